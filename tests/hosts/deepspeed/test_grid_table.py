"""The table of grids in docs/parallelism.md has a row for each source of the tests, and no size that none loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import test_grid
import test_grid_tensor
from grid_cases import Grid

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parallelism.md"
CASES = [*test_grid.LOADS, *test_grid.STAGES, *test_grid.EXPERTS, *test_grid.AUTOEP]
CASES += [*test_grid_tensor.LOADS, *test_grid_tensor.PADDED]
KINDS = {
    "pipeline": "`PipelineModule`",
    "autotp": "AutoTP",
    "llama": "AutoTP",
    "t5": "AutoTP",
    "mpu": "an `mpu`",
    "cut": "an `mpu`",
    "moe": "`deepspeed.moe`",
    "autoep": "AutoEP",
}


def sizes(grid: Grid) -> str:
    axes = {"pp": grid.pp, "tp": grid.tp, "ep": grid.ep}
    shown = {"pipeline": "pp", "moe": "ep", "autoep": "ep"}.get(grid.kind, "tp")
    return "".join(f"{axis}{n}" for axis, n in axes.items() if n > 1 or axis == shown) + f"dp{grid.dp}"


def stages(grids: list[Grid]) -> str:
    return ", ".join(sorted({"BF16" if grid.stage == "bf16opt" else str(grid.stage) for grid in grids}))


def rows() -> Iterator[str]:
    found: dict[tuple[str, str], list[tuple[Grid, Grid]]] = {}
    for source, target in CASES:
        found.setdefault((KINDS[source.kind], sizes(source)), []).append((source, target))
    for (kind, size), pairs in sorted(found.items()):
        targets = [target for _, target in pairs]
        under = ", ".join(sorted({sizes(target) for target in targets}))
        yield f"| {kind} | {size} | {stages([source for source, _ in pairs])} | {under} | {stages(targets)} |"


def test_the_page_has_what_the_tests_load() -> None:
    """Neither more nor less; `rows()` is what belongs there."""
    lines = PAGE.read_text().splitlines()
    start = lines.index("| saved by | sizes | ZeRO | loaded under | ZeRO |") + 2
    shown = lines[start : lines.index("", start)]
    assert shown == list(rows())
