"""The resume policy: one framework-neutral value, from flags, the DeepSpeed JSON or Python.

*Position* is how far a schedule has run: the number of optimizer steps for DeepSpeed and torch, of samples for
Megatron-LM. Only what a user gave counts when two places are compared; what nobody gave has its default,
which is what the framework does without this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields

from ds_reshard.errors import ConfigError, Fault, error_of, raise_faults, wrong_value

SCHEDULER = ("host", "override", "checkpoint", "strict", "reset")
OPTIMIZER = ("load", "skip", "masters")
ITERATION = ("load", "reset")
DATALOADER = ("load", "reset")

_CHOICES = {"scheduler": SCHEDULER, "optimizer": OPTIMIZER, "iteration": ITERATION, "dataloader": DATALOADER}
_SWITCHES = ("rng", "finetune")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """What a load takes from the checkpoint and what from this run.

    * `scheduler`: "host" (the framework's own values), "override" (this run's schedule, learning rates and weight
      decay at the checkpoint's position), "checkpoint" (all of these from the checkpoint), "strict" (they must
      agree), "reset" (this run's schedule from position 0).
    * `optimizer`: "load", "skip" (weights only; masters anew from them), "masters" (weights and fp32 masters,
      moments and step anew).
    * `hyperparameters`: names of param-group or engine values (betas, eps, weight_decay, momentum, clip_grad,
      loss_scale, ...) that this run's configuration gives.
    * `rng`: whether random states are restored. `finetune`: weights only, iteration 0, no rng.
    * `iteration`: "reset" zeroes iteration, consumed samples and the schedule's position. `dataloader`: "reset"
      starts the data anew and keeps the iteration.
    * `report`: a file that receives the resume report as JSON.
    * `asked`: how each key that was given was spelled there; two policies that differ in it alone are equal.

    Contradicting values raise ConfigError.
    """

    scheduler: str = "host"
    optimizer: str = "load"
    hyperparameters: tuple[str, ...] = ()
    rng: bool = True
    finetune: bool = False
    iteration: str = "load"
    dataloader: str = "load"
    report: str | None = None
    asked: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        raise_faults(_contradictions(self), subject="resume policy")

    @property
    def is_default(self) -> bool:
        """Whether the framework's own behaviour was asked for in every respect; a report changes nothing."""
        return all(getattr(self, name) == default for name, default in defaults().items() if name != "report")

    @property
    def loads_masters(self) -> bool:
        """Whether fp32 masters come from the checkpoint, rather than from the weights that were loaded."""
        return self.optimizer != "skip" and not self.finetune

    @property
    def loads_moments(self) -> bool:
        """Whether the optimizer's states and step count come from the checkpoint."""
        return self.optimizer == "load" and not self.finetune

    @property
    def keeps_position(self) -> bool:
        """Whether the schedule goes on where the checkpoint's was, rather than from position 0.

        A skipped optimizer starts its schedule anew unless "override" or "checkpoint" is asked for; an iteration
        that is reset takes the position with it, unless "checkpoint" is.
        """
        if self.finetune or self.scheduler == "reset":
            return False
        if self.scheduler == "checkpoint":
            return True
        if self.iteration == "reset":
            return False
        return self.optimizer != "skip" or self.scheduler == "override"

    @property
    def keeps_iteration(self) -> bool:
        return self.iteration == "load" and not self.finetune

    @property
    def schedule_is_this_runs(self) -> bool:
        """Whether learning rates, weight decay and schedule are this run's by request, not the host's choice."""
        return self.scheduler in ("override", "reset") or (not self.loads_masters and self.scheduler == "host")

    @property
    def places_schedule(self) -> bool:
        """Whether this run's scheduler is put at a position of its own schedule, rather than given the saved state."""
        return self.scheduler == "override" or not self.keeps_position

    def takes(self, name: str) -> bool:
        """Whether the hyper-parameter `name` of this run replaces the checkpoint's by request."""
        return name in self.hyperparameters


def defaults() -> dict[str, object]:
    """Every key of a policy with its default."""
    return {item.name: item.default for item in fields(ResumePolicy) if item.compare}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What one place gave: the `place` as a user would name it, values by key, and how each was spelled there.

    Only keys that the user gave are in `values`; `spelled` may leave out what is spelled as `key: value`. `adopted`
    are the keys whose flags were the script's own before they were ours.
    """

    place: str
    values: Mapping[str, object]
    spelled: Mapping[str, str] = field(default_factory=dict)
    adopted: frozenset[str] = frozenset()

    def say(self, key: str) -> str:
        return f"{self.spelled.get(key, f'{key} = {self.values[key]!r}')} ({self.place})"


def from_json(section: object, *, place: str = "ds_reshard.resume in the DeepSpeed JSON") -> Given:
    """The keys of a JSON object; every unknown key and wrong type is reported at once (ConfigError)."""
    if not isinstance(section, Mapping):
        raise error_of([wrong_value(place, "an object", section)], subject="resume policy")
    faults = [fault for key, value in section.items() for fault in _check(str(key), value, place)]
    raise_faults(faults, subject="resume policy")
    values = {key: tuple(value) if key == "hyperparameters" else value for key, value in section.items()}
    return Given(
        place=place, values=values, spelled={key: f'"{key}": {json.dumps(value)}' for key, value in section.items()}
    )


def combine(places: Iterable[Given]) -> ResumePolicy:
    """One policy from every place that gave something; ConfigError names both places where two differ."""
    chosen: dict[str, Given] = {}
    faults: list[Fault] = []
    for given in places:
        for key, value in given.values.items():
            first = chosen.setdefault(key, given)
            if _comparable(first.values[key]) != _comparable(value):
                what, mend = "is given in two places and differs", f"give {key} in one place, or the same in both"
                faults.append(ConfigError.fault(key, what, first.say(key), given.say(key), mend=mend))
    raise_faults(faults, subject="resume policy")
    values = {key: given.values[key] for key, given in chosen.items()}
    asked = {key: given.spelled.get(key, key) for key, given in chosen.items()}
    return ResumePolicy(**values, asked=asked)  # type: ignore[arg-type]


def policy_differences(policies: Sequence[ResumePolicy]) -> list[Fault]:
    """A fault for each key that ranks, in their order, were not given alike.

    Of a report, which rank 0 writes, the file may have another name on each.
    """
    mend = "give every rank the same flags and the same configuration"
    said = [{key: getattr(policy, key) for key in defaults()} for policy in policies]
    said = [{**of_rank, "report": of_rank["report"] and "a file"} for of_rank in said]
    return differences(said, where="resume policy", mend=mend)


def differences(said: Sequence[Mapping[str, object]], *, where: str, mend: str) -> list[Fault]:
    """A fault for each key of which ranks, in their order, have said other values."""
    faults = []
    for key in said[0] if said else ():
        ranks: dict[str, list[int]] = {}
        for number, values in enumerate(said):
            ranks.setdefault(repr(values[key]), []).append(number)
        if len(ranks) > 1:
            (first, numbers), *others = ranks.items()
            wanted = f"{first} everywhere, as on {_named(numbers)}"
            found = ", ".join(f"{value} on {_named(numbers)}" for value, numbers in others)
            what = "differs between ranks"
            faults.append(ConfigError.fault(f"{where}: {key}", what, wanted, found, mend=mend))
    return faults


def hyperparameter_faults(policy: ResumePolicy, known: Set[str], *, of_schedule: Sequence[str]) -> list[Fault]:
    """A fault for each hyper-parameter of the policy that this run does not know, or that its schedule sets."""
    settable, faults = sorted(known - set(of_schedule)), []
    for name in policy.hyperparameters:
        what, mend = "is not a hyper-parameter of this run", f"name some of: {', '.join(settable)}"
        if name in of_schedule:
            what, mend = "belongs to the schedule", "leave it out and add --override-opt-param-scheduler"
        elif name == "loss_scale":
            what, mend = "is not used by this run, which has no loss scale", "leave it out"
        if name not in settable:
            faults.append(ConfigError.fault(f"--override-optim-hparams {name}", what, mend=mend))
    return faults


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _comparable(value: object) -> object:
    return frozenset(value) if isinstance(value, tuple) else value  # names of hyper-parameters, in any order


def _check(key: str, value: object, place: str) -> list[Fault]:
    where = f"{place}: {key}"
    if key not in defaults():
        what, mend = "is not a key of the resume policy", f"remove or correct {key!r} in {place}"
        return [ConfigError.fault(where, what, f"one of {', '.join(defaults())}", repr(key), mend=mend)]
    if key in _CHOICES:
        expected, fits = "one of " + ", ".join(f'"{one}"' for one in _CHOICES[key]), value in _CHOICES[key]
    elif key in _SWITCHES:
        expected, fits = "true or false", isinstance(value, bool)
    elif key == "report":
        expected, fits = "the path of a file", isinstance(value, str) and value != ""
    else:
        expected = 'a list of names such as ["betas", "eps"]'
        fits = isinstance(value, (list, tuple)) and all(isinstance(one, str) and one.isidentifier() for one in value)
    return [] if fits else [wrong_value(where, expected, value)]


def _contradictions(policy: ResumePolicy) -> list[Fault]:
    wrong = []
    for name, value, kept in (
        ("scheduler", policy.scheduler, ("host", "reset")),
        ("optimizer", policy.optimizer, ("load", "skip")),
    ):
        if policy.finetune and value not in kept:
            what = "finetune takes weights alone and starts at iteration 0"
            mend = f'leave out one of finetune and {name} "{value}"'
            wrong.append((f'finetune with {name} "{value}"', what, mend))
    if "lr" in policy.hyperparameters and policy.scheduler in ("checkpoint", "strict"):
        what = "the learning rate cannot be this run's and the checkpoint's"
        mend = 'leave "lr" out of the hyper-parameters, or ask for --override-opt-param-scheduler'
        wrong.append((f'hyperparameters "lr" with scheduler "{policy.scheduler}"', what, mend))
    return [ConfigError.fault(where, f"contradict each other: {what}", mend=mend) for where, what, mend in wrong]
