"""Megatron-LM's state under the names of transformers, and back: every element is the one that was saved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import family_jobs
import pytest
import torch
from releases import NotFetched, home
from saved_worlds import DISTRIBUTED, EXPERTS_WHOLE, GATED, TP, Saved

from ds_reshard.cli.main import main
from ds_reshard.operations import convert
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.values import logical, read_spans

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
HEADS, GROUPS = 4, 2
WORDS = 100
"""Of the tokenizer; other rows of the vocabulary are padding."""
TIMEOUT_S = 900
PRINTED = (
    r"Megatron-LM, tp 2, dp 2, steps 1 to 60: loss (?P<first>\S+) to (?P<last>\S+)\n"
    r"Trainer, ZeRO-3, 3 ranks, steps 21 to 40: at most (?P<there>\S+) apart\n"
    r"Megatron-LM, tp 1, dp 4, steps 41 to 60: at most (?P<back>\S+) apart\n"
)
"""What examples/demo_megatron.py prints."""


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


def under_gpt2_names(tensors: Tensors) -> Tensors:
    """Megatron-LM's tensors as a GPT-2 of transformers has them, whose matrices are transposed."""
    found: Tensors = {}
    names = {
        "embedding.word_embeddings": "wte",
        "embedding.position_embeddings": "wpe",
        "decoder.final_layernorm": "ln_f",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    norms = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
    norms |= {"self_attention.linear_qkv.layer_norm": "ln_1", "mlp.linear_fc1.layer_norm": "ln_2"}
    for (name, kind), held in tensors.items():
        layer, inside, leaf = re.fullmatch(r"(?:decoder\.layers\.(\d+)\.)?(.*)[._](weight|bias)", name).groups()  # type: ignore[union-attr]
        if "linear_qkv" in inside and inside not in norms:
            held = held.reshape(HEADS, 3, -1, *held.shape[1:]).swapaxes(0, 1).reshape(held.shape)
        if layer is not None and held.ndim == 2:
            held = held.T.contiguous()
        place = f"transformer.h.{layer}." if layer is not None else "transformer."
        found[f"{place}{ {**names, **norms}[inside] }.{leaf}", kind] = held
    return found


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:8]
    wrong = [key for key, held in expected.items() if held.dtype != found[key].dtype or not held.equal(found[key])]
    assert not wrong, wrong[:8]


WORLDS = {
    "biases tp2 pp2": ("gpt2-megatron", DISTRIBUTED),
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
    under_names = under_gpt2_names if names == "gpt2-megatron" else under_transformers_names
    assert_equal(values(zero), under_names(values(source)))
    back = tmp_path / "back"
    convert(
        str(zero), str(back), to="megatron", names=names, like=str(source), ep=1 if EXPERTS_WHOLE in arguments else None
    )
    told = releases["0.19.2"].run(
        "format_jobs:loaded", ranks=2, arguments=f"{arguments} {TP} --ckpt-format torch_dist", folder=str(back)
    )
    for rank in told:
        assert rank["wrong"] == [] and rank["compared"] > 1000


def test_a_vocabulary_loses_its_padding_and_gets_it_back_as_zeros(releases: Any, saved: Saved, tmp_path: Path) -> None:
    """By the shipped map with a view for two tensors, as docs/maps.md says; Megatron-LM loads what comes back."""
    source, names, zero, back = saved("gated tp2 pp2", "buckets"), *(tmp_path / one for one in ("map", "zero", "back"))
    held = json.loads((ROOT / "ds_reshard" / "maps" / "llama-megatron.json").read_text())
    for entry in held["entries"]:
        if entry["megatron"] in ("embedding.word_embeddings.weight", "output_layer.weight"):
            entry["megatron"] += " : v+pad h"
            entry["transformers"] = [entry["transformers"], None]
    before = values(source)
    rows = before["output_layer.weight", "weight"].shape[0]
    held["numbers"] |= {"v": WORDS, "pad": rows - WORDS}
    names.write_text(json.dumps(held))
    made = convert(str(source), str(zero), to="zero1", dp=2, names=str(names))
    assert sum("(largest: weight " in note for note in made.notes) == 2 and rows > WORDS
    assert values(zero)["lm_head.weight", "exp_avg"].equal(before["output_layer.weight", "exp_avg"][:WORDS])
    made = convert(str(zero), str(back), to="megatron", names=str(names), like=str(source))
    assert sum(note.startswith("made of zeros: ") for note in made.notes) == 2
    for (name, _), one in before.items():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            one[WORDS:] = 0
    assert_equal(values(back), before)
    arguments = f"{DISTRIBUTED}{GATED}{TP}--ckpt-format torch_dist"
    for rank in releases["0.19.2"].run("format_jobs:loaded", ranks=2, arguments=arguments, folder=str(back)):
        assert rank["wrong"] == [] and rank["compared"] > 1000


EXPERTS = EXPERTS_WHOLE + "--moe-router-load-balancing-type none "
GROUPED = family_jobs.LIKE_LLAMA + "--group-query-attention --num-query-groups 2 "
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT2": (
        "gpt2-megatron",
        "--position-embedding-type learned_absolute --no-bias-gelu-fusion ",
        {
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **{"n_embd": 16, "n_head": 4, "n_inner": 24, "n_layer": 2, "n_positions": family_jobs.SEQUENCE},
            **{"activation_function": "gelu", "tie_word_embeddings": True},
        },
    ),
    "Llama": ("llama-megatron", GROUPED, {}),
    "Mistral": ("llama-megatron", GROUPED, {"sliding_window": None}),
    "Qwen2": ("llama-megatron", f"{GROUPED}--add-qkv-bias ", {}),
    "Qwen3": ("llama-megatron", f"{GROUPED}--qk-layernorm ", {}),
    "Mixtral": (
        "mixtral-megatron",
        EXPERTS + GROUPED,
        {
            "num_local_experts": 4,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "Qwen3Moe": (
        "qwen3-moe-megatron",
        f"{EXPERTS}{GROUPED}--qk-layernorm ",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "DeepseekV3": (
        "deepseek-v3-megatron",
        f"{family_jobs.LIKE_LLAMA}{EXPERTS}--multi-latent-attention"
        " --q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4"
        " --v-head-dim 6 --rope-type rope --moe-layer-freq [0,1] --moe-router-score-function sigmoid --qk-layernorm"
        " --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-bias-update-rate 0"
        " --moe-shared-expert-intermediate-size 24 --norm-epsilon 1e-6",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
        },
    ),
}
"""By the name of transformers: the map, Megatron-LM's arguments, and what the family's configuration has of its own."""


@pytest.mark.parametrize("family", FAMILIES)
def test_both_frameworks_compute_the_same(releases: Any, tmp_path: Path, family: str) -> None:
    """Converted weights give the same logits; Adam's next step from the converted state gives the same moments.

    There and back is bit-equal.
    """
    import transformers

    names, arguments, own = FAMILIES[family]
    saved, mapped = ([str(tmp_path / f"{kind} {number}") for number in (1, 2)] for kind in ("saved", "mapped"))
    (told,) = releases["0.19.2"].run("family_jobs:trained", ranks=1, arguments=arguments, folders=saved)
    for source, target in zip(saved, mapped, strict=True):
        convert(source, target, to="zero1", dp=2, names=names)
    back = str(tmp_path / "back")
    convert(mapped[0], back, to="megatron", names=names, like=saved[0])
    assert_equal(values(back), values(saved[0]))
    shape = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 24, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=family_jobs.VOCABULARY, attn_implementation="eager", pad_token_id=None, **{**shape, **heads, **own}
    )
    classes = {"GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, classes.get(family, f"{family}ForCausalLM"))(config).float()
    before, after = values(mapped[0]), values(mapped[1])
    told_of = model.load_state_dict({n: held for (n, kind), held in before.items() if kind == "weight"}, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert (told_of.missing_keys, told_of.unexpected_keys) == (tied, [])
    with torch.no_grad():
        logits = model(input_ids=family_jobs.batch(1)[:, :-1]).logits
    assert torch.tensor(told["logits"]).sub(logits).abs().max() < 1e-5 * max(1.0, float(logits.abs().max()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for name, live in model.named_parameters():
        states = {kind: before[name, kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[live] = {"step": torch.tensor(1.0), **states}
    tokens = family_jobs.batch(2)
    logits = model(input_ids=tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    for name, live in model.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[live][kind].sub(after[name, kind]).abs().max() < 1e-6, (name, kind)


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_llama_goes_from_megatron_to_the_trainer_and_back(interpreter: str) -> None:
    """tp 2 and dp 2; ZeRO-3 on three ranks; tp 1 and dp 4. The losses are those of the run that never left."""
    try:
        folder = home("0.19.2")
    except NotFetched as error:
        pytest.skip(str(error))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        [interpreter, str(ROOT / "examples" / "demo_megatron.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    assert "no resume report" not in errors
    found = re.fullmatch(PRINTED, output)
    assert found, output
    assert float(found["first"]) > 5 > 3 > float(found["last"])
    assert max(float(found["there"]), float(found["back"])) < 3e-3


def test_a_checkpoint_of_transformers_is_refused_with_the_line_that_converts_it(
    releases: Any, saved: Saved, tmp_path: Path
) -> None:
    """Of the Trainer, also its output folder, under either flag: Megatron-LM would begin from random weights.

    The line, followed to its end, loads everything. `preflight` has the same line.
    """
    source, output, weights = saved("gated tp2 pp2", "model_space"), tmp_path / "output", tmp_path / "weights"
    zero = output / "checkpoint-5"
    output.mkdir()
    convert(str(source), str(zero), to="zero1", dp=2, names="llama-megatron")
    (file,) = zero.rglob("mp_rank_00_model_states.pt")
    held = torch.load(file, weights_only=False)
    torch.save({name: one for name, one in held.items() if name not in ("args", "opt_param_scheduler")}, file)
    convert(str(source), str(weights), to="safetensors", names="llama-megatron")
    arguments, world = f"{DISTRIBUTED}{GATED}{TP}--ckpt-format torch_dist ", releases["0.19.2"]
    mends = dict[tuple[str, Path], str]()
    for flag in ("--load", "--pretrained-checkpoint"):
        for path in (zero, output, weights):
            told = world.run("load_jobs:tried", ranks=2, arguments=f"{arguments}{flag} {path}")
            assert [one["refused"] for one in told] == ["CheckpointNotFound"] * 2
            assert told[0]["faults"] == told[1]["faults"]
            ((where, what, mends[flag, path]),) = told[0]["faults"]
            assert where == str(zero if path == output else path)
            assert re.match(r"is a checkpoint of \S.*, which Megatron-LM cannot read", what)
        assert f"give {flag} a checkpoint that has an optimizer" in mends[flag, weights]
        assert mends[flag, zero] == mends[flag, output] == mends["--load", zero].replace("--load", flag)
    (foreseen,) = world.run("foresee_jobs:foresee", arguments=arguments, folder=str(output), world=2)
    assert [one["mend"] for one in foreseen["faults"]] == [mends["--load", zero]]
    line = re.match(r"ds-reshard (convert .*), and give --load DIR; SAVED is a checkpoint", mends["--load", zero])
    assert line is not None and line[1].endswith("--to megatron --names llama-megatron --like SAVED")
    places = {"DIR": str(tmp_path / "DIR"), "SAVED": str(source)}
    assert main([places.get(word, word) for word in line[1].split()]) == 0
    told = world.run("format_jobs:loaded", ranks=2, arguments=arguments, folder=places["DIR"])
    assert all(rank["wrong"] == [] and rank["compared"] > 1000 for rank in told)
