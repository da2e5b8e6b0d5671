"""What the policy tests look at: the sources of the project, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_reshard"
TESTS = ROOT / "tests"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(folder: Path) -> tuple[Path, ...]:
    """Every Python file below a folder, sorted; byte-code folders are not looked into."""
    return tuple(sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def place(path: Path, line: int | None = None) -> str:
    """The file as seen from the repository's root, with the line if one is meant."""
    relative = path.relative_to(ROOT).as_posix()
    return relative if line is None else f"{relative}:{line}"


def in_cli(path: Path) -> bool:
    return path.is_relative_to(PACKAGE / "cli") or path == PACKAGE / "__main__.py"


def offenders(what: str, found: list[str]) -> str:
    """The message of a failed rule: what to do, then each place."""
    return what + "".join(f"\n  {line}" for line in found)
