"""What torch and the managers of EasyR1 and verl unpickle, searched for what acts before they do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ds_reshard.operations.pickles import refuse_unsafe_folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def refuse_directory(arguments: Mapping[str, object]) -> None:
    """Of `_load_state_dict`, and of what reads a directory before it: UnsafePickle where it or an object of it acts.

    Collective, unless the load is one of this process alone. A reader of anything else than files in a folder is its
    owner's affair.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

    reader = arguments["storage_reader"]
    if not isinstance(reader, FileSystemReader) or type(reader.fs) is not FileSystem:
        return
    folder = os.fspath(reader.path)
    group = cast("ProcessGroup | None", arguments.get("process_group"))
    refuse_unsafe_folder(folder, group=group, alone=bool(arguments.get("no_dist")))


def refuse_manager(arguments: Mapping[str, object]) -> None:
    """Of `FSDPCheckpointManager.load_checkpoint`, which unpickles each rank's files below its first argument.

    Without a folder it loads nothing. Collective.
    """
    given = [value for name, value in arguments.items() if name != "self"]
    if given and isinstance(given[0], str | os.PathLike):
        refuse_unsafe_folder(os.fspath(given[0]))
