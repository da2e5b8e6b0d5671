"""What the interpreter did while a piece of work ran, as its audit events tell."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ds_reshard.errors import ReshardError

ACTS = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "pickle.",
    "ctypes.",
    "shutil.",
    "marshal.",
    "code.",
    "function.",
    "object.",
    "mmap.",
    "tempfile.",
    "signal.",
    "sys.",
)
_heard: list[str] = []
_listening = False


def _listen(event: str, args: tuple[object, ...]) -> None:
    if _listening and event.startswith(ACTS):
        _heard.append(f"{event} {args!r}"[:200])


sys.addaudithook(_listen)  # cannot be removed, so one for all tests, deaf between them


def heard(work: Callable[[], object]) -> list[str]:
    """What the interpreter reported while `work` ran; ReshardErrors end it quietly."""
    global _listening
    _heard.clear()
    _listening = True
    try:
        work()
    except ReshardError:
        pass
    finally:
        _listening = False
    return list(_heard)
