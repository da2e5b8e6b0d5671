"""The files that are written together, and the plan that fills them: what a conversion does, and what a plan tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ds_reshard.containers.dcp_directory import ArchivesPlan, plan_archives
from ds_reshard.containers.safetensors import plan_safetensors
from ds_reshard.containers.torch_zip_writer import ArchivePlan, PlainPlan, plan_archive
from ds_reshard.errors import ConfigError
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import ZERO_FILE, Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, StorageRecord
from ds_reshard.model.reports import ConversionPlan, UnitPlan
from ds_reshard.model.target import ConversionRequest, RunSizes, Target, TargetFile, Unit
from ds_reshard.operations.formats import WRITERS
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.options import Reading, refuse, refuse_memory
from ds_reshard.operations.shape_map import ShapeMap, coming_run
from ds_reshard.operations.source import Found, find_listing, open_checkpoint, open_weights
from ds_reshard.planning.copies import Copies, Copy
from ds_reshard.planning.plan import Match, Plan, Planner, window_nbytes


@gc_disabled()
def target_of(source: Checkpoint, asked: ConversionRequest) -> Target:
    """What is to be written. Raises UnsupportedLayout for what the format cannot hold."""
    like = open_checkpoint(find_listing(asked.like, None)) if asked.like is not None else None
    target = source.target(asked, like)
    if target is not None:
        if asked.names is not None:
            raise ConfigError("--names: names stay what they are within a framework; leave it out")
        return target
    content = source.content()
    if asked.names is None:
        return WRITERS[asked.to](content, asked, like, [])
    names = read_name_map(asked.names)
    mapped = names.apply(content, source.layout, coming_run(like.content() if like is not None else None))
    target = WRITERS[asked.to](mapped.content, asked, like, mapped.faults)
    layout = mapped.layout if mapped.layout is not source.layout else None
    notes = (*target.notes, *([_ORDER] if isinstance(names, ShapeMap) and like is None else []))
    basis = {**target.basis, "names": names.digest}
    return replace(target, basis=basis, source_layout=layout, notes=notes, padding=mapped.padding)


_ORDER = "parameters are in the order of the map, which DeepSpeed goes by: load this folder with ds_reshard"


FilePlan = ArchivePlan | ArchivesPlan | PlainPlan


def archive_of(file: TargetFile) -> FilePlan:
    """Where everything lies in a file that is to be written."""
    tree = file.tree()
    if file.container == "safetensors":
        assert isinstance(tree, dict)
        return plan_safetensors(tree, file.metadata)
    if file.container == "archives":
        assert isinstance(tree, list)
        return plan_archives(tree)
    if file.container == "plain":
        assert isinstance(tree, bytes)
        return PlainPlan(data=tree)
    return plan_archive(os.path.basename(file.name).removesuffix(".pt"), tree)


class Units:
    """What each unit of a target reads from its source; `wants` gives the source tensor of each target tensor."""

    def __init__(self, source: Checkpoint, target: Target) -> None:
        self._source = source
        self._target = target
        self.wants: dict[str, dict[TensorKey, TensorKey]] = {family: {} for family in target.layout.shards}
        for key, origin in target.sources.items():
            self.wants[target.layout[key].family][key] = origin
        self.index = source.index
        if target.source_layout is not None:
            self.index = source.index.with_layout(target.source_layout)
        self._planners = {family: Planner(self.index, target.layout, wants) for family, wants in self.wants.items()}

    def wanted(self, family: str) -> Sequence[Match]:
        """What the units of a family want, and where the source has it."""
        return self._planners[family].matches

    def plan(self, unit: Unit, archives: Sequence[FilePlan]) -> Plan:
        """The copies that fill the storages of a unit's archives; `buffer_of` names each."""
        filled = {buffer for file in unit.files for buffer in file.data}
        storages = [
            (buffer_of(storage, number, key), storage)
            for number, archive in enumerate(archives)
            for key, storage in archive.storages.items()
        ]
        fresh = {buffer: s.numel for buffer, s in storages if not s.path and buffer not in filled}
        plan = self._planners[unit.family].plan(unit.shard, sizes=fresh)
        copied = [_copy(storage, buffer) for buffer, storage in storages if storage.path and storage.nbytes]
        copies = Copies.of(plan.copies).merge(Copies.of(copied)) if copied else plan.copies
        return Plan(copies=copies, fills=plan.fills, checks=plan.checks)


def buffer_of(storage: StorageRecord, number: int, key: str) -> str:
    """The buffer that a storage of a new file is: its own name, or of one that is copied, its place in the unit.

    `number` is that of the file in its unit, `key` the storage's there.
    """
    return storage.key if not storage.path else f"{number}\0{key}"


def _copy(storage: StorageRecord, buffer: str) -> Copy:
    record = Record(path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32)
    return Copy(
        record=record,
        byte_offset=storage.byte_offset,
        numel=storage.nbytes,
        dtype=ElementType.UINT8,
        buffer=buffer,
        element_offset=0,
        target_dtype=ElementType.UINT8,
    )


@gc_disabled()
def plan_listing(
    found: Found, *, asked: ConversionRequest, reading: Reading, bandwidth: float, shard: tuple[int, int]
) -> ConversionPlan:
    """What `convert` does with the same arguments: its plans are made, and none is carried out.

    A part of the plan, `shard` being (number, of how many), opens no shard of a ZeRO checkpoint but those that it
    reads, and the first.
    """
    refuse(asked)
    refuse_memory(reading.threads, reading.memory_nbytes)
    number, shards = shard
    in_parts = shards > 1 and found.format.in_parts
    source = (open_weights if asked.weights_only else open_checkpoint)(found, whole=not in_parts)
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
        source.raise_shard_faults()
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
    of_path.pop(ZERO_FILE, None)
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
