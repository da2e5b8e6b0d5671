"""Plans at sizes that no disk here holds: which files are opened, which bytes are read, to which places.

The checkpoints are synthetic (see sparse_checkpoint.py); what is expected is computed here by DeepSpeed's rules anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch
from sparse_archive import Shape
from sparse_checkpoint import llama_shapes, write_checkpoint

from ds_reshard.errors import CheckpointDamaged
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.reader import open_checkpoint as open_zero
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.model.target import ConversionRequest
from ds_reshard.operations import plan
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.units import Units, archive_of, target_of
from ds_reshard.planning.plan import Plan

Span = tuple[int, int, int, int]
"""A saved shard, the first element of its buffer, the first element of the rank's buffer, and how many."""

LLAMA = llama_shapes(layers=133, width=24576, wide=69632)
TAG = "global_step1000"


def zero3_spans(shapes: dict[str, Shape], dp: int, to_dp: int, rank: int) -> Iterator[Span]:
    """Each tensor is cut on its own into equal parts (runtime/zero/partition_parameters.py)."""
    at_old = at_new = 0
    for numel in map(prod, shapes.values()):
        old, new = -(-numel // dp), -(-numel // to_dp)
        yield from spans(numel, old, new, rank, at_old, at_new)
        at_old, at_new = at_old + old, at_new + new


def flat_spans(shapes: dict[str, Shape], dp: int, to_dp: int, rank: int) -> Iterator[Span]:
    """All tensors one after another, cut into equal parts of an even number (runtime/zero/stage_1_and_2.py)."""
    numel = sum(map(prod, shapes.values()))
    yield from spans(numel, -(-numel // (2 * dp)) * 2, -(-numel // (2 * to_dp)) * 2, rank, 0, 0)


def spans(numel: int, old: int, new: int, rank: int, at_old: int, at_new: int) -> Iterator[Span]:
    start, stop = rank * new, min(numel, (rank + 1) * new)
    for shard in range(start // old, -(-stop // old)):
        first, last = max(start, shard * old), min(stop, (shard + 1) * old)
        yield shard, at_old + first - shard * old, at_new + first - start, last - first


def joined(found: Iterator[Span]) -> list[Span]:
    """In order, those joined that continue each other on both sides."""
    made: list[Span] = []
    for span in sorted(found):
        last = made[-1] if made else None
        if last and last[0] == span[0] and (last[1] + last[3], last[2] + last[3]) == span[1:3]:
            made[-1] = (*last[:3], last[3] + span[3])
        else:
            made.append(span)
    return made


def rank_plan(folder: Path, stage: int, to_dp: int, rank: int) -> Plan:
    """The plan of the optimizer file of one rank, of a source whose shards are opened as they are needed."""
    source = open_checkpoint(find_listing(str(folder), None), whole=False)
    target = target_of(source, ConversionRequest(to=f"zero{stage}", dp=to_dp))
    (unit,) = (unit for unit in target.units if (unit.family, unit.shard) == ("optim", rank))
    made = Units(source, target).plan(unit, [archive_of(file) for file in unit.files])
    source.raise_shard_faults()
    return made


def planned(made: Plan, kind: str) -> list[Span]:
    """The copies into one kind's buffer, from where in the record that they lie in."""
    copies = [copy for copy in made.copies if copy.buffer == f"{kind}/0"]
    return joined(
        (
            int(re.search(r"rank_(\d+)_mp", copy.path)[1]),  # type: ignore[index]
            (copy.byte_offset - copy.record.byte_offset) // 4,
            copy.element_offset,
            copy.numel,
        )
        for copy in copies
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened from now on."""
    seen: list[str] = []
    opening = os.open

    def watched(path: str, *arguments: int) -> int:
        seen.append(os.path.basename(path))
        return opening(path, *arguments)

    monkeypatch.setattr(os, "open", watched)
    return seen


def model_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def optim_file(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_one_of_3072_ranks_opens_two_of_4096_shards(tmp_path: Path, opened: list[str]) -> None:
    """A trillion parameters, ZeRO-3: its own bytes and no others, beside the first two files, which all share."""
    write_checkpoint(tmp_path, LLAMA, 4096, stage=3, ranks={22, 23})
    (unit,) = plan(str(tmp_path), to="zero3", dp=3072, shard=(3072 + 17, 6144)).units
    assert set(opened) == {"latest", model_file(0), optim_file(0), optim_file(22), optim_file(23)}
    owned = sum(-(-prod(shape) // 3072) for shape in LLAMA.values())
    assert unit.bytes_read == 12 * owned > 3 << 30
    assert set(unit.reads) == {optim_file(22), optim_file(23)}


@pytest.mark.parametrize("rank", [0, 17, 3071])
def test_every_byte_of_a_rank_comes_from_its_place(tmp_path: Path, rank: int) -> None:
    """Each kind, at sizes whose shares are no multiples of each other, from shards far apart."""
    shapes = llama_shapes(layers=2, width=25600, wide=70000)
    expected = joined(zero3_spans(shapes, 4096, 3072, rank))
    write_checkpoint(tmp_path, shapes, 4096, stage=3, ranks={shard for shard, *_ in expected})
    made = rank_plan(tmp_path, 3, 3072, rank)
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        assert planned(made, kind) == expected
    assert len({copy.record for copy in made.copies}) == 3 * len({shard for shard, *_ in expected})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_tensor_of_2_to_the_40_elements(tmp_path: Path, stage: int, rank: int) -> None:
    """Offsets far beyond 32 bits, on both sides; what lies at the last of them is what is read."""
    shapes: dict[str, Shape] = {"weight": (1 << 20, 1 << 20)}
    write_checkpoint(tmp_path, shapes, 8, stage=stage)
    made = rank_plan(tmp_path, stage, 6, rank)
    rule = zero3_spans if stage == 3 else flat_spans
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        assert planned(made, kind) == joined(rule(shapes, 8, 6, rank))
    last = max(made.copies, key=lambda copy: copy.byte_offset)
    assert last.byte_offset > 1 << 38 and made.nbytes > 1 << 40
    values = torch.arange(1024, dtype=torch.float32)
    at = last.byte_offset + last.nbytes - values.nbytes
    with open(last.path, "r+b") as file:
        file.seek(at)
        file.write(values.numpy().tobytes())
    end = last._replace(byte_offset=at, numel=1024, element_offset=0)
    target = TensorTarget(torch.empty(1024))
    outcome = ThreadExecutor(threads=1, memory_nbytes=1 << 20, checksum=True).execute(
        Plan(copies=(end,)), {last.buffer: target}
    )
    assert not outcome.faults and torch.equal(target.tensor, values)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_parts_of_a_plan_are_the_whole(tmp_path: Path, stage: int) -> None:
    """Every unit once, with the same bytes from the same files."""
    write_checkpoint(tmp_path, {f"{i}.weight": (7, 100 + i) for i in range(40)}, 8, stage=stage)
    whole = plan(str(tmp_path), to="zero3", dp=6)
    parts = [plan(str(tmp_path), to="zero3", dp=6, shard=(i, 5)) for i in range(5)]
    assert sorted((unit for part in parts for unit in part.units), key=lambda unit: unit.name) == sorted(
        whole.units, key=lambda unit: unit.name
    )
    assert {part.shard for part in parts} == {(i, 5) for i in range(5)}


def test_a_part_reads_each_file_once(tmp_path: Path, opened: list[str]) -> None:
    """The first of the model and of the optimizer, and those of its own: no file twice."""
    write_checkpoint(tmp_path, {f"{i}.weight": (8, 8) for i in range(20)}, 8, stage=3)
    units = plan(str(tmp_path), to="zero3", dp=8, shard=(3, 4)).units
    assert [unit.name for unit in units] == ["model 3", "model 7", "optim 3", "optim 7"]
    assert sorted(opened) == sorted(
        ["latest", *(model_file(rank) for rank in (0, 3, 7)), *(optim_file(rank) for rank in (0, 3, 7))]
    )


def test_a_part_refuses_the_files_that_it_reads(tmp_path: Path) -> None:
    """A shard under another's name, and one of another step: found by the parts that read it, and by no other."""
    write_checkpoint(tmp_path, {"weight": (64, 64)}, 8, stage=3, ranks={1, 2, 3, 4, 5, 6})
    first, last = 4, 7  # units are the files of the model, then those of the optimizer
    assert plan(str(tmp_path), to="zero3", dp=4, shard=(first, 8)).units[0].name == "optim 0"
    with pytest.raises(CheckpointDamaged, match="under another name"):
        plan(str(tmp_path), to="zero3", dp=4, shard=(last, 8))
    later = tmp_path / TAG / optim_file(1)
    content = torch.load(later, weights_only=False)
    content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["step"] = 1001
    torch.save(content, later)
    with pytest.raises(CheckpointDamaged, match="step of param group 0 differs"):
        plan(str(tmp_path), to="zero3", dp=4, shard=(first, 8))


def test_what_a_rank_tells_the_others_is_short(tmp_path: Path) -> None:
    """With 1,200 tensors a hundred bytes a value; a difference at their end is found all the same."""
    write_checkpoint(tmp_path, LLAMA, 2, stage=3)
    path = tmp_path / TAG / model_file(1)
    listing = find_listing(str(tmp_path), None).listing
    assert isinstance(listing, Listing)
    shards = ZeroShards(checkpoint=open_zero(listing, optimizer=True))
    for family in ("model", "optim"):
        for rank in range(2):
            shards.buffers(family, rank)
    assert max(len(text) for said in shards.signatures.values() for text in said.values()) < 100
    assert shards.signatures[model_file(0)] == shards.signatures[model_file(1)]
    content = torch.load(path, weights_only=False)
    content["param_shapes"][0]["head.weight"] = (24576, 128256)
    torch.save(content, path)
    with pytest.raises(CheckpointDamaged, match="param_shapes differs"):
        open_checkpoint(find_listing(str(tmp_path), None))
    with pytest.raises(CheckpointDamaged, match="param_shapes differs"):
        plan(str(tmp_path), to="zero3", shard=(1, 3))
    assert plan(str(tmp_path), to="zero3", shard=(2, 3)).units
