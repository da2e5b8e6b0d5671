"""Installing and removing patches of a host, in every order with another library's."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
from fake_framework import CALLS, FUNCTION, METHOD, Framework, attributes, engine, patch, table, theirs

from ds_reshard import hooks
from ds_reshard.hooks import Function


@pytest.mark.parametrize("target", CALLS)
def test_install_replaces_and_remove_restores_the_identical_attributes(framework: Framework, target: str) -> None:
    """Every kind of attribute is replaced in kind; after removal every `__dict__` holds the objects it held."""
    framework()
    before = attributes()
    installation = hooks.install(table(patch(target)))
    assert CALLS[target]() == ("ours", ("original", "here"))
    installation.remove()
    assert CALLS[target]() == ("original", "here")
    assert attributes() == before


def test_an_inherited_name_leaves_no_shadow(framework: Framework) -> None:
    """A patch of an inherited method is set on the class that was named, and deleted from it on removal."""
    framework()
    module = engine()
    with hooks.install(table(patch("fakeframe.engine:Engine.inherited"))):
        assert "inherited" in vars(module.Engine)
        assert module.Base().inherited("here") == ("original", "here")
    assert "inherited" not in vars(module.Engine)


def test_a_replacement_looks_like_the_original(framework: Framework) -> None:
    """Name, docstring, signature and `__wrapped__` are the original's, whatever the wrapper returned."""
    framework()
    original = engine().Engine.load_checkpoint
    with hooks.install(table()):
        replacement = engine().Engine.load_checkpoint
        assert replacement is not original
        assert replacement.__wrapped__ is original
        assert (replacement.__name__, replacement.__doc__) == ("load_checkpoint", "Load it.")
        assert inspect.signature(replacement) == inspect.signature(original)


def test_install_twice_is_one_installation(framework: Framework) -> None:
    """A second install patches nothing further and returns what is in place; one removal takes it off."""
    framework()
    before = attributes()
    first = hooks.install(table())
    assert hooks.install(table()) is first
    assert CALLS[METHOD]() == ("ours", ("original", "here"))
    first.remove()
    first.remove()
    assert attributes() == before


def test_threads_that_install_and_import_at_once_share_one_installation(framework: Framework) -> None:
    """No deadlock between the import's locks and ours, and ours runs once."""
    framework(more="import time\ntime.sleep(0.05)\n")
    hooks.install_on_import(table())
    with ThreadPoolExecutor(max_workers=8) as pool:
        tasks = [pool.submit(engine) if n % 2 else pool.submit(hooks.install, table()) for n in range(8)]
        done = [task.result(timeout=30) for task in tasks]
    assert len(set(done)) == 2
    assert CALLS[METHOD]() == ("ours", ("original", "here"))


def test_install_after_removal_patches_again(framework: Framework) -> None:
    framework()
    before = attributes()
    first = hooks.install(table())
    first.remove()
    second = hooks.install(table())
    assert second is not first
    assert CALLS[METHOD]() == ("ours", ("original", "here"))
    hooks.uninstall("fakeframe")
    assert not second.active
    assert attributes() == before


def test_an_error_inside_the_block_restores(framework: Framework) -> None:
    framework()
    before = attributes()
    with pytest.raises(KeyError), hooks.install(table()):
        raise KeyError
    assert attributes() == before


@pytest.mark.parametrize("inherited", [False, True])
def test_their_wrapper_first_ours_removed_first(framework: Framework, inherited: bool) -> None:
    """Ours on top of another library's wrapper: removal restores that very wrapper."""
    framework()
    name = "inherited" if inherited else "load_checkpoint"
    cls = engine().Engine
    wrapper = theirs(getattr(cls, name))
    setattr(cls, name, wrapper)
    with hooks.install(table(patch(f"fakeframe.engine:Engine.{name}"))):
        assert getattr(cls(), name)("here") == ("ours", ("theirs", ("original", "here")))
    assert vars(cls)[name] is wrapper


def test_their_wrapper_first_theirs_removed_first(framework: Framework) -> None:
    """They put the original back over ours: it stays, and nothing of ours is left to take off."""
    framework()
    before = attributes()
    cls = engine().Engine
    original = cls.load_checkpoint
    cls.load_checkpoint = theirs(original)
    installation = hooks.install(table())
    cls.load_checkpoint = original
    installation.remove()
    assert attributes() == before


@pytest.mark.parametrize("name", ["load_checkpoint", "inherited"])
def test_ours_first_ours_removed_first(framework: Framework, name: str) -> None:
    """Their wrapper on top survives our removal, and ours beneath it calls the original.

    When they put back what they had found, that is our transparent wrapper; removing once more takes it off.
    """
    framework()
    before = attributes()
    cls = engine().Engine
    installation = hooks.install(table(patch(f"fakeframe.engine:Engine.{name}")))
    found = vars(cls)[name]
    wrapper = theirs(found)
    setattr(cls, name, wrapper)
    assert getattr(cls(), name)("here") == ("theirs", ("ours", ("original", "here")))
    installation.remove()
    assert vars(cls)[name] is wrapper
    assert getattr(cls(), name)("here") == ("theirs", ("original", "here"))
    setattr(cls, name, found)
    assert getattr(cls(), name)("here") == ("original", "here")
    installation.remove()
    assert attributes() == before


def test_ours_first_theirs_removed_first(framework: Framework) -> None:
    framework()
    before = attributes()
    cls = engine().Engine
    installation = hooks.install(table())
    found = cls.load_checkpoint
    cls.load_checkpoint = theirs(found)
    cls.load_checkpoint = found
    installation.remove()
    assert attributes() == before


def test_install_again_beneath_their_wrapper_runs_ours_once(framework: Framework) -> None:
    """Removed under another library's wrapper and installed again, ours runs once, on top."""
    framework()
    cls = engine().Engine
    hooks.install(table())
    cls.load_checkpoint = theirs(cls.load_checkpoint)
    hooks.uninstall("fakeframe")
    hooks.install(table())
    assert CALLS[METHOD]() == ("ours", ("theirs", ("original", "here")))


def test_install_again_first_takes_off_what_had_been_left_beneath_them(framework: Framework) -> None:
    framework()
    before = attributes()
    cls = engine().Engine
    first = hooks.install(table())
    found = cls.load_checkpoint
    cls.load_checkpoint = theirs(found)
    first.remove()
    cls.load_checkpoint = found
    hooks.install(table()).remove()
    assert attributes() == before


def test_a_bound_proxy_on_the_method_still_gets_its_instance(framework: Framework) -> None:
    """A wrapper that is an object with `__get__` (wrapt's are) is bound at each call, as Python binds it."""
    framework()

    class Proxy:
        def __init__(self, wrapped: Function) -> None:
            functools.update_wrapper(self, wrapped)

        def __get__(self, instance: object, owner: type) -> Function:
            return lambda *args: ("bound to", type(instance).__name__, *args)

        def __call__(self, *args: object) -> object:
            return "called unbound"

    cls = engine().Engine
    proxy = Proxy(cls.load_checkpoint)
    cls.load_checkpoint = proxy
    with hooks.install(table()):
        assert CALLS[METHOD]() == ("ours", ("bound to", "Engine", "here"))
    assert vars(cls)["load_checkpoint"] is proxy


def test_copies_made_by_from_import_are_reached(framework: Framework) -> None:
    """`from m import f` in the host's package, before and after install, under any name; all are restored."""
    framework()
    tools = importlib.import_module("fakeframe.tools")
    package = sys.modules["fakeframe"]
    original = engine().load
    outside = ModuleType("fakeframework_of_another")
    outside.load = original  # type: ignore[attr-defined]
    sys.modules[outside.__name__] = outside
    try:
        with hooks.install(table(patch(FUNCTION))):
            late = importlib.import_module("fakeframe.late")
            taken = late.load
            holders = [engine().load, package.load, tools.load_it, late.load]
            assert [f("here") for f in holders] == [("ours", ("original", "here"))] * 4
            assert outside.load is original
        assert all(f is original for f in (engine().load, package.load, tools.load_it, late.load))
        assert taken("here") == ("original", "here")
    finally:
        del sys.modules[outside.__name__]
