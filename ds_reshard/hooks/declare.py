"""What is patched, in plain values: install, remove, list, docs and tests all read these tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

Function = Callable[..., object]
Wrapper = Callable[[Function], Function]

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One function of a host that is replaced, and what it must look like for that to be safe.

    `target` is `package.module:Class.method` or `package.module:function`. `wrapper` gets the original and
    returns the replacement; it is called once for each install, and does not import the host. `signature` names the
    leading parameters of the original in order (a first `self` may be left out); the original
    may have more. `vendored_marker` is the name that a source patch sets to a true value in the target's
    module: where it is set, the source does the work and the hook stands aside. An `optional` patch is one of a
    module that not every user of the host has or imports: nothing waits for that module, and the patch is put
    in place as soon as the module has been imported.
    """

    target: str
    wrapper: Wrapper
    signature: tuple[str, ...]
    summary: str
    vendored_marker: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if _TARGET.fullmatch(self.target) is None:
            raise ValueError(f"target {self.target!r}: expected 'package.module:Class.method' or 'package.module:name'")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        """The top-level package, in which copies made by `from m import f` are looked for."""
        return self.target.partition(":")[0].partition(".")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """The names inside the module, outermost first."""
        return tuple(self.target.partition(":")[2].split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHooks:
    """Every patch of one host: all of them are installed, or none.

    `distribution` is the name under which the framework is installed, `versions` the range (PEP 440) in
    which the patches are right, pre-releases and local builds included, and `tested` the releases of that
    range that the tests have run against. Where the framework may be used from a source tree, without a
    distribution, `version_attribute` names what holds its version, as `package.module:name`. `instead` are patches
    that `auto` puts in place where it leaves the host as it is: they refuse what was asked of us and would be dropped.
    `resumes` says that a resume policy is applied or refused through these patches, and would be dropped without them.
    """

    host: str
    distribution: str
    versions: str
    tested: tuple[str, ...]
    patches: tuple[Patch, ...]
    version_attribute: str | None = None
    instead: tuple[Patch, ...] = ()
    resumes: bool = True

    def __post_init__(self) -> None:
        versions = SpecifierSet(self.versions)
        outside = [text for text in self.tested if not versions.contains(Version(text), prereleases=True)]
        if outside:
            raise ValueError(f"{self.host}: tested versions {outside} are outside {self.versions}")
        targets = [patch.target for patch in self.patches]
        if not self.modules or len(set(targets)) != len(targets):
            raise ValueError(f"{self.host}: expected one patch or more, each with its own target, found {targets}")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that hold a target and that every user of the host imports, each once, in order."""
        return tuple(dict.fromkeys(patch.module for patch in self.patches if not patch.optional))

    @property
    def optional_modules(self) -> tuple[str, ...]:
        """The modules of optional patches, each once, in order."""
        return tuple(dict.fromkeys(patch.module for patch in self.patches if patch.optional))

    def covers(self, version: str) -> bool:
        """Whether `version` is in the range; a development or local build of a covered release is."""
        return SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    def has_tested(self, version: str) -> bool:
        """Whether the tests ran against this release; a local build (`1.2+cu128`) counts as its release."""
        return Version(Version(version).public) in {Version(text) for text in self.tested}
