"""`ds-reshard verify` and `ds-reshard diff`: their arguments, findings and differences as tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.arguments import FOLDER, READING, Command, reading, show, switch, text
from ds_reshard.cli.render import bar, line, printable, put, render_faults, size, table
from ds_reshard.errors import ConfigError, Fault, mends_of
from ds_reshard.model.reports import (
    DIFFERS,
    EQUAL,
    Difference,
    PickleScan,
    TensorDifference,
    ValueDifference,
    Verification,
    pickle_line,
)
from ds_reshard.operations import diff, scan_pickles, verify

_ROWS = 40


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.pickles:
        return _search(arguments)
    with bar("read") as progress:
        found = verify(
            arguments.checkpoint,
            tag=arguments.tag,
            deep=arguments.deep,
            against=arguments.against,
            reading=reading(arguments),
            progress=progress,
        )
    show(arguments, found.to_json, lambda console: render_verification(found, console))
    return 0 if found.clean else 1


def _search(arguments: argparse.Namespace) -> int:
    """What is in the pickles alone; status 1 for any finding."""
    if arguments.deep or arguments.against is not None or arguments.tag is not None:
        raise ConfigError("--pickles looks at pickles alone: leave out --deep, --against and --tag")
    found = scan_pickles(arguments.checkpoint)
    show(arguments, found.to_json, lambda console: _render_pickles(found, console))
    return 1 if found.faults else 0


def _render_pickles(found: PickleScan, console: Console) -> None:
    for fault in found.faults:
        line(console, f"{fault.where}: {fault.what}", "red")
    _mends(found.faults, console)
    files = f"{found.files} file{'s' if found.files != 1 else ''}"
    told = f"{found.folder}: {files}; {pickle_line(found.pickles, found.unread, found.faults)}"
    line(console, told, "bold red" if found.faults else "green")


def _mends(faults: Sequence[Fault], console: Console) -> None:
    for mend in filter(None, dict.fromkeys(mends_of(faults))):
        line(console, f"to mend: {mend}")


def render_verification(found: Verification, console: Console) -> None:
    """One row a finding, what mends them, what is no fault, and a line that says what was read."""
    if found.faults and not console.is_terminal:
        for fault in found.faults:
            line(console, fault.line())
    elif found.faults:
        made = table("Findings", "where", "what", "expected", "found", show_lines=True)
        for fault in found.faults:
            where = fault.where.removeprefix(f"{found.folder}/")
            made.add_row(*(Text(printable(text)) for text in (where, fault.what, fault.expected, fault.found)))
        console.print(made)
    _mends(found.faults, console)
    for note in found.notes:
        line(console, note, "dim")
    if found.difference is not None:
        render_difference(found.difference, console)
    looked = f", the values of {found.tensors} tensors" if found.tensors else ""
    count = len(found.faults)
    result = f"{count} finding{'s' if count != 1 else ''}" if count else "nothing found"
    rate = f" at {size(round(found.bytes_read / found.seconds))}/s" if found.seconds else ""
    told = f"{found.folder}: {result} in {found.files} files, {found.records} checksums{looked}; "
    line(console, f"{told}{size(found.bytes_read)} read{rate}", "bold red" if count else "green")
    line(console, pickle_line(found.pickles, found.pickles_unread, found.faults))


def _diff(arguments: argparse.Namespace) -> int:
    with bar("read") as progress:
        found = diff(
            arguments.a,
            arguments.b,
            tag_a=arguments.tag_a,
            tag_b=arguments.tag_b,
            names=arguments.names,
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
    line(console, _verdict(found), "green" if found.equal else "bold red")


def _verdict(found: Difference) -> str:
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


VERIFY = Command(
    "verify",
    _verify,
    "read a checkpoint whole and list everything that is wrong with it; status 1 for any finding",
    "checkpoints --deep",
    f"--tag {READING} --device --rules --trust",
    {
        "checkpoint": text("CKPT", f"{FOLDER}; with --pickles any folder"),
        "--deep": switch("look at the values of the tensors, too"),
        "--against": text("OTHER", "a checkpoint that it shall be equal to, of any layout"),
        "--pickles": switch("only search all pickles below CKPT for what acts when they are loaded"),
    },
    shared=True,
)
DIFF = Command(
    "diff",
    _diff,
    "compare two checkpoints of any stage and size, to the bit; status 1 where they differ",
    "checkpoints converted",
    f"--names {READING} --rules --trust",
    {
        "a": text("A", FOLDER),
        "b": text("B", "the other one"),
        "--tag-a": text("TAG", "the tag of A (default: the one that 'latest' names)"),
        "--tag-b": text("TAG", "the tag of B"),
        "--tensors": switch("list every tensor, the equal ones too"),
    },
    shared=True,
)
