"""DeepSpeed's own tests of checkpoints, with and without the hooks; what fails only with them is this run's failure.

The tests are those of a checkout; the package is the one that is installed. They run on CPU, under a pytest of their
own in `.venv-versions`: 8.4 and later do not take DeepSpeed's fixtures of several ranks.

    make test-peers SRC=path                 both runs of every test
    make test-peers SRC=path SELECT="moe"    those that pytest's -k selects
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "versions"))

from homes import HOMES, home  # noqa: E402

A_TEST_TAKES_S = 600
PYTEST = "8.3.5"
"""8.3 takes a class with `_pytestfixturefunction` (`DistributedFixture`, tests/unit/common.py) for a fixture."""
LEAST_PASSED = 142
"""Of the 297 tests at edaa72212, on a CPU without fp16 and DeepSpeed 0.19.8, with the hooks and without alike.

37 fail: 31 are of DeepSpeed 0.19.6, and ask for what 0.19.8 has no more, 6 want fp16. The others are skipped.
"""
Results = dict[str, tuple[str, str]]


def _results(report: Path) -> Results:
    """(passed, failed, skipped or not begun, why) of each test of a JUnit report."""
    results = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = {child.tag: child.get("message") or "" for child in case}
        outcome = "failed" if "failure" in found else "skipped" if "skipped" in found else "passed"
        outcome = "not begun" if "error" in found else outcome
        said = found.get("failure") or found.get("error") or found.get("skipped") or ""
        results[f"{case.get('classname')}::{case.get('name')}"] = outcome, said
    return results


def _run(checkout: Path, folder: Path, hooks: bool, select: str) -> Results:
    tests = folder / "tests"  # beside no package: DeepSpeed's conftest.py puts its parent on the path
    shutil.copytree(checkout / "tests", tests)
    paths = [HERE / "hooked"] * hooks + [HERE, HOMES / f"pytest-{PYTEST}", ROOT, tests]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "8",  # devices, for cpu_accelerator.py: tests of more ranks are skipped
        "OMP_NUM_THREADS": "1",
        "DS_UNITTEST_TIMEOUT": str(A_TEST_TAKES_S),
        "PYTEST_XDIST_WORKER": f"gw{int(hooks)}",  # for get_master_port: ports of its own
    }
    if hooks:
        environment["DS_RESHARD_PEERS"] = "1"
    report = tests / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "plugin", f"--junitxml={report}"]
    command += [f"--timeout={2 * A_TEST_TAKES_S}", *(["-k", select] if select else []), "unit/checkpoint"]
    subprocess.run(command, cwd=tests, env=environment, check=False)
    if not report.is_file():
        raise SystemExit("pytest has written no report: see above")
    return _results(report)


def main(checkout: Path, select: str = "") -> int:
    home("pytest", PYTEST, f"pytest-{PYTEST}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        runs = [pool.submit(_run, checkout, Path(folder, str(hooks)), hooks, select) for hooks in (False, True)]
        alone, hooked = (run.result() for run in runs)
    for name, results in (("without", alone), ("with", hooked)):
        counts = Counter(outcome for outcome, _ in results.values())
        ran = f"{counts['passed'] + counts['failed']} of {len(results)} ran"
        print(f"{name} the hooks: {ran};", ", ".join(f"{counts[each]} {each}" for each in OUTCOMES))
    for outcome in OUTCOMES[1:]:
        reasons = Counter(
            said.splitlines()[0][:150] if said else "" for each, said in alone.values() if each == outcome
        )
        for reason, count in reasons.most_common():
            print(f"  {count} {outcome} without them too: {reason}")
    missed = judged(alone, hooked, least=0 if select else LEAST_PASSED)
    print(*missed, sep="\n")
    return 1 if missed else 0


OUTCOMES = ("passed", "failed", "skipped", "not begun")


def judged(alone: Results, hooked: Results, *, least: int) -> list[str]:
    """What is wrong: tests that pass without the hooks alone, that were not begun, or fewer that pass than `least`."""
    passed = {name for name, (outcome, _) in alone.items() if outcome == "passed"}
    worse = sorted(name for name in passed if hooked.get(name, ("not run", ""))[0] != "passed")
    found = [f"only with the hooks: {name}: {': '.join(hooked.get(name, ('not run', '')))}" for name in worse]
    begun = sum(outcome == "not begun" for outcome, _ in alone.values())
    found += [f"{begun} tests ended before they began, and compare nothing"] if begun else []
    if len(passed) < max(1, least):
        found.append(f"{len(passed)} tests passed without the hooks, with which they are compared; at least {least} do")
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
