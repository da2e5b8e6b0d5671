"""A value that holds while a block runs, in this thread alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def context_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, the variable has this value; afterwards the one that it had."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
