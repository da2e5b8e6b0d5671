"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("tests", deadline=None)  # on a busy machine an example takes as long as it takes
settings.load_profile("tests")

_HOSTS = Path(__file__).parent / "hosts"
sys.path.insert(0, str(_HOSTS))

import host_folders  # noqa: E402, F401
import lifetimes  # noqa: E402

_WORLDS = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fifth", metavar="SEED", help="run a fifth of the slow cases of each file, drawn by SEED")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the cases that run. Each case runs for one commit in five, if the seed is the commit."""
    seed = config.getoption("fifth")
    cases = defaultdict(list)
    for item in items if seed else ():
        marked = item.get_closest_marker("slow") or item.get_closest_marker("distributed")
        if marked or item.path.is_relative_to(_HOSTS):
            cases[item.path].append(item)
    left_out = set()
    for of_one_file in cases.values():
        drawn = sorted(of_one_file, key=lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode()))
        left_out.update(drawn[-(-len(drawn) // 5) :])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM end a run like SIGINT, and find the processes that it leaves behind."""
    lifetimes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started this run in the background
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: object) -> None:
    pytest.exit("terminated by SIGTERM", returncode=128 + number)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported is no garbage: it would be most of what each collection looks at, and forks then copy."""
    gc.freeze()
    gc.set_threshold(10_000)  # a fifteenth of all time went by in looking at what is in use
    lifetimes.to_huge_pages()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill what is left when all fixtures are gone, and name it."""
    left = [command for command in lifetimes.end_descendants() if "from multiprocessing." not in command]
    if left:
        print(f"processes that tests left behind, killed: {len(left)}\n" + "\n".join(left))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    made = config.stash.get(_WORLDS, None)
    if made is not None:
        most = made.most
        terminalreporter.write_line(
            f"{made.started} worlds were started; a worker had at most {most.threads} threads, {most.files} open files "
            f"and {most.memory_mib} MiB"
        )


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Worlds of worker processes by size, kept alive for the whole session."""
    from worlds import Worlds

    made = request.config.stash[_WORLDS] = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[str]:
    """A command like python's own that begins with the frameworks imported, of `hosts/interpreters.py`."""
    own = [sys.executable, "-I", "-S", str(_HOSTS / "interpreters.py")]
    with tempfile.TemporaryDirectory() as folder:
        command, address = Path(folder) / "python", str(Path(folder) / "socket")
        command.write_text(f'#!/bin/sh\nexec {shlex.join([*own, "call", address])} "$@"\n')
        command.chmod(0o700)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        served = [sys.executable, own[-1], "serve", address, str(command)]
        with subprocess.Popen(
            served, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield str(command)


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


@pytest.fixture
def golden_layouts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every tensor lies where it lay in a test's conversions, in what they read and in what they write."""
    import golden

    with golden.recorded() as layouts:
        yield
    if "two sizes" not in request.node.nodeid:  # DeepSpeed orders their groups by hashes, which each run draws anew
        golden.check(request.node.nodeid.removeprefix("tests/"), [layouts])
