"""Live objects from records: an allow-list, what the caller builds, and what the user trusts; nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping

from ds_reshard.containers.pickle_table import is_enum
from ds_reshard.containers.revive_names import (
    enum_class,
    enum_member,
    fill_trusted,
    find_faults,
    import_trusted,
    make_trusted,
    target,
)
from ds_reshard.containers.revive_parts import Parts
from ds_reshard.containers.revive_recipes import RECIPES, VALUES
from ds_reshard.errors import CheckpointDamaged, ReshardError, raise_faults
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, TensorRecord

__all__ = ["Builder", "ReviveChild", "revive"]

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


class _Revival:
    """One call of `revive`: the objects made so far, by the identity of their records."""

    def __init__(
        self,
        builders: Mapping[str, Builder],
        trusted: frozenset[str],
        tensor: Callable[[TensorRecord], object],
        where: str,
    ) -> None:
        self._builders = builders
        self._trusted = trusted
        self._tensor = tensor
        self._where = where
        self._made: dict[int, object] = {}

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
        if key in self._made:
            return self._made[key]
        if isinstance(value, list):
            made_list: list[object] = []
            self._made[key] = made_list
            for item in value:
                made_list.append(item if type(item) in _PLAIN else (yield item))
            return made_list
        if isinstance(value, dict):
            made_dict: dict[object, object] = OrderedDict() if isinstance(value, OrderedDict) else {}
            self._made[key] = made_dict
            for name, item in value.items():
                live = name if type(name) in _PLAIN else (yield name)
                made_dict[live] = item if type(item) in _PLAIN else (yield item)
            return made_dict
        if isinstance(value, set):
            made_set: set[object] = set()
            self._made[key] = made_set
            for item in value:
                made_set.add((yield item))
            return made_set
        made = yield from self._unshared(value)
        # A tuple (or an object's arguments) may contain a list that contains it: then it is made already.
        return self._made.setdefault(key, made)

    def _unshared(self, value: object) -> _Steps:
        if isinstance(value, (tuple, frozenset)):
            items: list[object] = []
            for item in value:
                items.append(item if type(item) in _PLAIN else (yield item))
            if isinstance(value, SizeRecord) and "torch.Size" in self._builders:
                record = ObjectRecord(callable=GlobalName(module="torch", name="Size"), args=(tuple(items),))
                return self._builders["torch.Size"](record, lambda part: part)
            return tuple(items) if isinstance(value, tuple) else frozenset(items)
        if isinstance(value, TensorRecord):
            return self._tensor(value)
        if isinstance(value, GlobalName):
            return self._guarded(str(value), lambda: self._named(value))
        if isinstance(value, ObjectRecord):
            return (yield from self._object(value))
        raise TypeError(f"a {type(value).__name__} is not part of a pickle's value")

    def _named(self, name: GlobalName) -> object:
        dotted = str(name)
        if dotted in self._builders:
            return self._builders[dotted](name, self.run)
        if dotted in VALUES:
            return VALUES[dotted]()
        return enum_class(name) if is_enum(name) else import_trusted(name, self._trusted, self._where)

    def _object(self, record: ObjectRecord) -> _Steps:
        name, given, by_new = target(record)
        dotted = str(name)
        if dotted in self._builders:
            return self._guarded(dotted, lambda: self._builders[dotted](record, self.run))
        args: list[object] = []
        for arg in given:
            args.append((yield arg))
        parts = Parts(args=tuple(args))
        for keyword, arg in record.kwargs.items():
            parts.kwargs[keyword] = yield arg
        if id(record) in self._made:
            return self._made[id(record)]
        recipe = RECIPES.get(dotted)
        if recipe is not None and recipe.fill is None:
            yield from self._complete(record, parts)
            return self._guarded(dotted, lambda: recipe.make(parts))
        if recipe is not None:
            made = self._guarded(dotted, lambda: recipe.make(parts))
        elif is_enum(name):
            return self._guarded(dotted, lambda: enum_member(name, parts.args))
        else:
            accepted = import_trusted(name, self._trusted, self._where)
            made = self._guarded(dotted, lambda: make_trusted(accepted, parts, by_new))
        self._made[id(record)] = made
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
            raise CheckpointDamaged(f"{self._where}: {dotted} cannot be rebuilt: {str(error)[:200]}") from error
