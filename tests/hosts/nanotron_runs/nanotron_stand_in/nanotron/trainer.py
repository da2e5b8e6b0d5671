"""Synthetic: the order in which nanotron's trainer resumes, with the names that it binds."""

from __future__ import annotations

from typing import Any

from nanotron.config import get_config_from_file
from nanotron.helpers import lr_scheduler_builder
from nanotron.random import RandomStates, get_current_random_state
from nanotron.serialize import load_lr_scheduler, load_meta, load_weights, parse_ckpt_path, save
from nanotron.serialize.metadata import TrainingMetadata
from nanotron.serialize.optimizer import load_optimizer, state_dict_to_device


class DistributedTrainer:
    def __init__(self, config_or_config_file: Any) -> None:
        held = config_or_config_file
        self.config = config = get_config_from_file(held) if isinstance(held, str) else held
        self.parallel_context = config.parallel_context
        self.init_checkpoint_path = parse_ckpt_path(config=config, parallel_context=self.parallel_context)
        self.random_states = RandomStates({"tp_synced": get_current_random_state()})
        self.model = getattr(config, "model", None)
        if self.init_checkpoint_path is not None and self.model is not None:
            load_weights(
                model=self.model, parallel_context=self.parallel_context, root_folder=self.init_checkpoint_path
            )
        self.optimizer = config.build_optimizer()
        if self.init_checkpoint_path is not None and config.checkpoints.load_optimizer:
            load_optimizer(
                optimizer=self.optimizer,
                parallel_context=self.parallel_context,
                root_folder=self.init_checkpoint_path,
                param_shard_metadata=None,
                model=None,
                map_location="cpu",
            )
        self.lr_scheduler = lr_scheduler_builder(
            optimizer=self.optimizer,
            lr_scheduler_args=config.optimizer.learning_rate_scheduler,
            total_training_steps=config.tokens.train_steps,
        )
        self.metadata = TrainingMetadata(0, 0, 0, 0, [])
        if self.init_checkpoint_path is not None and config.checkpoints.load_lr_scheduler:
            load_lr_scheduler(
                lr_scheduler=self.lr_scheduler,
                is_zero=config.optimizer.zero_stage,
                parallel_context=self.parallel_context,
                root_folder=self.init_checkpoint_path,
            )
            self.metadata = load_meta(self.parallel_context, self.init_checkpoint_path).metas

    def first_step(self) -> None:
        if self.init_checkpoint_path is not None and self.config.checkpoints.load_optimizer:
            state_dict_to_device(self.optimizer.state_dict(), "cuda")

    def save_checkpoint(self, folder: Any) -> None:
        save(
            config=self.config,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            parallel_context=self.parallel_context,
            training_metadata=self.metadata,
            root_folder=folder,
        )
