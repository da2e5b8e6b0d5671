"""The fingerprints of a checkpoint's logical tensors, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ds_reshard.errors import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFingerprint:
    """One logical tensor; `fingerprint` is 16 hexadecimal digits, None where its bytes could not be verified."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """All logical tensors of one checkpoint, in order of name and kind; `notes` say what is not among them."""

    folder: str
    tensors: tuple[TensorFingerprint, ...]
    notes: tuple[str, ...]
    faults: tuple[Fault, ...]
    bytes_read: int

    def to_json(self) -> dict[str, object]:
        """The same as JSON values."""
        return asdict(self)
