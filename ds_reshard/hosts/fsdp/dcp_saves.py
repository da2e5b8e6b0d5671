"""The seam of `torch.distributed.checkpoint.save`: each rank reads again what it has written, and all agree."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.dcp_directory import Chunk, Directory, SavedTensor, read_directory
from ds_reshard.containers.pickle_rules import ALLOW_ALL
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
from ds_reshard.model.layout import check_cover
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.operations.ranks import gather

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_MEMORY_NBYTES = 64 << 20
_MEND = "save again into another folder, and do not resume from this one"
logger = logging.getLogger("ds_reshard")


def save(call: Call) -> object:
    """Save as torch does, then verify: `_save_state_dict`. Collective, as it is.

    Every tensor that a rank has written is read again and compared with what its planner gave to be written, bit for
    bit; the boxes of each tensor add up to its shape. A save that cannot be verified is one warning: into storage that
    is no folder of files of torch.save, or by a planner that does not tell its plan. Raises CheckpointDamaged,
    CheckpointNotFound, FingerprintMismatch, and what reading a damaged file raises: the same on each rank.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = cast("SavePlanner", call["planner"] or DefaultSavePlanner())
    metadata = call(planner=planner)
    group = cast("ProcessGroup | None", call["process_group"])
    together = not call["no_dist"] and dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if together else (0, 1)
    folder = _folder(call["storage_writer"])
    plan = getattr(planner, "plan", None)
    unable = _unable(folder, plan, call.arguments.get("use_collectives", True))
    mine = (unable, [] if unable else _faults(folder, cast("SavePlan", plan), planner, rank, size))
    seen = gather(mine, group) if together else [mine]
    if rank == 0:
        for reason in sorted({reason for reason, _ in seen if reason}):
            logger.warning("verify_after_save: what was saved in %s is not verified: %s", folder or "storage", reason)
    raise_faults([fault for _, faults in seen for fault in faults], subject=f"verifying {folder}")
    return metadata


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
    from ds_reshard.operations.values import SpanReader, stored

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
    reader = SpanReader(ledger, threads=1, memory_nbytes=_MEMORY_NBYTES, progress=None, total=0)
    for span in reader.read([(stored(flat),)]):
        part = live[span.start : span.stop].cpu().contiguous()
        if not torch.equal(span.values[0].view(torch.uint8), part.view(torch.uint8)):
            found = f"others among its elements {span.start} to {span.stop}"
            yield FingerprintMismatch.fault(place.path, what, "the same bytes", found, mend=_MEND)
            return
    yield from ledger.mismatches()


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=_MEND)
