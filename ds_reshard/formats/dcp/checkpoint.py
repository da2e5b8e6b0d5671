"""A folder of torch.distributed.checkpoint as a layout, an index and facts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import (
    BUFFER,
    METADATA,
    AlikeArchives,
    Chunk,
    Directory,
    Place,
    damaged,
    is_megatron_fsdp,
    is_megatrons,
    list_directory,
    read_directory,
)
from ds_reshard.errors import CheckpointNotFound, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.dcp.entries import (
    ACCELERATE,
    MODELS,
    GroupKey,
    Path,
    group_key,
    is_of_optimizer,
    read_values,
    tensor_key,
)
from ds_reshard.formats.dcp.item_files import is_items, item_names, read_items
from ds_reshard.formats.dcp.shard_files import MEND, is_tied, optimizer_parts, read_shards, shard_names, unlike_states
from ds_reshard.model.checkpoint import SavedListing, SavedState
from ds_reshard.model.content import MASTER, WEIGHT, weight_name_fault
from ds_reshard.model.facts import OptimizerFacts, Scalar, number_of
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box

_SAVED_AGAIN = "load it with torch, and save it with torch.distributed.checkpoint.save as it is by default"
_OF_MEGATRON = {"args", "checkpoint_version", "iteration"}
"""Beside the model, and without metadata.json (`generate_state_dict`, megatron/training/checkpointing.py, 0.19.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpCheckpoint(SavedState):
    """What the directory tells; a family of shards is one key, and a shard one of its chunks."""

    directory: Directory
    chunks: Mapping[str, Sequence[Chunk]]
    archives: AlikeArchives = field(default_factory=AlikeArchives)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        return self.archives.buffers(family, self.directory.tensors[family].dtype, self.chunks[family][shard])


def list_dcp(folder: str) -> SavedListing | None:
    """The files of such a folder, None for any other."""
    parts = _parts(folder)
    if not parts or is_megatrons(folder) or is_megatron_fsdp(folder):
        return None
    return list_directory(folder, parts, _read, format="torch.distributed.checkpoint", writer="torch")


def open_dcp(folder: str, *, optimizer: bool = True) -> DcpCheckpoint:
    """Read the directory; raises every structural fault: chunks that overlap, leave a hole or have no file.

    And what `read_directory` raises; UnsupportedLayout for chunks that were compressed, and for unknown types.
    `optimizer=False` leaves out what optimizers have, and does not read accelerate's folder of it.
    """
    directory = _read(folder, optimizer=optimizer)
    faults = [*directory.faults(saved_again=_SAVED_AGAIN), *_named_as_weights(directory), *_of_one_name(directory)]
    sharded = bool(shard_names(folder))
    faults += unlike_states(directory) if sharded else ()
    raise_faults(faults, subject=f"checkpoint {folder}")
    single = dict(_single(directory))
    chunks = {family: tensor.filled for family, tensor in directory.tensors.items()}
    placements: dict[TensorKey, Placement] = {}
    shards: dict[str, int] = {}
    for family, tensor in directory.tensors.items():
        if family in single:
            continue
        key = tensor_key(directory.paths.get(family, (family,)))
        boxes = tuple(Box(offset=chunk.offset, size=chunk.size) for chunk in chunks[family])
        shards[family] = len(boxes)
        dtype = ElementType.named(tensor.dtype)
        try:
            placements[key] = chunked_placement(key, tensor.shape, dtype, boxes, family=family, buffer=BUFFER)
        except ValueError as error:
            what = f"{family}: declares impossible chunks: {error}"
            fault = damaged(directory.path, what, "each element once", "another cover")
            faults.append(replace(fault, mend=MEND) if sharded else fault)
    raise_faults(faults, subject=f"checkpoint {folder}")
    values = read_values(directory, single)
    raise_faults(
        [_two(directory, f"parameter {name} is in groups of {a} and of {b}") for name, a, b in values.twice()],
        subject=f"checkpoint {folder}",
    )
    trained = [key.name for key in placements if key.kind != "weight"]
    facts = values.facts(list(dict.fromkeys([*trained, *values.scalars])))
    raise_faults(_without_a_state(directory.path, placements, facts), subject=f"checkpoint {folder}")
    return DcpCheckpoint(
        folder=folder,
        directory=directory,
        layout=Layout(placements, shards),
        facts=facts,
        objects=values.objects,
        extra_tensors=dict(_beside(directory)),
        chunks=chunks,
        notes=(*_notes(directory), *_of_two_saves(directory, single, values.scalars)),
        left_out=tuple(_left_out(directory, folder)),
    )


def _without_a_state(
    path: str, placements: Mapping[TensorKey, Placement], facts: OptimizerFacts | None
) -> Iterator[Fault]:
    """Yield a fault for each parameter that lacks a step that those of its group with the same states have."""
    kinds: dict[str, list[str]] = {}
    for key in placements:
        if key.kind != WEIGHT:
            kinds.setdefault(key.name, []).append(key.kind)
    scalars = facts.scalars if facts is not None else {}
    for group in facts.groups if facts is not None else ():
        alike: dict[frozenset[str], list[str]] = {}
        for name in group.members:
            alike.setdefault(frozenset(kinds.get(name, ())), []).append(name)
        for states, names in alike.items():
            known = {kind for name in names for kind in scalars.get(name, {})}
            for name in names if states else ():
                for kind in sorted(known - scalars.get(name, {}).keys()):
                    yield damaged(path, f"{name} lacks the {kind} that others of its param group have", kind, "none")


def _named_as_weights(directory: Directory) -> Iterator[Fault]:
    """States of the optimizer under the names that weights and their masters have here."""
    for family in (*directory.tensors, *directory.objects):
        path = [str(part) for part in directory.paths.get(family, (family,))]
        nested = len(path) >= 3 and path[-3] == "state" and path[0] not in MODELS
        flattened = len(path) == 2 and path[0] == "optimizer" and path[1].startswith("state.")
        if (nested or flattened) and path[-1].rpartition(".")[2] in (MASTER, WEIGHT):
            yield weight_name_fault(directory.path, family)


def _of_one_name(directory: Directory) -> Iterator[Fault]:
    """Keys that mean the same tensor or value of a group: of two optimizers, whose parameters have the same names."""
    found: dict[TensorKey | GroupKey, str] = {}
    for family in (*directory.tensors, *directory.objects):
        path = directory.paths.get(family, (family,))
        group = group_key(path)
        if family in directory.tensors or (group is not None and group.member is not None):
            first = found.setdefault(group or tensor_key(path), family)
            if first != family:
                yield _two(directory, f"{first} and {family} are of one name here")


def _two(directory: Directory, what: str) -> Fault:
    mend = "save each model and its optimizer into a folder of its own"
    return UnsupportedLayout.fault(directory.path, what, "names that differ", mend=mend)


def _notes(directory: Directory) -> Iterator[str]:
    if not directory.paths and any(".state." in key for key in directory.tensors):
        yield (
            "was saved without the paths of its keys (flatten_state_dict=False): "
            "all of its tensors are taken for weights, of the names that they have there"
        )
    if directory.objects.keys() >= _OF_MEGATRON:
        yield (
            "is of Megatron-LM's format torch_dcp, or of fsdp_dtensor without its optimizer: states are not read as "
            "parameters' own; load it with Megatron-LM, and save it with --ckpt-format torch_dist"
        )


def _of_two_saves(
    directory: Directory, single: Mapping[str, Place], scalars: Mapping[str, Mapping[str, Scalar]]
) -> Iterator[str]:
    """Files of one step each, and not of the same: torch deals the steps out to the files, whatever they are."""
    steps: dict[str, list[object]] = {}
    for family, place in single.items():
        key = tensor_key(directory.paths.get(family, (family,)))
        if key.kind == "step":
            value = number_of(scalars.get(key.name, {}).get("step"))
            steps.setdefault(os.path.basename(place.path), []).append(value)
    files: dict[object, list[str]] = {}
    for file, found in sorted(steps.items()):
        files.setdefault(found[0], []).append(file)
    one_each = all(len(set(found)) == 1 for found in steps.values())
    if one_each and len(files) > 1 and sum(map(len, steps.values())) > len(steps):
        told = ", ".join(f"step {step} in {' '.join(names)}" for step, names in files.items())
        yield f"may be of two saves, of which the later did not end, and left the earlier one's .metadata: {told}"


def _left_out(directory: Directory, folder: str) -> Iterator[str]:
    """accelerate's further models, its scheduler, what a Trainer puts there, and files of earlier saves."""
    shards = {os.path.basename(place.path) for place in directory.places}
    named = shard_names(folder) or item_names(folder)
    known = {METADATA, "ds_reshard.json", *_parts(folder), *shards, *named}
    empty = {name for name, nbytes in folders.files(folder).items() if not nbytes and name.endswith(".distcp")}
    names = [name for name in folders.names(folder) if name not in known | empty]  # torch makes one of a rank's nothing
    if names:
        yield f"left out, as nothing here reads them: {', '.join(names)}"
    if shard_names(folder) and is_tied(folder):
        yield (
            "config.json has tie_word_embeddings: a tied weight lies in the files under each of its names, and is "
            "written as a weight for each"
        )
    if shard_names(folder) and not optimizer_parts(folder):
        yield (
            "no optimizer's folder lies in it, and no file tells how many ranks saved: "
            "if the last rank's file is lost, nothing here can see it"
        )


def _parts(folder: str) -> list[str]:
    """Where the directories are: in the folder itself, or below it; ranks' files of weights count as one."""
    if shard_names(folder):
        return ["", *filter(None, optimizer_parts(folder))]
    if is_items(folder):
        return [""]
    return [part for part in ("", *ACCELERATE) if folders.is_file(os.path.join(folder, part, METADATA))]


def _read(folder: str, *, optimizer: bool = True) -> Directory:
    """The directory of a folder; of accelerate's two, what both say. CheckpointNotFound where one has none."""
    if shard_names(folder):
        parts = optimizer_parts(folder) if optimizer else []
        return _joined(folder, [read_shards(folder), *(read_directory(os.path.join(folder, part)) for part in parts)])
    if is_items(folder):
        directory = _joined(folder, [read_items(folder)])
        return directory if optimizer else _without_optimizers(directory)
    unread = () if optimizer else ACCELERATE[1:]
    parts = _parts(folder) or [""]
    for path in (
        os.path.join(folder, part) for part in ACCELERATE if part not in (*parts, *unread) and "" not in parts
    ):
        if folders.is_folder(path):
            whole = os.path.join(folder, parts[0])
            what = "has no .metadata, which is written last: the save did not end"
            raise CheckpointNotFound.of(path, what, mend=f"take an older checkpoint, or {whole} alone, which is whole")
    read = [read_directory(os.path.join(folder, part)) for part in parts if part not in unread or len(parts) == 1]
    first = _joined(folder, read)
    return first if optimizer else _without_optimizers(first)


def _joined(folder: str, directories: Sequence[Directory]) -> Directory:
    """What several directories say together; CheckpointDamaged for a key that two have."""
    first, *others = directories
    for other in others:
        twice = sorted((first.tensors.keys() | first.objects.keys()) & (other.tensors.keys() | other.objects.keys()))
        raise_faults(
            [damaged(other.path, f"{key} is in {first.path} too", "one", "two") for key in twice],
            subject=f"checkpoint {folder}",
        )
        first = replace(
            first,
            tensors={**first.tensors, **other.tensors},
            objects={**first.objects, **other.objects},
            paths={**first.paths, **other.paths},
            contradictions=first.contradictions + other.contradictions,
        )
    first = replace(first, paths={**first.paths, **dict(_of_modules(first))})
    return replace(first, paths={**first.paths, **dict(_of_model(first))})


def _without_optimizers(directory: Directory) -> Directory:
    kept = {
        family
        for family in (*directory.tensors, *directory.objects)
        if not is_of_optimizer(directory.paths.get(family, (family,)))
    }
    tensors = {family: tensor for family, tensor in directory.tensors.items() if family in kept}
    objects = {family: place for family, place in directory.objects.items() if family in kept}
    return replace(directory, tensors=tensors, objects=objects, values={})


def _of_model(directory: Directory) -> Iterator[tuple[str, Path]]:
    """The weights of a model that has no name of `MODELS` at the top, with one: an optimizer tells which they are.

    `{"app": {"model": ..., "optim": ...}}` is what torch's tutorial of this format saves; torchtitan's weights have no
    name above them (`_flattened_model_states_sd`, torchtitan/components/checkpointer/dcp.py, 0.3.0).
    """
    paths = {family: directory.paths.get(family, (family,)) for family in (*directory.tensors, *directory.objects)}
    if any(len(path) > 1 and path[0] in MODELS for path in paths.values()):
        return
    keys = {family: tensor_key(path) for family, path in paths.items() if group_key(path) is None}
    trained = {key.name for family, key in keys.items() if key.kind != WEIGHT and family in directory.tensors}
    weights = {family: paths[family] for family, key in keys.items() if key.kind == WEIGHT}
    below: dict[Path, set[str]] = {}
    for family in weights.keys() & directory.tensors.keys():
        below.setdefault(weights[family][:-1], set()).add(str(weights[family][-1]))
    fitting = [top for top, names in below.items() if trained and trained <= names]
    if len(fitting) == 1:
        for family, path in weights.items():
            own = not fitting[0] and family in directory.objects  # a value at the top is the script's
            if path[:-1] == fitting[0] and not own:
                yield family, (MODELS[0], path[-1])


def _of_modules(directory: Directory) -> Iterator[tuple[str, Path]]:
    """Weights of a module called `state`, whose keys look like flattened states: no param group is beside them.

    torch flattens both together (`_flatten_optim_state_dict`, torch/distributed/checkpoint/state_dict.py, 2.13). Their
    paths are given with the module's name apart.
    """
    keys = (*directory.tensors, *directory.objects)
    paths = {family: directory.paths.get(family, (family,)) for family in keys}
    grouped = {path[:-1] for path in paths.values() if group_key(path) is not None}
    for family, path in paths.items():
        module, _, rest = str(path[-1]).partition(".")
        optimizer = len(path) > 1 and str(path[0]).startswith("optim")  # which may be saved without its groups
        if module == "state" and rest and path[:-1] not in grouped and not optimizer:
            yield family, (*path[:-1], module, rest)


def _single(directory: Directory) -> Iterator[tuple[str, Place]]:
    """Tensors that are one value of a parameter, or of a param group: no logical tensors."""
    keys = {family: tensor_key(directory.paths.get(family, (family,))) for family in directory.tensors}
    shapes = {key.name: directory.tensors[family].shape for family, key in keys.items() if key.kind == "weight"}
    for family, key in keys.items():
        tensor = directory.tensors[family]
        chunks = tensor.filled
        of_group = group_key(directory.paths.get(family, (family,))) is not None
        of_state = key.kind == "step" or (key.kind != "weight" and shapes.get(key.name, ()) != ())
        if len(chunks) == 1 and chunks[0].place is not None and tensor.shape == () and (of_group or of_state):
            yield family, chunks[0].place


def _beside(directory: Directory) -> Iterator[tuple[str, Path]]:
    """Tensors outside the model: where the weights have a name above them, those that have another."""
    paths = [directory.paths.get(family, (family,)) for family in directory.tensors]
    weights = [path for path in paths if tensor_key(path).kind == "weight" and group_key(path) is None]
    if any(len(path) > 1 and path[0] in MODELS for path in weights):
        yield from ((tensor_key(path).name, path) for path in weights if path[0] not in MODELS)
