"""Train a small GPT on 4 ranks at ZeRO-2; resume its checkpoint at ZeRO-3 and at ZeRO-1; compare every bit.

Everything it writes is in `.demo/`. Exit status 1 when anything is not bit-equal, 2 when a rank fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

FOLDER = Path(".demo")


def main() -> int:
    from gpt_demo.comparison import Comparison, Joined, compare
    from gpt_demo.layouts import GLOBAL_BATCH, Layout, Outcome, Schedule
    from gpt_demo.picture import TITLE, differences, draw
    from gpt_demo.ranks import RankFailed, run_ranks
    from gpt_demo.report import progress, table
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    started = time.monotonic()
    schedule = Schedule(steps=200, checkpoint=100)
    checkpoints = FOLDER / "checkpoints"
    saving, resuming = Layout(ranks=4, stage=2), (Layout(ranks=2, stage=3), Layout(ranks=3, stage=1))

    def run(job: str, layout: Layout, title: str, first: int) -> tuple[Outcome, Joined]:
        folder = FOLDER / f"{job}-{layout.ranks}-ranks-zero-{layout.stage}"
        with progress(console, title, (first, schedule.steps)) as tell:
            outcome = run_ranks(
                job, layout.ranks, folder, tell, layout=layout, schedule=schedule, checkpoints=checkpoints
            )
        return outcome, Joined([folder / f"contents-{rank}.pt" for rank in range(layout.ranks)])

    console.print(
        "A byte-level GPT learns the sources of Python's standard library.\n"
        f"bf16, AdamW, global batch {GLOBAL_BATCH}, {schedule.steps} steps, checkpoint after {schedule.checkpoint}.\n"
    )
    try:
        whole, truth = run("uninterrupted", saving, f"{saving}, uninterrupted", 0)
        columns: dict[Layout, tuple[Outcome, Comparison]] = {}
        for layout in resuming:
            outcome, held = run("resumed", layout, f"{layout}, resumed", schedule.checkpoint)
            columns[layout] = outcome, compare(truth, held)
    except RankFailed as failure:
        console.print(f"\n[bold red]The demo failed.[/] {escape(str(failure))}", soft_wrap=True)
        return 2
    worst = {layout: max(map(abs, differences(whole, outcome))) for layout, (outcome, _) in columns.items()}
    resumed = {layout: outcome for layout, (outcome, _) in columns.items()}
    draw(FOLDER / "loss.png", TITLE, [schedule.checkpoint], (saving, whole), resumed)
    console.print()
    console.print(table(saving, columns, worst))
    equal = all(comparison.equal for _, comparison in columns.values())
    console.print("Every bit is equal." if equal else "[bold red]Not everything is equal.[/]", style="bold green")
    console.print(f"The losses are drawn in {FOLDER / 'loss.png'}.")
    console.print(f"{time.monotonic() - started:.0f} s in all; save_checkpoint took {whole.seconds:.2f} s.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
