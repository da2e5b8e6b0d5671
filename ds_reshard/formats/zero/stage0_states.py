"""What a stage-0 checkpoint's model file holds of its optimizer, before anybody names the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.model.records import TensorRecord


def torch_optimizer(model: ModelStates | None) -> Mapping[str, object]:
    """The state_dict of the torch optimizer, which DeepSpeed's own may wrap; empty where there is none."""
    saved = model.entries.get("optimizer") if model is not None else None
    if not isinstance(saved, dict):
        return {}
    inner = saved.get("optimizer_state_dict", saved)
    return inner if isinstance(inner, dict) else {}


def states(saved: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The state of each parameter (or flat group), in order."""
    found = saved.get("state")
    return [state for state in found.values() if isinstance(state, dict)] if isinstance(found, dict) else []


def param_groups(saved: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = saved.get("param_groups")
    return [group for group in found if isinstance(group, dict)] if isinstance(found, list) else []


def masters(model: ModelStates | None) -> Iterator[TensorRecord]:
    """The fp32 masters that FP16_UnfusedOptimizer and FP16_Optimizer save (see stage0.py); none in fp32 training."""
    saved = model.entries.get("optimizer") if model is not None else None
    groups = saved.get("fp32_groups", saved.get("fp32_groups_flat")) if isinstance(saved, dict) else None
    for group in groups if isinstance(groups, list | tuple) else ():
        tensors = group if isinstance(group, list | tuple) else [group]
        yield from (tensor for tensor in tensors if isinstance(tensor, TensorRecord))
