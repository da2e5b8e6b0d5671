"""DeepSpeed's own tests of checkpoints, with and without the hooks; what fails only with them is this run's failure.

The tests are those of a checkout; the package is the one that is installed. They run on CPU.

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
A_TEST_TAKES_S = 600


def _results(report: Path) -> dict[str, tuple[str, str]]:
    """(passed, failed or skipped, why) of each test of a JUnit report."""
    results = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = {child.tag: child.get("message") or "" for child in case}
        outcome = "failed" if found.keys() & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        said = found.get("failure") or found.get("error") or found.get("skipped") or ""
        results[f"{case.get('classname')}::{case.get('name')}"] = outcome, said
    return results


def _run(checkout: Path, folder: Path, hooks: bool, select: str) -> dict[str, tuple[str, str]]:
    tests = folder / "tests"  # beside no package: DeepSpeed's conftest.py puts its parent on the path
    shutil.copytree(checkout / "tests", tests)
    paths = [HERE / "hooked"] * hooks + [HERE, ROOT, tests]
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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        runs = [pool.submit(_run, checkout, Path(folder, str(hooks)), hooks, select) for hooks in (False, True)]
        alone, hooked = (run.result() for run in runs)
    for name, results in (("without", alone), ("with", hooked)):
        counts = Counter(outcome for outcome, _ in results.values())
        print(f"{name} the hooks:", ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped")))
    for outcome in ("failed", "skipped"):
        reasons = Counter(
            said.splitlines()[0][:150] if said else "" for each, said in alone.values() if each == outcome
        )
        for reason, count in reasons.most_common():
            print(f"  {count} {outcome} without them too: {reason}")
    passed = {name for name, (outcome, _) in alone.items() if outcome == "passed"}
    worse = sorted(name for name in passed if hooked.get(name, ("not run", ""))[0] != "passed")
    for name in worse:
        print(f"only with the hooks: {name}: {': '.join(hooked.get(name, ('not run', '')))}")
    if not passed:
        print("no test passed, with which the hooks could be compared")
    return 1 if worse or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
