"""Runs with tensor, pipeline and expert parallelism: plain values that travel to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Grid:
    """One side of a case.

    `kind` is "pipeline" (PipelineModule), "autotp" or "mpu" (tensor parallelism by DeepSpeed, or by an mpu), "llama"
    (DeepSpeed's, of a model of transformers), "moe" (deepspeed.moe) or "autoep" (DeepSpeed's own experts). `stage` is 0
    to 3 or "bf16opt" (stage 1 under BF16_Optimizer). `options` go to "zero_optimization", `config` beside it. `layers`
    names another list of layers, or way to tie them. All `dp` ranks share a sequence where `sp` is `dp`.
    """

    kind: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    stage: int | str = 1
    dtype: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layers: str = "usual"
    sp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        sizes = "".join(f"{axis}{n}" for axis in ("pp", "tp", "ep", "sp") if (n := getattr(self, axis)) > 1)
        return f"{self.kind}-{sizes}dp{self.dp}-z{self.stage}-{self.dtype}" + (
            "" if self.layers == "usual" else f"-{self.layers}"
        )


class Folders:
    """What each run saved; each made once."""

    def __init__(self, worlds: Any, base: Path) -> None:
        self._worlds, self._base = worlds, base
        self._made: dict[str, Path] = {}

    def __call__(self, grid: Grid) -> Path:
        name = str(grid)
        if name not in self._made:
            self._made[name] = self._base / name
            self._worlds[grid.ranks].run("grid_jobs.save", grid=grid, folder=str(self._made[name]))
        return self._made[name]


def forget_json(folder: Path) -> None:
    """As older DeepSpeed (0.16.4) saves it that is given the path of its JSON (the files are edited so: synthetic)."""
    for file in folder.glob("*.pt"):
        content = torch.load(file, weights_only=False)
        if "ds_config" in content:
            torch.save({**content, "ds_config": "ds_config.json"}, file)
