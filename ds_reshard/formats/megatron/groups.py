"""Where the param groups lie in a saved optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

Group = dict[str, object]
"""A param group: `params` and the values that the optimizer and the scheduler read."""


def saved_groups(state: object) -> list[Group] | None:
    """The param groups of one optimizer's saved state; None where they are not in it.

    `FP32Optimizer` saves its torch optimizer's state; `Float16OptimizerWithFloat16Params` and
    `DistributedOptimizer` put that under "optimizer", "optimizer_state_dict" in old ones
    (core/optimizer/optimizer.py and distrib_optimizer.py, 0.16.1 to 0.19.2). In a `torch_dist` checkpoint of
    sharding type `dp_reshardable` they lie in a sharded object, which is read with the tensors.
    """
    if not isinstance(state, Mapping):
        return None
    for holder in (state, state.get("optimizer"), state.get("optimizer_state_dict")):
        groups = holder.get("param_groups") if isinstance(holder, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
            return groups
    return None
