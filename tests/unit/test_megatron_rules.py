"""Megatron-LM's rules that no file tells: where parameters lie in flat buffers, and which folders there are.

The sizes of buffers are those that 0.19.2 and 0.18.2 saved (four layers of width 16, a vocabulary of 104 rows).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_reshard.containers.dcp_directory import Chunk, SavedTensor
from ds_reshard.formats.megatron.buckets import Slot, boxes_between, bucket_size_of, buckets_of
from ds_reshard.formats.megatron.flat_states import (
    experts_apart,
    experts_cut,
    layers_of,
    shards_of_experts,
    unplaced,
    unsupported,
)
from ds_reshard.formats.megatron.optimizer import Trained, facts_of, members_of, saved_steps
from ds_reshard.formats.megatron.torch_dist import _of_fragments, _sharding, _unread, contradictions, incomplete
from ds_reshard.formats.megatron.torch_format import _unsupported, places
from ds_reshard.hosts.megatron.weights import warn_of
from ds_reshard.model.layout import TensorKey, tiled_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.operations.matching import match_tensors


def _slots(*sizes: int, shared: int | None = None) -> list[Slot]:
    return [
        Slot(name=str(number), boxes=(Box.whole((size,)),), shared=number == shared)
        for number, size in enumerate(sizes)
    ]


def _told(
    *sizes: int, bucket_size: int | None = None, dp: int = 1, fast: bool = False, shared: int | None = None
) -> Any:
    made = buckets_of(_slots(*sizes, shared=shared), bucket_size=bucket_size, dp=dp, fast=fast)
    return [([(at, slot.name) for at, slot in one.slots], one.numel, one.unpadded) for one in made]


def test_a_weight_that_lies_in_no_buffer_is_named() -> None:
    """But for the bias of a router, which no optimizer steps."""
    names = [f"decoder.layers.1.mlp.router.{leaf}" for leaf in ("expert_bias", "weight", "bias")]
    weights = {
        key: tiled_placement(key, (4,), ElementType.FLOAT32, [], family="a", buffer="b")
        for key in (TensorKey(name=name, kind="weight") for name in names)
    }
    (fault,) = unplaced("here", weights, names[1:2])
    assert names[2] in fault.what


def test_parameters_lie_from_the_last_to_the_first() -> None:
    """Each at a multiple of 64; a bucket ends at one of 128, of the ranks, and with fast collectives of 65536."""
    assert _told(100, 16, 70) == [([(0, "2"), (128, "1"), (192, "0")], 384, 292)]
    assert [one[1] for one in _told(100, 16, 70, dp=3)] == [384]
    assert [one[1] for one in _told(300, 16, 70, dp=3)] == [768]
    assert [one[1] for one in _told(100, 16, 70, fast=True)] == [65536]


def test_a_bucket_closes_once_it_is_full() -> None:
    assert _told(100, 50, 128, bucket_size=128) == [([(0, "2")], 128, 128), ([(0, "1"), (64, "0")], 256, 164)]


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    """The padding before it counts to the bucket that it closes."""
    assert _told(40, 200, 20, shared=1) == [([(0, "2")], 128, 64), ([(0, "1")], 256, 200), ([(0, "0")], 128, 40)]


def test_the_layers_of_a_small_model_are_as_large_as_they_were_saved() -> None:
    """Dense parameters and experts of ep 2, and all of tp 2 in one buffer."""
    layer = [16, 16 * 16, 32 * 16, 16]
    expert = [48 * 16, 16 * 24]
    dense = buckets_of(_slots(104 * 16, *[*layer, 64] * 4, 16, 104 * 16), bucket_size=None, dp=2, fast=False)
    experts = buckets_of(_slots(*expert * 8), bucket_size=None, dp=1, fast=False)
    assert ([one.unpadded for one in dense], [one.unpadded for one in experts]) == ([7232], [9216])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"overlap_grad_reduce": True}, 40_000_000),
        ({"overlap_grad_reduce": True, "data_parallel_size": 25, "context_parallel_size": 2}, 50_000_000),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 7}, 7),
        ({"overlap_grad_reduce": True, "overlap_param_gather_with_optimizer_step": True}, None),
    ],
)
def test_the_size_of_a_bucket(arguments: dict[str, object], expected: int | None) -> None:
    """Of the first stage and chunk; others have one bucket."""
    assert bucket_size_of(arguments, 0, 0) == expected
    assert bucket_size_of(arguments, 1, 0) is bucket_size_of(arguments, 0, 1) is None


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (1, 59), (7, 8), (13, 47), (20, 40), (3, 21)])
def test_elements_of_a_box_are_cut_into_boxes(start: int, stop: int) -> None:
    """Each element once, in order."""
    box, found = Box(offset=(5, 2, 1), size=(3, 4, 5)), list[tuple[int, ...]]()
    for at, part in boxes_between(box, start, stop):
        assert at == start + len(found)
        found += part_of(part)
    assert found == part_of(box)[start:stop]


def part_of(box: Box) -> list[tuple[int, ...]]:
    (a, b, c), (x, y, z) = box.offset, box.size
    return [(i, j, k) for i in range(a, a + x) for j in range(b, b + y) for k in range(c, c + z)]


def _sizes(tp: int, pp: int, ep: int, etp: int | None = None, world: int = 8) -> dict[str, object]:
    sizes = {"tensor": tp, "pipeline": pp, "expert": ep}
    made: dict[str, object] = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    return {**made, "expert_tensor_parallel_size": etp, "num_experts": 8, "world_size": world}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 1), {"": (0, 0, 0)}),
        ((2, 1, 1), {"mp_rank_00": (0, 0, 0), "mp_rank_01": (1, 0, 0)}),
        ((1, 2, 1), {"mp_rank_00_000": (0, 0, 0), "mp_rank_00_001": (0, 1, 0)}),
        ((1, 1, 2), {"mp_rank_00_000": (0, 0, 0), "mp_rank_00_001": (0, 0, 1)}),
        ((2, 1, 1, 1), {"mp_rank_00": (0, 0, 0), "mp_rank_01": (1, 0, 0)}),
        ((2, 1, 2, 1), {"mp_rank_00_000": (0, 0, 0), "mp_rank_01_001": (1, 0, 1)}),
        ((2, 1, 3, 1), {"mp_rank_00_000": (0, 0, 0), "mp_rank_01_001": (1, 0, 1), "mp_rank_00_002": (0, 0, 2)}),
        ((1, 2, 2), {f"mp_rank_00_{p:03d}_{e:03d}": (0, p, e) for p in range(2) for e in range(2)}),
        ((2, 1, 2), {f"mp_rank_{t:02d}_{e:03d}": (t, 0, e) for t in range(2) for e in range(2)}),
    ],
)
def test_the_folders_of_ranks(sizes: tuple[int, ...], expected: dict[str, tuple[int, int, int]]) -> None:
    """One name may be a stage's or a half of the experts: the arguments tell."""
    assert places(_sizes(*sizes)) == ({"mp_rank_00": (0, 0, 0)} if "" in expected else expected)


def test_experts_have_an_optimizer_of_their_own() -> None:
    told = [_sizes(1, 1, 1), _sizes(1, 1, 2), _sizes(2, 1, 1), _sizes(2, 1, 1, 1), _sizes(2, 1, 2, 2)]
    assert list(map(experts_apart, told)) == [False, True, False, True, True]
    assert list(map(experts_cut, told)) == [1, 1, 2, 1, 2]
    assert list(map(shards_of_experts, told)) == [8, 4, 4, 8, 2]
    assert not experts_apart({**_sizes(1, 1, 2), "num_experts": None})


BAD = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "optimizer": "muon",
    "fp8_param_gather": True,
    "fp4_param_gather": True,
    "use_precision_aware_optimizer": True,
    "ddp_num_buckets": 3,
    "num_distributed_optimizer_instances": 2,
    "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "moe_latent_size": 8,
    "moe_layer_freq": [0, 1],
    "use_tp_pp_dp_mapping": True,
    "use_distributed_optimizer": False,
    "expert_tensor_parallel_size": 3,
    "num_layers": 5,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_read_of_format_torch_is_refused_by_name(name: str) -> None:
    known = {**_sizes(2, 2, 2), "num_layers": 4, "use_distributed_optimizer": True, "moe_layer_freq": 1}
    assert list(_unsupported("here", known, optimizer=True)) == []
    (fault,) = _unsupported("here", known | {name: BAD[name]}, optimizer=True)
    assert fault.error == "UnsupportedLayout" and name.removeprefix("use_").replace("_", " ") in fault.what.replace(
        "_", " "
    )


def test_states_that_are_no_flat_parts_of_parameters_are_refused_by_name() -> None:
    """Muon's in flat buckets and in what is written; weights in fp8 also where states are in model space."""
    known = {"num_layers": 4, "transformer_impl": "local", "optimizer": "adam"}
    assert list(unsupported("here", known)) == list(_unread("here", "fully_reshardable", known)) == []
    told = [[fault.what for fault in unsupported("here", known | {name: BAD[name]})] for name in ODD]
    assert [one.what.split(" the order")[0] for one in unsupported("here", {})] == ["with no saved arguments (args)"]
    assert [len(one) for one in told] == [1, 1, 1] and all(name in one[0] for name, one in zip(ODD, told, strict=True))
    kinds = ("fully_reshardable", "dp_reshardable", None)
    found = [[len(list(_unread("here", kind, {name: BAD[name]}))) for kind in kinds] for name in ODD]
    assert found == [[0, 0, 0], [1, 1, 0], [1, 1, 0]]


FIRST, LAST = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
LAYOUT = "pipeline_model_parallel_layout"
COUNTED = {f"account_for_{what}_in_pipeline_split": True for what in ("embedding", "loss")}
STAGES = [
    ((4, 2, 1), {}, [[0, 1], [2, 3]]),
    ((4, 2, 2), {}, [[0], [1], [2], [3]]),
    ((4, 2, 1), {FIRST: 1}, [[0], [1, 2, 3]]),
    ((4, 3, 1), COUNTED, [[0], [1, 2], [3]]),
    ((4, 2, 3), COUNTED, [[], [0], [1], [2], [3], []]),
    ((8, 3, 2), {FIRST: 2, LAST: 4}, [[0], [1], [2, 3], [4], [5], [6, 7]]),
    ((8, 2, 1), {FIRST: 3, LAST: 5}, [[0, 1, 2], [3, 4, 5, 6, 7]]),
    ((4, 2, 1), {LAYOUT: "Et|t*3,L"}, [[0], [1, 2, 3]]),
    ((4, 2, 2), {LAYOUT: "Ett|t||tL"}, [[0, 1], [2], [], [3]]),
    ((5, 3, 2), {LAYOUT: "E|(t|)*3t,t|mL"}, [[], [0], [1], [2], [3, 4], []]),
    ((4, 2, 1), {"hybrid_layer_pattern": "M|M*-/*-"}, [[0], [1, 2, 3]]),
    ((6, 2, 2), {"hybrid_layer_pattern": "M|M*|-|M-"}, [[0], [1, 2], [3], [4, 5]]),
    ((4, 2, 1), {"hybrid_layer_pattern": "MM*-"}, [[0, 1], [2, 3]]),
    ((5, 2, 1), {}, None),
    ((5, 2, 1), {LAYOUT: "Ett|ttL"}, None),
    ((5, 2, 1), {"hybrid_layer_pattern": "MM|M*"}, None),
    ((4, 2, 1), {LAYOUT: "Ett|t|tL"}, None),
    ((4, 2, 1), {LAYOUT: "Ett|ttxL"}, None),
    ((4, 2, 1), {LAYOUT: "Ett|((((t*9999)*9999)*9999)*9999)*9999L"}, None),
    ((8, 3, 2), {FIRST: 3}, None),
    ((4, 2, 1), {FIRST: 1, **COUNTED}, None),
    ((8, 2, 1), {FIRST: 3, LAST: 4}, None),
]


@pytest.mark.parametrize(("sizes", "told", "expected"), STAGES)
def test_the_layers_of_stages(sizes: tuple[int, int, int], told: dict[str, object], expected: Any) -> None:
    """Layers, stages and chunks: chunk after chunk, as 0.19.2 deals them out; None where it would stop."""
    names = ("num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    found = layers_of({**dict(zip(names, sizes, strict=True)), **told})
    assert (None if found is None else [list(one) for one in found.values()]) == expected


ODD = ("optimizer", "fp8_param_gather", "fp4_param_gather")


@pytest.mark.parametrize(("sizes", "fits"), [((2, 1, 3, 1), False), ((2, 1, 4, 1), True), ((4, 1, 2, 1), True)])
def test_grids_of_experts_that_save_copies_of_some_ranks_alone(sizes: tuple[int, ...], fits: bool) -> None:
    known = {**_sizes(*sizes), "num_experts": 12, "num_layers": 4, "use_distributed_optimizer": True}
    told = [fault.what for fault in _unsupported("here", known, optimizer=True)]
    assert told == [] if fits else "expert_model_parallel_size 3 at tp 2" in told[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16"])
def test_masters_that_are_no_fp32_are_refused(dtype: str) -> None:
    """Precision-aware optimizers keep fewer bits, and `store_param_remainders` the lower half of a master."""
    made = {}
    for kind, held in (("weight", "bfloat16"), ("fp32", dtype), ("exp_avg", "float32")):
        key = TensorKey(name="x", kind=kind)
        made[key] = tiled_placement(key, (4,), ElementType.named(held), [(0, 0, Box.whole((4,)))], family="", buffer="")
    (fault,) = incomplete("here", made)
    assert (fault.error, fault.found) == (
        "UnsupportedLayout",
        dtype,
    ) and "--use-precision-aware-optimizer" in fault.mend


def _fragments(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> SavedTensor:
    held = tuple(Chunk(offset=offset, size=size, place=None) for offset, size in chunks)
    return SavedTensor(shape=shape, dtype="float32", chunks=held)


def test_a_flat_part_of_a_fragment_is_boxes_of_its_weight() -> None:
    """Of (4, 6) in two fragments of columns the elements from 4 on of the second: part of its second row, the rest."""
    tensor = _fragments((1, 2, 12), ((0, 1, 4), (1, 1, 8)))
    assert list(_of_fragments(tensor, (4, 6))) == [
        (0, 0, Box(offset=(1, 4), size=(1, 2))),
        (0, 2, Box(offset=(2, 3), size=(2, 3))),
    ]


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((2, 12), ((0, 0), (1, 12))),  # of a weight of another number of axes
        ((1, 5, 12), ((0, 0, 0), (1, 1, 12))),  # six columns in five
        ((0, 2, 12), ((0, 0, 0), (1, 1, 12))),
        ((1, 2, 13), ((0, 0, 1), (1, 1, 12))),  # beyond the fragment
        ((1, 2, 12), ((0, 0, 0), (1, 2, 12))),  # of two fragments
    ],
)
def test_what_is_no_part_of_a_fragment(shape: tuple[int, ...], chunk: Any) -> None:
    with pytest.raises(ValueError, match="fragments"):
        list(_of_fragments(_fragments(shape, chunk), (4, 6)))


def test_embeddings_that_an_older_release_does_not_decay() -> None:
    """With `--embedding-init-method-std`, up to 0.15, whose groups have no `default_config`."""
    trained = [Trained(name=name, shape=shape) for name, shape in (("embedding.w", (4, 2)), ("a", (2, 2)), ("b", (2,)))]
    rates = {"lr_mult": 1.0, "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    for groups, std, expected in (
        ({}, None, [["embedding.w", "a"], ["b"]]),
        ({}, 0.02, [["a"], ["embedding.w", "b"]]),
        ({"default_config": True}, 0.02, [["embedding.w", "a"], ["b"]]),
    ):
        saved = [{**rates, **groups, "wd_mult": decay} for decay in (1.0, 0.0)]
        assert members_of(saved, trained, {"embedding_init_method_std": std}) == expected


_GROUPS = [{"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": experts} for experts in (False, True)]
_NAMES = ("decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.experts.linear_fc1.weight")


def test_each_of_a_chain_of_optimizers_has_the_step_that_it_saved() -> None:
    """Once for all its parameters, where torch's Adam counts in each; a group with a step of its own has that."""
    chain = ((dict(_GROUPS[0]),), (dict(_GROUPS[1]),))
    trained = [Trained(name=name, shape=(4, 4)) for name in _NAMES]
    state = {number: {"optimizer": {"state": {"common_step": 5 + number}}} for number in range(2)}
    for told in (state, list(state.values())):
        facts, _ = facts_of(chain, told, trained, {})
        assert facts is not None and [facts.scalars[name]["step"] for name in _NAMES] == [5, 6]
    chain[1][0]["step"] = 9
    facts, _ = facts_of(chain, state, trained, {})
    assert facts is not None and [facts.scalars[name]["step"] for name in _NAMES] == [5, 9]


def test_a_group_that_tells_no_step_has_that_of_all() -> None:
    """Fused optimizers count none of a group that is empty on the first rank; without members all have it, too."""
    trained = [Trained(name=name, shape=(4, 4)) for name in _NAMES]
    for odd in (False, True):
        groups = [{**_GROUPS[0], "step": 5, "is_decoupled_lr": odd}, dict(_GROUPS[1])]
        facts, ungrouped = facts_of((tuple(groups),), {}, trained, {})
        assert facts is not None and bool(ungrouped) is odd
        assert [facts.scalars[name]["step"] for name in _NAMES] == [5, 5]


def test_the_steps_of_states() -> None:
    """Equal ones are one; of a distributed optimizer, whose groups have it, there is none beside them."""
    states = {number: {"step": 5 + number // 2} for number in range(4)}
    assert saved_steps({"state": states}) == saved_steps({"optimizer": {"state": states}}) == [5, 6]
    assert saved_steps({"optimizer": {"param_groups": []}}) == saved_steps(None) == []


def test_a_save_without_the_optimizer_is_of_no_sharding_type() -> None:
    """Whatever its metadata says; unless states are there, or the run was to save them and they are lost."""
    common = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    keys = {}, {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param": None}
    for told, expected in (({"no_save_optim": True}, [None, "dp_reshardable"]), ({}, ["dp_reshardable"] * 2)):
        for where in ("tensors", "objects"):
            held: Any = [SimpleNamespace(**{"tensors": {}, "objects": {}, where: one}) for one in keys]
            assert [_sharding(common, directory, told) for directory in held] == expected


@pytest.mark.parametrize("name", ["", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"])
def test_a_layer_of_no_ops_has_no_tensors(name: str) -> None:
    """Where layers differ by a configuration; elsewhere a layer is lacking then. None is beyond their number."""
    for layers, lacking in (((0, 1, 3), not name), ((0, 1, 2, 4), True), ((0, 1, 2, 3), False)):
        weights: Any = {
            TensorKey(name=f"decoder.layers.{layer}.mlp.linear_fc1.weight", kind="weight"): 0 for layer in layers
        }
        found = list(contradictions("here", {"num_layers": 4, **({name: "x"} if name else {})}, weights))
        assert [fault.what for fault in found] == ["args.num_layers is not the number of layers"] * lacking


@pytest.mark.parametrize(("saved", "errors", "warnings"), [(("a", "c"), 0, 1), (("_orig_mod.a", "_orig_mod.b"), 4, 0)])
def test_a_finetune_of_other_weights_alone_is_an_error(saved: tuple[str, ...], errors: int, warnings: int) -> None:
    """Weights that one side lacks are a warning where Megatron-LM passes them over; if all are lacking, an error."""
    load, run = SimpleNamespace(warnings=[]), dict.fromkeys(("a", "b"))
    faults = match_tensors(run, dict.fromkeys(saved), mend="")
    assert len(warn_of(load, faults, "log_all", run)) == errors and len(load.warnings) == warnings  # type: ignore[arg-type]
