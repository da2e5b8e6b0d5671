"""What a nanotron checkpoint holds, for any other format; and any content as one that is arranged as another is.

How parameters are cut, in which stage and order they are trained, and with which schedule and data, is that run's.
Tensors, steps, hyper-parameters and the position are the content's. nanotron trains with torch's AdamW.
Its `TrainingMetadata` (serialize/metadata.py, 2411b02) refuses samples that are not the sum of those of its stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ds_reshard.containers import folders
from ds_reshard.errors import Fault, ModelMismatch, ParamGroupMismatch, UnsupportedLayout, error_of, raise_faults
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.metadata import Metadata
from ds_reshard.formats.nanotron.names import CONFIG, META, MODEL_CONFIG, OPTIMIZER_CONFIG
from ds_reshard.formats.nanotron.optimizer_file import MASTER, OptimizerFile, SavedScheduler
from ds_reshard.model.content import BASE, LAST, SAMPLES, SCHEDULER, STEPS, WEIGHT, Content, Schedule, TensorSource
from ds_reshard.model.facts import (
    GroupFacts,
    OptimizerFacts,
    Scalar,
    ScalarTensor,
    as_scalar,
    canonical,
    describe,
    number_of,
)
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType


def digest_of(checkpoint: NanotronCheckpoint) -> str:
    """Of the small files, the headers of weights, names, param groups and schedulers; of no tensor's values."""
    listing = checkpoint.listing
    small = [name for name in (META, CONFIG, MODEL_CONFIG, OPTIMIZER_CONFIG) if name in listing.nbytes]
    said = {
        "files": {name: hashlib.sha256(folders.read_small(listing.path(name))).hexdigest() for name in small},
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
                "groups": [[group.members, dict(group.hyperparameters or {})] for group in stage.groups],
                "states": {
                    name: {kind: tensor.dtype.label for kind, tensor in kinds.items()}
                    for name, kinds in stage.states.items()
                },
            }
            for stage in checkpoint.stages
        ],
        "schedulers": [scheduler.entries() for scheduler in checkpoint.schedulers],
    }
    return hashlib.sha256(canonical(said).encode("utf-8", "surrogatepass")).hexdigest()


_WEIGHTS = "--to safetensors or torch, for the weights"
_ALONE = "--to safetensors or torch without --like, for the weights"
METADATA = "nanotron"
"""The entry under which another framework's checkpoint keeps `metas` of checkpoint_metadata.json."""


def content_of(checkpoint: NanotronCheckpoint) -> Content:
    """All of it; a parameter that was trained in float32 is its own master."""
    tensors: dict[TensorKey, TensorSource] = {}
    for name, parameter in checkpoint.parameters.items():
        key = TensorKey(name=name, kind="weight")
        weight = tensors[key] = TensorSource(shape=parameter.shape, dtype=parameter.dtype, origin=key)
        stages = checkpoint.stages_of(name)
        kinds = checkpoint.stages[stages[0]].states[name] if stages else {}
        if kinds and MASTER not in kinds and parameter.dtype is ElementType.FLOAT32:
            tensors[TensorKey(name=name, kind=MASTER)] = weight
        for kind, tensor in kinds.items():
            key = TensorKey(name=name, kind=kind)
            tensors[key] = TensorSource(shape=parameter.shape, dtype=tensor.dtype, origin=key)
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
        expected = "metas in checkpoint_metadata.json"
        yield UnsupportedLayout.fault(checkpoint.folder, "does not say its step", expected, "none", mend=_WEIGHTS)


def _notes(checkpoint: NanotronCheckpoint, groups: int) -> Iterator[str]:
    saved = sum(bool(group.members) for stage in checkpoint.stages for group in stage.groups)
    if saved != groups:
        yield f"{saved} param groups are {groups}, each of equal hyper-parameters, as of torch's AdamW"
    if any(name.startswith("random/") for name in checkpoint.listing.nbytes):
        yield "random states are left out: no other format has a place for them"


def _groups(checkpoint: NanotronCheckpoint) -> tuple[OptimizerFacts | None, Schedule | None]:
    """Merge param groups with equal hyper-parameters and learning rates; return them and their schedule.

    nanotron makes one group for each parameter. Merged groups are in the order of their first members; a tied parameter
    belongs only to the first group that lists it.
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
                rates = checkpoint.schedulers[number].groups[at] if checkpoint.schedulers else {}
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


_SEQUENCE_LENGTH = 4096  # DataStageMetadata.__post_init__


def position_of(content: Content, like: Metadata) -> tuple[Mapping[str, object], list[Fault]]:
    """The saving run's own where it was one of nanotron; else its samples in the one data stage that `like` has."""
    own = content.entries.get(METADATA)
    if _is_text(own) and isinstance(own, dict) and own.get("last_train_step") == content.steps:
        return own, []
    if content.steps is None or content.samples is None:
        what, expected = "says no number of steps and samples", "global_steps and global_samples"
        return {}, [UnsupportedLayout.fault(content.folder, what, expected, "others", mend=_ALONE)]
    metas = like.entries.get("metas")
    shown: Mapping[str, object] = metas if isinstance(metas, dict) else {}
    counts: dict[str, object] = {"consumed_train_samples": content.samples, "last_train_step": content.steps}
    stages = shown.get("data_stages")
    if not isinstance(stages, list):
        return {**shown, **counts}, []
    stage = stages[0] if len(stages) == 1 else None
    folders = stage.get("consumed_tokens_per_dataset_folder") or {} if isinstance(stage, dict) else None
    if not isinstance(stage, dict) or not isinstance(folders, dict) or len(folders) > 1:
        what = "does not say what it has consumed of which data, of which --like has several stages or folders"
        expected, mend = (
            "a --like of one data stage and folder",
            "name a checkpoint of a run with one data stage: --like DIR",
        )
        return {}, [UnsupportedLayout.fault(content.folder, what, expected, "others", mend=mend)]
    tokens = content.samples * int(stage.get("sequence_length") or _SEQUENCE_LENGTH)
    consumed = dict.fromkeys(folders, tokens)
    stage = {**stage, "consumed_train_samples": content.samples, "consumed_tokens_per_dataset_folder": consumed}
    total = tokens if consumed else None
    return {**shown, **counts, "consumed_tokens_total": total, "last_stage_idx": 0, "data_stages": [stage]}, []


def _is_text(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


_INITIAL = "initial_lr"
_HOW = frozenset({"foreach", "capturable", "differentiable", "fused", "maximize", "amsgrad", "decoupled_weight_decay"})
"""How torch computes AdamW, or which variant of it: what other optimizers do not say is as the coming run has it."""
_VARIANT = ("maximize", "amsgrad", "decoupled_weight_decay")
_COUNTED = frozenset({"step"})


_SAME_GROUPS = "name a checkpoint of a run with the same param groups and optimizer: --like DIR"


class Hyperparameters:
    """The groups of a content, asked for one by one; `faults` and `notes` are what was found meanwhile."""

    def __init__(self, content: Content, *, mend: str = _SAME_GROUPS) -> None:
        assert content.facts is not None
        self.faults: list[Fault] = []
        self._mend = mend
        self._left: set[str] = set()
        self._borrowed: set[str] = set()
        self._other_base: set[str] = set()
        self._content = content
        self._number = {name: number for number, group in enumerate(content.facts.groups) for name in group.members}
        self._groups = [dict(group.hyperparameters or {}) for group in content.facts.groups]

    def group(self, path: str, like: GroupFacts) -> GroupFacts:
        """Return the param group `like` with the hyper-parameters that the source has for its members.

        Notes a fault if they come from source groups that differ, or were trained by another variant of Adam.
        """
        numbers = {self._number[name] for name in like.members if name in self._number}
        found = [self._groups[number] for number in sorted(numbers)]
        if not found:
            return like
        for other in found[1:]:
            if canonical(other) != canonical(found[0]):
                self._fault(
                    path, like, "are of several param groups of the source, which differ", "one", f"{len(found)}"
                )
        saved, shown = found[0], like.hyperparameters or {}
        made: dict[str, object] = {}
        for key, wanted in shown.items():
            if key in saved:
                made[key] = saved[key]
            elif key in _HOW or key == _INITIAL:
                made[key] = wanted
                self._borrowed |= {key} - _HOW
            else:
                self._fault(path, like, f"have no {key} in the source", describe(wanted), "none")
        for key in _VARIANT:
            if key in saved and key in shown and saved[key] != shown[key]:
                expected = describe(shown[key])
                self._fault(path, like, f"are trained with another {key}", expected, describe(saved[key]))
        if saved.get("bias_correction", True) is not True:
            self._fault(path, like, "are trained without the bias correction that AdamW makes", "True", "False")
        self._left |= set(saved) - set(shown) - _COUNTED - {"bias_correction"}
        if _INITIAL in shown and made.get(_INITIAL) != shown[_INITIAL]:
            self._other_base.add(f"{describe(made.get(_INITIAL))}, not {describe(shown[_INITIAL])}")
        return GroupFacts(members=like.members, hyperparameters=made)

    def base(self, members: Sequence[str], like: object) -> object:
        """The rate that the schedule of a param group is a multiple of: the source's where it has one."""
        number = next((self._number[name] for name in members if name in self._number), None)
        if number is None:
            return like
        rates: Mapping[str, object] = {}
        if self._content.schedule is not None:
            rates = self._content.schedule.groups[number]
        return rates.get(BASE, self._groups[number].get(_INITIAL, like))

    @property
    def left_out(self) -> list[str]:
        names = ", ".join(sorted(self._left))
        return [f"param group entries that AdamW does not have are left out: {names}"] if names else []

    @property
    def notes(self) -> list[str]:
        told = self.left_out
        if self._borrowed:
            told.append("the source has no initial learning rates: those of --like are taken")
        if self._other_base:
            told.append(f"the initial learning rate is the source's: {'; '.join(sorted(self._other_base))} of --like")
        return told

    def _fault(self, path: str, group: GroupFacts, what: str, expected: str, found: str) -> None:
        names = ", ".join(group.members[:3]) + ("" if len(group.members) < 4 else f" and {len(group.members) - 3} more")
        self.faults.append(ParamGroupMismatch.fault(names, f"{what} ({path})", expected, found, mend=self._mend))


_KINDS = "fp32, exp_avg, exp_avg_sq"
_SAME = "name a checkpoint of the same model"
_NAMES = "give the name that it has on the other side: --names map.json"


def adopt(
    content: Content, like: NanotronCheckpoint, faults: Sequence[Fault]
) -> tuple[NanotronCheckpoint, Mapping[TensorKey, TensorKey], list[str]]:
    """The content as a checkpoint that is arranged as `like` is, the tensors that it takes, and what there is to tell.

    Raises, with `faults`, every fault at once: an optimizer that is not there, and parameters, shapes, types, states,
    steps and param groups that `like` has otherwise.
    """
    subject = f"converting {content.folder} to nanotron"
    found = [*faults, *content.faults, *unlike(content, like)]
    if content.facts is None:
        what = "holds no optimizer"
        lacking = UnsupportedLayout.fault(content.folder, what, "param groups and states", mend=_ALONE)
        raise error_of([*found, lacking], subject=subject)
    scalars, wrong = _scalars(content, like)
    metas, lost = position_of(content, like.metadata)
    groups = Hyperparameters(content)
    stages = tuple(
        replace(stage, groups=tuple(groups.group(stage.path, group) for group in stage.groups)) for stage in like.stages
    )
    raise_faults([*found, *wrong, *lost, *groups.faults], subject=subject)
    listing = like.listing
    random = [name for name in listing.nbytes if name.startswith("random/")]
    checkpoint = replace(
        like,
        metadata=replace(like.metadata, entries={**like.metadata.entries, "metas": metas}),
        stages=stages,
        listing=replace(listing, nbytes={name: size for name, size in listing.nbytes.items() if name not in random}),
        schedulers=tuple(_scheduler(content, groups, *pair) for pair in zip(like.schedulers, stages, strict=False)),
        facts=OptimizerFacts(groups=(), scalars=scalars),
    )
    return checkpoint, _origins(content, like), [*_adoption_notes(content, like), *groups.notes]


def _origins(content: Content, like: NanotronCheckpoint) -> dict[TensorKey, TensorKey]:
    """Where each tensor is read from: a weight that has no master beside it in nanotron is the master."""
    masters = any(stage.has_masters for stage in like.stages)
    found = {key: held.origin for key, held in content.tensors.items()}
    for key in content.tensors:
        master = TensorKey(name=key.name, kind=MASTER)
        if key.kind == WEIGHT and not masters and master in found:
            found[key] = found[master]
    return found


def unlike(content: Content, like: NanotronCheckpoint, *, as_it_is: bool = False) -> Iterator[Fault]:
    """Names, shapes, types and states that the content has otherwise, and parameters that one side trains alone.

    A weight that is its own master may be of another type in the coming run, and a weight in float32 may lack its
    master there; not if the content is nanotron's, and is written `as_it_is`.
    """
    weights, trained, folder = content.weights, content.trained, like.folder
    for name in sorted(set(weights) - set(like.parameters)):
        yield _mismatch(name, "is in the source and not in --like", folder, _SAME if as_it_is else _NAMES)
    for name in sorted(set(like.parameters) - set(weights)):
        what = "is in --like, and no parameter of the source has that name"
        yield _mismatch(name, what, content.folder, _SAME if as_it_is else _NAMES)
    states: dict[str, Mapping[str, ElementType]] = {}
    for stage in reversed(like.stages):
        states |= {name: {kind: t.dtype for kind, t in kinds.items()} for name, kinds in stage.states.items()}
    for name in sorted(set(like.parameters) & set(weights)):
        parameter, held, kinds = like.parameters[name], weights[name], dict(trained.get(name, {}))
        own_master = held == kinds.get(MASTER)
        if parameter.shape != held.shape:
            what = f"is of shape {list(held.shape)} in the source and {list(parameter.shape)} in --like"
            yield _mismatch(name, what, folder, f"{_SAME}: tensors are not cut or fused")
        elif parameter.dtype is not held.dtype and (as_it_is or not own_master):
            what = f"is {held.dtype.label} in the source and {parameter.dtype.label} in --like"
            yield _mismatch(name, what, folder, "name a checkpoint of a run that trains in the same type")
        if content.facts is None or not (kinds or name in states):
            continue
        if not kinds or name not in states:
            what = f"has optimizer states only in {'--like' if name in states else 'the source'}"
            yield _mismatch(name, what, folder, "name a checkpoint of a run that trains it")
            continue
        if own_master if as_it_is else held.dtype is ElementType.FLOAT32 and MASTER not in states[name]:
            kinds.pop(MASTER, None)
        sides = {kind: one.dtype for kind, one in kinds.items()}, states[name]
        if sides[0] != sides[1]:
            said = (", ".join(f"{kind} {dtype.label}" for kind, dtype in sorted(side.items())) for side in sides)
            what = f"has the states {' in the source and '.join(said)} in --like"
            mend = f"name a checkpoint of a run that keeps the same: of AdamW {_KINDS}"
            yield _mismatch(name, what, folder, f"{mend}, masters with accumulate_grad_in_fp32")


def _mismatch(name: str, what: str, found: str, mend: str) -> Fault:
    return ModelMismatch.fault(name, what, found=found, mend=mend)


def _scalars(content: Content, like: NanotronCheckpoint) -> tuple[dict[str, dict[str, Scalar]], list[Fault]]:
    """Return the scalar states of each parameter, as its step, in the types that the `--like` checkpoint has.

    Also returns a fault for each parameter whose scalar states have other names, or cannot be converted.
    """
    assert content.facts is not None
    shown = like.facts.scalars if like.facts is not None else {}
    made: dict[str, dict[str, Scalar]] = {}
    faults: list[Fault] = []
    for name in sorted(set(shown) & set(content.trained)):
        said = {kind: value for kind, value in content.facts.scalars.get(name, {}).items() if value is not None}
        if set(said) != set(shown[name]):
            faults.append(_counters(name, ", ".join(sorted(shown[name])), ", ".join(sorted(said)) or "none"))
            continue
        made[name] = {}
        for kind, value in said.items():
            wanted, number = shown[name][kind], number_of(value)
            kept: Scalar = value
            if isinstance(wanted, ScalarTensor) and number is not None:
                kept = as_scalar(number, wanted)
            if type(kept) is not type(wanted):
                faults.append(_counters(name, describe(wanted), describe(value)))
            made[name][kind] = kept
    return made, faults


def _counters(name: str, expected: str, found: str) -> Fault:
    return UnsupportedLayout.fault(
        name,
        "has other counters than a parameter of nanotron's AdamW",
        expected,
        found,
        mend="resume it with DeepSpeed",
    )


def _scheduler(
    content: Content, groups: Hyperparameters, saved: SavedScheduler, stage: OptimizerFile
) -> SavedScheduler:
    """The schedule of `like` at the content's position, with the rates of the content."""
    kept = content.schedule.counters if content.schedule is not None else {}
    position = kept.get("last_epoch", content.steps)
    counters = {**saved.counters, "last_epoch": position}
    counters["_step_count"] = kept.get("_step_count", (content.steps or 0) + 1)
    rows = (
        {**row, BASE: groups.base(group.members, row[BASE]), LAST: (group.hyperparameters or {})["lr"]}
        for row, group in zip(saved.groups, stage.groups, strict=True)
    )
    return replace(saved, counters=counters, groups=tuple(rows))


def _adoption_notes(content: Content, like: NanotronCheckpoint) -> Iterator[str]:
    left = [name for name in content.extra_entries if name != METADATA]
    if left:
        yield f"left out, as nanotron has no place for them: {', '.join(left)}"
    if content.schedule is None and SCHEDULER in content.entries:
        yield (
            f"the scheduler's own state is left out: the schedule is that of --like, at step {content.steps}, as "
            "config.yaml has it"
        )
    elif like.schedulers:
        yield f"the schedule is that of --like, as config.yaml has it, at step {content.steps}"
    if not like.schedulers:
        yield "no scheduler is written, as --like has none"
    wanted = like.metadata.global_batch_size
    if content.batch_size != wanted:
        known = content.batch_size if content.batch_size is not None else "an unknown number of"
        yield f"the saving run's global batch was {known} samples, and that of config.yaml is {wanted}"
    if METADATA not in content.extra_entries:
        yield f"the data goes on after sample {content.samples} of the one data stage of --like"
