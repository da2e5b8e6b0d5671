"""What a user says of how tensor-parallel ranks cut parameters, where no checkpoint says it: rules over their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

from ds_reshard.errors import Fault, wrong_value
from ds_reshard.model.context_value import context_value


class Rule(NamedTuple):
    """What a user says of the parameters that a pattern names: they are cut along `dim`, or `replicated`.

    `parts` are the sizes along it of what is cut one by one (query, key, value; gate and up), or the number of equal
    ones. Rows behind `vocabulary` are padding. Copies are equal, unless the rank is named whose counts, their `owner`.
    """

    parameters: str
    dim: int = 0
    parts: int | tuple[int, ...] = 1
    replicated: bool = False
    vocabulary: int | None = None
    owner: int | None = None


_GIVEN: ContextVar[tuple[Rule, ...]] = ContextVar("rules of tensor parallelism", default=())


def use_rules(rules: Sequence[Rule]) -> AbstractContextManager[None]:
    """Let every checkpoint that a tool opens inside the block be divided by these rules."""
    return context_value(_GIVEN, tuple(rules))


def active_rules() -> tuple[Rule, ...]:
    return _GIVEN.get()


_FORM = '{"parameters": "REGEX"} with "dim" (0), "parts" (sizes, or a number), "vocabulary", or "replicated": true'
_FORM += ' with "owner"'


def rule_faults(where: str, said: object) -> list[Fault]:
    """What is wrong with rules as a JSON file has them: a list of objects."""
    if not isinstance(said, list):
        return [wrong_value(where, "a list of rules", said)]
    return [wrong_value(f"{where}[{number}]", _FORM, rule) for number, rule in enumerate(said) if not _is_rule(rule)]


def parse_rules(said: object) -> tuple[Rule, ...]:
    """The rules of a JSON file without faults."""
    rules = said if isinstance(said, list) else []
    return tuple(
        Rule(**{**rule, "parts": tuple(rule["parts"])} if isinstance(rule.get("parts"), list) else rule)
        for rule in rules
    )


def _is_rule(rule: object) -> bool:
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
    least = ((rule.get("dim", 0), 0), (rule.get("vocabulary", 1), 1), *((size, 1) for size in sizes))
    return all(type(one) is int and one >= low for one, low in least)
