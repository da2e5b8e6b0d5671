"""The tables of the pages about speed are those that the committed results make."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import PAGES, TABLES, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_results_say(name: str) -> None:
    """After new results: python -m benchmarks.page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert page(text) == text, "make the tables anew: python -m benchmarks.page"


def test_every_table_stands_on_a_page_and_has_figures() -> None:
    """No table is left out, and none is empty."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES]
    for name, made in TABLES.items():
        assert sum(f"<!-- {name} -->" in text for text in texts) == 1
        assert len(list(made())) > 1


def test_another_table_is_found() -> None:
    """One changed digit makes another page."""
    text = (ROOT / PAGES[0]).read_text(encoding="utf-8")
    at = text.index("| load under another layout")
    digit = next(i for i in range(at, len(text)) if text[i].isdigit() and text[i - 1] == ".")
    changed = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert page(changed) == text != changed
