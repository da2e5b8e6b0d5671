"""How runs are laid out and how long they are, and what they report: plain values that travel between processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

GLOBAL_BATCH = 12
WARMUP = 20


@dataclass(frozen=True)
class Layout:
    """How a run is spread: ranks and ZeRO stage."""

    ranks: int
    stage: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, ZeRO-{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Steps of the whole run, and the step after which the checkpoint is written."""

    steps: int
    checkpoint: int

    def rate(self, step: int) -> float:
        """The factor of the learning rate: a warm-up, then half a cosine down to a tenth."""
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (self.steps - WARMUP))


@dataclass(frozen=True)
class Outcome:
    """What rank 0 reports: the loss of each step after `first_step`, and the seconds of the save or the load.

    `refusal` is what DeepSpeed alone answered to the same load.
    """

    first_step: int
    losses: list[float]
    seconds: float = 0.0
    refusal: str = ""


Key = tuple[str, str]


@dataclass
class Contents:
    """One rank's share: pieces of logical tensors by (parameter, kind), each with its first element.

    `facts` are what every rank holds whole: hyper-parameters of the param groups, schedule, counters.
    """

    pieces: dict[Key, tuple[int, torch.Tensor]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
