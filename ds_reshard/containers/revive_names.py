"""Which names in a checkpoint may become live: the allow-list, enums already loaded, and what the user trusts."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ds_reshard.containers.revive_parts import Parts
from ds_reshard.containers.revive_recipes import RECIPES, VALUES
from ds_reshard.errors import ConfigError, Fault, raise_faults
from ds_reshard.model.nesting import LEAVES, children
from ds_reshard.model.records import GlobalName, ObjectRecord, StorageRecord

# Modules whose functions act on the machine; they are not offered for trust, nor accepted when trusted.
_NEVER = frozenset(
    {
        "os",
        "posix",
        "nt",
        "subprocess",
        "sys",
        "builtins",
        "importlib",
        "imp",
        "runpy",
        "pickle",
        "_pickle",
        "cPickle",
        "marshal",
        "socket",
        "shutil",
        "ctypes",
        "_ctypes",
        "code",
        "codeop",
        "pty",
        "pdb",
        "bdb",
        "timeit",
        "cProfile",
        "profile",
        "trace",
        "operator",
        "_operator",
        "multiprocessing",
        "asyncio",
        "threading",
        "_thread",
        "signal",
        "webbrowser",
        "http",
        "urllib",
        "ftplib",
        "smtplib",
        "tempfile",
        "pip",
        "ensurepip",
        "venv",
        "pydoc",
        "inspect",
        "gc",
        "atexit",
        "site",
        "zipimport",
        "pkgutil",
        "io",
        "_io",
    }
)


def target(record: ObjectRecord) -> tuple[GlobalName, tuple[object, ...], bool]:
    """The class or function that a record is of, its arguments, and whether `__new__` makes it.

    Protocols 0 and 1 write objects as calls of copyreg's `_reconstructor` and `__newobj__`.
    """
    args = record.args
    if record.callable.module == "copyreg" and args and isinstance(args[0], GlobalName):
        base = args[1] if record.callable.name == "_reconstructor" and len(args) == 3 and args[2] is None else None
        if isinstance(base, GlobalName) and str(base) == "builtins.object":
            return args[0], (), True
        if record.callable.name == "__newobj__":
            return args[0], args[1:], True
    return record.callable, args, record.by_new


def find_faults(value: object, builders: Mapping[str, object], trusted: frozenset[str], where: str) -> Iterator[Fault]:
    """One fault for each name in `value` that is not accepted, in no order."""
    for part in _walk(value):
        if isinstance(part, StorageRecord):
            yield Fault(
                error="UnsupportedLayout",
                where=where,
                what=f"storage {part.key!r} is held without a tensor",
                mend="save a tensor instead of its storage",
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

# Of modules that act on the machine, the names that only hold data: torch models keep extra state in them.
_INERT = frozenset({"_io.BytesIO", "_io.StringIO", "io.BytesIO", "io.StringIO", "operator.itemgetter"})


def find_hostile(value: object, where: str, named: Iterable[GlobalName] | None = None) -> Iterator[Fault]:
    """One fault for each name in `value` that acts on the machine when `torch.load` builds it.

    For files that are handed to a framework which builds everything: classes that are merely unknown pass. `named` are
    all names in `value`, where they are known.
    """
    if named is not None and not any(map(_acts, named)):
        return
    inert = dict.fromkeys(_INERT)
    for part in _walk(value):
        name = _needed(part)
        if name is not None and _acts(name) and not _accepted(part, name, inert, frozenset()):
            yield _fault(name, where)


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
    if dotted in builders or loaded_enum(name) is not None:
        return True
    if dotted in (RECIPES if isinstance(part, ObjectRecord) else VALUES):
        return True
    return dotted in trusted and not _acts(name) and name.module != "copyreg"


def _acts(name: GlobalName) -> bool:
    return name.module.partition(".")[0] in _NEVER


def _fault(name: GlobalName, where: str) -> Fault:
    if _acts(name):
        return Fault(
            error="UnsafePickle",
            where=where,
            what=f"it names {str(name)[:200]!r}, which acts on the machine; nothing was run",
            mend="do not load this file elsewhere either: ask whoever wrote it",
        )
    if name.module == "copyreg":
        return Fault(
            error="UnsafePickle",
            where=where,
            what="it holds an object that pickle protocol 0 or 1 wrote by way of a built-in type",
            mend="save it again with pickle protocol 2 or later, as torch.save does",
        )
    return Fault(
        error="TrustRequired",
        where=where,
        what=f"it holds a value of {str(name)[:200]}, which is not rebuilt unasked",
        mend=f'accept the class by adding "trust": ["{str(name)[:200]}"] to the "ds_reshard" section of the '
        "DeepSpeed JSON",
    )


def loaded_enum(name: GlobalName) -> type[enum.Enum] | None:
    """The enum that `name` names in a module that is already imported; None for anything else."""
    found: object = sys.modules.get(name.module)
    for part in name.name.split("."):
        if found is None or not hasattr(type(found), "__dict__"):
            return None
        # Not getattr: a module's __getattr__ may import, and a class attribute may be computed.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def enum_member(kind: type[enum.Enum], args: tuple[object, ...]) -> enum.Enum:
    """The member of that value, looked up and never computed; ValueError when there is none."""
    for member in kind.__members__.values():
        if len(args) == 1 and type(member.value) is type(args[0]) and member.value == args[0]:
            return member
    raise ValueError(f"{kind.__name__} has no such member")


def import_trusted(name: GlobalName, trusted: frozenset[str], where: str) -> object:
    """Import what the user has accepted by name; raises ConfigError when it is not there."""
    if (
        str(name) not in trusted or _acts(name) or name.module == "copyreg"
    ):  # found before by find_faults; never import on its word alone
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
