"""Folders of EasyR1, verl and accelerate: state dicts of DTensors, a file for each rank.

EasyR1 and verl name them `{model,optim,extra_state}_world_size_W_rank_R.pt`. accelerate (`use_dcp=False`) names them
`pytorch_model_fsdp_0_rankR.bin` and `optimizer_0_rankR.bin` (utils/fsdp_utils.py, 1.15); how many ranks saved, the mesh
of their DTensors alone says.

EasyR1 saves what `get_state_dict` gives for FSDP1 and FSDP2, by names; verl `model.state_dict()` and
`optimizer.state_dict()`, whose states have numbers (verl/utils/checkpoint/fsdp_checkpoint_manager.py of each). The
extra state is the schedule, which is the same on each rank, and each rank's own random states.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

from ds_reshard.containers import folders
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    ReshardError,
    UnsafePickle,
    UnsupportedLayout,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.fsdp.flat_parameters import (
    FlatStates,
    damaged,
    group_facts,
    groups_of,
    line_to_add,
    members_of,
    other_groups,
    read_flat,
    read_order,
    refuse,
)
from ds_reshard.model.checkpoint import SavedFile, SavedListing, SavedState
from ds_reshard.model.content import MASTER, WEIGHT, weight_name_fault
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ObjectRecord, TensorRecord
from ds_reshard.model.region import Box, Shape

MODEL, OPTIM, EXTRA = "model", "optim", "extra_state"
UNNAMED = "the optimizer's files name no parameter (verl saves optimizer.state_dict()): left out"
"""How the note of such files begins; why, and what mends it, follow."""
_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_ACCELERATES = re.compile(r"(pytorch_model_fsdp|optimizer)_0_rank(\d{1,9})\.bin")
_FAMILIES = {"pytorch_model_fsdp": MODEL, "optimizer": OPTIM}
_SHARDED = "torch.distributed._shard.sharded_tensor"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_SAVE = "save with FSDP(model, use_orig_params=True, device_mesh=...) and get_state_dict, as EasyR1 does"


def list_fsdp(folder: str) -> SavedListing | None:
    """The files of such a folder, None for any other."""
    sizes = {size for family, size in _ranks(folder) if family == MODEL}
    if not sizes:
        return None
    roles = {MODEL: "model", OPTIM: "optimizer"}
    files = {}
    for name, nbytes in folders.files(folder).items():
        named = _parsed(name)
        files[name] = SavedFile(nbytes=nbytes, role=roles.get(named[0], "other") if named is not None else "other")
    writer = "accelerate" if sizes == {None} else "EasyR1 or verl"
    return SavedListing(format="files of FSDP ranks", writer=writer, folder=folder, files=files)


def _parsed(name: str) -> tuple[str, int | None, int] | None:
    """The family, the number of ranks, None in accelerate's names, and the rank of a file; None for any other file."""
    if (match := _NAME.fullmatch(name)) is not None:
        return match[1], int(match[2]), int(match[3])
    match = _ACCELERATES.fullmatch(name)
    return (_FAMILIES[match[1]], None, int(match[2])) if match is not None else None


def is_ranks_file(name: str) -> bool:
    """Whether a file is named as one of a rank."""
    return _parsed(name) is not None


def file_name(family: str, size: int | None, rank: object) -> str:
    """The name of a rank's file; accelerate's without a `size`."""
    if size is not None:
        return f"{family}_world_size_{size}_rank_{rank}.pt"
    (prefix,) = (prefix for prefix, one in _FAMILIES.items() if one == family)
    return f"{prefix}_0_rank{rank}.bin"


def read_top(path: str, what: str = "is no state dict", expected: str = "names and tensors") -> dict[object, object]:
    """What torch.save was given, as records; CheckpointDamaged where it is no dict.

    UnsupportedLayout for the ShardedTensors of FSDP1 without a device mesh, whose pickle calls getattr.
    """
    try:
        with open_archive(path) as archive:
            top = archive.load()
    except UnsafePickle as error:
        if _SHARDED in str(error):
            sharded = "holds ShardedTensors, as FSDP1 without a device mesh saves: none is read here"
            again = "torch.load(FILE, weights_only=False), and save with device_mesh=... or use_dcp=True"
            mend = f"accelerate's load does not read it either; load it on as many ranks with {again}"
            refuse(UnsupportedLayout.fault(path, sharded, mend=mend))
        raise
    if not isinstance(top, dict):
        refuse(damaged(path, what, expected, type(top).__name__))
    return top


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """A tensor of one rank's file, plain or a DTensor: `local` of the whole `shape`, sharded by axis `dim` if any.

    `rank` is the one that saved it, by its place on the mesh, and `ranks` how many are on that; None of a plain tensor.
    Of HSDP, `replicas` groups of ranks, one after another, hold the same shards each.
    """

    shape: Shape
    dim: int | None
    rank: int | None
    local: TensorRecord
    replicas: int = 1
    ranks: int | None = None

    def box(self, rank: int, size: int) -> Box:
        """What a rank of `size` holds."""
        if self.dim is None:
            return Box.whole(self.shape)
        shards = size // self.replicas
        return Box.chunk(self.shape, self.dim, rank % shards, shards)


def shard_of(path: str, name: str, value: object) -> TensorShard | None:
    """A DTensor or a plain tensor; None for any other value. UnsupportedLayout for a placement that is not read."""
    if isinstance(value, TensorRecord):
        return TensorShard(shape=value.shape, dim=None, rank=None, local=_row_major(path, name, value))
    if not isinstance(value, ObjectRecord) or str(value.callable) != "torch._tensor._rebuild_from_type_v2":
        return None
    made, state = value.args[2], value.args[3]
    inner = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else {}
    local, spec = inner.get("_local_tensor"), _state(inner.get("_spec"))
    placements = spec.get("placements")
    shape = made[2] if isinstance(made, tuple) and len(made) > 2 else None
    if not isinstance(local, TensorRecord) or not isinstance(shape, tuple) or not isinstance(placements, tuple):
        what = f"{name} is no DTensor that is known: {value.args[1]}"
        refuse(UnsupportedLayout.fault(path, what, mend=_SAVE))
    kinds = [str(one.callable).rpartition(".")[2] for one in placements if isinstance(one, ObjectRecord)]
    if kinds not in (["Shard"], ["Replicate"], ["Replicate", "Shard"], ["Replicate", "Replicate"]):
        what = f"{name} is placed as {', '.join(kinds)}: sharded or replicated, or shards that are replicated, are read"
        refuse(UnsupportedLayout.fault(path, what, mend=_SAVE))
    dim = _state(placements[-1]).get("dim") if kinds[-1] == "Shard" else None
    if kinds[-1] == "Shard" and not (isinstance(dim, int) and 0 <= dim < len(shape)):
        refuse(damaged(path, f"{name} is sharded by axis {dim}", f"of {len(shape)}", "another"))
    mesh = _state(spec.get("mesh"))
    sizes, at = _mesh_sizes(mesh), mesh.get("_coordinate_on_dim")
    if len(kinds) == 2 and (sizes is None or len(sizes) != 2 or not isinstance(at, list | tuple) or len(at) != 2):
        refuse(UnsupportedLayout.fault(path, f"{name} lies on a mesh of unknown sizes", mend=_SAVE))
    rank = 0
    for size, coordinate in zip(sizes or (1,), at if isinstance(at, list | tuple) else (), strict=False):
        rank = rank * size + (coordinate if isinstance(coordinate, int) else 0)
    return TensorShard(
        shape=tuple(shape),
        dim=dim if isinstance(dim, int) else None,
        rank=rank,
        local=_row_major(path, name, local),
        replicas=sizes[0] if sizes and kinds == ["Replicate", "Shard"] else 1,
        ranks=prod(sizes) if sizes is not None else None,
    )


def _mesh_sizes(mesh: Mapping[object, object]) -> tuple[int, ...] | None:
    """The sizes of a mesh's dimensions, by its layout, else the tensor of its ranks; None if neither is known.

    `_MeshLayout` of torch/distributed/_mesh_layout.py: one of each axis in 2.13, one shape up to 2.12.
    """
    layout = _state(mesh.get("_layout"))
    axes, shape = layout.get("axes"), layout.get("shape")
    if isinstance(axes, tuple):
        shapes = [_state(axis).get("shape") for axis in axes]
        return tuple(prod(shape) for shape in shapes if isinstance(shape, tuple))
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
        return shape
    ranks = mesh.get("mesh")
    return ranks.shape if isinstance(ranks, TensorRecord) else None


def _row_major(path: str, name: str, tensor: TensorRecord) -> TensorRecord:
    if not tensor.contiguous:
        refuse(UnsupportedLayout.fault(path, f"{name} does not lie row-major", mend=_SAVE))
    return tensor


def _state(record: object) -> Mapping[object, object]:
    return record.state if isinstance(record, ObjectRecord) and isinstance(record.state, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCheckpoint(SavedState):
    """A folder; a family is "model" or "optim", a shard one rank's file. `first` is what rank 0's files hold.

    `flat` are the states of flat parameters, where the order of these is there, and `plain` those of rank 0's file that
    are plain numbers. `unnamed` says why no file tells whose states those of the optimizer are. `accelerates` are the
    names of its files.
    """

    ranks: int
    accelerates: bool = False
    first: Mapping[str, Mapping[TensorKey, TensorShard]]
    flat: FlatStates | None = None
    plain: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    unnamed: Fault | None = None

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return _parameters(self.first[MODEL], self.ranks)

    def path(self, family: str, rank: int) -> str:
        return os.path.join(self.folder, self.file_name(family, self.ranks, rank))

    def file_name(self, family: str, size: int, rank: int) -> str:
        return file_name(family, None if self.accelerates else size, rank)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """Return where the tensors of a rank's file lie, by the text of their keys; they are compared with rank 0's."""
        if family == OPTIM and self.flat is not None:
            return self.flat.buffers(shard)
        path = self.path(family, shard)
        first = self.first[family]
        file = _read(path, family, self.parameters)
        faults = [
            damaged(path, f"{key} is in this file or in rank 0's, and not in both", "the same tensors", "others")
            for key in sorted(file.tensors.keys() ^ first.keys())
        ]
        if family == OPTIM and self.facts is not None:
            faults += other_groups(path, file.groups, self.facts.groups)
        if family == OPTIM and canonical(file.scalars) != canonical(self.plain):
            what = "its states that are plain numbers are not rank 0's: of another step or run"
            faults.append(damaged(path, what, "the same on all ranks", "others"))
        for key in file.tensors.keys() & first.keys():
            faults += _differs(path, key, file.tensors[key], first[key], shard, self.ranks, same=family == OPTIM)
        raise_faults(faults, subject=f"checkpoint {self.folder}")
        raise_faults(self._unlike_replicas(family, shard, file.tensors), subject=f"checkpoint {self.folder}")
        return {str(key): extent_of(one.local) for key, one in file.tensors.items()}

    def notes_on_buffers(self) -> Iterator[str]:
        """Yield a note that names the plain tensors of the model whose values differ between ranks.

        Each rank has statistics of its own in a normalisation layer, for example. Skips files that cannot be read.
        """
        plain = {key: shard for key, shard in self.first[MODEL].items() if shard.dim is None}
        names: set[str] = set()
        for rank in range(1, self.ranks if plain else 0):
            with suppress(ReshardError):  # whoever opens the file is told
                tensors = _read(self.path(MODEL, rank), MODEL, {}).tensors
                own = plain.keys() & tensors.keys()
                names |= {key.name for key in own if _checksum(tensors[key]) != _checksum(plain[key])}
        if names:
            yield f"ranks have different values of these, and those of rank 0 are taken: {', '.join(sorted(names))}"

    def _unlike_replicas(self, family: str, shard: int, tensors: Mapping[TensorKey, TensorShard]) -> Iterator[Fault]:
        """The shards of HSDP that are not those of the first group of ranks."""
        shards = min((self.ranks // one.replicas for one in tensors.values()), default=self.ranks)
        if shard < shards:
            return
        number = shard % shards
        first = _read(self.path(family, number), family, self.parameters).tensors
        for key, one in tensors.items():
            if one.replicas > 1 and (key not in first or _checksum(one) != _checksum(first[key])):
                what = f"{key} is another than rank {number}'s, which holds the same shard"
                yield damaged(self.path(family, shard), what, "the same", "others")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One rank's file: its tensors, its param groups, and why nothing names the parameters of its states.

    `scalars` are states that are plain numbers, as the steps of transformers' Adafactor, or None. `others` are the keys
    of what is not read.
    """

    tensors: dict[TensorKey, TensorShard]
    groups: tuple[GroupFacts, ...] = ()
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    unnamed: Fault | None = None
    others: tuple[str, ...] = ()


def open_fsdp(folder: str, *, optimizer: bool = True) -> FsdpCheckpoint:
    """Read rank 0's files and the list of the others, those of the optimizer unless `optimizer` is False.

    Raises CheckpointNotFound, CheckpointDamaged for files of several world sizes or missing ones, UnsupportedLayout for
    tensors that are sharded over several dimensions of a mesh, and what reading a damaged file raises.
    """
    subject = f"checkpoint {folder}"
    wanted = (MODEL, OPTIM) if optimizer else (MODEL,)
    ranks = {at: found for at, found in _ranks(folder).items() if at[0] in wanted}
    sizes = {size for _, size in ranks}
    if not sizes:
        mend = "give the folder that holds them"
        raise CheckpointNotFound.of(folder, "holds no model_world_size_*.pt", mend=mend)
    if len(sizes) > 1:
        found = sorted(str(size or "accelerate's, which tell none") for size in sizes)
        several = damaged(folder, "holds files of several world sizes", "one", ", ".join(found))
        raise_faults([several], subject=subject)
    (named,) = sizes
    size = saved_ranks(folder) if named is None else named
    families = sorted({MODEL, *(family for family, _ in ranks)})
    raise_faults(
        [fault for family in families for fault in _missing(folder, family, named, size, ranks.get((family, named)))],
        subject=subject,
    )
    paths = {family: os.path.join(folder, file_name(family, named, 0)) for family in families}
    model = _read(paths[MODEL], MODEL, {})
    shapes = {key.name: shard.shape for key, shard in model.tensors.items()}
    optim = _read(paths[OPTIM], OPTIM, _parameters(model.tensors, size)) if OPTIM in paths else None
    read = {MODEL: model} if optim is None else {MODEL: model, OPTIM: optim}
    flat: FlatStates | None = None
    facts: OptimizerFacts | None = None
    unnamed: Fault | None = None
    single: dict[TensorKey, TensorShard] = {}
    if optim is not None and optim.unnamed:
        flat = _flat(folder, named, size, model, shapes)
        facts = flat.facts if flat is not None else None
        unnamed = optim.unnamed if flat is None else None
    elif optim is not None:
        raise_faults(_of_another_model(paths[OPTIM], optim, shapes), subject=subject)
        single = {key: shard for key, shard in optim.tensors.items() if _is_single(key, shard, shapes)}
        facts = OptimizerFacts(groups=optim.groups, scalars=_scalars(paths[OPTIM], single, optim.scalars))
    placements = {
        key: _placement(key, shard, family, size)
        for family, file in read.items()
        for key, shard in file.tensors.items()
        if key not in single
    }
    if flat is not None:
        placements |= {placement.key: placement for placement in flat.placements(flat.shards)}
    opened = FsdpCheckpoint(
        folder=folder,
        ranks=size,
        accelerates=named is None,
        layout=Layout(placements, dict.fromkeys(families, size)),
        facts=facts,
        first={family: file.tensors for family, file in read.items()},
        flat=flat,
        plain=optim.scalars if optim is not None else {},
        unnamed=unnamed,
        notes=(f"{UNNAMED}, as {unnamed.what} ({unnamed.found}); {unnamed.mend}",) if unnamed is not None else (),
        left_out=(*(_left_out(folder) if named is None else ()), *_not_read(paths, read)),
    )
    if facts is not None and not any(placement.family == OPTIM for placement in placements.values()):
        raise_faults(_unlike_ranks(opened), subject=subject)
    return opened


def _unlike_ranks(opened: FsdpCheckpoint) -> Iterator[Fault]:
    """What is wrong with the optimizer's files of the other ranks, which nobody opens later: they hold no tensor."""
    for rank in range(1, opened.ranks):
        try:
            opened.buffers(OPTIM, rank)
        except ReshardError as error:
            yield from faults_of(error)


def _ranks(folder: str) -> dict[tuple[str, int | None], set[int]]:
    """The ranks of which the folder has a file, by family and the world size of the name."""
    found: dict[tuple[str, int | None], set[int]] = {}
    for named in map(_parsed, folders.names(folder)):
        if named is not None:
            found.setdefault(named[:2], set()).add(named[2])
    return found


def saved_ranks(folder: str) -> int:
    """How many ranks have saved accelerate's files: the mesh of the first DTensor says, 1 where no tensor has one."""
    path = os.path.join(folder, file_name(MODEL, None, 0))
    tensors = _read(path, MODEL, {}).tensors if folders.exists(path) else {}
    meshes = [shard.ranks for shard in tensors.values() if shard.ranks is not None]
    return meshes[0] if meshes else 1


def _left_out(folder: str) -> Iterator[str]:
    """The files beside accelerate's of the first model: further models, the scheduler, random states."""
    names = [name for name in folders.names(folder) if name != "ds_reshard.json" and not is_ranks_file(name)]
    if names:
        yield f"left out, as nothing here reads them: {', '.join(names)}"


def _not_read(paths: Mapping[str, str], read: Mapping[str, _File]) -> Iterator[str]:
    for family, file in read.items():
        if file.others:
            shown = ", ".join(file.others[:8]) + (", ..." if len(file.others) > 8 else "")
            yield f"left out of {os.path.basename(paths[family])}, as no other format has a place for it: {shown}"


def other_size(folder: str, size: int) -> Iterator[Fault]:
    """A fault where a folder has files of other numbers of ranks alone: each rank looks for one under its own."""
    named = {saved for family, saved in _ranks(folder) if family == MODEL}
    sizes = sorted({saved_ranks(folder) if saved is None else saved for saved in named})
    if sizes and size not in sizes:
        found, out = " and ".join(map(str, sizes)), f"{folder.rstrip(os.sep)}-dp{size}"
        mend = f"ds-reshard convert {shlex.quote(folder)} {shlex.quote(out)} --to fsdp --dp {size}, and load {out}"
        what = "was saved by another number of ranks than this run has"
        yield UnsupportedLayout.fault(folder, what, str(size), found, mend=mend)


def _missing(folder: str, family: str, named: int | None, size: int, there: set[int] | None) -> Iterator[Fault]:
    there, ranks = there or set(), set(range(size))
    if there != ranks:
        missing, further = (", ".join(map(str, sorted(some)[:16])) or "none" for some in (ranks - there, there - ranks))
        what = f"files {file_name(family, named, '*')} are not those of {size} ranks"
        found = f"{len(there)} files; missing {missing}"
        fault = damaged(folder, what, f"ranks 0 to {size - 1}", found)
        if named is None and there > ranks:  # which the names of EasyR1 and verl rule out
            mend = f"move them out of the folder if the save of {size} ranks, as rank 0's mesh says, is the later one"
            found = f"files of ranks {further} too, of another save"
            fault = CheckpointDamaged.fault(folder, what, fault.expected, found, mend=mend)
        yield fault


def _flat(folder: str, named: int | None, size: int, model: _File, shapes: Mapping[str, Shape]) -> FlatStates | None:
    """The states of flat parameters, None where nothing tells their order."""
    order = read_order(folder, shapes)
    if order is None:
        return None
    paths = [os.path.join(folder, file_name(OPTIM, named, rank)) for rank in range(size)]
    replicas = max((shard.replicas for shard in model.tensors.values()), default=1)
    return read_flat(paths, [read_top(path) for path in paths], order, family=OPTIM, shards=size // replicas)


def _of_another_model(path: str, optim: _File, shapes: Mapping[str, Shape]) -> Iterator[Fault]:
    told = (TensorKey(name=name, kind=kind) for name, kinds in optim.scalars.items() for kind in kinds)
    for key in (*optim.tensors, *told):
        if key.name not in shapes:
            what = f"{key} is of no parameter of the model's files: of another model"
            yield damaged(path, what, "its names", "others")
    groups = Counter(name for group in optim.groups for name in group.members)
    for name in sorted({key.name for key in optim.tensors} | optim.scalars.keys() | groups.keys()):
        if groups[name] != 1:
            yield damaged(path, f"{name} is not in one param group", "1", str(groups[name]))
    for key, shard in optim.tensors.items():
        if key.name in shapes and key.kind in _MOMENTS and shard.shape != shapes[key.name]:
            what = f"{key} is of another shape than its parameter: of another model"
            yield damaged(path, what, str(list(shapes[key.name])), str(list(shard.shape)))


def _is_single(key: TensorKey, shard: TensorShard, shapes: Mapping[str, Shape]) -> bool:
    """Whether a state is one value of its parameter."""
    return shard.shape == () and (key.kind == "step" or shapes.get(key.name, ()) != ())


def _scalars(
    path: str, single: Mapping[TensorKey, TensorShard], plain: Mapping[str, Mapping[str, Scalar]]
) -> dict[str, dict[str, Scalar]]:
    found = {name: dict(kinds) for name, kinds in plain.items()}
    with open_archive(path) as archive:
        for key, shard in single.items():
            data = archive.tensor_bytes(shard.local)
            found.setdefault(key.name, {})[key.kind] = ScalarTensor(dtype=shard.local.dtype, shape=(), data=data)
    return found


def _checksum(shard: TensorShard) -> tuple[object, ...]:
    return shard.local.storage.crc32, shard.local.element_offset, shard.local.shape


def _placement(key: TensorKey, shard: TensorShard, family: str, size: int) -> Placement:
    if shard.dim is not None:
        boxes = [shard.box(rank, size) for rank in range(size // shard.replicas)]
        return chunked_placement(key, shard.shape, shard.local.dtype, boxes, family=family, buffer=str(key))
    return Placement(
        key=key,
        shape=shard.shape,
        dtype=shard.local.dtype,
        family=family,
        buffer=str(key),
        cut=Cut(chunk=max(1, prod(shard.shape))),
        box=Box.whole(shard.shape),
        replicated=True,
    )


def _parameters(tensors: Mapping[TensorKey, TensorShard], size: int) -> Mapping[str, Shape]:
    """Return the shapes of the parameters, in the order of the modules; of several ranks, those of sharded tensors."""
    second = second_names(tensors)
    return {
        key.name: shard.shape
        for key, shard in tensors.items()
        if key not in second and (size == 1 or shard.rank is not None)
    }


def second_names(tensors: Mapping[TensorKey, TensorShard]) -> Mapping[TensorKey, TensorKey]:
    """The first names of tied parameters by the others: `state_dict()` has all, and torch.save their memory once.

    `model.parameters()` gives a parameter once, under the first.
    """
    first: dict[tuple[object, ...], TensorKey] = {}
    found = {}
    for key, shard in tensors.items():
        owner = first.setdefault((shard.local.storage.key, shard.local.element_offset, shard.local.shape), key)
        if owner != key:
            found[key] = owner
    return found


def _read(path: str, family: str, parameters: Mapping[str, Shape]) -> _File:
    top = read_top(path)
    if family == MODEL:
        weights = {TensorKey(name=str(name), kind=WEIGHT): shard_of(path, str(name), one) for name, one in top.items()}
        if len(weights) < len(top):
            refuse(damaged(path, "has two keys of one text", "names that differ", ", ".join(map(repr, top))[:160]))
        others = tuple(key.name for key, shard in weights.items() if shard is None)
        return _File(tensors={key: shard for key, shard in weights.items() if shard is not None}, others=others)
    tree = top.get("state")
    if not isinstance(tree, dict):
        refuse(damaged(path, "is no state dict", "names and tensors", type(tree).__name__))
    groups = groups_of(top)
    names = state_names(groups, parameters)
    found: dict[TensorKey, TensorShard] = {}
    scalars: dict[str, dict[str, Scalar]] = {}
    faults: list[Fault] = []
    numbered = any(isinstance(name, int) for name in (*tree, *(one for group in groups for one in members_of(group))))
    for member, kinds in tree.items():
        if numbered and names and member not in names:
            refuse(damaged(path, f"holds states of {member!r}, which is no number of a parameter", "numbers", "others"))
        if not isinstance(kinds, dict):
            refuse(damaged(path, f"the states of {member!r} are no dict", "a dict", type(kinds).__name__))
        for kind, value in kinds.items():
            key = TensorKey(name=names.get(member, str(member)), kind=str(kind))
            shard = shard_of(path, key.name, value)
            if key.kind in (MASTER, WEIGHT):
                faults.append(weight_name_fault(path, f"{key.name}: {key.kind}"))
            elif shard is not None:
                found[key] = shard
            elif value is None or isinstance(value, int | float):
                scalars.setdefault(key.name, {})[key.kind] = value
            else:
                what = f"{key.name} has a state {key.kind!r} that is neither a tensor nor a number"
                told = str(value.callable) if isinstance(value, ObjectRecord) else type(value).__name__
                mend = f"move the {OPTIM} files out of the folder, for the weights; or load it with what has saved it"
                faults.append(UnsupportedLayout.fault(path, what, found=told, mend=mend))
    if numbered and (not names or any(shard.shape not in ((), parameters[key.name]) for key, shard in found.items())):
        return _File(tensors={}, unnamed=_unnamed(path, groups, parameters, found.values()))
    raise_faults(faults, subject="reading a checkpoint")
    facts = group_facts(
        top, lambda member: [names.get(member, str(member)) if isinstance(member, int) else str(member)]
    )
    others = tuple(str(name) for name in top if name not in ("state", "param_groups"))
    return _File(tensors=found, groups=facts, scalars=scalars, others=others)


def _unnamed(
    path: str, groups: Sequence[Mapping[object, object]], parameters: Mapping[str, Shape], states: Iterable[TensorShard]
) -> Fault:
    if any(shard.rank is None and shard.shape != () for shard in states):
        what, found = "they hold pieces of flat parameters of FSDP1", "no fsdp_units.json"
        return UnsupportedLayout.fault(path, what, found=found, mend=line_to_add(os.path.dirname(path)))
    fix = (
        f"move the {OPTIM} files out of the folder, for the weights; in runs to come save "
        "get_optimizer_state_dict(model, optimizer) in place of optimizer.state_dict()"
    )
    counted = sum(len(members_of(group)) for group in groups)
    if len(groups) != 1:
        what, found = "several param groups count them in an order of their own", f"{len(groups)}"
    elif counted != len(parameters):
        what = "their param group counts other parameters than the model's files have"
        found = f"{counted}, not {len(parameters)}"
    else:
        what, found = "their states are of other shapes than the model's parameters", "another order"
    return UnsupportedLayout.fault(path, what, found=found, mend=fix)


def state_names(groups: Sequence[Mapping[object, object]], parameters: Iterable[str]) -> Mapping[object, str]:
    """The name of each parameter by its number in an optimizer's state dict; none where they are not told.

    Of one group, numbers count the parameters as `model.parameters()` gives them, and so as `model.state_dict()` does:
    both go through the modules in one order (torch/optim/optimizer.py, torch/nn/modules/module.py, 2.13).
    """
    named = list(parameters)
    if len(groups) != 1 or groups[0].get("params") != list(range(len(named))):
        return {}
    return dict(enumerate(named))


def _differs(
    path: str, key: TensorKey, shard: TensorShard, first: TensorShard, rank: int, size: int, *, same: bool
) -> Iterator[Fault]:
    """What is wrong with a tensor of a rank's file beside rank 0's; replicas hold the `same` values."""
    expected = f"{first.local.dtype.label} {list(first.shape)}, axis {first.dim}, {first.replicas} times"
    found = f"{shard.local.dtype.label} {list(shard.shape)}, axis {shard.dim}, {shard.replicas} times"
    if shard.ranks not in (None, size):
        what = f"{key} lies on a mesh of another size than the files' names or rank 0's say: of another save"
        yield damaged(path, what, f"{size} ranks", f"{shard.ranks} ranks")
        return
    if expected != found:
        yield damaged(path, f"{key} is of another shape, type or placement than rank 0's", expected, found)
        return
    box, local = shard.box(rank, size), shard.local
    if local.shape != box.size and (local.numel or box.numel):
        what = f"{key}: its part is not rank {rank}'s of {size}"
        yield damaged(path, what, str(list(box.size)), str(list(local.shape)))
    elif shard.rank not in (None, rank):
        yield damaged(path, f"{key} was saved by another rank than the file's name says", f"{rank}", f"{shard.rank}")
    elif same and shard.dim is None and local.storage.crc32 != first.local.storage.crc32:
        yield damaged(path, f"{key} has another value than rank 0's: of another step or run", "the same", "others")


def wrong_extra(folder: str, ranks: int) -> list[Fault]:
    """Extra states that lack, where some rank has saved one, and those of another number of ranks."""
    found = sorted({size or 0 for family, size in _ranks(folder) if family == EXTRA} - {ranks})
    others = [f"{EXTRA}_world_size_{size}_rank_*.pt" for size in found]
    paths = [os.path.join(folder, file_name(EXTRA, ranks, rank)) for rank in range(ranks)]
    missing = [path for path in paths if not folders.exists(path)]
    some = missing if len(missing) < len(paths) else []
    return [
        *(damaged(path, "is missing", "a file of each rank", "none") for path in some),
        *(damaged(folder, "holds extra states of another world size", f"of {ranks} ranks", one) for one in others),
    ]


def extra_trees(folder: str, ranks: int, size: int) -> list[object]:
    """Return the extra state of each of `size` ranks from the files of the `ranks` that saved; nothing without files.

    A rank that has saved gets its own random states. Any other gets none, and keeps those that the run has seeded: two
    ranks never draw the same numbers. Everything else must be equal on all ranks.
    Raises CheckpointDamaged if it is not, or if a rank's file is missing or of another number of ranks.
    """
    raise_faults(wrong_extra(folder, ranks), subject="reading a checkpoint")
    paths = [os.path.join(folder, file_name(EXTRA, ranks, rank)) for rank in range(ranks)]
    if not any(map(folders.exists, paths)):
        return []
    saved = [read_top(path, "is no extra state", "lr_scheduler and rng") for path in paths]
    first, *others = ({(str(name), canonical(value)) for name, value in top.items() if name != "rng"} for top in saved)
    faults = []
    for path, values in zip(paths[1:], others, strict=True):
        if differ := sorted({name for name, _ in first ^ values}):
            what = f"{', '.join(differ)} is another than rank 0's: of another step or run"
            faults.append(damaged(path, what, "the same on each rank", "others"))
    raise_faults(faults, subject="reading a checkpoint")
    shared = {name: value for name, value in saved[0].items() if name != "rng"}
    return [saved[rank] if rank < len(saved) else shared for rank in range(size)]


def survey_extra(folder: str) -> list[Fault]:
    """Return the faults of the extra states, which hold no tensor: the rest can be used without them."""
    sizes = {size for family, size in _ranks(folder) if family == MODEL}
    try:
        for size in sizes if len(sizes) == 1 else ():  # files of several sizes are refused when the folder is opened
            extra_trees(folder, size or 0, 0)
    except ReshardError as error:
        return faults_of(error)
    return []
