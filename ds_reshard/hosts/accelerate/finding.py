"""One thing that `diagnose` has found, and what the hooks do about it."""

from __future__ import annotations

from dataclasses import dataclass

from ds_reshard.errors import Fault, PrepareError

REFUSED, MENDED, TOLD = "refused", "mended", "told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`what` accelerate does by itself, and the line to change (`mend`).

    `outcome` is what the hooks make of it: "refused" (a PrepareError), "mended" (done as asked, and logged), or
    "told" (left as it is, and logged). `rule` names the finding, whatever its text.
    """

    rule: str
    outcome: str
    where: str
    what: str
    mend: str

    def fault(self) -> Fault:
        return PrepareError.fault(self.where, self.what, mend=self.mend)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.mend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A parameter of the JSON that is to be set: `section` is "optimizer" or "scheduler"."""

    section: str
    name: str
    value: object


def refused(rule: str, where: str, what: str, mend: str) -> Finding:
    return Finding(rule=rule, outcome=REFUSED, where=where, what=what, mend=mend)


def mended(rule: str, where: str, what: str, mend: str) -> Finding:
    return Finding(rule=rule, outcome=MENDED, where=where, what=what, mend=mend)


def told(rule: str, where: str, what: str, mend: str) -> Finding:
    return Finding(rule=rule, outcome=TOLD, where=where, what=what, mend=mend)
