"""Fixtures of the host tests."""

from __future__ import annotations

from typing import Any

import pytest
from saves import Saves


@pytest.fixture(scope="session")
def saves(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(worlds, tmp_path_factory.mktemp("saves"))
