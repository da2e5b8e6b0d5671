"""Synthetic: the counters of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class DataStageMetadata:
    name: str
    start_training_step: int
    consumed_train_samples: int
    sequence_length: int | None = None
    consumed_tokens_per_dataset_folder: dict[str, int] = field(default_factory=dict)


@dataclass
class TrainingMetadata:
    consumed_train_samples: int
    last_train_step: int
    consumed_tokens_total: int | None = None
    last_stage_idx: int | None = None
    data_stages: list[DataStageMetadata] | None = None

    def __post_init__(self) -> None:
        stages = self.data_stages or []
        assert self.consumed_train_samples == sum(stage.consumed_train_samples for stage in stages)
        tokens = sum(sum(stage.consumed_tokens_per_dataset_folder.values()) for stage in stages)
        assert self.consumed_tokens_total == tokens


@dataclass
class CheckpointMetadata:
    version: str
    tp: int
    dp: int
    metas: TrainingMetadata
    cp: int = 1
    custom_metas: dict[str, Any] | None = None


def load_meta(parallel_context: Any, root_folder: Path) -> CheckpointMetadata:
    held = json.loads((root_folder / "checkpoint_metadata.json").read_text())
    stages = [DataStageMetadata(**stage) for stage in held["metas"]["data_stages"]]
    return CheckpointMetadata(**{**held, "metas": TrainingMetadata(**{**held["metas"], "data_stages": stages})})
