"""Optimizer state of FSDP1, gathered for a checkpoint: where torch 2.13 stops, aborts or hangs, and with the hooks.

Each row lives in processes of its own, as torch leaves the group of a row that fails unusable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from devices import DEVICE
from fsdp_jobs import MOMENTS, WAYS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
OVER_GLOO = pytest.mark.skipif(DEVICE == "cuda", reason="what torch alone does is told of ranks on CPUs, over gloo")

TOUCHED = {"frozen": True, "every": True, "touched": True}
ASSERTS, WAITS, MIXED = "AssertionError", "Timed out", "invalid tensor type"
ABORTS = "signal 6"

# What the run does, and what torch alone then does on rank 0 and rank 1: "" where it gathers.
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing, flat": ({"orig": False}, "", ""),
    "nothing": ({"orig": True}, "", ""),
    "frozen, not in the optimizer": ({"orig": True, "frozen": True}, "", ""),
    "frozen, in the optimizer": ({"orig": True, "frozen": True, "every": True}, "", ""),
    "frozen and touched": ({"orig": True, **TOUCHED}, ASSERTS, WAITS),
    "frozen and touched, bf16": ({"orig": True, **TOUCHED, "bf16": True}, ASSERTS, MIXED),
    "frozen and touched, no mesh": ({"orig": True, **TOUCHED, "mesh": False}, ASSERTS, WAITS),
    "exp_avg bf16, flat": ({"orig": False, "casts": ("exp_avg",)}, "", ""),
    "exp_avg bf16": ({"orig": True, "casts": ("exp_avg",)}, ASSERTS, ASSERTS),
    "the last names bf16": ({"orig": True, "casts": MOMENTS, "within": "visual"}, MIXED, MIXED),
    "rank 1 bf16": ({"orig": True, "casts": MOMENTS, "rank": 1}, ASSERTS, ASSERTS),
    "rank 1 bf16, flat": ({"orig": False, "casts": MOMENTS, "rank": 1}, ABORTS, ABORTS),
    "trainable without a gradient": ({"orig": True, "image": False, "touched": True}, "", ""),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"orig": True, "oddity": "blocks"}, "its state exp_avg is not of the parameter's shape"),
    "quantised, flat": ({"orig": False, "oddity": "blocks"}, "its state exp_avg is not of the parameter's shape"),
    "integers": ({"orig": True, "oddity": "integers"}, "found float32, int8"),
    "trainable since the last step": (
        {"orig": True, **TOUCHED, "oddity": "thawed"},
        "visual.merger.weight: has no exp_avg, exp_avg_sq on rank",
    ),
}


@OVER_GLOO
@pytest.mark.parametrize("name", ROWS)
def test_what_torch_alone_does(name: str) -> None:
    """The rows are what they are said to be: an error, an abort, or ranks that wait for one that has stopped."""
    case, *expected = ROWS[name]
    fails = any(expected)
    found = fresh.run("fsdp_jobs.row", 2, collective_s=5 if fails else 60, hooks=False, way="get_state_dict", **case)
    if ABORTS in expected and ABORTS in found:
        return  # the other rank aborts as well, or is told that its peer is gone
    for answer, text in zip(found, expected, strict=True):
        assert text in answer if fails else isinstance(answer, dict), found
        assert fails or answer["told"] == {"get_state_dict": ""}


@pytest.mark.parametrize("name", ROWS)
def test_with_the_hooks_it_gathers(name: str) -> None:
    """Every way of gathering gives what it gives without the trigger, to the bit, and in the types that were held.

    The optimizer is left with the very tensors that it had.
    """
    case = ROWS[name][0]
    for rank, told in enumerate(fresh.run("fsdp_jobs.row", 2, hooks=True, **case)):
        assert isinstance(told, dict), told
        assert told["told"] == dict.fromkeys(WAYS, "") and told["live"]
        warned = [line for line in told["lines"] if "rank 0 float32, rank 1 bfloat16" in line]
        assert bool(warned) == ("rank" in case and rank == 0)
        assert set(told["dtypes"]) <= {"torch.float32", "torch.bfloat16"}, "the type that holds both, and no wider one"
        if warned:
            assert any(".weight exp_avg_sq (rank 0 float32, rank 1 bfloat16)" in line for line in warned), warned


def test_a_type_that_sorts_early_is_kept() -> None:
    """torch saves it as the type of the name that sorts last, without a word."""
    case = {"orig": True, "casts": MOMENTS, "within": "lm_head"}
    off, on = (fresh.run("fsdp_jobs.row", 2, hooks=hooks, way="FSDP sharded", **case)[0] for hooks in (False, True))
    assert off["told"]["FSDP sharded"] == "lm_head.weight exp_avg: torch.float32 torch.Size([24, 16])"
    assert on["told"]["FSDP sharded"] == ""


@OVER_GLOO
def test_moments_that_are_copied_to_the_cpu_do_not_share_a_buffer() -> None:
    """On a CPU torch gives the second moment under the first one's name."""
    case = {"orig": True, "way": "get_optimizer_state_dict"}
    off, on = (fresh.run("fsdp_jobs.row", 2, hooks=hooks, **case)[0]["told"].popitem()[1] for hooks in (False, True))
    assert off == "embed.weight exp_avg: other values"
    assert on == ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_gathered_is_refused_on_every_rank(name: str) -> None:
    case, text = REFUSED[name]
    for told in fresh.run("fsdp_jobs.row", 2, hooks=True, **case):
        assert told.startswith("UnsupportedLayout") and text in told and "To mend: " in told


def test_frozen_and_trainable_in_one_flat_unit_are_named() -> None:
    for told in fresh.run("fsdp_jobs.built", 2, orig=False, frozen=True):
        assert told.startswith("UnsupportedLayout: building FSDP") and "use_orig_params=True" in told
        assert "found frozen visual.merger.bias, visual.merger.weight" in told and "trainable embed.weight" in told


@OVER_GLOO
@pytest.mark.parametrize("way", ["accelerate", "Trainer"])
def test_sharded_states_that_accelerate_leaves_out_are_loaded(tmp_path: Path, way: str) -> None:
    """accelerate 1.15 asks for no state of a fresh optimizer of FSDP1, and its moments began anew without a word."""
    saved = fresh.run("fsdp_jobs.sharded_by_accelerate", 2, folder=str(tmp_path / "saved"))
    loaded = fresh.run("fsdp_jobs.sharded_by_accelerate", 2, folder=str(tmp_path / "saved"), way=way)
    assert isinstance(saved[0], dict) and any(kind == "exp_avg_sq" for _, kind in saved[0]), saved
    for told in loaded:
        assert isinstance(told, dict) and told.keys() == saved[0].keys(), told
        assert all(torch.equal(told[key], value) for key, value in saved[0].items())
