"""What `ds-reshard lr` shows: a plot in a terminal, plain numbers in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.render import printable
from ds_reshard.resume.lr_preview import CHECKPOINT, HOST, OVERRIDE, ComingRun, Curve

COLORS = {CHECKPOINT: "bright_black", HOST: "red", OVERRIDE: "green"}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS, _WIDEST = 5, 96


def plain_rates(coming: ComingRun) -> Iterator[str]:
    """Lines of a table with tabs: the position, then every curve of every set of param groups; `#` begins a remark."""
    yield from (f"# {printable(note)}" for note in coming.notes)
    for curve in coming.curves:
        if curve.unknown is not None:
            yield f"# {curve.title}: not known: {printable(curve.unknown)}"
    shown = [curve for curve in coming.curves if curve.unknown is None]
    if not shown:
        return
    heads = [f"{curve.name}{_of(coming, part)}" for curve in shown for part in range(len(coming.groups))]
    yield "\t".join(("position", *heads))
    for number, position in enumerate(coming.positions):
        rates = [curve.rates[part][number] for curve in shown for part in range(len(coming.groups))]
        yield "\t".join((str(position), *(repr(float(rate)) for rate in rates)))


def render_rates(coming: ComingRun, console: Console) -> None:
    """For each set of param groups its curves, one below the other on one scale; then the first rates in numbers."""
    first, last = coming.positions[0], coming.positions[-1]
    console.print(Text(f"{printable(coming.checkpoint)} is at position {coming.position}", style="bold"))
    for part in range(len(coming.groups)):
        shown = [curve for curve in coming.curves if curve.unknown is None]
        top = max((max(curve.rates[part]) for curve in shown), default=0.0)
        width = max(16, min(_WIDEST, console.width - 12))
        for curve in shown:
            console.print(Text(f"\n{curve.title}{_of(coming, part)}", style=COLORS[curve.name]))
            for row, line in enumerate(_bars(curve.rates[part], top, width)):
                label = f"{top:9.3g} " if row == 0 else f"{0:9.3g} " if row == _ROWS - 1 else " " * 10
                console.print(Text(label, style="dim").append(line, style=COLORS[curve.name]), no_wrap=True)
            console.print(Text(f"{'position':>9} {first}{last:>{width - len(str(first))}}", style="dim"), no_wrap=True)
    console.print()
    if any(curve.unknown is None for curve in coming.curves):
        console.print(_table(coming))
    for curve in coming.curves:
        if curve.unknown is not None:
            console.print(Text(f"{curve.title}: not known: {printable(curve.unknown)}", style="yellow"))
    for note in coming.notes:
        console.print(Text(printable(note), style="yellow" if note.startswith("beware") else "dim"))


def _bars(rates: Sequence[float], top: float, width: int) -> list[str]:
    """A bar chart of eighths of a character; the first column is the first rate, the last the last."""
    columns = min(width, max(len(rates), 1))
    wide = max(1, width // columns)
    picked = [rates[round(n * (len(rates) - 1) / max(1, columns - 1))] for n in range(columns)]
    levels = [round(8 * _ROWS * max(0.0, rate) / top) if top > 0 else 0 for rate in picked]
    levels = [max(level, 1) if rate > 0 else 0 for level, rate in zip(levels, picked, strict=True)]
    return [
        "".join(_EIGHTHS[max(0, min(8, level - 8 * row))] * wide for level in levels) for row in reversed(range(_ROWS))
    ]


def _table(coming: ComingRun) -> Table:
    table = Table(title="Learning rate of the coming updates", title_justify="left")
    table.add_column("position", justify="right")
    columns: list[tuple[Curve, int]] = []
    for curve in coming.curves:
        for part in range(len(coming.groups)) if curve.unknown is None else ():
            table.add_column(
                f"{curve.title}{_of(coming, part)}", justify="right", overflow="fold", style=COLORS[curve.name]
            )
            columns.append((curve, part))
    count = len(coming.positions)
    for number in sorted({0, 1, 2, count // 4, count // 2, 3 * count // 4, count - 1} & set(range(count))):
        rates = [f"{curve.rates[part][number]:.6g}" for curve, part in columns]
        table.add_row(str(coming.positions[number]), *rates)
    return table


def _of(coming: ComingRun, part: int) -> str:
    """Which param groups are meant, where there are several kinds."""
    if len(coming.groups) == 1:
        return ""
    numbers = coming.groups[part]
    return f", group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
