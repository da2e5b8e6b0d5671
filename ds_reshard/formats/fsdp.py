"""Folders of EasyR1: `{model,optim}_world_size_W_rank_R.pt`, a state dict of DTensors by names on each rank.

What `get_state_dict` gives for FSDP1 and FSDP2 on a mesh of one dimension, saved by torch.save
(verl/utils/checkpoint/fsdp_checkpoint_manager.py of EasyR1). verl's own optimizer files name no parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.revive_names import find_hostile
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound, Fault, ReadFailed, raise_faults
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked
from ds_reshard.model.records import ObjectRecord, TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.model.saved import SavedFile, SavedListing

MODEL, OPTIM = "model", "optim"
_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_MEND = "restore the folder from a copy, or load an older step"
_SAVE = "save with FSDP(model, use_orig_params=True, device_mesh=...) and get_state_dict, as EasyR1 does"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor of one rank's file: `local` of the whole `shape`, sharded by axis `dim`, or all of it (None)."""

    shape: Shape
    dim: int | None
    coordinate: int | None
    local: TensorRecord

    def box(self, rank: int, size: int) -> Box:
        """What a rank holds, as torch.chunk cuts: ceil(n / size) rows each, the last ones fewer or none."""
        if self.dim is None:
            return Box.whole(self.shape)
        whole = self.shape[self.dim]
        rows = -(-whole // size)
        start, stop = min(whole, rank * rows), min(whole, (rank + 1) * rows)
        offset, extent = [0] * len(self.shape), list(self.shape)
        offset[self.dim], extent[self.dim] = start, stop - start
        return Box(offset=tuple(offset), size=tuple(extent))


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCheckpoint:
    """A folder; a family is "model" or "optim", a shard one rank's file. `first` is what rank 0's files hold."""

    folder: str
    ranks: int
    layout: Layout
    facts: OptimizerFacts | None
    objects: Mapping[tuple[object, ...], object]
    first: Mapping[str, Mapping[TensorKey, Held]]
    notes: tuple[str, ...]

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The tensors of one rank's file, by the text of their keys, each checked against rank 0's."""
        path = _path(self.folder, family, self.ranks, shard)
        expected = self.first[family]
        held = _read(path, family).tensors
        faults = [
            _damaged(path, f"{key} is in one of its file and rank 0's alone", "the same tensors", "others")
            for key in sorted(held.keys() ^ expected.keys())
        ]
        for key in held.keys() & expected.keys():
            faults += _differs(path, key, held[key], expected[key], shard, self.ranks, same=family == OPTIM)
        raise_faults(faults, subject=f"checkpoint {self.folder}")
        return {str(key): extent_of(one.local) for key, one in held.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One rank's file: its tensors, what is not among them, and its param groups."""

    tensors: dict[TensorKey, Held]
    notes: tuple[str, ...] = ()
    groups: tuple[GroupFacts, ...] = ()


def is_fsdp(folder: str) -> bool:
    return any(match["family"] == MODEL for match in _files(folder))


def list_fsdp(folder: str) -> SavedListing:
    """The files of such a folder."""
    roles = {MODEL: "model", OPTIM: "optimizer"}
    files = {}
    for name in sorted(os.listdir(folder)):
        path, match = os.path.join(folder, name), _NAME.fullmatch(name)
        if os.path.isfile(path):
            role = roles.get(match[1], "other") if match is not None else "other"
            files[name] = SavedFile(nbytes=os.path.getsize(path), role=role)
    tag = os.path.basename(os.path.abspath(folder))
    return SavedListing(format="files of FSDP ranks", writer="EasyR1 or verl", folder=folder, tag=tag, files=files)


def open_fsdp(folder: str) -> FsdpCheckpoint:
    """Read rank 0's files and the list of the others.

    Raises CheckpointNotFound, CheckpointDamaged for files of several world sizes or missing ones, UnsupportedLayout for
    meshes of several dimensions, and what reading a damaged file raises.
    """
    files = [match for match in _files(folder) if match["family"] in (MODEL, OPTIM)]
    sizes = sorted({int(match["size"]) for match in files})
    if not sizes:
        mend = "give the folder that holds them"
        fault = Fault(error="CheckpointNotFound", where=folder, what="holds no model_world_size_*.pt", mend=mend)
        raise CheckpointNotFound(f"{fault.line()}; {mend}", [fault])
    if len(sizes) > 1:
        raise_faults([_damaged(folder, "holds files of several world sizes", "one", ", ".join(map(str, sizes)))],
                     subject=f"checkpoint {folder}")  # fmt: skip
    size = sizes[0]
    faults = list(_missing(folder, files, size))
    raise_faults(faults, subject=f"checkpoint {folder}")
    families = sorted({match["family"] for match in files})
    read = {family: _read(_path(folder, family, size, 0), family) for family in families}
    shapes = {key.name: held.shape for key, held in read[MODEL].tensors.items()}
    states = read[OPTIM].tensors if OPTIM in read else {}
    single = {key: held for key, held in states.items() if _is_single(key, held, shapes)}
    placements = {
        key: _placement(key, held, family, size) for family, file in read.items() for key, held in file.tensors.items()
        if key not in single
    }  # fmt: skip
    facts = None
    if states:
        scalars = _scalars(_path(folder, OPTIM, size, 0), single)
        facts = OptimizerFacts(groups=read[OPTIM].groups, scalars=scalars)
    return FsdpCheckpoint(
        folder=folder, ranks=size, layout=Layout(placements, dict.fromkeys(families, size)), facts=facts, objects={},
        first={family: file.tensors for family, file in read.items()},
        notes=tuple(note for file in read.values() for note in file.notes),
    )  # fmt: skip


def _is_single(key: TensorKey, held: Held, shapes: Mapping[str, Shape]) -> bool:
    """Whether a state is one value of its parameter."""
    return held.shape == () and (key.kind == "step" or shapes.get(key.name, ()) != ())


def _scalars(path: str, single: Mapping[TensorKey, Held]) -> dict[str, dict[str, Scalar]]:
    found: dict[str, dict[str, Scalar]] = {}
    with open_archive(path) as archive:
        for key, held in single.items():
            data = archive.tensor_bytes(held.local)
            found.setdefault(key.name, {})[key.kind] = ScalarTensor(dtype=held.local.dtype, shape=(), data=data)
    return found


def _files(folder: str) -> list[dict[str, str]]:
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ReadFailed(f"{folder}: cannot be listed: {error}") from error
    found = (_NAME.fullmatch(name) for name in names)
    return [{"family": match[1], "size": match[2], "rank": match[3]} for match in found if match is not None]


def _path(folder: str, family: str, size: int, rank: int) -> str:
    return os.path.join(folder, f"{family}_world_size_{size}_rank_{rank}.pt")


def _missing(folder: str, files: list[dict[str, str]], size: int) -> Iterator[Fault]:
    for family in (MODEL, *(name for name in (OPTIM,) if any(one["family"] == name for one in files))):
        there = {int(one["rank"]) for one in files if one["family"] == family}
        if there != set(range(size)):
            shown = ", ".join(map(str, sorted(set(range(size)) - there)[:16])) or "none"
            yield _damaged(folder, f"files {family}_world_size_{size}_rank_*.pt are not those of {size} ranks",
                           f"ranks 0 to {size - 1}", f"{len(there)} files; missing {shown}")  # fmt: skip


def _placement(key: TensorKey, held: Held, family: str, size: int) -> Placement:
    if held.dim is not None:
        boxes = [held.box(rank, size) for rank in range(size)]
        return chunked(key, held.shape, held.local.dtype, boxes, family=family, buffer=str(key))
    return Placement(
        key=key, shape=held.shape, dtype=held.local.dtype, family=family, buffer=str(key),
        cut=Cut(chunk=max(1, prod(held.shape))), box=Box.whole(held.shape), replicated=True,
    )  # fmt: skip


def _read(path: str, family: str) -> _File:
    with open_archive(path) as archive:
        top = archive.load()
    raise_faults(list(find_hostile(top, path)), subject="reading a checkpoint")
    tree = top.get("state") if isinstance(top, dict) and family == OPTIM else top
    if not isinstance(tree, dict):
        raise_faults([_damaged(path, "is no state dict", "names and tensors", type(tree).__name__)],
                     subject="reading a checkpoint")  # fmt: skip
        raise AssertionError
    if family == OPTIM and any(isinstance(name, int) for name in tree):
        note = "the optimizer's files name no parameter (verl saves optimizer.state_dict()): left out"
        return _File(tensors={}, notes=(note,))
    named = (
        ((str(name), str(kind), value) for name, states in tree.items() if isinstance(states, dict)
         for kind, value in states.items())
        if family == OPTIM
        else ((str(name), "weight", value) for name, value in tree.items())
    )  # fmt: skip
    found: dict[TensorKey, Held] = {}
    for name, kind, value in named:
        held = _held(path, name, value)
        if held is not None:
            found[TensorKey(name=name, kind=kind)] = held
    groups = top.get("param_groups") if isinstance(top, dict) and family == OPTIM else None
    return _File(tensors=found, groups=tuple(_groups(groups if isinstance(groups, list) else [])))


def _groups(groups: list[object]) -> Iterator[GroupFacts]:
    for group in groups:
        if isinstance(group, dict):
            members = group.get("params")
            yield GroupFacts(
                members=tuple(map(str, members)) if isinstance(members, list | tuple) else (),
                hyperparameters={str(name): value for name, value in group.items() if name != "params"},
            )


def _held(path: str, name: str, value: object) -> Held | None:
    """A DTensor or a plain tensor; None for any other value."""
    if isinstance(value, TensorRecord):
        return Held(shape=value.shape, dim=None, coordinate=None, local=_row_major(path, name, value))
    if not isinstance(value, ObjectRecord) or str(value.callable) != "torch._tensor._rebuild_from_type_v2":
        return None
    made, state = value.args[2], value.args[3]
    inner = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else {}
    local, spec = inner.get("_local_tensor"), _state(inner.get("_spec"))
    placements = spec.get("placements")
    shape = made[2] if isinstance(made, tuple) and len(made) > 2 else None
    if not isinstance(local, TensorRecord) or not isinstance(shape, tuple) or not isinstance(placements, tuple):
        raise_faults([_unsupported(path, f"{name} is no DTensor that is known: {value.args[1]}")], subject="reading")
        raise AssertionError
    kinds = [str(one.callable).rpartition(".")[2] for one in placements if isinstance(one, ObjectRecord)]
    if len(placements) != 1 or kinds not in (["Shard"], ["Replicate"]):
        what = f"{name} is placed as {', '.join(kinds)}: a mesh of one dimension, sharded or replicated, is read"
        raise_faults([_unsupported(path, what)], subject="reading a checkpoint")
    dim = _state(placements[0]).get("dim") if kinds == ["Shard"] else None
    if kinds == ["Shard"] and not (isinstance(dim, int) and 0 <= dim < len(shape)):
        raise_faults([_damaged(path, f"{name} is sharded by axis {dim}", f"of {len(shape)}", "another")],
                     subject="reading a checkpoint")  # fmt: skip
    at = _state(spec.get("mesh")).get("_coordinate_on_dim")
    coordinate = at[0] if isinstance(at, list | tuple) and len(at) == 1 and isinstance(at[0], int) else None
    return Held(shape=tuple(shape), dim=dim if isinstance(dim, int) else None, coordinate=coordinate,
                local=_row_major(path, name, local))  # fmt: skip


def _row_major(path: str, name: str, tensor: TensorRecord) -> TensorRecord:
    if not tensor.contiguous:
        raise_faults([_unsupported(path, f"{name} does not lie row-major")], subject="reading a checkpoint")
    return tensor


def _differs(
    path: str, key: TensorKey, held: Held, first: Held, rank: int, size: int, *, same: bool
) -> Iterator[Fault]:
    """What is wrong with a tensor of a rank's file beside rank 0's; replicas hold the `same` values."""
    expected = f"{first.local.dtype.label} {list(first.shape)}, axis {first.dim}"
    found = f"{held.local.dtype.label} {list(held.shape)}, axis {held.dim}"
    if expected != found:
        yield _damaged(path, f"{key} is of another shape, type or placement than rank 0's", expected, found)
    elif held.local.shape != held.box(rank, size).size and (held.local.numel or held.box(rank, size).numel):
        yield _damaged(path, f"{key}: its part is not rank {rank}'s of {size}",
                       str(list(held.box(rank, size).size)), str(list(held.local.shape)))  # fmt: skip
    elif held.coordinate not in (None, rank):
        yield _damaged(path, f"{key} was saved by another rank than the file's name says", f"{rank}",
                       f"{held.coordinate}")  # fmt: skip
    elif same and held.dim is None and held.local.storage.crc32 != first.local.storage.crc32:
        yield _damaged(path, f"{key} has another value than rank 0's: of another step or run", "the same", "others")


def _state(record: object) -> Mapping[object, object]:
    return record.state if isinstance(record, ObjectRecord) and isinstance(record.state, dict) else {}


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return Fault(
        error="CheckpointDamaged", where=where, what=what, expected=expected, found=found, mend=_MEND,
    )  # fmt: skip


def _unsupported(where: str, what: str) -> Fault:
    return Fault(error="UnsupportedLayout", where=where, what=what, mend=_SAVE)
