"""Checkpoints that Megatron-FSDP saved (`fsdp_dtensor`): read without it, converted, and what of them is refused."""

from __future__ import annotations

import io
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damages import changed_common, changed_number, changed_text
from format_jobs import ITERATION, OPERATIONS, SAMPLES_SEEN, STEP
from saved_worlds import DISTRIBUTED, EXPERTS, EXPERTS_WHOLE, GATED, PP, TIED, TP
from test_megatron_formats import _rule, _tensors
from torch.distributed.checkpoint import FileSystemReader

import ds_reshard.dcp
import ds_reshard.operations as tools
from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ReshardError, UnsupportedLayout
from ds_reshard.formats.megatron.torch_dist import saved_tensors
from ds_reshard.hosts.megatron.topology import find_saved
from ds_reshard.operations.source import find_listing, open_checkpoint

pytestmark = pytest.mark.slow
KINDS = {"weight", "exp_avg", "exp_avg_sq"}
INSTANCES = "--num-distributed-optimizer-instances 2 "
PART = "--data-parallel-sharding-strategy "


@dataclass(frozen=True)
class World:
    """A model that Megatron-FSDP shards over some ranks; `plain` is torch's own Adam, `stages` allows a pipeline."""

    ranks: int
    arguments: str
    plain: bool = False
    stages: bool = False


WORLDS = {
    "gated dp2": World(2, DISTRIBUTED + GATED),
    "gated dp3": World(3, DISTRIBUTED + GATED + "--global-batch-size 3 "),
    "biases dp2": World(2, DISTRIBUTED),
    "biases dp2, not sharded": World(2, DISTRIBUTED + PART + "no_shard "),
    "biases fp32 dp2": World(2, "--use-distributed-optimizer "),
    "tied dp2, states alone sharded": World(2, DISTRIBUTED + TIED + PART + "optim "),
    "gated tp2 dp2": World(4, DISTRIBUTED + GATED + TP),
    "gated dp2x2": World(4, DISTRIBUTED + GATED + INSTANCES),
    "gated dp2x2, outer": World(4, DISTRIBUTED + GATED + INSTANCES + "--outer-dp-sharding-strategy optim "),
    "experts ep2": World(2, DISTRIBUTED + GATED + EXPERTS),
    "experts tp2 ep2": World(4, DISTRIBUTED + GATED + EXPERTS + TP),
    "gated dp2, torch's Adam": World(2, DISTRIBUTED + GATED, plain=True),
}
OTHERS = {
    "gated pp2": World(2, DISTRIBUTED + GATED + PP, stages=True),
    "gated dp2, bf16 masters": World(2, DISTRIBUTED + GATED + "--megatron-fsdp-main-params-dtype bf16 "),
}
"""What is refused."""
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def sharded(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder that Megatron-FSDP saved of a world; each is run once."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            world, made = {**WORLDS, **OTHERS}[name], tmp_path_factory.mktemp("sharded") / "saved"
            asked = {"arguments": world.arguments, "plain": world.plain, "stages": world.stages}
            releases["0.19.2"].run("fsdp_dtensor_jobs:save", ranks=world.ranks, folder=str(made), **asked)
            folders[name] = made
        return folders[name]

    return folder


@pytest.fixture
def copied(sharded: Saved, tmp_path: Path) -> Path:
    """Return the folder of an iteration that a test may change."""
    return Path(shutil.copytree(sharded("gated dp2"), tmp_path / "copied")) / "iter_0000005"


@pytest.mark.parametrize("world", WORLDS)
def test_every_element_is_the_one_that_was_saved(sharded: Saved, world: str) -> None:
    """By the names of `torch_dist`: SwiGLU's halves are one tensor, and so are the experts of a layer."""
    found: dict[str, set[str]] = {}
    for name, kind, held in _tensors(sharded(world)):
        assert held.dtype is torch.float32 and held.equal(_rule(name, kind, held.shape)), (name, kind)
        found.setdefault(name, set()).add(kind)
    assert all(kinds == KINDS for kinds in found.values())
    experts = "experts.experts." if "experts" in world else ""
    assert {f"decoder.layers.{layer}.mlp.{experts}linear_fc1.weight" for layer in range(4)} <= found.keys()
    assert ("output_layer.weight" in found) == ("--untie" in WORLDS[world].arguments)


@pytest.mark.parametrize("world", WORLDS)
def test_groups_steps_counters_and_sizes(sharded: Saved, world: str) -> None:
    """The files name the parameters of each group."""
    folder = str(sharded(world))
    told = tools.inspect(folder)
    assert told.format == "Megatron-LM, fsdp_dtensor" and told.faults == () and told.notes == ()
    assert tools.verify(folder, deep=True).faults == ()
    steps = told.steps
    assert (steps.global_steps, steps.global_samples, steps.optimizer_steps) == (ITERATION, SAMPLES_SEEN, (STEP,))
    tp, ep = (2 if f"{one}2" in world else 1 for one in ("tp", "ep"))
    assert (told.tp, told.pp, told.ep) == (tp, 1, ep if "experts" in world else None)
    assert told.dp == WORLDS[world].ranks // tp
    facts = open_checkpoint(find_listing(folder, None)).facts
    assert facts is not None and len(facts.groups) == 2
    decayed, others = sorted(facts.groups, key=lambda group: -group.hyperparameters["wd_mult"])
    for group, weight_decay in ((decayed, 0.01), (others, 0.0)):
        assert group.hyperparameters["weight_decay"] == weight_decay
        held = [group.hyperparameters[name] for name in ("max_lr", "min_lr", "betas", "eps")]
        assert held == [3e-4, 3e-5, (0.9, 0.999), 1e-8] and "params" not in group.hyperparameters
        decayed_by = 2.7e-4 * SAMPLES_SEEN / (40 * (3 if "dp3" in world else 4))
        assert group.hyperparameters["lr"] == pytest.approx(3e-4 - decayed_by)
    assert all(name.endswith("bias") or "norm" in name for name in others.members)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed.members)
    assert {*decayed.members, *others.members} == {name for name, _, _ in _tensors(Path(folder))}
    assert facts.scalars.keys() == {*decayed.members, *others.members}


def test_values_beside_the_tensors(sharded: Saved) -> None:
    entries = open_checkpoint(find_listing(str(sharded("gated dp2")), None)).content().entries
    scheduler = entries["opt_param_scheduler"]
    assert (scheduler["num_steps"], scheduler["max_lr"], scheduler["lr_decay_style"]) == (SAMPLES_SEEN, 3e-4, "linear")
    assert (entries["args"]["ckpt_format"], entries["args"]["num_layers"]) == ("fsdp_dtensor", 4)
    assert entries["num_floating_point_operations_so_far"] == OPERATIONS and entries["checkpoint_version"] == 3.0


TARGETS = ("zero1", "zero2", "zero3", "universal", "dcp", "accelerate", "pytorch", "megatron", "megatron-torch")


@pytest.mark.parametrize("world", ["gated tp2 dp2", "experts ep2", "biases dp2"])
@pytest.mark.parametrize("to", TARGETS)
def test_conversions_have_the_fingerprints_of_the_source(sharded: Saved, tmp_path: Path, world: str, to: str) -> None:
    """A master is the weight here, and has its own tensor in other formats."""
    folder, out = str(sharded(world)), str(tmp_path / "out")
    tools.convert(folder, out, to=to, dp=2 if to in ("zero1", "zero2", "zero3", "dcp", "accelerate") else None)
    own, made = (
        {(one.name, one.kind): one.fingerprint for one in tools.fingerprint(path).tensors} for path in (folder, out)
    )
    masters = "weight" if to in ("dcp", "accelerate", "pytorch") else "fp32"
    for name, kind in own:
        assert made[name, masters if kind == "weight" else kind] == own[name, kind], (name, kind)
    read = tools.inspect(out)
    assert read.faults == () and read.steps.optimizer_steps == (STEP,) and len(read.groups) in (2, 3)
    assert read.steps.global_samples == SAMPLES_SEEN or to == "pytorch"


def test_weights_alone(sharded: Saved, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tools.convert(str(sharded("gated dp2")), str(tmp_path / "out"), to="safetensors")
    held = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    assert len(held) == 27 and all(one.equal(_rule(name, "weight", one.shape)) for name, one in held.items())


STOCK = [
    ("gated tp2 dp2", {}, 2, GATED + PP),
    ("gated dp2x2", {}, 4, GATED + TP),
    ("experts ep2", {"ep": 2}, 2, GATED + EXPERTS),
    ("experts ep2", {"ep": 1}, 2, GATED + EXPERTS_WHOLE + TP),
]


@pytest.mark.parametrize(("world", "sizes", "ranks", "model"), STOCK)
def test_stock_megatron_loads_what_was_converted(
    releases: Any, sharded: Saved, tmp_path: Path, world: str, sizes: dict[str, int], ranks: int, model: str
) -> None:
    """As `torch_dist`, under other sizes than those of the save."""
    tools.convert(str(sharded(world)), str(tmp_path / "out"), to="megatron", **sizes)
    asked = {
        "arguments": f"{DISTRIBUTED}{model}--ckpt-format torch_dist --no-load-rng ",
        "folder": str(tmp_path / "out"),
    }
    for told in releases["0.19.2"].run("format_jobs:loaded", ranks=ranks, **asked):
        assert told["wrong"] == [] and told["compared"] > 1000 and told["steps"] == [STEP]
        assert told["counters"] == [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN]


def test_it_shows_what_another_format_lacks(sharded: Saved, tmp_path: Path) -> None:
    """As `--like`: what ZeRO has of the same model is written with the arguments and layers of the run."""
    folder, zero, out = str(sharded("gated dp2")), str(tmp_path / "zero"), str(tmp_path / "out")
    tools.convert(folder, zero, to="zero2", dp=2)
    tools.convert(zero, out, to="megatron", like=folder)
    tools.convert(folder, str(tmp_path / "whole"), to="megatron")
    found = tools.diff(out, str(tmp_path / "whole"))
    assert {one.state for one in found.tensors} == {"equal"} and {one.b for one in found.values} == {"absent"}


def test_diff_and_plan(sharded: Saved) -> None:
    found = tools.diff(str(sharded("gated dp2")), str(sharded("gated dp2x2, outer")))
    assert {one.state for one in found.tensors} == {"equal"} and found.faults == ()
    assert any("random states are not read" in note for note in found.notes)
    assert tools.plan(str(sharded("gated dp2")), to="zero2", dp=3)


def test_a_state_dict_is_filled_from_it(sharded: Saved) -> None:
    wanted = {"model": {"decoder.layers.3.mlp.linear_fc1.weight": torch.zeros(48, 16)}}
    torch.distributed.checkpoint.load(wanted, storage_reader=ds_reshard.dcp.Reader(str(sharded("gated dp2"))))
    for name, held in wanted["model"].items():
        assert held.equal(_rule(name, "weight", held.shape))


def test_rates_are_drawn_from_it(sharded: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    run = "--lr 3e-4 --min-lr 3e-5 --train-iters 5 --lr-decay-iters 40 --lr-decay-style linear --weight-decay 0.01"
    flags = f"{run} --global-batch-size 4 --micro-batch-size 1".split()
    assert main(["lr", str(sharded("gated dp2")), "--", *flags]) == 0
    assert "0.00026625" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "more"), [(1, ""), (2, TP + "--make-vocab-size-divisible-by 4 ")])
def test_a_run_of_megatron_fsdp_loads_it_as_before(releases: Any, sharded: Saved, ranks: int, more: str) -> None:
    """By Megatron-LM's own load, which the hooks leave alone, on other ranks than those that saved."""
    asked = {"arguments": DISTRIBUTED + GATED + more, "folder": str(sharded("gated dp2")), "hooks": True}
    for told in releases["0.19.2"].run("fsdp_dtensor_jobs:loaded", ranks=ranks, **asked):
        assert told["wrong"] == [] and told["compared"] > 1000 and told["steps"] == [STEP]
        assert told["counters"] == [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN]


def test_any_other_run_is_refused(releases: Any, sharded: Saved) -> None:
    folder = sharded("gated dp2")
    arguments = f"{DISTRIBUTED}{GATED}--ckpt-format torch_dist --load {folder}"
    told = releases["0.19.2"].run("load_jobs:refused", ranks=2, arguments=arguments)
    for one in told:
        assert one["refused"] == "ModelMismatch" and "is of format fsdp_dtensor" in one["message"]
        assert f"ds-reshard convert {folder} DIR --to megatron" in one["message"] and one["changed"] == []
    assert saved_tensors(str(folder / "iter_0000005")) == []


def test_an_iteration_under_load_is_named_with_its_folder(copied: Path) -> None:
    """Of a run of Megatron-FSDP, which would begin anew."""
    (copied.parent / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    with pytest.raises(CheckpointNotFound, match=f"belongs to one iteration.*\n.*give --load {copied.parent}"):
        find_saved(Namespace(load=str(copied), use_megatron_fsdp=True))
    assert find_saved(Namespace(load=str(copied.parent), use_megatron_fsdp=True)) is None


def test_stages_of_a_pipeline_overwrite_each_other(releases: Any, sharded: Saved, tmp_path: Path) -> None:
    """Megatron-LM saves and loads them without a word: layers of the one stage are then the other's."""
    folder = sharded("gated pp2")
    asked = {"arguments": OTHERS["gated pp2"].arguments, "folder": str(folder), "stages": True}
    told = releases["0.19.2"].run("fsdp_dtensor_jobs:loaded", ranks=2, **asked)
    lost = {name for one in told for name in one["wrong"]}
    assert "decoder.layers.mlp.linear_fc1.weight[param]" in lost and len(lost) > 10
    assert {one["counters"][0] for one in told} == {ITERATION}
    with pytest.raises(UnsupportedLayout, match=r"is of several stages of a pipeline.*_size 1, found 2\)"):
        tools.convert(str(folder), str(tmp_path / "out"), to="safetensors")
    assert tools.verify(str(folder)).faults != () and not (tmp_path / "out").exists()
    other = Path(shutil.copytree(folder, tmp_path / "copied")) / "iter_0000005"
    changed_common(other, changed_number("pipeline_model_parallel_size", 2, 1), "args")
    with pytest.raises(CheckpointDamaged, match=r"args.num_layers is not the number of layers \(expected 4, found 2\)"):
        tools.convert(str(other), str(tmp_path / "out"), to="safetensors")


def test_without_an_fp32_master(sharded: Saved, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLayout, match=r"trained without an fp32 master.*expected float32, found bfloat16"):
        tools.convert(str(sharded("gated dp2, bf16 masters")), str(tmp_path / "out"), to="zero2", dp=2)


def _renamed(folder: Path, name: Callable[[str], str | None]) -> None:
    """Rename keys of the directory; those of None are lost."""
    held = FileSystemReader(folder).read_metadata()
    names = {key: name(key) for key in held.state_dict_metadata}
    assert any(key != new for key, new in names.items())
    held.state_dict_metadata = {new: held.state_dict_metadata[key] for key, new in names.items() if new is not None}
    held.planner_data = {new: (new,) for new in names.values() if new is not None}
    held.storage_data = {
        replace(index, fqn=names[index.fqn]): place
        for index, place in held.storage_data.items()
        if names[index.fqn] is not None
    }
    (folder / ".metadata").write_bytes(pickle.dumps(held))


def _lost(folder: Path, pattern: str) -> None:
    _renamed(folder, lambda key: None if re.search(pattern, key) else key)


def _set(folder: Path, pattern: str, value: object) -> None:
    """Give the objects of the keys that match another value."""
    held, file = FileSystemReader(folder).read_metadata(), io.BytesIO()
    torch.save(value, file)
    (folder / "__9_9.distcp").write_bytes(file.getvalue())
    found = [index for index in held.storage_data if re.search(pattern, index.fqn)]
    assert found
    for index in found:
        told = {"relative_path": "__9_9.distcp", "offset": 0, "length": len(file.getvalue())}
        held.storage_data[index] = replace(held.storage_data[index], **told)
    (folder / ".metadata").write_bytes(pickle.dumps(held))


FC1, FC2 = r"layers\.0\.mlp\.linear_fc1\.weight", r"layers\.0\.mlp\.linear_fc2\.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], type[ReshardError], str]] = {
    "a layer is lost": (
        lambda folder: _lost(folder, r"layers\.3\."),
        CheckpointDamaged,
        r"args.num_layers is not the number of layers \(expected 4, found 3\)",
    ),
    "no saved arguments": (
        lambda folder: _lost(folder, "^args$"),
        UnsupportedLayout,
        "does not tell of how many.*None",
    ),
    "further tokens are predicted": (
        lambda folder: _renamed(folder, lambda key: key.replace("decoder.layers.3", "mtp.layers.0")),
        UnsupportedLayout,
        r"mtp.layers.0.mlp.linear_fc1.weight: how Megatron-LM has named, split or fused this tensor is not known",
    ),
    "a master is lost": (
        lambda folder: _lost(folder, rf"^model.*{FC2}"),
        CheckpointDamaged,
        r"linear_fc2.weight lacks a state that others have, or its weight",
    ),
    "a moment is lost": (
        lambda folder: _lost(folder, rf"{FC2}\.exp_avg_sq"),
        CheckpointDamaged,
        r"linear_fc2.weight lacks a state that others.*expected exp_avg, exp_avg_sq, weight, found exp_avg, weight\)",
    ),
    "all states are lost of a parameter": (
        lambda folder: _lost(folder, rf"^optimizer.state.*{FC2}"),
        CheckpointDamaged,
        r"linear_fc2.weight lacks a state that others have",
    ),
    "half of SwiGLU is lost": (
        lambda folder: _lost(folder, rf"^model.*{FC1}_v"),
        CheckpointDamaged,
        r"linear_fc1.weight\[weight\]: is not whole in model",
    ),
    "a chunk is lost": (
        lambda folder: _shortened(folder, r"^model.*linear_qkv"),
        CheckpointDamaged,
        "boxes of .* elements for",
    ),
    "a parameter is in no group": (
        lambda folder: _lost(folder, rf"param_to_group_meta.*{FC2}"),
        CheckpointDamaged,
        r"linear_fc2.weight, or its experts, are not in one param group \(expected 1, found 0\)",
    ),
    "other values than those of the group": (
        lambda folder: _set(folder, rf"param_to_group_meta.*{FC2}\.lr$", 0.5),
        UnsupportedLayout,
        r"lr of .*linear_fc2.weight is not that of .*, of the same param group \(expected 0.00026625, found 0.5\)",
    ),
    "another step than that of the group": (
        lambda folder: _set(folder, rf"param_to_group_meta.*{FC2}\.step", 6),
        UnsupportedLayout,
        r"step of .*linear_fc2.weight is not that of .*, of the same param group \(expected 5, found 6\)",
    ),
    "a split that is not known": (
        lambda folder: _renamed(
            folder, lambda key: key.replace("linear_proj.weight", "in_proj.weight.query") if "group" not in key else key
        ),
        UnsupportedLayout,
        "in_proj.weight.query: how Megatron-LM has named, split or fused this tensor is not known",
    ),
    "a projection that is fused otherwise": (
        lambda folder: _renamed(folder, lambda key: key.replace("linear_proj.", "linear_qkv_down_proj.")),
        UnsupportedLayout,
        "linear_qkv_down_proj.weight: how Megatron-LM has named, split or fused this tensor",
    ),
    "a tensor of something else": (
        lambda folder: _renamed(folder, lambda key: key.replace("rng_state.(0, 0).0.torch", "other.torch")),
        UnsupportedLayout,
        "other.torch_rng_state is no tensor of the model or its optimizer",
    ),
    "more layers than any model has": (
        lambda folder: _set(folder, "^args$", Namespace(pipeline_model_parallel_size=1, num_layers=10**12)),
        CheckpointDamaged,
        r"args.num_layers is not the number of layers \(expected 1000000000000, found 4\)",
    ),
    "an expert of a number without end": (
        lambda folder: _renamed(
            folder,
            lambda key: (
                key.replace("mlp.linear_fc2", f"mlp.experts.local_experts.{'9' * 5000}.linear_fc2")
                if key.startswith("model.")
                else key
            ),
        ),
        CheckpointDamaged,
        r"linear_fc2.weight lacks a state that others have, or its weight",
    ),
    "a file is lost": (lambda folder: (folder / "__1_0.distcp").unlink(), CheckpointNotFound, "__1_0.distcp"),
}


def _shortened(folder: Path, pattern: str) -> None:
    held = FileSystemReader(folder).read_metadata()
    key = next(key for key in held.state_dict_metadata if re.search(pattern, key))
    gone = held.state_dict_metadata[key].chunks.pop()
    held.storage_data = {
        index: place for index, place in held.storage_data.items() if (index.fqn, index.offset) != (key, gone.offsets)
    }
    (folder / ".metadata").write_bytes(pickle.dumps(held))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(copied: Path, tmp_path: Path, case: str) -> None:
    spoil, error, message = BROKEN[case]
    spoil(copied)
    with pytest.raises(error, match=message):
        tools.convert(str(copied), str(tmp_path / "out"), to="zero2", dp=2)
    assert not (tmp_path / "out").exists()


def test_a_step_that_one_parameter_lacks_is_told(sharded: Saved, tmp_path: Path) -> None:
    """torch's Adam keeps one beside the moments of each."""
    folder = Path(shutil.copytree(sharded("gated dp2, torch's Adam"), tmp_path / "copied")) / "iter_0000005"
    _lost(folder, rf"{FC2}\.step")
    with pytest.raises(CheckpointDamaged, match=r"linear_fc2.weight lacks the step that others have"):
        tools.convert(str(folder), str(tmp_path / "out"), to="zero2", dp=2)


@pytest.mark.acts  # bytes elsewhere in the files are taken for pickles that they are not
@pytest.mark.parametrize("other", ["gated dp3", "gated tp2 dp2", "biases dp2"])
def test_the_directory_of_another_save_is_refused(sharded: Saved, copied: Path, tmp_path: Path, other: str) -> None:
    shutil.copy(sharded(other) / "iter_0000005" / ".metadata", copied / ".metadata")
    with pytest.raises(ReshardError, match="distcp"):
        tools.convert(str(copied), str(tmp_path / "out"), to="zero2", dp=2)
    assert not (tmp_path / "out").exists()


def test_weights_are_taken_whatever_its_groups_are(copied: Path, tmp_path: Path) -> None:
    _set(copied, rf"param_to_group_meta.*{FC2}\.lr$", 0.5)
    _lost(copied, rf"^optimizer.state.*{FC1}_v")
    tools.convert(str(copied), str(tmp_path / "out"), to="safetensors")


def test_grouped_experts_are_the_same_tensors(sharded: Saved, tmp_path: Path) -> None:
    """By the names that Megatron-LM gives them, which no run here has saved: they need Transformer Engine."""
    folder = Path(shutil.copytree(sharded("experts ep2"), tmp_path / "copied")) / "iter_0000005"
    one = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
    _renamed(folder, lambda key: one.sub(r"experts.\2.weight\1", key))
    assert any(".experts.linear_fc1.weight3_v" in key for key in FileSystemReader(folder).read_metadata().planner_data)
    found = tools.diff(str(folder), str(sharded("experts ep2")))
    assert {one.state for one in found.tensors} == {"equal"} and found.values == () and found.faults == ()


def test_experts_of_several_groups_are_refused(sharded: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded("experts ep2"), tmp_path / "copied")) / "iter_0000005"
    _set(folder, r"param_to_group_meta.*layers\.1\.mlp\.experts\.local_experts\.2\.linear_fc1.*max_lr", 0.5)
    with pytest.raises(
        CheckpointDamaged, match=r"layers.1.*linear_fc1.weight, or its experts, are not in one.*found 2"
    ):
        tools.convert(str(folder), str(tmp_path / "out"), to="zero2", dp=2)


def test_one_without_its_optimizer_is_taken_for_weights(copied: Path, tmp_path: Path) -> None:
    _lost(copied, r"^optimizer\.|^opt_param")
    (note,) = tools.inspect(str(copied)).notes
    assert "torch_dcp, or of fsdp_dtensor without its optimizer" in note
    tools.convert(str(copied), str(tmp_path / "out"), to="safetensors")


def test_another_implementation_keeps_the_names_of_its_layers(copied: Path) -> None:
    """Norms are renamed in layers of Megatron's own alone."""
    changed_common(copied, changed_text("local", "transformer_engine"), "args")
    names = {one.name for one in tools.inspect(str(copied)).parameters}
    assert "decoder.layers.0.input_layernorm.weight" in names
