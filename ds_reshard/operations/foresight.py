"""`plan`: what a conversion would read and write, by whom and in what time; nothing is read beyond metadata."""

from __future__ import annotations

import os

from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.gc_pause import uncollected
from ds_reshard.model.reports import ConversionPlan, UnitPlan
from ds_reshard.model.target import Asked, RunSizes, Unit
from ds_reshard.operations.options import Reading, refuse, refuse_memory
from ds_reshard.operations.source import Found, open_checkpoint
from ds_reshard.operations.units import Units, archive_of, target_of
from ds_reshard.planning.copies import Copies
from ds_reshard.planning.plan import window_nbytes


@uncollected()
def plan_listing(
    found: Found, *, asked: Asked, reading: Reading, bandwidth: float, shard: tuple[int, int]
) -> ConversionPlan:
    """What `convert` does with the same arguments: its plans are made, and none is carried out.

    A part of the plan, `shard` being (number, of how many), opens no shard of a ZeRO checkpoint but those that it
    reads, and the first.
    """
    refuse(asked)
    refuse_memory(reading.threads, reading.memory_nbytes)
    number, shards = shard
    in_parts = shards > 1 and found.format.in_parts
    source = open_checkpoint(found, whole=not in_parts)
    if in_parts:
        source.open_first()
    target = target_of(source, asked)
    units = Units(source, target)
    widest = 0.0
    plans = []
    for unit in target.units[number::shards]:
        source.open_for(unit.family, unit.shard)
        made, cast = _unit(found, units, unit)
        plans.append(made)
        widest = max(widest, cast)
    if in_parts:
        source.refuse()
    at_once = max(1, min(reading.threads, len(target.units)))
    window = window_nbytes(reading.memory_nbytes // at_once)
    executor = ThreadExecutor(threads=reading.threads, memory_nbytes=reading.memory_nbytes // 2, checksum=True)
    files = source.files
    coming = target.sizes or RunSizes(asked.dp or source.dp, asked.tp or 1, asked.pp or 1, asked.ep or 1)
    names = dict.fromkeys((*source.shard_names, *sorted({name for plan in plans for name in plan.reads})))
    return ConversionPlan(
        folder=found.folder,
        to=asked.to,
        dp=coming.dp,
        saved=RunSizes(source.dp, source.tp or 1, source.pp or 1, source.ep or 1),
        coming=coming,
        units=tuple(plans),
        bandwidth=bandwidth,
        sources={name: files[name] for name in names},
        buffer_nbytes=round(at_once * window + reading.threads * executor.chunk_nbytes * (1 + widest)),
        shard=shard,
    )


def _unit(found: Found, units: Units, unit: Unit) -> tuple[UnitPlan, float]:
    """What one unit reads and writes; and how many bytes a byte becomes, at most, where elements are cast."""
    archives = [archive_of(file) for file in unit.files]
    plan = units.plan(unit, archives)
    copies = Copies.of(plan.copies)
    of_path = copies.nbytes_of_paths()
    for check in plan.checks:
        of_path[check.record.path] = of_path.get(check.record.path, 0) + check.nbytes
    reads = {os.path.relpath(path, found.folder): nbytes for path, nbytes in of_path.items()}
    cast = max((into.itemsize / dtype.itemsize for dtype, into in copies.types_used if dtype is not into), default=0.0)
    made = UnitPlan(
        family=unit.family,
        shard=unit.shard,
        files=tuple(file.name for file in unit.files),
        reads=reads,
        bytes_written=sum(archive.nbytes for archive in archives),
    )
    return made, cast
