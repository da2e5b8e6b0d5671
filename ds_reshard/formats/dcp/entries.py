"""What a folder of torch.distributed.checkpoint has beside its tensors, and by which keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import MEND, Directory, Place
from ds_reshard.errors import CheckpointNotFound, Fault, ModelMismatch, UnsafePickle, raise_faults
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord

Path = tuple[object, ...]
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""`save_fsdp_model` and `save_fsdp_optimizer` of accelerate/utils/fsdp_utils.py: a folder of torch's for each."""
MODELS = ("model", "module", "state_dict")
_GROUPS = "param_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """The value `name` of a param group: of that at `position`, or of that of the parameter `member`.

    A position is a number below the keys of its optimizer: a script may have several.
    """

    name: str
    position: tuple[str, int] | None = None
    member: str | None = None


def tensor_key(path: Path) -> TensorKey:
    """The logical tensor that a nested state dict's path means.

    `get_state_dict` nests states as (..., "state", W, KIND), flattens them to (..., "state.W.KIND"), and names weights
    by the name of the parameter below the model's: there nothing is a state, whatever a module is called.
    """
    names = [str(name) for name in path]
    if len(names) > 1 and names[0] in MODELS:
        return TensorKey(name=".".join(names[1:]), kind="weight")
    if len(names) >= 3 and names[-3] == "state":
        return TensorKey(name=names[-2], kind=names[-1])
    if names[-1].startswith("state.") and names[-1].count(".") >= 2:
        name, _, kind = names[-1].removeprefix("state.").rpartition(".")
        return TensorKey(name=name, kind=kind)
    return TensorKey(name=".".join(names), kind="weight")


def group_key(path: Path) -> GroupKey | None:
    """The value of a param group that a path means: (..., "param_groups", 0, "lr") or (..., "param_groups.W.lr")."""
    if len(path) > 1 and path[0] in MODELS:
        return None
    if len(path) >= 3 and path[-3] == _GROUPS and isinstance(path[-2], int):
        return GroupKey(name=str(path[-1]), position=(".".join(map(str, path[:-3])), path[-2]))
    last = str(path[-1])
    if last.startswith(f"{_GROUPS}.") and last.count(".") >= 2:
        member, _, name = last.removeprefix(f"{_GROUPS}.").rpartition(".")
        return GroupKey(name=name, member=member)
    return None


def is_of_optimizer(path: Path) -> bool:
    """Whether a path means a state of an optimizer, whatever its kind is called, or a value of a param group."""
    if len(path) > 1 and path[0] in MODELS:
        return False
    nested = len(path) >= 3 and path[-3] == "state"
    return nested or tensor_key(path).kind != "weight" or group_key(path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a state dict has of an optimizer: its key, the members of its param groups, and those that have a state."""

    key: str
    members: frozenset[str]
    stateful: frozenset[str]

    @property
    def top(self) -> str:
        return f"{self.key}.state." if self.key else "state."

    def parameter(self, saved: str) -> str | None:
        """The parameter of a key that was saved, None where it is no state of this optimizer."""
        return saved.removeprefix(self.top).rpartition(".")[0] if saved.startswith(self.top) else None


def optimizers(wanted: object, path: Path = ()) -> Iterator[Asked]:
    """The optimizers in a state dict, nested or with `flatten_optimizer_state_dict`, that ask for states.

    One that has no "state" at all asks for its param groups alone.
    """
    if not isinstance(wanted, Mapping):
        return
    key, state, groups = ".".join(map(str, path)), wanted.get("state"), wanted.get(_GROUPS)
    if isinstance(groups, list | tuple) and isinstance(state, Mapping):
        members = frozenset(
            str(name) for group in groups if isinstance(group, Mapping) for name in group.get("params", ())
        )
        stateful = frozenset(str(name) for name, kinds in state.items() if kinds)
        yield Asked(key=key, members=members, stateful=stateful)
    elif stateful := _flattened(wanted, "state."):
        yield Asked(key=key, members=_flattened(wanted, f"{_GROUPS}."), stateful=stateful)
    for name, value in wanted.items():
        yield from optimizers(value, (*path, name))


def _flattened(wanted: Mapping[object, object], start: str) -> frozenset[str]:
    names = (key.removeprefix(start).rpartition(".")[0] for key in wanted if str(key).startswith(start))  # type: ignore[attr-defined]
    return frozenset(filter(None, names))


def left_out(asked: Iterable[Asked], saved: Collection[str]) -> Iterator[Fault]:
    """A fault for each optimizer that asks for no state of a parameter of its own, of which states were saved.

    What no key asks for torch leaves out, silently. A fresh optimizer has no state, and one whose state dict torch has
    made has none of a parameter that is frozen (`_init_optim_state`, torch/distributed/checkpoint/state_dict.py, 2.13).
    """
    for one in asked:
        states = [name for name in map(one.parameter, saved) if name is not None]
        if not one.stateful and states:
            yield ModelMismatch.fault(
                one.key or "state dict",
                "asks for no state of its parameters, as a fresh optimizer has none, and would begin anew",
                f"keys for what was saved, {len(states)} of {one.top}*",
                "none",
                mend="before the state dict is made call torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict(model, optimizer), which begins them; where param groups alone are wanted, "
                'leave out "state"',
            )
        elif without := sorted(one.members.intersection(states) - one.stateful):
            yield ModelMismatch.fault(
                one.key or "state dict",
                f"asks for no state of {named(without)}, as frozen ones have none: what was saved would be lost",
                "keys for them",
                "none",
                mend="set requires_grad_(True) on them before get_optimizer_state_dict(model, optimizer) of a fresh "
                "optimizer, and freeze them after set_state_dict; or build the optimizer without them, which drops "
                "their states with a warning",
            )


def named(names: Sequence[str], noun: str = "parameter") -> str:
    """How many, and which."""
    shown = ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''} ({shown})"


class Unasked(NamedTuple):
    """Of the keys of a checkpoint in their order, bit by bit: states of parameters that optimizers of one rank have,
    and those that they do not have. Ranks that have other optimizers, as stages of a pipeline, are joined.
    """

    had: int
    others: int

    @classmethod
    def of(cls, asked: Iterable[Asked], saved: Collection[str]) -> Unasked:
        keys, had, others = sorted(saved), set[str](), set[str]()
        for one in asked:
            for key in keys:
                if (name := one.parameter(key)) is not None:
                    (had if name in one.members else others).add(key)
        return cls(*(int("0" + "".join("1" if key in some else "0" for key in keys), 2) for some in (had, others)))

    def warning(self, saved: Collection[str], folder: str) -> str:
        """What to tell of states that no rank's optimizer has; empty where there are none."""
        if not (lost := self.others & ~self.had):
            return ""
        keys = sorted(saved)
        states = [key for key, bit in zip(keys, f"{lost:0{len(keys)}b}", strict=True) if bit == "1"]
        parameters = sorted({key.rpartition(".")[0] for key in states})
        return f"{folder}: {len(states)} states of {named(parameters)} are left out: no optimizer of this run has them"


class Matched(NamedTuple):
    """Of the weights that a rank asks for, how many the checkpoint has; and every tensor that it lacks."""

    asked: int
    found: int
    lacking: frozenset[str]

    @classmethod
    def of(cls, tensors: Collection[str], asked: Iterable[Asked], saved: Collection[str], model: str) -> Matched:
        """`tensors` are the keys; weights are those under `model`, else all that no optimizer has, else all."""
        states = tuple(one.top for one in asked)
        others = [key for key in tensors if not key.startswith(states)]
        weights = [key for key in others if not model or key.startswith(f"{model}.")] or tensors
        return cls(len(weights), sum(key in saved for key in weights), frozenset(tensors).difference(saved))


def match_keys(
    seen: Sequence[tuple[Unasked, Matched]],
    saved: Collection[str],
    folder: str,
    *,
    rank: int,
    mend: Callable[[Sequence[str]], str],
) -> list[str]:
    """Return this rank's warnings: tensors that `folder` lacks, and saved states that no optimizer of the run has.

    `seen` is of all ranks. Raises ModelMismatch if the folder has none of the weights; `mend` says how to load them.
    """
    matched = [one for _, one in seen]
    lacking, names = sorted(frozenset().union(*(one.lacking for one in matched))), sorted(saved)
    if any(one.asked for one in matched) and not any(one.found for one in matched):
        what = "has none of the weights that this run asks for, by their keys"
        sides = named(lacking, "tensor"), named(names, "key")
        raise_faults([ModelMismatch.fault(folder, what, *sides, mend=mend(lacking))], subject=f"loading {folder}")
    states = Unasked(*(reduce(or_, bits) for bits in zip(*(one for one, _ in seen), strict=True)))
    first = next((number for number, (one, _) in enumerate(seen) if any(one)), 0)
    told = states.warning(names, folder) if rank == first else ""
    stay = f"{folder} lacks {named(lacking, 'tensor')}, which stay as they are" if lacking and rank == 0 else ""
    return [text for text in (told, stay) if text]


@dataclass(slots=True, kw_only=True)
class Values:
    """Everything that is no logical tensor: `objects` are the user's own, by their paths."""

    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    grouped: dict[GroupKey, object] = field(default_factory=dict)
    objects: dict[Path, object] = field(default_factory=dict)

    def facts(self, names: Sequence[str]) -> OptimizerFacts | None:
        """Of the optimizer that has states of the parameters `names`, in their order; None where there is none."""
        if not (names or self.grouped):
            return None
        return OptimizerFacts(groups=tuple(self._numbered() or self._flattened(names)), scalars=self.scalars)

    def put(self, path: Path, value: object) -> None:
        group, key = group_key(path), tensor_key(path)
        if group is not None:
            self.grouped[group] = value
        elif key.kind != "weight" and isinstance(value, ScalarTensor | int | float | str | None):
            self.scalars.setdefault(key.name, {})[key.kind] = value
        else:
            self.objects[path] = value

    def twice(self) -> Iterator[tuple[str, str, str]]:
        """Members of numbered groups of two optimizers, with the keys of both."""
        found: dict[str, str] = {}
        for key, value in self.grouped.items():
            if key.position is not None and key.name == "params" and isinstance(value, list | tuple):
                optimizer, _ = key.position
                first = {member: found.setdefault(str(member), optimizer) for member in value}
                yield from ((str(name), other, optimizer) for name, other in first.items() if other != optimizer)

    def _numbered(self) -> list[GroupFacts]:
        """The groups that were saved by their positions."""
        found: dict[tuple[str, int], dict[str, object]] = {}
        for key, value in self.grouped.items():
            if key.position is not None:
                found.setdefault(key.position, {})[key.name] = value
        groups = []
        for _, values in sorted(found.items()):
            members = values.pop("params", ())
            names = tuple(map(str, members)) if isinstance(members, list | tuple) else ()
            groups.append(GroupFacts(members=names, hyperparameters=values))
        return groups

    def _flattened(self, names: Sequence[str]) -> list[GroupFacts]:
        """The groups of values that were saved for each parameter: those that have the same are one."""
        found: dict[str, dict[str, object]] = {}
        for key, value in self.grouped.items():
            if key.member is not None:
                found.setdefault(key.member, {})[key.name] = value
        alike: dict[str, list[str]] = {}
        order = {name: number for number, name in enumerate(names)}
        for name in sorted(found, key=lambda name: order.get(name, len(order))):
            alike.setdefault(canonical(found[name]), []).append(name)
        return [GroupFacts(members=tuple(members), hyperparameters=found[members[0]]) for members in alike.values()]


def read_values(directory: Directory, single: Mapping[str, Place]) -> Values:
    """Read every object, and the tensors of one element in `single`; nothing is executed.

    Raises what reading a damaged file raises, UnsafePickle for what would act on the machine, and CheckpointNotFound
    with all files that are not there.
    """
    values = Values()
    faults: list[Fault] = []
    for family, place in {**directory.objects, **single}.items():
        path = directory.paths.get(family, (family,))
        try:
            with place.open() as archive:
                value = archive.load()
                if isinstance(value, TensorRecord) and value.numel == 1:
                    value = ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
        except UnsafePickle as error:
            faults += [replace(fault, what=f"{family}: {fault.what}") for fault in error.faults]
            continue
        except CheckpointNotFound:
            raise_faults([*faults, *_absent(directory)], subject="reading a checkpoint")
            raise
        values.put(path, value)
    for family, value in directory.values.items():
        values.put(directory.paths[family], value)
    raise_faults(faults, subject="reading a checkpoint")
    return values


def _absent(directory: Directory) -> Iterator[Fault]:
    for path in sorted({place.path for place in directory.places}):
        if not folders.exists(path):
            yield CheckpointNotFound.fault(path, "there is no such file", mend=MEND)
