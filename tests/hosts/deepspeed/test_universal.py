"""Universal checkpoints, made by DeepSpeed's converter of real saves, into any stage and data-parallel size.

Truth is what the saving run held in memory, as in test_matrix.py.
"""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same, gathered
from saves import UNIVERSAL, Saves, Universals

from ds_reshard.cli.main import main

pytestmark = pytest.mark.distributed

TARGETS: tuple[int | str, ...] = (0, 1, 2, 3, "bf16")
SIZES = (1, 2, 3, 4)
SOURCES = (
    (Run(1, 2), Model(groups=2, frozen=True, batchnorm=True)),
    (Run(1, 3), Model(tied=True, empty=True)),
    (Run("bf16", 2), Model(groups=2, frozen=True)),
    (Run(2, 4), Model(groups=2, tied=True)),
    (Run(2, 1, "fp32"), Model(frozen=True, batchnorm=True)),
    (Run(2, 2, options={"parameter_alignment": True}), Model(groups=2)),
    (Run(3, 2, options={"sub_group_size": 60}), Model(groups=2, frozen=True, batchnorm=True)),
    (Run(3, 3), Model(tied=True)),
    (Run(3, 4), Model(optimizer="nadam", groups=2)),
)


def _rows() -> list[tuple[Run, Model, Run]]:
    """Every target stage at every size twice; the sources take turns."""
    rows = []
    for n, (stage, dp) in enumerate(product(TARGETS, SIZES)):
        for step in range(2):
            source, model = SOURCES[(2 * n + step + n // 9) % len(SOURCES)]
            if source.dtype == "fp32" and stage == "bf16":
                source, model = SOURCES[0]
            config = UNIVERSAL if (n + step) % 2 else {}
            rows.append((source, model, Run(stage, dp, source.dtype, config=config)))
    return rows


def _name(row: tuple[Run, Model, Run]) -> str:
    return f"{row[0]}-to-{row[2]}-{'flag' if row[2].config else 'bare'}"


@pytest.mark.parametrize("row", _rows(), ids=_name)
def test_a_universal_checkpoint_loads_bit_equal(worlds: Any, universals: Universals, row: Any) -> None:
    """Masters, states, steps, every group's hyper-parameters, weights, frozen ones, buffers, counters, and losses."""
    source, model, target = row
    folder, saved = universals(source, model)
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
    assert_same(saved, loaded)
    assert loaded[0]["client"]["note"] == "kept"
    if not model.batchnorm:  # BatchNorm's loss depends on how many rows a rank sees
        assert loaded[0]["later"] == pytest.approx(saved[0]["later"], rel=0.02 if target.dtype == "bf16" else 1e-4)


ARGUMENTS = ({}, {"load_optimizer_states": False}, {"load_module_only": True}, {"load_lr_scheduler_states": False})
PAIRS = ((Run(1, 2), Run(3, 3)), (Run(2, 2), Run(1, 1)), (Run(3, 2), Run(2, 3)), (Run(3, 2), Run(3, 3)))


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda given: next(iter(given), "none"))
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_it_loads_as_the_checkpoint_that_it_was_made_from(
    worlds: Any, saves: Saves, universals: Universals, source: Run, target: Run, arguments: Any
) -> None:
    """Under every argument of `load_checkpoint`: the same contents, and the same losses to the last bit."""
    model = Model(groups=2, frozen=True)
    plain, universal = (
        worlds[target.dp].run("load", run=target, model=model, folder=str(folder), arguments=arguments, more=2)
        for folder in (saves(source, model)[0], universals(source, model)[0])
    )
    assert_same(plain, universal)
    assert [rank["later"] for rank in plain] == [rank["later"] for rank in universal]
    assert plain[0]["client"] == universal[0]["client"]
    assert plain[0]["client_keys"] == universal[0]["client_keys"]
    states = {kind for _, kind in gathered(universal)} - {"fp32"}
    assert bool(states) is not bool(arguments.keys() & {"load_optimizer_states", "load_module_only"})


@pytest.mark.parametrize("target", (Run(1, 3), Run(3, 2), Run("bf16", 1), Run(0, 2)), ids=str)
@pytest.mark.parametrize("optimizer", ("amsgrad", "sgd", "plain_sgd", "adagrad"))
def test_what_ds_reshard_converted_is_loaded(
    worlds: Any, saves: Saves, tmp_path: Path, optimizer: str, target: Run
) -> None:
    """Of optimizers too whose states ds_to_universal drops or does not know: `ds-reshard convert` writes all."""
    model = Model(optimizer=optimizer, groups=2)
    if optimizer == "adagrad":  # with two groups, or under BF16_Optimizer, DeepSpeed itself fails at the first step
        model, target = Model(optimizer=optimizer), Run(1, 1) if target.stage == "bf16" else target
    folder, saved = saves(Run(2, 2), model)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "universal"]) == 0
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(tmp_path / "out"), more=1)
    assert_same(saved, loaded)


@pytest.mark.parametrize("target", (Run(1, 3), Run(2, 2), Run(3, 3), Run(3, 1)), ids=str)
@pytest.mark.parametrize("source", (Run(1, 2), Run(3, 2)), ids=str)
def test_a_rank_reads_its_own_slices(worlds: Any, universals: Universals, source: Run, target: Run) -> None:
    """At most 1.02 times the bytes that it holds afterwards; nothing of the common state."""
    folder, _ = universals(source, Model(frozen=True))
    for read, held, files in worlds[target.dp].run(
        "universal_jobs.measured", run=target, model=Model(frozen=True), folder=str(folder)
    ):
        assert 0 < read <= 1.02 * held
        assert any(file.endswith("exp_avg_sq.pt") for file in files)
        assert not any(file.endswith("optimizer_state.pt") for file in files)


def test_latest_names_what_a_load_without_a_tag_takes(worlds: Any, universals: Universals, tmp_path: Path) -> None:
    """`latest` before `latest_universal`, but where "load_universal" is set."""
    model = Model(groups=2)
    folder, early = universals(Run(1, 2), model)
    shutil.copytree(folder, tmp_path / "both")
    late = worlds[2].run("save", run=Run(1, 2), model=model, folder=str(tmp_path / "both"), steps=5)
    for config, saved in ((UNIVERSAL, early), ({}, late)):
        run = Run(2, 3, config=config)
        assert_same(saved, worlds[3].run("load", run=run, model=model, folder=str(tmp_path / "both")))


def test_a_plain_checkpoint_loads_although_a_universal_one_was_asked_for(worlds: Any, saves: Saves) -> None:
    """On an unchanged layout too, where DeepSpeed would look for files that only a universal one has."""
    model = Model(groups=2)
    for source, target in ((Run(1, 2), Run(1, 2, config=UNIVERSAL)), (Run(3, 2), Run(2, 3, config=UNIVERSAL))):
        folder, saved = saves(source, model)
        tag = (folder / "latest").read_text()
        assert_same(saved, worlds[target.dp].run("load", run=target, model=model, folder=str(folder), tag=tag))
