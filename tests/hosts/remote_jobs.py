"""Loads by URL, in the rank workers: with the environment that names the store."""

from __future__ import annotations

from typing import Any

import jobs
import refused_jobs
import torch
from cases import Run, ds_config
from store_proxy import reach


def load(environment: dict[str, str], **given: Any) -> dict[str, Any]:
    reach(environment)
    return jobs.load(**given)


def wide(run: Run, *, folder: str = "", url: str = "", environment: dict[str, str] | None = None) -> tuple[int, int]:
    """Save 2M parameters in the folder; or load them by URL: the bytes that this rank has fetched, and that it owns."""
    import deepspeed

    import ds_reshard
    from ds_reshard.containers.remote import fetched

    reach(environment or {})
    torch.manual_seed(3)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    if folder:
        engine.backward(engine(torch.ones(3, 512, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        engine.save_checkpoint(folder)
        return 0, 0
    before = fetched()[1]
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(url)
    inner = engine.optimizer
    masters = getattr(inner, "fp32_partitioned_groups_flat", None) or inner.single_partition_of_fp32_groups
    states = [one for held in inner.optimizer.state.values() for one in held.values() if torch.is_tensor(one)]
    weights = [getattr(one, "ds_tensor", one) for one in engine.module.parameters()]
    return fetched()[1] - before, sum(one.numel() * one.element_size() for one in (*masters, *states, *weights))


def load_refused(environment: dict[str, str], **given: Any) -> dict[str, Any]:
    reach(environment)
    return jobs.load_refused(**given)


def load_with_feature(environment: dict[str, str], **given: Any) -> tuple[str, str]:
    reach(environment)
    return refused_jobs.load_with_feature(**given)
