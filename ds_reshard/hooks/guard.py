"""Whether a host looks as its table says: every deviation is found, not the first."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.version import InvalidVersion

from ds_reshard.errors import Fault, HookError
from ds_reshard.hooks.declare import Function, HostHooks, Patch
from ds_reshard.hooks.site import locate


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
    return [
        HookError.fault(
            hooks.distribution,
            "version outside the range that the patches were written for",
            hooks.versions,
            version or "not installed",
            mend=_tested_install(hooks),
        )
    ]


def patch_faults(hooks: HostHooks, patch: Patch) -> list[Fault]:
    """Faults of one target whose module is loaded: vendored, absent, of another kind, of another signature."""
    if vendored(patch):
        what = f"vendored: {patch.module} carries the source patch ({patch.vendored_marker} is set)"
        mend = "leave out the install, as the source patch does its work, or revert the source patch"
        return [HookError.fault(patch.target, what, mend=mend)]
    site = locate(patch)
    if site is None:
        what = "no such attribute"
        return [HookError.fault(patch.target, what, mend=_tested_install(hooks))]
    function = site.function()
    if function is None:
        return [
            HookError.fault(
                patch.target,
                "cannot be wrapped",
                "function, method, staticmethod, classmethod or property",
                type(site.stored).__name__,
                mend=_tested_install(hooks),
            )
        ]
    return _signature_faults(hooks, patch, function)


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


def _signature_faults(hooks: HostHooks, patch: Patch, function: Function) -> list[Fault]:
    mend = _tested_install(hooks)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        names = ["?"]
    else:
        names = [
            str(parameter.replace(annotation=parameter.empty, default=parameter.empty)) for parameter in parameters
        ]
    expected, found = _without_receiver(patch.signature), _without_receiver(names)
    if found[: len(expected)] == expected:
        return []
    if found and all(name.startswith("*") for name in found):
        place = getattr(function, "__module__", "another library")
        mend = f"install ds_reshard before {place} wraps {patch.target}, or have that wrapper use functools.wraps"
    return [
        HookError.fault(
            patch.target, "another signature", f"({', '.join(expected)}, ...)", f"({', '.join(found)})", mend=mend
        )
    ]


def _without_receiver(names: Sequence[str]) -> list[str]:
    return list(names[1:] if names and names[0] in ("self", "cls") else names)


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
