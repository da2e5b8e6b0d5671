"""A ZeRO or universal checkpoint as content that any format can write, and what a content lacks for DeepSpeed.

The entries of the model file are those of `_common_checkpoint_state` (deepspeed/runtime/engine.py, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import GridColumn, ZeroCheckpoint
from ds_reshard.formats.zero.flat import undo_round_robin
from ds_reshard.formats.zero.model_states import LAGGING, QUANTIZED, ModelStates, section
from ds_reshard.formats.zero.modules import sort_by_expert
from ds_reshard.formats.zero.optim_states import read_optim_states
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.content import MASTER, WEIGHT, Content, TensorSource, flatten, schedule_of
from ds_reshard.model.facts import ScalarTensor, canonical, exact_number
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor
from ds_reshard.model.region import Shape

# Entries that follow from the layout, and the saved configuration, which the new run's replaces.
UNSET = ("optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
LAYOUT_ENTRIES = frozenset(
    {*UNSET, "module", "buffer_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"}
    | {"ds_config", "ds_version", "universal_checkpoint_info"}
)


def content_of(checkpoint: ZeroCheckpoint, *, weights_alone: bool = False, same_format: bool = False) -> Content:
    """Return the content of a checkpoint; its `faults` say what its optimizer lacks.

    `weights_alone` leaves the optimizer out, unless only its files hold the weights. `same_format` is for rewriting
    DeepSpeed files, which may keep weights that are not row-major. Raises UnsupportedLayout for unreadable weights.
    """
    model, facts, layout = checkpoint.model, checkpoint.facts, checkpoint.layout
    raise_faults(quantized_faults(model) if not same_format else (), subject=f"converting {checkpoint.listing.folder}")
    optimizer_faults = () if facts is None and weights_alone else tuple(unwritable_optimizer_faults(checkpoint))
    tensors: dict[TensorKey, TensorSource] = {}
    unsaved_names = _unsaved_entries(checkpoint)
    first_by_name = {name: first for name, first in first_names(model).items() if name not in unsaved_names}
    for name, tensor in whole_tensors(model).items():
        if name in unsaved_names:
            continue
        key, master = TensorKey(name=name, kind=WEIGHT), TensorKey(name=name, kind=MASTER)
        tensors[key] = TensorSource(shape=tensor.shape, dtype=tensor.dtype, origin=key if key in layout else master)
    faults = map(strided_fault, sorted(set(first_by_name.values()) - {key.name for key in tensors}))
    raise_faults(list(faults) if not same_format else (), subject=f"converting {checkpoint.listing.folder}")
    order = group_order(checkpoint) if facts is not None else []
    for group in order if not model.masters_lag else ():  # lagging masters do not fit the weights
        for name in group:
            for kind in layout.kinds(name):
                key = TensorKey(name=name, kind=kind)
                if kind != WEIGHT:
                    tensors[key] = TensorSource(shape=layout[key].shape, dtype=layout[key].dtype, origin=key)
    entries, batch = model.entries, model.config.get("train_batch_size")
    other_entries = {name: value for name, value in entries.items() if name not in LAYOUT_ENTRIES and value is not None}
    buffers = {name: model.module[name] for name in sorted(model.buffer_names & model.module.keys())}
    return Content(
        folder=checkpoint.listing.folder,
        ranks=checkpoint.dp,
        tensors=tensors,
        facts=facts
        and replace(
            facts, groups=tuple(replace(g, members=tuple(names)) for g, names in zip(facts.groups, order, strict=True))
        ),
        tied={name: first for name, first in first_by_name.items() if name != first},
        buffers=model.buffer_names,
        records=buffers,
        objects=dict(flatten(other_entries)),
        schedule=schedule_of(entries.get("lr_scheduler"), len(facts.groups)) if facts is not None else None,
        batch_size=batch if type(batch) is int else None,
        faults=optimizer_faults,
        notes=(
            *(f"left out: the module's entry {name}, which is no tensor" for name in sorted(model.objects)),
            *(
                f"left out: {name}: ZeRO stage 3 saved no value under this name (it is another parameter's, or empty)"
                for name in unsaved_names
            ),
        ),
        native_source=checkpoint,
    )


def strided_fault(name: str) -> Fault:
    """Return the fault that a weight cannot be cut, or written to another file, as it is not row-major."""
    mend = "load it in a run, and save contiguous tensors there"
    return UnsupportedLayout.fault(name, "does not lie row-major in the file", mend=mend)


def _unsaved_entries(checkpoint: ZeroCheckpoint) -> list[str]:
    """Return stage-3 module entries of tensors in no file: neither parameters nor listed second names.

    AutoEP gives each router a second name (`mlp.gate.gate.weight`), which `shared_params` does not have (0.19.8).
    """
    model = checkpoint.model
    listed = {*model.trainable, *model.frozen_shapes, *model.buffer_names, *model.shared}
    module = model.module.items() if checkpoint.listing.partitioned_model else ()
    return sorted(name for name, tensor in module if not tensor.numel and name not in listed)


def optimizer_faults(content: Content) -> Iterator[Fault]:
    """Yield a fault for each reason why the optimizer of a content cannot be one of DeepSpeed's.

    DeepSpeed keeps fp32 masters and states of a weight's shape, steps a param group together, and trains every
    parameter of one. It would make missing masters from the weights, and so train another model.
    """
    if content.facts is None:
        return
    groups, trained, weights = content.facts.groups, content.trained, content.weights
    scalars = content.facts.scalars
    if not groups:
        yield _fault(content.folder, "has no param groups", "save the whole state dict of the optimizer")
    for number, group in enumerate(groups):
        for name, value in (group.hyperparameters or {}).items():
            if isinstance(value, ScalarTensor) and exact_number(value) is None:
                what = f"is a {value.dtype.label} tensor, which is not a Python number"
                yield _fault(f"param group {number}: {name}", what, "save it as a number")
    members = {name for group in groups for name in group.members}
    for where in content.nested_states:
        what = "is an optimizer state inside a dict or a list, which DeepSpeed cannot hold"
        yield _fault(where, what, "resume it with the optimizer that saved it, or --to dcp")
    for name in sorted(members - trained.keys() - scalars.keys()):
        what = "is in a param group, and has no state: no file says whether the new run trains it"
        mend = "give the optimizer only the trainable parameters, step once, and save"
        if not (trained or scalars):
            mend = "--to safetensors or torch, for the weights: the optimizer has no states"
        yield _fault(name, what, mend)
    for name in sorted({*trained, *scalars} - members) if groups else ():
        yield _fault(name, "has states, and is in no param group", "save model and optimizer together")
    for name in sorted({*content.extra_tensors, *content.buffers} - content.records.keys()):
        what = "is a buffer, or a tensor outside the model, that is saved in several pieces"
        yield _fault(name, what, "save it whole: not as a DTensor that is sharded")
    yield from _state_faults(content)
    lacking = [name for name in {**trained, **scalars} if name in weights and MASTER not in trained.get(name, ())]
    if lacking:
        yield UnsupportedLayout.fault(
            lacking[0],
            f"and {len(lacking) - 1} other parameters were trained without fp32 masters",
            f"fp32 masters, or {ElementType.FLOAT32.label} weights",
            weights[lacking[0]].dtype.label,
            mend="--to safetensors or torch, for the weights",
        )
    for group in groups:
        first = group.members[0] if group.members else ""
        for name in group.members[1:]:
            if canonical(dict(scalars.get(name, {}))) != canonical(dict(scalars.get(first, {}))):
                yield UnsupportedLayout.fault(
                    name,
                    "has another step count than a parameter with the same hyper-parameters; DeepSpeed puts both in "
                    "one param group, which has one step",
                    f"the counters of {first}",
                    "others",
                    mend="resume it with the framework that saved it",
                )


def _state_faults(content: Content) -> Iterator[Fault]:
    """Yield a fault for each state that is not an fp32 tensor of its weight's shape."""
    weights = content.weights
    for name, states in content.trained.items():
        for kind, tensor in states.items():
            if name not in weights or tensor.shape != weights[name].shape:
                what = "has another shape than its weight"
                mend = "save model and optimizer together; ZeRO cannot hold other shapes"
                if name not in weights:
                    what = "is a state of a parameter whose weight was not saved"
                    mend = "save it by get_state_dict of torch, beside the whole model's weights, under the same names"
                yield _fault(f"{name}[{kind}]", what, mend)
            elif tensor.dtype is not ElementType.FLOAT32:
                mend = "train on fp32 parameters (MixedPrecisionPolicy(param_dtype=...)), or load it "
                mend += "through ds_reshard.dcp.Reader"
                what = f"is {tensor.dtype.label}, and DeepSpeed keeps fp32 masters and states"
                yield _fault(f"{name}[{kind}]", what, mend)


def _fault(where: str, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=mend)


def first_names(model: ModelStates) -> dict[str, str]:
    """Return the first name of each of the module's tensors: tied tensors are saved as one view of one storage."""
    first_by_place: dict[tuple[object, ...], str] = {}
    names = {}
    for name, tensor in model.module.items():
        location = (tensor.storage.path, tensor.storage.key, tensor.element_offset, tensor.shape, tensor.stride)
        first = first_by_place.setdefault(location, name) if tensor.numel else name
        owner = model.shared.get(name, first)
        names[name] = owner if owner in model.module else first
    return names


def whole_tensors(model: ModelStates) -> dict[str, TensorRecord]:
    """Return every row-major tensor of a whole module under its first name, in a separate storage."""
    shapes = {**model.trainable, **model.frozen_shapes}
    tensors = {}
    for name, first in first_names(model).items():
        tensor = model.module[name]
        kept_in_pieces = name in shapes and not tensor.numel  # or the parameter is empty
        if name == first and (tensor.contiguous or kept_in_pieces):
            shape = shapes[name] if kept_in_pieces else tensor.shape
            tensors[name] = new_tensor(f"module/{name}", shape, tensor.dtype)
    return tensors


def group_order(checkpoint: ZeroCheckpoint) -> list[dict[str, Shape]]:
    """Return the trainable parameters of each param group in the order in which the optimizer was given them.

    With `round_robin_gradients` the flat buffers hold them in another order (`_round_robin_reorder`,
    deepspeed/runtime/zero/stage_1_and_2.py), which is undone here.
    """
    assert checkpoint.facts is not None
    shapes = checkpoint.model.trainable
    order = [list(group.members) for group in checkpoint.facts.groups]
    if is_round_robin(checkpoint):
        order = [undo_round_robin(members, checkpoint.dp) for members in order]
    return [{name: shapes[name] for name in members} for members in order]


def is_round_robin(checkpoint: ZeroCheckpoint) -> bool:
    """True if flat buffers are in the order of `round_robin_gradients`, which only stages 1 and 2 know.

    The JSON is not saved if DeepSpeed was given its path. Then the optimizer files tell: they list each rank's
    parameters in the order of its param groups (`_create_param_mapping`, runtime/zero/stage_1_and_2.py, 0.19.8).
    """
    if checkpoint.kind != "zero" or checkpoint.dp == 1 or not checkpoint.columns:  # a content is in order
        return False
    if isinstance(checkpoint.model.entries.get("ds_config"), dict):
        return section(checkpoint.model.config, "zero_optimization").get("round_robin_gradients") is True
    return any(_files_list_other_order(checkpoint, column) for column in checkpoint.columns)


def _files_list_other_order(checkpoint: ZeroCheckpoint, column: GridColumn) -> bool:
    """True if the second parameter of a flat buffer is not its param group's second: round-robin order shows there."""
    shapes = {buffer.number: buffer.shapes for buffer in column.buffers}
    listed: dict[int, list[str]] = {number: [] for number in shapes}
    for file in column.files:
        if all(len(names) >= min(2, len(shapes[number])) for number, names in listed.items()):
            break
        mappings = checkpoint.listing.read(file, read_optim_states).entries.get("param_slice_mappings")
        for number, names in listed.items():
            mapping = mappings[number] if isinstance(mappings, list) and number < len(mappings) else {}
            names_of_rank = mapping if isinstance(mapping, dict) else {}
            names += (name for name in map(str, names_of_rank) if name in shapes[number] and name not in names)
    return any(names[:2] != list(shapes[number])[: len(names[:2])] for number, names in listed.items())


def quantized_faults(model: ModelStates) -> Iterator[Fault]:
    mend = "save with exclude_frozen_parameters=True"
    return (UnsupportedLayout.fault(name, QUANTIZED, mend=mend) for name in sorted(model.quantized))


def unnamed_optimizer_fault(folder: str, stage: int) -> Fault:
    """Return the fault that a folder without an optimizer that names parameters cannot become a run's files."""
    return UnsupportedLayout.fault(
        folder,
        "holds an optimizer that names no parameter (ZeRO stage 0), or none",
        "a checkpoint of stage 1 to 3, or a universal one",
        f"stage {stage}",
        mend="--to safetensors for the weights; or load it in a run with import ds_reshard.auto, and save there",
    )


def unwritable_optimizer_faults(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """Yield every reason why the optimizer of a checkpoint cannot go to another layout or format."""
    folder = checkpoint.listing.folder
    if checkpoint.facts is None:
        yield unnamed_optimizer_fault(folder, checkpoint.stage)
        return
    if any(group.hyperparameters is None for group in checkpoint.facts.groups):
        yield UnsupportedLayout.fault(
            folder,
            "holds no param groups (elastic_checkpoint)",
            "learning rates and hyper-parameters, which DeepSpeed reads from a file of this kind",
            "none",
            mend="load it in a run with import ds_reshard.auto, and save there",
        )
    if checkpoint.universal is not None:
        yield from _lost_state_faults(checkpoint.universal)
    if checkpoint.model.masters_lag:
        yield UnsupportedLayout.fault(folder, LAGGING, mend="--to safetensors or torch, for the weights")
    has_json = isinstance(checkpoint.model.entries.get("ds_config"), dict)
    partitions = checkpoint.optim.partitions if checkpoint.optim is not None else ()
    if checkpoint.kind == "zero" and not has_json and any(any(partition.alignment or ()) for partition in partitions):
        yield UnsupportedLayout.fault(
            folder,
            "uses parameter_alignment, but its DeepSpeed JSON was not saved (DeepSpeed was given a path): "
            "it is unknown whether round_robin_gradients was on",
            mend="load it in a run with import ds_reshard.auto, and save there",
        )
    if checkpoint.has_grid_files:
        yield from _order_faults(checkpoint)
    for number, partition in enumerate(partitions):
        for name, why in partition.unreshardable.items():
            yield UnsupportedLayout.fault(
                f"state {name!r} of partition {number}",
                f"is neither one value nor one per element ({why}): no other layout can hold it",
                mend="resume with the layout that was saved",
            )


def _order_faults(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """Yield faults if a grid's flat buffers are not in the whole model's order: DeepSpeed fills them by position."""
    folder, mend = checkpoint.listing.folder, "load it in a run with import ds_reshard.auto, and save there"
    if is_round_robin(checkpoint):
        what, expected = "has round_robin_gradients on a grid", "parameters in the order of their param groups"
        yield UnsupportedLayout.fault(folder, what, expected, "round-robin order", mend=mend)
    names_of_buffers = [list(buffer.shapes) for column in checkpoint.columns for buffer in column.buffers]
    if checkpoint.listing.experts and any(names != sort_by_expert(names) for names in names_of_buffers):
        what = "has experts in another order than that of layers and numbers"
        yield UnsupportedLayout.fault(folder, what, "each layer's, one after another", "others", mend=mend)


def _lost_state_faults(universal: UniversalStates) -> Iterator[Fault]:
    """Yield faults for states that ds_to_universal may have dropped: it copies Adam's, without warning about others."""
    yield from universal.missing_states
    for number, group in enumerate(universal.groups if universal.states is None else ()):
        if "betas" not in group or group.get("amsgrad") is True or "momentum_decay" in group:
            yield UnsupportedLayout.fault(
                f"{universal.path}: param group {number}",
                "was not saved by Adam or AdamW: ds_to_universal silently drops some states of other optimizers",
                mend="convert the ZeRO checkpoint that it was made from",
            )
