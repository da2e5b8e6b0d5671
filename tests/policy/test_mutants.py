"""The seeded faults of tests/mutants.py fit the sources as they are."""

from __future__ import annotations

import json

from house import PACKAGE, ROOT
from mutants import MUTANTS, RESULTS, times_in


def test_the_text_of_each_fault_occurs_once() -> None:
    """A source that has changed takes its fault along: `make mutants` would else plant it nowhere, or elsewhere."""
    found = [
        f"{one.file}: {one.what}: {times_in(PACKAGE, one)} times" for one in MUTANTS if times_in(PACKAGE, one) != 1
    ]
    assert not found, "\n".join(found)
    assert len({(one.file, one.text) for one in MUTANTS}) == len(MUTANTS) >= 60


def test_each_fault_changes_the_source_and_its_tests_exist() -> None:
    """A fault is another text, and names files of tests that are there."""
    assert [one.what for one in MUTANTS if one.text == one.instead or not one.tests] == []
    files = {test.partition("::")[0] for one in MUTANTS for test in one.tests}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []


def test_the_results_are_of_the_list() -> None:
    """tests/mutants.json tells of faults of the list, in its order, which test noticed each: one that is there."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    listed = {(number, one.what, one.file) for number, one in enumerate(MUTANTS, 1)}
    told = [(row["number"], row["what"], row["file"]) for row in rows]
    assert told == sorted(told) and set(told) <= listed
    assert [row["what"] for row in rows if not row["noticed_by"]] == []
    assert [row["what"] for row in rows if not (ROOT / row["noticed_by"].partition("::")[0]).is_file()] == []
