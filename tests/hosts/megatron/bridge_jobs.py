"""On each rank: the model and state of format_jobs, saved by Megatron-Bridge's own `save_checkpoint`.

Its checkpointing, state and configuration are the real ones. Packages that it imports beside them and that are absent
here (modelopt, tensorboard, datasets, ...) are empty, as is its data package.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from dataclasses import fields
from typing import Any, ClassVar

import format_jobs

ABSENT = ("datasets", "mlflow", "modelopt", "nvidia_resiliency_ext", "peft", "tensorboard", "torch.utils.tensorboard")
ABSENT += ("wandb", "megatron.bridge.data")
PACKAGES = ("", ".models", ".peft", ".training", ".utils")
"""Those whose `__init__` imports models of all kinds: their modules are imported without it."""
PROVIDERS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}


class _Empty(types.ModuleType):
    """A package in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = any(name == one or name.startswith(f"{one}.") for one in ABSENT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        return _Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _bridge(home: str) -> None:
    import megatron

    megatron.__path__ = [*megatron.__path__, f"{home}/megatron"]
    sys.meta_path.insert(0, _Absent())
    for name in PACKAGES:
        module = types.ModuleType(f"megatron.bridge{name}")
        module.__path__ = [f"{home}/megatron/bridge{name.replace('.', '/')}"]
        sys.modules[module.__name__] = module
        if name:
            setattr(sys.modules["megatron.bridge"], name[1:], module)

    def provider(name: str) -> Any:
        if name not in PROVIDERS:
            raise AttributeError(name)
        return getattr(importlib.import_module(f"megatron.bridge.models.{PROVIDERS[name]}"), name)

    sys.modules["megatron.bridge.models"].__getattr__ = provider  # type: ignore[method-assign]


def _filled(kind: Any, source: Any, **more: Any) -> Any:
    """Return a configuration of class `kind` whose fields have the values that `source` has."""
    names = [one.name for one in fields(kind) if one.init and hasattr(source, one.name)]
    values = {name: getattr(source, name) for name in names if not callable(getattr(source, name))}
    return kind(**{**values, **more})


def save(arguments: str, home: str, saves: list[dict[str, Any]]) -> dict[str, Any]:
    """Build by Megatron-LM's set-up, fill, and save once for each of `saves`: values of Bridge's checkpoint block."""
    models, optimizer, scheduler = format_jobs._setup(arguments)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers
    from megatron.training import get_args

    args = get_args()
    format_jobs._fill(models, optimizer)
    scheduler.step(format_jobs.SAMPLES_SEEN)
    _bridge(home)
    checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
    checkpointing.save_sharded_modelopt_state = lambda *args, **options: None
    config, state = (importlib.import_module(f"megatron.bridge.training.{one}") for one in ("config", "state"))
    provider = importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    inner = models[0]
    while hasattr(inner, "module"):
        inner = inner.module
    tied = not args.untie_embeddings_and_output_weights
    rows = {name: getattr(args, name) for name in ("vocab_size", "make_vocab_size_divisible_by", "seq_length")}
    rows |= {"share_embeddings_and_output_weights": tied}
    for asked in saves:
        live = state.GlobalState()
        live._cfg = config.ConfigContainer(
            model=_filled(provider, inner.config, **rows),
            train=_filled(config.TrainingConfig, args),
            optimizer=_filled(config.OptimizerConfig, args),
            scheduler=_filled(config.SchedulerConfig, args),
            ddp=_filled(config.DistributedDataParallelConfig, models[0].ddp_config),
            dataset=None,
            logger=config.LoggerConfig(),
            tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=args.vocab_size),
            checkpoint=config.CheckpointConfig(ckpt_format="torch_dist", fully_parallel_save=False, **asked),
        )
        live._cfg.data_parallel_size = args.data_parallel_size
        live._train_state = state.TrainState()
        live.train_state.step = format_jobs.ITERATION
        live.train_state.consumed_train_samples = format_jobs.SAMPLES_SEEN
        live._timers = Timers(0, "max")
        groups = ProcessGroupCollection.use_mpu_process_groups()
        more = {"checkpointing_context": {}, "pg_collection": groups}
        checkpointing.save_checkpoint(live, models, optimizer, scheduler, format_jobs.OPERATIONS, **more)
    return {}
