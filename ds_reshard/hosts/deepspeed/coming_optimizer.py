"""The torch optimizer of a run that is still to come: its class, values and states.

Follows `_configure_basic_optimizer` and `_configure_optimizer` (runtime/engine.py) of DeepSpeed 0.19.8. Nothing of
DeepSpeed's own optimizers is built: they compile what they need. What DeepSpeed asserts of them it says itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
    """As the engine decides. What it asserts where it wraps its optimizer it says itself, when the run starts."""
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
    return Kind(name=name, stage=stage, dtype=half, cls=cls)


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
    if cls.__name__ not in KEPT:
        return params
    parameters = inspect.signature(cls).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not one.empty}
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
