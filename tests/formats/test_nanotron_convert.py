"""`convert --to nanotron`: the files of any topology are those that a run of it would have saved, to the bit."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanotron_builder import RUNS, STEP, Param, Run, again, values, write
from safetensors import safe_open

from ds_reshard.cli.main import main
from ds_reshard.errors import ConfigError, ModelMismatch, ReshardError, UnsupportedLayout
from ds_reshard.operations import Options, convert, diff, plan, verify

ONE_THREAD = Options(threads=1, memory_nbytes=1 << 20)


def contents(folder: Path) -> dict[str, Any]:
    """Every file as what its own library reads of it."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".pt":
            found[name] = torch.load(path, weights_only=True)
        elif path.suffix == ".json" and path.name != "ds_reshard.json":
            found[name] = json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found[name] = {"metadata": dict(file.metadata() or {}), "data": file.get_tensor("data")}
        elif path.suffix in (".yaml", ".txt"):
            found[name] = path.read_text()
    return found


def same(one: Any, other: Any, where: str = "") -> None:
    """Equal in every type, key, order of keys in `names`, and bit."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert sorted(map(str, one)) == sorted(map(str, other)), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}/{number}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), where
    else:
        assert one == other, where


def asked(run: Run) -> dict[str, Any]:
    return {"dp": run.dp, "tp": run.tp, "pp": run.pp, "zero_stage": run.zero}


def written(folder: Path, *runs: Run) -> dict[str, Any]:
    """The contents, without the batch in config.yaml where the builder's 8 samples are no multiple of some run's dp."""
    found, name = contents(folder), f"{STEP}/config.yaml"
    if any(8 % run.dp for run in runs):
        found[name] = "\n".join(line for line in found[name].splitlines() if "batch_accumulation" not in line)
    return found


# What stock nanotron refuses or loads wrongly is marked in docs/nanotron.md.
ROWS = {
    "zero 1, dp 2 to 2": (Run(dp=2), Run(dp=2)),
    "zero 1, dp 2 to 1": (Run(dp=2), Run()),
    "zero 1, dp 1 to 2": (Run(), Run(dp=2)),
    "zero 0, dp 2 to 1": (Run(dp=2, zero=0), Run(zero=0)),
    "zero 0, dp 1 to 2": (Run(zero=0), Run(dp=2, zero=0)),
    "zero 0, tp 1 to 2": (Run(zero=0), Run(tp=2, zero=0)),
    "zero 0, tp 2 to 1": (Run(tp=2, zero=0), Run(zero=0)),
    "zero 1, tp 2 to 1": (Run(tp=2), Run()),
    "zero 1, tp 2 to dp 2": (Run(tp=2), Run(dp=2)),
    "zero 0, pp 1 to 2": (Run(zero=0), Run(pp=2, zero=0)),
    "zero 0, pp 2 to 1": (Run(pp=2, zero=0), Run(zero=0)),
    "zero 1, pp 2 to 1": (Run(pp=2), Run()),
    "zero 0 tp 1 to zero 1 dp 2": (Run(zero=0), Run(dp=2)),
    "zero 1 dp 2 to zero 0": (Run(dp=2), Run(zero=0)),
    "tp 2 dp 2 to dp 4": (Run(dp=2, tp=2), Run(dp=4)),
    "pp 2 tp 2 to dp 4": (Run(pp=2, tp=2), Run(dp=4)),
    "pp 2 tp 2 dp 3 to tp 4 dp 2": (RUNS["pp 2 tp 2 dp 3"], Run(dp=2, tp=4)),
    "more ranks than elements": (Run(dp=2), Run(dp=9)),
}


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "fp32"])
@pytest.mark.parametrize("row", ROWS, ids=ROWS)
def test_the_files_are_those_of_a_run_of_that_topology(row: str, masters: bool, tmp_path: Path) -> None:
    """Tensors, names, numbers, param groups, rates, offsets and slices; every file, and no other."""
    saved, coming = (again(run, masters=masters) for run in ROWS[row])
    held = values(saved)
    source = write(saved, tmp_path / "saved", held)
    expected = write(coming, tmp_path / "expected", held)
    like = {}
    if coming.pp > saved.pp:
        like["like"] = str(write(again(coming, seed=1), tmp_path / "like"))
    done = convert(str(source), str(tmp_path / "out"), to="nanotron", options=ONE_THREAD, **asked(coming), **like)
    assert done.complete
    same(written(tmp_path / "out", saved, coming), written(expected, saved, coming))


@pytest.mark.parametrize(
    "stops",
    [(Run(zero=0), Run(dp=2)), (Run(tp=2, dp=2), Run(dp=4)), (Run(dp=3), Run(tp=2))],
    ids=["zero 1 to 0 to 1", "tp 2 dp 2", "dp 3"],
)
def test_there_and_back(stops: tuple[Run, Run], tmp_path: Path) -> None:
    """What comes back is what went out, file by file."""
    first, other = stops[1], stops[0]
    source = write(first, tmp_path / "saved")
    convert(str(source), str(tmp_path / "a"), to="nanotron", options=ONE_THREAD, **asked(other))
    convert(str(tmp_path / "a"), str(tmp_path / "b"), to="nanotron", options=ONE_THREAD, **asked(first))
    same(written(tmp_path / "b", other), written(source, other))
    assert diff(str(source), str(tmp_path / "a")).differing == ()


SIZES = st.tuples(st.sampled_from((1, 2, 3, 5)), st.sampled_from((1, 2, 4)), st.sampled_from((0, 1)))


@st.composite
def models(draw: st.DrawFn) -> tuple[Param, ...]:
    """Parameters of one to three dimensions; some cut along any of them, in one chunk or several."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))  # each row is a part for each chunk and rank
        split = draw(st.sampled_from((None, *range(len(shape)))))
        chunks = None
        if split is not None:
            sizes = draw(st.lists(st.sampled_from((4, 8)), min_size=1, max_size=3))
            chunks = tuple(sizes) if len(sizes) > 1 or draw(st.booleans()) else None
            shape[split] = sum(sizes)
        stages = draw(st.sampled_from(((0,), (1,), (0, 1))))
        made.append(Param(f"layer{number}.pp_block.weight", tuple(shape), stages, split, chunks))
    return (*sorted(made, key=lambda param: param.stages), Param("head.pp_block.bias", (3,), (1,)))


@pytest.mark.slow
@given(model=models(), pp=st.sampled_from((1, 2)), before=SIZES, after=SIZES, masters=st.booleans())
@settings(max_examples=40)
def test_any_model_under_any_topology(
    model: tuple[Param, ...], pp: int, before: tuple[int, int, int], after: tuple[int, int, int], masters: bool
) -> None:
    """The converted files are those of a run of that topology, whatever is cut where."""
    if all(0 not in param.stages for param in model):
        pp = 1
    saved = Run(dp=before[0], tp=before[1], zero=before[2], pp=pp, masters=masters, model=model)
    coming = again(saved, dp=after[0], tp=after[1], zero=after[2], pp=1)
    held = values(saved)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source, expected = write(saved, place / "saved", held), write(coming, place / "expected", held)
        largest = max(math.prod(p.shape) // (coming.tp if p.split is not None else 1) for p in model)
        if coming.zero and largest < coming.dp:
            with pytest.raises(UnsupportedLayout, match="would hold nothing"):
                convert(str(source), str(place / "out"), to="nanotron", options=ONE_THREAD, **asked(coming))
            return
        convert(str(source), str(place / "out"), to="nanotron", options=ONE_THREAD, **asked(coming))
        same(written(place / "out", saved, coming), written(expected, saved, coming))


def test_several_processes_write_what_one_writes(tmp_path: Path) -> None:
    source = write(RUNS["pp 2 tp 2 dp 3"], tmp_path / "saved")
    convert(str(source), str(tmp_path / "one"), to="nanotron", dp=2, options=ONE_THREAD)
    for number in (1, 0):
        options = Options(threads=1, memory_nbytes=1 << 20, shard=(number, 2))
        done = convert(str(source), str(tmp_path / "two"), to="nanotron", dp=2, options=options)
    assert done.complete
    files = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*.*")
            if path.is_file()
        }
        for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_the_output_verifies_and_its_manifest_lists_every_file(tmp_path: Path) -> None:
    """One changed byte in any file, also in those that have no checksum of their own, is found."""
    source = write(Run(dp=2, tp=2), tmp_path / "saved")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "nanotron", "--tp", "1", "--dp", "3"]) == 0
    assert verify(str(tmp_path / "out"), deep=True).faults == ()
    weight = next((tmp_path / "out").rglob("model_weight_pp-rank-0*.safetensors"))
    data = bytearray(weight.read_bytes())
    data[-1] ^= 1
    weight.write_bytes(bytes(data))
    assert [fault.what for fault in verify(str(tmp_path / "out")).faults] == ["is not as the manifest lists it"]


@pytest.mark.parametrize("naming", ["old_scheduler", "scheduler_dp"])
def test_schedulers_of_2024_become_those_of_today(naming: str, tmp_path: Path) -> None:
    """Rates are those of the param groups; position and counters those of the file that is there."""
    old = Run(dp=2, pp=2, version="1.2", **{naming: True})
    held = values(old)
    source = write(old, tmp_path / "saved", held)
    convert(str(source), str(tmp_path / "out"), to="nanotron", options=ONE_THREAD)
    expected = write(again(old, **{naming: False}), tmp_path / "expected", held)
    same(contents(tmp_path / "out"), contents(expected))


def test_a_plan_tells_what_is_written_and_by_whom(tmp_path: Path) -> None:
    source = write(Run(dp=2, tp=2), tmp_path / "saved")
    made = plan(str(source), to="nanotron", tp=1, dp=1)
    assert made.bytes_written == sum(unit.bytes_written for unit in made.units)
    written = {name for unit in made.units for name in unit.files}
    convert(str(source), str(tmp_path / "out"), to="nanotron", tp=1, dp=1, options=ONE_THREAD)
    place = tmp_path / "out" / str(STEP)
    assert written == {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


REFUSED: dict[str, tuple[Run, dict[str, Any], type[ReshardError], str]] = {
    "stages that no file tells": (Run(), {"pp": 2}, UnsupportedLayout, r"which stage of another pipeline.*--like DIR"),
    "chunks that cannot be cut": (Run(), {"tp": 3}, UnsupportedLayout, r"qkv.weight.*no multiple of 3"),
    "another format": (Run(), {"to": "fsdp"}, UnsupportedLayout, r"is not converted to this.*--to dcp"),
    "a stage that nanotron has not": (Run(), {"zero_stage": 2}, ConfigError, r"--zero-stage 2: takes 0 \| 1"),
    "a number of experts' ranks": (Run(), {"to": "zero1", "ep": 2}, ConfigError, r"--ep 2: no parameter is an expert"),
}


@pytest.mark.parametrize("case", REFUSED, ids=REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_there(case: str, tmp_path: Path) -> None:
    run, arguments, error, said = REFUSED[case]
    source = write(run, tmp_path / "saved")
    with pytest.raises(error, match=f"(?s){said}"):
        convert(str(source), str(tmp_path / "out"), **{"to": "nanotron", **arguments})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_frozen_parameters_that_have_no_name_are_refused(tmp_path: Path) -> None:
    """At ZeRO-0 they stay in their param group: read, and told, but not written anew without them."""
    source = write(Run(zero=0), tmp_path / "saved")
    path = source / str(STEP) / "optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt"
    saved = torch.load(path)
    del saved["state"][4], saved["gradient_accumulator"][saved["names"].pop(4)]
    torch.save(saved, path)
    assert verify(str(source)).faults == ()
    with pytest.raises(UnsupportedLayout, match=r"have no state, and so no name: they were frozen.*1 of them"):
        convert(str(source), str(tmp_path / "out"), to="nanotron", zero_stage=1)


def test_like_must_be_of_the_same_model(tmp_path: Path) -> None:
    source = write(Run(), tmp_path / "saved")
    other = Run(pp=2, model=Run().model[:-1])
    like = write(other, tmp_path / "like")
    with pytest.raises(ModelMismatch, match=r"norm.pp_block.weight: is in the source and not in --like"):
        convert(str(source), str(tmp_path / "out"), to="nanotron", like=str(like))


LIKE: dict[str, tuple[Run, list[str]]] = {
    "without masters": (
        Run(pp=2, masters=False),
        [
            "emb.pp_block.weight: is bfloat16 in the source and float32 in --like",
            "norm.pp_block.weight: has the states exp_avg float32, exp_avg_sq float32, fp32 float32 in the source and "
            "exp_avg float32, exp_avg_sq float32 in --like",
        ],
    ),
    "weights in float32": (Run(pp=2), ["emb.pp_block.weight: is bfloat16 in the source and float32 in --like"]),
    "states of 16 bits": (
        Run(pp=2),
        [
            "norm.pp_block.weight: has the states exp_avg float32, exp_avg_sq float32, fp32 "
            "float32 in the source and exp_avg bfloat16, exp_avg_sq float32, fp32 float32 in --like"
        ],
    ),
}


@pytest.mark.parametrize("case", LIKE, ids=LIKE)
def test_like_must_keep_the_same_states_in_the_same_types(case: str, tmp_path: Path) -> None:
    """nanotron would leave masters out, or take one type for another, without a word: every difference at once."""
    coming, told = LIKE[case]
    kind = {"weights in float32": "weight", "states of 16 bits": "exp_avg"}.get(case)
    other = torch.float32 if kind == "weight" else torch.bfloat16
    held = {key: tensor.to(other) if key[1] == kind else tensor for key, tensor in values(coming).items()}
    like = write(coming, tmp_path / "like", held)
    source = write(Run(dp=2), tmp_path / "saved")
    with pytest.raises(ModelMismatch, match="name a checkpoint of a run that") as raised:
        convert(str(source), str(tmp_path / "out"), to="nanotron", like=str(like))
    lines = [fault.line() for fault in raised.value.faults]
    assert all(any(line.startswith(text) for line in lines) for text in told), lines
    assert len(lines) == len(coming.model) * len(told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like", "saved"]


@pytest.mark.parametrize("side", ["source", "like"])
def test_masters_beside_weights_in_float32_are_not_made_up_nor_left_out(side: str, tmp_path: Path) -> None:
    """Of such a weight without masters other formats have one: nanotron's own files are written as they are."""
    with_masters, without = Run(pp=2), Run(pp=2, masters=False)
    runs = {"source": without, "like": without} | {side: with_masters}
    for name, run in runs.items():
        held = {key: tensor.float() if key[1] == "weight" else tensor for key, tensor in values(run).items()}
        write(run, tmp_path / name, held)
    with pytest.raises(ModelMismatch, match=r"has the states .* in the source and .* in --like") as raised:
        convert(str(tmp_path / "source"), str(tmp_path / "out"), to="nanotron", like=str(tmp_path / "like"))
    assert len(raised.value.faults) == len(without.model)
