"""Whether two runs hold the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpt_demo.layouts import Contents, Key

KINDS = ("weight", "fp32", "exp_avg", "exp_avg_sq", "step")


class Joined:
    """A run's tensors, whole again from the files of all its ranks."""

    def __init__(self, files: list[Path]) -> None:
        shares: list[Contents] = [torch.load(file, weights_only=False) for file in files]
        self.facts = [share.facts for share in shares]
        pieces: dict[Key, list[tuple[int, torch.Tensor]]] = {}
        for share in shares:
            for key, piece in share.pieces.items():
                pieces.setdefault(key, []).append(piece)
        self.tensors = {key: _join(key, parts) for key, parts in pieces.items()}


def _join(key: Key, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Pieces end to end; what several ranks hold whole must be the same on each of them."""
    if key[1] in ("weight", "step"):
        if not all(same_bits(parts[0][1], part) for _, part in parts):
            raise ValueError(f"the ranks hold different values of {key[1]} of {key[0]}")
        return parts[0][1]
    at = 0
    for first, part in sorted(parts, key=lambda piece: piece[0]):
        if first != at:
            raise ValueError(f"{key[1]} of {key[0]} has a hole: element {at} is on no rank")
        at += part.numel()
    return torch.cat([part for _, part in sorted(parts, key=lambda piece: piece[0])])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, size and every bit, the sign of a zero included."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass
class Comparison:
    """For each kind of tensor: how many of the saved ones the resumed run holds bit for bit, of how many."""

    counts: dict[str, tuple[int, int]]
    facts_equal: bool
    nbytes: int

    @property
    def equal(self) -> bool:
        return self.facts_equal and all(equal == total > 0 for equal, total in self.counts.values())


def compare(saved: Joined, resumed: Joined) -> Comparison:
    """Every tensor of the saved run against the resumed one's; what only one of them has counts as different."""
    counts = {}
    for kind in KINDS:
        keys = {key for key in {**saved.tensors, **resumed.tensors} if key[1] == kind}
        both = [key for key in keys if key in saved.tensors and key in resumed.tensors]
        counts[kind] = sum(same_bits(saved.tensors[key], resumed.tensors[key]) for key in both), len(keys)
    others = {key for key in {**saved.tensors, **resumed.tensors} if key[1] not in KINDS}
    facts_equal = not others and all(facts == saved.facts[0] for facts in [*saved.facts, *resumed.facts])
    nbytes = sum(tensor.nbytes for tensor in saved.tensors.values())
    return Comparison(counts=counts, facts_equal=facts_equal, nbytes=nbytes)
