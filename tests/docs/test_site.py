"""The site of `make docs`: every page is in it, each once, and it builds without a warning."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def _pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]  # type: ignore[union-attr]


def _elsewhere() -> dict[str, str]:
    tree = ast.parse((ROOT / "docs" / "site_pages.py").read_text(encoding="utf-8"))
    (found,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE"
    ]
    return ast.literal_eval(found)


def test_every_page_is_in_the_menu_once() -> None:
    """Those of docs/, those that lie elsewhere, and the reference."""
    own = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(_pages(SITE["nav"])) == sorted([*own, *_elsewhere(), "reference.md"])
    assert all((ROOT / source).is_file() for source in _elsewhere().values())


def test_every_recipe_names_what_runs_it() -> None:
    """An example, or a file of tests, which other tests look for. The first are in the order of a user's questions."""
    (recipes,) = (part["Recipes"] for part in SITE["nav"] if "Recipes" in part)
    order = ["DeepSpeed", "Hugging Face's Trainer", "accelerate", "FSDP2 and FSDP1", "Megatron-LM", "nanotron", "Slurm"]
    assert [name for recipe in recipes for name in recipe][: len(order)] == order
    named = re.compile(r"`(examples/\d\d_\w+\.py|tests/\w+/(?:\w+/)?test_\w+\.py)`")
    pages = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in _pages(recipes)}
    assert [page for page, text in pages.items() if not named.search(text)] == []


@pytest.mark.slow
def test_the_site_builds_and_asks_nobody_for_anything(tmp_path: Path) -> None:
    """Strictly, so that a link that leads nowhere is an error; and no page loads anything from outside."""
    pytest.importorskip("material", reason="make docs installs mkdocs-material")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) == len(_pages(SITE["nav"])) + 1  # and that of what is not found
    loaded = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//"
    assert [page.name for page in pages if re.search(loaded, page.read_text(encoding="utf-8"))] == []
