"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_framework import Framework, write_framework

from ds_reshard import hooks
from ds_reshard.hooks.installation import REGISTRY


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    """Call it to put the fake framework on the path; afterwards nothing of it, or of its hooks, is left."""

    def provide(*, version: str = "1.4.0", more: str = "") -> None:
        monkeypatch.syspath_prepend(str(write_framework(tmp_path / "site", version=version, more=more)))

    yield provide
    hooks.uninstall("fakeframe")
    REGISTRY.installations.pop("fakeframe", None)
    REGISTRY.refusals.pop("fakeframe", None)
    REGISTRY.quiet.pop("fakeframe", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakeframe"]:
        del sys.modules[name]
