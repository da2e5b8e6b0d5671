"""What the verification of a checkpoint found, as plain values that can be printed or written as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ds_reshard.errors import Fault
from ds_reshard.model.difference import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was read, and all that was found wrong.

    `records` are those whose checksums were compared, `unchecked` those whose writer recorded none; `tensors` the
    logical tensors whose values were looked at; `pickles` those that were searched for what acts, `pickles_unread` the
    files that could not be read to their end. `notes` tell what is no fault, or could not be looked at.
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
    pickles: int = 0
    pickles_unread: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.faults and (self.difference is None or self.difference.equal)

    def to_json(self) -> dict[str, object]:
        """The same as JSON values."""
        difference = self.difference.to_json() if self.difference is not None else None
        return {
            "clean": self.clean,
            "folder": self.folder,
            "files": self.files,
            "records": self.records,
            "unchecked": self.unchecked,
            "pickles": self.pickles,
            "pickles_unread": self.pickles_unread,
            "tensors": self.tensors,
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
            "faults": [asdict(fault) for fault in self.faults],
            "notes": list(self.notes),
            "difference": difference,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleScan:
    """The pickles of a file or of a folder of any kind: how many were read, and what in them acts or cannot be read."""

    folder: str
    files: int
    pickles: int
    unread: int
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, object]:
        """The same as JSON values."""
        return {**asdict(self), "clean": not self.faults, "faults": [asdict(fault) for fault in self.faults]}


def pickle_line(pickles: int, unread: int, faults: Iterable[Fault]) -> str:
    """One line about the pickles that were read: that nothing in them acts, or the number of findings."""
    found = sum(fault.error in ("UnsafePickle", "TrustRequired") for fault in faults)
    what = f"{found} finding{'s' if found != 1 else ''}" if found else "nothing in them acts"
    left = f"; {unread} file{'s' if unread != 1 else ''} could not be read to the end" if unread else ""
    return f"pickles: {pickles} read, {what}{left}"
