"""The same GPT in a pipeline, or with its feed-forward layers cut over tensor-parallel ranks; in fp32 at ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from gpt_demo.layouts import GLOBAL_BATCH, Schedule
from gpt_demo.model import GPT, LAYERS, VOCABULARY, WIDTH, Block, Norm, Positions
from gpt_demo.text import Text

_MICRO_BATCHES = 2
_CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*feed\.0\.weight$"], "partition_type": "column"},
        {"patterns": [r".*feed\.2\.weight$"], "partition_type": "row"},
    ],
}


@dataclass(frozen=True)
class GridLayout:
    """How a run is spread over data-, tensor- and pipeline-parallel ranks; `pipeline` is said of one stage, too."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    pipeline: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        axis = f"{self.pp} stage{'s' * (self.pp > 1)}" if self.pipeline else f"tensor-parallel {self.tp}"
        return f"{axis}, data-parallel {self.dp}"


def build(layout: GridLayout, schedule: Schedule, *, seed: int) -> Any:
    """A DeepSpeed engine with AdamW and a learning-rate schedule."""
    torch.manual_seed(seed)
    model = _pipeline(layout) if layout.pipeline else GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // layout.dp // _MICRO_BATCHES,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": _CUT}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    return engine


def _pipeline(layout: GridLayout) -> nn.Module:
    """The layers of GPT, of which DeepSpeed gives each stage some; the head is tied to the embedding."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("bytes", _Bytes),
        LayerSpec(_Places),
        *(LayerSpec(Block) for _ in range(LAYERS)),
        LayerSpec(Norm, WIDTH),
        TiedLayerSpec("bytes", _Bytes, forward_fn=_head),
    ]
    return PipelineModule(layers, num_stages=layout.pp, loss_fn=_loss, partition_method="uniform")


class _Bytes(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        nn.init.normal_(self.weight, std=0.02)


class _Places(Positions):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.weight, std=0.02)


def _head(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embedding.weight)


def _loss(said: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(said.flatten(0, 1), meant.flatten())


def train(
    engine: Any, layout: GridLayout, text: Text, last: int, tell: Callable[[int, float], None] = lambda step, loss: None
) -> list[float]:
    """Train from the engine's own step up to `last`; the loss of each step over the global batch."""
    rank = engine.grid.get_data_parallel_rank() if layout.pipeline else dist.get_rank() // layout.tp
    losses = []
    for step in range(engine.global_steps, last):
        parts = text.batch(step, GLOBAL_BATCH, rank=rank, ranks=layout.dp).chunk(_MICRO_BATCHES)
        if layout.pipeline:
            loss = engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in parts]))
            mean = loss.detach().double()
        else:
            mean = torch.zeros((), dtype=torch.float64)
            for part in parts:
                loss = engine(part)
                engine.backward(loss)
                engine.step()
                mean += loss.detach().double() / _MICRO_BATCHES
            dist.all_reduce(mean)
            mean /= layout.ranks
        losses.append(float(mean))
        tell(step + 1, losses[-1])
    return losses
