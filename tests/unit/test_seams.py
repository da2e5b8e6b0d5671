"""Seams get each call with its arguments by name, and run the function as it was called, or otherwise."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from ds_reshard.hooks import Call, Patch, Seam
from ds_reshard.hooks.installation import Replacement


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


def _wrapped(function: Callable[..., object]) -> Callable[..., object]:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def _short(folder: str, *, strict: bool = True) -> object:
    return folder, strict


def _said(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(TypeError) as raised:
        function(*args, **kwargs)
    return str(raised.value)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (("a", "b"), {}), (("a",), {"folder": "b"}), (("a",), {"strikt": True})]
)
def test_a_wrong_call_is_told_as_without_the_hooks(
    monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """The error names the host's function, and that another library has wrapped it changes nothing but for words."""
    reached: list[Call] = []
    seam = _seam(monkeypatch, lambda call: reached.append(call) or call["folder"])  # type: ignore[func-returns-value]
    assert _said(seam(_short), *args, **kwargs) == _said(_short, *args, **kwargs)
    assert not reached
    assert _said(seam(_wrapped(_short)), *args, **kwargs).startswith("_short() ")


def test_a_wrapper_that_takes_more_than_it_shows_is_not_called_past_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(_short)
    def more(folder: str, **extra: object) -> object:
        raise AssertionError("called past the seam")

    wrong = _said(_seam(monkeypatch, lambda call: call())(more), "a", extra=1)
    assert wrong == "_short() got an unexpected keyword argument 'extra'"


def test_early_imports_with_the_patch() -> None:
    with pytest.raises(ModuleNotFoundError):
        Seam("no_such_module:load", early=True)(_load)
    Seam("no_such_module:load")(_load)


@pytest.mark.parametrize(("seam", "below"), [("load_best_model", "load"), ("_folder", "call")])
def test_an_error_behind_a_hook_has_one_frame_of_ours(seam: str, below: str) -> None:
    """A script's own error in the Trainer begins where it did; one of ours keeps all that tells where it is."""

    def load(folder: str) -> None:
        raise KeyError(folder)

    patch = Patch(target="x:load", wrapper=Seam(f"ds_reshard.hosts.transformers:{seam}"), signature=(), summary="")
    site, active = SimpleNamespace(dressed=lambda made: made), SimpleNamespace(active=True)
    patched = Replacement(patch=patch, site=site, original=load, installation=active)  # type: ignore[arg-type]
    with pytest.raises((KeyError, TypeError)) as caught:
        patched.value("theirs")
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:]
    assert names == ["replacement", below]
