"""What the worker processes do with an engine that a load cannot serve, or must serve late."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import Model, Run
from jobs import build, train
from logs import heard


@contextmanager
def _launched() -> Iterator[None]:
    """With what a launcher for several machines sets, which engines of "writer" ask for."""
    before = dict(os.environ)
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0", LOCAL_RANK=os.environ.get("RANK", "0"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def load_with_feature(run: Run, model: Model, folder: str, switch: str, real: bool = False) -> Any:
    """Switch a feature on in a real engine and load; the error's class and text, or "original".

    With `real`, what the engine holds once DeepSpeed's own load has filled it.
    """
    import jobs

    import ds_reshard
    from ds_reshard.hooks import Seam

    with _launched():
        engine = build(run, model, seed=99)
    optimizer = engine.optimizer
    if switch in ("mp_world_size", "has_moe_layers"):
        setattr(engine, switch, 2 if switch == "mp_world_size" else True)
    elif switch == "nvme":
        optimizer.swap_optimizer = True
    elif switch == "zenflow":
        optimizer.zenflow = True
    else:
        optimizer.__class__ = type(switch, (type(optimizer),), {})
    if real:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
        return jobs.contents(engine)
    original = functools.wraps(type(engine).load_checkpoint)(lambda *args, **kwargs: ("original", ""))
    with heard() as lines:
        try:
            Seam("ds_reshard.hosts.deepspeed.load:load_checkpoint")(original)(engine, folder)
        except ds_reshard.ReshardError as error:
            return type(error).__name__, str(error)
    return "original", " ".join(lines)


def _quantize(engine: Any) -> None:
    """As `quantize_nontrainable_params` (runtime/zero/stage3.py, 0.19.8), whose kernel needs a GPU: synthetic."""
    for param in engine.module.parameters():
        if not param.requires_grad:
            part = param.ds_tensor
            scale = part.abs().max().float() / 127
            small = (part.float() / scale).round().to(torch.int8)
            for name in ("ds_numel", "status", "final_location"):
                setattr(small, name, getattr(part, name))
            small.ds_quant_scale = scale
            param.ds_tensor = small


def save_quantized(run: Run, model: Model, folder: str) -> None:
    engine = build(run, model)
    train(engine, 0, 1)
    _quantize(engine)
    engine.save_checkpoint(folder)


def load_quantized(run: Run, model: Model, folder: str, quantize: bool) -> str:
    """What the load raises."""
    import ds_reshard

    engine = build(run, model, seed=99)
    if quantize:
        _quantize(engine)
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    except ds_reshard.ReshardError as error:
        return str(error)
    return ""


def load_after_decoupled_save(run: Run, model: Model, folder: str) -> list[str]:
    import ds_reshard

    engine = build(run, model, seed=99)
    order: list[str] = []
    engine.checkpoint_engine.is_decoupled = lambda: True
    engine._commit_decoupled_checkpoint = lambda: order.append("commit")
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return [*order, "load"]


def load_by_writer(run: Run, model: Model, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Save and load through an engine of "checkpoint": {"writer": ...}; what was saved, loaded, and said."""
    import jobs

    with _launched():
        saved = jobs.save(run, model, folder)
        with heard() as lines:
            return saved, jobs.load(run, model, folder), lines


def load_with_one_faulty_rank(run: Run, model: Model, folder: str) -> str:
    """A pending save, behind which ranks wait for each other; the last rank's own settings are wrong."""
    import ds_reshard

    engine = build(run, model, seed=99)
    engine.checkpoint_engine.is_decoupled = lambda: True
    engine._commit_decoupled_checkpoint = torch.distributed.barrier
    if torch.distributed.get_rank() == run.dp - 1:
        engine._config._param_dict["ds_reshard"] = {"nonsense": 1}
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    except ds_reshard.ReshardError as error:
        return str(error)
    return "no error"


def load_under_wrappers(run: Run, model: Model, folder: str, bad: str) -> list[Any]:
    """Steps that a monitor counts: wrapped before loads, and once more between a load that fails and one that does not.

    What is not a method of the class stays, too.
    """
    import jobs

    import ds_reshard

    engine, counted = build(run, model, seed=99), [0, 0]

    def wrap(number: int) -> None:
        own = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            counted[number] += 1
            return own(*args, **kwargs)

        engine.step = step

    wrap(0)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
        jobs.train(engine, 0, 1)
        told: list[Any] = [jobs.outcome(lambda: engine.load_checkpoint(bad))]
        wrap(1)
        told.append(jobs.outcome(lambda: jobs.train(engine, 1, 1)))
        engine.load_checkpoint(folder)
        jobs.train(engine, 1, 1)
    return [*told, counted]


def give_own_state(run: Run, model: Model, folder: str, reshard: dict[str, Any] | None, steps: int = 0) -> list[str]:
    """Save the state of each rank's ZeRO optimizer by hand, or give the engine's the states of all saved ranks."""
    import jobs

    import ds_reshard

    own = Path(folder) / f"optimizer_{torch.distributed.get_rank()}.pt"
    if reshard is None:
        engine = build(run, model)
        jobs.train(engine, 0, 2)
        torch.save(engine.optimizer.state_dict(), own)
        return []
    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": reshard})
    engine = build(run, model, seed=99)
    jobs.train(engine, 0, steps)
    states = [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("optimizer_*.pt"))]
    with ds_reshard.install("deepspeed"), ds_reshard.install("torch"):
        try:
            engine.optimizer.load_state_dict(states if run.stage else states[0])
        except ds_reshard.ReshardError as error:
            return [type(error).__name__, str(error)]
    return []


def by_engine(run: Run, model: Model, folder: str, method: str, reshard: dict[str, Any] | None = None) -> Any:
    """Train and call the engine's `save_checkpoint`, or its `load_checkpoint` under a policy: what it holds then."""
    import jobs

    import ds_reshard

    config = {**run.config, **({"ds_reshard": reshard} if reshard else {})}
    engine = build(Run(run.stage, run.dp, run.dtype, run.options, config), model, seed=7 if reshard is None else 99)
    train(engine, 0, 2 if reshard is None else 0)
    with ds_reshard.install("deepspeed"), ds_reshard.install("torch"):
        getattr(engine, method)(folder)
    return jobs.contents(engine)


def give_later_state(run: Run, model: Model, folder: str, resume: dict[str, Any], give: str) -> dict[str, str]:
    """What a script is told that gives the engine's `optimizer`, the one `inside`, or its `schedule` a saved state.

    Before any load, after a load of all, and after one of weights alone; and what it is told of the next update.
    """
    import jobs
    from logs import heard, refusal

    import ds_reshard

    config = {**run.config, "ds_reshard": {"resume": resume}}
    told: dict[str, str] = {}
    for load in ("none", "all", "weights"):
        engine = build(Run(run.stage, run.dp, run.dtype, run.options, config), model, seed=99)
        path, number = Path(folder) / "given.pt", torch.distributed.get_rank()
        saved = torch.load(f"{path}{number}", weights_only=False)
        owner = {"optimizer": engine.optimizer, "schedule": engine.lr_scheduler}.get(give, engine.optimizer)
        owner = getattr(owner, "optimizer", owner) if give == "inside" else owner
        with ds_reshard.install("deepspeed"), ds_reshard.install("torch"), heard() as lines:
            if load != "none":
                engine.load_checkpoint(folder, load_module_only=load == "weights")
            told[load] = refusal(lambda owner=owner, saved=saved: owner.load_state_dict(saved[give]))  # type: ignore[misc]
            told[f"{load}, trained"] = refusal(lambda engine=engine: jobs.train(engine, 0, 1))  # type: ignore[misc]
            told[f"{load}, warned"] = "; ".join(line for line in lines if "load_module_only" in line)
    return told


def keep_state(run: Run, model: Model, folder: str) -> None:
    """Save a checkpoint, and beside it by hand what `give_later_state` gives."""
    import jobs

    engine = build(run, model)
    jobs.train(engine, 0, 2)
    engine.save_checkpoint(folder)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = {"optimizer": engine.optimizer.state_dict(), "schedule": engine.lr_scheduler.state_dict()}
    states["inside"] = states["optimizer"] if run.stage == 3 else inner.state_dict()
    own = {**states, "optimizer": [states["optimizer"]] if run.stage in (1, 2, 3, "bf16") else states["optimizer"]}
    torch.save(own, Path(folder) / f"given.pt{torch.distributed.get_rank()}")


def load_without(run: Run, folder: str, saved: str, loaded: str) -> list[Any]:
    """What a load at stage 0 is told, whose optimizer has not the parameter `loaded`, as the saved one's not `saved`.

    And whether the weights have changed.
    """
    import deepspeed
    import jobs
    from cases import ds_config
    from logs import refusal

    import ds_reshard

    def make(without: str, seed: int) -> Any:
        jobs.forget()
        torch.manual_seed(seed)
        net = jobs.Net(Model())
        optimizer = torch.optim.AdamW([param for name, param in net.named_parameters() if name != without], lr=0.01)
        given = {"model": net, "optimizer": optimizer, "config": ds_config(run), "dist_init_required": False}
        jobs._STATE["engine"] = engine = deepspeed.initialize(**given)[0]
        return engine

    engine = make(saved, 1)
    jobs.train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine = make(loaded, 9)
    before = [param.detach().clone() for param in engine.module.parameters()]
    with ds_reshard.install("deepspeed"):
        told = refusal(lambda: engine.load_checkpoint(folder))
    return [told, all(map(torch.equal, before, engine.module.parameters()))]


def load_without_moments(
    run: Run, model: Model, folder: str, stepped: int, section: dict[str, Any] | None = None, anew: bool = False
) -> dict[str, Any]:
    """Load into an engine that has `stepped`, what it holds then and after three updates, and what was told of it.

    `anew`: after a refusal, into an engine that has not.
    """
    import jobs

    import ds_reshard

    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, **({"ds_reshard": section} if section else {})})
    engine, raised = build(run, model, seed=99), []
    train(engine, 50, stepped)
    with ds_reshard.install("deepspeed"), heard() as told:
        for _ in range(1 + anew):
            before = jobs.contents(engine)
            try:
                engine.load_checkpoint(folder, load_optimizer_states=False)
                break
            except ds_reshard.ReshardError as error:
                raised.append((type(error).__name__, str(error), jobs.same(before, jobs.contents(engine))))
                engine = build(run, model, seed=99)
        held, told = jobs.contents(engine), list(told)
        rows = {row.name: row.used for row in report.rows} if (report := ds_reshard.last_report()) is not None else {}
    train(engine, 100, 3)
    after = jobs.contents(engine)
    mapped = {name: getattr(param, "_hp_mapping", None) for param, name in engine.param_names.items()}
    linked = {name: one.optim_fragment for name, one in mapped.items() if one is not None}
    return {"held": held, "after": after, "raised": raised, "told": told, "row": rows.get("moments"), "linked": linked}
