"""What a load really does, told in the words of a forecast: who loads, or what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jobs
import resume_jobs
import torch
from cases import Model, Run
from grid_cases import Grid
from resume_jobs import Setup


def shown(plan: Any) -> tuple[int, tuple[str, ...]]:
    return plan.nbytes, tuple(sorted({Path(path).name for path in plan.files}))


@contextlib.contextmanager
def _watched(loaders: list[str], read: list[Any]) -> Iterator[None]:
    from ds_reshard.hosts.deepspeed import load

    names = {"_load_directly": "ds_reshard", "_by_deepspeed": "DeepSpeed"}
    kept = {name: getattr(load, name) for name in names}
    files: dict[str, int] = {}
    torchs_load = torch.load

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        files[Path(file).name] = Path(file).stat().st_size
        return torchs_load(file, *args, **kwargs)

    def watch(name: str) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            loaders.append(names[name])
            read.extend(shown(one.plan) for one in args if hasattr(one, "plan"))
            with mock.patch.object(torch, "load", opened):
                result = kept[name](*args, **kwargs)
            if name == "_by_deepspeed":
                read.append((sum(files.values()), tuple(sorted(files))))
            return result

        return watched

    for name in names:
        setattr(load, name, watch(name))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(load, name, function)


def outcome(
    run: Run | Setup | Grid,
    folder: str,
    model: Model | None = None,
    tag: str | None = None,
    flags: tuple[str, ...] = (),
    strict: bool = True,
) -> dict[str, Any]:
    """Build the run as its script does, load, and say what came of it."""
    import argparse

    import grid_jobs

    import ds_reshard
    from ds_reshard.resume import policy_sources

    loaders: list[str] = []
    read: list[Any] = []
    policy_sources.forget()
    try:
        if isinstance(run, Setup):
            engine = resume_jobs.make(run, seed=99)
        elif isinstance(run, Grid):
            engine = grid_jobs.build(run)
        else:
            engine = jobs.build(run, model or Model(), seed=99)
    except Exception as error:
        return {"faults": {("ConfigError", "DeepSpeed config")}, "loader": "", "text": str(error)}
    try:
        if flags:
            ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args(list(flags))
        with ds_reshard.install("deepspeed"), _watched(loaders, read):
            path, _ = engine.load_checkpoint(folder, tag=tag, load_module_strict=strict)
    except ds_reshard.ReshardError as error:
        return {"faults": {(f.error, f.where) for f in error.faults}, "loader": "", "text": str(error)}
    finally:
        policy_sources.forget()
    if path is None:
        return {"faults": {("CheckpointNotFound", folder)}, "loader": "", "text": "nothing was loaded"}
    report = ds_reshard.last_report() if torch.distributed.get_rank() == 0 else None
    said = report.to_json() if report is not None else None
    return {"faults": set(), "loader": loaders[-1], "report": said, "read": read}
