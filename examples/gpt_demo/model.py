"""A byte-level GPT in plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
WIDTH = 128
HEADS = 4
LAYERS = 4


class Linear(nn.Linear):
    """Weights may be bf16; the arithmetic is fp32, since few CPUs have any other that is fast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


class Norm(nn.LayerNorm):
    """Weights may be bf16; the arithmetic is fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Positions(nn.Module):
    """A learned vector for each place in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONTEXT, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() + self.weight.float()


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = Norm(WIDTH)
        self.query_key_value = Linear(WIDTH, 3 * WIDTH)
        self.attended = Linear(WIDTH, WIDTH)
        self.feed_norm = Norm(WIDTH)
        self.feed = nn.Sequential(Linear(WIDTH, 4 * WIDTH), nn.GELU(), Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).split(WIDTH, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """Predicts the next byte; `forward` gives the mean loss in nats. The head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = Norm(WIDTH)
        self.head = Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.positions(self.bytes(text[:, :-1]))))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())
