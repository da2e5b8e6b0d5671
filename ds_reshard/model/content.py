"""What a checkpoint holds, in the words of no framework: what one format hands another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.layout import TensorKey

BASE, LAST, LAMBDAS = "base_lrs", "_last_lr", "lr_lambdas"
PER_GROUP = (BASE, LAST, LAMBDAS)
"""The entries of `LambdaLR.state_dict()` that have one value for each param group (torch/optim/lr_scheduler.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A whole tensor, and the one of the source that it is read from; cast where the types differ."""

    shape: tuple[int, ...]
    dtype: ElementType
    origin: TensorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The state of a LambdaLR: `groups` has of each param group the entries of PER_GROUP, `counters` all others."""

    counters: Mapping[str, object]
    groups: tuple[Mapping[str, object], ...]

    def entries(self) -> dict[str, object]:
        """As `state_dict()` has them."""
        return {**{key: [group[key] for group in self.groups] for key in PER_GROUP}, **self.counters}


def schedule_of(state: object, groups: int) -> Schedule | None:
    """The state of a LambdaLR with that many param groups; None for anything else."""
    if not isinstance(state, dict):
        return None
    lists = [state.get(key) for key in PER_GROUP]
    if not all(isinstance(values, list) and len(values) == groups for values in lists):
        return None
    rows = [{key: state[key][number] for key in PER_GROUP} for number in range(groups)]
    return Schedule(
        groups=tuple(rows), counters={str(key): value for key, value in state.items() if key not in PER_GROUP}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """`tensors` has weights and states by parameter and kind, in the model's order; `tied` other names of parameters.

    `scheduler` is the state that was saved, of whatever kind, `schedule` the same where it is a LambdaLR's.
    `batch_size` is the global one. `extra` are entries that the saving script has beside all this, by name.
    """

    folder: str
    tag: str
    dp: int
    tensors: Mapping[TensorKey, Held]
    tied: Mapping[str, str] = field(default_factory=dict)
    facts: OptimizerFacts | None
    scheduler: object = None
    schedule: Schedule | None = None
    steps: int | None
    samples: int | None
    batch_size: int | None
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Held]:
        return {key.name: held for key, held in self.tensors.items() if key.kind == "weight"}

    @property
    def trained(self) -> dict[str, dict[str, Held]]:
        """The parameters that the optimizer has states of, with these."""
        found: dict[str, dict[str, Held]] = {}
        for key, held in self.tensors.items():
            if key.kind != "weight":
                found.setdefault(key.name, {})[key.kind] = held
        return found
