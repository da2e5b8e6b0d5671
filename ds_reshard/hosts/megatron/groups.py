"""Which saved param group belongs to which live one, found from what a group is and never guessed.

Megatron matches by `param_group_identifier_keys`, up to 0.18.2 (wd_mult, lr_mult, is_expert_parallel,
is_decoupled_lr): groups that differ in their bounds alone (muP; `decoupled_lr`, for which is_decoupled_lr stays
False) share a key, and the last one's values go to all of them. From 0.19 the key holds the bounds themselves,
and a run that changes one matches nothing (core/optimizer/optimizer.py and distrib_optimizer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ds_reshard.errors import Fault
from ds_reshard.hosts.megatron.live import Group

STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
"""What a group is, whatever the learning rate; NeMo writes `pre_` before the first two."""

BOUNDS = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What the scheduler reads of a group (`OptimizerParamScheduler.get_lr`, `get_wd`)."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a group's parameters, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """`order[i]` is the saved group of live group i; empty where `faults` say why there is none."""

    order: tuple[int, ...]
    faults: tuple[Fault, ...] = ()


_Split = Callable[[int], Hashable]


def match_groups(
    live: Sequence[Group],
    saved: Sequence[Group],
    *,
    where: str,
    live_shapes: Sequence[Shapes] | None = None,
    saved_shapes: Sequence[Shapes] | None = None,
) -> Matched:
    """Pair live and saved groups one to one; ParamGroupMismatch faults where that would be a guess.

    By structure; where several are alike in that, by the shapes of their parameters where the checkpoint says
    which group had which, by whether they follow the schedule's own bounds (`default_config`), by eps, and by
    their bounds relative to the default group's or as they are. Groups that are alike in all of that too are
    taken in order if their parameters are known, or if nothing tells them apart at all.
    """
    if len(live) != len(saved):
        return _unmatched(where, live, saved, "another number of param groups")
    keys = [structure(group) for group in live], [structure(group) for group in saved]
    if Counter(keys[0]) != Counter(keys[1]):
        return _unmatched(where, live, saved, "param groups of another kind")
    shapes = (live_shapes, saved_shapes) if live_shapes is not None and saved_shapes is not None else None
    order: dict[int, int] = {}
    for key in dict.fromkeys(keys[0]):
        mine = [index for index, other in enumerate(keys[0]) if other == key]
        theirs = [index for index, other in enumerate(keys[1]) if other == key]
        if shapes is not None and Counter(shapes[0][i] for i in mine) != Counter(shapes[1][j] for j in theirs):
            return _unmatched(where, live, saved, "param groups with other parameters")
        pairs = _pair(live, saved, mine, theirs, shapes)
        if pairs is None:
            return _unmatched(where, live, saved, "param groups that cannot be told apart without a guess")
        order.update(pairs)
    return Matched(order=tuple(order[index] for index in range(len(live))))


def structure(group: Group) -> tuple[object, ...]:
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in STRUCTURE)


def bounds(group: Group) -> tuple[object, ...]:
    """The scheduler's values of a group; None for what it has not."""
    return tuple(group.get(name) for name in BOUNDS)


def _pair(
    live: Sequence[Group], saved: Sequence[Group], mine: list[int], theirs: list[int],
    shapes: tuple[Sequence[Shapes], Sequence[Shapes]] | None,
) -> dict[int, int] | None:  # fmt: skip
    """Pairs of groups of one structure, or None where more than one pairing is possible."""
    if len(mine) == 1:
        return {mine[0]: theirs[0]}
    evidence: list[tuple[_Split, _Split]] = []
    if shapes is not None:
        of_live, of_saved = shapes
        evidence.append((lambda i: of_live[i], lambda j: of_saved[j]))
    evidence += [
        (lambda i: live[i].get("default_config"), lambda j: saved[j].get("default_config")),
        (lambda i: live[i].get("eps"), lambda j: saved[j].get("eps")),
    ]
    parts = [(mine, theirs)]
    for of_mine, of_theirs in evidence:
        parts = [piece for part in parts for piece in _split(part, of_mine, of_theirs)]
    pairs: dict[int, int] = {}
    for part in parts:
        found = _pair_alike(live, saved, part, known=shapes is not None)
        if found is None:
            return None
        pairs.update(found)
    return pairs


def _split(part: tuple[list[int], list[int]], mine: _Split, theirs: _Split) -> list[tuple[list[int], list[int]]]:
    """Cut a part by a property, if both sides have it the same number of times each; else leave it whole."""
    first, second = part
    if Counter(map(mine, first)) != Counter(map(theirs, second)):
        return [part]
    return [
        ([i for i in first if mine(i) == value], [j for j in second if theirs(j) == value])
        for value in dict.fromkeys(map(mine, first))
    ]


def _pair_alike(
    live: Sequence[Group], saved: Sequence[Group], part: tuple[list[int], list[int]], *, known: bool
) -> dict[int, int] | None:
    """Pair groups that only their bounds tell apart; None where the bounds do not say.

    Where both are to be had, multiples of the default bounds and the bounds as they are give the same pairs.
    """
    mine, theirs = part
    if len(mine) == 1:
        return {mine[0]: theirs[0]}
    found = _by_value(mine, theirs, _ratios(live), _ratios(saved))
    found = found or _by_value(mine, theirs, lambda i: bounds(live[i]), lambda j: bounds(saved[j]))
    if found is not None:
        return found
    alike = all(_values(live[i]) == _values(live[mine[0]]) for i in mine)
    alike = alike and all(_values(saved[j]) == _values(saved[theirs[0]]) for j in theirs)
    return dict(zip(mine, theirs, strict=True)) if known or alike else None


def _by_value(mine: list[int], theirs: list[int], of_mine: _Split, of_theirs: _Split) -> dict[int, int] | None:
    """Pairs of equal values, if each value is there once on either side."""
    found = {of_theirs(j): j for j in theirs}
    wanted = [of_mine(i) for i in mine]
    if len(found) != len(theirs) or len(set(wanted)) != len(mine) or set(wanted) != set(found):
        return None
    return {i: found[value] for i, value in zip(mine, wanted, strict=True)}


def _ratios(groups: Sequence[Group]) -> _Split:
    """The bounds of a group as multiples of those of the group that follows the schedule; itself unique where none."""
    default = next((group for group in groups if group.get("default_config") is True), None)

    def ratio(index: int) -> Hashable:
        values: list[float] = []
        for name in BOUNDS:
            base, value = (default or {}).get(name), groups[index].get(name)
            if value == base:
                values.append(1.0)
            elif not isinstance(base, (int, float)) or not isinstance(value, (int, float)) or base <= 0:
                return ("unknown", id(groups), index)
            else:
                values.append(round(value / base, 9))
        return tuple(values)

    return ratio


def _values(group: Group) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "weight_decay", "step")}


def _unmatched(where: str, live: Sequence[Group], saved: Sequence[Group], what: str) -> Matched:
    fault = Fault(
        error="ParamGroupMismatch",
        where=where,
        what=f"the checkpoint has {what}",
        expected="; ".join(_describe(group) for group in saved),
        found="; ".join(_describe(group) for group in live),
        mend="build the optimizer with the param groups that were saved, or add --no-load-optim to start it anew",
    )
    return Matched(order=(), faults=(fault,))


def _describe(group: Group) -> str:
    names = (*STRUCTURE, *BOUNDS, "default_config")
    held = [f"{name}={group[name]}" for name in names if group.get(name) is not None and group[name] is not False]
    return f"({', '.join(held)})"
