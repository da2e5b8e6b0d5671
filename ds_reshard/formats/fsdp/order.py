"""`fsdp_units.json`: what the flat parameters of FSDP1 are made of, which no file of a rank tells.

    {"use_orig_params": true,
     "units": [{"embed.weight": {"shape": [24, 16], "offset": 0}, "norm.weight": {"shape": [16], "offset": 384}}],
     "parameters": ["embed.weight", "norm.weight"]}

`units` are the FSDP units, each with the parameters of its flat parameter and the element at which each begins there;
`parameters` names what the optimizer's state dict counts: a parameter, or with `use_orig_params` false the first one of
a unit. Nothing of it depends on the number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed, raise_faults
from ds_reshard.model.codec import ElementType
from ds_reshard.model.layout import Cut, Placement, TensorKey
from ds_reshard.model.region import Box, Region, boxes

ORDER = "fsdp_units.json"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter of a flat parameter: its shape, and the element of the flat parameter at which it begins."""

    shape: Shape
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)


Unit = Mapping[str, Member]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOrder:
    """The flat parameters of a model, and what each number of the optimizer's state dict is of."""

    use_orig_params: bool
    units: tuple[Unit, ...]
    parameters: tuple[str, ...]

    def unit_of(self, name: str) -> Unit:
        return next(unit for unit in self.units if name in unit)

    def members(self, number: int) -> Unit:
        """The parameters that a number is of."""
        name = self.parameters[number]
        unit = self.unit_of(name)
        return {name: unit[name]} if self.use_orig_params else unit

    def names(self, number: object) -> tuple[str, ...]:
        return tuple(self.members(number)) if isinstance(number, int) and 0 <= number < len(self.parameters) else ()

    def local_shape(self, number: int, rank: int, ranks: int) -> Shape:
        """The shape of a state of that number in a rank's file; under one rank nothing is sharded (NO_SHARD)."""
        name = self.parameters[number]
        unit = self.unit_of(name)
        if not self.use_orig_params:
            return (_shard_numel(unit, ranks),)
        if ranks == 1:
            return unit[name].shape
        region = _held(unit, name, rank, ranks)
        return (region.numel,)

    def buffer(self, number: int, kind: str) -> str:
        return f"{self.parameters[number]}[{kind}]"

    def placements(self, number: int, kind: str, dtype: ElementType, ranks: int, *, family: str) -> Iterator[Placement]:
        """Where a state of that number lies in the files of so many ranks, for each of its parameters.

        torch cuts a flat parameter into as many equal shards as there are ranks, the last ones padded (`_get_shard` of
        FlatParamHandle, torch/distributed/fsdp/_flat_param.py, 2.13). With use_orig_params each parameter's part is a
        tensor of its own.
        """
        buffer = self.buffer(number, kind)
        for name, member in self.members(number).items():
            unit, box = self.unit_of(name), Box.whole(member.shape)
            key = TensorKey(name=name, kind=kind)
            if self.use_orig_params:
                tiles = tuple(self._tiles(key, unit, dtype, ranks, family=family))
                yield Placement(
                    key=key,
                    shape=member.shape,
                    dtype=dtype,
                    family=family,
                    buffer=buffer,
                    cut=Cut(chunk=max(1, box.numel)),
                    box=box,
                    tiles=tiles,
                )
            else:
                cut = Cut(chunk=_shard_numel(unit, ranks), phase=member.offset)
                yield Placement(
                    key=key, shape=member.shape, dtype=dtype, family=family, buffer=buffer, cut=cut, box=box
                )

    def _tiles(self, key: TensorKey, unit: Unit, dtype: ElementType, ranks: int, *, family: str) -> Iterator[Placement]:
        for rank in range(ranks):
            at = 0
            region = _held(unit, key.name, rank, ranks)
            for box in boxes(region) if region.numel else ():
                yield Placement(
                    key=key,
                    shape=unit[key.name].shape,
                    dtype=dtype,
                    family=family,
                    buffer=str(key),
                    cut=Cut(chunk=box.numel, first=rank, origin=at),
                    box=box,
                )
                at += box.numel

    def text(self) -> str:
        """The file, a line for each parameter."""
        units = ",\n".join(
            "{"
            + ",\n ".join(
                f'{json.dumps(name)}: {{"shape": {list(member.shape)}, "offset": {member.offset}}}'
                for name, member in unit.items()
            )
            + "}"
            for unit in self.units
        )
        orig = json.dumps(self.use_orig_params)
        return f'{{"use_orig_params": {orig},\n"units": [\n{units}],\n"parameters": {json.dumps(self.parameters)}}}\n'


def _shard_numel(unit: Unit, ranks: int) -> int:
    return -(-max(member.stop for member in unit.values()) // ranks)


def _held(unit: Unit, name: str, rank: int, ranks: int) -> Region:
    """The elements of a parameter in a rank's shard of its flat parameter."""
    member, numel = unit[name], _shard_numel(unit, ranks)
    start, stop = (min(max(at - member.offset, 0), prod(member.shape)) for at in (rank * numel, (rank + 1) * numel))
    return Region(box=Box.whole(member.shape), start=start, stop=stop)


def line_to_add(folder: str) -> str:
    """What a user adds where the file is missing."""
    call = f"ds_reshard.save_units({folder!r}, model, optimizer)"
    return f"add to the script that saved, once FSDP has wrapped the model: {call}"


def read_order(folder: str, shapes: Mapping[str, Shape]) -> FlatOrder | None:
    """The order that lies beside the ranks' files, None where none does; `shapes` are those of the model's files.

    Raises ReadFailed, and CheckpointDamaged with every reason where it is of another model, or none.
    """
    path = os.path.join(folder, ORDER)
    try:
        with open(path, encoding="utf-8") as file:
            held = json.loads(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadFailed(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        held = error
    order = _order(held)
    if order is None:
        expected = '{"use_orig_params": ..., "units": [{"NAME": {"shape": [...], "offset": N}}], "parameters": [...]}'
        raise_faults([_fault(path, "holds no units of FSDP", expected, type(held).__name__)], subject="reading units")
        raise AssertionError
    raise_faults(list(_faults(path, order, shapes)), subject="reading units")
    return order


def _order(held: object) -> FlatOrder | None:
    if not isinstance(held, dict) or held.keys() != {"use_orig_params", "units", "parameters"}:
        return None
    orig, units, parameters = held["use_orig_params"], held["units"], held["parameters"]
    if not isinstance(orig, bool) or not isinstance(units, list) or not _are(str, parameters):
        return None
    found = [_unit(unit) for unit in units]
    made = tuple(unit for unit in found if unit)
    if len(made) != len(found) or not made:
        return None
    return FlatOrder(use_orig_params=orig, units=made, parameters=tuple(parameters))


def _unit(held: object) -> Unit | None:
    if not isinstance(held, dict):
        return None
    members = {}
    for name, told in held.items():
        if not isinstance(told, dict) or not _are(int, told.get("shape")) or type(told.get("offset")) is not int:
            return None
        members[name] = Member(shape=tuple(told["shape"]), offset=told["offset"])
    return members


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _faults(path: str, order: FlatOrder, shapes: Mapping[str, Shape]) -> Iterator[Fault]:
    for unit in order.units:
        at = 0
        for name, member in unit.items():
            if shapes.get(name) != member.shape:
                found = "no such parameter" if name not in shapes else str(list(shapes[name]))
                yield _fault(path, f"{name} is another than in the model's files", str(list(member.shape)), found)
            if member.offset < at:
                yield _fault(
                    path, f"{name} begins before the parameter in front of it ends", str(at), str(member.offset)
                )
            at = member.stop
    yield from _twice(path, [name for unit in order.units for name in unit], "is in two units")
    yield from _twice(path, order.parameters, "is counted twice")
    heads = {name for unit in order.units for name in (unit if order.use_orig_params else list(unit)[:1])}
    for name in order.parameters:
        if name not in heads:
            yield _fault(
                path,
                f"{name} is counted",
                "a parameter of a unit" if order.use_orig_params else "the first parameter of a unit",
                "another name",
            )


def _twice(path: str, names: Sequence[str], what: str) -> Iterator[Fault]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield _fault(path, f"{name} {what}", "once", "twice")


def _fault(path: str, what: str, expected: str, found: str) -> Fault:
    mend = line_to_add(os.path.dirname(path))
    return CheckpointDamaged.fault(path, what, expected, found, mend=mend)
