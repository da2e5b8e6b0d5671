"""What a nanotron checkpoint holds, for a format of another framework."""

from __future__ import annotations

from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import Content, Held, Schedule
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import TensorKey

METADATA = "nanotron"
"""The entry under which another framework's checkpoint keeps `metas` of checkpoint_metadata.json."""


def content_of(checkpoint: NanotronCheckpoint) -> Content:
    """All of it; a parameter that was trained in float32 is its own master."""
    tensors: dict[TensorKey, Held] = {}
    for name, parameter in checkpoint.parameters.items():
        key = TensorKey(name=name, kind="weight")
        weight = tensors[key] = Held(shape=parameter.shape, dtype=parameter.dtype, origin=key)
        stages = checkpoint.stages_of(name)
        kinds = checkpoint.stages[stages[0]].states[name] if stages else {}
        if kinds and MASTER not in kinds and parameter.dtype is ElementType.FLOAT32:
            tensors[TensorKey(name=name, kind=MASTER)] = weight
        for kind, tensor in kinds.items():
            key = TensorKey(name=name, kind=kind)
            tensors[key] = Held(shape=parameter.shape, dtype=tensor.dtype, origin=key)
    facts, schedule = _groups(checkpoint)
    metadata = checkpoint.metadata
    return Content(
        folder=checkpoint.folder,
        tag=checkpoint.listing.tag,
        dp=metadata.dp,
        tensors=tensors,
        facts=facts,
        scheduler=schedule.entries() if schedule is not None else None,
        schedule=schedule,
        steps=metadata.step,
        samples=metadata.samples,
        batch_size=metadata.global_batch_size,
        extra={METADATA: metadata.entries["metas"]} if "metas" in metadata.entries else {},
    )


def _groups(checkpoint: NanotronCheckpoint) -> tuple[OptimizerFacts | None, Schedule | None]:
    """The param groups that have members, a tied parameter's once, and what the scheduler keeps of each."""
    if checkpoint.facts is None:
        return None, None
    groups: list[GroupFacts] = []
    rates = []
    seen: set[str] = set()
    for number, stage in enumerate(checkpoint.stages):
        for at, group in enumerate(stage.groups):
            members = tuple(name for name in group.members if name not in seen)
            if members:
                seen.update(members)
                groups.append(GroupFacts(members=members, hyperparameters=group.hyperparameters))
                if checkpoint.schedulers:
                    rates.append(checkpoint.schedulers[number].of_group(at))
    facts = OptimizerFacts(groups=tuple(groups), scalars=checkpoint.facts.scalars)
    if not checkpoint.schedulers:
        return facts, None
    return facts, Schedule(counters=checkpoint.schedulers[0].counters, groups=tuple(rates))
