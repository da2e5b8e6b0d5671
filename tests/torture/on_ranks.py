"""What was tried and was wrong; and cases that ranks go through together, one of which has the fault."""

from __future__ import annotations

import argparse
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


def options(words: Sequence[str] | None, doc: str | None, **only: Any) -> argparse.Namespace:
    """What a command line asks for: each `every`-th case, of those of a kind where `only` is how one is named."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if only:
        parser.add_argument("only", **only)
    parser.add_argument("--every", type=int, default=1)
    return parser.parse_args(words)


class Tried:
    """What was tried: of all cases each `every`-th; those that end wrong are printed."""

    def __init__(self, every: int) -> None:
        self._every, self.turn = every, 0
        self._by, self._findings = Counter[str](), 0
        self._began = time.monotonic()

    def takes(self) -> bool:
        """Whether the next case is one of them."""
        self.turn += 1
        return self.turn % self._every == 0

    def counts(self, kind: str, called: Sequence[object], wrong: Iterable[object]) -> None:
        """One case was tried."""
        self._by[kind] += 1
        for finding in wrong:
            self._findings += 1
            print(*called, finding, flush=True)

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
                if self.takes():
                    cases.append((rank, step, fault))
        for first in range(0, len(cases), _SAME):
            part = cases[first : first + _SAME]
            told = world.run(job, cases=part, **arguments)
            for case, by_rank in zip(part, zip(*told, strict=True), strict=True):
                self.counts(f"{name}: {case[1].kind}", (name, case), filter(None, [wrong(case, list(by_rank))]))

    def end(self) -> int:
        """Print the counts; 1 if something was wrong, or nothing was tried."""
        seconds = round(time.monotonic() - self._began)
        told = {"tried": sum(self._by.values()), "by": self._by, "wrong": self._findings, "seconds": seconds}
        print(json.dumps(told))
        return 1 if self._findings or not self._by else 0
