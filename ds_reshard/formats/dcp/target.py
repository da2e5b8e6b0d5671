"""A folder of torch.distributed.checkpoint that is to be written, for stock `dcp.load` and its FileSystemReader.

Keys are those of `get_state_dict` (torch/distributed/checkpoint/state_dict.py, 2.13). Param groups stand there nested
and flattened, so that a run finds them in whichever form it asks; both forms name the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_reshard.containers.dcp_directory import Entry, PlacedArchive
from ds_reshard.containers.dcp_files import DirectoryFiles
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.content import MASTER, WEIGHT, Content, Path, TensorSource
from ds_reshard.model.facts import GroupFacts, ScalarTensor, torch_step
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.target import Target

_EXACT_STEPS = 1 << 24


def dcp_target(content: Content, files: int, *, folders: tuple[str, str] | None = None) -> Target:
    """The folder, with its tensors cut by rows over so many files, as FSDP2 of so many ranks saves them.

    Weights are the fp32 masters where there are some. `folders` are the names of two below it, for the model and for
    the optimizer, each whole by itself, as accelerate has them. Raises UnsupportedLayout for what torch could not load.
    """
    raise_faults(list(_unsupported(content)), subject=f"converting {content.folder} to dcp")
    parts = (
        [_Writing(content=content, files=files)]
        if folders is None
        else [
            _Writing(content=content, files=files, folder=folder, optimizer=bool(number))
            for number, folder in enumerate(folders)
            if not number or content.facts is not None
        ]
    )
    placements = {key: place for part in parts for key, place in part.placements.items()}
    shards = {family: count for part in parts for family, count in part.shards.items()}
    wants = {key: wanted for part in parts for key, wanted in part.wants.items()}
    units = [unit for part in parts for unit in part.units()]
    return Target(layout=Layout(placements, shards), sources=wants, units=units)


def _unsupported(content: Content) -> Iterator[Fault]:
    groups = content.facts.groups if content.facts is not None else ()
    for number, group in enumerate(groups):
        if group.hyperparameters is None:
            yield _fault(
                f"param group {number}",
                "has no hyper-parameters (elastic_checkpoint)",
                "load it in a run with import ds_reshard.auto, and save there",
            )
        for member in group.members:
            if member in map(str, range(len(groups))):
                what = f"is called as a param group is: param_groups.{member}.lr would be a value of both"
                yield _fault(f"parameter {member}", what, "rename the parameters: --names")
    for name, states in content.facts.scalars.items() if content.facts is not None else ():
        step = states.get("step")
        if (isinstance(step, int) and not 0 <= step < _EXACT_STEPS) or (isinstance(step, float) and not _is_fp32(step)):
            yield _fault(f"{name}[step]", f"is {step}, which no fp32 step of torch's optimizers is", "another tag")


def _is_fp32(number: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", number))[0] == number)
    except OverflowError:
        return False


def _fault(where: str, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=mend)


@dataclass(frozen=True, kw_only=True)
class _Writing(DirectoryFiles):
    """One directory and its files, in `folder`: of all, of the `optimizer` alone, or of all but it."""

    content: Content
    optimizer: bool | None = None

    def _holds(self, optimizer: bool) -> bool:
        return self.optimizer in (None, optimizer)

    @cached_property
    def held(self) -> dict[TensorKey, TensorSource]:
        """Each tensor that is written: of a parameter with a master that, as its weight."""
        tensors, found = self.content.tensors, {}
        for key, held in tensors.items():
            if key.kind != MASTER and self._holds(key.kind != WEIGHT):
                found[key] = tensors.get(TensorKey(name=key.name, kind=MASTER), held) if key.kind == WEIGHT else held
        return found

    @cached_property
    def settings(self) -> dict[Path, object]:
        """The values of the optimizer that are one for a parameter or a param group."""
        facts = self.content.facts if self._holds(True) else None
        found: dict[Path, object] = {}
        for name, states in facts.scalars.items() if facts is not None else ():
            for kind, value in states.items():
                found["optimizer", "state", name, kind] = torch_step(value) if kind == "step" else value
        for number, group in enumerate(facts.groups if facts is not None else ()):
            values = {**(group.hyperparameters or {}), "params": list(group.members)}
            for name, setting in values.items():
                found["optimizer", "param_groups", number, name] = setting
        return found

    @cached_property
    def objects(self) -> dict[Path, object]:
        own = self.content.objects if self._holds(False) else {}
        return {**own, **{path: _recorded(path, value) for path, value in self.settings.items()}}

    @cached_property
    def data(self) -> dict[str, bytes]:
        """The bytes of the small tensors among the objects."""
        return {_buffer(path): one.data for path, one in self.settings.items() if isinstance(one, ScalarTensor)}

    def tensor_entries(self, key: TensorKey, archives: tuple[PlacedArchive, ...]) -> Iterator[Entry]:
        placement = self.placements[key]
        names = [key.name]
        if key.kind == WEIGHT:
            names += [name for name, owner in self.content.tied.items() if owner == key.name]
        for name in names:
            path: Path = ("optimizer", "state", name, key.kind)
            if key.kind == WEIGHT:
                path = self.content.extra_tensors.get(name, ("model", name))
            yield Entry(path=path, archives=archives, shape=placement.shape, dtype=placement.dtype)

    def object_entries(self, path: Path, archive: PlacedArchive) -> Iterator[Entry]:
        value = self.objects[path]
        if isinstance(value, TensorRecord) and path[:2] == ("optimizer", "state"):
            whole = replace(archive, offset=(0,) * len(value.shape), size=value.shape)
            yield Entry(path=path, archives=(whole,), shape=value.shape, dtype=value.dtype)
            return
        yield Entry(path=path, archives=(archive,))
        if path[:2] == ("optimizer", "param_groups") and path[-1] != "params":
            for member in self._members(path[2]):
                yield Entry(path=("optimizer", f"param_groups.{member}.{path[-1]}"), archives=(archive,))

    def _members(self, number: object) -> Sequence[str]:
        groups: tuple[GroupFacts, ...] = self.content.facts.groups if self.content.facts is not None else ()
        assert isinstance(number, int)
        return groups[number].members


def _buffer(path: Path) -> str:
    return "/".join(map(str, path))


def _recorded(path: Path, value: object) -> object:
    """A value as torch.save is given it."""
    return new_tensor(_buffer(path), value.shape, value.dtype) if isinstance(value, ScalarTensor) else value
