"""A universal checkpoint: every trained tensor whole, in a file of its own; names and shapes from the model file.

Made by deepspeed/checkpoint/ds_to_universal.py (0.19.8) of a ZeRO checkpoint. It carries over `fp32`, `exp_avg`,
`exp_avg_sq` and, below stage 3, `step`: what else an optimizer kept is left out without a word. Of stage 3 the common
state tells which states there were; below, it has the hyper-parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, damaged, fail, faults_of, raise_faults
from ds_reshard.formats.zero.layout import whole
from ds_reshard.formats.zero.model_states import ModelStates, Shape
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.universal_common import CommonState, read_common
from ds_reshard.formats.zero.universal_files import (
    OPTIMIZER_STATE,
    STEP,
    StateFile,
    list_states,
    read_state,
    read_value,
    state_file,
)
from ds_reshard.formats.zero.universal_order import scrambled
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical, describe
from ds_reshard.model.layout import Placement
from ds_reshard.model.records import TensorRecord

BUFFER = "param"
_FP32 = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalStates:
    """What a universal checkpoint holds beside its model files, and where.

    `nbytes` are the files below `zero` with their sizes. `incomplete` are the faults of a load with moments: states
    that are known to be missing.
    """

    common: CommonState
    facts: OptimizerFacts
    placements: tuple[Placement, ...]
    nbytes: Mapping[str, int]
    incomplete: tuple[Fault, ...]


def read_universal(listing: Listing, model: ModelStates) -> UniversalStates:
    """Read what all ranks share: the sizes of all files, the common state, one file of each state, every step.

    Raises every structural fault at once: parameters without a folder or a master, files that cannot be read, steps
    that differ within a param group, and masters that ds_to_universal is known to have made wrong.
    """
    shapes = model.trainable
    names = [name for name, shape in shapes.items() if prod(shape)]
    files, faults = list_states(listing.folder, names)
    try:
        common = read_common(listing.path(OPTIMIZER_STATE), model)
    except ReshardError as error:
        raise_faults([*faults, *faults_of(error)], subject=f"checkpoint {listing.folder}")
        raise
    reading = _Reading(listing=listing, model=model, shapes=shapes, common=common, files=files, faults=faults)
    reading.check_order()
    reading.check_masters()
    scalars = reading.scalars()
    placements = tuple(reading.placements())
    faults += reading.steps_that_differ(scalars)
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    groups = tuple(
        GroupFacts(members=tuple(reading.members(g)), hyperparameters=hyper) for g, hyper in enumerate(common.groups)
    )
    nbytes = {state_file(name, kind): size for name, sizes in files.items() for kind, size in sizes.items()}
    return UniversalStates(
        common=common,
        facts=OptimizerFacts(groups=groups, scalars=scalars),
        placements=placements,
        nbytes={OPTIMIZER_STATE: common.nbytes, **nbytes},
        incomplete=tuple(reading.missing_states()),
    )


@dataclass(slots=True, kw_only=True)
class _Reading:
    """A universal checkpoint being read: `files` are the states of each parameter that has elements, with their bytes.

    A parameter without elements has no files: it is taken to have had what its group's others have.
    """

    listing: Listing
    model: ModelStates
    shapes: Mapping[str, Shape]
    common: CommonState
    files: Mapping[str, Mapping[str, int]]
    faults: list[Fault]
    opened: dict[tuple[str, str], StateFile | None] = field(default_factory=dict)

    def members(self, group: int) -> list[str]:
        shapes = self.model.param_shapes or ()
        return [name for i in self.common.buffers[group] for name in shapes[i]]

    def sources(self) -> Iterator[tuple[str, str]]:
        """Each parameter, and the one whose files tell of its states: itself, where it has elements."""
        for group in range(len(self.common.groups)):
            members = self.members(group)
            first = next((name for name in members if name in self.files), None)
            for name in members:
                source = first if not prod(self.shapes[name]) else name
                if source is not None and source in self.files:
                    yield name, source

    def open(self, name: str, kind: str) -> StateFile | None:
        """What a file holds; a fault is noted, and None returned, where it cannot be read."""
        if (name, kind) not in self.opened:
            try:
                found: StateFile | None = read_state(self.listing.path(state_file(name, kind)), kind)
            except ReshardError as error:
                self.faults += faults_of(error)
                found = None
            self.opened[name, kind] = found
        return self.opened[name, kind]

    def check_order(self) -> None:
        """Refuse parameters that were mixed up; only where they can be is anything opened for it."""
        if self.model.dp > 1 and self.common.stage < 3 and not self.common.own:
            names = [name for name, kinds in self.files.items() if _FP32 in kinds]
            self.faults += scrambled(self.listing, self.model, names, lambda name: self.open(name, _FP32))

    def check_masters(self) -> None:
        for name, kinds in self.files.items():
            path = self.listing.path(state_file(name, _FP32))
            if _FP32 not in kinds:
                self.faults.append(damaged(path, f"parameter {name} has no master", "a file", "none"))
            elif set(kinds) == {_FP32} and not self.common.own and self.common.stage < 3:
                file = self.open(name, _FP32)
                if file is not None and file.from_weights:
                    self.faults.append(_no_shard(path, name))

    def kinds(self, *, single: bool) -> dict[str, StateFile]:
        """The states that are one value, or those that follow their parameters, each with its first file."""
        first: dict[str, str] = {}
        for name, kinds in self.files.items():
            for kind in kinds:
                first.setdefault(kind, name)
        files = {kind: self.open(name, kind) for kind, name in first.items()}
        return {kind: file for kind, file in files.items() if file is not None and (file.tensor is None) == single}

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        """The states of each parameter that are one value."""
        single = self.kinds(single=True)
        buffers = zip(self.model.param_shapes or (), self.common.scalars, strict=True)
        found = {name: dict(embedded) for shapes, embedded in buffers for name in shapes}
        known: dict[bytes, StateFile] = {}
        for name, source in self.sources():
            for kind in single.keys() & self.files[source].keys():
                try:
                    file = read_value(self.listing.path(state_file(source, kind)), kind, known)
                    found[name][kind] = file.scalar
                except ReshardError as error:
                    self.faults += faults_of(error)
        return found

    def placements(self) -> Iterator[Placement]:
        """Each tensor in a family of its own, of one shard: its file. Its type is that of the state's first file."""
        following = self.kinds(single=False)
        for name, source in self.sources():
            for kind in self.files[source]:
                tensor = following[kind].tensor if kind in following else None
                if tensor is not None:
                    shape, family = self.shapes[name], state_file(name, kind)
                    yield whole(name, kind, shape, tensor.dtype, family=family, buffer=BUFFER)

    def missing_states(self) -> Iterator[Fault]:
        """States that the optimizer kept of a parameter, or of another of its param group, and that are not here."""
        shapes = self.model.param_shapes or ()
        for group, buffers in enumerate(self.common.buffers):
            of_group = {kind for name in self.members(group) for kind in self.files.get(name, ())}
            for i in buffers:
                kept = of_group | (self.common.kept[i] if self.common.kept is not None else frozenset())
                for name in shapes[i]:
                    if name in self.files:
                        yield from self._absent(name, kept - set(self.common.scalars[i]) - set(self.files[name]))

    def _absent(self, name: str, kinds: Iterable[str]) -> Iterator[Fault]:
        for kind in sorted(kinds):
            yield CheckpointDamaged.fault(
                self.listing.path(state_file(name, kind)),
                f"the saved optimizer kept {kind} of parameter {name}, and it is not here",
                "a file",
                "none",
                mend="load the ZeRO checkpoint that it was made from, or pass load_optimizer_states=False",
            )

    def steps_that_differ(self, scalars: Mapping[str, Mapping[str, Scalar]]) -> Iterator[Fault]:
        """The members of a param group were stepped together."""
        for group in range(len(self.common.groups)):
            steps = {name: scalars[name][STEP] for name in self.members(group) if STEP in scalars[name]}
            first = next(iter(steps), "")
            for name, step in steps.items():
                if canonical(step) != canonical(steps[first]):
                    path = self.listing.path(state_file(name, STEP))
                    what = f"is of another step than {first}, which is of the same param group"
                    yield damaged(path, what, describe(steps[first]), describe(step))


def _no_shard(path: str, name: str) -> Fault:
    return CheckpointDamaged.fault(
        path,
        f"is no master of {name} but a copy of its weight: ds_to_universal found no optimizer state of it",
        "the fp32 master, and states beside it",
        "the weight",
        mend="convert again with all optimizer shards, or load the ZeRO checkpoint that it was made from "
        "(one that was saved before the first step has no states, and does not survive the conversion)",
    )


def check_tensor(file: StateFile, placement: Placement) -> TensorRecord:
    """The tensor of a file, as its placement wants it; raises CheckpointDamaged where it is another."""
    tensor, shape, numel = file.tensor, placement.shape, placement.numel
    if tensor is None:
        raise fail(file.path, "holds one value", f"a tensor of {numel} elements", describe(file.scalar))
    if tensor.shape not in (shape, (numel,)):
        what = "has lost the rows that pad the vocabulary" if file.stripped else "has another shape than its parameter"
        raise fail(file.path, what, str(list(shape)), str(list(tensor.shape)))
    if tensor.dtype is not placement.dtype:
        what = f"is of another type than {placement.key.kind} of the first parameter"
        raise fail(file.path, what, placement.dtype.label, tensor.dtype.label)
    if not tensor.contiguous:
        raise fail(file.path, "does not lie row-major", "the strides of a whole tensor", str(tensor.stride))
    return tensor
