"""A part of the tests against older accelerate releases; writes accelerate.json.

Each release comes first on the path, from a folder of its own; everything else is the project's own environment.

    make test-versions
    .venv/bin/python tests/versions/run_accelerate.py 1.6.0   only these; other results are kept
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from homes import NotRun, home
from rich.console import Console
from table import ROOT

CURRENT = metadata.version("accelerate")
RELEASES = ("0.34.2", "1.0.1", "1.6.0", "1.10.1", CURRENT)
RESULTS = Path(__file__).with_name("accelerate.json")
TIMEOUT_S = 1200
# The placeholder, every row of the matrix with the hooks on, both clocks on one to three ranks, two schedulers with
# ZeRO-2. Up to 1.6 accelerate itself cannot accumulate with ZeRO-2, and 0.34 takes no second model.
FILES = ("test_late_optimizer", "test_prepare_matrix", "test_late_resume", "test_late_scheduler")
CHOSEN = (
    "test_late_optimizer or (test_row and on]) or (test_another_clock and LambdaLR) or "
    "(test_equals_plain and zero2 and x1 and (StepLR or OneCycleLR))"
)


def _test(release: str) -> dict[str, Any]:
    try:
        place = home("accelerate", release, f"accelerate-{release}") if release != CURRENT else None
    except NotRun as error:
        return {"accelerate": release, "reason": str(error), "passed": 0, "failed": []}
    paths = [str(path) for path in (place, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    says = [sys.executable, "-c", "import accelerate; print(accelerate.__version__)"]
    found = subprocess.run(says, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert found == release, f"{release} was to run, {found} did"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        files = [str(ROOT / "tests" / "hosts" / f"{name}.py") for name in FILES]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-k",
            CHOSEN,
            f"--junitxml={report}",
            f"--basetemp={scratch}/pytest",
            *files,
        ]
        subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"accelerate": release, "reason": "", "passed": len(cases) - len(failed), "failed": failed}


def main() -> int:
    wanted = tuple(sys.argv[1:]) or RELEASES
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if len(sys.argv) > 1 and RESULTS.exists() else []
    kept = {result["accelerate"]: result for result in known}
    for release in wanted:
        kept[release] = _test(release)
        Console().print(kept[release], highlight=False)
    results = [kept[release] for release in sorted(kept, key=lambda text: [int(n) for n in text.split(".")])]
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(any(result["failed"] or not result["passed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
