"""Every Python that the README names can install the versions of constraints.txt."""

from __future__ import annotations

from importlib.metadata import distributions

import pytest
from house import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("python", ["3.10.0", "3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_pins_install_on(python: str) -> None:
    """No pin that pip applies there needs a newer Python, as far as the packages that are installed here say."""
    needed = {
        (canonicalize_name(one.name), one.version): one.metadata.get("Requires-Python") for one in distributions()
    }
    short = python.rpartition(".")[0]
    found = []
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate({"python_version": short, "python_full_version": python}):
            (exact,) = pin.specifier
            needs = needed.get((canonicalize_name(pin.name), exact.version))
            if needs and not SpecifierSet(needs).contains(python):
                found.append(f"{pin}: needs Python {needs}")
    assert not found, f"pip cannot install these on {python}; give it a line of its own: {found}"
