"""The files of a PipelineModule, all stages of one row of the grid together as one checkpoint.

Each stage has model and optimizer files of its own, with its parameters alone, and each layer of a module a file. Names
count layers from the first of all, `3.weight`, whatever the stages (`PipelineModule._build`, `ckpt_layer_path`,
runtime/pipe/module.py, 0.19.8); a tied module's are `tied_modules.KEY.weight`, in each stage that has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged, error_of, fail, raise_faults
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    Row,
    ZeroCheckpoint,
    facts_of,
    layout_of,
    read_column,
    weights,
)
from ds_reshard.formats.zero.flat import whole
from ds_reshard.formats.zero.model_states import ModelStates, read_entries, read_model_states, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, read_optim_states
from ds_reshard.formats.zero.shards import compare_heads
from ds_reshard.model.content import SCHEDULER, WEIGHT, joined, regrouped
from ds_reshard.model.facts import OptimizerFacts, canonical
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import ElementType, ObjectRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Shape

_LAYER = re.compile(r"([0-9]+)\.(.*)", re.DOTALL)
_TIED = re.compile(r"tied_modules\.([^.]*)\.(.*)", re.DOTALL)
_RESTORE = "restore the file, or load another tag"


def layer_of(name: str) -> int | None:
    """The layer whose parameter or buffer has this name; None where it is a tied module's, or none's."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def tied_key(name: str) -> str | None:
    match = _TIED.fullmatch(name)
    return match[1] if match else None


def open_pipeline(listing: Listing, grid: Grid, row: Row, first: ModelStates, *, optimizer: bool) -> ZeroCheckpoint:
    """Read the heads of all stages of a row; raises every structural fault that they show."""
    subject = f"checkpoint {listing.folder}"
    numbers = [grid.column(stage, row.rank) for stage in range(grid.pp)]
    stages = [_stage(listing, number, first) for number in numbers]
    read = _read_layers(listing, row)
    if optimizer and first.param_shapes is None:
        stages = [
            _with_shapes(listing, number, stage, read, row) for number, stage in zip(numbers, stages, strict=True)
        ]
    shapes = [stage.param_shapes or () for stage in stages]
    copies, faults = _copies(stages)
    faults += [*_of_another_kind(listing, grid, stages), *compare_heads(stages, (), listing.folder, states=False)]
    faults += [*_absent(listing, row, read, stages)]
    raise_faults(faults, subject=subject)
    named, objects, beside, late = _layers(listing, row, read, stages, optimizer=optimizer)
    groups = [len(one) for one in shapes]
    columns: list[GridColumn] = []
    optims: list[OptimStates] = []
    facts: OptimizerFacts | None = None
    if optimizer:
        for stage, (number, model) in enumerate(zip(numbers, stages, strict=True)):
            column = read_column(listing.column(number), model)
            columns.append(replace(column, family=f"{OPTIM} of stage {stage}", copies=copies[stage]))
        optims = [column.first for column in columns]
        groups = [len(optim.members) for optim in optims]
        raise_faults(compare_heads(stages, optims, listing.folder, states=False), subject=subject)
    together = _together(optims) if optims else None
    module: dict[str, object] = {**named, **objects}
    model = replace(
        first,
        entries={**first.entries, "module": module, SCHEDULER: _schedule(stages, groups)},
        module=named,
        objects=objects,
        buffer_names=frozenset(name for stage in stages for name in stage.buffer_names),
        param_shapes=tuple(group for one in shapes for group in one) if stages[0].param_shapes is not None else None,
        frozen_shapes={name: shape for stage in stages for name, shape in stage.frozen_shapes.items()},
        shared={name: owner for stage in stages for name, owner in stage.shared.items()},
    )
    if together is not None:
        facts = owned(facts_of(model.param_shapes or (), together), columns)
    placements: list[Placement] = [*weights(model, listing), *_beside(beside)]
    for column in columns:
        placements += column.placements()
    shards = {MODEL: 1, **{column.family: column.dp for column in columns}}
    return ZeroCheckpoint(
        listing=listing,
        model=model,
        optim=together,
        layout=layout_of(listing, placements, shards),
        facts=facts,
        grid=grid,
        columns=tuple(columns),
        stages=tuple(stages),
        copies=({_buffer(key): tensor for key, tensor in beside.items()},),
        late=late,
        # a stage that has several files of a tied module has more copies of it than there are stages
        copy_stride=2 + max([len(stages) - 1, *(placement.key.copy for placement in placements)]),
    )


def _stage(listing: Listing, number: int, first: ModelStates) -> ModelStates:
    name = listing.column(number).model[0]
    return first if listing.path(name) == first.path else listing.read(name, read_model_states)


def _of_another_kind(listing: Listing, grid: Grid, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """Stages that save their weights themselves count layers as they like, and experts are in files of their own."""
    if any(stage.module for stage in stages):
        what, mend = "has stages of a pipeline that is no PipelineModule", "load it with the sizes it was saved with"
        yield UnsupportedLayout.fault(listing.folder, what, "files of layers", str(grid), mend=mend)
    if listing.experts:
        what, mend = "has experts beside stages of a pipeline", "load it with the sizes it was saved with"
        yield UnsupportedLayout.fault(listing.folder, what, "one or the other", str(grid), mend=mend)


def _copies(stages: Sequence[ModelStates]) -> tuple[list[dict[str, int]], list[Fault]]:
    """For each stage, the parameters of which an earlier one has a copy, with the number of its own."""
    seen: dict[str, tuple[int, Shape, str]] = {}
    copies: list[dict[str, int]] = []
    faults: list[Fault] = []
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
    return copies, faults


Layers = Mapping[int, Mapping[str, object]]
"""The entries of each layer's file."""


def _read_layers(listing: Listing, row: Row) -> Layers:
    files = {layer: name for (layer, rank), name in sorted(listing.layers.items()) if rank == row.rank}
    return {layer: listing.read(name, read_entries) for layer, name in files.items()}


def _with_shapes(listing: Listing, number: int, stage: ModelStates, read: Layers, row: Row) -> ModelStates:
    """A stage with its parameters in the order of the flat buffers, where its model file does not say them.

    `BF16_Optimizer` divides its masters at ZeRO stage 0 too, of which `_save_checkpoint` (runtime/engine.py, 0.19.8)
    saves no `param_shapes`. The optimizer files name what each rank has, in order (`_create_param_mapping`).
    """
    groups: list[dict[str, int]] = []
    for _, name in sorted(listing.column(number).optim.items()):
        for at, held in enumerate(listing.know(name, _slices)):
            groups += [{}] if at == len(groups) else []
            for parameter, numel in held.items():
                groups[at][parameter] = groups[at].get(parameter, 0) + numel
    shapes = tuple({name: _shape(stage, name, numel, read, row) for name, numel in group.items()} for group in groups)
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


def _shape(stage: ModelStates, name: str, numel: int, read: Layers, row: Row) -> Shape:
    """The shape of a parameter of so many elements, by the file of its layer."""
    layer, key = layer_of(name), tied_key(name)
    entry = name.removeprefix(f"tied_modules.{key}." if layer is None else f"{layer}.")
    layers = [layer] if layer is not None else [one for one, tie in (row.ties or {}).items() if tie == key]
    layers = list(read) if layer is None and row.ties is None else layers
    held = (read.get(one, {}).get(entry) for one in layers)
    found = {value.shape for value in held if isinstance(value, TensorRecord) and value.numel == numel}
    if len(found) == 1:
        return found.pop()
    what, mend = f"no file tells the shape of {name}", "save it at ZeRO stage 1, or with a layer that has no forward_fn"
    fault = UnsupportedLayout.fault(stage.path, what, f"{numel} elements in the file of its layer", "none", mend=mend)
    raise error_of([fault], subject="reading a checkpoint")


Module = tuple[dict[str, TensorRecord], dict[str, object], dict[TensorKey, TensorRecord], frozenset[str]]


def _layers(listing: Listing, row: Row, read: Layers, stages: Sequence[ModelStates], *, optimizer: bool) -> Module:
    """The entries of all layers' files by their names in the model: tensors, other values, and copies of tensors.

    A copy has the number that its stage's master has. Where only a later stage's has a file, as the first one's spec
    has a forward_fn, it is a copy beside none, if there are masters. If there are not, it is taken for the first, and
    its name is told.
    """
    shapes = {name: shape for stage in stages for name, shape in stage.trainable.items()}
    ties = dict(row.ties) if row.ties is not None else _inferred(read, shapes, stages, listing.folder)
    named: dict[str, TensorRecord] = {}
    objects: dict[str, object] = {}
    beside: dict[TensorKey, TensorRecord] = {}
    seen: dict[str, set[int]] = {}
    silent = set(range(max(read, default=0))) - set(read) if row.ties is None else set()
    for layer, entries in read.items():
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
                beside[TensorKey(name, "weight", number)] = value
            else:
                named[name] = value
    late = {at.name: at for at in sorted(beside, reverse=True) if at.name not in named}
    late = {name: at for name, at in late.items() if not (optimizer and name in shapes)}
    named |= {name: beside.pop(at) for name, at in late.items()}
    firsts = {key: layer for layer, key in sorted(ties.items(), reverse=True)} if not shapes and len(stages) > 1 else {}
    unsure = {name for name in named if firsts.get(tied_key(name) or "", -1) not in {-1, *read}}
    faults = list(_misshapen(listing, named, beside, shapes))
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    buffers = {name for stage in stages for name in stage.buffer_names}
    return named, objects, beside, frozenset({*late, *unsure} - buffers)


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


def _inferred(read: Layers, shapes: Mapping[str, Shape], stages: Sequence[ModelStates], folder: str) -> dict[int, str]:
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
    for layer, entries in read.items():
        held = {key: value.shape for key, value in entries.items() if isinstance(value, TensorRecord)}
        keys = [key for key, members in wanted.items() if all(held.get(name) == s for name, s in members.items())]
        if layer in owned or not keys:
            continue
        if len(keys) > 1:
            what = f"layer {layer} may be any of the tied modules {', '.join(map(repr, keys))}: their shapes are equal"
            mend = "load it in a run with import ds_reshard.auto, whose PipelineModule tells"
            raise_faults([UnsupportedLayout.fault(folder, what, mend=mend)], subject=f"checkpoint {folder}")
        found[layer] = keys[0]
    return found


def _absent(listing: Listing, row: Row, read: Layers, stages: Sequence[ModelStates]) -> Iterator[Fault]:
    """Layers with parameters or buffers that have no file; of a universal checkpoint none has, as none are copied."""
    names = [name for stage in stages for name, shape in stage.trainable.items() if prod(shape)]
    layers = map(layer_of, (*names, *(name for stage in stages for name in stage.buffer_names)))
    wanted = {layer for layer in layers if layer is not None} if not listing.universal else set()
    missing = sorted(wanted - set(read))
    if missing:
        end = f"-model_{row.rank:02d}" if any("-model_" in name for name in listing.layers.values()) else ""
        shown = ", ".join(f"layer_{layer:02d}{end}" for layer in missing[:16]) + (", ..." if len(missing) > 16 else "")
        what, mend = f"files of layers are missing: {shown}", _RESTORE
        said = (f"{len(wanted)} files", f"{len(wanted) - len(missing)}")
        yield CheckpointDamaged.fault(listing.folder, what, *said, mend=mend)


def _misshapen(
    listing: Listing,
    named: Mapping[str, TensorRecord],
    beside: Mapping[TensorKey, TensorRecord],
    shapes: Mapping[str, Shape],
) -> Iterator[Fault]:
    of_files = {layer_of(name) for name in named} - {None}
    for name, shape in shapes.items():
        tensor, layer = named.get(name), layer_of(name)
        if tensor is None and layer in of_files:
            yield damaged(listing.folder, f"the file of layer {layer} lacks {name}", str(list(shape)), "nothing")
        elif tensor is not None and tensor.shape != tuple(shape):
            yield damaged(
                tensor.storage.path, f"holds {name} of another shape", str(list(shape)), str(list(tensor.shape))
            )
    for key, tensor in beside.items():
        first = named.get(key.name)
        if first is not None and tensor.shape != first.shape:
            what = f"holds a copy of {key.name} of another shape"
            yield damaged(tensor.storage.path, what, str(list(first.shape)), str(list(tensor.shape)))


def _together(optims: Sequence[OptimStates]) -> OptimStates:
    """What the first files of all stages say, as one file would: buffers and param groups one stage after another."""
    groups: list[Mapping[str, object]] = []
    members: list[tuple[int, ...]] = []
    at = 0
    for optim in optims:
        groups += optim.groups or ()
        members += (tuple(number + at for number in of_group) for of_group in optim.members)
        at += len(optim.partitions)
    return replace(
        optims[0],
        partitions=tuple(partition for optim in optims for partition in optim.partitions),
        counts=tuple(count for optim in optims for count in optim.counts),
        groups=tuple(groups) if all(optim.groups is not None for optim in optims) else None,
        members=tuple(members),
    )


def owned(facts: OptimizerFacts, columns: Sequence[GridColumn]) -> OptimizerFacts:
    """The groups with each parameter once: of one that several stages have a copy of, in the first stage's group."""
    owners = [column for column in columns for _ in column.first.members]
    groups = tuple(
        replace(group, members=tuple(name for name in group.members if name not in column.copies))
        for group, column in zip(facts.groups, owners, strict=True)
    )
    return replace(facts, groups=groups)


def _schedule(stages: Sequence[ModelStates], groups: Sequence[int]) -> object:
    """The scheduler with the values of all stages' param groups, one stage after another."""
    states = [stage.entries.get(SCHEDULER) for stage in stages]
    dicts = [state for state in states if isinstance(state, dict)]
    if len(dicts) < len(states):
        return states[0]
    made, differing = joined(dicts, groups)
    faults = [
        damaged(stages[0].path, f"another stage's scheduler has another {key}", "one", "two") for key in differing
    ]
    raise_faults(faults, subject="reading a checkpoint")
    return made


def as_one_stage(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with param groups as one stage has them: those of the same hyper-parameters are one.

    Of several such in one stage the first are one, the second, and so on. Where another stage has another number of
    them, or the scheduler other values for them, no file tells which are one, and all stay as they are.
    """
    if len(zero.stages) < 2 or zero.facts is None or zero.universal is not None:
        return zero
    alike: dict[tuple[str, int], list[int]] = {}
    counts: dict[str, set[int]] = {}
    number = 0
    for column in (one for one in zero.columns if not one.number):
        texts = [canonical(dict(group)) for group in column.first.groups or ()]
        for at, text in enumerate(texts):
            alike.setdefault((text, texts[:at].count(text)), []).append(number)
            counts.setdefault(text, set()).add(texts.count(text))
            number += 1
    groups, entries = zero.facts.groups, dict(zero.model.entries)
    one = [members[0] for members in alike.values()]
    again = [members[-1] for members in alike.values()]
    if number == len(groups) and not any(len(of) > 1 and max(of) > 1 for of in counts.values()):
        state = entries.get(SCHEDULER)
        made, unknown = regrouped(state, one, number) if isinstance(state, dict) else (state, [])
        other = regrouped(state, again, number)[0] if isinstance(state, dict) else state
        if not unknown and canonical(made) == canonical(other):
            entries[SCHEDULER] = made
            groups = tuple(
                replace(groups[of[0]], members=tuple(name for at in of for name in groups[at].members))
                for of in alike.values()
            )
    model = replace(zero.model, entries=entries)
    return replace(zero, model=model, facts=replace(zero.facts, groups=groups))


def with_stand_ins(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with weights that are in no file in the module as placeholders, as those of ZeRO stage 3 are."""
    lost = {name: new_tensor("", (0,), dtype) for name, dtype in _unsaved(zero).items()}
    if not lost:
        return zero
    module = {**zero.model.module, **lost}
    entries = {**zero.model.entries, "module": {**module, **zero.model.objects}}
    return replace(zero, model=replace(zero.model, module=module, entries=entries))


def layer_files(zero: ZeroCheckpoint) -> dict[str, dict[str, TensorKey]]:
    """The files of all layers of the first row, with the weights that they have by their names there.

    Where no file has the first stage's copy of a weight, a later one's stands for it; for a second name the first. A
    layer without any has a file, too, which DeepSpeed looks for.
    """
    files: dict[str, dict[str, TensorKey]] = {name: {} for (_, rank), name in zero.listing.layers.items() if not rank}
    module = zero.rows[0].module if zero.rows else zero.model.module
    records = {TensorKey(name, WEIGHT): record for name, record in module.items()}
    copies = {key: _buffer(key) for key in zero.layout.placements if key.copy and key.kind == WEIGHT}
    beside = {key: zero.copies[0][buffer] for key, buffer in copies.items() if buffer in zero.copies[0]}
    held = {key: record for key, record in (records | beside).items() if record.storage.path}
    lowest = {key.name: key.copy for key in sorted(held, reverse=True)}
    for key, record in held.items():
        tie, layer = tied_key(key.name), layer_of(key.name)
        entry = key.name.removeprefix(f"{layer}." if tie is None else f"tied_modules.{tie}.")
        one = key._replace(name=zero.model.shared.get(key.name, key.name), copy=key.copy - lowest[key.name])
        files.setdefault(os.path.basename(record.storage.path), {})[entry] = one
    return files


def ties_first(names: Iterable[str]) -> list[str]:
    """The names as `PipelineModule.named_parameters` has them: it makes its dict of tied modules before any layer."""
    return sorted(names, key=lambda name: tied_key(name) is None)


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


def _buffer(key: TensorKey) -> str:
    return f"copy {key.copy} of {key.name}"


def _beside(copies: Mapping[TensorKey, TensorRecord]) -> Iterator[Placement]:
    for key, tensor in copies.items():
        if tensor.contiguous:
            placed = whole(key.name, key.kind, tensor.shape, tensor.dtype, family=MODEL, buffer=_buffer(key))
            yield placed._replace(key=key)
