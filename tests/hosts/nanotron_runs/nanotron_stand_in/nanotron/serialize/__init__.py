"""Synthetic: every name of the modules below, as nanotron's own package has them."""

from nanotron.serialize.main import parse_ckpt_path, save
from nanotron.serialize.metadata import CheckpointMetadata, DataStageMetadata, TrainingMetadata, load_meta
from nanotron.serialize.optimizer import (
    load_lr_scheduler,
    load_optimizer,
    lr_scheduler_filename,
    optimizer_filename,
    save_lr_scheduler,
    state_dict_to_device,
)
from nanotron.serialize.random import load_random_states, save_random_states
from nanotron.serialize.weights import load_weights

__all__ = [
    "CheckpointMetadata",
    "DataStageMetadata",
    "TrainingMetadata",
    "load_lr_scheduler",
    "load_meta",
    "load_optimizer",
    "load_random_states",
    "load_weights",
    "lr_scheduler_filename",
    "optimizer_filename",
    "parse_ckpt_path",
    "save",
    "save_lr_scheduler",
    "save_random_states",
    "state_dict_to_device",
]
