"""A `torch_dist` checkpoint of Megatron-LM as logical tensors, facts and values; Megatron is not needed for it.

The folder is one of torch.distributed.checkpoint with keys of Megatron's own (core/dist_checkpointing, 0.16.1 to
0.19.2). Of homogeneous layers a key holds all, stacked: `decoder.layers.mlp.linear_fc2.weight` has an axis of layers in
front (core/transformer/transformer_block.py, `sharded_state_dict`). Here each layer is a tensor of its own, named as
Megatron names those of layers that differ: `decoder.layers.3.mlp.linear_fc2.weight`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA, AlikeArchives, Chunk, Directory, read_directory
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    ReshardError,
    UnsupportedLayout,
    raise_faults,
)
from ds_reshard.formats.megatron.checkpoint import (
    BACKEND,
    COMMON,
    arguments_of,
    chained_groups,
    counted,
    objects_of,
    read_common,
    read_object,
)
from ds_reshard.formats.megatron.flat_states import FLAT, RESAVE, FlatStates, Tile, family_of, find_states, ordered
from ds_reshard.formats.megatron.optimizer import KINDS, Trained, facts_of
from ds_reshard.model.checkpoint import SavedFile, SavedListing
from ds_reshard.model.content import MASTER, WEIGHT, Path
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, check_cover
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box

BUFFER = "chunk"
_MEND = "restore the folder from a copy, or save it again"
_STACKED = re.compile(r"((?:.*\.)?layers\.)(?!\d+\.)(.+)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_FLAT = "dp_reshardable"
_READ = (None, "fully_reshardable", _FLAT)
_RESAVE = {
    "fully_sharded_model_space": "load it with Megatron-LM core 0.15, and save it there without "
    "--dist-ckpt-save-pre-mcore-014"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDist:
    """What the files tell; a shard is a chunk of a key of the directory, a family of them those of one key, or several.

    `replicas` are the copies of states that other ranks hold; `distributed` is whether an optimizer of that kind saved
    them, and `flat` whether in flat buffers, the order of which the weights prove.
    """

    folder: str
    directory: Directory
    layout: Layout
    facts: OptimizerFacts | None
    objects: Mapping[Path, object]
    chunks: Mapping[str, Sequence[tuple[str, Chunk]]]
    arguments: Mapping[str, object]
    replicas: Layout
    distributed: bool
    flat: bool
    ungrouped: str = ""
    ranks: int | None = None
    notes: tuple[str, ...] = ()
    beside: Mapping[str, Path] = field(default_factory=dict)
    archives: AlikeArchives = field(default_factory=AlikeArchives)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The one buffer of a chunk, opened and checked against the directory."""
        key, chunk = self.chunks[family][shard]
        dtype, place = self.directory.tensors[key].dtype, chunk.place
        assert place is not None, "a chunk without a place is refused when the folder is opened"
        held = self.archives.load(place.path, (place.byte_offset, place.nbytes), (dtype, chunk.size))
        if (
            not isinstance(held, TensorRecord)
            or (held.dtype.label, held.shape) != (dtype, chunk.size)
            or not held.contiguous
        ):
            expected = f"{dtype} {list(chunk.size)}, row-major"
            found = f"{held.dtype.label} {list(held.shape)}" if isinstance(held, TensorRecord) else type(held).__name__
            what = f"{key}: the chunk at {list(chunk.offset)} is not what the directory says"
            raise_faults([_damaged(place.path, what, expected, found)], subject=f"checkpoint {self.folder}")
            raise AssertionError
        return {BUFFER: extent_of(held)}

    def random_states(self) -> Mapping[str, object]:
        """What each rank's random number generators would have said next, by the name of the object."""
        objects = self.directory.objects
        return {key: read_object(place) for key, place in objects.items() if key.startswith("rng_state/")}


def is_torch_dist(folder: str) -> bool:
    """Whether Megatron says beside the directory that it is its own, or keeps there what all ranks share."""
    if not folders.is_file(os.path.join(folder, METADATA)):
        return False
    return folders.is_file(os.path.join(folder, COMMON)) or _backend(folder) is not None


def _backend(folder: str) -> object:
    """What metadata.json says that wrote the folder (core/dist_checkpointing/core.py, 0.19.2); None for any other."""
    try:
        told = folders.read_json(os.path.join(folder, BACKEND), 1 << 20)
    except (CheckpointNotFound, CheckpointDamaged, ValueError):
        return None
    return told.get("sharded_backend") if isinstance(told, dict) else None


def list_torch_dist(folder: str) -> SavedListing:
    files = {}
    for name, nbytes in folders.files(folder).items():
        files[name] = SavedFile(nbytes=nbytes, role="shards" if name.endswith(".distcp") else "other")
    return SavedListing(
        format="Megatron-LM, torch_dist",
        writer="Megatron-LM",
        folder=folder,
        tag=os.path.basename(os.path.abspath(folder)),
        files=files,
        archives=partial(_archives, folder),
    )


def _archives(folder: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """The archives inside each file, as far as the directory can be read; opening it says what is wrong."""
    found: dict[str, set[tuple[int, int]]] = {}
    try:
        directory = read_directory(folder)
    except ReshardError:
        return {}
    chunks = (chunk.place for tensor in directory.tensors.values() for chunk in tensor.chunks)
    for place in (*directory.objects.values(), *chunks):
        if place is not None:
            found.setdefault(os.path.relpath(place.path, folder), set()).add((place.byte_offset, place.nbytes))
    return {name: tuple(sorted(parts)) for name, parts in found.items()}


def open_torch_dist(folder: str) -> TorchDist:
    """Read the directory and what all ranks share; raises every structural fault at once.

    UnsupportedLayout for types of the optimizer's state, by their names, and what reading damaged files raises.
    """
    backend = _backend(folder)
    if backend is None:
        fault = _damaged(
            folder, f"has no readable {BACKEND}, which says which format it is of", "sharded_backend", "none"
        )
        raise_faults([fault], subject=f"checkpoint {folder}")
    if backend != "torch_dist":
        what, mend = f"is a checkpoint of format {str(backend)[:40]}", "save it with --ckpt-format torch_dist"
        raise_faults([UnsupportedLayout.fault(folder, what, "torch_dist", mend=mend)], subject=f"checkpoint {folder}")
    directory = read_directory(folder)
    common, _ = read_common(folder, directory)
    arguments = arguments_of(common.get("args"))
    kind = _sharding(common, directory)
    raise_faults(list(_unread(folder, kind)), subject=f"checkpoint {folder}")
    flat = kind == _FLAT
    chunks = {key: [one for one in tensor.chunks if prod(one.size)] for key, tensor in directory.tensors.items()}
    faults = list(directory.contradictions)
    faults += [fault for key in directory.tensors for fault in _faults(directory, key, chunks[key], flat=flat)]
    raise_faults(faults, subject=f"checkpoint {folder}")
    placements: dict[TensorKey, Placement] = {}
    families = {key: [(key, chunk) for chunk in held] for key, held in chunks.items()}
    for family in directory.tensors:
        for made in () if flat and FLAT.fullmatch(family) else _placements(directory, family, chunks[family], faults):
            if made.key in placements:
                faults.append(_damaged(directory.path, f"{family} and another key name {made.key}", "one", "two"))
            placements[made.key] = made
    faults += _contradictions(folder, arguments, placements)
    raise_faults(faults, subject=f"checkpoint {folder}")
    replicas: dict[TensorKey, Placement] = {}
    if flat:
        found = find_states(directory, arguments, dict(placements))
        raise_faults(found.faults, subject=f"checkpoint {folder}")
        families |= found.chunks
        for key, tiles in found.tiles.items():
            made = _flat_placed(directory, key, placements[TensorKey(name=key.name, kind=WEIGHT)], tiles, found, faults)
            (replicas if key.copy else placements)[key] = made
    faults += _incomplete(directory.path, placements)
    raise_faults(faults, subject=f"checkpoint {folder}")
    shards = {family: len(held) for family, held in families.items()}
    layout = Layout(placements, shards)
    groups = chained_groups(common.get("optimizer"), directory.objects)
    trained = _trained(placements)
    facts, ungrouped = facts_of(groups, common.get("optimizer"), trained, arguments)
    return TorchDist(
        folder=folder,
        directory=directory,
        layout=layout,
        facts=facts,
        objects=dict(objects_of(common, arguments)),
        chunks=families,
        arguments=arguments,
        replicas=Layout(replicas, shards),
        distributed=kind is not None,
        flat=flat,
        ungrouped=ungrouped,
        ranks=counted(arguments.get("data_parallel_size")),
    )


def _sharding(common: Mapping[object, object], directory: Directory) -> str | None:
    """The sharding type of the distributed optimizer's state; None where there is none, or no distributed optimizer.

    `content_metadata` has it since 0.14; before it the state itself (core/optimizer/distrib_optimizer.py).
    """
    told = common.get("content_metadata"), common.get("optimizer")
    for held, name in zip(told, ("distrib_optim_sharding_type", "param_state_sharding_type"), strict=True):
        parts = [held, *held.values()] if isinstance(held, dict) else []
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get(name), str):
                return str(part[name])
    for key, tensor in directory.tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None and match[2] in directory.tensors and tensor.shape != directory.tensors[match[2]].shape:
            return "fully_sharded_model_space"
    return None


def _unread(folder: str, kind: str | None) -> Iterator[Fault]:
    if kind not in _READ:
        what = "keeps the optimizer's state in a sharding type that is not read here"
        mend = _RESAVE.get(str(kind), RESAVE)
        yield UnsupportedLayout.fault(folder, what, "fully_reshardable", str(kind)[:60], mend=mend)


def _faults(directory: Directory, key: str, chunks: Sequence[Chunk], *, flat: bool) -> Iterator[Fault]:
    path, tensor = directory.path, directory.tensors[key]
    if flat and FLAT.fullmatch(key) is not None:
        try:
            check_cover([Box(offset=one.offset, size=one.size) for one in chunks], tensor.shape)
        except ValueError as error:
            yield _damaged(path, f"{key}: declares impossible chunks: {error}", "each element once", "others")
    elif _OPTIMIZER.match(key) is not None:
        match = _STATE.fullmatch(key)
        if match is None or match[1] in (MASTER, WEIGHT) or match[2] not in directory.tensors:
            what = f"{key} is no state of a parameter that the model has"
            yield UnsupportedLayout.fault(path, what, "optimizer.state.STATE.PARAMETER", mend=RESAVE)
    try:
        ElementType.named(tensor.dtype)
    except KeyError:
        yield _unsupported(path, f"{key} is of type {tensor.dtype}")
    for chunk in chunks:
        if chunk.place is None:
            yield _damaged(path, f"{key}: nothing says where its chunk at {list(chunk.offset)} lies", "a file", "none")
        elif chunk.place.transformed:
            yield _unsupported(path, f"{key} was compressed when it was written")
        if not len(chunk.offset) == len(chunk.size) == len(tensor.shape):
            dimensions = f"{len(tensor.shape)}", f"{len(chunk.size)}"
            yield _damaged(path, f"{key}: a chunk has another number of dimensions", *dimensions)


def _placements(directory: Directory, family: str, chunks: Sequence[Chunk], faults: list[Fault]) -> Iterator[Placement]:
    """The logical tensors of one key: one, or one of each layer."""
    tensor = directory.tensors[family]
    state = _STATE.fullmatch(family)
    kind, name = (KINDS.get(state[1], state[1]), state[2]) if state is not None else (WEIGHT, family)
    dtype = ElementType.named(tensor.dtype)
    stacked = _STACKED.fullmatch(name) if tensor.shape else None
    try:
        check_cover([Box(offset=one.offset, size=one.size) for one in chunks], tensor.shape)
    except ValueError as error:
        faults.append(
            _damaged(directory.path, f"{family}: declares impossible chunks: {error}", "each element once", "")
        )
        return
    if stacked is None:
        tiles = [(shard, 0, Box(offset=one.offset, size=one.size)) for shard, one in enumerate(chunks)]
        yield _placed(TensorKey(name=name, kind=kind), tensor.shape, dtype, family, tiles)
        return
    of_layer: dict[int, list[tuple[int, int, Box]]] = {layer: [] for layer in range(tensor.shape[0])}
    for shard, one in enumerate(chunks):
        box = Box(offset=one.offset[1:], size=one.size[1:])
        for number in range(one.size[0]):
            of_layer[one.offset[0] + number].append((shard, number * box.numel, box))
    for layer, tiles in of_layer.items():
        key = TensorKey(name=f"{stacked[1]}{layer}.{stacked[2]}", kind=kind)
        yield _placed(key, tensor.shape[1:], dtype, family, tiles)


def _placed(
    key: TensorKey, shape: tuple[int, ...], dtype: ElementType, family: str, tiles: Sequence[tuple[int, int, Box]]
) -> Placement:
    """A tensor that lies in boxes: each in a shard of the family, at an element of its buffer."""
    whole = Placement(key, shape, dtype, family, BUFFER, Cut(chunk=max(1, prod(shape))), Box.whole(shape))
    cuts = ((Cut(chunk=max(1, box.numel), origin=origin, first=shard), box) for shard, origin, box in tiles)
    return whole._replace(tiles=tuple(whole._replace(cut=cut, box=box) for cut, box in cuts))


def _flat_placed(
    directory: Directory,
    key: TensorKey,
    weight: Placement,
    tiles: Sequence[Tile],
    found: FlatStates,
    faults: list[Fault],
) -> Placement:
    """A state of the buckets, which is of the shape of its weight."""
    family = family_of(key.kind)
    labels = {directory.tensors[held].dtype for held in {found.chunks[family][shard][0] for shard, _, _ in tiles}}
    try:
        (label,) = labels
        check_cover([box for _, _, box in tiles], weight.shape)
    except ValueError as error:
        faults.append(_damaged(directory.path, f"{key}: does not lie in the buckets once: {error}", "each element", ""))
        label = min(labels)
    return _placed(key, weight.shape, ElementType.named(label), family, ordered(tiles))


def _contradictions(
    folder: str, arguments: Mapping[str, object], placements: Mapping[TensorKey, Placement]
) -> Iterator[Fault]:
    """What the run's arguments say otherwise than the tensors."""
    numbers = {name.split(".")[2] for name, *_ in placements if re.match(r"decoder\.layers\.\d+\.", name)}
    layers, rows = arguments.get("num_layers"), arguments.get("padded_vocab_size")
    if isinstance(layers, int) and numbers and numbers != set(map(str, range(layers))):
        yield _damaged(folder, "args.num_layers is not the number of layers", str(layers), str(len(numbers)))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        held = placements.get(TensorKey(name=name, kind=WEIGHT))
        if isinstance(rows, int) and held is not None and held.shape[:1] != (rows,):
            yield _damaged(folder, f"args.padded_vocab_size is not the rows of {name}", str(rows), str(held.shape[:1]))


def _incomplete(path: str, placements: Mapping[TensorKey, Placement]) -> Iterator[Fault]:
    """States of another shape than their parameter, and parameters that are trained without an fp32 master."""
    kinds: dict[str, dict[str, Placement]] = {}
    for key, placement in placements.items():
        kinds.setdefault(key.name, {})[key.kind] = placement
    for name, held in kinds.items():
        weight = held.get(WEIGHT)
        for kind, placement in held.items():
            if weight is None or placement.shape != weight.shape:
                shape = "none" if weight is None else str(list(weight.shape))
                yield _damaged(
                    path, f"{name}[{kind}] has not the shape of its weight", shape, str(list(placement.shape))
                )
        master = held.get(MASTER, weight)
        if len(held) > 1 and master is not None and master.dtype is not ElementType.FLOAT32:
            what = f"{name} is trained without an fp32 master: a precision-aware optimizer, or remainders of bf16"
            mend = "save it without --use-precision-aware-optimizer"
            yield UnsupportedLayout.fault(path, what, "float32", master.dtype.label, mend=mend)


def _trained(placements: Mapping[TensorKey, Placement]) -> list[Trained]:
    """The parameters that have states, in the order of the files, with the dimensions that each has in the model."""
    names = dict.fromkeys(key.name for key in placements if key.kind != WEIGHT)
    shapes = ((name, placements[TensorKey(name=name, kind=WEIGHT)].shape) for name in names)
    return [Trained(name=name, shape=shape) for name, shape in shapes]


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=_MEND)


def _unsupported(where: str, what: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend="save it again with --ckpt-format torch_dist, as it is by default")
