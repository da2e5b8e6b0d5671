"""A ZeRO or universal checkpoint as the content that any format takes, and any content as a ZeRO checkpoint.

The entries of the model file are those of `_common_checkpoint_state` (deepspeed/runtime/engine.py, 0.19.8).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.flat import by_key, whole
from ds_reshard.formats.zero.grid_target import said_of_all
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.modules import layer_files
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.target import first_names, group_order, lacking_of, quantized_faults, whole_tensors
from ds_reshard.formats.zero.tensor_parallel import Division
from ds_reshard.model.content import MASTER, WEIGHT, Content, Held, flattened, schedule_of
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, ScalarTensor, canonical, exact_number
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.rules import given, rules_given

# What follows from the layout, and the saved configuration, which the coming run's replaces.
_UNSET = ("optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
LAYOUT_ENTRIES = frozenset(
    {*_UNSET, "module", "buffer_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"}
    | {"ds_config", "ds_version", "universal_checkpoint_info"}
)
VERSION = "0.19.8"
"""The DeepSpeed whose files are written; its loaders ask for the version that has saved."""
SAME_BYTES = "masters\0"
_SIXTEEN = {ElementType.BFLOAT16: "bf16", ElementType.FLOAT16: "fp16"}


def content_of(checkpoint: ZeroCheckpoint, *, weights_alone: bool = False) -> Content:
    """All of it; its `faults` say what its optimizer lacks. Raises UnsupportedLayout for weights that cannot be read.

    `weights_alone` asks for no optimizer, unless its files alone hold the weights.
    """
    model, facts, layout = checkpoint.model, checkpoint.facts, checkpoint.layout
    raise_faults(quantized_faults(model), subject=f"converting {checkpoint.listing.folder}")
    lacking = () if facts is None and weights_alone else tuple(lacking_of(checkpoint))
    tensors: dict[TensorKey, Held] = {}
    unsaved = _unsaved(checkpoint)
    firsts = {name: first for name, first in first_names(model).items() if name not in unsaved}
    for name, tensor in whole_tensors(model).items():
        if name in unsaved:
            continue
        key, master = TensorKey(name=name, kind=WEIGHT), TensorKey(name=name, kind=MASTER)
        tensors[key] = Held(shape=tensor.shape, dtype=tensor.dtype, origin=key if key in layout else master)
    mend = "load it in a run, and save contiguous tensors there"
    strided = sorted(set(firsts.values()) - {key.name for key in tensors})
    faults = [UnsupportedLayout.fault(name, "does not lie row-major in the file", mend=mend) for name in strided]
    raise_faults(faults, subject=f"converting {checkpoint.listing.folder}")
    order = group_order(checkpoint) if facts is not None else []
    for group in order if not model.lagging else ():  # whose masters are not those of the weights
        for name in group:
            for kind in layout.kinds(name):
                key = TensorKey(name=name, kind=kind)
                if kind != WEIGHT:
                    tensors[key] = Held(shape=layout[key].shape, dtype=layout[key].dtype, origin=key)
    entries, batch = model.entries, model.config.get("train_batch_size")
    kept = {name: value for name, value in entries.items() if name not in LAYOUT_ENTRIES and value is not None}
    buffers = {name: model.module[name] for name in sorted(model.buffer_names & model.module.keys())}
    return Content(
        folder=checkpoint.listing.folder,
        ranks=checkpoint.dp,
        tensors=tensors,
        facts=facts
        and replace(
            facts,
            groups=tuple(replace(group, members=tuple(own)) for group, own in zip(facts.groups, order, strict=True)),
        ),
        tied={name: first for name, first in firsts.items() if name != first},
        buffers=model.buffer_names,
        records=buffers,
        objects=dict(flattened(kept)),
        schedule=schedule_of(entries.get("lr_scheduler"), len(facts.groups)) if facts is not None else None,
        batch_size=batch if type(batch) is int else None,
        faults=lacking,
        notes=(
            *(f"left out: the module's entry {name}, which is no tensor" for name in sorted(model.objects)),
            *(
                f"left out: {name}: ZeRO stage 3 saved no value under this name (it is another parameter's, or empty)"
                for name in unsaved
            ),
        ),
        home=checkpoint,
    )


def _unsaved(checkpoint: ZeroCheckpoint) -> list[str]:
    """Entries that stand at stage 3 for something that no file holds, nor says whether it is another's second name.

    AutoEP gives each router a second one (`mlp.gate.gate.weight`), which `shared_params` does not have (0.19.8).
    """
    model = checkpoint.model
    known = {*model.trainable, *model.frozen_shapes, *model.buffer_names, *model.shared}
    module = model.module.items() if checkpoint.listing.partitioned_model else ()
    return sorted(name for name, tensor in module if not tensor.numel and name not in known)


def as_zero(content: Content) -> ZeroCheckpoint:
    """The content as DeepSpeed would have saved it with torch's own optimizer; its tensors lie in no file.

    `optimizer_faults` says what a content lacks whose optimizer is wanted. One that was made of DeepSpeed's own files
    keeps what they say of the run and of its optimizer: configuration, version, loss scale.
    """
    facts, weights = content.facts, content.weights
    home = content.home if isinstance(content.home, ZeroCheckpoint) else None
    divided = _divided(content, home) if home is not None else {}
    groups = tuple(map(_plain_group, facts.groups)) if facts is not None else ()
    module = OrderedDict((name, new_tensor(f"module/{name}", held.shape, held.dtype)) for name, held in weights.items())
    module.update((name, module[first]) for name, first in content.tied.items())
    module.update({name: content.records[name] for name in content.buffers if name in content.records})
    apart = {*content.trained, *content.buffers, *content.tied}
    placements = [
        whole(key.name, key.kind, held.shape, held.dtype, family="content", buffer=f"{key.kind}/{key.name}")
        for key, held in content.tensors.items()
    ]
    model = ModelStates(
        path=content.folder,
        module=module,
        objects={},
        buffer_names=content.buffers,
        shared=dict(content.tied),
        entries={**_entries(content, module, home), **_kept(home)},
        param_shapes=tuple({name: weights[name].shape for name in group.members if name in weights} for group in groups)
        if facts is not None
        else None,
        frozen_shapes={name: held.shape for name, held in weights.items() if name not in apart} if facts else {},
        frozen_fragments={},
        dp=content.ranks or 1,
        version=home.model.version if home is not None else VERSION,
    )
    prefix = home.listing.optim_prefix if home is not None else ""
    return ZeroCheckpoint(
        listing=Listing(folder=content.folder, nbytes={}, optim_prefix=prefix),
        model=model,
        optim=home.optim if home is not None else None,
        layers=layer_files(home)
        if home is not None and home.stages and home.model.module.keys() == module.keys()
        else None,
        divided=divided,
        facts=facts and OptimizerFacts(groups=groups, scalars=facts.scalars),
        layout=Layout(by_key(placements), {"content": 1}),
    )


def _divided(content: Content, home: ZeroCheckpoint) -> dict[str, Division]:
    """How tensors were divided, by their names here. What one rank had whole patterns tell, where no rule does."""
    with given(()):  # the rules are of the names here
        said = said_of_all(home)
    rules = () if home.divided else rules_given()
    return {
        key.name: said[held.origin.name]
        for key, held in content.tensors.items()
        if held.origin.name in said and not any(re.fullmatch(rule.parameters, key.name) for rule in rules)
    }


def _kept(home: ZeroCheckpoint | None) -> dict[str, object]:
    """The entries of a run of DeepSpeed that follow from its configuration."""
    entries = home.model.entries if home is not None else {}
    return {key: entries[key] for key in ("ds_config", "ds_version") if key in entries}


def read_as_zero(content: Content, layout: Layout, files: Mapping[str, int]) -> ZeroCheckpoint:
    """The content as a ZeRO checkpoint whose tensors lie where those of the source do, in its `layout` and `files`.

    A weight that is its own master is two tensors of the same bytes: the master's family is the weight's, with
    SAME_BYTES before its name.
    """
    placements, shards = {}, dict(layout.shards)
    for key, held in content.tensors.items():
        place = layout[held.origin]
        family = place.family
        if key.kind == MASTER and held.origin.kind == WEIGHT:
            family = f"{SAME_BYTES}{place.family}"
            shards[family] = shards[place.family]
        tiles = tuple(tile._replace(key=key, family=family) for tile in place.tiles)
        placements[key] = place._replace(key=key, family=family, tiles=tiles)
    return replace(
        as_zero(content),
        listing=Listing(folder=content.folder, nbytes=files),
        layout=Layout(placements, shards),
        foreign=True,
    )


def _plain_group(group: GroupFacts) -> GroupFacts:
    """Hyper-parameters that were kept as small tensors are numbers to DeepSpeed; `optimizer_faults` has all others."""
    values = {
        name: exact_number(value) if isinstance(value, ScalarTensor) else value
        for name, value in (group.hyperparameters or {}).items()
    }
    return GroupFacts(members=group.members, hyperparameters=values)


def _entries(content: Content, module: Mapping[str, object], home: ZeroCheckpoint | None) -> dict[str, object]:
    """The entries of a model file; the steps that are not told are those of the optimizer.

    Without `global_samples` DeepSpeed counts them from the steps itself (`_load_checkpoint`, engine.py).
    """
    types = {held.dtype for name, held in content.weights.items() if name in content.trained}
    config: dict[str, object] = {name: {"enabled": True} for dtype, name in _SIXTEEN.items() if dtype in types}
    if content.batch_size is not None:
        config["train_batch_size"] = content.batch_size
    scalars = content.facts.scalars.values() if content.facts is not None else ()
    found = [states["step"] for states in scalars if "step" in states]
    steps = [exact_number(step) if isinstance(step, ScalarTensor) else step for step in found]
    usual: dict[str, object] = {
        **dict.fromkeys((*_UNSET, "lr_scheduler", "data_sampler", "random_ltd")),
        **({"sparse_tensor_module_names": set()} if home is None else {}),  # which loaders before 0.15 want
        "skipped_steps": 0,
        "global_steps": int(
            max((step for step in steps if isinstance(step, int | float) and isfinite(step)), default=0)
        ),
    }
    return {
        **usual,
        **content.entries,
        "module": module,
        "buffer_names": sorted(content.buffers),
        "dp_world_size": content.ranks or 1,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": VERSION,
    }


def optimizer_faults(content: Content) -> Iterator[Fault]:
    """What keeps the optimizer of a content from being one of DeepSpeed's.

    DeepSpeed keeps fp32 masters and states of a weight's shape, steps a param group together, and trains every
    parameter of one; it would make masters that are missing of the weights, and train another model from there.
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
                what = f"is a {value.dtype.label} tensor, which is no number of Python's"
                yield _fault(f"param group {number}: {name}", what, "save it as a number")
    members = {name for group in groups for name in group.members}
    for where in content.deeper:
        what = "is a state or a value of the optimizer inside a dict or a list, for which DeepSpeed has no place"
        yield _fault(where, what, "resume it with the optimizer that saved it, or --to dcp")
    for name in sorted(members - trained.keys() - scalars.keys()):
        what = "is in a param group, and has no state: whether the coming run trains it, no file says"
        mend = "build the optimizer of the trainable parameters alone, step once, and save"
        if not (trained or scalars):
            mend = "--to safetensors or torch, for the weights: the optimizer keeps nothing of any parameter"
        yield _fault(name, what, mend)
    for name in sorted({*trained, *scalars} - members) if groups else ():
        yield _fault(name, "has states, and is in no param group", "save model and optimizer together")
    for name in sorted({*content.beside, *content.buffers} - content.records.keys()):
        what = "is a buffer, or a tensor beside the model, that is saved in several pieces"
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
    """States that are no fp32 tensors of the shape of a weight."""
    weights = content.weights
    for name, states in content.trained.items():
        for kind, held in states.items():
            if name not in weights or held.shape != weights[name].shape:
                what = "is not of the shape of a weight that was saved"
                mend = "save model and optimizer together; other shapes have no place in ZeRO"
                if name not in weights:
                    what = "is a state of a parameter of which no weight was saved"
                    mend = "save it by get_state_dict of torch, beside the whole model's weights, under the same names"
                yield _fault(f"{name}[{kind}]", what, mend)
            elif held.dtype is not ElementType.FLOAT32:
                mend = "train on fp32 parameters (MixedPrecisionPolicy(param_dtype=...)), or load it "
                mend += "through ds_reshard.dcp.Reader"
                what = f"is {held.dtype.label}, where DeepSpeed keeps fp32 masters and states"
                yield _fault(f"{name}[{kind}]", what, mend)


def _fault(where: str, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=mend)
