"""All that a resume needs of a checkpoint, in the words of no framework: what one format hands another."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, canonical
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, TensorRecord

BASE, LAST, LAMBDAS = "base_lrs", "_last_lr", "lr_lambdas"
MASTER, WEIGHT = "fp32", "weight"
RENAME = "save it again under names that differ"
SCHEDULER, STEPS, SAMPLES = "lr_scheduler", "global_steps", "global_samples"
"""The entries that every format has a place for; of DeepSpeed's model files, whose names they have everywhere."""
STANDARD_ENTRIES = frozenset({SCHEDULER, STEPS, SAMPLES, "skipped_steps", "checkpoint_parallel_dims"})
STANDARD_ENTRIES |= {"sparse_tensor_module_names", "csr_tensor_module_names", "num_experts"}
"""Entries that are nobody's own: a format that has no place for them loses nothing that it does not say."""
PER_GROUP = (BASE, LAST, LAMBDAS)
"""The entries of `LambdaLR.state_dict()` that have one value for each param group (torch/optim/lr_scheduler.py)."""
_OF_GROUPS = frozenset({*PER_GROUP, "max_lrs", "min_lrs", "base_momentums", "max_momentums"})
"""Those of every scheduler of torch 2.13, of DeepSpeed 0.19.8 and of transformers."""
_OF_NO_GROUP = frozenset({"_milestones", "milestones"})


def weight_name_fault(where: str, state: str) -> Fault:
    what = f"{state} is an optimizer state of the name that a weight, or its master, has here"
    return UnsupportedLayout.fault(where, what, f"any name but {MASTER!r} and {WEIGHT!r}", mend=RENAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A whole tensor, and the one of the source that it is read from; cast where the types differ."""

    shape: tuple[int, ...]
    dtype: ElementType
    origin: TensorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The state of a LambdaLR: `groups` has of each param group the entries of PER_GROUP, `counters` all others."""

    counters: Mapping[str, object]
    groups: tuple[Mapping[str, object], ...]

    def entries(self) -> dict[str, object]:
        """As `state_dict()` has them."""
        return {**{key: [group[key] for group in self.groups] for key in PER_GROUP}, **self.counters}


def schedule_of(state: object, groups: int) -> Schedule | None:
    """The state of a LambdaLR with that many param groups; None for anything else."""
    if not isinstance(state, dict):
        return None
    lists = [state.get(key) for key in PER_GROUP]
    if not all(isinstance(values, list) and len(values) == groups for values in lists):
        return None
    rows = [{key: state[key][number] for key in PER_GROUP} for number in range(groups)]
    return Schedule(
        groups=tuple(rows), counters={str(key): value for key, value in state.items() if key not in PER_GROUP}
    )


def reorder_groups(
    state: Mapping[str, object], order: Sequence[int], saved: int
) -> tuple[dict[str, object], list[str]]:
    """A scheduler's state for other param groups: group i is what `order[i]` was, of `saved` groups.

    Schedulers inside it too. Beside it, the entries that may have a value for each group and are not known to.
    """
    made, unknown = dict(state), list[str]()
    for key, value in state.items() if list(order) != list(range(saved)) else ():
        if isinstance(value, list | tuple) and value and all(isinstance(part, dict) for part in value):
            parts = [reorder_groups(part, order, saved) for part in value]
            made[key] = [part for part, _ in parts]
            unknown += [name for _, names in parts for name in names]
        elif isinstance(value, list | tuple) and len(value) == saved:
            if key in _OF_GROUPS:
                made[key] = [value[number] for number in order]
            elif key not in _OF_NO_GROUP:
                unknown.append(key)
    return made, unknown


def join_states(states: Sequence[Mapping[str, object]], groups: Sequence[int]) -> tuple[dict[str, object], list[str]]:
    """One scheduler's state of those of several optimizers, whose param groups follow each other; of each so many.

    Schedulers inside it too. Beside it, the entries in which they differ though they have not a value for each group.
    """
    made, differing = dict(states[0]), list[str]()
    for key, value in states[0].items():
        values = [state.get(key) for state in states]
        lists = [one for one in values if isinstance(one, list | tuple)]
        if len(lists) == len(states) and all(one and isinstance(one[0], dict) for one in lists):
            parts = [join_states(part, groups) for part in zip(*lists, strict=False)]
            made[key] = [part for part, _ in parts]
            differing += [name for _, names in parts for name in names]
        elif [len(one) for one in lists] == list(groups) and key not in _OF_NO_GROUP:
            made[key] = [item for one in lists for item in one]
        elif any(canonical(one) != canonical(value) for one in values):
            differing.append(key)
    return made, differing


def regrouping_fault(entry: str, where: str) -> Fault:
    """That an entry of a scheduler's state may have a value for each param group, which are others now."""
    return UnsupportedLayout.fault(
        where,
        f"gives the param groups another order, and whether the scheduler's {entry} follows it is not known",
        mend="keep the param groups in the order in which they were saved",
    )


def with_groups(content: Content, groups: Sequence[GroupFacts], order: Sequence[int], where: str) -> Content:
    """The content with other param groups: group i has the scheduler's values of what `order[i]` was.

    Its `faults` say where that is not known; `where` is what asked for it.
    """
    assert content.facts is not None
    saved, schedule, objects, faults = len(content.facts.groups), content.schedule, dict(content.objects), list[Fault]()
    if schedule is not None:
        schedule = replace(schedule, groups=tuple(schedule.groups[number] for number in order))
    for path in (path for path in objects if path[0] == SCHEDULER):
        made, unknown = reorder_groups({str(path[-1]): objects[path]}, order, saved)
        objects[path] = made[str(path[-1])]
        faults += [regrouping_fault(name, where) for name in unknown]
    facts = replace(content.facts, groups=tuple(groups))
    return replace(content, facts=facts, schedule=schedule, objects=objects, faults=(*content.faults, *faults))


Path = tuple[object, ...]
"""The keys that lead to a value in nested dicts."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """One checkpoint; every format makes one when it is opened, and every format that is written is made of one.

    `tensors` has weights and states by parameter and kind, in the model's order: of a weight that is its own master
    both kinds are read from one tensor. `tied` has the other names of tied parameters, `buffers` the weights that no
    optimizer trains because they are no parameters, `beside` tensors that are not the model's, with the keys that lead
    to them. `records` are those of `buffers` and `beside` that lie in one piece in a file.

    `ranks` is the number of processes that saved it, None where no file tells. `home` is what its own format made it
    of, and knows more of than others have a place for. `objects` are the values beside tensors
    and optimizer: counters, the state of a scheduler of whatever kind, and what only one framework or script knows.
    `schedule` is the scheduler where it is a LambdaLR. `batch_size` is the global one. `faults` keep a run from going
    on from this; `notes` say what is otherwise here than in the files, and what is left out.
    """

    folder: str
    ranks: int | None
    tensors: Mapping[TensorKey, TensorSource]
    facts: OptimizerFacts | None
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    extra_tensors: Mapping[str, Path] = field(default_factory=dict)
    records: Mapping[str, TensorRecord] = field(default_factory=dict)
    objects: Mapping[Path, object] = field(default_factory=dict)
    schedule: Schedule | None = None
    batch_size: int | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    native_source: object = None

    @property
    def tag(self) -> str:
        """The folder's name; where that is the step alone, as in nanotron, the name that DeepSpeed gives a step."""
        name = os.path.basename(os.path.abspath(self.folder))
        return f"global_step{name}" if name == str(self.steps) else name

    @cached_property
    def weights(self) -> dict[str, TensorSource]:
        """The model's own, buffers with them."""
        return {
            key.name: held
            for key, held in self.tensors.items()
            if key.kind == WEIGHT and key.name not in self.extra_tensors
        }

    @cached_property
    def trained(self) -> dict[str, dict[str, TensorSource]]:
        """The parameters that the optimizer has states of, with these and their masters."""
        found: dict[str, dict[str, TensorSource]] = {}
        for key, held in self.tensors.items():
            if key.kind != WEIGHT:
                found.setdefault(key.name, {})[key.kind] = held
        return found

    @cached_property
    def entries(self) -> dict[str, object]:
        """The objects, and the tensors beside the model, nested as they were."""
        made: dict[str, object] = {}
        for path, value in self.objects.items():
            _nest(made, tuple(map(str, path)), value)
        for name, path in self.extra_tensors.items():
            if name in self.records:
                _nest(made, tuple(map(str, path)), self.records[name])
        if self.schedule is not None:
            made[SCHEDULER] = self.schedule.entries()
        return made

    @property
    def nested_states(self) -> list[str]:
        """The parts of an optimizer inside a dict or a list: of a state, or of a value of a group, by their keys."""
        groups = self.facts.groups if self.facts is not None and self.native_source is None else ()
        members = {name for group in groups for name in group.members}
        paths = (*self.extra_tensors.values(), *self.objects) if groups else ()
        return [".".join(map(str, path)) for path in paths if _lies_deeper(path, members)]

    @property
    def steps(self) -> int | None:
        """The updates that the saving run had made."""
        return _count(self.objects.get((STEPS,)))

    @property
    def samples(self) -> int | None:
        return _count(self.objects.get((SAMPLES,)))

    @property
    def extra_entries(self) -> list[str]:
        """The names of the entries that the saving script or framework has beside the usual ones."""
        return sorted({str(path[0]) for path in self.objects} - STANDARD_ENTRIES)


def _lies_deeper(path: Path, members: Container[str]) -> bool:
    """Whether keys lead through an optimizer's state of one of its members, or a value of a param group, to a part."""
    return any(
        (key == "state" and path[at + 1] in members) or (key == "param_groups" and len(path) > at + 3)
        for at, key in enumerate(path[:-2])
    )


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def flatten(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The innermost values of nested dicts by the keys that lead to them, as `flatten_state_dict` of torch has them."""
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, part in value.items():
            yield from flatten(part, (*path, key))
    elif path:
        yield path, value


def _nest(entries: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Put a value where it was; where another value is in the way, under its whole name."""
    at = entries
    for key in path[:-1]:
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            entries[".".join(path)] = value
            return
        at = inner
    at[path[-1]] = value
