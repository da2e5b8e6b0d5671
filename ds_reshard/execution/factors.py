"""The factors of the fingerprint's words and blocks, and words of memory that a device holds, summed where they lie."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise

import numpy
import torch

from ds_reshard.execution.word_kernel import BLOCK_THREADS, Kernel, compiled

BLOCK_WORDS = 16384
BLOCK_NBYTES = 4 * BLOCK_WORDS
Wide = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]
# Twice as many bytes of products: what stays of them in the cache of a device is not brought from memory to be summed.
_PORTION_NBYTES = 256 * BLOCK_NBYTES
_LAUNCH_WORDS = 1 << 30
_GROUPS = 512
_MASK = 2**64 - 1
_FIRST_BLOCK = 2**32
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INCREMENT = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    """The first output of the generator splitmix64 (Steele, Lea, Flood 2014) that is seeded with x."""
    x = (x + _INCREMENT) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


def word_factor(j: int) -> int:
    """T(j), the factor of word j of a block."""
    return splitmix64(j) | 1


@lru_cache(maxsize=1 << 16)
def block_factor(b: int) -> int:
    """K(b), the factor of block b."""
    return splitmix64(_FIRST_BLOCK + b) | 1


@cache
def word_factors() -> Wide:
    """T of every word of a block."""
    return numpy.array([word_factor(j) for j in range(BLOCK_WORDS)], dtype=numpy.uint64).view(numpy.int64)


def block_factors(first: int, number: int, device: torch.device) -> torch.Tensor:
    """K of `number` blocks from `first` on, made where they are wanted: int64, modulo 2**64."""
    x = torch.arange(number, dtype=torch.int64, device=device) + _signed((_FIRST_BLOCK + first + _INCREMENT) & _MASK)
    x = (x ^ _shifted(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MULTIPLIERS[1])
    made: torch.Tensor = (x ^ _shifted(x, 31)) | 1
    return made


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted to the right, zeros coming in."""
    shifted: torch.Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def sum_on_device(byte_position: int, data: torch.Tensor) -> torch.Tensor:
    """The sum over a contiguous tensor that begins at `byte_position` of the whole: one int64, modulo 2**64.

    It lies where the tensor lies, and is not waited for. Words that lie at multiples of four bytes are summed by a
    kernel, where there is one; others, and parts of words, by operations of torch.
    """
    flat = data.detach().view(-1).view(torch.uint8)
    kernel, lead = kernel_on(flat.device), min(len(flat), -byte_position % 4)
    end = len(flat) - (len(flat) - lead) % 4
    if kernel is None or lead == end or (flat.data_ptr() + lead) % 4 or (flat.storage_offset() + lead) % 4:
        return _by_products(byte_position, flat)
    total = _by_kernel(kernel, (byte_position + lead) // 4, flat[lead:end].view(torch.int32))
    for start, stop in ((0, lead), (end, len(flat))):
        if start < stop:
            total += _by_products(byte_position + start, flat[start:stop])
    return total


@cache
def kernel_on(device: torch.device) -> Kernel | None:
    """The kernel of a device, if it gives there what operations of torch give."""
    kernel = compiled(device)
    if kernel is None:
        return None
    first, words = 3 * BLOCK_WORDS + 7, torch.arange(-40_000, 40_000, dtype=torch.int32, device=device) * 53_687
    same = torch.equal(_by_kernel(kernel, first, words), _by_products(4 * first, words.view(torch.uint8)))
    return kernel if same else None


def _by_kernel(kernel: Kernel, first: int, words: torch.Tensor) -> torch.Tensor:
    """The sum over words from number `first` on."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for at in range(0, len(words), _LAUNCH_WORDS):
        part = words[at : at + _LAUNCH_WORDS]
        block, inside = divmod(first + at, BLOCK_WORDS)
        groups = min(_GROUPS, -(-(inside + len(part)) // BLOCK_WORDS))
        sums = torch.empty(groups * BLOCK_THREADS, dtype=torch.int64, device=words.device)
        with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
            kernel(
                grid=(groups, 1, 1),
                block=(BLOCK_THREADS, 1, 1),
                args=[part, len(part), block, inside, _table_on(words.device), sums],
            )
        total += sums.sum()
    return total


def _by_products(byte_position: int, flat: torch.Tensor) -> torch.Tensor:
    """The sum over bytes; CUDA has no matrix product of integers (2.13), so products are made, then summed.

    Whole blocks are read in place, if they begin at a multiple of four bytes of memory; others are padded.
    """
    first, lead = divmod(byte_position, BLOCK_NBYTES)
    sums = torch.zeros(-(-(lead + len(flat)) // BLOCK_NBYTES), dtype=torch.int64, device=flat.device)
    head = min(len(flat), -byte_position % BLOCK_NBYTES)
    tail = len(flat) - (len(flat) - head) % BLOCK_NBYTES
    for start, stop in pairwise((0, *range(head, tail, _PORTION_NBYTES), tail, len(flat))):
        if start < stop:
            block, inside = divmod(lead + start, BLOCK_NBYTES)
            words = _in_blocks(flat[start:stop], inside)
            torch.sum(words * _table_on(flat.device), 1, out=sums[block : block + len(words)])
    return (sums * block_factors(first, len(sums), flat.device)).sum()


def _in_blocks(part: torch.Tensor, inside: int) -> torch.Tensor:
    """Bytes that begin at `inside` of a block, as rows of words: in place where that can be, else with zeros around."""
    rows = -(-(inside + len(part)) // BLOCK_NBYTES)
    if len(part) != rows * BLOCK_NBYTES or part.storage_offset() % 4 or part.data_ptr() % 4:
        padded = torch.zeros(rows * BLOCK_NBYTES, dtype=torch.uint8, device=part.device)
        padded[inside : inside + len(part)] = part
        part = padded
    return part.view(torch.int32).view(rows, BLOCK_WORDS)


@cache
def _table_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(word_factors()).to(device)
