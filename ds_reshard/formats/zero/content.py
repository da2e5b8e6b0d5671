"""What a ZeRO or universal checkpoint holds, for a format of another framework; and such a content as a checkpoint.

The entries of the model file are those of `_common_checkpoint_state` (deepspeed/runtime/engine.py, 0.19.8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.layout import by_key, whole
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.model_target import first_names, whole_tensors
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.target import group_order, refuse_source
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import BASE, LAST, Content, Held, Schedule, schedule_of
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import new_tensor

VERSION = "0.19.8"
"""The DeepSpeed whose files are written; its loaders ask for the version that has saved."""
_OWN = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dims",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "universal_checkpoint_info",
    }
)
_SIXTEEN = {ElementType.BFLOAT16: "bf16", ElementType.FLOAT16: "fp16"}


def content_of(checkpoint: ZeroCheckpoint) -> Content:
    """All of it. Raises UnsupportedLayout, with every reason, where it has no names or no param groups."""
    refuse_source(checkpoint, "another framework")
    model, facts, layout = checkpoint.model, checkpoint.facts, checkpoint.layout
    assert facts is not None
    tensors: dict[TensorKey, Held] = {}
    firsts = first_names(model)
    for name, tensor in whole_tensors(model).items():
        key, master = TensorKey(name=name, kind="weight"), TensorKey(name=name, kind="fp32")
        tensors[key] = Held(shape=tensor.shape, dtype=tensor.dtype, origin=key if key in layout else master)
    for name in sorted(set(firsts.values()) - {key.name for key in tensors}):
        raise_faults([_strided(name)], subject=f"converting {checkpoint.listing.folder}")
    for group in group_order(checkpoint):
        for name in group:
            for kind in layout.kinds(name):
                key = TensorKey(name=name, kind=kind)
                if kind != "weight":
                    tensors[key] = Held(shape=layout[key].shape, dtype=layout[key].dtype, origin=key)
    entries = model.entries
    scheduler, config = entries.get("lr_scheduler"), entries.get("ds_config")
    return Content(
        folder=checkpoint.listing.folder,
        tag=checkpoint.listing.tag,
        dp=checkpoint.dp,
        tensors=tensors,
        facts=facts,
        tied={name: first for name, first in firsts.items() if name != first},
        scheduler=scheduler,
        schedule=schedule_of(scheduler, len(facts.groups)),
        steps=_count(entries.get("global_steps")),
        samples=_count(entries.get("global_samples")),
        extra=_extra(checkpoint),
        batch_size=_count(config.get("train_batch_size")) if isinstance(config, dict) else None,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _extra(checkpoint: ZeroCheckpoint) -> dict[str, object]:
    """The user's entries, and what DeepSpeed or the module keeps that is no tensor."""
    entries = checkpoint.model.entries
    kept = {key: value for key, value in entries.items() if key not in _OWN}
    for key in ("data_sampler", "random_ltd"):
        if entries.get(key) is not None:
            kept[key] = entries[key]
    return {**kept, **{f"module.{name}": value for name, value in checkpoint.model.objects.items()}}


def _strided(name: str) -> Fault:
    return UnsupportedLayout.fault(
        name, "does not lie row-major in the file", mend="load it in a run, and save contiguous tensors there"
    )


def as_zero(content: Content) -> ZeroCheckpoint:
    """The content as DeepSpeed would have saved it with torch's own optimizer; its tensors lie in no file.

    Param groups of equal hyper-parameters and rates are one. Raises UnsupportedLayout, with every reason, where such a
    group would be of several steps.
    """
    groups, schedule = _joined(content)
    raise_faults(list(_uneven(content, groups)), subject=f"converting {content.folder} to DeepSpeed")
    weights = content.weights
    module = OrderedDict((name, new_tensor(f"module/{name}", held.shape, held.dtype)) for name, held in weights.items())
    module.update((name, module[first]) for name, first in content.tied.items())
    shapes = tuple({name: weights[name].shape for name in group.members} for group in groups)
    frozen = {name: held.shape for name, held in weights.items() if name not in content.trained}
    facts = content.facts and OptimizerFacts(groups=groups, scalars=content.facts.scalars)
    placements = [
        whole(key.name, key.kind, held.shape, held.dtype, family="content", buffer=f"{key.kind}/{key.name}")
        for key, held in content.tensors.items()
    ]
    model = ModelStates(
        path=content.folder,
        module=module,
        objects={},
        buffer_names=frozenset(),
        shared=dict(content.tied),
        entries=_entries(content, module, schedule),
        param_shapes=shapes if facts is not None else None,
        frozen_shapes=frozen if facts is not None else {},
        frozen_fragments={},
        dp=content.dp,
        version=VERSION,
    )
    return ZeroCheckpoint(
        listing=Listing(folder=content.folder, nbytes={}),
        model=model,
        optim=None,
        facts=facts,
        layout=Layout(by_key(placements), {"content": 1}),
    )


def _entries(content: Content, module: Mapping[str, object], schedule: Schedule | None) -> dict[str, object]:
    types = {held.dtype for name, held in content.weights.items() if name in content.trained}
    config: dict[str, object] = {name: {"enabled": True} for dtype, name in _SIXTEEN.items() if dtype in types}
    if content.batch_size is not None:
        config["train_batch_size"] = content.batch_size
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": schedule.entries() if schedule is not None else content.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": content.steps or 0,
        "global_samples": content.samples or 0,
        "dp_world_size": content.dp,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": VERSION,
        **content.extra,
    }


def _joined(content: Content) -> tuple[tuple[GroupFacts, ...], Schedule | None]:
    """The param groups, those that are alike as one, in the order of their first members."""
    members: dict[str, list[str]] = {}
    firsts: dict[str, int] = {}
    groups = content.facts.groups if content.facts is not None else ()
    for number, group in enumerate(groups):
        rates = content.schedule.groups[number] if content.schedule is not None else {}
        alike = canonical([dict(group.hyperparameters or {}), [rates.get(BASE), rates.get(LAST)]])
        firsts.setdefault(alike, number)
        members.setdefault(alike, []).extend(group.members)
    joined = tuple(
        GroupFacts(members=tuple(members[alike]), hyperparameters=groups[number].hyperparameters)
        for alike, number in firsts.items()
    )
    if content.schedule is None:
        return joined, None
    kept = tuple(content.schedule.groups[number] for number in firsts.values())
    return joined, Schedule(counters=content.schedule.counters, groups=kept)


def _uneven(content: Content, groups: tuple[GroupFacts, ...]) -> Iterator[Fault]:
    """DeepSpeed steps a param group together, and keeps one step of it."""
    scalars: Mapping[str, Mapping[str, Scalar]] = content.facts.scalars if content.facts is not None else {}
    for group in groups:
        first = group.members[0]
        for name in group.members[1:]:
            if canonical(dict(scalars.get(name, {}))) != canonical(dict(scalars.get(first, {}))):
                yield UnsupportedLayout.fault(
                    name,
                    "is of another step than a parameter of the same "
                    "hyper-parameters, with which it would be in one param group",
                    f"the counters of {first}",
                    "others",
                    mend="resume it with nanotron",
                )
