"""Maps that change shapes: values are those of numpy's reshapes, whatever the layout; wrong maps are refused."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_plan import SOME, Arrangement, Checkpoint, raw

import ds_reshard
from ds_reshard.cli.main import main
from ds_reshard.containers.crc import crc32
from ds_reshard.containers.digests import MAP_OF_NAMES, digests
from ds_reshard.errors import ConfigError, ReshardError
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.content import Content, TensorSource
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.model.views import evaluate, parse_view
from ds_reshard.operations import Reading
from ds_reshard.operations.name_map import read_name_map, shipped_maps
from ds_reshard.operations.shape_map import Coming, Mapped, ShapeMap, coming_run
from ds_reshard.operations.values import largest_values
from ds_reshard.planning.plan import Planner

KINDS = {"weight": ElementType.BFLOAT16, "fp32": ElementType.FLOAT32, "exp_avg": ElementType.BFLOAT16}
LLAMA: dict[str, Any] = {
    "sides": ["megatron", "transformers"],
    "numbers": {"layers": 2, "g": 2, "q": 3, "d": 2, "f": 5, "h": 4, "v": 7, "pad": 3},
    "indices": {"l": "layers"},
    "entries": [
        {"megatron": "embedding.weight", "transformers": "embed.weight"},
        {"megatron": "layers.{l}.qkv.weight : (g q+1+1 d) h", "transformers": ["{l}.q", "{l}.k", "{l}.v"]},
        {
            "megatron": "layers.{l}.qkv.bias : (g q+1+1 d)",
            "transformers": ["{l}.qb", "{l}.kb", "{l}.vb"],
            "optional": True,
        },
        {"megatron": "layers.{l}.fc1.weight : f+f h", "transformers": ["{l}.gate", "{l}.up"]},
        {"megatron": "layers.{l}.rotary : (g d s) h", "transformers": ["{l}.rotary : (g s d) h"]},
    ],
}
LLAMA["numbers"]["s"] = 2
EXPERTS: dict[str, Any] = {
    "sides": ["4", "5"],
    "numbers": {"e": 3, "f": 2, "h": 4},
    "indices": {"e": "e"},
    "entries": [
        {"5": "gate_up : e f+f h", "4": ["{e}.w1", "{e}.w3"]},
        {"5": "down : e h f", "4": ["{e}.w2"]},
        {"5": "router", "4": "router.old"},
    ],
}


def megatron(bias: bool = True) -> dict[str, tuple[int, ...]]:
    one = {"qkv.weight": (20, 4), "fc1.weight": (10, 4), "rotary": (8, 4), **({"qkv.bias": (20,)} if bias else {})}
    return {"embedding.weight": (7, 4)} | {f"layers.{n}.{name}": shape for n in (0, 1) for name, shape in one.items()}


def split_by_numpy(values: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """The tensors of Megatron's side as those of transformers'."""
    made = {"embed.weight": values["embedding.weight"]}
    for n in (0, 1):
        for old, new in (("weight", ""), ("bias", "b")):
            if f"layers.{n}.qkv.{old}" in values:
                rows = values[f"layers.{n}.qkv.{old}"].reshape(2, 5, 2, -1)
                tail = (4,) if old == "weight" else ()
                made |= {
                    f"{n}.{name}{new}": part.reshape(-1, *tail)
                    for name, part in (("q", rows[:, :3]), ("k", rows[:, 3:4]), ("v", rows[:, 4:]))
                }
        made[f"{n}.gate"], made[f"{n}.up"] = values[f"layers.{n}.fc1.weight"].reshape(2, 5, 4)
        made[f"{n}.rotary"] = values[f"layers.{n}.rotary"].reshape(2, 2, 2, 4).swapaxes(1, 2).reshape(8, 4)
    return made


def truth_of(shapes: dict[str, tuple[int, ...]]) -> dict[TensorKey, torch.Tensor]:
    truth, at = dict[TensorKey, torch.Tensor](), 0
    for kind, dtype in KINDS.items():
        for name, shape in shapes.items():
            numel = prod(shape)
            whole = torch.arange(at, at + numel).reshape(shape)
            truth[TensorKey(name, kind)] = (whole % 251).to(torch_dtype(dtype))
            at += numel
    return truth


def content_of(layout: Layout, groups: tuple[tuple[str, ...], ...], **more: Any) -> Content:
    tensors = {k: TensorSource(shape=p.shape, dtype=p.dtype, origin=k) for k, p in layout.placements.items()}
    facts = OptimizerFacts(
        groups=tuple(GroupFacts(members=one, hyperparameters={"lr": 0.1}) for one in groups),
        scalars={name: {"step": 7} for one in groups for name in one},
    )
    return Content(folder="saved", ranks=1, tensors=tensors, facts=facts, **more)


def read_all(index: Index, mapped: Mapped) -> dict[TensorKey, torch.Tensor]:
    """Every tensor of the content, read whole by the planner and the executor."""
    made, wants = dict[TensorKey, Placement](), dict[TensorKey, TensorKey]()
    for key, one in mapped.content.tensors.items():
        cut = Cut(chunk=max(1, prod(one.shape)))
        made[key] = Placement(key, one.shape, one.dtype, "run", str(key), cut, Box.whole(one.shape))
        wants[key] = one.origin
    plan = Planner(index, Layout(made, {"run": 1}), wants).plan(0, sizes={})
    memory = {str(k): torch.empty(prod(p.shape), dtype=torch_dtype(p.dtype)) for k, p in made.items()}
    executor = ThreadExecutor(threads=1, memory_nbytes=1 << 20, checksum=True)
    outcome = executor.execute(plan, {name: TensorTarget(one) for name, one in memory.items()})
    assert not outcome.faults and not index.faults, (outcome.faults, index.faults)
    return {key: memory[str(key)].reshape(placement.shape) for key, placement in made.items()}


def mapped_values(shapes: dict[str, tuple[int, ...]], held: dict[str, Any], rule: str, dp: int, groups: Any) -> Any:
    truth = truth_of(shapes)
    arrangement = Arrangement(groups=groups, rule=rule, dp=dp, kinds=KINDS)
    layout = arrangement.layout(shapes)
    with tempfile.TemporaryDirectory() as folder:
        source = Checkpoint(folder, layout, arrangement.sizes(shapes), truth, seed=1)
        mapped = read_name_map(held).apply(content_of(layout, groups), layout, Coming())
        assert mapped.faults == ()
        return truth, read_all(Index(mapped.layout, source), mapped), mapped


@SOME
@given(rule=st.sampled_from(["flat", "sub", "gaps"]), dp=st.integers(1, 5), seed=st.randoms(), bias=st.booleans())
def test_a_tensor_is_split_whatever_the_layout(rule: str, dp: int, seed: Any, bias: bool) -> None:
    shapes = megatron(bias)
    names = [*shapes]
    seed.shuffle(names)
    groups = (tuple(names[:4]), tuple(names[4:]))
    truth, found, mapped = mapped_values(shapes, LLAMA, rule, dp, groups)
    for kind in KINDS:
        expected = split_by_numpy({key.name: one.float().numpy() for key, one in truth.items() if key.kind == kind})
        assert {key.name for key in found if key.kind == kind} == set(expected)
        for name, values in expected.items():
            assert numpy.array_equal(found[TensorKey(name, kind)].float().numpy(), values), (name, kind)
    facts = mapped.content.facts
    assert facts is not None
    assert sorted(name for group in facts.groups for name in group.members) == sorted(expected)
    assert facts.scalars.keys() == set(expected)


class Boxes:
    """A shard source with a family for each tensor, and a shard for each of its boxes, as torch_dist has them."""

    def __init__(self, folder: str, truth: dict[TensorKey, torch.Tensor], boxes: dict[TensorKey, list[Box]]) -> None:
        self.extents, placements = dict[tuple[str, int], dict[str, Extent]](), dict[TensorKey, Placement]()
        for number, (key, whole) in enumerate(truth.items()):
            dtype = KINDS[key.kind]
            for shard, box in enumerate(boxes[key]):
                path = f"{folder}/{number}-{shard}"
                held = whole[tuple(slice(a, a + s) for a, s in zip(box.offset, box.size, strict=True))]
                data = raw(held)
                Path(path).write_bytes(data)
                record = Record(path=path, byte_offset=0, nbytes=len(data), crc32=crc32(data))
                extent = Extent(record=record, byte_offset=0, dtype=dtype, numel=held.numel())
                self.extents[f"{key}", shard] = {"data": extent}
            placements[key] = chunked_placement(
                key, tuple(whole.shape), dtype, boxes[key], family=f"{key}", buffer="data"
            )
        self.layout = Layout(placements, {f"{key}": len(boxes[key]) for key in truth})

    def buffers(self, family: str, shard: int) -> dict[str, Extent]:
        return self.extents[family, shard]


def boxed(truth: dict[TensorKey, torch.Tensor], rng: Any) -> dict[TensorKey, list[Box]]:
    """Each tensor whole, or cut along one of its axes."""
    found = {}
    for key, whole in truth.items():
        shape, axis = tuple(whole.shape), rng.randrange(max(1, whole.ndim))
        count = rng.randint(1, min(4, shape[axis])) if shape else 1
        found[key] = [Box.chunk(shape, axis, n, count) for n in range(count)] if count > 1 else [Box.whole(shape)]
        found[key] = [box for box in found[key] if box.numel]
    return found


def moved(truth: dict[TensorKey, torch.Tensor], held: dict[str, Any], rng: Any) -> tuple[Any, Mapped]:
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, boxed(truth, rng))
        names = tuple(dict.fromkeys(key.name for key in truth))
        mapped = read_name_map(held).apply(content_of(source.layout, (names,)), source.layout, Coming())
        assert mapped.faults == ()
        return read_all(Index(mapped.layout, source), mapped), mapped


@SOME
@given(rng=st.randoms(use_true_random=False), held=st.sampled_from(["llama", "experts", "flat"]))
def test_there_and_back_is_equal_whatever_boxes_tensors_lie_in(rng: Any, held: str) -> None:
    """What is joined is what was split, cut along any axis on the way."""
    if held == "llama":
        shapes, maps = megatron(), LLAMA
    elif held == "flat":
        shapes, maps = {"whole": (3, 4, 2)}, {"sides": ["a", "b"], "numbers": {"e": 3, "f": 4, "h": 2}}
        maps["entries"] = [{"a": "whole : e f h", "b": ["rows : (e f) h"]}]
    else:
        shapes, maps = {"gate_up": (3, 4, 4), "down": (3, 4, 2), "router": (3, 4)}, EXPERTS
    truth = truth_of(shapes)
    split, _ = moved(truth, maps, rng)
    if held == "experts":
        stacked = torch.stack(
            [torch.cat((split[TensorKey(f"{e}.w1", "fp32")], split[TensorKey(f"{e}.w3", "fp32")])) for e in range(3)]
        )
        assert torch.equal(stacked, truth[TensorKey("gate_up", "fp32")])
        assert torch.equal(split[TensorKey("2.w2", "exp_avg")], truth[TensorKey("down", "exp_avg")][2])
    joined, mapped = moved(split, maps, rng)
    assert joined.keys() == truth.keys()
    for key, values in truth.items():
        assert torch.equal(joined[key], values), key
    facts = mapped.content.facts
    assert facts is not None
    assert facts.scalars == {name: {"step": 7} for name in shapes}
    assert sorted(facts.groups[0].members) == sorted(shapes)


def refused(held: dict[str, Any], shapes: dict[str, tuple[int, ...]], groups: Any = None, **more: Any) -> str:
    """Everything that is wrong with a map and tensors of these shapes."""
    truth = truth_of(shapes)
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, {key: [Box.whole(tuple(whole.shape))] for key, whole in truth.items()})
        try:
            content = content_of(source.layout, groups or (tuple(shapes),), **more)
            return "\n".join(
                fault.line() for fault in read_name_map(held).apply(content, source.layout, Coming()).faults
            )
        except ReshardError as error:
            return str(error)


def parts() -> dict[str, tuple[int, ...]]:
    return {f"{e}.{w}": (2, 4) if w != "w2" else (4, 2) for e in range(3) for w in ("w1", "w3", "w2")} | {
        "router.old": (3, 4)
    }


def changed(held: dict[str, Any], **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(held)) | more


WRONG = {
    "a number that nothing tells": (
        changed(EXPERTS, numbers={"e": 3, "f": "width", "h": 4}),
        parts(),
        "needs numbers of the model that no file tells: width",
    ),
    "a number that leaves a rest": (
        changed(EXPERTS, numbers={"e": 3, "f": "h / e", "h": 4}),
        parts(),
        "4 is no multiple of 3",
    ),
    "another number of experts": (
        changed(EXPERTS, numbers={"e": 4, "f": 2, "h": 4}),
        parts(),
        r"3.w1: is in the map, and not in the source",
    ),
    "another shape": (
        changed(EXPERTS, numbers={"e": 3, "f": 3, "h": 4}),
        parts(),
        "0.w1: does not have the shape that the map's numbers give",
    ),
    "a name of neither side": (EXPERTS, {**parts(), "bias": (3,)}, "bias: is in the source and not in the map"),
    "names of neither side at all": (EXPERTS, {"a": (3,)}, "has names of neither side of the map"),
    "names of both sides": (EXPERTS, {**parts(), "router": (3, 4)}, "has names of both sides"),
    "an entry twice": (
        changed(EXPERTS, entries=[*EXPERTS["entries"], EXPERTS["entries"][1]]),
        parts(),
        "is given twice in the map",
    ),
    "a factor that a part lacks": (
        changed(EXPERTS, entries=[{"5": "down : e h f", "4": ["{e}.w2 : h"]}, *EXPERTS["entries"][::2]]),
        parts(),
        "do not have the same factors",
    ),
    "two names for one part": (
        changed(EXPERTS, entries=[{"5": "down : e h f", "4": ["{e}.w2", "{e}.w4"]}]),
        parts(),
        "2 names beside a view of 1 parts",
    ),
    "an unknown key": (changed(EXPERTS, entry=[]), parts(), "unknown key: entry"),
    "no sides": (changed(EXPERTS, sides=["4"]), parts(), 'has no "sides"'),
    "a transposed part of single elements": (
        changed(EXPERTS, entries=[{"5": "down : h f e", "4": ["{e}.w2 : f h"]}, *EXPERTS["entries"][::2]]),
        parts(),
        "no two elements of it lie together",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_map_is_refused(case: str) -> None:
    held, shapes, why = WRONG[case]
    assert why in refused(held, shapes)


def test_of_two_expressions_the_one_whose_names_are_known_is_taken() -> None:
    held = changed(EXPERTS, numbers={"e": 3, "f": "width | 6 / e", "h": 4})
    assert refused(held, parts()) == ""
    held = changed(EXPERTS, numbers={"e": 3, "f": "6 / e | width", "h": 4, "width": 9})
    assert refused(held, parts()) == ""
    assert "no file tells: width" in refused(changed(EXPERTS, numbers={"e": 3, "f": "width | depth", "h": 4}), parts())


def test_rotary_rows_that_are_not_interleaved_are_refused_for_deepseek() -> None:
    held = {"map": "deepseek-v3-megatron", "numbers": {"first_k_dense_replace": 1}}
    said = refused(held, {"decoder.final_layernorm.weight": (3,)}, objects={("args",): {"rope_interleave": False}})
    assert "rope_interleave: is not what the map was written for" in said


@pytest.mark.parametrize(
    ("frequency", "dense"),
    [([0, 0, 1, 1], 2), ([1, 1], 0), *(((one, None)) for one in ([0, 1, 0, 1], [1, 0], [0, 2], [0, 0], [[1]], 2, "1"))],
)
def test_dense_layers_come_first_if_a_list_of_megatron_says_so(frequency: Any, dense: int | None) -> None:
    """A list of another form tells no number, and none is guessed."""
    held = small([{"a": "dense.{k}", "b": "{k}"}, {"a": "other", "b": "o"}], {"k": "first_k_dense_replace"})
    held["indices"] = {"k": "k"}
    shapes = {f"dense.{k}": (3,) for k in range(dense or 0)} | {"other": (3,)}
    said = refused(held, shapes, objects={("args",): {"moe_layer_freq": frequency}})
    assert said == "" if dense is not None else "no file tells: first_k_dense_replace" in said


def test_the_tensors_of_a_refused_entry_are_not_said_to_be_in_no_entry() -> None:
    held, shapes, _ = WRONG["a transposed part of single elements"]
    assert refused(held, shapes).count("\n") == 0


def test_what_is_joined_agrees() -> None:
    """Param groups, steps, and states; all that is wrong is told."""
    names = tuple(parts())
    apart = (names[:1], names[1:])
    assert refused(EXPERTS, parts(), apart) == ""  # two groups with equal values
    shapes = parts()
    truth = truth_of(shapes)
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, {key: [Box.whole(tuple(whole.shape))] for key, whole in truth.items()})
        content = content_of(source.layout, apart)
        assert content.facts is not None
        first, second = content.facts.groups
        groups = (GroupFacts(members=first.members, hyperparameters={"lr": 0.2}), second)
        scalars = {**content.facts.scalars, "1.w2": {"step": 8}}
        tensors = {key: one for key, one in content.tensors.items() if key != TensorKey("1.w3", "exp_avg")}
        wrong = replace(content, facts=OptimizerFacts(groups=groups, scalars=scalars), tensors=tensors)
        faults = [fault.line() for fault in read_name_map(EXPERTS).apply(wrong, source.layout, Coming()).faults]
    assert len(faults) == 2, faults
    assert "gate_up: would be made of tensors with other states or types" in faults[0]
    assert "down: would be made of parameters whose optimizer values differ" in faults[1]


def test_groups_with_other_values_are_not_joined() -> None:
    """Nor what one trains and another does not; what would make them agree is told."""
    shapes = {"0.w1": (2, 4), "0.w3": (2, 4), "0.w2": (4, 2), "router.old": (1, 4)}
    held = changed(EXPERTS, numbers={"e": 1, "f": 2, "h": 4})
    truth = truth_of(shapes)
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, {key: [Box.whole(tuple(whole.shape))] for key, whole in truth.items()})
        content = content_of(source.layout, (("0.w1",), ("0.w3", "0.w2", "router.old")))
        assert content.facts is not None
        first, second = content.facts.groups
        decayed = GroupFacts(members=first.members, hyperparameters={"lr": 0.1, "weight_decay": 0.1})
        for groups, found in (((decayed, second), "0.w1: group 0; 0.w3: group 1"), ((second,), "0.w1: not trained")):
            scalars = {name: {"step": 7} for name in shapes}
            wrong = replace(content, facts=OptimizerFacts(groups=groups, scalars=scalars))
            (fault,) = read_name_map(held).apply(wrong, source.layout, Coming()).faults
            assert fault.where == "gate_up" and "of groups that differ" in fault.what and found in fault.found


def llama_content(**more: Any) -> tuple[Content, Layout]:
    """A content with the names of Megatron-LM's Llama of one layer, in one file."""
    layer = "decoder.layers.0."
    shapes = {
        "embedding.word_embeddings.weight": (10, 8),
        f"{layer}self_attention.linear_qkv.weight": (16, 8),
        f"{layer}self_attention.linear_proj.weight": (8, 8),
        f"{layer}mlp.linear_fc1.weight": (12, 8),
        f"{layer}mlp.linear_fc2.weight": (8, 6),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}pre_mlp_layernorm.weight": (8,),
        "decoder.final_layernorm.weight": (8,),
    }
    layout = Arrangement(groups=(tuple(shapes),), rule="flat", dp=1, kinds=KINDS).layout(shapes)
    return content_of(layout, (tuple(shapes),), **more), layout


ARGUMENTS = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2},
    **{"ffn_hidden_size": 6, "padded_vocab_size": 10, "group_query_attention": True, "rotary_interleaved": False},
}


def test_numbers_come_from_the_arguments_that_were_saved() -> None:
    content, layout = llama_content(objects={("args",): ARGUMENTS})
    mapped = read_name_map("llama-megatron").apply(content, layout, Coming())
    assert mapped.faults == ()
    assert mapped.content.weights["model.layers.0.self_attn.q_proj.weight"].shape == (8, 8)
    assert mapped.content.weights["model.layers.0.self_attn.k_proj.weight"].shape == (4, 8)
    assert mapped.content.weights["model.layers.0.input_layernorm.weight"].shape == (8,)


def test_numbers_come_from_a_config_beside_the_files_or_are_given(tmp_path: Path) -> None:
    """Two head counts fit the same shapes, so they are never guessed."""
    content, layout = llama_content()
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 6}
    (fault,) = read_name_map("llama-megatron").apply(content, layout, Coming()).faults
    assert "no file tells: num_hidden_layers, hidden_size, num_key_value_heads" in fault.what
    assert '"map": "llama-megatron", "numbers": {"num_hidden_layers": ...' in fault.mend
    given = read_name_map({"map": "llama-megatron", "numbers": {**config, "num_key_value_heads": 2, "head_dim": 2}})
    assert given.apply(content, layout, Coming()).faults == ()
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}), encoding="utf-8")
    beside = replace(content, folder=str(tmp_path / "global_step3"))
    assert read_name_map("llama-megatron").apply(beside, layout, Coming()).faults == ()
    (fault,) = given.with_numbers({"num_attention_heads": 6}).apply(beside, layout, Coming()).faults
    assert "is another number in the checkpoint or the run than in the map" in fault.what


@pytest.mark.parametrize(
    ("name", "value"), [("rotary_interleaved", True), ("apply_layernorm_1p", True), ("attention_output_gate", True)]
)
def test_arguments_that_change_the_meaning_of_rows_are_refused(name: str, value: Any) -> None:
    """By name, as the shapes would fit; a map that was written for them is taken, and no other then."""
    content, layout = llama_content(objects={("args",): {**ARGUMENTS, name: value}})
    faults = read_name_map("llama-megatron").apply(content, layout, Coming()).faults
    assert [fault.where for fault in faults] == [name] and "was not written for it" in faults[0].what
    names = Path(ds_reshard.__file__).parent / "maps" / "llama-megatron.json"
    own = read_name_map({**json.loads(names.read_text("utf-8")), "for": {name: value}})
    assert own.apply(content, layout, Coming()).faults == ()
    plain, layout = llama_content(objects={("args",): ARGUMENTS | {name: False}})
    (fault,) = own.apply(plain, layout, Coming()).faults
    assert fault.where == name and "is not what the map was written for" in fault.what


def test_of_two_names_that_of_the_coming_run_is_taken() -> None:
    content, layout = llama_content(objects={("args",): ARGUMENTS})
    there = read_name_map("llama-megatron").apply(content, layout, Coming())
    first, _ = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.input_layernorm.weight"
    back = read_name_map("llama-megatron").apply(there.content, there.layout, Coming())
    assert first in back.content.weights and back.faults == ()
    again = read_name_map("llama-megatron").apply(there.content, there.layout, coming_run(content))
    assert again.content.weights.keys() == content.weights.keys()


def test_what_is_tied_stays_tied_if_it_is_whole() -> None:
    shapes = parts() | {"head": (3, 4)}
    names = tuple(shapes)
    kept = changed(EXPERTS, same=True)
    truth = truth_of(shapes)
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, {key: [Box.whole(tuple(whole.shape))] for key, whole in truth.items()})
        content = content_of(source.layout, (names,), tied={"other": "router.old", "copy": "head"})
        mapped = read_name_map(kept).apply(content, source.layout, Coming())
        assert mapped.faults == () and dict(mapped.content.tied) == {"other": "router", "copy": "head"}
        wrong = replace(content, tied={"other": "1.w1"})
        (fault,) = read_name_map(kept).apply(wrong, source.layout, Coming()).faults
        assert fault.where == "1.w1" and "is tied to other" in fault.what


PADDED: dict[str, Any] = {
    "sides": ["a", "b"],
    "numbers": {"v": 3, "pad": 2, "h": 4, "g": 2, "q": 3, "d": 2},
    "entries": [{"a": "table : v+pad h", "b": ["rows", None]}, {"a": "qkv : (g q+pad+1 d) h", "b": ["q", None, "v"]}],
}


@SOME
@given(rng=st.randoms(use_true_random=False))
def test_rows_of_padding_are_left_out_and_come_back_as_zeros(rng: Any) -> None:
    """Whatever boxes tensors lie in; `padding` places the elements that are left out, of each kind."""
    truth = truth_of({"table": (5, 4), "qkv": (24, 4)})
    with tempfile.TemporaryDirectory() as folder:
        source = Boxes(folder, truth, boxed(truth, rng))
        mapped = read_name_map(PADDED).apply(content_of(source.layout, (("table", "qkv"),)), source.layout, Coming())
        notes = [f"left out: {n} elements of {name} that the map says are padding" for n, name in MADE_OF]
        assert mapped.faults == () and sorted(mapped.content.notes) == sorted(notes)
        for note, name in zip(notes, ("table", "qkv"), strict=True):
            largest = largest_values(Index(mapped.layout, source), mapped.padding[note], Reading(threads=1))
            assert {key.kind: value for key, value in largest.items()} == {
                kind: float(padding(truth, name, kind).double().max()) for kind in KINDS
            }
        split = read_all(Index(mapped.layout, source), mapped)
    joined, mapped = moved(split, PADDED, rng)
    notes = [f"made of zeros: {n} elements of {name} that the map says are padding" for n, name in MADE_OF]
    assert sorted(mapped.content.notes) == sorted(notes) and joined.keys() == truth.keys()
    for key in truth:
        padding(truth, key.name, key.kind).zero_()
        assert torch.equal(joined[key], truth[key]), key


MADE_OF = ((8, "table"), (32, "qkv"))


def padding(truth: dict[TensorKey, torch.Tensor], name: str, kind: str) -> torch.Tensor:
    """The elements that PADDED leaves out of a tensor."""
    whole = truth[TensorKey(name, kind)]
    return whole[3:] if name == "table" else whole.reshape(2, 6, 2, 4)[:, 3:5]


def test_padding_may_be_of_no_rows() -> None:
    rng, truth = random.Random(1), truth_of({"table": (3, 4), "qkv": (16, 4)})
    split, mapped = moved(truth, changed(PADDED, numbers={**PADDED["numbers"], "pad": 0}), rng)
    assert mapped.content.notes == () and not mapped.padding
    joined, mapped = moved(split, changed(PADDED, numbers={**PADDED["numbers"], "pad": 0}), rng)
    assert mapped.content.notes == () and all(torch.equal(joined[key], truth[key]) for key in truth)


@pytest.mark.parametrize("name", shipped_maps())
def test_each_map_that_is_shipped_can_be_read(name: str) -> None:
    found = read_name_map(name)
    assert isinstance(found, ShapeMap) and found.about and found.digest == read_name_map(name).digest


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a + 2 * b", 13),
        ("(a + b) / 2", 4),
        ("a - b", "below 0"),
        ("a / b", "no multiple"),
        ("c", "nothing tells"),
        ("a ** b", "not an expression"),
        ("a.b", "not an expression"),
        ("f(a)", "not an expression"),
        ("", "not an expression"),
        ("1.5", "not an expression"),
        ("True", "not an expression"),
    ],
)
def test_numbers_are_arithmetic_of_whole_numbers(text: str, found: Any) -> None:
    if isinstance(found, int):
        assert evaluate(text, {"a": 3, "b": 5}) == found
        return
    with pytest.raises(ValueError, match=found):
        evaluate(text, {"a": 3, "b": 5})


@pytest.mark.parametrize("text", ["(a b", "a) b", "((a) b) c", ""])
def test_a_text_that_is_no_view(text: str) -> None:
    with pytest.raises(ValueError, match="is no view"):
        parse_view(text)


def small(entries: list[Any], numbers: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"sides": ["a", "b"], "numbers": numbers, "entries": entries, **more}


SILENT: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "a term that is a factor too": (
        small([{"a": "w : (g q+g d) h", "b": ["x", "y"]}], {"g": 2, "q": 3, "d": 2, "h": 4}),
        {"w": (20, 4)},
        "'g' in its sum and as a factor",
    ),
    "a term that is an index too": (
        small([{"a": "w : e e+f h", "b": ["{e}.a", "{e}.b"]}], {"e": 2, "f": 3, "h": 4}, indices={"e": "e"}),
        {"0.a": (4,), "1.a": (4,), "0.b": (3, 4), "1.b": (3, 4)},
        "'e' in its sum and as a factor that its parts do not have",
    ),
    "a factor of a part twice": (
        small([{"a": "w : (g s) h", "b": ["x : (g s s) h"]}], {"g": 3, "s": 2, "h": 4}),
        {"w": (6, 4)},
        "do not have the same factors",
    ),
    "a new name that a tensor has that stays": (
        small([{"a": "l.{l}.x", "b": "l.{l+1}.x"}, {"a": "o", "b": "p"}], {"n": 1}, indices={"l": "n"}, same=True),
        {"l.0.x": (6, 4), "l.1.x": (6, 4), "o": (2, 4)},
        "l.1.x: is a new name by the map, and that of a tensor that stays",
    ),
    "fewer experts than there are": (
        changed(EXPERTS, numbers={"e": 2, "f": 2, "h": 4}, same=True),
        parts(),
        "2.w1: is a name of 4, and no entry takes it",
    ),
    "both of two names": (
        small([{"a": "w | v", "b": "x"}, {"a": "o", "b": "p"}], {}, same=True),
        {"w": (6, 4), "v": (6, 4), "o": (2, 4)},
        "v: is a name of a, and no entry takes it",
    ),
    "an index of a name that the other has not": (
        small([{"a": "x", "b": "{e}.y"}, {"a": "o", "b": "p"}], {"e": 3}, indices={"e": "e"}),
        {"x": (6, 4), "o": (2, 4)},
        "{e} is no index of x, which has no view",
    ),
    "names of one tensor with other indices": (
        small([{"a": "x | y.{e}", "b": "z"}], {"e": 1}, indices={"e": "e"}),
        {"x": (6, 4)},
        "the names of one tensor have other indices",
    ),
    "a view of a part alone": (
        small([{"a": "x", "b": ["y : (s g) h"]}], {"s": 2, "g": 3, "h": 4}),
        {"x": (6, 4)},
        "has a view of a part, and none of the tensor",
    ),
    "a part without elements": (
        small([{"a": "x : f+g h", "b": ["y", "z"]}], {"f": 2, "g": 0, "h": 4}),
        {"x": (2, 4)},
        "has a part without elements",
    ),
    "padding for a whole tensor": (
        small([{"a": None, "b": "y"}, {"a": "o", "b": "p"}], {}),
        {"y": (6, 4), "p": (6, 4)},
        "has padding alone on a side",
    ),
    "a dimension without factors": (small([{"a": "x : ()", "b": "y"}], {}), {"x": (4,)}, "is no view"),
    "same that is no bool": (small([{"a": "x", "b": "y"}], {}, same="yes"), {"x": (4,)}, '"same" that is neither'),
    "an index without a reasonable end": (changed(EXPERTS, indices={"e": 10**12}), parts(), "goes up to 1000000000000"),
    "one side twice": ({"sides": ["a", "a"], "entries": []}, {"x": (4,)}, "one name twice"),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_would_go_wrong_without_a_word_is_refused(case: str) -> None:
    held, shapes, why = SILENT[case]
    assert why in refused(held, shapes)


def test_a_name_that_both_sides_use_is_of_two_tensors() -> None:
    """Rows of one may change in place, and a part may have the name of another tensor of the source."""
    rng = random.Random(1)
    held = small(
        [{"a": "q : (n s r) h", "b": ["q : (n r s) h"]}, {"a": "o", "b": "p"}], {"n": 1, "s": 2, "r": 3, "h": 4}
    )
    truth = truth_of({"q": (6, 4), "o": (2, 4)})
    found, _ = moved(truth, held, rng)
    for kind in KINDS:
        rows = truth[TensorKey("q", kind)].reshape(2, 3, 4)
        assert torch.equal(found[TensorKey("q", kind)], rows.swapaxes(0, 1).reshape(6, 4))
    held = small([{"a": "x : f+f h", "b": ["w", "y"]}, {"a": "y", "b": "z"}], {"f": 2, "h": 4})
    truth = truth_of({"x": (4, 4), "y": (2, 4)})
    found, _ = moved(truth, held, rng)
    for kind in KINDS:
        assert torch.equal(found[TensorKey("z", kind)], truth[TensorKey("y", kind)])
        assert torch.equal(found[TensorKey("y", kind)], truth[TensorKey("x", kind)][2:])


def test_parts_of_buffers_are_buffers_and_nested_states_are_refused() -> None:
    held = small([{"a": "w : f+f h", "b": ["x", "y"]}, {"a": "o", "b": "p"}], {"f": 3, "h": 4})
    shapes = {"w": (6, 4), "o": (2, 4)}
    layout = Arrangement(groups=(("w", "o"),), rule="flat", dp=1, kinds=KINDS).layout(shapes)
    content = content_of(layout, (("w", "o"),), buffers=frozenset({"w"}), records={"w": 1, "o": 2})
    mapped = read_name_map(held).apply(content, layout, Coming())
    assert mapped.faults == () and mapped.content.buffers == {"x", "y"}
    assert dict[str, Any](mapped.content.records) == {"p": 2}
    nested = replace(content, objects={("optimizer", "state", "w", "inner", "value"): 1})
    (fault,) = read_name_map(held).apply(nested, layout, Coming()).faults
    assert "which no map can rename" in fault.what


def test_parameters_without_tensors_keep_their_steps_and_their_names() -> None:
    """As those of SGD without momentum in a folder of the optimizer alone; and no tensor is given their name."""
    layout = Arrangement(groups=(("x", "y"),), rule="flat", dp=1, kinds=KINDS).layout({"x": (2, 4), "y": (2, 4)})
    content = content_of(layout, (("x", "y"), ("bare",)))
    facts = content.facts
    assert facts is not None
    content = replace(
        content, facts=replace(facts, scalars={**facts.scalars, "bare": {"step": 3}, "alone": {"step": 4}})
    )
    for held in (small([{"a": "x", "b": "new"}, {"a": "y", "b": "other"}], {}), {"x": "new", "y": "other"}):
        mapped = read_name_map(held).apply(content, layout, Coming())
        assert mapped.faults == () and mapped.content.facts is not None
        assert [group.members for group in mapped.content.facts.groups] == [("new", "other"), ("bare",)]
        steps = {name: values["step"] for name, values in mapped.content.facts.scalars.items()}
        assert steps == {"new": 7, "other": 7, "bare": 3, "alone": 4}
    for taken in ("bare", "alone"):
        for held in (
            small([{"a": "x", "b": taken}, {"a": "y", "b": "other"}], {}),
            {"x": taken, "y": "other"},
            {**small([{"a": "x", "b": taken}], {}), "same": True},
        ):
            (fault,) = read_name_map(held).apply(content, layout, Coming()).faults
            assert fault.where == taken and "is a new name by the map, and that of a" in fault.what


def test_other_names_of_what_is_tied_are_mapped_too() -> None:
    layout = Arrangement(groups=(("emb",),), rule="flat", dp=1, kinds=KINDS).layout({"emb": (6, 4)})
    content, numbers = content_of(layout, (("emb",),), tied={"out": "emb"}), {"v": 4, "p": 2, "h": 4}
    first, padded = {"a": "emb", "b": "e"}, {"a": "emb : v+p h", "b": ["e", None]}
    head, short = {"a": "out", "b": "lm"}, {"a": "out : v+p h", "b": ["lm", None]}
    for entries in ([first, head], [first, {**head, "optional": True}], [padded, short]):
        mapped = read_name_map(small(entries, numbers)).apply(content, layout, Coming())
        assert mapped.faults == () and dict(mapped.content.tied) == {"lm": "e"}
    (fault,) = read_name_map(small([first, short], numbers)).apply(content, layout, Coming()).faults
    assert "which has other rows by the map" in fault.what
    mapped = read_name_map(small([first], numbers)).apply(content, layout, Coming())
    assert mapped.content.tied == {} and "left out: out" in mapped.content.notes[-1]


def test_files_that_tell_other_numbers_are_refused(tmp_path: Path) -> None:
    """Beside the source, and of the checkpoint to be like; of nanotron too, which may interleave rows."""
    content, layout = llama_content(objects={("args",): ARGUMENTS})
    there = read_name_map("llama-megatron").apply(content, layout, Coming()).content
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    like = replace(there, folder=str(tmp_path), objects={})
    for name, more, where, what in (
        ("config.json", {}, "", ""),
        ("config.json", {"num_key_value_heads": 4}, "num_key_value_heads", "is another number in one file"),
        ("config.json", {"model_type": "gemma"}, "model_type", "weights of norms are stored minus one"),
        ("model_config.json", {"rope_interleaved": True}, "rope_interleaved", "was not written for it"),
    ):
        (tmp_path / name).write_text(json.dumps(config | more), encoding="utf-8")
        faults = read_name_map("llama-megatron").apply(content, layout, coming_run(like)).faults
        assert ([one.where for one in faults], what in "".join(one.what for one in faults)) == (
            [where][: len(what)],
            True,
        )
        (tmp_path / name).unlink()


def test_the_order_of_parameters_is_that_of_the_checkpoint_to_be_like() -> None:
    """DeepSpeed's own load restores flat buffers by the order of parameters, and looks at no name."""
    content, layout = llama_content(objects={("args",): ARGUMENTS})
    there = read_name_map("llama-megatron").apply(content, layout, Coming()).content
    names = [*reversed(there.weights)]
    tensors = {TensorKey(name, kind): there.tensors[TensorKey(name, kind)] for name in names for kind in KINDS}
    like = replace(there, tensors=tensors)
    mapped = read_name_map("llama-megatron").apply(content, layout, coming_run(like)).content
    assert mapped.facts is not None
    assert [*mapped.weights] == names == [name for group in mapped.facts.groups for name in group.members]


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """It may tell that rows are interleaved."""
    content, layout = llama_content(objects={("args",): ARGUMENTS})
    (tmp_path / "model_config.json").write_text('{"rope_interleaved": tr', encoding="utf-8")
    with pytest.raises(ConfigError, match="may hold the order of rows"):
        read_name_map("llama-megatron").apply(replace(content, folder=str(tmp_path)), layout, Coming())


def test_ranks_compare_what_a_map_has_become() -> None:
    """A map with other numbers has another digest, wherever they are from: so ranks with two maps refuse the load."""
    shapes = megatron()
    layout = Arrangement(groups=((*shapes,),), rule="flat", dp=1, kinds=KINDS).layout(shapes)
    content = content_of(layout, ((*shapes,),))

    def seen(held: dict[str, Any], **told: int) -> bytes:
        with digests() as found:
            mapped = read_name_map(held).apply(content, layout, Coming((), (("config.json", told),)))
        assert mapped.faults == ()
        return found[MAP_OF_NAMES]

    numbers = {name: value for name, value in LLAMA["numbers"].items() if name not in "gd"}
    other = {**LLAMA, "numbers": {**numbers, "g": 1, "d": 4}}
    assert seen(LLAMA) == seen({**LLAMA, "numbers": {**LLAMA["numbers"], "unused": 3}}) != seen(other)
    assert seen({**LLAMA, "numbers": numbers}, g=2, d=2) == seen(LLAMA)
    assert seen({**LLAMA, "numbers": numbers}, g=1, d=4) == seen(other)


def test_a_map_that_names_itself_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"map": str(own), "numbers": {"g": 2}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="names itself as its map"):
        read_name_map(str(own))


def test_the_command_says_which_map_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And gives the beginning of one that can be read if none does; of a map that is named, all that is wrong."""
    numbers = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 6}
    content, _ = llama_content()
    weights = {name: torch.zeros(one.shape) for name, one in content.weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(numbers | {"num_key_value_heads": 2}), encoding="utf-8")
    assert main(["names", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "llama-megatron: fits; 8 weights of megatron are 11 of transformers" in " ".join(told.split())
    assert main(["names", str(tmp_path), "--names", "mixtral-megatron"]) == 1
    assert "mlp.router.weight: is in the map, and not in the source" in " ".join(capsys.readouterr().out.split())
    save_file({f"a.{n}.b": torch.zeros(2) for n in (0, 1)}, tmp_path / "model.safetensors")
    assert main(["names", str(tmp_path)]) == 1
    _, _, beginning = capsys.readouterr().out.partition("docs/maps.md:")
    own = json.loads(beginning)
    assert own["indices"] == {"l": "l"} and own["numbers"] == {"l": 2}
    assert [entry["saved"] for entry in own["entries"]] == ["a.{l}.b"]
    assert isinstance(read_name_map(own), ShapeMap)
