"""The comparison with DeepSpeed's own tests counts only tests that ran."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

from run import LEAST_PASSED, Results, _results, judged

PASSED, FAILED, NOT_BEGUN = ("passed", ""), ("failed", "no fp16"), ("not begun", "at set-up")

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no fp16"/></testcase>
<testcase classname="a" name="left out"><skipped message="no GPU"/></testcase>
<testcase classname="a" name="set-up"><error message="at set-up"/></testcase>
</testsuite></testsuites>"""


def test_what_ended_at_set_up_was_not_begun(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert _results(tmp_path / "report.xml") == {
        "a::good": PASSED,
        "a::bad": FAILED,
        "a::left out": ("skipped", "no GPU"),
        "a::set-up": NOT_BEGUN,
    }


@pytest.mark.parametrize(
    ("alone", "hooked", "least", "said"),
    [
        ({"a": PASSED}, {"a": FAILED}, 1, "only with the hooks: a: failed: no fp16"),
        ({"a": PASSED}, {}, 1, "only with the hooks: a: not run"),
        ({"a": PASSED, "b": NOT_BEGUN}, {"a": PASSED, "b": NOT_BEGUN}, 1, "1 tests ended before they began"),
        ({"a": PASSED, "b": FAILED}, {"a": PASSED, "b": FAILED}, 2, "1 tests passed without the hooks"),
        ({}, {}, 0, "0 tests passed"),
    ],
)
def test_alike_is_no_success_where_nothing_ran(alone: Results, hooked: Results, least: int, said: str) -> None:
    (found,) = judged(alone, hooked, least=least)
    assert found.startswith(said)


def test_tests_that_fail_alike_are_no_fault_of_the_hooks() -> None:
    many = {str(number): PASSED for number in range(LEAST_PASSED)}
    assert judged({**many, "b": FAILED}, {**many, "b": FAILED}, least=LEAST_PASSED) == []
