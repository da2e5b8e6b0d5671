"""Seams get each call with its arguments by name, and run the function as it was called, or otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from ds_reshard.hooks import Call, Seam


def _load(folder: str, tag: str | None = None, *others: int, strict: bool = True, **more: object) -> tuple[object, ...]:
    return folder, tag, others, strict, more


def _seam(monkeypatch: pytest.MonkeyPatch, function: Callable[[Call], object]) -> Seam:
    module = ModuleType("seam_of_a_test")
    module.load = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Seam("seam_of_a_test:load")


def test_arguments_have_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def seam(call: Call) -> object:
        assert call.passed == {"folder": "a", "more": {"extra": 1}}
        assert call.arguments == {"folder": "a", "tag": None, "others": (), "strict": True, "more": {"extra": 1}}
        assert call["strict"] is True
        return call()

    patched = _seam(monkeypatch, seam)(_load)
    assert patched("a", extra=1) == ("a", None, (), True, {"extra": 1})
    assert patched.__wrapped__ is _load  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("args", "kwargs", "changed", "result"),
    [
        (("a",), {}, {"tag": "t"}, ("a", "t", (), True, {})),
        (("a", "t", 1, 2), {"strict": False}, {"folder": "b"}, ("b", "t", (1, 2), False, {})),
        (("a",), {"extra": 1}, {"extra": 2, "again": 3}, ("a", None, (), True, {"extra": 2, "again": 3})),
        (("a",), {"strict": False}, {"others": (7,), "tag": "t"}, ("a", "t", (7,), False, {})),
        ((), {"folder": "a"}, {"strict": 0}, ("a", None, (), 0, {})),
    ],
)
def test_a_call_with_other_arguments(
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    changed: dict[str, object],
    result: object,
) -> None:
    def seam(call: Call) -> object:
        assert call(**changed) == result
        return call()

    assert _seam(monkeypatch, seam)(_load)(*args, **kwargs) == _load(*args, **kwargs)  # type: ignore[arg-type]


def test_what_is_missing_is_told_as_python_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"_load\(\) missing 1 required positional argument: 'folder'"):
        _seam(monkeypatch, lambda call: call())(_load)()
    with pytest.raises(TypeError, match=r"_load\(\) missing argument 'folder'"):
        _seam(monkeypatch, lambda call: call["folder"])(_load)()


def test_early_imports_with_the_patch() -> None:
    with pytest.raises(ModuleNotFoundError):
        Seam("no_such_module:load", early=True)(_load)
    Seam("no_such_module:load")(_load)
