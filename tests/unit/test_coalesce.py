"""Copies are joined only where one read of one type is the same as two."""

from __future__ import annotations

from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.planning.copies import Copy, coalesce

FP32, INT32, BF16 = ElementType.FLOAT32, ElementType.INT32, ElementType.BFLOAT16
RECORD = Record(path="file", byte_offset=0, nbytes=64, crc32=None)


def test_copies_of_several_types_stay_apart() -> None:
    """Elements that follow each other in file and buffer are joined, unless one of them is cast otherwise."""
    first = Copy(RECORD, 0, 4, FP32, "buffer", 0, FP32)
    after = first._replace(byte_offset=16, element_offset=4)
    assert coalesce([after, first]) == (first._replace(numel=8),)
    for other in (after._replace(dtype=INT32), after._replace(target_dtype=BF16)):
        assert coalesce([other, first]) == (first, other)


def test_copies_that_lie_apart_stay_apart() -> None:
    """In the buffer, in the file, and where both are of other buffers: bytes between them belong to others."""
    first = Copy(RECORD, 0, 4, FP32, "buffer", 0, FP32)
    after = first._replace(byte_offset=16, element_offset=4)
    apart = (after._replace(element_offset=6), after._replace(byte_offset=20), after._replace(buffer="other"))
    for other in apart:
        assert set(coalesce([other, first])) == {first, other}
