"""crc32 as an algebra agrees with zlib, with and without isal."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.containers import crc

QUICK = settings(max_examples=50)


@pytest.fixture(params=["isal", "without isal"])
def backend(request, monkeypatch):
    if request.param == "without isal":
        monkeypatch.setattr(crc, "_HAS_ISAL", False)
    return request.param


def test_crc32_is_that_of_zlib(backend):
    assert [crc.crc32(b"ab" * n) for n in range(40)] == [zlib.crc32(b"ab" * n) for n in range(40)]
    assert crc.crc32(b"world", crc.crc32(b"hello ")) == zlib.crc32(b"hello world")


def test_combined_crc_is_that_of_the_two_slices_together(backend):
    @QUICK
    @given(st.binary(max_size=300), st.binary(max_size=300))
    def holds(first, second):
        assert crc.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)

    holds()


def test_whole_is_the_exclusive_or_of_shifted_slices(backend):
    @QUICK
    @given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
    def holds(data, cuts):
        edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        total = 0
        for start, stop in pairwise(edges):
            total ^= crc.shift(zlib.crc32(data[start:stop]), len(data) - stop)
        assert total == zlib.crc32(data)

    holds()


def test_repeated_crc_is_that_of_the_pattern_written_out(backend):
    @QUICK
    @given(st.binary(max_size=9), st.integers(0, 70))
    def holds(pattern, count):
        assert crc.repeated(pattern, count) == zlib.crc32(pattern * count)

    holds()


@QUICK
@given(st.integers(0, 2**32 - 1), st.integers(2**31 - 2, 2**62 - 1))
def test_shift_over_gigabytes_agrees_with_the_polynomial_algebra(value, nbytes):
    assert crc.shift(value, nbytes) == crc._multiply(crc._power_of_x(8 * nbytes), value)


def test_repeated_counts_more_bytes_than_memory_holds(backend):
    """5 TiB of zeros, as two halves."""
    half = crc.repeated(b"\0" * 4096, 5 << 27)
    assert crc.repeated(b"\0" * 4096, 5 << 28) == crc.combine(half, half, 4096 * (5 << 27))


@pytest.mark.parametrize("call", [lambda: crc.shift(1, -1), lambda: crc.repeated(b"a", -1)])
def test_negative_lengths_are_refused(call):
    with pytest.raises(ValueError, match="-1"):
        call()
