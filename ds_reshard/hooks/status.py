"""What is patched in this process, what could be, and why not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion

from ds_reshard.hooks import guard
from ds_reshard.hooks.declare import HostHooks, Patch
from ds_reshard.hooks.installation import REGISTRY

State = Literal["installed", "available", "vendored", "refused", "framework absent", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatus:
    """One patch: `version` is the framework's, or None where it is absent; `reason` says what `state` rests on."""

    host: str
    target: str
    summary: str
    state: State
    version: str | None
    tested: bool
    reason: str


def installed(tables: Iterable[HostHooks]) -> tuple[HookStatus, ...]:
    """The state of every patch of every table, in their order; imports no framework.

    The signature of a target whose module is not loaded is not known: such a patch is `available` when
    the version is in range, and the guard has the last word at install.
    """
    return tuple(status for hooks in tables for status in _of_host(hooks))


def in_place(hooks: HostHooks) -> bool:
    """Whether some patch is installed, or carried by the source of a module that is loaded; reads no source."""
    if REGISTRY.active(hooks.host) is not None:
        return True
    return any(patch.module in sys.modules and guard.vendored(patch) for patch in hooks.patches)


def _of_host(hooks: HostHooks) -> list[HookStatus]:
    version = guard.installed_version(hooks)
    loaded = any(module in sys.modules for module in hooks.modules)
    with REGISTRY.lock:
        states = [_of_patch(hooks, patch, absent=version is None and not loaded) for patch in hooks.patches]
    refused = any(state == "refused" for state, _ in states)
    try:
        tested = version is not None and hooks.has_tested(version)
    except InvalidVersion:
        tested = False
    statuses = []
    for patch, (state, reason) in zip(hooks.patches, states, strict=True):
        if refused and state == "available":
            state, reason = "refused", "another patch of this host is refused: all or none"
        statuses.append(
            HookStatus(
                host=hooks.host,
                target=patch.target,
                summary=patch.summary,
                state=state,
                version=version,
                tested=tested,
                reason=reason,
            )
        )
    return statuses


def _of_patch(hooks: HostHooks, patch: Patch, *, absent: bool) -> tuple[State, str]:
    if absent:
        return "framework absent", f"{hooks.distribution} is not installed"
    installation = REGISTRY.active(hooks.host)
    if installation is not None and not installation.holds(patch) and not guard.vendored(patch):
        return "available", f"will be installed when {patch.module} is imported"
    if installation is not None and installation.holds(patch):
        covered = "" if installation.on_top(patch) else "another library has wrapped or replaced the attribute"
        return "installed", covered
    if guard.vendored(patch):
        return "vendored", f"the source of {patch.module} carries the patch"
    faults = guard.version_faults(hooks)
    if patch.module in sys.modules:
        faults += guard.patch_faults(hooks, patch)
    if faults:
        return "refused", "; ".join(fault.line() for fault in faults)
    deferred = REGISTRY.deferred.get(hooks.host)
    if deferred is not None:
        return "available", f"will be installed when {', '.join(deferred.waiting)} is imported"
    if patch.module not in sys.modules:
        return "available", f"{patch.module} is not loaded: its signature is checked at install"
    return "available", ""
