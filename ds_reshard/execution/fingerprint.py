"""Fingerprints: 64 bits of a tensor's bytes that do not depend on how the tensor is cut, and two ways to find them.

The row-major little-endian bytes, zero-padded to whole words, are signed 32-bit words w_0, w_1, ...; word i is
number j = i mod 16384 of block b = i div 16384, and

    fingerprint = sum over i of K(b) * T(j) * w_i   modulo 2**64,
    T(j) = splitmix64(j) | 1,   K(b) = splitmix64(2**32 + b) | 1.

The sum is linear in the bytes: any range of them, padded with zeros to whole words, is summed by itself, and the
parts are added in any order. docs/fingerprint.md has test vectors, and what the function sees.

Host memory is summed by numpy, which is twice as fast as torch on a CPU, many times for small parts, and starts no
threads beside the readers. Memory of a device is summed there by operations of torch, which run on any device.

A load is proved by two sums of the same tensor. Bytes that are read count at the place that the source's layout gives
them in the file (`Witness`); bytes in memory count at the place that the target's layout gives them there (`held`). A
plan, an executor or a framework that puts bytes elsewhere, loses or changes some, makes the two differ.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray

from ds_reshard.execution.buffers import casts_alike, memory_of, torch_dtype
from ds_reshard.execution.interfaces import Strides
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Region, overlap
from ds_reshard.planning.copies import (
    BUFFER,
    BYTE_OFFSET,
    ELEMENT_OFFSET,
    NUMEL,
    RECORD,
    SPREAD,
    TYPES,
    Copies,
    Copy,
    Numbers,
    Types,
)
from ds_reshard.planning.plan import Match

BLOCK_WORDS = 16384
BLOCK_NBYTES = 4 * BLOCK_WORDS
_HOST_PORTION_NBYTES = 16 * BLOCK_NBYTES
_SPREAD_PORTION = 1 << 15  # elements; each takes some 64 bytes while it is summed
# Products take twice as much: what stays of them in the cache of a device is not brought from memory to be summed.
_DEVICE_PORTION_NBYTES = 256 * BLOCK_NBYTES
_MASK = 2**64 - 1
_FIRST_BLOCK = 2**32

Bytes = bytes | bytearray | memoryview
_Words = numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]
_Wide = NDArray[numpy.int64]
_Factors = TypeVar("_Factors", _Wide, torch.Tensor)


def signed(value: int) -> int:
    """The int64 that has the bits of `value` modulo 2**64."""
    return (value + 2**63 & _MASK) - 2**63


def _factors(numbers: _Factors, first: int) -> _Factors:
    """splitmix64(first + number) | 1 of each number: int64, modulo 2**64.

    splitmix64(x) is the first output of the generator of that name (Steele, Lea, Flood 2014) that is seeded with x.
    A shift to the right of an int64 brings in copies of its sign, which the masks take away.
    """
    x = numbers + signed(first + 0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30 & 2**34 - 1)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & 2**37 - 1)) * signed(0x94D049BB133111EB)
    return (x ^ (x >> 31 & 2**33 - 1)) | 1


@cache
def word_factors() -> _Wide:
    """T of every word of a block."""
    return _factors(numpy.arange(BLOCK_WORDS), 0)


@cache
def _word_factors_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(word_factors()).to(device)


def _block_factors(first: int, number: int) -> _Wide:
    """K of `number` blocks from `first` on."""
    return _factors(numpy.arange(number), _FIRST_BLOCK + first)


@cache
def _word_factors_twice() -> _Wide:
    return numpy.concatenate((word_factors(), word_factors()))


_ROOMS: list[_Wide] = []


@contextmanager
def _room() -> Iterator[_Wide]:
    """Room for the words of a portion as int64; one that was used before costs no first touch of its memory."""
    try:
        wide = _ROOMS.pop()
    except IndexError:
        wide = numpy.empty(_HOST_PORTION_NBYTES // 4, dtype=numpy.int64)
    try:
        yield wide
    finally:
        _ROOMS.append(wide)


def _sums_of_small(first: _Wide, number: _Wide, words: _Words, wide: _Wide) -> _Wide:
    """The sums of parts of at most a block, modulo 2**64: where each begins, how many words it has, the words of all.

    A part lies in one block or two, and the words of two have the factors of one after those of the other. `wide` is
    room for as many words as int64.
    """
    block, inside = numpy.divmod(first, BLOCK_WORDS)
    twice, begin, products = _word_factors_twice(), numpy.cumsum(number) - number, wide[: len(words)]
    factors = [twice[at : at + many] for at, many in zip(inside.tolist(), number.tolist(), strict=True)]
    numpy.multiply(numpy.concatenate(factors, out=products), words, out=products)
    (crossing,) = numpy.nonzero(inside + number > BLOCK_WORDS)
    starts = numpy.insert(begin, crossing + 1, (begin + BLOCK_WORDS - inside)[crossing])
    blocks = numpy.insert(block, crossing + 1, block[crossing] + 1)
    sums = numpy.add.reduceat(products, starts) * _factors(blocks, _FIRST_BLOCK)
    second = crossing + 1 + numpy.arange(len(crossing))
    whole = numpy.delete(sums, second)
    whole[crossing] += sums[second]
    return whole


@lru_cache(maxsize=1 << 16)
def _block_factor(block: int) -> int:
    return int(_block_factors(block, 1)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The sum over `nbytes` bytes of a tensor; parts that do not overlap are added up."""

    value: int = 0
    nbytes: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(value=(self.value + other.value) & _MASK, nbytes=self.nbytes + other.nbytes)

    def __str__(self) -> str:
        return f"{self.value:016x}"


_Key = TypeVar("_Key", bound=Hashable)


class Order(NamedTuple):
    """The places in a tensor of elements that are numbered along axes: each axis has its size, and its step there.

    The outermost axis comes first; `begin` is the place of the first element.
    """

    begin: int
    axes: tuple[tuple[int, int], ...]

    def places(self, number: _Wide) -> _Wide:
        places = numpy.full_like(number, self.begin)
        for size, step in reversed(self.axes):
            number, index = numpy.divmod(number, size)
            places += index * step
        return places


class Fingerprints(Generic[_Key]):
    """Fingerprints of tensors by key, summed part by part: any part, in any order, from any thread.

    Each thread that adds takes 2 MiB of scratch memory, which the process keeps. What lies on a device is summed there,
    in the stream that is current, and not waited for before a fingerprint is asked for.
    """

    def __init__(self) -> None:
        self._sums: dict[_Key, list[int]] = {}
        self._elsewhere: dict[_Key, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: _Key) -> Fingerprint:
        """What was added so far; nothing for a key that is not known."""
        with self._lock:
            value = sum(int(part) for part in self._elsewhere.pop(key, ()))
            if value:
                self._add(key, value, 0)
            value, nbytes = self._sums.get(key, (0, 0))
        return Fingerprint(value=value & _MASK, nbytes=nbytes)

    def __iter__(self) -> Iterator[_Key]:
        """The keys of which something was added."""
        return iter(list(self._sums))

    def _add(self, key: _Key, value: int, nbytes: int) -> None:
        """Add a sum, not reduced, over so many bytes; the lock is held."""
        known = self._sums.setdefault(key, [0, 0])
        known[0] += value
        known[1] += nbytes

    def add(self, key: _Key, byte_position: int, data: Bytes | torch.Tensor) -> None:
        """Add bytes that begin at `byte_position` of the whole tensor: memory, or a contiguous tensor."""
        if isinstance(data, torch.Tensor) and data.device.type != "cpu":
            self.add_elsewhere(key, byte_position, data)
            return
        memory = memory_of(data) if isinstance(data, torch.Tensor) else memoryview(data).cast("B")
        with _room() as wide:
            value = _sum_on_host(byte_position, memory, wide)
        with self._lock:
            self._add(key, value, len(memory))

    def add_elsewhere(self, key: _Key, byte_position: int, data: torch.Tensor) -> None:
        """The same for a tensor of any device, by operations of that device."""
        part = sum_on_device(byte_position, data)
        with self._lock:
            self._add(key, 0, data.numel() * data.element_size())
            parts = self._elsewhere.setdefault(key, [])
            if parts and parts[-1].device == part.device:
                parts[-1] += part
            else:
                parts.append(part)

    def add_spread(
        self, keys: Sequence[_Key], memories: Sequence[memoryview], first: _Wide, order: Order, itemsize: int
    ) -> None:
        """Add many parts of elements that lie apart in their tensor: `order` has the place of each, by its number.

        `first` has the number of each part's first element.
        """
        data = memoryview(b"".join(memories))
        ends = numpy.cumsum([len(memory) // itemsize for memory in memories])
        before, totals = numpy.append(0, ends[:-1]), numpy.zeros(len(memories), dtype=numpy.int64)
        for start in range(0, int(ends[-1]), _SPREAD_PORTION):
            number = numpy.arange(start, min(start + _SPREAD_PORTION, int(ends[-1])))
            part = numpy.searchsorted(ends, number, side="right")
            byte = itemsize * order.places(first[part] + number - before[part])
            words = data[start * itemsize : (start + len(number)) * itemsize]
            numpy.add.at(totals, part, _sums_of_elements(byte, words, itemsize))
        with self._lock:
            for key, value, memory in zip(keys, totals.tolist(), memories, strict=True):
                self._add(key, value, len(memory))

    def add_all(self, keys: Sequence[_Key], byte_positions: Sequence[int], memories: Sequence[memoryview]) -> None:
        """Add many parts, each with a key, a position and bytes as for `add`; small ones are summed together."""
        position, nbytes = (
            numpy.array(list(values), dtype=numpy.int64) for values in (byte_positions, map(len, memories))
        )
        small = (nbytes > 0) & (nbytes <= BLOCK_NBYTES) & (position % 4 == 0) & (nbytes % 4 == 0)
        for number in numpy.flatnonzero(~small).tolist():
            self.add(keys[number], byte_positions[number], memories[number])
        chosen = numpy.flatnonzero(small)
        if not len(chosen):
            return
        portion = numpy.cumsum(nbytes[chosen]) // (_HOST_PORTION_NBYTES - BLOCK_NBYTES)
        for of in numpy.split(chosen, numpy.flatnonzero(numpy.diff(portion)) + 1):
            numbers, sizes = of.tolist(), nbytes[of]
            words: _Words = numpy.frombuffer(b"".join([memories[number] for number in numbers]), "<i4")
            with _room() as wide:
                totals = _sums_of_small(position[of] // 4, sizes // 4, words, wide)
            with self._lock:
                for number, total, size in zip(numbers, totals.tolist(), sizes.tolist(), strict=True):
                    self._add(keys[number], total, size)

    def add_region(self, key: _Key, shape: tuple[int, ...], region: Region, data: torch.Tensor) -> None:
        """Add the elements of `region` of a tensor of that shape; `data` holds them as the region stores them."""
        flat = data.detach().reshape(-1)
        whole = Box.whole(shape)
        for run in overlap(region, Region(box=whole, start=0, stop=whole.numel)):
            for first, second, numel, *_ in run.each():
                self.add(key, second * flat.element_size(), flat[first : first + numel])


class FingerprintTarget:
    """A tensor that is read for its fingerprint alone, and kept nowhere; it is summed on `device`, or on the host."""

    def __init__(self, sums: Fingerprints[TensorKey], key: TensorKey, device: torch.device | None = None) -> None:
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

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        rows = len(data) // dtype.itemsize // strides.numel
        order = Order(element_offset, ((rows, strides.step), (strides.numel, strides.spread)))
        self._sums.add_spread([self._key], [data], numpy.zeros(1, dtype=numpy.int64), order, dtype.itemsize)

    def zero(self, element_offset: int, numel: int) -> None:
        """Nothing: zeros add nothing."""


def fingerprint_of(data: Bytes | torch.Tensor) -> Fingerprint:
    """The fingerprint of a whole tensor, given as its row-major bytes or as a contiguous tensor."""
    key, sums = TensorKey(name="", kind=""), Fingerprints[TensorKey]()
    sums.add(key, 0, data)
    return sums[key]


def _sums_of_elements(byte: _Wide, data: memoryview, itemsize: int) -> _Wide:
    """Return what each element of `data` adds to a sum, modulo 2**64; it begins at this byte of its tensor."""
    if itemsize < 4:
        small = numpy.frombuffer(data, f"<u{itemsize}").astype(numpy.uint32) << (8 * (byte % 4)).astype(numpy.uint32)
        words = small.view(numpy.int32).reshape(-1, 1)
    else:
        words = numpy.frombuffer(data, "<i4").reshape(-1, itemsize // 4)
    block, inside = numpy.divmod(byte[:, None] // 4 + numpy.arange(words.shape[1]), BLOCK_WORDS)
    sums: _Wide = (words * word_factors()[inside] * _factors(block, _FIRST_BLOCK)).sum(axis=1)
    return sums


def _sum_on_host(byte_position: int, data: memoryview, wide: _Wide) -> int:
    """The sum over bytes, not reduced; `wide` is room for the words of a portion as int64."""
    total, start = 0, 0
    while start < len(data):
        stop = min(len(data), start + _HOST_PORTION_NBYTES - (byte_position + start) % _HOST_PORTION_NBYTES)
        number, lead = divmod(byte_position + start, 4)
        part: Bytes = data[start:stop]
        if lead or len(part) % 4:
            part = bytes(lead) + bytes(part) + bytes(-(lead + len(part)) % 4)
        words: _Words = numpy.frombuffer(part, "<i4")
        block, inside = divmod(number, BLOCK_WORDS)
        rows, end = -(-(inside + len(words)) // BLOCK_WORDS), inside + len(words)
        if rows == 1:
            total += _block_factor(block) * int(numpy.dot(words, word_factors()[inside:end]))
        else:
            wide[:inside] = 0
            wide[inside:end] = words
            wide[end : rows * BLOCK_WORDS] = 0
            sums = numpy.einsum("ij,j->i", wide[: rows * BLOCK_WORDS].reshape(rows, -1), word_factors())
            total += int(numpy.dot(sums, _block_factors(block, rows)))
        start = stop
    return total


def sum_on_device(byte_position: int, data: torch.Tensor) -> torch.Tensor:
    """The sum over a contiguous tensor that begins at `byte_position` of the whole: one int64, modulo 2**64.

    It lies where the tensor lies, and is not waited for. CUDA has no matrix product of integers (torch 2.13), so
    products are made, then summed, a portion at a time. Whole blocks are read in place, if they begin at a multiple of
    four bytes of memory; others are padded.
    """
    flat = data.detach().view(-1).view(torch.uint8)
    first, lead = divmod(byte_position, BLOCK_NBYTES)
    sums = torch.zeros(-(-(lead + len(flat)) // BLOCK_NBYTES), dtype=torch.int64, device=flat.device)
    head = min(len(flat), -byte_position % BLOCK_NBYTES)
    tail = len(flat) - (len(flat) - head) % BLOCK_NBYTES
    for start, stop in pairwise((0, *range(head, tail, _DEVICE_PORTION_NBYTES), tail, len(flat))):
        if start < stop:
            block, inside = divmod(lead + start, BLOCK_NBYTES)
            words = _in_blocks(flat[start:stop], inside)
            torch.sum(words * _word_factors_on(flat.device), 1, out=sums[block : block + len(words)])
    blocks = torch.arange(len(sums), dtype=torch.int64, device=flat.device)
    return (sums * _factors(blocks, _FIRST_BLOCK + first)).sum()


def _in_blocks(part: torch.Tensor, inside: int) -> torch.Tensor:
    """Bytes that begin at `inside` of a block, as rows of words: in place where that can be, else with zeros around."""
    rows = -(-(inside + len(part)) // BLOCK_NBYTES)
    if len(part) != rows * BLOCK_NBYTES or part.storage_offset() % 4 or part.data_ptr() % 4:
        padded = torch.zeros(rows * BLOCK_NBYTES, dtype=torch.uint8, device=part.device)
        padded[inside : inside + len(part)] = part
        part = padded
    return part.view(torch.int32).view(rows, BLOCK_WORDS)


class _Spans(NamedTuple):
    """Bytes of a file that are elements of tensors, in their order.

    The rows of the table: first byte, the one behind the last, numbers of tensor and buffer, and of the first element;
    the place in that buffer where they are wanted, the first element's and how many; and the number of the order of a
    transposed tensor, else -1. Tied tensors share bytes, so spans may overlap; `reach` is how far those up to each
    reach.
    """

    table: _Wide
    reach: _Wide


class _Parts(NamedTuple):
    """Bytes of copies that are elements of tensors: of copy number `copy` the bytes [start, stop).

    They are of the tensor `key`, at `position` of its bytes, both as numbers; of a transposed tensor in its `order`.
    """

    copy: list[int]
    start: list[int]
    stop: list[int]
    key: list[int]
    position: list[int]
    order: list[int]


class Witness:
    """Sums what a rank reads, by target tensor, in the target's type: bytes that are cast count as they are cast.

    `sums` has the fingerprints of the parts that were seen of what `rank` wants. `saw` may be called from any thread.
    """

    @gc_disabled()
    def __init__(self, source: Index, wanted: Sequence[Match], rank: int) -> None:
        self.sums = Fingerprints[TensorKey]()
        keys, buffers, paths, orders = Numbers[TensorKey](), Numbers[str](), Numbers[str](), Numbers[Order]()
        tables = [numpy.empty((9, 0), dtype=numpy.int64)]
        for match in wanted:
            spans = _spans_alike if match.cuts is not None else _spans_of_boxes
            tables.append(spans(source, match, rank, (paths, keys, buffers, orders)))
        table = numpy.concatenate(tables, axis=1)
        table = table[:, numpy.lexsort((table[1], table[0]))]
        self._keys, self._buffers, self._spans = list(keys), dict(buffers), dict[str, _Spans]()
        self._orders = list(orders)
        self._last: tuple[Sequence[str], Sequence[Types], tuple[_Wide, _Wide]] = ((), (), (table[0], table))
        ends = numpy.searchsorted(table[0], numpy.arange(len(paths)), side="right").tolist()
        for name, first, last in zip(paths, [0, *ends], ends, strict=False):
            self._spans[name] = _Spans(table[1:, first:last], numpy.maximum.accumulate(table[2, first:last]))

    def saw(self, copies: Sequence[Copy], views: Sequence[memoryview]) -> None:
        """Count the bytes of copies, as they were read."""
        copies, seen = Copies.of(copies), list(views)
        parts, types = self._parts(copies), copies.table[TYPES]
        for number in set(types.tolist()):
            dtype, into = copies.types[number]
            if dtype is not into:
                which = numpy.flatnonzero(types == number).tolist()
                for at, cast in zip(which, _cast([seen[at] for at in which], dtype, into), strict=True):
                    seen[at] = cast
        itemsizes, into_sizes = self._named(copies)[1][:, types[parts.copy]]
        starts, stops = (numpy.array(ends, dtype=numpy.int64) // itemsizes * into_sizes for ends in parts[1:3])
        memories = [
            seen[of][start:stop] for of, start, stop in zip(parts.copy, starts.tolist(), stops.tolist(), strict=True)
        ]
        keys, positions = [self._keys[key] for key in parts.key], parts.position
        if max(parts.order, default=-1) >= 0:
            orders, first = numpy.array(parts.order), numpy.array(positions) // into_sizes
            for number, size in {*zip(parts.order, into_sizes.tolist(), strict=True)}:
                which = numpy.flatnonzero((orders == number) & (into_sizes == size)).tolist()
                if number >= 0:
                    those = [keys[at] for at in which], [memories[at] for at in which]
                    self.sums.add_spread(*those, first[which], self._orders[number], size)
            which = numpy.flatnonzero(orders < 0).tolist()
            keys, positions = [keys[at] for at in which], [positions[at] for at in which]
            memories = [memories[at] for at in which]
        self.sums.add_all(keys, positions, memories)

    def saw_there(self, copies: Sequence[Copy], tensors: Sequence[torch.Tensor]) -> None:
        """The same for copies whose bytes are tensors on a device, by operations of that device."""
        for number, start, stop, key, position, order in zip(*self._parts(Copies.of(copies)), strict=True):
            copy, part = copies[number], tensors[number][start:stop]
            cast = part.view(torch_dtype(copy.dtype)).to(torch_dtype(copy.target_dtype))
            if order < 0:
                self.sums.add(self._keys[key], position, cast)
                continue
            numbers = position // cast.element_size() + numpy.arange(cast.numel())
            for at, place in enumerate(self._orders[order].places(numbers).tolist()):  # few: others go to the host
                self.sums.add(self._keys[key], place * cast.element_size(), cast[at : at + 1])

    def _named(self, copies: Copies) -> tuple[_Wide, _Wide]:
        """What copies name, in columns: this witness's numbers of their buffers, and the sizes of their types.

        All batches of a plan name the same.
        """
        last = self._last
        if last[0] is not copies.buffers or last[1] is not copies.types:
            buffers = [self._buffers.get(buffer, -1) for buffer in copies.buffers]
            sizes = [(dtype.itemsize, into.itemsize) for dtype, into in copies.types]
            columns = numpy.array(buffers, dtype=numpy.int64), numpy.array(sizes, dtype=numpy.int64).reshape(-1, 2).T
            self._last = last = (copies.buffers, copies.types, columns)
        return last[2]

    def _parts(self, copies: Copies) -> _Parts:
        """What copies hold bytes of; those of one record, or of several."""
        table, parts = copies.table, _Parts([], [], [], [], [], [])
        buffers, sizes = self._named(copies)
        itemsizes, into = sizes[:, table[TYPES]]
        for record in dict.fromkeys(table[RECORD].tolist()):
            spans = self._spans.get(copies.records[record].path)
            if spans is None:
                continue
            of = numpy.flatnonzero(table[RECORD] == record)
            begin, size = table[BYTE_OFFSET, of], itemsizes[of]
            end = begin + table[NUMEL, of] * size
            first = numpy.searchsorted(spans.reach, begin, side="right")
            many = numpy.maximum(0, numpy.searchsorted(spans.table[0], end) - first)
            which = numpy.repeat(numpy.arange(len(of)), many)
            span = numpy.arange(len(which)) + (first - numpy.cumsum(many) + many)[which]
            of, begin, end, size = of[which], begin[which], end[which], size[which]
            known_start, known_stop, key, buffer, element, element_offset, room, order = spans.table[:, span]
            start, stop = numpy.maximum(known_start, begin), numpy.minimum(known_stop, end)
            place = table[ELEMENT_OFFSET, of] + (start - begin) // size * table[SPREAD, of] - element_offset
            held = (start < stop) & (buffers[table[BUFFER, of]] == buffer) & (place >= 0) & (place < room)
            # Between two elements of a tensor is nothing that it holds.
            held &= ((start - begin) % size == 0) & ((start - known_start) % size == 0)
            position = (element + (start - known_start) // size) * into[of]
            found = (of, start - begin, stop - begin, key, position, order)
            for known, column in zip(parts, found, strict=True):
                known += column[held].tolist()
        return parts


def held(layout: Layout, rank: int, buffers: Mapping[str, torch.Tensor]) -> Fingerprints[TensorKey]:
    """The fingerprints of a rank's parts as its buffers hold them now; a buffer that is not there holds nothing."""
    sums = Fingerprints[TensorKey]()
    for key, placement in layout.placements.items():
        flat = buffers.get(placement.buffer)
        if flat is None:
            continue
        for region, element_offset in placement.regions(rank):
            part = flat.detach().reshape(-1)[element_offset : element_offset + region.numel]
            sums.add_region(key, placement.shape, region, part)
    return sums


_Named = tuple[Numbers[str], Numbers[TensorKey], Numbers[str], Numbers[Order]]
"""Numbers of paths, tensors, buffers and orders."""


def _spans_alike(source: Index, match: Match, rank: int, named: _Named) -> _Wide:
    """Where files hold what a rank wants of tensors that lie in one box: numbers of paths, then columns of spans."""
    held = match.pieces_of(rank)
    pieces, origin = match.locate(held)
    held_in, numbers = match.extents(pieces, origin)
    extents = [source.open(placement.family, shard).get(placement.buffer) for placement, shard in held_in]
    paths, keys, buffers, _ = named
    found = [(paths[one.path], one.byte_offset, one.dtype.itemsize) if one else (-1, 0, 1) for one in extents]
    path, offset, itemsize = numpy.array(found, dtype=numpy.int64).reshape(-1, 3).T[:, numbers]
    of = held.member[pieces.member]
    members, which = numpy.unique(of, return_inverse=True)
    wanted = [match.family.members[number] for number in members.tolist()]
    names = numpy.array([(keys[one.key], buffers[one.buffer]) for one in wanted], dtype=numpy.int64).reshape(-1, 2).T
    begin, numel = offset + pieces.element_offset * itemsize, pieces.stop - pieces.start
    rooms = held.element_offset, held.stop - held.start
    key, buffer = names[:, which]
    places = pieces.start, *(one[pieces.member] for one in rooms), numpy.full_like(numel, -1)
    table: _Wide = numpy.stack((path, begin, begin + numel * itemsize, key, buffer, *places))[:, path >= 0]
    return table


def _spans_of_boxes(source: Index, match: Match, rank: int, named: _Named) -> _Wide:
    """The same where boxes differ: what lies in the pieces of files that hold some of it."""
    paths, keys, buffers, orders = named
    found = []
    for member, origin, wanted, offset in match.each(match.pieces_of(rank)):
        whole = Region(box=Box.whole(origin.shape), start=0, stop=prod(origin.shape))
        key, buffer = keys[member.key], buffers[member.buffer]
        for part, piece in source.pieces(origin, wanted):
            extent = source.open(part.family, piece.shard).get(part.buffer)
            if extent is None:
                continue
            itemsize = extent.dtype.itemsize
            begin = extent.byte_offset + piece.element_offset * itemsize
            if part.axes and part.axes[-1][::2] != (len(part.shape) - 1, 1):  # its elements would be as many spans
                end = begin + (piece.stop - piece.start) * itemsize
                order = orders[_order(part)]
                found.append((paths[extent.path], begin, end, key, buffer, piece.start, offset, wanted.numel, order))
                continue
            for run in overlap(whole, part.region(piece)):
                for element, first, numel, *_ in run.each():
                    start = begin + first * itemsize
                    stop = start + numel * itemsize
                    found.append((paths[extent.path], start, stop, key, buffer, element, offset, wanted.numel, -1))
    table: _Wide = numpy.array(found, dtype=numpy.int64).reshape(-1, 9).T
    return table


def _order(part: Placement) -> Order:
    """Return the places of a transposed box's elements in the whole tensor, as they are stored."""
    steps = [prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
    begin = sum(at * step for at, step in zip(part.box.offset, steps, strict=True))
    return Order(begin, tuple((axis.size, axis.step * steps[axis.dim]) for axis in part.axes))


def _cast(memories: Sequence[memoryview], dtype: ElementType, into: ElementType) -> list[memoryview]:
    """Copies of one type as another, all at once where that gives the same: a call costs more than a small copy."""
    if len(memories) > 1 and not casts_alike(dtype, into):
        return [cast for memory in memories for cast in _cast([memory], dtype, into)]
    values = torch.frombuffer(bytearray().join(memories), dtype=torch_dtype(dtype)).to(torch_dtype(into))
    cast = values.view(torch.uint8).numpy().data
    ends = accumulate(len(memory) // dtype.itemsize * into.itemsize for memory in memories)
    return [cast[begin:end] for begin, end in pairwise((0, *ends))]
