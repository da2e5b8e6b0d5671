"""`ds-reshard doctor`: what is installed against what is tested, and what comes of a DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.text import Text

from ds_reshard.cli.render import line, printable, put, table
from ds_reshard.hooks import HostHooks
from ds_reshard.hosts import tables
from ds_reshard.hosts.accelerate.diagnostic import Finding

TESTED, IN_RANGE, OUTSIDE, ABSENT = "tested", "in range, not tested", "outside the range", "absent"
_STYLE = {TESTED: "green", IN_RANGE: "yellow", OUTSIDE: "bold red", ABSENT: "dim"}
_OUTCOME = {"refused": "bold red", "mended": "yellow", "told": "dim"}
# Frameworks that are not patched: the range that setup.cfg asks for, and what the tests run against.
_BESIDE = {"torch": (">=2.1", ("2.13.0",))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework: the version that is installed here, and what is known of it."""

    name: str
    version: str | None
    versions: str
    tested: tuple[str, ...]

    @property
    def state(self) -> str:
        if self.version is None:
            return ABSENT
        try:
            found = Version(self.version)
        except InvalidVersion:
            return OUTSIDE
        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            return OUTSIDE
        return TESTED if Version(found.public) in {Version(text) for text in self.tested} else IN_RANGE

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "state": self.state}


def frameworks() -> tuple[Framework, ...]:
    """Every framework that ds_reshard patches or stands on; none is imported."""
    beside = [(name, name, *known) for name, known in _BESIDE.items()]
    tabled = [hooks for hooks in tables() if hooks.host not in _BESIDE]
    patched = [(_name(hooks), hooks.distribution, hooks.versions, hooks.tested) for hooks in tabled]
    return tuple(
        Framework(name=name, version=version_of(distribution), versions=versions, tested=tested)
        for name, distribution, versions, tested in (*beside, *patched)
    )


def _name(hooks: HostHooks) -> str:
    """The distribution's; of a part of one that is listed itself, with the part's."""
    return f"{hooks.distribution} ({hooks.host})" if hooks.distribution in _BESIDE else hooks.distribution


def version_of(distribution: str) -> str | None:
    """Its version here; it is not imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def wrong(found: Sequence[Framework], findings: Sequence[Finding]) -> bool:
    """Whether something is to be changed: a version outside its range, or what the hooks would refuse."""
    return any(one.state == OUTSIDE for one in found) or any(finding.outcome == "refused" for finding in findings)


def to_json(found: Sequence[Framework], findings: Sequence[Finding]) -> Mapping[str, object]:
    return {"frameworks": [one.to_json() for one in found], "findings": [asdict(finding) for finding in findings]}


def render(found: Sequence[Framework], findings: Sequence[Finding], console: Console) -> None:
    """One row a framework, then every finding with the line to change."""
    made = table("Frameworks", "framework", "installed", "state", "range", "tested")
    for one in found:
        state = Text(one.state, style=_STYLE[one.state])
        made.add_row(one.name, one.version or "", state, one.versions, ", ".join(one.tested))
    put(console, made)
    for finding in findings:
        said = Text(f"{finding.outcome}: ", style=_OUTCOME[finding.outcome])
        console.print(said.append(printable(f"{finding.where}: {finding.what}"), style=""), soft_wrap=True)
        line(console, f"  {finding.mend}")
