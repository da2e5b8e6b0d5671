"""What `convert --to nanotron` says to the coming run: its batch, random states, and what it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nanotron_builder import STEP, Run, again, write

from ds_reshard.cli.main import main
from ds_reshard.errors import ConfigError
from ds_reshard.formats.nanotron.metadata import Batch
from ds_reshard.operations import Options, convert, inspect

ONE_THREAD = {"threads": 1, "memory_nbytes": 1 << 20}


@pytest.mark.parametrize(
    ("saved", "dp", "expected"),
    [
        (Batch(micro=1, accumulation=8, dp=1), 4, Batch(micro=1, accumulation=2, dp=4)),
        (Batch(micro=4, accumulation=2, dp=2), 1, Batch(micro=4, accumulation=4, dp=1)),
        (Batch(micro=4, accumulation=1, dp=2), 4, Batch(micro=2, accumulation=1, dp=4)),
        (Batch(micro=6, accumulation=2, dp=1), 3, Batch(micro=4, accumulation=1, dp=3)),
        (Batch(micro=4, accumulation=1, dp=3), 2, Batch(micro=3, accumulation=2, dp=2)),
        (Batch(micro=1, accumulation=4, dp=2), 3, None),
        (Batch(micro=1, accumulation=1, dp=2), 4, None),
    ],
)
def test_the_global_batch_stays_the_same_where_it_divides(saved: Batch, dp: int, expected: Batch | None) -> None:
    """The accumulation follows dp; the micro batch becomes smaller, never larger, where that alone gives it."""
    assert saved.at(dp) == expected


def _batch_lines(folder: Path) -> list[str]:
    lines = (folder / str(STEP) / "config.yaml").read_text().splitlines()
    return [line.strip() for line in lines if "batch" in line]


def test_config_yaml_has_the_batch_of_the_new_size_and_the_user_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "nanotron", "--dp", "4"]) == 0
    assert _batch_lines(tmp_path / "out") == ["batch_accumulation_per_replica: 2", "micro_batch_size: 1"]
    said = "note: for the same global batch of 8 samples config.yaml has micro_batch_size 1"
    assert said in capsys.readouterr().out


def test_a_batch_that_cannot_stay_is_told_and_left_alone(tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    done = convert(str(source), str(tmp_path / "out"), to="nanotron", dp=3)
    assert _batch_lines(tmp_path / "out") == ["batch_accumulation_per_replica: 4", "micro_batch_size: 1"]
    (note,) = done.notes
    assert "8 samples is no multiple of dp 3" in note
    assert "a global batch of 12" in note


def test_a_config_without_a_batch_is_told(tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    (source / str(STEP) / "config.yaml").unlink()
    assert convert(str(source), str(tmp_path / "same"), to="nanotron").notes == ()
    (note,) = convert(str(source), str(tmp_path / "out"), to="nanotron", dp=1).notes
    assert note.startswith("config.yaml tells no batch")


def _with_random_states(run: Run, folder: Path) -> Path:
    source = write(run, folder)
    place = source / str(STEP) / "random"
    place.mkdir()
    for tp in range(run.tp):
        for dp in range(run.dp):
            name = f"tp-{tp}-of-{run.tp}_dp-{dp}-of-{run.dp}_pp-0-of-1.pt"
            torch.save({"torch_random_state": torch.arange(8) + dp}, place / name)
    return source


@pytest.mark.parametrize("zero", [0, 1])
def test_random_states_are_kept_where_the_ranks_are_the_same(zero: int, tmp_path: Path) -> None:
    """Byte by byte; another cut of the optimizer's files is no other set of ranks."""
    source = _with_random_states(Run(dp=2, tp=2, zero=1 - zero), tmp_path / "saved")
    done = convert(str(source), str(tmp_path / "out"), to="nanotron", zero_stage=zero)
    held = [
        {path.name: path.read_bytes() for path in (place / str(STEP) / "random").iterdir()}
        for place in (source, tmp_path / "out")
    ]
    assert len(held[0]) == 4
    assert held[0] == held[1]
    assert done.notes == ()


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 4}, {"tp": 1}], ids=str)
def test_random_states_of_other_ranks_are_left_out_and_that_is_told(sizes: dict[str, int], tmp_path: Path) -> None:
    source = _with_random_states(Run(dp=2, tp=2), tmp_path / "saved")
    done = convert(str(source), str(tmp_path / "out"), to="nanotron", **sizes)
    assert not (tmp_path / "out" / str(STEP) / "random").exists()
    assert any(note.startswith("random states are left out") for note in done.notes)
    assert inspect(str(tmp_path / "out")).faults == ()


def test_resume_goes_on_where_like_is_the_same_by_content_and_not_elsewhere(tmp_path: Path) -> None:
    """One of two parts is written with one example; the other with a copy of it, and not with another of that name."""
    source = write(Run(), tmp_path / "saved")
    like = write(again(Run(pp=2), seed=1), tmp_path / "like")
    first = Options(shard=(0, 2), resume=True, **ONE_THREAD)  # type: ignore[arg-type]
    other = Options(shard=(1, 2), resume=True, **ONE_THREAD)  # type: ignore[arg-type]
    assert not convert(str(source), str(tmp_path / "out"), to="nanotron", like=str(like), options=first).complete

    text = like / str(STEP) / "model_config.json"
    kept = text.read_text()
    text.write_text(json.dumps({"hidden_size": 7}))
    with pytest.raises(ConfigError, match="was left by another conversion"):
        convert(str(source), str(tmp_path / "out"), to="nanotron", like=str(like), options=other)

    text.write_text(kept)
    like.rename(tmp_path / "elsewhere")
    done = convert(str(source), str(tmp_path / "out"), to="nanotron", like=str(tmp_path / "elsewhere"), options=other)
    assert done.complete
