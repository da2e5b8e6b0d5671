"""Two tensors compared: every bit counts, and the numbers are those of plain arithmetic."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.execution.deviation import Deviation

BITS = st.integers(0, 2**32 - 1)


def deviation(a: torch.Tensor, b: torch.Tensor, start: int = 0) -> Deviation:
    found = Deviation()
    found.add(start, a, b)
    return found


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _place(bits: int) -> int:
    """The number of a float among all of them, counted from zero."""
    return bits if bits < 2**31 else 2**31 - bits


@settings(max_examples=200)
@given(pairs=st.lists(st.tuples(BITS, BITS | st.none()), min_size=1, max_size=20))
def test_float32_as_by_hand(pairs: list[tuple[int, int | None]]) -> None:
    """Count, first index, largest difference and distance, over arbitrary bit patterns; None stands for equal bits."""
    rows = [(one, one if other is None else other) for one, other in pairs]
    a, b = (
        torch.tensor([row[i] for row in rows], dtype=torch.int64).to(torch.int32).view(torch.float32) for i in (0, 1)
    )
    found = deviation(a, b, start=40)
    unequal = [n for n, (one, other) in enumerate(rows) if one != other]
    assert found.differing == len(unequal)
    assert found.first == (40 + unequal[0] if unequal else None)
    differences = [abs(_float(rows[n][0]) - _float(rows[n][1])) for n in unequal]
    if any(math.isnan(one) for one in differences):
        assert math.isnan(found.max_abs)
    else:
        assert found.max_abs == max(differences, default=0.0)
    ulps = [
        abs(_place(rows[n][0]) - _place(rows[n][1])) for n in unequal if not any(math.isnan(_float(x)) for x in rows[n])
    ]
    assert found.max_ulp == max(ulps, default=None)


TYPES = [
    (torch.float64, 0x3FF0000000000000),
    (torch.float32, 0x3F800000),
    (torch.bfloat16, 0x3F80),
    (torch.float16, 0x3C00),
    (torch.float8_e4m3fn, 0x38),
    (torch.float8_e5m2, 0x3C),
    (torch.int64, None),
    (torch.uint8, None),
    (torch.bool, None),
    (torch.complex64, None),
    (torch.complex128, None),
]


@pytest.mark.parametrize(("dtype", "ulps"), TYPES, ids=str)
def test_every_type_is_compared(dtype: torch.dtype, ulps: int | None) -> None:
    """Zero against one: the distance is the bit pattern of one."""
    a = torch.zeros(9).to(dtype)
    b = a.clone()
    b[4] = 1
    found = deviation(a, b)
    assert (found.differing, found.max_abs, found.max_ulp, found.first) == (1, 1.0, ulps, 4)


def test_the_widest_distance_does_not_overflow() -> None:
    """From the most negative to the largest double: more than 63 bits."""
    largest = torch.tensor([1.7976931348623157e308], dtype=torch.float64)
    assert deviation(-largest, largest).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


def test_large_integers_are_not_rounded() -> None:
    """Two 64-bit integers whose difference a double cannot hold apart from zero are different."""
    a = torch.tensor([2**62])
    assert (deviation(a, a + 1).differing, deviation(a, a + 1).max_abs) == (1, 1.0)


def test_parts_add_up() -> None:
    """In spans of any length, at odd places of their memory, the same as in one."""
    a, b = torch.randn(1001), torch.randn(1001)
    b[::3] = a[::3]
    whole, cut = deviation(a, b), Deviation()
    for at in range(0, 1001, 13):
        cut.add(at, a[at : at + 13], b[at : at + 13])
    assert vars(cut) == vars(whole)
