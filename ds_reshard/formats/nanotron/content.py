"""What a nanotron checkpoint holds, for any other format; and its digest, by which one is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.metadata import read_bytes
from ds_reshard.formats.nanotron.names import CONFIG, META, MODEL_CONFIG, OPTIMIZER_CONFIG
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.model.content import BASE, LAST, SAMPLES, SCHEDULER, STEPS, Content, Held, Schedule
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, canonical
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType


def digest_of(checkpoint: NanotronCheckpoint) -> str:
    """Of the small files, the headers of weights, names, param groups and schedulers; of no tensor's values."""
    listing = checkpoint.listing
    small = [name for name in (META, CONFIG, MODEL_CONFIG, OPTIMIZER_CONFIG) if name in listing.nbytes]
    said = {
        "files": {name: hashlib.sha256(read_bytes(listing.path(name))).hexdigest() for name in small},
        "weights": {
            name: [
                parameter.shape,
                parameter.dtype.label,
                [list(map(str, pairs)) for pairs in parameter.pairs],
                {rank: tensor.shape for rank, tensor in parameter.files.items()},
            ]
            for name, parameter in checkpoint.parameters.items()
        },
        "homes": dict(listing.weight_stages),
        "stages": [
            {
                "groups": [[group.members, dict(group.hyperparameters)] for group in stage.groups],
                "states": {
                    name: {kind: tensor.dtype.label for kind, tensor in kinds.items()}
                    for name, kinds in stage.states.items()
                },
            }
            for stage in checkpoint.stages
        ],
        "schedulers": [dict(scheduler.entries) for scheduler in checkpoint.schedulers],
    }
    return hashlib.sha256(canonical(said).encode("utf-8", "surrogatepass")).hexdigest()


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
    counters = {STEPS: metadata.step, SAMPLES: metadata.samples, METADATA: metadata.entries.get("metas")}
    if schedule is not None:
        counters[SCHEDULER] = schedule.entries()
    return Content(
        folder=checkpoint.folder,
        ranks=metadata.dp,
        tensors=tensors,
        facts=facts,
        objects={(name,): value for name, value in counters.items() if value is not None},
        schedule=schedule,
        batch_size=metadata.global_batch_size,
        faults=tuple(_faults(checkpoint)),
        notes=tuple(_notes(checkpoint, len(facts.groups) if facts is not None else 0)),
    )


def _faults(checkpoint: NanotronCheckpoint) -> Iterator[Fault]:
    if checkpoint.metadata.step is None:
        mend = "--to safetensors or torch, for the weights"
        expected = "metas in checkpoint_metadata.json"
        yield UnsupportedLayout.fault(checkpoint.folder, "does not say its step", expected, "none", mend=mend)


def _notes(checkpoint: NanotronCheckpoint, groups: int) -> Iterator[str]:
    saved = sum(bool(group.members) for stage in checkpoint.stages for group in stage.groups)
    if saved != groups:
        yield f"{saved} param groups are {groups}, each of equal hyper-parameters, as of torch's AdamW"
    if any(name.startswith("random/") for name in checkpoint.listing.nbytes):
        yield "random states are left out: no other format has a place for them"


def _groups(checkpoint: NanotronCheckpoint) -> tuple[OptimizerFacts | None, Schedule | None]:
    """The param groups, and what the scheduler keeps of each; those that are alike are one.

    nanotron has a group for each parameter, where torch's AdamW of the same settings would have one. They stand in the
    order of their first members, a tied parameter in the first of its groups.
    """
    if checkpoint.facts is None:
        return None, None
    members: dict[str, list[str]] = {}
    firsts: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = {}
    seen: set[str] = set()
    for number, stage in enumerate(checkpoint.stages):
        for at, group in enumerate(stage.groups):
            names = [name for name in group.members if name not in seen]
            if names:
                seen.update(names)
                rates = checkpoint.schedulers[number].of_group(at) if checkpoint.schedulers else {}
                values = dict(group.hyperparameters or {})
                alike = canonical([values, [rates.get(BASE), rates.get(LAST)]])
                firsts.setdefault(alike, (values, rates))
                members.setdefault(alike, []).extend(names)
    groups = tuple(GroupFacts(members=tuple(members[alike]), hyperparameters=firsts[alike][0]) for alike in firsts)
    facts = OptimizerFacts(groups=groups, scalars=checkpoint.facts.scalars)
    if not checkpoint.schedulers:
        return facts, None
    kept = tuple(rates for _, rates in firsts.values())
    return facts, Schedule(counters=checkpoint.schedulers[0].counters, groups=kept)
