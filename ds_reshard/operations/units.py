"""The files that are written together, and the plan that fills them: what a conversion does, and what a plan tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_reshard.containers.dcp_writer import ArchivesPlan, plan_archives
from ds_reshard.containers.plain_writer import PlainPlan
from ds_reshard.containers.safetensors_writer import SafetensorsPlan, plan_safetensors
from ds_reshard.containers.torch_zip_writer import ArchivePlan, plan_archive
from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.dcp.names import ACCELERATE as FOLDERS
from ds_reshard.formats.dcp.target import dcp_target
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint
from ds_reshard.formats.fsdp.target import fsdp_target
from ds_reshard.formats.nanotron.adopted import adopt
from ds_reshard.formats.nanotron.arrangement import Wanted
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.digest import digest_of
from ds_reshard.formats.nanotron.target import nanotron_target
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.content import as_zero, optimizer_faults
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.target import FORMATS as ZERO_FORMATS
from ds_reshard.formats.zero.target import zero_target
from ds_reshard.formats.zero.universal_target import universal_target
from ds_reshard.formats.zero.weights_target import WEIGHTS, safetensors_target, torch_target
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import SCHEDULER, Content
from ds_reshard.model.index import Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import StorageRecord
from ds_reshard.model.target import Target, TargetFile, Unit
from ds_reshard.operations.content import content_of
from ds_reshard.operations.finding import find_listing
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.options import ACCELERATE, DCP, FSDP, NANOTRON, UNIVERSAL, Asked
from ds_reshard.operations.source import Source
from ds_reshard.planning.match import Gaps, plan_rank
from ds_reshard.planning.plan import Copy, Plan


def target_of(source: Source, asked: Asked) -> Target:
    """What is to be written. Raises UnsupportedLayout for what the format cannot hold."""
    same = _of_its_own(source, asked)
    if same is not None:
        if asked.names is not None:
            raise ConfigError("--names: names stay what they are within a framework; leave it out")
        return same
    if asked.to == FSDP:
        mend = "--to dcp, which FSDP2 loads, or load it with ds_reshard.dcp.Reader"
        what = "is not converted to this: files of EasyR1 and verl are made of theirs alone"
        fault = UnsupportedLayout.fault(source.folder, what, found=f"--to {asked.to}", mend=mend)
        raise_faults([fault], subject="converting")
    content, names = content_of(source), None
    faults = [] if asked.to in WEIGHTS else list(content.faults)
    if asked.names is not None:
        names = read_name_map(asked.names)
        faults += names.faults(content)
        content = names.applied(content)
    target = _written(source, content, asked, faults)
    basis = {**target.basis, **({"names": names.digest} if names is not None else {})}
    return replace(target, basis=basis)


def _of_its_own(source: Source, asked: Asked) -> Target | None:
    """What a format makes of its own checkpoints, with all that it alone knows of them; None for another format."""
    if isinstance(source.saved, FsdpCheckpoint) and asked.to == FSDP:
        return fsdp_target(source.saved, source.dp if asked.dp is None else asked.dp)
    if source.nanotron is not None and asked.to == NANOTRON:
        return nanotron_target(source.nanotron, _wanted(asked), _like(asked))
    if source.zero is not None and asked.to in (*ZERO_FORMATS, UNIVERSAL, *WEIGHTS):
        return _deepspeed(source.zero, asked, source.zero_shards)
    return None


def _written(source: Source, content: Content, asked: Asked, faults: list[Fault]) -> Target:
    """What any content is made into; its tensors are read from where the source has them.

    Raises `faults` with those that the format adds.
    """
    subject = f"converting {source.folder} to {asked.to}"
    if asked.to == NANOTRON:
        return _nanotron(content, asked, faults)
    if asked.to not in (DCP, ACCELERATE, *WEIGHTS):
        faults += optimizer_faults(content)
    raise_faults(faults, subject=subject)
    if asked.to in (DCP, ACCELERATE):
        files = source.dp if asked.dp is None else asked.dp
        made = dcp_target(content, files, folders=FOLDERS if asked.to == ACCELERATE else None)
        return replace(made, notes=(*made.notes, *content.notes))
    if asked.to in WEIGHTS:
        return _read_from(_deepspeed(as_zero(content), asked), content)
    if asked.dp is None and asked.to in ZERO_FORMATS and content.ranks is None:
        raise ConfigError(
            f"--dp: no file of {source.folder} tells how many ranks saved it; name the coming run's: --dp N"
        )
    target = _read_from(_deepspeed(as_zero(content), asked), content)
    tag = content.tag
    pointers = dict.fromkeys(target.pointers, tag)
    return replace(target, folder=tag, pointers=pointers, notes=(*target.notes, *_said(content)))


def _read_from(target: Target, content: Content) -> Target:
    return replace(target, wants={key: content.tensors[wanted].origin for key, wanted in target.wants.items()})


def _said(content: Content) -> Iterator[str]:
    """What becomes of a content in DeepSpeed's files, and what is left out."""
    groups = len(content.facts.groups) if content.facts is not None else 0
    if content.schedule is not None:
        yield f"the scheduler is the state of a LambdaLR with {groups} param groups: the coming run's must be one, too"
    elif SCHEDULER not in content.entries:
        yield "no scheduler was saved, and none is written"
    if content.batch_size is not None:
        yield f"the saving run's global batch was {content.batch_size} samples: train_batch_size {content.batch_size}"
    if content.own:
        yield f"entries of the saving run are in the client state: {', '.join(content.own)}"
    yield from content.notes


def _deepspeed(checkpoint: ZeroCheckpoint, asked: Asked, shards: ZeroShards | None = None) -> Target:
    if asked.to in WEIGHTS:
        return (safetensors_target if asked.to == "safetensors" else torch_target)(checkpoint, asked.dtype)
    if asked.to == UNIVERSAL:
        return universal_target(checkpoint)
    dp = checkpoint.dp if asked.dp is None else asked.dp
    return zero_target(checkpoint, asked.to, dp, sub_group_size=asked.sub_group_size, shards=shards)


def _wanted(asked: Asked) -> Wanted:
    return Wanted(dp=asked.dp, tp=asked.tp, pp=asked.pp, zero_stage=asked.zero_stage)


def _like(asked: Asked) -> NanotronCheckpoint | None:
    like = Source(find_listing(asked.like, None)).nanotron if asked.like is not None else None
    if asked.like is not None and like is None:
        raise ConfigError(f"--like {asked.like}: is no checkpoint of nanotron; name one, or leave it out")
    return like


def _nanotron(content: Content, asked: Asked, faults: list[Fault]) -> Target:
    """A content as a checkpoint of nanotron, arranged as that of `--like` is; raises `faults` with its own."""
    like = _like(asked)
    if like is None:
        what = "does not tell how nanotron cuts parameters, in which order it trains them, and with which config.yaml"
        mend = "save a step of the coming run, and name that checkpoint: --like DIR"
        raise_faults([UnsupportedLayout.fault(content.folder, what, mend=mend)], subject="converting")
    assert like is not None
    adoption = adopt(content, like)
    raise_faults([*faults, *adoption.faults], subject=f"converting {content.folder} to nanotron")
    assert adoption.checkpoint is not None
    target = nanotron_target(adoption.checkpoint, _wanted(asked))
    tag = str(content.steps)
    return replace(
        target,
        wants={key: adoption.origins[wanted] for key, wanted in target.wants.items()},
        folder=tag,
        pointers=dict.fromkeys(target.pointers, tag),
        notes=(*adoption.notes, *target.notes, *content.notes),
        basis={"like": digest_of(like)},
    )


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
