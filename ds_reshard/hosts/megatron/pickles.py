"""What Megatron unpickles of a checkpoint, searched for what acts before it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA
from ds_reshard.errors import Fault, ReshardError, UnsafePickle
from ds_reshard.formats.megatron.checkpoint import MODEL, find_iteration
from ds_reshard.formats.megatron.torch_dist import is_state
from ds_reshard.formats.megatron.torch_format import FLAT_FILE
from ds_reshard.hooks import Call
from ds_reshard.hosts.megatron.live import Load
from ds_reshard.operations.pickles import Files, already_scanned, one_line_for_all, refuse_unsafe_folder, walk


@contextmanager
def refuse_iteration(load_dir: str, step: object, load: Load | None) -> Iterator[None]:
    """Raise UnsafePickle on every rank for anything of an iteration that the load in the block would run. Collective.

    Before the ranks have joined each reads the arguments alone: from the first model-parallel rank's file, or from the
    common state, which `read` looks at. One load of Megatron's training asks twice for the same iteration.
    """
    import torch.distributed as dist

    try:
        folder = find_iteration(load_dir, str(step) if step else None)
    except ReshardError:
        yield  # what is not there Megatron tells
        return
    whole = os.path.isfile(os.path.join(folder, METADATA))

    def files(faults: list[Fault]) -> list[str]:
        if not folders.is_folder(folder):  # a run begins where it will save: Megatron says that there is nothing
            return []
        paths = [path for path in walk(folder, faults) if whole or _rank_of(path)]
        if dist.is_initialized():
            return paths
        return [path for path in paths if _rank_of(path) and path.endswith(MODEL)][:1]

    if load is None or load.scanned != folder:
        optimizer = load is None or load.policy.loads_masters
        refuse_unsafe_iteration(folder, files, alone=not dist.is_initialized(), optimizer=optimizer)
    if not dist.is_initialized():
        yield
        return
    if load is not None:
        load.scanned = folder
    with already_scanned(folder):
        yield


def refuse_unsafe_iteration(folder: str, files: Files | None = None, *, alone: bool, optimizer: bool) -> None:
    """Raise UnsafePickle on every rank for what acts, also in what a load without the optimizer leaves out, and refuse
    what is damaged of the rest. Collective, unless `alone`.
    """
    try:
        with one_line_for_all(folder) if optimizer else nullcontext():
            refuse_unsafe_folder(folder, files, alone=alone, unread=[] if optimizer else [FLAT_FILE])
    except ReshardError as error:
        if optimizer or any(fault.error == UnsafePickle.__name__ for fault in error.faults):
            raise
        refuse_unsafe_folder(folder, files, alone=alone, unread=[FLAT_FILE], objects=lambda key: not is_state(key))


def _rank_of(path: str) -> bool:
    return os.path.basename(os.path.dirname(path)).startswith("mp_rank_")


def load(call: Call) -> object:
    """Load; UnsafePickle on every rank for anything that this would run. Collective in the group."""
    where = os.fspath(call["checkpoint_dir"])
    refuse_unsafe_folder(where, group=call.passed.get("process_group"))
    with already_scanned(where):
        return call()


def read(call: Call) -> object:
    """The same on this rank alone, of what every rank reads: the directory, and the common state."""
    refuse_unsafe_folder(
        os.fspath(call["checkpoint_dir"]), alone=True, objects=lambda key: key.startswith("common_state")
    )
    return call()


def load_file(call: Call) -> object:
    """The same of one file, where it is: of the ranks of the group, who all call it, the first reads it."""
    path, group = call["filename"], getattr(call["self"], "data_parallel_group", None)
    here = [path] if os.path.isfile(path) else []
    refuse_unsafe_folder(path, lambda faults: here, group=group, alone=group is None)
    return call()
