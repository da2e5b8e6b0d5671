"""The distribution `fake-frame`: a small framework on disk, and tables of patches for it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ds_reshard.hooks import Function, HostHooks, Patch

ENGINE = '''
class Base:
    def inherited(self, load_dir, tag=None):
        return "original", load_dir


class Engine(Base):
    def load_checkpoint(self, load_dir, tag=None, strict=True):
        """Load it."""
        return "original", load_dir

    @staticmethod
    def static(load_dir, tag=None):
        return "original", load_dir

    @classmethod
    def of_class(cls, load_dir, tag=None):
        return "original", load_dir

    @property
    def state(self):
        return "original", "here"

    def anything(*args, **kwargs):
        return "original", args[1]

    class Inner:
        def method(self, load_dir):
            return "original", load_dir


def load(load_dir, tag=None):
    return "original", load_dir


SETTING = 3
'''


METHOD = "fakeframe.engine:Engine.load_checkpoint"
FUNCTION = "fakeframe.engine:load"
Framework = Callable[..., None]


def ours(original: Function) -> Function:
    def replacement(*args: object, **kwargs: object) -> object:
        return "ours", original(*args, **kwargs)

    return replacement


def theirs(original: Function) -> Function:
    @functools.wraps(original)
    def replacement(*args: object, **kwargs: object) -> object:
        return "theirs", original(*args, **kwargs)

    return replacement


def patch(
    target: str, *, signature: tuple[str, ...] = ("load_dir",), marker: str | None = None, optional: bool = False
) -> Patch:
    return Patch(
        target=target, wrapper=ours, signature=signature, summary="a test", vendored_marker=marker, optional=optional
    )


def table(*patches: Patch, versions: str = ">=1.0,<2", tested: tuple[str, ...] = ("1.4.0",)) -> HostHooks:
    return HostHooks(
        host="fakeframe",
        distribution="fake-frame",
        versions=versions,
        tested=tested,
        patches=patches or (patch(METHOD),),
    )


def engine() -> ModuleType:
    return importlib.import_module("fakeframe.engine")


def attributes() -> dict[tuple[str, str], object]:
    """Every attribute of every class and module of the framework; functions and descriptors compare by identity."""
    importlib.import_module("fakeframe.tools")
    module = engine()
    owners = [m for name, m in sys.modules.items() if name.partition(".")[0] == "fakeframe"]
    owners += [module.Base, module.Engine, module.Engine.Inner]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


CALLS: dict[str, Callable[[], object]] = {
    METHOD: lambda: engine().Engine().load_checkpoint("here"),
    "fakeframe.engine:Engine.inherited": lambda: engine().Engine().inherited("here"),
    "fakeframe.engine:Engine.static": lambda: engine().Engine.static("here"),
    "fakeframe.engine:Engine.Inner.method": lambda: engine().Engine.Inner().method("here"),
    FUNCTION: lambda: engine().load("here"),
}


def write_framework(folder: Path, *, version: str = "1.4.0", more: str = "") -> Path:
    """Write the distribution under `folder`: `fakeframe.engine`, and three modules that copy from it."""
    package = folder / "fakeframe"
    metadata = folder / "fake_frame.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-frame\nVersion: {version}\n")
    (package / "__init__.py").write_text("from fakeframe.engine import Engine, load\nREADY = True\n")
    (package / "engine.py").write_text(ENGINE + more)
    (package / "tools.py").write_text("from fakeframe.engine import load as load_it\n")
    (package / "late.py").write_text("from fakeframe.engine import load\n")
    return folder
