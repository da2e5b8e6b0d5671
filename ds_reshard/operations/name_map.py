"""`--names map.json`: what the parameters of a checkpoint are called in another framework."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

from ds_reshard.containers.digests import note_names
from ds_reshard.errors import ConfigError, Fault, ModelMismatch, error_of, raise_faults
from ds_reshard.model.content import Content, with_groups
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import Layout
from ds_reshard.operations.shape_map import Coming, Mapped, ShapeMap, nested_faults, read_shape_map

_FORM = '{"name in the source": "name in the output"}, or a list of names for a parameter that is tied there'
_PLACE = re.compile(r"\{(\w+)(?:([+-])([0-9]+))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """By the name in the source all names in the output: the first is the parameter's, the others are tied to it.

    A name with a `(` is a pattern that stands for each name which it matches whole and which is in the map by no other
    entry; in its values `{1}` is what its first group has matched, `{1+2}` and `{n-1}` that number and so many more or
    less, `n` being the group's name. The order is that of the output's parameters, where the source does not tell it;
    what patterns that follow each other match stands in the order of the source's param groups.
    """

    path: str
    names: Mapping[str, tuple[str, ...]]
    digest: str

    def faults(self, content: Content) -> Iterator[Fault]:
        """Yield a fault for each name that only the source or the map has, and each new name of several tensors."""
        known, given = set(content.weights), self.of(content)
        yield from self._unmatched(content)
        for name in sorted(set(given) - known):
            first = content.tied.get(name)
            what = "is in the map, and the source has no such parameter"
            if first is not None:
                what = f"is in the map, and is another name of {first} in the source: name that one alone"
            yield self._fault(name, what, "a name of the source", ", ".join(sorted(known)[:4]))
        for name in sorted(known - set(given)):
            yield self._fault(name, "is in the source and not in the map", "every parameter", "no entry")
        givers: dict[str, list[str]] = {}
        for name, others in sorted(given.items()):
            for other in others:
                givers.setdefault(other, []).append(name)
        for other, names in givers.items():
            if len(names) > 1:
                yield self._fault(other, "is the name of several parameters in the map", "one", ", ".join(names))
        staying = [key for key in content.tensors if key.name not in known]
        for key in staying:  # a state of this name is no second tensor of a weight that has no states
            if taken := [name for name in givers.get(key.name, ()) if key._replace(name=name) in content.tensors]:
                what = "is a new name by the map, and that of a tensor that stays"
                yield self._fault(str(key), what, "one tensor", f"two, one of them {', '.join(taken)} by the map")
        facts = content.facts or OptimizerFacts(groups=())
        members = {name for group in facts.groups for name in group.members}
        for name in sorted(members.union(facts.scalars) - known - set(given)):
            if any({name, giver} <= held for giver in givers.get(name, ()) for held in (members, facts.scalars.keys())):
                what = "is a new name by the map, and that of a parameter of the optimizer that stays"
                yield self._fault(name, what, "one parameter", f"two, one of them {', '.join(givers[name])} by the map")

    def _fault(self, where: str, what: str, expected: str, found: str) -> Fault:
        return ModelMismatch.fault(where, what, expected, found, mend=f"correct {self.path}")

    def of(self, content: Content) -> dict[str, tuple[str, ...]]:
        """The map with each pattern's names in its place."""
        found: dict[str, tuple[str, ...]] = {}
        groups = content.facts.groups if content.facts is not None else ()
        order = dict.fromkeys((*(name for group in groups for name in group.members), *content.weights))
        for is_pattern, entries in groupby(self.names.items(), lambda entry: "(" in entry[0]):
            if not is_pattern:
                found |= dict(entries)
                continue
            patterns = dict(entries)
            for name in order:
                match = next((m for p in patterns if name not in self.names and (m := re.fullmatch(p, name))), None)
                if match is not None:
                    found.setdefault(name, tuple(_filled(form, match) for form in patterns[match.re.pattern]))
        return found

    def renaming(self, names: Sequence[str], tied: Mapping[str, str]) -> dict[str, str]:
        """New names of those that the map has, for a folder of the run's own framework; faults are a ModelMismatch.

        Other names of a tied parameter, where the map has none of them, are the further ones that it gives the first.
        """
        new, faults = dict[str, str](), list[Fault]()
        for name in names:
            found = self._matches(name)
            faults += self._ambiguous(name, found)
            for match in found[:1]:
                new[name] = _filled(self.names[match.re.pattern][0], match)
            if name in self.names:
                new[name] = self.names[name][0]
        for first in sorted(set(tied.values()) & self.names.keys()):
            others = [name for name in names if tied.get(name) == first and name not in new]
            new |= dict(zip(others, self.names[first][1:], strict=False))
        givers: dict[str, str] = {}
        for name in dict.fromkeys(names):
            other = givers.setdefault(new.get(name, name), name)
            if other != name:
                what = "is the name of several parameters by the map"
                faults.append(self._fault(new.get(name, name), what, "one", f"{other}, {name}"))
        raise_faults(faults, subject="names")
        return {name: other for name, other in new.items() if other != name}

    def _matches(self, name: str) -> list[re.Match[str]]:
        """Return how patterns match a name that is in the map by no other entry."""
        patterns = [pattern for pattern in self.names if "(" in pattern] if name not in self.names else []
        return [match for pattern in patterns if (match := re.fullmatch(pattern, name))]

    def _ambiguous(self, name: str, matches: Sequence[re.Match[str]]) -> Iterator[Fault]:
        if len(matches) > 1:
            found = " and ".join(repr(match.re.pattern) for match in matches)
            yield self._fault(name, "is matched by two patterns of the map", "one", found)

    def _unmatched(self, content: Content) -> Iterator[Fault]:
        """Patterns that match no name, and names that two match or of which one makes a number below 0."""
        fitting = {name: self._matches(name) for name in content.weights}
        matched = {match.re.pattern for found in fitting.values() for match in found}
        for pattern in self.names:
            if "(" in pattern and pattern not in matched:
                yield self._fault(pattern, "is a pattern that no name of the source matches", "one or more", "none")
        for name, found in fitting.items():
            yield from self._ambiguous(name, found)
        for name, others in self.of(content).items():
            if any("\0" in other for other in others):
                yield self._fault(name, "has no number there, or one below 0, in its new name", "a number", name)

    def apply(self, content: Content, layout: Layout, coming: Coming) -> Mapped:
        """Return the content under its new names; the places of its tensors stay what they are."""
        new_names = self.of(content)
        note_names([*new_names.items()])
        moved = {name for name, others in new_names.items() if others[0] != name}
        faults = (*self.faults(content), *nested_faults(content, moved, self.path))
        return Mapped(self.applied(content), layout, faults)

    def applied(self, content: Content) -> Content:
        """The content under its new names, in the map's order; a name that is not in the map, or is taken, stays."""
        new: dict[str, str] = {}
        tied: dict[str, str] = {}
        taken = set(content.extra_tensors)
        held, given = content.weights, self.of(content)
        for name in [*(name for name in given if name in held), *(name for name in held if name not in given)]:
            others = [other for other in given.get(name, (name,)) if other not in taken] or [name]
            taken.update(others)
            new[name] = others[0]
            tied |= dict.fromkeys(others[1:], others[0])
        facts = content.facts
        for name in (name for group in (facts.groups if facts is not None else ()) for name in group.members):
            new.setdefault(name, given.get(name, (name,))[0])  # of states that go by another name than their weight
        order = {name: number for number, name in enumerate(new)}
        keys = sorted(content.tensors, key=lambda key: order.get(key.name, len(order)))
        tensors = {key._replace(name=new.get(key.name, key.name)): content.tensors[key] for key in keys}
        if facts is not None:
            saved = facts.groups
            numbers = sorted(range(len(saved)), key=lambda number: _first(saved[number], order))
            groups = tuple(_renamed(saved[number], new, order) for number in numbers)
            scalars = {new.get(name, name): values for name, values in facts.scalars.items()}
            content = with_groups(content, groups, numbers, self.path)
            facts = OptimizerFacts(groups=groups, scalars=scalars)
        return replace(
            content,
            tensors=tensors,
            tied=tied,
            facts=facts,
            buffers=frozenset(new.get(name, name) for name in content.buffers),
            records={new.get(name, name): record for name, record in content.records.items()},
            notes=(*content.notes, *_loosened(content, given)),
        )


def _loosened(content: Content, given: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Names of tied parameters of which the map says no other."""
    for name, first in content.tied.items():
        others = given.get(first, ())
        if len(others) == 1:
            yield f"left out: {name}, in the source another name of {first}, which the map calls {others[0]} alone"


def _filled(form: str, match: re.Match[str]) -> str:
    """The form with what groups have matched; "\\0" where a number is asked for and none from 0 on is there."""

    def put(place: re.Match[str]) -> str:
        group, sign, more = place.groups()
        text = match[int(group) if group.isdecimal() else group] or ""
        if sign is None:
            return text
        number = int(text) + int(sign + more) if text.isdecimal() else -1
        return str(number) if number >= 0 else "\0"

    return _PLACE.sub(put, form)


def _is_malformed(name: str, others: Sequence[str]) -> str:
    """Why a pattern, or what it gives, cannot be; empty where it can."""
    try:
        pattern = re.compile(name)
    except re.error as error:
        return f"is no regular expression: {error}"
    known = {*map(str, range(pattern.groups + 1)), *pattern.groupindex}
    asked = {place[1] for other in others for place in _PLACE.finditer(other)} - known
    return f"has no group {', '.join(sorted(asked))}" if asked else ""


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


def read_name_map(given: str | Mapping[str, object]) -> NameMap | ShapeMap:
    """The map of a JSON file, one of `shipped_maps()`, or one that a JSON has in itself.

    Raises ConfigError with every reason if it is none.
    """
    if isinstance(given, Mapping):
        return _name_map('"names"', _Pairs(given.items()))
    shipped = files("ds_reshard") / "maps" / f"{given}.json"
    is_shipped = given in shipped_maps()
    try:
        text = shipped.read_text("utf-8") if is_shipped else Path(given).read_text("utf-8")
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except OSError as error:
        raise error_of([_unreadable(given, f"cannot be read: {error.strerror}")], subject="--names") from error
    except (ValueError, RecursionError) as error:
        raise error_of([_unreadable(given, f"is not JSON: {error}")], subject="--names") from error
    if not isinstance(pairs, _Pairs):
        raise error_of([_unreadable(given, "holds no object")], subject="--names")
    return _name_map(given, pairs)


def shipped_maps() -> tuple[str, ...]:
    """Return the names of the maps that ds_reshard has, between the models of frameworks."""
    held = (files("ds_reshard") / "maps").iterdir()
    return tuple(sorted(one.name.removesuffix(".json") for one in held if one.name.endswith(".json")))


def _name_map(path: str, pairs: _Pairs) -> NameMap | ShapeMap:
    faults, names = list[Fault](), dict[str, tuple[str, ...]]()
    if {"sides", "map"} & {name for name, _ in pairs}:
        held = _as_dict(pairs, path, faults)
        raise_faults(faults, subject="--names")
        assert isinstance(held, dict)
        return _with_numbers(path, held) if "map" in held else read_shape_map(path, held)
    for name, value in pairs:
        others: object = [value] if isinstance(value, str) else value
        if name in names:
            faults.append(_unreadable(path, f"{name!r} is given twice"))
        if not _are_names(others):
            faults.append(_unreadable(path, f"{name!r} has a value that is no name: {str(value)[:80]}"))
            others = []
        if "(" in name and (why := _is_malformed(name, others)):
            faults.append(_unreadable(path, f"the pattern {name!r} {why}"))
        names[name] = tuple(others)
    raise_faults(faults, subject="--names")
    digest = hashlib.sha256(json.dumps(list(names.items())).encode("utf-8")).hexdigest()
    return NameMap(path=path, names=names, digest=digest)


def _with_numbers(path: str, held: Mapping[str, object]) -> ShapeMap:
    """Return the map that another names, with numbers of the model that no file tells."""
    base, numbers = held["map"], held.get("numbers", {})
    if not isinstance(base, str) or held.keys() - {"map", "numbers"} or not isinstance(numbers, dict):
        raise error_of([_unreadable(path, 'has more than {"map": NAME, "numbers": {...}}')], subject="--names")
    try:
        found = read_name_map(base)
    except RecursionError:
        raise error_of([_unreadable(path, "names itself as its map")], subject="--names") from None
    if not isinstance(found, ShapeMap) or not all(type(one) is int and one >= 0 for one in numbers.values()):
        what = f"gives numbers that are none, or a map that takes none: {base!r}"
        raise error_of([_unreadable(path, what)], subject="--names")
    return found.with_numbers(numbers)


class _Pairs(list[tuple[str, object]]):
    """A JSON object with keys that may be there twice."""


def _as_dict(value: object, path: str, faults: list[Fault]) -> object:
    """Return a value of JSON with dicts for objects; a key that is given twice is a fault."""
    if isinstance(value, _Pairs):
        found = dict[str, object]()
        for name, one in value:
            if name in found:
                faults.append(_unreadable(path, f"{name!r} is given twice"))
            found[name] = _as_dict(one, path, faults)
        return found
    if isinstance(value, Mapping):
        return {str(name): _as_dict(one, path, faults) for name, one in value.items()}
    return [_as_dict(one, path, faults) for one in value] if isinstance(value, list) else value


def _are_names(value: object) -> TypeGuard[list[str]]:
    if not isinstance(value, list) or isinstance(value, _Pairs) or not value:
        return False
    return all(isinstance(name, str) and name for name in value) and len(set(value)) == len(value)


def _unreadable(path: str, what: str) -> Fault:
    return ConfigError.fault(path, what, mend=f"give {_FORM}")
