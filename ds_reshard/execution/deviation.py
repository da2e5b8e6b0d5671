"""By how much two tensors differ, bit for bit, gathered span by span."""

from __future__ import annotations

import math

import torch

_BLOCK_NUMEL = 1 << 18
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Deviation:
    """What differs between two tensors of one type; equal means the same bits, so -0.0 and 0.0 differ.

    `max_abs` is NaN as soon as one differing element has no difference that is a number; `max_ulp` counts the
    representable values between two elements, and leaves NaN out: None for types that are not floating-point, or where
    nothing was left. `first` is the flat index of the first element that differs.
    """

    def __init__(self) -> None:
        self.differing = 0
        self.max_abs = 0.0
        self.max_ulp: int | None = None
        self.first: int | None = None
        self.first_a = self.first_b = ""

    def add(self, start: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add elements from the flat index `start` on, of two contiguous flat tensors on the host."""
        if same_bits(a, b):
            return
        for at in range(0, a.numel(), _BLOCK_NUMEL):
            self._add_block(start + at, a[at : at + _BLOCK_NUMEL], b[at : at + _BLOCK_NUMEL])

    def _add_block(self, start: int, a: torch.Tensor, b: torch.Tensor) -> None:
        unequal = (as_bits(a) != as_bits(b)).any(-1)
        count = int(unequal.sum())
        if not count:
            return
        self.differing += count
        a, b = a[unequal], b[unequal]
        if self.first is None:
            self.first = start + int(unequal.nonzero()[0])
            self.first_a, self.first_b = shown(a[0]), shown(b[0])
        self._add_abs(a, b)
        if a.dtype.is_floating_point:
            number = ~(a.isnan() | b.isnan())
            if bool(number.any()):
                self.max_ulp = max(self.max_ulp or 0, _ulps(a[number], b[number]))

    def _add_abs(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if not (a.dtype.is_floating_point or a.dtype.is_complex):
            largest = float(max(abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True)))
        else:
            wide = torch.complex128 if a.dtype.is_complex else torch.float64
            largest = float((a.to(wide) - b.to(wide)).abs().max())
        self.max_abs = math.nan if math.isnan(largest) or math.isnan(self.max_abs) else max(self.max_abs, largest)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of two contiguous flat tensors of one type, eight bytes at a time where they lie so: thrice as fast."""
    left, right = a.view(torch.uint8), b.view(torch.uint8)
    if not (left.numel() % 8 or left.storage_offset() % 8 or right.storage_offset() % 8):
        left, right = left.view(torch.int64), right.view(torch.int64)
    return torch.equal(left, right)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """A row of integers for each element, which are equal where the element's bits are."""
    return values.view(_INTEGERS[min(8, values.element_size())]).view(values.numel(), -1)


def shown(element: torch.Tensor) -> str:
    """One element as text; a NaN with its bits, for two of them may differ."""
    value = element.item()
    if isinstance(value, float) and math.isnan(value):
        bits = int(as_bits(element.view(1))[0, 0]) & ((1 << 8 * element.element_size()) - 1)
        return f"nan (0x{bits:0{2 * element.element_size()}x})"
    if isinstance(value, float):
        return f"{value:.{17 if element.element_size() == 8 else 9}g}"
    return repr(value)


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in representable values. Distances of 64-bit types are taken modulo 2**64, unsigned."""
    one, other = _ordered(a), _ordered(b)
    distance = torch.maximum(one, other) - torch.minimum(one, other)
    lowest = -(2**63)
    return int((distance ^ lowest).max()) - lowest


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart; -0.0 and 0.0 are both 0."""
    bits = as_bits(values)[:, 0].to(torch.int64)
    lowest = -(1 << (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
