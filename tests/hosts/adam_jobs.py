"""Loads into another kind of Adam than the saved one, of what DeepSpeed itself rounds, and of runs without a step."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jobs
import torch

KEPT = ("exp_avg", "variance")
"""How the states begin that follow a parameter."""


class Needy(torch.optim.AdamW):
    """Synthetic: an AdamW whose groups need a value that torch's have not, as those of DeepSpeed's FusedAdam do.

    `adam_w_mode` is where FusedAdam and DeepSpeedCPUAdam say that weight decay is decoupled.
    """

    adam_w_mode = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for values in (self.defaults, *self.param_groups):
            values["bias_correction"] = True
            for name in ("maximize", "decoupled_weight_decay"):
                values.pop(name)

    def __setstate__(self, state: Any) -> None:
        torch.optim.Optimizer.__setstate__(self, state)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["bias_correction"]
            group.setdefault("maximize", False)
            group.setdefault("decoupled_weight_decay", True)
        return super().step(closure)


class Kernel:
    """In place of DeepSpeed's C++: Adam without weight decay, in fp32."""

    @staticmethod
    def create_adam(*given: Any) -> int:
        return 0

    destroy_adam = create_lion = destroy_lion = create_adam

    @staticmethod
    def multi_tensor_lion(
        chunk: int, overflow: Any, lists: Any, lr: float, beta1: float, beta2: float, *_: Any
    ) -> None:
        for grad, param, exp_avg in zip(*lists, strict=True):
            param.data.sub_(lr * (exp_avg * beta1 + grad * (1 - beta1)).sign())
            exp_avg.mul_(beta2).add_(grad * (1 - beta2))

    @staticmethod
    def lion_update(number: int, step: int, lr: float, beta1: float, beta2: float, decay: float, *tensors: Any) -> None:
        param, grad, exp_avg = tensors
        Kernel.multi_tensor_lion(0, None, [[grad], [param], [exp_avg]], lr, beta1, beta2)

    @staticmethod
    def multi_tensor_adam(chunk: int, overflow: Any, lists: Any, lr: float, *rest: Any) -> None:
        beta1, beta2, eps, step, *_ = rest
        for grad, param, first, second in zip(*lists, strict=True):
            first.mul_(beta1).add_(grad * (1 - beta1))
            second.mul_(beta2).add_(grad**2 * (1 - beta2))
            param.data.sub_(lr * first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps))

    @staticmethod
    def adam_update(number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        *_, param, grad, first, second = rest
        first.mul_(beta1).add_(grad.float() * (1 - beta1))
        second.mul_(beta2).add_(grad.float() ** 2 * (1 - beta2))
        param.sub_((lr * first / (second.sqrt() + 1e-8)).to(param.dtype))


def _engine(kind: str, stage: int, seed: int = 0, **asked: Any) -> Any:
    import deepspeed
    from deepspeed.ops.lion import fused_lion
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder

    jobs.forget()
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": kind not in ("of transformers", "fused")},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if kind.startswith(("cpu", "fused")):
        CPUAdamBuilder.load = FusedAdamBuilder.load = CPULionBuilder.load = lambda self, verbose=True: Kernel
        fused_lion.FusedLionBuilder = lambda: SimpleNamespace(load=lambda: Kernel)
        if not kind.startswith("fused"):
            config["bf16"]["bf16_master_weights_and_grads"] = kind == "cpu"
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if kind == "cpu, in part":
            config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
            config["zero_optimization"]["sub_group_size"] = 64
        config["optimizer"] = {
            "type": "Lion" if "lion" in kind else "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.0},
        }
        named = {"_name": "cpu:0"} if kind == "cpu, in part" else {}  # what is not "cpu" is the device, to DeepSpeed
        with mock.patch.multiple(deepspeed.accelerator.get_accelerator(), **named) if named else nullcontext():
            return deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    from transformers.optimization import Adafactor

    maker = {"needy": Needy, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    maker |= {"sgd": functools.partial(torch.optim.SGD, momentum=0.9), "adagrad": torch.optim.Adagrad}
    maker |= {"adafactor": torch.optim.Adafactor, "of transformers": functools.partial(Adafactor, relative_step=False)}
    optimizer = maker[kind](net.parameters(), lr=0.01, **asked)
    return deepspeed.initialize(model=net, config=config, optimizer=optimizer)[0]


def _step(engine: Any, step: int) -> None:
    torch.manual_seed(100 + step)
    engine.backward(
        engine(torch.randn(4, 16).to(engine.device, next(engine.parameters()).dtype)).float().square().mean()
    )
    engine.step()


def _moments(engine: Any) -> list[torch.Tensor]:
    states = engine.optimizer.optimizer.state.values()
    return [value.clone() for state in states for name, value in sorted(state.items()) if name.startswith(KEPT)]


def _weights(engine: Any) -> list[torch.Tensor]:
    import deepspeed

    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params) if engine.zero_optimization_stage() == 3 else torch.no_grad():
        return [param.detach().clone() for param in params]


def load(saved: tuple[str, int], loaded: tuple[str, int], folder: str, steps: int, **asked: Any) -> dict[str, Any]:
    """Save after so many steps and load into another engine, each of a kind of Adam and a stage, and step that."""
    import ds_reshard

    with ds_reshard.install("deepspeed"):
        engine = _engine(*saved, **asked)
        for step in range(steps):
            _step(engine, step)
        engine.save_checkpoint(folder)
        before = _moments(engine), _weights(engine)
        engine = _engine(*loaded, seed=9)
        try:
            engine.load_checkpoint(folder)
        except ds_reshard.ReshardError as error:
            return {"error": type(error).__name__, "text": str(error)}
        after = _moments(engine), _weights(engine)
        _step(engine, steps)
    same = [all(map(torch.equal, *both)) and len(both[0]) == len(both[1]) for both in zip(before, after, strict=True)]
    return {"error": None, "same": same, "types": sorted({str(moment.dtype) for moment in after[0]})}


def fused_of_stage_0(stage: int, folder: str) -> dict[str, Any]:
    """Save FusedAdam at stage 0 in fp32 after three steps, and load at a stage; steps and weights after two more."""
    import ds_reshard

    engine = _engine("fused", 0)
    for step in range(3):
        _step(engine, step)
    engine.save_checkpoint(folder)
    held = {"saved": [state["step"] for state in engine.optimizer.state.values()]}
    for made in (engine, _engine("fused", stage, seed=9)):
        if made is not engine:
            with ds_reshard.install("deepspeed"):
                made.load_checkpoint(folder)
            held["loaded"] = [state["step"] for state in made.optimizer.optimizer.state.values()]
        for step in range(3, 5):
            _step(made, step)
        held["now" if made is not engine else "truth"] = _weights(made)
    return held


def lion(saved: tuple[str, int], loaded: tuple[str, int], folder: str) -> dict[str, Any]:
    """Save DeepSpeed's Lion of the GPU or of the CPU, and load into the other; momentum, and weights a step later."""
    import ds_reshard

    engine = _engine(*saved)
    for step in range(3):
        _step(engine, step)
    engine.save_checkpoint(folder)
    held = {"saved": next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].clone()}
    _step(engine, 3)
    held["truth"] = _weights(engine)
    engine = _engine(*loaded, seed=9)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    held["loaded"] = next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].clone()
    _step(engine, 3)
    return {**held, "now": _weights(engine)}
