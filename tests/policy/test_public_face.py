"""What users can rely on: the exported names, the commands and the version. A change here is a release note."""

from __future__ import annotations

import argparse
import configparser
import subprocess
import sys

import pytest
from house import ROOT

import ds_reshard
from ds_reshard import operations
from ds_reshard.cli.main import build_parser, main, parse

EXPORTED = [
    "CheckpointDamaged",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "ConfigError",
    "DeviceFailed",
    "EngineUnusable",
    "Fault",
    "FingerprintMismatch",
    "HookError",
    "InternalError",
    "ModelMismatch",
    "ParamGroupMismatch",
    "PrepareError",
    "RankLost",
    "ReadFailed",
    "ReshardError",
    "ResumePolicy",
    "ScheduleMismatch",
    "TrustRequired",
    "UnsafePickle",
    "UnsupportedLayout",
    "WriteFailed",
    "__version__",
    "add_arguments",
    "diagnose",
    "install",
    "installed",
    "last_report",
    "prepare",
    "save_units",
    "uninstall",
    "verify_saved",
]

COMMANDS = {
    "convert": [
        "--dp",
        "--dtype",
        "--ep",
        "--force",
        "--json",
        "--like",
        "--memory",
        "--names",
        "--pp",
        "--processes",
        "--repair",
        "--resume",
        "--rules",
        "--shard",
        "--sub-group-size",
        "--tag",
        "--threads",
        "--to",
        "--tp",
        "--trust",
        "--zero-stage",
        "OUT",
        "SRC",
    ],
    "diff": [
        "--json",
        "--memory",
        "--names",
        "--processes",
        "--rules",
        "--tag-a",
        "--tag-b",
        "--tensors",
        "--threads",
        "--trust",
        "A",
        "B",
    ],
    "doctor": ["--config", "--json"],
    "fingerprint": [
        "--device",
        "--json",
        "--memory",
        "--names",
        "--processes",
        "--rules",
        "--tag",
        "--threads",
        "--trust",
        "CKPT",
    ],
    "hooks": ["--all", "--json", "--path"],
    "inspect": ["--all", "--json", "--rules", "--tag", "--trust", "CKPT"],
    "lr": ["--config", "--json", "--png", "--steps", "--tag", "--trust", "CKPT"],
    "names": ["--json", "--names", "--tag", "--trust", "CKPT"],
    "plan": [
        "--bandwidth",
        "--dp",
        "--dtype",
        "--ep",
        "--json",
        "--like",
        "--memory",
        "--names",
        "--pp",
        "--rules",
        "--shard",
        "--sub-group-size",
        "--tag",
        "--threads",
        "--to",
        "--tp",
        "--trust",
        "--zero-stage",
        "SRC",
    ],
    "preflight": [
        "--bandwidth",
        "--config",
        "--deep",
        "--ep",
        "--json",
        "--model",
        "--no-load-module-strict",
        "--nodes",
        "--pp",
        "--sp",
        "--tag",
        "--tp",
        "--trust",
        "--world",
        "CKPT",
    ],
    "verify": [
        "--against",
        "--deep",
        "--device",
        "--json",
        "--memory",
        "--pickles",
        "--processes",
        "--rules",
        "--tag",
        "--threads",
        "--trust",
        "CKPT",
    ],
}


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    found = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert len(found) == 1, "build_parser() must have exactly one set of subcommands"
    return dict(found[0].choices)


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return sorted(action.option_strings[-1] if action.option_strings else str(action.metavar) for action in actions)


def test_exported_names_are_frozen() -> None:
    """ds_reshard.__all__ is this list; whoever changes it changes the list and CHANGELOG.md in the same commit."""
    assert sorted(ds_reshard.__all__) == EXPORTED


def test_every_exported_name_is_there() -> None:
    """Each name of __all__ can be had from the package, the ones that are looked up late too."""
    missing = [name for name in ds_reshard.__all__ if not hasattr(ds_reshard, name)]
    assert missing == [], f"exported and not there: {', '.join(missing)}"


def test_no_module_takes_the_name_of_a_function() -> None:
    """A module that is imported late would stand in the function's place from then on."""
    modules = {path.stem for path in (ROOT / "ds_reshard" / "operations").glob("*.py")}
    assert modules & set(operations.__all__) == set()


def test_every_error_is_exported() -> None:
    """An exception that a caller can catch is a public name."""
    import ds_reshard.errors as errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised - set(ds_reshard.__all__) == set()


def test_commands_are_frozen() -> None:
    """The subcommands and arguments of ds-reshard are this table; scripts depend on them."""
    assert {name: _arguments(parser) for name, parser in _subcommands().items()} == COMMANDS


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """`ds-reshard --help` lists every subcommand, and each has a help of its own."""
    command = [sys.executable, "-m", "ds_reshard", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS), done.stderr
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and f"ds-reshard {name}" in capsys.readouterr().out


def test_the_version_is_one() -> None:
    """setup.cfg, ds_reshard.__version__ and the newest heading of CHANGELOG.md agree."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg", encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    newest = next(line for line in changes if line.startswith("## ")).split()[1]
    assert (declared["metadata"]["version"], newest) == (ds_reshard.__version__, ds_reshard.__version__)


def test_every_command_has_an_example_that_parses() -> None:
    """The last line of each --help is a command; one of a checkpoint of Megatron-LM goes on after `; or`."""
    for name, parser in _subcommands().items():
        told = " ".join(str(parser.epilog).split("; or")[0].split())
        assert told.startswith(f"example: ds-reshard {name}"), name
        parse(told.removeprefix("example: ds-reshard ").split())
