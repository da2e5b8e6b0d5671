"""Arguments that several subcommands have."""

from __future__ import annotations

import argparse
import os

from ds_reshard.formats.zero.weights_target import DTYPES
from ds_reshard.operations import FORMATS, Reading
from ds_reshard.operations.options import refuse_memory


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def add_target(parser: argparse.ArgumentParser) -> None:
    """What is to be written, of which tag."""
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument("--dp", type=count, metavar="N", help="data-parallel size (default: the saving run's)")
    parser.add_argument("--tag", help="the tag to read (default: the one that 'latest' names)")
    parser.add_argument(
        "--sub-group-size", type=count, metavar="N", help="the coming run's, for zero3 (default: the saving run's)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights, with safetensors and torch")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """--threads and --memory."""
    parser.add_argument(
        "--threads", type=count, metavar="N", default=min(4, os.cpu_count() or 1), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--memory", type=count, metavar="MIB", default=256, help="memory for buffers (default: %(default)s)"
    )


def reading(arguments: argparse.Namespace) -> Reading:
    """What add_reading's arguments say; raises ConfigError for memory that is too little for the threads."""
    refuse_memory(arguments.threads, arguments.memory << 20)
    return Reading(threads=arguments.threads, memory_nbytes=arguments.memory << 20)
