"""In what two checkpoints differ, as plain values that can be printed or written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ds_reshard.errors import Fault

EQUAL, DIFFERS = "equal", "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One logical tensor of both sides.

    `state` is "equal" (to the bit), "differs", "only in A", "only in B", "other shape" or "other type"; the numbers
    are those of a tensor that differs. `max_abs` is the largest absolute difference, NaN where one side is; `max_ulp`
    the largest number of representable values between two, NaN apart, None for types that are not floating-point.
    `first` is the index of the first element that differs, with its value in A and in B.
    """

    name: str
    kind: str
    state: str
    a: str
    b: str
    numel: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_ulp: int | None = None
    first: tuple[int, ...] | None = None
    first_a: str = ""
    first_b: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A hyper-parameter, counter or other value that differs; "absent" where one side has none."""

    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All of it; `tensors` holds every logical tensor, the equal ones too.

    `faults` are bytes that could not be read as they were written: what is said of their tensors is of the bytes that
    are there. `notes` tell what was not compared.
    """

    a: str
    b: str
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    bytes_read: int
    seconds: float

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.state != EQUAL)

    @property
    def equal(self) -> bool:
        """Whether all that both sides hold is equal to the bit, and was read as it was written."""
        return not (self.differing or self.values or self.faults)

    def to_json(self, *, every_tensor: bool = True) -> dict[str, object]:
        """The same as JSON values; NaN and infinities as text."""
        tensors = self.tensors if every_tensor else self.differing
        return {
            "equal": self.equal,
            "a": self.a,
            "b": self.b,
            "tensors_compared": len(self.tensors),
            "tensors": [{**asdict(tensor), "max_abs": _number(tensor.max_abs)} for tensor in tensors],
            "values": [asdict(value) for value in self.values],
            "faults": [asdict(fault) for fault in self.faults],
            "notes": list(self.notes),
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
        }


def _number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)
