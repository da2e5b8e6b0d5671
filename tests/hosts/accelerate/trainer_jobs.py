"""Hugging Face's Trainer on DeepSpeed: it keeps the best checkpoint of a run, and loads that at the end."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import jobs
import torch
from cases import Model
from logs import heard


def best_at_end(
    folder: str,
    own_scheduler: bool,
    resume_from: str | None = None,
    lr: float = 0.01,
    policy: dict[str, Any] | None = None,
    rising: bool = False,
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train six steps, saving and evaluating every second; what each optimizer step used, and what was loaded.

    Where the loss is `rising` the first evaluation is the best one. `beside` are more hosts to hook than DeepSpeed.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ds_reshard

    jobs.forget()
    torch.manual_seed(7)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "ds_reshard": {"resume": policy or {"scheduler": "override"}},
    }
    if not own_scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 3}}
    given = {
        "output_dir": folder,
        "deepspeed": config,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "per_device_train_batch_size": 4,
        "learning_rate": lr,
        "report_to": [],
        "lr_scheduler_type": "cosine" if own_scheduler else "constant_with_warmup",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "warmup_steps": 3,
    }
    rates: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            _watch(trainer.deepspeed.optimizer.optimizer, rates)

    class Evaluated(Trainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            found = super().evaluate(*args, **kwargs)
            return {**found, "eval_loss": 1.0 + self.state.global_step} if rising else found

    try:
        ds_reshard.uninstall("transformers")  # which another job of this process may have hooked for good
        with heard(logging.INFO) as told, jobs.trainer_on_cpus(), ExitStack() as stack:
            for host in ("deepspeed", *beside):
                stack.enter_context(ds_reshard.install(host))
            net = _Losses(Model())
            optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
            data = [{"tokens": torch.tensor(n % 13), "labels": torch.tensor((n + 1) % 13)} for n in range(64)]
            trainer = Evaluated(
                model=net,
                args=TrainingArguments(**given),
                train_dataset=data,
                eval_dataset=data[:8],
                optimizers=(optimizer, None),
                callbacks=[Watch()],
            )
            trainer.train(resume_from_checkpoint=resume_from)
    except ds_reshard.ReshardError as error:
        return {"error": str(error)}
    best = trainer.state.best_model_checkpoint
    own = sum("holds what this run has saved" in text for text in told)
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return {"error": None, "rates": rates, "best": best, "own": own, "weights": weights}


class _Losses(jobs.Net):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(tokens, labels)}


def _watch(optimizer: Any, rates: list[float]) -> None:
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        return original(*args, **kwargs)

    optimizer.step = step
