"""python examples/llama_demo/by_megatron.py RANKS ARGUMENTS: Megatron-LM trains the Llama.

It asks for a GPU. The stand-in of this repository's tests answers, so that all ranks train on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from setting import BATCH, DECAY, GROUPS, HEADS, HIDDEN, INNER, LAYERS, LENGTH, RATE, STEPS, VOCABULARY, on_ranks, rows

sys.path.append(str(Path(__file__).parents[2] / "tests" / "hosts" / "megatron"))
import cuda_stand_in

cuda_stand_in.stand_in()
from megatron.core.datasets import utils  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import argument_utils, training  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

import ds_reshard.auto  # noqa: E402, F401

cuda_stand_in.imported()
utils.compile_helpers = lambda: None  # they are for Megatron-LM's own datasets

ARGUMENTS = f"""--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {INNER} --num-attention-heads {HEADS}
    --group-query-attention --num-query-groups {GROUPS} --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --seq-length {LENGTH}
    --max-position-embeddings {LENGTH} --vocab-size {VOCABULARY - 1} --tokenizer-type NullTokenizer
    --bf16 --use-distributed-optimizer --lr {RATE} --min-lr {RATE} --lr-decay-style constant --weight-decay {DECAY}
    --train-iters {STEPS} --global-batch-size {BATCH} --micro-batch-size 3 --hidden-dropout 0 --attention-dropout 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0 --distributed-backend gloo
    --transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion"""


def datasets(*_: Any, **__: Any) -> tuple[Any, None, None]:
    return [{"tokens": tokens, "labels": labels} for tokens, labels in rows()], None, None


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    batch = next(batches)
    positions, mask = torch.arange(LENGTH), torch.ones(LENGTH, LENGTH).triu(1).bool()
    losses = model(batch["tokens"], positions[None], mask[None, None], labels=batch["labels"])
    total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return losses, lambda _: (total, count, {"lm loss": torch.stack([total.detach(), count.float()])})


def train() -> None:
    sys.argv[1:] = [*ARGUMENTS.split(), *sys.argv[2:]]
    arguments = parse_and_validate_args()
    model = argument_utils.gpt_config_from_args(arguments)
    config = argument_utils.pretrain_cfg_container_from_args(arguments, model)
    training.pretrain(config, datasets, ModelType.encoder_or_decoder, forward)


if __name__ == "__main__":
    on_ranks(int(sys.argv[1]), train)
