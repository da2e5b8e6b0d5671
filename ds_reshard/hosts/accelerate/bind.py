"""From the placeholder to DeepSpeed's optimizer: the scheduler that the user built drives the real one.

DeepSpeed takes param groups without parameters out, in place (`_configure_optimizer`, deepspeed/runtime/engine.py,
0.19.8), and keeps the group dicts of `basic_optimizer` in whatever ZeRO makes of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ds_reshard.errors import PrepareError, raise_faults
from ds_reshard.hosts.accelerate.given import is_optimizer, parts
from ds_reshard.resume.schedulers import innermost

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_reshard.hosts.accelerate.placeholder import LateOptimizer

# The lists of schedulers of torch and DeepSpeed that hold one value for each param group.
PER_GROUP = (
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "delta_lrs",
    "_init_lrs",
    "org_lrs",
    "min_moms",
    "max_moms",
    "min_lr",
)
_CYCLED = ("betas", "momentum")
_PREPARE = "accelerator.prepare"


def nonempty(groups: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """The groups that DeepSpeed keeps."""
    return tuple(number for number, group in enumerate(groups) if len(group["params"]))  # type: ignore[arg-type]


def drop_groups(scheduler: object, kept: Sequence[int], count: int) -> None:
    """Leave a scheduler that was built over `count` groups the values of those that are kept."""
    if len(kept) == count:
        return
    for part in parts(scheduler):
        for name in PER_GROUP:
            values = vars(part).get(name)
            if isinstance(values, list) and len(values) == count:
                setattr(part, name, [values[number] for number in kept])


def carry(late: LateOptimizer, real: Optimizer, *, scheduled: bool) -> None:
    """Write into the real groups what the script and its scheduler have written into the placeholder's.

    `scheduled` says that a scheduler was built on the placeholder, whose rates then hold, also where they are
    unchanged. Raises PrepareError where DeepSpeed has made other param groups, as it does for experts.
    """
    kept = nonempty(late.own_groups)
    changed = [_changes(late.own_groups[number], late.begun_with[number], rate=scheduled) for number in kept]
    if not any(changed):
        return
    if len(kept) != len(real.param_groups):
        fault = PrepareError.fault(
            "scheduler",
            "was built over other param groups than DeepSpeed has made, as it does for experts",
            str(len(kept)),
            str(len(real.param_groups)),
            mend="DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...) builds it over the real ones",
        )
        raise_faults([fault], subject=_PREPARE)
    for group, values in zip(real.param_groups, changed, strict=True):
        missing = [name for name in _CYCLED if name in values and name not in group]
        if missing:
            fault = PrepareError.fault(
                "DummyOptim",
                f"was made before the Accelerator: its scheduler cycles {missing[0]}, which "
                f"{type(real).__name__} has not",
                mend="make the Accelerator before DummyOptim(...)",
            )
            raise_faults([fault], subject=_PREPARE)
        group.update(values)


def _changes(group: Mapping[str, object], begun: Mapping[str, object], *, rate: bool) -> dict[str, object]:
    return {
        name: value
        for name, value in group.items()
        if name != "params" and ((rate and name == "lr") or name not in begun or not _same(begun[name], value))
    }


def _same(one: object, other: object) -> bool:
    return one is other or bool(one == other)


def adopt(scheduler: object, real: Optimizer) -> None:
    """Let a scheduler, and all that it holds, drive the real optimizer."""
    for part in parts(scheduler):
        part.optimizer = real  # type: ignore[attr-defined]
    _note_steps(real)


def called(function: Callable[[Optimizer], object], real: Optimizer) -> object:
    """What an `lr_scheduler_callable` makes of the real optimizer; PrepareError where that cannot drive it."""
    made = function(real)
    groups = getattr(innermost(getattr(made, "optimizer", None)), "param_groups", real.param_groups)
    if not callable(getattr(made, "step", None)) or is_optimizer(made):
        what = f"gave a {type(made).__name__}, which is no scheduler"
    elif not any(group is live for group in groups for live in real.param_groups):
        what = "gave a scheduler on another optimizer than the one it was called with: the real one's rates would stay"
    else:
        return made
    mend = "lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, ...), built on its argument"
    raise_faults([PrepareError.fault("lr_scheduler_callable", what, mend=mend)], subject=_PREPARE)
    return None


def _note_steps(optimizer: Optimizer) -> None:
    """As torch's schedulers do when they are built, so that they do not warn of a missing `optimizer.step()`.

    `patch_track_step_called` in torch/optim/lr_scheduler.py, 2.13.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    reference, function = weakref.ref(optimizer), getattr(optimizer.step, "__func__", None)
    if function is None:  # another library's, in place of the method
        return

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> object:
        live = reference()
        assert live is not None
        live._opt_called = True  # type: ignore[attr-defined]
        return function.__get__(live, type(live))(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign,assignment]
