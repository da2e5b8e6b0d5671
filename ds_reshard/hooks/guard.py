"""Where a target lives, and whether a host looks as its table says: every deviation is found, not the first."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType

from packaging.version import InvalidVersion

from ds_reshard.errors import Fault, HookError
from ds_reshard.hooks.declare import Function, HostHooks, Patch


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
        if issubclass(type(stored), staticmethod):
            inner = getattr(stored, "__func__", None)
            return inner if callable(inner) else None
        if type(stored) is FunctionType:
            return stored
        # An object proxy (wrapt) reports the class of what it wraps, hence type() above. A proxy of a
        # method is bound at each call, as Python does; a proxy of another descriptor is refused.
        if isinstance(stored, (staticmethod, classmethod, property)) or not hasattr(type(stored), "__get__"):
            return None
        return _bound_at_call(stored) if callable(stored) else None

    def dressed(self, function: Function) -> object:
        """`function` as the same kind of descriptor as the attribute that it replaces."""
        in_class = not isinstance(self.owner, ModuleType)
        return staticmethod(function) if in_class and issubclass(type(self.stored), staticmethod) else function


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


def holders(package: str, values: Iterable[object]) -> dict[int, list[tuple[ModuleType, str]]]:
    """By the id of each value: every loaded module of `package` that holds it itself, and under which name.

    `from m import f` copies the reference; a patch of `m.f` alone would miss such copies. All values are looked for
    at once: torch alone has some thousand modules.
    """
    found: dict[int, list[tuple[ModuleType, str]]] = {id(value): [] for value in values}
    for name, module in list(sys.modules.items()):
        if not (name == package or name.startswith(f"{package}.")) or not isinstance(module, ModuleType):
            continue
        # object.__getattribute__: a module behind importlib.util.LazyLoader loads when it is looked at.
        names = object.__getattribute__(module, "__dict__")
        if found.keys().isdisjoint(map(id, list(names.values()))):  # most modules hold none: the names cost as much
            continue
        for attribute, held in list(names.items()):
            if id(held) in found:
                found[id(held)].append((module, attribute))
    return found


def _bound_at_call(descriptor: Function) -> Function:
    def method(self: object, *args: object, **kwargs: object) -> object:
        bound: Function = descriptor.__get__(self, type(self))
        return bound(*args, **kwargs)

    return functools.wraps(descriptor)(method)


def load(hooks: HostHooks) -> list[Fault]:
    """Import every module that holds a target; a fault for each that cannot be.

    Called without any lock of ours: another thread may hold the import lock of the same module and be
    about to ask for ours.
    """
    found = []
    for module in hooks.modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a framework's import may fail in any way; the fault carries how
            what = f"cannot be imported: {type(error).__name__}: {error}"
            found.append(HookError.fault(module, what, mend=_tested_install(hooks)))
    return found


def check(hooks: HostHooks) -> list[Fault]:
    """Every fault of the version and of the targets whose modules are loaded; imports nothing."""
    found = version_faults(hooks)
    for patch in hooks.patches:
        if is_loaded(patch.module) if patch.optional else patch.module in sys.modules:
            found.extend(patch_faults(hooks, patch))
    return found


def is_loaded(module: str) -> bool:
    """Whether a module has been executed to its end; one that imports the host is itself half-way through."""
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)


def installed_version(hooks: HostHooks) -> str | None:
    """The version that the loaded framework says of itself, else that of its distribution, or None."""
    if hooks.version_attribute is not None:
        module, _, name = hooks.version_attribute.partition(":")
        said = getattr(sys.modules.get(module), name, None)
        if isinstance(said, str):
            return said
    try:
        return metadata.version(hooks.distribution)
    except metadata.PackageNotFoundError:
        return None


def version_faults(hooks: HostHooks) -> list[Fault]:
    version = installed_version(hooks)
    try:
        if version is not None and hooks.covers(version):
            return []
    except InvalidVersion:
        pass  # not a PEP 440 version, so in no range: the fault below shows it
    what, mend = "version outside the range that the patches were written for", _tested_install(hooks)
    return [HookError.fault(hooks.distribution, what, hooks.versions, version or "not installed", mend=mend)]


def patch_faults(hooks: HostHooks, patch: Patch) -> list[Fault]:
    """Faults of one target whose module is loaded: vendored, absent, of another kind, of another signature."""
    if vendored(patch):
        what = f"vendored: {patch.module} carries the source patch ({patch.vendored_marker} is set)"
        mend = "leave out the install, as the source patch does its work, or revert the source patch"
        return [HookError.fault(patch.target, what, mend=mend)]
    site, mend = locate(patch), _tested_install(hooks)
    if site is None:
        return [HookError.fault(patch.target, "no such attribute", mend=mend)]
    function = site.function()
    if function is None:
        kinds, found = "function, method or staticmethod", type(site.stored).__name__
        return [HookError.fault(patch.target, "cannot be wrapped", kinds, found, mend=mend)]
    return _signature_faults(patch, function, mend)


def vendored(patch: Patch) -> bool:
    """Whether a source patch does this patch's work: its marker is set in the target's module.

    A module that is not loaded is not imported for this: its source is searched for the assignment.
    """
    if patch.vendored_marker is None:
        return False
    module = sys.modules.get(patch.module)
    if module is not None:
        return bool(vars(module).get(patch.vendored_marker))
    source = _source(patch.module)
    if source is None:
        return False
    return re.search(rf"^{re.escape(patch.vendored_marker)}\s*(:[^=\n]*)?=(?!=)", source, re.MULTILINE) is not None


def beside_vendored(hooks: HostHooks) -> tuple[Patch, ...]:
    """The patches that no source patch can do the work of, where source patches do that of all the others."""
    marked = [patch for patch in hooks.patches if patch.vendored_marker is not None]
    if not marked or not all(map(vendored, marked)):
        return ()
    return tuple(patch for patch in hooks.patches if patch.vendored_marker is None)


def _signature_faults(patch: Patch, function: Function, mend: str) -> list[Fault]:
    try:
        parameters = inspect.signature(function).parameters.values()
        names = [str(one.replace(annotation=one.empty, default=one.empty)) for one in parameters]
    except (TypeError, ValueError):  # a builtin without a signature
        names = ["?"]
    expected, found = _without_receiver(patch.signature), _without_receiver(names)
    if found[: len(expected)] == expected:
        return []
    if found and all(name.startswith("*") for name in found):
        place = getattr(function, "__module__", "another library")
        mend = f"install ds_reshard before {place} wraps {patch.target}, or have that wrapper use functools.wraps"
    wanted, there = f"({', '.join(expected)}, ...)", f"({', '.join(found)})"
    return [HookError.fault(patch.target, "another signature", wanted, there, mend=mend)]


def _without_receiver(names: Sequence[str]) -> list[str]:
    return list(names[1:] if names and names[0] == "self" else names)


def _tested_install(hooks: HostHooks) -> str:
    versions = f"=={hooks.tested[-1]}" if hooks.tested else hooks.versions
    return f"pip install '{hooks.distribution}{versions}'"


def _source(module: str) -> str | None:
    """The source of a module, found without importing it or its parents (importlib's find_spec imports them)."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace")
