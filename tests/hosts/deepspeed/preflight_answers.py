"""What preflight says beside what a load did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def change(name: str, text: bytes = b"") -> Callable[[Path], None]:
    """Cut a file in half, or write other bytes over it."""

    def harm(folder: Path) -> None:
        path = min(folder.glob(f"*/{name}"))
        path.write_bytes(text or path.read_bytes()[: path.stat().st_size // 2])

    return harm


def agree(said: Any, real: dict[str, Any], loader: str, refused: str, *, whole: bool = True) -> None:
    assert {(fault.error, fault.where) for fault in said.faults} == real["faults"], (real.get("text"), said.faults)
    assert next((fault.error for fault in said.faults), "") == refused
    if not refused:
        assert said.loader == real["loader"] == loader
        if said.report is not None:
            _same_table(said.report.to_json(), real["report"], whole=whole)


def _same_table(said: dict[str, Any], real: dict[str, Any], *, whole: bool) -> None:
    """Every row is there, but those of groups that were not saved; what the script gives, preflight does not know.

    Nor does it know whether masters are no finer than their weights, which a load measures.
    """
    rows = {row["name"]: row for row in real["rows"] if row["name"] != "fingerprints"}
    own = {row["name"]: row for row in said["rows"] if row["name"] != "fingerprints"}
    rows = {name: row for name, row in rows.items() if name in own or not (whole and _of_the_script(row))}
    assert list(own) == list(rows) if whole else set(own) < set(rows)
    for name, mine in own.items():
        theirs = rows[name]
        for column in ("checkpoint", "this_run", "used", "because"):
            measured = column == "used" and name == "fp32 masters" and theirs[column] == "equal to the weights"
            if mine[column] != "the script's" and not (measured and mine[column] == "checkpoint"):
                assert mine[column] == pytest.approx(theirs[column]), (mine, theirs)


def _of_the_script(row: dict[str, Any]) -> bool:
    """Whether a row is a value of a param group that the load does not read: the script alone gives it."""
    return bool(row["name"].startswith("group ")) and row["checkpoint"] is None
