"""`ds-reshard doctor`: versions and a JSON looked over, nothing imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_reshard.cli import doctor
from ds_reshard.cli.doctor import Framework
from ds_reshard.cli.main import main

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("1.4.0", doctor.TESTED),
        ("1.4.0+cu128", doctor.TESTED),
        ("1.5.0.dev1", doctor.IN_RANGE),
        ("2.0", doctor.OUTSIDE),
        ("not a version", doctor.OUTSIDE),
        (None, doctor.ABSENT),
    ],
)
def test_a_version_is_judged(version: str | None, state: str) -> None:
    assert Framework(name="x", version=version, versions=">=1,<2", tested=("1.4.0",)).state == state


def test_every_framework_is_listed() -> None:
    names = {"torch", "torch (fsdp)", "transformers", "deepspeed", "megatron-core", "accelerate", "nanotron"}
    assert {one.name for one in doctor.frameworks()} == names


@pytest.mark.parametrize(
    ("config", "status", "rules"),
    [
        ({"zero_optimization": {"stage": 1}}, 0, []),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 0, ["auto-needs-object"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}, 0, ["auto-needs-object"] * 2),
        ({"scheduler": WARMUP}, 0, ["json-scheduler-unseen", "warmup-zero", "two-at-the-lowest"]),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, 1, ["json-scheduler-unseen", "plateau-metric"]),
    ],
    ids=["nothing", "told", "the Trainer's", "a warm-up of 0", "a metric that is none"],
)
def test_a_json_is_looked_over(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    config: object,
    status: int,
    rules: list[str],
) -> None:
    """Status 1 where the hooks would refuse; the terminal names what and the line to change."""
    monkeypatch.setattr(doctor, "frameworks", lambda: ())
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert main(["doctor", "--config", str(path), "--json"]) == status
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["rule"] for finding in findings] == rules
    assert main(["doctor", "--config", str(path)]) == status
    shown = capsys.readouterr().out
    assert all(finding["what"] in shown and finding["mend"] in shown for finding in findings)


def test_a_version_outside_its_range_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Framework(name="deepspeed", version="0.1", versions=">=0.14", tested=())
    monkeypatch.setattr(doctor, "frameworks", lambda: (old,))
    assert main(["doctor"]) == 1
    assert doctor.OUTSIDE in capsys.readouterr().out


def test_a_file_that_is_no_json_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text("{")
    assert main(["doctor", "--config", str(tmp_path / "ds.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("told", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_who_has_read_enough_changes_no_status(tmp_path: Path, told: list[str]) -> None:
    """`| head -n 1`: what was found stays found, also where a shell takes the status of every command of a pipe."""
    for status, config in enumerate(
        ({"zero_optimization": {"stage": 1}}, {"scheduler": {"type": "ReduceLROnPlateau"}})
    ):
        (tmp_path / "ds.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "ds_reshard", "doctor", "--config", str(tmp_path / "ds.json"), *told]
        reads, writes = os.pipe()
        os.close(reads)
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        os.close(writes)
        assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize("told", [[], ["--json"]], ids=["text", "json"])
def test_an_answer_that_cannot_be_written_is_no_finding(tmp_path: Path, told: list[str]) -> None:
    """A full disk: status 1 would say that something was found, and nobody has been told what."""
    for config in ({"zero_optimization": {"stage": 1}}, {"scheduler": {"type": "ReduceLROnPlateau"}}):
        (tmp_path / "ds.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "ds_reshard", "doctor", "--config", str(tmp_path / "ds.json"), *told]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert re.fullmatch(r"ds-reshard: stdout: cannot be written: No space left on device; .*\n", done.stderr)


def test_a_closed_output_changes_no_status(tmp_path: Path) -> None:
    """`>&-`: nobody wants to read it."""
    (tmp_path / "ds.json").write_text("{}")
    command = [sys.executable, "-m", "ds_reshard", "doctor", "--config", str(tmp_path / "ds.json")]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
