"""The answers of the tools, as plain values that can be printed, drawn or written as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import isfinite, prod
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.target import RunSizes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the checkpoint.

    `role` is "model", "optimizer", "shards" (of both), "unused" (of an older, wider save) or "other".
    """

    name: str
    nbytes: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """An optimizer state: its kind and element types; `scalar` is true if one value holds for a whole partition."""

    kind: str
    dtypes: tuple[str, ...]
    scalar: bool


def states_of(
    tensors: Iterable[tuple[str, ElementType]], scalars: Iterable[Mapping[str, object]]
) -> tuple[StateEntry, ...]:
    """Return the optimizer states; `tensors` are their kinds and types, `scalars` the scalar states per parameter."""
    labels_by_state: dict[tuple[str, bool], set[str]] = {}
    for kind, dtype in tensors:
        labels_by_state.setdefault((kind, False), set()).add(dtype.label)
    for kind, value in (pair for values in scalars for pair in values.items()):
        label = value.dtype.label if isinstance(value, ScalarTensor | TensorRecord) else type(value).__name__
        labels_by_state.setdefault((kind, True), set()).add(label)
    return tuple(
        StateEntry(kind=kind, dtypes=tuple(sorted(labels)), scalar=scalar)
        for (kind, scalar), labels in labels_by_state.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MapEntry:
    """A map of names, and what it makes of a checkpoint: `weights` are their numbers on each of its `sides`.

    The first side is that of the checkpoint. `faults` are all reasons why the map does not fit.
    """

    name: str
    about: str
    sides: tuple[str, str] = ("", "")
    weights: tuple[int, int] = (0, 0)
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The answer of `names`; `skeleton` is the beginning of a map, empty if one of `maps` fits."""

    folder: str
    maps: tuple[MapEntry, ...]
    skeleton: str

    def to_json(self) -> dict[str, object]:
        """Return the answer as JSON values."""
        return _fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A param group. `numel` counts its elements, None if the checkpoint names no members."""

    number: int
    members: int
    numel: int | None
    hyperparameters: Mapping[str, object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A parameter or buffer; `role` is "trainable", "frozen", "buffer", or "parameter" if the files do not tell.

    `tied_to` is the other name under which its values are saved; `group` the param group that trains it; `division`
    says how tensor-parallel ranks divided it, and from which source this is known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    role: str
    group: int | None
    tied_to: str | None
    division: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Counters of the saving run; `optimizer_steps` are the distinct `step` values of its states."""

    global_steps: int | None
    global_samples: int | None
    skipped_steps: int | None
    optimizer_steps: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the flat buffers are arranged; a field is None if the files do not tell.

    `buffers` counts the flat buffers of a rank (param groups, or sub-groups at stage 3).
    """

    buffers: int | None = None
    round_robin: bool | None = None
    alignment_gaps: bool | None = None
    elastic: bool | None = None
    offloaded_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The answer of `inspect`: all that the files of a checkpoint tell without their tensors' bytes, and every fault.

    A field is None or empty if it could not be read; `version` is that of `writer`. `bytes_read` is the number of bytes
    that this process read meanwhile, None if the system does not count them. `pickles` counts the pickles that were
    read, `pickles_unread` the files that could not be read to their end. `notes` are remarks that are not faults.
    """

    format: str
    folder: str
    tag: str
    version: str | None = None
    stage: int | None = None
    wrapper: str | None = None
    dp: int | None = None
    optimizer: str | None = None
    states: tuple[StateEntry, ...]
    groups: tuple[GroupEntry, ...]
    steps: Steps
    arrangement: Arrangement = field(default_factory=Arrangement)
    parameters: tuple[ParameterEntry, ...]
    files: tuple[FileEntry, ...]
    faults: tuple[Fault, ...]
    bytes_read: int | None = None
    writer: str = "DeepSpeed"
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    pickles: int = 0
    pickles_unread: int = 0
    notes: tuple[str, ...] = ()

    @property
    def total_nbytes(self) -> int:
        """The size of all files in the folder, in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The number of tensors and elements of each role; tied names count once."""
        counts: dict[str, dict[str, int]] = {}
        for entry in self.parameters:
            if entry.tied_to is None:
                count = counts.setdefault(entry.role, {"tensors": 0, "elements": 0})
                count["tensors"] += 1
                count["elements"] += entry.numel
        return counts

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values: dicts, lists, text and numbers only."""
        return {**_fields(self), "counts": self.counts, "total_nbytes": self.total_nbytes}


def _fields(report: DataclassInstance) -> dict[str, object]:
    """Return the fields of a report as JSON values; NaN and infinities as text."""
    return {field.name: _json(getattr(report, field.name)) for field in fields(report)}


def _json(value: object) -> object:
    if value is None or type(value) in (str, int, bool):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFingerprint:
    """One logical tensor; `fingerprint` is 16 hexadecimal digits, None if its bytes could not be verified."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """The fingerprints of all logical tensors of a checkpoint, by name and kind; `notes` list what is left out."""

    folder: str
    tensors: tuple[TensorFingerprint, ...]
    notes: tuple[str, ...]
    faults: tuple[Fault, ...]
    bytes_read: int

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return _fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """The files of one target rank (or of one part of a universal checkpoint), which are written together.

    `reads` maps each source file to the number of bytes read from it, without its header.
    """

    family: str
    shard: int
    files: tuple[str, ...]
    bytes_written: int
    reads: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.family} {self.shard}"

    @property
    def bytes_read(self) -> int:
        return sum(self.reads.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """The plan of a conversion, or of part `shard` of it (number, count).

    `sources` maps the source's files to their sizes, by family and rank. `buffer_nbytes` is the greatest memory that
    the buffers take at once, `seconds` the time to read and write at `bandwidth` bytes per second. `metadata_nbytes`
    were read to make the plan, None if the system does not count them. `saved` and `coming` are the sizes of the saving
    and of the coming run, as far as they are known.
    """

    folder: str
    to: str
    dp: int
    saved: RunSizes
    coming: RunSizes
    sources: Mapping[str, int]
    units: tuple[UnitPlan, ...]
    buffer_nbytes: int
    bandwidth: float
    shard: tuple[int, int] = (0, 1)
    metadata_nbytes: int | None = None

    @property
    def bytes_read(self) -> int:
        return sum(unit.bytes_read for unit in self.units)

    @property
    def bytes_written(self) -> int:
        return sum(unit.bytes_written for unit in self.units)

    @property
    def seconds(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.bandwidth

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        units = [
            {**_fields(unit), "bytes_read": unit.bytes_read, "files_opened": len(unit.reads)} for unit in self.units
        ]
        return {
            **_fields(self),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "files_written": sum(len(unit.files) for unit in self.units),
            "seconds": self.seconds,
            "units": units,
        }


EQUAL, DIFFERS = "equal", "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A comparison of one logical tensor in A and B.

    `state` is "equal" (to the bit), "differs", "only in A", "only in B", "other shape" or "other type"; the other
    fields describe a tensor that differs. `max_abs` is the largest absolute difference, NaN if one side has NaN;
    `max_ulp` the largest number of representable values between two elements, ignoring NaN, None for types that are not
    floating-point. `first` is the index of the first element that differs, with its value in A and in B.
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
    """A hyper-parameter, counter or other value that differs; "absent" if one side has none."""

    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The answer of `diff`; `tensors` has every logical tensor, equal ones too.

    `faults` are damaged bytes; their tensors are compared as they are in the files. `notes` tell what was not compared.
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
        """True if both sides are equal to the bit, and no file is damaged."""
        return not (self.differing or self.values or self.faults)

    def to_json(self, *, every_tensor: bool = True) -> dict[str, object]:
        """Return the report as JSON values."""
        shown = replace(self, tensors=self.tensors if every_tensor else self.differing)
        return {**_fields(shown), "equal": self.equal, "tensors_compared": len(self.tensors)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The answer of `verify`: how much was read, and every fault.

    `records` counts the records whose checksums were compared, `unchecked` those without a recorded checksum; `tensors`
    the logical tensors whose values were examined; `pickles` those that were searched for code, `pickles_unread` the
    files that could not be read to their end. `notes` are remarks that are not faults, or tell what was not examined.
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
        """True if no fault and no difference was found."""
        return not self.faults and (self.difference is None or self.difference.equal)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        difference = self.difference.to_json() if self.difference is not None else None
        return {**_fields(self), "clean": self.clean, "difference": difference}


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleScan:
    """The pickles of any file or folder: how many were read, and a fault for each that runs code or cannot be read."""

    folder: str
    files: int
    pickles: int
    unread: int
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {**_fields(self), "clean": not self.faults}


def pickle_line(pickles: int, unread: int, faults: Iterable[Fault]) -> str:
    """Return one line about the pickles that were read: "nothing in them acts", or the number of findings."""
    findings = sum(fault.error in ("UnsafePickle", "TrustRequired") for fault in faults)
    result = f"{findings} finding{'s' if findings != 1 else ''}" if findings else "nothing in them acts"
    unread_files = f"; {unread} file{'s' if unread != 1 else ''} could not be read to the end" if unread else ""
    return f"pickles: {pickles} read, {result}{unread_files}"
