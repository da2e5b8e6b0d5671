"""FSDP of torch: optimizer state of FSDP1 that is gathered, saves that are verified, loads that run no code.

Importing this loads no torch; the seams are in the modules beside.
Rung 2: `_optim_state_dict_impl` is where `FSDP.optim_state_dict`, its two older forms, `get_optimizer_state_dict` and
`get_state_dict` all pass, and there is no extension point before it; managers call `torch.save` in one method. Rung 3:
`save` and the thread of `async_save` look `_save_state_dict` up in their module, and a planner or a storage writer of
ours would take the place of the script's.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import ConfigError
from ds_reshard.hooks import Function, HostHooks, Patch, Wrapper
from ds_reshard.hosts.fsdp.settings import asks_to_verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Arguments = Mapping[str, object]
ByTorch = Callable[[dict[str, object]], object]
"""The original with the arguments of a call, less those that are given instead."""


def _around(seam: Callable[[Arguments, ByTorch], object]) -> Wrapper:
    """A wrapper that gives a seam the arguments by name, defaults too, and the original."""

    def wrap(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()

            def by_torch(changed: dict[str, object]) -> object:
                bound.arguments.update(changed)
                return original(*bound.args, **bound.kwargs) if changed else original(*args, **kwargs)

            return seam(dict(bound.arguments), by_torch)

        return call

    return wrap


def gather_state(arguments: Arguments, by_torch: ByTorch) -> object:
    from ds_reshard.hosts.fsdp.optimizer_state import gather

    return gather(arguments, by_torch)


def check_flattened(arguments: Arguments, by_torch: ByTorch) -> object:
    from ds_reshard.hosts.fsdp.optimizer_state import refuse_mixed

    if not arguments["use_orig_params"]:
        refuse_mixed(arguments["params"], arguments["module"])  # type: ignore[arg-type]
    return by_torch({})


def save(arguments: Arguments, by_torch: ByTorch) -> object:
    if not asks_to_verify():
        return by_torch({})
    from ds_reshard.hosts.fsdp.dcp_saves import save as save_and_verify

    return save_and_verify(arguments, by_torch)


def save_checkpoint(arguments: Arguments, by_torch: ByTorch) -> object:
    saved = by_torch({})
    if asks_to_verify():
        from ds_reshard.hosts.fsdp.saved import verify_save

        verify_save(arguments)
    return saved


def async_save(arguments: Arguments, by_torch: ByTorch) -> object:
    """ConfigError where saves are to be verified and this one is made in a process of its own."""
    if asks_to_verify() and getattr(arguments.get("async_checkpointer_type"), "value", None) == "process":
        raise ConfigError(
            "verify_after_save: async_save in a process of its own is not reached by the hooks; use "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD, or leave out verify_after_save"
        )
    return by_torch({})


def load_directory(arguments: Arguments, by_torch: ByTorch) -> object:
    """Of `_load_state_dict`, and of what reads a directory before it: UnsafePickle where it or an object of it acts.

    Collective, unless the load is one of this process alone: CheckpointDamaged where ranks see other directories, as
    copies of two saves have them. A reader of anything else than files in a folder is its owner's affair; a URL of
    local files is a folder.
    """
    from ds_reshard.containers.dcp_directory import METADATA
    from ds_reshard.containers.digests import digest
    from ds_reshard.operations.pickles import refuse_unsafe_folder
    from ds_reshard.operations.ranks import agree_files, attempt
    from ds_reshard.operations.watching import watched

    folder, alone = _local_folder(arguments["storage_reader"]), bool(arguments.get("no_dist"))
    with watched("fsdp", folder):
        if folder is not None:
            group = cast("ProcessGroup | None", arguments.get("process_group"))
            refuse_unsafe_folder(folder, group=group, alone=alone)
            if not alone:
                path = Path(folder, METADATA)
                read, _, _ = attempt(lambda: {str(path): digest(path.read_bytes())})  # what is not there torch tells
                agree_files(read or {}, group, subject=f"loading {folder}")
        return by_torch({})


def _local_folder(reader: object) -> str | None:
    """The folder that torch's reader reads, also by way of fsspec; None for any other reader, or a store elsewhere."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

    if not isinstance(reader, FileSystemReader):
        return None
    if type(reader.fs) is FileSystem:
        return os.fspath(reader.path)
    store = getattr(reader.fs, "fs", None)  # _fsspec_filesystem.py of torch, 2.13
    protocol = getattr(store, "protocol", ())
    strip = getattr(store, "_strip_protocol", None)
    if strip is None or "file" not in ((protocol,) if isinstance(protocol, str) else protocol):
        return None
    return str(strip(os.fspath(reader.path)))


def load_checkpoint(arguments: Arguments, by_torch: ByTorch) -> object:
    """Of `FSDPCheckpointManager.load_checkpoint`, which unpickles each rank's files below its first argument.

    Without a folder it loads nothing. Collective.
    """
    from ds_reshard.operations.pickles import refuse_unsafe_folder

    given = [value for name, value in arguments.items() if name != "self"]
    if given and isinstance(given[0], str | os.PathLike):
        refuse_unsafe_folder(os.fspath(given[0]))
    return by_torch({})


HOOKS = HostHooks(
    host="fsdp",
    distribution="torch",
    versions=">=2.4,<2.14",
    tested=("2.13.0",),
    resumes=False,
    patches=(
        Patch(
            target="torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel._optim_state_dict_impl",
            wrapper=_around(gather_state),
            signature=(
                "model",
                "optim",
                "optim_state_dict",
                "optim_input",
                "rank0_only",
                "full_state_dict",
                "group",
                "cpu_offload",
            ),
            summary="gathers the optimizer state of FSDP1 with frozen parameters and mixed element types",
        ),
        Patch(
            target="torch.distributed.fsdp._flat_param:FlatParamHandle._init_flat_param_and_metadata",
            wrapper=_around(check_flattened),
            signature=("params", "module", "aligned_numel", "use_orig_params"),
            summary="names the parameters of an FSDP unit of which some are frozen, with use_orig_params=False",
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_saver:_save_state_dict",
            wrapper=_around(save),
            signature=("state_dict", "storage_writer", "process_group", "coordinator_rank", "no_dist", "planner"),
            summary="where verify_after_save is asked for, verifies what torch.distributed.checkpoint has saved",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_saver:async_save",
            wrapper=_around(async_save),
            signature=("state_dict",),
            summary="where verify_after_save is asked for, refuses saves in a process that the hooks do not reach",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
            wrapper=_around(load_directory),
            signature=("state_dict", "storage_reader", "process_group", "coordinator_rank", "no_dist", "planner"),
            summary="refuses what would run code when it is unpickled, before it is",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.optimizer:load_sharded_optimizer_state_dict",
            wrapper=_around(load_directory),
            signature=("model_state_dict", "optimizer_key", "storage_reader", "planner"),
            summary="refuses what would run code when it is unpickled, before it reads the directory",
            optional=True,
        ),
        Patch(
            target="verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
            wrapper=_around(load_checkpoint),
            signature=(),
            summary="refuses what would run code when it is unpickled, before it is",
            optional=True,
        ),
        Patch(
            target="verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
            wrapper=_around(save_checkpoint),
            signature=(),
            summary="where verify_after_save is asked for, verifies what the managers of EasyR1 and verl have saved",
            optional=True,
        ),
    ),
)
