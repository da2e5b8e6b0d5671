"""A plan as one HTML page: a row a source file, a column a target rank, the darker the more bytes."""

from __future__ import annotations

import html

from ds_reshard.cli.render import printable, size
from ds_reshard.model.conversion_plan import ConversionPlan

_CELL, _MARGIN, _TOP = 13, 420, 130
_STYLE = """body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
text { font: 10px monospace; fill: #222 } rect.cell { fill: #1f5fa8 } rect.frame { fill: #f4f4f4; stroke: #ccc }
line { stroke: #ddd; stroke-width: 0.5 }"""


def page(plan: ConversionPlan) -> str:
    """A page that needs nothing beside itself; names are escaped. Hovering over a cell tells its bytes."""
    title = _escaped(f"{plan.folder} to {plan.to}, dp {plan.dp}")
    said = (
        f"{size(plan.bytes_read)} read from {len(plan.sources)} files, {size(plan.bytes_written)} written in "
        f"{sum(len(unit.files) for unit in plan.units)} files; {plan.seconds:.3g} s at {plan.bandwidth / 1e9:g} GB/s"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{_escaped(said)}. A row is a source file, a "
        "column a target rank (or a part of a universal checkpoint); the darker a cell, the more bytes it reads.</p>\n"
        f"{_drawing(plan)}\n</body></html>\n"
    )


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
