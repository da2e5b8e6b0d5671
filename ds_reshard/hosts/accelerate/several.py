"""One accelerator, several engines: `accelerator.backward` goes to the engine of the first `prepare` alone.

accelerate says so in a warning of its own, once, at the second `prepare` (`_prepare_deepspeed`, accelerate 1.15.0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_reshard.errors import PrepareError, raise_faults
from ds_reshard.hosts.accelerate.running import BACKWARD, trains

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine


class Several:
    """Stands where accelerate keeps the one engine that `backward` goes to, when more than one trains.

    `engine` is the first one's, which `free_memory` destroys.
    """

    def __init__(self, engine: object) -> None:
        self.engine = engine

    def backward(self, loss: object, **kwargs: object) -> None:
        _refuse("accelerator.backward")

    def get_global_grad_norm(self) -> None:
        _refuse("accelerator.clip_grad_norm_")


def _refuse(method: str) -> None:
    fault = PrepareError.fault(
        method,
        "this Accelerator has prepared several models, and accelerate takes the first one's engine for each",
        mend=BACKWARD,
    )
    raise_faults([fault], subject="accelerate")


def trains_alone(accelerator: Accelerator, engine: DeepSpeedEngine) -> None:
    """Let `accelerator.backward` go to the one engine that trains, and refuse it where there are more."""
    from accelerate.utils import DeepSpeedEngineWrapper

    wrapped = accelerator.deepspeed_engine_wrapped
    if wrapped.engine is engine:
        return
    if sum(map(trains, accelerator._models)) > 1:
        accelerator.deepspeed_engine_wrapped = Several(wrapped.engine)
    else:
        accelerator.deepspeed_engine_wrapped = DeepSpeedEngineWrapper(engine)
