"""What a run of transformers 4.57 saved goes on in one of transformers 5, by a map: two real releases, two processes.

`make test-versions` installs the older one and runs this; without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from homes import HOMES, NotRun, home
from table import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
RELEASE = "4.57.6"
NAME = f"transformers-{RELEASE}"
BESIDE = ("huggingface_hub==0.36.0", "tokenizers==0.22.1")
States = dict[tuple[str, str], torch.Tensor]


@pytest.fixture(scope="module")
def older() -> Path:
    if not (HOMES / NAME).is_dir() and not os.environ.get("DS_RESHARD_EVERY_RELEASE"):
        pytest.skip(f"transformers {RELEASE} is installed by make test-versions")
    try:
        return home("transformers", RELEASE, NAME, beside=BESIDE)
    except NotRun as error:
        pytest.skip(str(error))


def _run(action: str, family: str, folder: Path, ranks: int, *first: Path) -> None:
    paths = [*map(str, first), str(ROOT)]
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).with_name("expert_ranks.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, script, action, family, str(folder)],
        env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _stacked(states: States, family: str) -> States:
    """The tensors of transformers 4 as those of 5, which has one parameter for all experts."""
    old = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
    block, gate, up, down = old[family]
    found = {}
    for (name, kind), value in states.items():
        if ".experts." not in name:
            found[name.replace(block, "mlp"), kind] = value
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for kind in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
            of = [
                [states[f"{prefix}{block}.experts.{expert}.{part}.weight", kind] for expert in range(4)]
                for part in (gate, up, down)
            ]
            pairs = [torch.cat(pair) for pair in zip(of[0], of[1], strict=True)]
            found[f"{prefix}mlp.experts.gate_up_proj", kind] = torch.stack(pairs)
            found[f"{prefix}mlp.experts.down_proj", kind] = torch.stack(of[2])
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_zero_2_run_of_transformers_4_goes_on_in_5(older: Path, tmp_path: Path, family: str) -> None:
    """Two ranks saved it, one loads it: every bit, the same logits, and the same losses of further steps."""
    _run("save", family, tmp_path, 2, older)
    _run("load", family, tmp_path, 1)
    saved, found = torch.load(tmp_path / "truth.pt"), torch.load(tmp_path / "found.pt")
    assert saved["version"] == RELEASE and found["version"].startswith("5.")
    expected = _stacked(saved["states"], family)
    assert found["states"].keys() == expected.keys() and len(expected) > 60
    wrong = [key for key, value in expected.items() if not _same(found["states"][key], value)]
    assert not wrong, wrong[:8]
    assert torch.allclose(found["logits"], saved["logits"], rtol=0, atol=1e-5)
    assert found["losses"] == pytest.approx(saved["losses"], rel=1e-4)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)
