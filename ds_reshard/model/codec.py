"""Element types, by name and size, without torch."""

from __future__ import annotations

import enum


class ElementType(enum.Enum):
    """An element type of a tensor as torch names it; the value is (name, bytes per element)."""

    FLOAT64 = ("float64", 8)
    FLOAT32 = ("float32", 4)
    FLOAT16 = ("float16", 2)
    BFLOAT16 = ("bfloat16", 2)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 1)
    FLOAT8_E5M2 = ("float8_e5m2", 1)
    FLOAT8_E4M3FNUZ = ("float8_e4m3fnuz", 1)
    FLOAT8_E5M2FNUZ = ("float8_e5m2fnuz", 1)
    COMPLEX64 = ("complex64", 8)
    COMPLEX128 = ("complex128", 16)
    INT64 = ("int64", 8)
    INT32 = ("int32", 4)
    INT16 = ("int16", 2)
    INT8 = ("int8", 1)
    UINT8 = ("uint8", 1)
    UINT16 = ("uint16", 2)
    UINT32 = ("uint32", 4)
    UINT64 = ("uint64", 8)
    BOOL = ("bool", 1)

    def __init__(self, label: str, itemsize: int) -> None:
        self.label = label
        self.itemsize = itemsize

    @classmethod
    def named(cls, label: str) -> ElementType:
        """The type that torch calls `label`, for example "bfloat16"; KeyError when there is none."""
        return _BY_LABEL[label]


_BY_LABEL = {member.label: member for member in ElementType}
