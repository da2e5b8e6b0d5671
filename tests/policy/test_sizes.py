"""Files and functions stay short enough to be read in one go."""

from __future__ import annotations

from house import PACKAGE, ROOT, TESTS, functions, offenders, place, sources

FILE_LINES = 900
FUNCTION_LINES = 70


def test_files_of_the_package_are_under_900_lines() -> None:
    """A file of ds_reshard is one thought, whatever its length; one that reaches 900 lines holds two."""
    lengths = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(PACKAGE)}
    found = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines >= FILE_LINES]
    assert not found, offenders(f"split these files, each must be under {FILE_LINES} lines:", found)


def test_other_files_are_under_900_lines() -> None:
    """A test, example or benchmark file stays under 900 lines."""
    folders = (TESTS, ROOT / "examples", ROOT / "benchmarks")
    lengths = {
        place(path): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in sources(folder)
    }
    found = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines >= FILE_LINES]
    assert not found, offenders(f"split these files, each must be under {FILE_LINES} lines:", found)


def test_functions_are_under_70_lines() -> None:
    """A function of ds_reshard, decorators not counted, stays under 70 lines."""
    found = [
        f"{place(path, node.lineno)}: {node.name} has {lines} lines"
        for path in sources(PACKAGE)
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= FUNCTION_LINES
    ]
    assert not found, offenders(f"split these functions, each must be under {FUNCTION_LINES} lines:", found)


BUDGETS = {
    "model, planning": (("model", "planning"), 4249),
    "execution": (("execution",), 3260),
    "containers": (("containers",), 6449),
    "formats/zero": (("formats/zero",), 7163),
    "other formats": (("formats",), 9289),
    "operations": (("operations",), 6685),
    "hosts/deepspeed": (("hosts/deepspeed",), 7410),
    "other hosts": (("hosts",), 11886),
    "resume, hooks, cli, testing, top": ((".",), 7304),
}
"""The lines that each room may have. A step that makes a room smaller lowers its budget."""


def test_rooms_keep_to_their_budgets() -> None:
    """Every file of ds_reshard counts in the first room whose folder it is in."""
    lines = dict.fromkeys(BUDGETS, 0)
    narrow_first = sorted(
        BUDGETS, key=lambda room: -max(folder.count("/") + (folder != ".") for folder in BUDGETS[room][0])
    )
    for path in sources(PACKAGE):
        room = next(one for one in narrow_first if any(path.is_relative_to(PACKAGE / at) for at in BUDGETS[one][0]))
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    found = [f"{room}: {lines[room]} lines of {most}" for room, (_, most) in BUDGETS.items() if lines[room] > most]
    assert not found, offenders("make these rooms smaller, or say in the commit why they need more:", found)
