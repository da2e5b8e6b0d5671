"""`ds-reshard convert`: its arguments, its progress bar, and what it says at the end."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console

from ds_reshard.cli.arguments import (
    add_checkpoint,
    add_command,
    add_json,
    add_reading,
    add_target,
    add_trust,
    processes,
    shard,
    show,
    target,
)
from ds_reshard.cli.launch import restarted, sharing
from ds_reshard.cli.render import bar, line
from ds_reshard.operations import Conversion, Options, convert


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "convert",
        help="write a checkpoint anew, for another ZeRO stage, size or format; DeepSpeed itself loads it",
        example="checkpoints converted --to zero3 --dp 8",
    )
    add_checkpoint(parser, "SRC")
    parser.add_argument(
        "out", metavar="OUT", help="the folder to make, or its URL: it is there when all of it is written"
    )
    add_target(parser)
    add_reading(parser)
    parser.add_argument(
        "--shard", type=shard, metavar="I/N", help="do part I of N, counted from 0; the last one finishes"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a conversion that was interrupted")
    parser.add_argument(
        "--repair", action="store_true", help="put back states that Megatron-LM has saved shifted (--to megatron)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT when all of the new one is written")
    add_trust(parser)
    add_json(parser, run, shared=True)


def run(arguments: argparse.Namespace) -> int:
    ranks = sharing().size > 1
    options = Options(
        threads=arguments.threads,
        processes=processes(arguments, alone=not ranks and arguments.shard is None),
        memory_nbytes=arguments.memory << 20,
        shard=arguments.shard or (0, 1),
        resume=arguments.resume or restarted(),
        force=arguments.force,
        ranks=ranks,
    )
    with bar("written") as progress:
        done = convert(
            arguments.checkpoint,
            arguments.out,
            options=options,
            progress=progress,
            repair=arguments.repair,
            **target(arguments),
        )
    show(arguments, lambda: asdict(done), lambda console: _render(done, console))
    return 0


def _render(done: Conversion, console: Console) -> None:
    """A line that says what was written, and one for each note."""
    left = "" if done.complete else "; the parts of other processes are still to be written"
    line(console, f"{done.out}: {done.files} files, {done.bytes_read} bytes read, {done.bytes_written} written{left}")
    for note in done.notes:
        line(console, f"note: {note}")
