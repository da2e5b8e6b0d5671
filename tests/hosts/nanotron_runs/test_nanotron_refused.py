"""nanotron with the hooks, and what they refuse on every rank before anything changes: the synthetic stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import MODEL, STEP, Run, write

from ds_reshard.operations import convert

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

META, CONFIG = "checkpoint_metadata.json", "optimizer/optimizer_config.json"
SAME = {"dp": Run(dp=2), "tp": Run(tp=2), "pp": Run(pp=2)}
EVERY_AXIS = Run(dp=2, tp=2, pp=2)
Harm = Callable[[Path], object]


def _json(place: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((place / name).read_text())
    change(content)
    (place / name).write_text(json.dumps(content))


def _files(place: Path, axis: str, rank: int = 1) -> list[Path]:
    return sorted((place / "optimizer").glob(f"*{axis}-{rank}-of-2*.pt"))


def _missing(axis: str) -> Harm:
    return lambda place: _files(place, axis)[-1].unlink()


def _last(place: Path) -> Path:
    return sorted((place / "optimizer").glob("*.pt"))[-1]


def _flipped(place: Path) -> None:
    """One bit of a moment that is cut over all ranks, in the file of the last."""
    path = _last(place)
    held = torch.load(path)["state"][0]["exp_avg"].contiguous().numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(held)] ^= 1
    path.write_bytes(data)


def _cut_off(place: Path) -> None:
    _last(place).write_bytes(_last(place).read_bytes()[:-200])


def _older_stage(place: Path) -> None:
    """Of a constant learning rate, and without a parameter that both stages train, the steps alone tell."""
    for path in _files(place, "pp"):
        state = torch.load(path)
        for of_one in state["state"].values():
            of_one["step"] -= 1
        torch.save(state, path)


def _one_stage(place: Path) -> None:
    """As if it were of the other pipeline rank, or of another model."""
    offsets = "param_name_to_dp_rank_offsets"
    _json(place, CONFIG, lambda c: c["configs"].update({offsets: {"norm.pp_block.weight": {"0": ["0", "7"]}}}))


# The axis without which there is no such case, the harm, the error and a part of its text.
BAD: dict[str, tuple[str, Harm, str, str]] = {
    "no file of a data-parallel rank": ("dp", _missing("dp"), "CheckpointDamaged", "_dp-1-of-2_tp-"),
    "no file of a tensor-parallel rank": ("tp", _missing("tp"), "CheckpointDamaged", "_exp-0-of-1.pt: is missing"),
    "no file of a pipeline rank": ("pp", _missing("pp"), "CheckpointDamaged", "optimizer_pp-1-of-2_"),
    "a stage of an older step": ("pp", _older_stage, "CheckpointDamaged", "is of another step than"),
    "no optimizer_config.json": (
        "",
        lambda place: (place / CONFIG).unlink(),
        "CheckpointDamaged",
        "optimizer_config.json: is missing",
    ),
    "an optimizer_config.json of other parameters": (
        "",
        _one_stage,
        "CheckpointDamaged",
        "lists other parameters than the files of pipeline rank 0",
    ),
    "a version of tomorrow": (
        "",
        lambda place: _json(place, META, lambda c: c.update(version="1.6")),
        "UnsupportedLayout",
        "is of a checkpoint version that is not known here (expected 1.2 | 1.3 | 1.4 | 1.5, found '1.6')",
    ),
    "a bit of a moment": ("", _flipped, "ChecksumMismatch", "are not what was written"),
    "a file that is cut off": ("", _cut_off, "CheckpointDamaged", ".pt: "),
    "context parallelism": (
        "",
        lambda place: _json(place, META, lambda c: c.update(cp=2)),
        "UnsupportedLayout",
        "wrote one file at the same time (expected cp 1, found 2)",
    ),
}
UNTIED = tuple(param for param in MODEL if len(param.stages) == 1)


@pytest.mark.parametrize("where", ["same", "another"])
@pytest.mark.parametrize("axis", SAME)
def test_bad_input_is_refused_on_every_rank(axis: str, where: str, tmp_path: Path, worlds: Any) -> None:
    """A file that is missing on any axis, damaged, of another save or of a layout that is not read: nothing changes."""
    live = replace(SAME[axis], model=UNTIED)
    saved = live if where == "same" else replace(EVERY_AXIS, model=UNTIED)
    source = write(saved, tmp_path / "saved")
    cases = [case for case, (needed, *_) in BAD.items() if not needed or getattr(saved, needed) == 2]
    folders = [str(source)]
    for number, case in enumerate(cases):
        folder = copytree(source, tmp_path / str(number))
        BAD[case][1](folder / str(STEP))
        folders.append(str(folder))
    sound, *found = zip(*worlds[2].run("nanotron_jobs.load", run=live, folders=folders), strict=True)
    assert sound == ([], [])
    for case, (one, other) in zip(cases, found, strict=True):
        _, _, error, said = BAD[case]
        assert one == other, case
        assert (one[0], one[-1]) == (error, "changed: False"), (case, one)
        assert any(said in line for line in one), (case, one)


def _moments_again(place: Path) -> None:
    """Each file whole, with the checksums of what is in it now."""
    for path in place.glob("optimizer/optimizer_*.pt"):
        content = torch.load(path)
        content["state"][0]["exp_avg"].view(-1)[0] += 1
        torch.save(content, path)


OTHERS: dict[str, Harm] = {
    "counters": lambda place: _json(place, META, lambda c: c["metas"].update(last_train_step=STEP - 1)),
    "moments": _moments_again,
}


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("saved", (Run(dp=2, zero=False), EVERY_AXIS), ids=["same", "another"])
def test_ranks_that_see_other_files(saved: Run, other: str, who: int, tmp_path: Path, worlds: Any) -> None:
    """Each whole, as copies on nodes may become: no rank loads."""
    nodes, folder = [tmp_path / f"node{rank}" for rank in range(2)], write(saved, tmp_path / "saved")
    for node in nodes:
        copytree(folder, node / "ckpt")
    live = Run(dp=2, zero=False)
    both = worlds[2].run("nanotron_jobs.load", run=live, folders=["ckpt"], nodes=list(map(str, nodes)))
    assert both == [[[]], [[]]]
    OTHERS[other](nodes[who] / "ckpt" / str(STEP))
    one, two = worlds[2].run("nanotron_jobs.load", run=live, folders=["ckpt"], nodes=list(map(str, nodes)))
    assert one == two
    assert (one[0][0], one[0][-1]) == ("CheckpointDamaged", "changed: False")
    assert "ranks see different files of this name" in one[0][1]


WHOLE = tuple(replace(one, split=None, chunks=None) for one in MODEL)


@pytest.mark.parametrize("live", [Run(dp=2, model=WHOLE), Run(dp=2, pp=2, model=WHOLE)], ids=["dp2", "dp2 pp2"])
def test_ranks_that_see_other_weights(live: Run, tmp_path: Path, worlds: Any) -> None:
    """Of one tensor, in the copy of one node, with the optimizer left out: what is wrong is said on every rank."""
    ranks = live.dp * live.pp
    nodes, folder = [tmp_path / f"node{rank}" for rank in range(ranks)], write(live, tmp_path / "saved")
    for node in nodes:
        copytree(folder, node / "ckpt")
    job = {"run": live, "folder": f"ckpt/{STEP}", "nodes": list(map(str, nodes)), "policy": {"optimizer": "skip"}}
    for one in worlds[ranks].run("nanotron_jobs.other", **job):
        assert one.get("weights") == [], one
    path = sorted((nodes[-1] / "ckpt" / str(STEP) / "model").rglob("*.safetensors"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    told = worlds[ranks].run("nanotron_jobs.other", **job)
    assert {(one["error"], one["text"]) for one in told} == {(told[0]["error"], told[0]["text"])}
    assert told[0]["error"] == "CheckpointDamaged" and "the model has now" in told[0]["text"]
    assert "ranks see different files of this name" in told[0]["text"] and told[0]["text"].count("on ranks") == 1


def _another_step(place: Path) -> None:
    copytree(place, place / "1")
    (place / "latest.txt").write_text("1")


def _not_nanotrons(place: Path) -> None:
    other = place.parents[1] / "dcp"
    convert(str(place.parent), str(other), to="dcp")
    rmtree(place)
    other.rename(place)


FINDS: dict[str, tuple[Harm, str, str]] = {
    "nothing": (rmtree, "CheckpointNotFound", "is not seen by every rank"),
    "another step": (_another_step, "CheckpointDamaged", "ranks find other checkpoints there"),
    "another format": (_not_nanotrons, "CheckpointDamaged", "ranks find other checkpoints there"),
}


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("case", FINDS)
def test_ranks_that_find_other_checkpoints(case: str, who: int, tmp_path: Path, worlds: Any) -> None:
    """One would begin anew, or wait for the other for ever: no rank starts."""
    nodes, folder = [tmp_path / f"node{rank}" for rank in range(2)], write(Run(dp=2), tmp_path / "saved")
    for node in nodes:
        copytree(folder, node / "ckpt")
    harm, error, said = FINDS[case]
    harm(nodes[who] / "ckpt" / str(STEP))
    one, two = worlds[2].run("nanotron_jobs.start_refused", run=Run(dp=2), folder="ckpt", nodes=list(map(str, nodes)))
    assert one == two and said in one[1]
    assert (one[0], one[2]) == (error, False)


@pytest.mark.parametrize("live", [Run(pp=2), Run(dp=2)], ids=["same", "another"])
def test_a_configuration_of_the_first_stage_alone_is_nanotrons_own(live: Run, tmp_path: Path, worlds: Any) -> None:
    """World rank 0 writes it, so under pipeline parallelism it lists that rank's parameters: offsets are computed."""
    folder = write(Run(pp=2), tmp_path / "saved")
    noted = json.loads((folder / str(STEP) / CONFIG).read_text())["configs"]["param_name_to_dp_rank_offsets"]
    assert "norm.pp_block.weight" not in noted
    assert worlds[2].run("nanotron_jobs.load", run=live, folders=[str(folder)]) == [[[]], [[]]]


def test_context_parallelism_at_the_same_sizes_is_refused_with_the_reason(tmp_path: Path, worlds: Any) -> None:
    """Two ranks wrote one file; a run of context parallelism loads what was saved without it."""
    saved, sound = write(Run(cp=2), tmp_path / "saved"), write(Run(), tmp_path / "sound")
    found = worlds[2].run("nanotron_jobs.load", run=Run(cp=2), folders=[str(saved), str(sound)])
    assert found[0] == found[1]
    refused, loaded = found[0]
    assert (refused[0], refused[-1], loaded) == ("UnsupportedLayout", "changed: False", [])
    assert "the ranks of one group wrote one file at the same time" in refused[1]


@pytest.mark.parametrize("saved", [Run(exp=2), Run()], ids=["same", "another"])
def test_expert_parallelism_is_refused_by_name(saved: Run, tmp_path: Path, worlds: Any) -> None:
    folder = str(write(saved, tmp_path / "saved"))
    ((found,),) = worlds[1].run("nanotron_jobs.load", run=Run(exp=2), folders=[folder])
    assert (found[0], found[-1]) == ("UnsupportedLayout", "changed: False")
    assert any("this run: has expert parallelism" in line for line in found)
    assert any("was saved with expert parallelism" in line for line in found) == (saved.exp == 2)


@pytest.mark.parametrize("live", [Run(dp=2), Run(tp=2)], ids=["same", "another"])
@pytest.mark.parametrize(
    "policy",
    [{}, {"scheduler": "strict"}, {"optimizer": "masters"}, {"optimizer": "skip", "scheduler": "checkpoint"}],
    ids=str,
)
def test_another_global_batch_size_is_refused_before_anything_changes(
    policy: dict[str, Any], live: Run, tmp_path: Path, worlds: Any
) -> None:
    """Of config.yaml, against micro batch x accumulation x dp of the run, with what keeps it."""
    folder = str(write(Run(dp=2), tmp_path / "saved"))
    found = worlds[2].run("nanotron_jobs.start_refused", run=live, folder=folder, policy=policy, accumulation=2)
    assert found[0] == found[1]
    kind, told, changed = found[0]
    assert (kind, changed) == ("ScheduleMismatch", False)
    now = f"{2 * live.dp}: micro batch 1 x accumulation 2 x dp {live.dp}"
    assert f"expected 8 samples: micro batch 1 x accumulation 4 x dp 2, of config.yaml, found {now}" in told
    assert f"tokens: micro_batch_size 1, batch_accumulation_per_replica {8 // live.dp}, or" in told
    assert "--override-optim-hparams global_batch_size" in told


def test_the_batch_is_told_with_every_other_finding(tmp_path: Path, worlds: Any) -> None:
    """And on all ranks, where one alone has another."""
    folder = str(write(Run(dp=2, masters=False), tmp_path / "saved"))
    found = worlds[2].run("nanotron_jobs.start_refused", run=Run(dp=2), folder=folder, accumulation=[2, 4])
    assert found[0] == found[1] and found[0][0] == "ModelMismatch" and not found[0][2]
    assert "fp32 masters: are on one side only" in found[0][1]
    assert "global batch size: differs from the saving run's" in found[0][1]


def test_the_batch_is_compared_where_the_schedule_alone_is_loaded(tmp_path: Path, worlds: Any) -> None:
    folder = str(write(Run(dp=2), tmp_path / "saved"))
    off = {"load_optimizer": False}
    found = worlds[2].run("nanotron_jobs.start_refused", run=Run(dp=2), folder=folder, accumulation=2, checkpoints=off)
    assert found[0] == found[1] and found[0][0] == "ScheduleMismatch"
    assert "global batch size: differs from the saving run's" in found[0][1]


def test_a_checkpoint_that_tells_no_batch_is_told(tmp_path: Path, worlds: Any) -> None:
    folder = write(Run(), tmp_path / "saved")
    (folder / str(STEP) / "config.yaml").unlink()
    (found,) = worlds[1].run("nanotron_jobs.resume", run=Run(), folder=str(folder))
    assert any("tells no global batch size: this run's 8 is not compared" in warning for warning in found["warnings"])
    assert found["moments"]
