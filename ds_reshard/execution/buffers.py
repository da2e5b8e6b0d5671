"""torch tensors: as targets, as fresh memory for what an engine adopts, and read whole from a file."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import raise_faults
from ds_reshard.execution.checksums import verify
from ds_reshard.execution.interfaces import Outcome, Slice, Strides
from ds_reshard.model.index import extent_of
from ds_reshard.model.records import ElementType, TensorRecord

HUGE_NBYTES = 2 << 20
_CHOOSE_FROM_NBYTES = 32 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name


def torch_dtype(dtype: ElementType) -> torch.dtype:
    """The torch type of that name; AttributeError on a torch too old to have it."""
    found = getattr(torch, dtype.label)
    assert isinstance(found, torch.dtype)
    return found


def element_type(dtype: torch.dtype) -> ElementType:
    """The element type of a torch type."""
    return ElementType.named(str(dtype).removeprefix("torch."))


@cache
def casts_alike(dtype: ElementType, into: ElementType) -> bool:
    """Whether torch casts an element to the same bits wherever it lies in a tensor, found by trying.

    Of a NaN that holds for some types alone: from float16 to float32 the last elements of a tensor become other NaNs
    than those before them (torch 2.13, x86). What is cast in two places must then be cast there in the same parts.
    """
    source, target = torch_dtype(dtype), torch_dtype(into)
    if not source.is_floating_point:
        return not source.is_complex
    any_bits = torch.randint(0, 256, (128 * source.itemsize,), dtype=torch.uint8, generator=torch.Generator())
    not_finite = any_bits | torch.full((128,), torch.inf).to(source).view(torch.uint8)
    values = torch.cat((any_bits, not_finite)).view(source)
    alone = torch.cat([value.to(target) for value in values.chunk(len(values))])
    return torch.equal(values.to(target).view(torch.uint8), alone.view(torch.uint8))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which lives as long as they are used."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in host memory has bytes to look at")
    nbytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # a view of the memory keeps it, and it the tensor
    return memoryview(memory).cast("B")


def scatter(places: torch.Tensor, values: torch.Tensor, strides: Strides) -> None:
    """Copy rows of values, cast together, to where they lie apart: of a NaN a cast of strided elements makes others."""
    rows = values.to(places.dtype).view(-1, strides.numel)
    with torch.no_grad():
        places.as_strided(rows.shape, (strides.step, strides.spread)).copy_(rows)


class TensorTarget:
    """A torch tensor as a flat, row-major target of `numel` elements.

    Contiguous host memory of the wanted type is written in place; anything else (a device tensor, a
    cast) goes through `store`. The tensor must be contiguous; it is kept alive by this object. `untouched` says that
    its memory is new: who asks for a view then touches it for the first time, in the pages that cost less here.
    """

    def __init__(self, tensor: torch.Tensor, *, untouched: bool = False) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a target tensor must be contiguous")
        self.tensor = tensor.detach().view(-1)
        self.dtype = element_type(tensor.dtype)
        self._memory: memoryview | None = None
        if tensor.device.type == "cpu" and tensor.numel():
            self._memory = memory_of(tensor)
        self._pages = Untouched(tensor) if untouched and self._memory and page_choice() else None

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        if element_offset < 0 or element_offset + numel > self.tensor.numel():
            raise IndexError(
                f"elements [{element_offset}, {element_offset + numel}) of a buffer of {self.tensor.numel()}"
            )
        if self._memory is None or dtype is not self.dtype:
            return None
        begin, end = element_offset * self.dtype.itemsize, (element_offset + numel) * self.dtype.itemsize
        if self._pages is not None and numel:
            self._pages.touch(begin, end)
        return self._memory[begin:end]

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype))
        with torch.no_grad():
            self.tensor[element_offset : element_offset + values.numel()].copy_(values)

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype))
        scatter(self.tensor[element_offset:][: strides.reach(values.numel())], values, strides)

    def zero(self, element_offset: int, numel: int) -> None:
        with torch.no_grad():
            self.tensor[element_offset : element_offset + numel].zero_()


class PageChoice:
    """Which pages memory gets that is touched for the first time: those that cost less on this machine, now.

    A huge page stands for 512 faults. But where the host of a virtual machine has not backed it yet, or the kernel has
    to make room for it, it costs ten times as much as they do; which it is changes within the hour, and from one to the
    next. So small pages are the rule. After `wait` portions of them (2 MiB each) their cost is measured, and huge pages
    are tried, until those of one trial have cost more together than small ones. The wait is doubled after a trial that
    was shorter: so trials cost less than a tenth of what small pages do, where a huge one costs at most ten times that.

    `small` and `huge` touch all of the portion at an address, in pages of that kind, and return the seconds of the
    processor that it took.
    """

    FIRST_WAIT = 96
    LONGEST_WAIT = 1536
    _MEASURED = 4

    def __init__(self, small: Callable[[int], float], huge: Callable[[int], float]) -> None:
        self._small, self._huge = small, huge
        self._wait = self._left = self.FIRST_WAIT
        self._costs: list[float] = []
        self._gained: float | None = None
        """By the huge pages of a trial; None before the first of them has told its cost."""
        self._lock = threading.Lock()

    def touch(self, address: int) -> None:
        """Touch the portion at `address`, or leave it to who writes there first; any thread."""
        with self._lock:
            self._left -= 1
            left = self._left
            first_is_waited_for = left < -1 and self._gained is None
        if left >= self._MEASURED or first_is_waited_for:
            return
        if left >= 0:
            cost = self._small(address)
            with self._lock:
                self._costs.append(cost)
            return
        cost = self._huge(address)
        with self._lock:
            if self._left >= 0 or not self._costs:
                return  # another thread has found them slow
            self._gained = (self._gained or 0.0) + sorted(self._costs)[len(self._costs) // 2] - cost
            if self._gained < 0:
                was_short = -self._left < self._wait
                self._wait = min(self.LONGEST_WAIT, 2 * self._wait) if was_short else self.FIRST_WAIT
                self._left, self._costs, self._gained = self._wait, [], None


class Untouched:
    """The memory of a new tensor, of which no page has been touched: each portion of it is touched once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self._address = tensor.data_ptr()
        # Whole huge pages alone: what lies beside them may be others'.
        self._first = -(-self._address // HUGE_NBYTES)
        number = (self._address + nbytes) // HUGE_NBYTES - self._first
        self._left = bytearray(b"\1") * (number if nbytes >= _CHOOSE_FROM_NBYTES else 0)
        self._lock = threading.Lock()
        if self._left:
            _advise(self._first * HUGE_NBYTES, number * HUGE_NBYTES, mmap.MADV_NOHUGEPAGE)

    def touch(self, begin: int, end: int) -> None:
        """Bytes [begin, end) will be written by this thread: touch the portions among them that nobody has touched."""
        choice = page_choice()
        first = max(0, (self._address + begin) // HUGE_NBYTES - self._first)
        stop = min(len(self._left), -(-(self._address + end) // HUGE_NBYTES) - self._first)
        for number in range(first, stop):
            with self._lock:
                mine, self._left[number] = self._left[number], 0
            if mine and choice is not None:
                choice.touch((self._first + number) * HUGE_NBYTES)


@cache
def page_choice() -> PageChoice | None:
    """What this process has learned of its pages; None where the kernel gives no huge page to who asks for one."""
    try:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            page.madvise(_POPULATE_WRITE)
    except (OSError, AttributeError):
        return None
    return None if "[never]" in enabled else PageChoice(_populate, _populate_huge)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Best effort: advice changes no bytes, and without it memory is only slower."""
    _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _populate(address: int) -> float:
    """Touch a portion without a write: another thread may have written to a part of it already."""
    started = time.thread_time()  # waiting for a core is no cost of a page
    _advise(address, HUGE_NBYTES, _POPULATE_WRITE)
    return time.thread_time() - started


def _populate_huge(address: int) -> float:
    _advise(address, HUGE_NBYTES, mmap.MADV_HUGEPAGE)
    return _populate(address)


def tensor_from_bytes(data: bytes, dtype: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of its own memory with these row-major elements."""
    if not prod(shape):
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(dtype)).reshape(shape)


def read_tensor(record: TensorRecord) -> torch.Tensor:
    """One tensor, whole, in memory of its own; strides as saved."""
    if record.contiguous:
        return tensor_from_bytes(_checked_bytes(record), record.dtype, record.shape)
    storage, itemsize = record.storage, record.dtype.itemsize
    flat = TensorRecord(
        storage=storage, dtype=record.dtype, element_offset=0, shape=(storage.nbytes // itemsize,), stride=(1,)
    )
    values = tensor_from_bytes(_checked_bytes(flat), record.dtype, flat.shape)
    return torch.as_strided(values, record.shape, record.stride, record.element_offset)


def _checked_bytes(tensor: TensorRecord) -> bytes:
    """A row-major tensor's bytes, wherever in its file the archive lies; the whole record is compared with its sum."""
    record = extent_of(tensor).record
    with PositionedFile(record.path) as file:
        data = file.read(tensor.byte_offset, tensor.nbytes)
    part = Slice(byte_offset=tensor.byte_offset - record.byte_offset, nbytes=tensor.nbytes, crc32=crc32(data))
    raise_faults(verify(Outcome(slices={record: [part]})), subject=f"reading {record.path}")
    return data
