"""`diff`: two checkpoints of any stage and size compared, tensor by tensor and value by value, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ds_reshard.execution.deviation import Deviation
from ds_reshard.execution.ledger import Ledger
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.compared import compare_groups, compare_scalars, compare_values, differences
from ds_reshard.model.difference import DIFFERS, EQUAL, Difference, TensorDifference, ValueDifference
from ds_reshard.model.facts import canonical
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.operations.archives import read_records
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.source import Found, Source
from ds_reshard.operations.spans import SpanReader, logical
from ds_reshard.operations.values import index_of


def compare_listings(a: Found, b: Found, *, reading: Reading, progress: Progress | None) -> Difference:
    """Read both side by side, span by span; every byte that is read is checked against its file's checksum."""
    started = time.monotonic()
    sides = (Source(a), Source(b))
    pairs = _Pairs(*sides)
    deviations = {key: Deviation() for key in pairs.compared}
    keys = list(pairs.compared)
    rows = [
        tuple(logical(side.index, key) for side, key in zip(sides, pairs.compared[key], strict=True)) for key in keys
    ]
    total = sum(column.nbytes for columns in rows for column in columns)
    ledger = Ledger()
    reader = SpanReader(
        ledger, threads=reading.threads, memory_nbytes=reading.memory_nbytes, progress=progress, total=total
    )
    for span in reader.read(rows):
        deviations[keys[span.row]].add(span.start, *span.values)
    # What lies between the tensors, for the checksum of the whole record.
    read_records(
        sorted(ledger.records),
        ledger,
        threads=reading.threads,
        memory_nbytes=reading.memory_nbytes,
        progress=None,
        total=total,
    )
    tensors = [*pairs.other, *(_told(pairs, key, deviations[key]) for key in keys)]
    return Difference(
        a=a.folder,
        b=b.folder,
        tensors=tuple(sorted(tensors, key=lambda one: (one.name, one.kind))),
        values=(*_values(*sides), *_strided(*sides)),
        faults=tuple(ledger.faults + ledger.mismatches()),
        notes=tuple(_notes(*sides)),
        bytes_read=ledger.bytes_read,
        seconds=time.monotonic() - started,
    )


class _Pairs:
    """Which tensor of B each of A is compared with; `other` are those that cannot be, or are equal without reading.

    A weight that a side keeps as its master alone (ZeRO 3) is not compared, and neither is one whose master is the
    weight of the other side (FSDP): that is compared with the master.
    """

    def __init__(self, a: Source, b: Source) -> None:
        self._sides = (a, b)
        self.compared: dict[TensorKey, tuple[TensorKey, TensorKey]] = {}
        self.other: list[TensorDifference] = []
        for key in dict.fromkeys((*a.index.layout.placements, *b.index.layout.placements)):
            self._pair(key)

    def placement(self, number: int, key: TensorKey) -> Placement:
        return self._sides[number].index.layout[self.compared[key][number]]

    def _pair(self, key: TensorKey) -> None:
        found = [_key_in(side, key) for side in self._sides]
        if any(at is None and side.unstored(key) for side, at in zip(self._sides, found, strict=True)):
            return
        if key.kind == "weight" and (masters := self._by_master(key.name)) is not None:
            if not any(TensorKey(name=key.name, kind="fp32") in side.layout for side in self._sides):
                self.compared[key] = masters  # a tied name: only its owner's master has the kind
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


def _key_in(source: Source, key: TensorKey) -> TensorKey | None:
    """The tensor of that name, or that of the parameter which it is tied to and which alone was kept.

    Of FSDP, the weight of a parameter for its master.
    """
    owner = TensorKey(name=source.shared.get(key.name, key.name), kind=key.kind)
    known = next((known for known in (key, owner) if known in source.index.layout), None)
    return source.master(key.name) if known is None and key.kind == "fp32" else known


def _values(a: Source, b: Source) -> Iterator[ValueDifference]:
    """Counters and hyper-parameters that differ; of two formats the steps alone mean the same in both."""
    if a.zero is not None and b.zero is not None:
        yield from compare_values(a.zero, b.zero)
        return
    if a.saved is not None and b.saved is not None:
        named = [
            {".".join(map(str, path)): value for path, value in side.objects.items()} for side in (a.saved, b.saved)
        ]
        yield from differences("", named[0], named[1])
    if a.facts is not None and b.facts is not None:
        if a.nanotron is not None and b.nanotron is not None:
            yield from _nanotron_values(a.nanotron, b.nanotron)
        if (a.saved is None) == (b.saved is None) and (a.nanotron is None) == (b.nanotron is None):
            yield from compare_groups(a.facts.groups, b.facts.groups)
        yield from compare_scalars(a.facts.scalars, b.facts.scalars)


def _nanotron_values(a: NanotronCheckpoint, b: NanotronCheckpoint) -> Iterator[ValueDifference]:
    kept = [
        {key: value for key, value in side.metadata.entries.items() if key not in ("tp", "dp", "version")}
        for side in (a, b)
    ]
    yield from differences("", kept[0], kept[1])
    counters = [side.schedulers[0].counters if side.schedulers else {} for side in (a, b)]
    yield from differences("lr_scheduler", counters[0], counters[1])
    yield from compare_scalars(a.rates, b.rates)


def _described(placement: Placement | None) -> str:
    if placement is None:
        return "absent"
    return f"{placement.dtype.label} {'x'.join(map(str, placement.shape)) or 'scalar'}"


def _told(pairs: _Pairs, key: TensorKey, found: Deviation) -> TensorDifference:
    a, b = pairs.placement(0, key), pairs.placement(1, key)
    if found.first is None:
        return TensorDifference(
            name=key.name, kind=key.kind, state=EQUAL, a=_described(a), b=_described(b), numel=a.numel
        )
    return TensorDifference(
        name=key.name,
        kind=key.kind,
        state=DIFFERS,
        a=_described(a),
        b=_described(b),
        numel=a.numel,
        differing=found.differing,
        max_abs=found.max_abs,
        max_ulp=found.max_ulp,
        first=index_of(found.first, a.shape),
        first_a=found.first_a,
        first_b=found.first_b,
    )


def _strided(a: Source, b: Source) -> Iterator[ValueDifference]:
    """Entries of the module that do not lie row-major, which no layout has: by the checksums of their files."""
    modules = [side.zero.model.module if side.zero is not None else {} for side in (a, b)]
    for name in dict.fromkeys((*a.strided(), *b.strided())):
        one, other = (module.get(name) for module in modules)
        if canonical(one) != canonical(other):
            where = f"{name}[weight], which does not lie row-major and is compared by its checksum"
            yield ValueDifference(where=where, a=canonical(one), b=canonical(other))


def _notes(a: Source, b: Source) -> Iterator[str]:
    if (a.zero is None, a.saved is None) != (b.zero is None, b.saved is None):
        yield "of checkpoints of two frameworks hyper-parameters and counters other than the step are not compared"
    for name, side in (("A", a), ("B", b)):
        if side.zero is not None:
            yield from _zero_notes(name, side, side.zero)


def _zero_notes(name: str, source: Source, checkpoint: ZeroCheckpoint) -> Iterator[str]:
    weights = [TensorKey(name=parameter, kind="weight") for parameter in checkpoint.model.trainable]
    unstored = sum(source.unstored(key) and key not in checkpoint.layout for key in weights)
    if unstored:
        yield (
            f"the weights of {unstored} parameters are not stored in {name} (ZeRO 3): they are compared by their "
            "fp32 masters alone"
        )
    if checkpoint.listing.partitioned_model and checkpoint.model.buffer_names and checkpoint.dp > 1:
        yield f"each rank of ZeRO 3 saves buffers of its own: those of the first rank of {name} are compared"
    if checkpoint.facts is None and checkpoint.stage == 0:
        yield (
            f"the optimizer in {name} (ZeRO 0) names no parameter: its states are compared by their checksums, "
            "and with those of another stage 0 alone"
        )
    for number, partition in enumerate(checkpoint.optim.partitions if checkpoint.optim is not None else ()):
        for kind, why in partition.unfollowed.items():
            yield f"state {kind!r} of flat buffer {number} in {name} is not compared: {why}"
