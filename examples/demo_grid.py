"""Train a small GPT as a pipeline and with tensor parallelism; resume each under two other layouts; draw the losses.

python examples/demo_grid.py [STEPS]: writes into `.demo/`; docs/loss_pipeline.png and docs/loss_tensor.png are of 120.
It takes minutes: eight on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(".demo")


def main(steps: int) -> None:
    from gpt_demo.grid import GridLayout
    from gpt_demo.layouts import Outcome, Schedule
    from gpt_demo.picture import TITLE, differences, draw
    from gpt_demo.ranks import run_ranks

    schedule = Schedule(steps=steps, checkpoint=steps // 2)
    runs = {
        "pipeline": [GridLayout(pp=pp, dp=dp, pipeline=True) for pp, dp in ((2, 2), (4, 1), (1, 2))],
        "tensor": [GridLayout(tp=tp, dp=dp) for tp, dp in ((2, 2), (1, 3), (4, 1))],
    }
    for name, layouts in runs.items():
        checkpoints, outcomes = FOLDER / f"{name}-checkpoints", dict[GridLayout, Outcome]()
        for number, layout in enumerate(layouts):
            job = "grid_resumed" if number else "grid_uninterrupted"
            folder, asked = FOLDER / f"{name}-{number}", {"schedule": schedule, "checkpoints": checkpoints}
            outcomes[layout] = run_ranks(job, layout.ranks, folder, lambda step, loss: None, layout=layout, **asked)
            trunk = outcomes[layouts[0]]
            apart = max(map(abs, differences(trunk, outcomes[layout])))
            print(f"{layout}: last loss {outcomes[layout].losses[-1]:.4f}, at most {apart:.1e} apart", flush=True)
        resumed = {layout: outcomes[layout] for layout in layouts[1:]}
        whole = layouts[0], outcomes[layouts[0]]
        draw(FOLDER / f"loss_{name}.png", TITLE, [schedule.checkpoint], whole, resumed)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120)
