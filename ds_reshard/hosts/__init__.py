"""The frameworks that can be patched: one file or folder each, with its table of patches as `HOOKS`.

A table is imported when it is asked for, and imports its framework inside functions only.
"""

from __future__ import annotations

from importlib import import_module

from ds_reshard import hooks
from ds_reshard.errors import ConfigError
from ds_reshard.hooks import HookStatus, HostHooks, Installation

HOSTS: tuple[str, ...] = ("deepspeed", "megatron", "accelerate", "fsdp", "nanotron")


def table(name: str) -> HostHooks:
    """The patches of one host, by its name in `HOSTS`; ConfigError for any other name."""
    if name not in HOSTS:
        raise ConfigError(f"host {name!r}: expected one of {', '.join(HOSTS)}; write ds_reshard.install({HOSTS[0]!r})")
    found = import_module(f"{__name__}.{name}").HOOKS
    assert isinstance(found, HostHooks), f"{__name__}.{name}.HOOKS is not a HostHooks"
    return found


def tables() -> tuple[HostHooks, ...]:
    """The patches of every host, in the order of `HOSTS`."""
    return tuple(table(name) for name in HOSTS)


def install(name: str) -> Installation:
    """Patch one framework, importing it; `remove()` or the end of a `with` block takes the patches off.

    All of the host's patches or none: HookError lists every reason. Installed already, by this call or by
    `import ds_reshard.auto`, the same installation is returned.
    """
    return hooks.install(table(name))


def uninstall(name: str) -> None:
    """Take one framework's patches off, or stop `ds_reshard.auto` from waiting for its import."""
    hooks.uninstall(table(name).host)


def installed() -> tuple[HookStatus, ...]:
    """Every patch of every host with its state and whether this version of the framework is tested."""
    return hooks.installed(tables())
