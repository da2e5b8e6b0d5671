"""Test of the tests: workers are renewed by what they cost, and end with pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import MOST

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", MOST._fields)
def test_a_worker_that_costs_much_is_renewed(worlds: Any, what: str) -> None:
    """Threads are counted, not process groups, of which some have none and others several; files, and memory."""
    before = worlds[1].run("lifetimes.identity")
    worlds[1].run("lifetimes.take", what=what, number=getattr(MOST, what))
    worlds.renew()
    assert not set(before) & set(worlds[1].run("lifetimes.identity"))
    assert getattr(worlds.most, what) > getattr(MOST, what)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_no_process_is_left_of_a_run_that_a_signal_ends(number: int, tmp_path: Path) -> None:
    """Neither workers in the middle of a job, nor a script of a test, nor what that has started."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('shared', {str(ROOT / 'tests' / 'conftest.py')!r})\n"
        "shared = module_from_spec(spec)\nspec.loader.exec_module(shared)\n"
        "globals().update({name: value for name, value in vars(shared).items() if not name.startswith('__')})\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import subprocess, threading\n"
        "def test_it(worlds):\n"
        "    threading.Thread(target=worlds[2].run, args=['lifetimes.spin'], daemon=True).start()\n"
        f"    subprocess.run(['sh', '-c', 'setsid sleep 600 & touch {tmp_path}/running; wait'])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MARK_OF_THIS_RUN": str(tmp_path)},
    )
    while not (tmp_path / "running").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    assert len(_marked(tmp_path)) > 1
    run.send_signal(number)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == (143 if number == signal.SIGTERM else 2), said
    assert "setsid sleep" not in said and "sleep 600" in said, said
    assert _marked(tmp_path) == []


def _marked(folder: Path) -> list[int]:
    """The processes whose environment names a run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MARK_OF_THIS_RUN={folder}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found
