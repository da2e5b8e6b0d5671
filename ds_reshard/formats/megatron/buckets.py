"""The flat buffers of Megatron-LM's distributed optimizer: which elements of which parameter lie where.

Neither names nor shapes are saved with them. Sizes and padding are recomputed by Megatron's rule (0.16.1
core/distributed/param_and_grad_buffer.py 632-759, 0.18.2 and 0.19.2 core/optimizer/distrib_optimizer.py and
param_layout.py: the three give the same) and compared with what was saved; that each weight is the cast of its master
proves the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.model.region import Box, Region, boxes

_ALIGNMENT, _BUCKET_ALIGNMENT, _FAST_ALIGNMENT = 64, 128, 1 << 16
_LEAST_BUCKET, _LEAST_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one model-parallel rank holds of a parameter: boxes of it, in the order in which they lie in memory.

    `shared` is true of an embedding that first and last stage both have.
    """

    name: str
    boxes: tuple[Box, ...]
    shared: bool = False

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Slots by where each begins in it; `numel` is with the padding at the end, `unpadded` without."""

    slots: tuple[tuple[int, Slot], ...]
    numel: int
    unpadded: int


def buckets_of(slots: Sequence[Slot], *, bucket_size: int | None, dp: int, fast: bool) -> list[Bucket]:
    """The buckets of one buffer, of parameters in the model's order: they are laid out from the last to the first."""
    made: list[Bucket] = []
    held: list[tuple[int, Slot]] = []
    multiple = math.lcm(dp, _BUCKET_ALIGNMENT, _FAST_ALIGNMENT if fast else 1)
    end = 0

    def close(unpadded: int) -> int:
        made.append(Bucket(slots=tuple(held), numel=_padded(unpadded, multiple), unpadded=unpadded))
        held.clear()
        return 0

    for slot in reversed(slots):
        start = _padded(end, _ALIGNMENT)
        if slot.shared and held:
            start = close(start)
        held.append((start, slot))
        end = start + slot.numel
        if slot.shared or (bucket_size is not None and end >= bucket_size):
            end = close(end)
    if held:
        close(end)
    return made


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def bucket_size_of(arguments: Mapping[str, object], stage: int, chunk: int) -> int | None:
    """At how many elements a bucket is closed, None for one bucket (megatron/training/training.py, `get_model`).

    ValueError for --ddp-num-buckets, which counts parameters that no file tells.
    """
    if not arguments.get("overlap_grad_reduce") or stage or chunk:
        return None
    if arguments.get("overlap_param_gather_with_optimizer_step"):
        return None
    if arguments.get("ddp_num_buckets"):
        raise ValueError("--ddp-num-buckets")
    asked = arguments.get("ddp_bucket_size")
    return asked if isinstance(asked, int) and asked else max(_LEAST_BUCKET, _LEAST_PER_RANK * shards_of(arguments))


def shards_of(arguments: Mapping[str, object]) -> int:
    """Over how many ranks a buffer of the dense parameters is cut: data and context parallelism together."""
    sizes = [arguments.get(name) for name in ("data_parallel_size", "context_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def boxes_between(box: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements [start, stop) of a box, row-major, as boxes: each with the element of it at which it begins."""
    at = start
    for part in boxes(Region(box=box, start=start, stop=stop)):
        yield at, part
        at += part.numel
