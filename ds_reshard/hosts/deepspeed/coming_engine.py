"""The engine of a run that is still to come: what the code of a load asks of a running one, on the meta device.

Nothing decides here: `load.py` and `prepare.py` look at this engine as at any other. What DeepSpeed makes of a config
is its own to say (`DeepSpeedConfig`, its schedulers). How flat buffers are cut follows `_round_robin_reorder` and the
padding of `parameter_alignment` (runtime/zero/stage_1_and_2.py), and `_create_fp16_sub_groups` (runtime/zero/stage3.py)
of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd, prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from ds_reshard.errors import ConfigError, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.flat import Rule, arranged, slice_numel
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import expert_of
from ds_reshard.hooks import Seam
from ds_reshard.hosts.deepspeed.coming_grid import Spot
from ds_reshard.hosts.deepspeed.coming_model import ComingModel
from ds_reshard.hosts.deepspeed.coming_optimizer import Kind, kind_of, optimizer_of
from ds_reshard.hosts.deepspeed.live import param_shape
from ds_reshard.resume.lr_preview import SCRIPT_SCHEDULERS

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

Group = dict[str, object]
_META = torch.device("meta")
_KEYS = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "optimizer", "bf16", "fp16"}
)
"""Some key of every DeepSpeed JSON."""


def parsed(config: Mapping[str, object], world: int) -> DeepSpeedConfig:
    """What DeepSpeed makes of this JSON on so many ranks; ConfigError with its own words where it refuses it."""
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
            mend = f"name the DeepSpeed JSON: this is another program's, which begins with {next(iter(config))!r}"
        raise ConfigError.of("DeepSpeed config", f"DeepSpeed refuses it on {world} ranks: {said}", mend=mend) from error


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
"""Which argument of Hugging Face's Trainer fills what (integrations/deepspeed.py, transformers 5.23)."""


def by_flags(config: Mapping[str, object], flags: Mapping[str, object], under: str = "") -> dict[str, object]:
    """The config with what the flags of the Trainer's script say of what is "auto"."""
    made = dict(config)
    for key, value in config.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            made[key] = by_flags(value, flags, f"{name}.")
        elif value == "auto" and (told := _by_trainer(name, flags)) is not None:
            made[key] = told
    return made


def _by_trainer(name: str, flags: Mapping[str, object]) -> object:
    """What the Trainer makes of its arguments for a value of the config, None where these do not tell.

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
        *,
        sp: int = 1,
    ) -> None:
        self._config, self.coming_grid, place = ds, spot.grid, spot.data
        self.module = model.module
        self.param_names = {param: name for name, param in model.module.named_parameters()}
        self.seq_data_parallel_group = place
        self.seq_dp_world_size, self.dp_world_size = place.size, place.size // sp
        self.mp_world_size, self.mpu = spot.grid.row.size * spot.grid.pp, _Mpu(spot.grid.column)
        self.has_moe_layers = bool(spot.grid.experts)
        self.zenflow = section(config, "zero_optimization").get("zenflow") is not None
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.training_dataloader = self.client_lr_scheduler = self.lr_scheduler = None
        self.random_ltd_scheduler = None
        self.kind = kind_of(ds, config, checkpoint, model)
        self.optimizer = _wrapper(ds, config, checkpoint, model, spot, self.kind)
        inner = cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))
        self.lr_scheduler = _scheduler(config, checkpoint, self.optimizer, inner)
        if not section(config, "scheduler") and self.lr_scheduler is not None:
            self.client_lr_scheduler = self.lr_scheduler
        self.scripts_scheduler = self.client_lr_scheduler is not None
        several = len(model.order) > 1  # what a JSON says of one, the script says of each
        by_json = section(config, "optimizer").get("type") is not None
        self.scripts_optimizer = model.groups is None and (several or not by_json)

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
        return cast(int, self._config.train_batch_size)

    def gradient_accumulation_steps(self) -> int:
        return cast(int, self._config.gradient_accumulation_steps)


def _wrapper(
    ds: DeepSpeedConfig,
    config: Mapping[str, object],
    checkpoint: ZeroCheckpoint | None,
    model: ComingModel,
    spot: Spot,
    kind: Kind,
) -> object:
    """The optimizer of the engine, with its flat buffers."""
    zero, place = ds.zero_config, spot.data
    orders = [{name: param for name, param in group.items() if param.requires_grad} for group in model.order if group]
    shares = [spot.experts if any(map(expert_of, group)) else place for group in orders]
    made: dict[str, object] = {
        "clip_grad": ds.gradient_clipping,
        "compute_grad_norm": bool(getattr(zero, "compute_grad_norm", True)),
        "dp_process_group": place,
        "real_dp_process_group": shares,
        "zenflow": section(config, "zero_optimization").get("zenflow") is not None,
        "swap_optimizer": kind.stage == 3 and _device(zero.offload_optimizer) == "nvme",
    }
    flats: list[list[torch.Tensor]] = [[] for _ in orders]
    if kind.name == "torch":
        return optimizer_of(config, checkpoint, model, kind.cls, [list(group.values()) for group in orders])
    shapes = [{name: param_shape(param) for name, param in group.items()} for group in orders]
    if kind.name == "zero3":
        _partition(model.module, place.size)
        counts, most = [place.size] * len(orders), int(zero.sub_group_size)
        buffers = arranged(shapes, Rule.EACH, counts, sub_group_numel=most)
        masters = [_flat(buffer.partition_numel, torch.float32) for buffer in buffers]
        made["fp32_partitioned_groups_flat"] = masters
        made["fp16_partitioned_groups_flat"] = [
            _flat(buffer.partition_numel, kind.dtype or torch.float32) for buffer in buffers
        ]
        made["fp16_groups"] = [[orders[buffer.group][name] for name in buffer.shapes] for buffer in buffers]
        made["sub_group_to_group_id"] = {buffer.number: buffer.group for buffer in buffers}
        made["subgroup_to_device"] = _places(zero.offload_optimizer, len(buffers))
        for buffer, flat in zip(buffers, masters, strict=True):
            flats[buffer.group].append(flat)
    elif kind.name in ("zero", "bf16"):
        aligned = kind.name == "zero" and bool(getattr(zero, "parameter_alignment", False))
        itemsize = torch.empty(0, dtype=kind.dtype or torch.float32).element_size()
        buffers = arranged(
            shapes,
            Rule.FLAT,
            [share.size for share in shares],
            round_robin=bool(zero.round_robin_gradients) and kind.name == "zero",
            alignment=16 // gcd(16, itemsize) if aligned else 1,
        )
        flats = [[_flat(buffer.partition_numel, torch.float32)] for buffer in buffers]
        params = [[orders[buffer.group][name] for name in buffer.shapes] for buffer in buffers]
        if kind.name == "bf16":
            made |= {"bf16_groups": params, "fp32_groups_flat_partition": [flat for (flat,) in flats]}
        else:
            made |= {"bit16_groups": [list(group.values()) for group in orders], "round_robin_bit16_groups": params}
            made |= {"single_partition_of_fp32_groups": [flat for (flat,) in flats]}
            made |= {"round_robin_bit16_padding": [buffer.gaps or [0] * len(buffer.shapes) for buffer in buffers]}
    elif kind.name == "fused":
        flats = [[_flat(sum(map(prod, group.values())), torch.float32)] for group in shapes]
        made |= {"fp16_groups": [list(group.values()) for group in orders]}
        made |= {"fp32_groups_flat": [flat for (flat,) in flats]}
    else:
        flats = [[torch.empty(param_shape(p), device=_META) for p in group.values()] for group in orders]
        made |= {"fp16_groups": [list(group.values()) for group in orders], "fp32_groups": flats}
    made["optimizer"] = optimizer_of(config, checkpoint, model, kind.cls, flats)
    if kind.name in ("zero", "zero3"):
        made["loss_scaler"] = _loss_scaler(ds, kind.dtype)
    wrapper = type(_wrapper_name(config, kind), (SimpleNamespace,), {})
    return wrapper(**made)


def _device(offload: object) -> str:
    device = getattr(offload, "device", None)
    return str(getattr(device, "value", device))


def _places(offload: object, count: int) -> dict[int, str]:
    """Where sub-groups are stepped: with a `ratio` the first ones on the device (`subgroup_to_device`, stage3.py)."""
    there = int((1 - getattr(offload, "ratio", 1.0)) * count) if _device(offload) == "cpu" else 0
    return {number: "device" if number < there else "cpu" for number in range(count)}


def _wrapper_name(config: Mapping[str, object], kind: Kind) -> str:
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
        part = torch.empty(slice_numel(shape, dp), dtype=param.dtype, device=_META)
        for name, value in {"ds_id": number, "ds_shape": shape, "ds_numel": prod(shape), "ds_tensor": part}.items():
            setattr(param, name, value)


def _flat(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(numel, dtype=dtype, device=_META))


def _loss_scaler(ds: DeepSpeedConfig, dtype: torch.dtype | None) -> object:
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    dynamic = bool(ds.float16_config.enabled) and not ds.float16_config.loss_scale
    arguments = ds.float16_config.dynamic_loss_scale_args() if dynamic else None
    scale = ds.float16_config.loss_scale or 1.0
    return CreateLossScaler(dtype or torch.float32, scale, dynamic, arguments)


def _scheduler(
    config: Mapping[str, object], checkpoint: ZeroCheckpoint | None, outer: object, inner: torch.optim.Optimizer
) -> object:
    """The scheduler of the JSON, DeepSpeed's own class; without one that of the script, taken for the saved one's."""
    from deepspeed.runtime import lr_schedules

    said = section(config, "scheduler")
    if said.get("type") is not None:
        name = str(said["type"])
        cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
        try:
            assert cls is not None, f"DeepSpeed does not recognize LR scheduler {name}"
            # torch's own refuse what wraps an optimizer, and nobody takes no params (`_scheduler_from_config`)
            return cast(object, cls(outer, **cast(Mapping[str, object], said.get("params"))))
        except Exception as error:
            what = f"scheduler {said['type']}: {' '.join(str(error).split())}"
            fault = ConfigError.fault("DeepSpeed config", what, mend="correct the scheduler's section")
            raise_faults([fault], subject="preflight")
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
