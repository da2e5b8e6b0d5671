"""What `make dist` builds, installed into an environment in which the package was not: all of it is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path

import pytest
from house import ROOT

pytestmark = pytest.mark.slow

_SOURCES = ("ds_reshard", "patches", "docs", "examples", "README.md", "LICENSE", "MANIFEST.in", "setup.cfg", "setup.py")
_SOURCES += ("pyproject.toml", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")


def _run(*command: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The command of the Makefile, on a copy of the sources: the sdist, and the wheel."""
    copy = tmp_path_factory.mktemp("sources")
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndist: venv\n")[1].split("\n\n")[0]
    (code,) = re.findall(r'python -c "(.*)"', recipe)
    _run(sys.executable, "-c", code, cwd=copy)
    (sdist,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_it_installs_where_nothing_of_it_was(built: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Command, types, extras, licence and patches; what it stands on (torch, rich, ...) is taken from here."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    site = Path(paths["purelib"])
    (site / "beside.pth").write_text(sysconfig.get_paths()["purelib"])  # without a .pth of it: no editable install
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet")
    _run(*install, "--no-build-isolation", "--ignore-installed", built[kind], cwd=tmp_path)
    told = _run(home / "bin" / "ds-reshard", "--version", cwd=tmp_path)
    where = _run(python, "-c", "import ds_reshard; print(ds_reshard.__file__, ds_reshard.__version__)", cwd=tmp_path)
    assert where.split()[0] == str(site / "ds_reshard" / "__init__.py") and told.split()[-1] == where.split()[-1]
    assert (site / "ds_reshard" / "py.typed").is_file()
    (metadata,) = site.glob("ds_reshard-*.dist-info/METADATA")
    said = Parser().parsestr(metadata.read_text(encoding="utf-8"))
    assert {"deepspeed", "megatron", "accelerate"} <= set(said.get_all("Provides-Extra", []))
    assert list(metadata.parent.rglob("LICENSE"))
    installed = home / "share" / "ds_reshard" / "patches"
    patches = {path.relative_to(ROOT / "patches") for path in (ROOT / "patches").rglob("*.patch")}
    assert {path.relative_to(installed) for path in installed.rglob("*.patch")} == patches and patches
    modules = {path.relative_to(ROOT) for path in (ROOT / "ds_reshard").rglob("*.py")}
    assert {path.relative_to(site) for path in (site / "ds_reshard").rglob("*.py")} == modules
