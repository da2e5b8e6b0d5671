"""Fixtures of the host tests."""

from __future__ import annotations

from typing import Any

import pytest
from resume_jobs import Setup
from resumed import STEPS
from saves import Saves, Universals


@pytest.fixture(scope="session")
def saves(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(worlds, tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="session")
def universals(worlds: Any, saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Universals:
    return Universals(worlds, saves, tmp_path_factory.mktemp("universals"))


@pytest.fixture(scope="session")
def kept(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder saved by a setup after five steps, and what its ranks held then; each made once."""
    made: dict[str, Any] = {}

    def save(setup: Setup) -> Any:
        key = repr(setup)
        if key not in made:
            folder = tmp_path_factory.mktemp("resume")
            made[key] = (
                folder,
                worlds[setup.run.dp].run("resume_jobs.save", setup=setup, folder=str(folder), steps=STEPS),
            )
        return made[key]

    return save
