"""A Megatron-LM checkpoint: which iteration, which format, the objects in its files, and its schedule and groups.

Names from megatron/training/checkpointing.py `get_checkpoint_name`, `_get_checkpoint_format`, and from
megatron/core/dist_checkpointing (0.16.1 to 0.19.2).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import (
    BACKEND,
    COMMON,
    METADATA,
    Directory,
    Place,
    is_megatron_fsdp,
    read_directory,
)
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron import bridge
from ds_reshard.model.content import SAMPLES, STEPS, Path
from ds_reshard.model.facts import canonical
from ds_reshard.model.records import ObjectRecord
from ds_reshard.resume.megatron import MegatronPast, extra_values, read_schedule

TRACKER = "latest_checkpointed_iteration.txt"
MODEL = "model_optim_rng.pt"
_NUMBER = 20
_APART = ("args", "optimizer", "content_metadata", "iteration", "rerun_state_machine", "rng_state")


def is_megatron(path: str) -> bool:
    """Whether a folder is Megatron-LM's; Megatron-DeepSpeed leaves the tracker beside DeepSpeed's own files."""
    names = _names(path)
    ranks = any(name.startswith("mp_rank_") and folders.is_folder(os.path.join(path, name)) for name in names)
    return "latest" not in names and (ranks or not names.isdisjoint((TRACKER, METADATA, COMMON)))


def find_iteration(path: str, tag: str | None) -> str:
    """The folder of one iteration: `path` itself, the one that `tag` names (5, iter_0000005), or the latest.

    Raises CheckpointNotFound, ReadFailed.
    """
    names = _names(path)
    if tag is None and TRACKER not in names:
        return path
    name = iteration_name(tag if tag is not None else latest_iteration(path))
    if name not in names:
        there = sorted(name for name in names if name.startswith("iter_") or name == "release")
        mend = f"name one that is there: --tag {' | '.join(there[:12])}" if there else "give the folder of --save"
        raise _not_found(path, f"has no checkpoint {name!r}", mend)
    return os.path.join(path, name)


def read_common(folder: str, directory: Directory | None = None) -> tuple[Mapping[object, object], Mapping[str, Place]]:
    """What all ranks share, and where the other objects lie by name; no tensor's bytes are read.

    `directory` is the folder's, where it was read before.

    Raises UnsupportedLayout for torch_dcp and for fsdp_dtensor without an optimizer, and what a damaged file raises.
    """
    names = _names(folder)
    if METADATA in names:
        if is_megatron_fsdp(folder):
            directory = directory or read_directory(folder)
            return _of_fsdp(directory), directory.objects
        if BACKEND not in names:
            mend = "start the run with --resume-report FILE, or save with --ckpt-format torch_dist"
            what = "is a checkpoint of format torch_dcp or fsdp_dtensor, whose rates are not drawn"
            raise UnsupportedLayout(f"{folder}: {what}; {mend}", [UnsupportedLayout.fault(folder, what, mend=mend)])
        directory = directory or read_directory(folder)
        if COMMON in names:
            common = _load(os.path.join(folder, COMMON))
        elif "common_state/shard_0_1" in directory.objects:
            common = read_object(directory.objects["common_state/shard_0_1"])
        else:
            raise CheckpointDamaged(f"{folder}: holds neither {COMMON} nor the object common_state: it is incomplete")
        shared = _mapping(folder, common)
        if bridge.CONFIG in names and "args" not in shared:
            shared = bridge.with_arguments(folder, shared, directory)
        return shared, directory.objects
    ranks = sorted(name for name in names if name.startswith("mp_rank_"))
    if not ranks:
        raise _not_found(folder, "holds no checkpoint of Megatron-LM", "give the folder of --save")
    path = os.path.join(folder, ranks[0], MODEL)
    return _mapping(path, _load(path)), {}


_SCHEDULER, _GROUP = "opt_param_scheduler.", "optimizer.param_to_group_meta."


def _of_fsdp(directory: Directory) -> Mapping[object, object]:
    """The same of Megatron-FSDP, which saves a group's values for each of its parameters: `params` are their names."""
    common: dict[object, object] = {}
    scheduler: dict[object, object] = {}
    values: dict[str, Group] = {}
    for key, place in directory.objects.items():
        if key.startswith(_GROUP):
            name, _, value = key.removeprefix(_GROUP).rpartition(".")
            values.setdefault(name, {})[value] = read_object(place)
        elif key.startswith(_SCHEDULER):
            scheduler[key.removeprefix(_SCHEDULER)] = read_object(place)
        elif "." not in key:
            common[key] = read_object(place)
    if scheduler:
        common["opt_param_scheduler"] = scheduler
    return {**common, "optimizer": {"param_groups": _groups_of(directory.path, values)}}


_IDENTITY = (
    *("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "optimizer"),
    *("lr_mult", "is_expert_parallel", "is_decoupled_lr"),
)
"""By which Megatron tells groups apart (`param_group_identifier_keys`, core/optimizer/optimizer.py, 0.19.2)."""


def _groups_of(path: str, values: Mapping[str, Group]) -> list[Group]:
    """The param groups of the values that each parameter has. Raises UnsupportedLayout where those of one differ."""
    groups: dict[str, tuple[Group, list[str]]] = {}
    faults = []
    for name, own in values.items():
        first, members = groups.setdefault(canonical([own.get(one) for one in _IDENTITY]), (own, []))
        members.append(name)
        for one in sorted(own.keys() | first.keys()):
            if canonical(own.get(one)) != canonical(first.get(one)):
                what, mend = (
                    f"{one} of {name} is not that of {members[0]}, of the same param group",
                    "take an older one",
                )
                sides = str(first.get(one))[:40], str(own.get(one))[:40]
                faults.append(UnsupportedLayout.fault(path, what, *sides, mend=mend))
    raise_faults(faults, subject=f"checkpoint {os.path.dirname(path)}")
    return [{**own, "params": members} for own, members in groups.values()]


def read_object(place: Place) -> object:
    """An object that was saved among the tensors (`ShardedObject`): its pickle as inert values."""
    held = read_list(place)
    return held[0] if len(held) == 1 else held


def read_list(place: Place) -> list[object]:
    """The objects that were saved under one key, each by a rank."""
    with place.open() as archive:
        held = archive.load()
    return held if isinstance(held, list) else [held]


def _load(path: str) -> object:
    with open_archive(path) as archive:
        return archive.load()


def _mapping(where: str, held: object) -> Mapping[object, object]:
    if not isinstance(held, dict):
        raise CheckpointDamaged(f"{where}: holds a {type(held).__name__}, where Megatron saves a dict")
    return held


def latest_iteration(path: str) -> str:
    return folders.read_small(os.path.join(path, TRACKER), _NUMBER).decode("utf-8", errors="replace").strip()


def iteration_name(tag: str) -> str:
    return f"iter_{int(tag):07d}" if tag.isdecimal() and len(tag) <= _NUMBER else tag


def _names(path: str) -> frozenset[str]:
    return frozenset(folders.names(path))


def _not_found(where: str, what: str, mend: str) -> CheckpointNotFound:
    return CheckpointNotFound(f"{where}: {what}; {mend}", [CheckpointNotFound.fault(where, what, mend=mend)])


def objects_of(common: Mapping[object, object], arguments: Mapping[str, object]) -> Iterator[tuple[Path, object]]:
    """The values beside the tensors that are no file's alone, under the names of every format and Megatron's own."""
    counters = {STEPS: common.get("iteration"), SAMPLES: arguments.get("consumed_train_samples")}
    yield from (((name,), value) for name, value in counters.items() if value is not None)
    for name, value in common.items():
        if name not in _APART and not str(name).startswith("model"):
            yield (str(name),), value
    yield ("args",), dict(arguments)


def counted(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


Group = dict[str, object]
"""A param group: `params` and the values that the optimizer and the scheduler read."""


def saved_groups(state: object) -> list[Group] | None:
    """The param groups of one optimizer's saved state; None where they are not in it.

    `FP32Optimizer` saves its torch optimizer's state; `Float16OptimizerWithFloat16Params` and
    `DistributedOptimizer` put that under "optimizer", "optimizer_state_dict" in old ones
    (core/optimizer/optimizer.py and distrib_optimizer.py, 0.16.1 to 0.19.2). In a `torch_dist` checkpoint of
    sharding type `dp_reshardable` they lie in a sharded object, which is read with the tensors.
    """
    if not isinstance(state, Mapping):
        return None
    for holder in (state, state.get("optimizer"), state.get("optimizer_state_dict")):
        groups = holder.get("param_groups") if isinstance(holder, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
            return groups
    return None


_GROUPS = re.compile(r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_0_1")


def read_past(path: str, *, tag: str | None = None) -> MegatronPast:
    """Position, schedule, groups and arguments as they were saved; nothing of the files is executed.

    `path` is the folder of `--save`, or of one iteration. Raises CheckpointNotFound, UnsupportedLayout for a
    checkpoint without a schedule, and what reading a damaged file raises.
    """
    folder = find_iteration(path, tag)
    common, places = read_common(folder)
    state = common.get("opt_param_scheduler", common.get("lr_scheduler"))
    if state is None:
        what = "holds no scheduler state: it is a release, or was saved with --no-save-optim"
        raise UnsupportedLayout(f"{folder}: {what}; name another iteration: --tag ITERATION")
    arguments = arguments_of(common.get("args"))
    schedule = read_schedule(state, where=folder, extra=extra_values(SimpleNamespace(**arguments)))
    chain = chain_of(common.get("optimizer"), places)
    groups = tuple(group for groups in chain for group in groups) if chain is not None else None
    return MegatronPast(where=folder, schedule=schedule, groups=groups, arguments=arguments)


def arguments_of(held: object) -> dict[str, object]:
    """The attributes of a pickled `argparse.Namespace`."""
    state = held.state if isinstance(held, ObjectRecord) else None
    return {name: value for name, value in state.items() if isinstance(name, str)} if isinstance(state, dict) else {}


Chain = tuple[tuple[Group, ...], ...]
"""The param groups of each of a chain of optimizers: one, or that of dense parameters and that of experts."""


def chain_of(state: object, places: Mapping[str, Place]) -> Chain | None:
    """All groups in the order of the chain of optimizers; None where any cannot be found."""
    return _all_found([saved_groups(one) for one in parts_of(state)]) or _sharded_groups(places)


def parts_of(state: object) -> list[object]:
    """What is saved of each of a chain of optimizers, itself where there is but one.

    Several are a list in format `torch`, by number in `torch_dist` (`ChainedOptimizer.state_dict` and
    `sharded_state_dict`, core/optimizer/optimizer.py, 0.16.1 to 0.19.2).
    """
    numbers = sorted(key for key in state if isinstance(key, int)) if isinstance(state, Mapping) else []
    if isinstance(state, Mapping) and numbers:
        return [state[number] for number in numbers]
    return state if isinstance(state, list) else [state]


def _all_found(chain: Sequence[list[Group] | None]) -> Chain | None:
    found = tuple(tuple(groups) for groups in chain if groups is not None)
    return found if found and len(found) == len(chain) else None


def _sharded_groups(places: Mapping[str, Place]) -> Chain | None:
    """Those that lie among the tensors, of the first model-parallel rank of each optimizer: all ranks have the same."""
    first: dict[str, tuple[int, Place]] = {}
    for name, place in places.items():
        match = _GROUPS.fullmatch(name)
        if match is not None:
            prefix, number = match[1], int(match[2])
            first[prefix] = min(first.get(prefix, (number, place)), (number, place))
    return _all_found([saved_groups(read_object(first[prefix][1])) for prefix in sorted(first)])
