"""The seam of `load_meta`: iteration, consumed samples and data stages, as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

from ds_reshard.hosts.nanotron.current import current


class Metadata(Protocol):
    """`CheckpointMetadata` of serialize/metadata.py, a dataclass; `metas` is one too."""

    metas: Counters


class Counters(Protocol):
    """`TrainingMetadata`: its own check wants the samples of all stages to add up."""

    data_stages: list[object]


def load_meta(original: Callable[[], object]) -> object:
    """nanotron's metadata, with counters of 0 where the policy begins the iteration or the data anew."""
    meta = original()
    policy = current().policy
    if policy.keeps_iteration and policy.dataloader == "load":
        return meta
    metas = cast(Metadata, meta).metas
    stages = [
        replace(stage, consumed_train_samples=0, consumed_tokens_per_dataset_folder={})  # type: ignore[type-var]
        for stage in metas.data_stages
    ]
    changed: dict[str, object] = {"consumed_train_samples": 0, "consumed_tokens_total": 0, "data_stages": stages}
    if not policy.keeps_iteration:
        changed |= {"last_train_step": 0, "last_stage_idx": 0}
    return replace(meta, metas=replace(metas, **changed))  # type: ignore[type-var]
