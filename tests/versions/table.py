"""The table of DeepSpeed releases that docs/formats.md shows, rendered from `results.json`.

python tests/versions/table.py   write it anew, without running anything
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "formats.md"
RESULTS = Path(__file__).with_name("results.json")
BLOCK = re.compile(r"(<!-- support-table:begin -->\n).*?(<!-- support-table:end -->)", re.DOTALL)
_NOTE_LENGTH = 75


def read_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def rows(results: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """DeepSpeed, runs here, saved by it loads, loads under it, note: newest release first."""
    found = []
    for release in reversed(results["releases"]):
        if release["reason"]:
            found.append((release["deepspeed"], "no", "", "", _short(release["reason"])))
            continue
        across, inside = (
            [cell for cell in release["cells"] if cell["loaded_by"] == loader]
            for loader in (results["current"], release["deepspeed"])
        )
        found.append((release["deepspeed"], "yes", _count(across), _count(inside), _note(release["cells"])))
    return found


def render(results: Mapping[str, Any]) -> str:
    """The lines between the page's markers."""
    lines = [
        f"Each cell is a save and a load under another stage x ranks, compared bit for bit; torch {results['torch']},",
        f'Python {results["python"]}, CPU. "Saved by it loads" is a load under DeepSpeed {results["current"]}.',
        "",
        "| DeepSpeed | runs here | saved by it loads | loads under it | note |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows(results)),
    ]
    return "\n".join(lines) + "\n"


def block(text: str) -> str:
    """What stands between the markers of the page's text."""
    match = BLOCK.search(text)
    assert match, "docs/formats.md has no support-table markers"
    return match.group(0).removeprefix(match.group(1)).removesuffix(match.group(2))


def write_block(results: Mapping[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda match: match.group(1) + render(results) + match.group(2), text), encoding="utf-8")


def _count(cells: Sequence[Mapping[str, str]]) -> str:
    ran = [cell for cell in cells if cell["outcome"] in ("passed", "failed")]
    return f"{sum(cell['outcome'] == 'passed' for cell in ran)} of {len(ran)}"


def _note(cells: Sequence[Mapping[str, str]]) -> str:
    """What failed or did not run, cells with one reason together."""
    verbs = {"failed": "fails", "not run": "DeepSpeed itself fails"}
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell["outcome"] != "passed":
            found.setdefault((verbs[cell["outcome"]], _short(cell["reason"])), []).append(cell["cell"])
    return ". ".join(
        f"{verb} in {'; '.join(dict.fromkeys(names))}: {reason}" for (verb, reason), names in found.items()
    )


def _short(reason: str) -> str:
    reason = reason.replace("|", "/")
    reason = reason.rstrip(".")
    return reason if len(reason) <= _NOTE_LENGTH else reason[:_NOTE_LENGTH].rstrip() + "..."


if __name__ == "__main__":
    write_block(read_results())
