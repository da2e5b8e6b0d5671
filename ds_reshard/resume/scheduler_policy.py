"""What a resume policy makes of a learning-rate scheduler: what it refuses before a load, what it sets afterwards.

The engine's scheduler, and those that the script steps beside it (external), go through one table. A policy asks for
one of three things, or for none ("host"): then a scheduler takes its saved state as it is.

| kind             | placed in this run's schedule    | continued ("checkpoint")             | compared ("strict") |
|------------------|----------------------------------|--------------------------------------|---------------------|
| none             | this run's rates are set         | if none was saved: its rates are set | rates, weight decay |
| of DeepSpeed     | stepped to the position          | configured by the saved JSON         | the JSONs           |
| of torch         | stepped to it, not past its end  | its state; no function of the run's  | as continued        |
| plateau          | from its beginning alone         | its state                            | its state, rates    |
| unknown          | from its beginning alone         | refused                              | its state           |

`ResumePolicy.places_schedule` says when this run's schedule counts: at the saved position, or from 0. A saved JSON is
believed if it names the same type and gives the saved rates at the saved position.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from ds_reshard.errors import ConfigError, Fault, ModelMismatch, ParamGroupMismatch, ScheduleMismatch, UnsupportedLayout
from ds_reshard.resume import schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import DEEPSPEED, PLATEAU, TORCH, UNKNOWN, Beginning, position_in, set_groups

# What a schedule decides of a param group. `initial_lr` is where torch's schedulers keep a group's own rate.
BOUNDS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr"})
RATES = BOUNDS | {"lr"}
SCHEDULED = RATES | {"weight_decay"}

_REBUILD = "build the scheduler that was saved, or use --override-opt-param-scheduler or --no-load-lr-state"
_OTHER_KIND = "holds the state of another kind of scheduler"
_OVERRIDE = "use --override-opt-param-scheduler"
_OTHER_FLAG = "say with another flag whose schedule is right"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValues:
    """What a checkpoint says beside its tensors, as far as a resume policy and its report need it.

    `groups` maps a live param group to the saved hyper-parameters that belong to it; a group whose members were saved
    with different ones is left out, and all are if the optimizer's files are not opened. `scheduler` is the saved state
    dict, `config` the DeepSpeed JSON of the saving run. `sp` is the number of ranks that shared a micro batch. `states`
    says which states of the optimizer there are, by the rows of the report; None if that is not known.
    """

    where: str
    stage: int | str = 0
    dp: int = 1
    sp: int = 1
    groups: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    scheduler: Mapping[str, object] | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    iteration: int | None = None
    samples: int | None = None
    skipped: int = 0
    clip_grad: object = None
    states: Mapping[str, str] | None = None

    def has(self, name: str) -> bool:
        """Whether the optimizer has these states; assumed if that is not known."""
        return self.states is None or name in self.states

    @property
    def position(self) -> int:
        """How far the schedule had run; without a scheduler, the updates that were made."""
        position = position_in(self.scheduler) if self.scheduler is not None else None
        return position if position is not None else max(0, (self.iteration or 0) - self.skipped)

    def group_values(self, count: int) -> list[Mapping[str, object]]:
        """The saved rate and weight decay of each live param group; empty for a group that no opened file describes.

        The saved JSON speaks for a single group alone: of several, each may have had its own.
        """
        if not self.groups and count == 1 and "lr" in self.optimizer_params:
            return [self.optimizer_params]
        return [self.groups.get(number, {}) for number in range(count)]

    def rates(self, count: int) -> list[float]:
        """The saved learning rate of each live param group that an opened file describes."""
        return [float(str(group["lr"])) for group in self.group_values(count) if group]

    @property
    def scheduler_section(self) -> tuple[str | None, Mapping[str, object] | None]:
        """Type and parameters of the scheduler in the saving run's JSON, None for what is missing."""
        section = self.config.get("scheduler")
        if not isinstance(section, Mapping):
            return None, None
        kind, params = section.get("type"), section.get("params", {})
        return (str(kind) if kind else None), (params if isinstance(params, Mapping) else None)

    @property
    def optimizer_params(self) -> Mapping[str, object]:
        """Parameters of the optimizer in the saving run's JSON; empty if the script built it."""
        section = self.config.get("optimizer")
        params = section.get("params") if isinstance(section, Mapping) else None
        return params if isinstance(params, Mapping) else {}

    @property
    def batch(self) -> tuple[int | None, int | None]:
        """Samples and micro batches of an update, as the saving run's JSON gives or implies them."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, micro, steps = (one if isinstance(one := self.config.get(name), int) else None for name in names)
        together = (micro or 0) * (self.dp // self.sp)
        implied = total // together if total is not None and together > 0 and total % together == 0 else None
        if total is None and micro is not None and (steps is not None or names[2] not in self.config):
            total = together * (1 if steps is None else steps)
        return total, implied if steps is None else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResume:
    """One scheduler under a policy: `faults` before anything changes, `apply` once the load is done.

    `scheduler` and `beginning` are None for a run without a scheduler. `own_groups` are this run's param groups before
    its first load. `saved` is None as long as the checkpoint is not opened; for an external scheduler `saved.scheduler`
    is the state that it is given. `others` share the optimizer with an external scheduler. `by_script` tells that this
    run's JSON does not describe the scheduler, `stepped` that the run had trained before its values were noted.
    """

    policy: ResumePolicy
    scheduler: object
    beginning: Beginning | None
    own_groups: Sequence[Mapping[str, object]]
    saved: SavedValues | None
    external: bool = False
    others: Sequence[object] = ()
    by_script: bool = False
    stepped: bool = False

    @property
    def scheduled(self) -> bool:
        """Whether a torch scheduler was built on this run's groups: it keeps each group's own rate there."""
        return any("initial_lr" in group for group in self.own_groups)

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__ if self.scheduler is not None else "none"

    @property
    def _kind(self) -> str:
        return self.beginning.kind if self.beginning is not None else UNKNOWN

    def faults(self) -> list[Fault]:
        """What the policy cannot do with this scheduler, as far as it is known yet."""
        policy, saved, faults = self.policy, self.saved, list[Fault]()
        placed_anew = self.external and policy.places_schedule
        if policy.places_schedule and self.scheduler is not None:
            faults = self._placing_faults()
        if saved is not None and policy.scheduler == "checkpoint":
            faults += self._continuing_faults(saved)
        if saved is not None and policy.scheduler == "strict" and not placed_anew:
            faults += self._comparing_faults(saved)
        scheduled = self.scheduler is not None or self.scheduled
        if policy.takes("lr") and policy.scheduler != "override" and scheduled and not placed_anew:
            what, mend = "the learning rate belongs to this run's scheduler", f"{_OVERRIDE} (scheduler: override)"
            faults.append(ConfigError.fault("hyperparameters: lr", what, mend=mend))
        return faults

    def _placing_faults(self) -> list[Fault]:
        scheduler, policy, begun = self.scheduler, self.policy, self.beginning
        assert begun is not None
        where = f"the state of {self._name}" if self.external else "lr_scheduler"
        if self.others:
            names = ", ".join(type(one).__name__ for one in (scheduler, *self.others))
            what = f"several schedulers ({names}) share one optimizer: they cannot be put at a position one by one"
            return [_unsupported("lr_scheduler", what, "put them into one SequentialLR or ChainedScheduler")]
        if self.external and not policy.schedule_is_this_runs and self._kind == TORCH and not self.scheduled:
            what = f"{self._name} was built on the checkpoint's rates, as they are loaded, and is to begin anew"
            mend = "build it before load_checkpoint, or add --no-load-lr-state"
            return [ConfigError.fault("lr_scheduler", what, mend=mend)]
        if self.external and (loader := schedulers.own_loader(scheduler)) is not None:
            what = f"{loader}.load_state_dict is the script's: it may take more from the state than the position"
            return [_unsupported(where, what, "hand the scheduler to deepspeed.initialize")]
        fixed = self._kind in (PLATEAU, UNKNOWN)
        if (self.stepped or begun.position) and (self.external or not fixed):
            what = "has taken steps before it is resumed: the beginning of this run's schedule is gone"
            mend = "load the checkpoint before the first step, with a scheduler at its beginning"
            return [ConfigError.fault(where, what, mend=mend)]
        state = self.saved.scheduler if self.saved is not None else None
        nowhere = self.external and position_in(state or {}) is None
        if (policy.keeps_position and (fixed or nowhere)) or (
            policy.scheduler == "override" and fixed and not self.external
        ):
            return [schedulers.unplaceable(scheduler, where)]
        if not policy.keeps_position or self.saved is None:
            return []
        # ReduceLROnPlateau, and transformers' GreedyLR (optimization.py, 5.23): a run may be given one in many updates
        if self.external and "num_bad_epochs" in (state or {}):
            what = f"counts the metrics that another scheduler was given, not updates: {self._name} has no position"
            return [_unsupported(where, what, "use --no-load-lr-state for this run's schedule from its beginning")]
        return schedulers.beyond(scheduler, self.saved.position)

    def _continuing_faults(self, saved: SavedValues) -> list[Fault]:
        scheduler, count, masters = self.scheduler, len(self.own_groups), self.policy.loads_masters
        values, state = saved.group_values(count), saved.scheduler
        if not masters and any(values) and not all(values):
            where = f"param group {values.index({})}"
            what = "its members were saved with different learning rates or weight decay"
            mend = "build the param groups that were saved, or use --override-opt-param-scheduler"
            return [ParamGroupMismatch.fault(where, what, mend=mend)]
        if scheduler is None and not masters and not all(values):
            return [_unknown_rates(saved, "the optimizer's files, which have those of each group, are not opened")]
        if scheduler is None and state is None:
            return []
        if scheduler is None or state is None:
            has, without = ("this run", "the checkpoint") if state is None else ("the checkpoint", "this run")
            what = f'{without} has no scheduler and {has} has one: "checkpoint" needs both'
            return [ConfigError.fault(saved.where, what, mend=_REBUILD)]
        if self._kind == DEEPSPEED:
            return self._undescribed(saved)
        if schedulers.has_code(scheduler):
            what = f"the function that gives {self._name} its rates is this run's: no checkpoint holds it"
            return [_unsupported(saved.where, what, _REBUILD)]
        same = set(schedulers.configuration(scheduler)) == set(schedulers.saved_configuration(state))
        if not same or position_in(state) is None:
            expected, found = f"the state of {self._name}", ", ".join(sorted(state)) or "nothing"
            return [_unsupported(saved.where, _OTHER_KIND, _REBUILD, expected, found)]
        if masters or len(saved.groups) >= count:
            return []
        kept = ", ".join(sorted(schedulers.kept_in_groups(scheduler)))
        if kept:
            return [_unknown_rates(saved, f"{self._name} keeps {kept} in the optimizer, which is not loaded")]
        rates = schedulers.base_lrs_in(state)
        if rates and count == 1 and values[0] and values[0]["lr"] != rates[0]:
            what = "the saved DeepSpeed JSON does not describe the optimizer that ran, and its own files are not opened"
            expected, found = f"lr {rates[0]!r}, as the scheduler", f"lr {values[0]['lr']!r}"
            return [_unsupported(saved.where, what, f"load the optimizer, or {_OVERRIDE}", expected, found)]
        return []

    def _undescribed(self, saved: SavedValues) -> list[Fault]:
        """A fault if the saved JSON does not describe the scheduler of DeepSpeed that ran.

        A JSON may lie: the script built the scheduler, or the run resumed another one's schedule.
        """
        name, params = saved.scheduler_section
        what, same = "a scheduler of DeepSpeed stores its position alone", name == self._name and params is not None
        if self.by_script or name is None or (not same and self.policy.scheduler == "checkpoint"):
            why = "the script built it" if self.by_script or name is None else "it is not the one of the saved JSON"
            mend = f"name the scheduler in the DeepSpeed JSON, or {_OVERRIDE} or --no-load-lr-state"
            expected = f"{self._name} in the DeepSpeed JSON of both runs"
            return [_unsupported(saved.where, f"{what}, and {why}", mend, expected, name or "none")]
        if not same or params is None:
            return []  # two types, which the comparison names
        made = self._as_saved(saved, params)
        if made is None:
            return [_unknown_rates(saved, f"{name} was built from the optimizer's learning rates")]
        rates = [float(str(group["lr"])) for group in made.optimizer.param_groups]  # type: ignore[attr-defined]
        if len(saved.groups) == len(rates) and saved.rates(len(rates)) != rates:
            what = f"{what}, and {name} as in the saved JSON gives other rates there than were saved"
            return [_unsupported(saved.where, what, f"{_OVERRIDE} with the saving run's values, or --no-load-lr-state")]
        return []

    def _as_saved(self, saved: SavedValues, params: Mapping[str, object]) -> object | None:
        """This run's scheduler of DeepSpeed as the saving run had it; None if the files do not tell its base rates."""
        rates = saved.rates(len(self.own_groups))
        return schedulers.as_saved(self.scheduler, params, rates, saved.position, first=not saved.groups)

    def _comparing_faults(self, saved: SavedValues) -> list[Fault]:
        if not self.external and any(number not in saved.groups for number in range(len(self.own_groups))):
            what = (
                "rates and weight decay cannot be compared: the optimizer's files, which have them, are not opened, or "
            )
            what += "they differ within a param group of this run"
            return [_unsupported(saved.where, what, f"load the optimizer, or {_OTHER_FLAG}")]
        if self.scheduler is not None and schedulers.has_code(self.scheduler):
            what = f"the function that gives {self._name} its rates is in no checkpoint: it cannot be compared"
            return [_unsupported(saved.where, what, _OTHER_FLAG)]
        of_deepspeed = saved.scheduler is not None and self._kind == DEEPSPEED
        return (self._undescribed(saved) if of_deepspeed else []) or [
            ScheduleMismatch.fault(
                where,
                "differs, and the schedule was asked to be strict",
                f"{theirs!r} in the checkpoint (kept with --use-checkpoint-opt-param-scheduler)",
                f"{ours!r} in this run (used with --override-opt-param-scheduler)",
                mend="make this run's configuration the checkpoint's, or say with a flag whose values are right",
            )
            for where, (theirs, ours) in self._pairs(saved).items()
            if not _equal(theirs, ours)
        ]

    def _pairs(self, saved: SavedValues) -> dict[str, tuple[object, object]]:
        """The checkpoint's and this run's value of each field of schedule, learning rate and weight decay.

        The rate of a group is the scheduler's to tell, if there is one; that of an external torch scheduler is in
        `initial_lr`, and its other fields are compared when it is given its state.
        """
        scheduler, state, pairs = self.scheduler, saved.scheduler, dict[str, tuple[object, object]]()
        for number, group in enumerate(() if self.external else self.own_groups):
            theirs = saved.groups[number]
            names = BOUNDS & set(group) & set(theirs) | {"weight_decay"}
            names |= {"lr"} if scheduler is None and "initial_lr" not in names else set()
            pairs |= {f"param group {number}: {name}": (theirs.get(name), group.get(name)) for name in sorted(names)}
        kind, params = saved.scheduler_section
        if scheduler is None or state is None:
            return {**pairs, "scheduler": ("none" if state is None else kind or "a scheduler", self._name)}
        if self._kind == DEEPSPEED:
            pairs["scheduler"] = (kind, self._name)
            if kind != self._name or params is None:
                return pairs
            theirs, ours = map(schedulers.configuration, (self._as_saved(saved, params), scheduler))
        else:
            theirs, ours = schedulers.saved_configuration(state), schedulers.configuration(scheduler)
            if self.external and self.beginning is not None:  # which may have taken the state before the load
                ours |= self.beginning.configuration
        pairs |= {f"scheduler: {name}": (theirs.get(name), ours.get(name)) for name in sorted({*theirs, *ours})}
        if self._kind == PLATEAU:
            last = state.get("_last_lr") if self.external else saved.rates(len(self.own_groups))
            rates = [float(str(rate)) for rate in last] if isinstance(last, list) else []
            groups = self.beginning.groups if self.external and self.beginning is not None else self.own_groups
            first = [float(str(group["lr"])) for group in groups]
            if not schedulers.reduces_to(state, first, rates):
                pairs["scheduler: rates"] = (rates, first)
        return pairs

    def apply(self, groups: Sequence[MutableMapping[str, object]], values: Sequence[Mapping[str, object]]) -> None:
        """Put the schedule where the policy wants it, and its rates into the live param groups; the same on every rank.

        `values` are the groups' saved ones. Only for what has no faults.
        """
        if self.policy.places_schedule:
            self._place(groups)
        elif self.policy.scheduler == "checkpoint" or (self.policy.scheduler == "strict" and self.external):
            self._continue(groups, values)

    def _place(self, groups: Sequence[MutableMapping[str, object]]) -> None:
        scheduler, begun, external = self.scheduler, self.beginning, self.external
        names, own = RATES | schedulers.cycled(scheduler), self.scheduled
        if not external and self.policy.schedule_is_this_runs:
            names, own = names | SCHEDULED, True
        if own or (scheduler is not None and not external):
            set_groups(groups, self.own_groups, names)
            for group, mine in zip(groups, self.own_groups, strict=True):
                for name in BOUNDS - set(mine) if not external else ():  # which a later scheduler would use
                    group.pop(name, None)
        if begun is None or (self._kind == UNKNOWN and not external):  # which was not loaded: it is at its beginning
            return
        if external:
            set_groups(groups, begun.groups, names)
        assert self.saved is not None
        begun.place(scheduler, self.saved.position if self.policy.keeps_position else 0)

    def _continue(self, groups: Sequence[MutableMapping[str, object]], values: Sequence[Mapping[str, object]]) -> None:
        scheduler, write = self.scheduler, self.external or not self.policy.loads_masters
        if write:  # else the param groups were loaded
            set_groups(groups, values, (RATES if self.external else SCHEDULED) | schedulers.cycled(scheduler))
        assert self.saved is not None
        _, params = self.saved.scheduler_section
        if self._kind == DEEPSPEED and params is not None:
            schedulers.adopt_configuration(scheduler, self._as_saved(self.saved, params))
        if scheduler is not None and write:
            schedulers.write_rates(scheduler)


def _equal(one: object, other: object) -> bool:
    """Whether two values are the same; an iterator, which may have no end, is compared as it is."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    one, other = (value.tolist() if hasattr(value, "tolist") else value for value in (one, other))
    return bool(one == other)


def other_state_faults(scheduler: object, state: object, *, where: str) -> list[Fault]:
    """What the framework overlooks as it gives a scheduler its saved state ("host"): that there is none of its kind.

    Schedulers of DeepSpeed and of torch keep the position under different names: it would begin at 0 again.
    """
    if state is None:
        what, expected = "holds no scheduler state", "the state of this run's scheduler"
        mend = "pass load_lr_scheduler_states=False, or resume with --no-load-lr-state"
        return [ModelMismatch.fault(where, what, expected, "none", mend=mend)]
    names = ("last_batch_iteration", "last_epoch")
    saved = [name for name in names if name in state] if isinstance(state, Mapping) else []
    live = [name for name in names if hasattr(scheduler, name)]
    if len(saved) != 1 or len(live) != 1 or saved == live or not isinstance(state, Mapping):
        return []
    expected, found = f"the state of {type(scheduler).__name__}", ", ".join(sorted(state))
    return [ModelMismatch.fault(where, _OTHER_KIND, expected, found, mend=_REBUILD)]


def _unsupported(where: str, what: str, mend: str, expected: str = "", found: str = "") -> Fault:
    return UnsupportedLayout.fault(where, what, expected, found, mend=mend)


def _unknown_rates(saved: SavedValues, why: str) -> Fault:
    what = f'scheduler "checkpoint" needs the rates and weight decay of the saving run: {why}'
    expected = "one param group, described in the saved DeepSpeed JSON"
    mend = f"{_OVERRIDE} with the learning rate of the saving run, or load the optimizer"
    return _unsupported(
        saved.where, what, mend, expected, "several param groups, or an optimizer that the script built"
    )
