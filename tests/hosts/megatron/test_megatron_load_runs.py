"""`pretrain` saved under one topology and gone on with under another: rates, moments and losses."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from releases import TRAINED
from stages import FORMATS, OVERRIDE, POSITION, SAVED, curve, row, same_state, used

from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.values import logical, read_spans

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", TRAINED)]
PADDED = " --make-vocab-size-divisible-by 32"  # to 64 rows under one rank and under two
TP, PP = " --tensor-model-parallel-size 2", " --pipeline-model-parallel-size 2"
CHANGES = [(TP, ""), (PP, TP)]


def _saved(folder: str) -> dict[str, Counter[bytes]]:
    """The bytes of all states that lie in a checkpoint, by kind, without their names."""
    source = open_checkpoint(find_listing(folder, None))
    keys = list(source.layout.placements)
    made = {key: torch.empty(0) for key in keys}
    for span in read_spans([(logical(source.index, key),) for key in keys]):
        key = keys[span.row]
        made[key] = torch.cat([made[key].to(span.values[0].dtype), span.values[0]])
    found: dict[str, Counter[bytes]] = {}
    for key, values in made.items():
        found.setdefault(key.kind, Counter())[values.numpy().tobytes() if key.kind != "weight" else b""] += 1
    return found


def _losses(told: list[dict[str, Any]]) -> list[float]:
    """Of every iteration, as Megatron's last rank prints it."""
    return [float(found) for found in re.findall(r"lm loss: ([0-9.E+-]+)", told[-1]["log"])]


@pytest.mark.parametrize("kind", ["torch-sharded", "dist-sharded"])
def test_a_new_learning_rate_under_another_topology(stages: Any, release: str, kind: str) -> None:
    """The new curve from the first step, every master and moment bit for bit, and the data where it was."""
    folder = stages.first(release, FORMATS[kind] + PADDED + TP, 2).folder
    (resumed,) = stages.second(release, OVERRIDE, options=FORMATS[kind] + PADDED, folder=folder)
    for step in range(3):
        assert used(resumed, "lr", step) == pytest.approx([curve(POSITION + 4 * step, 3e-5, 2e-5)] * 2, rel=1e-12)
    assert used(resumed, "step") == [SAVED, SAVED]
    assert (resumed["samples"][:4], resumed["iteration"]) == ([20, 21, 22, 23], SAVED)
    assert row(resumed, "tensors read by")["used"] == "ds_reshard"
    saved = _saved(str(folder))
    for live, kept in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        assert Counter(one[live].numpy().tobytes() for part in resumed["first"] for one in part) == saved[kept]


@pytest.mark.parametrize(("before", "now"), CHANGES, ids=["tp2 to one", "pp2 to tp2"])
def test_losses_lie_on_the_uninterrupted_run(stages: Any, release: str, before: str, now: str) -> None:
    """Eight iterations in one go, and five and three: sums are added in another order, and nothing else differs."""
    options = FORMATS["dist-sharded"] + PADDED + " --train-iters 8"
    whole = stages.everyone(release, options + before, ranks=2)
    folder = stages.first(release, f"{options}{before} --exit-interval {SAVED}", 2).folder
    ranks = 2 if now else 1
    resumed = stages.second(release, options=options + now, folder=folder, ranks=ranks, lr="3e-4", min_lr="3e-5")
    assert len(_losses(resumed)) == 3 and len(set(_losses(whole))) > 3
    assert _losses(resumed) == pytest.approx(_losses(whole)[SAVED:], rel=2e-3)
    assert resumed[0]["steps"] == whole[0]["steps"][SAVED:]


@pytest.mark.parametrize("kind", ["torch-sharded", "dist-sharded"])
def test_a_load_by_url_is_that_of_the_local_folder(stages: Any, release: str, kind: str) -> None:
    """Of a plain resume, which Megatron does itself: it takes a URL for a folder that is not there, and begins anew."""
    options = FORMATS[kind]
    folder = stages.first(release, options).folder
    here, there = (stages.second(release, OVERRIDE, options=options, folder=one)[0] for one in (folder, _url(folder)))
    for entry in (here, there):
        assert entry["iteration"] == SAVED
    assert there["steps"] == here["steps"] and there["samples"] == here["samples"]
    assert same_state(here, {"first": there["last"]}, ("master", "exp_avg", "exp_avg_sq")) == []
    assert row(there, "tensors read by")["used"] == "ds_reshard"


def test_what_of_a_url_would_be_left_to_megatron_is_refused(stages: Any, release: str) -> None:
    """It would begin anew, or with other weights, and say so in a warning."""
    folder = stages.first(release, FORMATS["dist-sharded"]).folder
    for flags in (f"--pretrained-checkpoint {folder}", "--use-checkpoint-args", "--non-persistent-ckpt-type global"):
        told = stages.refused(release, flags, options=FORMATS["dist-sharded"], folder=_url(folder))
        assert told["error"] == "UnsupportedLayout" and "copy it to a local folder" in told["message"], told
    begun = stages.second(release, OVERRIDE, folder=_url(stages.folder()))[0]
    assert begun["iteration"] == 0 and "holds no checkpoint" in begun["log"]


def test_a_run_begins_where_it_will_save(releases: Any, release: str, tmp_path: Path) -> None:
    """As scripts are written that are started again and again: at first there is no folder, and Megatron begins."""
    job = f"--lr 3e-4 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --load {tmp_path}/run {OVERRIDE}"
    for iteration in (0, 2):
        arguments = f"{job} --save {tmp_path}/run --save-interval 2".split()
        told = releases[release].run("small_gpt:pretrain", ranks=2, arguments=arguments)
        assert [one["iteration"] for one in told] == [iteration] * 2
        assert ("holds no checkpoint" in told[0]["log"]) is (iteration == 0)


def _url(folder: Path) -> Path:
    """Of a folder; a string, for which the stages take a path."""
    return cast(Path, f"file://{folder}")
