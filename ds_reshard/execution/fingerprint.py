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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy
import torch

from ds_reshard.execution.buffers import memory_of
from ds_reshard.execution.factors import BLOCK_NBYTES, BLOCK_WORDS, Wide, block_factor, sum_on_device, word_factors
from ds_reshard.model.codec import ElementType
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region, overlap

_WORD_NBYTES = 4
_BLOCKS = 16
_MASK = 2**64 - 1

Bytes = bytes | bytearray | memoryview


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

    Each thread that adds keeps 2 MiB of scratch memory. What lies on a device is summed there, in the stream that is
    current, and not waited for before a fingerprint is asked for.
    """

    def __init__(self) -> None:
        self._sums: dict[TensorKey, tuple[int, int]] = {}
        self._elsewhere: dict[TensorKey, list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def __getitem__(self, key: TensorKey) -> Fingerprint:
        """What was added so far; nothing for a key that is not known."""
        with self._lock:
            value, nbytes = self._sums.get(key, (0, 0))
            if key in self._elsewhere:
                value = (value + sum(int(part) for part in self._elsewhere.pop(key))) & _MASK
                self._sums[key] = value, nbytes
        return Fingerprint(value=value, nbytes=nbytes)

    def add(self, key: TensorKey, byte_position: int, data: Bytes | torch.Tensor) -> None:
        """Add bytes that begin at `byte_position` of the whole tensor: memory, or a contiguous tensor."""
        if not isinstance(data, torch.Tensor):
            value, nbytes = self._sum(byte_position, memoryview(data).cast("B"))
        elif data.device.type == "cpu":
            value, nbytes = self._sum(byte_position, memory_of(data))
        else:
            self.add_elsewhere(key, byte_position, data)
            return
        with self._lock:
            before, seen = self._sums.get(key, (0, 0))
            self._sums[key] = (before + value) & _MASK, seen + nbytes

    def add_elsewhere(self, key: TensorKey, byte_position: int, data: torch.Tensor) -> None:
        """The same for a tensor of any device, by operations of that device."""
        part = sum_on_device(byte_position, data)
        with self._lock:
            value, seen = self._sums.get(key, (0, 0))
            self._sums[key] = value, seen + data.numel() * data.element_size()
            parts = self._elsewhere.setdefault(key, [])
            if parts and parts[-1].device == part.device:
                parts[-1] += part
            else:
                parts.append(part)

    def add_all(self, parts: Iterable[tuple[TensorKey, int, memoryview]]) -> None:
        """Add many parts, each a key, a position and bytes as for `add`; small ones are summed together."""
        small: list[tuple[TensorKey, int, int, Words]] = []
        for key, byte_position, data in parts:
            if len(data) > BLOCK_NBYTES or byte_position % _WORD_NBYTES or len(data) % _WORD_NBYTES or not data:
                self.add(key, byte_position, data)
                continue
            block, inside = divmod(byte_position // _WORD_NBYTES, BLOCK_WORDS)
            words, left = _as_words(data), BLOCK_WORDS - inside
            small.append((key, block, inside, words[:left]))
            if len(words) > left:
                small.append((key, block + 1, 0, words[left:]))
        if small:
            self._add_small(small)

    def _add_small(self, parts: list[tuple[TensorKey, int, int, Words]]) -> None:
        """Add words, each run inside one block."""
        factors = word_factors()
        runs = [factors[inside : inside + len(words)] for _, _, inside, words in parts]
        starts = list(accumulate((len(words) for *_, words in parts[:-1]), initial=0))
        products = numpy.concatenate([words for *_, words in parts]) * numpy.concatenate(runs)
        totals = numpy.add.reduceat(products, starts).tolist()
        with self._lock:
            for (key, block, _, words), total in zip(parts, totals, strict=True):
                before, seen = self._sums.get(key, (0, 0))
                self._sums[key] = (before + block_factor(block) * total) & _MASK, seen + words.nbytes

    def add_region(self, key: TensorKey, shape: tuple[int, ...], region: Region, data: torch.Tensor) -> None:
        """Add the elements of `region` of a tensor of that shape; `data` holds them as the region stores them."""
        flat = data.detach().reshape(-1)
        whole = Box.whole(shape)
        for run in overlap(region, Region(box=whole, start=0, stop=whole.numel)):
            part = flat[run.first_offset : run.first_offset + run.numel]
            self.add(key, run.second_offset * flat.element_size(), part)

    def _sum(self, byte_position: int, data: memoryview) -> tuple[int, int]:
        """The sum over some bytes, not reduced, and their number."""
        if not hasattr(self._scratch, "wide"):
            self._scratch.wide = numpy.empty(_BLOCKS * BLOCK_WORDS, dtype=numpy.int64)
        return sum(_sum_of_words(*run, self._scratch.wide) for run in _words(byte_position, data)), len(data)


class FingerprintTarget:
    """A tensor that is read for its fingerprint alone, and kept nowhere; it is summed on `device`, or on the host."""

    def __init__(self, sums: Fingerprints, key: TensorKey, device: torch.device | None = None) -> None:
        self._sums = sums
        self._key = key
        self._device = device

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        position = element_offset * dtype.itemsize
        if self._device is None:
            self._sums.add(self._key, position, data)
        else:
            there = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
            self._sums.add_elsewhere(self._key, position, there)

    def zero(self, element_offset: int, numel: int) -> None:
        """Nothing: zeros add nothing."""


def fingerprint_of(data: Bytes | torch.Tensor) -> Fingerprint:
    """The fingerprint of a whole tensor, given as its row-major bytes or as a contiguous tensor."""
    key, sums = TensorKey(name="", kind=""), Fingerprints()
    sums.add(key, 0, data)
    return sums[key]


Words = numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]
_WORD = numpy.dtype("<i4")


def _words(byte_position: int, data: memoryview) -> Iterator[tuple[int, Words]]:
    """The bytes as words, each run with the number of its first; what is cut of a word is zero."""
    first, lead = divmod(byte_position, _WORD_NBYTES)
    if not lead and data and not len(data) % _WORD_NBYTES:
        yield first, _as_words(data)
        return
    head = data[: _WORD_NBYTES - lead] if lead else data[:0]
    if head:
        yield first, _as_words(bytes(lead) + bytes(head) + bytes(_WORD_NBYTES - lead - len(head)))
        first += 1
    whole = (len(data) - len(head)) // _WORD_NBYTES
    if whole:
        yield first, _as_words(data[len(head) : len(head) + whole * _WORD_NBYTES])
    tail = bytes(data[len(head) + whole * _WORD_NBYTES :])
    if tail:
        yield first + whole, _as_words(tail + bytes(_WORD_NBYTES - len(tail)))


def _as_words(data: bytes | memoryview) -> Words:
    return numpy.frombuffer(data, _WORD)


def _sum_of_words(first: int, words: Words, wide: Wide) -> int:
    """The sum over words that begin with number `first`; numpy, unlike torch, starts no threads beside the readers."""
    block, inside = divmod(first, BLOCK_WORDS)
    if inside + len(words) <= BLOCK_WORDS:
        return block_factor(block) * int(numpy.dot(words, word_factors()[inside : inside + len(words)]))
    total, at = 0, 0
    while at < len(words):
        block, inside = divmod(first + at, BLOCK_WORDS)
        part = words[at : at + len(wide) - inside]
        rows = -(-(inside + len(part)) // BLOCK_WORDS)
        wide[:inside] = 0
        numpy.copyto(wide[inside : inside + len(part)], part)
        wide[inside + len(part) : rows * BLOCK_WORDS] = 0
        sums = numpy.einsum("ij,j->i", wide[: rows * BLOCK_WORDS].reshape(rows, -1), word_factors()).tolist()
        total += sum(block_factor(block + row) * value for row, value in enumerate(sums))
        at += len(part)
    return total
