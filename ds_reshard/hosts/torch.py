"""A script that loads its optimizer by itself: a resume policy that nobody would apply is refused there.

Importing this loads no torch. Rung 2 of the ladder (a method on a class): `register_load_state_dict_pre_hook` is of one
optimizer (torch/optim/optimizer.py, 2.13), and there is none of all. Rung 3: `set_optimizer_state_dict` begins the
states of a fresh optimizer before it loads them, in a function of its module.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, cast

from ds_reshard import hosts
from ds_reshard.hooks import Call, HostHooks, Patch, Seam
from ds_reshard.operations.watching import under_way
from ds_reshard.resume.policy_sources import asked_policy, refuse_unapplied
from ds_reshard.resume.schedulers import innermost

if TYPE_CHECKING:
    from torch.optim import Optimizer

_BEGUN: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
"""Optimizers whose states torch has begun by a step without gradients, until they make one of their own."""


def load_state_dict(call: Call) -> object:
    """Load a state; ConfigError where a resume policy was asked for that nobody would apply to it.

    Not collective: ranks are given the same policy. An optimizer that has trained goes back, and does not resume.
    Inside a load of a host the policy is the host's affair. Megatron's and nanotron's optimizers have seams of their
    own, also in a loop of the script's; DeepSpeed's has the policy of its engine's JSON. An optimizer that the script
    loads beside them has none.
    """
    policy, optimizer = asked_policy(), call["self"]
    if under_way() or (hosts.hooked("deepspeed") and (hosts.refuse_policy_of_engine(optimizer) or policy.is_default)):
        return call()
    if _has_trained(optimizer):
        return call()
    if (policy.is_default and policy.report is None) or _is_called_by_host():
        return call()
    if not _is_its_own(optimizer, call["state_dict"]):
        refuse_unapplied(f"{type(optimizer).__name__}.load_state_dict")
    return call()


def begin_states(call: Call) -> object:
    """Of `_init_optim_state`: what it gives an optimizer, to have something to load into, is no training."""
    # accelerate's wrapper is an optimizer of torch without what one has (AcceleratedOptimizer of optimizer.py)
    policy, optimizer = asked_policy(), cast("Optimizer", innermost(call["optim"]))
    if (policy.is_default and policy.report is None) or optimizer in _BEGUN or _has_trained(optimizer):
        return call()
    result = call()
    _BEGUN[optimizer] = None
    optimizer.register_step_post_hook(lambda stepped, *_: _BEGUN.pop(stepped, None))
    return result


def _is_called_by_host() -> bool:
    """True if Megatron's or nanotron's own code loads the optimizer, and their hooks are on."""
    owners = tuple(f"{name}." for name in ("megatron", "nanotron") if hosts.hooked(name))
    frame: FrameType | None = sys._getframe(1)
    while owners and frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(owners):
            return True
        frame = frame.f_back
    return False


def _has_trained(optimizer: Optimizer) -> bool:
    return optimizer not in _BEGUN and _of_a_step(optimizer.state.values())


def _of_a_step(states: Iterable[object]) -> bool:
    """Whether some state is of a step. Adagrad's are there before the first one, and count none.

    An entry without anything is what a look at `optimizer.state` leaves, which is a defaultdict.
    """
    return any(not isinstance(state, Mapping) or bool(state and state.get("step", 1) != 0) for state in states)


def _is_its_own(optimizer: Optimizer, state_dict: object) -> bool:
    """Whether a state is that which a fresh optimizer has: accelerate gives it to each in `prepare` (optimizer.py)."""
    if not isinstance(state_dict, dict) or _of_a_step((state_dict.get("state") or {}).values()):
        return False
    return bool(state_dict.get("param_groups") == optimizer.state_dict()["param_groups"])


HOOKS = HostHooks(
    host="torch",
    distribution="torch",
    versions=">=2.1,<3",
    tested=("2.10.0", "2.11.0", "2.13.0", "2.14.1"),
    patches=(
        Patch(
            target="torch.optim.optimizer:Optimizer.load_state_dict",
            wrapper=Seam(f"{__name__}:load_state_dict"),
            signature=("state_dict",),
            summary="refuses resume flags where a script loads its optimizer by itself: nobody would apply them",
        ),
        Patch(
            target="bitsandbytes.optim.optimizer:Optimizer8bit.load_state_dict",
            wrapper=Seam(f"{__name__}:load_state_dict"),
            signature=("state_dict",),
            summary="refuses them for the optimizers of bitsandbytes, which do not call torch's method",
            optional=True,
        ),
        Patch(
            target="torch.distributed.checkpoint.state_dict:_init_optim_state",
            wrapper=Seam(f"{__name__}:begin_states"),
            signature=("optim",),
            summary="tells the states that torch begins, to have something to load into, from those of a run",
            optional=True,
        ),
    ),
)
