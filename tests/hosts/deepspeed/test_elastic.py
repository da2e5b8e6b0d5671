"""Two torchrun agents, one of which is killed and started again: the run goes on under the size that there is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ports import free_port

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import MODEL, STEP
from nanotron_builder import Run as Nanotron
from nanotron_builder import write as write_nanotron

from ds_reshard.operations import diff

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "09_elastic.py"
TIMEOUT_S = 240


class Nodes:
    """Agents of one rank each on this machine; the first keeps the list of nodes. `python` starts the ranks.

    These run `script`, which is given `folder` to save to.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.log, self.agents = folder, folder / "log", list[subprocess.Popen[bytes]]()
        self.script, self.step_s = EXAMPLE, 0.05
        self.hurry, self._python = folder / "hurry", python
        self._port = free_port()

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}"]
        command += ["--local-addr", "localhost", "--rdzv-conf"]
        command += [f"is_host={not self.agents},last_call_timeout=5,keep_alive_interval=1"]
        command += [str(ROOT / "tests" / "hosts" / "scripts" / "slowly.py"), str(self.step_s), str(self.hurry)]
        command += [str(self.script), str(self.folder)]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
        anew = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHON_EXEC": self._python}
        with self.log.open("ab") as log:
            environment = {**os.environ, **quiet, **anew}
            self.agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    def kill(self, number: int) -> None:
        """The agent and its ranks at once, as when a machine goes."""
        agent = psutil.Process(self.agents[number].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)
        self.agents[number].wait()

    def said(self) -> list[tuple[int, int, int]]:
        """Each start: the step that it went on from, the data-parallel size, the micro batches of an update."""
        found = re.findall(r"at step (\d+) with dp (\d+): (\d+) micro batches", self.log.read_text(errors="replace"))
        return [(int(step), int(dp), int(micro)) for step, dp, micro in found]

    def reported(self, names: tuple[str, ...]) -> list[tuple[tuple[str, str], ...]]:
        """Of the report of each load: the checkpoint's value and the one that was used, by name of row."""
        tables = self.log.read_text(errors="replace").split("\nResumed from ")[1:]
        found = [
            [re.search(rf"\n{name}  +(.+?)  +.+?  +(.+?)  +this run\n", table) for name in names] for table in tables
        ]
        return [tuple((row[1], row[2]) if row else ("", "") for row in rows) for rows in found]

    def wait(self, dp: int, step: int) -> int:
        """The newest step that was saved, once so many ranks go on and it is this one or a later one."""
        began = time.monotonic()
        while True:
            saved = max(
                (int(path.parent.name.rpartition("-")[2]) for path in self.folder.glob("step-*/latest")), default=0
            )
            latest = self.folder / "latest"
            if latest.exists():
                saved = int(latest.read_text().removeprefix("global_step") or 0)
            if self.said() and self.said()[-1][1] == dp and saved >= step:
                return saved
            assert self.agents[0].poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() - began < TIMEOUT_S, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)


@pytest.fixture
def nodes(tmp_path: Path, interpreter: str) -> Iterator[Nodes]:
    made = Nodes(tmp_path, interpreter)
    yield made
    for number, agent in enumerate(made.agents):
        if agent.poll() is None:
            made.kill(number)


SCRIPTS = {
    "deepspeed": (EXAMPLE, "global_step{}"),
    "accelerate": (ROOT / "docs" / "elastic.md", "step-{}/pytorch_model"),
}
"""What is run, or the page whose block it is, and where a step's weights are saved."""


@pytest.mark.parametrize("host", SCRIPTS)
def test_a_node_is_lost_and_comes_back(nodes: Nodes, host: str) -> None:
    """2 ranks, 1, and 2 again, with 8 samples an update throughout; weights and losses of one process that went on.

    The report of each start says what changed: the ranks, and with them the micro batches of an update.
    """
    page, tag = SCRIPTS[host]
    if page.suffix == ".md":
        (block,) = re.findall(r"^```python\n(import .*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        nodes.script = nodes.folder / "train.py"
        nodes.script.write_text(block, "utf-8")
        nodes.step_s = 0.4  # accelerate steps the engine once an update
    nodes.start()
    nodes.start()
    saved = nodes.wait(dp=2, step=5)
    nodes.kill(1)
    saved = nodes.wait(dp=1, step=saved + 5)
    nodes.start()
    nodes.wait(dp=2, step=saved)
    nodes.hurry.touch()
    assert nodes.agents[0].wait(TIMEOUT_S) == nodes.agents[2].wait(TIMEOUT_S) == 0
    starts = nodes.said()
    assert [start[1:] for start in starts] == [(2, 4), (1, 8), (2, 4)]
    assert 0 == starts[0][0] < starts[1][0] < starts[2][0]
    then, now = ("(2, 2)", "4", "8"), ("(2, 1)", "8", "8")
    rows = ("stage and dp", "accumulation", "global batch size")
    assert nodes.reported(rows) == [tuple(zip(then, now, strict=True)), tuple(zip(now, then, strict=True))]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(50):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            file = nodes.folder / tag.format(step + 1) / "mp_rank_00_model_states.pt"
            weights = torch.load(file, weights_only=False)["module"]
            apart = max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())
            assert apart < 1e-4, (step + 1, apart)
            there, here = (
                torch.nn.functional.mse_loss(
                    torch.func.functional_call(model, held, (batch,)), batch.sum(1, keepdim=True)
                )
                for held in (weights, model.state_dict())
            )
            assert abs(float(there.detach()) - float(here.detach())) < 1e-4


def test_nanotrons_trainer_goes_on_with_the_ranks_that_are_there(worlds: Any, tmp_path: Path) -> None:
    """By its stand-in: of 2 ranks into 1, and of 1 into 2 once the node is back, with 8 samples an update at each size.

    Accumulation follows in its configuration; where it does not, the error says which it has to be.
    """
    straight = worlds[1].run("nanotron_jobs.uninterrupted", run=Nanotron())[0]
    for before, now in ((2, 1), (1, 2)):
        folder = str(write_nanotron(Nanotron(dp=before), tmp_path / f"dp{before}"))
        for one in worlds[now].run("nanotron_jobs.resume", run=Nanotron(dp=now), folder=folder):
            assert one["differences"] == [] and one["moments"]
            assert one["rates"] == pytest.approx(straight[STEP:], rel=1e-12)
        (kind, said, changed), *_ = worlds[now].run(
            "nanotron_jobs.start_refused", run=Nanotron(dp=now), folder=folder, accumulation=8 // before
        )
        assert (kind, changed) == ("ScheduleMismatch", False)
        assert f"tokens: micro_batch_size 1, batch_accumulation_per_replica {8 // now}, or" in said


def test_a_run_of_nanotrons_stand_in_goes_on_from_its_own_saves(worlds: Any, tmp_path: Path) -> None:
    """Synthetic: 2 ranks, 1, and 2 again; weights and states to the bit, losses and rates, of one that went on."""
    told = [
        worlds[dp].run("nanotron_jobs.elastic", run=Nanotron(dp=dp, masters=False), folder=str(folder), until=until)
        for folder, dp, until in (
            (tmp_path / "parts", 2, 5),
            (tmp_path / "parts", 1, 10),
            (tmp_path / "parts", 2, 15),
            (tmp_path / "straight", 1, 15),
        )
    ]
    *parts, straight = (ranks[0] for ranks in told)
    assert all(one == ranks[0] for ranks in told for one in ranks)
    assert [one["began"] for one in parts] == [0, 5, 10]
    assert [rate for one in parts for rate in one["rates"]] == pytest.approx(straight["rates"], rel=1e-12)
    assert [loss for one in parts for loss in one["losses"]] == pytest.approx(straight["losses"], rel=1e-6)
    found = diff(str(tmp_path / "parts"), str(tmp_path / "straight"))
    assert found.equal and len(found.tensors) == 3 * len(MODEL), found
