"""How a record of an accepted class becomes an object: a table of names, and what each needs.

numpy is imported when a value of it occurs. Its arrays are made from their bytes, not by `__setstate__`, and random
states are checked first: numpy trusts positions in them and would read outside its buffers.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib
import operator
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

from ds_reshard.containers.pickle_table import FUNCTIONS, SIGNALS

if TYPE_CHECKING:
    import numpy
    import numpy.random

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Parts:
    """The revived arguments, state and items of one ObjectRecord."""

    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    items: list[object] = field(default_factory=list)
    pairs: list[tuple[object, object]] = field(default_factory=list)

    def exactly(self, count: int) -> None:
        """Raise ValueError unless there are `count` arguments, none by keyword."""
        if self.kwargs or len(self.args) != count:
            raise ValueError(f"expected {count} arguments, found {len(self.args) + len(self.kwargs)}")

    def arg(self, index: int, kind: type[T]) -> T:
        """One argument, when it is exactly of that type; ValueError when it is not."""
        return exact(self.args[index], kind)

    def attributes(self) -> dict[str, object]:
        """The state, when it is a dict of attributes (an absent one has none); ValueError when it is not."""
        if self.state is None:
            return {}
        if not isinstance(self.state, dict) or not all(isinstance(name, str) for name in self.state):
            raise ValueError(f"the state is a {type(self.state).__name__}, not attributes")
        return self.state


def exact(value: object, kind: type[T]) -> T:
    """The value, when it is exactly of that type (True is no int); ValueError when it is not."""
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`make` an object; with a `fill`, from its arguments alone, and state and items are set afterwards.

    Objects that may contain themselves have a `fill`.
    """

    make: Callable[[Parts], object]
    fill: Callable[[object, Parts], None] | None = None


# -- Python's own values -----------------------------------------------------------------------------------------------

_FACTORIES: tuple[object, ...] = (None, list, dict, int, float, set, str, bool, tuple, type(None))


def _empty(kind: type) -> Callable[[Parts], object]:
    """An object of no arguments, whose attributes are its state."""

    def make(parts: Parts) -> object:
        parts.exactly(0)
        made: object = kind()
        return made

    return make


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


def _partial(parts: Parts) -> object:
    """Of a function that the table has judged, with its arguments; neither is called."""
    parts.exactly(1)
    state = (parts.args[0], (), {}, None) if parts.state is None else exact(parts.state, tuple)
    if len(state) != 4 or state[3] is not None:
        raise ValueError("the state is none of a function with some arguments")
    return partial(state[0], *exact(state[1], tuple), **exact(state[2], dict))


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


# -- numpy's arrays, scalars, element types and random states ----------------------------------------------------------

_CODE = re.compile(r"[|<>=]?([?bBhHiIlLqQefdgFDG]|[biufcSUVmMOa]\d{0,9})")
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")
_BIT_GENERATORS = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_SIZED = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
_SCALARS = (*_SIZED, "float16", "float32", "float64", "longdouble", "complex64", "complex128", "bool", "bool_")
_WORDS = ("str_", "bytes_", "datetime64", "timedelta64", "intc", "uintc", "longlong", "ulonglong")
_MAX_NDIM = 64  # of numpy 2, NPY_MAXDIMS


def _dtype(parts: Parts) -> numpy.dtype:
    """An element type: `numpy.dtype(code, False, True)` with the state of descriptor.c `arraydescr_reduce`."""
    import numpy

    code = parts.arg(0, str)
    if not _CODE.fullmatch(code):
        raise ValueError("malformed element type")
    dtype = numpy.dtype(code)
    if parts.state is None:
        return dtype
    _, order, sub, names, fields, nbytes, _, flags, *metadata = exact(parts.state, tuple)
    if names is not None:
        return _structured(exact(names, tuple), exact(fields, dict), exact(nbytes, int), exact(flags, int))
    if sub is not None:
        base, shape = exact(sub, tuple)
        if not isinstance(base, numpy.dtype):
            raise ValueError("malformed element type")
        return numpy.dtype((base, _shape(shape)))
    if dtype.kind in "mM" and metadata:
        unit, count, *_ = exact(exact(metadata[0], tuple)[1], tuple)
        unit = unit.decode() if isinstance(unit, bytes) else exact(unit, str)
        if not _UNIT.fullmatch(unit):
            raise ValueError("malformed unit of a time")
        if unit != "generic":
            dtype = numpy.dtype(f"{dtype.kind}8[{exact(count, int)}{unit}]")
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _structured(names: tuple[object, ...], fields: dict[object, object], nbytes: int, flags: int) -> numpy.dtype:
    import numpy

    formats: list[numpy.dtype] = []
    offsets: list[int] = []
    for name in names:
        element, offset = exact(fields[name], tuple)
        if not isinstance(element, numpy.dtype):
            raise ValueError("malformed fields of an element type")
        formats.append(element)
        offsets.append(exact(offset, int))
    texts = [exact(name, str) for name in names]
    aligned = bool(flags & 0x80)  # NPY_ALIGNED_STRUCT
    return numpy.dtype({"names": texts, "formats": formats, "offsets": offsets, "itemsize": nbytes, "aligned": aligned})


def _shape(value: object) -> tuple[int, ...]:
    shape = tuple(exact(size, int) for size in exact(value, tuple))
    if len(shape) > _MAX_NDIM or min((0, *shape)) < 0:
        raise ValueError("malformed shape")
    return shape


def _array(parts: Parts) -> object:
    """`_reconstruct(ndarray, (0,), b"b")` with state (version, shape, dtype, Fortran order, content)."""
    import numpy

    if parts.args[0] is not numpy.ndarray:
        raise ValueError("malformed array")
    _, shape, dtype, fortran, content = exact(parts.state, tuple)
    made = _filled(content, dtype, _shape(shape), "F" if fortran is True else "C")
    if made.dtype.isnative or made.dtype.names:
        return made
    native: numpy.ndarray = made.astype(made.dtype.newbyteorder("="))  # as methods.c `array_setstate` does
    return native


def _array_from_buffer(parts: Parts) -> object:
    """`_frombuffer(buffer, dtype, shape, order)`, as protocol 5 writes arrays."""
    content, dtype, shape, order, *_ = parts.args
    return _filled(content, dtype, _shape(shape), "F" if order == "F" else "C")


def _filled(content: object, dtype: object, shape: tuple[int, ...], order: Literal["C", "F"]) -> numpy.ndarray:
    import numpy

    if not isinstance(dtype, numpy.dtype):
        raise ValueError("malformed array")
    numel: int = prod(shape)
    if dtype.char == "O" and isinstance(content, list):
        if len(content) != numel:
            raise ValueError(f"an array of shape {shape} has {len(content)} values")
        flat = numpy.empty(len(content), dtype=object)
        for i, value in enumerate(content):
            flat[i] = value
        shaped: numpy.ndarray = flat.reshape(shape, order=order)
        return shaped
    if dtype.hasobject or not isinstance(content, (bytes, bytearray)):
        raise ValueError("malformed array")
    if len(content) != numel * dtype.itemsize or (dtype.itemsize == 0 and numel):
        raise ValueError(f"an array of shape {shape} and {dtype.itemsize} bytes per element has {len(content)} bytes")
    made: numpy.ndarray = numpy.ndarray(shape, dtype, bytearray(content), order=order)
    return made


def _scalar(parts: Parts) -> object:
    import numpy

    parts.exactly(2)
    dtype, content = parts.args[0], parts.arg(1, bytes)
    if not isinstance(dtype, numpy.dtype) or dtype.hasobject or len(content) != dtype.itemsize:
        raise ValueError("malformed scalar")
    made: object = numpy.frombuffer(content, dtype)[0] if content else dtype.type()
    return made


def _bit_generator(parts: Parts) -> numpy.random.BitGenerator:
    """`__bit_generator_ctor(class or name)` with state, or (state, seed sequence) since numpy 2."""
    import numpy

    kind = parts.args[0] if parts.args else "MT19937"
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    if name not in _BIT_GENERATORS:
        raise ValueError("not a known bit generator")
    state, seeds = parts.state if isinstance(parts.state, tuple) else (parts.state, None)
    make: type[numpy.random.BitGenerator] = getattr(numpy.random, name)
    made = make(seeds if isinstance(seeds, numpy.random.SeedSequence) else 0)
    if state is not None:
        made.state = _checked(state)
    return made


def _checked(value: object) -> dict[str, object]:
    """A random state whose positions lie inside its buffers, which numpy does not check."""
    state: dict[str, object] = exact(value, dict)
    for holder, key, limit in ((state.get("state"), "pos", 624), (state, "buffer_pos", 4)):
        position = exact(holder.get(key, 0), int) if isinstance(holder, dict) else 0
        if not 0 <= position <= limit:
            raise ValueError("a random state points outside its buffer")
    return state


def _generator(parts: Parts) -> object:
    """`__generator_ctor(bit generator)`, or its name and state before numpy 1.24."""
    import numpy

    made = numpy.random.Generator(_source(parts))
    if parts.state is not None:
        made.bit_generator.state = _checked(parts.state)
    return made


def _random_state(parts: Parts) -> object:
    """`__randomstate_ctor(bit generator)`, or its name before numpy 1.24, with the state of both."""
    import numpy

    made = numpy.random.RandomState(_source(parts))
    if parts.state is not None:
        made.set_state(_checked(parts.state))
    return made


def _source(parts: Parts) -> numpy.random.BitGenerator:
    import numpy

    source = parts.args[0] if parts.args else "MT19937"
    return source if isinstance(source, numpy.random.BitGenerator) else _bit_generator(Parts(args=(source,)))


def _seed_sequence(parts: Parts) -> object:
    """`__pyx_unpickle_SeedSequence(class, checksum, state)`: Cython pickles attributes in alphabetical order."""
    import numpy

    state = exact(parts.args[2] if parts.state is None else parts.state, tuple)
    entropy, spawned, _, pool_size, spawn_key = state
    if not 4 <= exact(pool_size, int) <= 1024:
        raise ValueError("malformed seed sequence")
    key = tuple(exact(part, int) for part in spawn_key)
    return numpy.random.SeedSequence(entropy, spawn_key=key, pool_size=pool_size, n_children_spawned=spawned)


def _of_numpy(name: str) -> Callable[[], object]:
    def look_up() -> object:
        import numpy

        found: object = operator.attrgetter(name)(numpy)
        return found

    return look_up


def _numpy_values() -> dict[str, Callable[[], object]]:
    named = {f"numpy.{name}": _of_numpy(name) for name in (*_SCALARS, *_WORDS, "ndarray", "dtype")}
    named |= {f"numpy.random.{m}.{name}": _of_numpy(f"random.{name}") for name, m in _BIT_GENERATORS.items()}
    named["numpy.random.bit_generator.SeedSequence"] = _of_numpy("random.SeedSequence")
    # The second argument of generators before numpy 1.24: a name that is looked at no further.
    named["numpy.random._pickle.__bit_generator_ctor"] = lambda: None
    return named


# -- the tables --------------------------------------------------------------------------------------------------------

_NUMPY_MAKERS: dict[str, Callable[[Parts], object]] = {
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__generator_ctor": _generator,
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
}
"""The calls by which numpy pickles, and what makes their value."""

RECIPES: Mapping[str, Recipe] = types.MappingProxyType(
    {
        "argparse.Namespace": Recipe(make=_empty(argparse.Namespace), fill=_set_attributes),
        "types.SimpleNamespace": Recipe(make=_empty(types.SimpleNamespace), fill=_set_attributes),
        "collections.defaultdict": Recipe(make=_default_dict, fill=_set_pairs),
        "collections.deque": Recipe(make=_deque, fill=_append),
        "collections.Counter": Recipe(make=_counter),
        "datetime.datetime": Recipe(make=_moment(datetime.datetime)),
        "datetime.date": Recipe(make=_moment(datetime.date)),
        "datetime.time": Recipe(make=_moment(datetime.time)),
        "datetime.timedelta": Recipe(make=_timedelta),
        "datetime.timezone": Recipe(make=_timezone),
        "builtins.type": Recipe(make=_type_of),
        "functools.partial": Recipe(make=_partial),
        **_paths(),
        **{name: Recipe(make=make) for name, make in _NUMPY_MAKERS.items()},
    }
)
"""The classes that are rebuilt without asking, by dotted name."""


def _imported(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name)


VALUES: Mapping[str, Callable[[], object]] = types.MappingProxyType(
    {
        **{
            f"builtins.{kind.__name__}": _constant(kind)
            for kind in (list, dict, int, float, set, str, bool, tuple, bytes, complex, object, frozenset, bytearray)
        },
        "builtins.Ellipsis": _constant(...),
        "builtins.NotImplemented": _constant(NotImplemented),
        **{name: partial(_imported, *name.rsplit(".", 1)) for name in FUNCTIONS | SIGNALS},
        **_numpy_values(),
    }
)
"""The names that may stand for themselves, as a default type or an element type does."""
