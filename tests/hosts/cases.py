"""What a test case trains: plain values, so that they travel to the workers and read as tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from devices import BUCKETS

GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Run:
    """One side of a case: how a run is laid out.

    `stage` is 0 to 3 or "bf16" (stage 1 under BF16_Optimizer); `options` go to "zero_optimization".
    """

    stage: int | str
    dp: int
    dtype: str = "bf16"
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __str__(self) -> str:
        extra = "".join(f",{k}={v}" for k, v in self.options.items())
        return f"zero{self.stage}x{self.dp}-{self.dtype}{extra}"


@dataclass(frozen=True)
class Model:
    """What is trained; every field changes what has to be carried over. What is frozen may have a second name."""

    optimizer: str = "adamw"
    groups: int = 1
    frozen: bool = False
    renamed: bool = False
    batchnorm: bool = False
    tied: bool = False
    empty: bool = False
    scheduler: bool = True
    extra: bool = False
    seed: int = 7


def ds_config(run: Run) -> dict[str, Any]:
    zero_stage = 1 if run.stage == "bf16" else int(run.stage)
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // run.dp,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": zero_stage, **BUCKETS, **run.options},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if zero_stage == 3:
        config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 20)
    if run.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if run.stage == "bf16":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    for key, value in run.config.items():
        config[key] = value
    return config
