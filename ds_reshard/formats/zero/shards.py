"""Open the shards of a ZeRO checkpoint one by one, check each against the layout, and compare them with each other."""

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
from ds_reshard.errors import AS_SAVED, CheckpointDamaged, Fault, UnsupportedLayout, damaged, fail, raise_faults
from ds_reshard.formats.zero.autoep import EXPERT_FILES, expert_file
from ds_reshard.formats.zero.checkpoint import AUTOEP, MODEL, OPTIM, GridColumn, ZeroCheckpoint, kinds_of
from ds_reshard.formats.zero.flat import FlatBuffer
from ds_reshard.formats.zero.model_states import IdentityCache, ModelFiles, ModelStates
from ds_reshard.formats.zero.modules import copy_buffer
from ds_reshard.formats.zero.names import column_of
from ds_reshard.formats.zero.optim_states import STATE, OptimStates, read_optim_states
from ds_reshard.formats.zero.universal import BUFFER, check_tensor, read_state
from ds_reshard.model.facts import canonical
from ds_reshard.model.index import Extent, Record, extent_of, extents_overlap
from ds_reshard.model.layout import TensorKey

_MAX_TEXT = 60


def compare_signatures(signatures: Mapping[str, Mapping[str, str]], folder: str, *, states: bool = True) -> list[Fault]:
    """Return a fault for each value that differs between shards of one family: they are of different steps or runs.

    `states=False` ignores scalar optimizer states other than the step: an optimizer may keep them per rank, which only
    a load under another layout has to refuse.
    """
    faults = []
    families: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for name in sorted(signatures):
        for family, text_by_key in signature_by_family(name, signatures[name], states=states).items():
            families.setdefault(family, []).append((name, text_by_key))
    columns = {column_of(name) for name in signatures}
    firsts = {name for members in families.values() for name, _ in members[:1]}
    for family, ((first_name, first), *others) in families.items():
        spans_columns = family in (MODEL, OPTIM)
        if spans_columns and len(columns) == 1:
            continue
        for name, text_by_key in others:
            if spans_columns and name not in firsts:
                continue  # compared with the first of its column
            for key in sorted({*first, *text_by_key}):
                value, other_value = first.get(key, "absent"), text_by_key.get(key, "absent")
                if value != other_value:
                    faults.append(_difference_fault(f"{folder}/{name}", first_name, key, value, other_value))
    return faults


def _difference_fault(path: str, first: str, key: str, value: str, other_value: str) -> Fault:
    """Return the fault that `key` differs between two files: an optimizer may keep states per rank, but one step."""
    if key.startswith(STATE):
        what = f"{key} is not as in {first}: the optimizer keeps it per rank, or the files are of two saves"
        mend = f"{AS_SAVED}, or pass --no-load-optim, or load_optimizer_states=False"
        return UnsupportedLayout.fault(path, what, value, other_value, mend=mend)
    what = f"is of another step or run than {first}: {key} differs"
    mend = "restore all files of one save, or load another tag"
    return CheckpointDamaged.fault(path, what, value, other_value, mend=mend)


def compare_heads(
    models: Sequence[ModelStates], optims: Sequence[OptimStates], folder: str, *, states: bool
) -> list[Fault]:
    """Return the differences between the first files of columns, which would be the same if all were of one save."""
    signatures = {os.path.basename(model.path): shorten(model_signature(model)) for model in models}
    signatures |= {os.path.basename(optim.path): shorten(optim.signature()) for optim in optims}
    return compare_signatures(signatures, folder, states=states)


_OF_GRID: tuple[str, ...]
_OF_GRID = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "DeepSpeed version", "sizes")
_OF_GRID += ("ZeRO stage", "optimizer wrapper", "saved DeepSpeed config", "elastic", "step of partition 0")
"""The values that the files of all columns of a grid have in common; all others are common to one column's files."""


def signature_by_family(name: str, signature: Mapping[str, str], *, states: bool) -> dict[str, Mapping[str, str]]:
    """Return a shard's signature by the family of files that share it: its column's files, and all columns' files."""
    kind = OPTIM if name.endswith("optim_states.pt") else MODEL
    of_column = {key: text for key, text in signature.items() if states or not key.startswith(STATE)}
    of_grid = {key: text for key, text in signature.items() if key in _OF_GRID}
    return {f"{kind} {column_of(name)}": of_column, kind: of_grid}


def shorten(texts: Mapping[str, str]) -> dict[str, str]:
    """Replace long texts of a signature by their beginning and a digest: every rank receives all signatures."""
    return {key: text if len(text) <= _MAX_TEXT else f"{text[:40]}... ({_digest(text)})" for key, text in texts.items()}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def compare_checksums(checksums: Mapping[str, Sequence[tuple[int, int | None]]], folder: str) -> list[Fault]:
    """Return a fault for each optimizer shard that holds the bytes of an earlier one: one was copied over the other.

    Partitions of constant values (zero moments, unit weights) may really be equal. A shard counts as a copy only if all
    its buffers equal those of another shard of its column, and at least two of them are not all zeros.
    """
    seen: dict[tuple[object, ...], str] = {}
    faults = []
    for name in sorted(checksums):
        buffers = tuple(checksums[name])
        not_zero = [crc for nbytes, crc in buffers if crc is not None and crc != repeated(b"\0", nbytes)]
        if len(not_zero) < 2:
            continue
        if (column_of(name), buffers) in seen:
            original = seen[column_of(name), buffers]
            what = f"holds the same bytes as {original}: one shard was copied over another"
            expected_and_found = ("different partitions", "identical checksums in every buffer")
            mend = "restore the shard, or load another tag"
            faults.append(CheckpointDamaged.fault(f"{folder}/{name}", what, *expected_and_found, mend=mend))
        seen.setdefault((column_of(name), buffers), name)
    return faults


@dataclass(slots=True, kw_only=True)
class ZeroShards:
    """Opens the shards of a checkpoint for an index, and checks each against the layout when it is opened.

    `signatures` collects what each opened shard says of the run, shortened, for the ranks to compare. `last_model` is
    the model file that was read last. `weight_extents` has where tensors lie by the module entry that model files
    share, `stage0` where the tensors of an optimizer without names lie, by the model file's shard. `crcs` has what
    `checksums` returns, by file and family.
    """

    checkpoint: ZeroCheckpoint
    last_model: ModelStates | None = None
    model_files: ModelFiles = field(default_factory=ModelFiles)
    weight_extents: IdentityCache[Mapping[str, Extent]] = field(default_factory=lambda: IdentityCache())
    stage0: Mapping[int, Mapping[str, Extent]] = field(default_factory=dict)
    signatures: dict[str, dict[str, str]] = field(default_factory=dict)
    crcs: dict[tuple[str, str], tuple[tuple[int, int | None], ...]] = field(default_factory=dict)

    @property
    def checksums(self) -> dict[str, tuple[tuple[int, int | None], ...]]:
        """Return the sizes and checksums of each optimizer file's buffers, of all columns that read the file."""
        by_file: dict[str, tuple[tuple[int, int | None], ...]] = {}
        for (name, _), marks in sorted(self.crcs.items()):
            by_file[name] = (*by_file.get(name, ()), *marks)
        return by_file

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """Return the buffers of one shard: `fp32/0`, `exp_avg/1`, `module/<name>`, `frozen/<name>`.

        A file of a universal checkpoint is a family of one shard with one buffer.
        """
        if family == MODEL:
            return self._model(shard)
        columns = [column for column in self.checkpoint.columns if column.family == family and column.begin <= shard]
        if columns:
            return self._optim(columns[-1], shard - columns[-1].begin)
        if family.startswith(EXPERT_FILES):
            return self._expert(int(family.removeprefix(EXPERT_FILES)), shard)
        (placement,) = self.checkpoint.layout.in_buffer(family, BUFFER)
        path = self.checkpoint.listing.path(family)
        if not placement.numel:  # ds_to_universal writes no file of an empty tensor
            no_bytes = Record(path=path, byte_offset=0, nbytes=0, crc32=None)
            return {BUFFER: Extent(record=no_bytes, byte_offset=0, dtype=placement.dtype, numel=0)}
        file = read_state(path, placement.key.kind)
        return {BUFFER: extent_of(check_tensor(file, placement))}

    def _expert(self, layer: int, expert: int) -> Mapping[str, Extent]:
        """Return the weights of one AutoEP expert, each a slice of its layer's parameter."""
        checkpoint, weights = self.checkpoint, expert_file(self.checkpoint.listing, layer, expert)
        for name, tensor in weights.items():
            (tile, *_) = checkpoint.layout.in_buffer(f"{EXPERT_FILES}{layer}", name) or (None,)
            if tile is None or (1, *tensor.shape) != tile.box.size or tensor.dtype is not tile.dtype:
                expected = "none" if tile is None else f"{tile.dtype.label} {list(tile.box.size[1:])}"
                what, found = f"holds {name} in another shape or type", f"{tensor.dtype.label} {list(tensor.shape)}"
                raise fail(tensor.storage.path, what, expected, found)
        return {name: extent_of(tensor) for name, tensor in weights.items()}

    def model_states(self, shard: int) -> ModelStates:
        """Return the model file of a shard; a file that is asked for several times in a row is read once."""
        per_rank_shapes = self.checkpoint.listing.partitioned_model and self.checkpoint.grid.ep > 1
        if shard == 0 and not self.checkpoint.tp_models and not per_rank_shapes:
            return self.checkpoint.model
        if self.checkpoint.stages:
            return self.checkpoint.tp_models[shard]
        name = self.checkpoint.listing.model[shard]
        path, last = self.checkpoint.listing.path(name), self.last_model
        if last is None or last.path != path:
            last = self.last_model = self.checkpoint.listing.read(name, self.model_files.read)
        return last

    def _model(self, shard: int) -> Mapping[str, Extent]:
        checkpoint = self.checkpoint
        name, model = checkpoint.listing.model[shard], self.model_states(shard)
        self.signatures[name] = shorten(model_signature(model))
        extents = dict(self.weight_extents.get(model.module, len(model.module), lambda: _weight_extents(model)))
        listed = checkpoint.tp_models[shard // checkpoint.dp] if checkpoint.tp_models else checkpoint.model
        for key, shape in listed.frozen_shapes.items() if checkpoint.listing.partitioned_model else ():
            fragment = model.frozen_fragments.get(key)
            expected = -(-prod(shape) // checkpoint.dp)
            if not prod(shape):
                continue
            if fragment is None or fragment.numel != expected or not fragment.contiguous:
                found = "nothing" if fragment is None else f"{fragment.numel}"
                raise fail(model.path, f"frozen parameter {key!r} has the wrong size", f"{expected} elements", found)
            extents[f"frozen/{key}"] = extent_of(fragment)
        copies = checkpoint.copies[shard] if checkpoint.copies else {}
        extents |= {copy_buffer(*at): extent_of(tensor) for at, tensor in copies.items() if tensor.contiguous}
        return {**extents, **self.stage0.get(shard, {})}

    def _optim(self, column: GridColumn, shard: int) -> Mapping[str, Extent]:
        """Return the buffers of one optimizer file, checked against the column's flat buffers."""
        checkpoint, first, name = self.checkpoint, column.head, column.files[shard]
        path = checkpoint.listing.path(name)
        optim = first if path == first.path else checkpoint.listing.read(name, read_optim_states)
        self.signatures[name] = shorten(optim.signature())
        faults: list[Fault] = []
        wrong = partial(damaged, optim.path)
        counts = {optim.counts[buffer.number] for buffer in column.buffers if buffer.number < len(optim.counts)}
        if counts - {column.dp}:
            what = "was saved with another data-parallel size than the model file"
            faults.append(wrong(what, f"{column.dp}", f"{max(counts - {column.dp})}"))
        layouts = [f"{states.kind}, {len(states.partitions)} buffers" for states in (first, optim)]
        if layouts[0] != layouts[1]:
            faults.append(wrong("is of another optimizer layout than the first shard", *layouts))
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        extents: dict[str, Extent] = {}
        for buffer in column.buffers:
            number, partition = buffer.number, optim.partitions[buffer.number]
            swapped = checkpoint.listing.nvme and not partition.fp32.numel and buffer.partition_numel
            faults += [_nvme_fault(optim.path, number)] if swapped else _partition_faults(first, optim, buffer, shard)
            extents[f"fp32/{number}"] = extent_of(partition.fp32)
            extents |= {f"{kind}/{number}": extent_of(state) for kind, state in partition.states.items()}
            full_kinds = first.partitions[number].full_param_kinds & partition.full_states.keys()
            extents |= {f"{kind}/{number}": extent_of(partition.full_states[kind]) for kind in full_kinds}
        for buffer_name, other in extents_overlap(extents):
            faults.append(wrong(f"buffers {buffer_name} and {other} share bytes", "disjoint buffers", "overlap"))
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        self.crcs[name, column.family] = tuple((e.record.nbytes, e.record.crc32) for e in extents.values() if e.numel)
        return extents


def _nvme_fault(path: str, number: int) -> Fault:
    """Refuse a sub-group that NVMe offload keeps in other files (`save_checkpoint`, runtime/engine.py, 0.19.8)."""
    what = f"lacks sub-group {number}: NVMe offload keeps it in offloaded_tensors, which only DeepSpeed reads"
    mend = 'load another tag, and save with "offload_optimizer": {"device": "cpu"}'
    return UnsupportedLayout.fault(path, what, "masters and moments", "none", mend=mend)


def _weight_extents(model: ModelStates) -> Mapping[str, Extent]:
    return {f"module/{key}": extent_of(tensor) for key, tensor in model.module.items() if tensor.contiguous}


def _partition_faults(head: OptimStates, optim: OptimStates, buffer: FlatBuffer, rank: int) -> Iterator[Fault]:
    """Yield a fault for each difference of a rank's partition from its flat buffer or the first rank's states."""
    number = buffer.number
    partition, first = optim.partitions[number], head.partitions[number]
    wrong = partial(damaged, optim.path)
    if kinds_of(partition) != kinds_of(first):
        names = [", ".join(sorted(kinds_of(part))) for part in (first, partition)]
        yield wrong(f"partition {number} holds other states than the first shard", *names)
    if (partition.alignment or ()) != (first.alignment or ()):
        yield wrong(f"partition {number} has other alignment gaps than the first shard", "the same gaps", "others")
        return
    padded, used = buffer.partition_numel, buffer.used_numel(rank)
    numel = used if optim.kind == "zero" else padded
    if partition.fp32.numel != numel:
        yield wrong(f"fp32 partition {number} has the wrong size", f"{numel} elements", f"{partition.fp32.numel}")
    for kind, state in partition.states.items():
        if state.numel not in (padded, used):
            yield wrong(f"{kind} partition {number} has the wrong size", f"{padded} elements", f"{state.numel}")
    for kind in sorted(first.full_param_kinds):
        expected = buffer.momentum_numel(rank)
        tensor, dtype = partition.full_states.get(kind), first.full_states[kind].dtype
        found = (tensor.numel, tensor.dtype) if tensor is not None else (0, dtype)
        if found != (expected, dtype):
            what = f"{kind} of partition {number} does not hold every parameter of the partition whole"
            yield wrong(what, f"{expected} elements of {dtype.label}", f"{found[0]} of {found[1].label}")
    others = partition.unreshardable.keys() - first.unreshardable.keys() - first.full_states.keys()
    if others:
        yield wrong(
            f"partition {number} holds other states than the first shard", "the same", ", ".join(sorted(others))
        )


def model_signature(model: ModelStates) -> dict[str, str]:
    """Return the values that every model file of one checkpoint has in common, as text."""
    keys = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
    return {key: canonical(model.entries[key]) for key in keys if key in model.entries} | {
        "DeepSpeed version": model.version,
        "param_shapes": str(_comparable_shapes(model)),
        "sizes": canonical([model.entries.get(key) for key in ("mp_world_size", "checkpoint_parallel_dimensions")]),
    }


def _comparable_shapes(model: ModelStates) -> object:
    """Return the parameters' shapes; of AutoEP's the shape of one expert, since ranks may have different numbers."""
    layers = model.entries.get(AUTOEP)
    prefixes = (
        [layer.get("expert_key_prefix") for layer in layers if isinstance(layer, dict)]
        if isinstance(layers, list)
        else []
    )
    expert_prefixes = tuple(f"{prefix}." for prefix in prefixes)
    if not expert_prefixes or model.param_shapes is None:
        return model.param_shapes
    return [
        {name: shape[1:] if name.startswith(expert_prefixes) else shape for name, shape in group.items()}
        for group in model.param_shapes
    ]


def rank_independent_text(model: ModelStates) -> str:
    """Return what model files of all nodes have in common, as text: no entries of the script, and no buffers."""
    common = {key: model.entries.get(key) for key in ("lr_scheduler", "optimizer", "random_ltd", "data_sampler")}
    weights = {name: tensor for name, tensor in model.module.items() if name not in model.buffer_names}
    return canonical([model_signature(model), common, weights])


def replica_fault(checkpoint: ZeroCheckpoint, key: TensorKey, rank: int, found: str) -> Fault:
    """Return the fault that replica `rank` differs from the first: of a tensor that ranks have several times.

    That is a tensor that tensor-parallel ranks do not split, one of experts, or Muon's momentum, which each rank with a
    part of the parameter keeps whole.
    """
    where, mend = f"tensor {key}", "restore all files of one save"
    if checkpoint.tp_models:
        what = f"is not divided, and tensor-parallel rank {rank} has other values than rank 0, whose copy counts"
        rule = json.dumps({"parameters": re.escape(key.name), "replicated": True, "owner": 0})
        mend += "; or resume with the tensor-parallel size that was saved; or say whose copy counts: "
        mend += f'"ds_reshard": {{"reshard": {{"tensor_parallel": [{rule}]}}}}; to a tool, --rules FILE with that list'
    elif checkpoint.has_autoep:
        what = "has experts on several expert-parallel ranks, whose copies differ"
        mend += ", or load another tag"
    else:
        what = f"is kept whole by each rank with a part of the parameter, and copy {rank + 1} differs from the first"
        mend += "; or resume with the layout that was saved"
    return CheckpointDamaged.fault(where, what, "the same bytes", found, mend=mend)
