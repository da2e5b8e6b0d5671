"""One Llama on the same batches: by Megatron-LM's own training, and by the Hugging Face Trainer on DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, HIDDEN, LAYERS, BATCH, RATE = 64, 16, 2, 12, 1e-2
MEGATRON = (
    "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu --disable-bias-linear --bf16"
    " --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --no-rope-fusion"
    f" --use-distributed-optimizer --make-vocab-size-divisible-by 32 --lr {RATE} --min-lr {RATE} --micro-batch-size 1"
    f" --lr-decay-style constant --train-iters 12 --global-batch-size {BATCH} --weight-decay 0.01"
)


def megatron(arguments: str) -> dict[str, Any]:
    """Train; the loss of each micro-batch of this rank, as (update, sum over its tokens, their number)."""
    import small_gpt

    losses: list[tuple[int, float, int]] = []
    forward = small_gpt._forward

    def watched(record: Any, iterator: Any, model: Any) -> Any:
        output, loss = forward(record, iterator, model)

        def told(output: torch.Tensor) -> Any:
            losses.append((len(record.steps), float(output.detach().float().sum()), output.numel()))
            return loss(output)

        return output, told

    small_gpt._forward = watched
    small_gpt.pretrain([*MEGATRON.split(), *arguments.split()])
    return {"losses": losses}


def trainer(folder: str, wanted: str, updates: int, stage: int) -> dict[str, Any]:
    """Go on from the checkpoint `wanted`; the loss of each update on this rank's share, the checkpoint in `folder`."""
    import jobs
    from small_gpt import Numbers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerControl, TrainerState, TrainingArguments

    import ds_reshard

    jobs.forget()
    torch.manual_seed(1)
    world = torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": RATE, "warmup_max_lr": RATE, "warmup_num_steps": 2},
        },
        "ds_reshard": {"resume": {"scheduler": "override"}},
    }
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        use_cache=False,
        pad_token_id=None,
    )
    if not torch.distributed.get_rank():
        TrainerState(
            global_step=updates // 2,
            train_batch_size=BATCH // world,
            stateful_callbacks={"TrainerControl": TrainerControl().state()},
        ).save_to_json(f"{wanted}/trainer_state.json")
    torch.distributed.barrier()
    losses: list[float] = []

    class InOrder(Trainer):  # type: ignore[misc]
        """Samples in their order, as Megatron-LM takes them; the mean over the tokens of a batch."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            logits = model(input_ids=inputs["input_ids"]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
            losses.append(float(loss))
            return loss

    data = [{"input_ids": one["tokens"], "labels": one["labels"]} for one in map(Numbers().__getitem__, range(400))]
    with jobs.trainer_on_cpus(), ds_reshard.install("deepspeed"), ds_reshard.install("transformers"):
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            bf16=True,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=updates,
            save_steps=updates,
            per_device_train_batch_size=BATCH // world,
            learning_rate=RATE,
            weight_decay=0.01,
            warmup_steps=2,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        net = LlamaForCausalLM(shape)
        decay = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
        groups = [{"params": one, "weight_decay": rate} for one, rate in zip(decay, (0.01, 0.0), strict=True)]
        optimizer = torch.optim.AdamW(groups, lr=RATE)
        held = InOrder(model=net, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        held.train(resume_from_checkpoint=wanted)
    return {"losses": losses}
