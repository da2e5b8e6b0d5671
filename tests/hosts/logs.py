"""What a worker process is told by the package: what it logs, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


def refusal(work: Callable[[], object]) -> str:
    """The class and the text of the error of ours that `work` raises; empty where it raises none."""
    import ds_reshard

    try:
        work()
    except ds_reshard.ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the package logs meanwhile; other jobs of this process may have silenced it."""
    told: list[str] = []
    listener, logger = logging.Handler(), logging.getLogger("ds_reshard")
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(level)
    try:
        yield told
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)


@contextmanager
def first_update() -> Iterator[list[str]]:
    """The lines that say what the first update after a load uses, for a load that was asked for something."""
    told: list[str] = []
    try:
        with heard(logging.INFO) as lines:
            yield told
    finally:
        told += [line for line in lines if "the first update uses" in line]


def uses(line: str, rates: Iterable[float]) -> bool:
    """Whether such a line says these learning rates, of each param group."""
    shown = [f"{rate:.6g}" for rate in rates]
    alike = shown[0] if len(set(shown)) == 1 else f"({', '.join(shown)})"
    return f"the first update uses lr {alike}," in line
