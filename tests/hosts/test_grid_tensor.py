"""Tensor-parallel sizes change: what ranks have divided loads under any other, bit for bit, or is refused by name.

Truth is a rule that gives every element of every tensor its own value (`grid_jobs.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_cases import Folders, Grid
from grid_jobs import RULES

pytestmark = pytest.mark.distributed


def autotp(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 1) -> Grid:
    return Grid("autotp", tp=tp, dp=dp, stage=stage, dtype=dtype)


def few(dp: int, stage: int | str = 1, tp: int = 1) -> Grid:
    """With a layer of two rows: some ranks have none of them."""
    return Grid("autotp", tp=tp, dp=dp, stage=stage, layers="few")


def mpu(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 1, layers: str = "said") -> Grid:
    return Grid("cut", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def proved(target: Grid) -> Grid:
    config = {"ds_reshard": {"reshard": {"verify": "fingerprint"}}}
    return Grid(target.kind, tp=target.tp, dp=target.dp, stage=target.stage, config=config, layers=target.layers)


def by_rules(target: Grid, rules: list[dict[str, Any]] = RULES) -> Grid:
    config = {"ds_reshard": {"reshard": {"tensor_parallel": rules}}}
    return Grid(target.kind, dp=target.dp, stage=target.stage, dtype=target.dtype, config=config, layers="rules")


LOADS = [
    (autotp(2, tp=2), autotp(4)),
    (autotp(2, 2, "bf16", tp=2), autotp(1, 3, "bf16")),
    (autotp(2, 3, tp=2), autotp(2, 2)),
    (autotp(1, "bf16opt", "bf16", tp=3), autotp(2, 1, "bf16")),
    (autotp(1, 3, "bf16", tp=3), autotp(1, "bf16opt", "bf16")),
    (autotp(1, tp=4), autotp(1, 0)),
    (autotp(2, tp=2), autotp(1, 2, tp=4)),
    (autotp(1, 3, "bf16", tp=3), autotp(2, 2, "bf16", tp=2)),
    (autotp(2, 2, "bf16", tp=2), autotp(1, 3, "bf16", tp=3)),
    (autotp(1), autotp(2, 3, tp=2)),
    (few(1, tp=4), few(2, 2)),
    (few(1, 2, tp=3), proved(few(2))),
    (few(1, 3, tp=3), few(2)),
    (few(2), few(1, 3, tp=4)),
    (few(1, 2, tp=3), few(2, tp=2)),
    (mpu(2, tp=2, layers="even"), mpu(1, 2, tp=4, layers="even")),
    (mpu(1, tp=4, layers="even"), mpu(2, 3, "bf16", tp=2, layers="even")),
    (mpu(2, tp=2), mpu(2, 2)),
    (mpu(2, 3, "bf16", tp=2), mpu(1, "bf16opt", "bf16")),
    (mpu(2, 2, tp=2), mpu(4, 1)),
    (mpu(2, "bf16opt", "bf16", tp=2), mpu(2, 3, "bf16")),
    (mpu(2, 2, "bf16", tp=2), mpu(1, 2, "bf16", tp=2)),
    (mpu(1, tp=4, layers="unsaid"), by_rules(mpu(2, 3))),
]


@pytest.mark.parametrize(("source", "target"), LOADS, ids=str)
def test_tensors_load_bit_equal_under_another_tensor_parallel_size(
    worlds: Any, folders: Folders, source: Grid, target: Grid
) -> None:
    """Weights, masters, moments, steps, buffers and frozen parameters, of even and of uneven parts."""
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folders(source)))
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        assert rank["compared"] > 5
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def test_weights_alone_load_whole(worlds: Any, folders: Folders) -> None:
    folder, target = str(folders(LOADS[0][0])), LOADS[0][1]
    for rank in worlds[4].run("grid_jobs.load", grid=target, folder=folder, load_optimizer_states=False):
        assert not any(name[0].isalpha() for name in rank["wrong"]), rank["wrong"]


TP, CUT = autotp(1, tp=2), mpu(1, tp=2)
UNSAID = mpu(1, tp=2, layers="unsaid")
MODEL, OPTIM = "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)

    return run


def scaled(content: dict[str, Any]) -> None:
    for entry in content["universal_checkpoint_info"]["affine_map"]["params"].values():
        for piece in entry["ranks"][0]["pieces"]:
            piece["scale"] = 0.5


def drifted(content: dict[str, Any]) -> None:
    content["module"]["norm"][2] += 0.5


def moment(content: dict[str, Any]) -> None:
    """The norm is alone in its param group."""
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"][3] = 4.0


def nothing(folder: Path) -> None:
    pass


TWICE = [*RULES, {"parameters": "q.*", "parts": 2}]
NOT_FIT = [{**rule, **({"parts": [8, 8, 4]} if rule["parameters"] == "qkv" else {})} for rule in RULES]
AS_COLUMN, DIVIDED = (
    [{"parameters": name} if rule["parameters"] == name else rule for rule in RULES] for name in ("row", "norm")
)
REFUSED = {
    "a row that is taken for a column": (UNSAID, by_rules(mpu(1), AS_COLUMN), nothing, "parameter row: has another"),
    "copies that are taken for parts": (UNSAID, by_rules(mpu(1), DIVIDED), nothing, "parameter norm: has another"),
    "no rule": (UNSAID, by_rules(mpu(1), RULES[:1]), nothing, "nothing says how it is cut"),
    "two rules": (UNSAID, by_rules(mpu(1), TWICE), nothing, "two rules name it"),
    "a rule that does not fit": (UNSAID, by_rules(mpu(1), NOT_FIT), nothing, "are not of these parts"),
    "copies of a weight differ": (
        CUT,
        mpu(1),
        changed(MODEL, drifted),
        "tensor norm[weight]: is not divided, and tensor-parallel rank 1 has other values than rank 0",
    ),
    "copies of a moment differ": (CUT, mpu(1), changed(OPTIM, moment), "tensor norm[exp_avg]: is not divided"),
    "a rank's file is missing": (TP, autotp(1), lambda f: (f / OPTIM).unlink(), "optim_states files of mp_rank_01"),
    "an affine map that scales": (TP, autotp(1), changed("mp_rank_00_model_states.pt", scaled), "affine map scales it"),
    "a proof of parts": (TP, proved(autotp(1, tp=4)), nothing, "does not prove tensors that this run divides"),
    "padding of this run": (CUT, mpu(1, tp=4), nothing, "parameter embed: has padding in this run"),
    "this run does not say": (CUT, mpu(1, tp=4, layers="unsaid"), nothing, "nothing says how it is cut"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_anew_is_refused_by_name(
    worlds: Any, folders: Folders, tmp_path: Path, case: str
) -> None:
    source, target, damage, text = REFUSED[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    damage(folder / "t")
    told = worlds[target.ranks].run("grid_jobs.refused", grid=target, folder=str(folder))
    assert {name for name, _, _ in told} <= {"CheckpointDamaged", "UnsupportedLayout", "ModelMismatch"}
    assert len({said for _, said, _ in told}) == 1
    assert text in told[0][1] and "To mend: " in told[0][1], told[0][1]
    assert all(same for _, _, same in told)
