"""Write a universal checkpoint: a file for each parameter and kind, as DeepSpeed's loaders read them.

`load_hp_checkpoint_state` (deepspeed/checkpoint/universal_checkpoint.py) needs a dict with "param", and the loader of
stage 3 (runtime/zero/stage3.py) accepts one. `optimizer_state.pt` has what the loaders of stages 1 and 2, of
BF16_Optimizer and of stage 3 look for, and no tensor of a rank (0.19.8). Stages below 3 read counters and scheduler
from `mp_rank_00_model_states.pt`, stage 3 from `zero_pp_rank_0_mp_rank_00_model_states.pt`, which has no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key, one_shard_placement
from ds_reshard.formats.zero.modules import expert_of
from ds_reshard.formats.zero.target import INFO, UNIVERSAL_INFO, Column, Saving
from ds_reshard.formats.zero.tensor_parallel import TensorSplit, pattern_info
from ds_reshard.model.content import TensorSource
from ds_reshard.model.facts import Scalar, ScalarTensor
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import GlobalName, ObjectRecord, new_tensor
from ds_reshard.model.rules import active_rules
from ds_reshard.model.target import Target, TargetFile, Unit

TENSORS = "universal"
_UNIT_NBYTES = 64 << 20
_PARTS = GlobalName(module="deepspeed.checkpoint.universal_checkpoint", name="SubparamShape")


def universal_target(saving: Saving) -> Target:
    """Return a universal checkpoint's files of the same state. Raises UnsupportedLayout for what they cannot hold."""
    content = saving.content
    order = [{name: saving.trained[name] for name in group.members} for group in saving.groups]
    buffers = (FlatBuffer(shapes=shapes, rule=Rule.REPLICATED, ranks=1) for shapes in order)
    names = [name for group in order for name in group]
    steps = _steps(saving, names)
    keys = [TensorKey(name=name, kind=kind) for name in names for kind in content.trained.get(name, {})]
    units = _group_into_units(saving, keys)
    placements = [
        one_shard_placement(key, content.tensors[key].shape, content.tensors[key].dtype, number, family=TENSORS)
        for number, members in enumerate(units)
        for key in members
    ]
    model = Column(saving=saving, kind="zero", stage=2, dp=saving.dp, groups=saving.groups, buffers=tuple(buffers))
    layout = Layout(by_key([*placements, *model.weights()]), {TENSORS: len(units), MODEL: 1})
    return Target(
        layout=layout,
        sources={key: content.tensors[key].origin for key in layout.placements},
        pointers={"latest_universal": saving.tag},
        folder=saving.tag,
        units=(_model_unit(saving, model, order, steps), *_units(saving, units, steps)),
    )


def _group_into_units(saving: Saving, keys: list[TensorKey]) -> list[list[TensorKey]]:
    """Return the tensors in the order in which they lie in the source, in units of about _UNIT_NBYTES."""
    tensors, source = saving.content.tensors, saving.source
    if source is not None:
        keys = sorted(keys, key=lambda key: source.layout[tensors[key].origin].buffer)  # in their order within a buffer
    units: list[list[TensorKey]] = [[]]
    nbytes = 0
    for key in keys:
        if nbytes >= _UNIT_NBYTES:
            units.append([])
            nbytes = 0
        units[-1].append(key)
        nbytes += prod(tensors[key].shape) * tensors[key].dtype.itemsize
    return units


def _units(saving: Saving, units: list[list[TensorKey]], steps: Mapping[str, Scalar]) -> Iterator[Unit]:
    splits = saving.splits.all_known()
    for number, members in enumerate(units):
        files = []
        for key in members:
            folder = f"zero/{key.name}"
            tree = partial(_tensor, key, saving.content.tensors[key], splits.get(key.name))
            files.append(TargetFile(name=f"{folder}/{key.kind}.pt", tree=tree))
            if key.kind == "fp32" and key.name in steps:
                files.append(_step_file(folder, key.name, steps[key.name]))
        yield Unit(family=TENSORS, shard=number, files=tuple(files))


def _tensor(key: TensorKey, tensor: TensorSource, split: TensorSplit | None) -> object:
    return {"param": new_tensor(f"{key.kind}/{key.name}", tensor.shape, tensor.dtype), **_split_marks(key.name, split)}


def _split_marks(name: str, split: TensorSplit | None) -> dict[str, object]:
    """Return the entries that say how ranks split a tensor, as `merge_tp_slices` (ds_to_universal.py) writes them.

    AutoTP needs none. For an expert DeepSpeed's loader asks how many there are if there are several expert-parallel
    ranks, and stops: without the mark each of them would take the first experts as its own.
    """
    if expert_of(name) is not None:
        return {"is_expert_param": True}
    if split is None:
        return {"cat_dim": 0}
    marks: dict[str, object] = {"vocab_tensor": True} if split.vocabulary else {}
    if len(set(split.sizes)) > 1:
        before, after = split.shape[: split.dim], split.shape[split.dim + 1 :]
        state = {"patterns": [], "shape": (*before, split.sizes, *after), "partition_dim": split.dim}
        marks["sub_param_shape"] = ObjectRecord(callable=_PARTS, by_new=True, state=state, has_state=True)
    elif split.widths:
        marks |= {"cat_dim": split.dim, "param_n_sub_params": len(split.sizes)}
    return marks


def _step_file(folder: str, name: str, step: Scalar) -> TargetFile:
    if not isinstance(step, ScalarTensor):
        return TargetFile(name=f"{folder}/step.pt", tree=lambda: step)
    buffer = f"step/{name}"
    tensor = new_tensor(buffer, step.shape, step.dtype)
    return TargetFile(name=f"{folder}/step.pt", tree=lambda: tensor, data={buffer: step.data})


def _names_a_folder(name: str) -> bool:
    """True if a file system accepts the name as one folder's; Linux allows at most 255 bytes."""
    encoded = name.encode("utf-8", "replace")
    return encoded.decode() == name and len(encoded) < 256 and not {"/", "\0"} & {*name} and name not in ("", ".", "..")


def _steps(saving: Saving, names: list[str]) -> Mapping[str, Scalar]:
    """Return each parameter's step. Refuses other scalar states, which universal files cannot hold."""
    assert saving.content.facts is not None
    steps, faults = {}, []
    for name in names:
        if not _names_a_folder(name):
            faults.append(_unsupported(name, "is a parameter name that cannot be a folder name"))
        for kind, value in saving.content.facts.scalars.get(name, {}).items():
            if kind == "step":
                steps[name] = value
            elif value is not None:
                what = "is a scalar state, and DeepSpeed's universal loaders know only the step"
                faults.append(_unsupported(f"{name}[{kind}]", what))
    raise_faults(faults, subject=f"converting {saving.content.folder} to universal")
    return steps


def _unsupported(where: str, what: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend="--to zero1, zero2 or zero3, which hold it")


def _model_unit(
    saving: Saving, model: Column, order: list[dict[str, tuple[int, ...]]], steps: Mapping[str, Scalar]
) -> Unit:
    first, split_entry = next(iter(steps.values()), None), _split_entry(saving)
    data = {"step/": first.data} if isinstance(first, ScalarTensor) else {}
    full = TargetFile(name="mp_rank_00_model_states.pt", tree=partial(_model, model, split_entry))
    bare = TargetFile(name="zero_pp_rank_0_mp_rank_00_model_states.pt", tree=partial(_bare_model, model, split_entry))
    optimizer = partial(_optimizer_state, saving, order, first)
    states = TargetFile(name="zero/optimizer_state.pt", tree=optimizer, data=data)
    return Unit(family=MODEL, shard=0, files=(full, bare, states))


def _model(model: Column, split_entry: Mapping[str, object]) -> dict[str, object]:
    return {INFO: UNIVERSAL_INFO, **model.model_tree(0, model.saving.source_model(0)), **split_entry}


def _split_entry(saving: Saving) -> dict[str, object]:
    """Return the entry with the splits that the source or rules say, so that ranks' files can be made of it again.

    Empty if the source was not split and no rule was given: then its files' entries are kept.
    """
    if not saving.splits.saved and not active_rules():
        return {}
    splits, _ = saving.splits.for_tp(1)
    names = saving.splits.shapes.keys() - splits.keys()
    unknown = {f"^{re.escape(name)}$": "nothing told it when this was converted" for name in sorted(names)}
    info = {**UNIVERSAL_INFO, **pattern_info(splits), "autotp_unsupported_parameter_patterns": unknown}
    return {INFO: info} if splits else {}


def _bare_model(model: Column, split_entry: Mapping[str, object]) -> object:
    """Return the model file's entries without weights, which no loader reads from the second file."""
    return {**_model(model, split_entry), "module": {}, "frozen_param_shapes": None, "frozen_param_fragments": None}


def _optimizer_state(saving: Saving, order: list[dict[str, tuple[int, ...]]], step: Scalar) -> object:
    """Return the object in `zero/optimizer_state.pt`."""
    groups = [
        {**(group.hyperparameters or {}), "params": list(members)}
        for group, members in zip(saving.groups, order, strict=True)
    ]
    first = new_tensor("step/", step.shape, step.dtype) if isinstance(step, ScalarTensor) else step
    state = {} if step is None else {0: {"step": first}}
    return {
        **saving.scaling,
        "ds_version": saving.version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
