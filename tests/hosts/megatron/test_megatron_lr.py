"""`ds-reshard lr` for Megatron-LM: what is drawn is what the optimizer steps use."""

from __future__ import annotations

from typing import Any

import pytest
from releases import TRAINED
from stages import CHECKPOINT, FIRST, FORMATS, OVERRIDE, POSITION, SECOND, curve, used

from ds_reshard.cli.main import main
from ds_reshard.operations import coming_run
from ds_reshard.resume.megatron import rates_of, read_run, weight_decay_of

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", TRAINED)]
DECOUPLED = "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
BATCH = "--micro-batch-size 2 --global-batch-size 4"
DECAYING = "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style"
STYLES = [
    *("constant", "linear", "cosine", "inverse-square-root"),
    *(f"WSD --lr-wsd-decay-style {style}" for style in ("exponential", "linear", "cosine", "minus_sqrt")),
]
LINES = [
    f"--lr 3e-4 --min-lr 3e-5 {BATCH} --lr-decay-style {style} {length}"
    for style in STYLES
    for length in (
        "--train-iters 50 --lr-decay-iters 40 --lr-warmup-iters 10 --lr-warmup-init 1e-5 --lr-wsd-decay-iters 15",
        "--train-samples 200 --lr-warmup-fraction 0.13 --lr-wsd-decay-samples 60",
        "--train-samples 220 --lr-decay-samples 210 --lr-warmup-samples 33 --lr-wsd-decay-samples 60",
    )
] + [
    f"--lr 3e-4 {BATCH} --train-iters 50",
    *(f"--lr 1 {BATCH} --train-iters 50 {DECAYING} {style}" for style in ("linear", "cosine")),
]


def test_a_command_line_means_what_megatron_makes_of_it(stages: Any, release: str) -> None:
    """Every style with warm-up, to the last bit: Megatron's own parser and OptimizerParamScheduler."""
    positions = [0, 1, 20, 26, 27, 33, 34, 40, 41, 100, 101, 140, 160, 161, 200, 201, 300]
    told = stages.run(release, "schedules:schedules", lines=LINES, positions=positions)[0]["told"]
    for line, theirs in zip(LINES, told, strict=True):
        run = read_run(line.split())
        rates = rates_of(run.schedule, (run.bounds,))
        assert isinstance(rates, tuple), rates
        ours = [(rates[0].rate(one), weight_decay_of(run.schedule, one)) for one in positions]
        assert [tuple(one) for one in theirs["used"]] == ours, line
        saved = {name: run.schedule.values[name] for name in theirs["state"] if name != "num_steps"}
        assert saved == {name: value for name, value in theirs["state"].items() if name != "num_steps"}


def _flags(**changes: str) -> list[str]:
    given = {**FIRST, **SECOND, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    return [word for pair in given.items() for word in pair]


@pytest.mark.parametrize("kind", ["torch-fp32", "dist-sharded", "dist-reshardable"])
def test_what_is_drawn_is_used(stages: Any, release: str, kind: str) -> None:
    """Groups with a rate of their own too, from each place where a checkpoint keeps them."""
    saved, new = f"{FORMATS[kind]} {DECOUPLED}", "--decoupled-lr 4e-4 --decoupled-min-lr 4e-5"
    folder = str(stages.first(release, saved).folder)
    resumed = stages.second(release, OVERRIDE, saved=saved, options=f"{FORMATS[kind]} {new}")[0]
    flags = [*_flags(), *FORMATS[kind].split(), *new.split(), OVERRIDE]
    drawn = coming_run(folder, flags=flags, steps=3)
    continued, override = drawn.curves
    assert (drawn.position, drawn.positions) == (POSITION, (20, 24, 28))
    of_group = {number: part for part, numbers in enumerate(drawn.groups) for number in numbers}
    for step in range(3):
        assert [override.rates[of_group[n]][step] for n in sorted(of_group)] == used(resumed, "lr", step)
        before = [group["max_lr"] for group in stages.first(release, saved).ranks[0]["steps"][-1]]
        position = POSITION + 4 * step
        assert [continued.rates[of_group[n]][step] for n in sorted(of_group)] == pytest.approx(
            [curve(position, high, high / 10) for high in before]
        )


def test_without_a_flag_the_refusal_is_told(stages: Any, release: str) -> None:
    """The difference that ends the load is what is drawn in place of a curve; an unchanged run has one."""
    folder = str(stages.first(release).folder)
    no_flag = coming_run(folder, flags=_flags()).curves[1]
    assert no_flag.name == "no flag" and "the load is refused: max_lr (from --lr)" in (no_flag.unknown or "")
    same = coming_run(folder, flags=_flags(lr="3e-4", min_lr="3e-5", train_iters="5"), steps=3)
    assert [curve.rates for curve in same.curves] == [same.curves[0].rates] * 3
    assert [one.name for one in coming_run(folder, flags=[*_flags(), CHECKPOINT]).curves] == ["checkpoint", "override"]


@pytest.mark.parametrize("kind", ["dist-sharded", "dist-reshardable"])
def test_other_tools_say_whose_checkpoint_it_is(
    stages: Any, release: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `.metadata` is one of torch.distributed.checkpoint: what Megatron wrote is told from what torch wrote."""
    (folder,) = stages.first(release, FORMATS[kind]).folder.glob("iter_*")
    for words in (["inspect"], ["verify"], ["fingerprint"], ["plan", "--to", "zero2"]):
        assert main([words[0], str(folder), *words[1:]]) == 0
        told = "".join(capsys.readouterr())
        assert words[0] != "inspect" or "Megatron-LM, torch_dist" in told
    assert main(["verify", "--pickles", str(folder)]) == 0
