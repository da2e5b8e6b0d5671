"""A 64-bit fingerprint of a tensor's bytes that does not depend on how the tensor is cut.

The row-major little-endian bytes, zero-padded to whole words, are signed 32-bit words w_0, w_1, ...; word i is
number j = i mod 16384 of block b = i div 16384, and

    fingerprint = sum over i of K(b) * T(j) * w_i   modulo 2**64,
    T(j) = splitmix64(j) | 1,   K(b) = splitmix64(2**32 + b) | 1.

The sum is linear in the bytes: any range of them, padded with zeros to whole words, is summed by itself, and the
parts are added in any order. docs/fingerprint.md has test vectors, and what the function sees.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from ds_reshard.model.codec import ElementType
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region, overlap

BLOCK_WORDS = 16384
_WORD_NBYTES = 4
_BLOCK_NBYTES = BLOCK_WORDS * _WORD_NBYTES
_BLOCKS = 16
_MASK = 2**64 - 1
_FIRST_BLOCK = 2**32

Bytes = bytes | bytearray | memoryview


def splitmix64(x: int) -> int:
    """The first output of the generator splitmix64 (Steele, Lea, Flood 2014) that is seeded with x."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def word_factor(j: int) -> int:
    """T(j), the factor of word j of a block."""
    return splitmix64(j) | 1


def block_factor(b: int) -> int:
    """K(b), the factor of block b."""
    return splitmix64(_FIRST_BLOCK + b) | 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The sum over `nbytes` bytes of a tensor; parts that do not overlap are added up."""

    value: int = 0
    nbytes: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(value=(self.value + other.value) & _MASK, nbytes=self.nbytes + other.nbytes)

    def __str__(self) -> str:
        return f"{self.value:016x}"


class Fingerprints:
    """Fingerprints of tensors by key, summed part by part: any part, in any order, from any thread.

    Each thread that adds keeps 3 MiB of scratch memory for each device.
    """

    def __init__(self) -> None:
        self._sums: dict[TensorKey, Fingerprint] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def __getitem__(self, key: TensorKey) -> Fingerprint:
        """What was added so far; nothing for a key that is not known."""
        return self._sums.get(key, Fingerprint())

    def add(self, key: TensorKey, byte_position: int, data: Bytes | torch.Tensor) -> None:
        """Add bytes that begin at `byte_position` of the whole tensor: memory, or a contiguous tensor."""
        part = Fingerprint()
        for at, chunk in _chunks(byte_position, data):
            part += Fingerprint(value=self._scratch_on(chunk.device).sum(at, chunk), nbytes=chunk.numel())
        with self._lock:
            self._sums[key] = self[key] + part

    def add_region(self, key: TensorKey, shape: tuple[int, ...], region: Region, data: torch.Tensor) -> None:
        """Add the elements of `region` of a tensor of that shape; `data` holds them as the region stores them."""
        flat = data.detach().reshape(-1)
        whole = Box.whole(shape)
        for run in overlap(region, Region(box=whole, start=0, stop=whole.numel)):
            part = flat[run.first_offset : run.first_offset + run.numel]
            self.add(key, run.second_offset * flat.element_size(), part)

    def _scratch_on(self, device: torch.device) -> _Scratch:
        found: dict[torch.device, _Scratch] = self._scratch.__dict__.setdefault("by_device", {})
        if device not in found:
            found[device] = _Scratch(device)
        return found[device]


class FingerprintTarget:
    """A tensor that is read for its fingerprint alone, and kept nowhere."""

    def __init__(self, sums: Fingerprints, key: TensorKey) -> None:
        self._sums = sums
        self._key = key

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        self._sums.add(self._key, element_offset * dtype.itemsize, data)

    def zero(self, element_offset: int, numel: int) -> None:
        """Nothing: zeros add nothing."""


def fingerprint_of(data: Bytes | torch.Tensor) -> Fingerprint:
    """The fingerprint of a whole tensor, given as its row-major bytes or as a contiguous tensor."""
    key, sums = TensorKey(name="", kind=""), Fingerprints()
    sums.add(key, 0, data)
    return sums[key]


def _chunks(byte_position: int, data: Bytes | torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes as flat uint8 tensors, each within one block, or of up to `_BLOCKS` whole ones."""
    view = data.detach().view(-1).view(torch.uint8) if isinstance(data, torch.Tensor) else memoryview(data).cast("B")
    at, nbytes = 0, len(view)
    while at < nbytes:
        inside = (byte_position + at) % _BLOCK_NBYTES
        whole = (nbytes - at) // _BLOCK_NBYTES * _BLOCK_NBYTES
        limit = _BLOCK_NBYTES - inside if inside else min(whole, _BLOCKS * _BLOCK_NBYTES) or _BLOCK_NBYTES
        take = min(nbytes - at, limit)
        yield byte_position + at, _as_tensor(view[at : at + take])
        at += take


def _as_tensor(view: memoryview | torch.Tensor) -> torch.Tensor:
    if isinstance(view, torch.Tensor):
        return view
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


@cache
def _word_factors(device: torch.device) -> torch.Tensor:
    signed = [factor - 2**64 if (factor := word_factor(j)) >= 2**63 else factor for j in range(BLOCK_WORDS)]
    return torch.tensor(signed, dtype=torch.int64, device=device)


class _Scratch:
    """Memory of one thread in which bytes become words, and words 64-bit numbers."""

    def __init__(self, device: torch.device) -> None:
        self._factors = _word_factors(device)
        self._words = torch.empty(_BLOCKS * BLOCK_WORDS, dtype=torch.int32, device=device)
        self._wide = torch.empty(_BLOCKS * BLOCK_WORDS, dtype=torch.int64, device=device)

    def sum(self, byte_position: int, data: torch.Tensor) -> int:
        """The sum over one chunk."""
        block, inside = divmod(byte_position, _BLOCK_NBYTES)
        first, lead = divmod(inside, _WORD_NBYTES)
        words = self._as_words(lead, data)
        rows, columns = -(-words.numel() // BLOCK_WORDS), min(words.numel(), BLOCK_WORDS)
        wide = self._wide[: rows * columns]
        _copy(wide, words)
        sums: list[int] = _row_sums(wide.view(rows, columns), self._factors[first : first + columns]).tolist()
        return sum(block_factor(block + row) * part for row, part in enumerate(sums)) & _MASK

    def _as_words(self, lead: int, data: torch.Tensor) -> torch.Tensor:
        """The bytes as words, those before and behind them in the first and last word zero."""
        places = (lead, data.numel(), data.data_ptr(), data.storage_offset())
        if not any(place % _WORD_NBYTES for place in places):
            return data.view(torch.int32)
        words = self._words[: -(-(lead + data.numel()) // _WORD_NBYTES)]
        words[0] = words[-1] = 0
        _copy(words.view(torch.uint8)[lead : lead + data.numel()], data)
        return words


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy in parts too small for torch to start threads of its own (from 32768 elements on): the readers are many."""
    for part, values in zip(torch.split(to, BLOCK_WORDS), torch.split(of, BLOCK_WORDS), strict=True):
        part.copy_(values)


def _row_sums(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Each row times the factors, modulo 2**64. CUDA has no matrix product of integers (torch 2.13)."""
    return torch.mv(rows, factors) if rows.device.type == "cpu" else (rows * factors).sum(1)
