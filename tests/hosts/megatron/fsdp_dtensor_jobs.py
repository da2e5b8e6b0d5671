"""On each rank: a GPT that Megatron-FSDP has sharded, its masters and moments made by the rule of format_jobs.

A model of the same run without Megatron-FSDP tells which elements of which key a parameter holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import format_jobs
import torch
import torch_adam
from format_jobs import ITERATION, KINDS, OPERATIONS, SAMPLES_SEEN, STEP, value


def save(arguments: str, folder: str, stages: bool = False, plain: bool = False) -> dict[str, Any]:
    """Fill and save; `stages` lets 0.19.2 run a pipeline, which it refuses by accident, and `plain` is torch's Adam."""
    if plain:
        torch_adam._fall_back()
    models, optimizer, scheduler = _setup(f"{arguments} --save {folder} --save-interval 1", stages)
    from megatron.training import checkpointing, get_args

    for one in _optimizers(optimizer):
        for live in (live for group in one.param_groups for live in group["params"]):
            live.grad = torch.zeros_like(live)
        one.step()  # which makes the moments
        one.zero_grad()
        for counted in one.state.values() if plain else one.param_groups:
            counted["step"] = torch.tensor(float(STEP)) if plain else STEP
    for key, index, held in _parameters(models, optimizer):
        for kind, local in zip(KINDS, held, strict=True):
            _local(local).copy_(value(key, index, kind))
    args = get_args()
    args.consumed_train_samples, args.iteration = SAMPLES_SEEN, ITERATION
    scheduler.step(SAMPLES_SEEN)
    checkpointing.save_checkpoint(ITERATION, models, optimizer, scheduler, OPERATIONS, checkpointing_context={})
    return {}


def loaded(arguments: str, folder: str, stages: bool = False, hooks: bool = False) -> dict[str, Any]:
    """Load by Megatron's own load: what of masters and moments is not by the rule, steps and counters."""
    if hooks:
        import ds_reshard

        ds_reshard.install("megatron")
    models, optimizer, scheduler = _setup(f"{arguments} --load {folder}", stages)
    from megatron.training import get_args

    wrong, compared = set(), 0
    for key, index, held in _parameters(models, optimizer):
        for kind, local in zip(KINDS, held, strict=True):
            compared += index.numel()
            if not _local(local).equal(value(key, index, kind)):
                wrong.add(f"{key}[{kind}]")
    args = get_args()
    steps = {int(group["step"]) for one in _optimizers(optimizer) for group in one.param_groups}
    counters = [args.iteration, args.consumed_train_samples, scheduler.num_steps]
    return {"wrong": sorted(wrong), "compared": compared, "steps": sorted(steps), "counters": counters}


def _setup(arguments: str, stages: bool) -> tuple[Any, Any, Any]:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # which Megatron-FSDP wants above 1
    torch.cuda.current_device = lambda: 0  # it makes a name of it
    if stages:
        _mesh_of_each_stage()
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
    if "--data-parallel-sharding-strategy" not in arguments:
        flags += " --data-parallel-sharding-strategy optim_grads_params"
    _states_of_all()
    return format_jobs._setup(f"{arguments} {flags}")


def _mesh_of_each_stage() -> None:
    """Of the ranks of one stage: 0.19.2 lays all ranks of the world over the mesh of data and tensor parallelism."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    def mesh(group: Any, tp_group: Any, ep_size: int = 1) -> torch.Tensor:
        return torch.tensor(torch.distributed.get_process_group_ranks(group)).reshape(-1, 1)

    mcore_fsdp_adapter._get_dp_tp_mesh = mesh


def _states_of_all() -> None:
    """Begin a state also where this rank has no gradient, as Transformer Engine's FusedAdam does.

    Without it a load hangs: ranks then have other sharded tensors, and gather one by one.
    """
    import fused_adam

    step = fused_adam.FusedAdam.step

    def whole(self: Any, closure: Any = None) -> None:
        for one in (one for group in self.param_groups for one in group["params"]):
            if not self.state[one]:
                self.state[one].update(exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
        step(self, closure)

    fused_adam.FusedAdam.step = whole


def _optimizers(optimizer: Any) -> list[Any]:
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor).detach().view(-1)


def _parameters(models: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor, tuple[Any, Any, Any]]]:
    """Of each parameter its key, the elements of it that this rank holds, and its master and moments."""
    states = {id(live): state for one in _optimizers(optimizer) for live, state in one.state.items()}
    places = _twin_places()
    for name, live in (one for model in models for one in model.named_parameters()):
        key, index = places[name.replace("module.", "")]
        part = getattr(live, "megatron_fsdp_slice", slice(None))
        state = states[id(live)]
        yield key, index.view(-1)[part], (live, state["exp_avg"], state["exp_avg_sq"])


def _twin_places() -> dict[str, tuple[str, torch.Tensor]]:
    """By the name of a parameter what `format_jobs` finds out of a model without Megatron-FSDP."""
    import small_gpt
    from megatron.core import parallel_state

    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    twin = small_gpt._model(**ends)
    places = format_jobs._places([twin])
    return {name: places[live] for name, live in twin.named_parameters()}
