"""The resume report: for every value of a load what the checkpoint had, what this run has, which was used and why."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.resume.policy import ResumePolicy

_WIDTH = 160
_LAST: list[ResumeReport] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value: `because` is the flag or key that decided, or "host" where the framework did.

    Values are plain (numbers, strings, booleans, lists); None means that there is no such value.
    """

    name: str
    checkpoint: object
    this_run: object
    used: object
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What one load did. `warnings` are what a user should look at, a changed global batch size for one."""

    host: str
    checkpoint: str
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_json(self) -> dict[str, object]:
        return {
            "host": self.host,
            "checkpoint": self.checkpoint,
            "rows": [{name: plain(value) for name, value in asdict(row).items()} for row in self.rows],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        table = Table(title=f"Resumed from {self.checkpoint}", title_justify="left")
        for heading in ("", "checkpoint", "this run", "used", "because of"):
            table.add_column(heading, overflow="fold")
        for row in self.rows:
            changed = row.checkpoint is not None and row.used is not None and _shown(row.used) != _shown(row.checkpoint)
            shown = [Text(_shown(value)) for value in (row.checkpoint, row.this_run, row.used)]
            if changed:
                shown[2].stylize("bold")
            table.add_row(Text(row.name), *shown, Text(row.because))
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(table)
        return "\n".join([*(line.rstrip() for line in text.getvalue().splitlines()), *self.warnings])


def publish(report: ResumeReport, *, path: str | None = None) -> None:
    """Make this the last report, and write it to `path` as JSON, whole or not at all."""
    _LAST[:] = [report]
    if path is None:
        return
    target = Path(path)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(report.to_json(), file, indent=2)
            file.write("\n")
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def last_report() -> ResumeReport | None:
    """The report of the last load in this process (rank 0 has one), or None before any."""
    return _LAST[0] if _LAST else None


def plain(value: object) -> object:
    """A value as JSON has it; what JSON has not is its text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_shown(item) for item in value) + ")"
    return str(value)


_SCHEDULER = {
    "host": "host",
    "override": "--override-opt-param-scheduler",
    "checkpoint": "--use-checkpoint-opt-param-scheduler",
    "strict": "--strict-opt-param-scheduler",
    "reset": "--no-load-lr-state",
}


def because(policy: ResumePolicy, what: str, name: str = "") -> str:
    """Which flag decided about `what`: iteration, position, schedule, optimizer, dataloader, or a hyper-parameter."""
    if policy.takes(name or what):
        return "--override-optim-hparams"
    if policy.finetune:
        return "--finetune"
    skipped = {"skip": "--no-load-optim", "masters": "--load-masters-only"}.get(policy.optimizer, "host")
    if what == "optimizer":
        return skipped
    if what == "iteration":
        return "--reset-iteration" if policy.iteration == "reset" else "host"
    if what == "dataloader":
        return "--reset-dataloader" if policy.dataloader == "reset" else "host"
    if what == "position" and not policy.keeps_position and policy.scheduler != "reset":
        return "--reset-iteration" if policy.iteration == "reset" else skipped
    if what in ("position", "schedule"):
        return _SCHEDULER[policy.scheduler] if policy.scheduler != "host" or policy.loads_masters else skipped
    return "host" if policy.loads_masters else skipped


def batch_size_warning(saved: int | None, now: int) -> tuple[str, ...]:
    """A warning where the global batch size (samples for each update) is not the saved run's."""
    if saved is None or saved == now:
        return ()
    return (
        f"global batch size is {now}, and was {saved}: each update now sees {now / saved:.3g} times the samples; keep "
        f"it (micro batch x accumulation x dp = {saved}), or change learning rate and schedule to suit",
    )
