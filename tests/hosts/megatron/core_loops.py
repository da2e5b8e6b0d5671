"""A training loop on `megatron.core` alone, as users write it: their own saving and loading, no megatron.training."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from small_gpt import Record
from torch.optim.optimizer import register_optimizer_step_pre_hook

KINDS = ("fp32", "float16", "sharded")


def loop(
    kind: str,
    *,
    steps: int,
    lr: float = 3e-4,
    min_lr: float = 3e-5,
    weight_decay: float = 0.01,
    groups: dict[str, float] | None = None,
    chained: bool = False,
    save: str | None = None,
    load: str | None = None,
    sharded_files: bool = False,
    order: tuple[str, ...] = ("optimizer", "scheduler"),
    flags: str = "",
    hooks: bool = True,
    built: str = "",
    betas: tuple[float, float] = (0.9, 0.999),
    times: int = 1,
    edit: str = "",
    train_steps: int = 40,
    scale: float = 1024.0,
    stepped: int = 0,
) -> dict[str, Any]:
    """Build, load if asked, train, save if asked; what each optimizer step used, and the scheduler's own values.

    `groups` gives parameters by name (a glob) a max_lr of their own; `built` sets a switch of the scheduler's
    constructor ("default" leaves both out); `edit` harms what was saved; `stepped` updates come before the load.
    """
    import ds_reshard

    ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    if hooks:
        ds_reshard.install("megatron")
    _join()
    models, optimizer = _build(kind, lr, min_lr, weight_decay, groups or {}, chained, betas, scale)
    scheduler = _scheduler(optimizer, lr, min_lr, weight_decay, built, train_steps)
    record, scales = Record(), []
    for step in range(stepped):
        _train(models, optimizer, step + 7)
        scheduler.step(increment=4)
    register_optimizer_step_pre_hook(record.before_step)
    if load is not None:
        for _ in range(times):
            _load(Path(load), models, optimizer, scheduler, order, sharded_files, edit)
    for step in range(steps):
        scales.append(float(optimizer.get_loss_scale()))
        _train(models, optimizer, step)
        scheduler.step(increment=4)
    if save is not None:
        _save(Path(save), models, optimizer, scheduler, sharded_files)
    report = ds_reshard.last_report()
    return {
        **record.result(),
        "position": scheduler.num_steps,
        "schedule": scheduler.state_dict(),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scales": scales,
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "report": report.to_json() if report is not None else None,
    }


def _join() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(3)


def _build(
    kind: str,
    lr: float,
    min_lr: float,
    weight_decay: float,
    groups: dict[str, float],
    chained: bool,
    betas: tuple[float, float],
    scale: float,
) -> tuple[list[Any], Any]:
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    options: dict[str, Any] = {
        "fp32": {},
        "float16": {"bf16": True},
        "sharded": {"bf16": True, "use_distributed_optimizer": True},
        "fp16": {"fp16": True, "initial_loss_scale": scale},
    }[kind]
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        **options,
    )
    overrides = {ParamKey(name="*.bias"): {"wd_mult": 0.0}}
    overrides |= {ParamKey(name=name): {"max_lr": high, "min_lr": high / 10} for name, high in groups.items()}
    models = [_model(kind) for _ in range(2 if chained else 1)]
    optimizers = [get_megatron_optimizer(config, [model], config_overrides=overrides) for model in models]
    return models, ChainedOptimizer([_only(one) for one in optimizers]) if chained else optimizers[0]


def _only(optimizer: Any) -> Any:
    return optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer


def _model(kind: str) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module, MegatronModule

    low = kind != "fp32"
    half = kind == "fp16"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        bf16=low and not half,
        fp16=half,
        params_dtype=torch.float16 if half else torch.bfloat16 if low else torch.float32,
    )

    class Net(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.first = torch.nn.Linear(8, 16)
            self.second = torch.nn.Linear(16, 8)
            self.third = torch.nn.Linear(8, 8)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.third(torch.tanh(self.second(torch.tanh(self.first(rows)))))

    net: Any = Net()
    net = Float16Module(config, net) if low else net
    plan = DistributedDataParallelConfig(use_distributed_optimizer=kind == "sharded")
    return DistributedDataParallel(config, plan, net)


def _scheduler(optimizer: Any, lr: float, min_lr: float, weight_decay: float, built: str, length: int) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    switches = {
        "use_checkpoint_opt_param_scheduler": built == "use_checkpoint",
        "override_opt_param_scheduler": built == "override",
    }
    if built == "default":
        switches = {}
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=160,
        lr_decay_style="linear",
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=4 * length,
        wd_incr_style="constant",
        **switches,
    )


def _train(models: list[Any], optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    for model in models:
        rows = torch.randn(4, 8, generator=generator)
        optimizer.scale_loss(model(rows).float().square().mean()).backward()
        model.finish_grad_sync()
    optimizer.step()


def _save(folder: Path, models: list[Any], optimizer: Any, scheduler: Any, sharded_files: bool) -> None:
    folder.mkdir()
    if sharded_files:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(_sharded(models, optimizer, scheduler, False), str(folder))
        return
    states = {
        "models": [model.state_dict() for model in models],
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(states, folder / "states.pt")
    if hasattr(_only(optimizer), "save_parameter_state"):
        optimizer.save_parameter_state(str(folder / "optimizer.pt"))


def _load(
    folder: Path,
    models: list[Any],
    optimizer: Any,
    scheduler: Any,
    order: tuple[str, ...],
    sharded_files: bool,
    edit: str,
) -> None:
    if sharded_files:
        from megatron.core import dist_checkpointing

        states = dist_checkpointing.load(_sharded(models, optimizer, scheduler, True), str(folder))
    else:
        states = torch.load(folder / "states.pt", weights_only=False)
        for model, state in zip(models, states["models"], strict=True):
            model.load_state_dict(state)
    if edit:
        _harm(states, edit)
    for part in order:
        if part == "scheduler":
            scheduler.load_state_dict(states["scheduler"])
        else:
            optimizer.load_state_dict(states["optimizer"])
            if not sharded_files and hasattr(_only(optimizer), "load_parameter_state"):
                optimizer.load_parameter_state(str(folder / "optimizer.pt"))


def _sharded(models: list[Any], optimizer: Any, scheduler: Any, is_loading: bool) -> dict[str, Any]:
    whole = {f"model{index}": model.sharded_state_dict(prefix=f"net{index}.") for index, model in enumerate(models)}
    tensors = whole if len(models) > 1 else whole["model0"]
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state = optimizer.sharded_state_dict(tensors, is_loading=is_loading, metadata=metadata)
    return {**whole, "optimizer": state, "scheduler": scheduler.state_dict()}


def _harm(states: dict[str, Any], edit: str) -> None:
    held = states["optimizer"]
    groups = held["param_groups"] if "param_groups" in held else held["optimizer"]["param_groups"]
    if edit == "other multiplier":
        groups[0]["wd_mult"] = 0.5
    elif edit == "one group less":
        groups.pop()
    elif edit == "another scheduler":
        states["scheduler"] = {"base_lrs": [0.1], "last_epoch": 3}
