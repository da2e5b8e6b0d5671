"""Checkpoints that Megatron-LM saved are opened without it: each element of each tensor is the one that was saved."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaged_files import flip
from damages import changed_chunks
from format_jobs import ITERATION, SAMPLES_SEEN, STEP, value
from releases import WITH_TRAINING
from saved_worlds import DISTRIBUTED, EXPERTS_WHOLE, FLAGS, GATED, PP, TP, WORLDS, Saved
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

import ds_reshard.dcp
import ds_reshard.operations as tools
from ds_reshard.containers.dcp_directory import read_directory
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ReshardError, UnsupportedLayout
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.operations.fingerprints import fingerprint
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.values import logical, read_spans

WRONG = ("many buckets dp2", "model_space")
"""What Megatron-LM itself saves wrong."""
READ = [(name, one) for name, world in WORLDS.items() for one in world.formats if (name, one) != WRONG]


def _tensors(path: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor that is there, by name and kind."""
    source = open_checkpoint(find_listing(str(path), None))
    keys = [key for key, place in source.layout.placements.items() if place.numel]
    rows = [(logical(source.index, key),) for key in keys]
    for span in read_spans(rows):
        key = keys[span.row]
        yield key.name, key.kind, span.values[0].clone().view(source.layout[key].shape)


def _rule(name: str, kind: str, shape: torch.Size) -> torch.Tensor:
    """What was saved under that name: of stacked layers the part of one."""
    match = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.*)", name)
    key, layer = (match[1] + match[3], int(match[2])) if match is not None else (name, 0)
    index = torch.arange(prod(shape)) + layer * prod(shape)
    return value(key, index, "param" if kind in ("weight", "fp32") else kind).view(shape)


@pytest.mark.parametrize(("world", "form"), READ)
def test_every_element_is_the_one_that_was_saved(saved: Saved, world: str, form: str) -> None:
    arguments, kinds = WORLDS[world].arguments, set()
    names = {name for name, _, _ in _tensors(saved(world, form))}
    for name, kind, held in _tensors(saved(world, form)):
        assert held.equal(_rule(name, kind, held.shape).to(held.dtype)), (name, kind)
        kinds.add((kind, str(held.dtype)))
    weights = "torch.bfloat16" if "--bf16" in arguments else "torch.float32"
    masters = {("fp32", "torch.float32")} if "--bf16" in arguments else set()
    named = (world, form) != ("gated fp32", "torch")  # which has no master that says whose a moment is
    moments = {("exp_avg", "torch.float32"), ("exp_avg_sq", "torch.float32")} if named else set()
    assert kinds == {("weight", weights)} | masters | moments
    experts = "experts.experts." if "--num-experts" in arguments else ""
    assert {f"decoder.layers.{layer}.mlp.{experts}linear_fc1.weight" for layer in range(4)} <= names
    assert ("output_layer.weight" in names) == ("--untie" in arguments)


@pytest.mark.parametrize(
    ("world", "form"), [("gated tp2 pp2", "model_space"), ("gated tp2 pp2", "torch"), ("gated fp32", "plain")]
)
def test_groups_steps_and_counters(saved: Saved, world: str, form: str) -> None:
    told = tools.inspect(str(saved(world, form)))
    assert told.faults == () and told.format == ("Megatron-LM, torch" if form == "torch" else "Megatron-LM, torch_dist")
    assert (told.steps.global_steps, told.steps.global_samples, told.steps.optimizer_steps) == (
        ITERATION,
        SAMPLES_SEEN,
        (STEP,),
    )
    assert [group.hyperparameters["weight_decay"] for group in told.groups] == [0.01, 0.0]
    assert all(len(one.shape) > 1 for one in told.parameters if one.group == 0)
    assert all(len(one.shape) == 1 or one.name.endswith(".bias") for one in told.parameters if one.group == 1)
    assert {one.role for one in told.parameters} == {"trainable"}


def test_the_grid_is_told(saved: Saved) -> None:
    told = [tools.inspect(str(saved(name, "torch"))) for name in ("gated tp2 pp2", "experts ep2 pp2")]
    assert [(one.tp, one.pp, one.ep, one.dp) for one in told] == [(2, 2, None, 1), (1, 2, 2, 2)]


def test_tools_on_a_whole_checkpoint(saved: Saved, tmp_path: Path) -> None:
    """verify finds nothing; what is converted to another format has the fingerprints that the source has."""
    folder = saved("gated tp2 pp2", "model_space")
    assert tools.verify(str(folder), deep=True).faults == ()
    own = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}
    assert None not in own.values()
    for to in ("zero2", "universal", "dcp"):
        tools.convert(str(folder), str(tmp_path / to), to=to, dp=2 if to != "universal" else None)
        made = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(tmp_path / to)).tensors}
        for name, kind in own:
            if kind != "weight":  # of which DCP has the masters
                kept = (name, "weight") if to == "dcp" and kind == "fp32" else (name, kind)
                assert made[kept] == own[name, kind], (to, name, kind)
    tools.convert(str(folder), str(tmp_path / "weights"), to="safetensors")


def test_weights_are_read_where_the_optimizers_states_are_not(releases: Any, tmp_path: Path, caplog: Any) -> None:
    """Shared experts, of which nothing tells where they lie in flat buckets: the same weights as from named states."""
    arguments = f"{DISTRIBUTED}{GATED}{EXPERTS_WHOLE}--moe-shared-expert-intermediate-size 24 "
    saves = [{"save": str(tmp_path / form), **FLAGS[form]} for form in ("buckets", "model_space")]
    releases["0.19.2"].run("format_jobs:save", ranks=1, arguments=arguments, saves=saves)
    folder, named = str(tmp_path / "buckets"), "the optimizer's states are not read: .*shared_experts.linear_fc1.weight"
    (note,), found = tools.inspect(folder).notes, tools.verify(folder)
    assert re.match(named, note) and note in found.notes and found.faults == ()
    with caplog.at_level("WARNING", logger="ds_reshard"):
        ds_reshard.dcp.Reader(folder)
    assert note in caplog.text  # of which a state dict that may be loaded in part would tell nothing
    assert f"A: {note}" in tools.diff(folder, saves[1]["save"]).notes
    with pytest.raises(UnsupportedLayout, match=named):
        tools.convert(folder, str(tmp_path / "zero"), to="zero2", dp=1)
    made = []
    for one in saves:
        tools.convert(one["save"], f"{one['save']} weights", to="safetensors")
        made.append(Path(f"{one['save']} weights", "model.safetensors").read_bytes())
    assert made[0] == made[1]


PAIRS = [(name, *one.formats[at : at + 2]) for name, one in WORLDS.items() for at in range(len(one.formats) - 1)]
PAIRS = [one for one in PAIRS if one[0] != "gated fp32" and {(one[0], one[1]), (one[0], one[2])} <= set(READ)]


@pytest.mark.parametrize(("world", "one", "other"), PAIRS)
def test_two_forms_of_one_state_do_not_differ(saved: Saved, world: str, one: str, other: str) -> None:
    found = tools.diff(str(saved(world, one)), str(saved(world, other)))
    assert {one.state for one in found.tensors} == {"equal"} and found.faults == ()


def test_two_topologies_of_one_state_do_not_differ(saved: Saved) -> None:
    """But in the rows that pad the vocabulary, and the run's arguments."""
    found = tools.diff(str(saved("gated tp2 pp2", "buckets")), str(saved("gated pp2 vp2", "model_space")))
    others = {(one.name.rpartition(".")[0], one.state) for one in found.tensors if one.state != "equal"}
    assert others == {("embedding.word_embeddings", "other shape"), ("output_layer", "other shape")}


def test_what_megatron_saves_shifted_is_found(saved: Saved, tmp_path: Path) -> None:
    """Every tensor of which a master is wrong is named, by verify and before anything is written; no other is."""
    folder, wrong = str(saved(*WRONG)), set()
    for name, kind, held in _tensors(saved(*WRONG)):
        if kind == "fp32" and not held.equal(_rule(name, kind, held.shape)):
            wrong.add(f"{name}[weight]")
    assert wrong
    found = {fault.where for fault in tools.verify(folder).faults}
    assert found == wrong
    with pytest.raises(CheckpointDamaged) as error:
        tools.convert(folder, str(tmp_path / "out"), to="zero2", dp=1)
    assert {fault.where for fault in error.value.faults} == wrong and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["buckets", "model_space", "torch"])
@pytest.mark.parametrize("release", WITH_TRAINING)
def test_a_save_without_the_optimizer_is_weights_alone(releases: Any, release: str, form: str, tmp_path: Path) -> None:
    """Its metadata names a sharding type of states all the same: tools and loads look for none."""
    folder, arguments = tmp_path / "saved", DISTRIBUTED + GATED
    saves = [{"save": str(folder), "no_save_optim": True, **FLAGS[form]}]
    releases[release].run("format_jobs:save", ranks=2, arguments=arguments + TP, saves=saves)
    assert tools.inspect(str(folder)).faults == tools.verify(str(folder), deep=True).faults == ()
    for name, kind, held in _tensors(folder):
        assert kind == "weight" and held.equal(_rule(name, kind, held.shape).to(held.dtype)), name
    tools.convert(str(folder), str(tmp_path / "weights"), to="safetensors")
    more = f"{arguments}--no-load-optim "
    (said,) = releases[release].run("foresee_jobs:foresee", arguments=more, folder=str(folder), world=1)
    assert (said["loads"], said["loader"], said["faults"]) == (True, "ds_reshard", [])
    (told,) = releases[release].run("load_jobs:load", arguments=f"{more}--load {folder}")
    assert {text.split()[0] for text in told["wrong"]} <= {"param", "exp_avg", "exp_avg_sq"} and told["cast"]


def _flipped(folder: Path, form: str) -> None:
    """A byte of each of the optimizer's larger tensors."""
    for file in folder.glob("*/mp_rank_*/distrib_optim.pt"):
        flip(file.name, "data/", each=True)(file.parent)
    for step in folder.glob("iter_*") if form != "torch" else ():
        directory = read_directory(str(step))
        states = [one for key, one in directory.tensors.items() if key.split(".")[0] == "optimizer"]
        objects = [place for key, place in directory.objects.items() if key.split(".")[0] == "optimizer"]
        assert bool(objects) is (form == "buckets"), "its param groups, and the sizes of its buckets"
        for place in (*objects, *(chunk.place for one in states for chunk in one.chunks)):
            assert place is not None
            with open(place.path, "r+b") as file:
                data = file.read()[place.byte_offset :][: place.nbytes]
                file.seek(place.byte_offset + place.nbytes // 2)
                file.write(bytes([data[place.nbytes // 2] ^ 1]))


def _harmed(folder: Path, form: str) -> None:
    """The optimizer's files cut, or where both lie in the same ones its chunks overwritten."""
    for file in folder.glob("*/mp_rank_*/distrib_optim.pt"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for step in folder.glob("iter_*") if form != "torch" else ():
        directory = read_directory(str(step))
        states = [one for key, one in directory.tensors.items() if key.split(".")[0] == "optimizer"]
        objects = [place for key, place in directory.objects.items() if key.split(".")[0] == "optimizer"]
        assert bool(objects) is (form == "buckets"), "its param groups, and the sizes of its buckets"
        for place in (*objects, *(chunk.place for one in states for chunk in one.chunks)):
            assert place is not None
            with open(place.path, "r+b") as file:
                file.seek(place.byte_offset)
                file.write(b"\xff" * place.nbytes)


def _wrong_alone(folder: str) -> list[str]:
    """The weights that torch reads wrong where its state dict has the model alone."""
    source = open_checkpoint(find_listing(folder, None), whole=False, optimizer=False)
    keys = {key.name: at for key, at in source.layout.placements.items() if key.kind == "weight"}
    wanted = {name: torch.zeros(at.shape, dtype=torch_dtype(at.dtype)) for name, at in keys.items()}
    assert wanted
    dcp.load({"model": wanted}, storage_reader=ds_reshard.dcp.Reader(folder))
    return [name for name, one in wanted.items() if not one.equal(_rule(name, "weight", one.shape).to(one.dtype))]


@pytest.mark.parametrize("harmed", [_harmed, _flipped])
@pytest.mark.parametrize("form", ["buckets", "model_space", "torch"])
def test_weights_alone_whatever_the_optimizer_is(
    saved: Saved, releases: Any, form: str, harmed: Any, tmp_path: Path
) -> None:
    """A conversion, preflight, a reader and a load; with the optimizer each is refused."""
    folder, arguments = tmp_path / "saved", f"{DISTRIBUTED}{GATED}"
    shutil.copytree(saved("gated tp2 pp2", form), folder)
    harmed(folder, form)
    with pytest.raises(ReshardError):
        tools.convert(str(folder), str(tmp_path / "whole"), to="dcp")
    for name, at in (("sound", saved("gated tp2 pp2", form)), ("weights", folder)):
        tools.convert(str(at), str(tmp_path / name), to="safetensors")
    assert tools.diff(str(tmp_path / "sound"), str(tmp_path / "weights")).equal
    assert _wrong_alone(str(folder)) == []
    alone = f"{arguments}--no-load-optim "
    (said,) = releases["0.19.2"].run("foresee_jobs:foresee", arguments=alone, folder=str(folder), world=1)
    assert (said["loads"], said["loader"], said["faults"]) == (True, "ds_reshard", []), said["faults"]
    (told,) = releases["0.19.2"].run("load_jobs:load", arguments=f"{alone}--load {folder}")
    assert {text.split()[0] for text in told["wrong"]} <= {"param", "exp_avg", "exp_avg_sq"} and told["cast"]
    (refused,) = releases["0.19.2"].run("load_jobs:refused", arguments=f"{arguments}--load {folder}")
    assert refused["refused"] is not None


# -- bad input ---------------------------------------------------------------------------------------------------------


def _copied(saved: Saved, to: Path) -> Path:
    (step,) = saved("gated tp2 pp2", "model_space").glob("iter_*")
    return Path(shutil.copytree(step, to / step.name))


def test_a_file_that_is_missing(saved: Saved, tmp_path: Path) -> None:
    folder = _copied(saved, tmp_path)
    next(folder.glob("__1_*.distcp")).unlink()
    with pytest.raises(ReshardError, match="__1_"):
        open_checkpoint(find_listing(str(folder), None))


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [('{"sharded_backend": "zarr"}', UnsupportedLayout, "zarr"), ("{}", UnsupportedLayout, "without the paths")],
)
def test_a_folder_of_another_backend(saved: Saved, tmp_path: Path, text: str, error: Any, said: str) -> None:
    folder = _copied(saved, tmp_path)
    (folder / "metadata.json").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=said):
        tools.convert(str(folder), str(tmp_path / "out"), to="zero2", dp=1)


@pytest.mark.parametrize(
    ("left", "text", "error", "said"),
    [
        ("common_state", '{"sharded_backend": "zarr"}', UnsupportedLayout, "format zarr"),
        ("__", '{"sharded_backend": "torch_dist"}', CheckpointNotFound, "the save did not end"),
    ],
)
def test_a_folder_without_a_directory(
    saved: Saved, tmp_path: Path, left: str, text: str, error: Any, said: str
) -> None:
    """Which the tracker names: the format's name, or that it is a part, and not that nothing is there."""
    folder = _copied(saved, tmp_path)
    for file in folder.iterdir():
        if not file.name.startswith(left):
            file.unlink()
    (folder / "metadata.json").write_text(text, encoding="utf-8")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(ITERATION), encoding="utf-8")
    for path in (tmp_path, folder):
        with pytest.raises(error, match=said):
            tools.inspect(str(path))


@pytest.mark.parametrize("key", ["output_layer.weight", "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"])
@pytest.mark.parametrize("change", ["hole", "overlap"])
def test_chunks_that_leave_a_hole_or_overlap(saved: Saved, tmp_path: Path, key: str, change: str) -> None:
    folder = _copied(saved, tmp_path)
    changed_chunks(folder, key, lambda chunks: chunks.pop() if change == "hole" else chunks.append(chunks[0]))
    with pytest.raises(CheckpointDamaged, match=re.escape(key)):
        open_checkpoint(find_listing(str(folder), None))


def exchanged_masters(saved: Saved, to: Path) -> str:
    """A copy in which two parameters of one size have each other's masters."""
    folder = _copied(saved, to)
    metadata = FileSystemReader(folder).read_metadata()
    one, other = (f"optimizer.state.param.{name}.weight" for name in ("output_layer", "embedding.word_embeddings"))
    places = metadata.storage_data
    for index in [index for index in places if index.fqn == one]:
        twin = next(held for held in places if held.fqn == other and held.offset == index.offset)
        places[index], places[twin] = places[twin], places[index]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return str(folder)


def test_masters_that_are_not_of_their_weights(saved: Saved, tmp_path: Path) -> None:
    """As Megatron-LM itself saves them where a bucket is padded: verify and every load find it; weights are had."""
    folder = exchanged_masters(saved, tmp_path)
    wrong = {"output_layer.weight[weight]", "embedding.word_embeddings.weight[weight]"}
    assert {fault.where for fault in tools.verify(folder).faults} == wrong
    for attempt in (
        lambda: tools.convert(folder, str(tmp_path / "out"), to="zero2", dp=1),
        lambda: fingerprint(folder),
        lambda: tools.diff(folder, folder),
    ):
        with pytest.raises(CheckpointDamaged) as error:
            attempt()
        assert {fault.where for fault in error.value.faults} == wrong
    assert not (tmp_path / "out").exists()
    tools.convert(folder, str(tmp_path / "weights"), to="safetensors")
    assert _wrong_alone(folder) == []


@pytest.mark.parametrize(
    ("kind", "numel", "said"), [("param", 256, "not the cast"), ("exp_avg", 16, "not the same on each rank")]
)
def test_buckets_in_another_order(saved: Saved, tmp_path: Path, kind: str, numel: int, said: str) -> None:
    """Of two parameters of one size exchanged in a bucket the masters tell, and what ranks hold twice."""
    (step,) = saved("gated tp2 pp2", "buckets").glob("iter_*")
    folder = Path(shutil.copytree(step, tmp_path / step.name))
    metadata = FileSystemReader(folder).read_metadata()
    key = f"dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{kind}"
    (full,) = (name for name in metadata.state_dict_metadata if name.endswith(key))
    chunks = [one for one in metadata.state_dict_metadata[full].chunks if one.sizes.numel() == numel]
    one, other = (next(at for at in metadata.storage_data if at == MetadataIndex(full, c.offsets)) for c in chunks[:2])
    places = metadata.storage_data
    places[one], places[other] = places[other], places[one]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert tools.inspect(str(folder)).faults == ()
    with pytest.raises(CheckpointDamaged, match=said):
        fingerprint(str(folder))
    assert any(said in fault.what for fault in tools.verify(str(folder)).faults)


@pytest.mark.parametrize("lacking", ["bucket", "sizes"])
def test_buckets_that_are_missing(saved: Saved, tmp_path: Path, lacking: str) -> None:
    (step,) = saved("gated tp2 pp2", "buckets").glob("iter_*")
    folder = Path(shutil.copytree(step, tmp_path / step.name))
    metadata = FileSystemReader(folder).read_metadata()
    last = "bucket_idx_0.exp_avg" if lacking == "bucket" else "per_bucket_numel/shard_0_1"
    (gone,) = (key for key in metadata.state_dict_metadata if "dp_group_idx_1." in key and key.endswith(last))
    del metadata.state_dict_metadata[gone]
    places = metadata.storage_data
    metadata.storage_data = {index: place for index, place in places.items() if index.fqn != gone}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match=r"dp_group_idx_1|exp_avg"):
        open_checkpoint(find_listing(str(folder), None))


def _copied_torch(saved: Saved, to: Path) -> Path:
    (step,) = saved("gated tp2 pp2", "torch").glob("iter_*")
    return Path(shutil.copytree(step, to / step.name))


def test_all_buckets_are_missing(saved: Saved, tmp_path: Path) -> None:
    """And the run that saved them was to save the optimizer: the folder is damaged, not one of weights alone."""
    (step,) = saved("gated tp2 pp2", "buckets").glob("iter_*")
    folder = Path(shutil.copytree(step, tmp_path / step.name))
    metadata = FileSystemReader(folder).read_metadata()
    for held in (metadata.state_dict_metadata, metadata.storage_data):
        for one in [one for one in held if "optimizer." in getattr(one, "fqn", one)]:
            del held[one]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match="the buckets of model chunk 0 are others"):
        open_checkpoint(find_listing(str(folder), None))


@pytest.mark.parametrize("gone", ["mp_rank_01_001", "mp_rank_00_001/distrib_optim.pt"])
def test_a_rank_that_is_missing(saved: Saved, tmp_path: Path, gone: str) -> None:
    folder = _copied_torch(saved, tmp_path)
    shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
    with pytest.raises(CheckpointNotFound, match=gone):
        open_checkpoint(find_listing(str(folder), None))


def test_a_folder_that_the_arguments_do_not_call_for(saved: Saved, tmp_path: Path) -> None:
    folder = _copied_torch(saved, tmp_path)
    shutil.copytree(folder / "mp_rank_01_001", folder / "mp_rank_02_001")
    with pytest.raises(CheckpointDamaged, match="mp_rank_02_001"):
        open_checkpoint(find_listing(str(folder), None))


@pytest.mark.parametrize(("ranks", "stages"), [(1, ""), (2, PP)])
def test_layers_that_are_no_decoders(releases: Any, tmp_path: Path, ranks: int, stages: str) -> None:
    """Those of several stages have the same names, and are not taken for copies of each other."""
    saves = [{"save": str(tmp_path), **FLAGS["torch"]}]
    releases["0.19.2"].run("format_jobs:save_bert", ranks=ranks, arguments=DISTRIBUTED + stages, saves=saves)
    for told in (tools.inspect(str(tmp_path)), tools.verify(str(tmp_path), deep=True)):
        assert {fault.error for fault in told.faults} == ({"UnsupportedLayout"} if stages else set())
        assert all(fault.what.startswith("encoder.layers.0.") for fault in told.faults)


def test_an_encoder_is_the_same_in_either_format(releases: Any, tmp_path: Path) -> None:
    """Names of its layers, and the states of layers without which Megatron loads no `torch_dist` of it."""
    saves = [{"save": str(tmp_path / form), **FLAGS[form]} for form in ("torch", "model_space")]
    releases["0.19.2"].run("format_jobs:save_bert", arguments=DISTRIBUTED, saves=saves)
    folders = [str(tmp_path / form) for form in ("torch", "model_space")]
    kept = [{one.name for one in tools.inspect(folder).parameters} for folder in folders]
    assert kept[0] == kept[1] and "encoder.layers.3.mlp.linear_fc1.layer_norm_weight" in kept[0]
    tools.convert(folders[0], str(tmp_path / "out"), to="megatron")
    (saved,), (made,) = ((tmp_path / name).glob("iter_*") for name in ("model_space", "out"))
    states = [{key for key in read_directory(str(one)).objects if "_extra_state" in key} for one in (saved, made)]
    assert states[0] == states[1] and "output_layer._extra_state/shard_0_1" in states[0]


def test_an_empty_folder_is_no_ranks(saved: Saved, tmp_path: Path) -> None:
    """Ranks that write nothing leave one, where experts are not cut as the dense parameters are."""
    folder = _copied_torch(saved, tmp_path)
    (folder / "mp_rank_02_001").mkdir()
    assert tools.verify(str(folder)).faults == ()


@pytest.mark.parametrize(("one", "other"), [("mp_rank_00_000", "mp_rank_01_000"), ("mp_rank_00_000", "mp_rank_00_001")])
def test_two_folders_exchanged(saved: Saved, tmp_path: Path, one: str, other: str) -> None:
    folder = _copied_torch(saved, tmp_path)
    (folder / one).rename(folder / "held")
    (folder / other).rename(folder / one)
    (folder / "held").rename(folder / other)
    with pytest.raises(CheckpointDamaged, match="another rank than its folder"):
        open_checkpoint(find_listing(str(folder), None))


@pytest.mark.parametrize(("whose", "said"), [("mp_rank_01_000", "not the cast"), ("mp_rank_00_001", "another size")])
def test_states_of_another_rank(saved: Saved, tmp_path: Path, whose: str, said: str) -> None:
    """Their size tells it, or their masters."""
    folder = _copied_torch(saved, tmp_path)
    (folder / "mp_rank_00_000" / "distrib_optim.pt").write_bytes((folder / whose / "distrib_optim.pt").read_bytes())
    with pytest.raises(CheckpointDamaged, match=said):
        fingerprint(str(folder))


def test_states_of_another_iteration(saved: Saved, tmp_path: Path) -> None:
    """A file of moments of one save beside the weights of a later one: their masters tell it."""
    folder = _copied_torch(saved, tmp_path)
    state: Any = open_checkpoint(find_listing(str(folder), None)).state  # type: ignore[attr-defined]
    for extents in state.extents:  # the weights go on, one bit of an exponent each
        extent = extents.get("decoder.layers.0.mlp.linear_fc2.weight[weight]")
        if extent is not None:
            with open(extent.path, "r+b") as file:
                file.seek(extent.byte_offset + 1)
                (byte,) = file.read(1)
                file.seek(extent.byte_offset + 1)
                file.write(bytes([byte ^ 1]))
    assert any("not the cast" in fault.what for fault in tools.verify(str(folder)).faults)
    with pytest.raises(CheckpointDamaged, match="not the cast"):
        tools.convert(str(folder), str(tmp_path / "out"), to="megatron")


@pytest.mark.parametrize("kind", ["weight", "exp_avg"])
def test_copies_of_ranks_that_differ(saved: Saved, tmp_path: Path, kind: str) -> None:
    """Of what tensor-parallel ranks hold whole; of weights also where no state is used."""
    folder = _copied_torch(saved, tmp_path)
    state: Any = open_checkpoint(find_listing(str(folder), None)).state  # type: ignore[attr-defined]
    extent = state.extents[-1][f"decoder.final_layernorm.weight[{kind}]"]
    with open(extent.path, "r+b") as file:
        file.seek(extent.byte_offset)
        (byte,) = file.read(1)
        file.seek(extent.byte_offset)
        file.write(bytes([byte ^ 1]))
    to = "safetensors" if kind == "weight" else "universal"
    with pytest.raises(CheckpointDamaged, match="not the same on each rank"):
        tools.convert(str(folder), str(tmp_path / "out"), to=to)
