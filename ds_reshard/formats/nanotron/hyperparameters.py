"""The hyper-parameters of another framework's param groups, as those of torch's AdamW in nanotron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_reshard.errors import Fault, ParamGroupMismatch
from ds_reshard.formats.nanotron.optimizer_file import SavedGroup
from ds_reshard.model.content import BASE, Content
from ds_reshard.model.facts import canonical, describe

_INITIAL = "initial_lr"
_HOW = frozenset({"foreach", "capturable", "differentiable", "fused", "maximize", "amsgrad", "decoupled_weight_decay"})
"""How torch computes AdamW, or which variant of it: what other optimizers do not say is as the coming run has it."""
_VARIANT = ("maximize", "amsgrad", "decoupled_weight_decay")
_COUNTED = frozenset({"step"})


class Hyperparameters:
    """The groups of a content, asked for one by one; `faults` and `notes` are what was found meanwhile."""

    def __init__(self, content: Content) -> None:
        assert content.facts is not None
        self.faults: list[Fault] = []
        self._left: set[str] = set()
        self._borrowed: set[str] = set()
        self._other_base: set[str] = set()
        self._content = content
        self._number = {name: number for number, group in enumerate(content.facts.groups) for name in group.members}
        self._groups = [dict(group.hyperparameters or {}) for group in content.facts.groups]

    def group(self, path: str, like: SavedGroup) -> SavedGroup:
        """A param group with the members of `like`: every value that it has, as the content has it of these members."""
        numbers = {self._number[name] for name in like.members if name in self._number}
        found = [self._groups[number] for number in sorted(numbers)]
        if not found:
            return like
        for other in found[1:]:
            if canonical(other) != canonical(found[0]):
                self._fault(
                    path, like, "are of several param groups of the source, which differ", "one", f"{len(found)}"
                )
        saved = found[0]
        made: dict[str, object] = {}
        for key, wanted in like.hyperparameters.items():
            if key in saved:
                made[key] = saved[key]
            elif key in _HOW or key == _INITIAL:
                made[key] = wanted
                self._borrowed |= {key} - _HOW
            else:
                self._fault(path, like, f"have no {key} in the source", describe(wanted), "none")
        for key in _VARIANT:
            if key in saved and key in like.hyperparameters and saved[key] != like.hyperparameters[key]:
                expected = describe(like.hyperparameters[key])
                self._fault(path, like, f"are trained with another {key}", expected, describe(saved[key]))
        if saved.get("bias_correction", True) is not True:
            self._fault(path, like, "are trained without the bias correction that AdamW makes", "True", "False")
        self._left |= set(saved) - set(like.hyperparameters) - _COUNTED - {"bias_correction"}
        if _INITIAL in like.hyperparameters and made.get(_INITIAL) != like.hyperparameters[_INITIAL]:
            self._other_base.add(f"{describe(made.get(_INITIAL))}, not {describe(like.hyperparameters[_INITIAL])}")
        return SavedGroup(members=like.members, hyperparameters=made)

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
    def notes(self) -> list[str]:
        told = []
        if self._left:
            told.append(f"entries of param groups that AdamW has not are left out: {', '.join(sorted(self._left))}")
        if self._borrowed:
            told.append("the source has no initial learning rates: those of --like are taken")
        if self._other_base:
            told.append(f"the initial learning rate is the source's: {'; '.join(sorted(self._other_base))} of --like")
        return told

    def _fault(self, path: str, group: SavedGroup, what: str, expected: str, found: str) -> None:
        names = ", ".join(group.members[:3]) + ("" if len(group.members) < 4 else f" and {len(group.members) - 3} more")
        self.faults.append(
            ParamGroupMismatch.fault(
                names,
                f"{what} ({path})",
                expected,
                found,
                mend="name a checkpoint of a run with the same param groups and optimizer: --like DIR",
            )
        )
