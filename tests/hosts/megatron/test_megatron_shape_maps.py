"""Megatron-LM's state under the names of transformers, and back: every element is the one that was saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_worlds import DISTRIBUTED, EXPERTS_WHOLE, GATED, TP, Saved

from ds_reshard.operations import convert
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.values import logical, read_spans

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HEADS, GROUPS = 4, 2


Tensors = dict[tuple[str, str], torch.Tensor]


def values(folder: str | Path) -> Tensors:
    """Every weight and state of a checkpoint, by the names that its format gives."""
    source = open_checkpoint(find_listing(str(folder), None))
    found: Tensors = {}
    for key, held in source.content().tensors.items():
        spans = read_spans([(logical(source.index, held.origin),)], threads=1, memory_nbytes=1 << 20)
        whole = torch.cat([span.values[0].clone() for span in spans]).reshape(held.shape)
        found[key.name, key.kind] = whole.to(getattr(torch, held.dtype.label))
    return found


def under_transformers_names(tensors: Tensors) -> Tensors:
    """Megatron-LM's tensors as a Llama or Mixtral of transformers has them, by torch's own reshapes."""
    found: Tensors = {}
    once = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    layer_names = {
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
    }
    for (name, kind), held in tensors.items():
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            found[once[name], kind] = held
            continue
        place, leaf = f"model.layers.{layer[1]}.", layer[2]
        if leaf == "self_attention.linear_qkv.weight":
            rows = held.reshape(GROUPS, HEADS // GROUPS + 2, -1, held.shape[-1])
            for one, part in zip("qkv", rows.split((HEADS // GROUPS, 1, 1), 1), strict=True):
                found[f"{place}self_attn.{one}_proj.weight", kind] = part.reshape(-1, held.shape[-1])
        elif leaf == "mlp.linear_fc1.weight":
            found[f"{place}mlp.gate_proj.weight", kind], found[f"{place}mlp.up_proj.weight", kind] = held.chunk(2)
        else:
            found[place + layer_names[leaf], kind] = held
    return found


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:8]
    wrong = [key for key, held in expected.items() if held.dtype != found[key].dtype or not held.equal(found[key])]
    assert not wrong, wrong[:8]


WORLDS = {
    "gated tp2 pp2": ("llama-megatron", DISTRIBUTED + GATED),
    "experts ep2": ("mixtral-megatron", DISTRIBUTED + GATED + EXPERTS_WHOLE),
}


@pytest.mark.parametrize("form", ["model_space", "buckets", "torch"])
@pytest.mark.parametrize("world", WORLDS)
def test_there_and_back(releases: Any, saved: Saved, tmp_path: Path, world: str, form: str) -> None:
    """Each form of each model becomes a ZeRO folder of transformers' model, and that one which Megatron-LM loads."""
    names, arguments = WORLDS[world]
    source, zero = saved(world, form), tmp_path / "zero"
    convert(str(source), str(zero), to="zero3", dp=3, names=names)
    assert_equal(values(zero), under_transformers_names(values(source)))
    back = tmp_path / "back"
    convert(
        str(zero), str(back), to="megatron", names=names, like=str(source), ep=1 if EXPERTS_WHOLE in arguments else None
    )
    told = releases["0.19.2"].run(
        "format_jobs:loaded", ranks=2, arguments=f"{arguments} {TP} --ckpt-format torch_dist", folder=str(back)
    )
    for rank in told:
        assert rank["wrong"] == [] and rank["compared"] > 1000


def _means(ranks: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of each update of Megatron-LM over all tokens."""
    sums: dict[int, list[float]] = {}
    for update, total, count in (one for rank in ranks for one in rank["losses"]):
        held = sums.setdefault(update, [0.0, 0.0])
        held[0] += total
        held[1] += count
    return {update: total / count for update, (total, count) in sums.items()}


def test_a_llama_goes_from_megatron_to_the_trainer_and_back(releases: Any, worlds: Any, tmp_path: Path) -> None:
    """tp 2 and dp 2; ZeRO-3 on three ranks; tp 1 and dp 4. The losses are those of the run that never left."""
    run = releases["0.19.2"].run
    stayed = _means(run("story_jobs:megatron", ranks=4, arguments=TP))
    first = str(tmp_path / "first")
    saved = f"--save {first} --save-interval 4 --exit-interval 4 "
    there = _means(run("story_jobs:megatron", ranks=4, arguments=TP + saved))
    middle = tmp_path / "checkpoint-4"
    convert(first, str(middle), to="zero3", dp=3, names="llama-megatron")
    asked = {"folder": str(tmp_path / "trainer"), "wanted": str(middle), "updates": 8, "stage": 3}
    trained = worlds[3].run("story_jobs.trainer", **asked)
    means = torch.tensor([one["losses"] for one in trained]).mean(0).tolist()
    last = str(tmp_path / "last")
    convert(str(tmp_path / "trainer" / "checkpoint-8"), last, to="megatron", dp=4, names="llama-megatron", like=first)
    back = _means(run("story_jobs:megatron", ranks=4, arguments=f"--load {last} --override-opt-param-scheduler"))
    found = [*there.values(), *means, *back.values()]
    assert len(found) == len(stayed) == 12
    assert found == pytest.approx([*stayed.values()], rel=5e-4)
