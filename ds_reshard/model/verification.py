"""What the verification of a checkpoint found, as plain values that can be printed or written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ds_reshard.errors import Fault
from ds_reshard.model.difference import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was read, and all that was found wrong.

    `records` are those whose checksums were compared, `unchecked` those whose writer recorded none; `tensors` the
    logical tensors whose values were looked at. `notes` tell what is no fault, or could not be looked at.
    """

    folder: str
    files: int
    records: int
    unchecked: int
    tensors: int
    bytes_read: int
    seconds: float
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    difference: Difference | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.faults and (self.difference is None or self.difference.equal)

    def to_json(self) -> dict[str, object]:
        """The same as JSON values."""
        difference = self.difference.to_json() if self.difference is not None else None
        return {
            "clean": self.clean, "folder": self.folder, "files": self.files, "records": self.records,
            "unchecked": self.unchecked, "tensors": self.tensors, "bytes_read": self.bytes_read,
            "seconds": self.seconds, "faults": [asdict(fault) for fault in self.faults], "notes": list(self.notes),
            "difference": difference,
        }  # fmt: skip
