"""The patches of one host in place, and how they come off again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from threading import RLock
from types import ModuleType, TracebackType

from ds_reshard.errors import HookError, raise_faults
from ds_reshard.hooks.declare import Function, HostHooks, Patch
from ds_reshard.hooks.site import Site, holders, locate


class Switch:
    """Shared by all replacements of one installation, so that they begin and end together."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


class Replacement:
    """One patch: its site, what stands there instead, and the copies inside the host's package.

    What stands there calls the wrapper while the switch is on and the original once it is off: a library
    that has wrapped ours keeps a reference to it for ever, and must find it transparent after removal.
    """

    __slots__ = ("copies", "original", "patch", "site", "value")

    def __init__(self, *, patch: Patch, site: Site, original: Function, switch: Switch) -> None:
        wrapped = patch.wrapper(original)

        @functools.wraps(original)
        def replacement(*args: object, **kwargs: object) -> object:
            return wrapped(*args, **kwargs) if switch.on else original(*args, **kwargs)

        self.patch = patch
        self.site = site
        self.original = original
        self.value = site.dressed(replacement)
        self.copies: list[tuple[ModuleType, str]] = []

    def put(self) -> None:
        """Put the replacement in place, and over every copy of a module's function."""
        if isinstance(self.site.owner, ModuleType):
            self.copies = list(holders(self.patch.package, self.site.stored))
        setattr(self.site.owner, self.site.name, self.value)
        for module, name in self.copies:
            setattr(module, name, self.value)

    def restore(self) -> None:
        """Put back whatever is still ours; what another library has put there since stays.

        Copies are looked for again: modules that were imported since took theirs from the replacement.
        """
        if isinstance(self.site.owner, ModuleType):
            for module, name in [*self.copies, *holders(self.patch.package, self.value)]:
                if vars(module).get(name) is self.value:
                    setattr(module, name, self.site.stored)
        if self.site.holds(self.value):
            self.site.put_back()


class Installation:
    """The patches of one host; `remove`, or leaving the `with` block, takes all of them off.

    Removal restores the identical objects. Where another library has put its wrapper on top, that
    wrapper stays and ours beneath it calls the original; once that library has taken its own off,
    `remove` again (or the next install) takes off what was left beneath.
    """

    def __init__(self, *, hooks: HostHooks, lock: RLock, ended: Callable[[], None]) -> None:
        self.hooks = hooks
        self._ended = ended
        self._replacements: tuple[Replacement, ...] = ()
        self._switch = Switch()
        self._lock = lock

    @property
    def active(self) -> bool:
        return self._switch.on

    def on_top(self, patch: Patch) -> bool:
        """Whether the host's attribute is the replacement itself, with no other wrapper over it."""
        return any(r.patch == patch and r.site.holds(r.value) for r in self._replacements)

    def holds(self, patch: Patch) -> bool:
        """Whether this patch is in place: an optional one is not before its module has been imported."""
        return any(r.patch == patch for r in self._replacements)

    def put(self, patches: Iterable[Patch]) -> None:
        """Put patches that the guard has passed in place; HookError, and nothing stays, where an owner refuses one."""
        made = []
        for patch in patches:
            site = locate(patch)
            assert site is not None, f"{patch.target} was passed by the guard"
            original = site.function()
            assert original is not None, f"{patch.target} was passed by the guard"
            made.append(Replacement(patch=patch, site=site, original=original, switch=self._switch))
        self._replacements += tuple(made)
        for replacement in made:
            try:
                replacement.put()
            except (AttributeError, TypeError) as error:
                self.remove()
                what = f"cannot be replaced: {error}"
                fault = HookError.fault(replacement.patch.target, what)
                raise_faults([fault], subject=f"hooks of {self.hooks.host}")
        self._switch.on = True

    def remove(self) -> None:
        """Take every patch off; without effect where that was done."""
        with self._lock:
            if self._switch.on:
                self._ended()
            self._switch.on = False
            for replacement in self._replacements:
                replacement.restore()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Installation of {self.hooks.host}, {'active' if self.active else 'removed'}>"
