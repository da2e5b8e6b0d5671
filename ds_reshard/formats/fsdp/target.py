"""A folder of EasyR1 or verl that is to be written for another number of ranks, for their own loading.

Each rank's file is rank 0's with this rank's parts: the same names and values, DTensors on the mesh of all ranks. Under
one rank FSDP1 shards nothing, and saves and loads whole tensors (NO_SHARD); FSDP2 keeps DTensors of one rank.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed, UnsupportedLayout, raise_faults
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint, groups_of, state_names
from ds_reshard.formats.fsdp.extra_state import EXTRA, extra_trees
from ds_reshard.formats.fsdp.files import MODEL, OPTIM, path_of
from ds_reshard.formats.fsdp.flat import flat_tree
from ds_reshard.formats.fsdp.held import Held, held_of
from ds_reshard.formats.fsdp.mesh import Meshes, ranks_data
from ds_reshard.formats.fsdp.order import ORDER, line_to_add
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked
from ds_reshard.model.records import ObjectRecord, new_tensor
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
    raise_faults(list(_faults(source, size)), subject=f"converting {source.folder} to fsdp")
    writing = _Writing(
        source=source,
        size=size,
        config=_config(source.folder),
        trees={family: _load(path_of(source.folder, family, source.ranks, 0)) for family in source.first},
        extra=tuple(extra_trees(source.folder, source.ranks, size)),
        group_size=_group_size(source),
    )
    placements = {placement.key: placement for placement in writing.placements()}
    families = [*writing.trees, *([EXTRA] if writing.extra else [])]
    return Target(
        layout=Layout(placements, {**dict.fromkeys(families, size), _TEXTS: 1}),
        folder="",
        pointers={},
        units=tuple(writing.units()),
        wants={key: key for key in placements},
        notes=tuple(writing.notes()),
    )


def _faults(source: FsdpCheckpoint, size: int) -> Iterator[Fault]:
    held = [one for tensors in source.first.values() for one in tensors.values()]
    if size > 1 and not any(one.dim is not None for one in held):
        yield _unsupported(
            source,
            "holds whole tensors: under one rank FSDP1 shards nothing, and no file tells of a mesh",
            "load it under one rank, or convert a folder that several ranks have saved",
        )
    shards = _group_size(source)
    if shards is not None and (size % shards or size <= shards):
        yield _unsupported(
            source,
            f"is of HSDP, groups of {shards} ranks: EasyR1 and verl make the same groups of other ranks, and "
            f"{size} are no number of them",
            f"give a multiple of {shards} above it: --dp {2 * shards}; or --to dcp",
        )
    if source.unnamed:
        yield _unsupported(
            source,
            "its optimizer's files tell of no parameter's name and shape (verl with FSDP1, or several groups)",
            f"of FSDP1 {line_to_add(source.folder)}; else save it with get_state_dict",
        )


def _group_size(source: FsdpCheckpoint) -> int | None:
    """The ranks of a group of HSDP, whose number is that of the groups; None where each rank holds a shard of its own.

    Both make meshes of `fsdp_size` ranks, one after another (`create_device_mesh`, verl/workers/engine/fsdp/utils.py of
    verl 0.9.1).
    """
    replicas = max((one.replicas for tensors in source.first.values() for one in tensors.values()), default=1)
    return source.ranks // replicas if replicas > 1 else None


def _unsupported(source: FsdpCheckpoint, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(source.folder, what, mend=mend)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
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

    def _box(self, held: Held, rank: int) -> Box:
        return held.box(rank, self.size if self.group_size is None else self.source.ranks)

    @property
    def _whole(self) -> bool:
        """Whether every tensor is written whole, as under one rank of FSDP1."""
        return self.size == 1 and (self.config or {}).get("FSDP_version") != 2

    def placements(self) -> Iterator[Placement]:
        for family, tensors in self.source.first.items():
            for key, held in tensors.items():
                if held.dim is not None:
                    boxes = [self._box(held, rank) for rank in range(self._shards)]
                    yield chunked(key, held.shape, held.local.dtype, boxes, family=family, buffer=str(key))
        if self.source.flat is not None:
            yield from self.source.flat.placements(self._shards)

    def units(self) -> Iterator[Unit]:
        texts = tuple(self._texts())
        if texts:
            yield Unit(family=_TEXTS, shard=0, files=texts)
        for family in self.trees:
            for rank in range(self.size):
                name = _name(family, self.size, rank)
                file = TargetFile(name=name, tree=partial(self._tree, family, rank), data=self._data(family))
                yield Unit(family=family, shard=rank, files=(file,))
        for rank, kept in enumerate(self.extra):
            files = (TargetFile(name=_name(EXTRA, self.size, rank), tree=partial(_kept, kept)),)
            yield Unit(family=EXTRA, shard=rank, files=files)

    def _saved(self, family: str, rank: int) -> Mapping[object, object]:
        return _load(path_of(self.source.folder, family, self.source.ranks, rank))

    def _data(self, family: str) -> Mapping[str, bytes]:
        meshed = any(held.rank is not None for held in self.source.first[family].values())
        return ranks_data(self.size) if meshed and not self._whole else {}

    def _tree(self, family: str, rank: int) -> object:
        """What torch.save is given for one rank's file; of a rank beyond the first shards, what was saved of these."""
        again = rank >= self._shards
        saved_rank = rank % self._shards if again else 0
        meshes = Meshes(
            self.source.folder,
            saved_size=self.source.ranks,
            rank=rank,
            size=self.size,
            shards=self.group_size,
            saved_rank=saved_rank,
        )
        top = self._saved(family, saved_rank) if again else self.trees[family]
        if family == OPTIM and self.source.flat is not None:
            return top if again else _like(top, flat_tree(self.source.flat, top, rank, self._shards))
        if family == MODEL:
            return _like(
                top, {name: self._value(family, name, "weight", value, rank, meshes) for name, value in top.items()}
            )
        state = top["state"]
        assert isinstance(state, dict)
        names = state_names(groups_of(top), self.source.parameters)
        states = {
            name: {
                kind: self._value(family, names.get(name, name), kind, value, rank, meshes)
                for kind, value in kinds.items()
            }
            if isinstance(kinds, dict)
            else kinds
            for name, kinds in state.items()
        }
        return _like(top, {**top, "state": states})

    def _value(self, family: str, name: object, kind: object, value: object, rank: int, meshes: Meshes) -> object:
        """A tensor as this rank holds it; any other value as it is."""
        key = TensorKey(name=str(name), kind=str(kind))
        held = self.source.first[family].get(key)
        if held is None or not isinstance(value, ObjectRecord):
            return value
        local = held.local
        if rank >= self._shards:
            found = held_of(self.source.folder, str(key), value)
            assert found is not None, "what is a DTensor in rank 0's file is one in each"
            local = found.local
        elif held.dim is not None:
            local = new_tensor(str(key), self._box(held, rank).size, held.local.dtype)
        return local if self._whole else meshes.dtensor(value, local)

    def _texts(self) -> Iterator[TargetFile]:
        """The configuration and the tokenizer; what both frameworks export for others as weights stays behind."""
        if self.config is not None:
            text = json.dumps({**self.config, "world_size": self.size}, indent=4)
            yield TargetFile(name=CONFIG, tree=partial(text.encode, "utf-8"), container="plain")
        if self.source.flat is not None:
            text = self.source.flat.order.text()
            yield TargetFile(name=ORDER, tree=partial(text.encode, "utf-8"), container="plain")
        for name in self._exported():
            if not name.endswith(_WEIGHTS):
                text_of = partial(_read, os.path.join(self.source.folder, name))
                yield TargetFile(name=name, tree=text_of, container="plain")

    def _exported(self) -> list[str]:
        folder = os.path.join(self.source.folder, _HUGGINGFACE)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        return [os.path.join(_HUGGINGFACE, name) for name in names if os.path.isfile(os.path.join(folder, name))]

    def notes(self) -> Iterator[str]:
        saved, size = self.source.ranks, self.size
        if self.extra and size > saved:
            yield f"ranks {saved} to {size - 1} have no random states: those that the run seeds hold"
        if self.extra and size < saved:
            yield f"the random states of ranks {size} to {saved - 1} are left out"
        left = [name for name in self._exported() if name.endswith(_WEIGHTS)]
        if left:
            yield f"weights that were exported are not copied: {', '.join(left)}"


def _name(family: str, size: int, rank: int) -> str:
    return f"{family}_world_size_{size}_rank_{rank}.pt"


def _kept(tree: object) -> object:
    return tree


def _like(saved: Mapping[object, object], entries: Mapping[object, object]) -> object:
    """The entries in a dict of the saved one's kind, with its attributes: the versions of the modules."""
    if not isinstance(saved, OrderedDict):
        return dict(entries)
    made = OrderedDict(entries)
    vars(made).update(vars(saved))
    return made


def _load(path: str) -> Mapping[object, object]:
    with open_archive(path) as archive:
        top = archive.load()
    assert isinstance(top, dict), "a file that is no state dict is refused when the folder is opened"
    return top


def _config(folder: str) -> Mapping[str, object] | None:
    """What verl notes of the saving run, None where nothing is (`FSDPConfig` of its fsdp_checkpoint_manager.py)."""
    path = os.path.join(folder, CONFIG)
    if not os.path.exists(path):
        return None
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path}: is no JSON: {error}; restore it from a copy, or remove it") from None
    if not isinstance(config, dict):
        raise CheckpointDamaged(f"{path}: holds no object; restore it from a copy, or remove it")
    return config


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ReadFailed(f"{path}: cannot be read: {error}") from error
