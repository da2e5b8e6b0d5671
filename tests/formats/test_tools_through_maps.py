"""diff, fingerprint and Reader through a map of names: they take a checkpoint for its conversion through the map."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nanotron_builder import Run
from nanotron_builder import write as write_nanotron
from test_every_pair import MAP as PAIR_MAP
from test_every_pair import converted
from torch.distributed.checkpoint.api import CheckpointException
from zero_builder import TAG, Built, values, write

from ds_reshard.cli.main import main
from ds_reshard.dcp import LoadPlanner, Reader
from ds_reshard.errors import CheckpointDamaged, ModelMismatch, UnsupportedLayout
from ds_reshard.model.reports import Difference, Fingerprinted
from ds_reshard.operations import Options, convert, diff, fingerprint, verify

pytestmark = pytest.mark.slow
Held = dict[tuple[str, str], torch.Tensor]
SOME = Options(threads=1, memory_nbytes=1 << 20)

MAP: dict[str, Any] = {
    "sides": ["fused", "apart"],
    "numbers": {"g": 2, "q": 2, "d": 2, "h": 4, "e": 3, "f": 2},
    "indices": {"e": "e"},
    "entries": [
        {"fused": "qkv : (g q+1+1 d) h", "apart": ["q", "k", "v"]},
        {"fused": ["w1", "w3"], "apart": "up : f+f h"},
        {"fused": "experts : e f h", "apart": ["x{e}.down"]},
        {"fused": "embed", "apart": "tokens"},
        {"fused": "head", "apart": "lm_head", "optional": True},
        {"fused": "bias", "apart": "beta"},
        {"fused": "gone", "apart": "went", "optional": True},
    ],
}
FIRST = (("qkv", (16, 4)), ("w1", (2, 4)), ("w3", (2, 4)), ("embed", (5, 4)))
BUILT = Built(groups=(FIRST, (("experts", (3, 2, 4)),)), frozen=(("bias", (4,)),), tied=(("head", "embed"),), dp=2)
"""Two groups of learning rates 0.1 and 0.05, a tie, and a frozen parameter."""


@pytest.fixture
def names(tmp_path: Path) -> str:
    return written(tmp_path, MAP)


def written(place: Path, held: dict[str, Any]) -> str:
    path = place / f"map{len(list(place.glob('map*.json')))}.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    return str(path)


def saved(place: Path, built: Built = BUILT, held: Held | None = None, **entries: object) -> Path:
    """A ZeRO-2 folder; `entries` are set in its model file."""
    folder = write(built, place, held)
    return edited(folder, "mp_rank_00_model_states.pt", lambda model: model.update(entries)) if entries else folder


def edited(folder: Path, pattern: str, change: Any) -> Path:
    for path in (folder / TAG).glob(pattern):
        held = torch.load(path, weights_only=False)
        change(held)
        torch.save(held, path)
    return folder


def out_of(source: Path, out: Path, names: str, to: str = "zero3") -> Path:
    size = {"dp": 3} if to in ("zero1", "zero2", "zero3", "dcp") else {}
    convert(str(source), str(out), to=to, names=names, options=SOME, **size)
    return out


def prints(folder: Path, **more: Any) -> dict[tuple[str, str], str | None]:
    found = fingerprint(str(folder), **more)
    assert not found.faults, found.faults
    return {(one.name, one.kind): one.fingerprint for one in found.tensors}


def read(folder: Path, **more: Any) -> dict[str, Any]:
    """Every tensor and every plain value but those of param groups by their position."""
    reader = Reader(str(folder), **more)
    state: dict[str, Any] = {}
    for key, told in reader.read_metadata().state_dict_metadata.items():
        if not re.search(r"param_groups\.\d+\.\w+$", key):
            state[key] = torch.zeros(told.size, dtype=told.properties.dtype) if hasattr(told, "size") else key
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return repr(a) == repr(b)


def whats(found: Difference) -> tuple[list[tuple[str, str, int, tuple[int, ...] | None]], list[str]]:
    """The tensors that differ with the first index, and the values."""
    tensors = [(one.name, one.kind, one.differing, one.first) for one in found.differing]
    return tensors, [value.where for value in found.values]


@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "bf16", "universal", "dcp", "accelerate", "pytorch"])
def test_nanotrons_folder_and_each_conversion_are_the_same(to: str, tmp_path: Path) -> None:
    """From either side: equal, the same fingerprints, and the same values for a Reader."""
    source = write_nanotron(Run(dp=2, tp=2), tmp_path / "nanotron")
    names = written(tmp_path, PAIR_MAP)
    out = converted(source, tmp_path / "out", to, {"names": names})
    for mapped, plain in ((source, out), (out, source)):
        told = diff(str(mapped), str(plain), names=names)
        assert told.equal and len(told.tensors) > 26, whats(told)
        found, expected = prints(mapped, names=names), prints(plain)
        assert {key[0] for key in found} == {key[0] for key in expected}
        for key in found.keys() & expected.keys():
            whole = (key[0], "fp32") if key[1] == "weight" and (key[0], "fp32") not in expected else key
            other = (key[0], "fp32") if key[1] == "weight" and (key[0], "fp32") not in found else key
            assert found.get(whole, found[key]) == expected.get(other, expected[key]), key
        held, other_held = read(mapped, names=names), read(plain)
        common = held.keys() & other_held.keys()
        assert {key for key in held.keys() ^ common if key.startswith(("model.", "optimizer."))} == set()
        assert [key for key in common if not equal(held[key], other_held[key])] == []
        assert sum("exp_avg" in key for key in common) == 2 * len({key[0] for key in found})


@pytest.mark.parametrize("to", ["zero1", "zero3", "dcp", "universal"])
def test_ties_frozen_parameters_and_groups_are_the_same(names: str, tmp_path: Path, to: str) -> None:
    source = saved(tmp_path / "zero")
    out = out_of(source, tmp_path / "out", names, to)
    for a, b in ((source, out), (out, source)):
        told = diff(str(a), str(b), names=names)
        assert told.equal, (whats(told), told.faults)
        assert not any("another name of a tied weight" in note for note in told.notes), told.notes
    found, expected = prints(source, names=names), prints(out)
    assert found["lm_head", "weight"] == found["tokens", "weight"]
    assert all(found[key] == expected[key] for key in expected if key[1] != "weight" or to in ("zero1", "universal"))
    held, other = read(source, names=names), read(out)
    tensors = [key for key in other if isinstance(other[key], torch.Tensor)]
    assert len(tensors) > 20 and [key for key in tensors if not equal(held[key], other[key])] == []
    assert equal(held["model.lm_head"], held["model.tokens"])
    assert held["optimizer.param_groups.x1.down.lr"] == 0.05 and held["optimizer.param_groups.up.lr"] == 0.1


CHANGES = {
    "split": ("qkv", "exp_avg", (5, 1), ("k", (1, 1))),
    "joined": ("w3", "exp_avg_sq", (1, 3), ("up", (3, 3))),
    "stacked": ("experts", "fp32", (2, 1, 0), ("x2.down", (1, 0))),
    "frozen": ("bias", "weight", (2,), ("beta", (2,))),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("to", ["zero1", "zero3", "dcp"])
def test_one_changed_element_has_its_new_name_and_index(what: str, to: str, names: str, tmp_path: Path) -> None:
    """Of whichever side is A, and by its values."""
    name, kind, at, (new, there) = CHANGES[what]
    held = values(BUILT)
    out = out_of(saved(tmp_path / "zero", held=held), tmp_path / "out", names, to)
    held[name, kind][at] = 7.0
    changed = saved(tmp_path / "changed", held=held)
    for a, b in ((changed, out), (out, changed)):
        found = diff(str(a), str(b), names=names)
        if a is changed:
            assert whats(found) == ([(new, kind, 1, there)], [])
            assert found.differing[0].first_a.startswith("7")
        else:
            assert whats(found) == ([(name, kind, 1, at)], [])
    held[name, kind][at] = values(BUILT)[name, kind][at]
    held["qkv", "weight"][0, 0] += 1  # of bf16 weights that are not the masters'
    found = diff(str(saved(tmp_path / "weight", held=held)), str(out), names=names)
    assert whats(found)[0] == ([] if to == "dcp" else [("q", "weight", 1, (0, 0))])


def test_steps_rates_and_counters_that_differ_are_told(names: str, tmp_path: Path) -> None:
    out = out_of(saved(tmp_path / "zero"), tmp_path / "out", names, "zero3")

    def change(held: dict[str, Any]) -> None:
        base = held["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][1]["lr"] = 0.9
        base["state"][0]["step"] = torch.tensor(4.0)

    changed = edited(saved(tmp_path / "changed", global_samples=37), "*optim_states.pt", change)
    tensors, told = whats(diff(str(changed), str(out), names=names))
    assert tensors == []
    assert "param group 1, of x0.down.lr" in told, told
    assert any(one.startswith("step of ") for one in told) and "global_samples" in told
    assert len(told) == 3, told


LAMBDA = {"base_lrs": [0.1, 0.05], "_last_lr": [0.1, 0.05], "lr_lambdas": [None, None], "last_epoch": 3}
STEPS = {"base_lrs": [0.1, 0.05], "_last_lr": [0.1, 0.05], "step_size": 1, "gamma": 0.5, "last_epoch": 3}


@pytest.mark.parametrize("schedule", [LAMBDA, STEPS], ids=["LambdaLR", "StepLR"])
def test_schedules_are_compared_by_param_group_in_whatever_order(tmp_path: Path, schedule: Any) -> None:
    """The map's first entry is of the second group: the output has the groups the other way round, and is the same."""
    entries = sorted(MAP["entries"], key=lambda entry: "experts" not in str(entry))
    names = written(tmp_path, {**MAP, "entries": entries})
    source = saved(tmp_path / "zero", lr_scheduler=schedule)
    out = out_of(source, tmp_path / "out", names, "zero1")
    model = torch.load(next(out.rglob("mp_rank_00_model_states.pt")), weights_only=False)
    assert model["lr_scheduler"]["base_lrs"] == [0.05, 0.1]
    for a, b in ((source, out), (out, source)):
        told = diff(str(a), str(b), names=names)
        assert told.equal, (whats(told), told.faults)
    swapped = {**schedule, "base_lrs": [0.05, 0.1]}
    other = saved(tmp_path / "other", lr_scheduler=swapped)
    told = diff(str(other), str(out), names=names)
    assert [value.where for value in told.values] == ["lr_scheduler.base_lrs"]
    alone = {f"{name}": f"new.{name}" for name in ("experts", "qkv", "w1", "w3", "bias")}
    turned = [
        written(tmp_path, {**one, "embed": ["new.embed", "new.head"]}) for one in (alone, dict(reversed(alone.items())))
    ]
    out_of(source, tmp_path / "turned", turned[0], "zero1")
    for folder, differing in ((source, []), (other, ["lr_scheduler.base_lrs"])):
        told = diff(str(folder), str(tmp_path / "turned"), names=turned[1])
        assert [value.where for value in told.values] == differing and not told.faults
    unknown = saved(tmp_path / "unknown", lr_scheduler={**schedule, "of each": [1, 2]})
    if schedule is STEPS:
        assert any(
            "of each has one value per group" in fault.what
            for fault in diff(str(unknown), str(out), names=names).faults
        )


def flip(path: Path, member: str, at: int = 0) -> None:
    with zipfile.ZipFile(path) as archive:
        info = next(one for one in archive.infolist() if one.filename.endswith(member))
    data = bytearray(path.read_bytes())
    begin = info.header_offset + 30 + int.from_bytes(data[info.header_offset + 26 :][:2], "little")
    begin += int.from_bytes(data[info.header_offset + 28 :][:2], "little")
    data[begin + at] ^= 64
    path.write_bytes(data)


def members(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [
            one.filename.partition("/")[2] for one in archive.infolist() if "/data/" in one.filename and one.file_size
        ]


def assert_damaged(tool: Callable[[], Difference | Fingerprinted]) -> None:
    """By its faults, or refused: a step, say, is read when the folder is opened."""
    try:
        assert tool().faults
    except CheckpointDamaged as error:
        assert "crc32" in str(error)


def test_damage_to_any_record_is_found(names: str, tmp_path: Path) -> None:
    """Also to weights of which the masters are compared, and to moments that the other side does not have."""
    source = saved(tmp_path / "zero")
    outs = [out_of(source, tmp_path / to, names, to) for to in ("dcp", "safetensors", "zero1")]
    files = [path.name for path in sorted((source / TAG).glob("*.pt"))]
    for number, name in enumerate(files):
        for member in members(source / TAG / name):
            bad = tmp_path / f"bad{number}{member.replace('/', '-')}"
            shutil.copytree(source, bad)
            flip(bad / TAG / name, member)
            if verify(str(bad)).clean:
                continue
            for out in outs:
                assert_damaged(lambda out=out, bad=bad: diff(str(bad), str(out), names=names))
            assert_damaged(lambda bad=bad: fingerprint(str(bad), names=names))


PADDED: dict[str, Any] = {
    "sides": ["padded", "exact"],
    "numbers": {"v": 4, "p": 4, "h": 3},
    "entries": [{"padded": "table : v+p h", "exact": ["rows", None]}, {"padded": "w", "exact": "w.new"}],
}


def test_rows_that_a_map_leaves_out_are_told_and_their_damage_is_found(tmp_path: Path) -> None:
    """Also if they are whole records, which no tensor of the other side lies in."""
    names = written(tmp_path, PADDED)
    table, w = torch.arange(24.0).view(8, 3), torch.ones(2, 2)
    source = tmp_path / "dcp"
    dcp.save({"model": {"w": w, "table": table}}, checkpoint_id=str(tmp_path / "whole"), no_dist=True)
    convert(str(tmp_path / "whole"), str(source), to="dcp", dp=2)
    out = out_of(source, tmp_path / "out", names, "safetensors")
    told = diff(str(source), str(out), names=names)
    assert told.equal
    assert "A: left out: 12 elements of table that the map says are padding" in told.notes
    assert any("12 elements of table" in note for note in fingerprint(str(source), names=names).notes)
    with pytest.raises(UnsupportedLayout, match="left out: 12 elements of table that the map says are padding"):
        Reader(str(source), names=names)
    back = out_of(out, tmp_path / "back", names, "safetensors")  # in which these rows are zeros
    assert diff(str(out), str(source), names=names).equal and diff(str(out), str(back), names=names).equal
    assert not diff(str(source), str(back)).equal
    assert prints(out, names=names) == prints(back)
    assert equal(read(out, names=names)["model.table"], torch.cat([table[:4], torch.zeros(4, 3)]))
    row = table[6].numpy().tobytes()
    (file,) = (file for file in source.glob("*.distcp") if row in file.read_bytes())
    data = bytearray(file.read_bytes())
    assert table[0].numpy().tobytes() not in data, "rows 4 to 7 are a record"
    at = data.index(row)
    data[at + 1] ^= 64
    file.write_bytes(data)
    assert diff(str(source), str(out), names=names).faults
    assert fingerprint(str(source), names=names).faults


def test_a_tied_weight_that_was_saved_again_with_other_values_is_refused(names: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "zero")
    out = out_of(source, tmp_path / "out", names, "zero1")

    def untie(value: float) -> Any:
        return lambda model: model["module"].update(head=model["module"]["embed"].clone() + value)

    again = edited(saved(tmp_path / "again"), "mp_rank*", untie(0))
    assert diff(str(again), str(out), names=names).equal
    assert prints(again, names=names) == prints(source, names=names)
    other = edited(saved(tmp_path / "other"), "mp_rank*", untie(1))
    for fault in (*diff(str(other), str(out), names=names).faults, *fingerprint(str(other), names=names).faults):
        assert (fault.where, fault.what) == ("head[weight]", "has other values than embed, to which it is tied")
    assert not diff(str(other), str(out), names=names).equal
    assert not diff(str(out), str(other), names=names).equal
    assert fingerprint(str(other), names=names).faults
    with pytest.raises(Exception, match="has other values than embed, to which it is tied"):
        Reader(str(other), names=names)
    loose = edited(saved(tmp_path / "loose"), "mp_rank*", untie(1))
    edited(
        loose,
        "mp_rank*",
        lambda model: model.update(
            shared_params={},
            frozen_param_shapes={**model["frozen_param_shapes"], "head": torch.Size((5, 4))},
            frozen_param_fragments={**model["frozen_param_fragments"], "head": model["module"]["head"]},
        ),
    )
    assert whats(diff(str(loose), str(out), names=names))[0] == [("lm_head", "weight", 20, (0, 0))]
    assert whats(diff(str(out), str(loose), names=names))[0] == [("head", "weight", 20, (0, 0))]


def test_what_a_content_cannot_hold_is_a_fault(names: str, tmp_path: Path) -> None:
    """Two equal folders with a state that no other layout can hold are not said to be equal through a map."""

    def odd(held: dict[str, Any]) -> None:
        for state in held["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["odd"] = torch.zeros(7)

    source = edited(saved(tmp_path / "zero"), "*optim_states.pt", odd)
    out = out_of(saved(tmp_path / "plain"), tmp_path / "out", names, "zero1")
    told = diff(str(source), str(out), names=names)
    assert not told.equal and any("'odd'" in fault.where for fault in told.faults), told.faults
    assert any("'odd'" in fault.where for fault in fingerprint(str(source), names=names).faults)
    model = {"model": {"q": torch.zeros(8, 4)}}
    dcp.load(model, storage_reader=Reader(str(source), names=names), no_dist=True)
    assert torch.equal(model["model"]["q"], read(out)["model.q"])
    for partial in (False, True):
        wanted = {**model, "optimizer": {"state": {"q": {"exp_avg": torch.zeros(8, 4)}}}}
        with pytest.raises(CheckpointException, match="'odd'"):
            dcp.load(
                wanted,
                storage_reader=Reader(str(source), names=names),
                planner=LoadPlanner(allow_partial_load=partial),
                no_dist=True,
            )


def test_an_optimizer_that_names_no_parameter_is_a_fault(names: str, tmp_path: Path) -> None:
    """ZeRO stage 0: no map can say whose states they are."""
    folders = []
    for number in (0, 1):
        built = Built(groups=BUILT.groups, frozen=BUILT.frozen, dp=1, config={"zero_optimization": {"stage": 0}})
        source = saved(tmp_path / str(number), built)
        for path in (source / TAG).glob("*optim_states.pt"):
            path.unlink()
        optimizer = {"state": {0: {"exp_avg": torch.zeros(4) + number}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        edited(source, "mp_rank*", lambda model, held=optimizer: model.update(optimizer=held, param_shapes=None))
        folders.append(source)
    out = tmp_path / "out"
    convert(str(folders[0]), str(out), to="safetensors", names=names)
    for a, b in ((folders[0], out), (out, folders[1])):
        told = diff(str(a), str(b), names=names)
        assert any("names no parameter" in fault.what for fault in told.faults)


def test_states_that_a_partial_load_would_leave_are_refused(names: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "zero", Built(groups=BUILT.groups, frozen=BUILT.frozen, states=("exp_avg",)))
    new = torch.full((3,), 2.0)
    wanted = {
        "model": {"q": torch.zeros(8, 4), "adapter": new},
        "optimizer": {"state": {"q": {kind: torch.ones(8, 4) for kind in ("exp_avg", "exp_avg_sq")}}},
    }
    planner = LoadPlanner(allow_partial_load=True)
    with pytest.raises(CheckpointException, match=r"optimizer\.state\.q\.exp_avg_sq: is not in the checkpoint"):
        dcp.load(wanted, storage_reader=Reader(str(source), names=names), planner=planner, no_dist=True)
    del wanted["optimizer"]["state"]["q"]["exp_avg_sq"]
    planner = LoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=Reader(str(source), names=names), planner=planner, no_dist=True)
    assert torch.equal(
        wanted["optimizer"]["state"]["q"]["exp_avg"], read(source, names=names)["optimizer.state.q.exp_avg"]
    )
    assert torch.equal(new, torch.full((3,), 2.0))


def test_names_that_are_the_others_already_are_refused(names: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "zero")
    out = out_of(source, tmp_path / "out", names, "zero1")
    for folder in (source, out):
        with pytest.raises(
            ModelMismatch, match=r"(?s)already has the names of the other.*compare them without --names"
        ):
            diff(str(folder), str(folder), names=names)
    other = written(tmp_path, {**MAP, "numbers": {**MAP["numbers"], "d": 3}})
    with pytest.raises(ModelMismatch, match="does not have the shape that the map's numbers give"):
        diff(str(source), str(out), names=other)


def test_a_map_of_names_alone_is_applied_to_either_side(tmp_path: Path) -> None:
    """Patterns may match the new names, too: what counts is which side it brings to the other's names."""
    source = saved(tmp_path / "zero")
    names = written(tmp_path, {"embed": ["model.embed", "model.head"], "(.*)": "model.{1}"})
    out = out_of(source, tmp_path / "out", names, "zero1")
    for a, b in ((source, out), (out, source)):
        told = diff(str(a), str(b), names=names)
        assert told.equal and {one.name for one in told.tensors} >= {"model.qkv", "model.embed"}, whats(told)
    assert prints(source, names=names) == prints(out)


def test_the_command_line_takes_a_map(names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "zero")
    out = out_of(source, tmp_path / "out", names, "zero1")
    assert main(["diff", str(source), str(out), "--names", names]) == 0
    assert main(["diff", str(source), str(out)]) == 1
    assert "equal to the bit" in capsys.readouterr().out
    assert main(["fingerprint", str(source), "--names", names, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["tensors"]
    assert {one["name"] for one in told} >= {"q", "k", "v", "up", "x0.down"}
