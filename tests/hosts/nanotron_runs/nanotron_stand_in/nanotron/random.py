"""Synthetic: the random states that a checkpoint keeps of each rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class RandomState:
    random: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None


class RandomStates(MutableMapping[str, RandomState]):
    def __init__(self, held: dict[str, RandomState]) -> None:
        self._dict = dict(held)

    def __getitem__(self, name: str) -> RandomState:
        return self._dict[name]

    def __setitem__(self, name: str, value: RandomState) -> None:
        if name not in self._dict:
            raise ValueError("Can't add a new random states after initialisation")
        self._dict[name] = value

    def __delitem__(self, name: str) -> None:
        raise ValueError("Can't delete a random states key")

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)


def get_current_random_state() -> RandomState:
    return RandomState(random.getstate(), np.random.get_state(), torch.random.get_rng_state(), None)
