"""How a record of an accepted class becomes an object: a table of names, and what each needs."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import os
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ds_reshard.containers import revive_numpy
from ds_reshard.containers.revive_parts import Parts, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`make` an object; with a `fill`, from its arguments alone, and state and items are set afterwards.

    Objects that may contain themselves have a `fill`.
    """

    make: Callable[[Parts], object]
    fill: Callable[[object, Parts], None] | None = field(default=None)


_FACTORIES: tuple[object, ...] = (None, list, dict, int, float, set, str, bool, tuple, type(None))
_FRACTION = re.compile(r"-?\d{1,4000}(/\d{1,4000})?")


def _namespace(parts: Parts) -> object:
    parts.exactly(0)
    return argparse.Namespace()


def _simple_namespace(parts: Parts) -> object:
    parts.exactly(0)
    return types.SimpleNamespace()


def _set_attributes(made: object, parts: Parts) -> None:
    for name, value in parts.attributes().items():
        vars(made)[name] = value


def _default_dict(parts: Parts) -> object:
    factory = parts.args[0] if parts.args else None
    if len(parts.args) > 1 or not any(factory is known for known in _FACTORIES):
        raise ValueError("the default of a defaultdict is not a built-in type")
    made: collections.defaultdict[object, object] = collections.defaultdict()
    made.default_factory = factory  # type: ignore[assignment]
    return made


def _set_pairs(made: object, parts: Parts) -> None:
    assert isinstance(made, dict)
    made.update(parts.pairs)


def _deque(parts: Parts) -> object:
    content = parts.args[0] if parts.args else ()
    bound = parts.args[1] if len(parts.args) > 1 else None
    if not isinstance(content, (list, tuple)):
        raise ValueError("malformed deque")
    return collections.deque(content, None if bound is None else exact(bound, int))


def _append(made: object, parts: Parts) -> None:
    assert isinstance(made, collections.deque)
    made.extend(parts.items)


def _counter(parts: Parts) -> object:
    return collections.Counter(parts.arg(0, dict) if parts.args else {})


def _moment(kind: type[datetime.date] | type[datetime.time]) -> Callable[[Parts], object]:
    """The constructors of datetime take their pickled bytes almost unchecked; `replace` checks each field."""

    def make(parts: Parts) -> object:
        if not parts.args or not isinstance(parts.args[0], bytes):
            raise ValueError(f"malformed {kind.__name__}")
        made = kind(*parts.args)  # type: ignore[arg-type]
        return made.replace()

    return make


def _timedelta(parts: Parts) -> object:
    parts.exactly(3)
    return datetime.timedelta(parts.arg(0, int), parts.arg(1, int), parts.arg(2, int))


def _timezone(parts: Parts) -> object:
    if len(parts.args) == 2:
        return datetime.timezone(parts.arg(0, datetime.timedelta), parts.arg(1, str))
    parts.exactly(1)
    return datetime.timezone(parts.arg(0, datetime.timedelta))


def _decimal(parts: Parts) -> object:
    parts.exactly(1)
    return decimal.Decimal(parts.arg(0, str))


def _fraction(parts: Parts) -> object:
    if len(parts.args) == 2:
        return fractions.Fraction(parts.arg(0, int), parts.arg(1, int))
    text = parts.arg(0, str)
    if not _FRACTION.fullmatch(text):  # "1e999999999" would be computed
        raise ValueError("malformed fraction")
    return fractions.Fraction(text)


def _uuid(parts: Parts) -> object:
    state = parts.attributes()
    number, safe = state.get("int"), state.get("is_safe")
    if type(number) is not int:
        raise ValueError("malformed UUID")
    return uuid.UUID(int=number, is_safe=uuid.SafeUUID.unknown if safe is None else uuid.SafeUUID(safe))


def _path(kind: type[pathlib.PurePath]) -> Callable[[Parts], object]:
    def make(parts: Parts) -> object:
        return kind(*(exact(part, str) for part in parts.args))

    return make


def _type_of(parts: Parts) -> object:
    """`type(None)`, `type(...)` and `type(NotImplemented)`: pickle.py `save_type`."""
    for value in (None, ..., NotImplemented):
        if len(parts.args) == 1 and parts.args[0] is value:
            return type(value)
    raise ValueError("asks for the type of a value")


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _paths() -> dict[str, Recipe]:
    """Paths of the other system as pure paths, for a checkpoint that was written on it."""
    on_windows = os.name == "nt"
    kinds: dict[str, type[pathlib.PurePath]] = {
        "Path": pathlib.Path,
        "PosixPath": pathlib.PurePosixPath if on_windows else pathlib.PosixPath,
        "WindowsPath": pathlib.WindowsPath if on_windows else pathlib.PureWindowsPath,
        "PurePath": pathlib.PurePath,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }
    # pathlib._local is where Python 3.13 defines them.
    return {
        f"{m}.{name}": Recipe(make=_path(kind)) for name, kind in kinds.items() for m in ("pathlib", "pathlib._local")
    }


RECIPES: Mapping[str, Recipe] = types.MappingProxyType(
    {
        "argparse.Namespace": Recipe(make=_namespace, fill=_set_attributes),
        "types.SimpleNamespace": Recipe(make=_simple_namespace, fill=_set_attributes),
        "collections.defaultdict": Recipe(make=_default_dict, fill=_set_pairs),
        "collections.deque": Recipe(make=_deque, fill=_append),
        "collections.Counter": Recipe(make=_counter),
        "datetime.datetime": Recipe(make=_moment(datetime.datetime)),
        "datetime.date": Recipe(make=_moment(datetime.date)),
        "datetime.time": Recipe(make=_moment(datetime.time)),
        "datetime.timedelta": Recipe(make=_timedelta),
        "datetime.timezone": Recipe(make=_timezone),
        "decimal.Decimal": Recipe(make=_decimal),
        "fractions.Fraction": Recipe(make=_fraction),
        "uuid.UUID": Recipe(make=_uuid),
        "builtins.type": Recipe(make=_type_of),
        **_paths(),
        **{name: Recipe(make=make) for name, make in revive_numpy.MAKERS.items()},
    }
)
"""The classes that are rebuilt without asking, by dotted name."""

VALUES: Mapping[str, Callable[[], object]] = types.MappingProxyType(
    {
        **{
            f"builtins.{kind.__name__}": _constant(kind)
            for kind in (list, dict, int, float, set, str, bool, tuple, bytes, complex, object, frozenset, bytearray)
        },
        "builtins.Ellipsis": _constant(...),
        "builtins.NotImplemented": _constant(NotImplemented),
        **revive_numpy.VALUES,
    }
)
"""The names that may stand for themselves, as a default type or an element type does."""
