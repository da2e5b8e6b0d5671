"""Saves and loads by transformers' own functions of a run with a DistributedConfig; every element by a rule."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP = 7.0
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
}


def rule(name: str, shape: Any) -> torch.Tensor:
    """Every element of a weight, another for each name and place."""
    first = zlib.crc32(name.encode()) % 4096
    return (torch.arange(torch.Size(shape).numel()) + first).reshape(shape).float() / 4096


def states_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The moments of a weight: of each element, and so of each part, whatever mesh it lies on."""
    return {"exp_avg": weight * 0.5 + 1, "exp_avg_sq": weight * 0.25 + 3}


def expected(tied: bool = False) -> dict[tuple[str, str], torch.Tensor]:
    """Weights and moments, whole; of a tied one under its first name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tied))
    held = {}
    for name, weight in model.named_parameters():
        held[name, "weight"] = rule(name, weight.shape)
        held |= {(name, kind): value for kind, value in states_of(held[name, "weight"]).items()}
    return held


def plain(folder: str, tied: bool = False, **other: int) -> None:
    """What one process saves: weights by the rule, for `from_pretrained`; of another configuration with `other`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **other}, tie_word_embeddings=tied))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(rule(name, weight.shape))
    model.save_pretrained(folder)


def _run(source: str, tp: int) -> tuple[Any, Any]:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = (
        {"tp_size": tp, "fsdp_size": dist.get_world_size() // tp} if tp > 1 else {"fsdp_size": dist.get_world_size()}
    )
    config = DistributedConfig(**sizes)
    model = LlamaForCausalLM.from_pretrained(source, distributed_config=config, dtype=torch.float32)
    named = list(model.named_parameters())
    groups = [
        {"params": [one for _, one in named if (one.dim() > 1) == heavy], "weight_decay": 0.1 * heavy}
        for heavy in (True, False)
    ]
    return model, torch.optim.AdamW(groups, lr=0.0, foreach=False)


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def _step(model: Any, optimizer: Any) -> None:
    """Begin the optimizer's states; the rate is 0, and weights stay."""
    words = torch.arange(12).reshape(2, 6)
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder: str, source: str, tp: int = 1, optimizer_folder: str = "optimizer", scale: float = 1.0) -> None:
    """Save a run of the weights of `source`; `scale` makes other ones of them."""
    from transformers.distributed import save_optimizer_distributed

    model, adam = _run(source, tp)
    _step(model, adam)
    with torch.no_grad():
        for weight in model.parameters():
            _local(weight).mul_(scale)
            state = adam.state[weight]
            state["step"].fill_(STEP)
            for kind, value in states_of(_local(weight)).items():
                _local(state[kind]).copy_(value)
    for group in adam.param_groups:
        group["lr"] = 0.25
    model.save_pretrained(folder, distributed_checkpoint=True)
    if optimizer_folder:
        save_optimizer_distributed(model, adam, os.path.join(folder, optimizer_folder))


def load(folder: str, optimizer_folder: str, tp: int = 1, tied: bool = False, backwards: bool = False) -> list[str]:
    """Load into a run; the names of what is then not as the rule has it.

    Which of two parts of an element a load takes is the order in which the file system lists files: here by name, or
    `backwards`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem
    from transformers.distributed import load_optimizer_distributed

    listed = FileSystem.ls
    FileSystem.ls = lambda self, path: sorted(listed(self, path), reverse=backwards)
    model, adam = _run(folder, tp)
    load_optimizer_distributed(model, adam, optimizer_folder)
    found = {}
    for name, weight in model.named_parameters():
        found[name, "weight"] = weight.detach()
        found |= {(name, kind): value for kind, value in adam.state[weight].items()}
    whole = {at: value.full_tensor() if hasattr(value, "full_tensor") else value for at, value in found.items()}
    return [str(at) for at, value in expected(tied).items() if at not in whole or not torch.equal(whole[at], value)]


def hf_writer(folder: str) -> None:
    """torch's own writer, of a plain tensor and a DTensor."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(rule("cut", (5, 3)), mesh, [Shard(0)])
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, fqn_to_index_mapping={"cut": 1, "whole": 2})
    dcp.save({"cut": cut, "whole": rule("whole", (3,))}, storage_writer=writer)
    assert Path(folder).is_dir()
