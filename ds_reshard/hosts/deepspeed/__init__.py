"""DeepSpeed: `engine.load_checkpoint` under any ZeRO stage and data-parallel size, and as the resume policy says.

Importing this loads neither DeepSpeed nor torch; the seams are in `load.py` and `resume.py`.
"""

from __future__ import annotations

from ds_reshard.errors import HookError
from ds_reshard.hooks import Call, HostHooks, Patch, Seam


def _seam(target: str) -> Seam:
    return Seam(f"{__name__}.{target}", early=True)  # torch is there: DeepSpeed has imported it


def _scheduler(target: str, parameter: str) -> Patch:
    return Patch(
        target=f"{target}.load_state_dict",
        wrapper=_seam("resume:load_state_dict"),
        signature=(parameter,),
        summary="a scheduler beside the engine takes its state as the resume policy says",
    )


_OPTIMIZERS = tuple(
    Patch(
        target=f"deepspeed.runtime.{target}.load_state_dict",
        wrapper=_seam("resume:load_optimizer_state"),
        signature=(parameter,),
        summary="refuses resume flags, and shards of other ranks, where a script gives the optimizer its state itself",
        optional=True,
    )
    for target, parameter in (
        ("zero.stage_1_and_2:DeepSpeedZeroOptimizer", "state_dict_list"),
        ("zero.stage3:DeepSpeedZeroOptimizer_Stage3", "state_dict_list"),
        ("bf16_optimizer:BF16_Optimizer", "state_dict_list"),
        ("fp16.fused_optimizer:FP16_Optimizer", "state_dict"),
        ("fp16.unfused_optimizer:FP16_UnfusedOptimizer", "state_dict"),
    )
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


def refuse_policy(call: Call) -> object:
    """Where this DeepSpeed is not patched: a resume policy in the JSON is an error, not dropped."""
    config = getattr(getattr(call["self"], "_config", None), "_param_dict", None)
    section = config.get("ds_reshard") if isinstance(config, dict) else None
    if isinstance(section, dict) and section.get("resume"):
        raise HookError(
            "ds_reshard.resume in the DeepSpeed JSON: the patches do not fit this DeepSpeed, so the resume "
            "policy cannot be applied (`ds-reshard hooks` says why); "
            f"pip install 'deepspeed=={HOOKS.tested[-1]}', or leave the policy out"
        )
    return call()


HOOKS = HostHooks(
    host="deepspeed",
    distribution="deepspeed",
    versions=">=0.14,<0.20",
    tested=("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.5", "0.19.8"),
    patches=(
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
            wrapper=_seam("load:load_checkpoint"),
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
            wrapper=_seam("resume:save_checkpoint"),
            signature=("save_dir", "tag"),
            summary="notes what this run saves, to which no resume policy applies",
        ),
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine._take_model_step",
            wrapper=_seam("resume:take_model_step"),
            signature=("lr_kwargs",),
            summary="raises a TypeError of the scheduler's own, where DeepSpeed steps it to another position",
        ),
        Patch(
            target="deepspeed.runtime.config:DeepSpeedConfig._batch_assertion",
            wrapper=_seam("settings:check_batch"),
            signature=(),
            summary="names the numbers of ranks that a global batch can be divided among, where this is none of them",
        ),
        *_OPTIMIZERS,
        *_SCHEDULERS,
    ),
    instead=(
        Patch(
            target="deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
            wrapper=Seam(f"{__name__}:refuse_policy"),
            signature=("load_dir",),
            summary="refuses a resume policy that could not be applied",
        ),
    ),
)
