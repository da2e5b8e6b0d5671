"""Installing when the host is imported, and what is left of the import machinery afterwards."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from types import ModuleType

import pytest
from fake_framework import CALLS, FUNCTION, METHOD, Framework, attributes, engine, patch, table

from ds_reshard import HookError, hooks
from ds_reshard.hooks.installation import REGISTRY, Deferred


def test_on_import_installs_at_once_where_the_module_is_loaded(framework: Framework) -> None:
    framework()
    engine()
    hooks.install_on_import(table())
    assert CALLS[METHOD]() == ("ours", ("original", "here"))


def test_on_import_waits_for_every_target_module_and_leaves_no_finder(framework: Framework) -> None:
    """Installed when the last of the modules was executed; loader and spec are what they would have been."""
    framework()
    finders = list(sys.meta_path)
    hooks.install_on_import(table(patch(METHOD), patch("fakeframe.late:load")))
    assert len(sys.meta_path) == len(finders) + 1
    assert CALLS[METHOD]() == ("original", "here")
    importlib.import_module("fakeframe.late")
    assert CALLS[METHOD]() == ("ours", ("original", "here"))
    assert sys.meta_path == finders
    assert type(engine().__loader__).__name__ == "SourceFileLoader"
    assert vars(engine())["__spec__"].loader is engine().__loader__


def test_uninstall_before_the_import_leaves_the_import_alone(framework: Framework) -> None:
    framework()
    finders = list(sys.meta_path)
    hooks.install_on_import(table())
    hooks.uninstall("fakeframe")
    assert sys.meta_path == finders
    assert CALLS[METHOD]() == ("original", "here")


def test_explicit_install_while_an_import_is_waited_for_is_one_installation(framework: Framework) -> None:
    framework()
    finders = list(sys.meta_path)
    hooks.install_on_import(table())
    with hooks.install(table()):
        assert CALLS[METHOD]() == ("ours", ("original", "here"))
        assert sys.meta_path == finders


def test_a_failed_import_is_waited_for_again(framework: Framework) -> None:
    framework(more="import fakeframe_missing\n")
    hooks.install_on_import(table())
    with pytest.raises(ModuleNotFoundError, match="fakeframe_missing"):
        engine()
    sys.modules["fakeframe_missing"] = ModuleType("fakeframe_missing")
    try:
        assert CALLS[METHOD]() == ("ours", ("original", "here"))
    finally:
        del sys.modules["fakeframe_missing"]


def test_two_finders_of_this_kind_do_not_ask_each_other_for_ever(framework: Framework) -> None:
    """Both wait for the same module, and both are called once, the inner one first."""
    framework()
    called: list[str] = []
    for name in ("inner", "outer"):
        Deferred(["fakeframe.engine"], functools.partial(called.append, name)).arm()
    engine()
    assert called == ["inner", "outer"]


def test_a_vendored_host_stands_aside_on_import_without_a_warning(
    framework: Framework, caplog: pytest.LogCaptureFixture
) -> None:
    framework(more="MARK = True\n")
    caplog.set_level(logging.INFO, logger="ds_reshard")
    hooks.install_on_import(table(patch(METHOD, marker="MARK")))
    assert CALLS[METHOD]() == ("original", "here")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "fakeframe" not in REGISTRY.refusals


def test_what_no_source_patch_can_do_is_installed_beside_those_that_are_vendored(framework: Framework) -> None:
    framework(more="MARK = True\n")
    patched = table(patch(METHOD, marker="MARK"), patch(FUNCTION))
    hooks.install_on_import(patched)
    before = CALLS[METHOD]()
    assert before == ("original", "here") and CALLS[FUNCTION]() == ("ours", ("original", "here"))
    assert [status.state for status in hooks.installed([patched])] == ["vendored", "installed"]
    hooks.uninstall("fakeframe")
    assert CALLS[FUNCTION]() == ("original", "here")
    with hooks.install(patched):
        assert CALLS[METHOD]() == before and CALLS[FUNCTION]() == ("ours", ("original", "here"))


def test_what_is_left_as_it_is_gets_the_patches_that_refuse_instead(framework: Framework) -> None:
    """One that does not fit is left out; uninstalling takes them off."""
    framework(version="9.0")
    before = attributes()
    odd = patch(FUNCTION, signature=("another",))
    hooks.install_on_import(dataclasses.replace(table(), instead=(patch(METHOD), odd)))
    engine()
    assert CALLS[METHOD]() == ("ours", ("original", "here"))
    assert CALLS[FUNCTION]() == ("original", "here")
    hooks.uninstall("fakeframe")
    assert attributes() == before


def test_a_refused_host_is_an_error_where_more_was_asked_for(framework: Framework) -> None:
    framework(version="9.0")
    hooks.install_on_import(table(), insist=lambda: True)
    with pytest.raises(HookError, match=r"version outside the range"):
        engine()
    assert "fakeframe" in hooks.refused()
