"""DeepSpeed: `engine.load_checkpoint` under any ZeRO stage and data-parallel size, and as the resume policy says.

Importing this loads neither DeepSpeed nor torch; the seams are in `load.py`, `resume_session.py` and
`external_schedulers.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from ds_reshard.errors import HookError
from ds_reshard.hooks import HostHooks, Patch


def wrap_load_checkpoint(original: Callable[..., object]) -> Callable[..., object]:
    from ds_reshard.hosts.deepspeed.load import load_checkpoint as seam  # torch is there: DeepSpeed imported it

    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        engine = arguments.pop("self")

        def by_deepspeed(changed: dict[str, object]) -> object:
            bound.arguments.update(changed)
            return original(*bound.args, **bound.kwargs)

        return seam(engine, by_deepspeed, **arguments)  # type: ignore[arg-type]

    return load_checkpoint


def wrap_save_checkpoint(original: Callable[..., object]) -> Callable[..., object]:
    from ds_reshard.hosts.deepspeed.resume_session import note_save as seam

    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        seam(bound["self"], str(bound["save_dir"]), bound.get("tag"))
        return result

    return save_checkpoint


def wrap_take_model_step(original: Callable[..., object]) -> Callable[..., object]:
    from ds_reshard.hosts.deepspeed.external_schedulers import take_model_step as seam

    @functools.wraps(original)
    def _take_model_step(self: object, *args: object, **kwargs: object) -> None:
        seam(self, lambda: original(self, *args, **kwargs))

    return _take_model_step


def wrap_load_state_dict(original: Callable[..., object]) -> Callable[..., object]:
    from ds_reshard.hosts.deepspeed.external_schedulers import load_state_dict as seam

    @functools.wraps(original)
    def load_state_dict(self: object, *args: object, **kwargs: object) -> object:
        state = next(iter([*args, *kwargs.values()]), None)
        return seam(self, lambda: original(self, *args, **kwargs), state)

    return load_state_dict


def wrap_batch_assertion(original: Callable[..., object]) -> Callable[..., object]:
    from ds_reshard.hosts.deepspeed.settings import check_batch as seam

    @functools.wraps(original)
    def _batch_assertion(self: object) -> None:
        seam(self, lambda: original(self))  # type: ignore[arg-type]

    return _batch_assertion


def _scheduler(target: str, parameter: str) -> Patch:
    return Patch(
        target=f"{target}.load_state_dict",
        wrapper=wrap_load_state_dict,
        signature=(parameter,),
        summary="a scheduler beside the engine takes its state as the resume policy says",
    )


_SCHEDULERS = (
    *(
        _scheduler(f"torch.optim.lr_scheduler:{name}", "state_dict")
        for name in (
            "LRScheduler",
            "LambdaLR",
            "MultiplicativeLR",
            "SequentialLR",
            "ChainedScheduler",
            "ReduceLROnPlateau",
            "CyclicLR",
        )
    ),
    _scheduler("torch.optim.swa_utils:SWALR", "state_dict"),
    *(
        _scheduler(f"deepspeed.runtime.lr_schedules:{name}", "sd")
        for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupCosineLR")
    ),
)


def _refuse_policy(original: Callable[..., object]) -> Callable[..., object]:
    """Where this DeepSpeed is not patched: a resume policy in the JSON is an error, not dropped."""

    @functools.wraps(original)
    def load_checkpoint(self: object, *args: object, **kwargs: object) -> object:
        config = getattr(getattr(self, "_config", None), "_param_dict", None)
        section = config.get("ds_reshard") if isinstance(config, dict) else None
        if isinstance(section, dict) and section.get("resume"):
            raise HookError(
                "ds_reshard.resume in the DeepSpeed JSON: the patches do not fit this DeepSpeed, so the resume "
                "policy cannot be applied (`ds-reshard hooks` says why); "
                f"pip install 'deepspeed=={HOOKS.tested[-1]}', or leave the policy out"
            )
        return original(self, *args, **kwargs)

    return load_checkpoint


HOOKS = HostHooks(
    host="deepspeed",
    distribution="deepspeed",
    versions=">=0.14,<0.20",
    tested=("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.5", "0.19.8"),
    patches=(
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
            wrapper=wrap_load_checkpoint,
            signature=(
                "load_dir",
                "tag",
                "load_module_strict",
                "load_optimizer_states",
                "load_lr_scheduler_states",
                "load_module_only",
                "custom_load_fn",
            ),
            summary="loads a checkpoint of another ZeRO stage or data-parallel size straight from its files",
            vendored_marker="_DS_RESHARD_LOAD_CHECKPOINT",
        ),
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
            wrapper=wrap_save_checkpoint,
            signature=("save_dir", "tag"),
            summary="notes what this run saves, to which no resume policy applies",
        ),
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine._take_model_step",
            wrapper=wrap_take_model_step,
            signature=("lr_kwargs",),
            summary="raises a TypeError of the scheduler's own, where DeepSpeed steps it to another position",
        ),
        Patch(
            target="deepspeed.runtime.config:DeepSpeedConfig._batch_assertion",
            wrapper=wrap_batch_assertion,
            signature=(),
            summary="names the numbers of ranks that a global batch can be divided among, where this is none of them",
        ),
        *_SCHEDULERS,
    ),
    instead=(
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
            wrapper=_refuse_policy,
            signature=("load_dir",),
            summary="refuses a resume policy that could not be applied",
        ),
    ),
)
