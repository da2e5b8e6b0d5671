"""A host's patches: put in place now or when the host is imported, and taken off again.

What is patched in this process is the one piece of module state in the package (`REGISTRY`): a patch changes modules
that the whole process shares. Everything else takes what it needs as an argument.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType, TracebackType

from ds_reshard.errors import Fault, HookError, raise_faults
from ds_reshard.hooks import guard
from ds_reshard.hooks.declare import Function, HostHooks, Patch
from ds_reshard.hooks.guard import Site, holders, locate
from ds_reshard.hooks.seams import beyond_hooks


class Deferred(MetaPathFinder):
    """Calls `then` once, right after the last of `modules` has been executed, and leaves `sys.meta_path`.

    Inside the import of the last module, in the thread that imports it, and before its importer goes on:
    the parent package may still be half-initialised. A module whose execution fails is waited for again.
    """

    def __init__(self, modules: Iterable[str], then: Callable[[], None]) -> None:
        self._waiting = set(modules)
        self._then = then
        self._asking = threading.local()

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(sorted(self._waiting))

    def arm(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no more; without effect where it has fired."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give for a module that is waited for, its loader announcing the end."""
        # Other hooks of this kind ask every finder, this one too: the second question is answered with None.
        if fullname not in self._waiting or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            found = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asking.now = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        spec.loader = _Announcing(spec.loader, lambda: self._executed(fullname))
        return spec

    def _executed(self, name: str) -> None:
        if name not in self._waiting:
            return
        self._waiting.discard(name)
        if not self._waiting:
            self.remove()
            self._then()


class _Announcing(Loader):
    """The loader of a module, which also says when the module has been executed.

    It takes itself out of the module first, so that `__loader__` and `__spec__` are what they would have been.
    """

    def __init__(self, loader: Loader, executed: Callable[[], None]) -> None:
        self._loader = loader
        self._executed = executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._executed()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_source, is_package, get_resource_reader, ...


class Replacement:
    """One patch: its site, what stands there instead, and the copies inside the host's package.

    What stands there calls the wrapper while the installation is active, and the original once it is not: a
    library that has wrapped ours keeps a reference to it for ever, and must find it transparent after removal.
    """

    __slots__ = ("copies", "patch", "site", "value")

    def __init__(self, *, patch: Patch, site: Site, original: Function, installation: Installation) -> None:
        wrapped = patch.wrapper(original)

        @functools.wraps(original)
        def replacement(*args: object, **kwargs: object) -> object:
            try:
                return wrapped(*args, **kwargs) if installation.active else original(*args, **kwargs)
            except BaseException as error:
                hosts = beyond_hooks(error.__traceback__)
                if hosts is None:
                    raise
                raise error.with_traceback(hosts)  # noqa: B904 (the same error, of which this frame alone is ours)

        self.patch = patch
        self.site = site
        self.value = site.dressed(replacement)
        self.copies: list[tuple[ModuleType, str]] = []

    def put(self) -> None:
        """Put the replacement in place, and over every copy of a module's function."""
        setattr(self.site.owner, self.site.name, self.value)
        for module, name in self.copies:
            setattr(module, name, self.value)

    def restore(self, more: Iterable[tuple[ModuleType, str]]) -> None:
        """Put back whatever is still ours; what another library has put there since stays.

        `more` holds the replacement as well: modules that were imported since took their copies from it.
        """
        for module, name in [*self.copies, *more]:
            if vars(module).get(name) is self.value:
                setattr(module, name, self.site.stored)
        if self.site.holds(self.value):
            self.site.put_back()


def _holders(
    replacements: Sequence[Replacement], value_of: Callable[[Replacement], object]
) -> list[list[tuple[ModuleType, str]]]:
    """For each replacement the holders of its value, where its owner is a module; of one value those of the first."""
    values: dict[str, list[object]] = {}
    for one in replacements:
        if isinstance(one.site.owner, ModuleType):
            values.setdefault(one.patch.package, []).append(value_of(one))
    found = {package: holders(package, wanted) for package, wanted in values.items()}
    return [
        found[one.patch.package].pop(id(value_of(one)), []) if isinstance(one.site.owner, ModuleType) else []
        for one in replacements
    ]


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
        self._lock = lock
        self.active = False

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
            made.append(Replacement(patch=patch, site=site, original=original, installation=self))
        self._replacements += tuple(made)
        for replacement, copies in zip(made, _holders(made, lambda one: one.site.stored), strict=True):
            replacement.copies = copies
            try:
                replacement.put()
            except (AttributeError, TypeError) as error:
                self.remove()
                what = f"cannot be replaced: {error}"
                fault = HookError.fault(replacement.patch.target, what)
                raise_faults([fault], subject=f"hooks of {self.hooks.host}")
        self.active = True

    def remove(self) -> None:
        """Take every patch off; without effect where that was done."""
        with self._lock:
            if self.active:
                self._ended()
            self.active = False
            more = _holders(self._replacements, lambda one: one.value)
            for replacement, holding in zip(self._replacements, more, strict=True):
                replacement.restore(holding)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Installation of {self.hooks.host}, {'active' if self.active else 'removed'}>"


class _Registry:
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


REGISTRY = _Registry()


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
