"""The code in README.md and docs/ is not decoration: it runs, compiles, parses, or names commands that exist.

```python run    executed in a folder of its own
```python        must compile
```json          must parse; a "ds_reshard" section must hold known settings of the right type
```console       every `ds-reshard` and `make` line must name what is there
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ds_reshard.cli.main import parse
from ds_reshard.hosts.deepspeed.settings import parse_settings

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```[ ]*$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    file: str
    line: int
    language: str
    flags: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_of(file: str, text: str) -> list[Block]:
    return [
        Block(
            file=file,
            line=text.count("\n", 0, match.start()) + 1,
            language=match.group(1),
            flags=tuple(match.group(2).split()),
            text=match.group(3),
        )
        for match in FENCE.finditer(text)
    ]


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    block
    for path in DOCUMENTS
    for block in blocks_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
]


def _of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("block", _of("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    """Every python block is valid Python."""
    compile(block.text, str(block), "exec")


def _run_blocks() -> list[object]:
    """Those that build an engine of DeepSpeed take longer than `make check` may wait."""
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.slow] if "import deepspeed" in block.text else [])
        for block in _of("python")
        if "run" in block.flags
    ]


@pytest.mark.parametrize("block", _run_blocks())
def test_python_runs(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A block marked `python run` ends without an error in an empty folder."""
    python = request.getfixturevalue("interpreter") if "import deepspeed" in block.text else sys.executable
    done = subprocess.run(
        [python, "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{block} failed:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("block", _of("json"), ids=str)
def test_json_parses(block: Block) -> None:
    """Every json block is a JSON value, and a "ds_reshard" section in it is one that the DeepSpeed host accepts."""
    value = json.loads(block.text)
    if isinstance(value, dict) and "ds_reshard" in value:
        parse_settings(value)


@pytest.mark.parametrize("block", _of("console"), ids=str)
def test_commands_exist(block: Block) -> None:
    """Each ds-reshard line is accepted by the parser, and each make line names a target."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for line in block.text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["ds-reshard"]:
            try:
                parse(words[1:])
            except SystemExit:
                pytest.fail(f"{block}: the command line does not accept: {line}")
        elif words[:1] == ["make"]:
            unknown = {word for word in words[1:] if "=" not in word} - targets
            assert not unknown, f"{block}: the Makefile has no target {', '.join(sorted(unknown))}"


def test_the_readme_begins_with_the_two_commands() -> None:
    """The first code block of README.md is `make demo` and `make test`."""
    first = next(block for block in BLOCKS if block.file == "README.md")
    commands = [line.partition("#")[0].removeprefix("$ ").strip() for line in first.text.splitlines()]
    assert commands == ["make demo", "make test"]


def _anchors(path: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Each relative link names a file that is there, and a heading that is in it."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert wrong == [], f"{path.name}: lead nowhere: {', '.join(wrong)}"


def test_blocks_are_found() -> None:
    """A block's language, flags, text and line are read as they stand."""
    text = "one\n\n```python run\nx = 1\n```\n\n```json\n{}\n```\n"
    assert blocks_of("f.md", text) == [
        Block(file="f.md", line=3, language="python", flags=("run",), text="x = 1\n"),
        Block(file="f.md", line=7, language="json", flags=(), text="{}\n"),
    ]


def test_no_block_is_without_a_language() -> None:
    """Every fence in the documents says its language, or the tests above would pass it by."""
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in DOCUMENTS
        for number, line in enumerate(_opening_fences(path.read_text(encoding="utf-8")), start=1)
        if line == "```"
    ]
    assert bare == [], f"write python, json, console or text after the fence: {bare}"


def _opening_fences(text: str) -> list[str]:
    """For each line of the text: the line where it opens a fence, else an empty string."""
    opening, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        opening.append(line.strip() if fence and not inside else "")
        inside = inside ^ fence
    return opening


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(path: Path) -> None:
    """`tests/x/test_y.py`, `test_y.py::test_z`: the file is there, once, and has the test."""
    for folder, file, name in re.findall(r"`(tests/[\w/]+/)?(test_\w+\.py)(?:::(\w+))?`", path.read_text("utf-8")):
        (found,) = [ROOT / folder / file] if folder else (ROOT / "tests").rglob(file)
        assert f"def {name}(" * bool(name) in found.read_text("utf-8"), f"{file}::{name}"
