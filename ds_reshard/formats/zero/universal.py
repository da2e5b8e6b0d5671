"""Read a universal checkpoint: every trained tensor whole, in one file; names and shapes are in the model file.

deepspeed/checkpoint/ds_to_universal.py (0.19.8) makes it from a ZeRO checkpoint: `zero/<parameter>/<state>.pt`, and
`zero/optimizer_state.pt`, which has what all parameters of a group have in common.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ds_reshard.containers import folders
from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    ReadFailed,
    ReshardError,
    UnsupportedLayout,
    collected,
    damaged,
    fail,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.zero.flat import whole_placement
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, keys_of, read_stage, states_in, torch_state
from ds_reshard.formats.zero.patterns import Patterns
from ds_reshard.model.content import SCHEDULER
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical, describe, text_of
from ds_reshard.model.layout import Placement
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalStates(OptimStates):
    """The header of `optimizer_state.pt`, which has no partitions, and what is known of the files beside it.

    `members` are the flat buffers (entries of `param_shapes`) of each param group. `states` are the names of the states
    that the optimizer kept of each flat buffer, None if the file does not say; `scalars` are those with a single value
    in this file. `by_ds_reshard` is set if `ds-reshard convert` wrote the file: then no state is left out, and each
    param group names its members. `nbytes` are the sizes of the files below `zero`. `missing_states` are faults of
    states that are known to be missing, for a load that needs moments.
    """

    groups: tuple[Mapping[str, object], ...]
    states: Sequence[frozenset[str]] | None
    scalars: Sequence[Mapping[str, Scalar]]
    by_ds_reshard: bool
    nbytes: Mapping[str, int]
    missing_states: tuple[Fault, ...] = ()


def read_common(path: str, model: ModelStates) -> UniversalStates:
    """Read the file: directory, pickle and scalar states. Raises CheckpointDamaged if it belongs to another model."""
    count = len(model.param_shapes or ())
    with open_archive(path) as archive:
        check_root(path, "optimizer_state", archive.root)
        entries = archive.load()
        if not isinstance(entries, dict) or not isinstance(entries.get("param_groups"), list):
            raise fail(path, "is not a universal checkpoint's common state", "'param_groups'", keys_of(entries))
        by_ds_reshard, numbered = _with_buffer_numbers(path, entries["param_groups"], model)
        _, groups, members = torch_state(path, "param_groups", {"state": {}, "param_groups": numbered})
        if sorted(i for of_group in members for i in of_group) != list(range(count)):
            raise fail(path, "param groups and the model file's param_shapes differ", f"{count}", str(members))
        partitions = _embedded_partitions(path, archive, entries, count)
        nbytes = archive.nbytes
    states: Sequence[frozenset[str]] | None = None
    if partitions is not None:
        states = [frozenset({*p.states, *p.scalars, *p.unreshardable}) for p in partitions]
    elif by_ds_reshard:
        states = [frozenset[str]()] * count
    return UniversalStates(
        path=path,
        kind="universal",
        stage=read_stage(path, entries["zero_stage"]) if "zero_stage" in entries else 1,
        entries=entries,
        groups=groups,
        members=members,
        version=text_of(entries.get("ds_version", "unknown")),
        states=states,
        # other single values may be kept per rank, and these are rank 0's
        scalars=[{name: p.scalars[name] for name in ("step", "mu_product") if name in p.scalars} for p in partitions]
        if partitions is not None
        else [{}] * count,
        by_ds_reshard=by_ds_reshard,
        nbytes={OPTIMIZER_STATE: nbytes},
    )


def _with_buffer_numbers(path: str, groups: list[object], model: ModelStates) -> tuple[bool, list[object]]:
    """Return the param groups with the numbers of their flat buffers, behind True if they had named their members."""
    shapes = model.param_shapes or ()
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not any(isinstance(name, str) for params in members if isinstance(params, list) for name in params):
        return False, groups
    if len(groups) != len(shapes) or any(params != list(names) for params, names in zip(members, shapes, strict=True)):
        raise fail(path, "param groups and the model file's param_shapes differ", f"{len(shapes)}", f"{len(groups)}")
    numbered: list[object] = [
        {**group, "params": [number]} for number, group in enumerate(groups) if isinstance(group, dict)
    ]
    return True, numbered


def _embedded_partitions(
    path: str, archive: TorchArchive, entries: Mapping[str, object], count: int
) -> tuple[Partition, ...] | None:
    """Return rank 0's partitions, which ds_to_universal leaves in the file for a stage-3 checkpoint, or None."""
    if "fp32_flat_groups" not in entries:
        return None
    partitions = states_in(path, archive, {}, entries).partitions
    if len(partitions) != count:
        raise fail(path, "flat buffers do not match the model file", f"{count}", f"{len(partitions)}")
    return partitions


ZERO = "zero"
STEP = "step"
OPTIMIZER_STATE = f"{ZERO}/optimizer_state.pt"
_VALUE_NBYTES = 8192
_PARAM, _VOCABULARY, _EXPERT, _EXPERTS = "param", "vocab_tensor", "is_expert_param", "ep_num_experts"


def state_file(name: str, kind: str) -> str:
    """Return the path of one state of one parameter, below the checkpoint's folder."""
    return f"{ZERO}/{name}/{kind}.pt"


def is_state_file(path: str, folder: str) -> bool:
    """True if a file of the universal checkpoint `folder` holds one state of one parameter."""
    return path.startswith(f"{folder}/{ZERO}/") and path != f"{folder}/{OPTIMIZER_STATE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One state of one parameter: a tensor, or one value if `tensor` is None; `keys` are the entries beside it."""

    path: str
    tensor: TensorRecord | None
    scalar: Scalar
    keys: frozenset[str]

    @property
    def stripped(self) -> bool:
        """True if rows that pad the vocabulary may be missing."""
        return _VOCABULARY in self.keys

    @property
    def from_weights(self) -> bool:
        """True if the file looks like ds_to_universal's copy of the model's weight, made for lack of a master."""
        return self.keys == {_PARAM}


def list_states(folder: str, names: Iterable[str]) -> tuple[dict[str, dict[str, int]], list[Fault]]:
    """Return each parameter's states with their bytes, and a fault for each parameter without a folder."""
    states_by_name: dict[str, dict[str, int]] = {}
    faults: list[Fault] = []
    for name in names:
        where = f"{folder}/{ZERO}/{name}"
        if os.path.isabs(name) or ".." in name.split("/"):
            faults.append(damaged(folder, "has a parameter name that cannot be a path", "a plain name", repr(name)))
            continue
        sizes = {file: nbytes for file, nbytes in folders.files(where).items() if file.endswith(".pt")}
        if not sizes and not folders.is_folder(where):
            what = f"parameter {name} was trained, and has no folder here"
            mend = "convert the checkpoint again, or load the one that it was made from"
            expected = "a folder with its master and states"
            faults.append(CheckpointDamaged.fault(where, what, expected, "none", mend=mend))
            continue
        states_by_name[name] = {file.removesuffix(".pt"): sizes[file] for file in sorted(sizes)}
        faults += [
            damaged(f"{where}/{file}", "is empty", "a torch zip file", "0 bytes") for file in sizes if not sizes[file]
        ]
    return states_by_name, faults


def read_state(path: str, kind: str) -> StateFile:
    """Read one file: directory and pickle, and the bytes of a scalar."""
    with open_archive(path) as archive:
        check_root(path, kind, archive.root)
        content = archive.load()
        if isinstance(content, dict):
            tensor = content.get(_PARAM)
            if not isinstance(tensor, TensorRecord):
                raise fail(path, "holds no tensor", f"an entry {_PARAM!r}", keys_of(content))
            if content.get(_EXPERT) and _EXPERTS in content:  # all experts of a layer in one tensor
                raise fail(path, "holds all experts of a layer", "a parameter that every rank has", _EXPERT)
            return StateFile(path=path, tensor=tensor, scalar=None, keys=frozenset(map(str, content)))
        if isinstance(content, TensorRecord) and content.shape and kind != STEP:
            return StateFile(path=path, tensor=content, scalar=None, keys=frozenset())
        return StateFile(path=path, tensor=None, scalar=_scalar(path, archive, content), keys=frozenset())


def read_value(path: str, kind: str, cache: dict[bytes, StateFile]) -> StateFile:
    """Read a file with one value as `read_state` does, but parse equal bytes only once.

    torch.save writes equal values into equal files, and every parameter has a step file.
    """
    try:
        data = folders.read_small(path, _VALUE_NBYTES + 1)
    except ReadFailed:
        return read_state(path, kind)
    if data not in cache:
        file = read_state(path, kind)
        if len(data) > _VALUE_NBYTES:
            return file
        cache[data] = file
    return replace(cache[data], path=path)


def _scalar(path: str, archive: TorchArchive, value: object) -> Scalar:
    if isinstance(value, TensorRecord) and value.numel == 1 and value.contiguous:
        return ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise fail(path, "is neither a tensor nor one value", "a tensor, or a number", type(value).__name__)


BUFFER = "param"
_FP32 = "fp32"


def read_universal(
    listing: Listing, model: ModelStates, stages: Sequence[ModelStates] = ()
) -> tuple[UniversalStates, OptimizerFacts, tuple[Placement, ...]]:
    """Read what all ranks share: the sizes of all files, the common state, one file of each state, every step.

    `stages` are the model files of a pipeline, which `model` merges. Also returns where masters and states lie.

    Raises every structural fault at once: parameters without a folder or a master, files that cannot be read, steps
    that differ within a param group, and masters that ds_to_universal is known to have made wrong.
    """
    shapes = model.trainable
    folder = f"{listing.folder}/{ZERO}"
    names = [name for name, shape in shapes.items() if prod(shape) or folders.is_folder(f"{folder}/{name}")]
    files, faults = list_states(listing.folder, names)
    try:
        common = read_common(listing.path(OPTIMIZER_STATE), stages[0] if stages else model)
        common, model, stage_faults = _merge_stages(common, model, stages)
        raise_faults(stage_faults, subject=f"checkpoint {listing.folder}")
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
        GroupFacts(members=tuple(reading.members(n)), hyperparameters=values) for n, values in enumerate(common.groups)
    )
    nbytes = {state_file(name, kind): size for name, sizes in files.items() for kind, size in sizes.items()}
    missing_states = tuple(reading.missing_states())
    states = replace(common, nbytes={**common.nbytes, **nbytes}, missing_states=missing_states)
    return states, OptimizerFacts(groups=groups, scalars=scalars), placements


def _merge_stages(
    common: UniversalStates, model: ModelStates, stages: Sequence[ModelStates]
) -> tuple[UniversalStates, ModelStates, list[Fault]]:
    """Merge the common state of all stages, with each parameter once; also return faults that prevent it.

    ds_to_universal takes it from the first stage alone, as DeepSpeed's loaders do for all. If no pattern matches what
    several stages have, it lets the last stage's copy win, or mixes two that are cut differently.
    """
    mend = "load the ZeRO checkpoint that it was made from"
    faults: list[Fault] = []
    paths: dict[str, str] = {}
    buffers: list[list[int]] = [[] for _ in common.members]
    shapes: list[dict[str, Shape]] = []
    schedule = canonical(stages[0].entries.get(SCHEDULER)) if stages else ""
    saved = section(model.entries, "universal_checkpoint_info").get("pipeline_replicated_parameter_patterns")
    patterns = Patterns(saved if isinstance(saved, list | tuple) else ())
    for stage in stages:
        of_stage = stage.param_shapes or ()
        if len(of_stage) != len(stages[0].param_shapes or ()) or canonical(stage.entries.get(SCHEDULER)) != schedule:
            what = "has other param groups than the first stage, and a universal checkpoint has only the first's"
            faults.append(
                UnsupportedLayout.fault(stage.path, what, "as many, of the same schedule", "others", mend=mend)
            )
            continue
        for of_group, numbers in zip(buffers, common.members, strict=True):
            of_group += [len(shapes) + number for number in numbers]
        shapes += [{name: shape for name, shape in group.items() if name not in paths} for group in of_stage]
        copies = [name for name in stage.trainable if name in paths]
        for name in copies:
            if not patterns.matching(name):
                what = f"has a copy of {name} that no pattern matches: ds_to_universal took this one, or mixed the two"
                saved_patterns = ("pipeline_replicated_parameter_patterns", "none that matches")
                faults.append(CheckpointDamaged.fault(stage.path, what, *saved_patterns, mend=mend))
        paths |= dict.fromkeys(stage.trainable, stage.path)
    if not stages or faults:
        return common, model, faults
    trainable = model.trainable
    groups = tuple({name: trainable[name] for name in group} for group in shapes)
    common = replace(
        common,
        members=tuple(map(tuple, buffers)),
        states=None if common.states is None else [common.states[n % len(common.states)] for n in range(len(groups))],
        scalars=[common.scalars[n % len(common.scalars)] for n in range(len(groups))],
    )
    return common, replace(model, param_shapes=groups), faults


@dataclass(slots=True, kw_only=True)
class _Reading:
    """A universal checkpoint being read: `files` are the states of each parameter that has files, with their bytes.

    ds_to_universal writes no file for an empty parameter: it is taken to have had the states of its group's others.
    """

    listing: Listing
    model: ModelStates
    shapes: Mapping[str, Shape]
    common: UniversalStates
    files: Mapping[str, Mapping[str, int]]
    faults: list[Fault]
    opened: dict[tuple[str, str], StateFile | None] = field(default_factory=dict)

    def members(self, group: int) -> list[str]:
        shapes = self.model.param_shapes or ()
        return [name for i in self.common.members[group] for name in shapes[i]]

    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield each parameter with the one whose files are read for its states: itself, if it has files."""
        for group in range(len(self.common.groups)):
            members = self.members(group)
            with_files = next((name for name in members if name in self.files), None)
            for name in members:
                source = with_files if not prod(self.shapes[name]) and name not in self.files else name
                if source is not None and source in self.files:
                    yield name, source

    def open(self, name: str, kind: str) -> StateFile | None:
        """Return what a file holds; if it cannot be read, note a fault and return None."""
        if (name, kind) not in self.opened:
            self.opened[name, kind] = None
            with collected(self.faults):
                self.opened[name, kind] = read_state(self.listing.path(state_file(name, kind)), kind)
        return self.opened[name, kind]

    def check_order(self) -> None:
        """Refuse parameters that ds_to_universal mixed up, or may have, as the saved DeepSpeed JSON tells.

        The JSON is not saved if an older DeepSpeed (0.16.4) was given its path. These faults are no UnsupportedLayout,
        which "load_universal" would leave to DeepSpeed.
        """
        if self.model.dp < 2 or self.common.stage == 3 or self.common.by_ds_reshard:
            return
        mixed_up = "was converted from a run with round_robin_gradients, whose parameters ds_to_universal mixes up"
        mend = "load the ZeRO checkpoint that it was made from, or convert that with ds-reshard convert --to universal"
        if not isinstance(self.model.entries.get("ds_config"), dict):
            what = "has no DeepSpeed JSON in its entry 'ds_config', which would say whether the saving run had "
            what += "round_robin_gradients: ds_to_universal then mixes up parameters"
            found = describe(self.model.entries.get("ds_config"))
            self.faults.append(CheckpointDamaged.fault(self.model.path, what, "the JSON", found, mend=mend))
        elif section(self.model.config, "zero_optimization").get("round_robin_gradients") is True:
            expected_and_found = ("each parameter's own master and states", "parts of others")
            self.faults.append(CheckpointDamaged.fault(self.listing.folder, mixed_up, *expected_and_found, mend=mend))

    def check_masters(self) -> None:
        for name, kinds in self.files.items():
            path = self.listing.path(state_file(name, _FP32))
            if _FP32 not in kinds:
                self.faults.append(damaged(path, f"parameter {name} has no master", "a file", "none"))
            elif set(kinds) == {_FP32} and not self.common.by_ds_reshard and self.common.stage < 3:
                file = self.open(name, _FP32)
                if file is not None and file.from_weights:
                    self.faults.append(_copied_weight_fault(path, name))

    def kinds(self, *, single: bool) -> dict[str, StateFile]:
        """Return the states with a single value, or those shaped like their parameters, each with its first file."""
        first_names: dict[str, str] = {}
        for name, kinds in self.files.items():
            for kind in kinds:
                first_names.setdefault(kind, name)
        files = {kind: self.open(name, kind) for kind, name in first_names.items()}
        return {kind: file for kind, file in files.items() if file is not None and (file.tensor is None) == single}

    def scalars(self) -> dict[str, dict[str, Scalar]]:
        """Return each parameter's scalar states."""
        scalar_files = self.kinds(single=True)
        buffers = zip(self.model.param_shapes or (), self.common.scalars, strict=True)
        values = {name: dict(embedded) for shapes, embedded in buffers for name in shapes}
        cache: dict[bytes, StateFile] = {}
        for name, source in self.sources():
            for kind in scalar_files.keys() & self.files[source].keys():
                with collected(self.faults):
                    file = read_value(self.listing.path(state_file(source, kind)), kind, cache)
                    values[name][kind] = file.scalar
        return values

    def placements(self) -> Iterator[Placement]:
        """Yield each tensor's placement: its file is a family of one shard; the state's first file has the type."""
        tensor_files = self.kinds(single=False)
        for name, source in self.sources():
            for kind in self.files[source]:
                tensor = tensor_files[kind].tensor if kind in tensor_files else None
                if tensor is not None:
                    shape, family = self.shapes[name], state_file(name, kind)
                    yield whole_placement(name, kind, shape, tensor.dtype, family=family, buffer=BUFFER)

    def missing_states(self) -> Iterator[Fault]:
        """Yield a fault for each missing state that the optimizer kept of a parameter or another of its group."""
        shapes = self.model.param_shapes or ()
        for group, buffers in enumerate(self.common.members):
            group_kinds = {kind for name in self.members(group) for kind in self.files.get(name, ())}
            for n in buffers:
                expected = group_kinds | (self.common.states[n] if self.common.states is not None else frozenset())
                for name in shapes[n]:
                    if name in self.files:
                        yield from self._absent(name, expected - set(self.common.scalars[n]) - set(self.files[name]))

    def _absent(self, name: str, kinds: Iterable[str]) -> Iterator[Fault]:
        mend = "load the ZeRO checkpoint that it was made from, or pass --no-load-optim, or load_optimizer_states=False"
        for kind in sorted(kinds):
            what = f"the saved optimizer had {kind} of parameter {name}, and its file is missing"
            path = self.listing.path(state_file(name, kind))
            yield CheckpointDamaged.fault(path, what, "a file", "none", mend=mend)

    def steps_that_differ(self, scalars: Mapping[str, Mapping[str, Scalar]]) -> Iterator[Fault]:
        """Yield a fault for each parameter of another step than its param group's first: a group steps together."""
        for group in range(len(self.common.groups)):
            steps = {name: scalars[name][STEP] for name in self.members(group) if STEP in scalars[name]}
            first = next(iter(steps), "")
            for name, step in steps.items():
                if canonical(step) != canonical(steps[first]):
                    path = self.listing.path(state_file(name, STEP))
                    what = f"is of another step than {first} of the same param group"
                    yield damaged(path, what, describe(steps[first]), describe(step))


def _copied_weight_fault(path: str, name: str) -> Fault:
    return CheckpointDamaged.fault(
        path,
        f"is not the master of {name} but a copy of its weight: ds_to_universal found no optimizer state of it",
        "the fp32 master, and states beside it",
        "the weight",
        mend="convert again with all optimizer shards, or load the ZeRO checkpoint that it was made from "
        "(one that was saved before the first step has no states, and does not survive the conversion)",
    )


def check_tensor(file: StateFile, placement: Placement) -> TensorRecord:
    """Return the tensor of a file; raises CheckpointDamaged if its shape or type is not the placement's."""
    tensor, shape, numel = file.tensor, placement.shape, placement.numel
    if tensor is None:
        raise fail(file.path, "holds one value", f"a tensor of {numel} elements", describe(file.scalar))
    if tensor.shape not in (shape, (numel,)):
        what = "has lost the rows that pad the vocabulary" if file.stripped else "has another shape than its parameter"
        fault = damaged(file.path, what, str(list(shape)), str(list(tensor.shape)))
        mend = "convert again with a pattern for its vocabulary, or load the ZeRO checkpoint that it was made from"
        raise_faults([replace(fault, mend=mend)], subject=f"reading {file.path}")
    if tensor.dtype is not placement.dtype:
        what = f"is of another type than {placement.key.kind} of the first parameter"
        raise fail(file.path, what, placement.dtype.label, tensor.dtype.label)
    if not tensor.contiguous:
        raise fail(file.path, "does not lie row-major", "the strides of a whole tensor", str(tensor.stride))
    return tensor
