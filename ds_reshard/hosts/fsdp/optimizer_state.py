"""The seams of FSDP1's optimizer state: torch's own gathering, given what it can gather.

Each rank tells what it holds of each unit in plain values, and all judge these alike: what is promoted to another
element type, what differs, what is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import Fault, UnsupportedLayout, error_of, raise_faults
from ds_reshard.hooks import Call
from ds_reshard.operations import ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

logger = logging.getLogger("ds_reshard")
_ADAMW = "torch.optim.AdamW(model.parameters(), ...), or save optimizer.state_dict() of each rank"
Key = int | str
States = Mapping[str, object]


def refuse_mixed(params: Sequence[Tensor], module: Module) -> None:
    """Raise UnsupportedLayout where frozen and trainable parameters would become one flat parameter.

    torch raises a ValueError there that names none of them (`_validate_tensors_to_flatten`, 2.13).
    """
    if len({param.requires_grad for param in params}) < 2:
        return
    names = {id(param): name for name, param in module.named_parameters()}
    frozen, trainable = (
        ", ".join(sorted(names.get(id(param), "?") for param in params if param.requires_grad is wanted)[:8])
        for wanted in (False, True)
    )
    fault = UnsupportedLayout.fault(
        f"FSDP unit {type(module).__name__}",
        "frozen and trainable parameters cannot be flattened into one with use_orig_params=False",
        "all frozen or all trainable",
        f"frozen {frozen}; trainable {trainable}",
        mend="FSDP(model, use_orig_params=True, ...), or give the frozen modules FSDP units of their own",
    )
    raise error_of([fault], subject="building FSDP")


def gather(call: Call) -> object:
    """Gather as torch does, the optimizer itself left as it is: `_optim_state_dict_impl`.

    Empty entries of frozen parameters, which torch takes for a state, are left out. Where the element types of a unit
    differ, its states are gathered in a type that holds them all, and given back in their own. Collective: raises
    UnsupportedLayout on every rank, before torch gathers anything, where torch would stop on some and wait on others.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = cast("Module", call["model"])
    state_dict = cast("Mapping[str, object]", call["optim_state_dict"])
    if call["optim"] is None or call["optim_input"] is not None or "state" not in state_dict:
        return call()
    state = cast("Mapping[Key, States]", state_dict["state"])
    use_orig_params = bool(FullyShardedDataParallel.fsdp_modules(model)[0]._use_orig_params)
    parameters = parameters_of(cast("Optimizer", call["optim"]), model, state_dict)
    units = units_of(model, parameters, state, use_orig_params=use_orig_params)
    group = cast("ProcessGroup | None", call["group"])
    agreed = agree(ranks.gather({unit.name: unit.shards for unit in units}, group), use_orig_params=use_orig_params)
    raise_faults(agreed.faults, subject="gathering the optimizer state of FSDP")
    if agreed.uneven and ranks.rank(group) == 0:
        logger.warning(
            "FSDP: %d optimizer states are of other element types on other ranks, and are saved in one that holds "
            "both: %s. The ranks do not compute alike: look for a cast that some of them make",
            len(agreed.uneven),
            "; ".join(agreed.uneven[:8]) + ("; ..." if len(agreed.uneven) > 8 else ""),
        )
    ready = _promote(_without_empty(state, units, use_orig_params=use_orig_params), units, agreed)
    changed: dict[str, object] = {"optim_state_dict": {**state_dict, "state": ready}}
    if on_cpu(model):
        # .cpu() copies nothing there, and the buffer of the gather is used again for the next state: with
        # cpu_offload=False torch clones (`_unflatten_orig_param_states`, _optim_utils.py, 2.13).
        changed["cpu_offload"] = False
    return _restored(call(**changed), agreed)


def _without_empty(state: Mapping[Key, States], units: list[Unit], *, use_orig_params: bool) -> Mapping[Key, States]:
    """The state without the empty entries of frozen parameters that a look into `optimizer.state` has left.

    Of a flat parameter they do no harm.
    """
    if not use_orig_params:
        return state
    frozen = {unit.keys[name] for unit in units for name in unit.frozen}
    return {key: states for key, states in state.items() if states or key not in frozen}


def _promote(state: Mapping[Key, States], units: list[Unit], agreed: Agreement) -> dict[Key, States]:
    """The state with copies of the states that are gathered in another type than they are held in."""
    import torch

    ready = dict(state)
    for unit in units if agreed.promoted else ():
        for key in (key for key in unit.keys.values() if key is not None and key in state):
            wide = {
                name: tensor.to(getattr(torch, agreed.promoted[unit.name, name]))
                for name, tensor in tensors(state[key])
                if (unit.name, name) in agreed.promoted
            }
            ready[key] = {**state[key], **wide}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """A state of one parameter: its element type, and its shape where it is not that of the shard."""

    dtype: str
    odd_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank holds of a parameter of which it has elements; of a flat parameter, `names` are its members."""

    frozen: bool
    states: Mapping[str, HeldState]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One flat parameter of FSDP1 that is sharded, so that its state is gathered.

    `name` is the same on every rank, that of its first parameter; `keys` are the keys in the optimizer's state dict of
    its parameters, by name; with `use_orig_params=False` the one key is that of the flat parameter, under `name`.
    """

    name: str
    keys: Mapping[str, Key | None]
    frozen: frozenset[str]
    shards: Mapping[str, Shard]


def units_of(
    model: Module, parameters: Mapping[Key, Parameter], state: Mapping[Key, States], *, use_orig_params: bool
) -> list[Unit]:
    """The units of a model whose state torch gathers, in the order of their names; the same units on every rank.

    A unit on one rank, or of NO_SHARD, is handed out as it is (`_gather_all_orig_param_state` and
    `_communicate_optim_state`, torch/distributed/fsdp/_optim_utils.py, 2.13).
    """
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    names = _get_param_to_fqns(model)
    keys: dict[str, Key] = {names[param][0]: key for key, param in parameters.items() if param in names}
    infos = {id(info): info for info in _get_fqn_to_fsdp_param_info(model).values()}
    units = []
    for info in infos.values():
        if info.state.world_size == 1 or info.state.sharding_strategy == ShardingStrategy.NO_SHARD:
            continue
        members = tuple(info.param_indices)
        flat = info.handle.flat_param
        if use_orig_params:
            frozen = frozenset(n for n, i in info.param_indices.items() if not info.param_requires_grad[i])
            sizes = {n: flat._shard_param_infos[i].numel_in_shard or 0 for n, i in info.param_indices.items()}
        else:
            frozen = frozenset() if flat.requires_grad else frozenset(members[:1])
            sizes = {members[0]: flat._sharded_size.numel()}
        shards = {
            name: Shard(
                frozen=name in frozen,
                states=_held(state.get(keys.get(name, -1), {}), numel),
                names=(name,) if use_orig_params else members,
            )
            for name, numel in sizes.items()
            if numel
        }
        units.append(Unit(name=members[0], keys={name: keys.get(name) for name in sizes}, frozen=frozen, shards=shards))
    return sorted(units, key=lambda unit: unit.name)


def parameters_of(optimizer: Optimizer, model: Module, state_dict: Mapping[str, object]) -> Mapping[Key, Parameter]:
    """The parameter of each key of an optimizer's state dict: numbered in order, or named by a NamedOptimizer."""
    from torch.distributed.fsdp import _optim_utils as torchs
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns

    found: Mapping[Key, Parameter] = torchs._get_param_key_to_param(
        optimizer,
        model,
        torchs._is_named_optimizer(dict(state_dict)),
        _get_param_to_fqns(model),
        torchs._get_flat_param_to_fqn(model),
    )
    return found


def on_cpu(model: Module) -> bool:
    """Whether every FSDP unit of a model computes on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    modules = FullyShardedDataParallel.fsdp_modules(model)
    return all(module.compute_device is not None and module.compute_device.type == "cpu" for module in modules)


def tensors(states: States) -> Iterator[tuple[str, Tensor]]:
    """The states that torch gathers: tensors of one dimension or more; others are taken from each rank as they are."""
    import torch

    for name, value in states.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            yield name, value


def _held(states: States, numel: int) -> Mapping[str, HeldState]:
    return {
        name: HeldState(
            dtype=str(tensor.dtype).removeprefix("torch."),
            odd_shape=None if local(tensor).numel() == numel else tuple(tensor.shape),
        )
        for name, tensor in tensors(states)
    }


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that tensor parallelism has divided."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`promoted` is the element type in which a state is gathered, by unit and state, where the held ones differ.

    `original` is the type in which all ranks hold a state, by parameter and state; None where they differ. `uneven`
    tells of the latter in words.
    """

    promoted: Mapping[tuple[str, str], str]
    original: Mapping[tuple[str, str], str | None]
    uneven: tuple[str, ...]
    faults: tuple[Fault, ...]


def agree(ranks: Sequence[Mapping[str, Mapping[str, Shard]]], *, use_orig_params: bool) -> Agreement:
    """Judge what the ranks hold, given in rank order.

    torch gathers all states of a unit through one buffer of one element type, that of the parameter whose name sorts
    last; with use_orig_params=False each state has a buffer of its own, of the type that the rank itself holds
    (`_allgather_orig_param_states`, `_communicate_optim_state`, torch/distributed/fsdp/_optim_utils.py, 2.13).
    """
    promoted: dict[tuple[str, str], str] = {}
    original: dict[tuple[str, str], str | None] = {}
    faults: list[Fault] = []
    uneven: list[str] = []
    for unit in dict.fromkeys(name for shards in ranks for name in shards):
        held = [shards.get(unit, {}) for shards in ranks]
        faults += _lacking(held)
        faults += _odd(held)
        types = _types(held)
        buffers = [list(types)] if use_orig_params else [[state] for state in types]
        for states in buffers:
            found = sorted({dtype for state in states for dtype in types[state]})
            if len(found) < 2:
                continue
            wide = _promoted(found)
            if wide is None:
                what = "the states of its FSDP unit are of element types that no type holds without loss"
                expected = "floating-point types of 16 bits or more"
                faults.append(UnsupportedLayout.fault(unit, what, expected, ", ".join(found), mend=_ADAMW))
                continue
            promoted |= {(unit, state): wide for state in states}
            for (name, state), of_rank in sorted(_by_rank(held).items()):
                first, *others = dict.fromkeys(of_rank.values())
                original[name, state] = None if others else first
                if others:
                    told = ", ".join(f"rank {rank} {dtype}" for rank, dtype in of_rank.items())
                    uneven.append(f"{name} {state} ({told})")
    return Agreement(promoted=promoted, original=original, uneven=tuple(uneven), faults=tuple(faults))


def _states(held: Sequence[Mapping[str, Shard]]) -> Iterator[tuple[int, str, str, HeldState]]:
    """Every state that the ranks hold of a unit: the rank, the shard's name, the state's, and how it is held."""
    for rank, shards in enumerate(held):
        for name, shard in shards.items():
            yield from ((rank, name, state, how) for state, how in shard.states.items())


def _types(held: Sequence[Mapping[str, Shard]]) -> dict[str, set[str]]:
    """The element types of each state of a unit."""
    types: dict[str, set[str]] = {}
    for _, _, state, how in _states(held):
        types.setdefault(state, set()).add(how.dtype)
    return types


def _by_rank(held: Sequence[Mapping[str, Shard]]) -> dict[tuple[str, str], dict[int, str]]:
    """The element type in which each rank holds a state, by parameter and state."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for rank, shard, state, how in _states(held):
        for name in held[rank][shard].names:
            found.setdefault((name, state), {})[rank] = how.dtype
    return found


def _promoted(found: Sequence[str]) -> str | None:
    """The floating-point type that holds every value of these, None where torch has none."""
    import functools

    import torch

    types = [getattr(torch, name) for name in found]
    if not all(one.is_floating_point and one.itemsize > 1 for one in types):
        return None
    return str(functools.reduce(torch.promote_types, types)).removeprefix("torch.")


def _lacking(held: Sequence[Mapping[str, Shard]]) -> Iterator[Fault]:
    """Parameters that lack a state which others of their unit have: torch stops on these ranks, and others wait."""
    states = sorted(_types(held))
    stateful = {name for shards in held for name, shard in shards.items() if shard.states}
    for rank, shards in enumerate(held):
        for name, shard in shards.items():
            lacks = [state for state in states if state not in shard.states]
            if lacks and (name in stateful or not shard.frozen):
                yield UnsupportedLayout.fault(
                    name,
                    f"has no {', '.join(lacks)} on rank {rank}, and other parameters of its FSDP unit have",
                    ", ".join(states),
                    ", ".join(shard.states) or "no state",
                    mend="take an optimizer step in which it has a gradient before saving, or give it an FSDP unit of "
                    "its own",
                )


def _odd(held: Sequence[Mapping[str, Shard]]) -> Iterator[Fault]:
    """States that are not of their parameter's shape, so that they cannot be brought from shards to the whole."""
    for _, name, state, how in _states(held):
        if how.odd_shape is not None:
            what = (
                f"its state {state} is not of the parameter's shape, as of a quantised or factored optimizer: FSDP "
                "cannot gather it"
            )
            expected, found = "one element for each of the shard", f"{how.dtype} {list(how.odd_shape)}"
            yield UnsupportedLayout.fault(name, what, expected, found, mend=_ADAMW)
