"""A Llama goes from Megatron-LM to Hugging Face's Trainer and back, under another layout each time; draw the losses.

python examples/demo_megatron.py [PICTURE] drew docs/loss_megatron.png. It takes about two minutes on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

LLAMA = Path(__file__).with_name("llama_demo")
LAYOUTS = "Megatron-LM, tp 2, dp 2", "Trainer, ZeRO-3, 3 ranks", "Megatron-LM, tp 1, dp 4"


def main(picture: str) -> None:
    from gpt_demo.layouts import Outcome
    from gpt_demo.picture import differences, draw
    from llama_demo.setting import BATCH, LEAVES, RETURNS, STEPS
    from transformers import TrainerControl, TrainerState

    with tempfile.TemporaryDirectory() as scratch:
        first, trained, back = (f"{scratch}/{name}" for name in ("megatron", "trainer", "back"))
        saves = f"--save={first}", f"--save-interval={LEAVES}"
        log = _run(f"{LLAMA}/by_megatron.py", "4", "--tensor-model-parallel-size=2", *saves)
        stayed = Outcome(0, _losses(log))

        os.mkdir(trained)
        checkpoint = f"{trained}/checkpoint-{LEAVES}"
        _convert(f"{first}/iter_{LEAVES:07}", checkpoint, "--to=zero3", "--dp=3")
        control = {"TrainerControl": TrainerControl().state()}
        steps = {"train_batch_size": BATCH // 3, "logging_steps": 1, "save_steps": RETURNS}  # the Trainer goes by these
        state = TrainerState(global_step=LEAVES, stateful_callbacks=control, **steps)
        state.save_to_json(f"{checkpoint}/trainer_state.json")
        _run(f"{LLAMA}/by_trainer.py", "3", trained)
        checkpoint = f"{trained}/checkpoint-{RETURNS}"
        state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        outcomes = [Outcome(LEAVES, [entry["loss"] for entry in state.log_history])]

        _convert(checkpoint, back, "--to=megatron", "--dp=4", f"--like={first}")
        log = _run(f"{LLAMA}/by_megatron.py", "4", f"--load={back}", "--override-opt-param-scheduler")
        outcomes.append(Outcome(RETURNS, _losses(log)))

    print(f"{LAYOUTS[0]}, steps 1 to {STEPS}: loss {stayed.losses[0]:.4f} to {stayed.losses[-1]:.4f}")
    resumed = dict(zip(LAYOUTS[1:], outcomes, strict=True))
    for layout, outcome in resumed.items():
        last, apart = outcome.first_step + len(outcome.losses), max(map(abs, differences(stayed, outcome)))
        print(f"{layout}, steps {outcome.first_step + 1} to {last}: at most {apart:.1e} apart")
    if picture:
        title = "One Llama, two frameworks, three layouts, the same training"
        draw(Path(picture), title, (LEAVES, RETURNS), (LAYOUTS[0], stayed), resumed)


def _run(*words: str) -> str:
    variables = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    variables |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NO_VCS_VERSION": "1"}
    command, environment = [sys.executable, *words], {**os.environ, **variables}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _convert(source: str, output: str, *options: str) -> None:
    _run("-m", "ds_reshard", "convert", source, output, "--names=llama-megatron", *options)


def _losses(log: str) -> list[float]:
    """What Megatron-LM logs, except that its second line has the mean of the first two steps."""
    first, mean, *others = (float(loss) for loss in re.findall(r"lm loss: (\S+)", log))
    return [first, 2 * mean - first, *others]


if __name__ == "__main__":
    if find_spec("megatron") is None:
        sys.exit("Megatron-LM is not installed: pip install megatron-core einops omegaconf")
    main(*sys.argv[1:] or [""])
