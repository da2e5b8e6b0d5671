"""The seam of FSDP1's optimizer-state gathering: torch's own, given what it can gather."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import raise_faults
from ds_reshard.hosts.fsdp.agreement import Agreement, agree
from ds_reshard.hosts.fsdp.units import Key, States, Unit, on_cpu, parameters_of, tensors, units_of
from ds_reshard.operations import ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer

logger = logging.getLogger("ds_reshard")


def gather(arguments: Mapping[str, object], by_torch: Callable[[dict[str, object]], object]) -> object:
    """Gather as torch does, the optimizer itself left as it is; `arguments` are those of `_optim_state_dict_impl`.

    Empty entries of frozen parameters, which torch takes for a state, are left out. Where the element types of a unit
    differ, its states are gathered in a type that holds them all, and given back in their own. Collective: raises
    UnsupportedLayout on every rank, before torch gathers anything, where torch would stop on some and wait on others.
    """
    model = cast("Module", arguments["model"])
    state_dict = cast("Mapping[str, object]", arguments["optim_state_dict"])
    if arguments["optim"] is None or arguments["optim_input"] is not None or "state" not in state_dict:
        return by_torch({})
    state = cast("Mapping[Key, States]", state_dict["state"])
    use_orig_params = _use_orig_params(model)
    parameters = parameters_of(cast("Optimizer", arguments["optim"]), model, state_dict)
    units = units_of(model, parameters, state, use_orig_params=use_orig_params)
    group = cast("ProcessGroup | None", arguments["group"])
    agreed = agree(ranks.gather({unit.name: unit.shards for unit in units}, group), use_orig_params=use_orig_params)
    raise_faults(agreed.faults, subject="gathering the optimizer state of FSDP")
    _warn(agreed, group)
    ready = _promoted(_without_empty(state, units, use_orig_params=use_orig_params), units, agreed)
    changed: dict[str, object] = {"optim_state_dict": {**state_dict, "state": ready}}
    if on_cpu(model):
        # .cpu() copies nothing there, and the buffer of the gather is used again for the next state: with
        # cpu_offload=False torch clones (`_unflatten_orig_param_states`, _optim_utils.py, 2.13).
        changed["cpu_offload"] = False
    return _restored(by_torch(changed), agreed)


def _use_orig_params(model: Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return bool(FullyShardedDataParallel.fsdp_modules(model)[0]._use_orig_params)


def _warn(agreed: Agreement, group: ProcessGroup | None) -> None:
    import torch.distributed as dist

    if agreed.uneven and dist.get_rank(group) == 0:
        shown = "; ".join(agreed.uneven[:8]) + ("; ..." if len(agreed.uneven) > 8 else "")
        logger.warning(
            "FSDP: %d optimizer states are of other element types on other ranks, and are saved in one that holds "
            "both: %s. The ranks do not compute alike: look for a cast that some of them make",
            len(agreed.uneven),
            shown,
        )


def _without_empty(state: Mapping[Key, States], units: list[Unit], *, use_orig_params: bool) -> Mapping[Key, States]:
    """The state without the empty entries of frozen parameters that a look into `optimizer.state` has left.

    Of a flat parameter they do no harm.
    """
    if not use_orig_params:
        return state
    frozen = {unit.keys[name] for unit in units for name in unit.frozen}
    return {key: states for key, states in state.items() if states or key not in frozen}


def _promoted(state: Mapping[Key, States], units: list[Unit], agreed: Agreement) -> dict[Key, States]:
    """The state with copies of the states that are gathered in another type than they are held in."""
    import torch

    ready = dict(state)
    for unit in units:
        for key in unit.keys.values():
            if key is None or key not in state:
                continue
            wide = {
                name: tensor.to(getattr(torch, agreed.promoted[unit.name, name]))
                for name, tensor in tensors(state[key])
                if (unit.name, name) in agreed.promoted
            }
            ready[key] = {**state[key], **wide} if wide else state[key]
    return ready


def _restored(gathered: object, agreed: Agreement) -> object:
    """What torch has gathered, each state in the type in which the ranks hold it."""
    import torch

    if isinstance(gathered, dict) and agreed.promoted:
        for (name, state), dtype in agreed.original.items():
            states = gathered.get("state", {}).get(name, {})
            if dtype is not None and state in states:
                states[state] = states[state].to(getattr(torch, dtype))
    return gathered
