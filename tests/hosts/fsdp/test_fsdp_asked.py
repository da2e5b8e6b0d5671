"""`verify_after_save`: what was saved is read again before the save returns, and all ranks are told the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ds_reshard
from ds_reshard.hosts.fsdp import dcp_saves, saved
from ds_reshard.hosts.fsdp.settings import ask_settings, ask_to_verify, asks_to_verify

DCP = {
    "truncated": ("CheckpointDamaged", "__1_0.distcp"),
    "missing": ("CheckpointNotFound", "__1_0.distcp"),
    "no directory": ("CheckpointNotFound", ".metadata"),
    "another rank's": ("", "__1_0.distcp"),
    "a bit": ("FingerprintMismatch", "is not what was saved"),
    "another save's directory": ("CheckpointDamaged", "is not what was saved"),
    "thread": ("FingerprintMismatch", "is not what was saved"),
    "accelerate, a bit": ("FingerprintMismatch", "is not what was saved"),
    "process": ("ConfigError", "AsyncCheckpointerType.THREAD"),
}
FILES = {
    "truncated": ("CheckpointDamaged", "optim_world_size_2_rank_0.pt"),
    "missing": ("CheckpointDamaged", "optim_world_size_2_rank_*.pt are not those of 2 ranks"),
    "no schedule": ("CheckpointDamaged", "extra_state_world_size_2_rank_1.pt"),
    "foreign": ("CheckpointDamaged", "several world sizes (expected one, found 2, 3)"),
    "swapped": ("FingerprintMismatch", "lm_head.weight[exp_avg] is not what the ranks hold"),
}


@pytest.mark.distributed
@pytest.mark.slow
def test_saves_of_torch_and_accelerate(tmp_path: Path) -> None:
    """Good ones pass without a word; what is wrong is one error on every rank, also where one rank's file is."""
    told = fresh.run("fsdp_asked_jobs.saves", 2, folder=str(tmp_path))
    assert all(isinstance(one, dict) for one in told), told
    assert told[0]["lines"][0].endswith("is not verified: it is no folder of files of torch.save")
    for one in told:
        assert {name: one[name] for name in ("none", "accelerate", "safetensors", "not asked")} == dict.fromkeys(
            ("none", "accelerate", "safetensors", "not asked"), ""
        )
        assert one["lines before"] == []
        for name, (kind, text) in DCP.items():
            assert one[name].startswith(kind) and text in one[name], (name, one[name])
            assert one[name] == told[0][name] != ""


@pytest.mark.acts
@pytest.mark.distributed
@pytest.mark.slow
def test_what_ranks_hold_under_one_name_and_is_not_alike_is_refused(tmp_path: Path) -> None:
    """torch writes one rank's, and the others' is nowhere: plain tensors, replicas, numbers and objects alike."""
    told = fresh.run("fsdp_asked_jobs.unequal", 4, folder=str(tmp_path))
    assert all(isinstance(one, dict) and one == told[0] for one in told), told
    said = dict(told[0])
    assert said.pop("equal") == ""
    for name in ("codes", "count", "_extra_state"):
        assert f"{name}: ranks hold different values" in said["of FSDP2"], said["of FSDP2"]
    assert "step:" not in said["of FSDP2"] and "layer.weight:" not in said["of FSDP2"]
    assert "model.count: ranks" in said.pop("accelerate")
    assert "inside.1" in said["inside"] and "shards of groups at [3]" in said["shards of groups"]
    assert "others on rank 3)" in said["plain"] or "others on rank 0, 1, 2)" in said["plain"]
    for name, text in said.items():
        assert text.startswith("FingerprintMismatch") and "make it equal on all ranks" in text, (name, text)


WAYS = {
    "equal on all ranks": "make it equal on all ranks before the save",
    "under its own key": "or save each rank's own under its own key",
    "as a DTensor": "or as a DTensor",
}


@pytest.mark.acts
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_out_of_what_ranks_do_not_hold_alike_saves_what_loads_equal(tmp_path: Path, way: str) -> None:
    told = fresh.run("fsdp_asked_jobs.made_alike", 2, folder=str(tmp_path), way=way)
    for one in told:
        assert isinstance(one, dict) and one["refused"].startswith("FingerprintMismatch"), told
        mend = one["refused"].rpartition("To mend: ")[2]
        assert WAYS[way] in mend and mend.count(", or ") == len(WAYS) - 1, mend
        assert (one["again"], one["load"], one["same"]) == ("", "", True)


class _Own(torch.Tensor):
    """As the states of torchao's 8-bit optimizers are: a class of its own, which torch.save writes as such."""


@pytest.mark.acts
@pytest.mark.parametrize(
    "value",
    [torch.ones(3).as_subclass(_Own), torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))],
    ids=["a subclass", "conjugated", "negated"],
)
def test_what_is_no_plain_tensor_is_told_and_not_refused(
    tmp_path: Path, value: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is a good one, and what lies beside it is compared."""
    told: list[str] = []
    monkeypatch.setattr(dcp_saves.logger, "warning", lambda text, *given: told.append(text % given))
    try:
        with ds_reshard.install("fsdp", verify_after_save=True):
            save({"odd": value, "plain": torch.ones(2)}, checkpoint_id=str(tmp_path))
    finally:
        ask_to_verify(False)
    assert told == ["verify_after_save: odd is no plain tensor: its file opens, and its values are not compared"]


def test_units_that_cannot_be_written_for_a_reason_nobody_foresaw_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on the rank that writes them is no reason for the others to wait."""

    def torch_has_changed(*given: object) -> None:
        raise AttributeError("'FlatParamHandle' object has no attribute '_get_flat_param_offsets'")

    monkeypatch.setattr(saved, "save_units", torch_has_changed)
    net = torch.nn.Linear(1, 1)
    reason = saved._without_units("folder", net, torch.optim.AdamW(net.parameters()))
    assert reason == "'FlatParamHandle' object has no attribute '_get_flat_param_offsets'"


class _Manager:
    """What the hooks look at of a manager."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        weights, states = get_state_dict(self.model, self.optimizer)
        torch.save(weights, folder / "model_world_size_1_rank_0.pt")
        torch.save(states, folder / "optim_world_size_1_rank_0.pt")
        saved.verify_save(self, folder)


def test_a_save_that_is_not_read_here_is_told_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that keeps a list for each parameter, which no tool reads: the save is a good one for all that."""
    told: list[str] = []
    monkeypatch.setattr(saved.logger, "warning", lambda text, *given: told.append(text % given))
    manager = _Manager()
    manager.save(tmp_path)
    assert told == []
    for states in manager.optimizer.state.values():
        states["history"] = [1, 2]
    manager.save(tmp_path)
    (line,) = told
    assert line.startswith(f"verify_after_save: {tmp_path} is not verified: ") and "has a state 'history'" in line
    (tmp_path / "optim_world_size_1_rank_0.pt").write_bytes(b"PK")
    with pytest.raises(ds_reshard.CheckpointDamaged):
        saved.verify_save(manager, tmp_path)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EasyR1", "verl", "verl with FSDP1"])
def test_saves_of_checkpoint_managers(tmp_path: Path, kind: str) -> None:
    """The hooks wait for the managers' module. Synthetic class, the calls of EasyR1 and of verl."""
    told = fresh.run("fsdp_asked_jobs.managed", 2, folder=str(tmp_path), kind=kind)
    assert all(isinstance(one, dict) for one in told), told
    assert told[0] == told[1] and told[0].pop("none") == ""
    assert "missing" in told[0]
    assert (tmp_path / "none" / "fsdp_units.json").exists() == (kind == "verl with FSDP1")
    for name, said in told[0].items():
        assert said.startswith(FILES[name][0]) and FILES[name][1] in said, said


def test_only_fsdp_takes_it() -> None:
    with pytest.raises(ds_reshard.ConfigError, match='verify_after_save: is of "fsdp"'):
        ds_reshard.install("deepspeed", verify_after_save=True)
    with pytest.raises(ds_reshard.ConfigError, match="True, False"):
        ask_to_verify("yes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("verify", "DS_RESHARD_SETTINGS"),
        ("[]", "DS_RESHARD_SETTINGS"),
        ('{"fsdp": {"verify": true}}', "fsdp.verify: is no setting"),
        ('{"reshard": {"threads": 2}}', "reshard: is no setting"),
        ('{"fsdp": {"verify_after_save": 1}}', "fsdp.verify_after_save: has a value that is not allowed"),
        ('{"fsdp": true}', "fsdp: has a value that is not allowed"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(ds_reshard.ConfigError) as raised:
        ask_settings(text, place="DS_RESHARD_SETTINGS")
    assert said in str(raised.value) and not asks_to_verify()


SCRIPT = """
import ds_reshard.auto
from ds_reshard.hosts.fsdp.settings import asks_to_verify
print(asks_to_verify())
ds_reshard.uninstall("fsdp")
print(asks_to_verify())
"""


def _auto(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_the_environment_asks() -> None:
    """By the same keys, read by `ds_reshard.auto`; disabled hooks cannot do it."""
    settings = json.dumps({"fsdp": {"verify_after_save": True}})
    assert _auto(DS_RESHARD_SETTINGS=settings).stdout.split() == ["True", "False"]
    assert _auto().stdout.split() == ["False", "False"]
    refused = _auto(DS_RESHARD_SETTINGS=settings, DS_RESHARD_DISABLE="1")
    assert refused.returncode and "unset one of them" in refused.stderr
