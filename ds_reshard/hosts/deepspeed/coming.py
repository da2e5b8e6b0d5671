"""A run that is still to come, as a load asks of it: from the DeepSpeed JSON, the ranks, and a model without memory.

Nothing decides here: what a load decides it decides of this run as of any other. What DeepSpeed makes of a JSON is its
own to say (`DeepSpeedConfig`, its schedulers); nothing of its optimizers is built, as they compile what they need. How
flat buffers are cut follows `_round_robin_reorder` and the padding of `parameter_alignment`
(runtime/zero/stage_1_and_2.py), and `_create_fp16_sub_groups` (runtime/zero/stage3.py); the optimizer's class
`_configure_basic_optimizer` and `_configure_optimizer` (runtime/engine.py), all of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, gcd, prod
from typing import TYPE_CHECKING, cast

import torch

from ds_reshard.errors import ConfigError, ModelMismatch, error_of, raise_faults
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.formats.zero.checkpoint import ALONE, AnyCheckpoint, Row, ZeroCheckpoint
from ds_reshard.formats.zero.content import dealt_in_turn
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, Rule, arranged, turned_back
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
"""Some key of every DeepSpeed JSON."""


def parse_config(config: Mapping[str, object], world: int) -> DeepSpeedConfig:
    """DeepSpeed's reading of this JSON on `world` ranks. Raises ConfigError with DeepSpeed's words if it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class OfWorld(DeepSpeedConfig):  # type: ignore[misc]
        """As DeepSpeed reads it where the process group has so many ranks."""

        def _configure_train_batch_size(self) -> None:
            self.world_size = world
            super()._configure_train_batch_size()

        _batch_assertion = Seam("ds_reshard.hosts.deepspeed.settings:check_batch")(DeepSpeedConfig._batch_assertion)

    try:
        return OfWorld(dict(config))
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:400] or type(error).__name__
        mend = "correct the DeepSpeed JSON, or --world"
        if config and not config.keys() & _KEYS:
            mend = f"give the path of the DeepSpeed JSON: the first key of this file is {next(iter(config))!r}"
        raise ConfigError.of("DeepSpeed config", f"DeepSpeed refuses it on {world} ranks: {said}", mend=mend) from error


def fill_auto(config: Mapping[str, object], saved: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The config with the saving run's values for what is "auto", which a trainer fills, and the names of these."""
    made: dict[str, object] = {}
    names: list[str] = []
    for key, value in config.items():
        theirs = saved.get(key)
        if isinstance(value, Mapping):
            made[key], found = fill_auto(value, theirs if isinstance(theirs, Mapping) else {})
            names += [f"{key}.{name}" for name in found]
        elif value != "auto":
            made[key] = value
        else:
            names.append(key)
            if key in saved and theirs != "auto" and key != "train_batch_size":  # which follows from the others
                made[key] = theirs
    return made, names


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
"""The argument of Hugging Face's Trainer that fills each value (integrations/deepspeed.py, transformers 5.23)."""


def fill_from_flags(config: Mapping[str, object], flags: Mapping[str, object], under: str = "") -> dict[str, object]:
    """The config with each "auto" filled from the flags of the Trainer's script."""
    made = dict(config)
    for key, value in config.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            made[key] = fill_from_flags(value, flags, f"{name}.")
        elif value == "auto" and (told := _trainer_value(name, flags)) is not None:
            made[key] = told
    return made


def _trainer_value(name: str, flags: Mapping[str, object]) -> object:
    """The value that the Trainer derives from its arguments, or None if they do not determine it.

    A warm-up below 1 is a part of all updates, and one of 0 is made 1 (`trainer_config_finalize`, transformers 5.23).
    """
    value, updates = flags.get(_TRAINERS.get(name, "")), flags.get("max_steps")
    known = isinstance(updates, int) and updates > 0  # else the data decide, of which nothing is known here
    if name == "scheduler.params.total_num_steps":
        return updates if known else None
    if name == "scheduler.params.warmup_num_steps" and isinstance(value, (int, float)):
        part = 0 < value < 1
        return None if part and not known else max(1, ceil(cast(int, updates) * value) if part else int(value))
    if name == "optimizer.params.betas" and {"adam_beta1", "adam_beta2"} & flags.keys():
        return [flags.get("adam_beta1", 0.9), flags.get("adam_beta2", 0.999)]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The module of a rank, and the trainable parameters of each param group in the order of the script.

    `groups` are the values that the script gives each, and `optimizer` its class; None if the JSON says it, or else
    those that were `saved` hold. `info` and `rules` are what the module says of how its parameters are divided.
    """

    module: LiveModule
    order: tuple[Sequence[str], ...]
    groups: tuple[Group, ...] | None = None
    saved: tuple[Group, ...] = ()
    optimizer: type | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    rules: Mapping[str, TensorRule | None] = field(default_factory=dict)


def saved_model(checkpoint: AnyCheckpoint, grid: LiveGrid, dtype: ElementType | None) -> PlannedModel:
    """The part of the saved model that a rank will hold: its weights in `dtype`, or in their saved type if it is None.

    DeepSpeed casts parameters and no buffers (`_cast_module_mixed_precision`, runtime/engine.py, 0.19.8).
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
    for name, record in saved.module.items():
        storage = (record.storage.path, record.storage.key, record.byte_offset) if record.numel else name
        buffer, by_name = name in saved.buffer_names, name in tied or checkpoint.stage == 3
        key: object = name if buffer else saved.shared.get(name, name) if by_name else storage
        if grid.is_responsible_for(name):
            tensors.setdefault((buffer, key), []).append(name)
    # weights that no file of a layer holds, or that only masters tell
    tensors |= {(False, name): [name] for name in trained - saved.module.keys()}
    made = []
    for (buffer, _), names in tensors.items():
        first = saved.module.get(names[0])
        own = first.dtype if first is not None else dtype or ElementType.FLOAT32
        kept = dtype if dtype is not None and own.is_floating and not buffer else own
        shape = next((shards[name] for name in names if name in shards), shapes.get(names[0], ()))
        trains = not buffer and kept.is_floating and not trained.isdisjoint(names)
        parameter = () if buffer else tuple(names)
        made.append(LiveTensor(names=parameter, entries=tuple(names), shape=shape, dtype=kept, trainable=trains))
    objects = list(filter(grid.is_responsible_for, saved.objects))
    return PlannedModel(
        module=LiveModule(
            tensors=tuple(made),
            names=frozenset({*objects, *(name for one in made for name in one.entries)}),
            unloaded={name: (None, frozenset()) for name in objects if not name.endswith(EXTRA_STATE)},
        ),
        order=order,
        saved=tuple(
            values for values, group in zip(_saved_values(checkpoint, len(groups)), groups, strict=True) if group
        ),
        info=info,
    )


def _saved_values(checkpoint: AnyCheckpoint, count: int) -> list[Group]:
    """The hyper-parameters of each saved param group, before a scheduler moved its rate."""
    saved: Sequence[Mapping[str, object]] = ()
    if checkpoint.facts is not None:
        saved = [group.hyperparameters or {} for group in checkpoint.facts.groups]
    elif isinstance(checkpoint.model.entries.get("optimizer"), Mapping):
        saved = param_groups(torch_optimizer(checkpoint.model))
    made = []
    for number in range(count):
        values = dict(saved[number]) if number < len(saved) else {}
        found = revived(values, trusted=frozenset(), where=f"param group {number}")
        assert isinstance(found, dict)
        made.append({name: value for name, value in found.items() if name not in ("params", "step")})
        if "initial_lr" in made[-1]:  # what the saving script gave it
            made[-1]["lr"] = made[-1].pop("initial_lr")
    return made


def placeholder_model() -> PlannedModel:
    """Stands in for a model that cannot be read; any use of the checkpoint raises the reason."""
    one = ("unknown",)
    tensor = LiveTensor(names=one, entries=one, shape=(1,), dtype=ElementType.FLOAT32, trainable=True)
    return PlannedModel(module=LiveModule(tensors=(tensor,), names=frozenset(one)), order=(one,))


def saved_group_names(checkpoint: AnyCheckpoint) -> list[list[str]]:
    """The trainable parameters of each param group, in the order in which the saving script gave them."""
    saved = checkpoint.model
    if checkpoint.stage == 0 and checkpoint.facts is None:
        return _stage0_group_names(checkpoint)
    if checkpoint.facts is None:
        return [list(group) for group in saved.param_shapes or ()]
    turned = isinstance(checkpoint, ZeroCheckpoint) and len(checkpoint.columns) == 1 and dealt_in_turn(checkpoint)
    return [
        turned_back(list(group.members), checkpoint.dp) if turned else list(group.members)
        for group in checkpoint.facts.groups
    ]


def _stage0_group_names(checkpoint: AnyCheckpoint) -> list[list[str]]:
    """By the module's order, and with several param groups by the shapes of what the optimizer holds.

    Of what tensor-parallel ranks have divided, both of the first rank.
    """
    saved = checkpoint.rows[0] if checkpoint.rows else checkpoint.model
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
        fits = [g for g, of in enumerate(expected or ()) if len(order[g]) < len(of) and of[len(order[g])] == shape]
        if len(fits) > 1:
            break
        for g in fits:
            order[g].append(name)
    if expected is None or [len(group) for group in order] != [len(group) for group in expected]:
        what = "a stage-0 optimizer names no parameter, and shapes do not tell which param group has which"
        mend = "give the model: --model module:factory"
        raise_faults([ModelMismatch.fault(saved.path, what, mend=mend)], subject="foreseeing the model")
    return order


def _saved_group_shapes(
    optimizer: Mapping[str, object], groups: Sequence[Mapping[str, object]]
) -> list[list[Shape]] | None:
    """The shapes of each param group's masters, or else of its states, in order; None if neither has them."""
    masters = optimizer.get("fp32_groups")
    if isinstance(masters, list):
        return [[one.shape for one in group] for group in masters]
    state = section(optimizer, "state")
    found = []
    for group in groups:
        indices = group.get("params")
        held = [state.get(index) for index in indices] if isinstance(indices, list) else []
        shapes = [
            next((v.shape for v in one.values() if isinstance(v, TensorRecord) and v.shape), ())
            for one in held
            if isinstance(one, Mapping)
        ]
        found.append(shapes)
    return found if any(found) else None


def load_factory(text: str) -> Callable[[], object]:
    """The function that module:factory names."""
    module, _, name = text.partition(":")
    if not name or not re.fullmatch(r"[\w.]+", module):
        mend = "write --model my_project.model:build"
        raise ConfigError.of("--model", f"{text!r} is not module:factory", mend=mend)

    def build() -> object:
        made: object = importlib.import_module(module)
        for part in name.split("."):
            made = getattr(made, part)
        return cast(Callable[[], object], made)()

    return build


def model_from_factory(made: object, dtype: ElementType | None, *, autotp: bool) -> PlannedModel:
    """What a factory has made: a module, or a module and the optimizer or param groups over its parameters.

    Its parameters are cast to `dtype` in place, as DeepSpeed casts them to its precision.
    """
    module, groups = (made[0], made[1]) if isinstance(made, tuple) and len(made) > 1 else (made, None)
    if not isinstance(module, torch.nn.Module):
        what = f"gives {type(module).__name__}, and no torch.nn.Module"
        raise error_of([ConfigError.fault("--model", what, mend="return the module")], subject="preflight")
    optimizer = type(groups) if isinstance(groups, torch.optim.Optimizer) else None
    groups = groups.param_groups if isinstance(groups, torch.optim.Optimizer) else groups
    names = {id(param): name for name, param in module.named_parameters()}
    every: list[Group] = [{"params": list(module.parameters())}]
    given = cast(list[Group], list(groups)) if groups is not None else every
    if given and all(isinstance(one, torch.Tensor) for one in given):
        given = [{"params": given}]
    kept = []  # DeepSpeed drops those that are empty
    for group in given:
        params = [one for one in cast(list[torch.nn.Parameter], group["params"]) if one.requires_grad]
        members = [names[id(param)] for param in params if id(param) in names]
        if members:
            kept.append((members, {name: value for name, value in group.items() if name != "params"}))
    if not kept and groups is not None:
        what, mend = "gives an optimizer of none of the module's parameters", "build it over module.parameters()"
        raise_faults([ConfigError.fault("--model", what, mend=mend)], subject="preflight")
    order, values = tuple(members for members, _ in kept), tuple(value for _, value in kept)
    for param in module.parameters():
        if dtype is not None and param.is_floating_point():
            param.data = param.data.to(torch_dtype(dtype))
    return PlannedModel(
        module=module_of(module, LiveGrid()),
        order=order,
        groups=values if any(values) else None,
        optimizer=optimizer,
        info=info_of(module),
        rules=told_by_parameters(module, ALONE, autotp=autotp).live,
    )


@dataclass(eq=False, kw_only=True)
class Training:
    """A rank of the coming run, with the values, schedule and counters of its engine, to which a policy is applied.

    `scripts_optimizer` and `scripts_scheduler` say that the script alone knows what these begin with.
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
    """An optimizer that is not built: its states are not known, or are those that its class keeps."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


_ADAMS = ("adam", "adamw")


def weight_precision(ds: DeepSpeedConfig) -> ElementType | None:
    """The 16-bit type of the run's weights; None where they stay as they are (`get_data_types`)."""
    if ds.float16_config.enabled:
        return ElementType.FLOAT16
    return ElementType.BFLOAT16 if ds.bfloat16_config.enabled else None


@dataclass(frozen=True, kw_only=True)  # not slotted: what follows from the JSON is computed once
class Launch:
    """Everything that determines a rank of the run: the JSON, the checkpoint, a model, and the rank's position."""

    ds: DeepSpeedConfig
    config: Mapping[str, object]
    checkpoint: AnyCheckpoint | None
    model: PlannedModel
    position: RankPosition

    def training(self, *, sp: int) -> Training:
        """The rank of the run, as DeepSpeed makes it; `sp` ranks share a sequence."""
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
            unpickles=section(config, "checkpoint").get("writer") is None,
            swaps=self.stage == 3 and self.offload == "nvme",
        )
        several = len(self.model.order) > 1  # what a JSON says of one, the script says of each
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
        """Where the JSON puts the optimizer's states; "none" where they stay with the weights."""
        return section(self.zero_section, "offload_optimizer").get("device", "none")

    @cached_property
    def json_has_optimizer(self) -> bool:
        """Whether the JSON names the optimizer."""
        return section(self.config, "optimizer").get("type") is not None

    @cached_property
    def half_dtype(self) -> ElementType | None:
        return weight_precision(self.ds)

    @cached_property
    def module(self) -> LiveModule:
        """The module, at stage 3 with a part of every parameter (runtime/zero/partition_parameters.py)."""
        module = self.model.module
        if self.stage != 3:
            return module
        return replace(module, tensors=tuple(replace(one, partitioned=bool(one.names)) for one in module.tensors))

    @cached_property
    def kind(self) -> str:
        """The optimizer's wrapper, as the engine decides. What DeepSpeed asserts of it, it says when the run starts."""
        wide = str(self.ds.grad_accum_dtype).removeprefix("torch.") in ("fp32", "float32", "float")
        half, saved, in_bf16 = self.half_dtype, self.checkpoint, self.half_dtype is ElementType.BFLOAT16
        if self.stage:
            bf16 = self.stage == 1 and in_bf16 and wide and self.offload != "cpu"
            return "zero3" if self.stage == 3 else "bf16" if bf16 else "zero"
        if half is None:
            return "torch"
        if in_bf16 and saved is not None and saved.listing.layers:
            return "bf16"
        own = stage0_kind(saved) if isinstance(saved, ZeroCheckpoint) and not self.json_has_optimizer else "none"
        fused = self.optimizer_class.__name__ == "FusedAdam" if self.optimizer_class is not None else own == "fused"
        return "fused" if fused else "unfused"

    @cached_property
    def optimizer_class(self) -> type | None:
        """The optimizer's class: by the script, by the JSON (`_configure_basic_optimizer`), or as its states tell.

        None for one that is built of two, or of another package.
        """
        from deepspeed.ops import adagrad, adam, lamb, lion
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

        if self.model.optimizer is not None or not self.json_has_optimizer:
            return self.model.optimizer or _class_of_saved_states(self.checkpoint)
        name, in_memory = str(self.ds.optimizer_name), self.offload in ("cpu", "nvme")
        if name in _ADAMS and self._params.get("torch_adam"):
            decoupled = name == "adamw" or self._params.get("adam_w_mode", True)
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        classes = {
            "adam": adam.DeepSpeedCPUAdam if in_memory else adam.FusedAdam,
            "adamw": adam.DeepSpeedCPUAdam if in_memory else adam.FusedAdam,
            "adagrad": adagrad.DeepSpeedCPUAdagrad if in_memory else torch.optim.Adagrad,
            "lion": lion.DeepSpeedCPULion if in_memory else lion.FusedLion,
            "lamb": lamb.FusedLamb,
        }
        found = classes.get(name) or getattr(torch.optim, name, None)
        if name not in DEEPSPEED_OPTIMIZERS and not isinstance(found, type):
            raise _config_error(
                "DeepSpeed refuses it: ", f"{name} is not a supported DeepSpeed Optimizer", "optimizer.type"
            )
        return found if isinstance(found, type) else None

    @property
    def _params(self) -> Mapping[str, object]:
        return section(section(self.config, "optimizer"), "params")

    def _optimizer_arguments(self) -> dict[str, object]:
        """The arguments of the JSON's optimizer. DeepSpeed's own are not built, so their defaults are added."""
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
        """The optimizer with its values, over masters without memory; one of torch's is torch's own."""
        flats = [[torch.nn.Parameter(torch.empty(shape, device=_META)) for shape in of] for of in masters]
        groups = [{**value, "params": of} for of, value in zip(flats, self._group_values(len(masters)), strict=True)]
        by_json, cls = self.json_has_optimizer and self.model.optimizer is None, self.optimizer_class
        given = self._optimizer_arguments() if by_json else {}
        if cls is not None and cls.__name__ not in KEPT:
            try:
                return cast(torch.optim.Optimizer, cls(groups, **given))
            except Exception as error:
                if by_json:
                    what = f"is refused by optimizer {section(self.config, 'optimizer').get('type')}: "
                    raise _config_error(what, error, "optimizer.params") from error
                given = {}
        return UnbuiltOptimizer(groups, {"lr": 1e-3, **given})

    def _group_values(self, count: int) -> list[Group]:
        """The values of each param group: from the model's script, else from the JSON, else from the checkpoint."""
        given = self.model.groups or (() if self.json_has_optimizer else self.model.saved)
        return [dict(given[number]) if given else {} for number in range(count)]

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Optimizer]:
        """The values of the optimizer that steps, as torch has them; and the engine's optimizer."""
        kind, zero, spot, parameters = self.kind, self.ds.zero_config, self.position, self.module.parameters()
        trained = ([name for name in group if parameters[name].trainable] for group in self.model.order)
        shapes = [{name: parameters[name].shape for name in group} for group in trained]
        flats = list(self._flat_buffers(shapes))
        single = kind in ("torch", "unfused")
        masters = [next(iter(one.shapes.values())) if single else (one.partition_numel,) for one in flats]
        by_group: list[list[Shape]] = [[] for _ in shapes]
        for flat, shape in zip(flats, masters, strict=True):
            by_group[flat.group].append(shape)
        inner = self._build_optimizer(by_group)
        if kind != "torch":
            vars(inner)["clip_grad"] = self.ds.gradient_clipping
        scaler = None
        if kind in ("zero", "zero3"):
            scaler = vars(inner)["loss_scaler"] = _loss_scaler(self.ds, self.half_dtype)
        stage, cls = (
            self.stage or int(kind == "bf16"),
            self.optimizer_class if type(inner) is not UnbuiltOptimizer else None,
        )
        cls = (
            self.optimizer_class if self.optimizer_class is not None and self.optimizer_class.__name__ in KEPT else cls
        )
        offload, count = zero.offload_optimizer, len(flats)  # with a `ratio` the first sub-groups are stepped there
        there = int((1 - getattr(offload, "ratio", 1.0)) * count) if kind == "zero3" and self.offload == "cpu" else 0
        return inner, LiveOptimizer(
            kind=kind,
            stage=stage,
            rank=spot.data_rank if stage else 0,
            dp=spot.dp if stage else 1,
            buffers=tuple(
                self._live_buffer(flat, shape, inner.param_groups[flat.group], cls)
                for flat, shape in zip(flats, masters, strict=True)
            ),
            groups=as_saved(inner.param_groups),
            order=tuple(shapes),
            parameters={name: one.trainable for name, one in parameters.items()},
            name=cls.__name__ if cls is not None else type(inner).__name__,
            group_keys=frozenset(inner.defaults),
            decoupled=decoupled_in(inner),
            states=usual_states(cls, {}, flat=True) if cls is not None else None,
            unsaved_states=(there, count),
            scaler=scaler,
            computes_norm=kind == "torch" or bool(getattr(zero, "compute_grad_norm", True)),
        )

    def _flat_buffers(self, shapes: Sequence[Mapping[str, Shape]]) -> Iterator[FlatBuffer]:
        """How DeepSpeed lays out the masters of param groups."""
        kind, zero, spot = self.kind, self.ds.zero_config, self.position
        if kind == "zero3":
            yield from arranged(shapes, Rule.EACH, [spot.dp] * len(shapes), sub_group_numel=int(zero.sub_group_size))
        elif kind in RULES:
            aligned = kind == "zero" and bool(getattr(zero, "parameter_alignment", False))
            itemsize = (self.half_dtype or ElementType.FLOAT32).itemsize
            yield from arranged(
                shapes,
                Rule.FLAT,
                [spot.expert_ranks if any(map(expert_of, group)) else spot.dp for group in shapes],
                round_robin=bool(zero.round_robin_gradients) and kind == "zero",
                alignment=16 // gcd(16, itemsize) if aligned else 1,
            )
        else:
            parts = (
                (number, part)
                for number, group in enumerate(shapes)
                for part in ([group] if kind == "fused" else [{name: shape} for name, shape in group.items()])
            )
            for at, (number, part) in enumerate(parts):
                yield FlatBuffer(shapes=part, rule=Rule.REPLICATED, ranks=1, number=at, group=number)

    def _live_buffer(self, flat: FlatBuffer, shape: Shape, group: Mapping[str, object], cls: type | None) -> LiveBuffer:
        """A flat buffer, of which this rank has masters of this shape: of fp32, if they are not the weights."""
        vector, spot, first = len(shape) < 2, self.position, next(iter(flat.shapes))
        usual = usual_states(cls, group, flat=vector) if cls is not None else None
        kept = kept_states(cls, group, flat=vector) if usual is None and cls is not None else usual
        weights = self.module.parameters()[first].dtype if self.kind == "torch" else None
        return LiveBuffer(
            **{one.name: getattr(flat, one.name) for one in fields(FlatBuffer)},
            rank=(spot.data_rank if flat.ranks == spot.dp else spot.expert_rank) if self.kind in RULES else 0,
            dtype=weights or ElementType.FLOAT32,
            held_numel=prod(shape),
            weight_dtype=self.half_dtype or ElementType.FLOAT32,
            states=own_states(prod(shape), group, kept),
            usual=usual,
        )

    def _tp_rank(self) -> Row:
        """The row of the rank with what its parameters tell (`told_by_parameters`)."""
        row, info, held = self.position.grid.row, self.model.info, self.module.shapes()
        if self.position.grid.parts:
            return row
        whole, maps = held if row.size == 1 or autotp_in(self.config) else {}, affine_maps(info)
        return row._replace(whole=whole, live=self.model.rules, maps=maps if row.size > 1 else {}, held=held)

    def _features(self, optimizer: str) -> Iterator[str]:
        """What only DeepSpeed can load of such a run (`unsupported`)."""
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
        """The scheduler of the JSON, DeepSpeed's own; without one that of the script, taken for the saved one's."""
        from deepspeed.runtime import lr_schedules

        said = section(self.config, "scheduler")
        name = str(said.get("type"))
        own = getattr(lr_schedules, name, None)
        if said.get("type") is not None:
            cls = own or getattr(torch.optim.lr_scheduler, name, None)
            try:
                assert cls is not None, f"DeepSpeed does not recognize LR scheduler {name}"
                # torch's own refuse what wraps an optimizer, and nobody takes no params (`_scheduler_from_config`)
                assert own or self.kind == "torch", f"the optimizer of ZeRO stage {self.stage} is not an Optimizer"
                return cast(object, cls(inner, **cast(Mapping[str, object], said.get("params"))))
            except Exception as error:
                raise _config_error(f"scheduler {name}: ", error, "the scheduler's section") from error
        state = self.checkpoint.model.entries.get("lr_scheduler") if self.checkpoint is not None else None
        if not isinstance(state, Mapping):
            return None
        return _build_saved_scheduler({str(key): value for key, value in state.items()}, inner)


def _class_of_saved_states(checkpoint: AnyCheckpoint | None) -> type | None:
    """The optimizer class that the saved states and hyper-parameters identify, or None."""
    groups = checkpoint.facts.groups if checkpoint is not None and checkpoint.facts is not None else ()
    hyper = set(groups[0].hyperparameters or ()) if groups else set()
    kinds = {key.kind for key in checkpoint.layout.placements} if checkpoint is not None else set()
    kinds -= {"weight", "fp32"}
    if kinds in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) and "amsgrad" in hyper:
        return torch.optim.AdamW
    return torch.optim.SGD if kinds <= {"momentum_buffer"} and "nesterov" in hyper else None


def _config_error(what: str, error: object, where: str) -> ConfigError:
    return ConfigError.of("DeepSpeed config", f"{what}{' '.join(str(error).split())}", mend=f"correct {where}")


def _loss_scaler(ds: DeepSpeedConfig, dtype: ElementType | None) -> object:
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    dynamic = bool(ds.float16_config.enabled) and not ds.float16_config.loss_scale
    arguments = ds.float16_config.dynamic_loss_scale_args() if dynamic else None
    scale = ds.float16_config.loss_scale or 1.0
    return CreateLossScaler(torch_dtype(dtype or ElementType.FLOAT32), scale, dynamic, arguments)


def _build_saved_scheduler(state: Mapping[str, object], inner: torch.optim.Optimizer) -> object:
    """A scheduler of the kind whose state was saved, at its beginning, which the script is taken to build again."""
    from deepspeed.runtime import lr_schedules

    if "last_batch_iteration" in state:
        return cast(object, lr_schedules.WarmupLR(inner))
    mark = next((kind for mark, kind in SCRIPT_SCHEDULERS.items() if mark in state), "LambdaLR")
    numbers = {name: value for name, value in state.items() if isinstance(value, (int, float))}
    wants: dict[str, dict[str, object]] = {
        "LambdaLR": {"lr_lambda": lambda step: 1.0},
        "CosineAnnealingLR": {name: numbers[name] for name in ("T_max", "eta_min") if name in numbers},
        "StepLR": {name: numbers[name] for name in ("step_size", "gamma") if name in numbers},
        "ReduceLROnPlateau": {},
    }
    if mark not in wants:
        mark = "LambdaLR"
    cls = getattr(torch.optim.lr_scheduler, mark)
    return cast(object, cls(inner, **wants[mark]))
