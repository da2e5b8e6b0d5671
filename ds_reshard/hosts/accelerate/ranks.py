"""What the ranks tell each other."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def everyone(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective.

    By torch and not by accelerate, which on a host without an accelerator believes that it is alone
    (`PartialState`, accelerate/state.py, 1.15.0, where no backend is given).
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
