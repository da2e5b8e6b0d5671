"""Parts of the tests against other releases of accelerate, transformers and torch; writes libraries.json.

Each release comes first on the path, from a folder of its own; everything else is the project's own environment. Those
of torch, 3 to 6 GB each with what they need, are run where torch is named alone.

    make test-versions
    .venv/bin/python tests/versions/run_libraries.py accelerate 1.6.0   only these; other results are kept
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from homes import NotRun, home
from rich.console import Console
from table import ROOT

RESULTS = Path(__file__).with_name("libraries.json")
TIMEOUT_S = 1800


class Library(NamedTuple):
    """Its releases, the files of tests/ that are run with each, and what is chosen of them."""

    releases: tuple[str, ...]
    files: tuple[str, ...]
    chosen: str = ""


LIBRARIES = {
    # The placeholder, every row of the matrix with the hooks on, both clocks on one to three ranks, two schedulers with
    # ZeRO-2. Up to 1.6 accelerate itself cannot accumulate with ZeRO-2, and 0.34 takes no second model.
    "accelerate": Library(
        ("0.34.2", "1.0.1", "1.6.0", "1.10.1", "1.15.0"),
        tuple(
            f"hosts/accelerate/test_{name}.py"
            for name in ("late_optimizer", "prepare_matrix", "late_resume", "late_scheduler")
        ),
        "test_late_optimizer or (test_row and on]) or (test_another_clock and LambdaLR) or "
        "(test_equals_plain and zero2 and x1 and (StepLR or OneCycleLR))",
    ),
    "transformers": Library(
        ("5.23.0", "5.24.0"),
        tuple(f"hosts/accelerate/test_{name}.py" for name in ("preflight_trainer", "resume_trainer", "late_trainer")),
    ),
    "torch": Library(
        ("2.10.0", "2.11.0", "2.13.0", "2.14.1"),
        tuple(
            str(path.relative_to(ROOT / "tests"))
            for folder in ("formats", "hosts")
            for kind in ("dcp", "fsdp")
            for path in sorted((ROOT / "tests" / folder).glob(f"**/test_{kind}*.py"))
        ),
    ),
}


def _test(library: str, release: str) -> dict[str, Any]:
    _, files, chosen = LIBRARIES[library]
    try:
        place = home(library, release, f"{library}-{release}", with_needed=library == "torch")
    except NotRun as error:
        return {"release": release, "reason": str(error), "passed": 0, "failed": []}
    paths = [str(path) for path in (place, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    says = [sys.executable, "-c", f"import {library}; print({library}.__version__)"]
    found = subprocess.run(says, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert found.split("+")[0] == release, f"{release} was to run, {found} did"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, f"--junitxml={report}"]
        command += [f"--basetemp={scratch}/pytest", *(str(ROOT / "tests" / name) for name in files)]
        subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {"release": release, "reason": "", **outcome(cases)}


def outcome(cases: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """Count the test cases of a JUnit report that passed, and name those that failed; a skipped one is neither."""
    ended = {case: {child.tag for child in case} & {"failure", "error", "skipped"} for case in cases}
    failed = [case.get("name", "") for case, how in ended.items() if how & {"failure", "error"}]
    return {"passed": sum(not how for how in ended.values()), "failed": failed}


def _tested(library: str, releases: Iterable[str], known: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of a library in the order of its releases: those that are known, and these anew."""
    kept = {result["release"]: result for result in known}
    for release in releases:
        kept[release] = _test(library, release)
        Console().print(library, kept[release], highlight=False)
    return [kept[release] for release in sorted(kept, key=lambda text: [int(n) for n in text.split(".")])]


def main() -> int:
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    library, *named = sys.argv[1:] or [""]
    for one in [library] if library else [name for name in LIBRARIES if name != "torch"]:
        known[one] = _tested(one, named or LIBRARIES[one].releases, known.get(one, []) if named else [])
    RESULTS.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return int(any(result["failed"] or not result["passed"] for results in known.values() for result in results))


if __name__ == "__main__":
    sys.exit(main())
