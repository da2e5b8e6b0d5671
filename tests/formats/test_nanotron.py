"""Checkpoints of nanotron, read without nanotron: every topology, every command, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nanotron_builder import MODEL, RUNS, STEP, Run, again, metadata, values, write
from safetensors.torch import save_file

from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ReshardError, UnsupportedLayout
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.formats.nanotron.checkpoint import NanotronShards, open_checkpoint
from ds_reshard.formats.nanotron.names import Topology, read_listing
from ds_reshard.formats.nanotron.parameters import parse_pairs, parse_shape, split_of, tiles_of
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations import diff, fingerprint, inspect, verify
from ds_reshard.testing import FormatSuite, SavedCheckpoint


class OfNanotron(FormatSuite):
    """The kit for formats, over one topology."""

    run: Run

    def make(self, folder: str) -> SavedCheckpoint:
        place = str(write(self.run, Path(folder) / "saved") / str(STEP))

        def opened() -> Index:
            checkpoint = open_checkpoint(read_listing(place))
            return Index(checkpoint.layout, NanotronShards(checkpoint=checkpoint))

        truth = {TensorKey(name=name, kind=kind): tensor for (name, kind), tensor in values(self.run).items()}
        return SavedCheckpoint(open=opened, truth=truth)


class TestEveryAxisAtOnce(OfNanotron):
    run = RUNS["pp 2 tp 2 dp 3"]


class TestWholeStates(OfNanotron):
    run = RUNS["pp 2 tp 2, whole states, fp32"]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_tensor_is_read_to_the_bit(run: Run, tmp_path: Path) -> None:
    """The fingerprints are those of the tensors that one process would have."""
    found = fingerprint(str(write(run, tmp_path / "saved")))
    assert found.faults == ()
    held = {(one.name, one.kind): one.fingerprint for one in found.tensors}
    assert held == {key: str(fingerprint_of(tensor)) for key, tensor in values(run).items()}


@pytest.mark.parametrize("name", ["pp 2 tp 2 dp 3", "of 2024, one scheduler"])
def test_a_sound_checkpoint_is_clean(name: str, tmp_path: Path) -> None:
    found = verify(str(write(RUNS[name], tmp_path / "saved")), deep=True)
    assert (found.faults, found.tensors > 30) == ((), True)


def test_two_topologies_of_one_state_are_equal(tmp_path: Path) -> None:
    """Whatever the axes; and a state that differs in one number is told."""
    run = Run(dp=2, tp=2, pp=2)
    held = values(run)
    a = write(run, tmp_path / "a", held)
    b = write(again(run, dp=3, tp=1, pp=1), tmp_path / "b", held)
    assert diff(str(a), str(b)).equal
    path = next((b / str(STEP) / "lr_scheduler").glob("*.pt"))
    saved = torch.load(path)
    torch.save({**saved, "last_epoch": 8, "base_lrs": [1.0, *saved["base_lrs"][1:]]}, path)
    assert [one.where for one in diff(str(a), str(b)).values] == [
        "lr_scheduler.last_epoch",
        "base_lrs of emb.pp_block.weight",
    ]
    held["blocks.0.pp_block.mix.weight", "exp_avg"][1, 7] += 1
    c = write(again(run, zero=0), tmp_path / "c", held)
    (found,) = diff(str(a), str(c)).differing
    assert (found.name, found.kind, found.differing) == ("blocks.0.pp_block.mix.weight", "exp_avg", 1)
    assert found.first == (1, 7)


def test_each_optimizer_file_has_its_rank() -> None:
    for topology in (Topology(pp=2, tp=3, dp=4, exp=1), Topology(pp=3, tp=2, dp=None, exp=1)):
        ranks = list(topology.ranks)
        assert [topology.rank(shard) for shard in range(len(ranks))] == ranks
        assert [topology.shard(rank) for rank in ranks] == list(range(len(ranks)))


@pytest.mark.parametrize("tool", [inspect, verify])
def test_ranks_are_not_listed_for_each_file(tool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening all files is no work that grows with the square of their number."""
    asked = dict[int, int]()
    listed, times = Topology.ranks, list[Topology]()
    assert isinstance(listed, property)
    monkeypatch.setattr(Topology, "ranks", property(lambda self: times.append(self) or listed.__get__(self)))
    for dp in (2, 16):
        folder = str(write(Run(dp=dp, tp=2), tmp_path / str(dp)))
        times.clear()
        tool(folder)  # type: ignore[operator]
        asked[dp] = len(times)
    assert asked[16] == asked[2] > 0


def test_inspect_says_the_topology_and_what_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(RUNS["pp 2 tp 2 dp 3"], tmp_path / "saved")
    found = inspect(str(folder))
    assert (found.format, found.version, found.stage) == ("nanotron", "1.5", 1)
    assert (found.dp, found.tp, found.pp, found.tag) == (3, 2, 2, str(STEP))
    assert {state.kind for state in found.states} == {"exp_avg", "exp_avg_sq", "fp32", "step"}
    assert (found.steps.global_steps, found.steps.optimizer_steps) == (STEP, (str(STEP),))
    assert {entry.name: entry.shape for entry in found.parameters} == {param.name: param.shape for param in MODEL}
    assert main(["inspect", str(folder)]) == 0
    assert "dp 3, tp 2, pp 2" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify", "fingerprint"])
def test_commands_take_the_folder_its_step_and_a_tag(command: str, tmp_path: Path) -> None:
    folder = write(Run(tp=2), tmp_path / "saved")
    assert main([command, str(folder), "--json"]) == 0
    assert main([command, str(folder / str(STEP)), "--json"]) == 0
    assert main([command, str(folder), "--tag", str(STEP), "--json"]) == 0
    assert main([command, str(folder), "--tag", "8", "--json"]) == 2


@pytest.mark.parametrize("text", ["8", "", "../saved"])
def test_a_latest_that_names_no_checkpoint_is_told(text: str, tmp_path: Path) -> None:
    """With the steps that are there."""
    folder = write(Run(), tmp_path / "saved")
    (folder / "latest.txt").write_text(text)
    with pytest.raises(CheckpointNotFound, match=f"'latest.txt' that names no.*--tag {STEP}"):
        inspect(str(folder))


def test_tools_of_other_frameworks_refuse_it_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(Run(), tmp_path / "saved")
    config = tmp_path / "ds.json"
    config.write_text("{}")
    assert main(["lr", str(folder), "--config", str(config)]) == 2
    assert "nanotron" in capsys.readouterr().err


def _json(place: Path, name: str, change: Callable[[dict], None]) -> None:
    content = json.loads((place / name).read_text())
    change(content)
    (place / name).write_text(json.dumps(content))


def _state(place: Path, name: str, change: Callable[[dict], None]) -> None:
    saved = torch.load(place / f"optimizer/optimizer_{name}.pt")
    change(saved)
    torch.save(saved, place / f"optimizer/optimizer_{name}.pt")


def _scheduler(place: Path, pp: int, tp: int, change: Callable[[dict], object]) -> None:
    path = place / f"lr_scheduler/lr_scheduler_pp-{pp}-of-2_tp-{tp}-of-2_exp-0-of-1.pt"
    saved = torch.load(path)
    change(saved)
    torch.save(saved, path)


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _experts(place: Path) -> None:
    for path in (place / "optimizer").glob("*.pt"):
        path.rename(path.with_name(path.name.replace("exp-0-of-1", "exp-0-of-2")))


META, CONFIG = "checkpoint_metadata.json", "optimizer/optimizer_config.json"
FILE = "pp-{}-of-2_dp-{}-of-2_tp-{}-of-2_exp-0-of-1"
QKV = "model/blocks/0/pp_block/qkv/model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors"
BAD: dict[str, tuple[Callable[[Path], object], type[ReshardError], str]] = {
    "no file of a pipeline rank": (
        lambda p: [path.unlink() for path in p.glob("optimizer/*_pp-1-*")],
        CheckpointDamaged,
        r"optimizer_pp-1-of-2_dp-0-of-2_tp-0-of-2_exp-0-of-1.pt: is missing",
    ),
    "no file of a data-parallel rank": (
        lambda p: (p / f"optimizer/optimizer_{FILE.format(0, 1, 0)}.pt").unlink(),
        CheckpointDamaged,
        r"optimizer_pp-0-of-2_dp-1-of-2_tp-0.*is missing",
    ),
    "no file of a tensor rank": (
        lambda p: (p / f"optimizer/optimizer_{FILE.format(0, 0, 1)}.pt").unlink(),
        CheckpointDamaged,
        r"_dp-0-of-2_tp-1-of-2_exp-0-of-1.pt: is missing",
    ),
    "no weight of a tensor rank": (
        lambda p: (p / QKV).unlink(),
        CheckpointDamaged,
        r"qkv.weight has not the files of all tensor-parallel ranks",
    ),
    "no weight at all": (
        lambda p: (p / "model/blocks/0/pp_block/ln/model_weight.safetensors").unlink(),
        CheckpointDamaged,
        r"has the states of blocks.0.pp_block.ln.weight, which has no weight",
    ),
    "no optimizer_config.json": (
        lambda p: (p / CONFIG).unlink(),
        CheckpointDamaged,
        r"optimizer_config.json: is missing",
    ),
    "offsets of another stage": (
        lambda p: _json(p, CONFIG, lambda c: c["configs"]["param_name_to_dp_rank_offsets"].pop("emb.pp_block.weight")),
        CheckpointDamaged,
        r"lists other parameters than the files of pipeline rank 0",
    ),
    "other offsets": (
        lambda p: _json(
            p,
            CONFIG,
            lambda c: c["configs"]["param_name_to_dp_rank_offsets"].update(
                {"emb.pp_block.weight": {"0": ["0", "20"], "1": ["20", "48"]}}
            ),
        ),
        CheckpointDamaged,
        r"has other offsets for emb.pp_block.weight",
    ),
    "another optimizer": (
        lambda p: _json(p, CONFIG, lambda c: c.update(type="NamedOptimizer")),
        CheckpointDamaged,
        r"names another optimizer than the one that wrote the optimizer files",
    ),
    "another size": (lambda p: _json(p, META, lambda c: c.update(dp=4)), CheckpointDamaged, r"says another dp size"),
    "context parallelism": (
        lambda p: _json(p, META, lambda c: c.update(cp=2)),
        UnsupportedLayout,
        r"context parallelism.*wrote one file at the same time",
    ),
    "expert parallelism": (_experts, UnsupportedLayout, r"was saved with expert parallelism"),
    "a version of tomorrow": (
        lambda p: _json(p, META, lambda c: c.update(version="1.6")),
        UnsupportedLayout,
        r"version.*'1.6'",
    ),
    "schedulers of two namings": (
        lambda p: torch.save({}, p / "lr_scheduler/lr_scheduler.pt"),
        CheckpointDamaged,
        r"holds the schedulers of several saves.*lr_scheduler.pt",
    ),
    "no scheduler of a rank": (
        lambda p: (p / "lr_scheduler/lr_scheduler_pp-0-of-2_tp-1-of-2_exp-0-of-1.pt").unlink(),
        CheckpointDamaged,
        r"lr_scheduler_pp-0-of-2_tp-1-of-2_exp-0-of-1.pt: is missing",
    ),
    "schedulers, and no optimizer": (
        lambda p: shutil.rmtree(p / "optimizer"),
        CheckpointDamaged,
        r"optimizer: is not there, and schedulers are",
    ),
    "a scheduler of other groups": (
        lambda p: _scheduler(p, 1, 1, lambda s: s["base_lrs"].pop()),
        CheckpointDamaged,
        r"is of another number of param groups than the optimizer",
    ),
    "a scheduler of another step": (
        lambda p: _scheduler(p, 1, 1, lambda s: s.update(last_epoch=8)),
        CheckpointDamaged,
        r"the scheduler differs",
    ),
    "a stage's scheduler of another step": (
        lambda p: [_scheduler(p, 1, tp, lambda s: s.update(last_epoch=8)) for tp in (0, 1)],
        CheckpointDamaged,
        r"the scheduler's position differs",
    ),
    "a scheduler of an older step": (
        lambda p: [
            _scheduler(p, pp, tp, lambda s: s.update(last_epoch=6, _last_lr=[2.7e-4] * len(s["_last_lr"])))
            for pp in (0, 1)
            for tp in (0, 1)
        ],
        CheckpointDamaged,
        r"was saved at another step than the optimizer",
    ),
    "masters of one stage alone": (
        lambda p: [
            _state(p, FILE.format(1, dp, tp), lambda s: s.pop("gradient_accumulator")) for dp in (0, 1) for tp in (0, 1)
        ],
        CheckpointDamaged,
        r"is of another run than .*fp32 masters",
    ),
    "other states of a tied parameter": (
        lambda p: [
            _state(p, FILE.format(1, dp, tp), lambda s: s["state"][3].pop("exp_avg_sq"))
            for dp in (0, 1)
            for tp in (0, 1)
        ],
        CheckpointDamaged,
        r"has other states of emb.pp_block.weight",
    ),
    "weights of two tensor ranks under each other's names": (
        lambda p: _swap(p / QKV, p / QKV.replace("tp-rank-1", "tp-rank-0")),
        CheckpointDamaged,
        r"shards of blocks.0.pp_block.qkv.weight are under each other's names",
    ),
    "config.yaml of another run": (
        lambda p: (p / "config.yaml").write_text((p / "config.yaml").read_text().replace("dp: 2", "dp: 4")),
        CheckpointDamaged,
        r"config.yaml: says another dp size",
    ),
    "two topologies": (
        lambda p: shutil.copy(
            p / f"optimizer/optimizer_{FILE.format(0, 0, 0)}.pt",
            p / "optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1_exp-0-of-1.pt",
        ),
        CheckpointDamaged,
        r"holds the files of several topologies",
    ),
    "the doubled name of 2024": (
        lambda p: (p / QKV).rename(
            (p / QKV).with_name("model_model_weight.safetensors_pp-rank-0-of-2_tp-rank-1-of-2.safetensors")
        ),
        UnsupportedLayout,
        r"fix_checkpoint_bad_naming.py",
    ),
    "a shard under another's name": (
        lambda p: shutil.copy(
            p / f"optimizer/optimizer_{FILE.format(0, 0, 0)}.pt", p / f"optimizer/optimizer_{FILE.format(0, 1, 0)}.pt"
        ),
        CheckpointDamaged,
        r"was written under another name",
    ),
    "another step in one file": (
        lambda p: _state(p, FILE.format(1, 1, 1), lambda s: s["state"][0]["step"].add_(1)),
        CheckpointDamaged,
        r"step of blocks.1.pp_block.qkv.weight differs",
    ),
    "a stage of an older step": (
        lambda p: [
            _state(p, FILE.format(1, dp, tp), lambda s: [one["step"].sub_(1) for one in s["state"].values()])
            for dp in (0, 1)
            for tp in (0, 1)
        ],
        CheckpointDamaged,
        r"pp-1-of-2_dp-0.*is of another step than .*_pp-0.*expected 7.0, found 6",
    ),
    "another rate in one file": (
        lambda p: _state(p, FILE.format(1, 1, 1), lambda s: s["param_groups"][0].update(lr=1.0)),
        CheckpointDamaged,
        r"param group of blocks.1.pp_block.qkv.weight differs",
    ),
    "replicas that differ": (
        lambda p: _state(p, FILE.format(0, 0, 1), lambda s: s["state"][5]["exp_avg"].add_(1)),
        CheckpointDamaged,
        r"exp_avg of blocks.0.pp_block.ln.weight differs from that of another rank",
    ),
    "masters that differ": (
        lambda p: _state(
            p, FILE.format(0, 0, 1), lambda s: s["gradient_accumulator"]["blocks.0.pp_block.ln.weight"].add_(1)
        ),
        CheckpointDamaged,
        r"fp32 of blocks.0.pp_block.ln.weight differs",
    ),
    "tied states that differ": (
        lambda p: _state(p, FILE.format(1, 1, 0), lambda s: s["state"][3]["exp_avg"].add_(1)),
        CheckpointDamaged,
        r"exp_avg of emb.pp_block.weight differs",
    ),
    "a state of another shape": (
        lambda p: _state(p, FILE.format(0, 1, 0), lambda s: s["state"][0].update(exp_avg=torch.zeros(3))),
        CheckpointDamaged,
        r"exp_avg of emb.pp_block.weight has another shape",
    ),
    "names that shift": (
        lambda p: _state(p, FILE.format(0, 1, 0), lambda s: s["names"].update({0: "blocks.0.pp_block.tiny"})),
        CheckpointDamaged,
        r"masters and states are of other parameters",
    ),
    "slices of another shape": (
        lambda p: save_file(
            {"data": torch.zeros(8, 6, dtype=torch.bfloat16)},
            p / QKV,
            metadata={
                "version": "1.5",
                "unsharded_shape": "(16, 6)",
                "local_global_slices_pairs": "None,None,None|None,None,None#0,8,None|None,None,None",
            },
        ),
        CheckpointDamaged,
        r"shards of blocks.0.pp_block.qkv.weight do not make up the parameter",
    ),
    "a weight that is cut off": (
        lambda p: (p / QKV).write_bytes((p / QKV).read_bytes()[:-5]),
        CheckpointDamaged,
        r"its tensors end at byte",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=BAD)
def test_bad_input_is_refused_by_name(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every tool, before it reads a tensor: an error of its own class that names the file."""
    harm, error, said = BAD[case]
    folder = write(Run(dp=2, tp=2, pp=2), tmp_path / "saved")
    harm(folder / str(STEP))
    with pytest.raises(error, match=f"(?s){said}"):
        fingerprint(str(folder))
    assert any(fault.error == error.__name__ for fault in inspect(str(folder)).faults)
    found = verify(str(folder))
    assert not found.clean
    assert all(fault.mend for fault in found.faults)
    assert main(["verify", str(folder)]) == 1
    capsys.readouterr()


def test_the_spelling_of_numpy_2_is_read() -> None:
    assert parse_shape("(np.int64(16), 6)") == (16, 6) == parse_shape("(16, 6)")
    assert parse_pairs("np.int64(0),np.int64(4),None#0,4,None") == parse_pairs("0,4,None#0,4,None")


def test_slices_with_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="has a step"):
        parse_pairs("0,8,2#0,8,2")


@pytest.mark.parametrize("split", [0, 1])
def test_a_chunk_that_lies_in_rows_is_found_row_by_row(split: int) -> None:
    """Along the first dimension a chunk is one box; along the second it lies in as many as there are rows."""
    shape, local = ((8, 3), (4, 3)) if split == 0 else ((3, 8), (3, 4))
    text = {
        0: "0,2,None|None,None,None#0,2,None|None,None,None;2,4,None|None,None,None#4,6,None|None,None,None",
        1: "None,None,None|0,2,None#None,None,None|0,2,None;None,None,None|2,4,None#None,None,None|4,6,None",
    }[split]
    tiles = tiles_of(parse_pairs(text), local, shape)
    whole = torch.arange(24).reshape(shape)
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(t.box.offset, t.box.size, strict=True))] for t in tiles]
    expected = torch.cat(
        [whole.split(4, split)[0].split(2, split)[0], whole.split(4, split)[1].split(2, split)[0]], split
    )
    assert torch.cat([part.reshape(-1) for part in parts]).tolist() == expected.reshape(-1).tolist()
    assert len(tiles) == {0: 2, 1: 6}[split]


def test_the_rule_behind_slices_is_found() -> None:
    """Split dimension and chunks, from the shards of any tensor-parallel size, one too."""
    for tp in (1, 2, 4):
        run = Run(tp=tp, model=tuple(param for param in MODEL if param.name.endswith("qkv.weight")))
        pairs = [parse_pairs(metadata(run, run.model[0], rank)["local_global_slices_pairs"]) for rank in range(tp)]
        split = split_of(pairs, (16, 6))
        assert split is not None
        assert (split.axis, split.chunks, split.plain) == (0, (8, 4, 4), False)
