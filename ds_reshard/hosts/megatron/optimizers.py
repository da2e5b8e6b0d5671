"""The seams of the optimizers' `load_state_dict`: states and fp32 masters by Megatron, param groups as asked.

Rung 2 of the ladder (methods on classes): Megatron publishes no extension point, and matches groups inside these
methods by `param_group_identifier_keys`, which the modules look up when they are called (core/optimizer/
optimizer.py and distrib_optimizer.py, 0.16.1 to 0.19.2). Here the groups are matched first, brought into the
order of the live ones, and identified to Megatron by their position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.megatron.groups import saved_groups
from ds_reshard.hosts.megatron.current import Load, current, is_building
from ds_reshard.hosts.megatron.groups import OF_SCHEDULE, Shapes, match_groups
from ds_reshard.hosts.megatron.live import Group, Optimizer, live_groups
from ds_reshard.hosts.megatron.moments import fresh_moments, masters_faults
from ds_reshard.hosts.megatron.scheduler import asked_checkpoint, given_by, loaded_scheduler_of, scheduler_of
from ds_reshard.hosts.megatron.settle import group_differences, hyperparameter_faults, remember, run_groups, settle
from ds_reshard.resume.asked import asked_policy

if TYPE_CHECKING:
    import torch

_POSITION = "_ds_reshard_position"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
LATE = "resuming, but late: the model has the checkpoint's weights already, so end this process"
"""Only where groups could not be read beforehand (`with_sharded_groups`) does Megatron bring them this late."""
_HOLDERS = ("optimizer", "optimizer_state_dict")


def load_optimizer(optimizer: Optimizer, original: Callable[[object], object], state_dict: object) -> Load | None:
    """Load one optimizer as the policy in force says; its groups are unchanged where matching or comparing raises.

    Every rank calls it for its own part. Afterwards each live group has its own saved group's values, but for
    those that the policy takes from this run, and Megatron has loaded states and masters as it does. Raises
    ParamGroupMismatch where groups cannot be matched without a guess, ScheduleMismatch where bounds differ and
    must not. Returns the load, or None where this was none: no parameters here, or an optimizer that allocates
    its state by loading its own.
    """
    saved = saved_groups(state_dict)
    sharded_by_fsdp = getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False)
    if getattr(optimizer, "optimizer", None) is None or saved is None or sharded_by_fsdp:
        original(state_dict)
        return None
    if is_building():
        _put(optimizer, original, state_dict, saved, None)
        return None
    load = current() or _own_load(optimizer)
    policy, run = load.policy, run_groups(optimizer)
    if load.own_loop:
        wrong = [*hyperparameter_faults(optimizer, policy), *masters_faults(optimizer, policy)]
        raise_faults(wrong, subject="resuming the optimizer")
    faults, saved, order = matched_groups(optimizer, state_dict, load)
    takes_saved = load.own_loop and asked_checkpoint(scheduler_of(optimizer))
    compares = policy.scheduler == "host" and compares_bounds() and not takes_saved
    if not faults and (policy.scheduler == "strict" or compares):
        differ = group_differences(run, saved, policy=policy)
        faults = [] if policy.schedule_is_this_runs else differ
    raise_faults(faults, subject="resuming the optimizer" if load.own_loop else LATE)
    if load.own_loop and (policy.optimizer == "skip" or policy.finetune):
        optimizer.reload_model_params()
        remember(optimizer, run, saved)
        return load
    resolved = [dict(group) for group in saved]
    for group, mine, kept in zip(resolved, run, saved, strict=True):
        settle(group, mine, kept, policy)
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = scaler.state_dict() if scaler is not None and policy.takes("loss_scale") else None
    _put(optimizer, original, state_dict, resolved, order)
    if scaler is not None and scale is not None:
        scaler.load_state_dict(scale)
    remember(optimizer, run, saved)
    loaded = loaded_scheduler_of(optimizer)
    if loaded is not None:
        loaded.step(0)
    if load.own_loop and policy.optimizer == "masters":
        fresh_moments(optimizer)
    return load


def _own_load(optimizer: Optimizer) -> Load:
    """A load of a loop of the user's own; a scheduler that was built to override asks for that."""
    policy = asked_policy(*given_by(scheduler_of(optimizer)))
    return Load(policy=policy, optimizer=optimizer, scheduler=None, own_loop=True)


def load_parameter_state(optimizer: Optimizer, original: Callable[[], object]) -> object:
    """The rest of a distributed optimizer's state, which comes after `load_state_dict` and overwrites fresh moments."""
    answer = original()
    if current() is None and asked_policy().optimizer == "masters" and optimizer.optimizer is not None:
        fresh_moments(optimizer)
    return answer


def matched_groups(
    optimizer: Optimizer, state: object, load: Load
) -> tuple[list[Fault], list[Group], tuple[int, ...] | None]:
    """Faults, or the saved groups in the order of the live ones, each with the `params` that its live group loads.

    Last the index of each among the saved groups, or None where parameters are numbered as the live ones. Bounds
    of a saved group that may be another one's are left out.
    """
    live, saved = live_groups(optimizer), saved_groups(state) or []
    own = load.read_in_place or _names_live_parameters(optimizer, state)
    matched = match_groups(
        live,
        saved,
        where=load.where,
        policy=load.policy,
        live_shapes=_live_shapes(live),
        saved_shapes=None if own else _saved_shapes(state, saved),
        moves_states=load.policy.loads_masters and not own and _holds_states(state),
    )
    if matched.faults:
        return list(matched.faults), [], None
    ordered = [
        {name: value for name, value in saved[index].items() if not (unknown and name in OF_SCHEDULE)}
        for index, unknown in ((index, mine in matched.bounds_unknown) for mine, index in enumerate(matched.order))
    ]
    if own:  # `torch_dist`: entry i names the parameters of live group i, whichever group its values are of
        for group, entry in zip(ordered, saved, strict=True):
            if "params" in entry:
                group["params"] = entry["params"]
    return [], ordered, None if own else matched.order


def _holds_states(state: object) -> bool:
    """Whether states or masters lie in the state by group, and not beside it by parameter."""
    assert isinstance(state, Mapping)
    return bool(_saved_states(state)) or any(state.get(name) for name in _MASTERS)


def compares_bounds() -> bool:
    """Whether this Megatron counts learning rates among what identifies a group, and so refuses changed ones."""
    from megatron.core.optimizer import optimizer

    return "max_lr" in optimizer.param_group_identifier_keys


def _put(
    optimizer: Optimizer,
    original: Callable[[object], object],
    state_dict: object,
    groups: Sequence[Group],
    order: Sequence[int] | None,
) -> None:
    """Megatron's own method, given the groups in live order; the state that it was given is not changed."""
    with _by_position(optimizer, groups) as marked:
        original(_with_groups(state_dict, marked, order))


@contextmanager
def _by_position(optimizer: Optimizer, groups: Sequence[Group]) -> Iterator[list[Group]]:
    """While inside, live groups and `groups` are identified to Megatron by their position and nothing else."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer import optimizer as plain

    modules = (plain, distrib_optimizer)
    keys = [module.param_group_identifier_keys for module in modules]
    marked = [{**group, _POSITION: index} for index, group in enumerate(groups)]
    try:
        for index, group in enumerate(live_groups(optimizer)):
            group[_POSITION] = index
        for module in modules:
            module.param_group_identifier_keys = (_POSITION,)
        yield marked
    finally:
        for module, key in zip(modules, keys, strict=True):
            module.param_group_identifier_keys = key
        inner = optimizer.optimizer
        for holder in (inner, *getattr(inner, "sub_optimizers", ())):
            for group in getattr(holder, "param_groups", ()):
                group.pop(_POSITION, None)


def _with_groups(state_dict: object, groups: list[Group], order: Sequence[int] | None) -> dict[str, object]:
    """A copy of a state, as deep as its groups lie, that has these groups instead; masters move with their group."""
    assert isinstance(state_dict, Mapping), "saved_groups() has found groups in it"
    state = dict(state_dict)
    if isinstance(state.get("param_groups"), list):
        state["param_groups"] = groups
    else:
        holder = next(name for name in _HOLDERS if isinstance(state.get(name), Mapping))
        state[holder] = {**cast(Mapping[str, object], state[holder]), "param_groups": groups}
    for name in _MASTERS if order is not None else ():
        masters = state.get(name)
        if isinstance(masters, list) and order is not None:
            state[name] = [masters[index] for index in order]
    return state


def _live_shapes(groups: Sequence[Group]) -> list[Shapes]:
    return [
        tuple(tuple(parameter.shape) for parameter in cast("Sequence[torch.Tensor]", group["params"]))
        for group in groups
    ]


def _saved_shapes(state: object, groups: Sequence[Group]) -> list[Shapes] | None:
    """The shapes of each saved group's parameters, from their moments; None where the state does not say."""
    held = _saved_states(state)
    shapes = []
    for group in groups:
        names = group.get("params")
        if not isinstance(names, list):
            return None
        of_group = [_shape(held.get(name)) for name in names]
        if any(shape is None for shape in of_group):
            return None
        shapes.append(tuple(shape for shape in of_group if shape is not None))
    return shapes


def _saved_states(state: object) -> Mapping[object, object]:
    assert isinstance(state, Mapping)
    for holder in (state, *(state.get(name) for name in _HOLDERS)):
        if isinstance(holder, Mapping) and "param_groups" in holder:
            found = holder.get("state")
            return found if isinstance(found, Mapping) else {}
    return {}


def _shape(entry: object) -> tuple[int, ...] | None:
    tensors = entry.values() if isinstance(entry, Mapping) else ()
    return next((tuple(value.shape) for value in tensors if len(getattr(value, "shape", ()))), None)


def _names_live_parameters(optimizer: Optimizer, state: object) -> bool:
    """Whether the state was read in place, so that its parameters are numbered as the live ones.

    `sharded_state_dict` (core/optimizer/optimizer.py) hands out the live states to be read into, and the live
    numbering with them; a state that `torch.load` made shares no memory with the optimizer.
    """
    assert optimizer.optimizer is not None
    places = {
        value.data_ptr()
        for entry in optimizer.optimizer.state.values()
        for value in entry.values()
        if hasattr(value, "data_ptr") and len(getattr(value, "shape", ()))
    }
    return any(
        value.data_ptr() in places
        for entry in _saved_states(state).values()
        for value in (entry.values() if isinstance(entry, Mapping) else ())
        if hasattr(value, "data_ptr") and len(getattr(value, "shape", ()))
    )
