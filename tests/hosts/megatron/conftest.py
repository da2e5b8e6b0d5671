"""Fixtures of the Megatron-LM tests: each release once a session, and each first stage once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import Release
from releases import NotFetched, home
from saved_worlds import Saved, saved_by
from stages import Stages


class Releases:
    """Releases by version, started when a test asks for one; a test is skipped, saying why, where none can be."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._started: dict[str, Release] = {}
        self._absent: dict[str, str] = {}

    def __getitem__(self, release: str) -> Release:
        if release not in self._started and release not in self._absent:
            folder = self._scratch / release
            folder.mkdir()
            try:
                self._started[release] = Release(release, home(release), folder)
            except NotFetched as error:
                self._absent[release] = str(error)
        if release in self._absent:
            pytest.skip(self._absent[release])
        return self._started[release]

    def close(self) -> None:
        for release in self._started.values():
            release.close()


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    made = Releases(tmp_path_factory.mktemp("releases"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def stages(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(releases, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="session")
def saved(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_by(releases, tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
