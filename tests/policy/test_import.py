"""Importing ds_reshard is quiet: it loads no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = ("torch", "numpy", "deepspeed", "megatron", "accelerate", "transformers")


def _modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter after one statement."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["ds_reshard", "ds_reshard.auto", "ds_reshard.errors", "ds_reshard.cli.main"])
def test_importing_loads_no_framework(module: str) -> None:
    """Neither torch nor numpy nor a framework is loaded by the import, so that it costs milliseconds."""
    loaded = sorted(_modules_after(f"import {module}").intersection(FRAMEWORKS))
    assert loaded == [], f"'import {module}' loads {', '.join(loaded)}: move that import into the function using it"


def test_what_needs_no_torch_loads_none(tmp_path: Path) -> None:
    """A look at what a file would run, and at what is patched, takes half a second, and no torch on the machine."""
    (tmp_path / "file.pkl").write_bytes(b"\x80\x02}q\x00.")
    for words in (["verify", "--pickles", str(tmp_path)], ["hooks"], ["doctor"]):
        quietly = "with contextlib.redirect_stdout(io.StringIO()):"
        run = f"import contextlib, io\nfrom ds_reshard.cli.main import main\n{quietly} assert main({words}) == 0"
        assert "torch" not in _modules_after(run), words


def test_a_torch_that_is_too_old_for_the_reader_is_named() -> None:
    """Up to 2.4 `torch.distributed.tensor` has no DTensor."""
    old = "import torch.distributed.tensor as tensor; del tensor.DTensor; import ds_reshard.dcp"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode and "ImportError: ds_reshard.dcp needs torch 2.5 or later" in done.stderr


def test_the_check_sees_a_framework() -> None:
    """The list of modules that the test above reads does hold a framework that was imported."""
    assert "numpy" in _modules_after("import numpy")
