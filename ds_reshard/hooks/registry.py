"""The one piece of module state in the package: what is patched in this process.

A patch changes modules that the whole process shares, so the record of it is shared as well. Everything
else takes what it needs as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

from ds_reshard.errors import HookError
from ds_reshard.hooks.deferred import Deferred
from ds_reshard.hooks.installation import Installation


class Registry:
    """By host: its latest installation, what waits for an import, and why `auto` stood aside.

    `late` waits for the modules of optional patches, `deferred` for all the others. Hosts in `quiet` were
    asked for by `auto`: where a guard fails they are left alone with a warning, unless what is kept there insists.

    `lock` is held while attributes change hands and never while a module is imported: an import holds
    locks of its own, and calls us from inside them.
    """

    __slots__ = ("deferred", "installations", "late", "lock", "quiet", "refusals")

    def __init__(self) -> None:
        self.lock = RLock()
        self.installations: dict[str, Installation] = {}
        self.deferred: dict[str, Deferred] = {}
        self.late: dict[str, tuple[Deferred, ...]] = {}
        self.quiet: dict[str, Callable[[], bool]] = {}
        self.refusals: dict[str, HookError] = {}

    def active(self, host: str) -> Installation | None:
        """The installation of `host` that is in place, or None."""
        installation = self.installations.get(host)
        return installation if installation is not None and installation.active else None


REGISTRY = Registry()
