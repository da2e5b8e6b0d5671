"""When a patch is refused, and how its state is listed."""

from __future__ import annotations

import pickle
import sys

import pytest
from fake_framework import FUNCTION, METHOD, Framework, attributes, engine, patch, table, theirs

from ds_reshard import hooks, hosts
from ds_reshard.errors import HookError
from ds_reshard.hooks import HostHooks, guard

GUARDED: dict[str, tuple[HostHooks, str, str]] = {
    "version too new": (table(versions=">=1.0,<1.4", tested=()), "1.4.0", "version outside"),
    "version too old": (table(versions=">=1.5", tested=()), "1.4.0", "version outside"),
    "pre-release of the excluded end": (table(versions="<1.4", tested=()), "1.4.0.dev0", "version outside"),
    "not a version": (table(), "from-somewhere", "version outside"),
    "attribute missing": (table(patch("fakeframe.engine:Engine.gone")), "1.4.0", "no such attribute"),
    "class missing": (table(patch("fakeframe.engine:Gone.load")), "1.4.0", "no such attribute"),
    "module missing": (table(patch("fakeframe.gone:load")), "1.4.0", "cannot be imported"),
    "parameter renamed": (table(patch(METHOD, signature=("path", "tag"))), "1.4.0", "(load_dir, tag, strict)"),
    "parameters reordered": (table(patch(METHOD, signature=("tag", "load_dir"))), "1.4.0", "another signature"),
    "parameter gone": (table(patch(FUNCTION, signature=("load_dir", "tag", "x"))), "1.4.0", "another signature"),
    "hidden signature": (table(patch("fakeframe.engine:Engine.anything")), "1.4.0", "have that wrapper use functools"),
    "not a function": (table(patch("fakeframe.engine:SETTING")), "1.4.0", "found int"),
    "a class": (table(patch("fakeframe.engine:Engine")), "1.4.0", "cannot be wrapped"),
    "a classmethod": (table(patch("fakeframe.engine:Engine.of_class")), "1.4.0", "cannot be wrapped"),
    "a property": (table(patch("fakeframe.engine:Engine.state")), "1.4.0", "cannot be wrapped"),
    "vendored": (table(patch(METHOD, marker="MARK")), "1.4.0", "MARK is set"),
}


@pytest.mark.parametrize("case", GUARDED)
def test_a_failed_guard_refuses_and_patches_nothing(framework: Framework, case: str) -> None:
    hooks_table, version, expected = GUARDED[case]
    framework(version=version, more="MARK = True\n")
    before = attributes()
    with pytest.raises(HookError) as caught:
        hooks.install(hooks_table)
    assert expected in str(caught.value)
    assert len(caught.value.faults) == 1
    assert "To mend:" in str(caught.value)
    assert attributes() == before


def test_every_failed_guard_is_listed_and_the_good_patches_are_not_installed(framework: Framework) -> None:
    """Version, attribute, signature, vendored and module: five faults, one error, nothing patched."""
    framework(more="MARK = True\n")
    before = attributes()
    refused = table(
        patch(METHOD, marker="NOT_SET"),
        patch("fakeframe.engine:Engine.gone"),
        patch("fakeframe.engine:Engine.static", signature=("path",)),
        patch(FUNCTION, marker="MARK"),
        patch("fakeframe.gone:load"),
        versions=">=2",
        tested=(),
    )
    with pytest.raises(HookError) as caught:
        hooks.install(refused)
    expected = {"fake-frame", "fakeframe.gone", *(p.target for p in refused.patches[1:4])}
    assert {fault.where for fault in caught.value.faults} == expected
    assert pickle.loads(pickle.dumps(caught.value)).faults == caught.value.faults
    assert attributes() == before


def test_an_owner_that_refuses_the_attribute_undoes_the_others(framework: Framework) -> None:
    """All or nothing also when the guard passed and setting the attribute fails."""
    framework(
        more="class Frozen(type):\n    def __setattr__(cls, name, value): raise TypeError('frozen')\n"
        "class Closed(metaclass=Frozen):\n    def load(self, load_dir): pass\n"
    )
    before = attributes()
    with pytest.raises(HookError, match=r"fakeframe\.engine:Closed\.load: cannot be replaced: frozen"):
        hooks.install(table(patch(METHOD), patch(FUNCTION), patch("fakeframe.engine:Closed.load")))
    assert attributes() == before


@pytest.mark.parametrize("version", ["1.4.0", "1.0", "1.5.0rc1", "1.4.1.dev3+g12ab", "1.4.0+cu128"])
def test_pre_releases_and_local_builds_inside_the_range_are_accepted(framework: Framework, version: str) -> None:
    framework(version=version)
    with hooks.install(table()) as installation:
        assert installation.active


@pytest.mark.parametrize(
    ("version", "tested"),
    [("1.4.0", True), ("1.4", True), ("1.4.0+cu128", True), ("1.4.1", False), ("1.4.0rc1", False)],
)
def test_tested_means_this_release_or_a_local_build_of_it(framework: Framework, version: str, tested: bool) -> None:
    framework(version=version)
    (status,) = hooks.installed([table()])
    assert (status.version, status.tested) == (version, tested)


def test_status_follows_the_life_of_an_installation_and_imports_nothing(framework: Framework) -> None:
    (absent,) = hooks.installed([table()])
    framework()
    (before,) = hooks.installed([table()])
    assert "fakeframe" not in sys.modules
    with hooks.install(table()):
        (during,) = hooks.installed([table()])
        engine().Engine.load_checkpoint = theirs(engine().Engine.load_checkpoint)
        (covered,) = hooks.installed([table()])
    (after,) = hooks.installed([table()])
    states = [status.state for status in (absent, before, during, covered, after)]
    assert states == ["framework absent", "available", "installed", "installed", "available"]
    assert (during.reason, covered.reason) == ("", "another library has wrapped or replaced the attribute")


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("source", "state"),
    [("MARK = True\n", "vendored"), ("MARK: bool = 1\n", "vendored"), ("'MARK'\n", "available"), ("", "available")],
)
def test_a_source_patch_is_seen_with_and_without_an_import(
    framework: Framework, source: str, state: str, loaded: bool
) -> None:
    framework(more=source)
    if loaded:
        engine()
    (status,) = hooks.installed([table(patch(METHOD, marker="MARK"))])
    assert status.state == state
    assert ("fakeframe" in sys.modules) == loaded


def test_one_refused_patch_refuses_its_host(framework: Framework) -> None:
    framework()
    engine()
    statuses = hooks.installed([table(patch(METHOD), patch("fakeframe.engine:Engine.gone"))])
    assert [status.state for status in statuses] == ["refused", "refused"]
    assert "no such attribute" in statuses[1].reason


@pytest.mark.parametrize("target", ["fakeframe.engine", "fakeframe.engine:", ":load", "fakeframe engine:load", "a:b:c"])
def test_a_patch_with_a_malformed_target_does_not_exist(target: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'package\.module"):
        patch(target)


def test_a_table_that_contradicts_itself_does_not_exist() -> None:
    with pytest.raises(ValueError, match="outside"):
        table(versions=">=2")
    with pytest.raises(ValueError, match="its own target"):
        table(patch(METHOD), patch(METHOD))
    with pytest.raises(ValueError, match="one patch or more"):
        HostHooks(host="fakeframe", distribution="fake-frame", versions="", tested=(), patches=())


def test_whether_a_host_is_patched_opens_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked at each load of an optimizer; what is not loaded is not patched, whatever its source says."""

    def opened(module: str) -> str:
        raise AssertionError(f"{module} is read")

    monkeypatch.setattr(guard, "_source", opened)
    for name in hosts.HOSTS:
        hosts.hooked(name)


def test_a_source_patch_counts_once_its_module_is_loaded(framework: Framework) -> None:
    framework(more="MARK = True\n")
    marked = table(patch(METHOD, marker="MARK"))
    assert not hooks.in_place(marked)
    engine()
    assert hooks.in_place(marked)
