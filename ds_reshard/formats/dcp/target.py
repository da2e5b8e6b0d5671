"""A folder of torch.distributed.checkpoint that is to be written, for stock `dcp.load` and its FileSystemReader.

Keys are those of `get_state_dict` (torch/distributed/checkpoint/state_dict.py, 2.13). Param groups stand there nested
and flattened, so that a run finds them in whichever form it asks; both forms name the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ds_reshard.containers.dcp_directory import METADATA, Entry, PlacedArchive, plan_archives, write_directory
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.content import MASTER, WEIGHT, Content, Held, Path
from ds_reshard.model.facts import GroupFacts, ScalarTensor, torch_step
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

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
    shards = {family: count for part in parts for family, count in ((part.shards, files), (part.last, 1))}
    wants = {key: wanted for part in parts for key, wanted in part.wants.items()}
    units = [unit for part in parts for unit in part.units()]
    return Target(layout=Layout(placements, shards), wants=wants, units=units, folder="", pointers={})


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


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
class _Writing:
    """One directory and its files, in `folder`: of all, of the `optimizer` alone, or of all but it."""

    content: Content
    files: int
    folder: str = ""
    optimizer: bool | None = None

    @property
    def shards(self) -> str:
        """The family of the files."""
        return f"{self.folder}shards"

    @property
    def last(self) -> str:
        """The family of the directory."""
        return f"{self.folder}directory"

    def units(self) -> Iterator[Unit]:
        for rank in range(self.files):
            if rank and not any(True for _ in self.chunks(rank)):
                continue  # more files than rows: torch writes none for a rank that holds nothing
            data = self.data if not rank else {}
            file = TargetFile(
                name=self._below(_file(rank)), tree=partial(self.values, rank), container="archives", data=data
            )
            yield Unit(family=self.shards, shard=rank, files=(file,))
        directory = TargetFile(name=self._below(METADATA), tree=self.directory, container="plain")
        yield Unit(family=self.last, shard=0, files=(directory,))

    def _below(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def _holds(self, optimizer: bool) -> bool:
        return self.optimizer in (None, optimizer)

    @cached_property
    def wants(self) -> dict[TensorKey, TensorKey]:
        """Each tensor with the source's: a weight's is its master, where that was saved."""
        return {key: held.origin for key, held in self.held.items()}

    @cached_property
    def held(self) -> dict[TensorKey, Held]:
        """Each tensor that is written: of a parameter with a master that, as its weight."""
        tensors, found = self.content.tensors, {}
        for key, held in tensors.items():
            if key.kind != MASTER and self._holds(key.kind != WEIGHT):
                found[key] = tensors.get(TensorKey(name=key.name, kind=MASTER), held) if key.kind == WEIGHT else held
        return found

    @cached_property
    def placements(self) -> dict[TensorKey, Placement]:
        made = {}
        for key, placed in self.held.items():
            files = self.files if placed.shape else 1
            boxes = [_rows(placed.shape, rank, files) for rank in range(files)]
            made[key] = chunked(key, placed.shape, placed.dtype, boxes, family=self.shards, buffer=str(key))
        return made

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
        """Every value that lies in the first file, as torch.save is given it: small tensors, too."""
        own = self.content.objects if self._holds(False) else {}
        return {**own, **{path: _recorded(path, value) for path, value in self.settings.items()}}

    @cached_property
    def data(self) -> dict[str, bytes]:
        """The bytes of the small tensors among the objects."""
        return {_buffer(path): one.data for path, one in self.settings.items() if isinstance(one, ScalarTensor)}

    def chunks(self, rank: int) -> Iterator[tuple[TensorKey, Box]]:
        """What one file holds, in its order; of a tensor without elements the first file has all of it."""
        for key, placement in self.placements.items():
            box = _rows(placement.shape, rank, self.files)
            if box.numel or (not placement.numel and not rank):
                yield key, box

    def values(self, rank: int) -> list[object]:
        """What each archive of one file holds."""
        tensors = [new_tensor(str(key), box.size, self.placements[key].dtype) for key, box in self.chunks(rank)]
        return [*tensors, *(self.objects.values() if not rank else ())]

    def directory(self) -> bytes:
        """The directory: where each chunk and each object lies, under every name that it has."""
        chunks: dict[TensorKey, list[PlacedArchive]] = {key: [] for key in self.placements}
        single: dict[Path, PlacedArchive] = {}
        for rank in range(self.files):
            plan = plan_archives(self.values(rank))
            held = list(zip(plan.starts, (archive.nbytes for archive in plan.archives), strict=True))
            boxes = list(self.chunks(rank))
            for (key, box), (start, nbytes) in zip(boxes, held, strict=False):
                chunks[key].append(
                    PlacedArchive(file=_file(rank), byte_offset=start, nbytes=nbytes, offset=box.offset, size=box.size)
                )
            if not rank:
                for path, (start, nbytes) in zip(self.objects, held[len(boxes) :], strict=True):
                    single[path] = PlacedArchive(file=_file(rank), byte_offset=start, nbytes=nbytes)
        entries = [entry for key, archives in chunks.items() for entry in self._tensor(key, tuple(archives))]
        entries += [entry for path, archive in single.items() for entry in self._object(path, archive)]
        return write_directory(entries)

    def _tensor(self, key: TensorKey, archives: tuple[PlacedArchive, ...]) -> Iterator[Entry]:
        placement = self.placements[key]
        names = [key.name]
        if key.kind == WEIGHT:
            names += [name for name, owner in self.content.tied.items() if owner == key.name]
        for name in names:
            path: Path = ("optimizer", "state", name, key.kind)
            if key.kind == WEIGHT:
                path = self.content.beside.get(name, ("model", name))
            yield Entry(path=path, archives=archives, shape=placement.shape, dtype=placement.dtype)

    def _object(self, path: Path, archive: PlacedArchive) -> Iterator[Entry]:
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


def _rows(shape: tuple[int, ...], rank: int, files: int) -> Box:
    """The part of a file: ceil(n / files) rows each, the last ones fewer or none; a scalar lies in the first."""
    if not shape:
        return Box(offset=(), size=()) if not rank else Box(offset=(0,), size=(0,))
    rows = -(-shape[0] // files)
    start, stop = min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows)
    return Box(offset=(start, *(0,) * (len(shape) - 1)), size=(stop - start, *shape[1:]))


def _buffer(path: Path) -> str:
    return "/".join(map(str, path))


def _recorded(path: Path, value: object) -> object:
    """A value as torch.save is given it."""
    return new_tensor(_buffer(path), value.shape, value.dtype) if isinstance(value, ScalarTensor) else value
