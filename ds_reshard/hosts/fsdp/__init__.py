"""FSDP of torch: optimizer state of FSDP1 that is gathered, saves that are verified, loads that run no code.

Importing this loads no torch; the seams are in the modules beside.
Rung 2: `_optim_state_dict_impl` is where `FSDP.optim_state_dict`, its two older forms, `get_optimizer_state_dict` and
`get_state_dict` all pass, and there is no extension point before it; managers call `torch.save` in one method. Rung 3:
`save` and the thread of `async_save` look `_save_state_dict` up in their module, and a planner or a storage writer of
ours would take the place of the script's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ds_reshard import hosts
from ds_reshard.containers.dcp_directory import METADATA, read_directory
from ds_reshard.containers.digests import digest
from ds_reshard.containers.pickle_rules import UNSAFE
from ds_reshard.errors import ConfigError, ModelMismatch, ReshardError, raise_faults
from ds_reshard.formats.dcp.entries import MODELS, Asked, Matched, Unasked, left_out, match_keys, named, optimizers
from ds_reshard.hooks import Call, HostHooks, Patch, Seam
from ds_reshard.hosts.fsdp.settings import asks_to_verify, note_saved, saved_here
from ds_reshard.model.content import WEIGHT
from ds_reshard.operations.pickles import refuse_unsafe_folder
from ds_reshard.operations.ranks import agree, agree_files, attempt, gather, raise_caused, rank, run_on_all, world_size
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.watching import watched
from ds_reshard.operations.wrapper_names import convert_line
from ds_reshard.resume.policy_sources import refuse_unapplied

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("ds_reshard")


def check_flattened(call: Call) -> object:
    from ds_reshard.hosts.fsdp.optimizer_state import refuse_mixed

    if not call["use_orig_params"]:
        refuse_mixed(call["params"], call["module"])
    return call()


def save(call: Call) -> object:
    path = getattr(call["storage_writer"], "path", None)
    if isinstance(path, str | os.PathLike):
        note_saved(os.fspath(path))
    if not asks_to_verify():
        return call()
    from ds_reshard.hosts.fsdp.dcp_saves import save as save_and_verify

    return save_and_verify(call)


def save_checkpoint(call: Call) -> object:
    saved = call()
    if folder := _folder_of(call):
        note_saved(folder)
    if asks_to_verify():
        from ds_reshard.hosts.fsdp.saved import verify_save

        verify_save(call["self"], folder, model_only=bool(call.arguments.get("save_model_only")))
    return saved


def async_save(call: Call) -> object:
    """ConfigError where saves are to be verified and this one is made in a process of its own."""
    if asks_to_verify() and getattr(call.arguments.get("async_checkpointer_type"), "value", None) == "process":
        raise ConfigError(
            "verify_after_save: async_save in a process of its own is not reached by the hooks; use "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD, or leave out verify_after_save"
        )
    return call()


def load_directory(call: Call) -> object:
    """Of `_load_state_dict`, and of what reads a directory before it: UnsafePickle where it or an object of it acts.

    ConfigError where resume flags were given: torch loads what is there, whatever they say. Collective, unless the load
    is one of this process alone: CheckpointDamaged where ranks see other directories, as copies of two saves have them,
    and ModelMismatch where states were saved of parameters of an optimizer of which the state dict asks for none.
    A reader of anything else than files in a folder is its owner's affair; a URL of local files is a folder.
    """
    folder, alone = _local_folder(call["storage_reader"]), bool(call.arguments.get("no_dist"))
    group = call.arguments.get("process_group")
    with watched("fsdp", folder):
        refuse_policy("torch.distributed.checkpoint.load", folder, group, alone=alone)
        if folder is not None:
            _refuse_unsafe(call.arguments.get("state_dict"), folder, group, alone=alone)
            if not alone:
                path = Path(folder, METADATA)
                read, _, _ = attempt(lambda: {str(path): digest(path.read_bytes())})  # what is not there torch tells
                agree_files(read or {}, group, subject=f"loading {folder}")
            partial_load = bool(getattr(call.arguments.get("planner"), "allow_partial_load", False))
            _refuse_left_out(call.arguments.get("state_dict"), folder, group, alone=alone, loose=partial_load)
        try:
            return call()
        except BaseException as error:  # torch's CheckpointException is no Exception
            if folder is not None and type(error).__name__ == "CheckpointException":
                _refuse_unfound(call.arguments.get("state_dict"), folder, error)
            raise


def _refuse_unsafe(wanted: object, folder: str, group: ProcessGroup | None, *, alone: bool) -> None:
    """Refuse a directory or an object that acts, and a damaged one that a rank asks for. Collective, unless `alone`.

    torch unpickles the objects whose keys are in the state dict, and no others.
    """
    try:
        refuse_unsafe_folder(folder, group=group, alone=alone)
    except ReshardError as error:
        if any(fault.error in UNSAFE for fault in error.faults):
            raise
        mine = list(map(str, wanted)) if isinstance(wanted, Mapping) else None
        everyone = [mine] if alone else gather(mine, group)
        if any(names is None for names in everyone):
            raise
        tops = {name for names in everyone for name in names or ()}

        def asked(key: str) -> bool:
            return any(key[:end] in tops for end in range(len(key) + 1) if key[end : end + 1] in ("", "."))

        refuse_unsafe_folder(folder, group=group, alone=alone, objects=asked)


def _refuse_left_out(wanted: object, folder: str, group: ProcessGroup | None, *, alone: bool, loose: bool) -> None:
    """Refuse to leave out states of parameters that this run's optimizers have; warn of those of others. Collective.

    Of a `loose` load, which leaves what is lacking as it is, also refuse one that finds none of the weights, and warn.
    """
    saved: list[str] = []

    def look() -> tuple[Unasked, Matched]:
        if (asked := list(optimizers(wanted))) or loose:
            directory = read_directory(folder)
            saved.extend((*directory.tensors, *directory.objects))
            raise_faults(list(left_out(asked, saved)), subject=f"loading {folder}")
        return Unasked.of(asked, saved), _matched(wanted if loose else {}, saved)

    nothing = Unasked(0, 0), _matched({}, ())
    seen, faults, cause = (look(), [], None) if alone else attempt(look)
    mine = faults, seen or nothing
    everyone = [mine] if alone else gather(mine, group)
    raise_caused([fault for of_rank, _ in everyone for fault in of_rank], subject=f"loading {folder}", cause=cause)

    number, mend = 0 if alone else rank(group), partial(_mend, wanted, folder)
    for text in match_keys([one for _, one in everyone], saved, folder, rank=number, mend=mend):
        logger.warning("%s", text)


def _matched(wanted: object, saved: Collection[str]) -> Matched:
    """Which tensors of a state dict are in a folder, by the keys that torch gives them."""
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat = flatten_state_dict(wanted)[0] if isinstance(wanted, dict) else {}
    tensors = [key for key, value in flat.items() if isinstance(value, torch.Tensor)]
    return Matched.of(tensors, list(optimizers(wanted)), saved, "")


def _mend(wanted: object, folder: str, lacking: Sequence[str]) -> str:
    line, _, _ = attempt(lambda: _renaming(list(optimizers(wanted)), lacking, folder))
    return line or "ask for the saved keys, or build the saved model"


def _renaming(asked: Sequence[Asked], lacking: Collection[str], folder: str) -> str | None:
    """What makes a folder with the keys that a run asks for, and what reads it where torch's own reader does not."""
    opened = open_checkpoint(find_listing(folder, None), whole=False, optimizer=False)
    saved = [key.name for key in opened.layout.placements if key.kind == WEIGHT]
    keys = [key for key in lacking if not any(key.startswith(one.top) for one in asked)]
    top = _top(keys, frozenset().union(*(one.members for one in asked)))
    run = [key.removeprefix(f"{top}.") for key in keys]
    optimizer = asked[0].key if asked else "optimizer"
    read = f"storage_reader=ds_reshard.dcp.Reader({{}}, model={top!r}, optimizer={optimizer!r})"
    if set(run) <= set(saved):
        return f"load it by {read.format(repr(folder))}"
    line = convert_line(saved, run, folder=folder)
    usual = (top, optimizer) == ("model", "optimizer")
    return line if line is None or usual else f"{line}\nby {read.format(repr('OUT'))}"


def _top(keys: Sequence[str], members: Set[str]) -> str:
    """What stands in the keys of weights before the names of an optimizer's members, else a usual name."""
    for parts in (key.split(".") for key in keys if members):
        for at in range(len(parts)):
            if ".".join(parts[at:]) in members:
                return ".".join(parts[:at])
    return next((top for top in MODELS if any(key.startswith(f"{top}.") for key in keys)), "")


def _refuse_unfound(wanted: object, folder: str, error: BaseException) -> None:
    """Raise ModelMismatch in place of torch's error, which names one key, with all tensors that were not found."""
    found, _, _ = attempt(lambda: read_directory(folder))
    saved = [*found.tensors, *found.objects] if found is not None else []
    matched = _matched(wanted if found is not None else {}, saved)
    try:
        match_keys([(Unasked(0, 0), matched)], saved, folder, rank=rank(), mend=partial(_mend, wanted, folder))
    except ModelMismatch as unfound:
        raise unfound from error
    if matched.lacking and "Missing key" in str(error):  # as torch 2.5 to 2.14 say it
        mend = "build the saved model, or DefaultLoadPlanner(allow_partial_load=True) to keep what is there"
        what = f"lacks {named(sorted(matched.lacking), 'tensor')}"
        raise ModelMismatch.of(folder, what, "every key that this run asks for", "others", mend=mend) from error


def refuse_policy(host: str, folder: str | None, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
    """Raise ConfigError where a resume policy was asked for that nobody applies; on every rank, unless `alone`.

    Where the hooks of a framework are on that applies it, its own load does: it may call torch's, or the script may.
    To load what this very run has saved is no resume: the Trainer does with `load_best_model_at_end`.
    """

    def elsewhere() -> bool:
        own = folder is not None and saved_here(folder)
        return own or any(map(hosts.hooked, ("deepspeed", "megatron", "nanotron")))

    refuse = partial(refuse_unapplied, host, unless=elsewhere)

    if alone:
        refuse()
    else:
        run_on_all(refuse, group, subject="loading")


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


def load_checkpoint(call: Call) -> object:
    """Of `FSDPCheckpointManager.load_checkpoint`, which unpickles each rank's files below its first argument.

    Without a folder it loads nothing. UnsupportedLayout for a folder of another number of ranks, of which each rank
    would find no file (FileNotFoundError). Collective.
    """
    if folder := _folder_of(call):
        from ds_reshard.formats.fsdp.checkpoint import other_size

        refuse_policy("this FSDPCheckpointManager", folder)
        faults, unread, _ = attempt(lambda: list(other_size(folder, world_size())))
        agree([*(faults or ()), *unread], subject=f"loading {folder}")
        refuse_unsafe_folder(folder)
    return call()


def _folder_of(call: Call) -> str | None:
    """The folder that a method of a manager is given, as its first argument; None for none."""
    given = [value for name, value in call.arguments.items() if name != "self"]
    return os.fspath(given[0]) if given and isinstance(given[0], str | os.PathLike) else None


HOOKS = HostHooks(
    host="fsdp",
    distribution="torch",
    versions=">=2.5,<2.15",
    tested=("2.10.0", "2.11.0", "2.13.0", "2.14.1"),
    resumes=False,
    patches=(
        Patch(
            target="torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel._optim_state_dict_impl",
            wrapper=Seam(f"{__name__}.optimizer_state:gather"),
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
            wrapper=Seam(f"{__name__}:check_flattened"),
            signature=("params", "module", "aligned_numel", "use_orig_params"),
            summary="names the parameters of an FSDP unit of which some are frozen, with use_orig_params=False",
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_saver:_save_state_dict",
            wrapper=Seam(f"{__name__}:save"),
            signature=("state_dict", "storage_writer", "process_group", "coordinator_rank", "no_dist", "planner"),
            summary="where verify_after_save is asked for, verifies what torch.distributed.checkpoint has saved",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_saver:async_save",
            wrapper=Seam(f"{__name__}:async_save"),
            signature=("state_dict",),
            summary="where verify_after_save is asked for, refuses saves in a process that the hooks do not reach",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
            wrapper=Seam(f"{__name__}:load_directory"),
            signature=("state_dict", "storage_reader", "process_group", "coordinator_rank", "no_dist", "planner"),
            summary="refuses what would run code when it is unpickled, before it is",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.optimizer:load_sharded_optimizer_state_dict",
            wrapper=Seam(f"{__name__}:load_directory"),
            signature=("model_state_dict", "optimizer_key", "storage_reader", "planner"),
            summary="refuses what would run code when it is unpickled, before it reads the directory",
            optional=True,
        ),
        Patch(
            target="verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
            wrapper=Seam(f"{__name__}:load_checkpoint"),
            signature=(),
            summary="refuses what would run code when it is unpickled, before it is",
            optional=True,
        ),
        Patch(
            target="verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
            wrapper=Seam(f"{__name__}:save_checkpoint"),
            signature=(),
            summary="where verify_after_save is asked for, verifies what the managers of EasyR1 and verl have saved",
            optional=True,
        ),
    ),
)
