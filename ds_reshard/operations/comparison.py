"""`diff`: two checkpoints of any stage and size compared, tensor by tensor and value by value, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

import torch

from ds_reshard.containers.plain import read_scalars, single_elements
from ds_reshard.errors import ReshardError
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.deviation import Deviation, same_bits
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.facts import GroupFacts, ScalarTensor, canonical, describe
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.model.reports import DIFFERS, EQUAL, Difference, TensorDifference, ValueDifference
from ds_reshard.operations.archives import read_records
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.proof import prove
from ds_reshard.operations.runner import Told, in_shares
from ds_reshard.operations.source import Found, open_checkpoint
from ds_reshard.operations.values import index_of, logical, read_spans


def compare_listings(a: Found, b: Found, *, reading: Reading, progress: Progress | None) -> Difference:
    """Read both side by side, span by span; every byte that is read is checked against its file's checksum."""
    started = time.monotonic()
    sides = (open_checkpoint(a), open_checkpoint(b))
    for side in sides:
        prove(side)
    values = (*_values(*sides), *_strided(*sides))
    pairs = _Pairs(*sides)
    keys = list(pairs.compared)
    rows = [
        tuple(logical(side.index, key) for side, key in zip(sides, pairs.compared[key], strict=True)) for key in keys
    ]
    sizes = [sum(column.nbytes for column in columns) for columns in rows]

    def compare(mine: list[int], own: Reading, told: Told) -> tuple[Outcome, dict[int, Deviation]]:
        ledger, found, wanted = Ledger(), {row: Deviation() for row in mine}, [rows[row] for row in mine]
        for span in read_spans(wanted, ledger, threads=own.threads, memory_nbytes=own.memory_nbytes, told=told):
            found[mine[span.row]].add(span.start, *span.values)
        return ledger, found

    subject = f"comparing {a.folder} with {b.folder}"
    ledger, deviations = Ledger(), dict[int, Deviation]()
    for read, found in in_shares(compare, sizes, reading, progress=progress, subject=subject):
        ledger.add(read)
        deviations |= found
    # What lies between the tensors, for the checksum of the whole record.
    read_records(sorted(ledger.slices), ledger, reading, progress=None, subject=subject)
    tensors = [*pairs.other, *(_told(pairs, key, deviations[row]) for row, key in enumerate(keys))]
    return Difference(
        a=a.folder,
        b=b.folder,
        tensors=tuple(sorted(tensors, key=lambda one: (one.name, one.kind))),
        values=values,
        faults=tuple(ledger.faults + ledger.mismatches()),
        notes=(*_notes(*sides), *_merged(sides, pairs, [keys[row] for row in deviations if deviations[row].differing])),
        bytes_read=ledger.bytes_read,
        seconds=time.monotonic() - started,
    )


_WHOLE_NBYTES = 64 << 20


def _merged(sides: tuple[Checkpoint, Checkpoint], pairs: _Pairs, keys: Sequence[TensorKey]) -> Iterator[str]:
    """Tensors that one side has as ranks of the other had their parts, one behind the other: merged by another rule.

    Of those that are not too large to be looked at as a whole.
    """
    for key in keys:
        at = pairs.compared[key]
        rows = tuple(logical(side.index, one) for side, one in zip(sides, at, strict=True))
        if not any(side.shards_of(key.name) for side in sides) or rows[0].nbytes > _WHOLE_NBYTES:
            continue
        spans = [[one.clone() for one in span.values] for span in read_spans([rows], memory_nbytes=_WHOLE_NBYTES)]
        a, b = (torch.cat(values) for values in zip(*spans, strict=True))
        for (side, mixed), (other, whole) in (((sides[0], a), (sides[1], b)), ((sides[1], b), (sides[0], a))):
            parts = list(_cut(whole.view(rows[0].shape), other.shards_of(key.name)))
            for dim in range(whole.view(rows[0].shape).dim()) if len(parts) > 1 else ():
                try:
                    joined = torch.cat(parts, dim)
                except RuntimeError:
                    continue
                if joined.numel() == mixed.numel() and same_bits(joined.flatten(), mixed):
                    what = f"has what the ranks of {other.folder} had, one part behind the other along dimension {dim}"
                    yield f"{key}: {side.folder} {what}: it was merged by another rule"


def _cut(
    whole: torch.Tensor, shards: Sequence[tuple[tuple[int, ...], Sequence[tuple[Box, int]]]]
) -> Iterator[torch.Tensor]:
    for shape, boxes in shards:
        flat = whole.new_zeros(prod(shape))
        for box, at in boxes:
            spans = tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))
            flat[at : at + box.numel] = whole[spans].flatten()
        yield flat.view(shape)


class _Pairs:
    """Which tensor of B each of A is compared with; `other` are those that cannot be, or are equal without reading.

    A weight that a side keeps as its master alone (ZeRO 3) is not compared, and neither is one whose master is the
    weight of the other side (FSDP): that is compared with the master.
    """

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self._sides = (a, b)
        self.compared: dict[TensorKey, tuple[TensorKey, TensorKey]] = {}
        self.other: list[TensorDifference] = []
        for key in dict.fromkeys((*a.index.layout.placements, *b.index.layout.placements)):
            self._pair(key)

    def placement(self, number: int, key: TensorKey) -> Placement:
        return self._sides[number].index.layout[self.compared[key][number]]

    def _pair(self, key: TensorKey) -> None:
        found = [_key_in(side, key) for side in self._sides]
        if key.kind == "weight" and (masters := self._by_master(key.name)) is not None:
            if not any(TensorKey(name=key.name, kind="fp32") in side.layout for side in self._sides):
                self.compared[key] = masters  # a tied name: only its owner's master has the kind
            return
        if any(at is None and side.stored_as_master_only(key) for side, at in zip(self._sides, found, strict=True)):
            return
        placements = [
            side.index.layout[at] if at is not None else None for side, at in zip(self._sides, found, strict=True)
        ]
        a, b = placements
        if a is None or b is None or found[0] is None or found[1] is None:
            self._tell(key, "only in A" if b is None else "only in B", a, b)
        elif a.shape != b.shape:
            self._tell(key, "other shape", a, b)
        elif a.dtype is not b.dtype:
            self._tell(key, "other type", a, b)
        elif not a.numel:
            self._tell(key, EQUAL, a, b)
        else:
            self.compared[key] = (found[0], found[1])

    def _by_master(self, name: str) -> tuple[TensorKey, TensorKey] | None:
        """The masters of both sides where one side's is its weight, and the other's is not."""
        a, b = (side.master(name) for side in self._sides)
        if a is None or b is None or {a.kind, b.kind} != {"fp32", "weight"}:
            return None
        return a, b

    def _tell(self, key: TensorKey, state: str, a: Placement | None, b: Placement | None) -> None:
        self.other.append(TensorDifference(name=key.name, kind=key.kind, state=state, a=_described(a), b=_described(b)))


def _key_in(source: Checkpoint, key: TensorKey) -> TensorKey | None:
    """The tensor of that name, or that of the parameter which it is tied to and which alone was kept.

    Of FSDP, the weight of a parameter for its master.
    """
    owner = TensorKey(name=source.shared.get(key.name, key.name), kind=key.kind)
    known = next((known for known in (key, owner) if known in source.index.layout), None)
    return source.master(key.name) if known is None and key.kind == "fp32" else known


def _values(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDifference]:
    """Counters and hyper-parameters that differ; of two frameworks the steps alone mean the same in both."""
    if a.framework == b.framework:
        one, two = a.values(), b.values()
        for section in dict.fromkeys((*one, *two)):
            yield from differences(section, one.get(section, {}), two.get(section, {}))
        both = [key for key in a.scaling if key in b.scaling]
        yield from differences(
            "optimizer", {key: a.scaling[key] for key in both}, {key: b.scaling[key] for key in both}
        )
        yield from compare_scalars(a.rates, b.rates)
        if a.optimizer != b.optimizer:
            yield ValueDifference(where="optimizer", a=a.optimizer, b=b.optimizer)
        elif a.unnamed_optimizer is not None or b.unnamed_optimizer is not None:
            unnamed = (side.unnamed_optimizer for side in (a, b))
            yield from differences("optimizer", *(_ABSENT if one is None else one for one in unnamed))
        if (extra := a.extra()) is not None and (other := b.extra()) is not None:
            yield from differences("extra_state", extra, other)
    if a.facts is not None and b.facts is not None:
        if a.framework == b.framework:
            yield from compare_groups(a.groups(), b.groups())
        yield from compare_scalars(a.facts.scalars, b.facts.scalars)


_ABSENT = object()


def compare_groups(a: tuple[GroupFacts, ...], b: tuple[GroupFacts, ...]) -> Iterator[ValueDifference]:
    """Groups with members in common, those without members in their order; and groups that one side alone has.

    A parameter may be in several groups of a side, as a tied one is of two stages of nanotron: each is then known.
    """
    home = {name: number for number, group in enumerate(b) for name in group.members}
    empty = iter([number for number, group in enumerate(b) if not group.members])
    for number, group in enumerate(a):
        others = dict.fromkeys(home[name] for name in group.members if name in home)
        if not group.members:
            others = dict.fromkeys(islice(empty, 1))
        if not others:
            yield ValueDifference(
                where=f"param group {number}{_of(group.members)}", a=f"{len(group.members)} parameters", b="absent"
            )
        for other in others:
            first = [name for name in group.members if home.get(name) == other][:1]
            where = f"param group {number}" + (f" ({other} in B)" if other != number else "") + _of(first)
            if set(group.members) != set(b[other].members):
                counts = (f"{len(one.members)} parameters" for one in (group, b[other]))
                yield ValueDifference(where=f"{where}: members", a=next(counts), b=next(counts))
            yield from differences(where, _read(group.hyperparameters), _read(b[other].hyperparameters))
    known = {name for group in a for name in group.members}
    alone = {*empty, *(number for number, group in enumerate(b) if group.members and known.isdisjoint(group.members))}
    for number in sorted(alone):
        group = b[number]
        yield ValueDifference(
            where=f"param group {number}{_of(group.members)}", a="absent", b=f"{len(group.members)} parameters"
        )


def _of(members: Sequence[str]) -> str:
    return f", of {members[0]}" if members else ", without parameters"


def _read(hyperparameters: Mapping[str, object] | None) -> object:
    """Hyper-parameters, those that were kept as tensors read; where one cannot be, what stands for it."""
    if hyperparameters is None:
        return "none saved (elastic_checkpoint)"
    read: dict[str, object] = dict(hyperparameters)
    for name, value in hyperparameters.items():
        for tensor in single_elements([value]):
            try:
                read[name] = read_scalars(tensor.storage.path, [tensor])[tensor]
            except ReshardError:
                read[name] = value
    return read


def compare_scalars(
    a: Mapping[str, Mapping[str, object]], b: Mapping[str, Mapping[str, object]]
) -> Iterator[ValueDifference]:
    """Steps and other states that are one value; parameters that differ alike are told together."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*a, *b)):
        for difference in differences("", a.get(name, {}), b.get(name, {})):
            alike.setdefault((difference.where, difference.a, difference.b), []).append(name)
    for (kind, one, other), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield ValueDifference(where=f"{kind} of {names[0]}{more}", a=one, b=other)


def differences(where: str, a: object, b: object) -> Iterator[ValueDifference]:
    """The innermost entries of two trees that differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            at = f"{where}.{key}" if where else str(key)
            yield from differences(at, a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif _text(a) != _text(b):
        one, other = _shown(a), _shown(b)
        if one == other:
            one, other = f"{one} ({_kind(a)})", f"{other} ({_kind(b)})"
        yield ValueDifference(where=where, a=one, b=other)


def _text(value: object) -> str:
    return "absent" if value is _ABSENT else canonical(value)


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else describe(value)


def _kind(value: object) -> str:
    """What tells two values apart that read alike."""
    if isinstance(value, ScalarTensor | TensorRecord):
        return f"shape {list(value.shape)}"
    return f"another {type(value).__name__}"


def _described(placement: Placement | None) -> str:
    if placement is None:
        return "absent"
    return f"{placement.dtype.label} {'x'.join(map(str, placement.shape)) or 'scalar'}"


def _told(pairs: _Pairs, key: TensorKey, found: Deviation) -> TensorDifference:
    a, b = pairs.placement(0, key), pairs.placement(1, key)
    equal = TensorDifference(name=key.name, kind=key.kind, state=EQUAL, a=_described(a), b=_described(b), numel=a.numel)
    if found.first is None:
        return equal
    return replace(
        equal,
        state=DIFFERS,
        differing=found.differing,
        max_abs=found.max_abs,
        max_ulp=found.max_ulp,
        first=index_of(found.first, a.shape),
        first_a=found.first_a,
        first_b=found.first_b,
    )


def _strided(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDifference]:
    """Entries of the module that do not lie row-major, which no layout has: by the checksums of their files."""
    modules = [side.module for side in (a, b)]
    for name in dict.fromkeys((*a.non_contiguous_weights(), *b.non_contiguous_weights())):
        one, other = (module.get(name) for module in modules)
        if canonical(one) != canonical(other):
            where = f"{name}[weight], which does not lie row-major and is compared by its checksum"
            yield ValueDifference(where=where, a=canonical(one), b=canonical(other))


def _notes(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    if a.framework != b.framework:
        yield (
            "of checkpoints of two frameworks param groups (members and hyper-parameters), schedulers, and counters "
            "other than the step are not compared"
        )
    for name, side in (("A", a), ("B", b)):
        yield from side.uncompared_notes(name)
