"""The files that are written together, and the plan that fills them: what a conversion does, and what a plan tells."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ds_reshard.containers.safetensors_writer import SafetensorsPlan, plan_safetensors
from ds_reshard.containers.torch_zip_writer import ArchivePlan, plan_archive
from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.target import Target, TargetFile, Unit, zero_target
from ds_reshard.formats.zero.universal_target import universal_target
from ds_reshard.formats.zero.weights_target import DTYPES, WEIGHTS, safetensors_target, torch_target
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import StorageRecord
from ds_reshard.operations.options import FORMATS, UNIVERSAL, refuse_memory
from ds_reshard.operations.source import Source
from ds_reshard.planning.match import plan_rank
from ds_reshard.planning.plan import Copy, Plan


def refuse(
    to: str, dp: int | None, sub_group_size: int | None, dtype: str | None, *, threads: int, memory_nbytes: int
) -> None:
    """Raise ConfigError for a format that is none, what it has not, or memory that is too little for the threads."""
    if to not in FORMATS:
        raise ConfigError(f"{to!r} is no format: --to {' | '.join(FORMATS)}")
    if dp is not None and to == UNIVERSAL:
        raise ConfigError("--dp: a universal checkpoint is loaded at any size; leave it out")
    if dp is not None and to in WEIGHTS:
        raise ConfigError(f"--dp: --to {to} writes whole tensors; leave it out")
    if dtype is not None and (to not in WEIGHTS or dtype not in DTYPES):
        raise ConfigError(f"--dtype {dtype}: takes {' | '.join(DTYPES)}, with --to {' | '.join(WEIGHTS)}")
    if sub_group_size is not None and to != "zero3":
        raise ConfigError(f"--sub-group-size: {to} has no sub-groups; leave it out, or --to zero3")
    refuse_memory(threads, memory_nbytes)


def target_of(checkpoint: ZeroCheckpoint, to: str, dp: int, sub_group_size: int | None, dtype: str | None) -> Target:
    """What is to be written. Raises UnsupportedLayout for what the format cannot hold."""
    if to in WEIGHTS:
        return (safetensors_target if to == "safetensors" else torch_target)(checkpoint, dtype)
    if to == UNIVERSAL:
        return universal_target(checkpoint)
    return zero_target(checkpoint, to, dp, sub_group_size=sub_group_size)


FilePlan = ArchivePlan | SafetensorsPlan


def archive_of(file: TargetFile) -> FilePlan:
    """Where everything lies in a file that is to be written."""
    tree = file.tree()
    if file.container == "safetensors":
        assert isinstance(tree, dict)
        return plan_safetensors(tree, {"format": "pt"})
    return plan_archive(os.path.basename(file.name).removesuffix(".pt"), tree)


class Units:
    """What each unit of a target reads from its source; `wants` gives the source tensor of each target tensor."""

    def __init__(self, source: Source, target: Target) -> None:
        self._source = source
        self._target = target
        self.wants: dict[str, dict[TensorKey, TensorKey]] = {family: {} for family in target.layout.shards}
        for key, origin in target.wants.items():
            self.wants[target.layout[key].family][key] = origin

    def plan(self, unit: Unit, archives: Sequence[FilePlan]) -> Plan:
        """The copies that fill the storages of a unit's archives; `buffer_of` names each."""
        storages = [storage for archive in archives for storage in archive.storages.values()]
        filled = {buffer for file in unit.files for buffer in file.data}
        fresh = {s.key: s.numel for s in storages if not s.path and s.key not in filled}
        plan = plan_rank(
            self._source.index,
            self._target.layout,
            unit.shard,
            self.wants[unit.family],
            sizes=fresh,
        )
        copied = [_copy(storage) for storage in storages if storage.path and storage.nbytes]
        return Plan(copies=(*plan.copies, *copied), fills=plan.fills, checks=plan.checks)


def buffer_of(storage: StorageRecord) -> str:
    """The buffer that a storage of a new file is: its own name, or where it is copied from."""
    return storage.key if not storage.path else f"{storage.path}\0{storage.key}"


def _copy(storage: StorageRecord) -> Copy:
    record = Record(path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32)
    return Copy(
        record=record, byte_offset=storage.byte_offset, numel=storage.nbytes, dtype=ElementType.UINT8,
        buffer=buffer_of(storage), element_offset=0, target_dtype=ElementType.UINT8,
    )  # fmt: skip
