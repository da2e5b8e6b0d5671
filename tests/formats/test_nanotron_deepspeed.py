"""`convert` between nanotron and DeepSpeed, on synthetic checkpoints of both: to the bit, or refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nanotron_builder import STEP, Param, Run, again, values, write
from safetensors.torch import load_file
from test_nanotron_convert import contents, same

from ds_reshard.cli.main import main
from ds_reshard.errors import ConfigError, ModelMismatch, ParamGroupMismatch, UnsupportedLayout
from ds_reshard.model.rules import parse_rules, use_rules
from ds_reshard.operations import Conversion, Options, convert, diff, plan, verify

FORMATS = {"zero1": 3, "zero2": 2, "zero3": 3, "bf16": 1, "universal": None}
TAG = f"global_step{STEP}"


def converted(source: Path, out: Path, to: str, **arguments: Any) -> Conversion:
    return convert(str(source), str(out), to=to, options=Options(threads=1, memory_nbytes=1 << 20), **arguments)


def optimizer_of(out: Path) -> dict[str, Any]:
    """What the first optimizer file of a ZeRO-1 or -2 output says."""
    (path,) = (out / TAG).glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    saved: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
    return saved


SOURCES = {
    "dp 2 tp 2 pp 2": Run(dp=2, tp=2, pp=2),
    "whole states": Run(tp=2, zero=0),
    "fp32 without masters": Run(dp=2, pp=2, masters=False),
}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("run", SOURCES.values(), ids=SOURCES)
def test_there_and_back_is_every_file_as_it_was(run: Run, to: str, tmp_path: Path) -> None:
    """Between them every tensor is equal, what DeepSpeed has is well formed, and nanotron's own files come back."""
    if to == "bf16" and not run.masters:
        with pytest.raises(UnsupportedLayout, match="was not trained in bf16"):
            converted(write(run, tmp_path / "saved"), tmp_path / "out", to)
        return
    source = write(run, tmp_path / "saved")
    size = {"dp": FORMATS[to]} if FORMATS[to] else {}
    converted(source, tmp_path / "out", to, **size)
    assert verify(str(tmp_path / "out"), deep=True).faults == ()
    between = diff(str(source), str(tmp_path / "out"))
    differing = {(one.name, one.kind) for one in between.tensors if one.state != "equal"}
    beside = set() if run.masters else {(param.name, "fp32") for param in run.model}
    unstored = {(param.name, "weight") for param in run.model} if to == "zero3" else set()
    assert differing - unstored == beside
    converted(tmp_path / "out", tmp_path / "back", "nanotron", like=str(write(again(run, seed=5), tmp_path / "like")))
    same(contents(tmp_path / "back"), contents(source))


@pytest.mark.parametrize("to", ["zero1", "zero3"])
def test_there_and_back_through_two_tensor_parallel_ranks_of_deepspeed(to: str, tmp_path: Path) -> None:
    """A rule for everything: rows of matrices, the same on both ranks of what is a vector."""
    source = write(Run(dp=2, tp=2, pp=2), tmp_path / "saved")
    shapes = {param.name: param.shape for param in Run().model}
    even = [re.escape(name) for name, shape in shapes.items() if len(shape) > 1 and shape[0] % 2 == 0]
    others = [re.escape(name) for name in shapes if re.escape(name) not in even]
    assert even and others
    rules = [{"parameters": "|".join(even)}, {"parameters": "|".join(others), "replicated": True}]
    with use_rules(parse_rules(rules)):
        converted(source, tmp_path / "out", to, tp=2, dp=3)
        assert verify(str(tmp_path / "out"), deep=True).faults == ()
    like = str(write(again(Run(dp=2, tp=2, pp=2), seed=5), tmp_path / "like"))
    converted(tmp_path / "out", tmp_path / "back", "nanotron", like=like)  # the files say themselves how they are cut
    same(contents(tmp_path / "back"), contents(source))


def test_another_topology_of_what_like_shows(tmp_path: Path) -> None:
    """The files of a run of that topology, as from a checkpoint of nanotron itself."""
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "zero", "zero2")
    coming = Run(dp=4, tp=2, zero=0)
    expected = write(coming, tmp_path / "expected", values(Run(dp=2)))
    like = write(Run(dp=2, seed=3), tmp_path / "like")
    converted(tmp_path / "zero", tmp_path / "out", "nanotron", like=str(like), dp=4, tp=2, zero_stage=0)
    same(contents(tmp_path / "out"), contents(expected))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_weights_for_other_programs(dtype: str | None, tmp_path: Path) -> None:
    """safetensors and torch: as they were trained, or from the masters."""
    run = Run(dp=2, tp=2)
    held, source = values(run), write(run, tmp_path / "saved")
    converted(source, tmp_path / "a", "safetensors", dtype=dtype)
    converted(source, tmp_path / "b", "torch", dtype=dtype)
    expected = {name: value for (name, kind), value in held.items() if kind == ("fp32" if dtype else "weight")}
    same(load_file(tmp_path / "a" / "model.safetensors"), expected)
    same(dict(torch.load(tmp_path / "b" / "weight.pt")), expected)
    moments = {name: value for (name, kind), value in held.items() if kind == "exp_avg_sq"}
    same(dict(torch.load(tmp_path / "b" / "exp_avg_sq.pt")), moments)


def test_steps_rates_counters_and_the_data_are_carried_over(tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "out", "zero1", dp=2)
    model = torch.load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    assert (model["global_steps"], model["global_samples"], model["skipped_steps"]) == (STEP, 8 * STEP, 0)
    schedule = torch.load(source / str(STEP) / "lr_scheduler/lr_scheduler_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt")
    assert model["lr_scheduler"] == {
        key: value[:1] if isinstance(value, list) else value for key, value in schedule.items()
    }
    metas = json.loads((source / str(STEP) / "checkpoint_metadata.json").read_text())["metas"]
    assert model["nanotron"] == metas
    state = optimizer_of(tmp_path / "out")["base_optimizer_state"]["state"]
    assert state[0]["step"].dtype == torch.float32
    assert float(state[0]["step"]) == STEP


def _regrouped(source: Path, decay: dict[str, float], steps: dict[str, float]) -> None:
    """Give parameters their own weight decay and step, as nanotron's `weight_decay_exclude_named_params` does."""
    for path in (source / str(STEP) / "optimizer").glob("*.pt"):
        saved = torch.load(path)
        for group in saved["param_groups"]:
            for number in group["params"]:
                name = saved["names"][number]
                group["weight_decay"] = decay.get(name, group["weight_decay"])
                saved["state"][number]["step"] += steps.get(name, 0.0)
        torch.save(saved, path)


PLAIN = ("blocks.0.pp_block.ln.weight", "norm.pp_block.weight")


def test_param_groups_of_equal_hyper_parameters_are_one(tmp_path: Path) -> None:
    """Each in the order of its first member, and each member with its own again on the way back."""
    run = Run(dp=2)
    source = write(run, tmp_path / "saved")
    _regrouped(source, dict.fromkeys(PLAIN, 0.0), {})
    done = converted(source, tmp_path / "out", "zero1", dp=2)
    saved = optimizer_of(tmp_path / "out")
    assert [group["weight_decay"] for group in saved["base_optimizer_state"]["param_groups"]] == [0.01, 0.0]
    model = torch.load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    assert [list(group) for group in model["param_shapes"]] == [
        [param.name for param in run.model if param.name not in PLAIN],
        list(PLAIN),
    ]
    assert "9 param groups are 2, each of equal hyper-parameters, as of torch's AdamW" in done.notes
    converted(tmp_path / "out", tmp_path / "back", "nanotron", like=str(source))
    same(contents(tmp_path / "back"), contents(source))


def test_the_order_of_the_map_is_that_of_groups_and_flat_buffers(tmp_path: Path) -> None:
    """DeepSpeed's own loader goes by place: a run that gives its optimizer other groups first is followed."""
    source = write(Run(dp=2), tmp_path / "saved")
    _regrouped(source, dict.fromkeys(PLAIN, 0.0), {})
    order = [*reversed(PLAIN), *sorted(set(NAMES) - set(PLAIN))]
    names = named(tmp_path / "map.json", {name: NAMES[name] for name in order})
    converted(source, tmp_path / "out", "zero1", dp=2, names=names)
    model = torch.load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    assert [list(group) for group in model["param_shapes"]] == [
        [NAMES[name] for name in order[:2]],
        [NAMES[name] for name in order[2:]],
    ]
    groups = optimizer_of(tmp_path / "out")["base_optimizer_state"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.01]
    assert verify(str(tmp_path / "out"), deep=True).faults == ()


@pytest.mark.parametrize("to", ["zero1", "zero3", "universal"])
def test_parameters_of_one_group_and_several_steps_are_refused_by_name(to: str, tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    _regrouped(source, {}, {PLAIN[0]: 1.0, PLAIN[1]: 1.0})
    with pytest.raises(UnsupportedLayout) as raised:
        converted(source, tmp_path / "out", to)
    assert {fault.where for fault in raised.value.faults} == set(PLAIN)
    assert not (tmp_path / "out").exists()


NAMES = {param.name: param.name.replace(".pp_block", "").replace("blocks", "model.layers") for param in Run().model}


def named(path: Path, names: Any) -> str:
    path.write_text(json.dumps(names))
    return str(path)


def test_names_of_a_map(tmp_path: Path) -> None:
    """New names there, the old ones on the way back; a list of names is one parameter that is tied."""
    source = write(Run(dp=2), tmp_path / "saved")
    tied = {**NAMES, "emb.pp_block.weight": ["model.emb.weight", "lm_head.weight"]}
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "zero1", "--dp", "3"]
    assert main([*command, "--names", named(tmp_path / "there.json", tied)]) == 0
    model = torch.load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    expected = {**NAMES, "emb.pp_block.weight": "model.emb.weight"}
    assert set(model["module"]) == {*expected.values(), "lm_head.weight"}
    assert model["shared_params"] == {"lm_head.weight": "model.emb.weight"}
    assert torch.equal(model["module"]["lm_head.weight"], values(Run())["emb.pp_block.weight", "weight"])
    assert [name for group in model["param_shapes"] for name in group] == list(expected.values())

    back = named(tmp_path / "back.json", {new: old for old, new in expected.items()})
    converted(tmp_path / "out", tmp_path / "back", "nanotron", like=str(source), names=back)
    same(contents(tmp_path / "back"), contents(source))


def test_the_step_that_was_saved_is_the_one_that_is_named(tmp_path: Path) -> None:
    """Not that of --like, which tells no more than how the coming run is laid out."""
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "zero", "zero1", dp=1)
    file = tmp_path / "zero" / TAG / "mp_rank_00_model_states.pt"
    model = torch.load(file, weights_only=False)
    torch.save({**model, "global_steps": STEP + 4}, file)
    converted(tmp_path / "zero", tmp_path / "back", "nanotron", like=str(source))
    assert (tmp_path / "back" / "latest.txt").read_text() == str(STEP + 4)
    assert (tmp_path / "back" / str(STEP + 4)).is_dir()


def test_a_checkpoint_without_its_step_is_refused_but_for_its_weights(tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    path = source / str(STEP) / "checkpoint_metadata.json"
    content = json.loads(path.read_text())
    del content["metas"]
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedLayout, match="does not say its step"):
        converted(source, tmp_path / "out", "zero1")
    converted(source, tmp_path / "weights", "safetensors")


def test_every_fault_of_a_map_at_once(tmp_path: Path) -> None:
    """Unknown, missing, two to one; shapes that differ and names that --like has not: in one error, and no output."""
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "zero", "zero2")
    first, second, third, fourth, *_, last = NAMES
    names = {name: name for name in NAMES}
    names |= {first: second, second: first, fourth: third, "stranger": "other"}
    del names[last]
    with pytest.raises(ModelMismatch) as raised:
        converted(
            tmp_path / "zero",
            tmp_path / "out",
            "nanotron",
            like=str(source),
            names=named(tmp_path / "map.json", {**names, "blocks.0.pp_block.tiny": "nobody"}),
        )
    said = {(fault.where, fault.what) for fault in raised.value.faults}
    assert said >= {
        ("stranger", "is in the map, and the source has no such parameter"),
        (last, "is in the source and not in the map"),
        (third, "is the name of several parameters in the map"),
        ("nobody", "is in the source and not in --like"),
        ("blocks.0.pp_block.tiny", "is in --like, and no parameter of the source has that name"),
    }
    assert not any(where in (first, second) for where, _ in said)  # both 16 x 6: exchanged as the map says
    assert not (tmp_path / "out").exists()


BAD_MAPS = {
    "no JSON": ("{", r"is not JSON"),
    "no object": ("[]", r"holds no object"),
    "a number": ('{"a": 3, "b": [], "c": ["x", "x"]}', r"(?s)'a' has a value.*'b' has a value.*'c' has a value"),
    "twice": ('{"a": "x", "a": "y"}', r"'a' is given twice"),
}


@pytest.mark.parametrize("case", BAD_MAPS, ids=BAD_MAPS)
def test_a_file_that_is_no_map_of_names(case: str, tmp_path: Path) -> None:
    text, said = BAD_MAPS[case]
    source = write(Run(), tmp_path / "saved")
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        converted(source, tmp_path / "out", "zero1", names=str(tmp_path / "map.json"))
    with pytest.raises(ConfigError, match="No such file"):
        converted(source, tmp_path / "out", "zero1", names=str(tmp_path / "nowhere.json"))


def _changed(run: Run, name: str, **changes: Any) -> Run:
    return replace(run, model=tuple(replace(p, **changes) if p.name == name else p for p in run.model))


def test_a_like_of_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "zero", "zero2")
    other = _changed(Run(), PLAIN[0], shape=(12,))
    other = replace(other, model=(*other.model[:-1], Param("more.weight", (2,), (1,))))
    with pytest.raises(ModelMismatch) as raised:
        converted(tmp_path / "zero", tmp_path / "out", "nanotron", like=str(write(other, tmp_path / "like")))
    assert {fault.where for fault in raised.value.faults} == {PLAIN[0], PLAIN[1], "more.weight"}


def test_another_type_or_other_states_are_refused(tmp_path: Path) -> None:
    """A run without masters, and one of another weight type, cannot go on from these to the bit."""
    source = write(Run(dp=2), tmp_path / "saved")
    converted(source, tmp_path / "zero", "zero2")
    like = write(Run(masters=False), tmp_path / "like")
    with pytest.raises(ModelMismatch, match=r"has the states .* in the source and .* in --like") as raised:
        converted(tmp_path / "zero", tmp_path / "out", "nanotron", like=str(like))
    assert "is bfloat16 in the source and float32 in --like" in str(raised.value)
    assert len(raised.value.faults) == 2 * len(Run().model)
    for path in (like / str(STEP) / "optimizer").glob("*.pt"):
        saved = torch.load(path)
        for state in saved["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        torch.save(saved, path)
    converted(write(Run(masters=False), tmp_path / "plain"), tmp_path / "plain-zero", "zero2")
    with pytest.raises(ModelMismatch, match=r"has the states .* in the source and .*max_exp_avg_sq"):
        converted(tmp_path / "plain-zero", tmp_path / "out", "nanotron", like=str(like))


def test_param_groups_that_adamw_of_nanotron_cannot_hold_are_refused(tmp_path: Path) -> None:
    """One of nanotron that would be of two of the source; and another variant of the optimizer."""
    source = write(Run(dp=2), tmp_path / "saved")
    _regrouped(source, dict.fromkeys(PLAIN, 0.0), {})
    converted(source, tmp_path / "zero", "zero1", dp=1)
    like = write(Run(), tmp_path / "like")
    path = next((like / str(STEP) / "optimizer").glob("*.pt"))
    saved = torch.load(path)
    joined = {**saved["param_groups"][0], "amsgrad": True, "params": list(range(9))}
    torch.save({**saved, "param_groups": [joined]}, path)
    scheduler = next((like / str(STEP) / "lr_scheduler").glob("*.pt"))
    torch.save(
        {key: value[:1] if isinstance(value, list) else value for key, value in torch.load(scheduler).items()},
        scheduler,
    )
    with pytest.raises(ParamGroupMismatch, match=r"(?s)several param groups of the source.*another amsgrad") as raised:
        converted(tmp_path / "zero", tmp_path / "out", "nanotron", like=str(like))
    assert len(raised.value.faults) == 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "without an arrangement": ("nanotron", {}, r"does not tell how nanotron shards parameters.*--like DIR")
}


@pytest.mark.parametrize("case", REFUSED, ids=REFUSED)
def test_what_is_refused_of_a_checkpoint_of_deepspeed(case: str, tmp_path: Path) -> None:
    to, arguments, said = REFUSED[case]
    converted(write(Run(), tmp_path / "saved"), tmp_path / "zero", "zero1")
    with pytest.raises((UnsupportedLayout, ConfigError), match=f"(?s){said}"):
        converted(tmp_path / "zero", tmp_path / "out", to, **arguments)


def test_a_folder_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "saved")
    like = str(write(Run(), tmp_path / "like"))
    with pytest.raises(UnsupportedLayout, match=r"(?s)holds no optimizer.*weight: is in the source and not in --like"):
        converted(tmp_path / "saved", tmp_path / "out", "nanotron", like=like)


def test_a_run_of_sixteen_bits_without_masters_is_refused_but_for_its_weights(tmp_path: Path) -> None:
    """DeepSpeed would make masters of the weights, and train another model from there."""
    run = Run(masters=False)
    held = {key: value.to(torch.bfloat16) for key, value in values(run).items()}
    source = write(run, tmp_path / "saved", held)
    with pytest.raises(UnsupportedLayout, match="trained without fp32 masters"):
        converted(source, tmp_path / "out", "zero1")
    converted(source, tmp_path / "weights", "safetensors")
    weights = {name: value for (name, kind), value in held.items() if kind == "weight"}
    same(load_file(tmp_path / "weights" / "model.safetensors"), weights)


def test_several_processes_and_a_plan(tmp_path: Path) -> None:
    """Parts are those of one conversion, by content of --names; plan lists what convert writes."""
    source = write(Run(dp=2), tmp_path / "saved")
    names = named(tmp_path / "map.json", NAMES)
    made = plan(str(source), to="zero1", dp=2, names=names)
    first = Options(threads=1, memory_nbytes=1 << 20, shard=(0, 2))
    convert(str(source), str(tmp_path / "out"), to="zero1", dp=2, names=names, options=first)
    changed = named(tmp_path / "other.json", {**NAMES, PLAIN[0]: "renamed"})
    with pytest.raises(ConfigError, match="was left by another conversion"):
        convert(
            str(source), str(tmp_path / "out"), to="zero1", dp=2, names=changed, options=replace(first, shard=(1, 2))
        )
    same_text = named(tmp_path / "same.json", NAMES)
    options = replace(first, shard=(1, 2))
    assert convert(str(source), str(tmp_path / "out"), to="zero1", dp=2, names=same_text, options=options).complete
    written = {str(path.relative_to(tmp_path / "out" / TAG)) for path in (tmp_path / "out" / TAG).iterdir()}
    assert {name for unit in made.units for name in unit.files} == written


def _of_deepspeed(source: Path, out: Path, *, bias_correction: bool = True, drop: str = "initial_lr") -> Path:
    """As a run of DeepSpeed with FusedAdam saves it: steps that are ints, other entries, none of nanotron's."""
    converted(source, out, "zero2", dp=1)
    (path,) = (out / TAG).glob("*optim_states.pt")
    saved = torch.load(path, weights_only=False)
    base = saved["optimizer_state_dict"]["base_optimizer_state"]
    for state in base["state"].values():
        state["step"] = int(state["step"])
    for group in base["param_groups"]:
        kept = {
            key: group[key] for key in ("lr", "initial_lr", "betas", "eps", "weight_decay", "params") if key != drop
        }
        group.clear()
        group |= {**kept, "bias_correction": bias_correction, "step": STEP, "lr_scale": 0.5}
    torch.save(saved, path)
    path = out / TAG / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    del model["nanotron"]
    torch.save({**model, "epoch": 3, "lr_scheduler": {"last_batch_iteration": STEP - 1}}, path)
    return out


def test_a_run_of_deepspeed_is_told_what_nanotron_takes_from_like(tmp_path: Path) -> None:
    """Steps and samples are the source's; what it has not is that of the run that --like shows, and each is said."""
    source = write(Run(dp=2), tmp_path / "saved")
    done = converted(_of_deepspeed(source, tmp_path / "zero"), tmp_path / "out", "nanotron", like=str(source))
    same(contents(tmp_path / "out"), contents(source))
    assert list(done.notes) == [
        "left out, as nanotron has no place for them: epoch",
        "the scheduler's own state is left out: the schedule is that of --like, at step 7, as config.yaml has it",
        "the data goes on after sample 56 of the one data stage of --like",
        "param group entries that AdamW does not have are left out: lr_scale",
        "the source has no initial learning rates: those of --like are taken",
    ]


ODD_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "no bias correction": ({"bias_correction": False}, "trained without the bias correction"),
    "no betas": ({"drop": "betas"}, "have no betas in the source"),
}


@pytest.mark.parametrize("case", ODD_RUNS, ids=ODD_RUNS)
def test_what_is_no_adamw_is_refused(case: str, tmp_path: Path) -> None:
    arguments, said = ODD_RUNS[case]
    source = write(Run(), tmp_path / "saved")
    with pytest.raises(ParamGroupMismatch, match=said):
        converted(_of_deepspeed(source, tmp_path / "zero", **arguments), tmp_path / "out", "nanotron", like=str(source))


def test_samples_of_several_data_stages_are_refused(tmp_path: Path) -> None:
    """Which of them the source has consumed no file tells."""
    source = write(Run(), tmp_path / "saved")
    zero = _of_deepspeed(source, tmp_path / "zero")
    path = source / str(STEP) / "checkpoint_metadata.json"
    content = json.loads(path.read_text())
    content["metas"]["data_stages"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedLayout, match="consumed of which data"):
        converted(zero, tmp_path / "out", "nanotron", like=str(source))
