"""Loads of checkpoints that may act: what each rank is told by the hooks of accelerate, the Trainer, and torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jobs
import late_jobs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from logs import heard

from ds_reshard.containers import pickle_rules


def _told(work: Callable[[], object]) -> tuple[str, str]:
    import ds_reshard

    try:
        work()
    except ds_reshard.ReshardError as error:
        return type(error).__name__, str(error)
    return "", ""


class Progress:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.state = {"epoch": 3}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _accelerated() -> tuple[Any, Any, Progress]:
    """A run without DeepSpeed."""
    from accelerate import Accelerator

    jobs.forget_accelerate()
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.backward(net(torch.ones(2, 4)).sum())
    optimizer.step()
    scheduler.step()
    return accelerator, net, progress


def accelerate_save(folder: str, safe: bool) -> None:
    accelerator, _, _ = _accelerated()
    accelerator.save_state(folder, safe_serialization=safe)


def accelerate_load(folder: str) -> tuple[str, str, bool]:
    """What is told, and whether the weights are as they were before."""
    import ds_reshard

    with ds_reshard.install("accelerate"):
        accelerator, net, progress = _accelerated()
        progress.state = {}
        before = {name: value.clone() for name, value in net.state_dict().items()}
        error, text = _told(lambda: accelerator.load_state(folder))
        same = all(torch.equal(before[name], value) for name, value in net.state_dict().items()) and not progress.state
    return error, text, same


def accelerate_within_an_update(folder: str, step: int | None = None) -> int:
    """Save with a count of micro-batches of `step`, or load; the count of this rank then."""
    import ds_reshard

    with ds_reshard.install("accelerate"):
        accelerator, _, _ = _accelerated()
        if step is not None:
            accelerator.step = step
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        return int(accelerator.step)


def accelerate_counted_data(folder: str) -> tuple[str, str]:
    """What is told of a load with a data loader that goes on by what one process has counted."""
    import ds_reshard

    with ds_reshard.install("accelerate"):
        accelerator, _, _ = _accelerated()
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(64.0))))
        loader.use_stateful_dataloader = True
        loader.base_dataloader.load_state_dict = lambda state: None  # torchdata's, a synthetic stand-in
        return _told(lambda: accelerator.load_state(folder))


def accelerate_load_latest(project: str) -> tuple[str, str, bool]:
    """As `accelerate_load`, by accelerate's own names; what a folder holds is listed backwards."""
    import ds_reshard

    listdir = os.listdir
    os.listdir = lambda *path: sorted(listdir(*path), reverse=True)
    try:
        with ds_reshard.install("accelerate"):
            accelerator, _, progress = _accelerated()
            accelerator.project_configuration.automatic_checkpoint_naming = True
            accelerator.project_configuration.set_directories(project)
            progress.state = {}
            error, text = _told(accelerator.load_state)
    finally:
        os.listdir = listdir
    return error, text, progress.state == {"epoch": 3}


def accelerate_deepspeed(late: Any, folder: str) -> dict[str, Any]:
    return late_jobs.resume(late, folder)


def _trainer(
    folder: str,
    safe: bool,
    resume_from: str | bool | None,
    deepspeed: dict[str, Any] | None,
    accumulation: int = 1,
    split: bool = False,
) -> Any:
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    torch.manual_seed(7)
    with jobs.trainer_on_cpus():
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4 if resume_from is None else 6,
            save_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            accelerator_config={"split_batches": split},
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            deepspeed=deepspeed,
            learning_rate=0.01,
        )
        data = [{"x": torch.ones(4) * n, "labels": torch.tensor(float(n))} for n in range(16)]
        trainer = Trainer(model=_Regression(), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume_from)
    return trainer


class _Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x.to(self.layer.weight.dtype)).squeeze(-1)
        return {"loss": (found.float() - labels.float()).square().mean()}


def trainer_save(folder: str, deepspeed: dict[str, Any] | None = None, split: bool = False) -> list[str]:
    _trainer(folder, True, None, deepspeed, split=split)
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def trainer_resume(folder: str, wanted: str | bool, deepspeed: dict[str, Any] | None = None) -> tuple[str, str]:
    import ds_reshard

    hooks = ("transformers", *(("deepspeed", "accelerate") if "ds_reshard" in (deepspeed or {}) else ()))
    with contextlib.ExitStack() as stack:
        for host in hooks:
            stack.enter_context(ds_reshard.install(host))
        return _told(lambda: _trainer(folder, True, wanted, deepspeed))


def trainer_data(folder: str, wanted: str, accumulation: int, split: bool = False) -> list[str]:
    """What a Trainer without DeepSpeed is told of its place in the data."""
    import ds_reshard

    with ds_reshard.install("transformers"), heard() as lines:
        _trainer(folder, True, wanted, None, accumulation, split)
    return [str(line) for line in lines if "samples" in str(line)]


def trainer_resume_of_old(wanted: str) -> tuple[str, str]:
    """The Trainer's method as releases 4.x have it (a synthetic stand-in)."""
    from ds_reshard.hooks import Seam

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> None:
        raise AssertionError("it was loaded")

    class Held:
        args = None

    return _told(lambda: Seam("ds_reshard.hosts.transformers:train")(train)(Held(), model_path=wanted))


def trusting(work: str, trust: Sequence[str], **given: Any) -> tuple[str, str]:
    """What a job of this file is told in a process that trusts these classes."""
    pickle_rules.trust(trust)
    try:
        error, text, *_ = globals()[work](**given)
    finally:
        pickle_rules._TRUSTED_ALWAYS.difference_update(trust)
    return error, text


def nanotron_start(folder: str, run: Any) -> tuple[str, str]:
    import nanotron_jobs

    error, text, _ = nanotron_jobs.start_refused(run, folder)
    return "" if error == "started" else error, text


def dcp_save(folder: str, run: Mapping[str, Any] = MappingProxyType({"epoch": 3, "name": "x"})) -> None:
    dcp.save({"w": torch.arange(12.0).view(4, 3), "run": dict(run)}, checkpoint_id=folder)


def dcp_load(
    folder: str,
    alone: bool = False,
    sharded: bool = False,
    left_out: tuple[str, ...] = (),
    run: Mapping[str, Any] = MappingProxyType({"epoch": 0, "name": ""}),
) -> tuple[str, str, bool]:
    """What is told, and whether the tensor that was to be filled is as it was; rank 0 leaves some keys out."""
    import ds_reshard

    held = {"w": torch.zeros(4, 3), "run": dict(run)}
    for key in left_out if alone or not dist.get_rank() else ():
        del held[key]
    with ds_reshard.install("fsdp"):
        if sharded:  # reads the directory before it loads
            error, text = _told(lambda: dcp.load_sharded_optimizer_state_dict(held, "w", dcp.FileSystemReader(folder)))
            return error, text, True
        error, text = _told(lambda: dcp.load(held, checkpoint_id=folder, no_dist=alone))
    return error, text, not held["w"].any()


SYNTHETIC = """
import torch
import torch.distributed as dist

class FSDPCheckpointManager:
    def save_checkpoint(self, path, **others):
        pass

    def load_checkpoint(self, {argument}=None, *args, **kwargs):
        if {argument} is None:
            return None
        name = f"{{{argument}}}/model_world_size_{{dist.get_world_size()}}_rank_{{dist.get_rank()}}.pt"
        return torch.load(name, weights_only=False)
"""


def managed(folder: str, argument: str) -> tuple[str, str]:
    """A synthetic class where EasyR1 and verl have theirs, which loads as theirs do."""
    import importlib
    import sys

    import ds_reshard

    at = Path(folder, f"package{dist.get_rank()}", "verl", "utils", "checkpoint")
    at.mkdir(parents=True)
    (at / "fsdp_checkpoint_manager.py").write_text(SYNTHETIC.format(argument=argument))
    sys.path.insert(0, str(at.parents[2]))
    try:
        with ds_reshard.install("fsdp"):
            manager = importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager").FSDPCheckpointManager()
            assert manager.load_checkpoint() is None
            dist.barrier()
            return _told(lambda: manager.load_checkpoint(del_local_after_load=False, **{argument: folder}))
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
