"""The parameters of a decoder-only transformer, as many as are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Width and depth; a block has 12 * width**2 parameters and a few more."""

    width: int
    layers: int
    vocabulary: int = 4096

    @classmethod
    def of(cls, params: int) -> Shape:
        """The shape whose parameters come nearest to `params`."""
        width = 1024 if params >= 100_000_000 else 256
        blocks = params - 2 * cls(width=width, layers=0).vocabulary * width
        return cls(width=width, layers=max(1, round(blocks / (12 * width**2))))


class Block(nn.Module):
    """The parameters of attention, and of a four times wider perceptron."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)


class GPT(nn.Module):
    """The model. It has no forward: it is saved and loaded here, and nobody calls it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)


def build(shape: Shape, *, filled: bool) -> GPT:
    """The bf16 model on the CPU; `filled` gives it random weights, otherwise they are ones (cheap, and overwritten).

    Random numbers are drawn once and rolled for each parameter: no two are equal, and 270M take a second.
    """
    with torch.device("meta"):
        model = GPT(shape).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    noise = torch.randn(4 * shape.width**2 + 1, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            if not filled or param.dim() == 1:
                param.fill_(1.0 if param.dim() > 1 else 0.5)
                continue
            flat, drawn = param.view(-1), noise.roll(number * 9973)
            for at in range(0, flat.numel(), drawn.numel()):
                flat[at : at + drawn.numel()] = drawn[: flat.numel() - at]
    return model
