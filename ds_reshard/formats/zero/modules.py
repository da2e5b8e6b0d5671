"""The weights of one tensor-parallel rank, as its model files have them: layers and experts are in files of their own.

Each stage of a PipelineModule has a model file, with its parameters' shapes, and each layer a file. Names count layers
from the first of all, `3.weight`, whatever the stages (`PipelineModule._build`, `ckpt_layer_path`,
runtime/pipe/module.py, 0.19.8); a tied module's are `tied_modules.KEY.weight`, in each stage that has it.

Each expert of `deepspeed.moe` has a model file, whose entries count experts through all ranks. Optimizer files count
those of their rank, from 0. For experts of AutoEP see `autoep`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged, error_of, fail
from ds_reshard.formats.zero.autoep import Dealt, autoep_layers, dealt_parameters, expert_weights
from ds_reshard.formats.zero.checkpoint import MODEL, Grid, Row, ZeroCheckpoint
from ds_reshard.formats.zero.flat import Placed, whole
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
    """The layer whose parameter or buffer has this name; None where it is a tied module's, or none's."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def tied_key(name: str) -> str | None:
    match = _TIED.fullmatch(name)
    return match[1] if match else None


def ties_first(names: Iterable[str]) -> list[str]:
    """The names as `PipelineModule.named_parameters` has them: it makes its dict of tied modules before any layer."""
    return sorted(names, key=lambda name: tied_key(name) is None)


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's tensor: the text before the expert's number, the number, and the text after it."""
    match = _EXPERT.fullmatch(name) if "deepspeed_experts" in name else None
    return (match[1], int(match[2]), match[3]) if match else None


def renumbered(name: str, first: Mapping[str, int]) -> str:
    """The name with the expert's number in the whole model. `first` numbers each layer's first expert here."""
    found = expert_of(name)
    return f"{found[0]}{first.get(found[0], 0) + found[1]}{found[2]}" if found is not None else name


def experts_held(names: Iterable[str], ep: int) -> dict[str, int]:
    """The number of experts that each of `ep` ranks has, by layer: the text before the number in their names."""
    totals: dict[str, int] = {}
    for of in map(expert_of, names):
        if of is not None:
            totals[of[0]] = max(totals.get(of[0], 0), of[1] + 1)
    return {prefix: total // ep for prefix, total in totals.items()}


def of_place(names: Iterable[str], held: Mapping[str, int], place: int) -> list[str]:
    """The names that the first rank's parameters have on the rank at `place`. All ranks have as many experts."""
    first = {prefix: place * number for prefix, number in held.items()}
    return [renumbered(name, first) for name in names]


def by_number(names: Iterable[str]) -> list[str]:
    """Names in order: those that belong to no expert, then experts by layer, in first-seen order, and by number."""
    names, layers = list(names), dict[str, int]()
    places = []
    for name in names:
        of = expert_of(name)
        places.append((-1, 0) if of is None else (layers.setdefault(of[0], len(layers)), of[1]))
    return [name for _, name in sorted(zip(places, names, strict=True), key=lambda pair: pair[0])]


class Module(NamedTuple):
    """The module's tensors by their names in the whole model, and its other entries.

    `placed` are weights that are not in the model file, and `shards` the families of files that they lie in.
    `copies` are tensors of which another stage's file has the first copy, by name and number, and `late` names of
    weights that are, or at ZeRO stage 0 may be, a later stage's. `dealt` are parameters that hold all experts of a
    layer of AutoEP.
    """

    tensors: Mapping[str, TensorRecord]
    objects: Mapping[str, object]
    placed: Sequence[Placed] = ()
    shards: Mapping[str, int] = {}
    copies: Mapping[tuple[str, int], TensorRecord] = {}
    late: frozenset[str] = frozenset()
    dealt: Mapping[str, Dealt] = {}


def with_experts(listing: Listing, model: ModelStates, dp: int, faults: list[Fault]) -> Module:
    """The module with the experts of `deepspeed.moe`, whose files name them by their numbers among all."""
    faults += _missing_experts(listing, model)
    faults += _missing_places(listing, model, dp) if listing.places else ()
    found: dict[str, TensorRecord] = {}
    for (_, expert), name in sorted(listing.experts.items()):
        for key, value in listing.know(name, read_entries).items():
            of = expert_of(key)
            if of is None or of[1] != expert or key in found or not isinstance(value, TensorRecord):
                expected = f"weights of expert {expert}, in no other file"
                raise fail(listing.path(name), "is not a file of this expert", expected, f"{key!r}")
            found[key] = value
    return Module({**model.module, **found}, model.objects)


def with_autoep(listing: Listing, model: ModelStates, faults: list[Fault]) -> Module:
    """The module with the experts of AutoEP. Empty tensors stand for them: no single file has all of a layer."""
    if not listing.partitioned_model:
        faults += _missing_experts(listing, model)
    layers = autoep_layers(model, faults)
    if faults:
        return Module({}, {})
    dealt, dtypes = dealt_parameters(listing, model, layers, faults)
    placements, shards = expert_weights(listing, dealt, dtypes)
    stand_ins = {name: new_tensor("", (0,), dtype) for name, dtype in dtypes.items()}
    placed = [Placed(one) for one in placements]
    return Module({**model.module, **stand_ins}, model.objects, placed, shards, dealt=dealt)


def _missing_experts(listing: Listing, model: ModelStates) -> Iterator[Fault]:
    """Expert files that the saving run must have written and the folder has not."""
    said = model.entries.get("num_experts")
    counts = said if isinstance(said, list | tuple) else [said]
    wanted = {
        (layer, expert) for layer, count in enumerate(counts) if isinstance(count, int) for expert in range(count)
    }
    absent, further = sorted(wanted - set(listing.experts)), sorted(set(listing.experts) - wanted)
    if absent:
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in absent[:8])
        what = f"files of experts are missing: {shown}{', ...' if len(absent) > 8 else ''}"
        found, mend = f"{len(wanted) - len(absent)}", "restore the files, or load another tag"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(wanted)} files", found, mend=mend)
    if further:
        what, found = "holds files of experts that the saving run had not", "layer {} expert {}".format(*further[0])
        mend = "move the files of the other save out of the folder"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(wanted)} files", found, mend=mend)


def _missing_places(listing: Listing, model: ModelStates, dp: int) -> Iterator[Fault]:
    """Optimizers of stage 0 that expert-parallel ranks have not saved, or of more ranks than can be."""
    count = 1 + max(listing.places)
    absent = sorted(set(range(count)) - set(listing.places))
    said = model.entries.get("num_experts")
    totals = [total for total in (said if isinstance(said, list | tuple) else [said]) if isinstance(total, int)]
    if absent or dp % count or any(total % count for total in totals):
        what, mend = "optimizers of expert-parallel ranks are missing", "restore the files, or load another tag"
        found = f"expp_rank_{', '.join(map(str, sorted(listing.places)))} of {dp} ranks and {totals} experts"
        expected = "one for each rank of a size that divides both"
        yield CheckpointDamaged.fault(listing.folder, what, expected, found, mend=mend)


def stage_copies(stages: Sequence[ModelStates], faults: list[Fault]) -> list[dict[str, int]]:
    """For each stage, the parameters that an earlier stage has too, with the number of this stage's copy."""
    seen: dict[str, tuple[int, Shape, str]] = {}
    copies: list[dict[str, int]] = []
    for stage in stages:
        own: dict[str, int] = {}
        twice: dict[str, list[str]] = {}
        for name, shape in stage.trainable.items():
            number, first, path = seen.get(name, (0, shape, stage.path))
            if name in seen:
                own[name] = number
            if name in seen and tied_key(name) is None:
                twice.setdefault(os.path.basename(path), []).append(name)
            elif shape != first:
                what = f"holds a copy of {name} of another shape than {os.path.basename(path)}"
                faults.append(damaged(stage.path, what, str(list(first)), str(list(shape))))
            seen[name] = (number + 1, first, path)
        for other, names in twice.items():
            more = f" and {len(names) - 2} others" if len(names) > 2 else ""
            what = f"holds {', '.join(names[:2])}{more}, which {other} holds too: the ranks are numbered otherwise, or "
            what += "files of two saves are mixed"
            expected = "mp_rank = stage * tp + tensor-parallel rank, and each layer in one stage"
            mend = "restore all files of one save; on a grid with other axes, save with PipeModelDataParallelTopology"
            faults.append(UnsupportedLayout.fault(stage.path, what, expected, "a layer in two", mend=mend))
        copies.append(own)
    return copies


def not_of_a_pipeline(listing: Listing, grid: Grid, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """Stages that save their weights themselves count layers as they like, and experts are in files of their own."""
    mend = "load it with the sizes it was saved with"
    if any(stage.module for stage in stages):
        what = "has stages of a pipeline that is no PipelineModule"
        yield UnsupportedLayout.fault(listing.folder, what, "files of layers", str(grid), mend=mend)
    if listing.experts:
        what = "has experts beside stages of a pipeline"
        yield UnsupportedLayout.fault(listing.folder, what, "one or the other", str(grid), mend=mend)


Layers = Mapping[int, Mapping[str, object]]
"""The entries of each layer's file."""


def read_layers(listing: Listing, rank: int) -> Layers:
    files = {layer: name for (layer, of), name in sorted(listing.layers.items()) if of == rank}
    return {layer: listing.read(name, read_entries) for layer, name in files.items()}


def with_shapes(listing: Listing, stage: ModelStates, layers: Layers, ties: Mapping[int, str] | None) -> ModelStates:
    """A stage with its parameters in the order of the flat buffers, for a model file that does not list them.

    `BF16_Optimizer` divides its masters at ZeRO stage 0 too, of which `_save_checkpoint` (runtime/engine.py, 0.19.8)
    saves no `param_shapes`. The optimizer files name what each rank has, in order (`_create_param_mapping`).
    """
    groups: list[dict[str, int]] = []
    for _, name in sorted(listing.optim.items()):
        for at, held in enumerate(listing.know(name, _slices)):
            groups += [{}] if at == len(groups) else []
            for parameter, numel in held.items():
                groups[at][parameter] = groups[at].get(parameter, 0) + numel
    shapes = tuple({name: _shape(stage, name, numel, layers, ties) for name, numel in of.items()} for of in groups)
    return replace(stage, param_shapes=shapes)


def _slices(path: str, root: str) -> list[dict[str, int]]:
    """How many elements of each parameter an optimizer file has, by flat buffer, in their order."""
    said, found = read_optim_states(path, root).entries.get("param_slice_mappings"), list[dict[str, int]]()
    for mapping in said if isinstance(said, list) else ():
        found.append({})
        for parameter, fragment in mapping.items() if isinstance(mapping, dict) else ():
            state = fragment.state if isinstance(fragment, ObjectRecord) else None
            numel = state.get("numel") if isinstance(state, dict) else None
            if not isinstance(parameter, str) or not isinstance(numel, int):
                raise fail(path, "entry 'param_slice_mappings' is malformed", "names and sizes", f"{parameter!r}")
            found[-1][parameter] = numel
    return found


def _shape(stage: ModelStates, name: str, numel: int, layers: Layers, ties: Mapping[int, str] | None) -> Shape:
    """The shape of a parameter with `numel` elements, from the file of its layer."""
    layer, key = layer_of(name), tied_key(name)
    entry = name.removeprefix(f"tied_modules.{key}." if layer is None else f"{layer}.")
    own = [layer] if layer is not None else [one for one, tie in (ties or {}).items() if tie == key]
    own = list(layers) if layer is None and ties is None else own
    held = (layers.get(one, {}).get(entry) for one in own)
    found = {value.shape for value in held if isinstance(value, TensorRecord) and value.numel == numel}
    if len(found) == 1:
        return found.pop()
    what, mend = f"no file tells the shape of {name}", "save it at ZeRO stage 1, or with a layer that has no forward_fn"
    fault = UnsupportedLayout.fault(stage.path, what, f"{numel} elements in the file of its layer", "none", mend=mend)
    raise error_of([fault], subject="reading a checkpoint")


def of_layers(
    listing: Listing, row: Row, layers: Layers, stages: Sequence[ModelStates], faults: list[Fault], *, optimizer: bool
) -> Module:
    """The entries of all layers' files.

    A copy has the number that its stage's master has. Where only a later stage's has a file, as the first one's spec
    has a forward_fn, it is a copy beside none, if there are masters. If there are not, it is taken for the first, and
    its name is told.
    """
    faults += _absent(listing, row, layers, stages)
    shapes = {name: shape for stage in stages for name, shape in stage.trainable.items()}
    ties = dict(row.ties) if row.ties is not None else _inferred(layers, shapes, stages, listing.folder, faults)
    named: dict[str, TensorRecord] = {}
    objects: dict[str, object] = {}
    copies: dict[tuple[str, int], TensorRecord] = {}
    seen: dict[str, set[int]] = {}
    silent = set(range(max(layers, default=0))) - set(layers) if row.ties is None else set()
    for layer, entries in layers.items():
        prefix = f"tied_modules.{ties[layer]}" if layer in ties else f"{layer}"
        taken, number = seen.setdefault(prefix, set()), 0
        if layer in ties:
            tied = {at for at, key in ties.items() if key == ties[layer]} | silent
            number = _copy_of_file(layer, ties[layer], tied, stages, taken)
        taken.add(number)
        for key, value in entries.items():
            name = f"{prefix}.{key}"
            if not isinstance(value, TensorRecord):
                objects[name] = value
            elif number:
                copies[name, number] = value
            else:
                named[name] = value
    late = {name: (name, number) for name, number in sorted(copies, reverse=True) if name not in named}
    late = {name: at for name, at in late.items() if not (optimizer and name in shapes)}
    named |= {name: copies.pop(at) for name, at in late.items()}
    firsts = {key: layer for layer, key in sorted(ties.items(), reverse=True)} if not shapes and len(stages) > 1 else {}
    unsure = {name for name in named if firsts.get(tied_key(name) or "", -1) not in {-1, *layers}}
    faults += _misshapen(listing, named, copies, shapes)
    placed = [
        Placed(whole(name, WEIGHT, one.shape, one.dtype, family=MODEL, buffer=copy_buffer(name, number)), None, number)
        for (name, number), one in copies.items()
        if one.contiguous
    ]
    late_names = frozenset({*late, *unsure}.difference(*(stage.buffer_names for stage in stages)))
    return Module(named, objects, placed, copies=copies, late=late_names)


def _copy_of_file(layer: int, key: str, tied: set[int], stages: Sequence[ModelStates], taken: set[int]) -> int:
    """Which copy of a tied module the file of a layer has: the number of its stage among those that have the module.

    A stage has the layers between those of the stages around it. Where several may have saved the file, it is the
    first of them that can have no other layer of the module, of those that are, or may be, `tied`; of a stage that has
    saved two, the second is a copy further.
    """
    names = [{*stage.trainable, *stage.frozen_shapes, *stage.buffer_names} for stage in stages]
    layers = [{at for at in map(layer_of, own) if at is not None} for own in names]
    holders = [stage for stage, own in enumerate(names) if any(tied_key(name) == key for name in own)]

    def may(stage: int, one: int) -> bool:
        before, behind = set().union(*layers[:stage]), set().union(*layers[stage + 1 :])
        return max(before, default=-1) < one < min(behind, default=one + 1)

    owners = [stage for stage in holders if may(stage, layer)]
    sole = [stage for stage in owners if sum(may(stage, one) for one in tied) == 1]
    found = holders.index((sole or owners)[0]) if owners else len(taken)
    return found if found not in taken else max(len(holders), *(number + 1 for number in taken))


def _inferred(
    layers: Layers, shapes: Mapping[str, Shape], stages: Sequence[ModelStates], folder: str, faults: list[Fault]
) -> dict[int, str]:
    """The key of each layer that is a tied module, by the names and shapes of its parameters: no file says it.

    Its layers are those whose own names are nowhere among the parameters and buffers of the stages.
    """
    known = {*shapes, *(name for stage in stages for name in stage.buffer_names)}
    owned = {layer for layer in map(layer_of, known) if layer is not None}
    wanted: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        key = tied_key(name)
        if key is not None:
            wanted.setdefault(key, {})[name.removeprefix(f"tied_modules.{key}.")] = shape
    found: dict[int, str] = {}
    for layer, entries in layers.items():
        held = {key: value.shape for key, value in entries.items() if isinstance(value, TensorRecord)}
        keys = [key for key, members in wanted.items() if all(held.get(name) == s for name, s in members.items())]
        if layer in owned or not keys:
            continue
        if len(keys) > 1:
            what = f"layer {layer} may be any of the tied modules {', '.join(map(repr, keys))}: their shapes are equal"
            mend = "load it in a run with import ds_reshard.auto, whose PipelineModule tells"
            faults.append(UnsupportedLayout.fault(folder, what, mend=mend))
        found[layer] = keys[0]
    return found


def _absent(listing: Listing, row: Row, layers: Layers, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """A fault that lists the layers without a file. A universal checkpoint has no such files: they are not copied."""
    names = [name for stage in stages for name, shape in stage.trainable.items() if prod(shape)]
    own = map(layer_of, (*names, *(name for stage in stages for name in stage.buffer_names)))
    wanted = {layer for layer in own if layer is not None} if not listing.universal else set()
    missing = sorted(wanted - set(layers))
    if missing:
        end = f"-model_{row.rank:02d}" if any("-model_" in name for name in listing.layers.values()) else ""
        shown = ", ".join(f"layer_{layer:02d}{end}" for layer in missing[:16]) + (", ..." if len(missing) > 16 else "")
        what, mend = f"files of layers are missing: {shown}", "restore the file, or load another tag"
        said = (f"{len(wanted)} files", f"{len(wanted) - len(missing)}")
        yield CheckpointDamaged.fault(listing.folder, what, *said, mend=mend)


def _misshapen(
    listing: Listing,
    named: Mapping[str, TensorRecord],
    copies: Mapping[tuple[str, int], TensorRecord],
    shapes: Mapping[str, Shape],
) -> Iterator[Fault]:
    of_files = {layer_of(name) for name in named} - {None}
    for name, shape in shapes.items():
        tensor, layer = named.get(name), layer_of(name)
        if tensor is None and layer in of_files:
            yield damaged(listing.folder, f"the file of layer {layer} lacks {name}", str(list(shape)), "nothing")
        elif tensor is not None and tensor.shape != tuple(shape):
            what = f"holds {name} of another shape"
            yield damaged(tensor.storage.path, what, str(list(shape)), str(list(tensor.shape)))
    for (name, _), tensor in copies.items():
        first = named.get(name)
        if first is not None and tensor.shape != first.shape:
            what = f"holds a copy of {name} of another shape"
            yield damaged(tensor.storage.path, what, str(list(first.shape)), str(list(tensor.shape)))


def layer_files(zero: ZeroCheckpoint) -> dict[str, dict[str, TensorKey]]:
    """The files of all layers of the first row, with the weights that they have by their names there.

    Where no file has the first stage's copy of a weight, a later one's stands for it; for a second name the first. A
    layer without any has a file, too, which DeepSpeed looks for.
    """
    files: dict[str, dict[str, TensorKey]] = {name: {} for (_, rank), name in zero.listing.layers.items() if not rank}
    module = zero.rows[0].module if zero.rows else zero.model.module
    copies = {at: record for at, record in zero.copies[0].items() if record.contiguous}
    records = {(name, 0): record for name, record in module.items()} | copies
    held = {at: record for at, record in records.items() if record.storage.path}
    lowest = dict(sorted(held, reverse=True))
    for (name, number), record in held.items():
        tie, layer = tied_key(name), layer_of(name)
        entry = name.removeprefix(f"{layer}." if tie is None else f"tied_modules.{tie}.")
        one = TensorKey(zero.model.shared.get(name, name), WEIGHT, number - lowest[name])
        files.setdefault(os.path.basename(record.storage.path), {})[entry] = one
    return files


def with_stand_ins(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with a placeholder, as ZeRO stage 3 saves them, for each weight that no file holds."""
    lost = {name: new_tensor("", (0,), dtype) for name, dtype in _unsaved(zero).items()}
    if not lost:
        return zero
    module = {**zero.model.module, **lost}
    entries = {**zero.model.entries, "module": {**module, **zero.model.objects}}
    return replace(zero, model=replace(zero.model, module=module, entries=entries))


def _unsaved(zero: ZeroCheckpoint) -> dict[str, ElementType]:
    """The parameters whose weights are in no file, with the type of the others.

    Those of a pipeline's tied modules whose specs all have a forward_fn; and of a universal checkpoint all that was not
    in the model file, as ds_to_universal copies no files of layers and experts. Where there are none others, with the
    type that the saved JSON trains in.
    """
    trained, module = zero.model.trainable, zero.model.module
    types = {module[name].dtype for name in trained if name in module}
    lost = [name for name in trained if name not in module]
    if not types and zero.universal is not None:
        sixteen = {"bf16": ElementType.BFLOAT16, "bfloat16": ElementType.BFLOAT16, "fp16": ElementType.FLOAT16}
        types = {dtype for key, dtype in sixteen.items() if section(zero.model.config, key).get("enabled") is True}
        types = types or {ElementType.FLOAT32}
    return dict.fromkeys(lost, types.pop()) if len(types) == 1 else {}


def copy_buffer(name: str, number: int) -> str:
    """The name of the buffer that holds a tied layer's copy of a weight."""
    return f"copy {number} of {name}"
