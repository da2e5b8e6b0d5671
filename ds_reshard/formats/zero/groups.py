"""Param groups of several stages or expert-parallel ranks as one, and those of a coming run of `deepspeed.moe`.

`split_params_into_different_moe_groups_for_optimizer` (moe/utils.py, 0.19.8) takes the experts out of each param
group, in order, into groups behind all others: one for each expert-parallel size, and another wherever one would have
more than MAX_NUMEL elements on a rank. All ranks of a run have their own experts under the names of the first rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.modules import by_number, expert_of, experts_held, of_place
from ds_reshard.model.content import SCHEDULER, Content, reorder_groups, with_groups
from ds_reshard.model.facts import GroupFacts, canonical

MAX_NUMEL = 178956971
_NAME, _MARK, _OF_SIZE = "name", "moe", "ep_size_"
AS_SAVED = "give --like a folder that the coming run has saved, with the model and the param groups of the source"


def as_one_place(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with param groups as one expert-parallel rank has them: layer by layer, expert by expert."""
    if not zero.listing.experts or zero.facts is None:
        return zero
    groups = tuple(replace(group, members=tuple(by_number(group.members))) for group in zero.facts.groups)
    return replace(zero, facts=replace(zero.facts, groups=groups))


def as_one_stage(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with param groups as one stage has them: those of the same hyper-parameters are one.

    Of several such in one stage the first are one, the second, and so on. Where another stage has another number of
    them, or the scheduler other values for them, no file tells which are one, and all stay as they are.
    """
    if len(zero.stages) < 2 or zero.facts is None or zero.universal is not None:
        return zero
    alike: dict[tuple[str, int], list[int]] = {}
    counts: dict[str, set[int]] = {}
    number = 0
    for column in (one for one in zero.columns if not one.number):
        texts = [canonical(dict(group)) for group in column.first.groups or ()]
        for at, text in enumerate(texts):
            alike.setdefault((text, texts[:at].count(text)), []).append(number)
            counts.setdefault(text, set()).add(texts.count(text))
            number += 1
    groups, entries = zero.facts.groups, dict(zero.model.entries)
    one = [members[0] for members in alike.values()]
    again = [members[-1] for members in alike.values()]
    if number == len(groups) and not any(len(of) > 1 and max(of) > 1 for of in counts.values()):
        state = entries.get(SCHEDULER)
        made, unknown = reorder_groups(state, one, number) if isinstance(state, dict) else (state, [])
        other = reorder_groups(state, again, number)[0] if isinstance(state, dict) else state
        if not unknown and canonical(made) == canonical(other):
            entries[SCHEDULER] = made
            groups = tuple(
                replace(groups[of[0]], members=tuple(name for at in of for name in groups[at].members))
                for of in alike.values()
            )
    model = replace(zero.model, entries=entries)
    return replace(zero, model=model, facts=replace(zero.facts, groups=groups))


class Group(NamedTuple):
    """Parameters of a param group as the first of `ep` ranks has them, and the source's group that they were in."""

    members: tuple[str, ...]
    ep: int
    origin: int = -1


def ep_of(group: GroupFacts) -> int:
    """The number of ranks that have the experts of a param group between them; 1 of a group of no experts."""
    values = group.hyperparameters or {}
    name = values.get(_NAME) if values.get(_MARK) is True else None
    size = name.removeprefix(_OF_SIZE) if isinstance(name, str) else ""
    return int(size) if size.isdecimal() and int(size) else 1


def dealt_out(content: Content, ep: int | None, like: ZeroCheckpoint | None) -> tuple[Content, list[Fault]]:
    """The content with the param groups of a run of `ep` expert-parallel ranks (1), or of that which has saved `like`.

    A group's members are those of the first rank, then those of the second, and so on; its name says of how many.
    """
    experts = [name for name in content.trained if expert_of(name) is not None]
    if content.facts is None or not experts:
        return content, []
    saved = content.facts.groups
    groups = _as_shown(content, like) if like is not None else list(_as_split(content, ep or 1))
    faults = [fault for group in groups for fault in _undivided(content, group)]
    made: list[GroupFacts] = []
    for group in groups if not faults else ():
        names = of_all(group, content)
        values = dict(saved[group.origin].hyperparameters or {})
        if expert_of(names[0]) is not None:
            values |= {_NAME: f"{_OF_SIZE}{group.ep}", _MARK: True}
        made.append(GroupFacts(members=tuple(names), hyperparameters=values))
    where = like.listing.folder if like is not None else content.folder
    if faults:
        return content, faults
    faults += [*_lacking(content, made, where), *_joined_apart(content, made, where)]
    order = [group.origin for group in groups]
    return (content if faults else with_groups(content, made, order, where)), faults


def of_all(group: Group, content: Content) -> list[str]:
    """The parameters of all ranks of a group, one rank after another."""
    held = experts_held(content.trained, group.ep)
    return [name for place in range(group.ep) for name in of_place(group.members, held, place)]


def _as_shown(content: Content, like: ZeroCheckpoint) -> list[Group]:
    """The param groups of the run that has saved a checkpoint: one flat buffer each, of ZeRO stages 1 and 2."""
    assert content.facts is not None
    home = {name: number for number, group in enumerate(content.facts.groups) for name in group.members}
    shown: dict[int, Group] = {}
    for column in like.columns:
        for buffer in column.buffers:
            origin = next((home[name] for name in buffer.shapes if name in home), 0)
            shown.setdefault(buffer.number, Group(tuple(buffer.shapes), like.dp // column.dp, origin))
    return [shown[number] for number in sorted(shown)]


def _as_split(content: Content, ep: int) -> Iterator[Group]:
    """The param groups that DeepSpeed makes of the source's: of no experts as they are, and behind them the others."""
    assert content.facts is not None
    saved, order = content.facts.groups, {name: at for at, name in enumerate(content.weights)}
    for number, group in enumerate(saved):
        apart = [name for name in group.members if expert_of(name) is None]
        if apart:
            yield Group(tuple(apart), 1, number)
    held = experts_held(content.trained, ep)
    for numbers in _families(content):
        names = [name for number in numbers for name in saved[number].members if expert_of(name) is not None]
        own = []
        for name in by_number(sorted(names, key=lambda name: order.get(name, len(order)))):
            of = expert_of(name)
            own += [name] if of is not None and of[1] < held[of[0]] else []
        for members in _cut(own, content):
            yield Group(tuple(members), ep, numbers[0])


def _families(content: Content) -> list[list[int]]:
    """The param groups with experts, those together that one group of the script has been split into.

    That is, of one expert-parallel size, where the next would have made it too large; and of several sizes, with the
    same hyper-parameters, the first of each, the second of each, and so on.
    """
    assert content.facts is not None
    found: dict[tuple[str, int], list[list[int]]] = {}
    for number, group in enumerate(content.facts.groups):
        if not any(expert_of(name) is not None for name in group.members):
            continue
        values = {key: value for key, value in (group.hyperparameters or {}).items() if key not in (_NAME, _MARK)}
        of_size = found.setdefault((canonical(values), ep_of(group)), [])
        before = content.facts.groups[of_size[-1][-1]] if of_size else None
        if before is not None and _numel(before, content) + _numel(group, content, first=True) > MAX_NUMEL:
            of_size[-1].append(number)
        else:
            of_size.append([number])
    joined: dict[tuple[str, int], list[int]] = {}
    for (text, _), of_size in found.items():
        for at, numbers in enumerate(of_size):
            joined.setdefault((text, at), []).extend(numbers)
    return sorted((sorted(numbers) for numbers in joined.values()), key=lambda numbers: numbers[0])


def _numel(group: GroupFacts, content: Content, *, first: bool = False) -> int:
    """Elements that a rank of the saving run had of a group of experts, or of its first parameter."""
    sizes = [prod(content.weights[name].shape) for name in group.members if expert_of(name) is not None]
    return sizes[0] if first else sum(sizes) // ep_of(group)


def _cut(names: Sequence[str], content: Content) -> Iterator[list[str]]:
    part: list[str] = []
    numel = 0
    for name in names:
        more = prod(content.weights[name].shape)
        if part and numel + more > MAX_NUMEL:
            yield part
            part, numel = [], 0
        part.append(name)
        numel += more
    yield part


def _undivided(content: Content, group: Group) -> Iterator[Fault]:
    """Layers whose experts are not the same number on each rank."""
    totals = experts_held(content.trained, 1)
    for prefix in dict.fromkeys(of[0] for of in map(expert_of, group.members) if of is not None):
        if totals.get(prefix, 0) % group.ep:
            what = "is a layer whose experts cannot be dealt out to so many ranks evenly"
            said = (f"a divisor of {totals[prefix]}", f"{group.ep}")
            yield UnsupportedLayout.fault(prefix.rstrip("."), what, *said, mend="another expert-parallel size: --ep")


def _lacking(content: Content, made: Sequence[GroupFacts], where: str) -> Iterator[Fault]:
    """Parameters that only the source has, or only the run that shows its param groups."""
    members = {name for group in made for name in group.members}
    assert content.facts is not None
    trained = {name for group in content.facts.groups for name in group.members}
    for name in sorted(members ^ trained):
        said = ("none", "one") if name in trained else ("one", "none")
        yield ModelMismatch.fault(f"{where}: {name}", "is another parameter there", *said, mend=AS_SAVED)


def _joined_apart(content: Content, made: Sequence[GroupFacts], where: str) -> Iterator[Fault]:
    """Parameters that would be in one param group, and had other hyper-parameters, or another schedule."""
    assert content.facts is not None
    saved, schedule = content.facts.groups, content.entries.get(SCHEDULER)
    state = schedule if isinstance(schedule, dict) else {}
    texts = []
    for number, group in enumerate(saved):
        values = {key: value for key, value in (group.hyperparameters or {}).items() if key not in (_NAME, _MARK)}
        texts.append(canonical([values, reorder_groups(state, [number], len(saved))[0]]))
    home = {name: texts[number] for number, group in enumerate(saved) for name in group.members}
    for group in made:
        first = group.members[0]
        other = next((name for name in group.members if home.get(name) != home.get(first)), None)
        if other is not None:
            what = "is in a param group with parameters of other hyper-parameters, or of another schedule"
            yield UnsupportedLayout.fault(f"{where}: {other}", what, f"those of {first}", "others", mend=AS_SAVED)
