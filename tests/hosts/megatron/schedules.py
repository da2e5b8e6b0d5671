"""What Megatron makes of a command line: its own parser, its own scheduler, no model."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from small_gpt import MODEL


def schedules(lines: list[str], positions: list[int]) -> dict[str, Any]:
    """For each command line the learning rate and the weight decay at each position, and the state that is saved."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training import global_vars
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.training import get_optimizer_param_scheduler

    told = []
    for line in lines:
        sys.argv = ["schedules.py", *MODEL.split(), *line.split()]
        global_vars.destroy_global_vars()
        destroy_num_microbatches_calculator()
        args = parse_and_validate_args()
        holder = SimpleNamespace(param_groups=[{"max_lr": args.lr, "min_lr": args.min_lr}])
        scheduler = get_optimizer_param_scheduler(holder)
        used = []
        for position in positions:
            scheduler.num_steps = 0
            scheduler.step(position)
            used.append((holder.param_groups[0]["lr"], holder.param_groups[0]["weight_decay"]))
        told.append({"used": used, "state": {**scheduler.state_dict(), "num_steps": 0}})
    return {"told": told}
