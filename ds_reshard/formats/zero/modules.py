"""Read the weights of one tensor-parallel rank from its model files: layers and experts are in separate files.

Each stage of a PipelineModule has a model file, with its parameters' shapes, and each layer a file. Names count layers
from the first of all, `3.weight`, whatever the stages (`PipelineModule._build`, `ckpt_layer_path`,
runtime/pipe/module.py, 0.19.8); a tied module's are `tied_modules.KEY.weight`, in each stage that has it.

Each expert of `deepspeed.moe` has a model file, whose entries count experts through all ranks. Optimizer files count
the experts of their rank, from 0. For experts of AutoEP see `autoep`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged, error_of, fail
from ds_reshard.formats.zero.autoep import ExpertParameter, autoep_layers, expert_parameters
from ds_reshard.formats.zero.checkpoint import MODEL, Grid, TpRank, ZeroCheckpoint
from ds_reshard.formats.zero.flat import Shard, whole_placement
from ds_reshard.formats.zero.model_states import ModelStates, read_entries, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import read_optim_states
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, ObjectRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Shape

_LAYER = re.compile(r"([0-9]+)\.(.*)", re.DOTALL)
_TIED = re.compile(r"tied_modules\.([^.]*)\.(.*)", re.DOTALL)
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]+)(\..*)", re.DOTALL)


def layer_of(name: str) -> int | None:
    """Return the layer whose parameter or buffer has this name; None for tied modules and names without a layer."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def tied_key(name: str) -> str | None:
    match = _TIED.fullmatch(name)
    return match[1] if match else None


def ties_first(names: Iterable[str]) -> list[str]:
    """Return the names in the order of `PipelineModule.named_parameters`: tied modules come before all layers."""
    return sorted(names, key=lambda name: tied_key(name) is None)


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's tensor: the text before the expert's number, the number, and the text after it."""
    match = _EXPERT.fullmatch(name) if "deepspeed_experts" in name else None
    return (match[1], int(match[2]), match[3]) if match else None


def renumber_expert(name: str, first_expert: Mapping[str, int]) -> str:
    """Return the name with the expert's number in the whole model; `first_expert` is each layer's first expert here."""
    parts = expert_of(name)
    return f"{parts[0]}{first_expert.get(parts[0], 0) + parts[1]}{parts[2]}" if parts is not None else name


def experts_per_rank(names: Iterable[str], ep: int) -> dict[str, int]:
    """Return how many experts each of `ep` ranks has, by layer: the text before the number in their names."""
    totals: dict[str, int] = {}
    for parts in map(expert_of, names):
        if parts is not None:
            totals[parts[0]] = max(totals.get(parts[0], 0), parts[1] + 1)
    return {prefix: total // ep for prefix, total in totals.items()}


def names_on_ep_rank(names: Iterable[str], expert_counts: Mapping[str, int], ep_rank: int) -> list[str]:
    """Return the first rank's parameter names as they are on rank `ep_rank`. All ranks have equally many experts."""
    first_expert = {prefix: ep_rank * count for prefix, count in expert_counts.items()}
    return [renumber_expert(name, first_expert) for name in names]


def sort_by_expert(names: Iterable[str]) -> list[str]:
    """Return names without an expert first, then those of experts by layer, in first-seen order, and by number."""
    names, layers = list(names), dict[str, int]()
    sort_keys = []
    for name in names:
        parts = expert_of(name)
        sort_keys.append((-1, 0) if parts is None else (layers.setdefault(parts[0], len(layers)), parts[1]))
    return [name for _, name in sorted(zip(sort_keys, names, strict=True), key=lambda pair: pair[0])]


class Module(NamedTuple):
    """The module's tensors by their names in the whole model, and its other entries.

    `placements` are weights outside the model file, `shards` counts the files of their families. `copies` are tensors
    whose first copy is in another stage's file, by name and copy number. `later_stage_weights` are names of weights
    that belong to a later stage, or at ZeRO stage 0 may. `autoep` are parameters of all experts of a layer.
    """

    tensors: Mapping[str, TensorRecord]
    objects: Mapping[str, object]
    placements: Sequence[Shard] = ()
    shards: Mapping[str, int] = {}
    copies: Mapping[tuple[str, int], TensorRecord] = {}
    later_stage_weights: frozenset[str] = frozenset()
    autoep: Mapping[str, ExpertParameter] = {}


def with_experts(listing: Listing, model: ModelStates, dp: int, faults: list[Fault]) -> Module:
    """Add the experts of `deepspeed.moe`, which their files name by their number in the whole model."""
    faults += _expert_file_faults(listing, model)
    faults += _missing_ep_rank_faults(listing, model, dp) if listing.ep_optim else ()
    weights: dict[str, TensorRecord] = {}
    for (_, expert), name in sorted(listing.experts.items()):
        for entry, value in listing.read_once(name, read_entries).items():
            parts = expert_of(entry)
            if parts is None or parts[1] != expert or entry in weights or not isinstance(value, TensorRecord):
                expected = f"weights of expert {expert}, in no other file"
                raise fail(listing.path(name), "does not hold this expert's weights", expected, f"{entry!r}")
            weights[entry] = value
    return Module({**model.module, **weights}, model.objects)


def with_autoep(listing: Listing, model: ModelStates, faults: list[Fault]) -> Module:
    """Add the experts of AutoEP as empty tensors, since no single file has all experts of a layer."""
    if not listing.partitioned_model:
        faults += _expert_file_faults(listing, model)
    layers = autoep_layers(model, faults)
    if faults:
        return Module({}, {})
    params = expert_parameters(listing, model, layers, faults)
    placeholders = {name: new_tensor("", (0,), param.dtype) for name, param in params.items()}
    weights = [param.weights(name) for name, param in params.items() if not listing.partitioned_model]
    shards = {placement.family: placement.shape[0] for placement in weights}
    tensors = {**model.module, **placeholders}
    return Module(tensors, model.objects, [*map(Shard, weights)], shards, autoep=params)


def _expert_file_faults(listing: Listing, model: ModelStates) -> Iterator[Fault]:
    """Yield faults for missing expert files, and for files of experts that the saving run did not have."""
    num_experts = model.entries.get("num_experts")
    counts = num_experts if isinstance(num_experts, list | tuple) else [num_experts]
    expected = {
        (layer, expert) for layer, count in enumerate(counts) if isinstance(count, int) for expert in range(count)
    }
    missing, unexpected = sorted(expected - set(listing.experts)), sorted(set(listing.experts) - expected)
    if missing:
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in missing[:8])
        what = f"files of experts are missing: {shown}{', ...' if len(missing) > 8 else ''}"
        found, mend = f"{len(expected) - len(missing)}", "restore the files, or load another tag"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(expected)} files", found, mend=mend)
    if unexpected:
        what, found = "holds files of experts that were not in the run", "layer {} expert {}".format(*unexpected[0])
        mend = "move the files of the other save out of the folder"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(expected)} files", found, mend=mend)


def _missing_ep_rank_faults(listing: Listing, model: ModelStates, dp: int) -> Iterator[Fault]:
    """Yield a fault if optimizer files of expert-parallel ranks are missing at stage 0, or there are too many."""
    count = 1 + max(listing.ep_optim)
    missing = sorted(set(range(count)) - set(listing.ep_optim))
    num_experts = model.entries.get("num_experts")
    counts = num_experts if isinstance(num_experts, list | tuple) else [num_experts]
    totals = [total for total in counts if isinstance(total, int)]
    if missing or dp % count or any(total % count for total in totals):
        what, mend = "optimizer files of expert-parallel ranks are missing", "restore the files, or load another tag"
        found = f"expp_rank_{', '.join(map(str, sorted(listing.ep_optim)))} of {dp} ranks and {totals} experts"
        expected = "one for each rank of a size that divides both"
        yield CheckpointDamaged.fault(listing.folder, what, expected, found, mend=mend)


def stage_copies(stages: Sequence[ModelStates], faults: list[Fault]) -> list[dict[str, int]]:
    """Return each stage's parameters that an earlier stage has too, with the number of this stage's copy."""
    known: dict[str, tuple[int, Shape, str]] = {}
    copies: list[dict[str, int]] = []
    for stage in stages:
        of_stage: dict[str, int] = {}
        unexpected: dict[str, list[str]] = {}
        for name, shape in stage.trainable.items():
            number, first_shape, path = known.get(name, (0, shape, stage.path))
            if name in known:
                of_stage[name] = number
            if name in known and tied_key(name) is None:
                unexpected.setdefault(os.path.basename(path), []).append(name)
            elif shape != first_shape:
                what = f"holds {name} in another shape than {os.path.basename(path)}"
                faults.append(damaged(stage.path, what, str(list(first_shape)), str(list(shape))))
            known[name] = (number + 1, first_shape, path)
        for other, names in unexpected.items():
            more = f" and {len(names) - 2} others" if len(names) > 2 else ""
            what = f"holds {', '.join(names[:2])}{more}, and so does {other}: "
            what += "the run numbers its ranks differently, or files of two saves are mixed"
            expected = "mp_rank = stage * tp + tensor-parallel rank, and each layer in one stage"
            mend = "restore all files of one save; on a grid with other axes, save with PipeModelDataParallelTopology"
            faults.append(UnsupportedLayout.fault(stage.path, what, expected, "a layer in two", mend=mend))
        copies.append(of_stage)
    return copies


def pipeline_faults(listing: Listing, grid: Grid, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """Refuse pipelines that are no PipelineModule, whose stages number layers freely, and pipelines with experts."""
    mend = "load it with the sizes it was saved with"
    if any(stage.module for stage in stages):
        what = "has pipeline stages, and was not saved by a PipelineModule"
        yield UnsupportedLayout.fault(listing.folder, what, "files of layers", str(grid), mend=mend)
    if listing.experts:
        what = "has both experts and pipeline stages"
        yield UnsupportedLayout.fault(listing.folder, what, "one or the other", str(grid), mend=mend)


Layers = Mapping[int, Mapping[str, object]]
"""The entries of each layer's file."""


def read_layers(listing: Listing, rank: int) -> Layers:
    files = {layer: name for (layer, tp_rank), name in sorted(listing.layers.items()) if tp_rank == rank}
    return {layer: listing.read(name, read_entries) for layer, name in files.items()}


def add_shapes(listing: Listing, stage: ModelStates, layers: Layers, ties: Mapping[int, str] | None) -> ModelStates:
    """Add the shapes of a stage's parameters, in the order of the flat buffers, if its model file does not list them.

    `BF16_Optimizer` cuts its masters at ZeRO stage 0 too, where `_save_checkpoint` (runtime/engine.py, 0.19.8) saves no
    `param_shapes`. The optimizer files name what each rank has, in order (`_create_param_mapping`).
    """
    groups: list[dict[str, int]] = []
    for _, name in sorted(listing.optim.items()):
        for number, numel_by_name in enumerate(listing.read_once(name, _numel_by_buffer)):
            groups += [{}] if number == len(groups) else []
            for parameter, numel in numel_by_name.items():
                groups[number][parameter] = groups[number].get(parameter, 0) + numel
    shapes = tuple({name: _find_shape(stage, name, n, layers, ties) for name, n in group.items()} for group in groups)
    return replace(stage, param_shapes=shapes)


def _numel_by_buffer(path: str, root: str) -> list[dict[str, int]]:
    """Return how many elements of each parameter an optimizer file has, by flat buffer, in the file's order."""
    mappings, buffers = read_optim_states(path, root).entries.get("param_slice_mappings"), list[dict[str, int]]()
    for mapping in mappings if isinstance(mappings, list) else ():
        buffers.append({})
        for parameter, fragment in mapping.items() if isinstance(mapping, dict) else ():
            state = fragment.state if isinstance(fragment, ObjectRecord) else None
            numel = state.get("numel") if isinstance(state, dict) else None
            if not isinstance(parameter, str) or not isinstance(numel, int):
                raise fail(path, "entry 'param_slice_mappings' is malformed", "names and sizes", f"{parameter!r}")
            buffers[-1][parameter] = numel
    return buffers


def _find_shape(stage: ModelStates, name: str, numel: int, layers: Layers, ties: Mapping[int, str] | None) -> Shape:
    """Return the shape of a parameter with `numel` elements, from the file of its layer."""
    layer, key = layer_of(name), tied_key(name)
    entry = name.removeprefix(f"tied_modules.{key}." if layer is None else f"{layer}.")
    candidates = [layer] if layer is not None else [number for number, tie in (ties or {}).items() if tie == key]
    candidates = list(layers) if layer is None and ties is None else candidates
    entries = (layers.get(number, {}).get(entry) for number in candidates)
    shapes = {value.shape for value in entries if isinstance(value, TensorRecord) and value.numel == numel}
    if len(shapes) == 1:
        return shapes.pop()
    what, mend = f"no file has the shape of {name}", "save it at ZeRO stage 1, or with a layer that has no forward_fn"
    fault = UnsupportedLayout.fault(stage.path, what, f"{numel} elements in the file of its layer", "none", mend=mend)
    raise error_of([fault], subject="reading a checkpoint")


def module_of_layers(
    listing: Listing, tp: TpRank, layers: Layers, stages: Sequence[ModelStates], faults: list[Fault], *, optimizer: bool
) -> Module:
    """Return the module with the entries of all layers' files.

    A weight's copy number is that of its stage's master. If only a later stage's file has a weight, as the first
    stage's layer spec has a forward_fn, the copy is read beside the first stage's master; if there are no masters, it
    is read as the weight itself, and its name is in `later_stage_weights`.
    """
    faults += _layer_faults(listing, tp, layers, stages)
    shapes = {name: shape for stage in stages for name, shape in stage.trainable.items()}
    ties = dict(tp.ties) if tp.ties is not None else _infer_ties(layers, shapes, stages, listing.folder, faults)
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, object] = {}
    copies: dict[tuple[str, int], TensorRecord] = {}
    seen: dict[str, set[int]] = {}
    layers_without_file = set(range(max(layers, default=0))) - set(layers) if tp.ties is None else set()
    for layer, entries in layers.items():
        prefix = f"tied_modules.{ties[layer]}" if layer in ties else f"{layer}"
        taken_copies, number = seen.setdefault(prefix, set()), 0
        if layer in ties:
            tied = {other_layer for other_layer, key in ties.items() if key == ties[layer]} | layers_without_file
            number = _copy_number(layer, ties[layer], tied, stages, taken_copies)
        taken_copies.add(number)
        for key, value in entries.items():
            name = f"{prefix}.{key}"
            if not isinstance(value, TensorRecord):
                objects[name] = value
            elif number:
                copies[name, number] = value
            else:
                tensors[name] = value
    later = {name: (name, number) for name, number in sorted(copies, reverse=True) if name not in tensors}
    later = {name: copy for name, copy in later.items() if not (optimizer and name in shapes)}
    tensors |= {name: copies.pop(copy) for name, copy in later.items()}
    firsts = {key: layer for layer, key in sorted(ties.items(), reverse=True)} if not shapes and len(stages) > 1 else {}
    unsure = {name for name in tensors if firsts.get(tied_key(name) or "", -1) not in {-1, *layers}}
    faults += _shape_faults(listing, tensors, copies, shapes)
    placements = [
        Shard(whole_placement(name, WEIGHT, t.shape, t.dtype, family=MODEL, buffer=copy_buffer(name, n)), None, n)
        for (name, n), t in copies.items()
        if t.contiguous
    ]
    later_stage_weights = frozenset({*later, *unsure}.difference(*(stage.buffer_names for stage in stages)))
    return Module(tensors, objects, placements, copies=copies, later_stage_weights=later_stage_weights)


def _copy_number(layer: int, key: str, tied: set[int], stages: Sequence[ModelStates], taken_copies: set[int]) -> int:
    """Return which copy of a tied module a layer's file has: its stage's index among the stages with the module.

    The layer must lie after the previous stages' layers and before the next stages'. If several stages qualify, take
    the first for which no other `tied` layer (one that is, or may be, of the module) does. A second file is the next
    copy.
    """
    names = [{*stage.trainable, *stage.frozen_shapes, *stage.buffer_names} for stage in stages]
    layers = [{number for number in map(layer_of, of_stage) if number is not None} for of_stage in names]
    holders = [stage for stage, of_stage in enumerate(names) if any(tied_key(name) == key for name in of_stage)]

    def may_save(stage: int, other: int) -> bool:
        before, behind = set().union(*layers[:stage]), set().union(*layers[stage + 1 :])
        return max(before, default=-1) < other < min(behind, default=other + 1)

    owners = [stage for stage in holders if may_save(stage, layer)]
    sole = [stage for stage in owners if sum(may_save(stage, other) for other in tied) == 1]
    copy = holders.index((sole or owners)[0]) if owners else len(taken_copies)
    return copy if copy not in taken_copies else max(len(holders), *(copy_number + 1 for copy_number in taken_copies))


def _infer_ties(
    layers: Layers, shapes: Mapping[str, Shape], stages: Sequence[ModelStates], folder: str, faults: list[Fault]
) -> dict[int, str]:
    """Return the key of each layer that is a tied module, found by its parameters' names and shapes: no file has it.

    A tied layer's own number is in no name of the stages' parameters and buffers.
    """
    names = {*shapes, *(name for stage in stages for name in stage.buffer_names)}
    untied_layers = {layer for layer in map(layer_of, names) if layer is not None}
    tied_shapes: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        key = tied_key(name)
        if key is not None:
            tied_shapes.setdefault(key, {})[name.removeprefix(f"tied_modules.{key}.")] = shape
    ties: dict[int, str] = {}
    for layer, entries in layers.items():
        shapes_here = {key: value.shape for key, value in entries.items() if isinstance(value, TensorRecord)}
        keys = [key for key, tied in tied_shapes.items() if all(shapes_here.get(name) == s for name, s in tied.items())]
        if layer in untied_layers or not keys:
            continue
        if len(keys) > 1:
            what = f"layer {layer} may be any of the tied modules {', '.join(map(repr, keys))}: their shapes are equal"
            mend = "load it in a run with import ds_reshard.auto: its PipelineModule says which"
            faults.append(UnsupportedLayout.fault(folder, what, mend=mend))
        ties[layer] = keys[0]
    return ties


def _layer_faults(listing: Listing, tp: TpRank, layers: Layers, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """Yield a fault that lists the layers without a file. ds_to_universal copies none into a universal checkpoint."""
    names = [name for stage in stages for name, shape in stage.trainable.items() if prod(shape)]
    used_layers = map(layer_of, (*names, *(name for stage in stages for name in stage.buffer_names)))
    expected = {layer for layer in used_layers if layer is not None} if not listing.universal else set()
    missing = sorted(expected - set(layers))
    if missing:
        end = f"-model_{tp.rank:02d}" if any("-model_" in name for name in listing.layers.values()) else ""
        shown = ", ".join(f"layer_{layer:02d}{end}" for layer in missing[:16]) + (", ..." if len(missing) > 16 else "")
        what, mend = f"files of layers are missing: {shown}", "restore the file, or load another tag"
        counts = (f"{len(expected)} files", f"{len(expected) - len(missing)}")
        yield CheckpointDamaged.fault(listing.folder, what, *counts, mend=mend)


def _shape_faults(
    listing: Listing,
    tensors: Mapping[str, TensorRecord],
    copies: Mapping[tuple[str, int], TensorRecord],
    shapes: Mapping[str, Shape],
) -> Iterator[Fault]:
    """Yield a fault for each weight that its layer's file lacks, or has in another shape than the model file."""
    layers_with_file = {layer_of(name) for name in tensors} - {None}
    for name, shape in shapes.items():
        tensor, layer = tensors.get(name), layer_of(name)
        if tensor is None and layer in layers_with_file:
            yield damaged(listing.folder, f"the file of layer {layer} lacks {name}", str(list(shape)), "nothing")
        elif tensor is not None and tensor.shape != tuple(shape):
            what = f"holds {name} in another shape than the model file says"
            yield damaged(tensor.storage.path, what, str(list(shape)), str(list(tensor.shape)))
    for (name, _), tensor in copies.items():
        first = tensors.get(name)
        if first is not None and tensor.shape != first.shape:
            what = f"holds {name} in another shape than the first stage"
            yield damaged(tensor.storage.path, what, str(list(first.shape)), str(list(tensor.shape)))


def layer_files(zero: ZeroCheckpoint) -> dict[str, dict[str, TensorKey]]:
    """Return the layers' files of the first tensor-parallel rank, with their weights by their names in the file.

    If no file has the first stage's copy of a weight, a later stage's copy stands for it; a tied weight is listed under
    its first name. A layer without weights has a file too, which DeepSpeed looks for.
    """
    files: dict[str, dict[str, TensorKey]] = {name: {} for (_, rank), name in zero.listing.layers.items() if not rank}
    module = zero.tp_models[0].module if zero.tp_models else zero.model.module
    copies = {copy_key: record for copy_key, record in zero.copies[0].items() if record.contiguous}
    records = {(name, 0): record for name, record in module.items()} | copies
    stored = {copy_key: record for copy_key, record in records.items() if record.storage.path}
    first_copies = dict(sorted(stored, reverse=True))
    for (name, copy), record in stored.items():
        tie, layer = tied_key(name), layer_of(name)
        entry = name.removeprefix(f"{layer}." if tie is None else f"tied_modules.{tie}.")
        weight = TensorKey(zero.model.shared.get(name, name), WEIGHT, copy - first_copies[name])
        files.setdefault(os.path.basename(record.storage.path), {})[entry] = weight
    return files


def with_placeholders(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """Add a placeholder, such as ZeRO stage 3 saves, for each weight that no file holds."""
    missing = {name: new_tensor("", (0,), dtype) for name, dtype in _params_without_weights(zero).items()}
    if not missing:
        return zero
    module = {**zero.model.module, **missing}
    entries = {**zero.model.entries, "module": {**module, **zero.model.objects}}
    return replace(zero, model=replace(zero.model, module=module, entries=entries))


def _params_without_weights(zero: ZeroCheckpoint) -> dict[str, ElementType]:
    """Return the parameters whose weights are in no file, with the type of the other weights.

    That is, of tied modules whose layer specs all have a forward_fn; and in a universal checkpoint all that are not in
    the model file, as ds_to_universal copies no files of layers and experts. If there are no other weights, the type is
    the one that the saved JSON trains in.
    """
    trainable, module = zero.model.trainable, zero.model.module
    types = {module[name].dtype for name in trainable if name in module}
    missing = [name for name in trainable if name not in module]
    if not types and zero.universal is not None:
        types_by_key = {"bf16": ElementType.BFLOAT16, "bfloat16": ElementType.BFLOAT16, "fp16": ElementType.FLOAT16}
        types = {dtype for key, dtype in types_by_key.items() if section(zero.model.config, key).get("enabled") is True}
        types = types or {ElementType.FLOAT32}
    return dict.fromkeys(missing, types.pop()) if len(types) == 1 else {}


def copy_buffer(name: str, number: int) -> str:
    """Return the name of the buffer of copy `number` of a tied layer's weight."""
    return f"copy {number} of {name}"
