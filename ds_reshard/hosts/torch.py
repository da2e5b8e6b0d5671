"""A script that loads its optimizer by itself: a resume policy that nobody would apply is refused there.

Importing this loads no torch. Rung 2 of the ladder (a method on a class): `register_load_state_dict_pre_hook` is of one
optimizer (torch/optim/optimizer.py, 2.13), and there is none of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_reshard.hooks import Call, HostHooks, Patch, Seam

if TYPE_CHECKING:
    from torch.optim import Optimizer


def load_state_dict(call: Call) -> object:
    """Load a state; ConfigError where a resume policy was asked for that nobody would apply to it.

    Not collective: ranks are given the same policy. An optimizer that has states goes back, and does not resume. Inside
    a load of a host the policy is the host's affair. Megatron's and nanotron's optimizers have seams of their own, also
    in a loop of the script's.
    """
    from ds_reshard import hosts
    from ds_reshard.operations.watching import under_way
    from ds_reshard.resume.policy_sources import asked_policy, refuse_unapplied

    policy, optimizer = asked_policy(), call["self"]
    if under_way() or (policy.is_default and policy.report is None) or optimizer.state:
        return call()
    if hosts.hooked("megatron") or hosts.hooked("nanotron") or (policy.is_default and hosts.hooked("deepspeed")):
        return call()
    if not _is_its_own(optimizer, call["state_dict"]):
        refuse_unapplied(f"{type(optimizer).__name__}.load_state_dict")
    return call()


def _is_its_own(optimizer: Optimizer, state_dict: object) -> bool:
    """Whether a state is that which a fresh optimizer has: accelerate gives it to each in `prepare` (optimizer.py)."""
    if not isinstance(state_dict, dict) or state_dict.get("state"):
        return False
    return bool(state_dict.get("param_groups") == optimizer.state_dict()["param_groups"])


HOOKS = HostHooks(
    host="torch",
    distribution="torch",
    versions=">=2.1,<3",
    tested=("2.13.0", "2.14.1"),
    patches=(
        Patch(
            target="torch.optim.optimizer:Optimizer.load_state_dict",
            wrapper=Seam(f"{__name__}:load_state_dict"),
            signature=("state_dict",),
            summary="refuses resume flags where a script loads its optimizer by itself: nobody would apply them",
        ),
    ),
)
