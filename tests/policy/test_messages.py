"""What messages tell the user to type exists: commands and their options, values of --to, keys of the JSON."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from messages import MEGATRON, named

from ds_reshard.cli.main import build_parser
from ds_reshard.operations import FORMATS
from ds_reshard.resume.policy import defaults
from ds_reshard.resume.policy_sources import FLAGS

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("--help", "--local-rank", "--local_rank", "--ds-reshard-always")
"""argparse's own; those of a launcher (run.py); and that of the Megatron host, which adds it itself."""


def _parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: sub for action in subs for name, sub in action.choices.items()}


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_there_are_messages() -> None:
    """What is looked for below is found at all."""
    assert len(list(named(r"ds-reshard [a-z]"))) > 5
    assert len(list(named(r"--[a-z]"))) > 100


def test_every_command_that_a_message_names_is_one_with_those_options() -> None:
    commands = _parsers(build_parser())
    wrong = []
    for module, text, match in named(r"ds-reshard ([a-z]+)((?: [^\s`;,()]+)*)"):
        name, rest = match[1], match[2]
        if name not in commands:
            wrong.append(f"{module}: ds-reshard {name}: {text[:100]}")
            continue
        unknown = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition(" -- ")[0])) - _options(commands[name])
        wrong += [f"{module}: ds-reshard {name} {option}" for option in sorted(unknown)]
    assert wrong == []


def test_every_option_that_a_message_names_exists() -> None:
    known = {*MEGATRON, *OTHERS}.union(*map(_options, _parsers(build_parser()).values()))
    known |= {name for flag in FLAGS for name in flag.names} | _options(build_parser())
    wrong = {
        f"{module}: {match[0]}: {text[:100]}"
        for module, text, match in named(r"(?<![\w-])--[a-z][\w-]*")
        if match[0] not in known and not match[0].endswith("-")
    }
    assert sorted(wrong) == []


def test_every_format_that_a_message_sends_to_exists() -> None:
    wrong = {
        f"{module}: {match[0]}"
        for module, _, match in named(r"--to ([a-z][a-z0-9-]*)")
        if match[1] not in FORMATS and match[1] not in ("of", "and", "has", "holds")
    }
    assert sorted(wrong) == []


@pytest.mark.parametrize("key", sorted(defaults()))
def test_every_key_of_the_resume_policy_is_documented(key: str) -> None:
    assert f'"{key}"' in (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
