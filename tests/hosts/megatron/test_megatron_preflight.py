"""Preflight and `--load` agree: who loads, with which values, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from format_jobs import RUN
from releases import TRAINED, WITH_TRAINING
from saved_worlds import GATED, PP, TP, WORLDS, Saved
from small_gpt import MODEL

pytestmark = pytest.mark.slow
RELEASE = "0.19.2"
SHARDED = "--bf16 --use-distributed-optimizer "
G = SHARDED + GATED
TIED = SHARDED + GATED.replace("--untie-embeddings-and-output-weights ", "")
MANY = WORLDS["many buckets dp2"].arguments
EXPERTS = WORLDS["experts ep2"].arguments
WITHOUT = ", bf16 without the distributed optimizer"
PLAIN = f"tied tp2{WITHOUT}"
ALONE = EXPERTS.replace("--expert-model-parallel-size 2 ", "")
FOUR = "gated tp2 pp2"

GOOD = [
    (FOUR, "model_space", G + TP + PP, 4, "ds_reshard"),
    (FOUR, "buckets", G + TP + PP, 4, "ds_reshard"),
    (FOUR, "torch", G + TP + PP, 4, "ds_reshard"),
    (FOUR, "model_space", G, 1, "ds_reshard"),
    (FOUR, "model_space", G + TP, 2, "ds_reshard"),
    (FOUR, "model_space", G.replace("--bf16 ", "") + TP + PP, 4, "ds_reshard"),
    (FOUR, "model_space", G.replace("--bf16", "--fp16") + TP + PP, 4, "Megatron-LM"),
    (FOUR, "buckets", G.replace("--bf16 ", "") + TP + PP, 4, "ds_reshard"),
    (FOUR, "torch", G.replace("--bf16 ", "") + TP + PP, 4, "ds_reshard"),
    (FOUR, "buckets", G, 1, "ds_reshard"),
    (FOUR, "buckets", G + PP, 2, "ds_reshard"),
    (FOUR, "buckets", G + TP, 4, "ds_reshard"),
    (FOUR, "torch", G, 2, "ds_reshard"),
    (FOUR, "torch", G + TP, 2, "ds_reshard"),
    (FOUR, "torch", "--bf16 " + GATED, 1, "ds_reshard"),
    (FOUR, "model_space", "--bf16 " + GATED, 1, "ds_reshard"),
    (FOUR, "buckets", G + "--no-load-optim", 1, "ds_reshard"),
    (FOUR, "torch", G + "--no-load-optim", 1, "ds_reshard"),
    (FOUR, "torch", G + "--finetune", 1, "ds_reshard"),
    (FOUR, "buckets", G + TP + PP + "--make-vocab-size-divisible-by 64", 4, "ds_reshard"),
    (FOUR, "model_space", G + TP + PP + "--make-vocab-size-divisible-by 64", 4, "ds_reshard"),
    (FOUR, "buckets", G + "--load-masters-only", 1, "ds_reshard"),
    (FOUR, "buckets", G + "--lr 1e-3 --override-opt-param-scheduler", 1, "ds_reshard"),
    (FOUR, "buckets", G + "--lr 1e-3 --use-checkpoint-opt-param-scheduler", 1, "ds_reshard"),
    (FOUR, "model_space", G + "--lr 1e-3 --override-opt-param-scheduler", 1, "ds_reshard"),
    (FOUR, "torch", G + "--reset-dataloader", 1, "ds_reshard"),
    (FOUR, "torch", G + "--global-batch-size 8 --override-opt-param-scheduler", 1, "ds_reshard"),
    ("gated pp2 vp2", "buckets", G + PP, 2, "ds_reshard"),
    ("tied pp2", "buckets", TIED, 1, "ds_reshard"),
    ("tied pp2", "model_space", TIED, 1, "ds_reshard"),
    ("experts ep2", "buckets", ALONE, 1, "ds_reshard"),
    ("experts ep2", "model_space", ALONE, 1, "ds_reshard"),
    ("experts ep2", "torch", ALONE, 1, "ds_reshard"),
    (f"experts ep2{WITHOUT}", "plain", ALONE.replace(SHARDED, "--bf16 "), 2, "ds_reshard"),
    ("experts tp2 etp1", "buckets", WORLDS["experts tp2 etp1"].arguments, 2, "ds_reshard"),
    ("experts ep2", "buckets", EXPERTS, 2, "ds_reshard"),
    ("many buckets dp2", "torch", SHARDED + "--hidden-size 20 --ffn-hidden-size 28", 1, "ds_reshard"),
    (PLAIN, "plain", "--bf16", 1, "ds_reshard"),
    (PLAIN, "torch", "--bf16", 1, "ds_reshard"),
    (PLAIN, "plain", SHARDED, 2, "ds_reshard"),
]
BAD = [
    (FOUR, "buckets", G + "--lr 1e-3", 1, "ScheduleMismatch"),
    (FOUR, "model_space", G + "--lr 1e-3 --strict-opt-param-scheduler", 1, "ScheduleMismatch"),
    (FOUR, "torch", G + "--weight-decay 0.1", 1, "ScheduleMismatch"),
    (FOUR, "torch", G + "--global-batch-size 8", 1, "ScheduleMismatch"),
    (FOUR, "buckets", G + "--hidden-size 32", 1, "ModelMismatch"),
    (FOUR, "torch", G + "--num-layers 2", 1, "ModelMismatch"),
    (FOUR, "model_space", G + "--hidden-size 32", 1, "ModelMismatch"),
    (FOUR, "buckets", G + "--ffn-hidden-size 32", 1, "ModelMismatch"),
    (FOUR, "buckets", G + "--vocab-size 120", 1, "ModelMismatch"),
    (FOUR, "buckets", TIED, 1, "ModelMismatch"),
    (FOUR, "buckets", G + "--optimizer sgd --no-load-optim", 1, "AssertionError"),
    (FOUR, "buckets", G + "--position-embedding-type learned_absolute", 1, "ModelMismatch"),
    (FOUR, "buckets", G + "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4", 1, "ParamGroupMismatch"),
    (FOUR, "buckets", G.replace("--bf16", "--fp16"), 1, "UnsupportedLayout"),
    (FOUR, "torch", G + "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", 1, "ConfigError"),
    (FOUR, "torch", G + "--override-optim-hparams betas,epsilon", 1, "ConfigError"),
    (FOUR, "buckets", G + TP + PP + "--optimizer sgd", 4, "AssertionError"),
    (FOUR, "torch", G + TP, 3, "AssertionError"),
    (FOUR, "torch", G + "--tensor-model-parallel-size 3", 3, "ValueError"),
    (FOUR, "torch", G + "--global-batch-size 3", 2, "AssertionError"),
    ("gated fp32", "torch", GATED + TP, 2, "UnsupportedLayout"),
]
if TRAINED != WITH_TRAINING:  # half of them; `make test-versions` has all
    GOOD, BAD = GOOD[::2], BAD[::2]
OF_MEGATRON = ("AssertionError", "ValueError")


def _both(releases: Any, folder: Path, arguments: str, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    runner = releases[RELEASE]
    (said,) = runner.run("foresee_jobs:foresee", arguments=arguments, folder=str(folder), world=world)
    real = runner.run("foresee_jobs:outcome", ranks=world, arguments=arguments, folder=str(folder))
    return said, real[0]


@pytest.mark.parametrize(("name", "form", "arguments", "world", "loader"), GOOD)
def test_good_pairs(saved: Saved, releases: Any, name: str, form: str, arguments: str, world: int, loader: str) -> None:
    """The loader, and every row of the report that is not of a live param group."""
    said, real = _both(releases, saved(name, form), arguments, world)
    assert said["loads"], said["verdict"]
    assert (real["refused"], real["loader"]) == ("", loader) and said["loader"] == loader, (real, said["verdict"])
    rows = {row["name"]: row for row in real["report"]["rows"]}
    assert {row["name"] for row in said["report"]["rows"]} >= {"iteration", "position (samples)", "max_lr"} & set(rows)
    for row in said["report"]["rows"]:
        assert row == rows[row["name"]]


FP16 = f"--fp16 --initial-loss-scale 4096 --use-distributed-optimizer {GATED}"


@pytest.mark.parametrize(
    ("arguments", "world", "end"),
    [
        (FP16, 1, "Megatron-LM"),
        (FP16 + TP, 2, "UnsupportedLayout"),
        (f"{FP16}--no-load-optim ", 1, "ds_reshard"),
        (f"{FP16}--no-load-optim --load-main-params-from-ckpt ", 1, "Megatron-LM"),
    ],
)
def test_options_under_which_nothing_is_filled_here(
    releases: Any, tmp_path: Path, arguments: str, world: int, end: str
) -> None:
    """Of fp16: Megatron loads it, or nobody does; preflight says which."""
    saves = [{"save": str(tmp_path), "ckpt_format": "torch_dist"}]
    releases[RELEASE].run("format_jobs:save", arguments=FP16, saves=saves)
    said, real = _both(releases, tmp_path, arguments, world)
    assert (said["loader"] if said["loads"] else said["faults"][0]["error"]) == end, said["verdict"]
    assert (real["refused"] or real["loader"]) == end


UNFORESEEN = {
    "--micro-batch-size 2": ("--global-batch-size 4", ""),
    "--use-mup --mup-base-hidden-size 8": ("", "--use-mup: the rates of hidden matrices follow from the model's width"),
}


@pytest.mark.parametrize("more", UNFORESEEN)
def test_what_only_a_curve_needs_hinders_no_load(releases: Any, more: str, tmp_path: Path) -> None:
    """Megatron makes the batch of the micro batch and the ranks; rates that are not foreseen are a note."""
    without, noted = UNFORESEEN[more]
    saves = [{"save": str(tmp_path), "ckpt_format": "torch_dist"}]
    own = "" if without else f" {more}"
    releases[RELEASE].run("format_jobs:save", ranks=2, arguments=f"{G}{own}", saves=saves)
    job = {"arguments": f"{G} {more}", "folder": str(tmp_path), "without": without}
    (said,) = releases[RELEASE].run("foresee_jobs:foresee", world=2, **job)
    assert said["loads"], said["verdict"]
    assert any(note.startswith(noted) for note in said["notes"])
    real = releases[RELEASE].run("foresee_jobs:outcome", ranks=2, **job)[0]
    assert (real["refused"], real["loader"]) == ("", said["loader"])


@pytest.mark.parametrize(("name", "form", "arguments", "world", "error"), BAD)
def test_bad_pairs(saved: Saved, releases: Any, name: str, form: str, arguments: str, world: int, error: str) -> None:
    """Neither loads; an error of ours is the same one, and Megatron's own is told in its words."""
    said, real = _both(releases, saved(name, form), arguments, world)
    assert real["refused"] == error, real
    assert not said["loads"], said
    (first, *_) = said["faults"]
    if error in OF_MEGATRON:
        assert "Megatron-LM refuses" in first["what"] or first["where"] == "--optimizer"
    else:
        assert first["error"] == error and first["mend"]


def _copied(saved: Saved, form: str, to: Path) -> tuple[Path, Path]:
    copy = Path(shutil.copytree(saved(FOUR, form), to / "copy"))
    return copy, next(copy.glob("iter_*"))


@pytest.mark.parametrize("harm", ["rank", "half", "tracker", "nothing"])
def test_faulty_folders(saved: Saved, releases: Any, tmp_path: Path, harm: str) -> None:
    folder, step = _copied(saved, "torch", tmp_path)
    if harm == "rank":
        shutil.rmtree(next(step.glob("mp_rank_01*")))
    elif harm == "half":
        path = min(step.glob("mp_rank_01*/model_optim_rng.pt"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif harm == "tracker":
        (folder / "latest_checkpointed_iteration.txt").unlink()
    else:
        folder = tmp_path / "empty"
        folder.mkdir()
    said, real = _both(releases, folder, G, 1)
    assert real["refused"] and not said["loads"], (real, said["verdict"])
    if harm in ("rank", "half"):
        assert said["faults"][0]["error"] == real["refused"]


def test_the_command(saved: Saved, releases: Any) -> None:
    """Status and first line; the rates; options of DeepSpeed, and what the flags do not tell, are named."""
    folder, run = saved(FOUR, "buckets"), releases[RELEASE].run
    words = [*MODEL.split(), *RUN.split(), *G.split()]
    start = ["preflight", str(folder), "--world", "2"]
    (told,) = run("foresee_jobs:command", words=[*start, "--json", "--", *words])
    made = json.loads(told["out"])
    assert told["status"] == 0 and made["verdict"].startswith("yes: ds_reshard loads torch_dist (dp_reshardable), tp=2")
    assert made["rates"]["position"] == 20 and made["cost"]["node_nbytes"] > 0
    (told,) = run("foresee_jobs:command", words=[*start, "--", *words, "--lr", "1e-3"])
    assert told["status"] == 1 and told["out"].startswith("no: ") and "--override-opt-param-scheduler" in told["out"]
    (told,) = run("foresee_jobs:command", words=[*start, "--tp", "2", "--", *words])
    assert told["status"] == 2 and "--tensor-model-parallel-size" in told["err"]
    (told,) = run("foresee_jobs:command", words=[*start, "--", *words, "--use-checkpoint-args"])
    assert told["status"] == 1 and "said elsewhere" in told["out"]


def test_without_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Megatron-LM cannot be imported the question is wrong, and says where to ask it."""
    from ds_reshard.cli.main import main

    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)
    assert main(["preflight", str(tmp_path), "--world", "2", "--", "--lr", "1e-3"]) == 2
    assert "the job's own environment" in capsys.readouterr().err
