"""Loads that are watched, in the rank workers: spans in memory, progress of reads that are made slow."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import jobs
import torch.distributed as dist


def load_with_spans(**given: Any) -> dict[str, Any]:
    """The spans of a load, as the SDK of OpenTelemetry has collected them, after it was set up as a script does."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = trace.get_tracer
    trace.get_tracer = lambda name: provider.get_tracer(name)  # a process sets its provider once: this one has none
    try:
        refused = "damaged" in given and given.pop("damaged")
        told = jobs.load_refused(**given) if refused else jobs.load(**given)
    finally:
        trace.get_tracer = before
    spans = exporter.get_finished_spans()
    return {
        "error": told.get("error"),
        "spans": [
            {
                "name": span.name,
                "inside": span.parent is not None and span.parent.span_id,
                "id": span.context.span_id,
                "attributes": dict(span.attributes or {}),
                "status": span.status.status_code.name,
                "start": span.start_time,
                "end": span.end_time,
            }
            for span in spans
        ],
    }


class Terminal(io.StringIO):
    """What is written to a terminal, or to a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@contextlib.contextmanager
def _slow(seconds: float) -> Iterator[None]:
    from ds_reshard.execution import threads
    from ds_reshard.operations import progress

    read, times = threads.read_into, (progress.QUIET_S, progress.LOG_S)

    def slowly(*given: Any) -> int:
        time.sleep(seconds)
        return read(*given)

    threads.read_into = slowly
    progress.QUIET_S, progress.LOG_S = 0.1, 0.5
    try:
        yield
    finally:
        threads.read_into = read
        progress.QUIET_S, progress.LOG_S = times


def load_slowly(terminal: bool, lost: bool = False, **given: Any) -> dict[str, Any]:
    """What rank 0 shows of a load whose every read takes so long; with `lost`, the store fails under it."""
    from ds_reshard.operations import progress

    class Lost:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("the store's server has gone")

    store = progress._store
    progress._store = (lambda: Lost()) if lost else store
    shown = Terminal(terminal)
    try:
        with contextlib.redirect_stderr(shown), _no_logging_set_up(), _slow(0.15):
            held = jobs.load(**given)
    finally:
        progress._store = store
    threads = [thread.name for thread in threading.enumerate()]
    dist.barrier()
    return {"shown": shown.getvalue(), "held": held, "threads": threads}


def resume_nanotron(file: str, **given: Any) -> str:
    """What is shown while the stand-in's trainer resumes and events are asked for."""
    import nanotron_jobs

    from ds_reshard.operations import watching

    watching.ask(None, file)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as shown, _no_logging_set_up():
            nanotron_jobs.resume(**given)
    finally:
        watching._FOR_ALL.clear()
    return shown.getvalue()


@contextlib.contextmanager
def _no_logging_set_up() -> Iterator[None]:
    """As in a fresh process: what ran in this one before has set levels and handlers."""
    root, own = logging.getLogger(), logging.getLogger("ds_reshard")
    kept = root.handlers[:], own.handlers[:], own.level
    root.handlers[:], own.handlers[:] = [], []
    own.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers[:], own.handlers[:] = kept[:2]
        own.setLevel(kept[2])
