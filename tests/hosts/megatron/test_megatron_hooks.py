"""Installing and removing the Megatron hooks: everything that was there is there again, in every order of imports."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forks import HERE, ROOT
from messages import MEGATRON
from releases import OLDEST, RELEASES, WITH_TRAINING, NotFetched, home

from ds_reshard.hosts import table

pytestmark = pytest.mark.slow
HOOKS = table("megatron")
CORE = [patch.target for patch in HOOKS.patches if not patch.optional]


@pytest.mark.parametrize("release", RELEASES)
def test_removal_restores_every_object(releases: Any, release: str) -> None:
    """Installed twice and removed twice: each name of each module and class holds the object that it held."""
    told = releases[release].run("hook_checks:install_twice_and_remove")[0]
    assert told["same installation"] and told["left"] == []
    expected = [patch.target for patch in HOOKS.patches] if release in (*OLDEST, *WITH_TRAINING) else CORE
    assert [target for target, state in told["states"].items() if state == "installed"] == expected
    assert told["tested"] == [release not in OLDEST]
    names = {name.rpartition(".")[2].rpartition("/")[2] for name in told["changed"]}
    assert names == {target.rpartition(".")[2].rpartition(":")[2] for target in expected}
    if release in (*OLDEST, *WITH_TRAINING):
        assert {"megatron.training.checkpointing.load_checkpoint", "megatron.training.training.load_checkpoint"} <= set(
            told["changed"]
        )


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_a_version_outside_the_range(releases: Any, release: str) -> None:
    """Install refuses; auto warns once and stands aside; a policy that nobody would carry out is an error."""
    told = releases[release].run("hook_checks:outside_the_range")[0]
    for which in ("install", "asked after", "asked before"):
        assert "megatron-core" in told[which] and "0.21.0" in told[which], which
    assert told["auto"] is None and len(told["warnings"]) == 1
    assert told["left"] == []


ORDERS = {
    "auto, core, training": "import ds_reshard.auto\nCORE\nTRAINING",
    "core, auto, training": "CORE\nimport ds_reshard.auto\nTRAINING",
    "core, training, auto": "CORE\nTRAINING\nimport ds_reshard.auto",
    "auto, training at once": "import ds_reshard.auto\nTRAINING",
    "install, training": "import ds_reshard; ds_reshard.install('megatron')\nTRAINING",
}
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from cuda_stand_in import stand_in
stand_in()
{order}
import ds_reshard
states = {{s.target: s.state for s in ds_reshard.installed() if s.host == "megatron"}}
from megatron.training import checkpointing, training
same = training.load_checkpoint is checkpointing.load_checkpoint and hasattr(training.load_checkpoint, "__wrapped__")
ds_reshard.uninstall("megatron")
clean = not any(hasattr(module.load_checkpoint, "__wrapped__") for module in (training, checkpointing))
print(json.dumps([states, same, clean]))
"""


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports(interpreter: str, order: str) -> None:
    """Core and training patched whatever is imported when; copies of `from m import f` follow, and come back."""
    release = "0.18.2" if order == "core, auto, training" else "0.19.2"
    try:
        folder = home(release)
    except NotFetched as error:
        pytest.skip(str(error))
    text = (
        ORDERS[order]
        .replace("CORE", "import megatron.core.optimizer")
        .replace("TRAINING", "import megatron.training.training")
    )
    path = os.pathsep.join([str(HERE), str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_VCS_VERSION": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [interpreter, "-c", SCRIPT.format(order=text)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states, same, clean = json.loads(done.stdout.splitlines()[-1])
    assert states == {patch.target: "installed" for patch in HOOKS.patches}
    assert same and clean


def test_a_loop_on_core_alone_needs_no_training(releases: Any) -> None:
    """0.16.1 has no megatron.training: its patches wait and trouble nobody."""
    told = releases["0.16.1"].run("hook_checks:install_twice_and_remove")[0]
    assert {told["states"][patch.target] for patch in HOOKS.patches if patch.optional} == {"available"}


def test_the_arguments_that_messages_name(releases: Any) -> None:
    """Each is one of Megatron-LM's, in one release at least."""
    known = {name for release in WITH_TRAINING for name in releases[release].run("hook_checks:arguments")[0]["options"]}
    assert sorted(set(MEGATRON) - known) == []


def test_the_event_of_a_load(saved: Any, releases: Any, tmp_path: Path) -> None:
    """One line of rank 0 for a load of ours and for one that is refused."""
    file, run = tmp_path / "events.jsonl", releases["0.19.2"].run
    folder = saved("tied tp2, bf16 without the distributed optimizer", "torch")
    for arguments in ("--bf16", "--bf16 --hidden-size 20"):
        run("foresee_jobs:outcome", arguments=arguments, folder=str(folder), events=str(file))
    loaded, refused = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert (loaded["host"], loaded["result"], loaded["loaded_by"]) == ("megatron", "loaded", "ds_reshard")
    assert loaded["bytes"] > 0 and loaded["report"]["host"] == "megatron"
    assert {"read", "load"} <= {phase["name"] for phase in loaded["phases"]}
    assert refused["result"] != "loaded" and refused["error"] and refused["report"] is None
