"""Fixtures of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HOSTS = str(Path(__file__).parent / "hosts")
sys.path.insert(0, _HOSTS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_HOSTS, os.environ.get("PYTHONPATH", ""))))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Any]:
    """Worlds of worker processes by size, kept alive for the whole session."""
    from worlds import Worlds

    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """What is written need not outlive the machine: no test cuts the power, and a process that ends loses nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _renewed(request: pytest.FixtureRequest) -> None:
    """No test begins with worlds that others have slowed down."""
    if "worlds" in request.fixturenames:
        request.getfixturevalue("worlds").renew()
