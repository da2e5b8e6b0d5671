"""What a library does not do: print, exit, read the environment, hide types, or name a thing after nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest
from house import PACKAGE, ROOT, functions, in_cli, offenders, place, sources, tree

NOT_NOUNS = {"util", "utils", "helper", "helpers", "manager", "managers", "info", "data", "process", "handle", "misc"}
# A folder of somebody's machine, at the start of a path. Written in parts so that this file holds no such path.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:" + "|".join(("work", "root", "tmp", "home", "Users", "mnt")) + r")/")


def _is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names


def _is_exit(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return ast.unparse(node.exc).split("(")[0] == "SystemExit"
    return _is_call(node, "sys.exit", "exit", "quit", "os._exit", "os.abort")


def _is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.putenv"}


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (
        isinstance(node, ast.Attribute) and ast.unparse(node) in {"typing.Any", "t.Any"}
    )


def _is_assert_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value


def _is_logging_setup(node: ast.AST) -> bool:
    return _is_call(node, "logging.basicConfig", "logging.config.dictConfig", "logging.disable")


RULES: list[tuple[str, Callable[[ast.AST], bool], str]] = [
    ("print", lambda node: _is_call(node, "print"), "return or raise instead; only cli/ prints:"),
    ("exit", _is_exit, "raise an error of ds_reshard.errors instead; only cli/ ends the process:"),
    (
        "any",
        _is_any,
        "name the type, or use object and narrow it; no Any below cli/, but for a host's arguments in hooks/seams.py:",
    ),
    ("environment", _is_environment, "take the value as an argument; only auto.py and cli/ read the environment:"),
    (
        "assert-false",
        _is_assert_false,
        "raise InternalError with what happened; an assert that always fails is not a check:",
    ),
    ("logging-setup", _is_logging_setup, "logging is configured by the program, not by a library:"),
]


EXCEPT = {(_is_environment, "auto.py"), (_is_exit, "auto.py"), (_is_any, "hooks/seams.py")}
"""Where a host's functions are called, their arguments have no types of ours. A process that `ds_reshard.run` became
by os.exec gets its status in auto.py: nothing else of ours runs at its end."""


@pytest.mark.parametrize(("breaks", "mend"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_the_library_keeps_to_itself(breaks: Callable[[ast.AST], bool], mend: str) -> None:
    """Below cli/ nothing prints, exits, reads the environment, configures logging or is typed Any."""
    found = [
        place(path, getattr(node, "lineno", None))
        for path in sources(PACKAGE)
        if not in_cli(path) and (breaks, path.relative_to(PACKAGE).as_posix()) not in EXCEPT
        for node in ast.walk(tree(path))
        if breaks(node)
    ]
    assert not found, offenders(mend, found)


_LOOKS = ("exists", "lexists", "isfile", "isdir", "getsize", "getmtime")


def _looks_away(node: ast.AST) -> bool:
    """A look at files that takes an error of the system for an absence, or raises it without a name."""
    return _is_call(node, "os.listdir", "os.scandir", *(f"os.path.{name}" for name in _LOOKS))


def test_an_error_of_the_system_is_no_absence() -> None:
    rooms = ("containers", "formats", "operations")
    own = {PACKAGE / "containers" / "folders.py", PACKAGE / "operations" / "pickles.py"}
    found = [
        place(path, getattr(node, "lineno", None))
        for path in sources(PACKAGE)
        if path.relative_to(PACKAGE).parts[0] in rooms and path not in own
        for node in ast.walk(tree(path))
        if _looks_away(node)
    ]
    assert not found, offenders("look at files through containers/folders.py:", found)


@pytest.mark.parametrize(
    ("breaks", "source"),
    [
        (lambda node: _is_call(node, "print"), "print(1)"),
        (_is_exit, "import sys\nsys.exit(1)"),
        (_is_exit, "raise SystemExit(1)"),
        (_is_exit, "raise SystemExit"),
        (_is_any, "def f(x: dict[str, Any]) -> None: ..."),
        (_is_any, "x: typing.Any = 1"),
        (_looks_away, "if os.path.isfile(path): pass"),
        (_is_environment, "import os\nos.environ['A']"),
        (_is_environment, "os.getenv('A')"),
        (_is_assert_false, "assert False, 'never'"),
        (_is_logging_setup, "logging.basicConfig()"),
    ],
)
def test_the_rules_can_fail(breaks: Callable[[ast.AST], bool], source: str) -> None:
    """Each rule finds the line that it forbids."""
    assert any(breaks(node) for node in ast.walk(ast.parse(source)))


def test_every_function_says_what_it_returns() -> None:
    """Every function of ds_reshard has a return annotation."""
    found = [
        f"{place(path, node.lineno)}: {node.name}"
        for path in sources(PACKAGE)
        for node in functions(path)
        if node.returns is None
    ]
    assert not found, offenders("annotate what these return:", found)


def test_every_module_says_what_it_promises() -> None:
    """Every module of ds_reshard begins with a docstring."""
    found = [place(path) for path in sources(PACKAGE) if not ast.get_docstring(tree(path))]
    assert not found, offenders("write a first line that says what these are for:", found)


def test_a_module_is_named_after_a_noun_of_the_domain() -> None:
    """No module or folder is called utils, helper, manager, info, data, process or handle."""
    names = {path for file in sources(PACKAGE) for path in (file, *file.parents) if path.is_relative_to(PACKAGE)}
    found = [place(path) for path in sorted(names) if NOT_NOUNS & set(path.stem.lower().split("_"))]
    assert not found, offenders("rename these after what they are about:", found)


def test_no_path_of_a_machine_is_committed() -> None:
    """Sources, documents and build files name no absolute folder of somebody's machine."""
    documents = [path for pattern in ("*.md", "*.cfg", "*.toml", "*.txt", "Makefile") for path in ROOT.glob(pattern)]
    documents += [*(ROOT / "docs").rglob("*.md"), ROOT / ".ci" / "run"]
    files = [*sources(PACKAGE), *sources(ROOT / "examples"), *sources(ROOT / "benchmarks"), *documents]
    found = [
        f"{place(path, number)}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, offenders("use a relative path, tempfile, or an argument:", found)
