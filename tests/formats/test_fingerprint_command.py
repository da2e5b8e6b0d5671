"""`ds-reshard fingerprint`: the fingerprint of every tensor of checkpoints that real DeepSpeed saved."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import gathered

from ds_reshard.cli.main import main
from ds_reshard.errors import ReshardError
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import Fingerprinted, Reading, fingerprint, inspect

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)
RUNS = (
    Run(0, 2),
    Run(1, 2),
    Run(2, 3, options={"round_robin_gradients": True}),
    Run(2, 2, options={"parameter_alignment": True}),
    Run(3, 3, options={"sub_group_size": 60}),
    Run("bf16", 2),
    Run(3, 2, "fp32"),
)
Saved = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calling it gives the folder of a run's checkpoint, and what its ranks held; each is made once."""

    @functools.cache
    def save(run: Run) -> Saved:
        folder = tmp_path_factory.mktemp("save")
        return folder, worlds[run.dp].run("save", run=run, model=MODEL, folder=str(folder))

    return save


def numbers(found: Fingerprinted) -> dict[tuple[str, str], str | None]:
    return {(tensor.name, tensor.kind): tensor.fingerprint for tensor in found.tensors}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_tensor_has_the_fingerprint_of_what_the_ranks_held(saved: Any, run: Run) -> None:
    """Masters, states, weights, frozen weights and buffers: of their whole values, put together by the test."""
    folder, held = saved(run)
    found = fingerprint(str(folder))
    truth = {(name, "weight"): tensor for name, tensor in held[0]["weights"].items()}
    states = gathered(held)
    if run.stage == 3:  # the masters stand for the trained weights, which are in no file
        truth = {key: tensor for key, tensor in truth.items() if (key[0], "fp32") not in states}
        truth.pop(("head.weight", "weight"))  # tied to embed.weight
    if run.stage != 0:
        truth |= states
    assert numbers(found) == {key: str(fingerprint_of(tensor.contiguous())) for key, tensor in truth.items()}
    assert found.faults == ()
    assert any("ZeRO 0" in note for note in found.notes) is (run.stage == 0)
    assert found.bytes_read <= inspect(str(folder)).total_nbytes


def test_the_same_state_has_the_same_fingerprints_under_every_layout(worlds: Any, saved: Any, tmp_path: Path) -> None:
    """ZeRO 1 on two ranks, saved again as ZeRO 3 on three, as ZeRO 2 on one, and as BF16_Optimizer on four."""
    folder, _ = saved(Run(1, 2))
    first = numbers(fingerprint(str(folder)))
    for run in (Run(3, 3), Run(2, 1), Run("bf16", 4)):
        to = tmp_path / str(run)
        worlds[run.dp].run("fingerprint_jobs.save_as", run=run, model=MODEL, folder=str(folder), to=str(to))
        again = numbers(fingerprint(str(to)))
        kinds = {kind for _, kind in again}
        assert kinds == {"weight", "fp32", "exp_avg", "exp_avg_sq"}
        assert again.items() <= first.items()
        assert run.stage == 3 or again == first
        folder = to


def test_threads_and_their_memory_change_nothing(saved: Any) -> None:
    folder, _ = saved(Run(2, 3, options={"round_robin_gradients": True}))
    few, many = Reading(threads=1), Reading(threads=5, memory_nbytes=5 << 20)
    told: list[tuple[int, int]] = []
    found = fingerprint(str(folder), reading=many, progress=lambda done, total: told.append((done, total)))
    assert fingerprint(str(folder), reading=few) == found
    assert told == sorted(told) and told[-1][0] <= told[-1][1] <= found.bytes_read


def test_a_changed_byte_takes_the_fingerprints_of_its_file(saved: Any, tmp_path: Path, capsys: Any) -> None:
    """Status 1, a named fault, no number for what is in that file, and the right one for everything else."""
    folder, _ = saved(Run(1, 2))
    right = numbers(fingerprint(str(folder)))
    broken = Path(shutil.copytree(folder, tmp_path / "copy"))
    shard = broken / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(shard, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    data, sought = bytearray(shard.read_bytes()), content[:8].detach().numpy().tobytes()
    data[data.index(sought) + 3] ^= 128
    shard.write_bytes(data)
    found = fingerprint(str(broken))
    assert [fault.error for fault in found.faults] == ["ChecksumMismatch"]
    assert found.faults[0].where == str(shard)
    shown = numbers(found)
    assert shown["tower.weight", "weight"] == right["tower.weight", "weight"]
    assert shown["head.weight", "weight"] == right["head.weight", "weight"]
    lost = {key for key, number in shown.items() if number is None}
    assert ("second.weight", "fp32") in lost
    assert {key: right[key] for key in shown if key not in lost} == {k: n for k, n in shown.items() if k not in lost}
    assert main(["fingerprint", str(broken)]) == 1
    assert "not verified" in capsys.readouterr().out


def test_a_weight_that_is_not_row_major_in_its_file_has_its_fingerprint(saved: Any, tmp_path: Path) -> None:
    """The same values, stored column by column. The model file is written by the test (synthetic)."""
    folder, _ = saved(Run(1, 2))
    right = numbers(fingerprint(str(folder)))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["module"]["second.weight"] = content["module"]["second.weight"].t().contiguous().t()
    torch.save(content, file)
    assert numbers(fingerprint(str(copy))) == right


def test_the_command_prints_and_exits(saved: Any, tmp_path: Path, capsys: Any) -> None:
    """A table, the same as JSON, a note for ZeRO 0; 2 where nothing, or not everything, is there."""
    folder, _ = saved(Run(0, 2))
    number = numbers(fingerprint(str(folder)))["first.weight", "weight"]
    assert main(["fingerprint", str(folder), "--threads", "2"]) == 0
    shown = capsys.readouterr().out
    assert number in shown
    assert "names no tensor of its optimizer" in shown
    assert main(["fingerprint", str(folder), "--tag", "global_step3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"name": "first.weight", "kind": "weight", "dtype": "bfloat16", "shape": [11, 7], "fingerprint": number} in (
        told["tensors"]
    )
    assert main(["fingerprint", str(tmp_path)]) == 2
    assert "holds no DeepSpeed checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["fingerprint", str(folder), "--threads", "0"])
    assert stop.value.code == 2


def test_shards_of_two_saves_have_no_fingerprint(worlds: Any, saved: Any, tmp_path: Path) -> None:
    """A mixed checkpoint is refused before a number is made of it, as it is by a load."""
    folder, _ = saved(Run(1, 2))
    worlds[2].run("save", run=Run(1, 2), model=MODEL, folder=str(tmp_path / "other"), steps=4, tag="global_step3")
    mixed = Path(shutil.copytree(folder, tmp_path / "mixed"))
    name = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(tmp_path / "other" / name, mixed / name)
    with pytest.raises(ReshardError, match="another step or run"):
        fingerprint(str(mixed))
    (mixed / name).unlink()
    with pytest.raises(ReshardError, match="missing"):
        fingerprint(str(mixed))
