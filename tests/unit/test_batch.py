"""Batch sizes that DeepSpeed refuses: the error names the numbers of ranks among which the batch can be divided."""

from __future__ import annotations

from typing import Any

import pytest

import ds_reshard
from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.flat import round_robin_order
from ds_reshard.hosts.deepspeed.coming import parse_config

MICRO = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("config", "world", "mend"),
    [
        (MICRO, 4, r"run on as many data-parallel ranks as divide it \(1, 2, 3, 6\)"),
        ({**MICRO, "gradient_accumulation_steps": 2}, 2, r"leave out gradient_accumulation_steps"),
        ({"train_batch_size": 12}, 5, r"run on as many data-parallel ranks as divide it \(1, 2, 3, 4, 6, 12\)"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 5}, 2, r"make train_batch_size a multiple of 10"),
        ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, 1, r"make train_batch_size a multiple of 2"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(config: dict[str, Any], world: int, mend: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){mend}"):
        parse_config(config, world)


def test_ranks_that_share_sequences_are_counted_in_whole_numbers() -> None:
    """DeepSpeed divides the number of ranks by that of those that share a sequence, and has 2.0 of four."""
    with pytest.raises(ConfigError, match=r"among 2 data-parallel ranks(?s:.*)make train_batch_size 2$"):
        parse_config(
            {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}, 2.0
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [12, 30, 32])
@pytest.mark.parametrize("micro", [None, 2, 4])
@pytest.mark.parametrize("steps", [None, 3, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_each_way_that_is_offered_passes(batch: int, micro: int | None, steps: int | None, world: int) -> None:
    """Numbers of ranks that are named, values that are set, and what is left out: each one followed."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {n: v for n, v in zip(names, (batch, micro, steps), strict=True) if v is not None}
    try:
        parse_config(config, world)
        return
    except ConfigError as error:
        (mend,) = [line for line in str(error).splitlines() if "To mend" in line]
    if "as many data-parallel ranks" in mend:
        ranks = [int(one) for one in mend.split("(")[1].split(")")[0].split(",")]
        assert all(parse_config(config, one) for one in ranks) and world not in ranks
        assert all(_refused(config, one) for one in range(1, max(ranks)) if one not in ranks)
    if "leave out gradient_accumulation_steps" in mend:
        config.pop("gradient_accumulation_steps")
        assert parse_config(config, world).gradient_accumulation_steps == int(mend.split()[-1])
    elif "set train_micro_batch_size_per_gpu" in mend:
        assert parse_config({**config, "train_micro_batch_size_per_gpu": int(mend.split()[-1])}, world)
    else:
        assert parse_config({**config, "train_batch_size": int(mend.split()[-1])}, world)


def _refused(config: dict[str, Any], world: int) -> bool:
    with pytest.raises(ConfigError):
        parse_config(config, world)
    return True


def test_what_can_be_divided_follows_the_ranks() -> None:
    assert [parse_config(MICRO, world).gradient_accumulation_steps for world in (1, 2, 3, 6)] == [6, 3, 2, 1]


def test_parameters_are_dealt_out_among_any_number_of_ranks_at_once() -> None:
    """`round_robin_gradients`: of a million ranks that are foreseen most have no turn."""
    turns = []

    class Watched(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            turns.append(key)
            return super().__getitem__(key)

    assert round_robin_order(Watched("abc"), 10**6) == ["a", "b", "c"] and len(turns) <= 3
    assert round_robin_order(list("abcde"), 2) == ["a", "c", "e", "b", "d"]  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.parametrize("size", [4, 4.0])
def test_deepspeed_itself_says_it_with_the_hooks_on(size: float) -> None:
    """A number of ranks that share sequences is a float in DeepSpeed."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class OfFour(DeepSpeedConfig):  # type: ignore[misc]
        def _configure_train_batch_size(self) -> None:
            self.world_size = size
            super()._configure_train_batch_size()

    mend = r"among 4 data.*\(1, 2, 3, 6\), or set train_micro_batch_size_per_gpu to 3(?!\.)"
    with ds_reshard.install("deepspeed"), pytest.raises(ConfigError, match=f"(?s){mend}"):
        OfFour(MICRO)
    with pytest.raises(AssertionError):
        OfFour(MICRO)
