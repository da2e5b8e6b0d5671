"""The wheel under every Python that is found here, from 3.10 to 3.13: its command, and the tests that need no torch.

Each has a virtual environment with what the package stands on, but for torch: a release of torch for every Python is
not asked for. What a command prints of a checkpoint is compared with what it prints here.

    make test-versions
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from homes import HOMES, last_line
from table import ROOT

sys.path.insert(0, str(ROOT / "tests" / "formats"))
from zero_builder import Built, write

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
NEEDED = ("numpy", "packaging", "rich", "isal", "pytest", "pytest-timeout", "hypothesis", "psutil")
COMMANDS = (
    "--version",
    "inspect {} --json",
    "verify --pickles {}",
    "plan {} --to zero3 --dp 5 --json",
    "lr {} --config ds.json",
)
OF_TORCH = ("test_batch", "test_copies", "test_ranks")
"""Tests of what imports torch, which do not name it themselves."""
_OF_HERE = re.compile(r'^(?: *"(?:bytes_read|metadata_nbytes)":|# ).*\n', re.MULTILINE)
"""What the process has read by then, whatever it was; and remarks on the frameworks that are installed."""
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")


def _run(*command: object, place: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)


def _found(version: str) -> str | None:
    """A Python of this version that runs: on the path, or of pyenv."""
    others = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in filter(None, (shutil.which(f"python{version}"), *map(str, others))):
        said = _run(python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        if said.stdout.strip() == version:
            return python
    return None


def _home(version: str, python: str) -> Path:
    """The interpreter of the version's own environment, made once."""
    place = HOMES / f"python-{version}"
    if not (place / "made").is_file():
        shutil.rmtree(place, ignore_errors=True)
        for step in (
            (python, "-m", "venv", place),
            (place / "bin/python", *PIP, "-c", ROOT / "constraints.txt", *NEEDED),
        ):
            done = _run(*step)
            assert done.returncode == 0, last_line(done.stderr)
        (place / "made").touch()
    return place / "bin" / "python"


def _printed(python: object, place: Path) -> dict[str, str]:
    """What each command prints of the checkpoint that lies there; a warning is an error."""
    told = {}
    for command in COMMANDS:
        done = _run(python, "-W", "error", "-m", "ds_reshard", *command.format("saved").split(), place=place)
        told[command] = _OF_HERE.sub("", done.stdout) or last_line(done.stderr)
    return told


def _tested(python: object) -> str:
    files = [path for path in sorted((ROOT / "tests" / "unit").glob("test_*.py")) if path.stem not in OF_TORCH]
    plain = [path for path in files if "torch" not in path.read_text(encoding="utf-8")]
    done = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not distributed", *plain)
    passed = re.findall(r"\d+ passed", done.stdout)
    return f"tests fail: {last_line(done.stdout)}" if done.returncode or not passed else passed[-1]


def _outcome(version: str, wheel: Path, place: Path, expected: dict[str, str]) -> str:
    python = _found(version)
    if python is None:
        return "not run: none of this version is here"
    home = _home(version, python)
    done = _run(home, *PIP, "--no-deps", "--force-reinstall", wheel)
    if done.returncode:
        return f"cannot be installed: {last_line(done.stderr)}"
    said = _printed(home, place)
    others = [command for command in COMMANDS if said[command] != expected[command]]
    return f"prints something else: {others[0]}: {said[others[0]][:200]}" if others else _tested(home)


def main() -> int:
    HOMES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        built = _run("make", "-s", "-C", ROOT, "dist")
        assert built.returncode == 0, last_line(built.stderr)
        (wheel,) = (ROOT / "dist").glob("*.whl")
        groups = ((("first.weight", (5, 3)), ("first.bias", (5,))), (("second.weight", (7, 5)),))
        write(Built(groups=groups, frozen=(("table", (3, 2)),)), place / "saved")
        (place / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
        expected = _printed(sys.executable, place)
        outcomes = {version: _outcome(version, wheel, place, expected) for version in VERSIONS}
    for version, outcome in outcomes.items():
        print(f"Python {version}: {outcome}")
    ran = [outcome for outcome in outcomes.values() if not outcome.startswith("not run: ")]
    print(f"{len(ran)} of {len(outcomes)} Pythons were there")
    return int(not ran or not all(re.fullmatch(r"\d+ passed", outcome) for outcome in ran))


if __name__ == "__main__":
    sys.exit(main())
