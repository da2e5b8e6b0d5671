"""Checkpoints saved once and used by many tests."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Model, Run
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
            self._saved[key] = (folder, held)
        folder, held = self._saved[key]
        return folder, copy.deepcopy(held)
