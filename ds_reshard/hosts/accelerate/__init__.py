"""accelerate: `DummyOptim`, `prepare` and `save_state`/`load_state` with DeepSpeed.

Importing this loads neither accelerate nor torch; the seams are in the modules beside.
"""

from __future__ import annotations

import functools
from importlib import import_module

from ds_reshard.errors import HookError
from ds_reshard.hooks import Function, HostHooks, Patch, Wrapper
from ds_reshard.resume.schedulers import clock_in


def _to(module: str, seam: str) -> Wrapper:
    """Has each call go to a function of a module beside, with the original, bound to its object, as second argument."""

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def call(self: object, *args: object, **kwargs: object) -> object:
            ours: Function = getattr(import_module(f"{__name__}.{module}"), seam)
            return ours(self, functools.partial(original, self), *args, **kwargs)

        return call

    return wrap


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
            wrapper=_to("late_optimizer", "make_late"),
            signature=("params", "lr", "weight_decay"),
            summary="makes a torch optimizer of it, so that schedulers can be built on it before prepare",
        ),
        Patch(
            target=_PREPARE,
            wrapper=_to("late_optimizer", "prepare_deepspeed"),
            signature=("*args",),
            summary="binds schedulers to DeepSpeed's optimizer; refuses what would be silently dropped",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.save_state",
            wrapper=_to("state", "save_state"),
            signature=("output_dir",),
            summary="records who steps the schedule",
        ),
        Patch(
            target="accelerate.accelerator:Accelerator.load_state",
            wrapper=_to("state", "load_state"),
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
