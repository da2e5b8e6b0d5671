"""How tensor-parallel ranks divide parameters: every element has its place, by any way to say it; else a refusal."""

from __future__ import annotations

import re
from math import prod
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_reshard.formats.zero.checkpoint import TpRank
from ds_reshard.formats.zero.patterns import Patterns, literal_name
from ds_reshard.formats.zero.reader import merge_orders
from ds_reshard.formats.zero.tensor_parallel import (
    NO_EVIDENCE,
    SplitEvidence,
    UnknownSplit,
    coverage_faults,
    find_splits,
    pattern_info,
    resplit,
    split_by_widths,
)
from ds_reshard.hosts.deepspeed.engine import module_of, told_by_parameters
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.load_targets import run_shares
from ds_reshard.model.layout import check_cover
from ds_reshard.model.rules import Rule, parse_rules, rule_faults


@st.composite
def cut_parameters(draw):
    """A tensor, the dimension it is cut along, and the width that each rank has of each part."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    ranks = draw(st.integers(1, 4))
    widths = draw(st.lists(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3))
    shape[dim] = sum(map(sum, widths))
    return numpy.arange(numpy.prod(shape)).reshape(shape), dim, widths


def shards_of(whole, dim, widths):
    """The shard of each rank, cut by numpy: its share of each part, one behind the other."""
    parts = numpy.split(whole, numpy.cumsum([sum(width) for width in widths])[:-1], axis=dim)
    cut = [numpy.split(part, numpy.cumsum(width)[:-1], axis=dim) for part, width in zip(parts, widths, strict=True)]
    return [numpy.concatenate(shares, axis=dim) for shares in zip(*cut, strict=True)]


def rebuilt(division, shards):
    whole = numpy.full(division.shape, -1)
    for parts, shard in zip(division.parts_by_rank, shards, strict=True):
        for box, at in parts:
            index = tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))
            whole[index] = shard.reshape(-1)[at : at + box.numel].reshape(box.size)
    return whole


def affine_map(whole, dim, widths):
    """What DeepSpeed writes of such a cut, as checkpoint/affine.py has it (0.19.8)."""

    def strides(shape):
        return [int(numpy.prod(shape[axis + 1 :])) for axis in range(len(shape))]

    ranks = {}
    for rank, shard in enumerate(shards_of(whole, dim, widths)):
        pieces, inside, begin = [], 0, 0
        for width in widths:
            size, first = [*whole.shape], begin + sum(width[:rank])
            size[dim] = width[rank]
            sides = ((first, strides(whole.shape)), (inside, strides(shard.shape)))
            source, dest = ([at * steps[dim], steps] for at, steps in sides)
            pieces.append({"shape": size, "source": source, "dest": dest, "locations": [rank]})
            inside, begin = inside + width[rank], begin + sum(width)
        ranks[rank] = {"shard_shape": list(shard.shape), "pieces": pieces}
    return {"logical_shape": list(whole.shape), "ranks": ranks}


@given(cut_parameters())
def test_every_element_has_its_place(case):
    whole, dim, widths = case
    shards = shards_of(whole, dim, widths)
    by_widths = split_by_widths(whole.shape, dim, widths, "rule")
    info = {"affine_map": {"version": 1, "params": {"^w$": affine_map(whole, dim, widths)}}}
    by_map, unknown = find_splits({"w": [shard.shape for shard in shards]}, SplitEvidence(info), [])
    assert not unknown
    for division in (by_widths, by_map["w"]):
        assert division.shape == whole.shape
        assert numpy.array_equal(rebuilt(division, shards), whole)
        if not division.replicated:
            check_cover([part.box for parts in division.parts_by_rank for part in parts], whole.shape)


HEADS, HALVES, ROW, SAME, VOCABULARY = (
    {"parameter_with_sub_params": [{"patterns": [r"a\.w"], "shape": ((8, 4, 4), 6), "partition_dim": 0}]},
    {"parameter_with_2_sub_params_cat_dim_0": [r"a\.w"]},
    {"parameter_with_row_parallelism_patterns": [r"a\.w"]},
    {"tp_replicated_parameter_patterns": [r"a\.w"]},
    {"vocabulary_parameter_patterns": [r"a\.w"], "original_vocab_size": 7},
)
WAYS = [
    (HEADS, Rule(r"a\.w", parts=(8, 4, 4)), 16, 0, [[4, 4], [2, 2], [2, 2]]),
    (HALVES, Rule(r"a\..", parts=2), 16, 0, [[4, 4], [4, 4]]),
    (ROW, Rule(r"a\.w", dim=1), 16, 1, [[3, 3]]),
    ({"universal_checkpoint_version": 0.2}, Rule(r"a\.w"), 16, 0, [[8, 8]]),
]


@pytest.mark.parametrize(("info", "rule", "rows", "dim", "widths"), WAYS)
def test_patterns_of_the_checkpoint_and_rules_of_the_user_say_the_same(info, rule, rows, dim, widths):
    whole = numpy.arange(rows * 6).reshape(rows, 6)
    shards = shards_of(whole, dim, widths)
    shapes = {"a.w": [shard.shape for shard in shards]}
    for found, unknown in (find_splits(shapes, SplitEvidence(info), []), find_splits(shapes, NO_EVIDENCE, [rule])):
        assert not unknown
        assert numpy.array_equal(rebuilt(found["a.w"], shards), whole)


def test_rows_behind_the_vocabulary_are_padding():
    padded = numpy.arange(48).reshape(8, 6)
    shards = shards_of(padded, 0, [[4, 4]])
    for found, _ in (
        find_splits({"a.w": [(4, 6)] * 2}, SplitEvidence(VOCABULARY), []),
        find_splits({"a.w": [(4, 6)] * 2}, NO_EVIDENCE, [Rule("a.w", vocabulary=7)]),
    ):
        assert found["a.w"].shape == (7, 6)
        assert numpy.array_equal(rebuilt(found["a.w"], shards), padded[:7])
        assert sum(part.box.numel for parts in found["a.w"].parts_by_rank for part in parts) == 42


def test_what_is_the_same_on_all_ranks_is_whole_on_each():
    for found, _ in (
        find_splits({"a.w": [(4, 6)] * 3}, SplitEvidence(SAME), []),
        find_splits({"a.w": [(4, 6)] * 3}, NO_EVIDENCE, [Rule("a.w", replicated=True)]),
    ):
        assert found["a.w"].replicated
        assert found["a.w"].shape == (4, 6)
        assert [part.box.size for parts in found["a.w"].parts_by_rank for part in parts] == [(4, 6)] * 3


def test_a_pattern_of_the_beginning_of_a_name_counts_where_none_is_of_the_whole():
    """As DeepSpeed looks (`re.match` in ds_to_universal.py): of halves it would not be known that they are two."""
    shapes = {"mlp.up.weight": [(8, 6)] * 2, "mlp.up.bias": [(8,)] * 2, "mlp.upper": [(4, 6)] * 2}
    info = {"parameter_with_2_sub_params_cat_dim_0": ["mlp.up"], "tp_replicated_parameter_patterns": ["mlp.upper"]}
    found, unknown = find_splits(shapes, SplitEvidence(info), [])
    assert {name: one.sizes for name, one in found.items()} == {"mlp.up.weight": (8, 8), "mlp.up.bias": (8, 8)}
    assert "two patterns" in unknown["mlp.upper"].what


SCALED = {"version": 1, "params": {"a.w": {"logical_shape": [2], "ranks": {}}}}
SCALED["params"]["a.w"]["ranks"] = {
    rank: {"shard_shape": [2], "pieces": [{"shape": [2], "source": [0, [1]], "dest": [0, [1]], "scale": 0.5}]}
    for rank in range(2)
}
SLANTED = {"version": 1, "params": {"a.w": {"logical_shape": [4, 6], "ranks": {}}}}
SLANTED["params"]["a.w"]["ranks"] = {
    rank: {"shard_shape": [2, 6], "pieces": [{"shape": [2, 6], "source": [0, [7, 1]], "dest": [0, [6, 1]]}]}
    for rank in range(2)
}

SPLIT = {"version": 1, "params": {"a.w": affine_map(numpy.zeros((4, 6)), 0, [[2, 2]])}}


@pytest.mark.parametrize(
    ("info", "rules", "shapes", "what"),
    [
        ({}, [], [(4, 6)] * 2, "nothing says how it is cut"),
        ({}, [Rule("a.*"), Rule("a.w", dim=1)], [(4, 6)] * 2, "two rules match it"),
        ({}, [Rule("a")], [(4, 6)] * 2, "nothing says how it is cut"),  # patterns are matched whole
        ({**ROW, **SAME}, [], [(4, 6)] * 2, "two patterns of the checkpoint match it"),
        ({**ROW, **HEADS}, [], [(8, 6)] * 2, "two patterns of the checkpoint match it"),
        ({"parameter_to_average_patterns": ["a.w"]}, [], [(4, 6)] * 2, "may differ between ranks"),
        ({"autotp_unsupported_parameter_patterns": {"a.w": "fused"}}, [], [(4, 6)] * 2, "did not know how it is cut"),
        (SAME, [], [(4, 6), (3, 6)], "said to be the same on all ranks"),
        (ROW, [], [(4, 6), (3, 6)], "not cut along dimension 1"),
        (HEADS, [], [(9, 6), (7, 6)], "not of these parts"),
        (HEADS, [], [(6, 6), (6, 6)], "not of these parts"),
        ({}, [Rule("a.w", parts=(3, 3))], [(3, 6), (3, 6)], "not of these parts"),
        ({}, [Rule("a.w", parts=2)], [(3, 6), (3, 6)], "so many equal parts"),
        ({}, [Rule("a.w", dim=2)], [(3, 6), (3, 6)], "not cut along dimension 2"),
        ({}, [Rule("a.w", replicated=True, owner=2)], [(4, 6)] * 2, "no copy of"),
        ({}, [Rule("a.w", vocabulary=9)], [(4, 6)] * 2, "padding is not after its last row"),
        ({"affine_map": SCALED}, [], [(2,)] * 2, "scales it"),
        ({"affine_map": SLANTED}, [], [(2, 6)] * 2, "does not place blocks"),
        ({"affine_map": SPLIT}, [], [(2, 6)] * 3, "lacks a rank"),
        ({"affine_map": SLANTED}, [], [(3, 6)] * 2, "of another shard"),
    ],
)
def test_what_is_not_known_is_said(info, rules, shapes, what):
    found, unknown = find_splits({"a.w": shapes}, SplitEvidence(info), rules)
    assert not found
    assert what in unknown["a.w"].what
    assert unknown["a.w"].expected
    assert unknown["a.w"].found


FUSED = {"parameter_with_sub_params": [{"patterns": [r"a\.weight"], "shape": ((8, 4, 4), 6), "partition_dim": 0}]}
SHAPES = {"a.weight": [(8, 6)] * 2, "a.bias": [(8,)] * 2, "b.bias": [(8,)] * 2}


@pytest.mark.parametrize("rules", [[], [Rule(r"a\.weight", parts=(8, 4, 4))]])
def test_a_bias_that_no_pattern_names_is_cut_as_the_rows_of_its_weight(rules):
    """Else it would be as long, and in another order."""
    found, unknown = find_splits(
        SHAPES, SplitEvidence(FUSED if not rules else {"tp_replicated_parameter_patterns": []}), rules
    )
    assert not unknown
    whole = numpy.arange(16)
    assert numpy.array_equal(rebuilt(found["a.bias"], shards_of(whole, 0, [[4, 4], [2, 2], [2, 2]])), whole)
    assert numpy.array_equal(rebuilt(found["b.bias"], shards_of(whole, 0, [[8, 8]])), whole)


def test_what_autotp_has_not_named_goes_by_its_release():
    """Since 0.3 of its patterns all that is not cut is named; before, the shapes of whole parameters tell."""
    shapes = {"norm.weight": [(4,)] * 2, "up.weight": [(4, 6)] * 2, "h.0.qkv_proj.weight": [(4, 6)] * 2}
    older, newer = ({"universal_checkpoint_version": version} for version in (0.2, 0.3))
    found, unknown = find_splits(shapes, SplitEvidence(newer, autotp=True), [])
    assert {name: one.shape for name, one in found.items()} == {"norm.weight": (8,), "up.weight": (8, 6)}
    assert {one.evidence for one in found.values()} == {"pattern"}
    assert "fused projection" in unknown["h.0.qkv_proj.weight"].what
    found, unknown = find_splits(shapes, SplitEvidence(older, autotp=True), [])
    assert not found
    assert "lists only some" in unknown["norm.weight"].what
    whole = {"norm.weight": (4,), "up.weight": (8, 6)}
    found, unknown = find_splits(shapes, SplitEvidence(older, autotp=True, whole_shapes=whole), [])
    assert {name: (one.shape, one.replicated) for name, one in found.items()} == {
        "norm.weight": ((4,), True),
        "up.weight": ((8, 6), False),
    }


def test_attributes_of_parameters_tell_what_they_can():
    """As Megatron sets them: a stride of one along dimension 0 is on SwiGLU's two halves too."""
    module = torch.nn.Module()
    for name, dim, stride in (("norm", -1, 1), ("row", 1, 1), ("gate_up", 0, 2), ("column", 0, 1)):
        parameter = torch.nn.Parameter(torch.zeros(4, 6))
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = dim >= 0, dim, stride
        module.register_parameter(name, parameter)
    live = told_by_parameters(module, TpRank(2, 0), autotp=False).live_rules
    shapes = dict.fromkeys(("norm", "row", "gate_up", "column", "other"), [(4, 6)] * 2)
    found, unknown = find_splits(shapes, SplitEvidence(live_rules=live), [])
    assert {name: (one.replicated, one.dim, one.sizes) for name, one in found.items()} == {
        "norm": (True, 0, ()),
        "row": (False, 1, (12,)),
        "gate_up": (False, 0, (4, 4)),
    }
    assert "does not say whether it is cut" in unknown["column"].what
    assert "nothing says" in unknown["other"].what
    assert not find_splits(shapes, SplitEvidence({"universal_checkpoint_version": 0.2}, live_rules=live), [])[1]


def test_widths_that_are_not_the_shards_are_refused():
    info = {**HEADS, "sub_param_shard_widths": {r"a\.w": [[4, 4], [2, 2], [2, 2]]}}
    assert find_splits({"a.w": [(8, 6)] * 2}, SplitEvidence(info), [])[0]
    assert find_splits({"a.w": [(9, 6), (7, 6)]}, SplitEvidence(info), [])[1]
    with pytest.raises(UnknownSplit, match="do not fill"):
        split_by_widths((17, 6), 0, [[4, 4], [2, 2]], "rule")


def test_rules_of_a_file():
    said = [
        {"parameters": r".*\.qkv\.weight", "parts": [8, 4, 4]},
        {"parameters": "norm", "replicated": True},
        {"parameters": "embed", "vocabulary": 7},
        {"parameters": "out", "dim": 1, "parts": 2},
    ]
    assert rule_faults("rules", said) == []
    assert parse_rules(said) == (
        Rule(r".*\.qkv\.weight", parts=(8, 4, 4)),
        Rule("norm", replicated=True),
        Rule("embed", vocabulary=7),
        Rule("out", dim=1, parts=2),
    )


@pytest.mark.parametrize(
    "rule",
    [
        "w",
        {},
        {"parameters": 3},
        {"parameters": "("},
        {"parameters": "w", "dimension": 0},
        {"parameters": "w", "dim": -1},
        {"parameters": "w", "dim": True},
        {"parameters": "w", "parts": []},
        {"parameters": "w", "parts": [4, 0]},
        {"parameters": "w", "parts": 2.0},
        {"parameters": "w", "vocabulary": 0},
        {"parameters": "w", "replicated": 1},
        {"parameters": "w", "replicated": True, "dim": 0},
    ],
)
def test_what_is_no_rule(rule):
    (fault,) = rule_faults("rules", [{"parameters": "v"}, rule])
    assert fault.where == "rules[1]"
    assert fault.mend


def test_rules_are_a_list():
    assert rule_faults("rules", {"parameters": "w"})


def test_parameters_that_the_first_rank_lacks_stand_where_others_have_them() -> None:
    """DeepSpeed loads a flat buffer by places: the order of a param group is that of the whole model."""
    held = [["a", "c", "f"], ["a", "b", "c", "d", "e", "f"], ["b", "f", "g"], ["a", "c", "f"]]
    assert merge_orders(held) == ["a", "b", "c", "d", "e", "f", "g"]
    assert merge_orders([["b", "a"], ["b", "a"]]) == ["b", "a"]


@given(cut_parameters(), st.integers(1, 4), st.booleans())
def test_a_parameter_is_cut_anew_in_equal_shares(cut, tp, mapped):
    """Of each part, as a map or a pattern of the saving run tells them; what is then written says so itself.

    Of one part alone the first ranks have one more, where it is not even.
    """
    whole, dim, widths = cut
    parts = [sum(width) for width in widths if sum(width)]
    source = split_by_widths(
        whole.shape, dim, [width for width in widths if sum(width)] or [[0] * len(widths[0])], "rule"
    )
    if mapped and whole.size:
        shards = [shard.shape for shard in shards_of(whole, dim, widths)]
        info = {"affine_map": {"version": 1, "params": {"a.w": affine_map(whole, dim, widths)}}}
        source = find_splits({"a.w": shards}, SplitEvidence(info), [])[0]["a.w"]
        assume(sum(1 for shape in shards if prod(shape)) > 1 and not source.replicated)
    assume(whole.size)
    try:
        found = resplit(source, whole.shape, tp)
    except UnknownSplit as misfit:
        by_other_ranks = mapped and any(sum(width) and not width[0] for width in widths)
        assert (len(parts) > 1 and any(part % tp for part in parts)) or by_other_ranks
        assert "do not divide by" in misfit.what or "cannot be told" in misfit.what
        return
    shares = [[part // tp + (rank < part % tp) for rank in range(tp)] for part in found.sizes]
    shards = shards_of(whole, dim, shares)
    assert numpy.array_equal(rebuilt(found, shards), whole)
    assert sum(found.sizes) == sum(parts)
    if not mapped or all(width[0] for width in widths if sum(width)):
        assert found.sizes == tuple(parts)
    assert tuple(shard.shape for shard in shards) == found.shards
    again, unknown = find_splits({"a.w": found.shards}, SplitEvidence(pattern_info({"a.w": found})), [])
    assert not unknown
    assert again["a.w"].parts_by_rank == found.parts_by_rank


def test_a_run_that_says_its_shards_overlap_is_refused():
    """Both ranks of it would take the first rows, and none the others."""
    entry = affine_map(numpy.zeros((4, 6)), 0, [[2, 2]])
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2, 6))
    info, grid = {"affine_map": {"version": 1, "params": {"w": entry}}}, LiveGrid(row=TpRank(2, 0))
    run = SimpleNamespace(info=info, grid=grid, module=module_of(module, grid), shard_sizes={"w": {}}, autotp=False)
    assert run_shares(run, SimpleNamespace(tp_models=(1,)))[1] == []
    entry["ranks"][1]["pieces"] = entry["ranks"][0]["pieces"]
    found = [fault.line() for fault in run_shares(run, SimpleNamespace(tp_models=(1,)))[1]]
    assert len(found) == 1
    assert "parameter w: has parts that do not make up the whole" in found[0]


@given(st.text(), st.text(alphabet="a1_-.\\^$*+ \n", max_size=4))
def test_a_pattern_that_spells_a_name_fits_that_name_alone(name, other):
    """As `re.fullmatch` has it; and no other pattern is taken for one that does."""
    pattern = f"^{re.escape(name)}$"
    assert literal_name(pattern) == name and re.fullmatch(pattern, name)
    assert Patterns([pattern]).matching(other) == ([pattern] if re.fullmatch(pattern, other) else [])
    assert literal_name(other) is None or re.fullmatch(other, literal_name(other))


@pytest.mark.parametrize("pattern", ["a.b", "^a.b$", r"^a\.b", r"a\.b$", r"^a\wb$", "^a|b$", "(", 3, "", "^"])
def test_other_patterns_are_matched_whole(pattern):
    """Or, where none fits the whole name, at its beginning."""
    try:
        fits = {name for name in ("a.b", "axb", "a", "b", "") if re.match(pattern, name)}
    except (re.error, TypeError):
        fits = set()
    assert {name for name in ("a.b", "axb", "a", "b", "") if Patterns([pattern]).matching(name)} == fits
    assert Patterns(["a", "ab"]).matching("ab") == ["ab"]


def test_patterns_of_many_parameters_are_not_compiled_for_each_of_them(monkeypatch):
    """Python keeps 512: with 1400 parameters, about those of a model of 70B, this took 90 seconds."""
    names = [f"layers.{number}.weight" for number in range(1400)]
    patterns = [f"^{re.escape(name)}$" for name in names]
    entry = affine_map(numpy.zeros((4, 2)), 0, [[2, 2]])
    info = {"affine_map": {"version": 1, "params": dict.fromkeys(patterns, entry)}}
    info["parameter_with_row_parallelism_patterns"] = patterns
    monkeypatch.setattr(re, "fullmatch", None)
    found, unknown = find_splits({name: [(2, 2), (2, 2)] for name in names}, SplitEvidence(info, autotp=True), ())
    assert len(found) == 1400 and not unknown


def test_what_ranks_share_in_part_is_loaded_with_the_sizes_that_were_saved():
    """As AutoTP cuts GPTBigCode: each rank has some rows of the query, and all of key and value. No rule fits."""
    entry = affine_map(numpy.zeros((6, 2)), 0, [[2, 2], [1, 1]])
    for rank, held in entry["ranks"].items():
        held["pieces"][1] = {"shape": [2, 2], "source": (8, [2, 1]), "dest": (4, [2, 1]), "locations": [0, 1]}
        held["shard_shape"] = [4, 2]
        assert held["pieces"][0]["locations"] == [rank]
    info = {"affine_map": {"version": 1, "params": {"^w$": entry}}}
    found, _ = find_splits({"w": [(4, 2), (4, 2)]}, SplitEvidence(info), ())
    (fault,) = coverage_faults("w", found["w"], [(4, 2), (4, 2)])
    assert "do not make up the whole" in fault.line() and "load it with the sizes that were saved" in fault.mend
