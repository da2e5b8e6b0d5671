"""Resumes under flags, by accelerate, by Hugging Face's Trainer and by torch, of what DeepSpeed does not load."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import late_trainer_jobs
import torch
import torch.distributed as dist
import unsafe_jobs


@contextmanager
def _asked(flags: list[str]) -> Iterator[None]:
    from ds_reshard.resume import policy_sources

    try:
        policy_sources.add_arguments(argparse.ArgumentParser()).parse_args(flags)
        yield
    finally:
        policy_sources.forget()


def save(host: str, folder: str) -> None:
    if host == "accelerate":
        unsafe_jobs.accelerate_save(folder, safe=True)
    elif host == "torch":
        unsafe_jobs.dcp_save(folder)
    elif host == "manager":
        Path(folder).mkdir(exist_ok=True)
        torch.save({"w": torch.ones(2)}, f"{folder}/model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    else:
        unsafe_jobs.trainer_save(folder)


def resume(host: str, folder: str, flags: list[str]) -> tuple[str, str]:
    """What a run without DeepSpeed is told."""
    with _asked(flags):
        if host == "accelerate":
            return unsafe_jobs.accelerate_load(folder)[:2]
        if host == "torch":
            return unsafe_jobs.dcp_load(folder)[:2]
        if host == "manager":
            shutil.rmtree(f"{folder}/package{dist.get_rank()}", ignore_errors=True)
            dist.barrier()
            return unsafe_jobs.managed(folder, "path")
        return unsafe_jobs.trainer_resume(folder, f"{folder}/checkpoint-2")


def beside_deepspeed(folder: str, flags: list[str]) -> tuple[str, str, bool]:
    """What torch's load is told in a run of which DeepSpeed loads under the flags."""
    import ds_reshard

    with _asked(flags), ds_reshard.install("deepspeed"):
        return unsafe_jobs.dcp_load(folder)


def own_save(folder: str, flags: list[str]) -> list[tuple[str, str]]:
    """What torch's load is told of what this run has saved itself, and of a copy of it."""
    import ds_reshard

    with _asked(flags), ds_reshard.install("fsdp"):
        unsafe_jobs.dcp_save(folder)
        if dist.get_rank() == 0:
            shutil.copytree(folder, f"{folder}.copy")
        dist.barrier()
        return [unsafe_jobs.dcp_load(one)[:2] for one in (folder, f"{folder}.copy")]


def unhooked(folder: str, policy: dict[str, Any]) -> dict[str, Any]:
    """A resume of the Trainer on DeepSpeed with its own hooks alone."""
    import ds_reshard

    with ds_reshard.install("transformers"):
        return late_trainer_jobs.run("none", 1, folder, hooks=False, resumes=True, policy=policy)


def start(host: str, folder: str, flags: list[str]) -> str:
    """What a run is told that has flags from the start, and nothing to resume from."""
    with _asked(flags):
        return unsafe_jobs._told(lambda: save(host, folder))[1]


def random_states(folder: str, policy: dict[str, Any]) -> list[bool]:
    """Whether each load of the Trainer's random states, in a resume, has changed this run's."""
    from transformers import Trainer

    import ds_reshard

    changed: list[bool] = []
    with ds_reshard.install("transformers"):
        hooked = Trainer._load_rng_state

        def noted(self: Any, checkpoint: str) -> None:
            torch.manual_seed(99)
            before = torch.get_rng_state()
            hooked(self, checkpoint)
            changed.append(not torch.equal(before, torch.get_rng_state()))

        Trainer._load_rng_state = noted
        try:
            told = late_trainer_jobs.run("optimizer", 1, folder, resumes=True, policy=policy)
        finally:
            Trainer._load_rng_state = hooked
    assert told["raised"] is None, told
    return changed
