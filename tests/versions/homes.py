"""A folder for each release of a framework, to come first on the path."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from table import ROOT

HOMES = ROOT / ".venv-versions"


class NotRun(Exception):
    """Why a release, or its cells, could not be run."""


def home(
    distribution: str, release: str, name: str, *, with_needed: bool = False, beside: tuple[str, ...] = ()
) -> Path:
    """Where the release is installed, under `name`; installs it once. Raises NotRun where pip cannot.

    Alone, with the requirements `beside`, or with what it needs.
    """
    place = HOMES / name
    if place.is_dir():
        return place
    HOMES.mkdir(exist_ok=True)
    fresh = HOMES / f"{name}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        *(() if with_needed else ("--no-deps",)),
        "--no-build-isolation",
        "--target",
        str(fresh),
        f"{distribution}=={release}",
        *beside,
    ]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(fresh, ignore_errors=True)
        raise NotRun(f"cannot be installed: {last_line(made.stderr)}")
    fresh.rename(place)
    return place


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given").replace(str(ROOT), ".")
