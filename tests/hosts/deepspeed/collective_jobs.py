"""A load whose collectives are counted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from cases import Model, Run, ds_config
from jobs import build, contents

import ds_reshard
from benchmarks.collectives import counted


class Wide(torch.nn.Module):
    """As many layers as it is told, to see whether what ranks exchange grows with them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in range(count))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(values).float().square().mean() for layer in self.layers]).sum()


def _wide(run: Run, count: int) -> Any:
    import deepspeed

    torch.manual_seed(3)
    net = Wide(count)
    config = {**ds_config(run), "gradient_clipping": 0.0}
    optimizer = torch.optim.AdamW(net.parameters())
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)[0]


def save_wide(run: Run, count: int, folder: str) -> None:
    engine = _wide(run, count)
    engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(folder)


def load_wide(run: Run, count: int, folder: str) -> list[tuple[str, int]]:
    return _counting(_wide(run, count), folder)


def load_counted(run: Run, model: Model, folder: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Name and bytes of each of ds_reshard's own collectives in one load, and what the engine holds after it."""
    engine = build(run, model, seed=99)
    return _counting(engine, folder), contents(engine)


def load_differing(run: Run, model: Model, folder: str, who: int | None, differs: str) -> dict[str, Any]:
    """As `load_counted`, where one rank, or each, cannot read what rank 0 lists, reads another file, or fails after it.

    `before` is how many collectives each rank had made when it read.
    """
    from ds_reshard.errors import ReshardError
    from ds_reshard.hosts.deepspeed import find_checkpoint, load

    engine, before, error = build(run, model, seed=99), list[int](), ""
    original, own = find_checkpoint.read_heads, who in (None, torch.distributed.get_rank())
    with ExitStack() as stack:
        stack.enter_context(ds_reshard.install("deepspeed"))
        seen = stack.enter_context(counted())

        def read(*arguments: Any, **named: Any) -> Any:
            before.append(len(seen))
            if own and differs.startswith("unreadable"):
                raise OSError(5, "Input/output error")
            checkpoint, digests = original(*arguments, **named)
            return checkpoint, dict.fromkeys(digests, b"another") if own and differs == "another file" else digests

        stack.enter_context(mock.patch.object(find_checkpoint, "read_heads", read))
        failing = {
            "unreadable, sizes too": (find_checkpoint, "saved_sizes"),
            "says nothing": (load.DeepSpeedLoad, "readiness"),
        }
        if own and differs in failing:
            fails = mock.Mock(side_effect=RuntimeError("out of order"))
            stack.enter_context(mock.patch.object(*failing[differs], fails))
        try:
            engine.load_checkpoint(folder)
        except ReshardError as caught:
            error = f"{type(caught).__name__}: {caught}"
    collectives = [(one.name, one.nbytes) for one in seen]
    return {"collectives": collectives, "before": before, "error": error, "held": contents(engine)}


def load_grid(grid: Any, folder: str) -> list[tuple[str, int]]:
    import grid_jobs

    return grid_jobs.alone(lambda: _counting(grid_jobs.build(grid), folder))()  # type: ignore[no-any-return]


def _counting(engine: Any, folder: str) -> list[tuple[str, int]]:
    with ds_reshard.install("deepspeed"), counted() as seen:
        engine.load_checkpoint(folder)
    return [(one.name, one.nbytes) for one in seen]
