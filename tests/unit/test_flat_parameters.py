"""Flat parameters of FSDP1: the parts of every rank are those that torch's own chunks of the padded flat tensor are."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.errors import CheckpointDamaged
from ds_reshard.formats.fsdp.flat_parameters import ORDER, FlatOrder, Member, read_order
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Region, overlap

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 3)}


def _order(orig: bool) -> FlatOrder:
    members, at = {}, 0
    for name, shape in SHAPES.items():
        members[name] = Member(shape=shape, offset=at)
        at += prod(shape)
    return FlatOrder(use_orig_params=orig, units=(members,), parameters=tuple(SHAPES) if orig else ("a",))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("orig", [True, False])
def test_every_rank_holds_its_chunk_of_the_flat_parameter(orig: bool, ranks: int) -> None:
    """The elements of each rank's buffers, by number, are those of torch.chunk of all parameters one after another."""
    order, flat = _order(orig), torch.arange(sum(map(prod, SHAPES.values())))
    size = -(-flat.numel() // ranks)
    whole = dict(zip(SHAPES, flat.split([prod(shape) for shape in SHAPES.values()]), strict=True))
    held: dict[int, dict[int, int]] = {rank: {} for rank in range(ranks)}
    for number in range(len(order.parameters)):
        for placement in order.placements(number, "exp_avg", ElementType.FLOAT32, ranks, family="optim"):
            everything = Region(box=Box.whole(placement.shape), start=0, stop=prod(placement.shape))
            for rank in range(ranks):
                first = min((at.item() for at in _part(whole[placement.key.name], rank, size)), default=0)
                for region, offset in placement.regions(rank):
                    for run in overlap(region, everything):
                        for i in range(run.numel):
                            value = int(whole[placement.key.name][run.second_offset + i])
                            at = offset + run.first_offset + i + (first - rank * size if orig else 0)
                            assert at not in held[rank]
                            held[rank][at] = value
    for rank in range(ranks):
        assert held[rank] == dict(enumerate(flat[rank * size : (rank + 1) * size].tolist()))


def _part(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return values[(values >= rank * size) & (values < (rank + 1) * size)]


@pytest.mark.parametrize("offset", [14, 15])
def test_parameters_of_a_unit_that_overlap_are_refused(tmp_path: Path, offset: int) -> None:
    """One that begins an element before the end of another is named; where it begins there, nothing is wrong."""
    units = [{"a": {"shape": [3, 5], "offset": 0}, "b": {"shape": [7], "offset": offset}}]
    text = json.dumps({"use_orig_params": True, "units": units, "parameters": ["a", "b"]})
    (tmp_path / ORDER).write_text(text)
    shapes = {name: SHAPES[name] for name in ("a", "b")}
    if offset == 15:
        assert read_order(str(tmp_path), shapes) is not None
        return
    with pytest.raises(CheckpointDamaged, match="b begins before the parameter in front of it ends"):
        read_order(str(tmp_path), shapes)


def test_a_parameter_is_looked_up_and_not_looked_for() -> None:
    """Its unit is found by its name, and the unit's end is its last parameter's, however many of both there are."""
    looks = []

    class Counted(dict[str, Member]):
        def __contains__(self, name: object) -> bool:
            looks.append(name)
            return super().__contains__(name)

        def values(self) -> Any:
            looks.append("values")
            return super().values()

    units = tuple(Counted({f"{unit}.{at}": Member(shape=(4,), offset=4 * at) for at in range(6)}) for unit in range(10))
    order = FlatOrder(use_orig_params=True, units=units, parameters=tuple(name for unit in units for name in unit))
    shapes = [order.local_shape(number, 1, 2) for number in range(60)]
    assert shapes == [(0,), (0,), (0,), (4,), (4,), (4,)] * 10
    assert looks == []
