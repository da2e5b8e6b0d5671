"""pytest plugin of `run.py`, and what the server imports once of which DeepSpeed's tests fork their workers.

Nothing is compiled: the kernel of FusedAdam is written in torch below, and what needs another (cpu_adam, lamb) is
skipped by its tests. The class, its states and its checkpoints are DeepSpeed's own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from types import SimpleNamespace

import deepspeed
import deepspeed.ops
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

NO_CALL = SimpleNamespace(params={})
REFUSALS = "test_elastic_checkpoint_change_dp[True-"
NOT_COMPILED = ("deepspeed_shm_comm", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_lamb", "async_io")


class Kernel:
    """csrc/cpu/adam/fused_adam.cpp"""

    @staticmethod
    def multi_tensor_adam(
        chunk: int,
        overflow: torch.Tensor,
        lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        right, square = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        for grad, param, exp_avg, exp_avg_sq in zip(*lists, strict=True):
            gradient, value = grad.float(), param.float()
            if not mode:  # 1 is AdamW
                gradient = gradient + weight_decay * value
            exp_avg.copy_(beta1 * exp_avg.float() + (1 - beta1) * gradient)
            exp_avg_sq.copy_(beta2 * exp_avg_sq.float() + (1 - beta2) * gradient * gradient)
            update = (exp_avg.float() / right) / ((exp_avg_sq.float() / square).sqrt() + eps)
            param.copy_(value - lr * (update + (weight_decay * value if mode else 0)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """A run without the hooks is none with them: the code of the load says which this is."""
    code = deepspeed.DeepSpeedEngine.load_checkpoint.__code__.co_filename
    assert ("ds_reshard/hooks" in code) == ("DS_RESHARD_PEERS" in os.environ), code


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what asserts that DeepSpeed refuses a checkpoint of another data-parallel size: the hooks load it.

    A worker that fails so ends without an answer, and the test waits for it until its time is over. Tests whose
    fixtures train in fp16 are skipped where there is none, as the others are: an error at set-up compares nothing.
    """
    if not get_accelerator().is_fp16_supported():
        for item in items:
            if any(value is torch.float16 for value in getattr(item, "callspec", NO_CALL).params.values()):
                item.add_marker(pytest.mark.skip(reason="no fp16 on this device"))
    refusals = [item for item in items if item.name.startswith(REFUSALS)]
    if refusals:
        config.hook.pytest_deselected(items=refusals)
        items[:] = [item for item in items if item not in refusals]


FusedAdamBuilder.load = lambda self, verbose=True: Kernel
for name in NOT_COMPILED:
    deepspeed.ops.__compatible_ops__[name] = False
multiprocessing.set_forkserver_preload(["plugin", "unit.simple_model"])
