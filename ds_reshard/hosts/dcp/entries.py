"""What a checkpoint holds under the keys by which torch.distributed.checkpoint asks for it.

The keys are those of `get_state_dict` under two names at the top, nested or with `flatten_optimizer_state_dict`
(torch/distributed/checkpoint/state_dict.py, 2.13): `model.W`, `optimizer.state.W.exp_avg`, and
`optimizer.param_groups.0.lr` or `optimizer.param_groups.W.lr`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_reshard.containers.revive import revive
from ds_reshard.errors import Fault, ParamGroupMismatch
from ds_reshard.execution.buffers import read_tensor, tensor_from_bytes
from ds_reshard.model.content import Content
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical, describe
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType

_WEIGHTS = ("fp32", "weight")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor: the logical tensors that hold its values, by element type, the first being the widest."""

    path: Path
    shape: tuple[int, ...]
    sources: Mapping[ElementType, TensorKey]

    @property
    def dtype(self) -> ElementType:
        return next(iter(self.sources))

    def source(self, dtype: ElementType) -> TensorKey:
        """What is read for a target of that type."""
        return self.sources.get(dtype, self.sources[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One value of a parameter: a small tensor, as `step` is in an optimizer of torch, or a plain one."""

    path: Path
    value: Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A value of a param group: of the group at `position`, or of the group of the parameter `member`.

    `name` is "params" for the list of members.
    """

    path: Path
    name: str
    position: int | None = None
    member: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A value of the script's own, of plain Python, under the name that it had."""

    path: Path
    value: object


def is_state(entry: Entry) -> bool:
    """Whether it is the optimizer's: a state, or a value of a param group."""
    if isinstance(entry, Stored):
        return any(key.kind not in _WEIGHTS for key in entry.sources.values())
    return isinstance(entry, Single | GroupValue)


Entry = Stored | Single | GroupValue | Own


def entries(content: Content, *, model: str, optimizer: str) -> dict[str, Entry]:
    """Every entry by its key; `model` and `optimizer` are the names at the top, "" for none."""
    found: list[Entry] = [*_weights(content, model)]
    if content.facts is not None:
        found += _states(content, content.facts, optimizer)
        found += _groups(content.facts.groups, optimizer)
    found += _own(content)
    return {".".join(map(str, entry.path)): entry for entry in found}


def owner(content: Content, name: str) -> str:
    """The name under which the optimizer has a parameter: of tied ones, the first."""
    return content.tied.get(name, name)


def _top(name: str) -> Path:
    return (name,) if name else ()


def _keys(path: tuple[object, ...]) -> Path:
    return tuple(key if isinstance(key, int) else str(key) for key in path)


def _names(content: Content) -> list[str]:
    """Every parameter and buffer, the other names of tied ones too."""
    return list(dict.fromkeys([*(key.name for key in content.tensors), *content.tied]))


def _weights(content: Content, model: str) -> Iterator[Stored]:
    tensors = content.tensors
    for name in _names(content):
        keys = (TensorKey(one, kind) for kind in _WEIGHTS for one in (owner(content, name), name))
        found = [tensors[key] for key in keys if key in tensors]
        if found:  # of one type the weight counts: damage to an optimizer's file is not its own
            own = content.extra_tensors.get(name)
            path = _keys(own) if own is not None else (*_top(model), name)
            yield Stored(path=path, shape=found[0].shape, sources={one.dtype: one.origin for one in found})


def _states(content: Content, facts: OptimizerFacts, optimizer: str) -> Iterator[Entry]:
    for name in _names(content):
        at = (*_top(optimizer), "state", name)
        for kind, tensor in content.trained.get(owner(content, name), {}).items():
            if kind not in _WEIGHTS:
                yield Stored(path=(*at, kind), shape=tensor.shape, sources={tensor.dtype: tensor.origin})
        for kind, value in facts.scalars.get(owner(content, name), {}).items():
            yield Single(path=(*at, kind), value=value)


def _groups(groups: tuple[GroupFacts, ...], optimizer: str) -> Iterator[GroupValue]:
    at = (*_top(optimizer), "param_groups")
    for position, group in enumerate(groups):
        names = [name for name in group.hyperparameters or {} if name != "params"]
        for name in (*names, "params"):
            yield GroupValue(path=(*at, position, name), name=name, position=position)
        for member in group.members:
            for name in names:
                yield GroupValue(path=(*at[:-1], f"param_groups.{member}.{name}"), name=name, member=member)


def _own(content: Content) -> Iterator[Own]:
    """Values beside model and optimizer; what holds tensors or classes is not offered."""
    for path, value in content.objects.items():
        if _is_plain(value):
            yield Own(path=_keys(path), value=value)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


class Groups:
    """The saved groups, and what a group of this run gets from them.

    `tied` gives the name under which the optimizer has a parameter of another name.
    """

    def __init__(self, groups: Sequence[GroupFacts], tied: Mapping[str, str], *, where: str) -> None:
        self._groups = groups
        self._tied = tied
        self._where = where
        self._of = {name: group for group in groups for name in group.members}

    def value(self, asked: GroupValue, members: Sequence[str | int]) -> object:
        """The value that is asked for; `members` are those of this run's group, none where it has no list of them.

        Members that are numbers are those of `Optimizer.state_dict()`: they are the run's own, and say which group is
        meant where a group of the same numbers was saved. Raises ParamGroupMismatch where the saved groups of the
        members have different values, or count their parameters otherwise.
        """
        if asked.member is not None:
            return self._revived(self._of[asked.member], asked.name)
        assert asked.position is not None, "a value of a group is asked for by position or by member"
        names = [name for name in members if isinstance(name, str)]
        if not names or len(names) < len(members):
            group = self._alike_numbered(asked, members)
            if group is not None and asked.name == "params":
                return list(members)
            if group is None and len(self._groups) > 1:
                what = f"{len(self._groups)} groups were saved, and the target does not name the parameters of its own"
                raise ParamGroupMismatch("", [self._fault(asked, what, 'names in "params", of get_state_dict', "none")])
            group = group or self._groups[asked.position]
            return list(group.members) if asked.name == "params" else self._revived(group, asked.name)
        if asked.name == "params":
            return names
        saved = self._saved(names)
        if not saved:
            raise ParamGroupMismatch("", [self._fault(asked, "none of its parameters is in a saved group", "", "")])
        if differing := self._differing([(group.members[0], group) for group in saved], asked.name):
            what = "the parameters of this group were saved in groups that differ in it"
            raise ParamGroupMismatch("", [self._fault(asked, what, "one value", differing)])
        return self._revived(saved[0], asked.name)

    def _alike_numbered(self, asked: GroupValue, members: Sequence[str | int]) -> GroupFacts | None:
        """The saved group of the same numbers, None where none was saved that has one of them."""
        numbers = [str(number) for number in members if isinstance(number, int)]
        found = self._saved(numbers)
        for group in found:
            if list(group.members) != numbers:
                what = "its parameters have other numbers than those of the group that was saved"
                raise ParamGroupMismatch(
                    "", [self._fault(asked, what, ", ".join(group.members[:8]), ", ".join(numbers[:8]))]
                )
        return found[0] if found else None

    def joined(self, current: Mapping[str, Mapping[str, object]]) -> Iterator[Fault]:
        """Faults of parameters with equal values in this run, `current` by name, that were saved with other ones.

        Flattened state dicts do not tell groups apart. torch gives each group of the run the values of its first member
        (`_unflatten_optim_state_dict`, torch/distributed/checkpoint/state_dict.py, 2.13): two groups could become one.
        """
        alike: dict[str, list[str]] = {}
        for member, values in current.items():
            alike.setdefault(_plain(values), []).append(member)
        for members in alike.values():
            for name in current[members[0]]:
                if differing := self._differing([(member, self._of[member]) for member in members], name):
                    yield ParamGroupMismatch.fault(
                        f"param_groups.{members[0]}.{name}",
                        "parameters that this run does not tell apart were saved in groups that differ in it",
                        "groups of this run that differ, as those that were saved",
                        differing,
                        mend="build the optimizer with the param groups of the saved run; where it has them, and they "
                        "begin with equal values, load without flatten_optimizer_state_dict, which names them",
                    )

    def _differing(self, saved: Iterable[tuple[str, GroupFacts]], name: str) -> str:
        """The values that these members were saved with, in words, where they differ; else nothing."""
        recorded = [(member, self._recorded(group, name)) for member, group in saved]
        told = {canonical(value): f"{describe(value)} ({member}, ...)" for member, value in recorded}
        return " and ".join(told.values()) if len(told) > 1 else ""

    def _saved(self, members: Sequence[str]) -> list[GroupFacts]:
        names = (self._tied.get(name, name) for name in members)
        found = {id(self._of[name]): self._of[name] for name in names if name in self._of}
        return list(found.values())

    def _recorded(self, group: GroupFacts, name: str) -> object:
        return (group.hyperparameters or {}).get(name)

    def _revived(self, group: GroupFacts, name: str) -> object:
        recorded = self._recorded(group, name)
        if isinstance(recorded, ScalarTensor):
            return tensor_from_bytes(recorded.data, recorded.dtype, recorded.shape)
        return revive(recorded, builders={}, tensor=read_tensor, where=f"{self._where}: param group {name}")

    def _fault(self, asked: GroupValue, what: str, expected: str, found: str) -> Fault:
        return ParamGroupMismatch.fault(
            ".".join(map(str, asked.path)),
            what,
            expected,
            found,
            mend="build the optimizer with the param groups of the saved run, or load without its param groups",
        )


def _plain(values: Mapping[str, object]) -> str:
    """A text that is equal for equal hyper-parameters."""
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    return repr(sorted(plain.items()))
