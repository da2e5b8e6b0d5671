"""The support table in docs/formats.md is the one that the last `make test-versions` gave."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_libraries import outcome
from table import PAGE, block, read_results, render

from ds_reshard.hooks import HostHooks
from ds_reshard.hosts.accelerate import HOOKS as ACCELERATE
from ds_reshard.hosts.deepspeed import HOOKS
from ds_reshard.hosts.fsdp import HOOKS as FSDP
from ds_reshard.hosts.torch import HOOKS as TORCH
from ds_reshard.hosts.transformers import HOOKS as TRANSFORMERS


def test_the_support_table_is_what_the_results_render_to() -> None:
    """The page shows results.json, not something written by hand."""
    expected = render(read_results())
    assert expected == block(PAGE.read_text(encoding="utf-8")), "run `make test-versions` to write the table anew"


@pytest.mark.parametrize("release", read_results()["releases"], ids=lambda release: release["deepspeed"])
def test_a_release_ran_or_says_why_not(release: dict) -> None:
    """No release and no cell is left out in silence."""
    assert release["cells"] or release["reason"]
    silent = [cell for cell in release["cells"] if cell["outcome"] != "passed" and not cell["reason"]]
    assert silent == []


def test_every_release_of_the_table_is_one_that_the_patches_accept() -> None:
    """A table that speaks for releases outside the declared range would promise what install refuses."""
    outside = [r["deepspeed"] for r in read_results()["releases"] if not HOOKS.covers(r["deepspeed"])]
    assert outside == []


@pytest.mark.parametrize("hooks", [ACCELERATE, TRANSFORMERS, FSDP, TORCH], ids=lambda hooks: hooks.host)
def test_the_tested_releases_of_a_library_are_those_that_passed(hooks: HostHooks) -> None:
    """What the hooks call tested is what tests/versions/run_libraries.py ran, all of it without a failure."""
    results = json.loads(Path(__file__).with_name("libraries.json").read_text(encoding="utf-8"))
    ran = results[hooks.distribution]
    assert tuple(r["release"] for r in ran if r["passed"] and not r["failed"]) == hooks.tested


def test_the_tested_releases_of_deepspeed_are_those_that_passed() -> None:
    """Every release of the table in which something passed and nothing failed, and no other."""
    passed = {
        release["deepspeed"]
        for release in read_results()["releases"]
        if {cell["outcome"] for cell in release["cells"]} in ({"passed"}, {"passed", "not run"})
    }
    assert set(HOOKS.tested) == passed


def test_a_skipped_case_has_neither_passed_nor_failed() -> None:
    """A release under which every case is skipped has passed none, and `make test-versions` fails."""
    ends = ("", "<skipped/>", "<failure/>", "<error/>")
    cases = [ElementTree.fromstring(f'<testcase name="{n}">{end}</testcase>') for n, end in enumerate(ends)]
    assert outcome(cases) == {"passed": 1, "failed": ["2", "3"]}
    assert outcome(cases[1:2]) == {"passed": 0, "failed": []}
