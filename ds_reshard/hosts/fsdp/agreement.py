"""What all ranks hold of each unit, judged alike on every rank: what is promoted, what differs, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.hosts.fsdp.units import Shard

Shards = Mapping[str, Mapping[str, Shard]]
"""By unit and parameter: what one rank holds."""


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


def agree(ranks: Sequence[Shards], *, use_orig_params: bool) -> Agreement:
    """Judge what the ranks hold, given in rank order.

    torch gathers all states of a unit through one buffer of one element type, that of the parameter whose name sorts
    last; with use_orig_params=False each state has a buffer of its own, of the type that the rank itself holds
    (`_allgather_orig_param_states`, `_communicate_optim_state`, torch/distributed/fsdp/_optim_utils.py, 2.13).
    """
    promoted: dict[tuple[str, str], str] = {}
    original: dict[tuple[str, str], str | None] = {}
    faults: list[Fault] = []
    uneven: list[str] = []
    for unit in dict.fromkeys(name for of_rank in ranks for name in of_rank):
        held = [of_rank.get(unit, {}) for of_rank in ranks]
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
                faults.append(_no_common(unit, found))
                continue
            promoted |= {(unit, state): wide for state in states}
            original |= _originals(held)
            uneven += _uneven(held)
    return Agreement(promoted=promoted, original=original, uneven=tuple(uneven), faults=tuple(faults))


def _types(held: Sequence[Mapping[str, Shard]]) -> dict[str, set[str]]:
    """The element types of each state of a unit."""
    types: dict[str, set[str]] = {}
    for shards in held:
        for shard in shards.values():
            for state, how in shard.states.items():
                types.setdefault(state, set()).add(how.dtype)
    return types


def _by_rank(held: Sequence[Mapping[str, Shard]]) -> dict[tuple[str, str], dict[int, str]]:
    """The element type in which each rank holds a state, by parameter and state."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for rank, shards in enumerate(held):
        for shard in shards.values():
            for state, how in shard.states.items():
                for name in shard.names:
                    found.setdefault((name, state), {})[rank] = how.dtype
    return found


def _originals(held: Sequence[Mapping[str, Shard]]) -> dict[tuple[str, str], str | None]:
    return {
        at: next(iter(types.values())) if len(set(types.values())) == 1 else None
        for at, types in _by_rank(held).items()
    }


def _uneven(held: Sequence[Mapping[str, Shard]]) -> Iterator[str]:
    for (name, state), types in sorted(_by_rank(held).items()):
        if len(set(types.values())) > 1:
            yield f"{name} {state} ({', '.join(f'rank {rank} {dtype}' for rank, dtype in types.items())})"


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
    for shards in held:
        for name, shard in shards.items():
            for state, how in shard.states.items():
                if how.odd_shape is not None:
                    yield UnsupportedLayout.fault(
                        name,
                        f"its state {state} is not of the parameter's shape, as of a quantised or factored "
                        "optimizer: FSDP cannot gather it",
                        "one element for each of the shard",
                        f"{how.dtype} {list(how.odd_shape)}",
                        mend="torch.optim.AdamW(model.parameters(), ...), or save optimizer.state_dict() of each rank",
                    )


def _no_common(unit: str, found: Sequence[str]) -> Fault:
    return UnsupportedLayout.fault(
        unit,
        "the states of its FSDP unit are of element types that no type holds without loss",
        "floating-point types of 16 bits or more",
        ", ".join(found),
        mend="torch.optim.AdamW(model.parameters(), ...), or save optimizer.state_dict() of each rank",
    )
