"""Folders of EasyR1 and verl: `{model,optim}_world_size_W_rank_R.pt`, a state dict of DTensors on each rank.

EasyR1 saves what `get_state_dict` gives for FSDP1 and FSDP2, by names; verl `model.state_dict()` and
`optimizer.state_dict()`, whose states have numbers (verl/utils/checkpoint/fsdp_checkpoint_manager.py of each).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.revive_names import find_hostile
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound, Fault, ReadFailed, raise_faults
from ds_reshard.formats.fsdp.held import Held, Shape, damaged, held_of
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked
from ds_reshard.model.region import Box
from ds_reshard.model.saved import SavedFile, SavedListing

MODEL, OPTIM = "model", "optim"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
UNNAMED = "the optimizer's files name no parameter (verl saves optimizer.state_dict()): left out"
_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCheckpoint:
    """A folder; a family is "model" or "optim", a shard one rank's file. `first` is what rank 0's files hold."""

    folder: str
    ranks: int
    layout: Layout
    facts: OptimizerFacts | None
    objects: Mapping[tuple[object, ...], object]
    beside: Mapping[str, tuple[object, ...]]
    first: Mapping[str, Mapping[TensorKey, Held]]
    notes: tuple[str, ...]

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return _parameters(self.first[MODEL], self.ranks)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The tensors of one rank's file, by the text of their keys, each checked against rank 0's."""
        path = _path(self.folder, family, self.ranks, shard)
        expected = self.first[family]
        held = _read(path, family, self.parameters).tensors
        faults = [
            damaged(path, f"{key} is in one of its file and rank 0's alone", "the same tensors", "others")
            for key in sorted(held.keys() ^ expected.keys())
        ]
        for key in held.keys() & expected.keys():
            faults += _differs(path, key, held[key], expected[key], shard, self.ranks, same=family == OPTIM)
        raise_faults(faults, subject=f"checkpoint {self.folder}")
        raise_faults(list(self._unlike_replicas(path, family, shard, held)), subject=f"checkpoint {self.folder}")
        return {str(key): extent_of(one.local) for key, one in held.items()}

    def _unlike_replicas(self, path: str, family: str, shard: int, held: Mapping[TensorKey, Held]) -> Iterator[Fault]:
        """The shards of HSDP that are not those of the first group of ranks."""
        shards = min((self.ranks // one.replicas for one in held.values()), default=self.ranks)
        if shard < shards:
            return
        first = _read(_path(self.folder, family, self.ranks, shard % shards), family, self.parameters).tensors
        for key, one in held.items():
            if one.replicas > 1 and (key not in first or _checksum(one) != _checksum(first[key])):
                yield damaged(path, f"{key} is another than rank {shard % shards}'s, which holds the same shard",
                              "the same", "others")  # fmt: skip


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
    tensors that are sharded over several dimensions of a mesh, and what reading a damaged file raises.
    """
    files = [match for match in _files(folder) if match["family"] in (MODEL, OPTIM)]
    sizes = sorted({int(match["size"]) for match in files})
    if not sizes:
        mend = "give the folder that holds them"
        fault = Fault(error="CheckpointNotFound", where=folder, what="holds no model_world_size_*.pt", mend=mend)
        raise CheckpointNotFound(f"{fault.line()}; {mend}", [fault])
    if len(sizes) > 1:
        raise_faults([damaged(folder, "holds files of several world sizes", "one", ", ".join(map(str, sizes)))],
                     subject=f"checkpoint {folder}")  # fmt: skip
    size = sizes[0]
    faults = list(_missing(folder, files, size))
    raise_faults(faults, subject=f"checkpoint {folder}")
    families = sorted({match["family"] for match in files})
    read = {MODEL: _read(_path(folder, MODEL, size, 0), MODEL, {})}
    if OPTIM in families:
        read[OPTIM] = _read(_path(folder, OPTIM, size, 0), OPTIM, _parameters(read[MODEL].tensors, size))
    shapes = {key.name: held.shape for key, held in read[MODEL].tensors.items()}
    states = read[OPTIM].tensors if OPTIM in read else {}
    raise_faults(list(_of_another_model(_path(folder, OPTIM, size, 0), states, shapes)), subject=f"checkpoint {folder}")
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
        beside={},
        first={family: file.tensors for family, file in read.items()},
        notes=tuple(note for file in read.values() for note in file.notes),
    )  # fmt: skip


def _of_another_model(path: str, states: Mapping[TensorKey, Held], shapes: Mapping[str, Shape]) -> Iterator[Fault]:
    for key, held in states.items():
        if key.name not in shapes:
            yield damaged(
                path, f"{key} is of no parameter of the model's files: of another model", "its names", "others"
            )
        elif key.kind in _MOMENTS and held.shape != shapes[key.name]:
            what = f"{key} is of another shape than its parameter: of another model"
            yield damaged(path, what, str(list(shapes[key.name])), str(list(held.shape)))


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


def _checksum(held: Held) -> tuple[object, ...]:
    return held.local.storage.crc32, held.local.element_offset, held.local.shape


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
            yield damaged(folder, f"files {family}_world_size_{size}_rank_*.pt are not those of {size} ranks",
                           f"ranks 0 to {size - 1}", f"{len(there)} files; missing {shown}")  # fmt: skip


def _placement(key: TensorKey, held: Held, family: str, size: int) -> Placement:
    if held.dim is not None:
        boxes = [held.box(rank, size) for rank in range(size // held.replicas)]
        return chunked(key, held.shape, held.local.dtype, boxes, family=family, buffer=str(key))
    return Placement(
        key=key, shape=held.shape, dtype=held.local.dtype, family=family, buffer=str(key),
        cut=Cut(chunk=max(1, prod(held.shape))), box=Box.whole(held.shape), replicated=True,
    )  # fmt: skip


def _parameters(tensors: Mapping[TensorKey, Held], size: int) -> Mapping[str, Shape]:
    """The shapes of a model's parameters by names, in the order of its modules: what several ranks have sharded."""
    return {key.name: held.shape for key, held in tensors.items() if size == 1 or held.rank is not None}


def _read(path: str, family: str, parameters: Mapping[str, Shape]) -> _File:
    with open_archive(path) as archive:
        top = archive.load()
    raise_faults(list(find_hostile(top, path)), subject="reading a checkpoint")
    tree = top.get("state") if isinstance(top, dict) and family == OPTIM else top
    if not isinstance(top, dict) or not isinstance(tree, dict):
        raise_faults([damaged(path, "is no state dict", "names and tensors", type(tree).__name__)],
                     subject="reading a checkpoint")  # fmt: skip
        raise AssertionError
    if family == MODEL:
        entries = [(str(name), "weight", value) for name, value in tree.items()]
        return _File(tensors=_tensors(path, entries))
    groups = groups_of(top)
    names = state_names(groups, parameters)
    states = [(names.get(name, str(name)), str(kind), value)
              for name, kinds in tree.items() if isinstance(kinds, dict) for kind, value in kinds.items()]  # fmt: skip
    found = _tensors(path, states)
    numbered = any(isinstance(name, int) for name in tree)
    if numbered and (not names or any(held.shape not in ((), parameters[key.name]) for key, held in found.items())):
        return _File(tensors={}, notes=(UNNAMED,))
    return _File(tensors=found, groups=tuple(_groups(groups, names)))


def groups_of(optimizer: Mapping[object, object]) -> list[Mapping[object, object]]:
    groups = optimizer.get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def state_names(groups: Sequence[Mapping[object, object]], parameters: Iterable[str]) -> Mapping[object, str]:
    """The name of each parameter by its number in an optimizer's state dict; none where they are not told.

    Of one group, numbers count the parameters as `model.parameters()` gives them, and so as `model.state_dict()` does:
    both go through the modules in one order (torch/optim/optimizer.py, torch/nn/modules/module.py, 2.13).
    """
    named = list(parameters)
    if len(groups) != 1 or groups[0].get("params") != list(range(len(named))):
        return {}
    return dict(enumerate(named))


def _tensors(path: str, entries: Iterable[tuple[str, str, object]]) -> dict[TensorKey, Held]:
    found = {}
    for name, kind, value in entries:
        held = held_of(path, name, value)
        if held is not None:
            found[TensorKey(name=name, kind=kind)] = held
    return found


def _groups(groups: Iterable[Mapping[object, object]], names: Mapping[object, str]) -> Iterator[GroupFacts]:
    for group in groups:
        members = group.get("params")
        yield GroupFacts(
            members=tuple(names.get(one, str(one)) for one in members) if isinstance(members, list | tuple) else (),
            hyperparameters={str(name): value for name, value in group.items() if name != "params"},
        )


def _differs(
    path: str, key: TensorKey, held: Held, first: Held, rank: int, size: int, *, same: bool
) -> Iterator[Fault]:
    """What is wrong with a tensor of a rank's file beside rank 0's; replicas hold the `same` values."""
    expected = f"{first.local.dtype.label} {list(first.shape)}, axis {first.dim}, {first.replicas} times"
    found = f"{held.local.dtype.label} {list(held.shape)}, axis {held.dim}, {held.replicas} times"
    if expected != found:
        yield damaged(path, f"{key} is of another shape, type or placement than rank 0's", expected, found)
    elif held.local.shape != held.box(rank, size).size and (held.local.numel or held.box(rank, size).numel):
        yield damaged(path, f"{key}: its part is not rank {rank}'s of {size}",
                       str(list(held.box(rank, size).size)), str(list(held.local.shape)))  # fmt: skip
    elif held.rank not in (None, rank):
        yield damaged(path, f"{key} was saved by another rank than the file's name says", f"{rank}",
                       f"{held.rank}")  # fmt: skip
    elif same and held.dim is None and held.local.storage.crc32 != first.local.storage.crc32:
        yield damaged(path, f"{key} has another value than rank 0's: of another step or run", "the same", "others")
