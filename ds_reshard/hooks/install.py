"""Install a host's patches now or when it is imported, and uninstall them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable

from ds_reshard.errors import Fault, HookError, raise_faults
from ds_reshard.hooks import guard
from ds_reshard.hooks.declare import HostHooks
from ds_reshard.hooks.deferred import Deferred
from ds_reshard.hooks.installation import Installation
from ds_reshard.hooks.registry import REGISTRY

_LOG = logging.getLogger("ds_reshard")


def install(hooks: HostHooks) -> Installation:
    """Patch every target of a host, all or none; what is installed already is returned as it is.

    Where its source carries every patch that can be there, the others are put in place.
    Imports the host's modules, those of optional patches excepted: these are patched as soon as they are
    imported. Raises HookError with every fault of the guard, nothing being patched.
    """
    with REGISTRY.lock:
        REGISTRY.quiet.pop(hooks.host, None)
        _stop_waiting(hooks.host)  # or the import would install, or warn, before this call does
    return _install(hooks)


def _install(hooks: HostHooks) -> Installation:
    found = guard.load(hooks)
    beside = guard.beside_vendored(hooks)
    if beside:
        hooks = dataclasses.replace(hooks, patches=beside)
    with REGISTRY.lock:
        present = REGISTRY.active(hooks.host)
        if present is not None:
            return present
        earlier = REGISTRY.installations.get(hooks.host)
        if earlier is not None:
            earlier.remove()  # what another library's wrapper had kept from coming off, if that has gone
        raise_faults([*found, *guard.check(hooks), *_half_imported(hooks)], subject=f"hooks of {hooks.host}")
        installation = Installation(
            hooks=hooks, lock=REGISTRY.lock, ended=functools.partial(_stop_optional, hooks.host)
        )
        installation.put(patch for patch in hooks.patches if not patch.optional or guard.is_loaded(patch.module))
        REGISTRY.installations[hooks.host] = installation
        REGISTRY.refusals.pop(hooks.host, None)
        _await_optional(hooks)
        return installation


def install_on_import(hooks: HostHooks, *, insist: Callable[[], bool] = lambda: False) -> None:
    """Patch a host as soon as its modules are imported, which may be now.

    A failed guard is one warning, and the host stays as it is, so that its own errors still protect the
    user; where `insist` says that more was asked for than that, it is raised. A host whose source carries the
    patches needs none, and is not warned about.
    """
    with REGISTRY.lock:
        if REGISTRY.active(hooks.host) is not None or hooks.host in REGISTRY.deferred:
            return
        REGISTRY.quiet[hooks.host] = insist
        absent = [module for module in hooks.modules if module not in sys.modules]
        if absent:
            deferred = Deferred(absent, lambda: _install_or_stand_aside(hooks))
            REGISTRY.deferred[hooks.host] = deferred
            deferred.arm()
            _await_optional(hooks)
            return
    _install_or_stand_aside(hooks)


def uninstall(host: str) -> None:
    """Take a host's patches off, or stop waiting for its import; without effect where neither is the case."""
    with REGISTRY.lock:
        _stop_waiting(host)
        _stop_optional(host)
        REGISTRY.refusals.pop(host, None)
        for name in (host, _instead(host)):
            installation = REGISTRY.installations.get(name)
            if installation is not None:
                installation.remove()


def _stop_waiting(host: str) -> None:
    deferred = REGISTRY.deferred.pop(host, None)
    if deferred is not None:
        deferred.remove()


def _stop_optional(host: str) -> None:
    for late in REGISTRY.late.pop(host, ()):
        late.remove()


def refused() -> dict[str, HookError]:
    """Why each host that was imported has been left as it is, by host."""
    return dict(REGISTRY.refusals)


def _install_or_stand_aside(hooks: HostHooks) -> None:
    REGISTRY.deferred.pop(hooks.host, None)
    if all(guard.vendored(patch) for patch in hooks.patches):
        _LOG.info("%s: the hooks stand aside, its source carries them (vendored)", hooks.host)
        return
    try:
        _install(hooks)
    except HookError as error:
        _stand_aside(hooks, error)


def _stand_aside(hooks: HostHooks, error: HookError) -> None:
    """Warn once that a host is not patched; raise where more was asked for than that."""
    if hooks.host not in REGISTRY.refusals:
        _LOG.warning("%s is left as it is, its own checkpoint loading runs: %s", hooks.host, error)
    REGISTRY.refusals[hooks.host] = error
    insist = REGISTRY.quiet.get(hooks.host)
    if insist is not None and insist():
        raise error
    _put_instead(hooks)


def _put_instead(hooks: HostHooks) -> None:
    """Put the patches in place that refuse what would be dropped; one that does not fit is left out."""
    name = _instead(hooks.host)
    fitting = [p for p in hooks.instead if guard.is_loaded(p.module) and not guard.patch_faults(hooks, p)]
    with REGISTRY.lock:
        if fitting and REGISTRY.active(name) is None:
            own = dataclasses.replace(hooks, host=name, patches=tuple(fitting), instead=())
            installation = Installation(hooks=own, lock=REGISTRY.lock, ended=lambda: None)
            installation.put(fitting)
            REGISTRY.installations[name] = installation


def _instead(host: str) -> str:
    return f"{host} (left as it is)"


def _waited_for(host: str) -> set[str]:
    return {module for late in REGISTRY.late.get(host, ()) for module in late.waiting}


def _half_imported(hooks: HostHooks) -> list[Fault]:
    """A fault for every optional module whose import has begun unseen: nobody will say when it ends."""
    unseen = [m for m in hooks.optional_modules if m in sys.modules and m not in _waited_for(hooks.host)]
    what = "is being imported at this moment, and cannot be patched before that has ended"
    mend = f"install before or after {hooks.distribution} is imported, not in between"
    return [HookError.fault(module, what, mend=mend) for module in unseen if not guard.is_loaded(module)]


def _await_optional(hooks: HostHooks) -> None:
    """Patch each module of an optional patch as soon as it has been imported, if it was not yet."""
    waited = [late for late in REGISTRY.late.get(hooks.host, ()) if late.waiting]
    covered = _waited_for(hooks.host)
    for module in hooks.optional_modules:
        if module not in sys.modules and module not in covered:
            late = Deferred([module], functools.partial(_optional_came, hooks, module))
            late.arm()
            waited.append(late)
    REGISTRY.late[hooks.host] = tuple(waited)


def _optional_came(hooks: HostHooks, module: str) -> None:
    """Put the optional patches of a module in place, or take all of the host's off where one does not fit.

    Where the host is not patched yet, its installation will find the module loaded.
    """
    with REGISTRY.lock:
        installation = REGISTRY.active(hooks.host)
        patches = [patch for patch in hooks.patches if patch.module == module]
        if installation is None or any(installation.holds(patch) for patch in patches):
            return
        try:
            faults = [fault for patch in patches for fault in guard.patch_faults(hooks, patch)]
            raise_faults(faults, subject=f"hooks of {hooks.host}")
            installation.put(patches)
        except HookError as error:
            installation.remove()
            if hooks.host not in REGISTRY.quiet:
                raise
            _stand_aside(hooks, error)
