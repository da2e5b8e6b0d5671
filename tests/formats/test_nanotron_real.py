"""A real checkout of nanotron saves, ds_reshard converts, and stock nanotron loads: `make test-nanotron SRC=path`.

Skipped without NANOTRON_SRC, the folder that holds the package `nanotron`: its requirements (flash_attn, a CUDA
machine) are not those of this project. The commit that it was last run with is in docs/nanotron.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, fingerprint, verify

SRC = os.environ.get("NANOTRON_SRC", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not SRC, reason="NANOTRON_SRC names no checkout of nanotron: make test-nanotron SRC=path"),
]

Topology = dict[str, int]


def of(dp: int = 1, tp: int = 1, pp: int = 1, zero: int = 1, masters: int = 1) -> Topology:
    return {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "masters": masters}


# (saved, loaded): every row of what stock nanotron does alone, and those that it refuses.
ROWS = [
    (of(dp=2), of(dp=2)),
    (of(dp=2), of()),
    (of(), of(dp=2)),
    (of(dp=2, zero=0), of(zero=0)),
    (of(zero=0), of(dp=2, zero=0)),
    (of(zero=0), of(tp=2, zero=0)),
    (of(tp=2, zero=0), of(zero=0)),
    (of(tp=2), of()),
    (of(tp=2), of(dp=2)),
    (of(zero=0), of(pp=2, zero=0)),
    (of(pp=2, zero=0), of(zero=0)),
    (of(pp=2), of()),
    (of(zero=0), of(dp=2)),
    (of(dp=2), of(zero=0)),
    (of(dp=2, tp=2), of(dp=4)),
    (of(pp=2, tp=2), of(dp=4)),
    (of(dp=2, masters=0), of(tp=2, zero=0, masters=0)),
    (of(pp=2, masters=0), of(masters=0)),
]


def label(topology: Topology) -> str:
    return "_".join(f"{key}{size}" for key, size in topology.items())


def run(jobs: list[dict[str, Any]], folder: Path) -> dict[str, list[list[str]]]:
    """Each job by all its ranks, those of one world size in one set of processes; what each rank found, by path."""
    found = {}
    sizes = [job["dp"] * job["tp"] * job["pp"] * job.get("cp", 1) for job in jobs]
    for world in sorted(set(sizes)):
        mine = [job for job, size in zip(jobs, sizes, strict=True) if size == world]
        path = folder / f"{mine[0]['do']}-{world}.json"
        path.write_text(json.dumps(mine))
        workers = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("nanotron_host.py")), SRC, str(path)],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            errors = [worker.communicate(timeout=600)[1] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0] * world, errors[0][-3000:]
        results = json.loads(Path(f"{path}.found").read_text())
        found |= {job["path"]: result for job, result in zip(mine, results, strict=True)}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every topology of ROWS as nanotron has saved it, both as sources and as examples of an arrangement."""
    folder = tmp_path_factory.mktemp("nanotron")
    topologies = {label(topology): topology for row in ROWS for topology in row}
    jobs = [{"do": "save", "path": str(folder / name / "3"), **topology} for name, topology in topologies.items()]
    wrong = {path: ranks for path, ranks in run(jobs, folder).items() if any(ranks)}
    assert wrong == {}, "nanotron itself does not do what one process does"
    return folder


def test_what_nanotron_saves_is_read_to_the_bit(saved: Path) -> None:
    """Every tensor of every topology, masters too, is that of one process; and every file is in order."""
    for place in sorted(path for path in saved.iterdir() if path.is_dir()):
        expected = {
            (name, kind): str(fingerprint_of(tensor.contiguous()))
            for name, kinds in torch.load(place / "reference.pt").items()
            for kind, tensor in kinds.items()
        }
        found = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(place / "3")).tensors}
        assert found == expected, place.name
        assert verify(str(place / "3"), deep=True).faults == (), place.name


def test_a_run_resumes_at_another_topology_with_the_hooks(saved: Path, tmp_path: Path) -> None:
    """Every row without a conversion: the state is the reference's to the bit, the rates an uninterrupted run's."""
    jobs = []
    for number, (before, after) in enumerate(ROWS):
        source = tmp_path / str(number) / "3"
        source.parent.mkdir()
        source.symlink_to(saved / label(before) / "3")
        jobs.append({"do": "resume", "path": str(source), "same": before == after, **after})
    names = {job["path"]: f"{label(before)}-to-{label(after)}" for job, (before, after) in zip(jobs, ROWS, strict=True)}
    wrong = {names[path]: ranks for path, ranks in run(jobs, tmp_path).items() if any(ranks)}
    assert wrong == {}


def _flipped(place: Path) -> None:
    path = sorted((place / "optimizer").glob("*.pt"))[-1]
    held = torch.load(path)["state"][0]["exp_avg"].contiguous().numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(held)] ^= 1
    path.write_bytes(data)


def _meta(place: Path, **changed: object) -> None:
    path = place / "checkpoint_metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


# (saved, the coming run, what becomes of the files, the error and a part of its text)
REFUSED: list[tuple[Topology, dict[str, Any], Callable[[Path], object], str, str]] = [
    (of(dp=2), {**of(dp=2), "accumulation": 2}, _meta, "ScheduleMismatch", "differs from the saving run's"),
    (of(dp=2), {**of(dp=4), "accumulation": 4}, _meta, "ScheduleMismatch", "micro batch 1 x accumulation 4 x dp 4"),
    (of(dp=2), of(dp=2), _flipped, "ChecksumMismatch", "are not what was written"),
    (
        of(pp=2),
        of(pp=2),
        lambda place: (place / "optimizer/optimizer_config.json").unlink(),
        "CheckpointDamaged",
        "optimizer_config.json: is missing",
    ),
    (of(), {**of(), "cp": 2}, lambda place: _meta(place, cp=2), "UnsupportedLayout", "wrote one file at the same time"),
    (of(tp=2), of(tp=2), lambda place: _meta(place, version="1.6"), "UnsupportedLayout", "is not known here"),
]


def test_what_does_not_fit_is_refused_before_anything_is_loaded(saved: Path, tmp_path: Path) -> None:
    """At the same sizes, too, where nanotron's own loading has nothing against it: by its trainer, on every rank."""
    jobs = []
    for number, (before, after, harm, _, _) in enumerate(REFUSED):
        place = Path(shutil.copytree(saved / label(before) / "3", tmp_path / str(number) / "3"))
        harm(place)
        jobs.append({"do": "refused", "path": str(place), **after})
    found = run(jobs, tmp_path)
    for job, (_, _, _, error, said) in zip(jobs, REFUSED, strict=True):
        ranks = found[job["path"]]
        assert [of_rank[:2] for of_rank in ranks] == [[error, "changed: False"]] * len(ranks), ranks
        assert all(said in of_rank[2] for of_rank in ranks), ranks


def test_stock_nanotron_loads_what_was_converted(saved: Path, tmp_path: Path) -> None:
    """`load_weights`, `load_optimizer` and `load_lr_scheduler`: every rank's state is the reference's, to the bit."""
    jobs = []
    for before, after in ROWS:
        out = tmp_path / f"{label(before)}-to-{label(after)}"
        like = {"like": str(saved / label(after) / "3")} if after["pp"] > before["pp"] else {}
        sizes = {"dp": after["dp"], "tp": after["tp"], "pp": after["pp"], "zero_stage": after["zero"]}
        convert(str(saved / label(before) / "3"), str(out), to="nanotron", **sizes, **like)
        jobs.append({"do": "load", "path": str(out / "3"), **after})
    wrong = {path: ranks for path, ranks in run(jobs, tmp_path).items() if any(ranks)}
    assert wrong == {}


# (saved by nanotron, converted to a format of DeepSpeed, and from there to this topology of nanotron)
THROUGH = [
    (of(dp=2, tp=2), "zero2", of(dp=4)),
    (of(pp=2, tp=2), "universal", of(dp=4)),
    (of(zero=0), "zero3", of(pp=2, zero=0)),
    (of(dp=2, masters=0), "zero1", of(tp=2, zero=0, masters=0)),
]


def test_stock_nanotron_loads_what_went_through_the_files_of_deepspeed(saved: Path, tmp_path: Path) -> None:
    """There, and back as the checkpoint of the coming run shows it: the reference's state, steps and base rates."""
    jobs = []
    for before, to, after in THROUGH:
        between, out = tmp_path / f"{label(before)}-{to}", tmp_path / f"{label(before)}-{to}-{label(after)}"
        convert(str(saved / label(before) / "3"), str(between), to=to, dp=None if to == "universal" else 3)
        convert(str(between), str(out), to="nanotron", like=str(saved / label(after) / "3"))
        jobs.append({"do": "load", "path": str(out / "3"), **after})
    assert {path: ranks for path, ranks in run(jobs, tmp_path).items() if any(ranks)} == {}
