"""The resume report: for every value of a load what the checkpoint had, what this run has, which was used and why."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_reshard.errors import ConfigError, Fault, WriteFailed
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.policy_sources import FLAGS

MASTERS, MOMENTS = "fp32 masters", "moments"
ANEW = {MASTERS: "from weights", MOMENTS: "anew"}
"""What a load without them leaves, by the rows of the report."""
FROM_CHECKPOINT = "checkpoint"

_LOG = logging.getLogger("ds_reshard")
_HOSTS = {"deepspeed": "DeepSpeed", "megatron": "Megatron-LM"}
_LAST: list[ResumeReport] = []


def say(text: str) -> None:
    """Log a line at level INFO; where that is not shown, and nobody has set this logger's level, on stderr."""
    if _LOG.isEnabledFor(logging.INFO) and _LOG.hasHandlers():
        _LOG.info("%s", text)
    elif _LOG.level == logging.NOTSET and logging.lastResort is not None and not getattr(sys.stderr, "closed", False):
        record = _LOG.makeRecord(_LOG.name, logging.INFO, __file__, 0, "ds_reshard: %s", (text,), None)
        logging.lastResort.handle(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value: `because` is the flag or JSON key that decided, or "host" where the framework did.

    Values are plain (numbers, strings, booleans, lists); None means that there is no such value.
    """

    name: str
    checkpoint: object
    this_run: object
    used: object
    because: str

    @classmethod
    def of(cls, name: str, checkpoint: object, this_run: object, used: object, because: str) -> Row:
        """A row, its values in the order of the report's columns."""
        return cls(name=name, checkpoint=checkpoint, this_run=this_run, used=used, because=because)


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

    def shown(self) -> Iterator[tuple[str, ...]]:
        """Each row as people read it."""
        for row in self.rows:
            why = _HOSTS.get(self.host, self.host) if row.because == "host" else row.because
            yield (row.name, _shown(row.checkpoint), _shown(row.this_run), _shown(row.used), why)

    def __str__(self) -> str:
        lines = [("", "checkpoint", "this run", "used", "because of"), *self.shown()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([f"Resumed from {self.checkpoint}", *rows, *self.warnings])


_OF_GROUP = re.compile(r"group \d+:? (.+)")
_ALWAYS = ("lr", "schedule position", "position", "position (samples)")


def say_applied(report: ResumeReport, policy: ResumePolicy, *, reserve: str = "") -> None:
    """Say in one line, for people, what a policy asked of a load, and what the first update uses by the report's rows.

    Rank 0 calls this; nothing is said of a default policy. `reserve` is added: what may still change the values.
    """
    if policy.is_default:
        return
    asked = [spelled for key, spelled in policy.asked.items() if key != "report"]
    values: dict[str, list[str]] = {}
    for row in report.rows:
        of_group = _OF_GROUP.fullmatch(row.name)
        name = of_group[1] if of_group else row.name
        if row.used is not None and (name in _ALWAYS or row.because in asked):
            values.setdefault(name, []).append(_shown(row.used))
    ordered = sorted(values, key=lambda name: _ALWAYS.index(name) if name in _ALWAYS else len(_ALWAYS))
    told = ", ".join(f"{name} {_alike(values[name])}" for name in ordered)
    uses = f": the first update uses {told}{reserve}" if told else ""
    say(f"{', '.join(asked) or 'resume policy'} applied to {report.checkpoint}{uses}")


def _alike(shown: Sequence[str]) -> str:
    """The values of all param groups, as one where they are alike."""
    return shown[0] if len(set(shown)) == 1 else f"({', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''})"


def publish(report: ResumeReport, *, path: str | None = None) -> None:
    """Make this the last report, and write it to `path` as JSON, whole or not at all; a link stays one.

    Raises WriteFailed.
    """
    _LAST[:] = [report]
    if path is None:
        return
    try:
        target = os.path.realpath(path)
        beside = os.path.join(os.path.dirname(target), f"{os.urandom(8).hex()}.part")
        try:
            with open(beside, "x", encoding="utf-8") as file:
                json.dump(report.to_json(), file, indent=2)
                file.write("\n")
            os.replace(beside, target)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        what = f"the resume report cannot be written: {error.strerror or error}"
        raise WriteFailed.of(path, what, mend="the load itself is done: free space there for the next one") from error


def unwritable(path: str | None) -> list[Fault]:
    """What is wrong with the place of a report: asked for on the rank that writes it, before anything is loaded."""
    if path is None:
        return []
    what = "is a folder" if os.path.isdir(path) else "is a device or a pipe, in whose place a file would be put"
    if not os.path.exists(path) or os.path.isfile(path):
        writable = os.access(os.path.dirname(os.path.realpath(path)), os.W_OK | os.X_OK)
        what = "" if writable else "cannot be written: its folder is not there, or is read-only"
    mend = "name a file in a folder that is there"
    return [ConfigError.fault(f"--resume-report {path}", what, mend=mend)] if what else []


def publish_or_log(report: ResumeReport, path: str | None) -> None:
    """The same where other ranks go on: a report that cannot be written is an error in the log."""
    try:
        publish(report, path=path)
    except WriteFailed as error:
        _LOG.error("%s", error)


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


EQUAL_TO_WEIGHTS = "equal to the weights"
"""Of fp32 masters of 16-bit weights that are no finer than these, also where a load was to bring finer ones."""

_SPELLED = {(flag.key, flag.value): flag.names[0] for flag in FLAGS}


def because(policy: ResumePolicy, what: str, name: str = "") -> str:
    """Which flag or key decided about iteration, position, schedule, optimizer, dataloader, rng or a hyper-parameter.

    As it was given where that is known, else the flag.
    """

    def of(key: str) -> str:
        return policy.asked.get(key) or _SPELLED.get((key, getattr(policy, key)), "host")

    if policy.takes(name or what):
        return policy.asked.get("hyperparameters", "--override-optim-hparams")
    if policy.finetune:
        return of("finetune")
    if what in ("optimizer", "iteration", "dataloader", "rng"):
        return of(what)
    if what == "position" and not policy.keeps_position and policy.scheduler != "reset":
        return of("iteration" if policy.iteration == "reset" else "optimizer")
    if what in ("position", "schedule"):
        return of("scheduler" if policy.scheduler != "host" or policy.loads_masters else "optimizer")
    return "host" if policy.loads_masters else of("optimizer")


def rate_warning(group: int, mine: object, used: object, *, when: str = "") -> str:
    """A warning where the learning rate that a run was given is not the one that it goes on with."""
    return (
        f"param group {group}: learning rate {_shown(mine)} of this run is not used{when}, but the checkpoint's "
        f"{_shown(used)}; "
        'to use it: {"ds_reshard": {"resume": {"scheduler": "override"}}} in the DeepSpeed JSON, or '
        "--override-opt-param-scheduler"
    )


def batch_size_warning(saved: int | None, now: int) -> tuple[str, ...]:
    """A warning where the global batch size (samples for each update) is not the saved run's."""
    if saved is None or saved == now:
        return ()
    return (
        f"global batch size is {now}, and was {saved}: each update now sees {now / saved:.3g} times the samples; keep "
        f"it (micro batch x accumulation x dp = {saved}), or change learning rate and schedule to suit",
    )
