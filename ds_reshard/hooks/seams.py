"""Seams: functions of ours that take the calls of a host's functions, each call with all that it was given."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType, TracebackType
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
        self,
        function: Function,
        signature: inspect.Signature,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        partial: bool,
    ) -> None:
        self._function = function
        self._given = args, kwargs
        self._bound = signature.bind_partial(*args, **kwargs) if partial else _bound(function, signature, args, kwargs)
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


def _bound(
    function: Function, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> inspect.BoundArguments:
    """The arguments by their names; the TypeError of a wrong call is the host's own, as without the hooks.

    A function that others have wrapped may take more than the signature that it shows, or give some of it itself: it is
    not called here, as that would be a call past the seam, and it tells itself what is missing.
    """
    plain = isinstance(function, FunctionType) and not {"__wrapped__", "__signature__"} & vars(function).keys()
    try:
        return signature.bind(*args, **kwargs) if plain else signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        wrong = TypeError(f"{function.__qualname__}() {error}")
    if plain:
        function(*args, **kwargs)  # raises before its body
    raise wrong


@dataclass(frozen=True, slots=True)
class Seam:
    """A wrapper by which each call goes to `target`, `package.module:function`, as a `Call`; it returns what that does.

    The target is imported with the first call, since hosts are patched while they are imported themselves; `early`
    imports it with the patch, so that no load waits for that. The target of a `partial` seam gets calls that leave out
    arguments, too: it derives them, or refuses the call by name.
    """

    target: str
    early: bool = False
    partial: bool = False

    def __call__(self, original: Function) -> Function:
        module, _, name = self.target.partition(":")
        signature = inspect.signature(original)
        if self.early:
            import_module(module)

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            return getattr(import_module(module), name)(Call(original, signature, args, kwargs, partial=self.partial))

        return call


def beyond_hooks(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with a host's function; None where a frame of ours did not call one."""
    called = False
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        called = trace.tb_frame.f_code is Call.__call__.__code__
        trace = trace.tb_next
    return trace if called else None


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
