"""What EasyR1 and verl keep beside tensors: the schedule, the same on each rank, and each rank's own random states."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.fsdp.held import damaged
from ds_reshard.model.records import ObjectRecord, TensorRecord

EXTRA = "extra_state"
_RNG = "rng"


def extra_paths(folder: str, ranks: int) -> list[str]:
    return [os.path.join(folder, f"{EXTRA}_world_size_{ranks}_rank_{rank}.pt") for rank in range(ranks)]


def missing_extra(folder: str, ranks: int) -> Iterator[Fault]:
    """The files that lack, where some rank has saved one."""
    paths = extra_paths(folder, ranks)
    missing = [path for path in paths if not os.path.exists(path)]
    for path in missing if len(missing) < len(paths) else ():
        yield damaged(path, "is missing", "a file of each rank", "none")


def extra_trees(folder: str, ranks: int, size: int) -> list[object]:
    """What each of `size` ranks is given, of the files of the `ranks` that saved; nothing where these have no files.

    A rank that was there keeps its random states. A rank that was not has none, and both frameworks then leave those
    that the run has seeded: two ranks never draw the same numbers. Everything else must be alike on all ranks.
    Raises CheckpointDamaged where it is not, or where a rank's file is missing.
    """
    faults = list(missing_extra(folder, ranks))
    raise_faults(faults, subject="reading a checkpoint")
    paths = extra_paths(folder, ranks)
    if not os.path.exists(paths[0]):
        return []
    saved = [_read(path) for path in paths]
    shared = {name: value for name, value in saved[0].items() if name != _RNG}
    for path, entries in zip(paths[1:], saved[1:], strict=True):
        others = {name: value for name, value in entries.items() if name != _RNG}
        differ = [
            name
            for name in {**shared, **others}
            if name not in shared or name not in others or not _alike(shared[name], others[name])
        ]
        if differ:
            what = f"{', '.join(map(str, differ))} is another than rank 0's: of another step or run"
            faults.append(damaged(path, what, "the same on each rank", "others"))
    raise_faults(faults, subject="reading a checkpoint")
    return [saved[rank] if rank < len(saved) else shared for rank in range(size)]


def _read(path: str) -> dict[object, object]:
    with open_archive(path) as archive:
        top = archive.load()
    if not isinstance(top, dict):
        raise_faults(
            [damaged(path, "is no extra state", "lr_scheduler and rng", type(top).__name__)],
            subject="reading a checkpoint",
        )
    assert isinstance(top, dict)
    return top


def _alike(one: object, other: object) -> bool:
    """Whether two values of pickles are the same, of whatever files they are."""
    if isinstance(one, TensorRecord) and isinstance(other, TensorRecord):
        return _told(one) == _told(other)
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        return type(one) is type(other) and (one == other or (one != one and other != other))
    return type(one) is type(other) and len(parts) == len(others) and all(map(_alike, parts, others))


def _told(tensor: TensorRecord) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.element_offset, tensor.storage.crc32


def _parts(value: object) -> list[object] | None:
    """What a value is made of, None for one that is not."""
    if isinstance(value, ObjectRecord):
        return [value.callable, *value.args, value.kwargs, value.state, value.items, value.pairs]
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, list | tuple) else None
