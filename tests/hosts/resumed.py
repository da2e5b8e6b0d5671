"""Resume under a policy in a world of workers, and compare with what should have won."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gathered import gathered, same_bits
from resume_jobs import Setup

STEPS = 5


def resume(worlds: Any, setup: Setup, folder: Path, **more: Any) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = worlds[setup.run.dp].run(
        "resume_jobs.resume", setup=setup, folder=str(folder), **more
    )
    assert len({repr(rank["error"]) for rank in loaded}) == 1, "ranks disagree"
    return loaded


_RUNS: dict[str, Any] = {}


def uninterrupted(worlds: Any, setup: Setup, steps: int = STEPS) -> Any:
    """What the three steps after the first `steps` of a run without a checkpoint use; each run is made once."""
    whole = setup.but(policy={})
    if repr(whole) not in _RUNS:
        _RUNS[repr(whole)] = worlds[whole.run.dp].run("resume_jobs.uninterrupted", setup=whole, steps=0, more=STEPS + 3)
    rows = _RUNS[repr(whole)][0]
    assert steps <= STEPS
    return rows[steps : steps + 3]


def same_tensors(saved: Any, loaded: Any, kinds: tuple[str, ...] | None = None) -> None:
    truth, got = gathered(saved), gathered(loaded)
    wanted = {key for key in truth if kinds is None or key[1] in kinds}
    wrong = [key for key in wanted if key not in got or not same_bits(truth[key], got[key])]
    assert wanted and not wrong, f"{len(wrong)} of {len(wanted)} tensors differ: {wrong[:3]}"


def rates(rows: Any, names: tuple[str, ...] = ("lr", "weight_decay")) -> Any:
    return [[{name: group[name] for name in names} for group in step] for step in rows]
