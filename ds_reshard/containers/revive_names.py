"""Which names in a checkpoint may become live: what has a recipe, enums of the table of names, what the user trusts."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ds_reshard.containers.pickle_rules import acts, trusting
from ds_reshard.containers.pickle_table import is_enum, reconstructed
from ds_reshard.containers.revive_parts import Parts
from ds_reshard.containers.revive_recipes import RECIPES, VALUES
from ds_reshard.errors import ConfigError, Fault, TrustRequired, UnsafePickle, UnsupportedLayout, raise_faults
from ds_reshard.model.nesting import LEAVES, children
from ds_reshard.model.records import GlobalName, ObjectRecord, StorageRecord


def target(record: ObjectRecord) -> tuple[GlobalName, tuple[object, ...], bool]:
    """The class or function that a record is of, its arguments, and whether `__new__` makes it.

    Protocols 0 and 1 write objects as calls of copyreg's `_reconstructor` and `__newobj__`.
    """
    made = reconstructed(record.callable, record.args) if record.callable.module == "copyreg" else None
    if made is None:
        return record.callable, record.args, record.by_new
    return made, record.args[1:] if record.callable.name == "__newobj__" else (), True


def find_faults(value: object, builders: Mapping[str, object], trusted: frozenset[str], where: str) -> Iterator[Fault]:
    """One fault for each name in `value` that is not accepted, in no order."""
    for part in _walk(value):
        if isinstance(part, StorageRecord):
            yield UnsupportedLayout.fault(
                where, f"storage {part.key!r} is held without a tensor", mend="save a tensor instead of its storage"
            )
        name = _needed(part)
        if name is not None and not _accepted(part, name, builders, trusted):
            yield _fault(name, where)


def _walk(value: object) -> Iterator[object]:
    """Each part of a value once."""
    seen = {id(value)}
    left = [value]
    while left:
        part = left.pop()
        yield part
        for child in _parts(part):
            if type(child) not in _NAMELESS and id(child) not in seen:
                seen.add(id(child))
                left.append(child)


_NAMELESS = LEAVES - {GlobalName, StorageRecord}


def _parts(part: object) -> Iterator[object]:
    """What is rebuilt inside `part`: not the class that a call of copyreg is about."""
    if isinstance(part, ObjectRecord):
        _, args, by_new = target(part)
        if args is not part.args:
            part = replace(part, args=args, by_new=by_new)
    return children(part)


def _needed(part: object) -> GlobalName | None:
    if isinstance(part, GlobalName):
        return part
    return target(part)[0] if isinstance(part, ObjectRecord) else None


def _accepted(part: object, name: GlobalName, builders: Mapping[str, object], trusted: frozenset[str]) -> bool:
    dotted = str(name)
    if dotted in builders or is_enum(name) or dotted in (RECIPES if isinstance(part, ObjectRecord) else VALUES):
        return True
    return dotted in trusted and not _never(name)


def _never(name: GlobalName) -> bool:
    return acts(str(name)) or name.module == "copyreg"


def _fault(name: GlobalName, where: str) -> Fault:
    if name.module == "copyreg":
        return UnsafePickle.fault(
            where,
            "it holds an object that pickle protocol 0 or 1 wrote by way of a built-in type",
            mend="save it again with pickle protocol 2 or later, as torch.save does",
        )
    if _never(name):
        return UnsafePickle.fault(
            where,
            f"it names {str(name)[:200]!r}, which acts on the machine; nothing was run",
            mend="do not load this file elsewhere either: ask whoever wrote it",
        )
    return TrustRequired.fault(
        where, f"it holds a value of {str(name)[:200]}, which is not rebuilt unasked", mend=trusting(str(name))
    )


def enum_member(name: GlobalName, args: tuple[object, ...]) -> enum.Enum:
    """The member of that value of an enum of the table, looked up and never computed; ValueError when there is none."""
    kind = enum_class(name)
    for member in kind.__members__.values():
        if len(args) == 1 and type(member.value) is type(args[0]) and member.value == args[0]:
            return member
    raise ValueError(f"{kind.__name__} has no such member")


def enum_class(name: GlobalName) -> type[enum.Enum]:
    """An enum of the table of names, by name; ValueError where what is installed here has none of that name."""
    try:
        found: object = getattr(importlib.import_module(name.module), name.name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} is not installed here: {error}") from error
    if not isinstance(found, type) or not issubclass(found, enum.Enum):
        raise ValueError(f"{name} is no enum here")
    return found


def import_trusted(name: GlobalName, trusted: frozenset[str], where: str) -> object:
    """Import what the user has accepted by name; raises ConfigError when it is not there."""
    if str(name) not in trusted or _never(name):  # found before by find_faults; never import on its word alone
        raise_faults([_fault(name, where)], subject=where)
    try:
        found: object = importlib.import_module(name.module)
        for part in name.name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"{where}: {name} is trusted, and cannot be imported: {error!r}; make it importable, or remove it from "
            '"trust" in the "ds_reshard" section of the DeepSpeed JSON'
        ) from error
    return found


def make_trusted(kind: object, parts: Parts, by_new: bool) -> object:
    """Call the class, or its `__new__`, as pickle does."""
    if by_new and isinstance(kind, type):
        made: object = kind.__new__(kind, *parts.args, **parts.kwargs)
        return made
    if by_new or not callable(kind):
        raise ValueError("it is not a class")
    return kind(*parts.args, **parts.kwargs)


def fill_trusted(made: object, parts: Parts, has_state: bool) -> None:
    """Items, then pairs, then state, in the order of pickle.py `save_reduce`."""
    for item in parts.items:
        made.append(item)  # type: ignore[attr-defined]
    for key, value in parts.pairs:
        made[key] = value  # type: ignore[index]
    if not has_state:
        return
    set_state = getattr(made, "__setstate__", None)
    if set_state is not None:
        set_state(parts.state)
        return
    state, slots = parts.state, None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if isinstance(state, dict):
        made.__dict__.update(state)
    if isinstance(slots, dict):
        for slot, value in slots.items():
            setattr(made, slot, value)
