"""Cases that ranks go through together, one of which has the fault."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from calls import DEATH, FAULTS, Step
from worlds import World

Case = tuple[int, Step, str]
"""The rank that has it, at which call, and what befalls that."""
_SAME = 25
"""Cases that one call of the workers goes through."""


class Tried:
    """What was tried: of all cases each `every`-th; those that end wrong are printed."""

    def __init__(self, every: int) -> None:
        self._every, self._turn = every, 0
        self._by, self._findings = Counter[str](), 0
        self._began = time.monotonic()

    def of(
        self,
        world: World,
        name: str,
        steps: Iterable[Sequence[Step]],
        job: str,
        wrong: Callable[[Case, list[tuple[str, ...]]], str],
        **arguments: Any,
    ) -> None:
        """Let what may befall each rank's calls do so, in a job that tells what each case ended in."""
        cases: list[Case] = []
        for rank, of_rank in enumerate(steps):
            for step, fault in ((one, fault) for one in of_rank for fault in FAULTS[one.kind] if fault != DEATH):
                self._turn += 1
                if self._turn % self._every == 0:
                    cases.append((rank, step, fault))
        for first in range(0, len(cases), _SAME):
            part = cases[first : first + _SAME]
            told = world.run(job, cases=part, **arguments)
            for case, by_rank in zip(part, zip(*told, strict=True), strict=True):
                self._by[f"{name}: {case[1].kind}"] += 1
                if found := wrong(case, list(by_rank)):
                    self._findings += 1
                    print(name, case, found, flush=True)

    def end(self) -> int:
        """Print the counts; 1 where something was wrong."""
        seconds = round(time.monotonic() - self._began)
        told = {"tried": sum(self._by.values()), "by": self._by, "wrong": self._findings, "seconds": seconds}
        print(json.dumps(told))
        return 1 if self._findings else 0
