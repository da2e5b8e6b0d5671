"""Which saved param group belongs to which live one, found from what a group is and never guessed.

Megatron matches by `param_group_identifier_keys`, up to 0.18.2 (wd_mult, lr_mult, is_expert_parallel,
is_decoupled_lr): groups that differ in their bounds alone (muP; `decoupled_lr`, for which is_decoupled_lr stays
False) share a key, and the last one's values go to all of them. From 0.19 the key holds the bounds themselves,
and a run that changes one matches nothing (core/optimizer/optimizer.py and distrib_optimizer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from ds_reshard.errors import Fault, ParamGroupMismatch
from ds_reshard.hosts.megatron.live import Group, as_number
from ds_reshard.hosts.megatron.pieces import is_mixed
from ds_reshard.resume.megatron import OVERRIDE
from ds_reshard.resume.policy import ResumePolicy

STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
"""What a group is, whatever the learning rate; NeMo writes `pre_` before the first two."""

BOUNDS = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What the scheduler reads of a group (`OptimizerParamScheduler.get_lr`, `get_wd`)."""

_EXPERTS = "is_expert_parallel"

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a group's parameters, in order."""


TOLD_APART = (*STRUCTURE, "default_config", "eps")
"""What pairs groups beside their parameters: what they are, and not what they learn at."""

OF_SCHEDULE = (*BOUNDS, "lr", "weight_decay")
"""The values of a group that are the schedule's, which a policy takes from one side together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """`order[i]` is the saved group of live group i; empty where `faults` say why there is none.

    `bounds_unknown` are the live groups of which only that is known that it makes no difference to what is used:
    the bounds of the saved group may be another one's.
    """

    order: tuple[int, ...]
    faults: tuple[Fault, ...] = ()
    bounds_unknown: frozenset[int] = frozenset()


_Known = Sequence[Hashable]
_Part = tuple[list[int], list[int]]


def match_groups(
    live: Sequence[Group],
    saved: Sequence[Group],
    *,
    where: str,
    policy: ResumePolicy,
    live_shapes: Sequence[Shapes] | None = None,
    saved_shapes: Sequence[Shapes] | None = None,
    moves_states: bool = True,
) -> Matched:
    """Pair live and saved groups one to one; ParamGroupMismatch faults where that would be a guess.

    By structure; where several are alike in that, by the shapes of their parameters where the checkpoint says
    which group had which, by whether they follow the schedule's own bounds (`default_config`), and by eps. Bounds
    say nothing: two groups may have exchanged theirs since. Groups that only bounds tell apart are paired in three
    cases. Where states do not go with the pairing (`moves_states`) and the policy takes the same from each of
    them, it makes no difference. Where all are equal on either side, there is nothing but their order. And where
    no flag says otherwise and each has the bounds of one that was saved, they are Megatron's own pairs.
    """
    if len(live) != len(saved):
        return _unmatched(where, live, saved, "another number of param groups")
    keys = [structure(group) for group in live], [structure(group) for group in saved]
    if Counter(keys[0]) != Counter(keys[1]):
        return _unmatched(where, live, saved, "param groups of another kind")
    shapes = (live_shapes, saved_shapes) if live_shapes is not None and saved_shapes is not None else None
    order: dict[int, int] = {}
    unknown: set[int] = set()
    faults: list[Fault] = []
    for key in dict.fromkeys(keys[0]):
        mine = [index for index, other in enumerate(keys[0]) if other == key]
        theirs = [index for index, other in enumerate(keys[1]) if other == key]
        if shapes is not None and Counter(shapes[0][i] for i in mine) != Counter(shapes[1][j] for j in theirs):
            return _unmatched(where, live, saved, "param groups with other parameters")
        for part in _parts(live, saved, (mine, theirs), shapes):
            pairs = _pair(live, saved, part, policy, moves_states)
            if pairs is None:
                faults.append(_ambiguous(where, live, saved, part, policy, moves_states))
                continue
            order.update(pairs)
            if len({bounds(saved[j]) for j in part[1]}) > 1 and policy.schedule_is_this_runs:
                unknown.update(part[0])
    if faults:
        return Matched(order=(), faults=tuple(faults))
    return Matched(order=tuple(order[index] for index in range(len(live))), bounds_unknown=frozenset(unknown))


def dealt(saved: Sequence[Group], live: Sequence[Group]) -> list[Group]:
    """The saved groups of one live optimizer: those of experts, or the others.

    Where experts were trained with the dense parameters, those of the dense groups that they would have been in.
    """
    flags = {bool(group.get(_EXPERTS)) for group in live}
    kept = [dict(group) for group in saved if bool(group.get(_EXPERTS)) in flags]
    if kept:
        return kept
    own = {structure(group) for group in live}
    twins = [{**group, _EXPERTS: True} for group in saved]
    return [group for group in twins if structure(group) in own]


def experts_differ(saved: Sequence[Group], where: str) -> list[Fault]:
    """A fault for each group of experts that learns otherwise than the dense group which takes it in."""
    dense = [_values(group) for group in saved if not group.get(_EXPERTS)]
    experts = [{**_values(group), _EXPERTS: False} for group in saved if group.get(_EXPERTS)]
    what = "experts learned otherwise than the dense parameters, with which this run trains them"
    mend = "train with the expert-parallel size that was saved, or add --no-load-optim"
    return [ParamGroupMismatch.fault(where, what, mend=mend) for group in experts if group not in dense]


def structure(group: Group) -> tuple[object, ...]:
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in STRUCTURE)


def bounds(group: Group) -> tuple[object, ...]:
    """The scheduler's values of a group; None for what it has not."""
    return tuple(group.get(name) for name in BOUNDS)


def _parts(
    live: Sequence[Group], saved: Sequence[Group], part: _Part, shapes: tuple[Sequence[Shapes], Sequence[Shapes]] | None
) -> list[_Part]:
    """Groups of one structure, cut by what else tells them apart."""
    evidence: list[tuple[_Known, _Known]] = [shapes] if shapes is not None else []
    for name in ("default_config", "eps"):
        evidence.append(([group.get(name) for group in live], [group.get(name) for group in saved]))
    parts = [part]
    for of_live, of_saved in evidence:
        parts = [piece for one in parts for piece in _split(one, of_live, of_saved)]
    return parts


def _pair(
    live: Sequence[Group], saved: Sequence[Group], part: _Part, policy: ResumePolicy, moves_states: bool
) -> dict[int, int] | None:
    """Pairs of groups that at most their values tell apart, or None where another pairing would make a difference."""
    mine, theirs = part
    in_order = dict(zip(mine, theirs, strict=True))
    if len(mine) == 1 or (not moves_states and not _differing(saved, theirs, policy)):
        return in_order
    if all(_values(live[i]) == _values(live[mine[0]]) for i in mine) and all(
        _values(saved[j]) == _values(saved[theirs[0]]) for j in theirs
    ):
        return in_order
    if policy.scheduler == "host" and not policy.schedule_is_this_runs:
        return _by_bounds(live, saved, part)
    return None


def _differing(saved: Sequence[Group], theirs: list[int], policy: ResumePolicy) -> list[str]:
    """What the policy takes from the checkpoint and is not the same in these saved groups."""
    of_run = {"params", *policy.hyperparameters, *(OF_SCHEDULE if policy.schedule_is_this_runs else ())}
    if policy.takes("weight_decay"):
        of_run.update(("start_wd", "end_wd"))
    names = dict.fromkeys(name for j in theirs for name in saved[j] if name not in of_run)
    first = saved[theirs[0]]
    return [name for name in names if any(as_number(saved[j].get(name)) != as_number(first.get(name)) for j in theirs)]


def _split(part: _Part, live: _Known, saved: _Known) -> list[_Part]:
    """Cut a part by a property, if both sides have it the same number of times each; else leave it whole."""
    mine, theirs = part
    if Counter(live[i] for i in mine) != Counter(saved[j] for j in theirs):
        return [part]
    return [
        ([i for i in mine if live[i] == value], [j for j in theirs if saved[j] == value])
        for value in dict.fromkeys(live[i] for i in mine)
    ]


def _by_bounds(live: Sequence[Group], saved: Sequence[Group], part: _Part) -> dict[int, int] | None:
    """Pairs of equal bounds, if each are there once on either side."""
    mine, theirs = part
    found = {bounds(saved[j]): j for j in theirs}
    wanted = [bounds(live[i]) for i in mine]
    if len(found) != len(theirs) or len(set(wanted)) != len(mine) or set(wanted) != set(found):
        return None
    return {i: found[value] for i, value in zip(mine, wanted, strict=True)}


def _values(group: Group) -> dict[str, object]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "weight_decay", "step")}


def _unmatched(where: str, live: Sequence[Group], saved: Sequence[Group], what: str) -> Matched:
    fault = ParamGroupMismatch.fault(
        where,
        f"the checkpoint has {what}",
        "; ".join(_describe(group) for group in saved),
        "; ".join(_describe(group) for group in live),
        mend="build the optimizer with the param groups that were saved, or add --no-load-optim to start it anew",
    )
    return Matched(order=(), faults=(fault,))


def _ambiguous(
    where: str, live: Sequence[Group], saved: Sequence[Group], part: _Part, policy: ResumePolicy, moves_states: bool
) -> Fault:
    """Groups that more than one pairing fits, and a way that needs none."""
    mine, theirs = part
    differing = _differing(saved, theirs, policy)
    if moves_states:
        mend = "give every group the bounds that were saved and leave the schedule's flags out, or add --no-load-optim"
    elif policy.schedule_is_this_runs:
        mend = f"add --override-optim-hparams {','.join(differing)} for this run's values, or --no-load-optim"
    else:
        mend = (
            f"add {OVERRIDE} for this run's bounds, or give every group the bounds that were saved and leave "
            "the schedule's flags out"
        )
    alike = ", ".join(name for name in TOLD_APART if live[mine[0]].get(name) is not None)
    return ParamGroupMismatch.fault(
        where,
        f"the checkpoint has param groups that cannot be told apart without a guess: alike in {alike}"
        + (", and in the shapes of their parameters" if moves_states else f"; they differ in {', '.join(differing)}"),
        "; ".join(_describe(saved[j]) for j in theirs),
        "; ".join(_describe(live[i]) for i in mine),
        mend=mend,
    )


def _describe(group: Group) -> str:
    names = (*STRUCTURE, *BOUNDS, "default_config", "eps")
    held = [f"{name}={group[name]}" for name in names if group.get(name) is not None and group[name] is not False]
    return f"({', '.join(held)})"


def states_of(optimizer: object, saved: Sequence[Group]) -> object:
    """Saved groups as the state of an optimizer, or of a chain of them, without tensors.

    Entry i names the parameters of live group i, whichever group its values are of: states go by name here.
    """
    states = [_state(part, saved) for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _state(part: object, saved: Sequence[Group]) -> dict[str, object]:
    inner = getattr(part, "optimizer", None)
    live = inner.state_dict()["param_groups"] if inner is not None else []
    groups = dealt(saved, live)
    for group, mine in zip(groups, live, strict=False):
        group["params"] = mine["params"]
    held: dict[str, object] = {"state": {}, "param_groups": groups}
    return {"optimizer": held, "fp32_from_fp16_params": []} if is_mixed(part) else held


def plain_groups(chain: Sequence[Sequence[Group]]) -> list[Group]:
    """The groups of a chain of optimizers without what is no plain value: a learning rate may have been a tensor."""
    found = [group for groups in chain for group in groups]
    return [{k: v for k, v in group.items() if k != "params" and is_plain(v)} for group in found]


def is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_plain(item) for item in cast("list[object]", value))
    return value is None or isinstance(value, (bool, int, float, str))
