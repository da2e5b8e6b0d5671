"""Importing ds_reshard is quiet: it loads no framework."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_the_check_sees_a_framework() -> None:
    """The list of modules that the test above reads does hold a framework that was imported."""
    assert "numpy" in _modules_after("import numpy")
