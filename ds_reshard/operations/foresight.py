"""`plan`: what a conversion would read and write, by whom and in what time; nothing is read beyond metadata."""

from __future__ import annotations

import os

from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.conversion_plan import ConversionPlan, UnitPlan
from ds_reshard.model.target import Unit
from ds_reshard.operations.options import Asked, Reading, refuse_memory
from ds_reshard.operations.source import Found, Source
from ds_reshard.operations.units import Units, archive_of, target_of


def plan_listing(listing: Found, *, asked: Asked, reading: Reading, bandwidth: float) -> ConversionPlan:
    """What `convert` does with the same arguments: its plans are made, and none is carried out."""
    asked.refuse()
    refuse_memory(reading.threads, reading.memory_nbytes)
    source = Source(listing)
    target = target_of(source, asked)
    units = Units(source, target)
    widest = 0.0
    plans = []
    for unit in target.units:
        made, cast = _unit(listing, units, unit)
        plans.append(made)
        widest = max(widest, cast)
    chunk = ThreadExecutor(threads=reading.threads, memory_nbytes=reading.memory_nbytes, checksum=True).chunk_nbytes
    files = source.files
    names = dict.fromkeys((*source.shard_names, *sorted({name for plan in plans for name in plan.reads})))
    return ConversionPlan(
        folder=listing.folder, to=asked.to, dp=source.dp if asked.dp is None else asked.dp, units=tuple(plans),
        bandwidth=bandwidth, sources={name: files[name] for name in names},
        buffer_nbytes=round(reading.threads * chunk * (1 + widest)),
    )  # fmt: skip


def _unit(listing: Found, units: Units, unit: Unit) -> tuple[UnitPlan, float]:
    """What one unit reads and writes; and how many bytes a byte becomes, at most, where elements are cast."""
    archives = [archive_of(file) for file in unit.files]
    plan = units.plan(unit, archives)
    reads: dict[str, int] = {}
    read = [(copy.record, copy.nbytes) for copy in plan.copies] + [
        (check.record, check.nbytes) for check in plan.checks
    ]
    for record, nbytes in read:
        name = os.path.relpath(record.path, listing.folder)
        reads[name] = reads.get(name, 0) + nbytes
    cast = max((copy.target_dtype.itemsize / copy.dtype.itemsize for copy in plan.copies
                if copy.dtype is not copy.target_dtype), default=0.0)  # fmt: skip
    made = UnitPlan(
        family=unit.family, shard=unit.shard, files=tuple(file.name for file in unit.files), reads=reads,
        bytes_written=sum(archive.nbytes for archive in archives),
    )  # fmt: skip
    return made, cast
