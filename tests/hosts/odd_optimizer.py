"""An optimizer of a script's own, whose states are not all cut as parameters are."""

from __future__ import annotations

from typing import Any

import torch


class Cast(torch.optim.SGD):
    """Momentum in codes of 8 bits, with a scale per block (synthetic), which torch casts when it loads them."""

    def step(self, closure: Any = None) -> Any:
        answer = super().step(closure)
        for parameter, state in self.state.items():
            scale = parameter.detach().abs().amax().clamp(min=1e-6)
            state["state1"] = (parameter.detach() / scale * 127 + 128).to(torch.uint8)
            state["absmax1"] = scale.expand(-(-parameter.numel() // 8)).clone()
        return answer


class Coded(Cast):
    """The same, which loads its own, as bitsandbytes' optimizers do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        types = {number: {k: v.dtype for k, v in one.items()} for number, one in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, kinds in types.items():
            state = self.state[parameters[number]]
            state.update({kind: state[kind].to(dtype) for kind, dtype in kinds.items()})


class Odd(torch.optim.AdamW):
    """AdamW that keeps one more state: a scale per block, one named like a weight, a mask, a list, one value a rank or
    group, or one of its own, as MADGRAD does or in its state dict."""

    def __init__(self, groups: Any, kind: str) -> None:
        super().__init__(groups)
        self.kind = kind

    def step(self, closure: Any = None) -> Any:
        answer = super().step(closure)
        of_rank = float(torch.distributed.get_rank() + 1)
        self.param_groups[0].update({"d_numerator": of_rank} if self.kind == "group" else {})
        self.state.update({"k": torch.tensor([3])} if self.kind == "counted" else {})
        kinds = {"blocks": "absmax", "weight": "weight", "per_rank": "rms", "mask": "mask", "listed": "listed"}
        for parameter, state in self.state.items() if self.kind in kinds else ():
            state[kinds[self.kind]] = {
                "blocks": lambda p: p.detach().abs().flatten()[: p.numel() // 8 * 8].view(p.numel() // 8, 8).amax(1),
                "weight": lambda p: p.detach().clone(),
                "per_rank": lambda p: torch.tensor(of_rank),
                "mask": lambda p: p.detach() > 0,
                "listed": lambda p: [0.5],
            }[self.kind](parameter)
        return answer

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"horizon": 3} if self.kind == "own" else {})}
