"""Patterns of parameter names, as checkpoints have them: AutoTP saves one or more for each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Patterns:
    """Compiled patterns, without invalid ones. A pattern that spells out one name is looked up in a dict.

    Python's `re` keeps 512 compiled patterns: with more, each would be compiled again for each name.
    """

    def __init__(self, patterns: Iterable[object]) -> None:
        self._spelled: dict[str, list[str]] = {}
        self._others: list[re.Pattern[str]] = []
        for pattern in patterns:
            name = literal_name(pattern) if isinstance(pattern, str) else None
            if isinstance(pattern, str) and name is not None:
                self._spelled.setdefault(name, []).append(pattern)
            elif isinstance(pattern, str):
                try:
                    self._others.append(re.compile(pattern))
                except re.error:
                    continue

    def matching(self, name: str) -> list[str]:
        """Return the patterns that match the whole name, or else those that match its beginning, as DeepSpeed does."""
        full = [*self._spelled.get(name, ()), *(p.pattern for p in self._others if p.fullmatch(name))]
        return full or [p.pattern for p in self._others if p.match(name)]


def literal_name(pattern: str) -> str | None:
    """Return the name if the pattern is one name, escaped, between ^ and $; None for other patterns."""
    name = re.sub(r"\\(\W)", r"\1", pattern[1:-1])
    return name if pattern == f"^{re.escape(name)}$" else None
