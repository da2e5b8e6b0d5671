"""Synthetic: nanotron's optimizers, which wrap a torch optimizer each in their own way and know parameters by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Groups = list[dict[str, Any]]


class BaseOptimizer:
    def __init__(self, optimizer: Any, id_to_name: dict[int, str]) -> None:
        self.optimizer, self.id_to_name = optimizer, id_to_name

    @property
    def param_groups(self) -> Groups:
        return self.optimizer.param_groups

    def get_base_optimizer(self) -> torch.optim.Optimizer:
        inner = self.optimizer
        return inner if isinstance(inner, torch.optim.Optimizer) else inner.get_base_optimizer()

    def inherit_from(self, cls: type) -> bool:
        inner = self.optimizer
        return isinstance(self, cls) or (isinstance(inner, BaseOptimizer) and inner.inherit_from(cls))

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], map_location: Any = None) -> None:
        self.optimizer.load_state_dict(state_dict, map_location=map_location)

    def step(self) -> None:
        self.optimizer.step()


class NamedOptimizer(BaseOptimizer):
    def __init__(self, groups: Groups, builder: Callable[[Groups], torch.optim.Optimizer]) -> None:
        names = {id(param): name for group in groups for name, param in group["named_params"]}
        plain = [
            {
                **{key: value for key, value in group.items() if key != "named_params"},
                "params": [param for _, param in group["named_params"]],
            }
            for group in groups
        ]
        super().__init__(builder(plain), names)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        order = [self.id_to_name[id(param)] for group in self.param_groups for param in group["params"]]
        return {**saved, "names": {number: order[number] for number in saved["state"]}}

    def load_state_dict(self, state_dict: dict[str, Any], map_location: Any = None) -> None:
        assert set(self.id_to_name.values()) == set(state_dict["names"].values()), "Elements don't match"
        assert len(state_dict["state"]) > 0, "Loading empty state dict"
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class FP32GradientAccumulator:
    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.parameters = {
            name: {"fp32": param.detach().float().clone().requires_grad_(), "half": param} for name, param in named
        }

    def step(self) -> None:
        for held in self.parameters.values():
            held["half"].data.copy_(held["fp32"].detach())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: held["fp32"] for name, held in self.parameters.items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        assert set(state_dict) == set(self.parameters)
        for name, held in self.parameters.items():
            held["fp32"].data.copy_(state_dict[name])


class OptimizerFromGradientAccumulator(BaseOptimizer):
    def __init__(self, groups: Groups, builder: Callable[[Groups], NamedOptimizer]) -> None:
        self.gradient_accumulator = FP32GradientAccumulator(
            [pair for group in groups for pair in group["named_params"]]
        )
        masters = self.gradient_accumulator.parameters
        inner = builder(
            [
                {**group, "named_params": [(name, masters[name]["fp32"]) for name, _ in group["named_params"]]}
                for group in groups
            ]
        )
        super().__init__(inner, inner.id_to_name)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gradient_accumulator": self.gradient_accumulator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], map_location: Any = None) -> None:
        masters = state_dict.pop("gradient_accumulator")
        super().load_state_dict(state_dict, map_location)
        self.gradient_accumulator.load_state_dict(masters)

    def step(self) -> None:
        super().step()
        self.gradient_accumulator.step()


class ZeroDistributedOptimizer(BaseOptimizer):
    def __init__(self, groups: Groups, builder: Callable[[Groups], BaseOptimizer], dp_pg: Any) -> None:
        self.zero_named_param_groups, self.dp_pg = groups, dp_pg
        self.param_name_to_dp_rank_offsets = {
            name: dict(self._parts(param.numel())) for group in groups for name, param in group["named_params"]
        }
        rank, offsets = dist.get_rank(dp_pg), self.param_name_to_dp_rank_offsets
        inner = builder(
            [
                {
                    **group,
                    "named_params": [
                        (name, param.detach().view(-1)[slice(*offsets[name][rank])].requires_grad_())
                        for name, param in group["named_params"]
                        if rank in offsets[name]
                    ],
                }
                for group in groups
            ]
        )
        super().__init__(inner, inner.id_to_name)

    def _parts(self, numel: int) -> Any:
        """The first ranks have ceil(numel / dp) elements, the last ones one less; an empty part is left out."""
        size, at = self.dp_pg.size(), 0
        for rank in range(size):
            stop = at + numel // size + (rank < numel % size)
            if at < stop:
                yield rank, (at, stop)
            at = stop
