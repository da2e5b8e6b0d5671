"""The part of the matrix that is run against every DeepSpeed release, and what one release does with it.

    python tests/versions/cells.py save FOLDER REPORT   save every cell under the release that is importable
    python tests/versions/cells.py load FOLDER REPORT   load what lies in FOLDER under it, compare with the truth

A separate program, because one process sees one DeepSpeed. The truth (what every rank held when it saved) lies
beside each checkpoint, so that one release can judge what another has saved.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))

import host_folders  # noqa: F401
from cases import Model, Run
from grid_cases import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One save and one load of the same model."""

    source: Run
    target: Run
    model: Model

    def __str__(self) -> str:
        return f"{_layout(self.source)} to {_layout(self.target)}, {self.model.optimizer}"


def _layout(run: Run) -> str:
    """Stage x ranks, and the options that are on: "2x3 round_robin_gradients"."""
    return " ".join([f"{run.stage}x{run.dp}", *run.options])


_ROUND_ROBIN = {"round_robin_gradients": True}
_ELASTIC = {"elastic_checkpoint": True}

CELLS = (
    Cell(source=Run(2, 2, options=_ROUND_ROBIN), target=Run(3, 3), model=Model(groups=2)),
    Cell(source=Run(1, 3), target=Run(2, 2, options=_ROUND_ROBIN), model=Model(optimizer="amsgrad", tied=True)),
    Cell(source=Run(3, 2), target=Run(1, 3), model=Model(groups=2, frozen=True)),
    Cell(source=Run("bf16", 2), target=Run(3, 1), model=Model(groups=2)),
    Cell(source=Run(0, 2), target=Run(2, 2), model=Model()),
    Cell(source=Run(1, 2, options=_ELASTIC), target=Run(2, 3), model=Model(optimizer="sgd", groups=2)),
    Cell(source=Run(1, 2, options=_ELASTIC), target=Run(2, 3), model=Model(groups=2)),
)


GRIDS = ((Grid("autotp", tp=2), Grid("autotp", dp=2)),)
"""Saved and loaded under another tensor-parallel size: before 0.19.6 patterns and shapes tell how it was cut."""


def _of_grid(action: str, worlds: Any, source: Grid, target: Grid, folder: Path) -> dict[str, str]:
    """One cell of a grid. A release that cannot build it, or tells nothing of it (0.18.5), did not run it."""
    grid = source if action == "save" else target
    if action == "load" and not folder.is_dir():
        return {"outcome": "not saved", "reason": ""}
    try:
        told = worlds[grid.ranks].run(f"grid_jobs.{action}", grid=grid, folder=str(folder))
        wrong = [rank["wrong"] for rank in told if rank and rank["wrong"]]
        assert not wrong, f"not as it was saved: {wrong[0]}"
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        return {"outcome": "not run" if action == "save" else "failed", "reason": _reason(error)}
    return {"outcome": "saved" if action == "save" else "passed", "reason": ""}


def _reason(error: BaseException) -> str:
    """The last line of a traceback, the innermost error of a worker's where there is one."""
    raised = [e for e in getattr(error, "errors", []) if e is not None]
    error = raised[0] if raised else error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _save(worlds: Any, cell: Cell, folder: Path) -> dict[str, str]:
    import torch

    try:
        held = worlds[cell.source.dp].run(
            "save", run=cell.source, model=cell.model, folder=str(folder / "saved"), more=2
        )
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        return {"outcome": "not run", "reason": _reason(error)}
    if _optimizer_lost(folder / "saved"):
        shutil.rmtree(folder)
        return {"outcome": "not run", "reason": "save_checkpoint wrote no optimizer state"}
    torch.save(held, folder / "truth.pt")
    return {"outcome": "saved", "reason": ""}


def _optimizer_lost(saved: Path) -> bool:
    """Whether DeepSpeed saved the weights alone.

    So it does with bf16 at stage 0, and at stage 1 with grad_accum_dtype fp32, where runtime/constants.py has
    `DDP_BFLOAT16 = "bf16"` (0.17.6, 0.18.4): the engine then builds FP16_UnfusedOptimizer in place of
    BF16_Optimizer (runtime/engine.py, `_configure_optimizer`), and `_save_checkpoint` takes it for a ZeRO one.
    """
    import torch

    if any(saved.glob("*/*_optim_states.pt")):
        return False
    return all(
        torch.load(path, weights_only=False)["optimizer"] is None for path in saved.glob("*/mp_rank_*_model_states.pt")
    )


def _load(worlds: Any, cell: Cell, folder: Path) -> dict[str, str]:
    """A load that fails where DeepSpeed cannot train the target's layout at all is not a failure of ours."""
    import pytest
    import torch
    from gathered import assert_same

    if not folder.is_dir():
        return {"outcome": "not saved", "reason": ""}
    saved = torch.load(folder / "truth.pt", weights_only=False)
    world = worlds[cell.target.dp]
    try:
        loaded = world.run("load", run=cell.target, model=cell.model, folder=str(folder / "saved"), more=2)
        if "elastic_checkpoint" in cell.source.options:  # that format holds no hyper-parameters
            for rank in (*saved, *loaded):
                rank["groups"] = []
        assert_same(saved, loaded)
        assert loaded[0]["later"] == pytest.approx(saved[0]["later"], rel=0.02), "the losses after the load differ"
    except Exception as error:
        own = _own_failure(worlds, cell, folder / "probe")
        return {"outcome": "not run", "reason": own} if own else {"outcome": "failed", "reason": _reason(error)}
    return {"outcome": "passed", "reason": ""}


def _own_failure(worlds: Any, cell: Cell, folder: Path) -> str:
    """How this release fails at training the target's layout without any checkpoint; empty where it does not."""
    try:
        worlds[cell.target.dp].run("save", run=cell.target, model=cell.model, folder=str(folder), more=2)
    except Exception as error:
        return _reason(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def _run(action: str, folder: Path) -> list[dict[str, str]]:
    from worlds import Worlds

    worlds, answers, act = Worlds(), [], {"save": _save, "load": _load}[action]
    cells: list[tuple[str, Callable[[Path], dict[str, str]]]]
    cells = [(str(cell), partial(act, worlds, cell)) for cell in CELLS]
    cells += [(f"{source} to {target}", partial(_of_grid, action, worlds, source, target)) for source, target in GRIDS]
    try:
        for number, (name, run) in enumerate(cells):
            answer = {"cell": name, **run(folder / str(number))}
            answer["reason"] = answer["reason"].replace(str(folder), "CHECKPOINT")
            answers.append(answer)
    finally:
        worlds.close()
    return answers


def main() -> None:
    action, folder, report = sys.argv[1:]
    import deepspeed  # a release that cannot be imported says so here, and not in every worker

    cells = _run(action, Path(folder))
    Path(report).write_text(json.dumps({"deepspeed": deepspeed.__version__, "cells": cells}), encoding="utf-8")


if __name__ == "__main__":
    main()
