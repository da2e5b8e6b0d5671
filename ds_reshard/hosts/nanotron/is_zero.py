"""`is_zero` of the scheduler's functions: derived from the optimizer, compared with what was passed, one writer a file.

The trainer passes the stage's number, which is not `True`: every data-parallel rank of ZeRO-1 then writes the one file
without a data-parallel rank in its name (`lr_scheduler_filename`, serialize/optimizer.py, commit 2411b02).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import cast

from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.hosts.nanotron.current import recall, remember
from ds_reshard.hosts.nanotron.live import Optimizer, ParallelContext, is_zero
from ds_reshard.operations.ranks import agree, gather

_NEEDED = ("lr_scheduler", "parallel_context", "root_folder")


def save(arguments: Mapping[str, object], original: Callable[[], object]) -> object:
    """nanotron's `save`, once configuration and optimizer agree and each file has one writer. Collective, as `save`."""
    optimizer = cast(Optimizer, arguments["optimizer"])
    context = cast(ParallelContext, arguments["parallel_context"])
    remember(optimizer)
    stage = getattr(getattr(arguments["config"], "optimizer", None), "zero_stage", None)
    zero = is_zero(optimizer)
    faults = check_is_zero(stage, zero, where="optimizer.zero_stage")
    writes = [_file(arguments, context)] if arguments.get("should_save_lr_scheduler", True) and _writes(context) else []
    by_file: dict[str, list[int]] = {}
    for rank, files in enumerate(gather(writes, context.world_pg)):
        for file in files:
            by_file.setdefault(file, []).append(rank)
    faults += [_several(file, ranks) for file, ranks in by_file.items() if len(ranks) > 1]
    agree(faults, context.world_pg, subject=f"saving {arguments['root_folder']}")
    return original()


def save_lr_scheduler(arguments: Mapping[str, object], original: Callable[..., object]) -> object:
    """Save once for all data-parallel ranks, who have one schedule, under the name that nanotron's trainer asks for.

    `is_zero` may be left out where the optimizer is known. Raises ConfigError for missing or shifted arguments.
    """
    scheduler = arguments.get("lr_scheduler")
    memory = recall(getattr(scheduler, "optimizer", None))
    outer = cast("Optimizer | None", memory.outer if memory is not None else None)
    derived = is_zero(outer) if outer is not None else None
    raise_faults(missing(arguments, derived), subject="save_lr_scheduler")
    raise_faults(check_is_zero(arguments.get("is_zero"), derived), subject="save_lr_scheduler")
    return original(is_zero=False, **{name: arguments[name] for name in _NEEDED})


def missing(arguments: Mapping[str, object], derived: bool | None) -> list[Fault]:
    """A fault for each argument that was not passed; `is_zero` may be, where it is derived."""
    needed = (*_NEEDED, *(("is_zero",) if derived is None else ()))
    return [
        ConfigError.fault(
            name,
            "is not passed",
            ", ".join(needed),
            "none",
            mend="name every argument: f(lr_scheduler=..., is_zero=..., parallel_context=..., root_folder=...)",
        )
        for name in needed
        if name not in arguments
    ]


def check_is_zero(given: object, derived: bool | None, *, where: str = "is_zero") -> list[Fault]:
    """A fault where what was passed is no switch or stage, or not what the optimizer is."""
    if given is None and derived is not None:
        return []
    if not isinstance(given, int):  # a bool is one
        return [
            ConfigError.fault(
                where,
                "is neither a switch nor a ZeRO stage: an argument was left out before it",
                "True, False or the stage",
                type(given).__name__,
                mend="name every argument: f(lr_scheduler=..., is_zero=..., parallel_context=..., root_folder=...)",
            )
        ]
    if derived is not None and bool(given) != derived:
        kind = "ZeroDistributedOptimizer" if derived else "an optimizer that is not cut over data-parallel ranks"
        return [
            ConfigError.fault(
                where,
                "is not what the optimizer is",
                f"{'1' if derived else '0'}, for {kind}",
                str(given),
                mend=f"optimizer.zero_stage: {int(derived)}",
            )
        ]
    return []


def _writes(context: ParallelContext) -> bool:
    import torch.distributed as dist

    return dist.get_rank(context.dp_cp_pg) == 0


def _file(arguments: Mapping[str, object], context: ParallelContext) -> str:
    from nanotron.serialize.optimizer import lr_scheduler_filename

    return os.path.join(str(arguments["root_folder"]), "lr_scheduler", lr_scheduler_filename(context, False))


def _several(file: str, ranks: list[int]) -> Fault:
    return UnsupportedLayout.fault(
        file,
        "would be written by several ranks at the same time",
        "one writer",
        f"ranks {', '.join(map(str, ranks))}",
        mend="give each rank a place of its own in the parallel context",
    )
