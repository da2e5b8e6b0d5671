"""The frameworks that can be patched: one file or folder each, with its table of patches as `HOOKS`.

A table is imported when it is asked for, and imports its framework inside functions only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ds_reshard import hooks
from ds_reshard.errors import ConfigError, HookError
from ds_reshard.hooks import HookStatus, HostHooks, Installation
from ds_reshard.resume.policy import ResumePolicy

if TYPE_CHECKING:
    from torch.optim import Optimizer

HOSTS: tuple[str, ...] = ("deepspeed", "megatron", "accelerate", "fsdp", "nanotron", "transformers", "torch")


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


def install(name: str, *, verify_after_save: bool | None = None) -> Installation:
    """Patch one framework, importing it; `remove()` or the end of a `with` block takes the patches off.

    All of the host's patches or none: HookError lists every reason. Installed already, by this call or by
    `import ds_reshard.auto`, the same installation is returned. `verify_after_save`, of "fsdp" alone, says whether what
    is saved is verified from now on (docs/fsdp.md); None leaves it as it was asked before.
    """
    found = table(name)
    if verify_after_save is not None and found.host != "fsdp":
        raise ConfigError(f'verify_after_save: is of "fsdp", not of {name!r}; write ds_reshard.install("fsdp", ...)')
    installation = hooks.install(found)
    if verify_after_save is not None:
        _ask_to_verify(verify_after_save)
    return installation


def uninstall(name: str | None = None) -> None:
    """Take one framework's patches off, or every framework's, and forget what was asked of its saves.

    `import ds_reshard.auto` then waits for its import no longer.
    """
    for found in (table(name),) if name is not None else tables():
        hooks.uninstall(found.host)
        if found.host == "fsdp":
            _ask_to_verify(False)


def _ask_to_verify(wanted: bool) -> None:
    import_module(f"{__name__}.fsdp.settings").ask_to_verify(wanted)


def installed() -> tuple[HookStatus, ...]:
    """Every patch of every host with its state and whether this version of the framework is tested."""
    return hooks.installed(tables())


def hooked(name: str) -> bool:
    """Whether the patches of one host are in place, put there by us or carried by the source of what is loaded.

    Cheap enough for each load of an optimizer: it opens no file.
    """
    return hooks.in_place(table(name))


def insist(policy: ResumePolicy) -> None:
    """Raise HookError where a policy is asked for that the hooks of DeepSpeed would apply, and they are not on."""
    if not policy.is_default and not hooked("deepspeed"):
        raise HookError(
            "a resume policy was asked for, and the hooks of DeepSpeed, which apply it, are not on: "
            "write import ds_reshard.auto at the top of the script"
        )


def refuse_policy_of_engine(optimizer: Optimizer) -> bool:
    """Return whether this optimizer is a DeepSpeed engine's; raise ConfigError if that has a policy to apply."""
    return bool(import_module(f"{__name__}.deepspeed.resume").refuse_policy(optimizer))


def begin_states(plugin: object, optimizer: Optimizer) -> None:
    """Begin an optimizer's states, for accelerate to load into: those of FSDP1 that are saved in shards.

    `load_fsdp_optimizer` loads what `FSDP.optim_state_dict` tells, of a fresh optimizer no state, and says nothing
    (accelerate/utils/fsdp_utils.py, 1.15.0). Of FSDP2 torch begins them itself, in the same way.
    """
    kind = getattr(getattr(plugin, "state_dict_type", None), "name", "")
    if kind != "SHARDED_STATE_DICT" or getattr(plugin, "fsdp_version", 1) != 1:
        return
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(getattr(optimizer, "optimizer", optimizer))  # of accelerate's wrapper, which may leave steps out
