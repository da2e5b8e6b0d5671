"""The model of a run that is still to come: the one that was saved, or what --model makes; on torch's meta device."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ds_reshard.errors import ConfigError, ModelMismatch, error_of, raise_faults
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.flat import turned_back
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.stage0 import param_groups, torch_optimizer
from ds_reshard.hosts.deepspeed.unfound import saved_shapes
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape

Group = dict[str, object]
_META = torch.device("meta")


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
        turned_back(list(group.members), checkpoint.dp) if turned else list(group.members)
        for group in checkpoint.facts.groups
    ]


def _stage0_order(checkpoint: ZeroCheckpoint) -> list[list[str]]:
    """By the module's order, and with several param groups by the shapes of what the optimizer holds.

    Of what tensor-parallel ranks have divided, both of the first rank.
    """
    saved = checkpoint.rows[0] if checkpoint.rows else checkpoint.model
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


def factory_of(text: str) -> Callable[[], object]:
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


def given_model(made: object) -> ComingModel:
    """What a factory has made: a module, or a module and the optimizer or param groups over its parameters."""
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
        members = {names[id(param)]: param for param in params if id(param) in names}
        if members:
            kept.append((members, {name: value for name, value in group.items() if name != "params"}))
    if not kept and groups is not None:
        what, mend = "gives an optimizer of none of the module's parameters", "build it over module.parameters()"
        raise_faults([ConfigError.fault("--model", what, mend=mend)], subject="preflight")
    order, values = tuple(members for members, _ in kept), tuple(value for _, value in kept)
    return ComingModel(module=module, order=order, groups=values if any(values) else None, optimizer=optimizer)


def cast_model(model: ComingModel, dtype: torch.dtype | None) -> ComingModel:
    """The model as DeepSpeed makes it of its precision: `module.half()` or `module.bfloat16()`, in place."""
    if dtype is not None:
        for tensor in [*model.module.parameters(), *model.module.buffers()]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return model
