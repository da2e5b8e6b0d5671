"""DeepSpeed's curriculum learning, the one position in the data that it saves."""

from __future__ import annotations

from typing import Any

import jobs
import torch


class _Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor(index)


def _engine(stage: int, folder: str, policy: dict[str, Any]) -> Any:
    import deepspeed

    jobs.forget()
    net = torch.nn.Linear(3, 1)
    schedule = {"total_curriculum_step": 6, "difficulty_step": 1}
    metric = {"difficulty_type": "value", "clustering_type": "single_cluster", "min_difficulty": 1, "max_difficulty": 4}
    metric |= {"schedule_type": "fixed_linear", "schedule_config": schedule}
    curriculum = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": {"any": metric}}
    sampling = {"enabled": True, "num_epochs": 10, "num_workers": 0, "curriculum_learning": curriculum}
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "seed": 1, "data_sampling": sampling},
        "ds_reshard": {"resume": policy},
    }
    optimizer = torch.optim.AdamW(net.parameters())
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config, training_data=_Numbers())[0]


def _drawn(engine: Any, steps: int) -> list[list[int]]:
    """Train; which samples each step has drawn on this rank."""
    batches, drawn = iter(engine.training_dataloader), []
    for _ in range(steps):
        inputs, numbers = next(batches)
        engine.backward(engine(inputs).square().mean())
        engine.step()
        drawn.append(numbers.tolist())
    return drawn


def _position(engine: Any) -> tuple[Any, ...]:
    sampler = engine.training_dataloader.data_sampler
    clusters = len(getattr(sampler, "data_clusters", sampler.data_cluster_paths))
    return sampler.curriculum_step, [int(at) for at in sampler.data_cluster_current_position], clusters


def resumed(folder: str, before: int, policy: dict[str, Any]) -> dict[str, Any]:
    """Save after three steps; load at another stage into an engine that has made some, and draw on."""
    import ds_reshard

    engine = _engine(2, folder, {})
    told = {"first": _drawn(engine, 3), "saved": _position(engine)}
    engine.save_checkpoint(folder)
    engine = _engine(1, folder, policy)
    _drawn(engine, before)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return {**told, "loaded": _position(engine), "next": _drawn(engine, 3)}


def layer_tokens(folder: str, policies: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The layer tokens of random-LTD and the iteration: as saved, then after a load by each policy."""
    import deepspeed

    import ds_reshard

    tokens = {"min_value": 2, "max_value": 8, "schedule_type": "fixed_linear"}
    tokens["schedule_config"] = {"require_steps": 2, "seq_per_step": 1}
    layers = {"total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "model_mask_name": None}
    form = {"model_type": "decoder", "hidden_state_order": "batch_seq_dim", "random_ltd_schedule": tokens}
    told = []
    for stage, policy in ((2, None), *((1, policy) for policy in policies)):
        jobs.forget()
        net = torch.nn.Linear(3, 1)
        config = {
            "train_batch_size": 4,
            "zero_optimization": {"stage": stage},
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True, **layers, **form}},
            },
            "ds_reshard": {"resume": policy or {}},
        }
        engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)[0]
        if policy is None:
            for _ in range(4):
                engine.backward(engine(torch.ones(2, 3)).square().mean())
                engine.step()
            engine.save_checkpoint(folder)
        else:
            with ds_reshard.install("deepspeed"):
                engine.load_checkpoint(folder)
        told.append((engine.random_ltd_scheduler.get_current_seq(), engine.global_steps))
    return told
