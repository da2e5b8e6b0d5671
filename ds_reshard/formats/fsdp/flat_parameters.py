"""The optimizer's files of verl with FSDP1: states of flat parameters, by number, one part on each rank.

No file of a rank tells what the flat parameters are made of. `fsdp_units.json` does:

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import NoReturn

from ds_reshard.containers import folders
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, Fault, UnsupportedLayout, error_of, raise_faults
from ds_reshard.model.content import MASTER, WEIGHT, weight_name_fault
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Placement, TensorKey
from ds_reshard.model.records import ElementType, ObjectRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region, Shape, boxes

ORDER = "fsdp_units.json"
Tree = Mapping[object, object]
States = Mapping[int, Mapping[str, TensorRecord]]
"""The tensors of one rank's file by number and kind."""


def damaged(where: str, what: str, expected: str, found: str) -> Fault:
    mend = "restore the folder from a copy, or load an older step"
    return CheckpointDamaged.fault(where, what, expected, found, mend=mend)


def other_groups(path: str, groups: Sequence[GroupFacts], first: Sequence[GroupFacts]) -> Iterator[Fault]:
    """A rank's file whose param groups are not rank 0's; a tensor among the values is the same by its checksum."""
    told, expected = ([(one.members, one.hyperparameters) for one in ranks] for ranks in (groups, first))
    if canonical(told) != canonical(expected):
        what = "its param groups have other members or values than rank 0's: of another run"
        yield damaged(path, what, "the same on all ranks", "others")


def refuse(fault: Fault) -> NoReturn:
    """Raise for a file that cannot be read any further."""
    raise error_of([fault], subject="reading a checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter of a flat parameter: its shape, and the element of the flat parameter at which it begins."""

    shape: Shape
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)


Unit = dict[str, Member]
"""In the order of their offsets."""


@dataclass(frozen=True, kw_only=True)
class FlatOrder:
    """The flat parameters of a model, and what each number of the optimizer's state dict is of."""

    use_orig_params: bool
    units: tuple[Unit, ...]
    parameters: tuple[str, ...]

    def unit_of(self, name: str) -> Unit:
        return self._unit_of[name]

    @cached_property
    def _unit_of(self) -> dict[str, Unit]:
        return {name: unit for unit in reversed(self.units) for name in unit}

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
        return unit[name].shape if ranks == 1 else (_region(unit, name, rank, ranks).numel,)

    def buffer(self, number: int, kind: str) -> str:
        return f"{self.parameters[number]}[{kind}]"

    def placements(self, number: int, kind: str, dtype: ElementType, ranks: int, *, family: str) -> Iterator[Placement]:
        """Where a state of that number lies in the files of so many ranks, for each of its parameters.

        torch cuts a flat parameter into as many equal shards as there are ranks, the last ones padded (`_get_shard` of
        FlatParamHandle, torch/distributed/fsdp/_flat_param.py, 2.13). With use_orig_params each parameter's part is a
        tensor of its own.
        """
        for name, member in self.members(number).items():
            unit, box = self.unit_of(name), Box.whole(member.shape)
            key, buffer = TensorKey(name=name, kind=kind), self.buffer(number, kind)
            place = partial(Placement, key=key, shape=member.shape, dtype=dtype, family=family, buffer=buffer)
            if not self.use_orig_params:
                yield place(cut=Cut(chunk=_shard_numel(unit, ranks), phase=member.offset), box=box)
                continue
            tiles = []
            for rank in range(ranks):
                region, at = _region(unit, name, rank, ranks), 0
                for part in boxes(region):
                    tiles.append(place(cut=Cut(chunk=part.numel, first=rank, origin=at), box=part))
                    at += part.numel
            yield place(cut=Cut(chunk=max(1, box.numel)), box=box, tiles=tuple(tiles))

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
    return -(-unit[next(reversed(unit))].stop // ranks)


def _region(unit: Unit, name: str, rank: int, ranks: int) -> Region:
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
        held = folders.read_json(path)
    except CheckpointNotFound:
        return None
    except ValueError as error:
        held = error
    order = _order(held)
    expected = '{"use_orig_params": ..., "units": [{"NAME": {"shape": [...], "offset": N}}], "parameters": [...]}'
    wrong = [("holds no units of FSDP", expected, type(held).__name__)]
    if order is not None:
        wrong = list(_wrong_order(order, shapes))
    mend = line_to_add(folder)
    raise_faults([CheckpointDamaged.fault(path, *told, mend=mend) for told in wrong], subject="reading units")
    return order


def _order(held: object) -> FlatOrder | None:
    """The order of a file's JSON; None where it is of another form."""
    if not isinstance(held, dict) or held.keys() != {"use_orig_params", "units", "parameters"}:
        return None
    orig, units, parameters = held["use_orig_params"], held["units"], held["parameters"]
    if not isinstance(orig, bool) or not isinstance(units, list) or not _are(str, parameters):
        return None
    made = [_unit(unit) for unit in units]
    if not made or not all(made):
        return None
    return FlatOrder(use_orig_params=orig, units=tuple(made), parameters=tuple(parameters))


def _unit(held: object) -> Unit:
    """The members of a unit; none where they are of another form."""
    members = {}
    for name, told in held.items() if isinstance(held, dict) else ():
        if not isinstance(told, dict) or not _are(int, told.get("shape")) or type(told.get("offset")) is not int:
            return {}
        members[name] = Member(shape=tuple(told["shape"]), offset=told["offset"])
    return members


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _wrong_order(order: FlatOrder, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, str]]:
    """What is wrong, what was expected and what was found, of units that are not those of the model."""
    for unit in order.units:
        at = 0
        for name, member in unit.items():
            if shapes.get(name) != member.shape:
                found = "no such parameter" if name not in shapes else str(list(shapes[name]))
                yield f"{name} is another than in the model's files", str(list(member.shape)), found
            if member.offset < at:
                yield f"{name} begins before the parameter in front of it ends", str(at), str(member.offset)
            at = member.stop
    members = [name for unit in order.units for name in unit]
    for names, what in ((members, "is in two units"), (order.parameters, "is counted twice")):
        yield from ((f"{name} {what}", "once", "twice") for name, times in Counter(names).items() if times > 1)
    heads = set(members) if order.use_orig_params else {next(iter(unit)) for unit in order.units}
    what = "a parameter of a unit" if order.use_orig_params else "the first parameter of a unit"
    yield from ((f"{name} is counted", what, "another name") for name in order.parameters if name not in heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatStates:
    """What all ranks' files hold. A rank without elements of a parameter has no state of it.

    `kinds` are the states of each number with their element types; `values` all that is one for the whole parameter,
    as it lies in the first file that has it. Of HSDP, groups of `shards` ranks hold the same parts.
    """

    order: FlatOrder
    family: str
    shards: int
    files: tuple[States, ...]
    kinds: Mapping[int, Mapping[str, ElementType]]
    values: Mapping[int, Mapping[str, object]]
    facts: OptimizerFacts

    def placements(self, ranks: int) -> Iterator[Placement]:
        """Where the states lie, or would lie, in the files of so many ranks."""
        for number, kinds in self.kinds.items():
            for kind, dtype in kinds.items():
                yield from self.order.placements(number, kind, dtype, ranks, family=self.family)

    def buffers(self, rank: int) -> Mapping[str, Extent]:
        return {
            self.order.buffer(number, kind): extent_of(tensor)
            for number, states in self.files[rank].items()
            for kind, tensor in states.items()
        }


def read_flat(paths: Sequence[str], tops: Sequence[Tree], order: FlatOrder, *, family: str, shards: int) -> FlatStates:
    """Read every rank's file, each checked against the order and the others.

    Raises CheckpointDamaged with every reason: states of other sizes or types than the order and the other ranks have,
    missing ones, numbers and values that differ; UnsupportedLayout for states that are not of a parameter's elements.
    """
    faults: list[Fault] = []
    files: list[States] = []
    values: dict[int, dict[str, object]] = {}
    scalars: dict[int, dict[str, Scalar]] = {}
    counted = list(range(len(order.parameters)))
    for path, top in zip(paths, tops, strict=True):
        if sorted(n for group in groups_of(top) for n in members_of(group) if type(n) is int) != counted:
            expected = f"numbers 0 to {len(counted) - 1}, as the order of its units counts"
            faults.append(damaged(path, "its param groups are of another optimizer", expected, "others"))
        tensors, singles, read = _split(path, top, faults)
        files.append(tensors)
        for number, kinds in read.items():
            values.setdefault(number, singles[number])
            if scalars.setdefault(number, kinds) != kinds:
                other = f"parameter {number} has other values of {', '.join(kinds)} than another rank's"
                faults.append(damaged(path, f"{other}: of another step or run", "the same", "others"))
    raise_faults(faults, subject="reading a checkpoint")
    groups = [group_facts(top, order.names) for top in tops]
    types: dict[int, dict[str, ElementType]] = {}
    for states in files:
        for number, held in sorted(states.items()):
            types.setdefault(number, {}).update({kind: tensor.dtype for kind, tensor in held.items()})
    for rank, path in enumerate(paths):
        faults += other_groups(path, groups[rank], groups[0])
        faults += _unlike(path, order, types, files[rank], rank % shards, shards)
        faults += _unlike_replica(path, files[rank], files[rank % shards], rank % shards)
    raise_faults(faults, subject="reading a checkpoint")
    return FlatStates(
        order=order,
        family=family,
        shards=shards,
        files=tuple(files),
        values=values,
        kinds={number: types[number] for number in sorted(types)},
        facts=OptimizerFacts(
            groups=groups[0], scalars={name: kinds for number, kinds in scalars.items() for name in order.names(number)}
        ),
    )


def groups_of(optimizer: Tree) -> list[Tree]:
    """The param groups of an optimizer's state dict."""
    groups = optimizer.get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def members_of(group: Tree) -> list[object]:
    members = group.get("params")
    return list(members) if isinstance(members, list | tuple) else []


def group_facts(optimizer: Tree, names: Callable[[object], Iterable[str]]) -> tuple[GroupFacts, ...]:
    """The param groups; `names` gives the parameters of a member."""
    return tuple(
        GroupFacts(
            members=tuple(name for member in members_of(group) for name in names(member)),
            hyperparameters={str(name): value for name, value in group.items() if name != "params"},
        )
        for group in groups_of(optimizer)
    )


def _split(
    path: str, top: Tree, faults: list[Fault]
) -> tuple[States, dict[int, dict[str, object]], dict[int, dict[str, Scalar]]]:
    """A file's states: tensors of elements of a parameter, and values that are one for the whole of it, twice.

    These are given as they lie in the file, and read.
    """
    tensors: dict[int, dict[str, TensorRecord]] = {}
    values: dict[int, dict[str, object]] = {}
    scalars: dict[int, dict[str, Scalar]] = {}
    state = top.get("state")
    with open_archive(path) as archive:
        for number, kinds in state.items() if isinstance(state, dict) else ():
            if type(number) is not int or not isinstance(kinds, dict):
                what = f"{number!r} is no number of a parameter"
                faults.append(damaged(path, what, "a number", type(number).__name__))
                continue
            for kind, value in kinds.items():
                if str(kind) in (MASTER, WEIGHT):
                    faults.append(weight_name_fault(path, f"parameter {number}: {kind}"))
                    continue
                if isinstance(value, TensorRecord) and value.shape != () and value.contiguous:
                    tensors.setdefault(number, {})[str(kind)] = value
                    continue
                if isinstance(value, TensorRecord):
                    data = archive.tensor_bytes(value)
                    scalar: Scalar = ScalarTensor(dtype=value.dtype, shape=value.shape, data=data)
                elif value is None or isinstance(value, int | float):
                    scalar = value
                else:
                    what = f"the state {kind} of parameter {number} is no part of a flat parameter"
                    found = str(value.callable) if isinstance(value, ObjectRecord) else type(value).__name__
                    mend = "remove fsdp_units.json, where it is not of FSDP1"
                    faults.append(UnsupportedLayout.fault(path, what, found=found, mend=mend))
                    continue
                values.setdefault(number, {})[str(kind)] = value
                scalars.setdefault(number, {})[str(kind)] = scalar
    return tensors, values, scalars


def _unlike(
    path: str, order: FlatOrder, types: Mapping[int, Mapping[str, ElementType]], states: States, rank: int, ranks: int
) -> Iterator[Fault]:
    """States of a rank that are missing, too many, or of another size or type than theirs."""
    for number, kinds in types.items():
        if not 0 <= number < len(order.parameters):
            yield damaged(path, f"holds a state of parameter {number}", f"0 to {len(order.parameters) - 1}", "more")
            continue
        shape, name = order.local_shape(number, rank, ranks), order.parameters[number]
        for kind, dtype in kinds.items():
            held = states.get(number, {}).get(kind)
            expected = f"{dtype.label} {list(shape)}" if 0 not in shape else "nothing"
            found = f"{held.dtype.label} {list(held.shape)}" if held is not None and held.numel else "nothing"
            if found != expected:
                what = f"{name}[{kind}], parameter {number}, is not rank {rank}'s part of {ranks}"
                yield damaged(path, what, expected, found)


def _unlike_replica(path: str, states: States, first: States, rank: int) -> Iterator[Fault]:
    """States of a rank that are not those of the first rank that holds the same shard."""
    for number, kinds in states.items():
        for kind, tensor in kinds.items():
            other = first.get(number, {}).get(kind)
            if other is not None and tensor.storage.crc32 != other.storage.crc32:
                what = f"{kind} of parameter {number} is another than rank {rank}'s, which holds the same shard"
                yield damaged(path, what, "the same", "others")


def flat_tree(states: FlatStates, top: Tree, rank: int, ranks: int) -> Tree:
    """What torch.save is given for the optimizer's file of one rank of so many."""
    made: dict[int, dict[str, object]] = {}
    for number, kinds in states.kinds.items():
        shape = states.order.local_shape(number, rank, ranks)
        if 0 in shape:
            continue  # a parameter without elements gets no gradient, and AdamW no state of it
        tensors = {kind: new_tensor(states.order.buffer(number, kind), shape, dtype) for kind, dtype in kinds.items()}
        made[number] = {**states.values.get(number, {}), **tensors}
    return {**top, "state": made}
