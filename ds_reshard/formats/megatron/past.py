"""What a checkpoint of Megatron-LM says of its schedule: scheduler state, param groups and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

from ds_reshard.containers.dcp_directory import Place
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.formats.megatron.files import find_iteration, read_common, read_object
from ds_reshard.formats.megatron.groups import Group, saved_groups
from ds_reshard.model.records import ObjectRecord
from ds_reshard.resume.megatron_past import MegatronPast
from ds_reshard.resume.megatron_schedule import extra_values, read_schedule

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
    arguments = _arguments(common.get("args"))
    schedule = read_schedule(state, where=folder, extra=extra_values(SimpleNamespace(**arguments)))
    return MegatronPast(
        where=folder, schedule=schedule, groups=_groups(common.get("optimizer"), places), arguments=arguments
    )


def _arguments(held: object) -> dict[str, object]:
    """The attributes of a pickled `argparse.Namespace`."""
    state = held.state if isinstance(held, ObjectRecord) else None
    return {name: value for name, value in state.items() if isinstance(name, str)} if isinstance(state, dict) else {}


def _groups(state: object, places: Mapping[str, Place]) -> tuple[Group, ...] | None:
    """All groups in the order of the chain of optimizers; None where any cannot be found."""
    found = saved_groups(state)
    if found is not None:
        return tuple(found)
    chain: list[object] = []
    if isinstance(state, list):
        chain = state
    elif isinstance(state, Mapping):
        chain = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    of_chain = [saved_groups(one) for one in chain]
    if of_chain and all(groups is not None for groups in of_chain):
        return tuple(group for groups in of_chain for group in groups or ())
    return _sharded_groups(places)


def _sharded_groups(places: Mapping[str, Place]) -> tuple[Group, ...] | None:
    """Those that lie among the tensors, of the first model-parallel rank of each optimizer: all ranks have the same."""
    first: dict[str, tuple[int, Place]] = {}
    for name, place in places.items():
        match = _GROUPS.fullmatch(name)
        if match is not None:
            prefix, number = match[1], int(match[2])
            first[prefix] = min(first.get(prefix, (number, place)), (number, place))
    held = [saved_groups(read_object(first[prefix][1])) for prefix in sorted(first)]
    if not held or any(groups is None for groups in held):
        return None
    return tuple(group for groups in held for group in groups or ())
