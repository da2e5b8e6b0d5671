"""What this process was asked: places that gave a policy, until a load consumes them; and the last report."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ds_reshard.resume.policy import Given, ResumePolicy, combine

_LOCK = threading.Lock()
_PLACES: dict[str, Given] = {}
_LISTENERS: list[Callable[[ResumePolicy], None]] = []


def ask(given: Given) -> None:
    """Note what a place gave, instead of what it gave before; ConfigError where places differ.

    A place that gives nothing takes nothing back: scripts parse again for defaults, or with a second parser.
    """
    if not given.values:
        return
    with _LOCK:
        others = [one for place, one in _PLACES.items() if place != given.place]
        policy = combine([*others, given])
        _PLACES[given.place] = given
    for listener in list(_LISTENERS):
        listener(policy)


def on_asked(listener: Callable[[ResumePolicy], None]) -> None:
    """Call `listener` with the policy whenever one is asked for, and now if one was; each listener once."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)
    policy = asked_policy()
    if not policy.is_default:
        listener(policy)


def asked_policy(*more: Given) -> ResumePolicy:
    """The policy of every place together with `more` (a host's own configuration)."""
    with _LOCK:
        return combine([*_PLACES.values(), *more])


def adopted(key: str) -> bool:
    """Whether `key` was given through a flag of the script's own, which the script acts on as well."""
    with _LOCK:
        return any(key in given.adopted for given in _PLACES.values())


def forget() -> None:
    """Forget what was asked."""
    with _LOCK:
        _PLACES.clear()
