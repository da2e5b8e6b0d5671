"""The optimizer's and the scheduler's files of a nanotron checkpoint, one of each rank.

`save_optimizer` and `save_lr_scheduler` (serialize/optimizer.py, commit 2411b02). The scheduler's is
`LambdaLR.state_dict()`, with a rate for each of the rank's param groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import basename

from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import CheckpointDamaged, Fault, damaged, error_of, fail
from ds_reshard.formats.nanotron.names import NanotronListing, Rank
from ds_reshard.model.content import BASE, LAMBDAS, LAST, PER_GROUP, Schedule, schedule_of
from ds_reshard.model.facts import GroupFacts, Scalar, ScalarTensor, number_of
from ds_reshard.model.records import TensorRecord

MASTER = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFile:
    """What one file says; `states` has of each parameter its tensors by kind, in the file's order.

    The members of its groups are those that its rank has a part of. `stateless` counts those that have no state and so
    no name: frozen ones, which ZeRO-0 leaves in their group.
    """

    path: str
    states: Mapping[str, Mapping[str, TensorRecord]]
    scalars: Mapping[str, Mapping[str, Scalar]]
    groups: tuple[GroupFacts, ...]
    stateless: int

    @property
    def has_masters(self) -> bool:
        return any(MASTER in kinds for kinds in self.states.values())

    @property
    def step(self) -> int | float | None:
        """How many steps the optimizer had made: the most of any parameter; None where none is counted."""
        counted = (number_of(values.get("step")) for values in self.scalars.values())
        return max((number for number in counted if number is not None), default=None)


def read_optimizer(path: str) -> OptimizerFile:
    """Read the structure of an optimizer file and its steps. Raises CheckpointDamaged if it has another form."""
    with open_archive(path) as archive:
        check_root(path, basename(path).removesuffix(".pt"), archive.root)
        top = archive.load()
        entries = top if isinstance(top, dict) else {}
        names, state, groups = (entries.get(key) for key in ("names", "state", "param_groups"))
        if not isinstance(names, dict) or not isinstance(state, dict) or not isinstance(groups, list):
            found = f"entries {sorted(map(str, entries))[:8]}"
            raise fail(path, "is no optimizer file of nanotron", "names, state and param_groups", found)
        if set(names) != set(state) or len(set(names.values())) != len(names):
            raise fail(path, "names and states do not match", f"{len(names)} names, each once", f"{len(state)} states")
        masters = entries.get("gradient_accumulator", {})
        if not isinstance(masters, dict):
            raise fail(path, "gradient_accumulator is no dict", "masters by name", type(masters).__name__)
        if masters and set(masters) != set(names.values()):
            raise fail(path, "masters and states are of other parameters", f"{len(names)}", f"{len(masters)}")
        states: dict[str, dict[str, TensorRecord]] = {}
        scalars: dict[str, dict[str, Scalar]] = {}
        for number, name in names.items():
            if not isinstance(name, str) or not isinstance(state[number], dict):
                raise fail(path, "has a state that is no dict by name", "exp_avg, exp_avg_sq, step", repr(name)[:80])
            states[name], scalars[name] = _split(path, archive, state[number])
            if masters:
                states[name][MASTER] = _whole(path, f"{MASTER} of {name}", masters[name])
    read = tuple(_group(path, group, names) for group in groups)
    stateless = sum(len(group["params"]) for group in groups) - sum(len(group.members) for group in read)
    return OptimizerFile(path=path, states=states, scalars=scalars, groups=read, stateless=stateless)


def _split(
    path: str, archive: TorchArchive, state: Mapping[object, object]
) -> tuple[dict[str, TensorRecord], dict[str, Scalar]]:
    tensors: dict[str, TensorRecord] = {}
    scalars: dict[str, Scalar] = {}
    for kind, value in state.items():
        if isinstance(value, TensorRecord) and value.shape:
            tensors[str(kind)] = _whole(path, f"state {kind!r}", value)
        elif isinstance(value, TensorRecord):
            scalars[str(kind)] = ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
        elif value is None or isinstance(value, int | float | bool | str):
            scalars[str(kind)] = value
        else:
            raise fail(path, f"state {kind!r} is neither a tensor nor one value", "a tensor", type(value).__name__)
    if MASTER in tensors:
        raise fail(path, f"has a state called {MASTER!r}", "exp_avg, exp_avg_sq, ...", MASTER)
    return tensors, scalars


def _whole(path: str, what: str, value: object) -> TensorRecord:
    if not isinstance(value, TensorRecord) or not value.contiguous:
        raise fail(path, f"{what} is no row-major tensor", "a contiguous tensor", type(value).__name__)
    return value


def _group(path: str, group: object, names: Mapping[object, object]) -> GroupFacts:
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(params, list):
        raise fail(path, "has a param group without members", "a list 'params'", type(group).__name__)
    members = tuple(str(names[number]) for number in params if number in names)
    hyperparameters = {str(key): value for key, value in group.items() if key != "params"}
    return GroupFacts(members=members, hyperparameters=hyperparameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScheduler(Schedule):
    """One file."""

    path: str


def read_scheduler(path: str, groups: int | None) -> SavedScheduler:
    """Read one file; CheckpointDamaged where it is no LambdaLR's, or not of that many param groups."""
    with open_archive(path) as archive:
        check_root(path, basename(path).removesuffix(".pt"), archive.root)
        top = archive.load()
    sizes = [len(top[key]) for key in PER_GROUP if isinstance(top.get(key), list)] if isinstance(top, dict) else []
    if len(sizes) < len(PER_GROUP):
        found = ", ".join(sorted(map(str, top))[:8]) if isinstance(top, dict) else type(top).__name__
        raise fail(path, "is no state of a LambdaLR", ", ".join(PER_GROUP), found)
    schedule = schedule_of(top, sizes[0] if groups is None else groups)
    if schedule is None:
        what, found = "is of another number of param groups than the optimizer", f"{sorted(set(sizes))}"
        raise fail(path, what, f"{groups}", found)
    return SavedScheduler(path=path, counters=schedule.counters, groups=schedule.groups)


def scheduler_of(listing: NanotronListing, groups: Sequence[Sequence[GroupFacts]]) -> list[SavedScheduler]:
    """The scheduler of each pipeline stage; none where it was not saved. `groups` are the param groups of each.

    Where one file was written for all, the rates of the other stages are those of their param groups.
    """
    if listing.schedulers and not groups:
        what, mend = "is not there, and schedulers are", "restore it, or remove lr_scheduler to have the weights alone"
        fault = CheckpointDamaged.fault(
            f"{listing.folder}/optimizer", what, "states of the optimizer", "none", mend=mend
        )
        raise error_of([fault], subject=f"checkpoint {listing.folder}")
    if not listing.schedulers:
        return []
    first = Rank(pp=0, tp=0, dp=0)
    if len(listing.schedulers) == 1 and len(groups) > 1:
        one = read_scheduler(listing.path(listing.schedulers[first]), len(groups[0]))
        return [one, *(_expanded(one, of_stage) for of_stage in groups[1:])]
    found = []
    for pp, of_stage in enumerate(groups):
        name = listing.schedulers.get(Rank(pp=pp, tp=0, dp=0))
        if name is None:
            what = "has no scheduler of a pipeline rank"
            raise fail(f"{listing.folder}/lr_scheduler", what, f"that of rank {pp}", f"{len(listing.schedulers)} files")
        found.append(read_scheduler(listing.path(name), len(of_stage)))
    return found


def of_another_step(schedulers: Sequence[SavedScheduler], groups: Sequence[Sequence[GroupFacts]]) -> Iterator[Fault]:
    """A scheduler whose last rates are not those that it had put into the param groups when both were saved."""
    for saved, of_stage in zip(schedulers, groups, strict=False):
        for number, (row, group) in enumerate(zip(saved.groups, of_stage, strict=True)):
            last, rate = row[LAST], (group.hyperparameters or {}).get("lr")
            if isinstance(rate, int | float) and last != rate:
                names = ", ".join(group.members[:3]) or f"param group {number}"
                what = f"was saved at another step than the optimizer: the last learning rate of {names} differs"
                yield damaged(saved.path, what, str(rate), str(last)[:80])
                break


def _expanded(one: SavedScheduler, groups: Sequence[GroupFacts]) -> SavedScheduler:
    rates = [group.hyperparameters or {} for group in groups]
    if any("initial_lr" not in rate for rate in rates):
        raise fail(
            one.path, "is of the first pipeline stage, and the groups of another have no initial_lr", "it", "none"
        )
    return replace(one, groups=tuple({BASE: rate["initial_lr"], LAST: rate["lr"], LAMBDAS: {}} for rate in rates))
