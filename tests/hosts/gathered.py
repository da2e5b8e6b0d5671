"""Reassemble what the ranks hold, and compare two runs bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def gathered(held: list[dict[str, Any]]) -> dict[tuple[str, str], torch.Tensor]:
    """Whole flat tensors by (name, kind), from all ranks' pieces; replicas must agree."""
    pieces: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for rank in held:
        for name, kind, start, values in rank["pieces"]:
            if values.numel():
                pieces.setdefault((name, kind), []).append((start, values))
    whole = {}
    for key, parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        joined: list[torch.Tensor] = []
        at = 0
        for start, values in parts:
            if start + values.numel() <= at:
                assert same_bits(torch.cat(joined)[start : start + values.numel()], values), f"replicas of {key} differ"
                continue
            assert start == at, f"{key}: a hole at {at}, the next piece starts at {start}"
            joined.append(values)
            at += values.numel()
        whole[key] = torch.cat(joined)
    return whole


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


def assert_moments(held: Mapping[tuple[str, str], torch.Tensor]) -> None:
    """First and second moments are there, not zero, and not each other's, so that a shared buffer cannot hide."""
    names = [name for name, kind in held if kind == "exp_avg"]
    assert names and all(held[name, "exp_avg"].any() for name in names)
    assert all(not torch.equal(held[name, "exp_avg"], held[name, "exp_avg_sq"]) for name in names)


def scalars(held: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for rank in held:
        for key, value in rank["scalars"].items():
            assert found.setdefault(key, value) == value, f"ranks disagree on {key}"
    return found


def assert_same(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    """Every master, state, scalar, hyper-parameter, weight, buffer and counter: equal, to the bit.

    Stage 3 saves each rank's buffers: at the same size each rank must have its own back, else rank 0's.
    """
    own_buffers = saved[0]["stage"] == 3 and len(saved) == len(loaded)
    truth, got = gathered(saved), gathered(loaded)
    assert set(got) == set(truth), f"tensors differ: {set(got) ^ set(truth)}"
    wrong = [key for key in truth if not same_bits(truth[key], got[key])]
    assert not wrong, f"{len(wrong)} of {len(truth)} tensors differ, for example {wrong[:4]}"
    assert scalars(loaded) == scalars(saved)
    for number, rank in enumerate(loaded):
        assert sorted(rank["groups"], key=lambda g: g[0]) == sorted(saved[0]["groups"], key=lambda g: g[0])
        assert rank["steps"] == saved[0]["steps"]
        assert rank["scheduler"] == saved[0]["scheduler"]
        assert rank["scaler"] in (saved[0]["scaler"], 1, 1.0, None)
        expected = saved[number if own_buffers else 0]["weights"]
        assert set(rank["weights"]) == set(expected)
        differ = [n for n in expected if not same_bits(rank["weights"][n], expected[n])]
        assert not differ, f"weights differ: {differ}"
