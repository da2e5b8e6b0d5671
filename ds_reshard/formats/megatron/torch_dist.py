"""A `torch_dist` checkpoint of Megatron-LM as logical tensors, facts and values; Megatron is not needed for it.

The folder is one of torch.distributed.checkpoint with keys of Megatron's own (core/dist_checkpointing, 0.16.1 to
0.19.2). Of homogeneous layers a key holds all, stacked: `decoder.layers.mlp.linear_fc2.weight` has an axis of layers in
front (core/transformer/transformer_block.py, `sharded_state_dict`). Here each layer is a tensor of its own, named as
Megatron names those of layers that differ: `decoder.layers.3.mlp.linear_fc2.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ds_reshard.containers.dcp_directory import (
    BACKEND,
    BUFFER,
    AlikeArchives,
    Chunk,
    Directory,
    SavedTensor,
    backend_of,
    damaged,
    is_megatrons,
    list_directory,
    read_directory,
)
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron import bridge
from ds_reshard.formats.megatron.buckets import boxes_between
from ds_reshard.formats.megatron.checkpoint import (
    TRACKER,
    Chain,
    arguments_of,
    chain_of,
    counted,
    objects_of,
    read_common,
    read_list,
    read_object,
)
from ds_reshard.formats.megatron.flat_states import FLAT, RESAVE, FlatStates, by_holder, family_of, find_states, ordered
from ds_reshard.formats.megatron.optimizer import KINDS, Trained, facts_of
from ds_reshard.formats.megatron.shifts import Shifts, find_shifts
from ds_reshard.formats.megatron.target import Shown
from ds_reshard.model.checkpoint import SavedListing, SavedState
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import Holder, Layout, Placement, TensorKey, Tile, check_cover, tiled_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box

_SAVED_AGAIN = "save it again with --ckpt-format torch_dist, as it is by default"
STACKED = re.compile(r"((?:.*\.)?layers\.)(?!\d+\.)(.+)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
_REPLACED = re.compile(r"(?:chained_\d+\.)*optimizer\.|common_state/")
_FLAT, _FRAGMENTS = "dp_reshardable", "fully_sharded_model_space"
_READ = (None, "fully_reshardable", _FLAT, _FRAGMENTS)
_RESAVE = {
    "fully_sharded_bucket_space": "load it with Megatron-LM core 0.14, the last that does, and save it there again"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDist(SavedState):
    """What the files tell; a shard is a chunk of a key of the directory, a family of them those of one key, or several.

    `replicas` are the copies of states that other ranks hold; `distributed` is whether an optimizer of that kind saved
    them, and `flat` whether in flat buffers, the order of which the weights prove.
    """

    directory: Directory
    chunks: Mapping[str, Sequence[tuple[str, Chunk]]]
    arguments: Mapping[str, object]
    replicas: Mapping[Holder, Layout]
    distributed: bool
    flat: bool
    common: Mapping[object, object]
    chain: Chain | None
    shifts: Shifts | None = None
    ungrouped: str = ""
    archives: AlikeArchives = field(default_factory=AlikeArchives)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        key, chunk = self.chunks[family][shard]
        return self.archives.buffers(key, self.directory.tensors[key].dtype, chunk)

    @property
    def shown(self) -> Shown:
        """What it has beside its tensors."""
        kept = {key: place for key, place in self.directory.objects.items() if not _REPLACED.match(key)}
        objects = {key: read_list(place) for key, place in kept.items()}
        stacked = any(STACKED.fullmatch(key) for key in self.directory.tensors)
        return Shown(common=self.common, objects=objects, chain=self.chain, stacked=stacked)

    def find_shifts(self) -> Shifts:
        """Where the states are that Megatron-LM has saved shifted, by its rule."""
        chained = len(self.chain or ()) > 1
        return find_shifts(self.directory, self.arguments, self.layout.placements, chained=chained)

    def repair(self) -> TorchDist:
        """The same with every state where it belongs. Raises UnsupportedLayout, with every reason."""
        found, placements = self.find_shifts(), dict(self.layout.placements)
        raise_faults(found.faults, subject=f"repairing {self.folder}")
        for key, tiles in found.tiles.items():
            held, family = placements[key], family_of(key.kind)
            placements[key] = tiled_placement(key, held.shape, held.dtype, ordered(tiles), family=family, buffer=BUFFER)
        families = {**self.chunks, **found.chunks}
        shards = {family: len(held) for family, held in families.items()}
        return replace(self, layout=Layout(placements, shards), chunks=families, flat=True, shifts=found)

    def random_states(self) -> Mapping[str, object]:
        """What each rank's random number generators would have said next, by the name of the object."""
        objects = self.directory.objects
        return {key: read_object(place) for key, place in objects.items() if key.startswith("rng_state/")}


def saved_tensors(folder: str) -> list[str]:
    """The keys of all tensors in the folder of one iteration; none of torch_dcp and fsdp_dtensor."""
    return sorted(read_directory(folder).tensors) if is_megatrons(folder) else []


def is_state(key: str) -> bool:
    """Whether a tensor of that key is a state or a master of an optimizer."""
    return _OPTIMIZER.match(key) is not None


def list_torch_dist(folder: str) -> SavedListing:
    return list_directory(folder, [""], read_directory, format="Megatron-LM, torch_dist", writer="Megatron-LM")


def open_torch_dist(folder: str, *, optimizer: bool = True) -> TorchDist:
    """Read the directory and what all ranks share; raises every structural fault at once.

    UnsupportedLayout for types of the optimizer's state, by their names, and what reading damaged files raises. Where
    it is that state alone of which something is not known, the weights are there without it, and a note says so.
    `optimizer=False` leaves it out.
    """
    subject = f"checkpoint {folder}"
    raise_faults(list(_foreign(folder, backend_of(folder))), subject=subject)
    directory = read_directory(folder)
    common, _ = read_common(folder, directory)
    arguments = arguments_of(common.get("args"))
    if not optimizer:
        directory, common = without_optimizer(directory), {k: v for k, v in common.items() if k != "optimizer"}
    kind = _sharding(common, directory, arguments) if optimizer else None
    raise_faults(list(_unread(folder, kind, arguments)), subject=subject)
    flat = kind == _FLAT
    faults = [*directory.faults(saved_again=_SAVED_AGAIN), *_unknown(directory, flat=flat)]
    raise_faults(faults, subject=subject)
    placements: dict[TensorKey, Placement] = {}
    families = {key: [(key, chunk) for chunk in tensor.filled] for key, tensor in directory.tensors.items()}
    for family in directory.tensors:
        for made in () if flat and FLAT.fullmatch(family) else _placements(directory, family, kind, faults):
            if made.key in placements:
                faults.append(damaged(directory.path, f"{family} and another key name {made.key}", "one", "two"))
            placements[made.key] = made
    faults += contradictions(folder, arguments, placements)
    raise_faults(faults, subject=subject)
    replicas: dict[TensorKey, Placement] = {}
    unread: list[Fault] = []
    if flat:
        found = find_states(directory, arguments, dict(placements))
        unread = _left_out(found.faults, subject)
        found = FlatStates() if unread else found
        families |= found.chunks
        for key, tiles in found.tiles.items():
            made = _flat_placed(directory, key, placements[TensorKey(name=key.name, kind=WEIGHT)], tiles, found, faults)
            (replicas if key.copy else placements)[key] = made
    unread += _left_out([*faults, *incomplete(directory.path, placements)], subject)
    if unread:
        placements = {key: placement for key, placement in placements.items() if key.kind == WEIGHT}
    shards = {family: len(held) for family, held in families.items()}
    chain = chain_of(common.get("optimizer"), directory.objects)
    trained = _trained(placements)
    facts, ungrouped = facts_of(chain, common.get("optimizer"), trained, arguments) if not unread else (None, "")
    return TorchDist(
        folder=folder,
        directory=directory,
        layout=Layout(placements, shards),
        facts=facts,
        objects=dict(objects_of(common, arguments)),
        chunks=families,
        arguments=arguments,
        replicas=by_holder(replicas, shards),
        distributed=kind is not None and not unread,
        flat=flat and not unread,
        ungrouped=ungrouped,
        common=common,
        chain=chain,
        ranks=counted(arguments.get("data_parallel_size")),
        notes=(*_unread_states(unread), *bridge.notes(folder, TRACKER)),
    )


def without_optimizer(directory: Directory) -> Directory:
    tensors = {key: tensor for key, tensor in directory.tensors.items() if not is_state(key)}
    objects = {key: place for key, place in directory.objects.items() if not is_state(key)}
    return replace(directory, tensors=tensors, objects=objects)


def _left_out(faults: Sequence[Fault], subject: str) -> list[Fault]:
    """The states of the optimizer that are not read here; raises where anything else is wrong."""
    raise_faults([one for one in faults if one.error != UnsupportedLayout.__name__], subject=subject)
    return list(faults)


def _unread_states(unread: Sequence[Fault]) -> Iterator[str]:
    if unread:
        others = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        yield f"the optimizer's states are not read: {unread[0].what}{others}; {unread[0].mend}"


def _foreign(folder: str, backend: str | None) -> Iterator[Fault]:
    if backend is None:
        what = f"has no readable {BACKEND}, which says which format it is of"
        yield damaged(folder, what, "sharded_backend", "none")
    elif backend != "torch_dist":
        what, mend = f"is a checkpoint of format {backend[:40]}", "save it with --ckpt-format torch_dist"
        yield UnsupportedLayout.fault(folder, what, "torch_dist", mend=mend)


def _sharding(common: Mapping[object, object], directory: Directory, arguments: Mapping[str, object]) -> str | None:
    """The sharding type of the distributed optimizer's state; None where there is none, or no distributed optimizer.

    `content_metadata` has it since 0.14, also of a save with --no-save-optim (`_build_sharded_state_dict_metadata`,
    megatron/training/checkpointing.py, 0.18.2 and 0.19.2); before it the state itself
    (core/optimizer/distrib_optimizer.py).
    """
    if arguments.get("no_save_optim") and not any(map(_OPTIMIZER.match, (*directory.tensors, *directory.objects))):
        return None
    told = common.get("content_metadata"), common.get("optimizer")
    for held, name in zip(told, ("distrib_optim_sharding_type", "param_state_sharding_type"), strict=True):
        parts = [held, *held.values()] if isinstance(held, dict) else []
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get(name), str):
                return str(part[name])
    for key, tensor in directory.tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None and match[2] in directory.tensors and tensor.shape != directory.tensors[match[2]].shape:
            return _FRAGMENTS
    return None


def _unread(folder: str, kind: str | None, arguments: Mapping[str, object]) -> Iterator[Fault]:
    if kind not in _READ:
        what = "keeps the optimizer's state in a sharding type that is not read here"
        mend = _RESAVE.get(str(kind), RESAVE)
        yield UnsupportedLayout.fault(folder, what, "fully_reshardable", str(kind)[:60], mend=mend)
    for name in ("fp8_param_gather", "fp4_param_gather") if kind is not None else ():
        if arguments.get(name):
            what = f"with {name} weights are no casts of their masters, and nothing proves the optimizer's states"
            yield UnsupportedLayout.fault(folder, what, mend=f"save it without {name}")


def _unknown(directory: Directory, *, flat: bool) -> Iterator[Fault]:
    """Flat buckets that do not hold each element once, and keys of the optimizer that are no parameter's."""
    for key, tensor in directory.tensors.items():
        if flat and FLAT.fullmatch(key) is not None:
            try:
                check_cover([Box(offset=one.offset, size=one.size) for one in tensor.filled], tensor.shape)
            except ValueError as error:
                what = f"{key}: declares impossible chunks: {error}"
                yield damaged(directory.path, what, "each element once", "others")
        elif _OPTIMIZER.match(key) is not None:
            match = _STATE.fullmatch(key)
            if match is None or match[1] in (MASTER, WEIGHT) or match[2] not in directory.tensors:
                what = f"{key} is no state of a parameter that the model has"
                yield UnsupportedLayout.fault(directory.path, what, "optimizer.state.STATE.PARAMETER", mend=RESAVE)


def _placements(directory: Directory, family: str, sharding: str | None, faults: list[Fault]) -> Iterator[Placement]:
    """The logical tensors of one key: one, or one of each layer."""
    tensor, shape = directory.tensors[family], directory.tensors[family].shape
    state = _STATE.fullmatch(family)
    kind, name = (KINDS.get(state[1], state[1]), state[2]) if state is not None else (WEIGHT, family)
    dtype = ElementType.named(tensor.dtype)
    stacked = STACKED.fullmatch(name) if shape else None
    tiles: list[Tile] = [(shard, 0, Box(offset=one.offset, size=one.size)) for shard, one in enumerate(tensor.filled)]
    try:
        if sharding == _FRAGMENTS and state is not None:
            shape = directory.tensors[name].shape
            tiles = list(_of_fragments(tensor, shape))
        check_cover([box for _, _, box in tiles], shape)
    except ValueError as error:
        faults.append(
            damaged(directory.path, f"{family}: declares impossible chunks: {error}", "each element once", "")
        )
        return
    if stacked is None:
        yield tiled_placement(TensorKey(name=name, kind=kind), shape, dtype, tiles, family=family, buffer=BUFFER)
        return
    of_layer: dict[int, list[Tile]] = {layer: [] for layer in range(shape[0])}
    for shard, element, whole in tiles:
        box = Box(offset=whole.offset[1:], size=whole.size[1:])
        for number in range(whole.size[0]):
            of_layer[whole.offset[0] + number].append((shard, element + number * box.numel, box))
    for layer, held in of_layer.items():
        key = TensorKey(name=f"{stacked[1]}{layer}.{stacked[2]}", kind=kind)
        yield tiled_placement(key, shape[1:], dtype, held, family=family, buffer=BUFFER)


def _of_fragments(tensor: SavedTensor, whole: tuple[int, ...]) -> Iterator[Tile]:
    """The tiles of a state of a weight of shape `whole`, of which flat parts of fragments were saved.

    Its axes count the fragments along those of the weight; the last has their elements (`ShardedTensor` with a
    `flattened_range`, core/dist_checkpointing/mapping.py, 0.14.0). ValueError where they are no such parts.
    """
    counts = tensor.shape[:-1]
    if len(counts) != len(whole) or not all(counts) or any(a % b for a, b in zip(whole, counts, strict=False)):
        raise ValueError(f"{list(counts)} fragments of {list(whole)}")
    size = tuple(a // b for a, b in zip(whole, counts, strict=True))
    for shard, chunk in enumerate(tensor.filled):
        box = Box(offset=tuple(at * n for at, n in zip(chunk.offset, size, strict=False)), size=size)
        start, stop = chunk.offset[-1], chunk.offset[-1] + chunk.size[-1]
        if prod(chunk.size) != stop - start or not 0 <= start < stop <= box.numel:
            raise ValueError(f"elements {start} to {stop} of fragments of {box.numel}")
        yield from ((shard, at - start, part) for at, part in boxes_between(box, start, stop))


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
        faults.append(damaged(directory.path, f"{key}: does not lie in the buckets once: {error}", "each element", ""))
        label = min(labels)
    return tiled_placement(key, weight.shape, ElementType.named(label), ordered(tiles), family=family, buffer=BUFFER)


_MOST_LAYERS = 1_000_000  # no run has as many, and nothing need count further


def contradictions(
    folder: str, arguments: Mapping[str, object], placements: Mapping[TensorKey, Placement]
) -> Iterator[Fault]:
    """What the run's arguments say otherwise than the tensors."""
    numbers = {name.split(".")[2] for name, *_ in placements if re.match(r"decoder\.layers\.\d+\.", name)}
    layers, rows = arguments.get("num_layers"), arguments.get("padded_vocab_size")
    known = set(map(str, range(min(layers, _MOST_LAYERS)))) if isinstance(layers, int) else numbers
    if any(arguments.get(f"heterogeneous_layers_config_{name}") for name in ("path", "encoded_json")):
        known = known & numbers or known  # a layer of which attention and MLP are no-ops has no tensor
    if numbers and numbers != known:
        yield damaged(folder, "args.num_layers is not the number of layers", str(layers), str(len(numbers)))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        held = placements.get(TensorKey(name=name, kind=WEIGHT))
        if isinstance(rows, int) and held is not None and held.shape[:1] != (rows,):
            yield damaged(folder, f"args.padded_vocab_size is not the rows of {name}", str(rows), str(held.shape[:1]))


def incomplete(path: str, placements: Mapping[TensorKey, Placement]) -> Iterator[Fault]:
    """States of another shape than their parameter, and parameters that are trained without an fp32 master."""
    kinds: dict[str, dict[str, Placement]] = {}
    for key, placement in placements.items():
        kinds.setdefault(key.name, {})[key.kind] = placement
    for name, held in kinds.items():
        weight = held.get(WEIGHT)
        for kind, placement in held.items():
            if weight is None or placement.shape != weight.shape:
                shape = "none" if weight is None else str(list(weight.shape))
                yield damaged(
                    path, f"{name}[{kind}] has not the shape of its weight", shape, str(list(placement.shape))
                )
        master = held.get(MASTER, weight)
        if len(held) > 1 and master is not None and master.dtype is not ElementType.FLOAT32:
            why = "a precision-aware optimizer, remainders of bf16, or masters of another type"
            what = f"{name} is trained without an fp32 master: {why}"
            mend = "save it without --use-precision-aware-optimizer, and of Megatron-FSDP with fp32 masters"
            yield UnsupportedLayout.fault(path, what, "float32", master.dtype.label, mend=mend)


def _trained(placements: Mapping[TensorKey, Placement]) -> list[Trained]:
    """The parameters that have states, in the order of the files, with the dimensions that each has in the model."""
    names = dict.fromkeys(key.name for key in placements if key.kind != WEIGHT)
    shapes = ((name, placements[TensorKey(name=name, kind=WEIGHT)].shape) for name in names)
    return [Trained(name=name, shape=shape) for name, shape in shapes]
