"""Loads into buffers on a device are bit for bit those into host memory; faults of one device are every rank's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same
from saves import Saves

from ds_reshard.cli.main import main
from ds_reshard.execution import cuda
from ds_reshard.execution.fingerprint import Fingerprints
from ds_reshard.operations import Reading, fingerprint, verification, verify

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)


@pytest.mark.parametrize(
    ("source", "target", "held"),
    [(Run(1, 2), Run(3, 3), "all"), (Run(3, 2), Run(1, 2), "all"), (Run(1, 2), Run(2, 3), "weights")],
    ids=str,
)
def test_buffers_on_a_device_hold_the_same_bits(worlds: Any, saves: Saves, source: Run, target: Run, held: str) -> None:
    """Masters, states and weights, all there or the weights alone (CPU offload), proved and compared."""
    folder, saved = saves(source, MODEL)
    there = worlds[target.dp].run("device_jobs.load_there", run=target, model=MODEL, folder=str(folder), held=held)
    here = worlds[target.dp].run("fingerprint_jobs.load_proved", run=target, model=MODEL, folder=str(folder))
    assert all(rank["error"] is None and rank["scratch_nbytes"] for rank in there)
    assert [rank["proved"] for rank in there] == [rank["proved"] for rank in here]
    assert_same(saved, [rank["contents"] for rank in there])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("no memory", r"1000 bytes free on the device"),
        ("kernel", r"elements \[\d+, \d+\) \((\w+\.)*\w+\[\w+\].*: CUDA error: an illegal memory access"),
    ],
)
def test_a_device_that_fails_on_one_rank_ends_the_load_on_all(worlds: Any, saves: Saves, harm: str, said: str) -> None:
    """The same error on every rank, with the figure, or with the tensors and their range; and none may step."""
    folder, _ = saves(Run(1, 2), MODEL)
    told = worlds[3].run(
        "device_jobs.load_there", run=Run(2, 3), model=MODEL, folder=str(folder), held="all", harm=harm
    )
    assert [(rank["error"], rank["step"]) for rank in told] == [("DeviceFailed", "EngineUnusable")] * 3
    assert len({rank["text"] for rank in told}) == 1
    assert re.search(said, told[0]["text"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", [("fingerprint",), ("verify", "--deep")], ids=" ".join)
def test_no_cuda_on_the_command_line_is_refused_by_name(
    saves: Saves, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """Status 2, before a tensor is read; "auto" and "cpu" work."""
    folder, _ = saves(Run(1, 2), MODEL)
    assert main([*command, str(folder), "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert "--device: asks for a CUDA device, and this process has none" in said.err and not said.out
    assert [main([*command, str(folder), "--device", device]) for device in ("auto", "cpu")] == [0, 0]


def test_verify_without_deep_has_nothing_to_do_on_a_device(saves: Saves, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that would do nothing is refused."""
    folder, _ = saves(Run(1, 2), MODEL)
    assert main(["verify", str(folder), "--device", "cuda"]) == 2
    assert "add --deep, or leave it out" in capsys.readouterr().err


def test_fingerprints_and_findings_of_a_device_are_the_hosts(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operations of a device, on one that is the host (a stand-in): the same numbers, the same finding."""
    folder, _ = saves(Run(1, 2), MODEL)
    here, calls = fingerprint(str(folder)), []
    add = Fingerprints.add_elsewhere
    device = torch.device("cpu")
    monkeypatch.setattr(cuda, "offline_device", lambda name: device if name == "cuda" else None)
    monkeypatch.setattr(verification, "offline_device", lambda name: device if name == "cuda" else None)
    monkeypatch.setattr(Fingerprints, "add_elsewhere", lambda *args: calls.append(args[1]) or add(*args))
    there = fingerprint(str(folder), reading=Reading(device="cuda"))
    assert there == here and len(set(calls)) == len({tensor.fingerprint for tensor in there.tensors})
    assert verify(str(folder), deep=True, reading=Reading(device="cuda")).clean
