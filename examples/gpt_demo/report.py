"""What the demo prints: progress, and the table of bit-equality."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gpt_demo.comparison import KINDS, Comparison
from gpt_demo.layouts import Layout, Outcome

TITLES = {
    "weight": "weights, bf16",
    "fp32": "fp32 masters",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "step": "step",
}


@contextmanager
def progress(console: Console, title: str, steps: Sequence[int]) -> Iterator[Callable[[int, float], None]]:
    """A bar for one run, from the first to the last of its steps; the value is called with each step and loss."""
    first, last = steps
    columns = (
        TextColumn("{task.description:<31}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:>11}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=last, completed=first, loss="starting")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"loss {loss:.4f}")


def table(saved: Layout, columns: Mapping[Layout, tuple[Outcome, Comparison]], worst: Mapping[Layout, float]) -> Table:
    """One column for each resumed run: tensors equal of all, the rest of the state, loss, seconds, DeepSpeed alone."""
    shown = Table(
        title=f"Saved by {saved}; each resumed run against it, right after the load",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_lines=False,
    )
    shown.add_column("equal to the last bit", no_wrap=True)
    for layout in columns:
        shown.add_column(f"resumed as {layout}", justify="left", ratio=1)
    both = list(columns.values())
    for kind in KINDS:
        shown.add_row(TITLES[kind], *(_count(*comparison.counts[kind]) for _, comparison in both))
    shown.add_row("groups, schedule, counters", *(_verdict(comparison.facts_equal) for _, comparison in both))
    shown.add_row(
        "bytes compared", *(f"{comparison.nbytes / 2**20:.1f} MiB" for _, comparison in both), end_section=True
    )
    shown.add_row("largest loss difference", *(f"{worst[layout]:.1e}" for layout in columns))
    shown.add_row("load_checkpoint", *(f"{outcome.seconds:.2f} s" for outcome, _ in both), end_section=True)
    shown.add_row("DeepSpeed alone", *(_refusal(outcome.refusal) for outcome, _ in both))
    return shown


def _count(equal: int, total: int) -> Text:
    return Text(f"{equal} / {total}", style="green" if equal == total > 0 else "bold red")


def _verdict(equal: bool) -> Text:
    return Text("equal", style="green") if equal else Text("different", style="bold red")


def _refusal(said: str) -> Text:
    return Text(f"refuses: {said}", style="yellow") if said else Text("loads it")
