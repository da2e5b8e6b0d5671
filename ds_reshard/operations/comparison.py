"""`diff`: two checkpoints of any stage and size compared, tensor by tensor and value by value, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

import torch

from ds_reshard.containers.plain import read_scalars, single_elements
from ds_reshard.errors import Fault, ModelMismatch, ReshardError, error_of, raise_faults
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.deviation import Deviation, same_bits
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.model.checkpoint import Checkpoint, records_of
from ds_reshard.model.content import (
    MASTER,
    SAMPLES,
    SCHEDULER,
    STANDARD_ENTRIES,
    STEPS,
    WEIGHT,
    Content,
    TensorSource,
    flatten,
    with_groups,
)
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, ScalarTensor, canonical, describe
from ds_reshard.model.index import ZEROS, Index, Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.model.reports import DIFFERS, EQUAL, Difference, TensorDifference, ValueDifference
from ds_reshard.operations.archives import read_records
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.proof import left_out_faults, prove
from ds_reshard.operations.runner import Told, in_shares
from ds_reshard.operations.shape_map import Mapped, coming_run
from ds_reshard.operations.source import Found, open_checkpoint
from ds_reshard.operations.values import Column, index_of, logical, read_spans


def compare_listings(
    a: Found, b: Found, *, names: str | None, reading: Reading, progress: Progress | None
) -> Difference:
    """Compare two checkpoints value by value; every byte that is read is checked against its file's checksum.

    With a map of `names`, the side whose names differ from the other's is compared as the map has it.
    """
    started = time.monotonic()
    sides = (open_checkpoint(a), open_checkpoint(b))
    for side in sides:
        prove(side)
    pairs = _saved_pairs(*sides) if names is None else _mapped_pairs(names, *sides)
    keys = list(pairs.compared)
    rows = [pairs.compared[key] for key in keys]
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
    read_records(sorted({*ledger.slices, *pairs.records}), ledger, reading, progress=None, subject=subject)
    tensors = [*pairs.other, *(_told(pairs, key, deviations[row]) for row, key in enumerate(keys))]
    return Difference(
        a=a.folder,
        b=b.folder,
        tensors=tuple(sorted(tensors, key=lambda one: (one.name, one.kind))),
        values=tuple(pairs.values),
        faults=(*pairs.faults, *ledger.faults, *ledger.mismatches()),
        notes=(*pairs.notes, *_merged(sides, pairs, [keys[row] for row in deviations if deviations[row].differing])),
        bytes_read=ledger.bytes_read,
        seconds=time.monotonic() - started,
    )


_WHOLE_NBYTES = 64 << 20


def _merged(sides: tuple[Checkpoint, Checkpoint], pairs: _Pairs, keys: Sequence[TensorKey]) -> Iterator[str]:
    """Tensors that one side has as ranks of the other had their parts, one behind the other: merged by another rule.

    Of those that are not too large to be looked at as a whole.
    """
    for key in keys:
        rows = pairs.compared[key]
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

    `values`, `faults` and `notes` are what is found without reading tensors; `records` are read for their checksums.
    """

    def __init__(self) -> None:
        self.compared: dict[TensorKey, tuple[Column, Column]] = {}
        self.other: list[TensorDifference] = []
        self.values: list[ValueDifference] = []
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.records: set[Record] = set()

    def add(self, key: TensorKey, a: Column | None, b: Column | None) -> None:
        if a is None or b is None:
            self._tell(key, "only in A" if b is None else "only in B", a, b)
        elif a.shape != b.shape:
            self._tell(key, "other shape", a, b)
        elif a.dtype is not b.dtype:
            self._tell(key, "other type", a, b)
        elif not a.numel:
            self._tell(key, EQUAL, a, b)
        else:
            self.compared[key] = (a, b)

    def _tell(self, key: TensorKey, state: str, a: Column | None, b: Column | None) -> None:
        self.other.append(TensorDifference(name=key.name, kind=key.kind, state=state, a=_described(a), b=_described(b)))


def _saved_pairs(a: Checkpoint, b: Checkpoint) -> _Pairs:
    """Return the pairs of two checkpoints of the same names.

    A weight that a side keeps as its master alone (ZeRO 3) is not compared, and neither is one whose master is the
    weight of the other side (FSDP): that is compared with the master.
    """
    pairs, sides = _Pairs(), (a, b)
    pairs.values += [*_values(a, b), *_strided(a, b)]
    pairs.notes += _notes(a, b)
    for key in dict.fromkeys((*a.index.layout.placements, *b.index.layout.placements)):
        found = [_key_in(side, key) for side in sides]
        if key.kind == "weight" and (masters := _by_master(sides, key.name)) is not None:
            if any(TensorKey(name=key.name, kind="fp32") in side.layout for side in sides):
                continue
            found = [*masters]  # a tied name: only its owner's master has the kind
        elif any(at is None and side.stored_as_master_only(key) for side, at in zip(sides, found, strict=True)):
            continue
        columns = (logical(side.index, at) if at is not None else None for side, at in zip(sides, found, strict=True))
        pairs.add(key, *columns)
    return pairs


def _by_master(sides: tuple[Checkpoint, Checkpoint], name: str) -> tuple[TensorKey, TensorKey] | None:
    """Return the masters of both sides if one side's is its weight, and the other's is not."""
    a, b = (side.master(name) for side in sides)
    return (a, b) if a is not None and b is not None and {a.kind, b.kind} == {"fp32", "weight"} else None


def _mapped_pairs(names: str, a: Checkpoint, b: Checkpoint) -> _Pairs:
    """Return the pairs of two contents, one of which is as a map has it.

    A weight is not compared if it is read from its master on both sides; or if it is the master on one side (FSDP), and
    has another type on the other.
    """
    pairs, (contents, indexes) = _Pairs(), _under_one_side(names, a, b)
    for name, source, content in zip("AB", (a, b), contents, strict=True):
        pairs.faults += left_out_faults(source)
        pairs.notes += [f"{name}: {note}" for note in content.notes]
        pairs.records |= records_of(source.index)
    pairs.values += [*_mapped_values(contents, pairs, alike=a.framework == b.framework), *_scaling(a, b)]
    saved = dict.fromkeys(key for content in contents for key in content.tensors)
    ties = dict.fromkeys(TensorKey(name, WEIGHT) for content in contents for name in content.tied)
    seen = set[tuple[object, ...]]()
    for key in saved | ties:
        found = [_tensor_of(content, key) for content in contents]
        if None in found and key not in saved:
            pairs.notes.append(f"{key.name}, another name of a tied weight, is in {'AB'[found[0] is None]} alone")
            continue
        pair = (key.kind, *(tensor and tensor.origin for tensor in found))
        if pair not in seen and not (key.kind == WEIGHT and _compared_by_master(key, contents)):
            pairs.add(key, *(_column(index, tensor) for index, tensor in zip(indexes, found, strict=True)))
        seen.add(pair)
    return pairs


def _under_one_side(names: str, a: Checkpoint, b: Checkpoint) -> tuple[list[Content], list[Index]]:
    """Apply the map to the side that then shares more names with the other; return both contents, and their indexes.

    If both would, it is A, unless rows of A would be made of zeros. Raises ModelMismatch if neither would.
    """
    read, contents, indexes = read_name_map(names), [a.content(), b.content()], [a.index, b.index]
    known = [content.weights.keys() | content.tied.keys() for content in contents]
    fits, refused = list[tuple[bool, int, Mapped]](), list[tuple[Fault, ...]]()
    for number, content in enumerate(contents):
        mapped = read.apply(content, indexes[number].layout, coming_run(contents[1 - number]))
        found = mapped.content.weights.keys() | mapped.content.tied.keys()
        if not mapped.faults and len(found & known[1 - number]) > len(known[0] & known[1]):
            fits.append((bool(mapped.layout.buffers(ZEROS)), number, mapped))
        refused.append(mapped.faults)
    if fits:
        _, number, mapped = min(fits, key=lambda one: one[:2])
        contents[number], indexes[number] = mapped.content, indexes[number].with_layout(mapped.layout)
        return contents, indexes
    fewest, subject = min(refused, key=len), f"comparing {a.folder} with {b.folder}"
    raise_faults(fewest if known[0] != known[1] else (), subject=subject)
    what = f"{'already has the' if known[0] == known[1] else 'gets no'} names of the other, {b.folder}"
    mend = "compare them without --names, or take the map between their names"
    raise error_of([ModelMismatch.fault(a.folder, what, f"another side of {names}", mend=mend)], subject=subject)


def _tensor_of(content: Content, key: TensorKey) -> TensorSource | None:
    """The tensor of that name, or that of the parameter to which it is tied."""
    return content.tensors.get(key, content.tensors.get(key._replace(name=content.tied.get(key.name, key.name))))


def _column(index: Index, tensor: TensorSource | None) -> Column | None:
    return replace(logical(index, tensor.origin), dtype=tensor.dtype) if tensor is not None else None


def _compared_by_master(key: TensorKey, contents: Sequence[Content]) -> bool:
    both = [(_tensor_of(one, key), _tensor_of(one, key._replace(kind=MASTER))) for one in contents]
    pairs = [(one, master) for one, master in both if one and master]
    if len(pairs) < 2 or pairs[0][0].dtype is pairs[1][0].dtype:
        return len(pairs) == 2 and all(one.origin == master.origin for one, master in pairs)
    return any(one == master for one, master in pairs)


def _mapped_values(contents: Sequence[Content], pairs: _Pairs, *, alike: bool) -> Iterator[ValueDifference]:
    """Yield param groups, steps, schedules and counters that differ; of two frameworks, those that both have."""
    contents = [_in_order(content, contents[0]) for content in contents]
    pairs.faults += [fault for content in contents for fault in content.faults]
    facts = [content.facts or OptimizerFacts(groups=()) for content in contents]
    held = [
        [_objects(content), *(dict(group.hyperparameters or {}) for group in of_side.groups)]
        for content, of_side in zip(contents, facts, strict=True)
    ]
    if not alike:
        known = [set[str]().union(*of_side) for of_side in held]
        alone = known[0] ^ known[1]
        held = [[{k: value for k, value in one.items() if k not in alone} for one in of_side] for of_side in held]
        told = ", ".join(["random states, loss scaling", *sorted(alone)])
        pairs.notes.append(f"of two frameworks, what one of them alone has is not compared: {told}")
    groups = (
        tuple(replace(group, hyperparameters=values) for group, values in zip(one.groups, of_side[1:], strict=True))
        for one, of_side in zip(facts, held, strict=True)
    )
    yield from compare_groups(*groups)
    yield from compare_scalars(facts[0].scalars, facts[1].scalars)
    yield from differences("", held[0][0], held[1][0])


def _objects(content: Content) -> dict[str, object]:
    counters = {STEPS, SAMPLES, "skipped_steps"}
    held = {path: one for path, one in content.objects.items() if path[0] not in STANDARD_ENTRIES - counters}
    held[SCHEDULER,] = content.entries.get(SCHEDULER)
    values = (one for path, value in held.items() for one in flatten(value, path))
    return {".".join(map(str, path)): value for path, value in values if value is not None}


def _in_order(content: Content, like: Content) -> Content:
    """Return the content with its param groups, and its scheduler's values, in the order of the members in `like`."""
    groups = content.facts.groups if content.facts is not None else ()
    known = [name for group in (like.facts.groups if like.facts is not None else ()) for name in group.members]
    at = {name: number for number, name in enumerate(known)}
    firsts = [min((at.get(name, len(at)) for name in group.members), default=len(at)) for group in groups]
    order = sorted(range(len(groups)), key=firsts.__getitem__)
    return with_groups(content, [groups[number] for number in order], order, content.folder) if groups else content


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
        yield from _scaling(a, b)
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


def _scaling(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDifference]:
    both = [key for key in a.scaling if key in b.scaling]
    return differences("optimizer", {key: a.scaling[key] for key in both}, {key: b.scaling[key] for key in both})


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


def _described(column: Column | None) -> str:
    if column is None:
        return "absent"
    return f"{column.dtype.label} {'x'.join(map(str, column.shape)) or 'scalar'}"


def _told(pairs: _Pairs, key: TensorKey, found: Deviation) -> TensorDifference:
    a, b = pairs.compared[key]
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
