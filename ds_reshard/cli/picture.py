"""The picture of `ds-reshard lr --png`."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError
from ds_reshard.resume.lr_preview import CHECKPOINT, HOST, OVERRIDE, ComingRun

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

    Raises ConfigError without matplotlib, and where the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise _error("--png", "needs matplotlib, which is not installed", "pip install matplotlib") from None
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
    beside = None
    try:
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(path) or ".", suffix=".part")
        with open(handle, "wb") as file:
            figure.savefig(file, format="png")
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except OSError as error:
        if beside is not None and os.path.exists(beside):
            os.unlink(beside)
        raise _error(path, f"cannot be written: {error.strerror}", "name a file in a folder that is there") from None


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


def _error(where: str, what: str, mend: str) -> ConfigError:
    fault = ConfigError.fault(where, what, mend=mend)
    return ConfigError(f"{fault.line()}; {mend}", [fault])
