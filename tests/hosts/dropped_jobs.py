"""Resumes under flags, by accelerate and by Hugging Face's Trainer, of what DeepSpeed does not load."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

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
    else:
        unsafe_jobs.trainer_save(folder)


def resume(host: str, folder: str, flags: list[str]) -> tuple[str, str]:
    """What a run without DeepSpeed is told."""
    with _asked(flags):
        if host == "accelerate":
            return unsafe_jobs.accelerate_load(folder)[:2]
        return unsafe_jobs.trainer_resume(folder, f"{folder}/checkpoint-2")


def start(host: str, folder: str, flags: list[str]) -> str:
    """What a run is told that has flags from the start, and nothing to resume from."""
    with _asked(flags):
        return unsafe_jobs._told(lambda: save(host, folder))[1]
