"""The collectives of ds_reshard's own: how many one rank makes in a load, and the bytes that it gives to them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, and the bytes that this rank gave to it: of objects those of their pickle."""

    name: str
    nbytes: int


@contextmanager
def counted() -> Iterator[list[Collective]]:
    """The collectives that ds_reshard calls in the block; those that DeepSpeed or torch call inside are not its own."""
    import torch.distributed as dist

    seen: list[Collective] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("ds_reshard."):
                seen.append(Collective(name=name, nbytes=_given(name, args)))
            return original(*args, **kwargs)

        return call

    patches = [mock.patch.object(dist, name, watched(name, getattr(dist, name))) for name in NAMES]
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def _given(name: str, args: tuple[Any, ...]) -> int:
    import torch.distributed as dist

    if name == "all_gather_object":
        return len(pickle.dumps(args[1]))
    if name == "broadcast_object_list":
        return len(pickle.dumps(args[0])) if dist.get_rank() == 0 else 0
    return sum(arg.nbytes for arg in args if hasattr(arg, "nbytes"))
