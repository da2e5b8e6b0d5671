"""One rank: a model with experts under DeepSpeed's ZeRO-2, by the release of transformers that is importable.

torchrun expert_ranks.py save FAMILY FOLDER     train it, and save it with what it holds in FOLDER/truth.pt
torchrun expert_ranks.py load FAMILY FOLDER     load that under the map of the family; FOLDER/found.pt
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import deepspeed
import torch
import transformers

import ds_reshard.auto  # noqa: F401

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
}
CONFIG = {
    "train_batch_size": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))


def step(engine: Any, number: int) -> float:
    """Train on this rank's share of the batch; the loss over all of it."""
    share = tokens(number).chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    loss = engine(input_ids=share, labels=share).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().float()
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def held(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Weights, masters and moments: of each flat buffer the ranks' shares in their order, cut by parameter."""
    found = {(name, "weight"): parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    for group, masters in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        moments = optimizer.optimizer.state[masters]
        for kind, share in {"fp32": masters, **{kind: moments[kind] for kind in ("exp_avg", "exp_avg_sq")}}.items():
            shares = [torch.empty_like(share) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(shares, share.detach())
            whole, at = torch.cat(shares), 0
            for parameter in group:
                found[names[id(parameter)], kind] = whole[at : at + parameter.numel()].reshape(parameter.shape).clone()
                at += parameter.numel()
    return found


def logits(engine: Any, states: dict[tuple[str, str], torch.Tensor]) -> torch.Tensor:
    """What a model in fp32 with the masters' values answers."""
    model = copy.deepcopy(engine.module).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(states[name, "fp32"])
        answer: torch.Tensor = model(input_ids=tokens(9)).logits
    return answer


def main(action: str, family: str, folder: str) -> None:
    kind, more = FAMILIES[family]
    torch.manual_seed(0 if action == "save" else 1)
    shape = getattr(transformers, f"{kind}Config")(**SIZES, **more, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(shape)
    section = {} if action == "save" else {"ds_reshard": {"names": f"{family}-transformers-5"}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**CONFIG, **section}, dist_init_required=True
    )
    if action == "save":
        for number in range(3):
            step(engine, number)
        engine.save_checkpoint(folder)
        shape.save_pretrained(folder)
    else:
        engine.load_checkpoint(folder)
    states = held(engine)
    found = {"version": transformers.__version__, "states": states, "logits": logits(engine, states)}
    found["losses"] = [step(engine, number) for number in (3, 4)]
    if torch.distributed.get_rank() == 0:
        torch.save(found, f"{folder}/{'truth' if action == 'save' else 'found'}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
