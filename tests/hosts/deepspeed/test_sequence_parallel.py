"""Ulysses sequence parallelism: ranks that share a sequence divide the optimizer, and no parameter.

DeepSpeed's own mpu of it answers `get_model_parallel_*` with their number, which it then saves as `tp_degree`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from cases import GLOBAL_BATCH, Model, Run
from gathered import assert_same
from grid_cases import Folders, Grid

from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, tied=True)


def run(stage: int, ranks: int, sp: int = 1) -> Run:
    return Run(stage, ranks, config={"ulysses": sp} if sp > 1 else {})


ROWS = [
    (run(1, 2, 2), run(1, 2, 2)),
    (run(2, 2, 2), run(3, 2)),
    (run(3, 4, 4), run(1, 4, 2)),
    (run(2, 2), run(1, 4, 4)),
    (run(1, 1), run(3, 2, 2)),
    (run(3, 4, 2), run(2, 2, 2)),
    (run(0, 2, 2), run(2, 1)),
    (run(1, 4, 2), run(3, 3)),
    (run(2, 2, 2), run(3, 4, 4)),
    (run(1, 4, 4), run(2, 1)),
]


def save(worlds: Any, of: Run, folder: Path) -> Any:
    return worlds[of.dp].run("grid_jobs.save_net", run=of, model=MODEL, folder=str(folder), more=2)


@pytest.mark.parametrize(("source", "target"), ROWS, ids=lambda of: f"{of}-sp{of.config.get('ulysses', 1)}")
def test_any_number_of_ranks_share_a_sequence(worlds: Any, tmp_path: Path, source: Run, target: Run) -> None:
    """Every tensor and number is what was saved, and so are the losses that follow; the report tells the same batch."""
    saved, report = save(worlds, source, tmp_path), tmp_path / "report.json"
    asked = {"resume": {"report": str(report)}}
    loaded = worlds[target.dp].run(
        "grid_jobs.load_net", run=target, model=MODEL, folder=str(tmp_path), more=2, reshard=asked
    )
    assert_same(saved, loaded)
    told = json.loads(report.read_text())
    rows = {row["name"]: row for row in told["rows"]}
    assert (rows["global batch size"]["checkpoint"], told["warnings"]) == (GLOBAL_BATCH, [])


def test_the_batch_of_ranks_that_share_a_sequence_is_one(worlds: Any, tmp_path: Path) -> None:
    """Where the JSON names the micro batch alone, no change of the global batch is told that is none."""
    of = run(2, 2, 2)
    of = Run(2, 2, config={**of.config, "train_batch_size": None})
    save(worlds, of, tmp_path / "saved")
    report = tmp_path / "report.json"
    asked = {"resume": {"report": str(report)}}
    worlds[1].run("load", run=run(2, 1), model=MODEL, folder=str(tmp_path / "saved"), reshard=asked)
    assert json.loads(report.read_text())["warnings"] == []


def test_offline_tools_take_its_folders_for_whole(worlds: Any, tmp_path: Path, capsys: Any) -> None:
    """They inspect, verify, convert, foresee, print and compare it as one of a run without sequence parallelism."""
    source, target = run(2, 2, 2), run(3, 4, 2)
    save(worlds, source, tmp_path / "shared")
    folder, made = str(tmp_path / "shared"), str(tmp_path / "made")
    (model,) = (tmp_path / "shared").glob("*/mp_rank_00_model_states.pt")
    said = torch.load(model, weights_only=False)
    assert (said["mp_world_size"], said["checkpoint_parallel_dimensions"]["tp_degree"]) == (1, 2), (
        "as DeepSpeed saves it"
    )

    assert inspect(folder).faults == () and verify(folder, deep=True).faults == ()
    convert(folder, made, to="zero1", dp=3)
    found = diff(folder, made)
    assert found.tensors and found.equal
    prints = [{(one.name, one.kind): one.fingerprint for one in fingerprint(of).tensors} for of in (folder, made)]
    assert prints[0] == prints[1] and prints[0]
    (tmp_path / "ds.json").write_text(json.dumps(_json(target)))
    asked = [folder, "--config", str(tmp_path / "ds.json"), "--world", "4"]
    assert main(["preflight", *asked, "--sp", "2"]) == 0, capsys.readouterr().out
    assert main(["preflight", *asked]) == 1  # the batch is not that of four ranks
    assert main(["preflight", *asked, "--sp", "3"]) == 1


def _json(of: Run) -> dict[str, Any]:
    micro = GLOBAL_BATCH * of.config["ulysses"] // of.dp
    return {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": of.stage},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }


@pytest.mark.parametrize(("ranks", "sp", "stage"), [(1, 1, 3), (4, 2, 1)], ids=str)
def test_ranks_of_accelerate_that_share_a_sequence(tmp_path: Path, ranks: int, sp: int, stage: int) -> None:
    """`ParallelismConfig(sp_backend="deepspeed")`: saved by two ranks that share one, loaded, and saved again."""
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    job = "accelerate_jobs.shared_sequence"
    assert fresh.run(job, 2, stage=2, sp=2, folder=saved, again="") == ["saved"] * 2
    assert fresh.run(job, ranks, stage=stage, sp=sp, folder=saved, again=again) == ["loaded"] * ranks
    found = diff(saved, again)
    assert found.equal and any(one.kind == "exp_avg" for one in found.tensors)
    assert verify(saved, deep=True).faults == ()


SHARED, PLAIN = Grid("cut", tp=2, dp=2, sp=2), Grid("cut", tp=2, dp=1)


@pytest.mark.parametrize(
    ("source", "target"),
    [(SHARED, PLAIN), (PLAIN, SHARED), (SHARED, Grid("cut", dp=3)), (Grid("cut", dp=2), SHARED), (SHARED, SHARED)],
    ids=str,
)
def test_beside_tensor_parallelism(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    """An mpu that tells both: its tensor-parallel ranks divide parameters, those that share a sequence do not."""
    folder = str(folders(source))
    for said in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=folder, saved_sp=source.sp):
        assert said["wrong"] == {} and said["compared"]


def test_files_of_other_ranks_are_damage_all_the_same(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """One model-parallel rank has no second file, whatever the sizes beside it say."""
    of = tmp_path / "t"
    of.mkdir()
    for file in (folders(PLAIN) / "t").iterdir():
        content = torch.load(file, weights_only=False)
        torch.save({**content, **({"mp_world_size": 1} if "module" in content else {})}, of / file.name)
    (tmp_path / "latest").write_text("t")
    with pytest.raises(CheckpointDamaged, match="holds files of another grid"):
        fingerprint(str(tmp_path))
