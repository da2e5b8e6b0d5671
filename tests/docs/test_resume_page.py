"""docs/resume.md leaves out no flag, no key and no cell."""

from __future__ import annotations

import re
from pathlib import Path

from ds_reshard.resume.policy import OPTIMIZER, SCHEDULER, defaults
from ds_reshard.resume.policy_sources import FLAGS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "resume.md").read_text(encoding="utf-8")


def _section(heading: str) -> str:
    return TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_flag_has_a_row_and_every_spelling_is_named() -> None:
    section = _section("Flags and keys")
    rows = set(re.findall(r"^\| `(--[\w-]+)", section, flags=re.MULTILINE))
    assert rows == {flag.names[0] for flag in FLAGS}
    assert all(f"`{name}" in section for flag in FLAGS for name in flag.names)


def test_every_key_and_value_is_named() -> None:
    section = _section("Flags and keys")
    assert set(re.findall(r'\| `"(\w+)":', section)) == set(defaults())
    assert all(f'"scheduler": "{value}"' in section for value in SCHEDULER)


def test_the_table_has_a_cell_for_each_optimizer_and_scheduler() -> None:
    section = _section("Optimizer and scheduler together")
    heading = next(line for line in section.splitlines() if line.startswith("| `scheduler`"))
    assert tuple(re.findall(r"`(\w+)`", heading))[2:] == OPTIMIZER
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|(.*)\|$", section, flags=re.MULTILINE)}
    assert tuple(name for name in rows if name in SCHEDULER) == SCHEDULER
    assert all(len(rows[name].split("|")) == len(OPTIMIZER) and all(rows[name].split("|")) for name in SCHEDULER)
