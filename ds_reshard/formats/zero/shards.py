"""The shards of a ZeRO checkpoint, opened one by one, each checked against the layout, and compared with each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import prod

from ds_reshard.containers.crc import repeated
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged, fail, raise_faults
from ds_reshard.formats.zero.autoep import EXPERT_FILES, expert_file
from ds_reshard.formats.zero.checkpoint import AUTOEP, MODEL, OPTIM, GridColumn, ZeroCheckpoint, kinds_of
from ds_reshard.formats.zero.flat import FlatBuffer
from ds_reshard.formats.zero.model_states import Kept, ModelFiles, ModelStates
from ds_reshard.formats.zero.modules import copy_buffer
from ds_reshard.formats.zero.names import column_of
from ds_reshard.formats.zero.optim_states import STATE, OptimStates, read_optim_states
from ds_reshard.formats.zero.universal import BUFFER, check_tensor, read_state
from ds_reshard.model.facts import canonical
from ds_reshard.model.index import Extent, Record, extent_of, extents_overlap
from ds_reshard.model.layout import TensorKey

_LONGEST = 60


def compare_signatures(signatures: Mapping[str, Mapping[str, str]], folder: str, *, states: bool = True) -> list[Fault]:
    """Faults where shards of one family say different things: they are of different steps or runs.

    `states=False` passes over scalar states other than the step: an optimizer may keep them per rank,
    which only a load under another layout has to refuse.
    """
    faults = []
    families: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for name in sorted(signatures):
        for family, said in said_alike(name, signatures[name], states=states).items():
            families.setdefault(family, []).append((name, said))
    columns = {column_of(name) for name in signatures}
    firsts = {name for members in families.values() for name, _ in members[:1]}
    for family, ((first_name, first), *others) in families.items():
        across = family in (MODEL, OPTIM)
        if across and len(columns) == 1:
            continue
        for name, said in others:
            if across and name not in firsts:
                continue  # compared with the first of its column
            for key in sorted({*first, *said}):
                one, other = first.get(key, "absent"), said.get(key, "absent")
                if one != other:
                    faults.append(_differing(f"{folder}/{name}", first_name, key, one, other))
    return faults


def _differing(path: str, first: str, key: str, one: str, other: str) -> Fault:
    """That two files say different things; an optimizer may keep states per rank, but one step."""
    if key.startswith(STATE):
        what = f"has another {key} than {first}: each rank keeps one for itself, or files of two saves are mixed"
        mend = "resume with the layout that was saved, or pass --no-load-optim, or load_optimizer_states=False"
        return UnsupportedLayout.fault(path, what, one, other, mend=mend)
    what = f"is of another step or run than {first}: {key} differs"
    mend = "restore all files of one save, or load another tag"
    return CheckpointDamaged.fault(path, what, one, other, mend=mend)


def compare_heads(
    models: Sequence[ModelStates], optims: Sequence[OptimStates], folder: str, *, states: bool
) -> list[Fault]:
    """Where the first files of two columns are not of one save."""
    said = {os.path.basename(model.path): abridged(model_signature(model)) for model in models}
    said |= {os.path.basename(optim.path): abridged(optim.signature()) for optim in optims}
    return compare_signatures(said, folder, states=states)


_OF_GRID: tuple[str, ...]
_OF_GRID = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "DeepSpeed version", "sizes")
_OF_GRID += ("ZeRO stage", "optimizer wrapper", "saved DeepSpeed config", "elastic", "step of partition 0")
"""What the files of all columns of a grid say alike; the rest is said alike in a column."""


def said_alike(name: str, said: Mapping[str, str], *, states: bool) -> dict[str, Mapping[str, str]]:
    """What a shard says, by the family of files that say it alike: those of its column, and those of all columns."""
    kind = OPTIM if name.endswith("optim_states.pt") else MODEL
    of_column = {key: text for key, text in said.items() if states or not key.startswith(STATE)}
    of_grid = {key: text for key, text in said.items() if key in _OF_GRID}
    return {f"{kind} {column_of(name)}": of_column, kind: of_grid}


def abridged(said: Mapping[str, str]) -> dict[str, str]:
    """What a shard says, long texts by their beginning and a digest: each rank is told what all shards say."""
    return {key: text if len(text) <= _LONGEST else f"{text[:40]}... ({_digest(text)})" for key, text in said.items()}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def compare_prints(prints: Mapping[str, Sequence[tuple[int, int | None]]], folder: str) -> list[Fault]:
    """Faults where two optimizer shards hold the same bytes: one was copied over the other.

    Partitions of constant values (zero moments, unit weights) may truly be equal: a shard counts as a
    copy only when all its buffers equal those of another of its column and at least two of them are not all zeros.
    """
    seen: dict[tuple[object, ...], str] = {}
    faults = []
    for name in sorted(prints):
        marks = tuple(prints[name])
        telling = [crc for nbytes, crc in marks if crc is not None and crc != repeated(b"\0", nbytes)]
        if len(telling) < 2:
            continue
        if (column_of(name), marks) in seen:
            twin = seen[column_of(name), marks]
            what = f"holds the same bytes as {twin}: one shard was copied over another"
            said = ("different partitions", "identical checksums in every buffer")
            mend = "restore the shard, or load another tag"
            faults.append(CheckpointDamaged.fault(f"{folder}/{name}", what, *said, mend=mend))
        seen.setdefault((column_of(name), marks), name)
    return faults


@dataclass(slots=True, kw_only=True)
class ZeroShards:
    """Opens the shards of a checkpoint for an index, each checked against the layout when it is opened.

    `signatures` collects what each opened shard says of the run, abridged; the ranks compare theirs. `latest` is the
    model file that was read last, `places` has where tensors lie that model files say alike, `stage0` where those of an
    optimizer do that names no parameter, by the model file's shard. `marks` has what `prints` is made of, by file and
    family.
    """

    checkpoint: ZeroCheckpoint
    latest: ModelStates | None = None
    model_files: ModelFiles = field(default_factory=ModelFiles)
    places: Kept[Mapping[str, Extent]] = field(default_factory=lambda: Kept())
    stage0: Mapping[int, Mapping[str, Extent]] = field(default_factory=dict)
    signatures: dict[str, dict[str, str]] = field(default_factory=dict)
    marks: dict[tuple[str, str], tuple[tuple[int, int | None], ...]] = field(default_factory=dict)

    @property
    def prints(self) -> dict[str, tuple[tuple[int, int | None], ...]]:
        """The sizes and checksums of the buffers of each optimizer file, of all the columns that read it."""
        found: dict[str, tuple[tuple[int, int | None], ...]] = {}
        for (name, _), marks in sorted(self.marks.items()):
            found[name] = (*found.get(name, ()), *marks)
        return found

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The buffers of one shard: `fp32/0`, `exp_avg/1`, `module/<name>`, `frozen/<name>`.

        A file of a universal checkpoint is a family of one shard with one buffer.
        """
        if family == MODEL:
            return self._model(shard)
        columns = [one for one in self.checkpoint.columns if one.family == family and one.begin <= shard]
        if columns:
            return self._optim(columns[-1], shard - columns[-1].begin)
        if family.startswith(EXPERT_FILES):
            return self._expert(int(family.removeprefix(EXPERT_FILES)), shard)
        (placement,) = self.checkpoint.layout.in_buffer(family, BUFFER)
        path = self.checkpoint.listing.path(family)
        if not placement.numel:  # ds_to_universal writes no file of what has no elements
            nothing = Record(path=path, byte_offset=0, nbytes=0, crc32=None)
            return {BUFFER: Extent(record=nothing, byte_offset=0, dtype=placement.dtype, numel=0)}
        file = read_state(path, placement.key.kind)
        return {BUFFER: extent_of(check_tensor(file, placement))}

    def _expert(self, layer: int, expert: int) -> Mapping[str, Extent]:
        """The weights of one expert of AutoEP, each a slice of what its layer has of all."""
        checkpoint, found = self.checkpoint, expert_file(self.checkpoint.listing, layer, expert)
        for name, tensor in found.items():
            (tile, *_) = checkpoint.layout.in_buffer(f"{EXPERT_FILES}{layer}", name) or (None,)
            if tile is None or (1, *tensor.shape) != tile.box.size or tensor.dtype is not tile.dtype:
                expected = "none" if tile is None else f"{tile.dtype.label} {list(tile.box.size[1:])}"
                what, said = f"holds {name} of another shape or type", f"{tensor.dtype.label} {list(tensor.shape)}"
                raise fail(tensor.storage.path, what, expected, said)
        return {name: extent_of(tensor) for name, tensor in found.items()}

    def model_states(self, shard: int) -> ModelStates:
        """What the model file of a shard says; read once where it is asked for again before another."""
        local = self.checkpoint.listing.partitioned_model and self.checkpoint.grid.ep > 1  # each has shapes of its own
        if shard == 0 and not self.checkpoint.rows and not local:
            return self.checkpoint.model
        if self.checkpoint.stages:
            return self.checkpoint.rows[shard]
        name = self.checkpoint.listing.model[shard]
        path, latest = self.checkpoint.listing.path(name), self.latest
        if latest is None or latest.path != path:
            latest = self.latest = self.checkpoint.listing.read(name, self.model_files.read)
        return latest

    def _model(self, shard: int) -> Mapping[str, Extent]:
        checkpoint = self.checkpoint
        name, model = checkpoint.listing.model[shard], self.model_states(shard)
        self.signatures[name] = abridged(model_signature(model))
        extents = dict(self.places.of(model.module, len(model.module), lambda: _places(model)))
        said = checkpoint.rows[shard // checkpoint.dp] if checkpoint.rows else checkpoint.model
        for key, shape in said.frozen_shapes.items() if checkpoint.listing.partitioned_model else ():
            fragment = model.frozen_fragments.get(key)
            expected = -(-prod(shape) // checkpoint.dp)
            if not prod(shape):
                continue
            if fragment is None or fragment.numel != expected or not fragment.contiguous:
                found = "nothing" if fragment is None else f"{fragment.numel}"
                raise fail(model.path, f"frozen parameter {key!r} has the wrong share", f"{expected} elements", found)
            extents[f"frozen/{key}"] = extent_of(fragment)
        beside = checkpoint.copies[shard] if checkpoint.copies else {}
        extents |= {copy_buffer(*at): extent_of(tensor) for at, tensor in beside.items() if tensor.contiguous}
        return {**extents, **self.stage0.get(shard, {})}

    def _optim(self, column: GridColumn, shard: int) -> Mapping[str, Extent]:
        checkpoint, first, name = self.checkpoint, column.first, column.files[shard]
        path = checkpoint.listing.path(name)
        optim = first if path == first.path else checkpoint.listing.read(name, read_optim_states)
        self.signatures[name] = abridged(optim.signature())
        faults: list[Fault] = []
        wrong = partial(damaged, optim.path)
        counts = {optim.counts[buffer.number] for buffer in column.buffers if buffer.number < len(optim.counts)}
        if counts - {column.dp}:
            what = "was saved with another data-parallel size than the model file"
            faults.append(wrong(what, f"{column.dp}", f"{max(counts - {column.dp})}"))
        said = [f"{states.kind}, {len(states.partitions)} buffers" for states in (first, optim)]
        if said[0] != said[1]:
            faults.append(wrong("is of another optimizer layout than the first shard", *said))
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        extents: dict[str, Extent] = {}
        for buffer in column.buffers:
            number, partition = buffer.number, optim.partitions[buffer.number]
            swapped = checkpoint.listing.nvme and not partition.fp32.numel and buffer.partition_numel
            faults += [_swapped(optim.path, number)] if swapped else _sizes(column.first, optim, buffer, shard)
            extents[f"fp32/{number}"] = extent_of(partition.fp32)
            extents |= {f"{kind}/{number}": extent_of(state) for kind, state in partition.states.items()}
            wholes = first.partitions[number].whole_kinds & partition.wholes.keys()
            extents |= {f"{kind}/{number}": extent_of(partition.wholes[kind]) for kind in wholes}
        for one, other in extents_overlap(extents):
            faults.append(wrong(f"buffers {one} and {other} share bytes", "disjoint buffers", "overlap"))
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        self.marks[name, column.family] = tuple((e.record.nbytes, e.record.crc32) for e in extents.values() if e.numel)
        return extents


def _swapped(path: str, number: int) -> Fault:
    """Of what NVMe offload keeps in files of its own (`save_checkpoint`, runtime/engine.py, 0.19.8)."""
    what = f"has nothing of sub-group {number}: NVMe offload keeps it in offloaded_tensors, which DeepSpeed alone reads"
    mend = 'load another tag, and save with "offload_optimizer": {"device": "cpu"}'
    return UnsupportedLayout.fault(path, what, "masters and moments", "none", mend=mend)


def _places(model: ModelStates) -> Mapping[str, Extent]:
    return {f"module/{key}": extent_of(tensor) for key, tensor in model.module.items() if tensor.contiguous}


def _sizes(head: OptimStates, optim: OptimStates, buffer: FlatBuffer, rank: int) -> Iterator[Fault]:
    """Whether a rank's partition has the elements that its flat buffer gives it, and the states of the first rank's."""
    number = buffer.number
    partition, first = optim.partitions[number], head.partitions[number]
    wrong = partial(damaged, optim.path)
    if kinds_of(partition) != kinds_of(first):
        names = [", ".join(sorted(kinds_of(one))) for one in (first, partition)]
        yield wrong(f"partition {number} holds other states than the first shard", *names)
    if (partition.alignment or ()) != (first.alignment or ()):
        yield wrong(f"partition {number} has other alignment gaps than the first shard", "the same gaps", "others")
        return
    padded, used = buffer.partition_numel, buffer.used_numel(rank)
    own = used if optim.kind == "zero" else padded
    if partition.fp32.numel != own:
        yield wrong(f"fp32 partition {number} has the wrong size", f"{own} elements", f"{partition.fp32.numel}")
    for kind, state in partition.states.items():
        if state.numel not in (padded, used):
            yield wrong(f"{kind} partition {number} has the wrong size", f"{padded} elements", f"{state.numel}")
    for kind in sorted(first.whole_kinds):
        expected = buffer.momentum_numel(rank)
        held, dtype = partition.wholes.get(kind), first.wholes[kind].dtype
        found = (held.numel, held.dtype) if held is not None else (0, dtype)
        if found != (expected, dtype):
            what = f"{kind} of partition {number} is not of the whole of each parameter that it has a part of"
            yield wrong(what, f"{expected} elements of {dtype.label}", f"{found[0]} of {found[1].label}")
    others = partition.unfollowed.keys() - first.unfollowed.keys() - first.wholes.keys()
    if others:
        yield wrong(
            f"partition {number} holds other states than the first shard", "the same", ", ".join(sorted(others))
        )


def model_signature(model: ModelStates) -> dict[str, str]:
    """What every model file of one checkpoint says alike."""
    keys = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
    return {key: canonical(model.entries[key]) for key in keys if key in model.entries} | {
        "DeepSpeed version": model.version,
        "param_shapes": str(_shapes_of_all(model)),
        "sizes": canonical([model.entries.get(key) for key in ("mp_world_size", "checkpoint_parallel_dimensions")]),
    }


def _shapes_of_all(model: ModelStates) -> object:
    """The shapes of parameters; of AutoEP's that of one expert, as a rank may have more of them than another."""
    layers = model.entries.get(AUTOEP)
    said = (
        [layer.get("expert_key_prefix") for layer in layers if isinstance(layer, dict)]
        if isinstance(layers, list)
        else []
    )
    of_experts = tuple(f"{prefix}." for prefix in said)
    if not of_experts or model.param_shapes is None:
        return model.param_shapes
    return [
        {name: shape[1:] if name.startswith(of_experts) else shape for name, shape in group.items()}
        for group in model.param_shapes
    ]


def alike_on_all_ranks(model: ModelStates) -> str:
    """What a model file of any node says alike: without what a script keeps, and buffers, as batch statistics are."""
    loaded = {key: model.entries.get(key) for key in ("lr_scheduler", "optimizer", "random_ltd", "data_sampler")}
    weights = {name: tensor for name, tensor in model.module.items() if name not in model.buffer_names}
    return canonical([model_signature(model), loaded, weights])


def copy_fault(checkpoint: ZeroCheckpoint, key: TensorKey, rank: int, found: str) -> Fault:
    """The fault that a replica, the one of number `rank` among those of several ranks, has other values than the first.

    It is of a tensor that tensor-parallel ranks do not divide, of experts, or of Muon's momentum, of which each rank
    that has a part of the parameter keeps all.
    """
    where, mend = f"tensor {key}", "restore all files of one save"
    if checkpoint.rows:
        what = f"is not divided, and tensor-parallel rank {rank} has other values than rank 0, whose copy counts"
        rule = json.dumps({"parameters": re.escape(key.name), "replicated": True, "owner": 0})
        mend += "; or resume with the tensor-parallel size that was saved; or say whose copy counts: "
        mend += f'"ds_reshard": {{"reshard": {{"tensor_parallel": [{rule}]}}}}; to a tool, --rules FILE with that list'
    elif checkpoint.of_autoep:
        what = "has experts on several expert-parallel ranks, whose copies are not the same"
        mend += ", or load another tag"
    else:
        what = f"is kept whole by each rank that has a part of the parameter, and copy {rank + 1} is not the first"
        mend += "; or resume with the layout that was saved"
    return CheckpointDamaged.fault(where, what, "the same bytes", found, mend=mend)
