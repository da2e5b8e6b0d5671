"""`import ds_reshard` and `import ds_reshard.auto`, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_framework import write_framework

import ds_reshard

ROOT = Path(ds_reshard.__file__).parent.parent

# A host that the package does not have, put where `ds_reshard.hosts` looks for one.
FAKE_HOST = """
import sys, types
import ds_reshard.hosts
from ds_reshard.hooks import HostHooks, Patch

def ours(original):
    return lambda *args, **kwargs: ("ours", original(*args, **kwargs))

host = types.ModuleType("ds_reshard.hosts.fakeframe")
host.HOOKS = HostHooks(
    host="fakeframe", distribution="fake-frame", versions=">=1,<2", tested=("1.4.0",),
    patches=(
        Patch(target="fakeframe.engine:Engine.load_checkpoint", wrapper=ours, signature=("load_dir",), summary="one"),
        Patch(target="fakeframe.engine:load", wrapper=ours, signature=("load_dir",), summary="a test"),
    ),
)
sys.modules[host.__name__] = host
ds_reshard.hosts.HOSTS = ("fakeframe",)
"""
OURS, ORIGINAL = ["ours", ["original", "x"]], ["original", "x"]


def run(script: str, *, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script; it must exit with 0."""
    places = [str(ROOT), *([str(path)] if path is not None else [])]
    environ = {key: value for key, value in os.environ.items() if key != "DS_RESHARD_DISABLE"}
    environ |= {"PYTHONPATH": os.pathsep.join(places), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def results(script: str, *, path: Path, **environment: str) -> object:
    """What a script with the fake host prints as JSON, nothing being written to stderr."""
    done = run(FAKE_HOST + script, path=path, **environment)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "statement", ["import ds_reshard", "import ds_reshard.auto", "import ds_reshard; ds_reshard.installed()"]
)
def test_importing_loads_neither_torch_nor_a_framework(statement: str) -> None:
    done = run(f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert {"torch", "numpy", "deepspeed", "megatron", "accelerate", "rich"} & set(done.stdout.split()) == set()


def test_every_exported_name_is_there_and_unknown_names_are_attribute_errors() -> None:
    """`__all__`, `dir` and the attributes agree; every error of ds_reshard.errors is exported."""
    assert len(set(ds_reshard.__all__)) == len(ds_reshard.__all__)
    assert all(getattr(ds_reshard, name) is not None and name in dir(ds_reshard) for name in ds_reshard.__all__)
    errors = {name for name, value in vars(ds_reshard.errors).items() if isinstance(value, type)}
    assert {name for name in errors if issubclass(getattr(ds_reshard.errors, name), Exception)} <= set(
        ds_reshard.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        _ = ds_reshard.instal


def test_an_unknown_host_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ds_reshard.ConfigError, match="'deepsped': expected one of deepspeed"):
        ds_reshard.install("deepsped")


ORDERS = {
    "auto, then the framework": "import ds_reshard.auto, fakeframe",
    "the framework, then auto": "import fakeframe, ds_reshard.auto",
    "the engine by name": "import ds_reshard.auto; from fakeframe.engine import Engine; import fakeframe",
    "auto twice": "import fakeframe, importlib, ds_reshard.auto; importlib.reload(ds_reshard.auto)",
    "then an explicit install": "import ds_reshard.auto; ds_reshard.install('fakeframe'); import fakeframe",
    "an explicit install first": "ds_reshard.install('fakeframe'); import ds_reshard.auto, fakeframe",
}


@pytest.mark.parametrize("order", ORDERS)
def test_auto_patches_in_every_order_of_import(tmp_path: Path, order: str) -> None:
    """The method, the function and the package's own copy of it are replaced once; uninstall restores them."""
    script = f"""
finders = list(sys.meta_path)
{ORDERS[order]}
import json
call = lambda: [fakeframe.Engine().load_checkpoint("x"), fakeframe.engine.load("x"), fakeframe.load("x")]
patched = call()
ds_reshard.uninstall("fakeframe")
print(json.dumps([patched, call(), sys.meta_path == finders, fakeframe.READY]))
"""
    expected = [[OURS] * 3, [ORIGINAL] * 3, True, True]
    assert results(script, path=write_framework(tmp_path)) == expected


@pytest.mark.parametrize(("value", "patched"), [("1", False), ("true", False), ("0", True), ("", True)])
def test_the_environment_can_disable_auto(tmp_path: Path, value: str, patched: bool) -> None:
    script = """
import ds_reshard.auto, fakeframe, json
print(json.dumps(fakeframe.load("x")))
"""
    found = results(script, path=write_framework(tmp_path), DS_RESHARD_DISABLE=value)
    assert found == (OURS if patched else ORIGINAL)


@pytest.mark.parametrize("first", ["import ds_reshard.auto, fakeframe", "import fakeframe, ds_reshard.auto"])
def test_auto_with_a_failed_guard_warns_once_and_stands_aside(tmp_path: Path, first: str) -> None:
    """The host works as without us; the warning says what was expected and found; explicit install raises it."""
    script = f"""
{first}
import importlib, json
importlib.reload(ds_reshard.auto)
refused = [status.state for status in ds_reshard.installed()]
try:
    ds_reshard.install("fakeframe")
except ds_reshard.HookError as error:
    print(json.dumps([fakeframe.load("x"), refused, len(error.faults)]))
"""
    done = run(FAKE_HOST + script, path=write_framework(tmp_path, version="2.1"))
    assert json.loads(done.stdout) == [ORIGINAL, ["refused", "refused"], 1]
    assert done.stderr.count("fakeframe is left as it is") == 1
    assert "expected >=1,<2, found 2.1" in done.stderr


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("first", ["", "import fakeframe"])
def test_a_policy_is_an_error_where_a_host_that_follows_it_is_refused(
    tmp_path: Path, resumes: bool, first: str
) -> None:
    """One that loads no checkpoint of ours may stand aside."""
    script = f"""
import dataclasses, json
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import Given
host.HOOKS = dataclasses.replace(host.HOOKS, resumes={resumes})
import ds_reshard.auto
{first}
try:
    policy_sources.ask(Given(place="here", values={{"scheduler": "override"}}))
    import fakeframe
    raised = False
except ds_reshard.HookError:
    raised = True
print(json.dumps(raised))
"""
    done = run(FAKE_HOST + script, path=write_framework(tmp_path, version="2.1"))
    assert json.loads(done.stdout) is resumes


def test_auto_without_the_framework_is_silent(tmp_path: Path) -> None:
    assert results("import ds_reshard.auto\nprint('[]')", path=tmp_path) == []


@pytest.mark.parametrize(
    ("version", "status"), [("1.4.0", 0), ("2.1", 1)], ids=["nothing refused", "a refused hook is a finding"]
)
def test_the_command_lists_hooks(tmp_path: Path, version: str, status: int) -> None:
    """Table and JSON name every patch; the exit status tells whether one is refused."""
    script = """
import contextlib, io, json
from ds_reshard.cli.main import main
shown = []
for arguments in (["hooks", "--json"], ["hooks", "--all"], ["hooks"]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    shown.append((code, out.getvalue()))
listed = json.loads(shown[0][1])["hooks"]
drawn = all(hook["target"].partition(":")[2] in shown[1][1] and hook["state"] in shown[1][1] for hook in listed)
refused = [hook for hook in listed if hook["state"] == "refused"]
drawn = drawn and len(shown[2][1].splitlines()) == 1 + (2 + len(refused) if refused else 0)
print(json.dumps([[code for code, _ in shown], [[hook["version"], hook["tested"]] for hook in listed], drawn]))
"""
    found = results(script, path=write_framework(tmp_path, version=version), COLUMNS="200")
    assert found == [[status] * 3, [[version, status == 0]] * 2, True]


def test_a_disabled_import_is_said(tmp_path: Path) -> None:
    """Under DS_RESHARD_DISABLE nothing is available: the import does nothing."""
    script = """
import contextlib, io, json
from ds_reshard.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["hooks"])
print(json.dumps(out.getvalue()))
"""
    path = write_framework(tmp_path)
    for disable, state in (("1", "disabled"), ("0", "available")):
        found = results(script, path=path, DS_RESHARD_DISABLE=disable)
        assert found == f"fakeframe 1.4.0 (tested): 2 {state}\n"


def test_uninstall_without_a_name_takes_every_patch_off(tmp_path: Path) -> None:
    script = """
import json
import ds_reshard.auto
import fakeframe.engine
before = {status.state for status in ds_reshard.installed()}
ds_reshard.uninstall()
print(json.dumps([sorted(before), sorted({status.state for status in ds_reshard.installed()})]))
"""
    assert results(script, path=write_framework(tmp_path)) == [["installed"], ["available"]]


def test_the_command_says_an_error_of_ours_without_a_traceback() -> None:
    """The message on stderr and exit status 2."""
    script = """
import ds_reshard, sys
from ds_reshard.cli import main as cli
def refuse():
    raise ds_reshard.CheckpointNotFound("nowhere: no such folder")
cli.installed = refuse
sys.exit(cli.main(["hooks"]) - 2)
"""
    done = run(script)
    assert (done.stdout, done.stderr) == ("", "ds-reshard: nowhere: no such folder\n")


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["nothing"], ["hooks", "--jsn"]])
def test_wrong_usage_is_exit_status_2(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ds_reshard", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ds-reshard")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_real_deepspeed_is_patched_by_auto_and_restored_exactly() -> None:
    """Every attribute of DeepSpeedEngine and its bases after uninstall is the object that it was before."""
    script = """
import types, sys
import ds_reshard, ds_reshard.hosts
from ds_reshard.hooks import HostHooks, Patch

def ours(original):
    def replacement(*args, **kwargs):
        return "ours"
    return replacement

target = "deepspeed.runtime.engine:DeepSpeedEngine."
host = types.ModuleType("ds_reshard.hosts.deepspeed")
host.HOOKS = HostHooks(
    host="deepspeed", distribution="deepspeed", versions=">=0.14,<0.20", tested=("0.19.8",),
    patches=(
        Patch(target=target + "load_checkpoint", wrapper=ours, signature=("load_dir", "tag"), summary="a test"),
        Patch(target=target + "register_buffer", wrapper=ours, signature=("name", "tensor"), summary="inherited"),
        Patch(target="deepspeed.runtime.utils:see_memory_usage", wrapper=ours, signature=(), summary="copied"),
    ),
)
sys.modules[host.__name__] = host
ds_reshard.hosts.HOSTS = ("deepspeed",)
import ds_reshard.auto
import deepspeed
from deepspeed.runtime import engine, utils
assert [status.state for status in ds_reshard.installed()] == ["installed"] * 3
cls = engine.DeepSpeedEngine
assert cls.load_checkpoint(None) == cls.register_buffer(None) == engine.see_memory_usage("") == "ours"
original = cls.load_checkpoint.__wrapped__
copied = utils.see_memory_usage.__wrapped__
ds_reshard.uninstall("deepspeed")
assert vars(cls)["load_checkpoint"] is original and original.__qualname__ == "DeepSpeedEngine.load_checkpoint"
assert "register_buffer" not in vars(cls)
assert engine.see_memory_usage is utils.see_memory_usage is copied
def attributes():
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "deepspeed"]
    return [(m.__name__, dict(vars(m))) for m in modules] + [(c.__name__, dict(vars(c))) for c in cls.__mro__]
def same(one, other):
    return all(
        a == b and x.keys() == y.keys() and all(x[key] is y[key] for key in x)
        for (a, x), (b, y) in zip(one, other, strict=True)
    )
before = attributes()
with ds_reshard.install("deepspeed"):
    during = attributes()
assert not same(before, during) and same(before, attributes())
print("restored", flush=True)
"""
    done = run(script, DS_ACCELERATOR="cpu")
    assert done.stdout.splitlines()[-1] == "restored"
