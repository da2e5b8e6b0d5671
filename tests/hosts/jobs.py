"""What the worker processes do: build an engine, train, save, load, and tell what an engine holds.

What an engine holds is read from the optimizer's own flat partitions and reassembled by the test, never
from `safe_get_*`, which is wrong under round-robin.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import golden
import torch
from cases import GLOBAL_BATCH, Model, Run, ds_config
from devices import BACKEND, DEVICE
from odd_optimizer import Cast, Coded, Odd

_STATE: dict[str, Any] = {}
_LINEAR = torch.nn.functional.linear


def load_frameworks() -> None:
    """Once per process: import, silence DeepSpeed, keep its JIT op away."""
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _groups_at_first()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def join(timeout_s: int) -> None:
    """Once per process: join the world, all ranks at about the same time."""
    import deepspeed

    torch.distributed.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=timeout_s))
    deepspeed.init_distributed(BACKEND, verbose=False)


def forget_accelerate() -> None:
    """Whatever accelerate has set up in this process before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


@contextmanager
def trainer_on_cpus() -> Iterator[None]:
    """For a Trainer that is made inside: accelerate joins the ranks that there are, and wants no GPU where none is."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    forget_accelerate()
    backend = PartialState._prepare_backend
    if DEVICE == "cpu":
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.NO)
    try:
        yield
    finally:
        PartialState._prepare_backend = backend


def forget() -> None:
    """Let the engine go; what is left is never looked at again: each engine leaves some hundred objects behind."""
    let_go(_STATE)
    gc.freeze()


def put_back() -> None:
    """What a job has put on DeepSpeed's accelerator, by which it chooses types: those of later engines would differ."""
    from deepspeed.accelerator import get_accelerator

    vars(get_accelerator()).pop("is_fp16_supported", None)


def let_go(state: dict[str, Any]) -> None:
    """Empty `state`; destroy every engine there is and every process group but the world: they keep threads otherwise.

    An engine that is not destroyed is never collected: hooks of autograd, outside of Python's sight, refer to it.
    """
    from deepspeed import DeepSpeedEngine
    from deepspeed.utils import groups
    from torch.distributed import distributed_c10d

    state.clear()
    engines = [one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine)]
    while engines:
        with contextlib.suppress(Exception):  # it takes states of an optimizer for dense ones; then the engine stays
            engines.pop().destroy()
    torch.nn.functional.linear = _LINEAR  # in whose place the first engine of stage 3 puts another
    gc.collect()
    for name, first in _groups_at_first().items():
        setattr(groups, name, {} if first == {} else first)
    world = distributed_c10d._get_default_group()
    for group in [one for one in distributed_c10d._world.pg_map if one is not world]:
        torch.distributed.destroy_process_group(group)
        for holder in gc.get_referrers(group):  # engines of stage 3, and parameters of bf16, stay all the same
            names = holder if type(holder) is dict else getattr(holder, "__dict__", None)
            for name in [name for name, held in names.items() if held is group] if type(names) is dict else ():
                names[name] = None


@functools.cache
def _groups_at_first() -> dict[str, Any]:
    """The variables of DeepSpeed's module of groups before any engine: each is None, empty or a size."""
    from deepspeed.utils import groups

    return {name: value for name, value in vars(groups).items() if value is None or value == {} or type(value) is int}


class Net(torch.nn.Module):
    """Odd sizes, a scalar-like parameter, and whatever the case asks for."""

    def __init__(self, model: Model, tiny: bool = False) -> None:
        super().__init__()
        if tiny:
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.table = torch.nn.Parameter(torch.randn(1, 3))
            return
        self.embed = torch.nn.Embedding(13, 7)
        if model.frozen:
            self.tower = torch.nn.Linear(7, 13, bias=True).requires_grad_(False)
            self.towers = torch.nn.ParameterList([self.tower.weight] if model.renamed else [])
        self.first = torch.nn.Linear(7, 11)
        if model.batchnorm:
            self.norm = torch.nn.BatchNorm1d(11, affine=False)
        self.second = torch.nn.Linear(11, 7)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.tiny = torch.nn.Parameter(torch.full((3,), 0.5))
        if model.empty:
            self.spare = torch.nn.ParameterDict({"empty": torch.nn.Parameter(torch.zeros(0, 5))})
        self.head = torch.nn.Linear(7, 13, bias=False)
        if model.extra:
            self.new = torch.nn.Linear(3, 5)
        if model.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "table"):
            return (self.table.float().sum() * self.scale.float() * tokens.float() - labels).square().mean()
        hidden = self.embed(tokens)
        hidden = self.first(hidden)
        if hasattr(self, "norm"):
            hidden = self.norm(hidden.to(self.norm.running_mean.dtype)).to(hidden.dtype)
        hidden = self.second(torch.tanh(hidden)) * self.scale + self.tiny.sum()
        logits = self.head(hidden)
        if hasattr(self, "tower"):
            logits = logits + self.tower(hidden)
        return torch.nn.functional.cross_entropy(logits.float(), labels)


def _groups(net: torch.nn.Module, model: Model) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    if model.groups == 1:
        return [{"params": [p for _, p in named], "lr": 0.01, "weight_decay": 0.1}]
    plain = [p for n, p in named if p.dim() > 1]
    other = [p for n, p in named if p.dim() <= 1]
    return [{"params": plain, "lr": 0.01, "weight_decay": 0.1}, {"params": other, "lr": 0.003, "weight_decay": 0.0}]


def fused_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's, its kernel one of torch."""
    from adam_jobs import Kernel
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

    FusedAdamBuilder.load = lambda self, verbose=True: Kernel
    return FusedAdam(groups)


def _optimizer(model: Model, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    makers = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        "amsgrad": lambda: torch.optim.AdamW(groups, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "plain_sgd": lambda: torch.optim.SGD(groups),
        "adagrad": lambda: torch.optim.Adagrad(groups),
        "nadam": lambda: torch.optim.NAdam(groups),
        "fused": lambda: fused_adam(groups),
        "coded": lambda: Coded(groups, momentum=0.9),
        "cast": lambda: Cast(groups, momentum=0.9),
    }
    if model.optimizer.startswith("odd_"):
        return Odd(groups, model.optimizer.removeprefix("odd_"))
    return makers[model.optimizer]()


def build(run: Run, model: Model, seed: int | None = None, tiny: bool = False, thaw: bool = False) -> Any:
    import deepspeed

    forget()
    torch.manual_seed(model.seed if seed is None else seed)
    net = Net(model, tiny)
    for parameter in net.parameters() if thaw else ():
        parameter.requires_grad = True
    optimizer = _optimizer(model, _groups(net, model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0 / (1 + 0.1 * s)) if model.scheduler else None
    config = ds_config(run)
    mesh = config.pop("mesh", None)
    sp = config.pop("ulysses", 1)
    if sp > 1:  # newer than DeepSpeed 0.14
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * sp // run.dp
        parallel_state_sp.initialize_sequence_parallel(sp)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=config,
        mpu=parallel_state_sp if sp > 1 else None,
        dist_init_required=False,
        **({"mesh_param": tuple(mesh)} if mesh else {}),  # newer than DeepSpeed 0.14
    )
    _STATE["engine"] = engine
    return engine


def batch(step: int, rank: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 13, (GLOBAL_BATCH,), generator=generator)
    labels = torch.randint(0, 13, (GLOBAL_BATCH,), generator=generator)
    share = slice(rank * GLOBAL_BATCH // dp, (rank + 1) * GLOBAL_BATCH // dp)
    return tokens[share].to(DEVICE), labels[share].to(DEVICE)


def place(engine: Any) -> tuple[int, int]:
    """Rank and size of the group that shares the data and the optimizer."""
    group = engine.seq_data_parallel_group
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)


def train(engine: Any, first: int, steps: int) -> list[float]:
    rank, dp = place(engine)
    losses = []
    for step in range(first, first + steps):
        loss = engine(*batch(step, rank, dp))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean, group=engine.seq_data_parallel_group)
        losses.append(float(mean) / dp)
    return losses


def save(
    run: Run,
    model: Model,
    folder: str,
    steps: int = 3,
    tag: str | None = None,
    more: int = 0,
    client: dict[str, Any] | None = None,
    save_options: dict[str, Any] | None = None,
    tiny: bool = False,
) -> dict[str, Any]:
    engine = build(run, model, tiny=tiny)
    losses = train(engine, 0, steps)
    held = contents(engine)
    state = client or {"note": "kept", "epoch": 4}
    engine.save_checkpoint(folder, tag=tag, client_state=state, **(save_options or {}))
    held["losses"] = losses
    held["later"] = train(engine, steps, more)
    return held


def load(
    run: Run,
    model: Model,
    folder: str,
    more: int = 0,
    hooks: bool = True,
    tag: str | None = None,
    arguments: dict[str, Any] | None = None,
    reshard: dict[str, Any] | None = None,
    seed: int = 99,
    tiny: bool = False,
) -> dict[str, Any]:
    import ds_reshard

    if reshard is not None:
        run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": reshard})
    engine = build(run, model, seed=seed, tiny=tiny)
    with golden.recorded() as layouts, ds_reshard.install("deepspeed") if hooks else nullcontext():
        path, client = engine.load_checkpoint(folder, tag=tag, **(arguments or {}))
    held = contents(engine)
    held["layouts"] = layouts
    held["path"] = path and os.path.relpath(path, folder)
    held["client"] = {k: v for k, v in (client or {}).items() if k in ("note", "epoch", "global_samples", "extra")}
    held["client_keys"] = sorted(client or {})
    held["later"] = train(engine, engine.global_steps, more)
    return held


def load_refused(run: Run, model: Model, folder: str, **kwargs: Any) -> dict[str, Any]:
    """Load and expect an error; says what it was and what the engine holds afterwards.

    An engine that a refusal has left unchanged on every rank is that of the next call for the same run and model.
    """
    import ds_reshard

    reshard, fault = kwargs.pop("reshard", None), kwargs.pop("fault", None)
    if reshard is not None:
        run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": reshard})
    asked = (repr(run), model, kwargs.pop("thaw", False))
    engine = _STATE["engine"] if _STATE.pop("unchanged", None) == asked else build(run, model, seed=99, thaw=asked[2])
    before = contents(engine)
    undo = break_rank_1(fault) if fault else None
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **kwargs)
    except ds_reshard.ReshardError as error:
        unchanged = same(before, contents(engine))
        told = {
            "error": type(error).__name__,
            "text": str(error),
            "faults": error.faults,
            "unchanged": unchanged,
            "step": outcome(engine.step),
            "save": "" if unchanged else outcome(lambda: engine.save_checkpoint(folder)),
        }
        everywhere = torch.tensor(unchanged, device=DEVICE)
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
        if everywhere:
            _STATE["unchanged"] = asked
        return told
    finally:
        if undo:
            undo()
    return {"error": None, "text": "nothing was raised"}


def outcome(action: Any) -> str:
    from ds_reshard.errors import EngineUnusable

    try:
        action()
    except EngineUnusable:
        return "EngineUnusable"
    except Exception as error:
        return type(error).__name__
    return "done"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def pieces(held: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(n, k, s, t.view(torch.uint8).numpy().tobytes() if t.numel() else b"") for n, k, s, t in held["pieces"]]

    return pieces(one) == pieces(other) and one["groups"] == other["groups"] and one["steps"] == other["steps"]


def contents(engine: Any) -> dict[str, Any]:
    """What this rank holds: pieces (name, kind, first element, values), groups by member names, counters."""
    optimizer, names = engine.optimizer, engine.param_names
    pieces: list[tuple[str, str, int, torch.Tensor]] = []
    scalars: dict[tuple[str, str], Any] = {}

    def put(name: str, start: int, take: slice, master: torch.Tensor, state: dict[str, Any]) -> None:
        pieces.append((name, "fp32", start, master.detach().view(-1)[take].to("cpu", copy=True)))
        for kind, value in state.items():
            if kind in ("absmax", "absmax1", "rms", "weight"):
                continue
            if torch.is_tensor(value) and value.numel() == master.numel() and (value.dim() or kind != "step"):
                if kind in ("step", "mu_product"):
                    scalars[name, kind] = float(value)
                else:
                    pieces.append((name, kind, start, value.detach().view(-1)[take].to("cpu", copy=True)))
            else:
                scalars[name, kind] = (
                    float(value) if torch.is_tensor(value) or isinstance(value, int | float) else value
                )

    inner = getattr(optimizer, "optimizer", optimizer)
    members: list[list[str]] = []
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):
        rank, dp = place(engine)
        members = [[] for _ in inner.param_groups]
        for i, (params, flat) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        ):
            at = 0
            members[optimizer.sub_group_to_group_id[i]] += [names[p] for p in params]
            for p in params:
                chunk = -(-p.ds_numel // dp)
                start, stop = min(rank * chunk, p.ds_numel), min((rank + 1) * chunk, p.ds_numel)
                put(names[p], start, slice(at, at + stop - start), flat, inner.state.get(flat, {}))
                at += chunk
    elif hasattr(optimizer, "round_robin_bit16_groups") or hasattr(optimizer, "bf16_groups"):
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
        flats = optimizer.fp32_groups_flat_partition if flats is None else flats
        groups = getattr(optimizer, "round_robin_bit16_groups", None)
        groups = optimizer.bf16_groups if groups is None else groups
        rank, _ = place(engine)
        for g, (params, flat) in enumerate(zip(groups, flats, strict=True)):
            members.append([names[p] for p in params])
            low, high, at = rank * flat.numel(), (rank + 1) * flat.numel(), 0
            offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
            for i, p in enumerate(params):
                base = offsets[g][i] if offsets else at
                a, b = max(base, low), min(base + p.numel(), high)
                if a < b:
                    put(names[p], a - base, slice(a - low, b - low), flat, inner.state.get(flat, {}))
                at = base + p.numel()
    else:
        masters = getattr(optimizer, "fp32_groups", None)
        for g, group in enumerate(inner.param_groups):
            params = (
                optimizer.fp16_groups[g] if masters is not None else [p for p in group["params"] if p.requires_grad]
            )
            members.append([names[p] for p in params])
            for j, p in enumerate(params):
                master = masters[g][j] if masters is not None else p
                put(names[p], 0, slice(0, master.numel()), master, inner.state.get(master, {}))
    return {
        "pieces": pieces,
        "scalars": scalars,
        "groups": [
            (tuple(sorted(m)), {k: v for k, v in group.items() if k != "params"})
            for m, group in zip(members, inner.param_groups, strict=True)
        ],
        "weights": weights(engine),
        "stage": int(engine.zero_optimization_stage()),
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scheduler": engine.lr_scheduler.state_dict().get("last_epoch") if engine.lr_scheduler else None,
        "scaler": getattr(getattr(optimizer, "loss_scaler", None), "cur_scale", None),
    }


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every entry of the module's state dict, whole.

    What stage 3 has partitioned is put together here: `GatheredParameters` of 0.14 to 0.16 now and then hands out
    a parameter on gloo before all of it has arrived.
    """
    found = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        whole = value.detach()
        if getattr(value, "ds_numel", 0) and value.ds_status.name != "AVAILABLE":
            group, own = value.ds_process_group, value.ds_tensor.detach().to(DEVICE)
            parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group=group))]
            torch.distributed.all_gather(parts, own, group=group)
            whole = torch.cat([part.view(-1) for part in parts])[: value.ds_numel].view(value.ds_shape)
        if whole.numel():
            found[name] = whole.to("cpu", copy=True)
    return found


def fresh(run: Run, model: Model, seed: int = 99) -> dict[str, Any]:
    return contents(build(run, model, seed=seed))


def load_without_optimizer(folder: str, dtype: str, arguments: dict[str, Any]) -> Any:
    """The weights of an engine without an optimizer after a load, or the error."""
    import deepspeed

    import ds_reshard

    forget()
    torch.manual_seed(99)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bf16"}}
    engine = deepspeed.initialize(model=Net(Model(groups=2, frozen=True)), config=config, dist_init_required=False)[0]
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **arguments)
    except ds_reshard.ReshardError as error:
        return str(error)
    return {"weights": weights(engine)}


def load_counting(run: Run, model: Model, folder: str) -> tuple[int, int]:
    """How often DeepSpeed's `_load_checkpoint` and our direct path ran in one load."""
    import ds_reshard
    from ds_reshard.hosts.deepspeed import load as host

    engine = build(run, model, seed=99)
    counts = {"original": 0, "direct": 0}
    original, direct = type(engine)._load_checkpoint, host._load_directly

    def count_original(*args: Any, **kwargs: Any) -> Any:
        counts["original"] += 1
        return original(*args, **kwargs)

    def count_direct(*args: Any, **kwargs: Any) -> Any:
        counts["direct"] += 1
        return direct(*args, **kwargs)

    type(engine)._load_checkpoint, host._load_directly = count_original, count_direct
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    finally:
        type(engine)._load_checkpoint, host._load_directly = original, direct
    return counts["original"], counts["direct"]


def load_opening(run: Run, model: Model, folder: str) -> list[str]:
    """The names of the checkpoint's files that this rank opens in one load."""
    import ds_reshard

    engine, seen, opening = build(run, model, seed=99), set(), os.open

    def watched(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith(folder):
            seen.add(os.path.basename(path))
        return opening(path, *arguments, **named)

    os.open = watched
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    finally:
        os.open = opening
    return sorted(seen)


def _client(stranger: bool) -> dict[str, Any]:
    import argparse
    import collections
    import random

    import numpy as np
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from unlisted_class import Stranger

    torch.manual_seed(3)
    state = {
        "namespace": argparse.Namespace(lr=0.1, path=Path("a/b"), nested=argparse.Namespace(x=[1, (2, 3)])),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "span": datetime.timedelta(days=3),
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "number": np.float64(0.25),
        "numpy_random": np.random.RandomState(5).get_state(),
        "python_random": random.Random(5).getstate(),
        "torch_random": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "shape": torch.Size((2, 3)),
        "stage": ZeroStageEnum.weights,
        "ordered": collections.OrderedDict(a=1, b={2, 3}),
        "tensor": torch.arange(5).float()[1:4],
    }
    if stranger:
        state["stranger"] = Stranger(7)
    return state


def _told(state: dict[str, Any]) -> dict[str, str]:
    names = (*_client(stranger=False), "stranger")
    return {
        name: f"{type(state[name]).__name__} {state[name]!r}" for name in names if name in state and name != "stranger"
    } | ({"stranger": repr(state["stranger"])} if "stranger" in state else {})


def save_client(run: Run, folder: str, stranger: bool = False) -> dict[str, str]:
    engine = build(run, Model())
    train(engine, 0, 1)
    engine.save_checkpoint(folder, client_state=_client(stranger))
    return _told(_client(stranger))


def load_client(run: Run, folder: str, trust: list[str] | None = None) -> dict[str, str]:
    import ds_reshard

    section = {"ds_reshard": {"trust": trust}} if trust else {}
    engine = build(Run(run.stage, run.dp, run.dtype, run.options, section), Model(), seed=99)
    with ds_reshard.install("deepspeed"):
        _, client = engine.load_checkpoint(folder)
    return _told(client)


def load_bad_then_good(run: Run, model: Model, bad: str, good: str) -> dict[str, Any]:
    """A load that fails while copying, what the engine then refuses, and a load that puts it right."""
    import ds_reshard

    engine = build(run, model, seed=99)
    told: dict[str, Any] = {"error": None, "text": ""}
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(bad)
        except ds_reshard.ReshardError as error:
            told.update(error=type(error).__name__, text=str(error))
        told["step"] = outcome(engine.step)
        told["save"] = outcome(lambda: engine.save_checkpoint(bad))
        engine.load_checkpoint(good)
    told["after"] = contents(engine)
    told["step_after"] = outcome(lambda: train(engine, 3, 1))
    return told


def break_rank_1(fault: str) -> Any:
    """Let one thing fail on rank 1; returns what undoes it."""
    from unittest import mock

    from ds_reshard.hosts.deepspeed import load, move, prepare

    def fail(*args: Any, **kwargs: Any) -> Any:
        raised = {
            "unreadable": OSError(5, "Input/output error"),
            "another folder": FileNotFoundError(2, "No such file"),
        }
        raise raised.get(fault, KeyError("surprise"))

    place, name = {
        "unreadable": (os, "preadv"),
        "another folder": (os, "stat"),
        "crash": (prepare, "plan_rank"),
        "crash in settings": (load, "parse_settings"),
        "crash in live": (load, "run_of"),
        "crash in check": (load, "Index"),
        "crash in adopt": (move, "adopt"),
        "crash in client": (load, "client_entries"),
    }[fault]
    patch = mock.patch.object(place, name, fail)
    patch.start()  # on every rank, so that a name which is no longer there fails everywhere
    if torch.distributed.get_rank() != 1:
        patch.stop()
        return lambda: None
    return patch.stop


def save_named(run: Run, folder: str) -> None:
    """A config with a value of the rank's own, as a logger's file name may be."""
    named = {"tensorboard": {"enabled": False, "job_name": f"rank{torch.distributed.get_rank()}"}}
    engine = build(Run(run.stage, run.dp, run.dtype, run.options, named), Model())
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
