"""The files that are written together, and the plan that fills them: what a conversion does, and what a plan tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ds_reshard.containers.dcp_writer import ArchivesPlan, plan_archives
from ds_reshard.containers.plain_writer import PlainPlan
from ds_reshard.containers.safetensors_writer import SafetensorsPlan, plan_safetensors
from ds_reshard.containers.torch_zip_writer import ArchivePlan, plan_archive
from ds_reshard.errors import ConfigError, UnsupportedLayout, raise_faults
from ds_reshard.formats.dcp.names import ACCELERATE as FOLDERS
from ds_reshard.formats.dcp.target import dcp_target
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint
from ds_reshard.formats.fsdp.target import fsdp_target
from ds_reshard.formats.nanotron.arrangement import Wanted
from ds_reshard.formats.nanotron.target import nanotron_target
from ds_reshard.formats.zero.adopted import adopt, foreign_faults, foreign_key
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.target import FORMATS as ZERO_FORMATS
from ds_reshard.formats.zero.target import zero_target
from ds_reshard.formats.zero.universal_target import universal_target
from ds_reshard.formats.zero.weights_target import WEIGHTS, safetensors_target, torch_target
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import StorageRecord
from ds_reshard.model.target import Target, TargetFile, Unit
from ds_reshard.operations.crossing import from_nanotron, to_nanotron
from ds_reshard.operations.finding import find_listing
from ds_reshard.operations.options import ACCELERATE, DCP, FSDP, NANOTRON, UNIVERSAL, Asked
from ds_reshard.operations.portable import contents_of, foreign_of
from ds_reshard.operations.source import Source
from ds_reshard.planning.match import Gaps, plan_rank
from ds_reshard.planning.plan import Copy, Plan


def target_of(source: Source, asked: Asked) -> Target:
    """What is to be written. Raises UnsupportedLayout for what the format cannot hold."""
    if (source.nanotron is not None) is (asked.to == NANOTRON) and asked.names is not None:
        raise ConfigError("--names: names stay what they are within a framework; leave it out")
    if isinstance(source.saved, FsdpCheckpoint) and asked.to == FSDP:
        return fsdp_target(source.saved, source.dp if asked.dp is None else asked.dp)
    if asked.to in (DCP, ACCELERATE) and source.nanotron is None:
        files = source.dp if asked.dp is None else asked.dp
        made = dcp_target(contents_of(source), files, folders=FOLDERS if asked.to == ACCELERATE else None)
        return replace(made, notes=(*made.notes, *_left_out(source)))
    if source.nanotron is not None and asked.to in (*ZERO_FORMATS, UNIVERSAL, *WEIGHTS):
        make, optimizer = partial(_deepspeed, asked=asked), asked.to not in WEIGHTS
        return from_nanotron(source.nanotron, asked.names, make, optimizer=optimizer)
    if asked.to in (FSDP, DCP, ACCELERATE) or (source.saved is not None and asked.to == NANOTRON):
        fault = UnsupportedLayout.fault(
            source.folder,
            "is not converted to this: to fsdp folders of EasyR1 "
            "and verl are, to nanotron checkpoints of DeepSpeed, and to dcp all but nanotron's",
            found=f"--to {asked.to}",
            mend="convert it to zero1 first, or load it with ds_reshard.dcp.Reader",
        )
        raise_faults([fault], subject="converting")
    if asked.to == NANOTRON:
        return _nanotron(source, asked)
    if source.saved is not None:
        return _adopted(source, asked)
    assert source.zero is not None
    return _deepspeed(source.zero, asked, source.zero_shards)


def _deepspeed(checkpoint: ZeroCheckpoint, asked: Asked, shards: ZeroShards | None = None) -> Target:
    if asked.to in WEIGHTS:
        return (safetensors_target if asked.to == "safetensors" else torch_target)(checkpoint, asked.dtype)
    if asked.to == UNIVERSAL:
        return universal_target(checkpoint)
    dp = checkpoint.dp if asked.dp is None else asked.dp
    return zero_target(checkpoint, asked.to, dp, sub_group_size=asked.sub_group_size, shards=shards)


def _adopted(source: Source, asked: Asked) -> Target:
    """DeepSpeed's files of what FSDP has saved: its weights are the masters."""
    if asked.dp is None and asked.to in ZERO_FORMATS and source.saved is not None and source.saved.ranks is None:
        raise ConfigError(
            f"--dp: no file of {source.folder} tells how many ranks saved it; name the coming run's: --dp N"
        )
    foreign = foreign_of(source)
    if asked.to not in WEIGHTS:
        raise_faults(list(foreign_faults(foreign)), subject=f"converting {source.folder} to {asked.to}")
    target = _deepspeed(adopt(foreign), asked)
    wants = {key: foreign_key(foreign, wanted) for key, wanted in target.wants.items()}
    return replace(target, wants=wants, notes=(*target.notes, *_left_out(source)))


def _left_out(source: Source) -> Iterator[str]:
    if isinstance(source.saved, FsdpCheckpoint) and any(name.startswith("extra_state") for name in source.files):
        yield "the extra_state files (schedule and random states) are not carried over"


def _nanotron(source: Source, asked: Asked) -> Target:
    like = Source(find_listing(asked.like, None)).nanotron if asked.like is not None else None
    if asked.like is not None and like is None:
        raise ConfigError(f"--like {asked.like}: is no checkpoint of nanotron; name one, or leave it out")
    wanted = Wanted(dp=asked.dp, tp=asked.tp, pp=asked.pp, zero_stage=asked.zero_stage)
    if source.nanotron is not None:
        return nanotron_target(source.nanotron, wanted, like)
    assert source.zero is not None
    if like is None:
        what = "does not tell how nanotron cuts parameters, in which order it trains them, and with which config.yaml"
        fault = UnsupportedLayout.fault(
            source.folder, what, mend="save a step of the coming run, and name that checkpoint: --like DIR"
        )
        raise_faults([fault], subject="converting to nanotron")
    assert like is not None
    return to_nanotron(source.zero, like, wanted, asked.names)


FilePlan = ArchivePlan | ArchivesPlan | SafetensorsPlan | PlainPlan


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

    def __init__(self, source: Source, target: Target) -> None:
        self._source = source
        self._target = target
        self.wants: dict[str, dict[TensorKey, TensorKey]] = {family: {} for family in target.layout.shards}
        for key, origin in target.wants.items():
            self.wants[target.layout[key].family][key] = origin
        self._gaps = {family: Gaps(source.index, target.layout, wants) for family, wants in self.wants.items()}

    def plan(self, unit: Unit, archives: Sequence[FilePlan]) -> Plan:
        """The copies that fill the storages of a unit's archives; `buffer_of` names each."""
        filled = {buffer for file in unit.files for buffer in file.data}
        storages = [
            (buffer_of(storage, number, key), storage)
            for number, archive in enumerate(archives)
            for key, storage in archive.storages.items()
        ]
        fresh = {buffer: s.numel for buffer, s in storages if not s.path and buffer not in filled}
        plan = plan_rank(
            self._source.index,
            self._target.layout,
            unit.shard,
            self.wants[unit.family],
            sizes=fresh,
            gaps=self._gaps[unit.family],
        )
        copied = [_copy(storage, buffer) for buffer, storage in storages if storage.path and storage.nbytes]
        return Plan(copies=(*plan.copies, *copied), fills=plan.fills, checks=plan.checks)


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
