"""The torch optimizer of a run that is still to come: its class, values and states, and what DeepSpeed refuses of it.

Follows `_configure_basic_optimizer`, `_configure_optimizer` and `_do_optimizer_sanity_check` (runtime/engine.py), and
what the wrappers assert where they are made (runtime/zero/stage_1_and_2.py, stage3.py, runtime/base_optimizer.py), of
DeepSpeed 0.19.8. Nothing of DeepSpeed's own optimizers is built: they compile what they need.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ds_reshard.errors import ConfigError, Fault, error_of, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.stage0 import param_groups, stage0_kind, torch_optimizer
from ds_reshard.hosts.deepspeed.coming_model import ComingModel, Group
from ds_reshard.hosts.deepspeed.entries import revived
from ds_reshard.hosts.deepspeed.load_targets import KEPT, kept_states

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_ADAMS = ("adam", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Which wrapper DeepSpeed puts around the optimizer, the type of weights, and the optimizer's class if it is known.

    `cls` is that of the model's script, of the JSON, or of the optimizer whose states were saved.
    """

    name: str
    stage: int
    dtype: torch.dtype | None
    cls: type | None


def precision(ds: DeepSpeedConfig) -> torch.dtype | None:
    """The 16-bit type of the run's weights; None where they stay as they are (`get_data_types`)."""
    if ds.float16_config.enabled:
        return torch.float16
    return torch.bfloat16 if ds.bfloat16_config.enabled else None


def kind_of(
    ds: DeepSpeedConfig, config: Mapping[str, object], checkpoint: ZeroCheckpoint | None, model: ComingModel
) -> Kind:
    """As the engine decides, which refuses what it refuses: ConfigError in its words."""
    half, stage = precision(ds), int(ds.zero_optimization_stage)
    wide, cls = _accumulated(ds) or half or torch.float32, model.optimizer
    if cls is None:
        cls = _class_of_json(ds, config) if _of_json(config) else _saved_class(checkpoint)
    name = "zero3" if stage == 3 else "zero"
    if stage == 1 and half is torch.bfloat16 and wide is torch.float32 and _offload(config) != "cpu":
        name = "bf16"
    elif not stage and half is None:
        name = "torch"
    elif not stage and half is torch.bfloat16 and checkpoint is not None and checkpoint.listing.layers:
        name = "bf16"
    elif not stage:
        own = stage0_kind(checkpoint) if checkpoint is not None and not _of_json(config) else "none"
        fused = cls.__name__ == "FusedAdam" if cls is not None else own == "fused"
        name = "fused" if fused else "unfused"
    made = Kind(name=name, stage=stage, dtype=half, cls=cls)
    raise_faults(list(_refused(ds, config, made, model, wide)), subject="preflight")
    return made


def _accumulated(ds: DeepSpeedConfig) -> torch.dtype | None:
    from deepspeed.runtime.config import DtypeEnum

    try:
        return cast(torch.dtype, DtypeEnum(ds.grad_accum_dtype).value) if ds.grad_accum_dtype is not None else None
    except ValueError as error:
        raise error_of([_refusal(str(error), "correct data_types.grad_accum_dtype")], subject="preflight") from error


def _offload(config: Mapping[str, object]) -> object:
    """Where the JSON puts the optimizer's states; "none" where they stay with the weights."""
    return section(section(config, "zero_optimization"), "offload_optimizer").get("device", "none")


def _of_json(config: Mapping[str, object]) -> bool:
    return section(config, "optimizer").get("type") is not None


def _class_of_json(ds: DeepSpeedConfig, config: Mapping[str, object]) -> type | None:
    """`_configure_basic_optimizer`; None for one that is built of two, or of another package."""
    from deepspeed.ops import adagrad, adam, lamb, lion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name, params, apart = str(ds.optimizer_name), _params(config), _offload(config) in ("cpu", "nvme")
    if name in _ADAMS and params.get("torch_adam"):
        return torch.optim.AdamW if name == "adamw" or params.get("adam_w_mode", True) else torch.optim.Adam
    classes = {
        "adam": adam.DeepSpeedCPUAdam if apart else adam.FusedAdam,
        "adamw": adam.DeepSpeedCPUAdam if apart else adam.FusedAdam,
        "adagrad": adagrad.DeepSpeedCPUAdagrad if apart else torch.optim.Adagrad,
        "lion": lion.DeepSpeedCPULion if apart else lion.FusedLion,
        "lamb": lamb.FusedLamb,
    }
    found = classes.get(name) or getattr(torch.optim, name, None)
    if name not in DEEPSPEED_OPTIMIZERS and not isinstance(found, type):
        what = f"{name} is not a supported DeepSpeed Optimizer"
        raise_faults([_refusal(what, "correct optimizer.type")], subject="preflight")
    return found if isinstance(found, type) else None


def _saved_class(checkpoint: ZeroCheckpoint | None) -> type | None:
    """The class whose states and hyper-parameters were saved, where these tell it."""
    groups = checkpoint.facts.groups if checkpoint is not None and checkpoint.facts is not None else ()
    hyper = set(groups[0].hyperparameters or ()) if groups else set()
    kinds = {key.kind for key in checkpoint.layout.placements} if checkpoint is not None else set()
    kinds -= {"weight", "fp32"}
    if kinds in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}) and "amsgrad" in hyper:
        return torch.optim.AdamW
    return torch.optim.SGD if kinds <= {"momentum_buffer"} and "nesterov" in hyper else None


def _refusal(what: str, mend: str) -> Fault:
    return ConfigError.fault("DeepSpeed config", f"DeepSpeed refuses it: {what}", mend=mend)


def _refused(
    ds: DeepSpeedConfig, config: Mapping[str, object], kind: Kind, model: ComingModel, accumulated: torch.dtype
) -> Iterator[Fault]:
    """What the engine asserts where it wraps its optimizer, after the JSON was read."""
    half, zero, apart = kind.dtype or torch.float32, section(config, "zero_optimization"), _offload(config) != "none"
    if not kind.stage:
        if half is not accumulated:
            what = f"unsupported mix of weights of {half} and grad_accum_dtype={accumulated}"
            yield _refusal(what, "correct data_types.grad_accum_dtype")
        return
    if zero.get("legacy_stage1"):
        yield _refusal("the deprecated version of ZeRO stage 1", "leave out zero_optimization.legacy_stage1")
    if kind.cls is not None and not ds.zero_allow_untested_optimizer and not _tested(kind.cls):
        yield _refusal(
            f"{kind.cls.__name__} is an untested ZeRO optimizer", 'write "zero_allow_untested_optimizer": true'
        )
    by_script = model.optimizer is not None or not _of_json(config)
    forced = by_script and getattr(ds, "zero_force_ds_cpu_optimizer", False) and _offload(config) in ("cpu", "nvme")
    if forced and kind.cls is not None and not issubclass(kind.cls, _of_the_host()):
        mend = 'build DeepSpeedCPUAdam, or write "zero_force_ds_cpu_optimizer": false'
        yield _refusal(f"ZeRO-Offload with the script's optimizer ({kind.cls.__name__})", mend)
    yield from _refused_masters(ds, kind, apart=apart)
    if zero.get("compute_grad_norm") is False and kind.stage < 3:
        clips, wide = float(ds.gradient_clipping or 0) > 0, kind.name == "bf16"
        for there, what in ((clips, "gradient_clipping"), (apart, "optimizer offload"), (wide, "BF16_Optimizer")):
            if there:
                yield _refusal(f"compute_grad_norm=false does not support {what}", "leave out compute_grad_norm")
    scatters = kind.name == "zero3" or (kind.stage == 2)
    if scatters and zero.get("reduce_scatter", True):
        if getattr(ds, "gradient_predivide_factor", 1.0) != 1.0:
            yield _refusal("gradient_predivide_factor != 1.0 with reduce scatter", "leave it out")
        if getattr(ds, "prescale_gradients", False):
            yield _refusal("pre-scale gradients with reduce scatter", "leave out prescale_gradients")


def _tested(cls: type) -> bool:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    return cls in ZERO_SUPPORTED_OPTIMIZERS or cls.__name__ == "MuonWithAuxAdam"


def _of_the_host() -> tuple[type, ...]:
    from deepspeed.ops import adam, lion

    return adam.DeepSpeedCPUAdam, lion.DeepSpeedCPULion


def _refused_masters(ds: DeepSpeedConfig, kind: Kind, *, apart: bool) -> Iterator[Fault]:
    """`_configure_master_weights`: 16-bit masters lie in the host's memory, or have 16-bit states beside them."""
    fp16 = getattr(ds.float16_config, "fp16_master_weights_and_grads", False)
    bf16 = getattr(ds.bfloat16_config, "bf16_master_weights_and_grads", False)
    states = getattr(ds.bfloat16_config, "bf16_optimizer_states", False)
    if kind.name not in ("zero", "zero3"):
        return
    if (fp16 and bf16) or (states and not bf16):
        what = (
            "fp16_master_weights_and_grads, bf16_master_weights_and_grads and bf16_optimizer_states do not go together"
        )
        yield _refusal(what, "leave out one of them")
    by_host = apart and (kind.cls is None or kind.cls.__name__ == "DeepSpeedCPUAdam")
    if (fp16 or (bf16 and (not states or apart))) and not by_host:
        what = "16-bit master weights without ZeRO-Offload with DeepSpeedCPUAdam"
        yield _refusal(what, "leave out fp16_master_weights_and_grads or bf16_master_weights_and_grads")


class ScriptsOwn(torch.optim.Optimizer):
    """An optimizer that is not built: its states are not known, or are those that its class keeps."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def optimizer_of(
    config: Mapping[str, object],
    checkpoint: ZeroCheckpoint | None,
    model: ComingModel,
    cls: type | None,
    params: Sequence[Sequence[torch.Tensor]],
) -> torch.optim.Optimizer:
    """The optimizer with its values and the states that it keeps of its parameters; one of torch's is torch's own."""
    values = _group_values(config, checkpoint, model, len(params))
    groups = [{**value, "params": list(of)} for of, value in zip(params, values, strict=True)]
    by_json = _of_json(config) and model.optimizer is None
    given = _arguments(config, cls) if by_json else {}
    if cls is None:
        return ScriptsOwn(groups, {"lr": 1e-3, **given})
    if cls.__name__ in KEPT:
        named = type(cls.__name__, (ScriptsOwn,), {"__module__": cls.__module__})
        inner = cast(torch.optim.Optimizer, named(groups, {"lr": 1e-3, **given}))
        kept = [dict.fromkeys(KEPT[cls.__name__], True)] * 2
    else:
        try:
            inner = cast(torch.optim.Optimizer, cls(groups, **given))
        except Exception as error:
            if by_json:
                raise_faults([_refused_by(config, error)], subject="preflight")
            return ScriptsOwn(groups, {"lr": 1e-3})
        kept = [kept_states(cls, inner.param_groups[0], flat=vectors) or {} for vectors in (False, True)]
    for flat in (flat for of in params for flat in of):
        followed = (name for name, follows in kept[flat.dim() < 2].items() if follows)
        inner.state[flat] = {name: torch.empty_like(flat) for name in followed}
    return inner


def _refused_by(config: Mapping[str, object], error: Exception) -> Fault:
    what = f"is refused by optimizer {section(config, 'optimizer').get('type')}: {' '.join(str(error).split())}"
    return ConfigError.fault("DeepSpeed config", what, mend="correct optimizer.params")


def _params(config: Mapping[str, object]) -> Mapping[str, object]:
    return section(section(config, "optimizer"), "params")


def _arguments(config: Mapping[str, object], cls: type | None) -> dict[str, object]:
    """What the JSON's optimizer is given; of one of DeepSpeed's own, which is not built, with its defaults."""
    params = dict(_params(config))
    if "max_grad_norm" in params:
        error = "'max_grad_norm' is not supported as an optimizer parameter, but gradient_clipping beside it"
        raise_faults([_refused_by(config, ValueError(error))], subject="preflight")
    if str(section(config, "optimizer").get("type")).lower() in (*_ADAMS, "muon"):
        drop = [
            "torch_adam",
            "adam_w_mode",
            "fp32_optimizer_states",
            *(["foreach"] if params.get("torch_adam") else []),
        ]
        params = {name: value for name, value in params.items() if name not in drop}
    if cls is None:
        return {name: value for name, value in params.items() if value is not None}
    signature = inspect.signature(cls)
    try:
        signature.bind([], **params)
        if params.get("amsgrad") and cls.__name__ in ("FusedAdam", "FusedLamb"):
            raise ValueError(f"{cls.__name__} does not support the AMSGrad variant")
    except (TypeError, ValueError) as error:
        raise_faults([_refused_by(config, error)], subject="preflight")
    if cls.__name__ not in KEPT:
        return params
    defaults = {name: one.default for name, one in signature.parameters.items() if one.default is not one.empty}
    return {**defaults, **params}


def _group_values(
    config: Mapping[str, object], checkpoint: ZeroCheckpoint | None, model: ComingModel, count: int
) -> list[Group]:
    """What each param group is given: by the model's script, by the JSON, or else what was saved."""
    if model.groups is not None:
        return [dict(group) for group in model.groups]
    if _of_json(config):
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
