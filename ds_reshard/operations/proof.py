"""That states are of the parameters that they are said to be of: each weight is the cast of its fp32 master."""

from __future__ import annotations

from collections.abc import Collection

from ds_reshard.errors import CheckpointDamaged, Fault, raise_faults
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations.options import Reading


def prove(source: Checkpoint, names: Collection[str] | None = None) -> None:
    """Raise what `unproved` finds; of a checkpoint that needs no such proof nothing is read."""
    raise_faults(unproved(source, names), subject=f"checkpoint {source.folder}")


def unproved(source: Checkpoint, names: Collection[str] | None = None) -> list[Fault]:
    """The parameters, of `names` or all, whose weight is not the cast of its master, and copies that are not the same.

    Of parameters that are not in `names` copies of the weights are compared. Reads them in 64 MiB.
    """
    return _uncast(source, names) or _differing(source, names)


def _uncast(source: Checkpoint, names: Collection[str] | None) -> list[Fault]:
    layout = source.layout
    masters = [key for key in layout.placements if key.kind == MASTER and (names is None or key.name in names)]
    masters = [key for key in masters if layout[key].numel] if source.masters_are_cast else []
    if not masters:
        return []
    faults = list(source.unprovable())
    if faults:
        return faults
    from ds_reshard.execution.checksums import Ledger
    from ds_reshard.execution.deviation import as_bits
    from ds_reshard.operations.values import SpanReader, logical

    index, reading, wrong = source.index, Reading(), dict[TensorKey, int]()
    rows = [(logical(index, key), logical(index, TensorKey(name=key.name, kind=WEIGHT))) for key in masters]
    ledger, total = Ledger(), sum(column.nbytes for row in rows for column in row)
    reader = SpanReader(ledger, threads=reading.threads, memory_nbytes=64 << 20, progress=None, total=total)
    for span in reader.read(rows):
        master, weight = span.values
        differs = (as_bits(master.to(weight.dtype)) != as_bits(weight)).any(-1) & ~(master.isnan() & weight.isnan())
        if bool(differs.any()):
            key = masters[span.row]
            wrong[key] = wrong.get(key, 0) + int(differs.sum())
    return [_fault(key, count, layout[key].numel, source.unproved_mend) for key, count in wrong.items()]


def _differing(source: Checkpoint, names: Collection[str] | None) -> list[Fault]:
    """The tensors of which several ranks hold copies that are not the same bits."""
    from ds_reshard.execution.checksums import Ledger
    from ds_reshard.execution.deviation import same_bits
    from ds_reshard.operations.values import SpanReader, logical

    copies = source.replicas()
    if copies is None:
        return []
    keys = [key for key in copies.layout.placements if names is None or key.name in names or key.kind == WEIGHT]
    rows = [(logical(copies, key), logical(source.index, key._replace(copy=0))) for key in keys]
    reader = SpanReader(Ledger(), threads=Reading().threads, memory_nbytes=64 << 20, progress=None, total=0)
    wrong = {keys[span.row] for span in reader.read(rows) if not same_bits(*span.values)}
    what, mend = "is not the same on each rank that holds a copy of it", source.unproved_mend
    return [CheckpointDamaged.fault(str(key), what, "the same bits", "others", mend=mend) for key in sorted(wrong)]


def _fault(key: TensorKey, count: int, numel: int, mend: str) -> Fault:
    what = f"{count} of {numel} elements are not the cast of their fp32 masters: masters, or states, are of others"
    return CheckpointDamaged.fault(f"{key.name}[{WEIGHT}]", what, "the cast of the master", "others", mend=mend)
