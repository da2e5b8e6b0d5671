"""How to patch a host: declare, guard, install, remove, list. Knows no host.

A host declares its patches in a `HostHooks` table. `install` guards and applies it, all or nothing, and
gives an `Installation` that takes it off exactly; `install_on_import` does so as soon as the host is
imported; `installed` lists. A host that does not look as its table says is a HookError with every fault.
"""

from __future__ import annotations

from ds_reshard.hooks.declare import Function, HostHooks, Patch, Wrapper
from ds_reshard.hooks.installation import Installation, install, install_on_import, refused, uninstall
from ds_reshard.hooks.seams import Call, Seam
from ds_reshard.hooks.status import HookStatus, in_place, installed

__all__ = [
    "Call",
    "Function",
    "HookStatus",
    "HostHooks",
    "Installation",
    "Patch",
    "Seam",
    "Wrapper",
    "in_place",
    "install",
    "install_on_import",
    "installed",
    "refused",
    "uninstall",
]
