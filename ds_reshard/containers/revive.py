"""Live objects from records: an allow-list, what the caller builds, and what the user trusts; nothing else."""

from __future__ import annotations

import enum
import importlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ds_reshard.containers.pickle_rules import acts
from ds_reshard.containers.pickle_table import is_enum, reconstructed
from ds_reshard.containers.revive_recipes import RECIPES, VALUES, Parts
from ds_reshard.errors import (
    CheckpointDamaged,
    ConfigError,
    Fault,
    ReshardError,
    TrustRequired,
    UnsafePickle,
    UnsupportedLayout,
    raise_faults,
    trusting,
)
from ds_reshard.model.nesting import LEAVES, children
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord

ReviveChild = Callable[[object], object]
Builder = Callable[[ObjectRecord | GlobalName, ReviveChild], object]

# A step yields a value to revive, receives the object, and returns its own: recursion without the stack.
_Steps = Generator[object, object, object]

_PLAIN = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex, slice, range})


def revive(
    value: object,
    *,
    builders: Mapping[str, Builder],
    trusted: frozenset[str] = frozenset(),
    tensor: Callable[[TensorRecord], object],
    where: str,
) -> object:
    """The value with every record replaced by the object that it describes; shared parts stay shared.

    `builders` are by dotted name, are asked first, and get the record and a function that revives a part of
    it; a builder of a name also stands for the bare name. `trusted` are dotted names that may be imported
    and called. Enums are those of the table of names. Plain containers are copied.

    Raises TrustRequired (UnsafePickle for names that act on the machine) with one fault for each class that
    is not accepted, before anything is built; CheckpointDamaged when a class cannot be built from its parts;
    ConfigError when a trusted class cannot be imported.
    """
    raise_faults(find_faults(value, builders, trusted, where), subject=where)
    revival = _Revival(builders, trusted, tensor, where)
    try:
        return revival.run(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: a value cannot be rebuilt: {str(error)[:200]}") from error


@dataclass(slots=True)
class _Revival:
    """One call of `revive`: the objects made so far, by the identity of their records."""

    builders: Mapping[str, Builder]
    trusted: frozenset[str]
    tensor: Callable[[TensorRecord], object]
    where: str
    made: dict[int, object] = field(default_factory=dict)

    def run(self, value: object) -> object:
        """Revive one value; the depth of its nesting costs memory, not stack."""
        path = [self._steps(value)]
        answer: object = None
        while path:
            try:
                part = path[-1].send(answer)
            except StopIteration as finished:
                path.pop()
                answer = finished.value
            else:
                path.append(self._steps(part))
                answer = None
        return answer

    def _steps(self, value: object) -> _Steps:
        if type(value) in _PLAIN:
            return value
        key = id(value)
        if key in self.made:
            return self.made[key]
        if isinstance(value, list):
            made_list: list[object] = []
            self.made[key] = made_list
            for item in value:
                made_list.append(item if type(item) in _PLAIN else (yield item))
            return made_list
        if isinstance(value, dict):
            made_dict: dict[object, object] = OrderedDict() if isinstance(value, OrderedDict) else {}
            self.made[key] = made_dict
            for name, item in value.items():
                live = name if type(name) in _PLAIN else (yield name)
                made_dict[live] = item if type(item) in _PLAIN else (yield item)
            return made_dict
        if isinstance(value, set):
            made_set: set[object] = set()
            self.made[key] = made_set
            for item in value:
                made_set.add((yield item))
            return made_set
        made = yield from self._unshared(value)
        # A tuple (or an object's arguments) may contain a list that contains it: then it is made already.
        return self.made.setdefault(key, made)

    def _unshared(self, value: object) -> _Steps:
        if isinstance(value, (tuple, frozenset)):
            items: list[object] = []
            for item in value:
                items.append(item if type(item) in _PLAIN else (yield item))
            if isinstance(value, SizeRecord) and "torch.Size" in self.builders:
                record = ObjectRecord(callable=GlobalName(module="torch", name="Size"), args=(tuple(items),))
                return self.builders["torch.Size"](record, lambda part: part)
            return tuple(items) if isinstance(value, tuple) else frozenset(items)
        if isinstance(value, TensorRecord):
            return self.tensor(value)
        if isinstance(value, GlobalName):
            return self._guarded(str(value), lambda: self._named(value))
        if isinstance(value, ObjectRecord):
            return (yield from self._object(value))
        raise TypeError(f"a {type(value).__name__} is not part of a pickle's value")

    def _named(self, name: GlobalName) -> object:
        dotted = str(name)
        if dotted in self.builders:
            return self.builders[dotted](name, self.run)
        if dotted in VALUES:
            return VALUES[dotted]()
        return enum_class(name) if is_enum(name) else import_trusted(name, self.trusted, self.where)

    def _object(self, record: ObjectRecord) -> _Steps:
        name, given, by_new = target(record)
        dotted = str(name)
        if dotted in self.builders:
            return self._guarded(dotted, lambda: self.builders[dotted](record, self.run))
        args: list[object] = []
        for arg in given:
            args.append((yield arg))
        parts = Parts(args=tuple(args))
        for keyword, arg in record.kwargs.items():
            parts.kwargs[keyword] = yield arg
        if id(record) in self.made:
            return self.made[id(record)]
        recipe = RECIPES.get(dotted)
        if recipe is not None and recipe.fill is None:
            yield from self._complete(record, parts)
            return self._guarded(dotted, lambda: recipe.make(parts))
        if recipe is not None:
            made = self._guarded(dotted, lambda: recipe.make(parts))
        elif is_enum(name):
            yield from self._complete(record, parts)
            return self._guarded(dotted, lambda: enum_member(name, parts))
        else:
            accepted = import_trusted(name, self.trusted, self.where)
            made = self._guarded(dotted, lambda: make_trusted(accepted, parts, by_new))
        self.made[id(record)] = made
        yield from self._complete(record, parts)
        if recipe is not None and recipe.fill is not None:
            fill = recipe.fill
            self._guarded(dotted, lambda: fill(made, parts))
        else:
            self._guarded(dotted, lambda: fill_trusted(made, parts, record.has_state))
        return made

    def _complete(self, record: ObjectRecord, parts: Parts) -> Generator[object, object, None]:
        for item in record.items:
            parts.items.append((yield item))
        for key, value in record.pairs:
            live = yield key
            parts.pairs.append((live, (yield value)))
        if record.has_state:
            parts.state = yield record.state

    def _guarded(self, dotted: str, work: Callable[[], object]) -> object:
        """What `work` gives; whatever a class raises on its parts means that the parts are wrong."""
        try:
            return work()
        except ReshardError:
            raise
        except Exception as error:
            raise CheckpointDamaged(f"{self.where}: {dotted} cannot be rebuilt: {str(error)[:200]}") from error


def target(record: ObjectRecord) -> tuple[GlobalName, tuple[object, ...], bool]:
    """The class or function that a record is of, its arguments, and whether `__new__` makes it.

    Protocols 0 and 1 write objects as calls of copyreg's `_reconstructor` and `__newobj__`; Python 3.11.0 to 3.11.3
    writes the member of an enum as `getattr(class, name)`.
    """
    if str(record.callable) == "builtins.getattr" and len(record.args) == 2:
        kind = record.args[0]
        if isinstance(kind, GlobalName) and is_enum(kind):
            return kind, record.args, False
    made = reconstructed(record.callable, record.args) if record.callable.module == "copyreg" else None
    if made is None:
        return record.callable, record.args, record.by_new
    return made, record.args[1:] if record.callable.name == "__newobj__" else (), True


# -- which names may become live ---------------------------------------------------------------------------------------


def find_faults(value: object, builders: Mapping[str, object], trusted: frozenset[str], where: str) -> Iterator[Fault]:
    """One fault for each name in `value` that is not accepted, in no order."""
    for part in _walk(value):
        if isinstance(part, StorageRecord):
            yield UnsupportedLayout.fault(
                where, f"storage {part.key!r} is held without a tensor", mend="save a tensor instead of its storage"
            )
        name = target(part)[0] if isinstance(part, ObjectRecord) else part
        if isinstance(name, GlobalName) and not _accepted(part, name, builders, trusted):
            yield _refusal(name, where)


_NAMELESS = LEAVES - {GlobalName, StorageRecord}


def _walk(value: object) -> Iterator[object]:
    """Each part of a value once."""
    seen = {id(value)}
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, ObjectRecord):
            _, args, by_new = target(part)
            if args is not part.args:  # the class that a call of copyreg is about is not rebuilt
                part = replace(part, args=args, by_new=by_new)
        for child in children(part):
            if type(child) not in _NAMELESS and id(child) not in seen:
                seen.add(id(child))
                left.append(child)


def _accepted(part: object, name: GlobalName, builders: Mapping[str, object], trusted: frozenset[str]) -> bool:
    dotted = str(name)
    if dotted in builders or is_enum(name) or dotted in (RECIPES if isinstance(part, ObjectRecord) else VALUES):
        return True
    return dotted in trusted and not _never(name)


def _never(name: GlobalName) -> bool:
    return acts(str(name)) or name.module == "copyreg"


def _refusal(name: GlobalName, where: str) -> Fault:
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
        where, f"it holds a value of {str(name)[:200]}, which is not rebuilt unasked", mend=trusting([str(name)[:200]])
    )


# -- enums and what is trusted -----------------------------------------------------------------------------------------


def enum_member(name: GlobalName, parts: Parts) -> enum.Enum:
    """The member of an enum of the table, looked up by its value, or by its class and name, and never computed.

    Raises ValueError if there is none, or if the pickle would change it.
    """
    kind, args = enum_class(name), parts.args
    if parts.items or parts.pairs or parts.state is not None:
        raise ValueError("it gives the member of an enum a state")
    if len(args) == 2 and args[0] is kind and args[1] in kind.__members__:
        return kind.__members__[str(args[1])]
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
        raise_faults([_refusal(name, where)], subject=where)
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
