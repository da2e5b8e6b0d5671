"""Checkpoints saved once and used by many tests."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Model, Run
from gathered import assert_moments, gathered
from worlds import Worlds


class Saves:
    """Calling it gives a checkpoint folder of that run and model, and what each rank held when it saved."""

    def __init__(self, worlds: Worlds, folder: Path) -> None:
        self._worlds = worlds
        self._folder = folder
        self._saved: dict[str, tuple[Path, Any]] = {}

    def __call__(self, run: Run, model: Model) -> tuple[Path, Any]:
        key = json.dumps([asdict(run), asdict(model)], sort_keys=True)
        if key not in self._saved:
            folder = self._folder / f"save{len(self._saved)}"
            held = self._worlds[run.dp].run("save", run=run, model=model, folder=str(folder), more=2)
            moments = gathered(held)
            if any(kind == "exp_avg" for _, kind in moments):
                assert_moments(moments)
            self._saved[key] = (folder, held)
        folder, held = self._saved[key]
        return folder, copy.deepcopy(held)


UNIVERSAL = {"checkpoint": {"load_universal": True}}


class Universals:
    """The same of universal checkpoints, which DeepSpeed's own converter makes of what `saves` saved."""

    def __init__(self, worlds: Worlds, saves: Saves, folder: Path) -> None:
        self._worlds = worlds
        self._saves = saves
        self._folder = folder
        self._made: dict[Path, Path] = {}

    def __call__(self, run: Run, model: Model) -> tuple[Path, Any]:
        saved, held = self._saves(run, model)
        if saved not in self._made:
            made = self._folder / saved.name
            shutil.copytree(saved, made)
            tag = (saved / "latest").read_text()
            self._worlds[1].run("unowned_jobs.universal", folder=str(made), tag=tag)
            shutil.rmtree(made / tag)
            (made / "latest").unlink()
            self._made[saved] = made
        return self._made[saved], held
