"""The source patches: they apply once, do what the hooks do, and come off without a trace."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forks import Release
from releases import WITH_TRAINING, NotFetched, home
from stages import FIRST, OVERRIDE, POSITION, SECOND, curve, same_state, used
from vendored import PATCHES, additions, patches

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("release", WITH_TRAINING),
    pytest.mark.skipif(shutil.which("patch") is None, reason="there is no `patch` program on this machine"),
]
EVERYTHING = ("master", "exp_avg", "exp_avg_sq")


def _patch(tree: Path, release: str, *options: str) -> int:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((PATCHES / release).glob("*.patch")))
    command = ["patch", "-p1", "--batch", "-r", "-", *options, "-d", str(tree)]
    return subprocess.run(command, input=text, text=True, capture_output=True, timeout=60).returncode


@pytest.fixture
def tree(release: str, tmp_path: Path) -> Path:
    """A copy of an unpacked release; its files are links, which `patch` replaces and does not write through."""
    try:
        source = home(release)
    except NotFetched as error:
        pytest.skip(str(error))
    return Path(shutil.copytree(source, tmp_path / "tree", copy_function=os.link))


def test_the_committed_patches_are_those_of_the_table(release: str) -> None:
    """They are made from the hooks' own table, and add lines only."""
    try:
        wanted = patches(release)
    except NotFetched as error:
        pytest.skip(str(error))
    assert {path.name: path.read_text(encoding="utf-8") for path in (PATCHES / release).glob("*.patch")} == wanted
    lines = [line for text in wanted.values() for line in text.splitlines()]
    assert [line for line in lines if line.startswith("-") and not line.startswith("---")] == []


def test_applied_once_refused_twice_and_reverted(release: str, tree: Path) -> None:
    before = {path: (home(release) / path).read_bytes() for path in additions()}
    assert _patch(tree, release, "-N") == 0
    after = {path: (tree / path).read_bytes() for path in before}
    assert all(after[path] == before[path] + added.encode() for path, added in additions().items())
    assert _patch(tree, release, "-N") != 0
    assert {path: (tree / path).read_bytes() for path in before} == after
    assert _patch(tree, release, "-R") == 0
    assert {path: (tree / path).read_bytes() for path in before} == before
    assert {path: (home(release) / path).read_bytes() for path in before} == before


def test_a_patched_tree_does_what_the_hooks_do(release: str, tree: Path, stages: Any, tmp_path: Path) -> None:
    """Report S2 without any hook; the hooks see that their work is done."""
    saved = stages.first(release)
    assert _patch(tree, release, "-N") == 0
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    runner = Release(release, tree, scratch)
    try:
        words = [word for pair in {**FIRST, **SECOND}.items() for word in pair]
        words += ["--ckpt-format", "torch", "--load", str(saved.folder), OVERRIDE]
        resumed = runner.run("small_gpt:pretrain", arguments=words, hooks=False)[0]
        told = runner.run("hook_checks:vendored")[0]
    finally:
        runner.close()
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2, rel=1e-12)
    assert same_state(saved.ranks[0], resumed, EVERYTHING) == []
    assert set(told["states"].values()) == {"vendored"} and told["auto"] is None
    assert told["install"] is not None and "vendored" in told["install"]
