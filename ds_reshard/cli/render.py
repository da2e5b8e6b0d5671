"""What the subcommands show in a terminal: tables, faults and progress."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.launch import launched, sharing
from ds_reshard.errors import Fault, mends_of
from ds_reshard.hooks import HookStatus
from ds_reshard.model.reports import (
    FileEntry,
    Fingerprinted,
    GroupEntry,
    Inspection,
    Naming,
    ParameterEntry,
    pickle_line,
)
from ds_reshard.operations import Progress as Told


def complain(text: str) -> None:
    """Put it on stderr; where that is closed, full or read by nobody, the work and its status stay what they are."""
    if sys.stderr is None:
        return
    try:
        print(f"ds-reshard: {in_lines(text)}", file=sys.stderr, flush=True)
    except OSError:
        read_enough(sys.stderr)


def in_lines(text: str) -> str:
    """As `printable`, its lines kept."""
    return "\n".join(map(printable, text.split("\n")))


def read_enough(stream: TextIO) -> None:
    """Nobody reads on; nor is it an error at the end (python.org, library/signal, "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def bar(what: str) -> Iterator[Told | None]:
    """Bytes, rate and time left on stderr, on a terminal; of several ranks a line every 30 s elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty() or not launched().tells:
        yield _lines(what) if sharing().size > 1 and sharing().tells else None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _lines(what: str) -> Told:
    from ds_reshard.operations.progress import LOG_S, so_far  # which needs numpy

    began = told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= LOG_S:
            told = now
            complain(so_far(done, total, now - began, what))

    return tell


_ROWS = 20

_STYLE = {
    "installed": "green",
    "available": "cyan",
    "disabled": "yellow",
    "vendored": "cyan",
    "refused": "bold red",
    "framework absent": "dim",
}


def put(console: Console, made: Table) -> None:
    """The table on a terminal; elsewhere plain lines: headings behind `#`, and a row a line, with tabs."""
    if console.is_terminal:
        console.print(made)
        return
    for texts in ([str(made.title or "")], [str(column.header) for column in made.columns]):
        if any(texts):
            print("# " + "\t".join(map(printable, texts)), file=console.file)
    for cells in zip(*(column.cells for column in made.columns), strict=True):
        print("\t".join(printable(str(cell).replace("\n", "; ")) for cell in cells), file=console.file)


def render_hooks(statuses: Sequence[HookStatus], console: Console, *, every_patch: bool = False) -> None:
    """One line a host: its version, whether that is tested, how many patches are in which state; refused ones whole."""
    hosts = {(status.host, status.version, status.tested): None for status in statuses}
    for host, version, tested in () if every_patch else hosts:
        states = Counter(status.state for status in statuses if status.host == host)
        said = ", ".join(f"{count} {state}" for state, count in states.items()) if version else "framework absent"
        known = f" {version} ({'tested' if tested else 'not tested'})" if version else ""
        line(console, f"{host}{known}: {said}", _STYLE[next(iter(states))] if len(states) == 1 else "")
    shown = statuses if every_patch else [status for status in statuses if status.state == "refused"]
    if shown:
        put(console, _hook_table(shown))


def _hook_table(statuses: Sequence[HookStatus]) -> Table:
    """One row a patch: host and version, state, whether the version is tested, target, summary and reason."""
    made = table("Hooks", "host", "state", "tested", "patch", show_lines=True)
    for status in statuses:
        module, _, name = status.target.partition(":")
        patch = Text(f"{name}\n")
        patch.append(f"of {module}\n{status.summary}", style="dim")
        if status.reason:
            patch.append(f"\n{status.reason}", style=_STYLE[status.state])
        made.add_row(
            Text(f"{status.host} {status.version or ''}".rstrip()),
            Text(status.state, style=_STYLE[status.state]),
            Text("yes" if status.tested else "no"),
            patch,
        )
    return made


def render_inspection(inspection: Inspection, console: Console, *, every_row: bool = False) -> None:
    """A summary, the param groups, the parameters (the first 20 unless `every_row`), then every fault in red."""
    if console.is_terminal:
        console.print(Panel(_summary(inspection), title="Checkpoint", title_align="left", expand=False))
    else:
        put(console, _summary(inspection))
    if inspection.groups:
        put(console, _group_table(inspection.groups))
    if inspection.parameters:
        shown = inspection.parameters if every_row else inspection.parameters[:_ROWS]
        put(console, _parameter_table(shown))
        if len(shown) < len(inspection.parameters):
            console.print(Text(f"and {len(inspection.parameters) - len(shown)} more: --all shows them", style="dim"))
    if every_row or inspection.faults:
        put(console, _file_table(inspection.files))
    for note in inspection.notes:
        line(console, note, "dim")
    render_faults(inspection.faults, console)
    line(console, pickle_line(inspection.pickles, inspection.pickles_unread, inspection.faults))


def render_fingerprints(found: Fingerprinted, console: Console) -> None:
    """One row a logical tensor, then what is not among them, then every fault in red."""
    made = table(f"Fingerprints of {printable(found.folder)}", "name", "kind", "type", "shape")
    made.add_column("fingerprint", no_wrap=True)
    for tensor in found.tensors:
        shown = Text("not verified", style="red") if tensor.fingerprint is None else Text(tensor.fingerprint)
        name, kind = Text(printable(tensor.name)), Text(printable(tensor.kind))
        made.add_row(name, kind, tensor.dtype, _shape(tensor.shape), shown)
    put(console, made)
    for note in found.notes:
        line(console, note, "dim")
    render_faults(found.faults, console)


def render_naming(found: Naming, console: Console) -> None:
    """One line a map that fits, then the faults of the others: of one that was named all, else how many."""
    for one in found.maps:
        if one.faults:
            continue
        (here, there), (before, after) = one.sides, one.weights
        line(console, f"{one.name}: fits; {before} weights of {here} are {after} of {there}. {one.about}")
    for one in (one for one in found.maps if one.faults):
        if len(found.maps) == 1:
            line(console, f"{printable(one.name)}: does not fit")
            render_faults(one.faults, console)
            continue
        line(console, f"{one.name}: does not fit: {printable(one.faults[0].line())}", "dim")
    if found.skeleton:
        line(console, "No map fits. A map of your own begins like this; see docs/maps.md:")
        for one_line in found.skeleton.splitlines():
            line(console, one_line)


def render_faults(faults: Sequence[Fault], console: Console) -> None:
    """How many there are, and what mends them."""
    if faults:
        line(console, f"{len(faults)} fault{'s' if len(faults) > 1 else ''} found", "bold red")
        render_lines(faults, console)


def render_lines(faults: Sequence[Fault], console: Console, *, told: int = 0) -> None:
    """Each fault but the first that are `told` already, and what mends it, once for those that follow each other."""
    mends = mends_of(faults)
    for number, fault in enumerate(faults):
        if number >= told:
            line(console, fault.line(), "red")
        if mends[number : number + 1] != mends[number + 1 : number + 2]:
            line(console, f"  to mend: {mends[number]}")


def table(title: str, *headings: str, right: Sequence[str] = (), **how: Any) -> Table:
    """A table of which long cells are folded; numbers below the headings `right` stand at the right."""
    made = Table(title=title, title_justify="left", **how)
    for heading in headings:
        made.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    return made


def line(console: Console, text: str, style: str = "") -> None:
    """One line, not wrapped: whoever reads it by a program finds it whole."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters spelled out: names in a file must not command the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _summary(inspection: Inspection) -> Table:
    steps, made = inspection.steps, inspection.arrangement
    roles = ", ".join(f"{c['elements']:,} {role} (in {c['tensors']} tensors)" for role, c in inspection.counts.items())
    flags = {
        "round-robin": made.round_robin,
        "alignment gaps": made.alignment_gaps,
        "elastic": made.elastic,
        f"offloaded to {made.offloaded_to}": made.offloaded_to not in (None, "none"),
    }
    rows = {
        "format": f"{inspection.format}, written by {inspection.writer} {_or_unknown(inspection.version)}",
        "folder": inspection.folder,
        "tag": inspection.tag,
        "layout": f"stage {_or_unknown(inspection.stage)}, dp {_or_unknown(inspection.dp)}, "
        + "".join(
            f"{axis} {size}, "
            for axis, size in (("tp", inspection.tp), ("pp", inspection.pp), ("ep", inspection.ep))
            if size is not None
        )
        + f"wrapper {_or_unknown(inspection.wrapper)}"
        + (f", flat buffers a rank: {made.buffers}" if made.buffers is not None else ""),
        "flags": ", ".join(name for name, on in flags.items() if on) or "none",
        "optimizer": inspection.optimizer or "not named (the script's own)",
        "states": ", ".join(
            f"{s.kind} {'/'.join(s.dtypes)}{' (scalar)' if s.scalar else ''}" for s in inspection.states
        ),
        "steps": f"{_or_unknown(steps.global_steps)} global, {_or_unknown(steps.skipped_steps)} skipped, optimizer "
        + (", ".join(map(str, steps.optimizer_steps)) or "unknown"),
        "elements": roles or "unknown",
        "size": f"{size(inspection.total_nbytes)} in {len(inspection.files)} files"
        + (f"; {size(inspection.bytes_read)} read" if inspection.bytes_read is not None else ""),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(Text(name, style="dim"), Text(printable(value), overflow="fold"))
    return grid


def _group_table(groups: Sequence[GroupEntry]) -> Table:
    counts = ("group", "members", "elements")
    made = table("Param groups", *counts, "hyper-parameters", right=counts)
    for group in groups:
        hyper = group.hyperparameters
        said = "not saved" if hyper is None else ", ".join(f"{name}={value}" for name, value in hyper.items())
        numel = "unknown" if group.numel is None else f"{group.numel:,}"
        made.add_row(str(group.number), str(group.members), numel, Text(printable(said)))
    return made


def _parameter_table(parameters: Sequence[ParameterEntry]) -> Table:
    made = table("Parameters", "name", "shape", "type", "role", "group")
    for entry in parameters:
        role = f"{entry.role}, tied to {printable(entry.tied_to)}" if entry.tied_to is not None else entry.role
        role += f", {printable(entry.division)}" if entry.division is not None else ""
        group = "" if entry.group is None else str(entry.group)
        made.add_row(Text(printable(entry.name)), _shape(entry.shape), entry.dtype or "unknown", Text(role), group)
    return made


def _file_table(files: Sequence[FileEntry]) -> Table:
    made = table("Files", "name", "role", "size", right=("size",))
    for file in files:
        made.add_row(Text(printable(file.name)), file.role, size(file.nbytes))
    return made


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)


def size(nbytes: int) -> str:
    """A number of bytes in the unit that suits it."""
    scaled, units = float(nbytes), iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while scaled >= 1024 and unit != "TiB":
        scaled, unit = scaled / 1024, next(units)
    return f"{nbytes} bytes" if unit == "bytes" else f"{scaled:.1f} {unit}"
