"""The tools read a grid without an engine: whole tensors by name, whatever the sizes, and what is wrong with them.

Truth is a rule that gives every element of every tensor its own value (`grid_truth.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaged_files import Damage, changed
from grid_cases import Folders, Grid
from grid_models import PIPE_RULES, RULES
from grid_truth import tensors
from safetensors.torch import load_file

from ds_reshard.cli.main import main
from ds_reshard.dcp import LoadPlanner, Reader
from ds_reshard.errors import ReshardError
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.hosts.nanotron import source
from ds_reshard.model.rules import Rule, parse_rules, use_rules
from ds_reshard.operations import coming_run, diff, fingerprint, inspect, verify
from ds_reshard.operations.shape_map import Coming
from ds_reshard.resume.policy import ResumePolicy

pytestmark = pytest.mark.distributed


def pipe(pp: int, dp: int = 1, stage: int | str = 1, dtype: str = "fp32", layers: str = "usual", tp: int = 1) -> Grid:
    return Grid("pipeline", pp=pp, tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def rules_of(grid: Grid) -> tuple[Rule, ...]:
    """What the user has to say of a grid whose files do not."""
    said = PIPE_RULES if grid.kind == "pipeline" else RULES
    return parse_rules(said if "unsaid" in grid.layers else [])


def autotp(tp: int, dp: int = 1, stage: int | str = 1, dtype: str = "fp32", layers: str = "usual") -> Grid:
    return Grid("autotp", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def cut(tp: int, dp: int = 1, stage: int | str = 1, layers: str = "said") -> Grid:
    return Grid("cut", tp=tp, dp=dp, stage=stage, layers=layers)


def moe(ep: int, dp: int, stage: int | str = 1, dtype: str = "fp32") -> Grid:
    return Grid("moe", ep=ep, dp=dp, stage=stage, dtype=dtype)


UNSAID = cut(2, 2, layers="unsaid")
STAGES = pipe(2, tp=2, layers="divided")
READ = [
    STAGES,
    pipe(2, 1, 0, "bf16", "divided unsaid", tp=2),
    pipe(2, 2),
    pipe(4),
    pipe(3, stage="bf16opt", dtype="bf16"),
    pipe(2, 2, 0, "bf16"),
    pipe(2, 2, 1, "bf16", "no file"),
    autotp(2, 2),
    autotp(3, 1, 3, "bf16"),
    autotp(4, 1, 2),
    autotp(3, 1, 2, layers="few"),
    autotp(2, 2, "bf16opt", "bf16"),
    cut(2),
    cut(2, 2, 3),
    UNSAID,
    moe(2, 4),
    moe(1, 2, 2),
    moe(4, 4, "bf16opt", "bf16"),
]


@pytest.mark.parametrize("grid", READ, ids=str)
def test_every_tensor_of_a_grid_has_the_fingerprint_of_the_whole(folders: Folders, grid: Grid) -> None:
    """Weights, masters and moments by their names in the whole model: the truth, and no others are trained."""
    with use_rules(rules_of(grid)):
        found = fingerprint(str(folders(grid)))
    assert not found.faults
    expected = {at: str(fingerprint_of(value.contiguous())) for at, value in tensors(grid).items()}
    told = {(one.name, one.kind): one.fingerprint for one in found.tensors}
    assert {at: told.get(at) for at in expected} == expected
    assert {name for name, kind in told if kind != "weight"} == {name for name, kind in expected}


PAIRS = [
    (pipe(2, 2), pipe(4)),
    (STAGES, pipe(1, tp=4, layers="divided one position")),
    (autotp(2, 2), autotp(4, 1, 2)),
    (cut(2), UNSAID),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_one_model_saved_by_two_grids_does_not_differ(folders: Folders, pair: tuple[Grid, Grid]) -> None:
    """But in the samples that more ranks have seen. Param groups of stages are those of the whole model."""
    with use_rules(rules_of(pair[1])):
        found = diff(*(str(folders(grid)) for grid in pair))
    assert all(one.state == "equal" for one in found.tensors) and len(found.tensors) > 10
    assert {one.where for one in found.values} <= {"global_samples"}


@pytest.mark.parametrize(
    "grid", [pipe(2, 2), STAGES, pipe(2, 2, 1, "bf16", "no file"), autotp(2, 2), moe(2, 4), cut(2)], ids=str
)
def test_a_grid_that_is_whole_passes(folders: Folders, grid: Grid) -> None:
    assert not inspect(str(folders(grid))).faults
    assert not verify(str(folders(grid)), deep=True).faults


@pytest.mark.parametrize("grid", [*(grid for grid in READ if grid is not UNSAID), Grid("muon", dp=2)], ids=str)
def test_torch_reads_a_grid(folders: Folders, grid: Grid) -> None:
    """`ds_reshard.dcp.Reader` proves a folder before it serves it, copies on other ranks included."""
    with use_rules(rules_of(grid)):
        reader = Reader(str(folders(grid)))
        held = fingerprint(str(folders(grid)))
    read = {(one.name, one.kind): one.fingerprint for one in held.tensors if one.kind != "weight"}
    shapes = {key.name: at.shape for key, at in reader._source.layout.placements.items() if key.kind == "fp32"}
    model = {name: torch.full(shape, -7.0) for name, shape in shapes.items()}
    kinds = {kind for _, kind in read} - {"fp32"}
    moments = {
        name: {kind: torch.full(shape, -7.0) for kind in kinds if (name, kind) in read}
        for name, shape in shapes.items()
    }
    if model:  # ZeRO stage 0 names none
        dcp.load({"model": model, "optimizer": {"state": moments}}, storage_reader=reader, planner=LoadPlanner())
    found = {(name, "fp32"): str(fingerprint_of(value)) for name, value in model.items()}
    found |= {(name, kind): str(fingerprint_of(v)) for name, own in moments.items() for kind, v in own.items()}
    assert found == read


OPTIM = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
MODEL = "mp_rank_01_model_states.pt"
LAYER = "layer_02-model_00-model_states.pt"
LAST = "zero_pp_rank_0_mp_rank_03_optim_states.pt"


def weight(name: str, key: str) -> Damage:
    return changed(name, lambda content: content.get("module", content)[key].view(-1)[2:3].add_(0.5))


def state(name: str, group: int, kind: str, at: int) -> Damage:
    def change(content: dict[str, Any]) -> None:
        said = content["optimizer_state_dict"]
        flat = said["single_partition_of_fp32_groups"][group].detach()
        (flat if kind == "fp32" else said["base_optimizer_state"]["state"][group][kind])[at] = 9.0

    return changed(name, change)


def swapped(one: str, other: str) -> Damage:
    """The weights of two experts change places."""

    def run(folder: Path) -> None:
        first, second = (torch.load(folder / name) for name in (one, other))
        for to, names, values in ((one, first, second), (other, second, first)):
            torch.save(dict(zip(names, values.values(), strict=True)), folder / to)

    return run


TIED = "layer_{:02d}-model_{:02d}-model_states.pt"


def tied_again(name: str, key: str) -> Damage:
    """A stage with three files of its tied module, as of so many TiedLayerSpecs (synthetic), one of other values."""

    def run(folder: Path) -> None:
        for layer, row in ((layer, row) for layer in (7, 8) for row in (0, 1)):
            torch.save(torch.load(folder / TIED.format(0, row)), folder / TIED.format(layer, row))
        weight(name, key)(folder)

    return run


EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
ONE_STAGE = pipe(1, tp=2, layers="divided one position")
WRONG = {
    "a third copy in one stage": (ONE_STAGE, tied_again(TIED.format(8, 0), "position"), "tied_modules.embed.position"),
    "a third copy in one stage, of the second row": (
        ONE_STAGE,
        tied_again(TIED.format(8, 1), "position"),
        "tied_modules.embed.position[weight]: differs between the files",
    ),
    "a third part in one stage, of the second row": (
        ONE_STAGE,
        tied_again(TIED.format(8, 1), "weight"),
        "tied_modules.embed.weight[weight]: differs between the files",
    ),
    "a layer's file of another step": (pipe(2), weight(LAYER, "w"), "2.w[weight]: 1 of 35 elements are not the cast"),
    "a tied moment": (
        pipe(2),
        state(OPTIM, 0, "exp_avg", 20),
        "tied_modules.embed.weight[exp_avg]: has a copy on another stage",
    ),
    "a tied master": (
        pipe(2),
        state(OPTIM, 0, "fp32", 20),
        "tied_modules.embed.weight[fp32]: has a copy on another stage (copy 2)",
    ),
    "a position that a later stage trained": (pipe(2), state(OPTIM, 1, "exp_avg", 1), "tied_modules.embed.position"),
    "a copy of a bias, in a later stage": (
        STAGES,
        state(LAST, 1, "fp32", 4),
        "4.b[fp32]: is not divided, and tensor-parallel rank 1",
    ),
    "a part of a tied moment": (
        STAGES,
        state(LAST, 0, "exp_avg", 4),
        "tied_modules.embed.weight[exp_avg]: has a copy on another stage",
    ),
    "a weight of a row of a later stage": (
        STAGES,
        weight("layer_04-model_01-model_states.pt", "b"),
        "4.b[weight]: is not divided, and tensor-parallel rank 1",
    ),
    "a copy of a weight": (autotp(2), weight(MODEL, "embed.weight"), "embed.weight[weight]: is not divided"),
    "a copy of a moment": (cut(2), state(OPTIM, 1, "exp_avg", 3), "norm[exp_avg]: is not divided, and tensor-parallel"),
    "two experts that changed places": (
        moe(2, 2),
        swapped(EXPERT.format(0, 0), EXPERT.format(0, 3)),
        "experts.0.down.weight",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_do_not_go_together_are_found(folders: Folders, tmp_path: Path, case: str) -> None:
    """`verify` names them, and no tool takes one for the truth."""
    grid, damage, text = WRONG[case]
    folder = shutil.copytree(folders(grid), tmp_path / "broken")
    damage(folder / "t")
    found = verify(str(folder))
    assert any(text in fault.line() for fault in found.faults), [fault.line() for fault in found.faults]
    with pytest.raises(ReshardError) as raised:
        fingerprint(str(folder))
    assert text in str(raised.value)


OF_STATES = ["a tied moment", "a tied master", "a copy of a bias, in a later stage", "a copy of a moment"]


@pytest.mark.parametrize("case", OF_STATES)
def test_a_reader_proves_masters_and_states_for_those_who_ask_for_them(
    worlds: Any, folders: Folders, tmp_path: Path, case: str
) -> None:
    """Weights alone are read whatever they are; what one rank asks for, every rank is told is wrong."""
    grid, damage, text = WRONG[case]
    folder = shutil.copytree(folders(grid), tmp_path / "broken")
    damage(folder / "t")
    truth = {name: value for (name, kind), value in tensors(grid).items() if kind == "weight"}
    wanted = {"model": {name: torch.full_like(value, 7.0) for name, value in truth.items()}}
    dcp.load(wanted, storage_reader=Reader(str(folder)), planner=LoadPlanner())
    assert all(torch.equal(wanted["model"][name], value) for name, value in truth.items())
    harmed = text.partition("[")[0]
    others = [name for name in truth if name != harmed]
    for names in ([others, [harmed]], [[harmed], others[:1]], [[], [harmed]]):
        said = worlds[2].run("dcp_jobs.states_told", folder=str(folder), names=names)
        assert all(text in told for told in said), said
    assert not any(worlds[2].run("dcp_jobs.states_told", folder=str(folder), names=[others, []]))


def test_nanotron_proves_masters_where_it_loads_them(folders: Folders, tmp_path: Path) -> None:
    """A policy that skips the optimizer, but goes on in the schedule of its groups, reads the weights alone."""
    grid, damage, text = WRONG["a tied master"]
    folder = shutil.copytree(folders(grid), tmp_path / "broken")
    damage(folder / "t")
    opened = source._open(str(folder), ResumePolicy(optimizer="skip", scheduler="override"), Coming())
    assert opened is not None and opened.content.facts is not None
    with pytest.raises(ReshardError) as raised:
        source._open(str(folder), ResumePolicy(), Coming())
    assert text in str(raised.value)


def test_experts_that_repeat_others_are_found(folders: Folders, tmp_path: Path) -> None:
    """As DeepSpeed saves them after it has given the first rank's experts to all (its universal loads do)."""
    folder = shutil.copytree(folders(moe(2, 2)), tmp_path / "broken")
    for layer, expert in ((layer, expert) for layer in range(2) for expert in range(2)):
        one, other = (folder / "t" / EXPERT.format(layer, number) for number in (expert, expert + 2))
        renamed = {
            name.replace(f"experts.{expert}.", f"experts.{expert + 2}."): value
            for name, value in torch.load(one).items()
        }
        torch.save(renamed, other)
    first = torch.load(folder / "t" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)

    def repeat(content: dict[str, Any]) -> None:
        own, other = content["optimizer_state_dict"], first["optimizer_state_dict"]
        own["single_partition_of_fp32_groups"][1] = other["single_partition_of_fp32_groups"][1]
        own["base_optimizer_state"]["state"][1] = other["base_optimizer_state"]["state"][1]

    changed("zero_pp_rank_1_mp_rank_00_optim_states.pt", repeat)(folder / "t")
    found = [fault.line() for fault in verify(str(folder)).faults]
    assert len(found) == 4
    assert sum("experts.3: has the weights, masters and states of" in line for line in found) == 2


def test_what_cannot_be_divided_is_refused_with_the_rule_that_would_say_it(folders: Folders, capsys: Any) -> None:
    folder = str(folders(UNSAID))
    assert main(["fingerprint", folder]) == 2
    told = capsys.readouterr().err
    assert "gate_up: nothing says how it is cut" in told and "--rules FILE" in told
    assert {fault.where.rpartition(" ")[2] for fault in inspect(folder).faults} == {
        "embed",
        "gate_up",
        "norm",
        "qkv",
        "row",
    }


def test_rules_are_read_of_a_file(folders: Folders, tmp_path: Path, capsys: Any) -> None:
    """`inspect` says of each parameter how it was cut, and what says so."""
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(RULES))
    assert main(["inspect", str(folders(UNSAID)), "--rules", str(file), "--json"]) == 0
    said = {one["name"]: one["division"] for one in json.loads(capsys.readouterr().out)["parameters"]}
    assert said == {
        "embed": "cut along 0 (rule)",
        "gate_up": "cut along 0 (rule)",
        "qkv": "cut along 0 (rule)",
        "row": "cut along 1 (rule)",
        "norm": "a copy each (rule)",
    }


CUTS: list[tuple[Grid, dict[str, str | None]]] = [
    (
        STAGES,
        {
            "tied_modules.embed.weight": "a copy in stages 0, 1, cut along 0 (no pattern)",
            "2.gate_up": "stage 0, cut along 0 (pattern)",
            "4.row": "stage 1, cut along 1 (pattern)",
            "6.g": "stage 1, a copy each (pattern)",
            "4.count": None,
        },
    ),
    (
        moe(2, 4),
        {
            "dense.weight": None,
            "moe.1.deepspeed_moe.experts.deepspeed_experts.2.up.bias": "expert-parallel rank 1 of 2",
        },
    ),
    (autotp(3, 1, 3, "bf16"), {"layers.0.col.weight": "cut along 0 (affine map)"}),
]


@pytest.mark.parametrize(("grid", "cuts"), CUTS, ids=str)
def test_inspect_says_where_a_parameter_is_and_what_tells_it(
    folders: Folders, grid: Grid, cuts: dict[str, str | None]
) -> None:
    told = {one.name: one.division for one in inspect(str(folders(grid))).parameters}
    assert {name: told[name] for name in cuts} == cuts


@pytest.mark.parametrize(
    "text", ['{"parameters": "x"}', '[{"parameters": "x", "dimension": 1}]', "[{", '[{"parameters": "("}]']
)
def test_a_file_that_holds_no_rules_is_refused(folders: Folders, tmp_path: Path, capsys: Any, text: str) -> None:
    file = tmp_path / "rules.json"
    file.write_text(text)
    assert main(["inspect", str(folders(UNSAID)), "--rules", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("grid", [UNSAID, pipe(2, 2), moe(2, 4), Grid("pipeline", pp=2, tp=2)], ids=str)
def test_the_rates_of_a_grid_are_known_without_a_rule(folders: Folders, tmp_path: Path, grid: Grid) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}))
    found = coming_run(str(folders(grid)), str(config), steps=3)
    assert found.position == 1 and found.positions


def test_weights_that_only_masters_tell_are_not_read_without_them(folders: Folders, tmp_path: Path) -> None:
    """The first stage saves no file of its tied module: a later one's never trained value must not stand for it."""
    source = folders(pipe(2, 2, 1, "bf16", "late file"))
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    for out in (whole, alone):
        out.mkdir()
    assert main(["convert", str(source), str(whole / "model"), "--to", "safetensors"]) == 0
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    file = next(broken.rglob("*_pp_rank_0_mp_rank_00_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:700])
    assert main(["convert", str(broken), str(alone / "model"), "--to", "safetensors"])
    assert not any(alone.iterdir())
    name = "tied_modules.embed.position"
    state = {name: torch.zeros_like(load_file(next(whole.rglob("*.safetensors")))[name])}
    with pytest.raises((dcp.CheckpointException, ReshardError), match="mp_rank_00_optim_states"):
        dcp.load({"model": state}, storage_reader=Reader(str(broken)), planner=LoadPlanner(), no_dist=True)
    assert not state[name].any()


def test_an_optimizer_file_of_experts_that_lacks_a_flat_buffer(folders: Folders, tmp_path: Path) -> None:
    """It is told by name, and raises nothing else: the file is read no further."""
    shutil.copytree(folders(moe(2, 2)), tmp_path, dirs_exist_ok=True)
    for file in tmp_path.rglob("*_optim_states.pt"):
        data = torch.load(file, weights_only=False)
        entries = data["optimizer_state_dict"]
        entries["base_optimizer_state"]["state"].pop(1)
        entries["base_optimizer_state"]["param_groups"].pop()
        for name in (
            "single_partition_of_fp32_groups",
            "group_paddings",
            "param_alignment_paddings",
            "partition_count",
        ):
            entries[name].pop()
        torch.save(data, file)
    (fault,) = {(one.what, one.found) for one in inspect(str(tmp_path)).faults}
    assert fault == ("flat buffers do not match the model file", "1")
