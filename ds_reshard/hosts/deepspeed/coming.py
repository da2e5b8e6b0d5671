"""The LiveRun of a rank of a planned run, made from the DeepSpeed JSON, the ranks, and a model without memory.

Nothing is decided here: a load decides about this run as about any other. DeepSpeed itself reads the JSON
(`DeepSpeedConfig`) and makes its schedulers; its optimizers are not built, as they compile their kernels. Flat buffers
are cut as by `_round_robin_reorder` and the padding of `parameter_alignment` (runtime/zero/stage_1_and_2.py) and by
`_create_fp16_sub_groups` (runtime/zero/stage3.py); the optimizer's class is chosen as by `_configure_basic_optimizer`
and `_configure_optimizer` (runtime/engine.py), all of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, gcd, prod
from typing import TYPE_CHECKING, cast

import torch

from ds_reshard.errors import ConfigError, ModelMismatch, error_of, raise_faults
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.formats.zero.checkpoint import SINGLE_TP_RANK, AnyCheckpoint, TpRank, ZeroCheckpoint
from ds_reshard.formats.zero.content import is_round_robin
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, Rule, arrange_buffers, undo_round_robin
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import expert_of
from ds_reshard.formats.zero.stage0 import param_groups, stage0_kind, torch_optimizer
from ds_reshard.formats.zero.tensor_parallel import affine_maps
from ds_reshard.hooks import Seam
from ds_reshard.hosts.deepspeed.coming_grid import RankPosition, cannot_predict, names_on_rank, shards_on_rank
from ds_reshard.hosts.deepspeed.engine import (
    EXTRA_STATE,
    KEPT,
    MIXTURE,
    LiveBuffer,
    Optimizer,
    Run,
    as_saved,
    autotp_in,
    decoupled_in,
    info_of,
    kept_states,
    module_of,
    own_states,
    plain_experts,
    told_by_parameters,
    usual_states,
)
from ds_reshard.hosts.deepspeed.entries import revived
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.unfound import saved_shapes
from ds_reshard.model.live_run import LiveModule, LiveOptimizer, LiveTensor
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule as TensorRule
from ds_reshard.resume.lr_preview import SCRIPT_SCHEDULERS

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

Group = dict[str, object]
_META = torch.device("meta")


_KEYS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer", "bf16", "fp16"}
)
"""Every DeepSpeed JSON has one of these keys."""


def parse_config(config: Mapping[str, object], world: int) -> DeepSpeedConfig:
    """Return the JSON as DeepSpeed reads it on `world` ranks. Raises ConfigError with its words if it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class OfWorld(DeepSpeedConfig):  # type: ignore[misc]
        """DeepSpeed's config class, which believes that the process group has `world` ranks."""

        def _configure_train_batch_size(self) -> None:
            self.world_size = world
            super()._configure_train_batch_size()

        _batch_assertion = Seam("ds_reshard.hosts.deepspeed.settings:check_batch")(DeepSpeedConfig._batch_assertion)

    try:
        return OfWorld(dict(config))
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400] or type(error).__name__
        mend = "correct the DeepSpeed JSON, or --world"
        if config and not config.keys() & _KEYS:
            mend = f"give the path of the DeepSpeed JSON: the first key of this file is {next(iter(config))!r}"
        raise ConfigError.of("DeepSpeed config", f"DeepSpeed refuses it on {world} ranks: {text}", mend=mend) from error


def fill_auto(config: Mapping[str, object], saved: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Replace each "auto", which a trainer would fill, by the saving run's value; return the config and their names."""
    result: dict[str, object] = {}
    names: list[str] = []
    for key, value in config.items():
        saved_value = saved.get(key)
        if isinstance(value, Mapping):
            result[key], inner_names = fill_auto(value, saved_value if isinstance(saved_value, Mapping) else {})
            names += [f"{key}.{name}" for name in inner_names]
        elif value != "auto":
            result[key] = value
        else:
            names.append(key)
            if key in saved and saved_value != "auto" and key != "train_batch_size":  # which follows from the others
                result[key] = saved_value
    return result, names


_TRAINERS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""The argument of Hugging Face's Trainer that fills each "auto" (integrations/deepspeed.py, transformers 5.23)."""


def fill_from_flags(config: Mapping[str, object], flags: Mapping[str, object], under: str = "") -> dict[str, object]:
    """Return the config with each "auto" filled from the flags of the Trainer's script."""
    result = dict(config)
    for key, value in config.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            result[key] = fill_from_flags(value, flags, f"{name}.")
        elif value == "auto" and (filled := _trainer_value(name, flags)) is not None:
            result[key] = filled
    return result


def _trainer_value(name: str, flags: Mapping[str, object]) -> object:
    """Return the value that the Trainer derives from its arguments, or None if they do not determine it.

    A warm-up below 1 is a fraction of all updates, and 0 becomes 1 (`trainer_config_finalize`, transformers 5.23).
    """
    value, updates = flags.get(_TRAINERS.get(name, "")), flags.get("max_steps")
    # without max_steps the number of updates follows from the data, which is unknown here
    updates_known = isinstance(updates, int) and updates > 0
    if name == "scheduler.params.total_num_steps":
        return updates if updates_known else None
    if name == "scheduler.params.warmup_num_steps" and isinstance(value, (int, float)):
        part = 0 < value < 1
        return None if part and not updates_known else max(1, ceil(cast(int, updates) * value) if part else int(value))
    if name == "optimizer.params.betas" and {"adam_beta1", "adam_beta2"} & flags.keys():
        return [flags.get("adam_beta1", 0.9), flags.get("adam_beta2", 0.999)]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The module of a rank, and the trainable parameters of each param group in the order of the script.

    `groups` are the values that the script gives each param group, and `optimizer` is its class. If they are None, the
    JSON decides, or else the `saved` values. `info` and `rules` tell how the module divides its parameters.
    """

    module: LiveModule
    order: tuple[Sequence[str], ...]
    groups: tuple[Group, ...] | None = None
    saved: tuple[Group, ...] = ()
    optimizer: type | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    rules: Mapping[str, TensorRule | None] = field(default_factory=dict)


def saved_model(checkpoint: AnyCheckpoint, grid: LiveGrid, dtype: ElementType | None) -> PlannedModel:
    """Return the part of the saved model that a rank will hold, its weights in `dtype`, or as saved if that is None.

    DeepSpeed casts parameters but not buffers (`_cast_module_mixed_precision`, runtime/engine.py, 0.19.8).
    """
    saved, (shards, info) = checkpoint.model, shards_on_rank(checkpoint, grid)
    shapes = {**saved.trainable, **saved_shapes(checkpoint), **shards}
    groups = [names_on_rank(group, grid) for group in saved_group_names(checkpoint)]
    order = tuple(group for group in groups if group)
    if groups and not order and grid.parts:
        raise cannot_predict(f"--pp {grid.pp}, with a stage that trains nothing")
    trained = {name for group in order for name in group}
    tied = {*saved.shared, *saved.shared.values()}
    tensors: dict[tuple[bool, object], list[str]] = {}
    beside = dict.fromkeys(name for name in saved.module if _is_beside_tensor(name, saved.module))
    for name, record in saved.module.items():
        if name in beside:
            continue
        storage = (record.storage.path, record.storage.key, record.byte_offset) if record.numel else name
        buffer, by_name = name in saved.buffer_names, name in tied or checkpoint.stage == 3
        key: object = name if buffer else saved.shared.get(name, name) if by_name else storage
        if grid.is_responsible_for(name):
            tensors.setdefault((buffer, key), []).append(name)
    # weights that are in no layer's file, or saved only as masters
    tensors |= {(False, name): [name] for name in trained - saved.module.keys()}
    live_tensors = []
    for (buffer, _), names in tensors.items():
        first = saved.module.get(names[0])
        saved_dtype = first.dtype if first is not None else dtype or ElementType.FLOAT32
        live_dtype = dtype if dtype is not None and saved_dtype.is_floating and not buffer else saved_dtype
        shape = next((shards[name] for name in names if name in shards), shapes.get(names[0], ()))
        trainable = not buffer and live_dtype.is_floating and not trained.isdisjoint(names)
        names_of = () if buffer else tuple(names)
        tensor = LiveTensor(names=names_of, entries=tuple(names), shape=shape, dtype=live_dtype, trainable=trainable)
        live_tensors.append(tensor)
    objects = list(filter(grid.is_responsible_for, (*beside, *saved.objects)))
    return PlannedModel(
        module=LiveModule(
            tensors=tuple(live_tensors),
            names=frozenset({*objects, *(name for one in live_tensors for name in one.entries)}),
            unloaded={name: (None, frozenset()) for name in objects if not name.endswith(EXTRA_STATE)},
        ),
        order=order,
        saved=tuple(
            values for values, group in zip(_saved_values(checkpoint, len(groups)), groups, strict=True) if group
        ),
        info=info,
    )


def _is_beside_tensor(name: str, module: Container[str]) -> bool:
    """Whether an entry is named below a tensor's, as "base.weight.absmax" is: no parameter or buffer of a module is.

    bitsandbytes' Linear4bit writes such entries, and does not load them (nn/modules.py, 0.50.2).
    """
    return any(name[:at] in module for at, letter in enumerate(name) if letter == ".")


def _saved_values(checkpoint: AnyCheckpoint, count: int) -> list[Group]:
    """Return the hyper-parameters of each saved param group, with the learning rate that the script gave it."""
    saved: Sequence[Mapping[str, object]] = ()
    if checkpoint.facts is not None:
        saved = [group.hyperparameters or {} for group in checkpoint.facts.groups]
    elif isinstance(checkpoint.model.entries.get("optimizer"), Mapping):
        saved = param_groups(torch_optimizer(checkpoint.model))
    values_by_group = []
    for number in range(count):
        values = dict(saved[number]) if number < len(saved) else {}
        group_values = revived(values, trusted=frozenset(), where=f"param group {number}")
        assert isinstance(group_values, dict)
        values_by_group.append({name: value for name, value in group_values.items() if name not in ("params", "step")})
        if "initial_lr" in values_by_group[-1]:  # the rate before a scheduler changed it
            values_by_group[-1]["lr"] = values_by_group[-1].pop("initial_lr")
    return values_by_group


def placeholder_model() -> PlannedModel:
    """Return a placeholder for a model that cannot be read; any use of the checkpoint raises the reason."""
    names = ("unknown",)
    tensor = LiveTensor(names=names, entries=names, shape=(1,), dtype=ElementType.FLOAT32, trainable=True)
    return PlannedModel(module=LiveModule(tensors=(tensor,), names=frozenset(names)), order=(names,))


def saved_group_names(checkpoint: AnyCheckpoint) -> list[list[str]]:
    """Return the trainable parameters of each saved param group, in the order of the saving script."""
    saved = checkpoint.model
    if checkpoint.stage == 0 and checkpoint.facts is None:
        return _stage0_group_names(checkpoint)
    if checkpoint.facts is None:
        return [list(group) for group in saved.param_shapes or ()]
    round_robin = isinstance(checkpoint, ZeroCheckpoint) and len(checkpoint.columns) == 1 and is_round_robin(checkpoint)
    return [
        undo_round_robin(list(group.members), checkpoint.dp) if round_robin else list(group.members)
        for group in checkpoint.facts.groups
    ]


def _stage0_group_names(checkpoint: AnyCheckpoint) -> list[list[str]]:
    """Return the names of each param group of a stage-0 checkpoint, whose optimizer names no parameters.

    They are in the module's order; several groups are told apart by the shapes of the saved masters or states. If
    tensor-parallel ranks divided the model, both are those of the first rank.
    """
    saved = checkpoint.tp_models[0] if checkpoint.tp_models else checkpoint.model
    seen: set[object] = set()
    names: list[str] = []
    for name, record in saved.module.items():
        storage = (record.storage.path, record.byte_offset) if record.numel else name
        if name not in saved.buffer_names and record.dtype.is_floating and storage not in seen:
            seen.add(storage)
            names.append(name)
    optimizer = saved.entries.get("optimizer")
    groups = param_groups(torch_optimizer(saved)) if isinstance(optimizer, Mapping) else [{}]
    expected = (
        _saved_group_shapes(cast(Mapping[str, object], optimizer), groups) if isinstance(optimizer, Mapping) else None
    )
    if expected is None and len(groups) < 2:
        return [names]
    order: list[list[str]] = [[] for _ in groups]
    for name in names if expected is not None else ():
        shape = saved.module[name].shape
        fits = [
            g for g, group in enumerate(expected or ()) if len(order[g]) < len(group) and group[len(order[g])] == shape
        ]
        if len(fits) > 1:
            break
        for g in fits:
            order[g].append(name)
    if expected is None or [len(group) for group in order] != [len(group) for group in expected]:
        what = "a stage-0 optimizer names no parameter, and shapes do not tell which param group has which"
        mend = "give the model: --model module:factory"
        raise_faults([ModelMismatch.fault(saved.path, what, mend=mend)], subject="preflight")
    return order


def _saved_group_shapes(
    optimizer: Mapping[str, object], groups: Sequence[Mapping[str, object]]
) -> list[list[Shape]] | None:
    """Return the shapes of each param group's masters, or else of its states, in order; None if there are neither."""
    masters = optimizer.get("fp32_groups")
    if isinstance(masters, list):
        return [[one.shape for one in group] for group in masters]
    state = section(optimizer, "state")
    shapes_by_group = []
    for group in groups:
        indices = group.get("params")
        states = [state.get(index) for index in indices] if isinstance(indices, list) else []
        shapes = [
            next((v.shape for v in one.values() if isinstance(v, TensorRecord) and v.shape), ())
            for one in states
            if isinstance(one, Mapping)
        ]
        shapes_by_group.append(shapes)
    return shapes_by_group if any(shapes_by_group) else None


def load_factory(text: str) -> Callable[[], object]:
    """Return the function that "module:factory" names; it is imported when it is called."""
    module, _, name = text.partition(":")
    if not name or not re.fullmatch(r"[\w.]+", module):
        mend = "write --model my_project.model:build"
        raise ConfigError.of("--model", f"{text!r} is not module:factory", mend=mend)

    def build() -> object:
        value: object = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return cast(Callable[[], object], value)()

    return build


def model_from_factory(result: object, dtype: ElementType | None, *, autotp: bool) -> PlannedModel:
    """Return the planned model of what a factory made: a module, or (module, optimizer or param groups).

    The module's parameters are cast to `dtype` in place, as DeepSpeed would cast them.
    """
    module, groups = (result[0], result[1]) if isinstance(result, tuple) and len(result) > 1 else (result, None)
    if not isinstance(module, torch.nn.Module):
        what = f"gives {type(module).__name__}, and no torch.nn.Module"
        raise error_of([ConfigError.fault("--model", what, mend="return the module")], subject="preflight")
    optimizer = type(groups) if isinstance(groups, torch.optim.Optimizer) else None
    groups = groups.param_groups if isinstance(groups, torch.optim.Optimizer) else groups
    names = {id(param): name for name, param in module.named_parameters()}
    all_parameters: list[Group] = [{"params": list(module.parameters())}]
    param_groups = cast(list[Group], list(groups)) if groups is not None else all_parameters
    if param_groups and all(isinstance(one, torch.Tensor) for one in param_groups):
        param_groups = [{"params": param_groups}]
    group_members = []  # DeepSpeed drops empty groups
    for group in param_groups:
        params = [one for one in cast(list[torch.nn.Parameter], group["params"]) if one.requires_grad]
        members = [names[id(param)] for param in params if id(param) in names]
        if members:
            group_members.append((members, {name: value for name, value in group.items() if name != "params"}))
    if not group_members and groups is not None:
        what, mend = "gives an optimizer of none of the module's parameters", "build it over module.parameters()"
        raise_faults([ConfigError.fault("--model", what, mend=mend)], subject="preflight")
    order, values = tuple(members for members, _ in group_members), tuple(value for _, value in group_members)
    for param in module.parameters():
        if dtype is not None and param.is_floating_point():
            param.data = param.data.to(torch_dtype(dtype))
    return PlannedModel(
        module=module_of(module, LiveGrid()),
        order=order,
        groups=values if any(values) else None,
        optimizer=optimizer,
        info=info_of(module),
        rules=told_by_parameters(module, SINGLE_TP_RANK, autotp=autotp).live_rules,
    )


@dataclass(eq=False, kw_only=True)
class Training:
    """A rank of the planned run with the values, scheduler and counters of its engine, for a resume policy.

    `script_sets_optimizer` and `script_builds_scheduler` are true if only the script knows their initial values.
    """

    run: Run
    ds: DeepSpeedConfig
    optimizer: torch.optim.Optimizer
    script_sets_optimizer: bool
    script_builds_scheduler: bool
    dp_world_size: int
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None
    training_dataloader: object = None

    def __post_init__(self) -> None:
        self._config, self.lr_scheduler, self.seq_dp_world_size = self.ds, self.run.scheduler, self.run.data_ranks
        self.client_lr_scheduler = self.lr_scheduler if self.script_builds_scheduler else None

    def zero_optimization_stage(self) -> int:
        return self.run.stage

    def zero_load_from_fp32_weights(self) -> bool:
        return self.run.from_masters

    def gradient_clipping(self) -> object:
        return self.ds.gradient_clipping

    def train_batch_size(self) -> int:
        return cast(int, self.ds.train_batch_size)

    def gradient_accumulation_steps(self) -> int:
        return cast(int, self.ds.gradient_accumulation_steps)


class UnbuiltOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer that is not built; its states are unknown, or follow from its class."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


_ADAMS = ("adam", "adamw")


def weight_precision(ds: DeepSpeedConfig) -> ElementType | None:
    """Return the 16-bit type of the run's weights; None if they keep their type (`get_data_types`)."""
    if ds.float16_config.enabled:
        return ElementType.FLOAT16
    return ElementType.BFLOAT16 if ds.bfloat16_config.enabled else None


@dataclass(frozen=True, kw_only=True)  # not slotted: what follows from the JSON is computed once
class Launch:
    """Everything that determines a rank of the planned run: the JSON, checkpoint, model, and the rank's position."""

    ds: DeepSpeedConfig
    config: Mapping[str, object]
    checkpoint: AnyCheckpoint | None
    model: PlannedModel
    position: RankPosition

    def training(self, *, sp: int) -> Training:
        """Return the rank of the run as DeepSpeed would make it; `sp` ranks share a sequence."""
        grid, config, by_json = self.position.grid, self.config, bool(section(self.config, "scheduler"))
        inner, optimizer = self._optimizer()
        scheduler = self._scheduler(inner)
        run = Run(
            data_rank=self.position.data_rank,
            data_ranks=self.position.dp,
            module=self.module,
            optimizer=optimizer,
            scheduler=scheduler,
            features=tuple(self._features(optimizer.name)),
            stage=self.stage,
            grid=replace(grid, row=self._tp_rank()),
            columns=grid.row.size * grid.pp,
            info=self.model.info,
            autotp=autotp_in(config),
            universal=bool(self.ds.load_universal_checkpoint),
            from_masters=bool(self.ds.zero_config.load_from_fp32_weights),
            bf16=bool(self.ds.bfloat16_config.enabled),
            node_local=bool(self.ds.use_node_local_storage),
            unpickles=section(config, "checkpoint").get("writer") is None,
            swaps=self.stage == 3 and self.offload == "nvme",
        )
        several = len(self.model.order) > 1  # the JSON has values for one group; the script then sets those of each
        return Training(
            run=run,
            ds=self.ds,
            optimizer=inner,
            script_sets_optimizer=self.model.groups is None and (several or not self.json_has_optimizer),
            script_builds_scheduler=scheduler is not None and not by_json,
            dp_world_size=self.position.dp // sp,
        )

    @property
    def stage(self) -> int:
        return int(self.ds.zero_optimization_stage)

    @cached_property
    def zero_section(self) -> Mapping[str, object]:
        return section(self.config, "zero_optimization")

    @property
    def offload(self) -> object:
        """The device to which the JSON offloads the optimizer's states; "none" if they stay with the weights."""
        return section(self.zero_section, "offload_optimizer").get("device", "none")

    @cached_property
    def json_has_optimizer(self) -> bool:
        """True if the JSON names an optimizer."""
        return section(self.config, "optimizer").get("type") is not None

    @cached_property
    def half_dtype(self) -> ElementType | None:
        return weight_precision(self.ds)

    @cached_property
    def module(self) -> LiveModule:
        """The module; at stage 3 every parameter is partitioned (runtime/zero/partition_parameters.py)."""
        module = self.model.module
        if self.stage != 3:
            return module
        return replace(module, tensors=tuple(replace(one, partitioned=bool(one.names)) for one in module.tensors))

    @cached_property
    def kind(self) -> str:
        """The optimizer's wrapper, chosen as by the engine; DeepSpeed's assertions are not repeated here."""
        wide = str(self.ds.grad_accum_dtype).removeprefix("torch.") in ("fp32", "float32", "float")
        half, saved, in_bf16 = self.half_dtype, self.checkpoint, self.half_dtype is ElementType.BFLOAT16
        if self.stage:
            bf16 = self.stage == 1 and in_bf16 and wide and self.offload != "cpu"
            return "zero3" if self.stage == 3 else "bf16" if bf16 else "zero"
        if half is None:
            return "torch"
        if in_bf16 and saved is not None and saved.listing.layers:
            return "bf16"
        saved_kind = stage0_kind(saved) if isinstance(saved, ZeroCheckpoint) and not self.json_has_optimizer else "none"
        fused = (
            self.optimizer_class.__name__ == "FusedAdam" if self.optimizer_class is not None else saved_kind == "fused"
        )
        return "fused" if fused else "unfused"

    @cached_property
    def optimizer_class(self) -> type | None:
        """The optimizer's class: the script's, the JSON's (`_configure_basic_optimizer`), or that of the saved states.

        None if the optimizer consists of two, or comes from another package.
        """
        from deepspeed.ops import adagrad, adam, lamb, lion
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

        if self.model.optimizer is not None or not self.json_has_optimizer:
            return self.model.optimizer or _class_of_saved_states(self.checkpoint)
        name, offloaded = str(self.ds.optimizer_name), self.offload in ("cpu", "nvme")
        if name in _ADAMS and self._params.get("torch_adam"):
            decoupled = name == "adamw" or self._params.get("adam_w_mode", True)
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        classes = {
            "adam": adam.DeepSpeedCPUAdam if offloaded else adam.FusedAdam,
            "adamw": adam.DeepSpeedCPUAdam if offloaded else adam.FusedAdam,
            "adagrad": adagrad.DeepSpeedCPUAdagrad if offloaded else torch.optim.Adagrad,
            "lion": lion.DeepSpeedCPULion if offloaded else lion.FusedLion,
            "lamb": lamb.FusedLamb,
        }
        chosen = classes.get(name) or getattr(torch.optim, name, None)
        if name not in DEEPSPEED_OPTIMIZERS and not isinstance(chosen, type):
            raise _config_error(
                "DeepSpeed refuses it: ", f"{name} is not a supported DeepSpeed Optimizer", "optimizer.type"
            )
        return chosen if isinstance(chosen, type) else None

    @property
    def _params(self) -> Mapping[str, object]:
        return section(section(self.config, "optimizer"), "params")

    def _optimizer_arguments(self) -> dict[str, object]:
        """Return the arguments of the JSON's optimizer; for DeepSpeed's own, not built, with their defaults."""
        params, cls = dict(self._params), self.optimizer_class
        if str(section(self.config, "optimizer").get("type")).lower() in (*_ADAMS, "muon"):
            drop = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
            drop |= {"foreach"} if params.get("torch_adam") else set()
            params = {name: value for name, value in params.items() if name not in drop}
        if cls is None:
            return {name: value for name, value in params.items() if value is not None}
        if cls.__name__ not in KEPT:
            return params
        parameters = inspect.signature(cls).parameters.items()
        return {**{name: one.default for name, one in parameters if one.default is not one.empty}, **params}

    def _build_optimizer(self, masters: Sequence[Sequence[Shape]]) -> torch.optim.Optimizer:
        """Return an optimizer over masters (shapes by group) without memory: a real one if it is torch's."""
        params = [[torch.nn.Parameter(torch.empty(shape, device=_META)) for shape in shapes] for shapes in masters]
        values = self._group_values(len(masters))
        groups = [{**value, "params": members} for members, value in zip(params, values, strict=True)]
        by_json, cls = self.json_has_optimizer and self.model.optimizer is None, self.optimizer_class
        arguments = self._optimizer_arguments() if by_json else {}
        if cls is not None and cls.__name__ not in KEPT:
            try:
                return cast(torch.optim.Optimizer, cls(groups, **arguments))
            except Exception as error:
                if by_json:
                    what = f"is refused by optimizer {section(self.config, 'optimizer').get('type')}: "
                    raise _config_error(what, error, "optimizer.params") from error
                arguments = {}
        return UnbuiltOptimizer(groups, {"lr": 1e-3, **arguments})

    def _group_values(self, count: int) -> list[Group]:
        """Return the values of each param group: the script's, or none if the JSON has them, else the checkpoint's."""
        saved = self.model.groups or (() if self.json_has_optimizer else self.model.saved)
        return [dict(saved[number]) if saved else {} for number in range(count)]

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Optimizer]:
        """Return the inner optimizer as a torch optimizer, and the description of the engine's optimizer."""
        kind, zero, position, parameters = self.kind, self.ds.zero_config, self.position, self.module.parameters()
        trained = ([name for name in group if parameters[name].trainable] for group in self.model.order)
        shapes = [{name: parameters[name].shape for name in group} for group in trained]
        flat_buffers = list(self._flat_buffers(shapes))
        single = kind in ("torch", "unfused")
        masters = [next(iter(one.shapes.values())) if single else (one.partition_numel,) for one in flat_buffers]
        by_group: list[list[Shape]] = [[] for _ in shapes]
        for flat, shape in zip(flat_buffers, masters, strict=True):
            by_group[flat.group].append(shape)
        inner = self._build_optimizer(by_group)
        if kind != "torch":
            vars(inner)["clip_grad"] = self.ds.gradient_clipping
        scaler = None
        if kind in ("zero", "zero3"):
            scaler = vars(inner)["loss_scaler"] = _loss_scaler(self.ds, self.half_dtype)
        stage, cls = self.stage or int(kind == "bf16"), self.optimizer_class
        if type(inner) is UnbuiltOptimizer and (cls is None or cls.__name__ not in KEPT):
            cls = None
        # with a `ratio` the first sub-groups are stepped on the other device, and no save has their states
        offload, count = zero.offload_optimizer, len(flat_buffers)
        unsaved = int((1 - getattr(offload, "ratio", 1.0)) * count) if kind == "zero3" and self.offload == "cpu" else 0
        return inner, LiveOptimizer(
            kind=kind,
            stage=stage,
            rank=position.data_rank if stage else 0,
            dp=position.dp if stage else 1,
            buffers=tuple(
                self._live_buffer(flat, shape, inner.param_groups[flat.group], cls)
                for flat, shape in zip(flat_buffers, masters, strict=True)
            ),
            groups=as_saved(inner.param_groups),
            order=tuple(shapes),
            parameters={name: one.trainable for name, one in parameters.items()},
            name=cls.__name__ if cls is not None else type(inner).__name__,
            group_keys=frozenset(inner.defaults),
            decoupled=decoupled_in(inner),
            states=usual_states(cls, {}, flat=True) if cls is not None else None,
            unsaved_states=(unsaved, count),
            scaler=scaler,
            computes_norm=kind == "torch" or bool(getattr(zero, "compute_grad_norm", True)),
        )

    def _flat_buffers(self, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[FlatBuffer]:
        """Yield the flat buffers of the masters of param groups; `shapes` has the parameters of each group."""
        kind, zero, position = self.kind, self.ds.zero_config, self.position
        if kind == "zero3":
            ranks, sub_group_numel = [position.dp] * len(shapes), int(zero.sub_group_size)
            yield from arrange_buffers(shapes, Rule.EACH, ranks, sub_group_numel=sub_group_numel)
        elif kind in RULES:
            aligned = kind == "zero" and bool(getattr(zero, "parameter_alignment", False))
            itemsize = (self.half_dtype or ElementType.FLOAT32).itemsize
            yield from arrange_buffers(
                shapes,
                Rule.FLAT,
                [position.expert_ranks if any(map(expert_of, group)) else position.dp for group in shapes],
                round_robin=bool(zero.round_robin_gradients) and kind == "zero",
                alignment=16 // gcd(16, itemsize) if aligned else 1,
            )
        else:
            parts = (
                (number, part)
                for number, group in enumerate(shapes)
                for part in ([group] if kind == "fused" else [{name: shape} for name, shape in group.items()])
            )
            for index, (number, part) in enumerate(parts):
                yield FlatBuffer(shapes=part, rule=Rule.REPLICATED, ranks=1, number=index, group=number)

    def _live_buffer(self, flat: FlatBuffer, shape: Shape, group: Mapping[str, object], cls: type | None) -> LiveBuffer:
        """Return a flat buffer of this rank, with masters of this shape; they are fp32 unless they are weights."""
        vector, position, first = len(shape) < 2, self.position, next(iter(flat.shapes))
        usual = usual_states(cls, group, flat=vector) if cls is not None else None
        kept = kept_states(cls, group, flat=vector) if usual is None and cls is not None else usual
        weights = self.module.parameters()[first].dtype if self.kind == "torch" else None
        rank = position.data_rank if flat.ranks == position.dp else position.expert_rank
        return LiveBuffer(
            **{one.name: getattr(flat, one.name) for one in fields(FlatBuffer)},
            rank=rank if self.kind in RULES else 0,
            dtype=weights or ElementType.FLOAT32,
            held_numel=prod(shape),
            weight_dtype=self.half_dtype or ElementType.FLOAT32,
            states=own_states(prod(shape), group, kept),
            usual=usual,
        )

    def _tp_rank(self) -> TpRank:
        """Return the rank's tensor-parallel position with what its parameters tell of it (`told_by_parameters`)."""
        row, info, shapes = self.position.grid.row, self.model.info, self.module.shapes()
        if self.position.grid.parts:
            return row
        whole_shapes, maps = shapes if row.size == 1 or autotp_in(self.config) else {}, affine_maps(info)
        return row._replace(
            whole_shapes=whole_shapes,
            live_rules=self.model.rules,
            affine_maps=maps if row.size > 1 else {},
            shard_shapes=shapes,
        )

    def _features(self, optimizer: str) -> Iterator[str]:
        """Yield the features of the run that only DeepSpeed can load (`unsupported`)."""
        grid, mics = self.position.grid, self.zero_section.get("mics_shard_size")
        if grid.experts and not plain_experts(self.kind, grid, autoep=False):
            yield MIXTURE
        if self.stage == 3 and self.offload == "nvme":
            yield "NVMe offload"
        if self.zero_section.get("zenflow") is not None:
            yield "ZenFlow"
        if self.stage == 3 and section(self.zero_section, "offload_optimizer").get("super_offload"):
            yield "SuperOffload"
        elif self.stage == 3 and isinstance(mics, int) and mics > 0:
            yield "MiCS"
        if self.stage and "Muon" in optimizer and (grid.row.size * grid.pp > 1 or grid.experts):
            yield "Muon beside tensor, pipeline or expert parallelism"
        if self.stage and "Muon" in optimizer and self.kind == "bf16":
            yield "Muon in BF16_Optimizer"

    def _scheduler(self, inner: torch.optim.Optimizer) -> object:
        """Build the scheduler that the JSON names; if it names none, one of the saved kind, as the script may."""
        from deepspeed.runtime import lr_schedules

        declared = section(self.config, "scheduler")
        name = str(declared.get("type"))
        own_class = getattr(lr_schedules, name, None)
        if declared.get("type") is not None:
            cls = own_class or getattr(torch.optim.lr_scheduler, name, None)
            try:
                assert cls is not None, f"DeepSpeed does not recognize LR scheduler {name}"
                # torch's schedulers refuse wrapped optimizers, and all need params (`_scheduler_from_config`)
                assert own_class or self.kind == "torch", (
                    f"the optimizer of ZeRO stage {self.stage} is not an Optimizer"
                )
                return cast(object, cls(inner, **cast(Mapping[str, object], declared.get("params"))))
            except Exception as error:
                raise _config_error(f"scheduler {name}: ", error, "the scheduler's section") from error
        state = self.checkpoint.model.entries.get("lr_scheduler") if self.checkpoint is not None else None
        if not isinstance(state, Mapping):
            return None
        return _build_saved_scheduler({str(key): value for key, value in state.items()}, inner)


def _class_of_saved_states(checkpoint: AnyCheckpoint | None) -> type | None:
    """Return the optimizer class that the saved states and hyper-parameters identify, or None."""
    groups = checkpoint.facts.groups if checkpoint is not None and checkpoint.facts is not None else ()
    group_keys = set(groups[0].hyperparameters or ()) if groups else set()
    kinds = {key.kind for key in checkpoint.layout.placements} if checkpoint is not None else set()
    kinds -= {"weight", "fp32"}
    if kinds in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) and "amsgrad" in group_keys:
        return torch.optim.AdamW
    return torch.optim.SGD if kinds <= {"momentum_buffer"} and "nesterov" in group_keys else None


def _config_error(what: str, error: object, where: str) -> ConfigError:
    return ConfigError.of("DeepSpeed config", f"{what}{' '.join(str(error).split())}", mend=f"correct {where}")


def _loss_scaler(ds: DeepSpeedConfig, dtype: ElementType | None) -> object:
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    dynamic = bool(ds.float16_config.enabled) and not ds.float16_config.loss_scale
    arguments = ds.float16_config.dynamic_loss_scale_args() if dynamic else None
    scale = ds.float16_config.loss_scale or 1.0
    return CreateLossScaler(torch_dtype(dtype or ElementType.FLOAT32), scale, dynamic, arguments)


def _build_saved_scheduler(state: Mapping[str, object], inner: torch.optim.Optimizer) -> object:
    """Return a new scheduler of the kind whose state was saved, as the script is assumed to build it again."""
    from deepspeed.runtime import lr_schedules

    if "last_batch_iteration" in state:
        return cast(object, lr_schedules.WarmupLR(inner))
    kind = next((name for entry, name in SCRIPT_SCHEDULERS.items() if entry in state), "LambdaLR")
    numbers = {name: value for name, value in state.items() if isinstance(value, (int, float))}
    arguments: dict[str, dict[str, object]] = {
        "LambdaLR": {"lr_lambda": lambda step: 1.0},
        "CosineAnnealingLR": {name: numbers[name] for name in ("T_max", "eta_min") if name in numbers},
        "StepLR": {name: numbers[name] for name in ("step_size", "gamma") if name in numbers},
        "ReduceLROnPlateau": {},
    }
    if kind not in arguments:
        kind = "LambdaLR"
    cls = getattr(torch.optim.lr_scheduler, kind)
    return cast(object, cls(inner, **arguments[kind]))
