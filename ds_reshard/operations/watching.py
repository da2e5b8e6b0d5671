"""What people see of a load: a line of progress while it reads, and one event when it has ended; and how long it waits.

An event is one line of JSON, and spans of OpenTelemetry where the process has set that up itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.remote import release
from ds_reshard.errors import Fault, without_secrets, wrong_value
from ds_reshard.resume.report import last_report, say

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger("ds_reshard")
PROGRESS = ("auto", "off")
_LONGEST_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whether progress is shown, "auto" or "off", the file that events are appended to, and how long ranks wait."""

    progress: str = "auto"
    events: str | None = None
    timeout_s: int | None = None


_FOR_ALL: list[Asked] = []


def watching_faults(place: str, progress: object, events: object, timeout_s: object) -> Iterator[Fault]:
    if progress not in (None, *PROGRESS):
        yield wrong_value(f"{place}progress", "one of " + ", ".join(f'"{one}"' for one in PROGRESS), progress)
    if events is not None and not (isinstance(events, str) and events):
        yield wrong_value(f"{place}events", "the path of a file, to which a line is appended", events)
    whole = isinstance(timeout_s, int) and not isinstance(timeout_s, bool) and 1 <= timeout_s <= _LONGEST_S
    if timeout_s is not None and not whole:
        yield wrong_value(f"{place}timeout_s", f"a whole number of seconds from 1 to {_LONGEST_S}", timeout_s)


def ask(progress: str | None, events: str | None, timeout_s: int | None = None) -> None:
    """What is asked of all loads of this process from now on, where their own settings do not say."""
    _FOR_ALL[:] = [asked(progress, events, timeout_s)]


def asked(progress: str | None = None, events: str | None = None, timeout_s: int | None = None) -> Asked:
    """What is asked of one load: what its settings say, and else what is asked of all."""
    first = _FOR_ALL[0] if _FOR_ALL else Asked()
    return Asked(
        progress=progress or first.progress, events=events or first.events, timeout_s=timeout_s or first.timeout_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    name: str
    start_ns: int
    end_ns: int
    nbytes: int | None

    def to_json(self) -> dict[str, object]:
        told: dict[str, object] = {"name": self.name, "seconds": _seconds(self.start_ns, self.end_ns)}
        return told if self.nbytes is None else {**told, "bytes": self.nbytes}


@dataclass(slots=True, kw_only=True)
class Watched:
    """One load as its event tells it; `nbytes` of a phase are those that rank 0 read. Times are of time.time_ns()."""

    host: str
    checkpoint: str | None
    asked: Asked
    ranks: int
    start_ns: int
    phases: list[_Phase] = field(default_factory=list)

    @property
    def read(self) -> list[int]:
        """The bytes of each part of a load that is not the framework's own."""
        return [phase.nbytes or 0 for phase in self.phases if phase.name == "read"]

    def say(self) -> None:
        """A line of rank 0, that this load was not the framework's own: all else is seen only where INFO is logged."""
        from ds_reshard.operations.ranks import rank

        if self.read and not rank():
            nbytes, seconds = sum(self.read), _seconds(self.start_ns, time.time_ns())
            what = f"loaded {self.checkpoint} into this run's topology"
            say(f"{what}; rank 0 read {nbytes / 2**20:.1f} MiB in {seconds:.2f} s")

    def told(self, error: BaseException | None, report: object) -> dict[str, object]:
        read = self.read
        return {
            "event": "load",
            "time": datetime.fromtimestamp(self.start_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds"),
            "host": self.host,
            "checkpoint": without_secrets(str(self.checkpoint)),
            "ranks": self.ranks,
            "result": "loaded" if error is None else type(error).__name__,
            "error": None if error is None else without_secrets(str(error)),
            "loaded_by": "ds_reshard" if read else self.host,
            "seconds": _seconds(self.start_ns, time.time_ns()),
            "bytes": sum(read),
            "phases": [phase.to_json() for phase in self.phases],
            "report": report,
        }


_CURRENT: ContextVar[Watched | None] = ContextVar("ds_reshard_watched", default=None)


def under_way() -> bool:
    """Whether this is called inside a load of one of the hosts."""
    return _CURRENT.get() is not None


def in_force() -> Asked:
    """What is asked of the load that is going on, or would be of one that begins now."""
    current = _CURRENT.get()
    return current.asked if current is not None else asked()


@contextmanager
def watched(host: str, checkpoint: str | None, wanted: Asked | None = None) -> Iterator[Watched]:
    """Around one load of this rank: rank 0 tells its event when it ends, well or not. Ranks wait as long as is asked.

    A load inside another is part of it. Where `checkpoint` stays None there was nothing to load, and no event.
    """
    from ds_reshard.operations.ranks import collective_timeout, rank, world_size

    outer = _CURRENT.get()
    if outer is not None:
        yield outer
        return
    load = Watched(
        host=host, checkpoint=checkpoint, asked=wanted or asked(), ranks=world_size(), start_ns=time.time_ns()
    )
    token, before, error = _CURRENT.set(load), last_report(), None
    try:
        with collective_timeout(load.asked.timeout_s):
            yield load
    except BaseException as raised:
        error = raised
        raise
    finally:
        _CURRENT.reset(token)
        release()
        if rank() == 0 and load.checkpoint is not None:
            report = last_report()
            _tell(load, error, report.to_json() if report is not None and report is not before else None)


@contextmanager
def phase(name: str) -> Iterator[list[int]]:
    """A part of the load that is going on; what is appended to the list is the bytes that it read."""
    load, start_ns, nbytes = _CURRENT.get(), time.time_ns(), list[int]()
    try:
        yield nbytes
    finally:
        if load is not None:
            total = sum(nbytes) if nbytes else None
            load.phases.append(_Phase(name=name, start_ns=start_ns, end_ns=time.time_ns(), nbytes=total))


def _tell(load: Watched, error: BaseException | None, report: object) -> None:
    """The event, to whoever asked for it; what goes wrong with that is a warning, and never the load's end."""
    try:
        if load.asked.events is not None:
            _append(load.asked.events, json.dumps(load.told(error, report)))
        trace = sys.modules.get("opentelemetry.trace")
        if trace is not None:
            _spans(load, error, cast("Tracer", trace.get_tracer("ds_reshard")))
    except Exception as wrong:
        logger.warning("the event of this load could not be told: %s", wrong)


def _append(path: str, line: str) -> None:
    """One write, so that lines of several jobs do not mix; a named pipe that nobody reads is waited for by no load."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _spans(load: Watched, error: BaseException | None, tracer: Tracer) -> None:
    """A span of the load, and one in it for each phase; a tracer that nobody has set up makes none."""
    from opentelemetry.trace import StatusCode, set_span_in_context

    checkpoint = without_secrets(str(load.checkpoint))
    named: dict[str, str | int] = {"ds_reshard.host": load.host, "ds_reshard.checkpoint": checkpoint}
    named["ds_reshard.ranks"] = load.ranks
    whole = tracer.start_span("ds_reshard.load", start_time=load.start_ns, attributes=named)
    for part in load.phases:
        attributes = {} if part.nbytes is None else {"ds_reshard.bytes": part.nbytes}
        name, inside = f"ds_reshard.{part.name}", set_span_in_context(whole)
        span = tracer.start_span(name, inside, start_time=part.start_ns, attributes=attributes)
        span.end(part.end_ns)
    if error is not None:
        whole.set_status(StatusCode.ERROR, without_secrets(f"{type(error).__name__}: {error}"))
    whole.end()


def _seconds(start_ns: int, end_ns: int) -> float:
    return round((end_ns - start_ns) / 1e9, 6)
