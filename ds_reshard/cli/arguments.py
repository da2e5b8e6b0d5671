"""Arguments that several subcommands have."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from ds_reshard.cli.launch import sharing
from ds_reshard.cli.render import read_enough
from ds_reshard.errors import WriteFailed
from ds_reshard.model.target import DTYPES
from ds_reshard.operations import FORMATS, Reading
from ds_reshard.operations.options import THREADS, refuse_memory

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


def add_target(parser: argparse.ArgumentParser) -> None:
    """What is to be written: the format, and the options of each format."""
    parser.add_argument("--to", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument(
        "--names",
        metavar="FILE",
        help="JSON: each parameter's name and that in OUT; a name with a ( is a pattern: docs/convert.md",
    )
    sizes = parser.add_argument_group(
        "zero1, zero2, zero3, bf16, dcp, accelerate, fsdp, nanotron, megatron, megatron-torch"
    )
    sizes.add_argument("--dp", type=count, metavar="N", help="data-parallel size (default: the saving run's)")
    zero3 = parser.add_argument_group("zero3")
    zero3.add_argument("--sub-group-size", type=count, metavar="N", help="the coming run's (default: the saving run's)")
    weights = parser.add_argument_group("safetensors, torch")
    weights.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were trained)")
    grid = parser.add_argument_group("nanotron, megatron-torch", "sizes and stage are the saving run's unless given")
    grid.add_argument(
        "--tp", type=count, metavar="N", help="tensor-parallel size, of zero1, zero2, zero3 and bf16, too"
    )
    grid.add_argument("--pp", type=count, metavar="N", help="pipeline-parallel size, of zero1 and bf16, too")
    grid.add_argument("--zero-stage", type=int, choices=(0, 1), help="of nanotron's optimizer")
    shown = parser.add_argument_group("zero1, zero2, zero3, bf16, nanotron, megatron, megatron-torch")
    shown.add_argument(
        "--like", metavar="DIR", help="a checkpoint of the coming run, whose sizes, stages, parts and experts are taken"
    )
    experts = parser.add_argument_group("zero1, zero2, bf16, megatron")
    experts.add_argument(
        "--ep", type=count, metavar="N", help="expert-parallel size (default: 1); of megatron from 1 to more or back"
    )


def target(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """What add_target's arguments say, by the names that `convert` and `plan` give them."""
    names = ("to", "dp", "tag", "sub_group_size", "dtype", "tp", "pp", "ep", "zero_stage", "like", "names")
    return {name: getattr(arguments, name) for name in names}


def add_reading(parser: argparse.ArgumentParser, *, processes: bool = True) -> None:
    """--threads, --memory, and of a tool that copies of the process may share, --processes."""
    parser.add_argument("--threads", type=count, metavar="N", default=THREADS, help="(default: %(default)s)")
    parser.add_argument(
        "--memory", type=count, metavar="MIB", default=256, help="memory for buffers (default: %(default)s)"
    )
    if processes:
        told = "for what is large (default: as many as cores; 1 for each of several ranks)"
        parser.add_argument("--processes", type=count, metavar="N", help=told)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    help: str,
    example: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """A subcommand whose --help ends with an example."""
    told = f"example: ds-reshard {name} {example}"
    return commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", usage=usage, epilog=told)


def add_checkpoint(parser: argparse.ArgumentParser, metavar: str = "CKPT", help: str = FOLDER) -> None:
    """The checkpoint, and --tag."""
    parser.add_argument("checkpoint", metavar=metavar, help=help)
    parser.add_argument("--tag", help="the tag to read (default: the one that 'latest' names)")


def add_json(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, shared: bool = False
) -> None:
    """--json, and what the subcommand does; `shared` where the ranks of a launcher do it together."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, shared=shared)


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


def add_trust(parser: argparse.ArgumentParser, *, rules: bool = True) -> None:
    """--trust, and of a tool that reads tensors, --rules."""
    if rules:
        told = "JSON: how tensor-parallel ranks have cut parameters, where DeepSpeed's files do not say it"
        parser.add_argument("--rules", metavar="FILE", help=told)
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="CLASS",
        help="a class that its pickles may name, as module.Class; may be given again",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the values are computed; auto is the cpu (default: %(default)s)",
    )


def reading(arguments: argparse.Namespace) -> Reading:
    """What add_reading's and add_device's arguments say; raises ConfigError for memory too little for the threads."""
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
