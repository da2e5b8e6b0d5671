"""`import ds_reshard.auto`: every host that this process imports, before or after, is patched.

Loads no framework. A host that does not look as its table says is left as it is, with one warning; where a resume
policy was asked for, which could then not be applied, that is an error. `DS_RESHARD_DISABLE=1` in the environment
makes this import do nothing, and a policy an error; `ds_reshard.uninstall` undoes it. `DS_RESHARD_SETTINGS` holds what
is asked of hosts that have no JSON of their own: `{"trust": ["my_project.RunState"]}`.
"""

from __future__ import annotations

import os

from ds_reshard.errors import ConfigError, HookError
from ds_reshard.hooks import install_on_import, refused
from ds_reshard.hosts import tables
from ds_reshard.hosts.fsdp.settings import ask_settings, asks_to_verify
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import ResumePolicy


def _asked_for() -> bool:
    return not policy_sources.asked_policy().is_default


def _insist(policy: ResumePolicy) -> None:
    """A policy that comes after a host was left as it is: say so now, not at the load that would drop it."""
    resuming = {table.host for table in tables() if table.resumes}
    for host, error in refused().items():
        if not policy.is_default and host in resuming:
            raise HookError(f"a resume policy was asked for, and cannot be applied to {host}: {error}", error.faults)


def _refuse(policy: ResumePolicy) -> None:
    if not policy.is_default:
        raise ConfigError(
            "DS_RESHARD_DISABLE is set, and a resume policy was asked for: it cannot be applied; "
            "unset DS_RESHARD_DISABLE, or leave out the resume flags"
        )


_settings = os.environ.get("DS_RESHARD_SETTINGS", "")
if os.environ.get("DS_RESHARD_DISABLE", "") in ("", "0"):
    if _settings:
        ask_settings(_settings, place="DS_RESHARD_SETTINGS")
    for _table in tables():
        if _table.resumes:
            install_on_import(_table, insist=_asked_for)
        elif _table.host == "fsdp":
            install_on_import(_table, insist=asks_to_verify)
        else:
            install_on_import(_table)
    policy_sources.on_asked(_insist)
elif _settings:
    raise ConfigError(
        "DS_RESHARD_DISABLE is set, and DS_RESHARD_SETTINGS as well: what it asks for cannot be done; unset one of them"
    )
else:
    policy_sources.on_asked(_refuse)
