"""python examples/llama_demo/by_trainer.py RANKS FOLDER: the Trainer goes on from FOLDER's checkpoint at ZeRO-3."""

from __future__ import annotations

import sys

import deepspeed
from setting import (
    BATCH,
    DECAY,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    LENGTH,
    RATE,
    RETURNS,
    VOCABULARY,
    on_ranks,
    rows,
)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import ds_reshard.auto  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it needs a compiler, and these ranks do not need it
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": RATE, "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "ds_reshard": {"resume": {"scheduler": "override"}},
}
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    max_position_embeddings=LENGTH,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
)


def train() -> None:
    ranks, folder = int(sys.argv[1]), sys.argv[2]
    arguments = TrainingArguments(
        folder,
        deepspeed=CONFIG,
        max_steps=RETURNS,
        per_device_train_batch_size=BATCH // ranks,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # shift_labels, which the model hands to its loss
        learning_rate=RATE,
        weight_decay=DECAY,
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": tokens, "labels": labels, "shift_labels": labels} for tokens, labels in rows()]
    trainer = Trainer(model=LlamaForCausalLM(LLAMA), args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


if __name__ == "__main__":
    on_ranks(int(sys.argv[1]), train)
