"""Synthetic ZeRO-1, 2 and 3 checkpoints of any size: real structure, and tensors that are holes in sparse files.

No run wrote them; see sparse_archive.py for what is real in them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from sparse_archive import Shape, SparseArchive, hole, sparse_archive, write_sparse

from ds_reshard.model.records import TensorRecord


def gpt_shapes(layers: int, width: int, vocabulary: int = 32000) -> dict[str, Shape]:
    """The parameters of a GPT, by name."""
    shapes: dict[str, Shape] = {"embed.weight": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _block(width)}
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)}


def _block(width: int) -> Iterator[tuple[str, Shape]]:
    for name, outputs, inputs in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
        yield f"{name}.weight", (outputs * width, inputs * width)
        yield f"{name}.bias", (outputs * width,)
    for name in ("norm1", "norm2"):
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def llama_shapes(layers: int, width: int, wide: int, vocabulary: int = 128256) -> dict[str, Shape]:
    """The parameters of a Llama without grouped queries, by name: nine for each layer, and three."""
    shapes: dict[str, Shape] = {"embed.weight": (vocabulary, width)}
    for i in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{i}.{name}.weight"] = (width, width)
        shapes |= {f"layers.{i}.{name}.weight": (wide, width) for name in ("gate", "up")}
        shapes[f"layers.{i}.down.weight"] = (width, wide)
        shapes |= {f"layers.{i}.{name}.weight": (width,) for name in ("norm1", "norm2")}
    return shapes | {"norm.weight": (width,), "head.weight": (vocabulary, width)}


def write_checkpoint(
    folder: Path, shapes: Mapping[str, Shape], dp: int, *, stage: int = 2, ranks: Collection[int] | None = None
) -> int:
    """Write a checkpoint of AdamW (one param group) under `folder`; returns its bytes.

    With `ranks` the files of all others are links to rank 0's, under names that are not theirs: they are listed at
    their size, and refused when they are opened.
    """
    tag = folder / "global_step1000"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    config = {
        "train_batch_size": dp,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    model = _model_file(shapes, dp, stage, config)
    if stage == 3:
        numel = sum(-(-prod(shape) // dp) for shape in shapes.values())
        _write_ranks(tag, "zero_pp_rank_{}_mp_rank_00_model_states", model, dp, ranks)
        _write_ranks(tag, OPTIM, {"optimizer_state_dict": _stage3(numel, dp), **_said(config)}, dp, ranks)
        return sum(file.stat().st_size for file in tag.iterdir())
    write_sparse(tag / "mp_rank_00_model_states.pt", model)
    total = sum(map(prod, shapes.values()))
    chunk = -(-total // (2 * dp)) * 2
    for rank in range(dp):
        used = max(0, min(chunk, total - rank * chunk))
        content = {"optimizer_state_dict": _flat(used, chunk, dp, stage), **_said(config)}
        write_sparse(tag / f"{OPTIM.format(rank)}.pt", content)
    return sum(file.stat().st_size for file in tag.iterdir())


ROWS = ("o.weight", "down.weight")
"""The ends of the names that a Llama of tensor-parallel ranks cuts along their second dimension."""


def write_tensor_parallel(folder: Path, shapes: Mapping[str, Shape], tp: int, dp: int) -> int:
    """The same at ZeRO-1, of `llama_shapes` that `tp` ranks divide, each of `dp` ranks; returns its bytes."""
    tag = folder / "global_step1000"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "train_batch_size": dp}
    local = {name: shard(name, shape, tp) for name, shape in shapes.items()}
    model = _model_file(local, dp, 1, config)
    model |= {"mp_world_size": tp, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp}}
    model["universal_checkpoint_info"] = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r".*norm[12]?\.weight"],
        "parameter_with_row_parallelism_patterns": [rf".*\.{end}" for end in ROWS],
    }
    _write_columns(tag, range(tp), model, sum(map(prod, local.values())), dp, config)
    return sum(file.stat().st_size for file in tag.iterdir())


def by_layers(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The parameters of a Llama by the names that they have in a PipelineModule: numbers of layers."""
    end = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    first = {"embed.": "0.", "norm.": f"{end + 1}.", "head.": f"{end + 2}."}
    named = {}
    for name, shape in shapes.items():
        kind, layer, rest = (*name.split(".", 2), "")[:3]
        named[f"{int(layer) + 1}.{rest}" if kind == "layers" else first[f"{kind}."] + layer] = shape
    return named


def write_pipeline(folder: Path, shapes: Mapping[str, Shape], tp: int, pp: int, dp: int) -> int:
    """At ZeRO-1, the files of a PipelineModule of `by_layers` of a Llama, as those of `write_tensor_parallel`.

    Its layers are dealt out to the stages in equal numbers, but for the last.
    """
    tag = folder / "global_step1000"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "train_batch_size": dp}
    local = {name: shard(name, shape, tp) for name, shape in shapes.items()}
    layers: dict[int, dict[str, TensorRecord]] = {}
    for name, shape in local.items():
        layer, _, entry = name.partition(".")
        layers.setdefault(int(layer), {})[entry] = hole(shape, torch.bfloat16)
    for layer, held in layers.items():
        made = sparse_archive(f"layer_{layer:02d}-model_00-model_states", OrderedDict(held))
        for rank in range(tp):
            made.renamed(f"layer_{layer:02d}-model_{rank:02d}-model_states").write(tag)
    info = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [r".*norm[12]?\.weight", f"{len(layers) - 2}\\.weight"],
        "parameter_with_row_parallelism_patterns": [rf".*\.{end}" for end in ROWS],
    }
    for stage in range(pp):
        own = [layer for layer in layers if min(pp - 1, layer // -(-len(layers) // pp)) == stage]
        held = {name: shape for name, shape in local.items() if int(name.partition(".")[0]) in own}
        model = {**_model_file(held, dp, 1, config), "module": None, "mp_world_size": tp * pp}
        model |= {"checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp}}
        model["universal_checkpoint_info"] = info
        numbers = range(stage * tp, (stage + 1) * tp)
        _write_columns(tag, numbers, model, sum(map(prod, held.values())), dp, config)
    return sum(file.stat().st_size for file in tag.iterdir())


def shard(name: str, shape: Shape, tp: int) -> Shape:
    if len(shape) == 1:
        return shape
    return (shape[0], shape[1] // tp) if name.endswith(ROWS) else (shape[0] // tp, shape[1])


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states"


def _write_columns(
    tag: Path, numbers: Sequence[int], model: object, numel: int, dp: int, config: dict[str, Any]
) -> None:
    """Model files of these numbers, and the optimizer files of the ranks of each, alike but for their names."""
    chunk = -(-numel // (2 * dp)) * 2
    made: dict[tuple[int, int], SparseArchive] = {}
    for number in numbers:
        write_sparse(tag / f"mp_rank_{number:02d}_model_states.pt", model)
        for rank in range(dp):
            name = OPTIM.format(rank).replace("mp_rank_00", f"mp_rank_{number:02d}")
            used = max(0, min(chunk, numel - rank * chunk))
            if (len(name), used) not in made:
                content = {"optimizer_state_dict": _flat(used, chunk, dp, 1), **_said(config)}
                made[len(name), used] = sparse_archive(name, content)
            made[len(name), used].renamed(name).write(tag)


def _write_ranks(tag: Path, stem: str, value: object, dp: int, ranks: Collection[int] | None) -> None:
    """The same content for each rank, under its own name."""
    made: dict[int, SparseArchive] = {}
    for rank in range(dp):
        name = stem.format(rank)
        if ranks is not None and rank not in ranks and rank:
            os.link(tag / f"{stem.format(0)}.pt", tag / f"{name}.pt")
            continue
        if len(name) not in made:
            made[len(name)] = sparse_archive(name, value)
        made[len(name)].renamed(name).write(tag)


def _said(config: dict[str, Any]) -> dict[str, object]:
    return {"ds_config": config, "ds_version": "0.19.8"}


def _model_file(shapes: Mapping[str, Shape], dp: int, stage: int, config: dict[str, Any]) -> dict[str, object]:
    whole = stage < 3  # stage 3 keeps placeholders of no element
    return {
        "module": OrderedDict((name, hole(shape if whole else (0,), torch.bfloat16)) for name, shape in shapes.items()),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict(shapes)],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 1000,
        "global_samples": 1000 * dp,
        "skipped_steps": 0,
        "dp_world_size": dp,
        "mp_world_size": 1,
        **_said(config),
    }


def _adam(numel: int) -> dict[str, object]:
    moments = {kind: hole((numel,), torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 1000, "params": [0]}
    return {"state": {0: moments}, "param_groups": [group]}


def _flat(used: int, chunk: int, dp: int, stage: int) -> dict[str, object]:
    return {
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": _adam(chunk),
        "single_partition_of_fp32_groups": [hole((used,), torch.float32)],
        "zero_stage": stage,
        "group_paddings": [chunk - used],
        "partition_count": [dp],
        "ds_version": "0.19.8",
        "param_slice_mappings": [OrderedDict()],
    }


def _stage3(numel: int, dp: int) -> dict[str, object]:
    return {
        "zero_stage": 3,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": dp,
        "optimizer_state_dict": _adam(numel),
        "fp32_flat_groups": [hole((numel,), torch.float32)],
    }
