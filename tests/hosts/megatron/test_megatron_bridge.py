"""Checkpoints that Megatron-Bridge saved: read without it, converted, resumed by Megatron-LM; and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from format_jobs import ITERATION, OPERATIONS, SAMPLES_SEEN, STEP
from releases import BRIDGE, NotFetched, home
from saved_worlds import DISTRIBUTED, EXPERTS, GATED, MANY_BUCKETS, PP, TIED, TP
from test_megatron_formats import _rule, _tensors

import ds_reshard.operations as tools
from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ReshardError
from ds_reshard.operations.source import find_listing, open_checkpoint

pytestmark = pytest.mark.slow
BUCKETS, WHOLE = "dp_reshardable", "fully_reshardable"


@dataclass(frozen=True)
class World:
    """A model under a topology, and the sharding types in which Bridge saves its optimizer."""

    ranks: int
    arguments: str
    forms: tuple[str, ...] = (BUCKETS, WHOLE)


WORLDS = {
    "gated tp2 pp2": World(4, GATED + TP + PP),
    "experts ep2": World(2, GATED + EXPERTS),
    "tied pp2": World(2, TIED + PP),
    "many buckets dp2": World(2, MANY_BUCKETS, (BUCKETS,)),
}
FORMS = [(name, form) for name, world in WORLDS.items() for form in world.forms]
Saved = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def bridged(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder that Bridge saved, by world and sharding type; each world is run once."""
    try:
        bridge = str(home(BRIDGE))
    except NotFetched as error:
        pytest.skip(str(error))
    folders: dict[str, Path] = {}

    def folder(name: str, form: str) -> Path:
        if name not in folders:
            folders[name], world = tmp_path_factory.mktemp("bridged"), WORLDS[name]
            saves = [
                {"save": str(folders[name] / one), "dist_ckpt_optim_fully_reshardable": one == WHOLE}
                for one in world.forms
            ]
            told = {"arguments": DISTRIBUTED + world.arguments, "home": bridge, "saves": saves}
            releases["0.19.2"].run("bridge_jobs:save", ranks=world.ranks, **told)
        return folders[name] / form

    return folder


@pytest.fixture
def copied(bridged: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bridged("gated tp2 pp2", BUCKETS), tmp_path / "copied"))


@pytest.mark.parametrize(("world", "form"), FORMS)
def test_every_element_is_the_one_that_was_saved(bridged: Saved, world: str, form: str) -> None:
    kinds = set()
    for name, kind, held in _tensors(bridged(world, form)):
        assert held.equal(_rule(name, kind, held.shape).to(held.dtype)), (name, kind)
        kinds.add(kind)
    assert kinds == {"weight", "fp32", "exp_avg", "exp_avg_sq"}
    assert tools.verify(str(bridged(world, form)), deep=True).faults == ()


@pytest.mark.parametrize(("world", "form"), FORMS)
def test_counters_groups_and_sizes(bridged: Saved, world: str, form: str) -> None:
    """What no file tells is not told: how many ranks saved an optimizer in `fully_reshardable`."""
    told = tools.inspect(str(bridged(world, form)))
    assert told.format == "Megatron-LM, torch_dist" and told.faults == () and told.notes == ()
    steps = told.steps
    assert (steps.global_steps, steps.global_samples, steps.optimizer_steps) == (ITERATION, SAMPLES_SEEN, (STEP,))
    assert [group.hyperparameters["weight_decay"] for group in told.groups][:2] == [0.01, 0.0]
    ranks = WORLDS[world].ranks
    sizes = {"gated tp2 pp2": (2, 2, None, 1), "experts ep2": (1, 1, 2, ranks), "tied pp2": (1, 2, None, 1)}
    expected = sizes.get(world, (1, 1, None, ranks))
    assert (told.tp, told.pp, told.ep) == expected[:3]
    assert told.dp == (expected[3] if form == BUCKETS else None)


def test_both_sharding_types_are_equal(bridged: Saved) -> None:
    found = tools.diff(str(bridged("gated tp2 pp2", BUCKETS)), str(bridged("gated tp2 pp2", WHOLE)))
    assert {one.state for one in found.tensors} == {"equal"} and found.faults == () and found.notes == ()
    apart = {"dist_ckpt_optim_fully_reshardable", "save", "world_size", "data_parallel_size"}
    assert {one.where for one in found.values} == {f"args.{name}" for name in apart}


@pytest.mark.parametrize("to", ["zero3", "universal", "dcp", "megatron", "megatron-torch"])
def test_conversions_have_the_fingerprints_of_the_source(bridged: Saved, tmp_path: Path, to: str) -> None:
    folder, out = str(bridged("gated tp2 pp2", BUCKETS)), str(tmp_path / "out")
    tools.convert(folder, out, to=to, dp=2 if to in ("zero3", "dcp") else None)
    own, made = (
        {(one.name, one.kind): one.fingerprint for one in tools.fingerprint(path).tensors} for path in (folder, out)
    )
    for name, kind in own:
        if kind != "weight":  # ZeRO 3 and dcp have masters alone
            assert made[(name, "weight") if to == "dcp" and kind == "fp32" else (name, kind)] == own[name, kind], name
    read = tools.inspect(out)
    assert read.steps.global_samples == SAMPLES_SEEN and read.faults == ()


@pytest.mark.parametrize("to", ["megatron", "megatron-torch"])
def test_stock_megatron_loads_what_was_converted(releases: Any, bridged: Saved, tmp_path: Path, to: str) -> None:
    tools.convert(
        str(bridged("gated tp2 pp2", BUCKETS)),
        str(tmp_path / "out"),
        to=to,
        **({"tp": 2, "pp": 1} if to != "megatron" else {}),
    )
    form = "torch" if to.endswith("torch") else "torch_dist"
    arguments = f"{DISTRIBUTED}{GATED}{TP}--ckpt-format {form} --no-load-rng "
    for told in releases["0.19.2"].run(
        "format_jobs:loaded", ranks=2, arguments=arguments, folder=str(tmp_path / "out")
    ):
        assert told["wrong"] == [] and told["steps"] == [STEP]
        assert told["counters"] == [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN]


@pytest.mark.parametrize(("flags", "ranks"), [("", 1), (TP, 4)])
@pytest.mark.parametrize("form", [BUCKETS, WHOLE])
def test_a_run_of_megatron_resumes_from_it(releases: Any, bridged: Saved, form: str, flags: str, ranks: int) -> None:
    """Saved at tp 2 and pp 2; loaded by Megatron-LM with the hooks on one rank, and at tp 2 and dp 2."""
    folder = bridged("gated tp2 pp2", form)
    arguments = f"{DISTRIBUTED}{GATED}{flags}--load {folder} --ckpt-format torch_dist"
    for told in releases["0.19.2"].run("load_jobs:load", ranks=ranks, arguments=arguments):
        counters = [told[name] for name in ("iteration", "samples", "position", "steps")]
        assert told["wrong"] == [] and counters == [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN, [STEP]]


def test_the_arguments_are_those_of_the_run(bridged: Saved) -> None:
    """By their names in Megatron-LM; a class of the YAML is no value, and a type of torch is one."""
    found = open_checkpoint(find_listing(str(bridged("gated tp2 pp2", BUCKETS)), None)).content().entries
    arguments = found["args"]
    expected = {"num_layers": 4, "swiglu": True, "untie_embeddings_and_output_weights": True, "lr": 3e-4}
    expected |= {"num_query_groups": 2, "group_query_attention": True, "global_batch_size": 4, "no_save_optim": False}
    expected |= {"padded_vocab_size": 112, "consumed_train_samples": SAMPLES_SEEN, "world_size": 4, "bf16": True}
    assert {name: arguments[name] for name in expected} == expected
    assert str(arguments["params_dtype"]) == "torch.bfloat16" and "activation_func" not in arguments
    assert found["num_floating_point_operations_so_far"] == OPERATIONS


def test_a_map_takes_its_numbers_from_it(bridged: Saved, tmp_path: Path) -> None:
    tools.convert(
        str(bridged("gated tp2 pp2", BUCKETS)), str(tmp_path / "llama"), to="zero2", dp=2, names="llama-megatron"
    )
    names = {one.name for one in tools.inspect(str(tmp_path / "llama")).parameters}
    assert "model.layers.3.self_attn.k_proj.weight" in names


def test_rates_are_drawn_from_it(bridged: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    run = "--lr 3e-4 --min-lr 3e-5 --train-iters 5 --lr-decay-iters 40 --lr-decay-style linear --weight-decay 0.01"
    flags = f"{run} --global-batch-size 4 --micro-batch-size 1".split()
    assert main(["lr", str(bridged("gated tp2 pp2", BUCKETS)), "--", *flags]) == 0
    assert "0.00026625" in capsys.readouterr().out


def _config(folder: Path) -> Path:
    return folder / "iter_0000005" / "run_config.yaml"


def _replaced(folder: Path, old: str, new: str) -> None:
    text = _config(folder).read_text(encoding="utf-8")
    assert old in text
    _config(folder).write_text(text.replace(old, new), encoding="utf-8")


def _counter(folder: Path, name: str, value: int | None, *, file: str = "iter_0000005/train_state.pt") -> None:
    held = torch.load(folder / file, weights_only=True)
    held.pop(name)
    torch.save(held if value is None else {**held, name: torch.tensor(value)}, folder / file)


BROKEN: dict[str, tuple[Callable[[Path], Any], type[ReshardError], str]] = {
    "a tag in the YAML": (
        lambda folder: _replaced(folder, "num_layers: 4", "num_layers: !!python/object/apply:os.getpid []"),
        CheckpointDamaged,
        "run_config.yaml: is no YAML of plain values",
    ),
    "a YAML cut off": (
        lambda folder: _config(folder).write_text("model: {num_layers: [", encoding="utf-8"),
        CheckpointDamaged,
        "run_config.yaml: is no YAML of plain values",
    ),
    "a YAML of deep nesting": (
        lambda folder: _config(folder).write_text("[" * 100_000, encoding="utf-8"),
        CheckpointDamaged,
        "run_config.yaml: is no YAML of plain values",
    ),
    "a YAML that merges": (
        lambda folder: _replaced(folder, "\nmodel:\n", "\nother: &other {a: 1}\nmodel:\n  <<: *other\n"),
        CheckpointDamaged,
        "run_config.yaml: is no YAML of plain values",
    ),
    "a number of base 60": (
        lambda folder: _replaced(folder, "num_layers: 4", "num_layers: 1:30"),
        CheckpointDamaged,
        "run_config.yaml: is no YAML of plain values",
    ),
    "a YAML without end": (
        lambda folder: _config(folder).write_text("#" * (5 << 20), encoding="utf-8"),
        CheckpointDamaged,
        "is larger than any configuration",
    ),
    "a block is missing": (
        lambda folder: _replaced(folder, "\nmodel:\n", "\nother:\n"),
        CheckpointDamaged,
        "has no block model",
    ),
    "no train_state.pt": (
        lambda folder: (folder / "iter_0000005" / "train_state.pt").unlink(),
        CheckpointNotFound,
        "train_state.pt",
    ),
    "train_state.pt of another save": (
        lambda folder: _counter(folder, "step", 6),
        CheckpointDamaged,
        "train_state.pt: belongs to another iteration",
    ),
    "train_state.pt lacks a counter": (
        lambda folder: _counter(folder, "consumed_train_samples", None),
        CheckpointDamaged,
        "has no consumed_train_samples",
    ),
    "layers of another run": (
        lambda folder: _replaced(folder, "num_layers: 4", "num_layers: 3"),
        CheckpointDamaged,
        "args.num_layers is not the number of layers",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(copied: Path, tmp_path: Path, case: str) -> None:
    spoil, error, message = BROKEN[case]
    spoil(copied)
    with pytest.raises(error, match=message):
        tools.convert(str(copied), str(tmp_path / "out"), to="zero2", dp=2)
    assert not (tmp_path / "out").exists()


def test_an_iteration_that_bridge_would_not_resume_from_is_told(copied: Path) -> None:
    """A save that was killed between the two files that name the latest iteration."""
    _counter(copied, "step", 10, file="latest_train_state.pt")
    (note,) = tools.inspect(str(copied)).notes
    assert re.fullmatch(r"Megatron-Bridge would resume at 10, by .*latest_train_state.pt; .*txt names 5", note)


def test_without_its_configuration_the_weights_alone_are_read(copied: Path, tmp_path: Path) -> None:
    _config(copied).unlink()
    (note,) = tools.inspect(str(copied)).notes
    assert "no saved arguments (args)" in note
    tools.convert(str(copied), str(tmp_path / "out"), to="safetensors")


def test_another_topology_in_the_configuration_is_refused(copied: Path, tmp_path: Path) -> None:
    """Sizes of the saved buckets are compared with those that the arguments give."""
    _replaced(copied, "tensor_model_parallel_size: 2", "tensor_model_parallel_size: 1")
    with pytest.raises(ReshardError, match="are others than those of its parameters"):
        tools.convert(str(copied), str(tmp_path / "out"), to="zero2", dp=2)
