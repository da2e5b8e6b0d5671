"""Where a target lives, and how its attribute is put there, copied and put back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType

from ds_reshard.hooks.declare import Function, Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The class or module that a patch names, and the attribute exactly as it is stored there.

    `stored` is what `__dict__` holds, so a staticmethod is still one; `inherited` says that the class
    that was named does not hold the attribute itself.
    """

    owner: type | ModuleType
    name: str
    stored: object
    inherited: bool

    def holds(self, value: object) -> bool:
        """Whether `value` itself is what the owner holds at this moment."""
        return vars(self.owner).get(self.name) is value

    def put_back(self) -> None:
        """Leave the owner as it was found: the identical object, or no attribute where it was inherited."""
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.stored)

    def function(self) -> Function | None:
        """The function to wrap, or None where the attribute is of a kind that cannot be wrapped safely."""
        stored = self.stored
        if isinstance(stored, type):
            return None
        if isinstance(self.owner, ModuleType):
            return stored if callable(stored) else None
        if issubclass(type(stored), (staticmethod, classmethod, property)):
            return _inner(stored)
        if type(stored) is FunctionType:
            return stored
        # An object proxy (wrapt) reports the class of what it wraps, hence type() above. A proxy of a
        # method is bound at each call, as Python does; a proxy of another descriptor is refused.
        if isinstance(stored, (staticmethod, classmethod, property)) or not hasattr(type(stored), "__get__"):
            return None
        return _bound_at_call(stored) if callable(stored) else None

    def dressed(self, function: Function) -> object:
        """`function` as the same kind of descriptor as the attribute that it replaces."""
        stored = self.stored
        if isinstance(self.owner, ModuleType):
            return function
        if issubclass(type(stored), staticmethod):
            return staticmethod(function)
        if issubclass(type(stored), classmethod):
            return classmethod(function)
        if isinstance(stored, property) and issubclass(type(stored), property):
            return property(function, stored.fset, stored.fdel, stored.__doc__)
        return function


def locate(patch: Patch) -> Site | None:
    """The site of a target whose module is loaded, or None where it has no such attribute. Imports nothing."""
    owner: object = sys.modules.get(patch.module)
    for name in patch.path[:-1]:
        owner = inspect.getattr_static(owner, name, None)
    name = patch.path[-1]
    if isinstance(owner, ModuleType):
        return Site(owner=owner, name=name, stored=vars(owner)[name], inherited=False) if name in vars(owner) else None
    if not isinstance(owner, type):
        return None
    for holder in owner.__mro__:
        if name in vars(holder):
            return Site(owner=owner, name=name, stored=vars(holder)[name], inherited=holder is not owner)
    return None


def holders(package: str, value: object) -> Iterator[tuple[ModuleType, str]]:
    """Every loaded module of `package` that holds `value` itself, and under which name.

    `from m import f` copies the reference; a patch of `m.f` alone would miss such copies.
    """
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not (name == package or name.startswith(package + ".")):
            continue
        # object.__getattribute__: a module behind importlib.util.LazyLoader loads when it is looked at.
        for attribute, held in list(object.__getattribute__(module, "__dict__").items()):
            if held is value:
                yield module, attribute


def _inner(descriptor: object) -> Function | None:
    inner = descriptor.fget if isinstance(descriptor, property) else getattr(descriptor, "__func__", None)
    return inner if callable(inner) else None


def _bound_at_call(descriptor: Function) -> Function:
    def method(self: object, *args: object, **kwargs: object) -> object:
        bound: Function = descriptor.__get__(self, type(self))
        return bound(*args, **kwargs)

    return functools.wraps(descriptor)(method)
