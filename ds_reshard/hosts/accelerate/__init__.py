"""accelerate: `DummyOptim`, `prepare` and `save_state`/`load_state` with DeepSpeed.

Importing this loads neither accelerate nor torch; the seams are in the modules beside.
"""

from __future__ import annotations

import os

from ds_reshard import hosts
from ds_reshard.errors import HookError
from ds_reshard.hooks import Call, HostHooks, Patch, Seam
from ds_reshard.operations.ranks import agree, attempt, world_size
from ds_reshard.resume.schedulers import clock_in


def refuse_clock(call: Call) -> object:
    """Where this accelerate is not patched: a clock in the JSON is an error, not dropped."""
    plugin = getattr(getattr(call["self"], "state", None), "deepspeed_plugin", None)
    if clock_in(getattr(plugin, "deepspeed_config", None) or {}) is not None:
        raise HookError(
            "ds_reshard.accelerate.clock in the DeepSpeed JSON: the patches do not fit this accelerate, so the "
            "clock cannot be applied (`ds-reshard hooks` says why); "
            f"pip install 'accelerate=={HOOKS.tested[-1]}', or leave the clock out"
        )
    return call()


def load_fsdp_optimizer(call: Call) -> object:
    hosts.begin_states(call["fsdp_plugin"], call["optimizer"])
    return call()


def load_fsdp_model(call: Call) -> object:
    """Refuse files of ranks (use_dcp=False) that another number of ranks has saved; collective."""
    if not call.arguments.get("use_dcp", True):
        from ds_reshard.formats.fsdp.checkpoint import other_size

        folder = os.fspath(call["input_dir"])
        faults, unread, _ = attempt(lambda: list(other_size(folder, world_size())))
        agree([*(faults or ()), *unread], subject=f"loading {folder}")
    return call()


_PREPARE = "accelerate.accelerator:Accelerator._prepare_deepspeed"

HOOKS = HostHooks(
    host="accelerate",
    distribution="accelerate",
    versions=">=0.34,<1.16",
    tested=("0.34.2", "1.0.1", "1.6.0", "1.10.1", "1.15.0"),
    patches=(
        Patch(
            target="accelerate.utils.deepspeed:DummyOptim.__init__",
            wrapper=Seam(f"{__name__}.late_optimizer:make_late"),
            signature=("params", "lr", "weight_decay"),
            summary="makes a torch optimizer of it, so that schedulers can be built on it before prepare",
        ),
        Patch(
            target=_PREPARE,
            wrapper=Seam(f"{__name__}.late_optimizer:prepare_deepspeed"),
            signature=("*args",),
            summary="binds schedulers to DeepSpeed's optimizer; refuses what would be silently dropped",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.save_state",
            wrapper=Seam(f"{__name__}.state:save_state"),
            signature=("output_dir",),
            summary="records who steps the schedule",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.load_state",
            wrapper=Seam(f"{__name__}.state:load_state"),
            signature=("input_dir",),
            summary="goes on with the schedule on either clock, and in step on ranks that are new",
        ),
        Patch(
            target="accelerate.utils.fsdp_utils:load_fsdp_model",
            wrapper=Seam(f"{__name__}:load_fsdp_model"),
            signature=("fsdp_plugin", "accelerator", "model", "input_dir"),
            summary="refuses files of ranks that another number of ranks has saved, with the line that converts them",
        ),
        Patch(
            target="accelerate.utils.fsdp_utils:load_fsdp_optimizer",
            wrapper=Seam(f"{__name__}:load_fsdp_optimizer"),
            signature=("fsdp_plugin", "accelerator", "optimizer"),
            summary="loads the sharded states of FSDP1, which a fresh optimizer would begin anew",
        ),
    ),
    instead=(
        Patch(
            target=_PREPARE,
            wrapper=Seam(f"{__name__}:refuse_clock"),
            signature=("*args",),
            summary="refuses a clock that could not be applied",
        ),
    ),
)
