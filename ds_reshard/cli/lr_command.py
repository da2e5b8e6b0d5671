"""`ds-reshard lr`: its arguments, and the rates of a coming run as a table or a picture."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.render import printable
from ds_reshard.errors import ConfigError
from ds_reshard.execution import disk
from ds_reshard.resume.lr_preview import CHECKPOINT, HOST, OVERRIDE, ComingRun, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_INK, _GRID = "#24292f", "#e6e8eb"
_STYLE = {
    CHECKPOINT: {"color": "#9aa7b5", "linewidth": 4.0, "alpha": 0.6},
    HOST: {"color": "#d1495b", "linewidth": 1.7},
    OVERRIDE: {"color": "#1f6f8b", "linewidth": 1.7, "linestyle": (0, (4, 3))},
}


def draw(coming: ComingRun, path: str) -> None:
    """Write the curves as PNG, whole or not at all: one panel for each set of param groups that share them.

    Raises ConfigError without matplotlib, and WriteFailed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        mend = "pip install matplotlib"
        raise ConfigError.of("--png", "needs matplotlib, which is not installed", mend=mend) from None
    parts = max(1, len(coming.groups))
    figure = Figure(figsize=(8.4, 1.6 + 2.8 * parts), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for part, axes in enumerate(figure.subplots(parts, 1, squeeze=False, sharex=True)[:, 0]):
        _panel(axes, coming, part)
    figure.suptitle(
        f"Learning rate of the coming run, from position {coming.position}",
        x=0.01,
        ha="left",
        color=_INK,
        fontsize=12,
        fontweight="bold",
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    disk.write_named(path, drawn.getvalue(), mend="free space there, or name another file: --png")


def _panel(axes: Axes, coming: ComingRun, part: int) -> None:
    for curve in coming.curves:
        if curve.unknown is None:
            axes.plot(coming.positions, curve.rates[part], label=curve.title, **_STYLE[curve.name])  # type: ignore[arg-type]
        else:
            axes.plot([], [], label=f"{curve.title}: not known", **_STYLE[curve.name])  # type: ignore[arg-type]
    first = coming.positions[0]
    axes.axvline(first, color=_INK, linewidth=0.8, linestyle=":")
    span = max(1, coming.positions[-1] - first)
    axes.set_xlim(first - 0.02 * span, coming.positions[-1] + 0.02 * span)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_xlabel("position (steps of the schedule)", color=_INK)
    axes.set_ylabel("learning rate", color=_INK)
    if len(coming.groups) > 1:
        axes.set_title(f"param groups {', '.join(map(str, coming.groups[part]))}", loc="left", fontsize=10)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=9.5)


COLORS = {CHECKPOINT: "bright_black", HOST: "red", OVERRIDE: "green"}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS, _WIDEST = 5, 96


def put_rates(coming: ComingRun, console: Console) -> None:
    """Drawn on a terminal; elsewhere plain lines."""
    if console.is_terminal:
        render_rates(coming, console)
    else:
        console.file.writelines(f"{line}\n" for line in plain_rates(coming))


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
