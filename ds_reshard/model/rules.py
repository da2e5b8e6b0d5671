"""A user's rules of how tensor-parallel ranks cut parameters, by their names, if the checkpoint does not tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

from ds_reshard.errors import Fault, wrong_value
from ds_reshard.model.context_value import context_value


class Rule(NamedTuple):
    """A user's rule for the parameters that match a pattern: they are cut along `dim`, or `replicated`.

    `parts` are the sizes along `dim` of the parts that are cut separately (query, key, value; gate and up), or the
    number of equal parts. Rows from `vocabulary` on are padding. Replicas must be equal, unless `owner` is the rank
    whose copy is used.
    """

    parameters: str
    dim: int = 0
    parts: int | tuple[int, ...] = 1
    replicated: bool = False
    vocabulary: int | None = None
    owner: int | None = None


_GIVEN: ContextVar[tuple[Rule, ...]] = ContextVar("rules of tensor parallelism", default=())


def use_rules(rules: Sequence[Rule]) -> AbstractContextManager[None]:
    """Apply these rules to every checkpoint that is opened inside the block."""
    return context_value(_GIVEN, tuple(rules))


def active_rules() -> tuple[Rule, ...]:
    return _GIVEN.get()


_FORM = '{"parameters": "REGEX"} with "dim" (0), "parts" (sizes, or a number), "vocabulary", or "replicated": true'
_FORM += ' with "owner"'


def rule_faults(where: str, value: object) -> list[Fault]:
    """Return the faults of rules as they come from a JSON file; expected is a list of objects."""
    if not isinstance(value, list):
        return [wrong_value(where, "a list of rules", value)]
    return [wrong_value(f"{where}[{number}]", _FORM, rule) for number, rule in enumerate(value) if not _is_rule(rule)]


def parse_rules(value: object) -> tuple[Rule, ...]:
    """Return the rules of a JSON file that has no faults."""
    rules = value if isinstance(value, list) else []
    return tuple(
        Rule(**{**rule, "parts": tuple(rule["parts"])} if isinstance(rule.get("parts"), list) else rule)
        for rule in rules
    )


def _is_rule(rule: object) -> bool:
    """True if a JSON value is a rule: known keys with values of the right kind, and a valid pattern."""
    if not isinstance(rule, dict) or not rule.keys() <= set(Rule._fields):
        return False
    try:
        re.compile(rule["parameters"])
    except (KeyError, TypeError, re.error):
        return False
    cut, parts, owner = {"dim", "parts", "vocabulary"} & rule.keys(), rule.get("parts", 1), rule.get("owner", 0)
    if rule.get("replicated", False) is not False:
        return rule["replicated"] is True and not cut and type(owner) is int and owner >= 0
    if "owner" in rule:
        return False
    sizes = parts if isinstance(parts, list) and parts else [parts]
    minimums = ((rule.get("dim", 0), 0), (rule.get("vocabulary", 1), 1), *((size, 1) for size in sizes))
    return all(type(number) is int and number >= minimum for number, minimum in minimums)
