"""The content of a checkpoint: everything that one format passes to another, independent of any framework."""

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
"""Entries that every format stores, under the names that DeepSpeed's model files give them."""
STANDARD_ENTRIES = frozenset({SCHEDULER, STEPS, SAMPLES, "skipped_steps", "checkpoint_parallel_dims"})
STANDARD_ENTRIES |= {"sparse_tensor_module_names", "csr_tensor_module_names", "num_experts"}
"""Standard entries. A format that cannot store them may drop them without a note."""
PER_GROUP = (BASE, LAST, LAMBDAS)
"""The entries of `LambdaLR.state_dict()` that have one value for each param group (torch/optim/lr_scheduler.py)."""
_OF_GROUPS = frozenset({*PER_GROUP, "max_lrs", "min_lrs", "base_momentums", "max_momentums"})
"""Entries with one value per param group, of every scheduler of torch 2.13, DeepSpeed 0.19.8 and transformers."""
_OF_NO_GROUP = frozenset({"_milestones", "milestones"})


def weight_name_fault(where: str, state: str) -> Fault:
    what = f"optimizer state {state} has a name that is reserved for weights and their masters"
    return UnsupportedLayout.fault(where, what, f"any name but {MASTER!r} and {WEIGHT!r}", mend=RENAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A whole tensor, and the key of the source tensor that it is read from; cast if the types differ."""

    shape: tuple[int, ...]
    dtype: ElementType
    origin: TensorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The state of a LambdaLR: `groups` has the PER_GROUP entries of each param group, `counters` all other entries."""

    counters: Mapping[str, object]
    groups: tuple[Mapping[str, object], ...]

    def entries(self) -> dict[str, object]:
        """Return the entries as `state_dict()` has them."""
        return {**{key: [group[key] for group in self.groups] for key in PER_GROUP}, **self.counters}


def schedule_of(state: object, groups: int) -> Schedule | None:
    """Return `state` if it is that of a LambdaLR with that many param groups; None otherwise."""
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
    """Reorder a scheduler's state for new param groups: group i takes the values of saved group `order[i]`.

    `saved` is the number of saved groups. Nested schedulers too. Also returns entries that may have a value per group.
    """
    reordered, unknown = dict(state), list[str]()
    for key, value in state.items() if list(order) != list(range(saved)) else ():
        if isinstance(value, list | tuple) and value and all(isinstance(part, dict) for part in value):
            parts = [reorder_groups(part, order, saved) for part in value]
            reordered[key] = [part for part, _ in parts]
            unknown += [name for _, names in parts for name in names]
        elif isinstance(value, list | tuple) and len(value) == saved:
            if key in _OF_GROUPS:
                reordered[key] = [value[number] for number in order]
            elif key not in _OF_NO_GROUP:
                unknown.append(key)
    return reordered, unknown


def join_states(states: Sequence[Mapping[str, object]], groups: Sequence[int]) -> tuple[dict[str, object], list[str]]:
    """Merge the scheduler states of several optimizers into one, as if their param groups followed each other.

    `groups` is the number of groups of each. Nested schedulers too. Also returns other entries in which they differ.
    """
    merged, differing = dict(states[0]), list[str]()
    for key, value in states[0].items():
        values = [state.get(key) for state in states]
        lists = [values_of_state for values_of_state in values if isinstance(values_of_state, list | tuple)]
        if len(lists) == len(states) and all(
            values_of_state and isinstance(values_of_state[0], dict) for values_of_state in lists
        ):
            parts = [join_states(part, groups) for part in zip(*lists, strict=False)]
            merged[key] = [part for part, _ in parts]
            differing += [name for _, names in parts for name in names]
        elif [len(values_of_state) for values_of_state in lists] == list(groups) and key not in _OF_NO_GROUP:
            merged[key] = [item for values_of_state in lists for item in values_of_state]
        elif any(canonical(values_of_state) != canonical(value) for values_of_state in values):
            differing.append(key)
    return merged, differing


def regrouping_fault(entry: str, where: str) -> Fault:
    """Return the fault of a scheduler entry that may have one value per param group, as the groups were reordered."""
    return UnsupportedLayout.fault(
        where,
        f"changes the order of the param groups; it is not known if the scheduler's {entry} has one value per group",
        mend="keep the param groups in the order in which they were saved",
    )


def with_groups(content: Content, groups: Sequence[GroupFacts], order: Sequence[int], where: str) -> Content:
    """Return the content with other param groups; group i takes the scheduler's values of saved group `order[i]`.

    A scheduler entry that cannot be reordered becomes a fault of the content, at `where`.
    """
    assert content.facts is not None
    saved, schedule, objects, faults = len(content.facts.groups), content.schedule, dict(content.objects), list[Fault]()
    if schedule is not None:
        schedule = replace(schedule, groups=tuple(schedule.groups[number] for number in order))
    for path in (path for path in objects if path[0] == SCHEDULER):
        value, name = objects[path], str(path[-1])
        whole = {str(key): one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        reordered, unknown = reorder_groups(whole, order, saved)
        objects[path] = reordered if isinstance(value, dict) else reordered[name]
        faults += [regrouping_fault(name, where) for name in unknown]
    facts = replace(content.facts, groups=tuple(groups))
    return replace(content, facts=facts, schedule=schedule, objects=objects, faults=(*content.faults, *faults))


Path = tuple[object, ...]
"""The keys that lead to a value in nested dicts."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """One checkpoint, as every format makes it when opened and takes it when written.

    `tensors` has weights and states by parameter and kind, in the model's order; if a weight is its own master, both
    kinds are read from one tensor. `tied` maps the other names of tied parameters to the saved name. `buffers` are
    weights that are not parameters. `extra_tensors` do not belong to the model; they come with the keys that lead to
    them. `records` are the buffers and extra tensors that lie in one piece in a file.

    `ranks` is the number of processes that saved it, None if no file tells. `native_source` is the checkpoint itself,
    for writers of its own format, which keep more. `objects` are the values that are neither tensors nor the
    optimizer's: counters, a scheduler's state, and values of the framework or script. `schedule` is the scheduler if it
    is a LambdaLR. `batch_size` is the global one. `faults` are reasons why no run can go on from here; `notes` tell the
    user what differs from the files or is left out, `shape_notes` are those that hold until a map changes shapes.
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
    shape_notes: frozenset[str] = frozenset()
    native_source: object = None

    @property
    def tag(self) -> str:
        """The folder's name; for a step of nanotron or Megatron-LM, the name that DeepSpeed gives a step."""
        name, steps = os.path.basename(os.path.abspath(self.folder)), self.steps
        is_step = steps is not None and name in (str(steps), f"iter_{steps:07d}")
        return f"global_step{steps}" if is_step else name

    @cached_property
    def weights(self) -> dict[str, TensorSource]:
        """The weights of the model, including buffers."""
        return {
            key.name: source
            for key, source in self.tensors.items()
            if key.kind == WEIGHT and key.name not in self.extra_tensors
        }

    @property
    def names(self) -> set[str]:
        """The names of all tensors, and of parameters of which the optimizer has a step or a param group alone."""
        facts = self.facts or OptimizerFacts(groups=())
        members = (name for group in facts.groups for name in group.members)
        return {*(key.name for key in self.tensors), *facts.scalars, *members}

    @cached_property
    def trained(self) -> dict[str, dict[str, TensorSource]]:
        """The masters and optimizer states of each trained parameter, by name and kind."""
        states: dict[str, dict[str, TensorSource]] = {}
        for key, source in self.tensors.items():
            if key.kind != WEIGHT:
                states.setdefault(key.name, {})[key.kind] = source
        return states

    @cached_property
    def entries(self) -> dict[str, object]:
        """The objects and the extra tensors, nested as in the source."""
        entries: dict[str, object] = {}
        for path, value in self.objects.items():
            _nest(entries, tuple(map(str, path)), value)
        for name, path in self.extra_tensors.items():
            if name in self.records:
                _nest(entries, tuple(map(str, path)), self.records[name])
        if self.schedule is not None:
            entries[SCHEDULER] = self.schedule.entries()
        return entries

    @property
    def nested_states(self) -> list[str]:
        """The dotted keys of values inside a dict or list that is an optimizer state or a value of a param group."""
        groups = self.facts.groups if self.facts is not None and self.native_source is None else ()
        members = {name for group in groups for name in group.members}
        paths = (*self.extra_tensors.values(), *self.objects) if groups else ()
        return [".".join(map(str, path)) for path in paths if _lies_deeper(path, members)]

    @property
    def steps(self) -> int | None:
        """The number of updates that the saving run had made, None if it is unknown."""
        return _count(self.objects.get((STEPS,)))

    @property
    def samples(self) -> int | None:
        return _count(self.objects.get((SAMPLES,)))

    @property
    def extra_entries(self) -> list[str]:
        """The names of the entries that the saving script or framework added to the standard ones."""
        return sorted({str(path[0]) for path in self.objects} - STANDARD_ENTRIES)


def _lies_deeper(path: Path, members: Container[str]) -> bool:
    """True if keys lead inside an optimizer state of one of `members`, or inside a value of a param group."""
    return any(
        (key == "state" and path[at + 1] in members) or (key == "param_groups" and len(path) > at + 3)
        for at, key in enumerate(path[:-2])
    )


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def flatten(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yield the innermost values of nested dicts with the keys that lead to them, as torch's `flatten_state_dict`."""
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, part in value.items():
            yield from flatten(part, (*path, key))
    elif path:
        yield path, value


def _nest(entries: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Put a value at its keys; if another value is in the way, under the dotted name instead."""
    parent = entries
    for key in path[:-1]:
        inner = parent.setdefault(key, {})
        if not isinstance(inner, dict):
            entries[".".join(path)] = value
            return
        parent = inner
    parent[path[-1]] = value
