"""Names of another framework: groups, schedules, states and tied names go with their parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_reshard.errors import ConfigError
from ds_reshard.model.content import Content, Schedule, TensorSource
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.operations.name_map import NameMap, read_name_map


def test_groups_schedules_and_states_are_renamed_in_the_order_of_the_map() -> None:
    """The second group is the first parameter's in the map: its rates and its schedule come first, too."""
    keys = [TensorKey(name=name, kind=kind) for name in ("a", "b", "c") for kind in ("weight", "exp_avg")]
    tensors = {key: TensorSource(shape=(1,), dtype=ElementType.FLOAT32, origin=key) for key in keys}
    groups = tuple(GroupFacts(members=m, hyperparameters={"lr": lr}) for m, lr in ((("a", "c"), 0.1), (("b",), 0.2)))
    facts = OptimizerFacts(groups=groups, scalars={name: {"step": at} for at, name in enumerate("abc")})
    rows = tuple({"base_lrs": lr, "_last_lr": lr, "lr_lambdas": None} for lr in (0.1, 0.2))
    schedule = Schedule(counters={"last_epoch": 3}, groups=rows)
    content = Content(folder="run", ranks=1, tensors=tensors, facts=facts, schedule=schedule)
    names = {"b": ("B", "head"), "c": ("C",), "a": ("A",)}
    made = NameMap(path="map.json", names=names, digest="").applied(content)
    assert list(made.weights) == ["B", "C", "A"]
    assert made.tied == {"head": "B"}
    assert made.facts is not None and made.schedule is not None
    found = [(group.members, (group.hyperparameters or {})["lr"]) for group in made.facts.groups]
    assert found == [(("B",), 0.2), (("C", "A"), 0.1)]
    assert made.facts.scalars == {"A": {"step": 0}, "B": {"step": 1}, "C": {"step": 2}}
    assert [group["base_lrs"] for group in made.schedule.groups] == [0.2, 0.1]
    origins = {(key.name, held.origin.name) for key, held in made.tensors.items()}
    assert origins == {("A", "a"), ("B", "b"), ("C", "c")}


def _content(*groups: tuple[str, ...]) -> Content:
    keys = [TensorKey(name=name, kind="weight") for group in reversed(groups) for name in group]
    tensors = {key: TensorSource(shape=(1,), dtype=ElementType.FLOAT32, origin=key) for key in keys}
    facts = OptimizerFacts(groups=tuple(GroupFacts(members=group, hyperparameters={}) for group in groups))
    return Content(folder="run", ranks=1, tensors=tensors, facts=facts)


def test_patterns_name_layers_by_their_numbers_in_the_order_of_the_param_groups() -> None:
    """DeepSpeed loads flat buffers by places: what patterns match keeps its place among the others."""
    names = {
        "embed.w": ("wte.weight", "head.weight"),
        "(?P<n>\\d+)\\.att\\.(.*)": ("h.{n-1}.attention.{2}",),
        "(\\d+)\\.mlp\\.w(\\d)": ("h.{1-1}.ffn.{2+10}.{1}",),
        "last": ("ln",),
    }
    content = _content(("embed.w", "1.att.q", "1.mlp.w2", "10.att.q", "10.mlp.w2"), ("last",))
    made = NameMap(path="map.json", names=names, digest="")
    assert list(made.faults(content)) == []
    assert made.applied(content).facts == OptimizerFacts(
        groups=(
            GroupFacts(
                members=("wte.weight", "h.0.attention.q", "h.0.ffn.12.1", "h.9.attention.q", "h.9.ffn.12.10"),
                hyperparameters={},
            ),
            GroupFacts(members=("ln",), hyperparameters={}),
        )
    )
    assert made.applied(content).tied == {"head.weight": "wte.weight"}


OF_A_LAYER = {
    "input_layernorm.weight": "norm1.weight",
    "self_attention.query_key_value.weight": "attn.qkv.weight",
    "self_attention.query_key_value.bias": "attn.qkv.bias",
    "self_attention.dense.weight": "attn.out.weight",
    "self_attention.dense.bias": "attn.out.bias",
    "post_attention_layernorm.weight": "norm2.weight",
    "mlp.dense_h_to_4h.weight": "mlp.up.weight",
    "mlp.dense_h_to_4h.bias": "mlp.up.bias",
    "mlp.dense_4h_to_h.weight": "mlp.down.weight",
    "mlp.dense_4h_to_h.bias": "mlp.down.bias",
}
TO_PLAIN = {
    "tied_modules\\.embed\\.word_embeddings\\.weight()": ["embed.weight{1}", "head.weight{1}"],
    "(?P<n>[0-9]+)\\.input_layernorm\\.(.*)": "blocks.{n-2}.norm1.{2}",
    "(?P<n>[0-9]+)\\.self_attention\\.query_key_value\\.(.*)": "blocks.{n-2}.attn.qkv.{2}",
    "(?P<n>[0-9]+)\\.self_attention\\.dense\\.(.*)": "blocks.{n-2}.attn.out.{2}",
    "(?P<n>[0-9]+)\\.post_attention_layernorm\\.(.*)": "blocks.{n-2}.norm2.{2}",
    "(?P<n>[0-9]+)\\.mlp\\.dense_h_to_4h\\.(.*)": "blocks.{n-2}.mlp.up.{2}",
    "(?P<n>[0-9]+)\\.mlp\\.dense_4h_to_h\\.(.*)": "blocks.{n-2}.mlp.down.{2}",
    "103\\.(weight)": "norm.{1}",
}
TO_STAGES = {
    "embed\\.(weight)": "tied_modules.embed.word_embeddings.{1}",
    "blocks\\.([0-9]+)\\.norm1\\.(.*)": "{1+2}.input_layernorm.{2}",
    "blocks\\.([0-9]+)\\.attn\\.qkv\\.(.*)": "{1+2}.self_attention.query_key_value.{2}",
    "blocks\\.([0-9]+)\\.attn\\.out\\.(.*)": "{1+2}.self_attention.dense.{2}",
    "blocks\\.([0-9]+)\\.norm2\\.(.*)": "{1+2}.post_attention_layernorm.{2}",
    "blocks\\.([0-9]+)\\.mlp\\.up\\.(.*)": "{1+2}.mlp.dense_h_to_4h.{2}",
    "blocks\\.([0-9]+)\\.mlp\\.down\\.(.*)": "{1+2}.mlp.dense_4h_to_h.{2}",
    "norm\\.(weight)": "103.{1}",
}


def test_a_map_of_ten_lines_names_a_hundred_layers_and_back(tmp_path: Path) -> None:
    """Of a GPT as Megatron-DeepSpeed's PipelineModule has it, whose layers are 2 to 101, and as a plain module."""
    staged = ["tied_modules.embed.word_embeddings.weight"]
    staged += [f"{n}.{name}" for n in range(2, 102) for name in OF_A_LAYER] + ["103.weight"]
    plain = ["embed.weight", *(f"blocks.{n}.{name}" for n in range(100) for name in OF_A_LAYER.values()), "norm.weight"]
    assert len(TO_PLAIN) <= 10 and len(TO_STAGES) <= 10 and len(staged) == len(plain) == 1002
    for number, (given, expected, names) in enumerate([(staged, plain, TO_PLAIN), (plain, staged, TO_STAGES)]):
        (tmp_path / f"{number}.json").write_text(json.dumps(names, indent=1))
        read, content = read_name_map(str(tmp_path / f"{number}.json")), _content(tuple(given))
        assert list(read.faults(content)) == []
        made = read.applied(content)
        assert made.facts is not None
        assert made.facts.groups[0].members == tuple(expected)
        assert {key.name: held.origin.name for key, held in made.tensors.items()} == dict(
            zip(expected, given, strict=True)
        )


def test_a_name_of_its_own_goes_before_a_pattern() -> None:
    made = NameMap(path="map.json", names={"(.*)": ("x.{1}",), "b": ("own",)}, digest="")
    assert list(made.faults(_content(("a", "b")))) == []
    assert made.of(_content(("a", "b"))) == {"a": ("x.a",), "b": ("own",)}


@pytest.mark.parametrize(
    ("pattern", "name", "text"),
    [
        ("(\\d+", "a", "is no regular expression"),
        ("(\\d+)", "layer.{2}", "has no group 2"),
        ("(?P<n>\\d+)", "layer.{m+1}", "has no group m"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(tmp_path: Path, pattern: str, name: str, text: str) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({pattern: name}))
    with pytest.raises(ConfigError, match=text):
        read_name_map(str(file))
