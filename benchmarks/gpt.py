"""A decoder-only transformer in plain torch, sized by its number of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Width and depth; a block has 12 * width**2 parameters and a few more."""

    width: int
    layers: int
    vocabulary: int = 4096
    heads: int = 8

    @classmethod
    def of(cls, params: int) -> Shape:
        """The shape whose parameters come nearest to `params`."""
        width = 1024 if params >= 100_000_000 else 256
        blocks = params - 2 * cls(width=width, layers=0).vocabulary * width
        return cls(width=width, layers=max(1, round(blocks / (12 * width**2))))


class Block(nn.Module):
    """Attention, then a four times wider perceptron, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.before_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.before_mlp(hidden))))


class GPT(nn.Module):
    """The model; calling it with tokens gives the loss of predicting each from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


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
