"""A context variable that has another value while a block runs, in this thread only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def context_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside the block, and restore its former value afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
