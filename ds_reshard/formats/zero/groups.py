"""Param groups of several stages or expert-parallel ranks merged, and those of a new run of `deepspeed.moe`.

`split_params_into_different_moe_groups_for_optimizer` (moe/utils.py, 0.19.8) takes the experts out of each param group,
in order, into groups after all others: one for each expert-parallel size, and another whenever one would have more than
MAX_NUMEL elements on a rank. Each rank of a run has its experts under the names of the first rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.modules import expert_of, experts_per_rank, names_on_ep_rank, sort_by_expert
from ds_reshard.model.content import SCHEDULER, Content, reorder_groups, with_groups
from ds_reshard.model.facts import GroupFacts, canonical
from ds_reshard.model.region import Shape

MAX_NUMEL = 178956971
_NAME, _MARK, _OF_SIZE = "name", "moe", "ep_size_"
AS_SAVED = "give --like a folder that the new run has saved, with the model and the param groups of the source"


def merge_expert_groups(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """Return the checkpoint with param groups as a single expert-parallel rank has them: by layer, then expert."""
    if not zero.listing.experts or zero.facts is None:
        return zero
    groups = tuple(replace(group, members=tuple(sort_by_expert(group.members))) for group in zero.facts.groups)
    return replace(zero, facts=replace(zero.facts, groups=groups))


def merge_stage_groups(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """Return the checkpoint with param groups as one stage has them: groups with equal hyper-parameters are joined.

    If a stage has several such groups, the first ones of all stages are joined, then the second ones, and so on. If
    stages have different numbers of them, or their schedulers differ, no file says which to join: all stay as they are.
    """
    if len(zero.stages) < 2 or zero.facts is None or zero.universal is not None:
        return zero
    numbers_by_text: dict[tuple[str, int], list[int]] = {}
    counts: dict[str, set[int]] = {}
    number = 0
    for column in (column for column in zero.columns if not column.number):
        texts = [canonical(dict(group)) for group in column.head.groups or ()]
        for index, text in enumerate(texts):
            numbers_by_text.setdefault((text, texts[:index].count(text)), []).append(number)
            counts.setdefault(text, set()).add(texts.count(text))
            number += 1
    groups, entries = zero.facts.groups, dict(zero.model.entries)
    firsts = [members[0] for members in numbers_by_text.values()]
    lasts = [members[-1] for members in numbers_by_text.values()]
    if number == len(groups) and not any(len(of_stages) > 1 and max(of_stages) > 1 for of_stages in counts.values()):
        state = entries.get(SCHEDULER)
        merged, unknown = reorder_groups(state, firsts, number) if isinstance(state, dict) else (state, [])
        merged_from_last = reorder_groups(state, lasts, number)[0] if isinstance(state, dict) else state
        if not unknown and canonical(merged) == canonical(merged_from_last):
            entries[SCHEDULER] = merged
            groups = tuple(
                replace(groups[joined[0]], members=tuple(name for number in joined for name in groups[number].members))
                for joined in numbers_by_text.values()
            )
    model = replace(zero.model, entries=entries)
    return replace(zero, model=model, facts=replace(zero.facts, groups=groups))


class LocalGroup(NamedTuple):
    """Parameters of a param group as the first of `ep` ranks has them, and the number of their group in the source."""

    members: tuple[str, ...]
    ep: int
    origin: int = -1


def ep_of(group: GroupFacts) -> int:
    """Return how many ranks share the experts of a param group; 1 for a group without experts."""
    values = group.hyperparameters or {}
    name = values.get(_NAME) if values.get(_MARK) is True else None
    size = name.removeprefix(_OF_SIZE) if isinstance(name, str) else ""
    return int(size) if size.isdecimal() and int(size) else 1


def groups_for_ep(content: Content, ep: int | None, like: ZeroCheckpoint | None) -> tuple[Content, list[Fault]]:
    """Return the content with the param groups of a run of `ep` expert-parallel ranks (1), or of the run `like`.

    A group's members are those of the first rank, then those of the second, and so on; its name says how many ranks.
    """
    experts = [name for name in content.trained if expert_of(name) is not None]
    if content.facts is None or not experts:
        return content, []
    saved_groups = content.facts.groups
    groups = _groups_of_run(content, like) if like is not None else list(_groups_by_deepspeed(content, ep or 1))
    faults = [fault for group in groups for fault in _uneven_expert_faults(content, group)]
    new_groups: list[GroupFacts] = []
    for group in groups if not faults else ():
        names = members_on_all_ranks(group, content)
        values = dict(saved_groups[group.origin].hyperparameters or {})
        if expert_of(names[0]) is not None:
            values |= {_NAME: f"{_OF_SIZE}{group.ep}", _MARK: True}
        new_groups.append(GroupFacts(members=tuple(names), hyperparameters=values))
    where = like.listing.folder if like is not None else content.folder
    if faults:
        return content, faults
    shapes = {name: tensor.shape for name, tensor in content.weights.items() if name in content.trained}
    faults += other_parameter_faults(shapes, like) if like is not None else ()
    members = [group.members for group in new_groups]
    faults += mixed_group_faults(saved_groups, content.entries.get(SCHEDULER), members, where)
    order = [group.origin for group in groups]
    return (content if faults else with_groups(content, new_groups, order, where)), faults


def members_on_all_ranks(group: LocalGroup, content: Content) -> list[str]:
    """Return the parameters of a group on all ranks, one rank after another."""
    counts = experts_per_rank(content.trained, group.ep)
    return [name for ep_rank in range(group.ep) for name in names_on_ep_rank(group.members, counts, ep_rank)]


def _groups_of_run(content: Content, like: ZeroCheckpoint) -> list[LocalGroup]:
    """Return the param groups of the run that saved `like`: one for each flat buffer of ZeRO stages 1 and 2."""
    assert content.facts is not None
    group_of = {name: number for number, group in enumerate(content.facts.groups) for name in group.members}
    groups: dict[int, LocalGroup] = {}
    for column in like.columns:
        for buffer in column.buffers:
            origin = next((group_of[name] for name in buffer.shapes if name in group_of), 0)
            groups.setdefault(buffer.number, LocalGroup(tuple(buffer.shapes), like.dp // column.dp, origin))
    return [groups[number] for number in sorted(groups)]


def _groups_by_deepspeed(content: Content, ep: int) -> Iterator[LocalGroup]:
    """Yield the param groups that DeepSpeed makes of the source's: without the experts, and then those of experts."""
    assert content.facts is not None
    saved, order = content.facts.groups, {name: index for index, name in enumerate(content.weights)}
    for number, group in enumerate(saved):
        dense = [name for name in group.members if expert_of(name) is None]
        if dense:
            yield LocalGroup(tuple(dense), 1, number)
    counts = experts_per_rank(content.trained, ep)
    for numbers in _groups_split_from_one(content):
        names = [name for number in numbers for name in saved[number].members if expert_of(name) is not None]
        on_first_rank = []
        for name in sort_by_expert(sorted(names, key=lambda name: order.get(name, len(order)))):
            parts = expert_of(name)
            on_first_rank += [name] if parts is not None and parts[1] < counts[parts[0]] else []
        for members in _cut_to_max_numel(on_first_rank, content):
            yield LocalGroup(tuple(members), ep, numbers[0])


def _groups_split_from_one(content: Content) -> list[list[int]]:
    """Return the numbers of the param groups with experts, grouped by the script's param group that they come from.

    Consecutive groups of one expert-parallel size belong together if the next would have made the first too large. Of
    groups of several sizes with equal hyper-parameters the first ones belong together, the second ones, and so on.
    """
    assert content.facts is not None
    by_values: dict[tuple[str, int], list[list[int]]] = {}
    for number, group in enumerate(content.facts.groups):
        if not any(expert_of(name) is not None for name in group.members):
            continue
        values = {key: value for key, value in (group.hyperparameters or {}).items() if key not in (_NAME, _MARK)}
        same_size = by_values.setdefault((canonical(values), ep_of(group)), [])
        previous = content.facts.groups[same_size[-1][-1]] if same_size else None
        if previous is not None and _numel(previous, content) + _numel(group, content, first=True) > MAX_NUMEL:
            same_size[-1].append(number)
        else:
            same_size.append([number])
    joined: dict[tuple[str, int], list[int]] = {}
    for (text, _), same_size in by_values.items():
        for index, numbers in enumerate(same_size):
            joined.setdefault((text, index), []).extend(numbers)
    return sorted((sorted(numbers) for numbers in joined.values()), key=lambda numbers: numbers[0])


def _numel(group: GroupFacts, content: Content, *, first: bool = False) -> int:
    """Return the elements that a rank of the saving run had of a group of experts, or of its first parameter."""
    sizes = [prod(content.weights[name].shape) for name in group.members if expert_of(name) is not None]
    return sizes[0] if first else sum(sizes) // ep_of(group)


def _cut_to_max_numel(names: Sequence[str], content: Content) -> Iterator[list[str]]:
    """Yield the names in lists of at most MAX_NUMEL elements each."""
    part: list[str] = []
    numel = 0
    for name in names:
        size = prod(content.weights[name].shape)
        if part and numel + size > MAX_NUMEL:
            yield part
            part, numel = [], 0
        part.append(name)
        numel += size
    yield part


def _uneven_expert_faults(content: Content, group: LocalGroup) -> Iterator[Fault]:
    """Yield a fault for each layer whose experts cannot be shared evenly by the group's ranks."""
    totals = experts_per_rank(content.trained, 1)
    for prefix in dict.fromkeys(of[0] for of in map(expert_of, group.members) if of is not None):
        if totals.get(prefix, 0) % group.ep:
            what = "is a layer whose experts cannot be shared evenly by so many ranks"
            counts = (f"a divisor of {totals[prefix]}", f"{group.ep}")
            yield UnsupportedLayout.fault(prefix.rstrip("."), what, *counts, mend="another expert-parallel size: --ep")


def other_parameter_faults(source: Mapping[str, Shape], like: ZeroCheckpoint) -> Iterator[Fault]:
    """Yield a fault for each parameter that the source and the run that saved `like` do not both have in one shape."""
    for name in sorted(source.keys() | like.model.trainable.keys()):
        shapes = [of.get(name) for of in (like.model.trainable, source)]
        if shapes[0] != shapes[1]:
            counts = ["none" if shape is None else str([*shape]) for shape in shapes]
            where, what = f"{like.listing.folder}: {name}", "differs from the source's parameter"
            yield ModelMismatch.fault(where, what, *counts, mend=AS_SAVED)


def mixed_group_faults(
    saved: Sequence[GroupFacts], schedule: object, groups: Iterable[Sequence[str]], where: str
) -> Iterator[Fault]:
    """Yield a fault for each new group of parameters that had different hyper-parameters or schedules."""
    texts, state = [], schedule if isinstance(schedule, dict) else {}
    for number, group in enumerate(saved):
        values = {key: value for key, value in (group.hyperparameters or {}).items() if key not in (_NAME, _MARK)}
        texts.append(canonical([values, reorder_groups(state, [number], len(saved))[0]]))
    text_by_name = {name: texts[number] for number, group in enumerate(saved) for name in group.members}
    for members in groups:
        other = next((name for name in members if text_by_name.get(name) != text_by_name.get(members[0])), None)
        if other is not None:
            what = "is in a param group with parameters of other hyper-parameters, or of another schedule"
            yield UnsupportedLayout.fault(f"{where}: {other}", what, f"those of {members[0]}", "others", mend=AS_SAVED)
