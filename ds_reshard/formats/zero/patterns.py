"""Patterns of parameters' names, as checkpoints have them: AutoTP has one or more for each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Patterns:
    """Patterns; what is none is left out. One that spells a name is looked up, not tried.

    Python keeps 512 of them compiled: with more, each would be compiled anew for each name.
    """

    def __init__(self, patterns: Iterable[object]) -> None:
        self._spelled: dict[str, list[str]] = {}
        self._others: list[re.Pattern[str]] = []
        for pattern in patterns:
            name = spelled(pattern) if isinstance(pattern, str) else None
            if isinstance(pattern, str) and name is not None:
                self._spelled.setdefault(name, []).append(pattern)
            elif isinstance(pattern, str):
                try:
                    self._others.append(re.compile(pattern))
                except re.error:
                    continue

    def of(self, name: str) -> list[str]:
        """The patterns that fit a name, or where none does those that fit its beginning, as DeepSpeed looks."""
        whole = [*self._spelled.get(name, ()), *(one.pattern for one in self._others if one.fullmatch(name))]
        return whole or [one.pattern for one in self._others if one.match(name)]


def spelled(pattern: str) -> str | None:
    """The one name that a pattern fits which is that name, escaped, from its beginning to its end; None of others."""
    name = re.sub(r"\\(\W)", r"\1", pattern[1:-1])
    return name if pattern == f"^{re.escape(name)}$" else None
