"""Fixtures of the host tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_cases import Folders
from resume_jobs import Setup
from resumed import STEPS
from saves import Saves, Universals

from ds_reshard.containers.pickle_rules import UNSAFE
from ds_reshard.operations import scan_pickles

_SHARED = ("saves", "universals", "resume", "trainer", "stages", "releases", "grids")


def _assert_nothing_acts(folder: Path) -> None:
    assert [fault for fault in scan_pickles(str(folder)).faults if fault.error in UNSAFE] == []


@pytest.fixture(autouse=True)
def _what_a_test_saves_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """What real frameworks save in a test holds nothing that acts, and nothing that needs `trust`."""
    yield
    folder = (getattr(request.node, "funcargs", None) or {}).get("tmp_path")
    if folder is not None and request.node.get_closest_marker("acts") is None:
        _assert_nothing_acts(folder)


@pytest.fixture(scope="session", autouse=True)
def _what_tests_share_passes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    for folder in tmp_path_factory.getbasetemp().iterdir():
        if folder.name.rstrip("0123456789") in _SHARED:
            _assert_nothing_acts(folder)


@pytest.fixture(scope="session")
def saves(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(worlds, tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="session")
def universals(worlds: Any, saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Universals:
    return Universals(worlds, saves, tmp_path_factory.mktemp("universals"))


@pytest.fixture(scope="session")
def folders(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """What runs of `grid_cases.Grid` saved."""
    return Folders(worlds, tmp_path_factory.mktemp("grids"))


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


@pytest.fixture(scope="session")
def foreseen() -> Any:
    """The forecast's own modules: importing DeepSpeed takes a while."""
    torch.set_num_threads(1)
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from ds_reshard.hosts.deepspeed import preflight

    return preflight
