"""What the runs of `grid_jobs.py` save, as whole tensors by name: the rule's values, written down without a rank."""

from __future__ import annotations

import torch
from grid_cases import Grid
from grid_models import (
    EXPERTS,
    VOCABULARIES,
    VOCABULARY,
    WIDTH,
    Cut,
    Expert,
    divided_block,
    expert_sizes,
    moments,
    numbers,
)

Tensors = dict[tuple[str, str], torch.Tensor]


def masters(grid: Grid) -> dict[str, torch.Tensor]:
    """Every trained parameter of the model, whole; of what stages have copies of, the first's."""
    return {"pipeline": _pipeline, "autotp": _autotp, "cut": _cut, "moe": _moe}[grid.kind](grid)


def tensors(grid: Grid) -> Tensors:
    """Each with its moments and, where a file has it, its weight, by name and kind: what is trained, after one step."""
    found: Tensors = {}
    weights = torch.bfloat16 if grid.dtype == "bf16" else torch.float32
    for name, value in masters(grid).items():
        master = value.float()
        found[name, "fp32"] = master
        if grid.stage != 3 and not (grid.layers == "no file" and name.startswith("tied_modules.")):
            found[name, "weight"] = master.to(weights)
        # DeepSpeed divides the gradients of experts by all data-parallel ranks, of which only some have them
        share = expert_sizes(grid)[int(name.split(".")[1])] if ".deepspeed_experts." in name else 1
        found |= {(name, kind): moment for kind, moment in moments(master / share).items()}
    return found


def _pipeline(grid: Grid) -> dict[str, torch.Tensor]:
    tied = "tied_modules.embed"
    norm = {"6.g": numbers(400, 9), "6.m": numbers(420, 3, 2)}
    if grid.layers.startswith("divided"):
        own = {f"{at}.{name}": value for at, start in _blocks() for name, value in divided_block(start).items()}
        return {f"{tied}.weight": numbers(0, 12, 3), f"{tied}.position": numbers(40, 3), **own, **norm}
    blocks = {
        f"{at}.{name}": numbers(start + 50 * (name == "b"), *shape) for at, start in _blocks() for name, shape in _BLOCK
    }
    return {f"{tied}.weight": numbers(0, 11, 3), f"{tied}.position": numbers(40, 3), **blocks, **norm}


_BLOCK = (("w", (5, 7)), ("b", (7,)))


def _blocks() -> list[tuple[int, int]]:
    return [(1, 100), (2, 200), (4, 300)]


def _autotp(grid: Grid) -> dict[str, torch.Tensor]:
    found, start = {}, 0
    for name, parameter in Cut(few=grid.layers == "few").named_parameters():
        if parameter.requires_grad:
            found[name] = numbers(start, *parameter.shape)
        start += parameter.numel()
    return found


def _cut(grid: Grid) -> dict[str, torch.Tensor]:
    vocabulary = VOCABULARIES.get(grid.layers, VOCABULARY)
    return {
        "embed": numbers(0, vocabulary, WIDTH),
        "gate_up": torch.cat([numbers(100, 8, 6), numbers(200, 8, 6)]),
        "qkv": torch.cat([numbers(300 + 100 * n, rows, 6) for n, rows in enumerate((8, 4, 4))]),
        "row": numbers(600, 6, 8),
        "norm": numbers(700, 6),
    }


def _moe(grid: Grid) -> dict[str, torch.Tensor]:
    """Names and order as `named_parameters` of `grid_models` has them, experts counted through all ranks."""
    dense = {"dense.weight": (4, 4), "dense.bias": (4,), "moe.0.deepspeed_moe.gate.wg.weight": (EXPERTS, 4)}
    dense |= {"moe.1.deepspeed_moe.gate.wg.weight": (EXPERTS, 4)}
    dense |= {f"moe.1.mlp.{name}": tuple(p.shape) for name, p in Expert().named_parameters()}
    dense |= {"moe.1.coefficient.weight": (2, 4), "moe.1.coefficient.bias": (2,)}
    found, start = {}, 0
    for name, shape in dense.items():
        found[name] = numbers(start, *shape)
        start += found[name].numel()
    for layer in range(2):
        for expert in range(EXPERTS):
            start = 1000 + 1000 * layer + 100 * expert
            for name, parameter in Expert().named_parameters():
                key = f"moe.{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{name}"
                found[key] = numbers(start, *parameter.shape)
                start += parameter.numel()
    return found
