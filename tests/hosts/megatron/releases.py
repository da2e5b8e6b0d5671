"""The releases of megatron-core that the tests run, and Megatron-Bridge, unpacked beside `.venv` in `.venv-megatron`.

    .venv/bin/python tests/hosts/megatron/releases.py     fetches what is missing, and says what cannot be had

A wheel is unpacked, not installed: three releases stand side by side, and one that asks for a newer Python than
this one is fetched all the same. 0.16.1 holds `megatron.core` alone; 0.18.2 and 0.19.2 hold `megatron.training` too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOMES = ROOT / ".venv-megatron"
EVERY = bool(os.environ.get("DS_RESHARD_EVERY_RELEASE"))
# Its `pretrain` is set up in another way than that of later ones: what it saves is read, and loads are tried.
OLDEST = ("0.17.1",) if EVERY else ()
# Whose wheels have no training: the forms in which each saves. 0.14 and 0.15 write what is read, and run without hooks.
CORE = {"0.16.1": ("model_space", "buckets", "torch")}
CORE |= {"0.15.3": ("buckets",), "0.14.0": ("fragments", "torch")} if EVERY else {}
BRIDGE = "megatron-bridge 0.6.2"
RELEASES = ("0.16.1", *OLDEST, "0.18.2", "0.19.2")
WITH_TRAINING = ("0.18.2", "0.19.2")
# Whole trainings on the newest alone: `make test-versions` runs them on each.
TRAINED = WITH_TRAINING if EVERY else WITH_TRAINING[-1:]
# What `megatron.training` imports beside torch; versions are in constraints.txt, names in the extra [test].
NEEDED = ("einops", "omegaconf", "yaml")
DOWNLOAD_TIMEOUT_S = 240


class NotFetched(Exception):
    """Why a release cannot be run here."""


def home(release: str) -> Path:
    """Return the folder that goes on the path for a release of megatron-core, or for "PACKAGE RELEASE"; fetch it first.

    Raises NotFetched with the reason.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise NotFetched(f"{_named(release)} needs {', '.join(absent)}: pip install -e '.[test]'")
    folder = HOMES / release
    if not folder.is_dir():
        HOMES.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HOMES) as scratch:
            wheel = _download(release, Path(scratch))
            fresh = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(fresh)
            shutil.move(fresh, folder)
    return folder


def _named(release: str) -> str:
    return release if " " in release else f"megatron-core {release}"


def _download(release: str, folder: Path) -> Path:
    """The wheel for Python 3.12, the one that every release has; only its Python files are used."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--dest",
        str(folder),
        _named(release).replace(" ", "=="),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotFetched(f"{_named(release)} was not downloaded in {DOWNLOAD_TIMEOUT_S} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise NotFetched(f"{_named(release)} cannot be downloaded: {lines[-1] if lines else 'no reason given'}")
    return wheels[0]


def main() -> int:
    for release in dict.fromkeys((*CORE, *RELEASES, BRIDGE)):
        try:
            print(f"{_named(release)}: {home(release).relative_to(ROOT)}")
        except NotFetched as error:
            print(f"skipped: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
