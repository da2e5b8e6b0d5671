"""Whether the tests notice: seeded faults that would matter, each in a copy of the package, each run against few tests.

`python tests/mutants.py [TEXT] [--jobs N] [--new] [--seconds N] [--check]`, or `make mutants`; TEXT chooses faults by
what they are or where. The tree itself is never changed. What noticed which fault is kept in tests/mutants.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "mutants.json"
_COPIED = ("ds_reshard", "tests")
_DISTRIBUTED = "tests/hosts/"
"""Tests of engines, with several processes; all others are run without their distributed ones."""
_FAILED = r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*)"
_SECONDS = 240
# An example that fails is enough; to look for the smallest takes minutes.
_NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], deadline=None)
settings.load_profile("mutants")
"""


class Mutant(NamedTuple):
    """A fault: `text`, which is in `file` of ds_reshard once, becomes `instead`; `tests` are to fail then."""

    what: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


TESTS = {
    "LAYOUT": "tests/unit/test_layout.py",
    "PLAN": "tests/unit/test_plan.py tests/unit/test_plan_blocks.py",
    "COPIES": "tests/unit/test_copies.py tests/unit/test_coalesce.py",
    "COLUMNS": "tests/unit/test_columns.py",
    "PROCESSES": "tests/formats/test_convert_processes.py",
    "REGION": "tests/unit/test_region.py",
    "TENSOR_PARALLEL": "tests/unit/test_tensor_parallel.py",
    "CHECKSUMS": "tests/unit/test_checksums.py tests/unit/test_ledger.py",
    "EXECUTOR": "tests/unit/test_executor.py",
    "PRINT": "tests/unit/test_fingerprint.py",
    "WITNESS": "tests/unit/test_witness.py",
    "FOLDERS": "tests/unit/test_folders.py",
    "SCATTER": "tests/unit/test_cuda_executor.py",
    "CRC": "tests/unit/test_crc.py",
    "ZIP": "tests/hostile/test_containers.py::test_directories_that_lie_are_refused tests/unit/test_torch_zip.py"
    " tests/hostile/test_containers.py::test_bytes_before_the_first_entry_are_refused"
    " tests/hostile/test_containers.py::test_a_header_inside_a_header_is_refused",
    "RULES": "tests/hostile/test_pickle_rules.py",
    "ZERO_CONTENT": "tests/unit/test_zero_content.py",
    "FOREIGN": "tests/formats/test_foreign_shards.py",
    "RANKS": "tests/unit/test_ranks.py",
    "NAMES": "tests/unit/test_name_map.py tests/formats/test_nanotron_deepspeed.py",
    "ZERO_DOOR": "tests/formats/test_nanotron_deepspeed.py tests/formats/test_dcp_folder.py",
    "PYTORCH_DOOR": "tests/formats/test_pytorch.py tests/formats/test_every_pair.py",
    "NANOTRON_STEPS": "tests/formats/test_nanotron_deepspeed.py",
    "OTHER_FORMATS": "tests/hosts/deepspeed/test_other_formats.py::test_names_of_another_framework",
    "LATEST": "tests/formats/test_pytorch.py::test_the_tag_is_the_one_that_latest_names",
    "SHARDS": "tests/formats/test_zero_shards.py",
    "DIFFERING": "tests/hosts/deepspeed/test_ranks_differ.py",
    "MEGATRON_DIFFERING": "tests/hosts/megatron/test_megatron_ranks_differ.py",
    "NANOTRON_DIFFERING": "tests/hosts/nanotron_runs/test_nanotron_refused.py::test_ranks_that_see_other_files",
    "NANOTRON_FINDS": "tests/hosts/nanotron_runs/test_nanotron_refused.py::test_ranks_that_find_other_checkpoints",
    "ACCELERATE": "tests/hosts/accelerate/test_late_resume.py::test_weights_alone_leave_accelerates_own_states_out"
    " tests/hosts/accelerate/test_late_resume.py::test_the_updates_of_the_engine_that_has_the_schedule_count",
    "OTHER_ADAMS": "tests/hosts/deepspeed/test_other_adams.py",
    "OPENED": "tests/hosts/fsdp/test_dcp_reader.py::test_copies_of_two_saves_are_no_checkpoint"
    " tests/hosts/fsdp/test_dcp_reader.py::test_copies_of_two_saves_are_none_for_torch_either",
    "SCAN": "tests/hostile/test_unsafe_checkpoints.py tests/hostile/test_pickle_scan.py",
    "DAMAGE": "tests/hostile/test_checkpoints.py",
    "NANOTRON": "tests/formats/test_nanotron.py",
    "TO_NANOTRON": "tests/formats/test_nanotron_convert.py tests/formats/test_nanotron_deepspeed.py",
    "ZERO": "tests/formats/test_convert_any.py tests/formats/test_nanotron_deepspeed.py",
    "DCP": "tests/formats/test_dcp_folder.py",
    "PYTORCH": "tests/formats/test_pytorch.py",
    "FLAT": "tests/unit/test_flat_parameters.py",
    "MEGATRON": "tests/unit/test_megatron_rules.py tests/hosts/megatron/test_megatron_topology.py",
    "POLICY": "tests/unit/test_policy_position.py tests/unit/test_resume_policy.py",
    "SCHEDULE": "tests/unit/test_schedule.py",
    "HOOKS": "tests/unit/test_hooks.py tests/unit/test_hooks_guard.py",
    "PROOF": "tests/formats/test_proof_of_files.py",
    "FORESEEN": "tests/hosts/deepspeed/test_preflight_grid.py",
    "LISTED": "tests/formats/test_nanotron_convert.py::test_the_output_verifies_and_its_manifest_lists_every_file",
    "WORKSPACE": "tests/unit/test_workspace.py",
    "BY_RANKS": "tests/formats/test_convert_ranks.py",
    "BY_URL": "tests/formats/test_convert_urls.py",
    "FAR": "tests/formats/test_far_store.py",
    "MEGATRON_STEPS": "tests/hosts/megatron/test_megatron_torch_adam.py",
    "MEGATRON_RELEASE": "tests/hosts/megatron/test_megatron_odd.py::test_an_iteration_beside_a_release",
    "NANOTRON_WEIGHTS": "tests/hosts/nanotron_runs/test_nanotron_refused.py::test_ranks_that_see_other_weights",
    "UNIVERSAL_CUT": "tests/hosts/deepspeed/test_grid_written.py",
    "CUT_OTHERWISE": "tests/hosts/deepspeed/test_grid_tensor.py"
    "::test_as_many_ranks_that_cut_otherwise_take_their_own_parts",
    "LATE_FILE": "tests/hosts/deepspeed/test_grid.py::test_tools_take_a_later_stages_file_for_no_others"
    " tests/hosts/deepspeed/test_grid.py::test_what_only_a_later_stage_has_saved_is_not_the_first_stages"
    " tests/hosts/deepspeed/test_grid.py::test_a_pipeline_loads_bit_equal_with_other_stages",
    "PADDED": "tests/hosts/deepspeed/test_grid_tensor.py::test_rows_behind_the_vocabulary_are_zeros"
    " tests/hosts/deepspeed/test_grid_tensor.py::test_rows_behind_the_vocabulary_of_what_was_converted_are_zeros",
    "ACTIVATIONS": "tests/unit/test_revive.py",
    "LOOKED_AT_ONCE": "tests/formats/test_looked_at_once.py",
    "GRID_OFFLINE": "tests/hosts/deepspeed/test_grid_offline.py",
    "LACKING_EXPERTS": "tests/hosts/deepspeed/test_grid.py::test_experts_that_some_files_lack_load_bit_equal",
}

# By file of ds_reshard: what a fault does, the tests that are to fail, the lines that go, and those that come.
FAULTS = (ROOT / "tests" / "mutants.txt").read_text(encoding="utf-8")


def _read(faults: str) -> Iterator[Mutant]:
    """The faults of a text in the form of FAULTS."""
    file = what = tests = ""
    sides: dict[str, list[str]] = {}
    for line in [*faults.strip().splitlines(), "# end []"]:
        mark, _, rest = line.partition(" ")
        if mark in "-+":
            sides.setdefault(mark, []).append(rest)
            continue
        if sides:
            named = tuple(test for name in tests.split() for test in TESTS.get(name, name).split())
            yield Mutant(what, file, "\n".join(sides["-"]), "\n".join(sides.get("+", ())), named)
            sides = {}
        if mark == "==":
            file = rest
        else:
            what, _, tests = rest.removesuffix("]").partition(" [")


MUTANTS = tuple(_read(FAULTS))


def times_in(package: Path, mutant: Mutant) -> int:
    """How often the text of a fault is in its file; 0 where there is no such file."""
    path = package / mutant.file
    return path.read_text(encoding="utf-8").count(mutant.text) if path.is_file() else 0


def _pytest(mutant: Mutant | None, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of tests of a copy with a fault, or without any, and what pytest printed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        place = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.name not in _COPIED and not path.name.startswith("."):
                (place / path.name).symlink_to(path)
        with open(place / "tests" / "conftest.py", "a", encoding="utf-8") as conftest:
            conftest.write(_NO_SHRINKING)
        if mutant is not None:
            file = place / "ds_reshard" / mutant.file
            file.write_text(file.read_text(encoding="utf-8").replace(mutant.text, mutant.instead), encoding="utf-8")
        known = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        alone = any(not test.startswith(_DISTRIBUTED) for test in tests)
        chosen = "not distributed and not gpu" if alone and mutant is not None else "not gpu"
        given = ["-x", "-q", "-p", "no:cacheprovider", "-m", chosen, *tests]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *given],
                cwd=folder,
                env=known,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"no end after {_SECONDS} seconds"
        return done.returncode, done.stdout + done.stderr


def noticed_by(mutant: Mutant, before: str | None = None) -> str | None:
    """The first test that fails because of a fault; None if none does. RuntimeError if tests did not run.

    `before` is the test that noticed it the last time: it runs first, and alone.
    """
    for tests in ([before] if before else []), mutant.tests:
        code, printed = _pytest(mutant, tests) if tests else (0, "")
        failed = re.search(_FAILED, printed, re.MULTILINE)
        if code == 1 and failed is not None:
            return failed[1]
        if code != 0 and tests is mutant.tests:  # the test of the last time may have another name or place now
            raise RuntimeError(f"{mutant.what}: pytest ended with {code}\n{printed[-2000:]}")
    return None


Row = dict[str, str | None]


def _row(mutant: Mutant, before: str | None) -> Row:
    started = time.monotonic()
    found = noticed_by(mutant, before)
    said = f"noticed by {found}" if found else "NOT NOTICED"
    print(f"{time.monotonic() - started:4.0f} s {said}: {mutant.what} ({mutant.file})", flush=True)
    return {"what": mutant.what, "file": mutant.file, "noticed_by": found}


def _known() -> dict[str | None, Row]:
    """The rows of the results by what their faults do."""
    return {one["what"]: one for one in json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else {}


def _keep(row: Row) -> None:
    """Put a row into the results, beside those of other faults of the list."""
    known = {**_known(), row["what"]: row}
    kept = [known[one.what] for one in MUTANTS if one.what in known]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", encoding="utf-8")


def _fail_without_a_fault(rows: Sequence[Row]) -> list[str]:
    """The tests, of those that noticed faults, that fail without any: file by file, as they also ran."""
    tests = sorted({row["noticed_by"] for row in rows if row["noticed_by"]})
    found: list[str] = []
    for file, of_file in groupby(tests, key=lambda test: test.partition("::")[0]):
        code, printed = _pytest(None, list(of_file))
        if code:
            found += sorted(set(re.findall(_FAILED, printed, re.MULTILINE))) or [f"{file}: {printed[-1000:]}"]
    return found


def main() -> int:
    """The number of faults that no test noticed, as a status of 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="faults with this text in their file or description")
    parser.add_argument("--jobs", type=int, default=2, help="how many are run at once (2)")
    parser.add_argument("--new", action="store_true", help="only those that are not noticed in the results")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after these; --new goes on")
    parser.add_argument("--check", action="store_true", help="no fault: do the tests that noticed faults pass?")
    asked = parser.parse_args()
    before = {what: row["noticed_by"] for what, row in _known().items() if row["noticed_by"]}
    asked_for = [one for one in MUTANTS if asked.text in f"{one.file}: {one.what}"]
    chosen = [one for one in asked_for if not (asked.new and one.what in before)]
    rows, end = [], time.monotonic() + (0 if asked.check else asked.seconds)
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(lambda one: _row(one, before.get(one.what)) if time.monotonic() < end else None, chosen):
            if row is not None:
                rows.append(row)
                _keep(row)
    failing = _fail_without_a_fault(list(_known().values()) if asked.check else rows)
    if failing:
        print("these fail without a fault:", *failing, sep="\n")
        return 1
    missed = [row for row in rows if not row["noticed_by"]]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} faults were noticed, {len(chosen) - len(rows)} not run; "
        f"without a fault the same tests pass"
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
