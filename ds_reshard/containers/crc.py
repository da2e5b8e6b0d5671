"""crc32 as an algebra: parts are checked where they are read, and combined without reading again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

try:
    from isal import isal_zlib
except ImportError:  # no wheel for this platform: zlib is slower, and says the same
    _HAS_ISAL = False
else:
    _HAS_ISAL = True

# The reflected polynomial of crc32 (zlib crc32.c, POLY), bit 31 standing for x**0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The crc32 of `data`, continuing from `value`, as zlib computes it."""
    if _HAS_ISAL:
        return isal_zlib.crc32(data, value)
    return zlib.crc32(data, value)


def combine(first_crc: int, second_crc: int, second_nbytes: int) -> int:
    """The crc32 of two slices laid end to end, from the crc32 of each."""
    return shift(first_crc, second_nbytes) ^ second_crc


def crc32_of_rows(rows: Iterable[memoryview], step: int) -> int:
    """Return what rows contribute to the crc32 of all bytes up to the end of the last row.

    There, each row begins `step` bytes after the one before it.
    """
    total, of_row = 0, isal_zlib.crc32 if _HAS_ISAL else zlib.crc32
    join = isal_zlib.crc32_combine if _HAS_ISAL and step < 1 << 62 else combine
    for row in rows:
        total = join(total, of_row(row), step)
    return total


def shift(crc: int, nbytes_after: int) -> int:
    """What a slice with this crc32 contributes to the crc32 of a whole in which `nbytes_after` follow it.

    The crc32 of a whole is the XOR of `shift(crc32(slice), bytes after the slice)` over slices that cover
    it once, in any order: crc32 is linear, see zlib crc32.c, `crc32_combine`. Costs O(log nbytes_after).
    Raises ValueError when `nbytes_after` is negative.
    """
    if nbytes_after < 0:
        raise ValueError(f"a slice cannot be followed by {nbytes_after} bytes")
    if _HAS_ISAL and nbytes_after < 1 << 62:
        return isal_zlib.crc32_combine(crc, 0, nbytes_after)
    return _multiply(_power_of_x(8 * nbytes_after), crc)


def repeated(pattern: bytes, count: int) -> int:
    """The crc32 of `pattern` written `count` times, in O(log count).

    Raises ValueError when `count` is negative.
    """
    if count < 0:
        raise ValueError(f"a pattern cannot be repeated {count} times")
    whole, unit, unit_nbytes = 0, crc32(pattern), len(pattern)
    while count:
        if count & 1:
            whole = combine(whole, unit, unit_nbytes)
        unit = combine(unit, unit, unit_nbytes)
        unit_nbytes *= 2
        count >>= 1
    return whole


def _multiply(first: int, second: int) -> int:
    """The product of two polynomials over GF(2), modulo crc32's (zlib crc32.c, `multmodp`)."""
    product = 0
    while first:
        if first & _ONE:
            product ^= second
        first = (first << 1) & 0xFFFFFFFF
        second = (second >> 1) ^ (_POLYNOMIAL if second & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    """x**exponent modulo crc32's polynomial, by squaring (zlib crc32.c, `x2nmodp`)."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power
