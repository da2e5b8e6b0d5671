"""Seams: functions of ours that take the calls of a host's functions, each call with all that it was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ds_reshard.hooks.declare import Function


class Call:
    """One call of a patched function, as a seam gets it.

    `passed` are its arguments by their names in the function's signature, `self` with them; `arguments` are the same
    with the defaults, and `call[name]` is one of these. `call()` runs the function as it was called, `call(name=value)`
    with other arguments, or more.
    """

    __slots__ = ("_bound", "_function", "_given", "arguments", "passed")

    def __init__(
        self, function: Function, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._function = function
        self._given = args, kwargs
        self._bound = signature.bind_partial(*args, **kwargs)  # what is missing the function itself tells
        self.passed: Mapping[str, Any] = dict(self._bound.arguments)
        self._bound.apply_defaults()
        self.arguments: Mapping[str, Any] = dict(self._bound.arguments)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.arguments[name]
        except KeyError:
            raise TypeError(f"{self._function.__qualname__}() missing argument {name!r}") from None

    def __call__(self, /, **changed: object) -> Any:
        if not changed:
            args, kwargs = self._given
            return self._function(*args, **kwargs)
        named = changed.keys() & self._bound.signature.parameters.keys()
        self._bound.arguments = {**self.passed, **{name: changed.pop(name) for name in named}}
        return self._function(*self._bound.args, **{**self._bound.kwargs, **changed})


@dataclass(frozen=True, slots=True)
class Seam:
    """A wrapper by which each call goes to `target`, `package.module:function`, as a `Call`; it returns what that does.

    The target is imported with the first call, since hosts are patched while they are imported themselves; `early`
    imports it with the patch, so that no load waits for that.
    """

    target: str
    early: bool = False

    def __call__(self, original: Function) -> Function:
        module, _, name = self.target.partition(":")
        signature = inspect.signature(original)
        if self.early:
            import_module(module)

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            return getattr(import_module(module), name)(Call(original, signature, args, kwargs))

        return call
