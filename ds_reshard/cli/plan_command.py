"""`ds-reshard plan`: its arguments, and what a conversion would do, as a table or a page."""

from __future__ import annotations

import argparse
import html

from rich.console import Console
from rich.text import Text

from ds_reshard.cli.arguments import (
    add_checkpoint,
    add_command,
    add_json,
    add_reading,
    add_target,
    add_trust,
    bandwidth,
    reading,
    shard,
    show,
    target,
)
from ds_reshard.cli.render import line, printable, put, size, table
from ds_reshard.execution import disk
from ds_reshard.model.reports import ConversionPlan
from ds_reshard.model.target import RunSizes
from ds_reshard.operations import plan

_CELL, _MARGIN, _TOP = 13, 420, 130
_STYLE = """body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
text { font: 10px monospace; fill: #222 } rect.cell { fill: #1f5fa8 } rect.frame { fill: #f4f4f4; stroke: #ccc }
line { stroke: #ddd; stroke-width: 0.5 }"""


def page(plan: ConversionPlan) -> str:
    """A page that needs nothing beside itself; names are escaped. Hovering over a cell tells its bytes."""
    title = _escaped(f"{plan.folder} to {plan.to}, {_sized(plan.coming)}")
    said = (
        f"{size(plan.bytes_read)} read from {len(plan.sources)} files, {size(plan.bytes_written)} written in "
        f"{sum(len(unit.files) for unit in plan.units)} files; {plan.seconds:.3g} s at {plan.bandwidth / 1e9:g} GB/s"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{_escaped(said)}. A row is a source file, a "
        "column a target rank (or a part of a universal checkpoint); the darker a cell, the more bytes it reads.</p>\n"
        f"{_grids(plan)}{_drawing(plan)}\n</body></html>\n"
    )


_RANK, _MOST = 9, 16
_PLACES = ("#1f5fa8", "#d9822b", "#3a8f4f", "#a23b72", "#6b6b6b", "#8c6bb1", "#c2a83e", "#4aa3a3")


def _sized(sizes: RunSizes) -> str:
    """The sizes of a run, without those that are 1 but for dp."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes._asdict().items() if size > 1 or axis == "dp")


def _grids(plan: ConversionPlan) -> str:
    """The ranks of the two runs, where either has tensor, pipeline or expert parallelism."""
    if max(*plan.saved[1:], *plan.coming[1:]) == 1:
        return ""
    told = (
        "A column is a pipeline stage, a row a tensor-parallel rank, a square a data-parallel rank; squares of one "
        "colour have the same experts."
    )
    drawn = "".join(
        f"<figure><figcaption>{name}: {_sized(sizes)}</figcaption>{_grid(sizes)}</figure>"
        for name, sizes in (("saved", plan.saved), ("coming", plan.coming))
    )
    return f"<p>{told}</p>\n{drawn}\n"


def _grid(sizes: RunSizes) -> str:
    """At most so many ranks along each axis; the caption tells how many there are."""
    dp, tp, pp = (min(size, _MOST) for size in sizes[:3])
    width, height = pp * (dp * _RANK + 8) + 2, tp * (_RANK + 8) + 2
    parts = []
    for stage in range(pp):
        for row in range(tp):
            x, y = 2 + stage * (dp * _RANK + 8), 2 + row * (_RANK + 8)
            parts.append(f'<rect class="frame" x="{x}" y="{y}" width="{dp * _RANK + 4}" height="{_RANK + 4}"/>')
            for rank in range(dp):
                colour = _PLACES[rank % sizes.ep % len(_PLACES)]
                said = f"stage {stage}, tensor-parallel rank {row}, data-parallel rank {rank}"
                parts.append(
                    f'<rect x="{x + 2 + rank * _RANK}" y="{y + 2}" width="{_RANK - 2}" height="{_RANK}" '
                    f'fill="{colour}"><title>{said}</title></rect>'
                )
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">' + "".join(parts) + "</svg>"


def _drawing(plan: ConversionPlan) -> str:
    names, units = list(plan.sources), plan.units
    width, height = len(units) * _CELL, len(names) * _CELL
    most = max((nbytes for unit in units for nbytes in unit.reads.values()), default=1)
    rows = {name: number for number, name in enumerate(names)}
    parts = [f'<rect class="frame" x="{_MARGIN}" y="{_TOP}" width="{width}" height="{height}"/>']
    for number, name in enumerate(names):
        y = _TOP + number * _CELL
        parts.append(f'<line x1="{_MARGIN}" x2="{_MARGIN + width}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="{_MARGIN - 6}" y="{y + 10}" text-anchor="end">{_escaped(_short(name))}'
            f"<title>{_escaped(name)}: {size(plan.sources[name])}</title></text>"
        )
    for number, unit in enumerate(units):
        x = _MARGIN + number * _CELL
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_TOP + height}"/>')
        files = _escaped(", ".join(unit.files[:4]))
        parts.append(
            f'<text transform="translate({x + 10} {_TOP - 6}) rotate(-90)">{_escaped(unit.name)}'
            f"<title>{files}: {size(unit.bytes_written)}</title></text>"
        )
        for name, nbytes in unit.reads.items():
            y = _TOP + rows[name] * _CELL
            opacity = 0.15 + 0.85 * nbytes / max(1, most)
            said = f"{name} to {unit.name}: {size(nbytes)}"
            parts.append(
                f'<rect class="cell" x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" '
                f'opacity="{opacity:.2f}"><title>{_escaped(said)}</title></rect>'
            )
    box = f'width="{_MARGIN + width + 20}" height="{_TOP + height + 20}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n' + "\n".join(parts) + "\n</svg>"


def _short(name: str) -> str:
    """The end of a long name, which is what tells it from others."""
    return name if len(name) <= 66 else f"...{name[-63:]}"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


_ROWS = 20


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "plan",
        help="what convert would read and write, by whom; reads no tensor",
        example="checkpoints --to zero3 --dp 8",
    )
    add_checkpoint(parser, "SRC")
    add_target(parser)
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        metavar="GBPS",
        default=1.0,
        help="gigabytes a second that the disk reads or writes (default: %(default)s)",
    )
    add_reading(parser, processes=False)
    parser.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        default=(0, 1),
        help="plan part I of N, counted from 0, as convert would write it; opens that part's files alone",
    )
    parser.add_argument("--html", metavar="FILE", help="draw which source file feeds which target rank")
    add_trust(parser)
    add_json(parser, run)


def run(arguments: argparse.Namespace) -> int:
    made = plan(
        arguments.checkpoint,
        bandwidth=arguments.bandwidth * 1e9,
        reading=reading(arguments),
        shard=arguments.shard,
        **target(arguments),
    )
    if arguments.html is not None:
        mend = "free space there, or name another file: --html"
        disk.write_named(arguments.html, page(made).encode("utf-8"), mend=mend)
    show(arguments, made.to_json, lambda console: render_plan(made, console))
    return 0


def render_plan(made: ConversionPlan, console: Console) -> None:
    """One row a target rank (the first 20), and a line that sums up."""
    number, shards = made.shard
    part = f": part {number} of {shards}" if shards > 1 else ""
    title = f"From {printable(made.folder)} ({_sized(made.saved)}) to {made.to}, {_sized(made.coming)}{part}"
    numbers = ("written", "source files", "read")
    rows = table(title, "target", "files", *numbers, right=numbers)
    for unit in made.units[:_ROWS]:
        files = unit.files[0] + (f" and {len(unit.files) - 1} more" if len(unit.files) > 1 else "")
        told = (size(unit.bytes_written), str(len(unit.reads)), size(unit.bytes_read))
        rows.add_row(unit.name, Text(printable(files)), *told)
    put(console, rows)
    if len(made.units) > _ROWS:
        console.print(Text(f"and {len(made.units) - _ROWS} more: --json shows them", style="dim"))
    line(
        console,
        f"{size(made.bytes_read)} read, {size(made.bytes_written)} written, buffers of {size(made.buffer_nbytes)}; "
        f"{made.seconds:.3g} s at {made.bandwidth / 1e9:g} GB/s"
        + (f"; planned from {size(made.metadata_nbytes)}" if made.metadata_nbytes is not None else ""),
    )
