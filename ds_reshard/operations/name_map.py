"""`--names map.json`: what the parameters of a checkpoint are called in another framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ds_reshard.errors import ConfigError, Fault, ModelMismatch, raise_faults
from ds_reshard.model.content import SCHEDULER, Content, regrouped, regrouping_fault
from ds_reshard.model.facts import GroupFacts, OptimizerFacts

_FORM = '{"name in the source": "name in the output"}, or a list of names for a parameter that is tied there'


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """By the name in the source all names in the output: the first is the parameter's, the others are tied to it.

    The order is that of the output's parameters, where the source does not tell it.
    """

    path: str
    names: Mapping[str, tuple[str, ...]]
    digest: str

    def faults(self, content: Content) -> Iterator[Fault]:
        """Names that the source has not, or has and the map has not, and names that several parameters would have."""
        known = set(content.weights)
        for name in sorted(set(self.names) - known):
            first = content.tied.get(name)
            what = "is in the map, and the source has no such parameter"
            if first is not None:
                what = f"is in the map, and is another name of {first} in the source: name that one alone"
            yield self._fault(name, what, "a name of the source", ", ".join(sorted(known)[:4]))
        for name in sorted(known - set(self.names)):
            yield self._fault(name, "is in the source and not in the map", "every parameter", "no entry")
        givers: dict[str, list[str]] = {}
        for name, others in sorted(self.names.items()):
            for other in others:
                givers.setdefault(other, []).append(name)
        for other, names in givers.items():
            if len(names) > 1:
                yield self._fault(other, "is the name of several parameters in the map", "one", ", ".join(names))

    def _fault(self, where: str, what: str, expected: str, found: str) -> Fault:
        return ModelMismatch.fault(where, what, expected, found, mend=f"correct {self.path}")

    def applied(self, content: Content) -> Content:
        """The content under its new names, in the map's order; a name that is not in the map, or is taken, stays."""
        new: dict[str, str] = {}
        tied: dict[str, str] = {}
        taken: set[str] = set()
        held = content.weights
        for name in [
            *(name for name in self.names if name in held),
            *(name for name in held if name not in self.names),
        ]:
            others = [other for other in self.names.get(name, (name,)) if other not in taken] or [name]
            taken.update(others)
            new[name] = others[0]
            tied |= dict.fromkeys(others[1:], others[0])
        order = {name: number for number, name in enumerate(new)}
        keys = sorted(content.tensors, key=lambda key: order.get(key.name, len(order)))
        tensors = {key._replace(name=new.get(key.name, key.name)): content.tensors[key] for key in keys}
        facts, schedule, objects, faults = content.facts, content.schedule, dict(content.objects), []
        if facts is not None:
            saved = facts.groups
            numbers = sorted(range(len(saved)), key=lambda number: _first(saved[number], order))
            groups = tuple(_renamed(saved[number], new, order) for number in numbers)
            scalars = {new[name]: values for name, values in facts.scalars.items() if name in new}
            facts = OptimizerFacts(groups=groups, scalars=scalars)
            if schedule is not None:
                schedule = replace(schedule, groups=tuple(schedule.groups[number] for number in numbers))
            for path in (path for path in objects if path[0] == SCHEDULER):
                made, unknown = regrouped({str(path[-1]): objects[path]}, numbers, len(saved))
                objects[path] = made[str(path[-1])]
                faults += [regrouping_fault(name, self.path) for name in unknown]
        return replace(
            content,
            tensors=tensors,
            tied=tied,
            facts=facts,
            schedule=schedule,
            objects=objects,
            faults=(*content.faults, *faults),
            buffers=frozenset(new.get(name, name) for name in content.buffers),
            records={new.get(name, name): record for name, record in content.records.items()},
            notes=(*content.notes, *self._loosened(content, tied)),
        )

    def _loosened(self, content: Content, tied: Mapping[str, str]) -> Iterator[str]:
        """Names of tied parameters of which the map says no other."""
        for name, first in content.tied.items():
            given = self.names.get(first, ())
            if len(given) == 1:
                yield f"left out: {name}, in the source another name of {first}, which the map calls {given[0]} alone"


def _first(group: GroupFacts, order: Mapping[str, int]) -> int:
    return min((order[name] for name in group.members), default=len(order))


def _renamed(group: GroupFacts, new: Mapping[str, str], order: Mapping[str, int]) -> GroupFacts:
    members = sorted(group.members, key=order.__getitem__)
    return GroupFacts(members=tuple(new[name] for name in members), hyperparameters=group.hyperparameters)


_ASKED: dict[str, str] = {}


def ask_names(path: str | None) -> None:
    """Use this map in every load of a host that has no JSON of its own; None takes it back."""
    _ASKED.clear()
    if path is not None:
        _ASKED["names"] = path


def asked_names() -> str | None:
    return _ASKED.get("names")


def read_name_map(path: str) -> NameMap:
    """Raises ConfigError, with every reason, where the file is no map of names."""
    try:
        with open(path, encoding="utf-8") as file:
            pairs = json.load(file, object_pairs_hook=_Pairs)
    except OSError as error:
        raise_faults([_unreadable(path, f"cannot be read: {error.strerror}")], subject="--names")
        raise
    except (ValueError, RecursionError) as error:
        raise_faults([_unreadable(path, f"is not JSON: {error}")], subject="--names")
        raise
    if not isinstance(pairs, _Pairs):
        raise_faults([_unreadable(path, "holds no object")], subject="--names")
    faults, names = [], {}
    for name, value in pairs:
        others = [value] if isinstance(value, str) else value
        if name in names:
            faults.append(_unreadable(path, f"{name!r} is given twice"))
        if not _are_names(others):
            faults.append(_unreadable(path, f"{name!r} has a value that is no name: {str(value)[:80]}"))
            others = []
        names[name] = tuple(others)
    raise_faults(faults, subject="--names")
    digest = hashlib.sha256(json.dumps(list(names.items())).encode("utf-8")).hexdigest()
    return NameMap(path=path, names=names, digest=digest)


class _Pairs(list[tuple[str, object]]):
    """A JSON object with keys that may be there twice."""


def _are_names(value: object) -> bool:
    if not isinstance(value, list) or isinstance(value, _Pairs) or not value:
        return False
    return all(isinstance(name, str) and name for name in value) and len(set(value)) == len(value)


def _unreadable(path: str, what: str) -> Fault:
    return ConfigError.fault(path, what, mend=f"give {_FORM}")
