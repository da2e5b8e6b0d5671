"""The fingerprint of every logical tensor of a checkpoint, whatever its layout."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, InternalError, ReshardError, faults_of, raise_faults
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.model.checkpoint import Checkpoint, records_of
from ds_reshard.model.content import WEIGHT, Content
from ds_reshard.model.index import ZERO_FILE, Index
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.region import Box
from ds_reshard.model.reports import Fingerprinted, TensorFingerprint
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.proof import left_out_faults, prove
from ds_reshard.operations.runner import Told, in_shares
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import find_listing, open_checkpoint

if TYPE_CHECKING:
    from ds_reshard.execution.fingerprint import Fingerprint
    from ds_reshard.planning.plan import Plan

_FILE = "fingerprint"


def fingerprint(
    path: str,
    *,
    tag: str | None = None,
    names: str | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Fingerprinted:
    """The fingerprint of every logical tensor of the checkpoint in `path`; docs/fingerprint.md defines it.

    `path` and `tag` as for `inspect`. Reads each byte once and checks it against the checksum in its file, in memory of
    `reading.memory_nbytes`, and 2 MiB a thread. A tensor of a file that does not pass has none, and the faults say why.
    `names` is a map, as for `convert`: the tensors are then those of its other side, and faults of the answer say what
    it cannot take along. `shard` (number, of how many) takes a share of the tensors. Needs torch.

    Raises CheckpointNotFound, and what a load raises for files that are missing, of several saves or not as their
    format says; ModelMismatch if the map does not fit.
    """
    source = open_checkpoint(find_listing(os.fspath(path), tag), states=False)
    prove(source)
    index, content = (source.index, None) if names is None else _mapped(source, names)
    number, shards = shard
    keys = list(index.layout.placements)[number::shards]
    return _read(source, index, content, keys, reading or Reading(), progress)


def _mapped(source: Checkpoint, names: str) -> tuple[Index, Content]:
    """Return the content as a map has it, and an index of its tensors but those that are cast from others, or them."""
    mapped = read_name_map(names).apply(source.content(), source.layout, Coming())
    raise_faults(mapped.faults, subject=f"checkpoint {source.folder}")
    tensors = {key: tensor.origin for key, tensor in mapped.content.tensors.items() if tensor.origin.kind == key.kind}
    placements = {key: mapped.layout[origin].renamed(key) for key, origin in tensors.items()}
    return source.index.with_layout(Layout(placements, mapped.layout.shards)), mapped.content


def _owners(index: Index, keys: Sequence[TensorKey]) -> dict[TensorKey, TensorKey]:
    """For each tensor that one whose bytes are its own: the first name of a tied weight."""
    first: dict[object, TensorKey] = {}
    owners = {}
    for key in keys:
        placement = index.layout[key]
        lies = index.open(placement.family, 0)[placement.buffer] if placement.replicated else key
        owners[key] = first.setdefault((lies, placement.shape), key)
    return owners


def _planned(index: Index, keys: Sequence[TensorKey], elsewhere: frozenset[TensorKey] = frozenset()) -> Plan:
    """Each tensor whole into a buffer of its own; those `elsewhere` are read by other shares."""
    from ds_reshard.planning.plan import Planner  # which needs numpy

    placements = {}
    for key in keys:
        placement = index.layout[key]
        box, cut = Box.whole(placement.shape), Cut(chunk=max(1, prod(placement.shape)))
        placements[key] = Placement(key, placement.shape, placement.dtype, _FILE, str(key), cut, box)
    wanted = dict(zip(placements, placements, strict=True))
    plan = Planner(index, Layout(placements, {_FILE: 1}), wanted, elsewhere=elsewhere).plan(0, sizes={})
    raise_faults(index.faults, subject="reading tensors")
    return plan


def _part(
    index: Index, every: Sequence[TensorKey], items: Sequence[int], reading: Reading, told: Told
) -> tuple[Outcome, dict[TensorKey, Fingerprint]]:
    """Read some of the tensors, each byte once: what was read, and the sums of all their bytes."""
    from ds_reshard.execution.cuda import offline_device
    from ds_reshard.execution.fingerprint import Fingerprints, FingerprintTarget
    from ds_reshard.execution.threads import ThreadExecutor

    keys = [every[item] for item in items]
    plan = _planned(index, keys, frozenset(every).difference(keys))
    sums, device = Fingerprints[TensorKey](), offline_device(reading.device)
    targets = {str(key): FingerprintTarget(sums, key, device) for key in keys}
    lock, tell = threading.Lock(), told if told is not None else lambda done: None

    def saw(copies: object, views: object) -> None:
        with lock:
            tell(executor.nbytes_read)

    how = saw if told is not None else None
    executor = ThreadExecutor(threads=reading.threads, memory_nbytes=reading.memory_nbytes, checksum=True, saw=how)
    outcome = executor.execute(plan, targets)
    tell(outcome.bytes_read)
    return outcome, {key: sums[key] for key in keys}


def _read(
    source: Checkpoint,
    index: Index,
    content: Content | None,
    keys: Sequence[TensorKey],
    reading: Reading,
    progress: Progress | None,
) -> Fingerprinted:
    """Read the tensors of the index, and the records that none of them lies in if it has a map's `content`."""
    from ds_reshard.execution.buffers import read_tensor
    from ds_reshard.execution.checksums import compare_records, verify
    from ds_reshard.execution.fingerprint import fingerprint_of

    layout, owners = index.layout, _owners(index, keys)
    own = [key for key in keys if owners[key] == key]
    sizes = [layout[key].numel * layout[key].dtype.itemsize for key in own]
    parts = in_shares(
        lambda mine, how, told: _part(index, own, mine, how, told),
        sizes,
        reading,
        progress=progress,
        subject=f"checkpoint {source.folder}",
    )
    outcome = Outcome()
    sums: dict[TensorKey, Fingerprint] = {}
    for read, found_there in parts:
        outcome.add(read)
        sums |= found_there
    faults = [*outcome.faults, *verify(outcome)]
    if content is not None:
        others = records_of(source.index) - records_of(index)
        faults += compare_records(record for record in others if record.crc32 is not None)
    damaged = {fault.where for fault in faults}
    unsure = {copy.buffer for copy in _planned(index, own).copies if copy.path in damaged} if damaged else set()
    unread = [key for key, size in zip(own, sizes, strict=True) if str(key) not in unsure and sums[key].nbytes != size]
    raise_faults(map(_incomplete, unread), subject=f"checkpoint {source.folder}")
    found: list[TensorFingerprint] = []
    for key in keys:
        placement, owner = layout[key], owners[key]
        shown = str(sums[owner]) if str(owner) not in unsure else None
        found.append(_told(key, placement.dtype.label, placement.shape, shown))
    if content is not None:
        known = {one.name: one for one in found if one.kind == WEIGHT}
        found += [replace(known[first], name=name) for name, first in content.tied.items() if first in known]
        faults += [*content.faults, *left_out_faults(source)]
    for name, record in source.non_contiguous_weights().items():
        key = TensorKey(name=name, kind="weight")
        try:
            shown = str(fingerprint_of(read_tensor(record).contiguous()))
        except ReshardError as error:
            shown = None
            faults += faults_of(error)
        found.append(_told(key, record.dtype.label, record.shape, shown))
    bare = sum(record.crc32 is None and record.path != ZERO_FILE for record in outcome.slices)
    return Fingerprinted(
        folder=source.folder,
        tensors=tuple(sorted(found, key=lambda one: (one.name, one.kind))),
        notes=(*(source.notes if content is None else content.notes), *_unverified(bare)),
        faults=tuple(faults),
        bytes_read=outcome.bytes_read,
    )


def _told(key: TensorKey, dtype: str, shape: tuple[int, ...], fingerprint: str | None) -> TensorFingerprint:
    return TensorFingerprint(name=key.name, kind=key.kind, dtype=dtype, shape=shape, fingerprint=fingerprint)


def _incomplete(key: TensorKey) -> Fault:
    mend = "report this with the checkpoint's `ds-reshard inspect` output"
    return InternalError.fault(str(key), "not all of its bytes were read, or some twice", mend=mend)


def _unverified(bare: int) -> Iterable[str]:
    if bare:
        yield f"{bare} records carry no checksum (safetensors has none, torch's may be off): not verified when read"
