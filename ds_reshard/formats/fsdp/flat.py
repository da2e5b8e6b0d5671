"""The optimizer's files of verl with FSDP1: states of flat parameters, by number, one part on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.fsdp.held import damaged, other_groups
from ds_reshard.formats.fsdp.order import FlatOrder
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Placement
from ds_reshard.model.records import ObjectRecord, TensorRecord, new_tensor

Tree = Mapping[object, object]
States = Mapping[int, Mapping[str, TensorRecord]]
"""The tensors of one rank's file by number and kind."""


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
    files: list[dict[int, dict[str, TensorRecord]]] = []
    values: dict[int, dict[str, object]] = {}
    scalars: dict[int, dict[str, Scalar]] = {}
    counted = list(range(len(order.parameters)))
    for path, top in zip(paths, tops, strict=True):
        if sorted(_numbers(top)) != counted:
            expected = f"numbers 0 to {len(counted) - 1}, as the order of its units counts"
            faults.append(damaged(path, "its param groups are of another optimizer", expected, "others"))
        tensors, singles = _split(path, top, faults)
        files.append(tensors)
        for number, kinds in _read_values(path, singles).items():
            values.setdefault(number, singles[number])
            if scalars.setdefault(number, kinds) != kinds:
                faults.append(
                    damaged(
                        path,
                        f"parameter {number} has other values of {', '.join(kinds)} than another "
                        "rank's: of another step or run",
                        "the same",
                        "others",
                    )
                )
    raise_faults(faults, subject="reading a checkpoint")
    groups = tuple(_groups(tops[0], order))
    faults += [
        other_groups(path) for path, top in zip(paths, tops, strict=True) if tuple(_groups(top, order)) != groups
    ]
    types: dict[int, dict[str, ElementType]] = {}
    for states in files:
        for number, held in sorted(states.items()):
            types.setdefault(number, {}).update({kind: tensor.dtype for kind, tensor in held.items()})
    for rank, path in enumerate(paths):
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
            groups=groups, scalars={name: kinds for number, kinds in scalars.items() for name in order.names(number)}
        ),
    )


def _numbers(top: Tree) -> list[int]:
    groups = top.get("param_groups")
    found = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [number for members in found if isinstance(members, list) for number in members if type(number) is int]


def _split(
    path: str, top: Tree, faults: list[Fault]
) -> tuple[dict[int, dict[str, TensorRecord]], dict[int, dict[str, object]]]:
    """A file's states: tensors of elements of a parameter, and values that are one for the whole of it."""
    tensors: dict[int, dict[str, TensorRecord]] = {}
    singles: dict[int, dict[str, object]] = {}
    state = top.get("state")
    for number, kinds in state.items() if isinstance(state, dict) else ():
        if type(number) is not int or not isinstance(kinds, dict):
            faults.append(damaged(path, f"{number!r} is no number of a parameter", "a number", type(number).__name__))
            continue
        for kind, value in kinds.items():
            if isinstance(value, TensorRecord) and value.shape != () and value.contiguous:
                tensors.setdefault(number, {})[str(kind)] = value
            elif isinstance(value, TensorRecord | int | float | None):
                singles.setdefault(number, {})[str(kind)] = value
            else:
                what = f"the state {kind} of parameter {number} is no part of a flat parameter"
                kept = str(value.callable) if isinstance(value, ObjectRecord) else type(value).__name__
                faults.append(
                    UnsupportedLayout.fault(
                        path, what, found=kept, mend="remove fsdp_units.json, where it is not of FSDP1"
                    )
                )
    return tensors, singles


def _read_values(path: str, singles: Mapping[int, Mapping[str, object]]) -> dict[int, dict[str, Scalar]]:
    found: dict[int, dict[str, Scalar]] = {}
    with open_archive(path) as archive:
        for number, kinds in singles.items():
            held = found.setdefault(number, {})
            for kind, value in kinds.items():
                if isinstance(value, TensorRecord):
                    held[kind] = ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
                elif value is None or isinstance(value, int | float):
                    held[kind] = value
    return found


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
                yield damaged(
                    path, f"{name}[{kind}], parameter {number}, is not rank {rank}'s part of {ranks}", expected, found
                )


def _unlike_replica(path: str, states: States, first: States, rank: int) -> Iterator[Fault]:
    """States of a rank that are not those of the first rank that holds the same shard."""
    for number, kinds in states.items():
        for kind, tensor in kinds.items():
            other = first[number][kind] if kind in first.get(number, {}) else None
            if other is not None and tensor.storage.crc32 != other.storage.crc32:
                yield damaged(
                    path,
                    f"{kind} of parameter {number} is another than rank {rank}'s, which holds the same shard",
                    "the same",
                    "others",
                )


def _groups(top: Tree, order: FlatOrder) -> Iterator[GroupFacts]:
    groups = top["param_groups"]
    assert isinstance(groups, list), "a file without param groups counts no parameters, and is refused"
    for group in groups:
        members = [name for number in group["params"] for name in order.names(number)]
        kept = {str(name): value for name, value in group.items() if name != "params"}
        yield GroupFacts(members=tuple(members), hyperparameters=kept)


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
