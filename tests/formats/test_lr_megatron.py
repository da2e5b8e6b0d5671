"""`ds-reshard lr` on checkpoints of Megatron-LM: what it reads, and what it refuses by name. No Megatron here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.cli.main import main
from ds_reshard.errors import UnsafePickle
from ds_reshard.operations import coming_run

STATE = {
    "max_lr": 0.1,
    "min_lr": 0.01,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 100,
    "lr_decay_style": "linear",
    "num_steps": 20,
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_style": "constant",
    "wd_incr_steps": 100,
}
RATE = 0.01 + 0.8 * (0.1 - 0.01)
GROUP = {"lr": RATE, "max_lr": 0.1, "min_lr": 0.01, "default_config": True, "wd_mult": 1.0, "params": [0]}
FLAGS = ["--lr", "0.5", "--min-lr", "0.1", "--train-iters", "25", "--global-batch-size", "4"]
DRAW = [*FLAGS, "--override-opt-param-scheduler"]


@pytest.fixture
def save(tmp_path: Path) -> Any:
    """Writes a `torch` checkpoint with these entries, and returns the folder of `--save`."""

    def write(state: Any = STATE, groups: Any = (GROUP,), args: Any = None, **more: Any) -> str:
        folder = tmp_path / "saved" / "iter_0000005" / "mp_rank_00"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
        usual = {"lr_warmup_init": 0.0, "train_iters": 25, "global_batch_size": 4}
        named = argparse.Namespace(**(usual if args is None else args))
        optimizer = {"state": {}, "param_groups": list(groups)}
        held = {"args": named, "iteration": 5, "optimizer": optimizer, "opt_param_scheduler": state, **more}
        torch.save({name: value for name, value in held.items() if value is not None}, folder / "model_optim_rng.pt")
        return str(tmp_path / "saved")

    return write


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["lr", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_the_runs_own_command_line_follows_two_dashes(capsys: pytest.CaptureFixture[str], save: Any) -> None:
    """The whole of it: what has nothing to do with the schedule is counted, and options of lr may stand before."""
    status, out, err = _run(capsys, save(), "--steps", "2", "--", *DRAW, "--num-layers", "2", "--bf16")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[-3:-1] == ["position\tcheckpoint\toverride", f"20\t{RATE!r}\t{0.1 + 0.8 * 0.4!r}"]
    assert lines[-1].startswith("24\t") and "# 2 flags that have nothing to do with the schedule were not read" in lines
    status, out, _ = _run(capsys, save(), "--json", "--", *DRAW)
    assert status == 0 and json.loads(out)["positions"][:2] == [20, 24] and json.loads(out)["positions"][-1] >= 100


@pytest.mark.parametrize("tag", ["5", "iter_0000005"])
def test_an_iteration_is_named_by_number_or_folder(save: Any, tag: str) -> None:
    folder = save()
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("99", encoding="utf-8")
    assert coming_run(folder, flags=DRAW, tag=tag).position == 20
    assert coming_run(folder, flags=[*DRAW, "--ckpt-step", "5"]).position == 20
    assert coming_run(f"{folder}/iter_0000005", flags=DRAW).position == 20


OWN = {**GROUP, "max_lr": 0.3, "lr": 0.01 + 0.8 * (0.3 - 0.01), "default_config": False}
UNKNOWN = {
    "rates of their own": {"groups": (GROUP, OWN)},
    "the script set them": {"groups": ({**GROUP, "lr": 0.5},)},
    "no param groups that can be read": {"optimizer": {}},
    "the warm-up goes on": {"state": {**STATE, "lr_warmup_steps": 50}, "args": {"world_size": 1}},
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_what_the_files_do_not_tell_is_not_drawn(capsys: pytest.CaptureFixture[str], save: Any, words: str) -> None:
    status, out, _ = _run(capsys, save(**UNKNOWN[words]), "--", *DRAW)
    assert status == 1 and words in out


REFUSED = {
    "--lr: is missing": FLAGS[2:],
    "--global-batch-size: is missing": FLAGS[:-2],
    "just one of them is needed": [*FLAGS, "--train-samples", "100"],
    "write --lr-warmup-iters": [*FLAGS, "--lr-warmup-iter", "3"],
    "write --lr-decay-style": [*FLAGS, "--lr-decay-styl", "cosine"],
    "invalid choice: 'exponential'": [*FLAGS, "--lr-decay-style", "exponential"],
    "invalid float value": [*FLAGS, "--lr", "fast"],
    "are above --lr": [*FLAGS, "--min-lr", "0.9"],
    "--lr-decay-samples": [*FLAGS, "--lr-decay-samples", "7"],
    "--lr-warmup-iters: does not go": [*FLAGS, "--lr-warmup-iters", "7", "--lr-warmup-fraction", "0.1"],
    "--start-weight-decay": [*FLAGS, "--start-weight-decay", "0.1"],
    "YAML file": [*FLAGS, "--yaml-cfg", "x.yaml"],
    "the model's width": [*FLAGS, "--use-mup"],
    "contradict each other": [*DRAW, "--use-checkpoint-opt-param-scheduler"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_megatron_refuses_or_that_tell_too_little(
    capsys: pytest.CaptureFixture[str], save: Any, words: str
) -> None:
    status, out, err = _run(capsys, save(), "--", *REFUSED[words])
    assert (status, out) == (2, "") and words in err


def test_each_framework_has_its_own_way_in(capsys: pytest.CaptureFixture[str], save: Any, tmp_path: Path) -> None:
    status, _, err = _run(capsys, save(), "--config", "ds_config.json")
    assert status == 2 and "is a checkpoint of Megatron-LM" in err and "-- --lr" in err
    status, _, err = _run(capsys, str(tmp_path), "--", *DRAW)
    assert status == 2 and "is not a checkpoint of Megatron-LM" in err and "--config FILE" in err


def test_what_is_no_checkpoint_with_a_schedule(capsys: pytest.CaptureFixture[str], save: Any) -> None:
    status, _, err = _run(capsys, save(state=None), "--", *DRAW)
    assert status == 2 and "--no-save-optim" in err
    status, _, err = _run(capsys, save(state={"base_lrs": [0.1]}), "--", *DRAW)
    assert status == 2 and "not one of OptimizerParamScheduler" in err
    status, _, err = _run(capsys, save(), "--tag", "7", "--", *DRAW)
    assert status == 2 and "--tag iter_0000005" in err


def test_a_format_that_is_not_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    status, _, err = _run(capsys, str(tmp_path), "--", *DRAW)
    assert status == 2 and "torch_dcp or fsdp_dtensor" in err
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}', encoding="utf-8")
    status, _, err = _run(capsys, str(tmp_path), "--", *DRAW)
    assert status == 2 and ".metadata: byte 0" in err


class _Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_nothing_in_the_file_is_executed(save: Any) -> None:
    folder = save(args={"lr_warmup_init": _Bomb(), "bomb": _Bomb()}, rng_state=[_Bomb()])
    with pytest.raises(UnsafePickle, match=r"calls builtins\.exec"):
        coming_run(folder, flags=DRAW)
