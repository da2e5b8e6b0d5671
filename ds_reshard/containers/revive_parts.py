"""What a record was made of, once its parts are live objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Parts:
    """The revived arguments, state and items of one ObjectRecord."""

    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    items: list[object] = field(default_factory=list)
    pairs: list[tuple[object, object]] = field(default_factory=list)

    def exactly(self, count: int) -> None:
        """Raise ValueError unless there are `count` arguments, none by keyword."""
        if self.kwargs or len(self.args) != count:
            raise ValueError(f"expected {count} arguments, found {len(self.args) + len(self.kwargs)}")

    def arg(self, index: int, kind: type[T]) -> T:
        """One argument, when it is exactly of that type; ValueError when it is not."""
        return exact(self.args[index], kind)

    def attributes(self) -> dict[str, object]:
        """The state, when it is a dict of attributes (an absent one has none); ValueError when it is not."""
        if self.state is None:
            return {}
        if not isinstance(self.state, dict) or not all(isinstance(name, str) for name in self.state):
            raise ValueError(f"the state is a {type(self.state).__name__}, not attributes")
        return self.state


def exact(value: object, kind: type[T]) -> T:
    """The value, when it is exactly of that type (True is no int); ValueError when it is not."""
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
