"""A subcommand, the arguments that several have, and how an answer is printed."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.console import Console

from ds_reshard.cli.launch import sharing
from ds_reshard.cli.render import read_enough
from ds_reshard.errors import WriteFailed
from ds_reshard.operations import FORMATS, Reading
from ds_reshard.operations.options import OPTIONS, THREADS, TargetOption, refuse_memory

FOLDER = "the folder that was given to save_checkpoint"


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def bandwidth(text: str) -> float:
    """Gigabytes a second."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes a second")
    return value


def shard(text: str) -> tuple[int, int]:
    """I/N: a part of the work, counted from 0, and the number of parts."""
    number, _, count = text.partition("/")
    if not number.isdecimal() or not count.isdecimal() or not int(number) < int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")
    return int(number), int(count)


How = Mapping[str, Any]
"""The keywords of argparse's `add_argument`."""


def switch(help: str) -> How:
    return {"action": "store_true", "help": help}


def text(metavar: str, help: str) -> How:
    return {"metavar": metavar, "help": help}


def number(help: str, *, type: Callable[[str], object] = count, metavar: str = "N", **more: Any) -> How:
    return {"help": help, "type": type, "metavar": metavar, **more}


def gigabytes(help: str) -> How:
    return number(help, type=bandwidth, metavar="GBPS", default=1.0)


def _how(option: TargetOption) -> How:
    """Return how the command line takes an option of some formats; its help names them."""
    help = f"{option.help} ({', '.join(option.formats)})"
    if option.choices:
        return {"help": help, "choices": option.choices, "type": type(option.choices[0])}
    if option.is_switch:
        return switch(help)
    return number(help) if option.metavar == "N" else text(option.metavar, help)


ARGUMENTS: Mapping[str, How] = {
    "checkpoint": text("CKPT", FOLDER),
    "--tag": {"help": "the tag to read (default: the one that 'latest' names)"},
    "--config": text("FILE", "the DeepSpeed JSON of the coming run"),
    "--to": {"required": True, "choices": FORMATS, "metavar": "FORMAT", "help": ", ".join(FORMATS)},
    "--names": text("FILE", "a map of names (docs/convert.md) or shapes (docs/maps.md): its JSON, or its name"),
    **{option.flag: _how(option) for option in OPTIONS},
    "--threads": number("(default: %(default)s)", default=THREADS),
    "--memory": number("memory for buffers (default: %(default)s)", metavar="MIB", default=256),
    "--processes": number("for what is large (default: as many as cores; 1 for each of several ranks)"),
    "--device": {
        "choices": ("auto", "cpu", "cuda"),
        "default": "auto",
        "help": "where the values are computed; auto is the cpu (default: %(default)s)",
    },
    "--rules": text("FILE", "JSON: how tensor-parallel ranks cut parameters, where DeepSpeed's files do not say it"),
    "--trust": {
        "action": "append",
        "default": [],
        **text("CLASS", "a class that its pickles may name, as module.Class; may be given again"),
    },
    "--json": switch("print JSON"),
}
"""The arguments that several subcommands have."""
TARGET = " ".join(("--to", "--names", *(option.flag for option in OPTIONS if not option.is_switch)))
"""What is to be written: the format, and the options of each format."""
READING = "--threads --memory --processes"


class Command(NamedTuple):
    """A subcommand: its `own` arguments, the `common` ones by name, and --json; its --help ends with the example.

    It is `shared` if the ranks of a launcher do it together.
    """

    name: str
    run: Callable[[argparse.Namespace], int]
    help: str
    example: str
    common: str
    own: Mapping[str, How] = {}
    usage: str | None = None
    shared: bool = False

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add its parser."""
        told: dict[str, Any] = {"description": f"{self.help[0].upper()}{self.help[1:]}.", "usage": self.usage}
        example = f"example: ds-reshard {self.name} {self.example}"
        parser = commands.add_parser(self.name, help=self.help, epilog=example, **told)
        for name in (*self.own, *self.common.split(), "--json"):
            parser.add_argument(name, **self.own.get(name, ARGUMENTS.get(name, {})))
        parser.set_defaults(run=self.run, shared=self.shared)


def target(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Return what the arguments of TARGET say, and --repair, by the names that `convert` and `plan` give them."""
    names = ("to", "tag", "names", *(option.name for option in OPTIONS))
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def show(arguments: argparse.Namespace, told: Callable[[], object], render: Callable[[Console], None]) -> None:
    """Print what was found: as JSON, or on the console. Of several ranks the first does.

    Raises WriteFailed where it cannot be written: whoever asked has not been told, so no status says what was found.
    """
    if not sharing().tells or sys.stdout is None:  # closed: nobody wants to read it
        return
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the encoding of the locale has no letters for
    try:
        if arguments.json:
            print(json.dumps(told(), indent=2), flush=True)
        else:
            render(_Output(width=max(_NARROWEST, Console().width)))
            sys.stdout.flush()
    except BrokenPipeError:
        read_enough(sys.stdout)
    except OSError as error:
        read_enough(sys.stdout)
        mend = "free space there, or let it be written elsewhere"
        raise WriteFailed.of("stdout", f"cannot be written: {error.strerror or error}", mend=mend) from None


_NARROWEST = 40  # COLUMNS may be 0, and rich shows nothing then


class _Output(Console):
    """stdout, which may be read to its first line alone: the exit status is then what it would have been."""

    def on_broken_pipe(self) -> None:
        read_enough(sys.stdout)


def reading(arguments: argparse.Namespace) -> Reading:
    """What READING and --device say; raises ConfigError for memory too little for the threads."""
    refuse_memory(arguments.threads, arguments.memory << 20)
    device = getattr(arguments, "device", "auto")
    alone = sharing().size == 1
    return Reading(
        threads=arguments.threads,
        memory_nbytes=arguments.memory << 20,
        device=device,
        processes=processes(arguments, alone=alone),
        ranks=not alone,
    )


def processes(arguments: argparse.Namespace, *, alone: bool) -> int:
    """How many copies of this process share its work; one where it is not alone."""
    asked: int | None = getattr(arguments, "processes", 1)
    return asked or (os.cpu_count() or 1 if alone else 1)
