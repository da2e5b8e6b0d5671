"""Param groups, matched by the names of their members: positions of two runs need not mean the same group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ds_reshard.containers.revive import revive
from ds_reshard.errors import Fault, ParamGroupMismatch
from ds_reshard.execution.buffers import tensor_from_bytes
from ds_reshard.execution.whole import read_tensor
from ds_reshard.hosts.dcp.names import GroupValue
from ds_reshard.model.facts import GroupFacts, ScalarTensor, canonical, describe


class Groups:
    """The saved groups, and what a group of this run gets from them.

    `tied` gives the name under which the optimizer has a parameter of another name.
    """

    def __init__(self, groups: Sequence[GroupFacts], tied: Mapping[str, str], *, where: str) -> None:
        self._groups = groups
        self._tied = tied
        self._where = where
        self._of = {name: group for group in groups for name in group.members}

    def value(self, asked: GroupValue, members: Sequence[str] | None) -> object:
        """The value that is asked for; `members` are those of this run's group, None where it names none.

        Raises ParamGroupMismatch where the saved groups of the members have different values.
        """
        if asked.member is not None:
            return self._revived(self._of[asked.member], asked.name)
        assert asked.position is not None, "a value of a group is asked for by position or by member"
        if members is None:
            if len(self._groups) > 1:
                what = f"{len(self._groups)} groups were saved, and the target does not name the parameters of its own"
                raise ParamGroupMismatch("", [self._fault(asked, what, 'names in "params", of get_state_dict', "none")])
            group = self._groups[asked.position]
            return list(group.members) if asked.name == "params" else self._revived(group, asked.name)
        if asked.name == "params":
            return list(members)
        saved = self._saved(members)
        if not saved:
            raise ParamGroupMismatch("", [self._fault(asked, "none of its parameters is in a saved group", "", "")])
        values = {canonical(self._recorded(group, asked.name)): group for group in saved}
        if len(values) > 1:
            told = [
                f"{describe(self._recorded(group, asked.name))} ({group.members[0]}, ...)" for group in values.values()
            ]
            what = "the parameters of this group were saved in groups that differ in it"
            raise ParamGroupMismatch("", [self._fault(asked, what, "one value", " and ".join(told))])
        return self._revived(saved[0], asked.name)

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
                saved = {canonical(self._recorded(self._of[member], name)): member for member in members}
                if len(saved) > 1:
                    told = [f"{describe(self._recorded(self._of[one], name))} ({one}, ...)" for one in saved.values()]
                    yield ParamGroupMismatch.fault(
                        f"param_groups.{members[0]}.{name}",
                        "parameters that this run does not tell apart were saved in groups that differ in it",
                        "groups of this run that differ, as those that were saved",
                        " and ".join(told),
                        mend="build the optimizer with the param groups of the saved run; where it has them, and they "
                        "begin with equal values, load without flatten_optimizer_state_dict, which names them",
                    )

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
