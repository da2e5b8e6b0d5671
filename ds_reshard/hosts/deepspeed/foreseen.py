"""The engine of a run that is still to come: what the code of a load asks of a running one, on the meta device.

Nothing decides here: `load.py` and `prepare.py` look at this engine as at any other. What DeepSpeed makes of a config
is its own to say (`DeepSpeedConfig`, its schedulers). Which optimizer wraps what, and how its flat buffers are cut,
follows `_do_optimizer_sanity_check` and `_configure_fp16_optimizer` (runtime/engine.py), `_round_robin_reorder` and the
padding of `parameter_alignment` (runtime/zero/stage_1_and_2.py), and `_create_fp16_sub_groups` (runtime/zero/stage3.py)
of DeepSpeed 0.19.8. The model is the checkpoint's, or one that was built on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from ds_reshard.errors import ConfigError, ModelMismatch, as_faults, raise_faults
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.experts import expert_of
from ds_reshard.formats.zero.layout import chunk_numel, flat_numel, partition_numel, sub_group_numel
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.stage0 import param_groups, torch_optimizer
from ds_reshard.formats.zero.target import sub_groups
from ds_reshard.hosts.deepspeed.coming_grid import Spot
from ds_reshard.hosts.deepspeed.entries import revived
from ds_reshard.hosts.deepspeed.prepare import saved_shapes, stage0_kind
from ds_reshard.hosts.deepspeed.settings import check_batch
from ds_reshard.model.records import TensorRecord
from ds_reshard.resume.lr_preview import SCRIPT_SCHEDULERS

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

Shape = tuple[int, ...]
Group = dict[str, object]
_META = torch.device("meta")


def parsed(config: Mapping[str, object], world: int) -> DeepSpeedConfig:
    """What DeepSpeed makes of this JSON on so many ranks; ConfigError with its own words where it refuses it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class OfWorld(DeepSpeedConfig):  # type: ignore[misc]
        """As DeepSpeed reads it where the process group has so many ranks."""

        def _configure_train_batch_size(self) -> None:
            self.world_size = world
            super()._configure_train_batch_size()

        def _batch_assertion(self) -> None:
            check_batch(self, super()._batch_assertion)

    try:
        return OfWorld(dict(config))
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:400] or type(error).__name__
        mend = "correct the DeepSpeed JSON, or --world"
        fault = ConfigError.fault("DeepSpeed config", f"DeepSpeed refuses it on {world} ranks: {said}", mend=mend)
        raise ConfigError(f"{fault.line()}; {mend}", [fault]) from error


def filled(config: Mapping[str, object], saved: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The config with the saving run's values for what is "auto", which a trainer fills, and the names of these."""
    made: dict[str, object] = {}
    names: list[str] = []
    for key, value in config.items():
        theirs = saved.get(key)
        if isinstance(value, Mapping):
            made[key], found = filled(value, theirs if isinstance(theirs, Mapping) else {})
            names += [f"{key}.{name}" for name in found]
        elif value != "auto":
            made[key] = value
        else:
            names.append(key)
            if key in saved and theirs != "auto" and key != "train_batch_size":  # which follows from the others
                made[key] = theirs
    return made, names


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingModel:
    """The module of the run, and the trainable parameters of each param group in the order of the script.

    `groups` are the values that the script gives each, and `optimizer` its class; None where the JSON says it, or else
    what was saved holds.
    """

    module: torch.nn.Module
    order: tuple[dict[str, torch.nn.Parameter], ...]
    groups: tuple[Group, ...] | None = None
    optimizer: type | None = None


class _SavedModule(torch.nn.Module):
    """A module whose state dict has the saved entries that are no tensors, too, and which says how it is divided."""

    def __init__(self, saved: ModelStates) -> None:
        super().__init__()
        self._objects = tuple(saved.objects)
        object.__setattr__(self, "universal_checkpoint_info", saved.entries.get("universal_checkpoint_info"))

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        return {**super().state_dict(*args, **kwargs), **dict.fromkeys(self._objects)}  # type: ignore[call-overload]


def saved_model(checkpoint: ZeroCheckpoint, dtype: torch.dtype | None) -> ComingModel:
    """The model that was saved, its floating-point weights and buffers of `dtype`, None for as they were saved."""
    saved, shapes = checkpoint.model, saved_shapes(checkpoint)
    module = _SavedModule(saved)
    order = saved_order(checkpoint)
    trained = {name for group in order for name in group}
    tied = {*saved.shared, *saved.shared.values()}
    made: dict[object, torch.Tensor] = {}
    named: dict[str, torch.nn.Parameter] = {}
    for name, record in saved.module.items():
        kept = torch_dtype(record.dtype)
        kept = dtype if dtype is not None and kept.is_floating_point else kept
        storage = (record.storage.path, record.storage.key, record.byte_offset) if record.numel else name
        owner = saved.shared.get(name, name)
        key: object = owner if name in tied or checkpoint.stage == 3 or checkpoint.foreign else storage
        if name in saved.buffer_names:
            _put(module, name, torch.empty(shapes[name], dtype=kept, device=_META))
            continue
        if key not in made:
            value = torch.empty(shapes[name], dtype=kept, device=_META)
            requires = name in trained and kept.is_floating_point
            made[key] = torch.nn.Parameter(value, requires_grad=requires)
        parameter = cast(torch.nn.Parameter, made[key])
        _put(module, name, parameter)
        named[name] = parameter
    lacking = [name for name in trained if name not in named]
    for name in lacking:  # weights that no file of a layer holds, or that only masters tell
        shape = saved.trainable.get(name, ())
        named[name] = torch.nn.Parameter(torch.empty(shape, dtype=dtype or torch.float32, device=_META))
        _put(module, name, named[name])
    return ComingModel(module=module, order=tuple({name: named[name] for name in group} for group in order))


def _put(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = torch.nn.Module()
        module = cast(torch.nn.Module, module._modules[part])
    if isinstance(value, torch.nn.Parameter):
        module._parameters[last] = value
    else:
        module._buffers[last] = value


def no_model() -> ComingModel:
    """In place of a model that cannot be read: whatever is asked of the checkpoint will say why."""
    module = torch.nn.Module()
    module.unknown = torch.nn.Parameter(torch.empty(1, device=_META))
    return ComingModel(module=module, order=({"unknown": module.unknown},))


def saved_order(checkpoint: ZeroCheckpoint) -> list[list[str]]:
    """The trainable parameters of each param group, in the order in which the saving script gave them."""
    saved = checkpoint.model
    if checkpoint.stage == 0 and checkpoint.facts is None:
        return _stage0_order(checkpoint)
    if checkpoint.facts is None:
        return [list(group) for group in saved.param_shapes or ()]
    zero = section(saved.config, "zero_optimization")
    turned = zero.get("round_robin_gradients") is True and checkpoint.kind == "zero" and len(checkpoint.columns) == 1
    return [
        _turned_back(list(group.members), checkpoint.dp) if turned else list(group.members)
        for group in checkpoint.facts.groups
    ]


def _turned_back(names: list[str], ranks: int) -> list[str]:
    """What `_round_robin_reorder` has made this order of."""
    places = [at for rank in range(ranks) for at in range(rank, len(names), ranks)]
    return [name for _, name in sorted(zip(places, names, strict=True))]


def _stage0_order(checkpoint: ZeroCheckpoint) -> list[list[str]]:
    """By the module's order, and with several param groups by the shapes of what the optimizer holds."""
    saved = checkpoint.model
    seen: set[object] = set()
    names: list[str] = []
    for name, record in saved.module.items():
        storage = (record.storage.path, record.byte_offset) if record.numel else name
        if name not in saved.buffer_names and torch_dtype(record.dtype).is_floating_point and storage not in seen:
            seen.add(storage)
            names.append(name)
    optimizer = saved.entries.get("optimizer")
    groups = param_groups(torch_optimizer(saved)) if isinstance(optimizer, Mapping) else [{}]
    expected = _held_shapes(cast(Mapping[str, object], optimizer), groups) if isinstance(optimizer, Mapping) else None
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
    if checkpoint.listing.layers and [len(group) for group in order] != [len(group) for group in expected or ()]:
        return [names]  # of a stage of which no file says where it begins; each loads its own as it was saved
    if expected is None or [len(group) for group in order] != [len(group) for group in expected]:
        what = "a stage-0 optimizer names no parameter, and shapes do not tell which param group has which"
        mend = "give the model: --model module:factory"
        raise_faults([ModelMismatch.fault(saved.path, what, mend=mend)], subject="foreseeing the model")
    return order


def _held_shapes(optimizer: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> list[list[Shape]] | None:
    """The shapes of each param group's masters or states, in order; None where they do not tell."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Which wrapper DeepSpeed puts around the optimizer, and the type of weights."""

    name: str
    stage: int
    dtype: torch.dtype | None


def kind_of(ds: DeepSpeedConfig, config: Mapping[str, object], checkpoint: ZeroCheckpoint | None) -> _Kind:
    """`_do_optimizer_sanity_check`, `get_data_types` and `_configure_fp16_optimizer`."""
    half = {True: torch.bfloat16, False: None}[bool(ds.bfloat16_config.enabled)]
    half = torch.float16 if ds.float16_config.enabled else half
    stage = int(ds.zero_optimization_stage)
    accumulated = ds.grad_accum_dtype
    if stage == 3:
        return _Kind(name="zero3", stage=stage, dtype=half)
    if stage:
        offloads = ds.zero_config.offload_optimizer is not None
        wide = accumulated in ("fp32", "float32") and half is torch.bfloat16
        return _Kind(name="bf16" if wide and stage == 1 and not offloads else "zero", stage=stage, dtype=half)
    if half is None:
        return _Kind(name="torch", stage=stage, dtype=half)
    if half is torch.bfloat16 and checkpoint is not None and checkpoint.listing.layers:
        return _Kind(name="bf16", stage=stage, dtype=half)
    optimizer = section(config, "optimizer")
    params = section(optimizer, "params")
    own = stage0_kind(checkpoint) if checkpoint is not None else "none"
    if optimizer:
        fused = str(optimizer.get("type")).lower() in ("adam", "adamw") and not params.get("torch_adam")
        return _Kind(name="fused" if fused else "unfused", stage=stage, dtype=half)
    return _Kind(name=own if own in ("fused", "unfused") else "unfused", stage=stage, dtype=half)


class _Mpu(NamedTuple):
    """What is asked of an `mpu`: the rank among those that divide the model, as its files are numbered."""

    column: int

    def get_model_parallel_rank(self) -> int:
        return self.column


class ComingEngine:
    """What `hosts/deepspeed` reads of a DeepSpeedEngine."""

    def __init__(
        self,
        ds: DeepSpeedConfig,
        config: Mapping[str, object],
        checkpoint: ZeroCheckpoint | None,
        model: ComingModel,
        spot: Spot,
    ) -> None:
        self._config, self.coming_grid, place = ds, spot.grid, spot.data
        self.module = model.module
        self.param_names = {param: name for name, param in model.module.named_parameters()}
        self.seq_data_parallel_group = place
        self.seq_dp_world_size = self.dp_world_size = place.size
        self.mp_world_size, self.mpu = spot.grid.row.size * spot.grid.pp, _Mpu(spot.grid.column)
        self.has_moe_layers = bool(spot.grid.experts)
        self.zenflow = section(config, "zero_optimization").get("zenflow") is not None
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.training_dataloader = self.client_lr_scheduler = self.lr_scheduler = None
        self.random_ltd_scheduler = None
        self.kind = kind_of(ds, config, checkpoint)
        self.optimizer = _wrapper(ds, config, checkpoint, model, spot, self.kind)
        inner = cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))
        self.lr_scheduler = _scheduler(config, checkpoint, inner)
        if not section(config, "scheduler") and self.lr_scheduler is not None:
            self.client_lr_scheduler = self.lr_scheduler
        self.scripts_scheduler = self.client_lr_scheduler is not None
        several = len(model.order) > 1  # what a JSON says of one, the script says of each
        self.scripts_optimizer = model.groups is None and (several or not section(config, "optimizer"))

    def zero_optimization_stage(self) -> int:
        return self.kind.stage

    def load_universal_checkpoint(self) -> bool:
        return bool(self._config.load_universal_checkpoint)

    def bfloat16_enabled(self) -> bool:
        return bool(self._config.bfloat16_config.enabled)

    def zero_load_from_fp32_weights(self) -> bool:
        return bool(self._config.zero_config.load_from_fp32_weights)

    def curriculum_learning_enabled(self) -> bool:
        return False

    def random_ltd_enabled(self) -> bool:
        return False

    def gradient_clipping(self) -> object:
        return self._config.gradient_clipping

    def train_batch_size(self) -> int:
        return int(self._config.train_batch_size)


def _wrapper(
    ds: DeepSpeedConfig,
    config: Mapping[str, object],
    checkpoint: ZeroCheckpoint | None,
    model: ComingModel,
    spot: Spot,
    kind: _Kind,
) -> object:
    """The optimizer of the engine, with its flat buffers."""
    zero, place = ds.zero_config, spot.data
    orders = [{name: param for name, param in group.items() if param.requires_grad} for group in model.order if group]
    shares = [spot.experts if any(map(expert_of, group)) else place for group in orders]
    offload = getattr(zero.offload_optimizer, "device", None)
    nvme = "nvme" in (str(offload), str(getattr(offload, "value", "")))
    made: dict[str, object] = {
        "clip_grad": ds.gradient_clipping,
        "dp_process_group": place,
        "real_dp_process_group": shares,
        "zenflow": section(config, "zero_optimization").get("zenflow") is not None,
        "swap_optimizer": kind.stage == 3 and nvme,
    }
    flats: list[list[torch.Tensor]] = [[] for _ in orders]
    if kind.name == "torch":
        return _inner(config, checkpoint, model, [list(group.values()) for group in orders])
    if kind.name == "zero3":
        _partition(model.module, place.size)
        subs = [
            (g, list(part))
            for g, group in enumerate(orders)
            for part in sub_groups(_shapes(group), place.size, int(zero.sub_group_size))
        ]
        sizes = [sub_group_numel({name: _shape(orders[g][name]) for name in part}, place.size) for g, part in subs]
        made["fp32_partitioned_groups_flat"] = masters = [_flat(size, torch.float32) for size in sizes]
        made["fp16_partitioned_groups_flat"] = [_flat(size, kind.dtype or torch.float32) for size in sizes]
        made["fp16_groups"] = [[orders[g][name] for name in part] for g, part in subs]
        made["sub_group_to_group_id"] = {number: g for number, (g, _) in enumerate(subs)}
        for (g, _), flat in zip(subs, masters, strict=True):
            flats[g].append(flat)
    elif kind.name in ("zero", "bf16"):
        turns = bool(zero.round_robin_gradients) and kind.name == "zero"
        turned = [
            _turned(list(group.items()), share.size) if turns else list(group.items())
            for group, share in zip(orders, shares, strict=True)
        ]
        aligned = kind.name == "zero" and bool(getattr(zero, "parameter_alignment", False))
        gaps = [_gaps([param for _, param in group], kind.dtype or torch.float32, aligned) for group in turned]
        for g, group in enumerate(turned):
            shapes = {name: _shape(param) for name, param in group}
            flats[g] = [_flat(partition_numel(flat_numel(shapes, gaps[g]), shares[g].size), torch.float32)]
        params = [[param for _, param in group] for group in turned]
        if kind.name == "bf16":
            made |= {"bf16_groups": params, "fp32_groups_flat_partition": [flat for (flat,) in flats]}
        else:
            made |= {"bit16_groups": [list(group.values()) for group in orders], "round_robin_bit16_groups": params}
            made |= {"single_partition_of_fp32_groups": [flat for (flat,) in flats]}
            made |= {"round_robin_bit16_padding": gaps}
    elif kind.name == "fused":
        flats = [[_flat(sum(map(prod, _shapes(group).values())), torch.float32)] for group in orders]
        made |= {"fp16_groups": [list(group.values()) for group in orders]}
        made |= {"fp32_groups_flat": [flat for (flat,) in flats]}
    else:
        flats = [[torch.empty(_shape(p), device=_META) for p in group.values()] for group in orders]
        made |= {"fp16_groups": [list(group.values()) for group in orders], "fp32_groups": flats}
    made["optimizer"] = _inner(config, checkpoint, model, flats)
    if kind.name in ("zero", "zero3"):
        made["loss_scaler"] = _loss_scaler(ds, kind.dtype)
    wrapper = type(_wrapper_name(config, kind), (SimpleNamespace,), {})
    return wrapper(**made)


def _wrapper_name(config: Mapping[str, object], kind: _Kind) -> str:
    zero = section(config, "zero_optimization")
    if kind.stage == 3 and section(zero, "offload_optimizer").get("super_offload"):
        return "SuperOffloadOptimizer_Stage3"
    if kind.stage == 3 and isinstance(zero.get("mics_shard_size"), int) and int(str(zero["mics_shard_size"])) > 0:
        return "MiCS_Optimizer"
    return {"zero3": "DeepSpeedZeroOptimizer_Stage3", "bf16": "BF16_Optimizer"}.get(kind.name, "DeepSpeedZeroOptimizer")


def _partition(module: torch.nn.Module, dp: int) -> None:
    """Every parameter as stage 3 marks it (runtime/zero/partition_parameters.py)."""
    for number, param in enumerate(module.parameters()):
        shape = tuple(param.shape)
        part = torch.empty(chunk_numel(shape, dp), dtype=param.dtype, device=_META)
        for name, value in {"ds_id": number, "ds_shape": shape, "ds_numel": prod(shape), "ds_tensor": part}.items():
            setattr(param, name, value)


def _shape(param: torch.Tensor) -> Shape:
    return tuple(getattr(param, "ds_shape", param.shape))


def _shapes(group: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {name: _shape(param) for name, param in group.items()}


def _flat(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(numel, dtype=dtype, device=_META))


def _turned(items: list[tuple[str, torch.nn.Parameter]], ranks: int) -> list[tuple[str, torch.nn.Parameter]]:
    """`_round_robin_reorder`."""
    return [item for rank in range(ranks) for item in items[rank::ranks]]


def _gaps(params: Sequence[torch.Tensor], dtype: torch.dtype, aligned: bool) -> list[int]:
    """Elements after each parameter of a flat buffer, the last one without any."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    alignment, at, found = (16 // gcd(16, itemsize) if aligned else 1), 0, list[int]()
    for number, param in enumerate(params):
        at += prod(_shape(param))
        found.append(0 if number == len(params) - 1 else -at % alignment)
        at += found[-1]
    return found


def _group_values(
    config: Mapping[str, object], checkpoint: ZeroCheckpoint | None, model: ComingModel, count: int
) -> list[Group]:
    """What each param group is given: by the model's script, by the JSON, or else what was saved."""
    if model.groups is not None:
        return [dict(group) for group in model.groups]
    if section(config, "optimizer"):
        return [dict[str, object]() for _ in range(count)]
    saved: Sequence[Mapping[str, object]] = ()
    if checkpoint is not None and checkpoint.facts is not None:
        saved = [group.hyperparameters or {} for group in checkpoint.facts.groups]
    elif checkpoint is not None and isinstance(checkpoint.model.entries.get("optimizer"), Mapping):
        saved = param_groups(torch_optimizer(checkpoint.model))
    made = []
    for number in range(count):
        values = dict(saved[number]) if number < len(saved) else {}
        found = revived(values, trusted=frozenset(), where=f"param group {number}")
        assert isinstance(found, dict)
        made.append({name: value for name, value in found.items() if name not in ("params", "step")})
        if "initial_lr" in made[-1]:  # what the saving script gave it, before a scheduler moved it
            made[-1]["lr"] = made[-1].pop("initial_lr")
    return made


class ScriptsOwn(torch.optim.Optimizer):
    """An optimizer that the script builds: nothing is known of its states."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def _inner(
    config: Mapping[str, object],
    checkpoint: ZeroCheckpoint | None,
    model: ComingModel,
    params: Sequence[Sequence[torch.Tensor]],
) -> torch.optim.Optimizer:
    """The torch optimizer inside: the model's, that of the JSON as torch has it, or else the one that was saved.

    With the states that it keeps of its parameters.
    """
    values = _group_values(config, checkpoint, model, len(params))
    groups = [{**value, "params": list(of)} for of, value in zip(params, values, strict=True)]
    said = section(config, "optimizer")
    given = {key: value for key, value in section(said, "params").items() if key not in _OURS}
    cls: object = model.optimizer
    if cls is None and said:
        name = str(said.get("type"))
        cls = getattr(torch.optim, _NAMES.get(name.lower(), name), None)
    elif cls is None:
        cls = _saved_class(checkpoint)
    if not isinstance(cls, type):
        return ScriptsOwn(groups, {"lr": 1e-3, **{key: value for key, value in given.items() if value is not None}})
    probe = torch.nn.Parameter(torch.zeros(3, 2))
    probe.grad = torch.zeros(3, 2)
    try:
        inner = cast(torch.optim.Optimizer, cls(groups, **given))
        tried = cast(torch.optim.Optimizer, cls([{**values[0], "params": [probe]}], **given))
        tried.step()
    except Exception as error:
        if not said:
            return ScriptsOwn(groups, {"lr": 1e-3})
        what = f"is refused by optimizer {said.get('type')}: {' '.join(str(error).split())}"
        fault = ConfigError.fault("DeepSpeed config", what, mend="correct optimizer.params")
        raise ConfigError(fault.line(), [fault]) from error
    kept = [k for k, v in tried.state[probe].items() if torch.is_tensor(v) and v.shape == probe.shape]
    for of in params:
        for flat in of:
            inner.state[flat] = {kind: torch.empty_like(flat) for kind in kept}
    return inner


# What DeepSpeed takes of the JSON itself, or only its own optimizers do (`_configure_basic_optimizer`).
_OURS = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states", "freeze_step", "cuda_aware")
_NAMES = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


def _saved_class(checkpoint: ZeroCheckpoint | None) -> type | None:
    """The class whose states and hyper-parameters were saved, where these tell it."""
    groups = checkpoint.facts.groups if checkpoint is not None and checkpoint.facts is not None else ()
    hyper = set(groups[0].hyperparameters or ()) if groups else set()
    kinds = {key.kind for key in checkpoint.layout.placements} if checkpoint is not None else set()
    kinds -= {"weight", "fp32"}
    if kinds in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) and "amsgrad" in hyper:
        return torch.optim.AdamW
    return torch.optim.SGD if kinds <= {"momentum_buffer"} and "nesterov" in hyper else None


def _loss_scaler(ds: DeepSpeedConfig, dtype: torch.dtype | None) -> object:
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    dynamic = bool(ds.float16_config.enabled) and not ds.float16_config.loss_scale
    arguments = ds.float16_config.dynamic_loss_scale_args() if dynamic else None
    scale = ds.float16_config.loss_scale or 1.0
    return CreateLossScaler(dtype or torch.float32, scale, dynamic, arguments)


def _scheduler(config: Mapping[str, object], checkpoint: ZeroCheckpoint | None, inner: torch.optim.Optimizer) -> object:
    """The scheduler of the JSON, DeepSpeed's own class; without one that of the script, taken for the saved one's."""
    from deepspeed.runtime import lr_schedules

    said = section(config, "scheduler")
    if said.get("type") is not None:
        name = str(said["type"])
        cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
        try:
            assert cls is not None, f"DeepSpeed does not recognize LR scheduler {name}"
            return cast(object, cls(inner, **section(said, "params")))
        except Exception as error:
            faults = [
                ConfigError.fault("DeepSpeed config", f.what, mend="correct the scheduler's section")
                for f in as_faults(error, where="scheduler")
            ]
            raise_faults(faults, subject="preflight")
    state = checkpoint.model.entries.get("lr_scheduler") if checkpoint is not None else None
    if not isinstance(state, Mapping):
        return None
    return _scripts_scheduler({str(key): value for key, value in state.items()}, inner)


def _scripts_scheduler(state: Mapping[str, object], inner: torch.optim.Optimizer) -> object:
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
