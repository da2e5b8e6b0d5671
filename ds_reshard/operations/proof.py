"""That states are of the parameters that they are said to be of: each weight is the cast of its fp32 master."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.checkpoint import Checkpoint, checksums
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Holder, TensorKey
from ds_reshard.operations.options import THREADS

if TYPE_CHECKING:
    from ds_reshard.operations.values import Span


def prove(source: Checkpoint, names: Collection[str] | None = None) -> None:
    """Raise what `unproved` finds; of a checkpoint that needs no such proof nothing is read."""
    raise_faults(unproved(source, names), subject=f"checkpoint {source.folder}")


def repaired(source: Checkpoint) -> Checkpoint:
    """The checkpoint with what its framework has saved wrong put right; itself where nothing is wrong."""
    return source.repair() if unproved(source) else source


def unproved(source: Checkpoint, names: Collection[str] | None = None, *, part: int = 0, of: int = 1) -> list[Fault]:
    """The parameters, of `names` or all, whose weight is not the cast of its master, and copies that are not the same.

    Of parameters that are not in `names` copies of the weights are compared. Reads them in 64 MiB. Ranks that prove a
    checkpoint together each take a part `of` so many.
    """
    return _uncast(source, names, part, of) or _differing(source, names, part, of)


def _uncast(source: Checkpoint, names: Collection[str] | None, part: int, of: int) -> list[Fault]:
    layout = source.layout
    masters = [key for key in layout.placements if key.kind == MASTER and (names is None or key.name in names)]
    masters = [key for key in masters if layout[key].numel and key._replace(kind=WEIGHT) in layout]
    masters = masters[part::of] if source.masters_are_cast else []
    if not masters:
        return []
    faults = list(source.master_proof_faults())
    if faults:
        return faults
    from ds_reshard.execution.deviation import as_bits

    index, wrong = source.index, dict[TensorKey, int]()
    rows = [((index, key), (index, TensorKey(name=key.name, kind=WEIGHT))) for key in masters]
    for span in _side_by_side(rows):
        master, weight = span.values
        differs = (as_bits(master.to(weight.dtype)) != as_bits(weight)).any(-1) & ~(master.isnan() & weight.isnan())
        if bool(differs.any()):
            key = masters[span.row]
            wrong[key] = wrong.get(key, 0) + int(differs.sum())
    return [_fault(key, count, layout[key].numel, source.mismatch_mend_for(key.name)) for key, count in wrong.items()]


def _differing(source: Checkpoint, names: Collection[str] | None, part: int, of: int) -> list[Fault]:
    """The tensors of which several ranks hold copies that are not the same bits."""
    from ds_reshard.execution.deviation import Deviation, same_bits

    replicas = source.replicas()
    rows = [
        (key, holder)
        for holder, index in replicas.items()
        for key in index.layout.placements
        if key in source.layout
        and (names is None or key.name in names or key.kind == WEIGHT)
        and checksums(index, key) != checksums(source.index, key)
    ]
    rows = rows[part::of]
    if not rows:
        return []
    wrong = dict[tuple[TensorKey, Holder], Deviation]()
    for span in _side_by_side([((replicas[holder], key), (source.index, key)) for key, holder in rows]):
        if not same_bits(*span.values):
            wrong.setdefault(rows[span.row], Deviation()).add(span.start, *span.values)
    told = {at: f"{found.differing} elements differ, by at most {found.max_abs:g}" for at, found in wrong.items()}
    faults = (source.replica_fault(*at, told[at], partial(is_zero, replicas[at[1]])) for at in sorted(wrong))
    return [fault for fault in faults if fault is not None]


def left_out_faults(source: Checkpoint) -> Iterator[Fault]:
    """Yield a fault for each saved tensor that the content leaves out: a tied weight's second values, if they differ.

    Reads the weights that are saved under two names, and compares them. None of what faults of the content tell.
    """
    from ds_reshard.execution.deviation import same_bits

    content, index = source.content(), source.index
    read = {tensor.origin for tensor in content.tensors.values()}
    for key in (key for key in source.layout.placements if key not in read):
        first = content.tensors.get(key._replace(name=content.tied.get(key.name, "")))
        if first is None:
            mend = "leave out --names, and use a checkpoint of the same names"
            yield from (
                []
                if content.faults
                else [UnsupportedLayout.fault(str(key), "is left out of what a map is applied to", mend=mend)]
            )
        elif checksums(index, key) != checksums(index, first.origin):
            rows = [((index, key), (index, first.origin))] if source.layout[key].shape == first.shape else []
            spans = [same_bits(one, other.to(one.dtype)) for one, other in (s.values for s in _side_by_side(rows))]
            if not rows or not all(spans):
                what = f"has other values than {content.tied[key.name]}, to which it is tied"
                mend = "restore the model file from a copy: which of the two is right, no file says"
                yield CheckpointDamaged.fault(str(key), what, "the same bits", mend=mend)


def repeated(source: Checkpoint) -> list[Fault]:
    """Parts of the model that hold what another part holds, weights, masters and states, and were trained.

    Read are the masters and states of those whose weights have equal checksums.
    """
    faults = []
    for parts in source.independent_parts():
        seen: dict[object, str] = {}
        for name, keys in parts.items():
            marks = tuple(checksums(source.index, key) for key in keys if key.kind == WEIGHT)
            first = seen.setdefault(marks, name) if marks else name
            if first != name and _trained_alike(source.index, keys, parts[first]):
                what = f"has the weights, masters and states of {first}: what one had learned was given to both"
                said = ("values of its own", "the same bits")
                mend = "load the checkpoint that the run which saved this was resumed from; --against it shows more"
                faults.append(CheckpointDamaged.fault(f"{source.folder}: {name}", what, *said, mend=mend))
    return faults


def _trained_alike(index: Index, keys: Sequence[TensorKey], others: Sequence[TensorKey]) -> bool:
    from ds_reshard.execution.deviation import same_bits

    pairs = [pair for pair in zip(keys, others, strict=True) if pair[0].kind != WEIGHT]
    moved = False
    for span in _side_by_side([((index, one), (index, other)) for one, other in pairs]):
        if not same_bits(*span.values):
            return False
        moved = moved or (pairs[span.row][0].kind != MASTER and bool(span.values[0].any()))
    return moved


def is_zero(index: Index, key: TensorKey, *, memory_nbytes: int = 64 << 20) -> bool:
    """Whether a tensor is all zeros."""
    return not any(bool(span.values[0].any()) for span in _side_by_side([((index, key),)], memory_nbytes))


_Tensor = tuple[Index, TensorKey]


def _side_by_side(rows: Sequence[tuple[_Tensor, ...]], memory_nbytes: int = 64 << 20) -> Iterator[Span]:
    """The elements of several tensors each, of the same number."""
    from ds_reshard.operations.values import logical, read_spans

    columns = [tuple(logical(*one) for one in row) for row in rows]
    return read_spans(columns, threads=THREADS, memory_nbytes=memory_nbytes)


def _fault(key: TensorKey, count: int, numel: int, mend: str) -> Fault:
    what = f"{count} of {numel} elements are not the cast of their fp32 masters: masters, or states, are of others"
    return CheckpointDamaged.fault(f"{key.name}[{WEIGHT}]", what, "the cast of the master", "others", mend=mend)
