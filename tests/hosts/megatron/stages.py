"""Runs in two stages: the first saves, the second resumes under other arguments.

Stage 1 takes 5 iterations of 4 samples at 3e-4/3e-5, decaying over 160 samples; stage 2 is written as what is
different. `curve` is the schedule in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forks import Failed

BATCH = 4
DECAY = 40 * BATCH
SAVED = 5
POSITION = SAVED * BATCH
FIRST = {
    "--lr": "3e-4",
    "--min-lr": "3e-5",
    "--train-iters": "5",
    "--lr-decay-iters": "40",
    "--weight-decay": "0.01",
    "--lr-decay-style": "linear",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
}
SECOND = {"--lr": "3e-5", "--min-lr": "2e-5", "--train-iters": "8"}
OVERRIDE = "--override-opt_param-scheduler"
CHECKPOINT = "--use-checkpoint-opt_param-scheduler"

BF16 = "--bf16"
SHARDED = "--bf16 --use-distributed-optimizer"
FORMATS = {
    "torch-fp32": "--ckpt-format torch",
    "torch-bf16": f"--ckpt-format torch {BF16}",
    "torch-sharded": f"--ckpt-format torch {SHARDED}",
    "dist-fp32": "--ckpt-format torch_dist",
    "dist-bf16": f"--ckpt-format torch_dist {BF16}",
    "dist-sharded": f"--ckpt-format torch_dist {SHARDED}",
    "dist-reshardable": f"--ckpt-format torch_dist {SHARDED} --dist-ckpt-optim-fully-reshardable",
}


def curve(position: int, highest: float, lowest: float, length: int = DECAY) -> float:
    """Megatron's linear decay without warm-up, after `position` samples."""
    return lowest + (highest - lowest) * (1 - position / length) if position <= length else lowest


@dataclass(frozen=True)
class Stage:
    folder: Path
    ranks: list[dict[str, Any]]


class Stages:
    """First stages, each made once, and second stages that load them."""

    def __init__(self, releases: Any, scratch: Path) -> None:
        self._releases = releases
        self._scratch = scratch
        self._first: dict[tuple[str, str, int], Stage] = {}
        self._folders = 0

    def first(self, release: str, options: str = FORMATS["torch-fp32"], ranks: int = 1) -> Stage:
        """The stage that saved, made without hooks: a checkpoint of plain Megatron."""
        key = (release, options, ranks)
        if key not in self._first:
            folder = self._scratch / f"first{len(self._first)}"
            arguments = [*_words(FIRST), *options.split(), "--save", str(folder), "--save-interval", str(SAVED)]
            runner = self._releases[release]
            told = runner.run("small_gpt:pretrain", ranks=ranks, arguments=arguments, hooks=False)
            self._first[key] = Stage(folder, told)
        return self._first[key]

    def second(
        self,
        release: str,
        flags: str = "",
        *,
        options: str = FORMATS["torch-fp32"],
        ranks: int = 1,
        hooks: bool = True,
        saved: str | None = None,
        folder: Path | None = None,
        asked_before: dict[str, Any] | None = None,
        **changes: str,
    ) -> list[dict[str, Any]]:
        """Resume the first stage, whose options are `saved`, with `flags`.

        `changes` (lr="3e-5"; "" takes a flag away) come on top of SECOND.
        """
        load = folder if folder is not None else self.first(release, saved or options, ranks).folder
        arguments = _second(load, flags, options, changes)
        runner = self._releases[release]
        told: list[dict[str, Any]] = runner.run(
            "small_gpt:pretrain", ranks=ranks, arguments=arguments, hooks=hooks, asked_before=asked_before
        )
        return told

    def run(self, release: str, function: str, **arguments: Any) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._releases[release].run(function, **arguments)
        return told

    def folder(self) -> Path:
        """A new empty folder."""
        self._folders += 1
        made = self._scratch / f"folder{self._folders}"
        made.mkdir()
        return made

    def whole(self, release: str, options: str) -> dict[str, Any]:
        """An uninterrupted run of plain Megatron from the beginning, neither saved nor loaded."""
        return self.everyone(release, options)[0]

    def everyone(self, release: str, options: str, ranks: int = 1) -> list[dict[str, Any]]:
        """The same, of every rank."""
        arguments = [*_words(FIRST), *options.split()]
        return self.run(release, "small_gpt:pretrain", ranks=ranks, arguments=arguments, hooks=False)

    def refused(self, release: str, flags: str = "", **others: Any) -> dict[str, Any]:
        """The same, expected to end with an error; what rank 0 said."""
        try:
            told = self.second(release, flags, **others)
        except Failed as error:
            return error.ranks[0]
        raise AssertionError(f"resumed with {flags!r}: {used(told[0], 'lr')}")

    def untouched(
        self,
        release: str,
        flags: str = "",
        *,
        options: str,
        saved: str | None = None,
        ranks: int = 1,
        unreadable: bool = False,
        folder: Path | None = None,
        **changes: str,
    ) -> dict[str, Any]:
        """A refused load on every rank alike: its error, and what it had changed by then."""
        load = folder if folder is not None else self.first(release, saved or options, ranks).folder
        told: list[dict[str, Any]] = self._releases[release].run(
            "small_gpt:refused", ranks=ranks, arguments=_second(load, flags, options, changes), unreadable=unreadable
        )
        assert len({one["message"] for one in told}) == 1
        return told[0]


def _second(load: Path, flags: str, options: str, changes: dict[str, str]) -> list[str]:
    given = {**FIRST, **SECOND, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    given = {name: value for name, value in given.items() if value}
    return [*_words(given), *options.split(), "--load", str(load), *flags.split()]


def _words(arguments: dict[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in (name, value)]


def used(run: dict[str, Any], name: str, step: int = 0) -> list[Any]:
    """A value of every param group, as the optimizer's step number `step` found it."""
    return [group[name] for group in run["steps"][step]]


def same_state(saved: dict[str, Any], resumed: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """What of `names` differs between the end of one run and the first step of another; nothing when all is equal."""
    assert len(saved["last"]) == len(resumed["first"]) and all(saved["last"])
    wrong = []
    for index, (old, new) in enumerate(zip(saved["last"], resumed["first"], strict=True)):
        assert len(old) == len(new) > 0
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            for name in names:
                one, other = before[name], after.get(name)
                if other is None or one.dtype != other.dtype or not _bits(one).equal(_bits(other)):
                    wrong.append(f"optimizer {index}, parameter {number}: {name}")
    return wrong


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def row(run: dict[str, Any], name: str) -> dict[str, Any]:
    """A row of the resume report of a run."""
    found = [one for one in run["report"]["rows"] if one["name"] == name]
    assert len(found) == 1, [one["name"] for one in run["report"]["rows"]]
    return found[0]
