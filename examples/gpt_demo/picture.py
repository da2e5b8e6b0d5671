"""The picture of the demo: losses that overlap, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpt_demo.layouts import Outcome

INK, GRID, TRUNK = "#24292f", "#e6e8eb", "#9aa7b5"
BRANCHES = ("#d1495b", "#1f6f8b")
TITLE = "One checkpoint, three layouts, the same training"
DASHES = ((0, (4, 4)), (4, (4, 4)))


def draw(
    path: Path, title: str, checkpoints: Sequence[int], whole: tuple[object, Outcome], resumed: Mapping[Any, Outcome]
) -> None:
    """The uninterrupted run as a broad line, the resumed ones as dashes on it; their differences in an inset."""
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    figure, axes = plt.subplots(figsize=(8.4, 4.7), dpi=120, layout="constrained")
    layout, trunk = whole
    axes.plot(
        _steps(trunk),
        trunk.losses,
        color=TRUNK,
        linewidth=5,
        alpha=0.55,
        solid_capstyle="round",
        label=f"{layout}, uninterrupted",
    )
    for (branch, outcome), color, dashes in zip(resumed.items(), BRANCHES, DASHES, strict=False):
        axes.plot(
            _steps(outcome), outcome.losses, color=color, linewidth=1.7, linestyle=dashes, label=f"{branch}, resumed"
        )
    _clean(axes)
    for step in checkpoints:
        axes.axvline(step, color=INK, linewidth=0.8, linestyle=":")
        axes.text(step, 0.03, "checkpoint  ", transform=axes.get_xaxis_transform(), fontsize=9, ha="right")
    axes.set(xlabel="step", ylabel="loss, nats per byte", xlim=(0, len(trunk.losses) + 1))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.legend(loc="upper left", bbox_to_anchor=(0.13, 1.0), frameon=False, fontsize=9.5)
    _differences(axes.inset_axes((0.56, 0.44, 0.425, 0.4)), trunk, resumed)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _differences(inset: Axes, trunk: Outcome, resumed: Mapping[Any, Outcome]) -> None:
    for outcome, color in zip(resumed.values(), BRANCHES, strict=False):
        inset.plot(_steps(outcome), differences(trunk, outcome), color=color, linewidth=1.1)
    _clean(inset)
    inset.set_title("difference to the uninterrupted run", loc="left", fontsize=8.5)
    inset.tick_params(labelsize=8)
    inset.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    inset.yaxis.get_offset_text().set_fontsize(8)
    inset.yaxis.set_major_locator(MaxNLocator(4))
    inset.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def differences(trunk: Outcome, branch: Outcome) -> list[float]:
    """Loss of the resumed run minus that of the uninterrupted one, for each step that both made."""
    first = branch.first_step
    beside = trunk.losses[first : first + len(branch.losses)]
    return [one - other for one, other in zip(branch.losses, beside, strict=True)]


def _steps(outcome: Outcome) -> range:
    return range(outcome.first_step + 1, outcome.first_step + 1 + len(outcome.losses))


def _clean(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
