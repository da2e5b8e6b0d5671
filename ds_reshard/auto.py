"""`import ds_reshard.auto`: every host that this process imports, before or after, is patched.

Loads no framework. A host that does not look as its table says is left as it is, with one warning; where a resume
policy was asked for, which could then not be applied, that is an error. `DS_RESHARD_DISABLE=1` in the environment
makes this import do nothing, and a policy an error; `ds_reshard.uninstall` undoes it. `DS_RESHARD_SETTINGS` holds what
is asked of hosts that have no JSON of their own: `{"trust": ["my_project.RunState"]}`. `DS_RESHARD_FLAGS` holds resume
flags, as on a command line. `hand_on` gives all of it to the processes that this one starts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import sys
import tempfile

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


_LOG = logging.getLogger("ds_reshard")
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
"""The folder that puts the hooks on in each Python process which has it on PYTHONPATH."""
_FLAGS, _APPLIED = "DS_RESHARD_FLAGS", "DS_RESHARD_APPLIED"
"""Resume flags for this process and its children; the file in which a load that has applied them leaves a mark."""


def hand_on() -> bool:
    """Give the hooks and this process's resume policy to every Python process that it starts, by whatever launcher.

    By environment: launchers hand that on, and `startup/sitecustomize.py` reads it. Returns whether it is for this
    process to `refuse_unseen` at its end: there is a policy, and no process above this one looks whether it is applied.
    """
    path = os.environ.get("PYTHONPATH", "")
    if STARTUP not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{path}" if path else STARTUP
    policy = policy_sources.asked_policy()
    if policy.is_default and policy.report is None:
        return False
    os.environ[_FLAGS] = shlex.join(policy_sources.flags_of(policy))
    name = os.environ.get(_APPLIED)
    if policy.is_default or (name is not None and not _is_own(name)):
        return False
    atexit.unregister(_at_end)  # the caller looks, and knows the script's own status
    if name is None:
        _make_mark()
    return True


def _make_mark() -> None:
    file, os.environ[_APPLIED] = tempfile.mkstemp(prefix=f"ds-reshard-{os.getpid()}-")
    os.close(file)


def forget_mark() -> None:
    """Remove the file that `hand_on` has made, if it has."""
    name = os.environ.get(_APPLIED)
    if name is not None and _is_own(name):
        with contextlib.suppress(FileNotFoundError):
            os.remove(name)


def _is_own(name: str) -> bool:
    """Whether this process looks into a mark's file: it has made it, or has become what it is by os.exec."""
    return os.path.basename(name).startswith(f"ds-reshard-{os.getpid()}-")


def refuse_unseen() -> None:
    """Raise ConfigError where no load has applied the policy, in this process or in one below it on this machine."""
    policy, name = policy_sources.asked_policy(), os.environ.get(_APPLIED)
    marked = name is not None and os.path.exists(name) and os.path.getsize(name) > 0
    if policy.is_default or policy_sources.applied() or marked:
        return
    flags = shlex.join(policy_sources.flags_of(policy))
    raise ConfigError.of(
        flags,
        "no load has applied it, in this process or in one that it started on this machine: training began anew, or "
        "went on without it",
        mend="name the checkpoint to the script, or leave the flags out; if the script starts its ranks by a launcher "
        f"that gives them another environment: torchrun ... -m ds_reshard.run {flags} train.py",
    )


def _mark() -> None:
    """Leave a mark in the file of the process above; where that has ended there is none, and none is made."""
    name = os.environ.get(_APPLIED)
    if name is None or not os.path.exists(name):
        return
    try:
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.write(file, b"1")
        os.close(file)
    except OSError as error:
        _LOG.warning("%s cannot be written: ds_reshard.run will not know that a load has applied its flags", error)


def _at_end() -> None:
    """At exit: end with status 1 if no load has applied `DS_RESHARD_FLAGS`.

    If the user has set the variable, rank 0 does so; if `ds_reshard.run` has replaced itself by the script (os.exec),
    that process. Processes that these start say nothing. A script that has failed keeps its own status.
    """
    name = os.environ.get(_APPLIED)
    if name is None or not _is_own(name):
        return
    try:
        if getattr(sys, "last_value", None) is None:
            refuse_unseen()
    except ConfigError as error:
        _LOG.error("%s", error)
        forget_mark()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    forget_mark()


def report_unseen() -> None:
    """At exit, log an error if no load has applied the flags of a script's own parser. They change no status."""
    atexit.unregister(_report)
    atexit.register(_report)


def _report() -> None:
    ends_with_status = _APPLIED in os.environ  # which says it, too
    if ends_with_status or os.environ.get("RANK", "0") != "0" or getattr(sys, "last_value", None) is not None:
        return
    try:
        refuse_unseen()
    except ConfigError as error:
        _LOG.error("%s", error)


_settings, _flags = os.environ.get("DS_RESHARD_SETTINGS", ""), os.environ.get(_FLAGS, "")
if _flags:
    policy_sources.ask(policy_sources.from_flags(shlex.split(_flags), place=_FLAGS))
    if os.environ.get("RANK") == "0" and _APPLIED not in os.environ:
        _make_mark()
    atexit.register(_at_end)
policy_sources.on_applied(_mark)
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
