"""Patches of modules that not every user of a host imports: nothing waits for them, and none is forgotten."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
from fake_framework import CALLS, METHOD, Framework, attributes, engine, patch, table

from ds_reshard import HookError, hooks
from ds_reshard.hooks import HostHooks

LATE = "fakeframe.late:own"
OWN = "def own(load_dir):\n    return 'original', load_dir\n"


@pytest.fixture
def with_late(framework: Framework, tmp_path: Path) -> HostHooks:
    """The framework, with a function in a module of its own, and a table that patches it where it is imported."""
    framework()
    with (tmp_path / "site" / "fakeframe" / "late.py").open("a", encoding="utf-8") as file:
        file.write(OWN)
    return table(patch(METHOD), patch(LATE, optional=True))


def late() -> object:
    return importlib.import_module("fakeframe.late").own("here")


def states(hooked: HostHooks) -> list[str]:
    return [status.state for status in hooks.installed([hooked])]


@pytest.mark.parametrize("begin", ["install", "on import"])
def test_patched_as_soon_as_it_is_imported(with_late: HostHooks, begin: str) -> None:
    """Before that it is available and its absence holds up nothing; afterwards no finder is left."""
    finders = list(sys.meta_path)
    if begin == "install":
        hooks.install(with_late)
    else:
        hooks.install_on_import(with_late)
    assert CALLS[METHOD]() == ("ours", ("original", "here"))
    assert states(with_late) == ["installed", "available"]
    assert late() == ("ours", ("original", "here"))
    assert states(with_late) == ["installed", "installed"]
    assert sys.meta_path == finders


def test_patched_at_once_where_it_is_loaded(with_late: HostHooks) -> None:
    late()
    before = attributes()
    with hooks.install(with_late):
        assert late() == ("ours", ("original", "here"))
    assert attributes() == before and late() == ("original", "here")


def test_a_module_that_is_imported_first_and_imports_the_host_itself(with_late: HostHooks) -> None:
    """The host's own modules are executed while the optional one is half-way: it is patched when it is done."""
    hooks.install_on_import(with_late)
    assert late() == ("ours", ("original", "here"))
    assert states(with_late) == ["installed", "installed"]


def test_removal_stops_waiting(with_late: HostHooks) -> None:
    """After removal the import of the optional module is as if nothing had ever been installed."""
    finders = list(sys.meta_path)
    hooks.install(with_late).remove()
    assert sys.meta_path == finders and late() == ("original", "here")
    assert engine().Engine().load_checkpoint("here") == ("original", "here")


def test_one_that_does_not_fit_takes_all_off(with_late: HostHooks, caplog: pytest.LogCaptureFixture) -> None:
    """All or none: an error at the import after `install`, a warning after `auto`."""
    other = table(patch(METHOD), patch(LATE, signature=("elsewhere",), optional=True))
    hooks.install(other)
    with pytest.raises(HookError, match="another signature"):
        late()
    assert CALLS[METHOD]() == ("original", "here")
    sys.modules.pop("fakeframe.late", None)
    hooks.install_on_import(other)
    with caplog.at_level(logging.WARNING, logger="ds_reshard"):
        assert late() == ("original", "here")
    assert CALLS[METHOD]() == ("original", "here")


def test_a_policy_that_nobody_would_carry_out_is_an_error(framework: Framework) -> None:
    """Where more was asked for than a warning can give, auto does not stand aside."""
    framework()
    engine()
    hooked = table(versions=">=2,<3", tested=())
    hooks.install_on_import(hooked, insist=lambda: False)
    assert list(hooks.refused()) == ["fakeframe"]
    hooks.uninstall("fakeframe")
    assert hooks.refused() == {}
    with pytest.raises(HookError, match="version outside the range"):
        hooks.install_on_import(hooked, insist=lambda: True)
