"""What a checkpoint cannot be made to do, whatever is in it: by its format, as a release, by `--ckpt-step`."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import PurePath

from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout
from ds_reshard.formats.megatron.files import TRACKER
from ds_reshard.resume.policy import ResumePolicy

_OTHER_FORMATS = ("torch_dcp", "fsdp_dtensor")
"""Formats whose optimizer state does not come through the optimizers' `load_state_dict`."""


def format_faults(where: str, name: str, policy: ResumePolicy) -> list[Fault]:
    """A fault for what was asked of a format in which it cannot be chosen.

    `torch_dcp` is read into the live moments even where Megatron's flags leave the optimizer out
    (`load_checkpoint`, training/checkpointing.py, 0.18.2 and 0.19.2).
    """
    asked = policy.scheduler != "host" or policy.optimizer == "masters" or bool(policy.hyperparameters)
    if name == "torch_dcp":
        asked = asked or not policy.loads_moments
    if name not in _OTHER_FORMATS or not asked:
        return []
    what = f"is of format {name}, in which schedule, masters, moments and hyper-parameters cannot be chosen"
    mend = "save it with --ckpt-format torch_dist, or leave these flags out"
    return [UnsupportedLayout.fault(where, what, "torch or torch_dist", name, mend=mend)]


def announced_format_faults(policy: ResumePolicy, arguments: Namespace) -> list[Fault]:
    """The same before anything is read, which these formats are into the live tensors."""
    folder = getattr(arguments, "load", None)
    if getattr(arguments, "auto_detect_ckpt_format", False) or folder is None:
        return []
    if not os.path.isfile(os.path.join(folder, TRACKER)):
        return []
    return format_faults(folder, getattr(arguments, "ckpt_format", ""), policy)


def release_faults(where: str, policy: ResumePolicy) -> list[Fault]:
    """A release holds weights alone."""
    if policy.optimizer != "masters" and policy.scheduler == "host":
        return []
    what = "is a release: weights alone, with no optimizer, schedule or position to resume"
    return [ConfigError.fault(where, what, mend="add --finetune and leave out the others")]


def step_faults(where: str, arguments: object) -> list[Fault]:
    """Moments of another iteration: for `torch` with the distributed optimizer Megatron reads `distrib_optim.pt`, and
    the iteration to go on from, by the tracker file and not by `--ckpt-step` (`load_checkpoint`, 0.18.2 and 0.19.2).
    """
    if not getattr(arguments, "ckpt_step", None) or not getattr(arguments, "use_distributed_optimizer", False):
        return []
    folder = PurePath(where)
    try:
        with open(folder.parent / TRACKER, encoding="utf-8") as file:
            latest = file.read(20).strip()
    except (OSError, ValueError):
        latest = "nothing that can be read"
    if latest.isdecimal() and folder.name == f"iter_{int(latest):07d}":
        return []
    what = "Megatron-LM would load its weights, and moments and iteration of the checkpoint that the tracker file names"
    mend = f"write the iteration into {folder.parent / TRACKER} in place of --ckpt-step, or add --no-load-optim"
    return [UnsupportedLayout.fault(where, what, folder.name, latest, mend=mend)]
