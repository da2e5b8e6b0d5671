"""The files of a Megatron-LM checkpoint: which iteration, which format, and the objects that lie in them.

Names from megatron/training/checkpointing.py `get_checkpoint_name`, `_get_checkpoint_format`, and from
megatron/core/dist_checkpointing (0.16.1 to 0.19.2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ds_reshard.containers.dcp_directory import METADATA, Place, read_directory
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, Fault, ReadFailed, UnsupportedLayout

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON, _BACKEND = "common.pt", "metadata.json"
MODEL = "model_optim_rng.pt"
_NUMBER = 20


def is_megatron(path: str) -> bool:
    """Whether a folder is Megatron-LM's; Megatron-DeepSpeed leaves the tracker beside DeepSpeed's own files."""
    names = _names(path)
    ranks = any(name.startswith("mp_rank_") and os.path.isdir(os.path.join(path, name)) for name in names)
    return "latest" not in names and (ranks or not names.isdisjoint((TRACKER, METADATA, _COMMON)))


def find_iteration(path: str, tag: str | None) -> str:
    """The folder of one iteration: `path` itself, the one that `tag` names (5, iter_0000005), or the latest.

    Raises CheckpointNotFound, ReadFailed.
    """
    names = _names(path)
    if tag is None and TRACKER not in names:
        return path
    name = _folder_name(tag if tag is not None else _latest(path))
    if name not in names:
        there = sorted(name for name in names if name.startswith("iter_") or name == "release")
        mend = f"name one that is there: --tag {' | '.join(there[:12])}" if there else "give the folder of --save"
        raise _not_found(path, f"has no checkpoint {name!r}", mend)
    return os.path.join(path, name)


def read_common(folder: str) -> tuple[Mapping[object, object], Mapping[str, Place]]:
    """What all ranks share, and where the other objects lie by name; no tensor's bytes are read.

    Raises UnsupportedLayout for torch_dcp and fsdp_dtensor, and what reading a damaged file raises.
    """
    names = _names(folder)
    if METADATA in names:
        if _BACKEND not in names:
            mend = "start the run with --resume-report FILE, or save with --ckpt-format torch_dist"
            what = "is a checkpoint of format torch_dcp or fsdp_dtensor, whose rates are not drawn"
            raise UnsupportedLayout(f"{folder}: {what}; {mend}", [_fault("UnsupportedLayout", folder, what, mend)])
        places = read_directory(folder).objects
        if _COMMON in names:
            common = _load(os.path.join(folder, _COMMON))
        elif "common_state/shard_0_1" in places:
            common = read_object(places["common_state/shard_0_1"])
        else:
            raise CheckpointDamaged(f"{folder}: holds neither {_COMMON} nor the object common_state: it is incomplete")
        return _mapping(folder, common), places
    ranks = sorted(name for name in names if name.startswith("mp_rank_"))
    if not ranks:
        raise _not_found(folder, "holds no checkpoint of Megatron-LM", "give the folder of --save")
    path = os.path.join(folder, ranks[0], MODEL)
    return _mapping(path, _load(path)), {}


def read_object(place: Place) -> object:
    """An object that was saved among the tensors (`ShardedObject`): its pickle as inert values."""
    with place.open() as archive:
        held = archive.load()
    return held[0] if isinstance(held, list) and len(held) == 1 else held


def _load(path: str) -> object:
    with open_archive(path) as archive:
        return archive.load()


def _mapping(where: str, held: object) -> Mapping[object, object]:
    if not isinstance(held, dict):
        raise CheckpointDamaged(f"{where}: holds a {type(held).__name__}, where Megatron saves a dict")
    return held


def _latest(path: str) -> str:
    file = PositionedFile(os.path.join(path, TRACKER))
    try:
        return file.read(0, min(file.nbytes, _NUMBER)).decode("utf-8", errors="replace").strip()
    finally:
        file.close()


def _folder_name(tag: str) -> str:
    return f"iter_{int(tag):07d}" if tag.isdecimal() and len(tag) <= _NUMBER else tag


def _names(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        raise ReadFailed(f"{path}: cannot be listed: {error}") from error


def _not_found(where: str, what: str, mend: str) -> CheckpointNotFound:
    return CheckpointNotFound(f"{where}: {what}; {mend}", [_fault("CheckpointNotFound", where, what, mend)])


def _fault(error: str, where: str, what: str, mend: str) -> Fault:
    return Fault(error=error, where=where, what=what, mend=mend)
