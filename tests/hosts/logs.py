"""What the package logs in a worker process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
