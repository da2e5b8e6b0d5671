"""What is asked of the hooks of FSDP, of every save that follows; and of all hosts that have no JSON of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from ds_reshard.containers.pickle_rules import trust, trust_faults
from ds_reshard.errors import ConfigError, Fault, error_of, raise_faults, wrong_value
from ds_reshard.operations.name_map import ask_names
from ds_reshard.operations.watching import ask, watching_faults
from ds_reshard.resume.schedulers import ask_unit, unit_faults

VERIFY_AFTER_SAVE = "verify_after_save"
_ASKED: set[str] = set()
_TOP = ("accelerate", "events", "fsdp", "names", "progress", "timeout_s", "trust")


_SAVED: set[str] = set()


def note_saved(folder: str) -> None:
    """Remember a folder that this process has saved into."""
    _SAVED.add(os.path.realpath(folder))


def saved_here(folder: str) -> bool:
    """Whether this process has saved into a folder: to load it is no resume."""
    return os.path.realpath(folder) in _SAVED


def asks_to_verify() -> bool:
    """Whether what is saved is verified before the save returns."""
    return VERIFY_AFTER_SAVE in _ASKED


def ask_to_verify(wanted: object) -> None:
    """Verify what is saved from now on, or no longer; ConfigError for anything else than True and False."""
    if not isinstance(wanted, bool):
        raise error_of([wrong_value(VERIFY_AFTER_SAVE, "True, False", wanted)], subject='ds_reshard.install("fsdp")')
    if wanted:
        _ASKED.add(VERIFY_AFTER_SAVE)
    else:
        _ASKED.discard(VERIFY_AFTER_SAVE)


def ask_settings(text: str, *, place: str) -> None:
    """Ask for what a JSON object of settings says; ConfigError names every mistake, `place` says where it was read."""
    try:
        held: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        held = error
    faults = list(_mistakes(held, place))
    raise_faults(faults, subject=place)
    if isinstance(held, dict):
        trust(held.get("trust", ()))
        if "names" in held:
            ask_names(held["names"])
        ask_unit(held.get("accelerate", {}).get("position"))
        ask(held.get("progress"), held.get("events"), held.get("timeout_s"))
        if VERIFY_AFTER_SAVE in held.get("fsdp", {}):
            ask_to_verify(held["fsdp"][VERIFY_AFTER_SAVE])


def _mistakes(held: object, place: str) -> Iterator[Fault]:
    if not isinstance(held, dict):
        yield wrong_value(place, '{"fsdp": {"verify_after_save": true}}', held)
        return
    yield from (_unknown(place, name, ", ".join(_TOP)) for name in held if name not in _TOP)
    if not isinstance(held.get("names", ""), str):
        yield wrong_value("names", "the path of a JSON file", held["names"])
    yield from watching_faults("", held.get("progress"), held.get("events"), held.get("timeout_s"))
    yield from unit_faults(held.get("accelerate", {}))
    names = held.get("trust", [])
    yield from trust_faults("trust", names)
    section = held.get("fsdp", {})
    if not isinstance(section, dict):
        yield wrong_value("fsdp", '{"verify_after_save": true}', section)
        return
    yield from (
        _unknown(place, f"fsdp.{name}", f"fsdp.{VERIFY_AFTER_SAVE}") for name in section if name != VERIFY_AFTER_SAVE
    )
    wanted = section.get(VERIFY_AFTER_SAVE, False)
    if not isinstance(wanted, bool):
        yield wrong_value(f"fsdp.{VERIFY_AFTER_SAVE}", "true, false", wanted)


def _unknown(place: str, name: str, expected: str) -> Fault:
    mend = f'remove "{name}" from {place}; settings of other hosts belong in the "ds_reshard" section of their JSON'
    return ConfigError.fault(name, "is no setting of this place", expected, mend=mend)
