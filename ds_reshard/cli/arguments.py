"""Arguments that several subcommands have."""

from __future__ import annotations

import argparse
import os

from ds_reshard.operations import Reading
from ds_reshard.operations.options import refuse_memory


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


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
