"""Installing right after a host's modules have been executed, without importing them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
            spec = _ask_others(self, fullname, path, target)
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


def _ask_others(
    asker: Deferred, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is asker or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None
