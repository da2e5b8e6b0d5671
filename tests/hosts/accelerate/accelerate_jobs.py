"""A run that accelerate owns: its scheduler is not known to the DeepSpeed engine, and is loaded after it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import jobs
import logs
import torch
from cases import GLOBAL_BATCH
from late_jobs import new_accelerator, new_net


def _prepare(
    stage: int, lr: float, slope: float, policy: dict[str, Any], seed: int, times: int = 1
) -> tuple[Any, Any, Any, Any]:
    """The schedule takes `times` steps for each update that its script means."""
    world = torch.distributed.get_world_size()
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "ds_reshard": {"resume": policy},
    }
    accelerator, net = new_accelerator(config), new_net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + slope * (step / times)))
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    return accelerator, model, optimizer, scheduler


def _train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, first: int, steps: int) -> list[float]:
    rank, dp = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seen = []
    for step in range(first, first + steps):
        seen.append(float(model.optimizer.optimizer.param_groups[0]["lr"]))
        accelerator.backward(model(*jobs.batch(step, rank, dp)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return seen


def save(stage: int, lr: float, slope: float, folder: str, steps: int, times: int = 1) -> list[float]:
    made = _prepare(stage, lr, slope, {}, 7, times)
    rates = _train(*made, 0, steps)
    made[0].save_state(folder)
    return rates + _train(*made, steps, 3)


def resume(
    stage: int,
    lr: float,
    slope: float,
    folder: str,
    policy: dict[str, Any],
    times: int = 1,
    moved: int | None = None,
    hosts: tuple[str, ...] = ("deepspeed",),
) -> dict[str, Any]:
    """Load and train; a schedule is given its state once more, with `moved` in it where a warning says so."""
    import ds_reshard

    made = _prepare(stage, lr, slope, policy, 99, times)
    with ExitStack() as stack, logs.heard() as heard, logs.first_update() as told:
        for host in hosts:
            stack.enter_context(ds_reshard.install(host))
        made[0].load_state(folder)
        if moved is not None:
            scheduler = made[3].scheduler
            heard.clear()
            scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": moved})
    state = made[3].scheduler.state_dict()
    kept = torch.cat([s["exp_avg"].view(-1) for s in made[1].optimizer.optimizer.state.values()]).abs().sum()
    report = ds_reshard.last_report()
    warnings = list(report.warnings) if report is not None else []
    rates = _train(*made, 50, 3)
    return {
        "rates": rates,
        "state": sorted(state),
        "moments": float(kept),
        "warnings": warnings,
        "told": told,
        "heard": list(heard),
    }


def shared_sequence(stage: int, sp: int, folder: str, again: str) -> str:
    """Save a Llama of which `sp` ranks share each sequence (accelerate's `ParallelismConfig`); or load, and save again.

    Without `again` it trains for one update and saves `folder`. Loading into ranks that share none takes `sp` 1.
    """
    from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_reshard

    ds_reshard.install("deepspeed")
    ds_reshard.install("accelerate")
    ranks = torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=16, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    shared = ParallelismConfig(sp_backend="deepspeed", sp_size=sp, dp_replicate_size=ranks // sp, sp_handler=handler)
    accelerator = new_accelerator(config, **({"parallelism_config": shared} if sp > 1 else {}))
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(len(again))  # a run that loads begins with other weights
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    row = {"input_ids": torch.arange(16), "labels": torch.arange(16), "position_ids": torch.arange(16)}
    loader = torch.utils.data.DataLoader([row] * ranks, batch_size=1)
    model, optimizer, loader = accelerator.prepare(net, DummyOptim(net.parameters(), lr=1e-3), loader)
    if again:
        accelerator.load_state(folder)
    else:
        batch = next(iter(loader))
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        accelerator.backward(logits.float().square().mean())
        optimizer.step()
    accelerator.save_state(again or folder)
    return "loaded" if again else "saved"


def without_deepspeed(wrapper: str, folder: str, safe: bool | None = None, **arguments: Any) -> dict[str, Any]:
    """Save a network, its file one of safetensors or of torch; or load it, with what was told, and by what error."""
    import wrapped_jobs
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from devices import BACKEND

    import ds_reshard

    jobs.forget_accelerate()
    torch.manual_seed(99 if safe is None else 7)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
    net = wrapped_jobs.network(wrapper)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    net(torch.randn(1, 6)).backward()
    optimizer.step()
    before, error = [one.detach().clone() for one in net.parameters()], ""
    with ds_reshard.install("accelerate"), logs.heard() as told:
        if safe is not None:
            accelerator.save_state(folder, safe_serialization=safe)
        else:
            error = logs.refusal(lambda: accelerator.load_state(folder, **arguments))
    after = [one.detach().clone() for one in net.parameters()]
    changed = [number for number, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)]
    return {"weights": after, "changed": changed, "error": error, "told": list(told)}
