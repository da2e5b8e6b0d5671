"""Resumes under flags, by accelerate, by Hugging Face's Trainer and by torch, of what DeepSpeed does not load."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobs
import late_trainer_jobs
import torch
import torch.distributed as dist
import unsafe_jobs
from accelerate import Accelerator
from logs import heard
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


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
    elif host in SCRIPTS:
        _Plain(folder, host).save()
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
        if host in SCRIPTS:
            return unsafe_jobs._told(_Plain(folder, host).load)
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


class _Plain:
    """A script that saves and loads its optimizer by itself, in one of the ways of `SCRIPTS`."""

    def __init__(self, folder: str, way: str = "script") -> None:
        torch.manual_seed(3)
        self.file, self.way = f"{folder}/plain.pt", way
        self.net = torch.nn.Linear(4, 3)
        self.optimizer = SCRIPTS[way](self.net.parameters(), lr=0.01)

    def train(self) -> None:
        self.net(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        os.makedirs(os.path.dirname(self.file), exist_ok=True)
        self.train()
        named = self.way == "script, by names"
        states = get_optimizer_state_dict(self.net, self.optimizer) if named else self.optimizer.state_dict()
        torch.save({"net": self.net.state_dict(), "optimizer": states}, self.file)

    def load(self) -> None:
        import ds_reshard

        with ds_reshard.install("torch"):
            saved = torch.load(self.file, weights_only=True)
            if self.way == "script, by names":
                set_optimizer_state_dict(self.net, self.optimizer, saved["optimizer"])
            else:
                for param in self.net.parameters() if self.way == "script, that looks" else ():
                    assert not self.optimizer.state[param]
                self.optimizer.load_state_dict(saved["optimizer"])
            self.net.load_state_dict(saved["net"])


SCRIPTS = {
    "script": torch.optim.AdamW,
    "script, by names": torch.optim.AdamW,
    "script, that looks": torch.optim.AdamW,
    "script, Adagrad": torch.optim.Adagrad,
}
"""By what a script does with its optimizer, which that is: Adagrad has states before its first step."""


def unhooked(folder: str, policy: dict[str, Any]) -> dict[str, Any]:
    """A resume of the Trainer on DeepSpeed with its own hooks alone."""
    import ds_reshard

    with ds_reshard.install("transformers"):
        return late_trainer_jobs.run("none", 1, folder, hooks=False, resumes=True, policy=policy)


def beside(folder: str, flags: list[str]) -> list[str]:
    """What a script is told that has DeepSpeed's engine and, beside it, an optimizer whose state it loads itself."""
    from cases import Model, Run

    import ds_reshard

    _Plain(folder).save()
    with ds_reshard.install("deepspeed"), ds_reshard.install("torch"):
        engine = jobs.build(Run(1, 1), Model())
        jobs.train(engine, 0, 2)
        engine.save_checkpoint(folder)
        with _asked(flags):
            told = [unsafe_jobs._told(lambda: jobs.build(Run(1, 1), Model()).load_checkpoint(folder))[0]]
            return [*told, unsafe_jobs._told(_Plain(folder).load)[0]]


def no_resume(flags: list[str]) -> list[str]:
    """What a script without DeepSpeed is told of an optimizer that gets its own state: prepared, or going back."""
    import ds_reshard

    jobs.forget_accelerate()
    plain, other, named = _Plain(""), _Plain("", "script, Adagrad"), _Plain("", "script, by names")

    def prepare() -> None:
        Accelerator(cpu=True).prepare(plain.net, plain.optimizer)
        Accelerator(cpu=True).prepare(other.net, other.optimizer)

    def go_back() -> None:
        plain.train()
        plain.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))

    def go_back_by_names() -> None:
        get_optimizer_state_dict(named.net, named.optimizer)  # which begins its states
        named.train()
        kept = copy.deepcopy(get_optimizer_state_dict(named.net, named.optimizer))
        set_optimizer_state_dict(named.net, named.optimizer, kept)

    with ds_reshard.install("torch"), _asked(flags):
        return [unsafe_jobs._told(one)[0] for one in (prepare, go_back, go_back_by_names)]


def beside_an_import(folder: str, flags: list[str]) -> str:
    """What FSDP2 is told that torch loads in a process in which DeepSpeed is hooked, and no engine of it is there."""
    import dcp_jobs
    from cases import Model

    import ds_reshard

    dcp_jobs.save(folder, Model())
    with ds_reshard.install("deepspeed"), ds_reshard.install("torch"), _asked(flags):
        return unsafe_jobs._told(lambda: dcp_jobs.load(folder, Model(), torchs=True))[0]


def start(host: str, folder: str, flags: list[str]) -> str:
    """What a run is told that has flags from the start, and nothing to resume from; its save is of another run."""
    import ds_reshard

    ds_reshard.uninstall()
    with _asked(flags):
        return unsafe_jobs._told(lambda: save(host, folder))[1]


def random_states(folder: str, policy: dict[str, Any]) -> tuple[list[bool], bool]:
    """Whether each load of the Trainer's random states has changed this run's; and whether its counters are told of."""
    import torch
    from transformers import Trainer

    import ds_reshard

    changed: list[bool] = []
    with ds_reshard.install("transformers"), heard() as told:
        hooked = Trainer._load_rng_state

        def noted(self: Any, checkpoint: str) -> None:
            torch.manual_seed(99)
            before = torch.get_rng_state()
            hooked(self, checkpoint)
            changed.append(not torch.equal(before, torch.get_rng_state()))

        Trainer._load_rng_state = noted
        try:
            answer = late_trainer_jobs.run("optimizer", 1, folder, resumes=True, policy=policy)
        finally:
            Trainer._load_rng_state = hooked
    assert answer["raised"] is None, answer
    return changed, any("trainer_state.json" in text for text in told)
