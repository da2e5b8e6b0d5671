"""The documents describe the project that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house import PACKAGE, ROOT, place

NAME = re.compile(r"[\w.]+(?:\.py|/)(?=\s|$)")


def _rooms() -> set[Path]:
    """Every path named by the code block below "## Rooms" in ARCHITECTURE.md.

    A line that is not indented names a folder of the repository; an indented line begins with an entry of the
    folder above it. In both, each further word that ends in .py or / lies inside that entry.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = re.search(r"^## Rooms\n.*?^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert block, 'ARCHITECTURE.md has no code block below "## Rooms"'
    paths: set[Path] = set()
    folder = entry = ROOT
    for line in block.group(1).splitlines():
        names = NAME.findall(line)
        indent = len(line) - len(line.lstrip())
        if indent <= 2 and names:
            folder = ROOT if indent == 0 else folder
            entry = folder / names.pop(0)
            folder = entry if indent == 0 else folder
            paths.add(entry)
        paths.update(entry / name for name in names)
    return paths


def test_everything_on_the_map_exists() -> None:
    """Each file and folder in the Rooms block of ARCHITECTURE.md is there."""
    missing = [place(path) for path in sorted(_rooms()) if not path.exists()]
    assert missing == [], f"take these off the Rooms block of ARCHITECTURE.md, or write them: {missing}"


def test_every_room_is_on_the_map() -> None:
    """Each folder and module of ds_reshard, and each folder beside it, is in the Rooms block of ARCHITECTURE.md."""
    inside = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()]
    beside = [ROOT / name for name in ("ds_reshard", "docs", "examples", "benchmarks", "patches", "tests")]
    beside += [path for path in (ROOT / "tests").iterdir() if path.is_dir()]
    there = {path for path in (*inside, *beside) if path.exists() and path.name != "__pycache__"}
    unnamed = [place(path) for path in sorted(there - _rooms())]
    assert unnamed == [], f"add these to the Rooms block of ARCHITECTURE.md: {unnamed}"


def test_the_hour_of_reading_is_an_hour() -> None:
    """Each of the ten files in docs/reading.md has as many lines as the page says, within a tenth."""
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [0-9]+ \| (\S+) \| ([0-9]+) \|", text, flags=re.MULTILINE)
    counts = {name: len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert len(rows) == 10
    wrong = {name: counts[name] for name, lines in rows if not 0.9 <= int(lines) / counts[name] <= 1.1}
    assert wrong == {}, f"correct the lines of these files in docs/reading.md: {wrong}"


@pytest.mark.parametrize("pattern", ["examples/[0-9][0-9]_*.py", "ds_reshard/formats/*", "ds_reshard/hosts/*"])
def test_what_is_found_by_a_glob_is_not_empty(pattern: str) -> None:
    """Examples, formats and hosts are found by name; a glob that finds none would pass every test below it."""
    found = [path for path in ROOT.glob(pattern) if path.name not in ("__init__.py", "__pycache__")]
    assert found, f"nothing matches {pattern}: write one, or correct the pattern where the folder has moved"


def test_examples_are_under_70_lines() -> None:
    """An example is read in a minute."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("[0-9][0-9]_*.py")}
    long = {name: lines for name, lines in lengths.items() if lines >= 70}
    assert long == {}, f"shorten these examples to under 70 lines: {long}"
