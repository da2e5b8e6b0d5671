"""The seam of `torch.distributed.checkpoint.save`: each rank reads again what it has written, and all agree.

Of what several ranks give under one name torch writes one rank's (`dedup_save_plans`, torch/distributed/checkpoint/
_dedup_save_plans.py, 2.13), whatever the others hold: those are compared by digests.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

from ds_reshard.containers.dcp_directory import Chunk, Directory, SavedTensor, read_directory
from ds_reshard.containers.digests import digest
from ds_reshard.containers.pickle_rules import ALLOW_ALL
from ds_reshard.containers.positioned import PositionedBytes
from ds_reshard.containers.torch_zip import TorchArchive
from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    FingerprintMismatch,
    ReshardError,
    as_faults,
    faults_of,
    raise_faults,
)
from ds_reshard.hooks import Call
from ds_reshard.model.facts import canonical
from ds_reshard.model.layout import check_cover
from ds_reshard.model.nesting import children
from ds_reshard.model.records import ObjectRecord, StorageRecord, TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.operations.ranks import agree, attempt, gather, run_on_all

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_MEMORY_NBYTES = 64 << 20
_MEND = "save again into another folder, and do not resume from this one"
_ONE_FOR_ALL = "make it equal on all ranks before the save, or save each rank's own under its own key, or as a DTensor"
logger = logging.getLogger("ds_reshard")


class _Seen(NamedTuple):
    """What one rank tells: why it cannot verify, its faults, a digest of what it holds whole, and whether another rank
    has written a part of a tensor that it holds.
    """

    unable: str
    faults: list[Fault]
    whole: bytes
    has_parts: bool


def save(call: Call) -> object:
    """Save as torch does, then verify: `_save_state_dict`. Collective, as it is.

    Every tensor that a rank has written is read again and compared with what its planner gave to be written, bit for
    bit; the boxes of each tensor add up to its shape; what a rank holds and another has written is equal on both. A
    save that cannot be verified is one warning: into storage that is no folder of files of torch.save, or by a planner
    that does not tell its plan. Raises CheckpointDamaged, CheckpointNotFound, FingerprintMismatch, and what reading a
    damaged file raises: the same on each rank.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = cast("SavePlanner", call["planner"] or DefaultSavePlanner())
    with _local_plans(planner) as plans:
        metadata = call(planner=planner)
    group = cast("ProcessGroup | None", call["process_group"])
    several = not call["no_dist"] and dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if several else (0, 1)
    folder = _folder(call["storage_writer"])
    written = getattr(planner, "plan", None)
    unable = _unable(folder, written, call.arguments.get("use_collectives", True))
    held = _Held(plans[-1] if plans and not unable else None, written, planner)
    faults = [] if unable else _faults(folder, cast("SavePlan", written), planner, rank, size)
    whole, failed, _ = attempt(held.whole) if size > 1 and not faults else (b"", [], None)
    seen = _Seen(unable, faults + failed, whole or b"", bool(held.parts))
    everyone = gather(seen, group) if several else [seen]
    if rank == 0:
        for reason in sorted({one.unable for one in everyone if one.unable}):
            logger.warning("verify_after_save: what was saved in %s is not verified: %s", folder or "storage", reason)
    raise_faults([fault for one in everyone for fault in one.faults], subject=f"verifying {folder}")
    alike = len({one.whole for one in everyone}) == 1
    if not any(one.unable for one in everyone) and (not alike or any(one.has_parts for one in everyone)):
        _refuse_lost(folder, held, group, parts_only=alike)
    return metadata


def _refuse_lost(folder: str, held: _Held, group: ProcessGroup | None, *, parts_only: bool) -> None:
    """Raise FingerprintMismatch where ranks hold other values than those that were written for them. Collective."""
    subject = f"verifying {folder}"
    rows = run_on_all(lambda: held.rows(parts_only=parts_only), group, subject=subject)
    everyone = gather(rows, group)
    agree(run_on_all(lambda: list(held.unlike(folder, everyone)), group, subject=subject), group, subject=subject)


@contextmanager
def _local_plans(planner: SavePlanner) -> Iterator[list[SavePlan]]:
    """Record the plans that the planner makes inside the `with` block, before torch removes what other ranks write.

    With `enable_plan_caching` a planner returns an empty plan if nothing has changed; its cached plan is then recorded.
    """
    found: list[SavePlan] = []
    create, before = planner.create_local_plan, dict(vars(planner))

    def create_local_plan() -> SavePlan:
        plan = create()
        found.append(plan if getattr(plan, "usable", True) else getattr(planner, "plan", plan))
        return plan

    planner.create_local_plan = create_local_plan  # type: ignore[method-assign]
    try:
        yield found
    finally:
        if "create_local_plan" in before:
            planner.create_local_plan = create  # type: ignore[method-assign]
        else:
            del planner.create_local_plan


class _Held:
    """What this rank gave to be saved: `written` by itself, or by other ranks `passed`, of which `parts` are no whole
    tensors, as shards that several ranks hold.
    """

    def __init__(self, plan: SavePlan | None, written: SavePlan | None, planner: SavePlanner) -> None:
        self._planner = planner
        self._written = {item.index: item for item in written.items} if plan is not None and written is not None else {}
        items = [*plan.items, *_unplanned(planner, plan)] if plan is not None else []
        self._whole = [item for item in items if _is_whole(item)]
        self._passed = [item for item in items if item.index not in self._written]
        self.parts = [item for item in self._passed if not _is_whole(item)]
        self._objects: dict[bytes, bytes] = {}
        self._digests: dict[object, bytes] = {}

    def whole(self) -> bytes:
        """A digest of all whole tensors and objects: alike on ranks that hold the same, as they do of most saves."""
        return digest(sorted((name, self._digest(item)) for name, item in self._named(self._whole)))

    def rows(self, *, parts_only: bool) -> NDArray[numpy.uint64]:
        """A row of two numbers for what another rank has written: of its name, and of what this rank holds."""
        import numpy

        named = self._named(self.parts if parts_only else self._passed)
        rows = b"".join(digest(name)[:8] + self._digest(item)[:8] for name, item in named)
        return numpy.frombuffer(rows, numpy.uint64).reshape(-1, 2)

    def unlike(self, folder: str, rows: Sequence[NDArray[numpy.uint64]]) -> Iterator[Fault]:
        """A fault for each thing that this rank has written, and of which another rank holds another value."""
        import numpy

        mine = {
            int.from_bytes(digest(name)[:8], sys.byteorder): (name, item)
            for name, item in self._named(self._written.values())
        }
        names = numpy.array(list(mine), numpy.uint64)
        ranks: dict[int, list[int]] = {}
        for rank, of_rank in enumerate(rows):
            for key, value in of_rank[numpy.isin(of_rank[:, 0], names)].tolist():
                if value != int.from_bytes(self._digest(mine[key][1])[:8], sys.byteorder):
                    ranks.setdefault(key, []).append(rank)
        for key, differing in ranks.items():
            what = f"{mine[key][0]}: ranks hold different values under this name, of which one was saved"
            shown = ", ".join(map(str, differing[:8])) + (", ..." if len(differing) > 8 else "")
            found = f"others on rank {shown}"
            yield FingerprintMismatch.fault(folder, what, "one value", found, mend=_ONE_FOR_ALL)

    def _named(self, items: Iterable[WriteItem]) -> list[tuple[str, WriteItem]]:
        return [(_name(item), item) for item in items]

    def _digest(self, item: WriteItem) -> bytes:
        """16 bytes that are the same for equal values: of objects, however they were pickled."""
        import torch

        from ds_reshard.execution.fingerprint import fingerprint_of

        if item.index in self._digests:
            return self._digests[item.index]
        value = self._planner.resolve_data(item)
        if isinstance(value, torch.Tensor) and _is_plain(value):
            found = digest(_type(value), fingerprint_of(value.detach().contiguous()).value)
        else:
            if isinstance(value, torch.Tensor):
                torch.save(value, file := io.BytesIO())
                value = file
            data = value.getvalue()
            if (key := digest(data)) not in self._objects:
                self._objects[key] = _object_digest(data)
            found = self._objects[key]
        self._digests[item.index] = found
        return found


def _unplanned(planner: SavePlanner, plan: SavePlan) -> Iterator[WriteItem]:
    """Plain tensors and objects that a planner was given and plans nothing of, as another rank writes its own.

    The default planner did so with the objects of all ranks but the first (`create_default_local_save_plan`,
    torch/distributed/checkpoint/default_planner.py, 2.1).
    """
    import torch
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    planned, given = {item.index.fqn for item in plan.items}, getattr(planner, "state_dict", None)
    for name, value in given.items() if isinstance(given, dict) else ():
        if name not in planned and (not isinstance(value, torch.Tensor) or _is_plain(value)):
            yield from _create_write_items(name, value)


def _name(item: WriteItem) -> str:
    offset = list(item.index.offset or ())
    return f"{item.index.fqn} at {offset}" if any(offset) else item.index.fqn


def _is_whole(item: WriteItem) -> bool:
    return item.tensor_data is None or item.tensor_data.chunk.sizes == item.tensor_data.size


def _object_digest(data: bytes) -> bytes:
    """Of a file of torch.save: sets and shared parts are pickled in an order that is no part of the value."""
    with TorchArchive(PositionedBytes("an object that is saved", data)) as archive:
        try:
            held = archive.load(rules=ALLOW_ALL)
            return digest(canonical(held, known=dict(_texts(held, archive))))
        except ReshardError:  # a pickle that nothing here reads is compared as it is
            stored = [archive.read(name) for name in sorted(archive.members) if name.startswith("data/")]
            return digest(archive.read("data.pkl"), *stored)


def _texts(held: object, archive: TorchArchive) -> Iterator[tuple[int, str]]:
    """Texts of tensors by their values, however these lie in their storages, and of devices without their numbers."""
    seen, left = set[int](), [held]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        left += children(part)
        if isinstance(part, TensorRecord):
            yield id(part), f"tensor({part.dtype.label},{part.shape},{digest(_row_major(part, archive)).hex()})"
        elif isinstance(part, StorageRecord):
            yield id(part), f"storage({part.dtype.label},{digest(archive.read(f'data/{part.key}')).hex()})"
        elif isinstance(part, ObjectRecord) and part.args and str(part.callable) == "torch.device":
            yield id(part), f"device({part.args[0]})"
        elif isinstance(part, ObjectRecord) and part.callable.name.endswith("Storage") and len(part.args) == 3:
            name = f"data/{part.args[0]}"  # of a type that has no name here: its key, its device and its size
            if name in archive.members:
                yield id(part), f"storage({part.callable},{digest(archive.read(name)).hex()})"


def _row_major(tensor: TensorRecord, archive: TorchArchive) -> bytes:
    import numpy

    size = tensor.dtype.itemsize
    flat = numpy.frombuffer(archive.read(f"data/{tensor.storage.key}"), f"V{size}")[tensor.element_offset :]
    strides = [size * stride for stride in tensor.stride]
    return numpy.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).tobytes()


def _folder(writer: object) -> str:
    """Where a storage writer has written files of torch.save to; empty where it writes anything else."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

    if not isinstance(writer, FileSystemWriter) or type(writer.fs) is not FileSystem:
        return ""
    kind = getattr(getattr(writer, "serialization_format", None), "value", "torch_save")
    return os.fspath(writer.path) if kind == "torch_save" else ""


def _unable(folder: str, plan: object, use_collectives: object) -> str:
    from torch.distributed.checkpoint.planner import SavePlan

    if not folder:
        return "it is no folder of files of torch.save"
    if not isinstance(plan, SavePlan):
        return "its planner does not tell its plan"
    return "" if use_collectives else "it has a directory for each rank (use_collectives=False)"


def _faults(folder: str, plan: SavePlan, planner: SavePlanner, rank: int, size: int) -> list[Fault]:
    """What is wrong with this rank's share; whatever goes wrong is a fault, for others wait for this rank."""
    try:
        directory = read_directory(folder)
        shares = list(directory.tensors.items())[rank::size]
        faults = [fault for key, tensor in shares for fault in _gaps(directory, key, tensor)]
        return faults + list(_unlike(directory, plan, planner))
    except Exception as error:
        return as_faults(error, where=f"{folder}, verified by rank {rank}")


def _gaps(directory: Directory, key: str, tensor: SavedTensor) -> Iterator[Fault]:
    """A tensor whose boxes leave a hole, or overlap."""
    boxes = [Box(offset=chunk.offset, size=chunk.size) for chunk in tensor.chunks if 0 not in chunk.size]
    try:
        check_cover(boxes, tensor.shape)
    except ValueError as error:
        what = f"{key}: its chunks do not add up: {error}"
        yield _damaged(directory.path, what, "each element once", "another cover")


def _unlike(directory: Directory, plan: SavePlan, planner: SavePlanner) -> Iterator[Fault]:
    """What this rank was to write, and is not in the files as it was."""
    from torch.distributed.checkpoint.planner import WriteItemType

    for item in plan.items:
        key = item.index.fqn
        try:
            if item.type == WriteItemType.BYTE_IO:
                place = directory.objects.get(key)
                if place is None:
                    yield _damaged(directory.path, f"{key} is not in the directory", "an object", "nothing")
                elif place.transformed:
                    logger.warning("verify_after_save: %s was changed as it was written, and is not compared", key)
                else:
                    with place.open() as archive:
                        archive.read("data.pkl")
            else:
                value = cast("Tensor", planner.resolve_data(item)).detach()
                yield from _unlike_tensor(directory, key, item, value)
        except ReshardError as error:
            yield from faults_of(error)


def _unlike_tensor(directory: Directory, key: str, item: WriteItem, value: Tensor) -> Iterator[Fault]:
    assert item.tensor_data is not None, "an item that is no bytes is a tensor"
    offset, size = (tuple(at) for at in (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes))
    what = f"{key}: the chunk at {list(offset)} is not what was saved"
    expected = _told(value, item.tensor_data.size)
    saved = directory.tensors.get(key)
    chunk = next((one for one in saved.chunks if (one.offset, one.size) == (offset, size)), None) if saved else None
    if saved is None or chunk is None or chunk.place is None:
        yield _damaged(directory.path, what, expected, "nothing")
        return
    found = f"{saved.dtype} {list(size)} of {list(saved.shape)}"
    if found != expected:
        yield _damaged(directory.path, what, expected, found)
    elif chunk.place.transformed:
        logger.warning("verify_after_save: %s was changed as it was written, and is not compared", key)
    elif not _is_plain(value):
        with chunk.place.open() as archive:
            archive.load(rules=ALLOW_ALL)  # of a class of the script's own, which it has saved just now
        logger.warning("verify_after_save: %s is no plain tensor: its file opens, and its values are not compared", key)
    elif value.numel():
        yield from _unlike_values(chunk, what, value)


def _is_plain(value: Tensor) -> bool:
    """Whether torch.save writes it as a tensor: not one of another class, quantized, or a view that conjugates."""
    import torch

    return type(value) is torch.Tensor and not (value.is_conj() or value.is_neg() or value.is_quantized)


def _told(value: Tensor, whole: Sequence[int]) -> str:
    return f"{_type(value)} of {list(whole)}"


def _type(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _unlike_values(chunk: Chunk, what: str, value: Tensor) -> Iterator[Fault]:
    """Compare the bytes of a chunk with a tensor's, in bounded memory."""
    import torch

    from ds_reshard.execution.checksums import Ledger
    from ds_reshard.operations.values import read_spans, stored

    place = chunk.place
    assert place is not None
    with place.open() as archive:
        held = archive.load(rules=ALLOW_ALL)
    if not isinstance(held, TensorRecord) or f"{held.dtype.label} {list(held.shape)}" != _type(value):
        yield _damaged(place.path, what, _told(value, chunk.size), type(held).__name__)
        return
    # torch saves a tensor that is not row-major as it lies: its axes are taken in the order of the file.
    order = sorted(range(value.dim()), key=lambda axis: -held.stride[axis])
    live = value.permute(order).reshape(-1)
    flat = TensorRecord(
        storage=held.storage, dtype=held.dtype, element_offset=held.element_offset, shape=(value.numel(),), stride=(1,)
    )
    ledger = Ledger()
    for span in read_spans([(stored(flat),)], ledger, memory_nbytes=_MEMORY_NBYTES):
        part = live[span.start : span.stop].cpu().contiguous()
        if not torch.equal(span.values[0].view(torch.uint8), part.view(torch.uint8)):
            found = f"others among its elements {span.start} to {span.stop}"
            yield FingerprintMismatch.fault(place.path, what, "the same bytes", found, mend=_MEND)
            return
    yield from ledger.mismatches()


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=_MEND)
