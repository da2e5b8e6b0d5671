"""Install a host's patches now or when it is imported, and uninstall them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from ds_reshard.errors import HookError, raise_faults
from ds_reshard.hooks import guard
from ds_reshard.hooks.declare import HostHooks
from ds_reshard.hooks.deferred import Deferred
from ds_reshard.hooks.installation import Installation, put_in_place
from ds_reshard.hooks.registry import REGISTRY

_LOG = logging.getLogger("ds_reshard")


def install(hooks: HostHooks) -> Installation:
    """Patch every target of a host, all or none; what is installed already is returned as it is.

    Imports the host's modules. Raises HookError with every fault of the guard, nothing being patched.
    """
    with REGISTRY.lock:
        _stop_waiting(hooks.host)  # or the import would install, or warn, before this call does
    found = guard.load(hooks)
    with REGISTRY.lock:
        present = REGISTRY.active(hooks.host)
        if present is not None:
            return present
        earlier = REGISTRY.installations.get(hooks.host)
        if earlier is not None:
            earlier.remove()  # what another library's wrapper had kept from coming off, if that has gone
        raise_faults([*found, *guard.check(hooks)], subject=f"hooks of {hooks.host}")
        installation = put_in_place(hooks, REGISTRY.lock)
        REGISTRY.installations[hooks.host] = installation
        REGISTRY.refusals.pop(hooks.host, None)
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
        absent = [module for module in hooks.modules if module not in sys.modules]
        if absent:
            deferred = Deferred(absent, lambda: _install_or_stand_aside(hooks, insist))
            REGISTRY.deferred[hooks.host] = deferred
            deferred.arm()
            return
    _install_or_stand_aside(hooks, insist)


def uninstall(host: str) -> None:
    """Take a host's patches off, or stop waiting for its import; without effect where neither is the case."""
    with REGISTRY.lock:
        _stop_waiting(host)
        installation = REGISTRY.installations.get(host)
        if installation is not None:
            installation.remove()


def _stop_waiting(host: str) -> None:
    deferred = REGISTRY.deferred.pop(host, None)
    if deferred is not None:
        deferred.remove()


def refused() -> dict[str, HookError]:
    """Why each host that was imported has been left as it is, by host."""
    return dict(REGISTRY.refusals)


def _install_or_stand_aside(hooks: HostHooks, insist: Callable[[], bool]) -> None:
    REGISTRY.deferred.pop(hooks.host, None)
    if all(guard.vendored(patch) for patch in hooks.patches):
        _LOG.info("%s: the hooks stand aside, its source carries them (vendored)", hooks.host)
        return
    try:
        install(hooks)
    except HookError as error:
        if hooks.host not in REGISTRY.refusals:
            _LOG.warning("%s is left as it is, its own checkpoint loading runs: %s", hooks.host, error)
        REGISTRY.refusals[hooks.host] = error
        if insist():
            raise
