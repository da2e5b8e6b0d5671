"""A folder of EasyR1 or verl that is to be written for another number of ranks, for their own loading.

Each rank's file is rank 0's with this rank's parts: the same names and values, DTensors on the mesh of all ranks. Under
one rank FSDP1 shards nothing, and saves and loads whole tensors (NO_SHARD); FSDP2 keeps DTensors of one rank.
"""

from __future__ import annotations

import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import NoReturn

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, error_of, raise_faults
from ds_reshard.formats.fsdp.checkpoint import (
    EXTRA,
    MODEL,
    OPTIM,
    FsdpCheckpoint,
    TensorShard,
    extra_trees,
    file_name,
    is_ranks_file,
    read_top,
    second_names,
    shard_of,
    state_names,
)
from ds_reshard.formats.fsdp.flat_parameters import ORDER, flat_tree, groups_of
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

CONFIG = "fsdp_config.json"
_HUGGINGFACE = "huggingface"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_TEXTS = "texts"


def fsdp_target(source: FsdpCheckpoint, size: int) -> Target:
    """The files of the same state for `size` ranks.

    Raises UnsupportedLayout where the folder does not tell how they are cut, and what reading its files raises.
    """
    raise_faults(_faults(source, size), subject=f"converting {source.folder} to fsdp")
    writing = _Writing(
        source=source,
        size=size,
        config=_config(source.folder),
        trees={family: read_top(source.path(family, 0)) for family in source.first},
        extra=tuple(extra_trees(source.folder, source.ranks, size)),
        group_size=_group_size(source),
    )
    placements = {placement.key: placement for placement in writing.placements()}
    families = [*writing.trees, *([EXTRA] if writing.extra else [])]
    return Target(
        layout=Layout(placements, {**dict.fromkeys(families, size), _TEXTS: 1}),
        units=tuple(writing.units()),
        sources={key: key for key in placements},
        notes=tuple(writing.notes()),
    )


def _faults(source: FsdpCheckpoint, size: int) -> Iterator[Fault]:
    shards = [shard for tensors in source.first.values() for shard in tensors.values()]
    if size > 1 and all(shard.dim is None for shard in shards):
        yield UnsupportedLayout.fault(
            source.folder,
            "holds whole tensors: under one rank FSDP1 shards nothing, and no file tells of a mesh",
            mend="load it under one rank, or convert a folder that several ranks have saved",
        )
    group = _group_size(source)
    if group is not None and (size % group or size <= group):
        yield UnsupportedLayout.fault(
            source.folder,
            f"is of HSDP, groups of {group} ranks: EasyR1 and verl make the same groups of other ranks, and "
            f"{size} are no number of them",
            mend=f"give a multiple of {group} above it: --dp {2 * group}; or --to dcp",
        )
    if (unnamed := source.unnamed) is not None:
        what = f"its optimizer's files name no parameter, as {unnamed.what}"
        yield replace(unnamed, where=source.folder, what=what)


def _group_size(source: FsdpCheckpoint) -> int | None:
    """The ranks of a group of HSDP, whose number is that of the groups; None where each rank holds a shard of its own.

    Both make meshes of `fsdp_size` ranks, one after another (`create_device_mesh`, verl/workers/engine/fsdp/utils.py of
    verl 0.9.1).
    """
    replicas = max((one.replicas for tensors in source.first.values() for one in tensors.values()), default=1)
    return source.ranks // replicas if replicas > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """The files that are to be written; `trees` are those of rank 0, `extra` the extra state of each new rank."""

    source: FsdpCheckpoint
    size: int
    config: Mapping[str, object] | None
    trees: Mapping[str, Mapping[object, object]]
    extra: tuple[object, ...]
    group_size: int | None

    @property
    def _shards(self) -> int:
        """How many ranks hold all of it together: further ones are given what these are."""
        return self.group_size or self.size

    def _box(self, shard: TensorShard, rank: int) -> Box:
        return shard.box(rank, self.size if self.group_size is None else self.source.ranks)

    @property
    def _whole(self) -> bool:
        """Whether every tensor is written whole, as under one rank of FSDP1."""
        return self.size == 1 and (self.config or {}).get("FSDP_version") != 2 and not self.source.accelerates

    def placements(self) -> Iterator[Placement]:
        for family, tensors in self.source.first.items():
            second = second_names(tensors)
            for key, shard in tensors.items():
                if shard.dim is not None and key not in second:
                    boxes = [self._box(shard, rank) for rank in range(self._shards)]
                    yield chunked_placement(key, shard.shape, shard.local.dtype, boxes, family=family, buffer=str(key))
        if self.source.flat is not None:
            yield from self.source.flat.placements(self._shards)

    def units(self) -> Iterator[Unit]:
        texts = self._texts()
        if texts:
            files = [TargetFile(name=name, tree=text, container="plain") for name, text in texts.items()]
            yield Unit(family=_TEXTS, shard=0, files=tuple(files))
        for family, tensors in self.source.first.items():
            meshed = any(shard.rank is not None for shard in tensors.values()) and not self._whole
            data = ranks_data(self.size) if meshed else {}
            for rank in range(self.size):
                tree = partial(self._tree, family, rank)
                file = TargetFile(name=self.source.file_name(family, self.size, rank), tree=tree, data=data)
                yield Unit(family=family, shard=rank, files=(file,))
        for rank in range(len(self.extra)):
            file = TargetFile(name=file_name(EXTRA, self.size, rank), tree=partial(self.extra.__getitem__, rank))
            yield Unit(family=EXTRA, shard=rank, files=(file,))

    def _tree(self, family: str, rank: int) -> object:
        """What torch.save is given for one rank's file; of a rank beyond the first shards, what was saved of these."""
        again = rank >= self._shards
        saved_rank = rank % self._shards if again else 0
        top = read_top(self.source.path(family, saved_rank)) if again else self.trees[family]
        if family == OPTIM and self.source.flat is not None:
            return top if again else _like(top, flat_tree(self.source.flat, top, rank, self._shards))
        meshes = Meshes(
            self.source.folder,
            saved_size=self.source.ranks,
            rank=rank,
            size=self.size,
            shards=self.group_size,
            saved_rank=saved_rank,
        )

        second = second_names(self.source.first[family])

        def held(name: object, kind: object, value: object) -> object:
            """A tensor as this rank holds it; any other value as it is."""
            key = TensorKey(name=str(name), kind=str(kind))
            shard = self.source.first[family].get(key)
            if shard is None or not isinstance(value, ObjectRecord):
                return value
            local = shard.local
            if again:
                found = shard_of(self.source.folder, str(key), value)
                assert found is not None, "what is a DTensor in rank 0's file is one in each"
                local = found.local
            elif shard.dim is not None:
                buffer = str(second.get(key, key))
                local = new_tensor(buffer, self._box(shard, rank).size, shard.local.dtype)
            return local if self._whole else meshes.dtensor(value, local)

        if family == MODEL:
            return _like(top, {name: held(name, "weight", value) for name, value in top.items()})
        state = top["state"]
        assert isinstance(state, dict), "an optimizer's file without states is refused when the folder is opened"
        names = state_names(groups_of(top), self.source.parameters)
        states = {
            name: {kind: held(names.get(name, name), kind, value) for kind, value in kinds.items()}
            if isinstance(kinds, dict)
            else kinds
            for name, kinds in state.items()
        }
        return _like(top, {**top, "state": states})

    def _texts(self) -> Mapping[str, Callable[[], bytes]]:
        """The configuration and the tokenizer; what both frameworks export for others as weights stays behind."""
        texts: dict[str, Callable[[], bytes]] = {}
        if self.config is not None:
            texts[CONFIG] = json.dumps({**self.config, "world_size": self.size}, indent=4).encode
        if self.source.flat is not None:
            texts[ORDER] = self.source.flat.order.text().encode
        for name in self._exported():
            if not name.endswith(_WEIGHTS):
                texts[name] = partial(folders.read_small, os.path.join(self.source.folder, name))
        return texts

    def _exported(self) -> list[str]:
        folder = os.path.join(self.source.folder, _HUGGINGFACE)
        return [os.path.join(_HUGGINGFACE, name) for name in folders.files_below(folder)]

    def notes(self) -> Iterator[str]:
        saved, size = self.source.ranks, self.size
        yield from self.source.notes_on_buffers()
        if self.source.accelerates and size == 1:
            yield "for FSDP2: FSDP1 shards nothing under one rank, and does not load DTensors there; give --to dcp"
        if self.extra and size > saved:
            yield f"ranks {saved} to {size - 1} have no random states: those that the run seeds hold"
        if self.extra and size < saved:
            yield f"the random states of ranks {size} to {saved - 1} are left out"
        left = [name for name in self._exported() if name.endswith(_WEIGHTS)]
        if left:
            yield f"weights that were exported are not copied: {', '.join(left)}"
        known = {CONFIG, _HUGGINGFACE, "ds_reshard.json", *([ORDER] if self.source.flat is not None else [])}
        others = [name for name in folders.names(self.source.folder) if name not in known and not is_ranks_file(name)]
        if others:
            yield f"left out, as nothing here reads them: {', '.join(others)}"


def _like(saved: Mapping[object, object], entries: Mapping[object, object]) -> object:
    """The entries in a dict of the saved one's kind, with its attributes: the versions of the modules."""
    if not isinstance(saved, OrderedDict):
        return dict(entries)
    made = OrderedDict(entries)
    vars(made).update(vars(saved))
    return made


def _config(folder: str) -> Mapping[str, object] | None:
    """What verl notes of the saving run, None where nothing is (`FSDPConfig` of its fsdp_checkpoint_manager.py)."""
    path = os.path.join(folder, CONFIG)
    if not folders.exists(path):
        return None
    try:
        config = folders.read_json(path)
    except ValueError as error:
        raise CheckpointDamaged(f"{path}: is no JSON: {error}; restore it from a copy, or remove it") from None
    if not isinstance(config, dict):
        raise CheckpointDamaged(f"{path}: holds no object; restore it from a copy, or remove it")
    return config


_RANKS = "ranks of the mesh"
_CPU = ObjectRecord(callable=GlobalName(module="torch", name="device"), args=("cpu",))
_OF_SPEC = frozenset({"mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order", "_hash"})
# The names of groups are those that a run gives in the order in which it makes them, whatever its size is.
_OF_MESH = frozenset(
    {"_device_type", "device_type", "_mesh_dim_names", "mesh_dim_names", "_thread_id", "_dim_group_names"}
)
_NOTHING = frozenset({"_root_mesh", "_parent_mesh", "_flatten_mapping"})


def ranks_data(size: int) -> Mapping[str, bytes]:
    """The buffer of a mesh's ranks, for a file that has DTensors."""
    return {_RANKS: struct.pack(f"<{size}i", *range(size))}


@dataclass(slots=True)
class Meshes:
    """The meshes of one new file, that of `rank` of `size`; DTensors that share one share it there too.

    `shards` is the size of a group of HSDP, None of a mesh of one dimension; `saved_rank` saved the DTensors, in the
    first group. What `DeviceMesh.__init__` and `DTensorSpec` keep (torch/distributed/device_mesh.py and
    tensor/_dtensor_spec.py): 2.13, and of one dimension, from their sources alone, the older form with `mesh`,
    `_flatten_mesh_list` and `_dim_group_infos`.
    """

    path: str
    _: KW_ONLY
    saved_size: int
    rank: int
    size: int
    shards: int | None = None
    saved_rank: int = 0
    _made: dict[int, ObjectRecord] = field(default_factory=dict)

    def dtensor(self, saved: ObjectRecord, local: TensorRecord) -> ObjectRecord:
        """The DTensor of which this rank holds `local`; on the CPU, as all that is written is.

        Raises UnsupportedLayout for what no version of torch that is known keeps of one.
        """
        function, kind, made, state = saved.args
        assert isinstance(made, tuple) and isinstance(state, tuple)
        slots, attributes = state
        spec = attributes["_spec"]
        entries = {name: self._of_spec(name, value) for name, value in spec.state.items()}
        device = tuple(_CPU if _is_device(part) else part for part in made)
        inner = {**attributes, "_local_tensor": local, "_spec": replace(spec, state=entries)}
        return replace(saved, args=(function, kind, device, (slots, inner)))

    def _of_spec(self, name: str, value: object) -> object:
        if name == "mesh" and isinstance(value, ObjectRecord) and isinstance(value.state, dict):
            if id(value) not in self._made:
                entries = {name: self._of_mesh(str(name), entry) for name, entry in value.state.items()}
                self._made[id(value)] = replace(value, state=entries)
            return self._made[id(value)]
        if name not in _OF_SPEC:
            self._refuse(f"a DTensor's {name}")
        return None if name == "_hash" else value

    def _of_mesh(self, name: str, value: object) -> object:
        if name in ("_rank_map", "mesh") and isinstance(value, TensorRecord):
            return self._ranks(value)
        if name in ("_flatten_rank_map", "_flatten_mesh_list"):
            if value != tuple(range(self.saved_size)):
                self._refuse(f"a mesh of the ranks {value}")
            return tuple(range(self.size))
        if name == "_coordinate_on_dim" and isinstance(value, tuple | list):
            return type(value)([self.rank] if self.shards is None else divmod(self.rank, self.shards))
        if name in ("_layout", "_layouts"):
            return self._resized(value) if self.shards is None else self._regrouped(value, self.shards)
        if name == "_dim_group_names" and self.shards is not None:
            return self._group_names(value, self.shards)
        if name == "_dim_group_infos" and isinstance(value, list) and self.shards is None:
            return [(tag, list(range(self.size)), *rest) for tag, _, *rest in value]
        if name == "_rank":
            return self.rank
        if name == "_hash":
            return None
        if name not in _OF_MESH and (name not in _NOTHING or value):
            self._refuse(f"a mesh's {name}")
        return value

    def _ranks(self, saved: TensorRecord) -> TensorRecord:
        if saved.shape != (self.saved_size,) or saved.dtype is not ElementType.INT32:
            self._refuse(f"a mesh of {saved.dtype.label} {list(saved.shape)}")
        return new_tensor(_RANKS, (self.size,), saved.dtype)

    def _resized(self, layout: object) -> object:
        """A mesh's layout: its one size follows that of the run, its stride is 1."""
        if isinstance(layout, tuple):
            return tuple(map(self._resized, layout))
        if not isinstance(layout, ObjectRecord) or not isinstance(layout.state, dict):
            return layout
        if "shape" not in layout.state:
            return replace(layout, state={name: self._resized(value) for name, value in layout.state.items()})
        flat = layout.callable.name == "_FlatLayout"
        if layout.state != _axis(self.saved_size, flat=flat):
            self._refuse(f"a mesh of the layout {layout.state}")
        return replace(layout, state=_axis(self.size, flat=flat))

    def _regrouped(self, layout: object, shards: int) -> object:
        """The layout of a mesh of HSDP, as torch keeps it since 2.10: groups of `shards` ranks, one after another."""
        state = layout.state if isinstance(layout, ObjectRecord) and isinstance(layout.state, dict) else {}
        axes, groups = state.get("axes"), self.size // shards
        if isinstance(layout, ObjectRecord) and state == _grid(self.saved_size // shards, shards):
            return replace(layout, state=_grid(groups, shards))
        if not isinstance(layout, ObjectRecord) or not isinstance(axes, tuple):
            self._refuse("a mesh of two dimensions")
        found = [axis.state for axis in axes if isinstance(axis, ObjectRecord)]
        expected = [_part(self.saved_size // shards, shards), _part(shards, 1)]
        if found != expected or shards == 1:
            self._refuse(f"a mesh of the layout {found}")
        first = replace(axes[0], state=_part(groups, shards))
        return replace(layout, state={**state, "axes": (first, *axes[1:])})

    def _group_names(self, saved: object, shards: int) -> list[str]:
        """The names of this rank's groups, of which `saved` are those of the rank that saved.

        `init_device_mesh` makes the groups of one dimension after those of the other, and all ranks count them
        (torch/distributed/device_mesh.py, 2.13): first one for each shard, of the ranks that hold it, then the rest.
        """
        numbers = [int(name) for name in saved if str(name).isdigit()] if isinstance(saved, list) else []
        if len(numbers) != 2 or numbers[1] != numbers[0] - self.saved_rank + shards:
            self._refuse(f"a mesh with groups named {saved}")
        alike, together = numbers[0] - self.saved_rank, numbers[1]
        group, number = divmod(self.rank, shards)
        return [str(alike + number), str(together + group)]

    def _refuse(self, what: str) -> NoReturn:
        fault = UnsupportedLayout.fault(
            self.path,
            f"{what} is not known here, and may depend on the number of ranks",
            "a mesh of one dimension over all ranks, or of two for HSDP, as torch 2.13 keeps it",
            mend="give --to dcp, which any mesh loads; or load it on as many ranks, and save it with torch 2.13",
        )
        raise error_of([fault], subject="converting")


def _axis(size: int, *, flat: bool) -> dict[object, object]:
    """The layout of one dimension; a `_FlatLayout` drops a size of 1 (torch/distributed/_mesh_layout.py, 2.13)."""
    return {"shape": (), "stride": ()} if flat and size == 1 else {"shape": (size,), "stride": (1,)}


def _part(size: int, stride: int) -> dict[object, object]:
    return {"shape": (size,), "stride": (stride,)}


def _grid(groups: int, shards: int) -> dict[object, object]:
    """The layout of two dimensions up to torch 2.12."""
    return {"shape": (groups, shards), "stride": (shards, 1)}


def _is_device(value: object) -> bool:
    return isinstance(value, ObjectRecord) and str(value.callable) == "torch.device"
