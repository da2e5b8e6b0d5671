"""What a checkpoint says about itself, as plain values that can be printed or written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

from ds_reshard.errors import Fault


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
    """An optimizer state: its kind and element types; `scalar` where one value serves a whole partition."""

    kind: str
    dtypes: tuple[str, ...]
    scalar: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A param group. `numel` counts its elements, None where the checkpoint names no members."""

    number: int
    members: int
    numel: int | None
    hyperparameters: Mapping[str, object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A parameter or buffer; `role` is "trainable", "frozen", "buffer", or "parameter" where the files do not tell.

    `tied_to` is the name under which its values are also saved; `group` the param group that trains it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    role: str
    group: int | None
    tied_to: str | None

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Counters of the saving run; `optimizer_steps` are the distinct `step` values of its states."""

    global_steps: int | None
    global_samples: int | None
    skipped_steps: int | None
    optimizer_steps: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How the flat buffers were made; None where the files do not tell.

    `buffers` counts the flat buffers of a rank (param groups, or sub-groups at stage 3).
    """

    buffers: int | None
    round_robin: bool | None
    alignment_gaps: bool | None
    elastic: bool | None
    offloaded_to: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What the files of one checkpoint tell, without their tensors' bytes, and every fault found in them.

    What could not be read is None or empty; `version` is that of `writer`. `bytes_read` is what this process asked of
    the system meanwhile, None where the system does not count it. `pickles` counts those that were read,
    `pickles_unread` the files that could not be read to their end.
    """

    format: str
    folder: str
    tag: str
    version: str | None
    stage: int | None
    wrapper: str | None
    dp: int | None
    optimizer: str | None
    states: tuple[StateEntry, ...]
    groups: tuple[GroupEntry, ...]
    steps: Steps
    arrangement: Arrangement
    parameters: tuple[ParameterEntry, ...]
    files: tuple[FileEntry, ...]
    faults: tuple[Fault, ...]
    bytes_read: int | None
    writer: str = "DeepSpeed"
    tp: int | None = None
    pp: int | None = None
    pickles: int = 0
    pickles_unread: int = 0

    @property
    def total_nbytes(self) -> int:
        """Bytes on disk, of every file in the folder."""
        return sum(file.nbytes for file in self.files)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Tensors and elements of each role; tied names count once."""
        counts: dict[str, dict[str, int]] = {}
        for entry in self.parameters:
            if entry.tied_to is None:
                count = counts.setdefault(entry.role, {"tensors": 0, "elements": 0})
                count["tensors"] += 1
                count["elements"] += entry.numel
        return counts

    def to_json(self) -> dict[str, object]:
        """The same as JSON values: dicts, lists, text and numbers only."""
        made = {field.name: _json(getattr(self, field.name)) for field in fields(self)}
        return {**made, "counts": self.counts, "total_nbytes": self.total_nbytes}


def _json(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value
