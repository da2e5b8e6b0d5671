"""What a folder of torch.distributed.checkpoint has beside its tensors, and by which keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


def stateless(wanted: object, path: Path = ()) -> Iterator[str]:
    """The keys of optimizers in a nested state dict that have no state, as `Optimizer.state_dict` of a fresh one."""
    if isinstance(wanted, Mapping):
        state = wanted.get("state")
        if _GROUPS in wanted and isinstance(state, Mapping) and not state:
            yield ".".join(map(str, path))
        for key, value in wanted.items():
            yield from stateless(value, (*path, key))


def left_out(optimizers: Iterable[str], saved: Collection[str]) -> Iterator[Fault]:
    """A fault for each of these optimizers whose states were saved: what no key asks for torch leaves out, silently."""
    for optimizer in optimizers:
        top = f"{optimizer}.state." if optimizer else "state."
        if states := sum(key.startswith(top) for key in saved):
            yield ModelMismatch.fault(
                optimizer or "state dict",
                "asks for no state of its parameters, as a fresh optimizer has none, and would begin anew",
                f"keys for what was saved, {states} of {top}*",
                "none",
                mend="before the state dict is made call torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict(model, optimizer), which begins them; where param groups alone are wanted, "
                'leave out "state"',
            )


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
        group, key = group_key(path), tensor_key(path)
        if group is not None:
            values.grouped[group] = value
        elif key.kind != "weight" and isinstance(value, ScalarTensor | int | float | str | None):
            values.scalars.setdefault(key.name, {})[key.kind] = value
        else:
            values.objects[path] = value
    raise_faults(faults, subject="reading a checkpoint")
    return values


def _absent(directory: Directory) -> Iterator[Fault]:
    for path in sorted({place.path for place in directory.places}):
        if not folders.exists(path):
            yield CheckpointNotFound.fault(path, "there is no such file", mend=MEND)
