"""The seeded faults of tests/mutants.py fit the sources as they are, and a test noticed each."""

from __future__ import annotations

import json
import re

from house import PACKAGE, ROOT
from mutants import MUTANTS, RESULTS, times_in


def test_the_text_of_each_fault_occurs_once() -> None:
    """A source that has changed takes its fault along: `make mutants` would else plant it nowhere, or elsewhere."""
    moved = [
        f"ds_reshard/{one.file}: {one.what!r}: found {times_in(PACKAGE, one)} times, not once:\n{one.text}"
        for one in MUTANTS
        if times_in(PACKAGE, one) != 1
    ]
    mend = "give the fault in tests/mutants.py its text of today, or another in its place, and `make mutants` its words"
    assert not moved, f"{len(moved)} of {len(MUTANTS)} faults no longer fit the sources; {mend}\n" + "\n".join(moved)


def test_each_fault_is_another_and_changes_the_source_and_its_tests_exist() -> None:
    """A fault is another text, and names files of tests that are there."""
    assert len({one.what for one in MUTANTS}) == len({(one.file, one.text) for one in MUTANTS}) == len(MUTANTS) >= 60
    assert [one.what for one in MUTANTS if one.text == one.instead or not one.tests] == []
    files = {test.partition("::")[0] for one in MUTANTS for test in one.tests}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []


def test_the_results_are_of_the_list_and_a_test_that_is_there_noticed_each() -> None:
    """tests/mutants.json has rows of faults of the list, in its order; CONTRIBUTING.md tells how many they are."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    told = [(row["what"], row["file"]) for row in rows]
    assert told == [one for one in ((one.what, one.file) for one in MUTANTS) if one in set(told)]
    assert len(told) >= 60, "run those that have no row: make mutants MUTANTS=--new"
    assert [row["what"] for row in rows if not row["noticed_by"]] == []
    suites = (PACKAGE / "testing" / "suites.py").read_text(encoding="utf-8")
    gone = []
    for test in sorted({row["noticed_by"] for row in rows}):
        file, *_, name = test.split("::")
        there = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        if not re.search(rf"(def|class) {name}\b", there + suites):
            gone.append(test)
    assert gone == [], "these noticed faults, and are no more: make mutants"
    said = re.search(r"(\d+) seeded faults", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert said is not None and int(said[1]) == len(rows)
