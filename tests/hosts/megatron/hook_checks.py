"""What installing and removing the hooks does to Megatron's modules, seen from inside a process that has them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from logs import heard

import ds_reshard
from ds_reshard import hooks
from ds_reshard.errors import HookError
from ds_reshard.hosts import table
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import Given

HOOKS = table("megatron")


def everything() -> dict[str, int]:
    """Which object every name of every loaded Megatron module and patched class holds."""
    held = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == "megatron" or name.startswith("megatron.")):
            held.update({f"{name}.{key}": id(value) for key, value in list(vars(module).items())})
    for patch in HOOKS.patches:
        owner: Any = sys.modules.get(patch.module)
        for part in patch.path[:-1]:
            owner = getattr(owner, part, None)
        if isinstance(owner, type):
            held.update({f"{patch.target}/{key}": id(value) for key, value in vars(owner).items()})
    return held


def install_twice_and_remove() -> dict[str, Any]:
    """Names that differ while installed and afterwards; whether the second install was the first."""
    before = everything()
    first = ds_reshard.install("megatron")
    again = ds_reshard.install("megatron")
    during = everything()
    states = {status.target: status.state for status in ds_reshard.installed() if status.host == "megatron"}
    tested = {status.tested for status in ds_reshard.installed() if status.host == "megatron"}
    first.remove()
    first.remove()
    after = everything()
    return {
        "same installation": first is again,
        "changed": sorted(name for name in before if during.get(name) != before[name]),
        "left": sorted(name for name in {*before, *after} if after.get(name) != before.get(name)),
        "states": states,
        "tested": sorted(tested),
    }


def outside_the_range() -> dict[str, Any]:
    """What install and auto do with a version that the hooks were not written for, with and without a policy."""
    import megatron.core

    megatron.core.__version__ = "0.21.0"
    before = everything()
    with heard() as messages:
        told: dict[str, Any] = {"install": _refusal(lambda: hooks.install(HOOKS))}
        told["auto"] = _refusal(lambda: importlib.import_module("ds_reshard.auto"))
    told["warnings"] = messages
    policy = Given(place="a test", values={"scheduler": "override"})
    told["asked after"] = _refusal(lambda: policy_sources.ask(policy))
    hooks.uninstall("megatron")
    told["asked before"] = _refusal(lambda: importlib.reload(sys.modules["ds_reshard.auto"]))
    told["left"] = sorted(name for name, held in everything().items() if before.get(name) != held)
    return told


def _refusal(action: Any) -> str | None:
    try:
        action()
    except HookError as error:
        return str(error)
    return None


def vendored() -> dict[str, Any]:
    """What the hooks say of a tree whose source carries them."""
    states = {status.target: status.state for status in ds_reshard.installed() if status.host == "megatron"}
    told = {"states": states, "auto": _refusal(lambda: hooks.install_on_import(HOOKS))}
    return {**told, "install": _refusal(lambda: hooks.install(HOOKS))}


def arguments() -> dict[str, list[str]]:
    """The options that this release's parser has."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    return {"options": sorted(option for action in parser._actions for option in action.option_strings)}
