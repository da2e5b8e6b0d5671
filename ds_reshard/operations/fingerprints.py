"""The fingerprint of every logical tensor of a checkpoint, whatever its layout."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, InternalError, ReshardError, faults_of, raise_faults
from ds_reshard.execution.interfaces import Saw
from ds_reshard.formats.zero.layout import whole
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.reports import Fingerprinted, TensorFingerprint
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.proof import prove
from ds_reshard.operations.source import find_listing, open_checkpoint

if TYPE_CHECKING:
    from ds_reshard.planning.copies import Copy
    from ds_reshard.planning.plan import Plan

_FILE = "fingerprint"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What is read, each byte once: `same` names those of `keys` whose bytes are another's (tied weights)."""

    plan: Plan
    keys: Sequence[TensorKey]
    same: Mapping[TensorKey, TensorKey]


def fingerprint(
    path: str,
    *,
    tag: str | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Fingerprinted:
    """The fingerprint of every logical tensor of the checkpoint in `path`; docs/fingerprint.md defines it.

    `path` and `tag` as for `inspect`. Reads each byte once and checks it against the checksum in its file, in memory of
    `reading.memory_nbytes`, and 2 MiB a thread. A tensor of a file that does not pass has none, and the faults say why.
    `shard` (number, of how many) takes a share of the tensors. Needs torch.

    Raises CheckpointNotFound, and what a load raises for files that are missing, of several saves or not as their
    format says.
    """
    source = open_checkpoint(find_listing(os.fspath(path), tag), states=False)
    prove(source)
    return _read(source, _planned(source, shard), reading or Reading(), progress)


def _planned(source: Checkpoint, shard: tuple[int, int]) -> _Planned:
    """Every tensor of the share whole into a buffer of its own."""
    from ds_reshard.planning.plan import plan_rank  # which needs numpy

    index = source.index
    wanted: dict[TensorKey, TensorKey] = {}
    same: dict[TensorKey, TensorKey] = {}
    first: dict[object, TensorKey] = {}
    placements = {}
    number, shards = shard
    keys = list(source.layout.placements)[number::shards]
    for key in keys:
        placement = source.layout[key]
        lies = index.open(placement.family, 0)[placement.buffer] if placement.replicated else key
        owner = first.setdefault((lies, placement.shape), key)
        if owner != key:
            same[key] = owner
            continue
        wanted[key] = key
        placements[key] = whole(key.name, key.kind, placement.shape, placement.dtype, family=_FILE, buffer=str(key))
    plan = plan_rank(index, Layout(placements, {_FILE: 1}), 0, wanted, sizes={})
    raise_faults(index.faults, subject=f"checkpoint {source.folder}")
    return _Planned(plan=plan, keys=keys, same=same)


def _read(source: Checkpoint, planned: _Planned, reading: Reading, progress: Progress | None) -> Fingerprinted:
    from ds_reshard.execution.buffers import read_tensor
    from ds_reshard.execution.checksums import verify
    from ds_reshard.execution.cuda import offline_device
    from ds_reshard.execution.fingerprint import Fingerprints, FingerprintTarget, fingerprint_of
    from ds_reshard.execution.threads import ThreadExecutor

    layout, sums, device = source.layout, Fingerprints[TensorKey](), offline_device(reading.device)
    targets = {str(key): FingerprintTarget(sums, key, device) for key in planned.keys if key not in planned.same}
    told = _told_of(progress, planned.plan.nbytes) if progress is not None else None
    executor = ThreadExecutor(threads=reading.threads, memory_nbytes=reading.memory_nbytes, checksum=True, saw=told)
    outcome = executor.execute(planned.plan, targets)
    faults = [*outcome.faults, *verify(outcome)]
    damaged = {fault.where for fault in faults}
    unsure = {copy.buffer for copy in planned.plan.copies if copy.path in damaged} if damaged else set()
    unread = [
        key
        for key in planned.keys
        if key not in planned.same
        and str(key) not in unsure
        and sums[key].nbytes != layout[key].numel * layout[key].dtype.itemsize
    ]
    raise_faults(map(_incomplete, unread), subject=f"checkpoint {source.folder}")
    found: list[TensorFingerprint] = []
    for key in planned.keys:
        placement = layout[key]
        owner = planned.same.get(key, key)
        shown = str(sums[owner]) if str(owner) not in unsure else None
        found.append(_told(key, placement.dtype.label, placement.shape, shown))
    for name, record in source.strided().items():
        key = TensorKey(name=name, kind="weight")
        try:
            shown = str(fingerprint_of(read_tensor(record).contiguous()))
        except ReshardError as error:
            shown = None
            faults += faults_of(error)
        found.append(_told(key, record.dtype.label, record.shape, shown))
    bare = sum(record.crc32 is None for record in outcome.slices)
    return Fingerprinted(
        folder=source.folder,
        tensors=tuple(sorted(found, key=lambda one: (one.name, one.kind))),
        notes=(*source.notes, *_unverified(bare)),
        faults=tuple(faults),
        bytes_read=outcome.bytes_read,
    )


def _told_of(progress: Progress, total: int) -> Saw:
    """What tells `progress` how much was read."""
    lock, done = threading.Lock(), 0

    def saw(copies: Sequence[Copy], views: Sequence[memoryview]) -> None:
        nonlocal done
        with lock:
            done += sum(copy.nbytes for copy in copies)
            progress(done, total)

    return saw


def _told(key: TensorKey, dtype: str, shape: tuple[int, ...], fingerprint: str | None) -> TensorFingerprint:
    return TensorFingerprint(name=key.name, kind=key.kind, dtype=dtype, shape=shape, fingerprint=fingerprint)


def _incomplete(key: TensorKey) -> Fault:
    mend = "report this with the checkpoint's `ds-reshard inspect` output"
    return InternalError.fault(str(key), "not all of its bytes were read, or some twice", mend=mend)


def _unverified(bare: int) -> Iterable[str]:
    if bare:
        yield f"{bare} records carry no checksum (safetensors has none, torch's may be off): not verified when read"
