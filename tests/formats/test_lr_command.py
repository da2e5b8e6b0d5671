"""`ds-reshard lr`: what it prints, writes and answers. The curves are in tests/unit/test_coming.py and tests/hosts."""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ds_reshard.cli.lr_command import render_rates
from ds_reshard.cli.main import main
from ds_reshard.operations import coming_run

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 20}}
NEW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": SCHEDULE}
STATE = {"last_batch_iteration": 4}


@pytest.fixture
def save(tmp_path: Path) -> Any:
    """Writes the model file of a stage-0 run after five steps, with what a schedule leaves in it."""

    def write(scheduler: object = None, config: object = None, lr: object = 0.01, **more: object) -> str:
        folder = tmp_path / "checkpoints" / "global_step5"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "latest").write_text("global_step5", encoding="utf-8")
        group = {"lr": lr, "weight_decay": 0.0, "params": [0]}
        held = {
            "module": {"w": torch.zeros(2)},
            "dp_world_size": 1,
            "mp_world_size": 1,
            "global_steps": 5,
            "skipped_steps": 0,
            "ds_version": "0.19.8",
            "lr_scheduler": scheduler,
            "ds_config": config,
            "optimizer": {"state": {}, "param_groups": [group]},
            **more,
        }
        torch.save(held, folder / "mp_rank_00_model_states.pt")
        return str(folder.parent)

    return write


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(value: object = NEW) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        return str(path)

    return write


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["lr", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_in_a_pipe_it_prints_plain_numbers(capsys: pytest.CaptureFixture[str], save: Any, config: Any) -> None:
    """Tabs between columns, full precision, remarks after `#`; status 0."""
    folder = save(STATE, {"scheduler": SCHEDULE})
    status, out, err = _run(capsys, folder, "--config", config(), "--steps", "3")
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert (status, err, lines[0]) == (0, "", "position\tcheckpoint\tno flag\toverride")
    assert lines[2] == "6\t" + "\t".join([repr(0.01 * 15 / 16)] * 3)
    assert len(lines) == 4


def test_what_is_not_known_is_status_1(capsys: pytest.CaptureFixture[str], save: Any, config: Any) -> None:
    folder = save({"last_epoch": 5, "base_lrs": [0.1], "lr_lambdas": [None]})
    status, out, _ = _run(capsys, folder, "--config", config())
    assert status == 1 and all(line.startswith("#") for line in out.splitlines())
    assert out.count("LambdaLR: the function is not in the file") == 3
    status, out, _ = _run(capsys, folder, "--config", config(), "--json")
    told = json.loads(out)
    assert status == 1 and all(curve["rates"] == [] for curve in told["curves"].values())


def test_a_section_that_acts_with_the_hooks_alone_is_told(save: Any, config: Any) -> None:
    """Nothing of it holds in a run without them, and DeepSpeed says nothing; without a section there is no note."""
    folder = save(STATE, {"scheduler": SCHEDULE})
    for section, told in (({"resume": {"scheduler": "override"}}, True), ({"trust": []}, False), ({}, False)):
        notes = coming_run(folder, config({**NEW, "ds_reshard": section})).notes
        assert any("acts only in a run with the hooks" in note for note in notes) == told
        assert any("the resume section of this JSON asks for" in note for note in notes) == told


def test_the_position_is_of_updates_where_no_scheduler_counts(save: Any, config: Any) -> None:
    """Steps that overflowed were no updates."""
    assert coming_run(save(skipped_steps=2), config()).position == 3
    assert coming_run(save(STATE, {"scheduler": SCHEDULE}, skipped_steps=2), config()).position == 5


def test_a_rate_that_was_kept_as_a_tensor_is_read(save: Any, config: Any) -> None:
    """`capturable` optimizers keep fp32 tensors: the first update uses that very number."""
    drawn = coming_run(save(lr=torch.tensor(0.01)), config({"optimizer": {"params": {"lr": 0.5}}}), steps=2)
    assert drawn.curves[1].rates == ((float(torch.tensor(0.01)),) * 2,)
    drawn = coming_run(save(STATE, {"scheduler": SCHEDULE}, lr=torch.tensor(0.01)), config(), steps=2)
    assert drawn.curves[0].rates == ((float(torch.tensor(0.01)), 0.01 * 15 / 16),)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_in_a_terminal_it_draws(save: Any, config: Any, width: int) -> None:
    """No line is longer than the terminal, and each curve has its bars and its numbers."""
    console = Console(width=width, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    drawn = coming_run(save(STATE, {"scheduler": SCHEDULE}), config(), steps=500)
    render_rates(drawn, console)
    text = console.export_text()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert text.count("█") > 10 and "0.01" in text


@pytest.mark.parametrize("columns", ["0", "1"])
def test_a_terminal_without_a_width_is_told(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """COLUMNS is 0 where nobody knows the width; what was found is shown all the same."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = _run(capsys, save(STATE, {"scheduler": SCHEDULE}), "--config", config(), "--steps", "3")
    assert status == 0 and "is at position" in out and "position" in out and "7" in out and "█" in out


def test_a_name_in_a_file_does_not_command_the_terminal(save: Any, config: Any) -> None:
    drawn = coming_run(save({"\x1b[2Jlast_epoch": 1}), config())
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render_rates(drawn, console)
    assert "\x1b" not in console.export_text()


def test_a_picture_is_written_whole(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, png = save(STATE, {"scheduler": SCHEDULE}), tmp_path / "lr.png"
    assert _run(capsys, folder, "--config", config(), "--png", str(png))[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob("*.part"))
    status, _, err = _run(capsys, folder, "--config", config(), "--png", str(tmp_path / "no" / "lr.png"))
    assert status == 2 and "cannot be written" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = _run(capsys, folder, "--config", config(), "--png", str(png))
    assert status == 2 and "pip install matplotlib" in err


def test_a_picture_is_written_as_any_file(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, tmp_path: Path
) -> None:
    """A link stays one, others may read it as the umask says, and what reads a pipe is given it."""
    words = [save(STATE, {"scheduler": SCHEDULE}), "--config", config(), "--png"]
    (tmp_path / "link.png").symlink_to("lr.png")
    before = os.umask(0o027)
    try:
        assert _run(capsys, *words, str(tmp_path / "link.png"))[0] == 0
    finally:
        os.umask(before)
    drawn = (tmp_path / "lr.png").read_bytes()
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "lr.png").stat().st_mode & 0o777 == 0o640
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reads = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reads.start()
    assert _run(capsys, *words, str(tmp_path / "pipe"))[0] == 0
    assert (tmp_path / "pipe").is_fifo()
    reads.join(60)
    assert read == [drawn]


def test_a_picture_that_does_not_fit_leaves_the_old_one(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, tmp_path: Path
) -> None:
    """A limit of the system on the bytes of a file; nothing is left of the new one."""
    words, png = [save(STATE, {"scheduler": SCHEDULE}), "--config", config()], tmp_path / "lr.png"
    png.write_bytes(b"old")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        status, _, err = _run(capsys, *words, "--png", str(png))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert status == 2 and f"{png}: cannot be written: File too large; free space there" in err
    assert png.read_bytes() == b"old" and not list(tmp_path.glob("*.part"))


BAD_JSON = {
    "is not JSON": "{'optimizer': 1}",
    "comments": "{} // lr",
    "given twice: type": '{"scheduler": {"type": "WarmupLR", "type": "OneCycle"}}',
    "holds no object": "[]",
}


@pytest.mark.parametrize("words", BAD_JSON)
def test_a_configuration_that_deepspeed_would_refuse(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, words: str
) -> None:
    status, out, err = _run(capsys, save(), "--config", config(BAD_JSON[words]))
    assert (status, out) == (2, "") and words in err
    status, _, err = _run(capsys, save(), "--config", "absent.json")
    assert status == 2 and "--config FILE" in err


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", ".metadata", "common.pt"])
def test_a_checkpoint_of_megatron_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Any, name: str
) -> None:
    folder = tmp_path / "megatron"
    folder.mkdir()
    (folder / name).write_text("5", encoding="utf-8")
    status, _, err = _run(capsys, str(folder), "--config", config())
    assert status == 2 and "is a checkpoint of Megatron-LM" in err


def test_megatron_deepspeed_is_deepspeed(save: Any, config: Any) -> None:
    """It leaves Megatron's file beside DeepSpeed's own."""
    folder = save()
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    assert coming_run(folder, config()).position == 5


class _Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_nothing_in_the_file_is_executed(capsys: pytest.CaptureFixture[str], save: Any, config: Any) -> None:
    assert b"exec" in pickle.dumps(_Bomb())
    status, _, err = _run(capsys, save(_Bomb()), "--config", config())
    assert status == 2 and "calls builtins.exec('raise SystemExit" in err.replace('"', "'")


@pytest.mark.parametrize("steps", [-1, 10**30, "five", None])
def test_a_count_of_steps_that_cannot_be_is_damage(
    capsys: pytest.CaptureFixture[str], save: Any, config: Any, steps: object
) -> None:
    status, _, err = _run(capsys, save(global_steps=steps), "--config", config())
    assert status == 2 and "step count" in err
