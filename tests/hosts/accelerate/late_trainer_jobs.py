"""Hugging Face's Trainer with DeepSpeed, on a host without an accelerator."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import jobs
import torch
from cases import GLOBAL_BATCH, Model

UPDATES, SAVED = 8, 4


def _config(mode: str, stage: int, policy: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "ds_reshard": {"resume": policy},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    if mode in ("optimizer", "both"):
        auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": {**auto, "torch_adam": True}}
    if mode == "both":
        auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": auto}
    return config


def run(
    mode: str,
    stage: int,
    folder: str,
    *,
    hooks: bool = True,
    lr: float = 0.01,
    resumes: bool = False,
    policy: dict[str, Any] | None = None,
    metric: str | None = None,
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Train, or resume at the fourth update; `mode` is what the JSON has: "none", "optimizer" or "both".

    `metric` names a scheduler that is stepped by what an evaluation gives, here after every second update.
    `beside` are more hosts to hook.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ds_reshard

    jobs.forget()
    rates: list[list[float]] = []

    class Rates(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.model_wrapped.basic_optimizer.register_step_pre_hook(self.note)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append([])

        def note(self, optimizer: Any, *_: Any) -> None:
            rates[-1] += [float(group["lr"]) for group in optimizer.param_groups]

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": 1.0 + self.state.global_step}

    by_metric: dict[str, Any] = {
        "lr_scheduler_type": metric,
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "min_lr": 1e-6},
        "warmup_steps": 0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
    }
    try:
        with jobs.trainer_on_cpus(), ExitStack() as stack:
            for host in ("accelerate", "deepspeed", *beside) if hooks else ():
                stack.enter_context(ds_reshard.install(host))
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=GLOBAL_BATCH // torch.distributed.get_world_size(),
                max_steps=UPDATES,
                save_steps=SAVED,
                save_strategy="steps",
                **(by_metric if metric else {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
                learning_rate=lr,
                report_to="none",
                logging_strategy="no",
                disable_tqdm=True,
                seed=7,
                deepspeed=_config(mode, stage, policy or {}),
                remove_unused_columns=False,
                save_only_model=False,
                dataloader_pin_memory=False,
            )
            torch.manual_seed(7)
            tokens, labels = jobs.batch(0, 0, 1)
            items = [{"tokens": t, "labels": c} for t, c in zip(tokens, labels, strict=True)] * UPDATES
            data = {"train_dataset": items, "eval_dataset": items}
            trainer = Evaluated(model=Worded(), args=arguments, **data, callbacks=[Rates()])
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resumes else None)
            engine = trainer.model_wrapped
    except ds_reshard.ReshardError as error:
        return {"raised": type(error).__name__, "text": str(error)}
    return {"raised": None, "rates": [sorted(set(used)) for used in rates], "updates": engine.global_steps}


class Worded(torch.nn.Module):
    """The net with the answer that the Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = jobs.Net(Model())

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(tokens, labels)}
