"""`ds-reshard diff`: its arguments, and what differs as tables."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.arguments import add_command, add_json, add_reading, add_trust, reading, show
from ds_reshard.cli.render import bar, line, printable, put, render_faults, size, table
from ds_reshard.model.reports import DIFFERS, EQUAL, Difference, TensorDifference, ValueDifference
from ds_reshard.operations import diff

_ROWS = 40


def add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "diff",
        help="compare two checkpoints of any stage and size, to the bit; status 1 where they differ",
        example="checkpoints converted",
    )
    parser.add_argument("a", metavar="A", help="the folder that was given to save_checkpoint")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--tag-a", metavar="TAG", help="the tag of A (default: the one that 'latest' names)")
    parser.add_argument("--tag-b", metavar="TAG", help="the tag of B")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, the equal ones too")
    add_reading(parser)
    add_trust(parser)
    add_json(parser, run, shared=True)


def run(arguments: argparse.Namespace) -> int:
    with bar("read") as progress:
        found = diff(
            arguments.a,
            arguments.b,
            tag_a=arguments.tag_a,
            tag_b=arguments.tag_b,
            reading=reading(arguments),
            progress=progress,
        )
    show(
        arguments,
        lambda: found.to_json(every_tensor=arguments.tensors),
        lambda console: render_difference(found, console, every_tensor=arguments.tensors),
    )
    return 0 if found.equal else 1


def render_difference(found: Difference, console: Console, *, every_tensor: bool = False) -> None:
    """The tensors that differ (the first 40, or all of both sides), the values that differ, and a line that sums up."""
    shown = found.tensors if every_tensor else found.differing[:_ROWS]
    if shown:
        put(console, _tensor_table(shown))
    left = len(found.differing) - len(shown)
    if left > 0:
        console.print(Text(f"and {left} more that differ: --tensors shows all", style="dim"))
    if found.values:
        put(console, _value_table(found.values))
    render_faults(found.faults, console)
    for note in found.notes:
        line(console, note, "dim")
    line(console, _summary(found), "green" if found.equal else "bold red")


def _summary(found: Difference) -> str:
    sides = f"A {found.a}, B {found.b}"
    read = f"{size(found.bytes_read)} read"
    if found.equal:
        return f"{sides}: equal to the bit in {len(found.tensors)} tensors and all values that are compared; {read}"
    return (
        f"{sides}: {len(found.differing)} of {len(found.tensors)} tensors and {len(found.values)} values differ"
        + (f", {len(found.faults)} faults" if found.faults else "")
        + f"; {read}"
    )


def _tensor_table(tensors: tuple[TensorDifference, ...]) -> Table:
    made = table("Tensors", "name", "kind", "state", "elements", "max abs", "ulp", "first at")
    for tensor in tensors:
        state = tensor.state if tensor.state in (EQUAL, DIFFERS) else f"{tensor.state}: {tensor.a} | {tensor.b}"
        numbers = ["", "", "", ""]
        if tensor.first is not None:
            first = f"{list(tensor.first)}: {tensor.first_a} | {tensor.first_b}"
            ulp = "" if tensor.max_ulp is None else f"{tensor.max_ulp:,}"
            numbers = [f"{tensor.differing:,} of {tensor.numel:,}", f"{tensor.max_abs:.4g}", ulp, first]
        style = "dim" if tensor.state == EQUAL else ""
        made.add_row(*(Text(printable(text)) for text in (tensor.name, tensor.kind, state, *numbers)), style=style)
    return made


def _value_table(values: tuple[ValueDifference, ...]) -> Table:
    made = table("Values", "what", "A", "B")
    for value in values:
        made.add_row(*(Text(printable(text)) for text in (value.where, value.a, value.b)))
    return made
