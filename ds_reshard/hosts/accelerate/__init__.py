"""accelerate: `DummyOptim`, `prepare` and `save_state`/`load_state` with DeepSpeed.

Importing this loads neither accelerate nor torch; the seams are in the modules beside.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ds_reshard.errors import HookError
from ds_reshard.hooks import Function, HostHooks, Patch
from ds_reshard.resume.schedulers import clock_in

if TYPE_CHECKING:
    from accelerate import Accelerator


def wrap_dummy_optim(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        from ds_reshard.hosts.accelerate.late_optimizer import make_late

        make_late(self, original, *args, **kwargs)

    return __init__


def wrap_prepare(original: Function) -> Function:
    @functools.wraps(original)
    def _prepare_deepspeed(self: Accelerator, *args: object) -> object:
        from ds_reshard.hosts.accelerate.late_optimizer import prepare_deepspeed

        return prepare_deepspeed(self, functools.partial(original, self), *args)  # type: ignore[arg-type]

    return _prepare_deepspeed


def wrap_save_state(original: Function) -> Function:
    @functools.wraps(original)
    def save_state(self: Accelerator, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.accelerate.state import save_state as seam

        return seam(self, functools.partial(original, self, *args, **kwargs))

    return save_state


def wrap_load_state(original: Function) -> Function:
    @functools.wraps(original)
    def load_state(self: Accelerator, input_dir: str | None = None, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.accelerate.state import load_state as seam

        def load(folder: str | None, **others: object) -> object:
            return original(self, folder, *args, **{**kwargs, **others})

        return seam(self, load, input_dir, **kwargs)

    return load_state


def _refuse_clock(original: Function) -> Function:
    """Where this accelerate is not patched: a clock in the JSON is an error, not dropped."""

    @functools.wraps(original)
    def _prepare_deepspeed(self: object, *args: object) -> object:
        plugin = getattr(getattr(self, "state", None), "deepspeed_plugin", None)
        if clock_in(getattr(plugin, "deepspeed_config", None) or {}) is not None:
            raise HookError(
                "ds_reshard.accelerate.clock in the DeepSpeed JSON: the patches do not fit this accelerate, so the "
                "clock cannot be applied (`ds-reshard hooks` says why); "
                f"pip install 'accelerate=={HOOKS.tested[-1]}', or leave the clock out"
            )
        return original(self, *args)

    return _prepare_deepspeed


_PREPARE = "accelerate.accelerator:Accelerator._prepare_deepspeed"

HOOKS = HostHooks(
    host="accelerate",
    distribution="accelerate",
    versions=">=0.34,<1.16",
    tested=("0.34.2", "1.0.1", "1.6.0", "1.10.1", "1.15.0"),
    patches=(
        Patch(
            target="accelerate.utils.deepspeed:DummyOptim.__init__",
            wrapper=wrap_dummy_optim,
            signature=("params", "lr", "weight_decay"),
            summary="makes a torch optimizer of it, so that schedulers can be built on it before prepare",
        ),
        Patch(
            target=_PREPARE,
            wrapper=wrap_prepare,
            signature=("*args",),
            summary="binds schedulers to DeepSpeed's optimizer; refuses what would be silently dropped",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.save_state",
            wrapper=wrap_save_state,
            signature=("output_dir",),
            summary="records who steps the schedule",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.load_state",
            wrapper=wrap_load_state,
            signature=("input_dir",),
            summary="goes on with the schedule on either clock, and in step on ranks that are new",
        ),
    ),
    instead=(
        Patch(
            target=_PREPARE,
            wrapper=_refuse_clock,
            signature=("*args",),
            summary="refuses a clock that could not be applied",
        ),
    ),
)
