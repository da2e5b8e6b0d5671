"""The floor under a load: a bare loop of preadv, and the executor on the same bytes."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.memory import Counters

if TYPE_CHECKING:
    from ds_reshard.execution.buffers import TensorTarget
    from ds_reshard.execution.threads import ThreadExecutor
    from ds_reshard.planning.plan import Plan


@dataclass(slots=True, kw_only=True)
class Execution:
    """What the load gave its executor, and how long that took."""

    executor: ThreadExecutor
    plan: Plan
    targets: Mapping[str, TensorTarget]
    seconds: float


def watch_executor() -> list[Execution]:
    """From now on every execution of this process is timed and added to the list."""
    from ds_reshard.execution import threads

    seen: list[Execution] = []
    original = threads.ThreadExecutor.execute

    def execute(self: ThreadExecutor, plan: Plan, targets: Mapping[str, TensorTarget]) -> object:
        started = time.perf_counter()
        outcome = original(self, plan, targets)
        seen.append(Execution(executor=self, plan=plan, targets=targets, seconds=time.perf_counter() - started))
        return outcome

    threads.ThreadExecutor.execute = execute  # type: ignore[method-assign, assignment]
    return seen


def watch_ending() -> list[float]:
    """From now on the seconds of each part of a load that follows its bytes: DeepSpeed takes over what was read.

    That is what its own load does as well: masters, weights from them, and at stage 3 its gathers.
    """
    from ds_reshard.hosts.deepspeed import load, move

    seen: list[float] = []

    def timed(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            started = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                seen.append(time.perf_counter() - started)

        return call

    for module, name in (
        (move, "_settle_model"),
        (move, "_adopt"),
        (move, "_weights_from_masters"),
        (move, "_masters_from_weights"),
        (load, "event"),
    ):
        setattr(module, name, timed(getattr(module, name)))
    return seen


def is_optimizer(buffer: str) -> bool:
    """Whether a buffer of a plan is part of the optimizer: masters and states, not weights."""
    return not buffer.startswith(("module/", "weight/", "frozen/"))


def optimizer_part(plan: Plan) -> Plan:
    """The same plan without the weights."""
    return dataclasses.replace(
        plan,
        copies=tuple(copy for copy in plan.copies if is_optimizer(copy.buffer)),
        fills=tuple(fill for fill in plan.fills if is_optimizer(fill.buffer)),
    )


def compare(
    execution: Execution, *, touched: bool, executor_first: bool, barrier: Callable[[], None]
) -> dict[str, object]:
    """Move the optimizer's bytes once more, by the executor and by a bare loop; seconds and page faults of each.

    Both write masters where the load wrote them and states into memory made as the load makes it, or, when
    `touched`, written to before. Collective.
    """
    plan = optimizer_part(execution.plan)
    contestants: dict[str, Callable[[Mapping[str, TensorTarget]], object]] = {
        "executor": lambda targets: execution.executor.execute(plan, targets),
        "preadv": lambda targets: bare_preadv(plan, targets),
    }
    taken: dict[str, object] = {"optimizer_nbytes": plan.nbytes}
    for name in contestants if executor_first else reversed(contestants):
        targets = _like_the_load(execution.targets, touched=touched)
        barrier()
        before, started = Counters.now(), time.perf_counter()
        contestants[name](targets)
        taken[f"{name}_s"] = time.perf_counter() - started
        taken[f"{name}_minor_faults"] = Counters.now().since(before).minor_faults
        del targets
    return taken


def _like_the_load(targets: Mapping[str, TensorTarget], *, touched: bool) -> dict[str, TensorTarget]:
    import torch

    from ds_reshard.execution.buffers import TensorTarget

    made = {name: target for name, target in targets.items() if is_optimizer(name)}
    for name, target in made.items():
        if not name.startswith("fp32/"):
            tensor = torch.empty(target.tensor.numel(), dtype=target.tensor.dtype)
            made[name] = TensorTarget(tensor.fill_(1) if touched else tensor, untouched=not touched)
    return made


def bare_preadv(plan: Plan, targets: Mapping[str, TensorTarget]) -> None:
    """Read every byte of the plan's copies to its place: one thread, each file opened once, one call a copy."""
    opened: dict[str, int] = {}
    for copy in plan.copies:
        path = copy.record.path
        if path not in opened:
            opened[path] = os.open(path, os.O_RDONLY)
        view = targets[copy.buffer].view(copy.element_offset, copy.numel, copy.dtype)
        assert view is not None, "the benchmark's plan copies without a cast"
        at = 0
        while at < len(view):
            at += os.preadv(opened[path], [view[at:]], copy.byte_offset + at)
    for descriptor in opened.values():
        os.close(descriptor)
