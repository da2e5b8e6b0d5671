"""A worker that saves and loads with a real checkout of nanotron, on CPU with gloo.

Run as `python nanotron_host.py SRC JOBS.json`, with RANK and WORLD_SIZE; each job is saved or loaded by all ranks, and
rank 0 writes what every rank found beside JOBS.json. What nanotron imports and does not use here is stubbed: datasets,
transformers, flash_attn, triton, grouped_gemm. Of CUDA there is the name alone: tensors that ask for it are made on
the CPU. gloo gathers tensors of one size only, so uneven ZeRO-1 parts are padded for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import sys
import types
import unittest.mock
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

STUBBED = ("datasets", "transformers", "flash_attn", "triton", "grouped_gemm")
SHAPES = {"emb.weight": (16, 6), "ln.weight": (6,), "qkv.weight": (16, 6), "odd.weight": (5, 3), "tiny": (1,)}
SPLIT, CHUNKS = ("emb.weight", "qkv.weight"), {"qkv.weight": (8, 4, 4)}
STAGE = {"emb.weight": 0, "ln.weight": 0, "tiny": 0, "qkv.weight": 1, "odd.weight": 1}
STEPS, TOTAL, LR, BATCH = 3, 10, 3e-4, 8
SCHEDULE = types.SimpleNamespace(
    lr_decay_steps=None,
    lr_warmup_steps=2,
    lr_decay_starting_step=None,
    lr_warmup_style="linear",
    learning_rate=LR,
    lr_decay_style="cosine",
    min_decay_lr=3e-5,
)


class _Anything:
    dtype = type("dtype", (), {})

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return pathlib.PosixPath if name == "xPath" else _Anything


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Stub(spec.name)
        module.__path__ = []
        module.__version__ = "2.6.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class OnCpu(TorchFunctionMode):
    """What asks for CUDA is made on the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") == "to":
            args = tuple("cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args)
        return func(*args, **kwargs)


def _pad_gathers() -> None:
    gather = dist.all_gather

    def padded(outs: Any, inp: Any, group: Any = None, async_op: bool = False) -> Any:
        most = max(out.numel() for out in outs)
        if len({out.numel() for out in outs}) == 1:
            return gather(outs, inp, group=group, async_op=async_op)
        one = inp.new_zeros(most)
        one[: inp.numel()] = inp.reshape(-1)
        found = [inp.new_zeros(most) for _ in outs]
        gather(found, one, group=group)
        for out, values in zip(outs, found, strict=True):
            out.copy_(values[: out.numel()].view_as(out))
        return None

    dist.all_gather = padded


def full(name: str, tag: str, number: int = 0) -> torch.Tensor:
    """The initial weight ("w") or a step's gradient ("g") of a parameter, whole."""
    made = torch.Generator().manual_seed(zlib.crc32(f"{name}/{tag}/{number}".encode()))
    return torch.randn(SHAPES[name], generator=made)


def local(tensor: torch.Tensor, name: str, tp: int, rank: int) -> torch.Tensor:
    if name not in SPLIT:
        return tensor
    return torch.cat([chunk.chunk(tp)[rank] for chunk in tensor.split(CHUNKS.get(name, (16,)))])


def reference(masters: bool) -> dict[str, dict[str, torch.Tensor]]:
    """What one process has after STEPS steps of AdamW under the schedule."""
    kept = torch.bfloat16 if masters else torch.float32
    params = {name: torch.nn.Parameter(full(name, "w").to(kept).float()) for name in SHAPES}
    optimizer = torch.optim.AdamW([{"params": [p]} for p in params.values()], lr=LR, weight_decay=0.01)
    rates = trajectory()
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates[number]
        for name, param in params.items():
            param.grad = full(name, "g", number).to(kept).float()
        optimizer.step()
    found = {}
    for name, param in params.items():
        state = optimizer.state[param]
        found[name] = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        found[name]["fp32" if masters else "weight"] = param.detach()
        if masters:
            found[name]["weight"] = param.detach().to(kept)
    return found


def trajectory() -> list[float]:
    """The rate of each step of an uninterrupted run, by nanotron's own scheduler."""
    from nanotron.helpers import lr_scheduler_builder

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    holder = types.SimpleNamespace(get_base_optimizer=lambda: optimizer)
    scheduler = lr_scheduler_builder(holder, SCHEDULE, TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class Built:
    """A model of SHAPES with nanotron's optimizer, as its trainer builds them."""

    def __init__(self, context: Any, job: dict[str, Any], tag: str) -> None:
        from nanotron import distributed as nd
        from nanotron.parallel.parameters import NanotronParameter
        from nanotron.parallel.sharded_parameters import SplitConfig, create_sharded_parameter_from_config
        from nanotron.parallel.tied_parameters import tie_parameters

        self.context, self.job = context, job
        self.tp, self.rank = job["tp"], nd.get_rank(context.tp_pg)
        self.dtype = torch.bfloat16 if job["masters"] else torch.float32
        self.model = torch.nn.Module()
        stage = nd.get_rank(context.pp_pg)
        for name in SHAPES:
            if job["pp"] > 1 and STAGE[name] != stage:
                continue
            folder, _, leaf = name.rpartition(".")
            if folder and not hasattr(self.model, folder):
                self.model.add_module(folder, torch.nn.Module())
            param = torch.nn.Parameter(local(full(name, tag), name, self.tp, self.rank).to(self.dtype).clone())
            if name in SPLIT:
                param = create_sharded_parameter_from_config(param, context.tp_pg, SplitConfig(0, CHUNKS.get(name)))
            else:
                param = NanotronParameter(tensor=param)
            setattr(getattr(self.model, folder) if folder else self.model, leaf, param)
        ranks = tuple(sorted(nd.get_process_group_ranks(context.tp_pg)))
        for name, param in list(self.model.named_parameters()):
            if not param.is_sharded:
                tie_parameters(root_module=self.model, ties=[(name, ranks)], parallel_context=context, reduce_op=None)

    def optimize(self) -> None:
        from nanotron import distributed as nd
        from nanotron.optim import NamedOptimizer, OptimizerFromGradientAccumulator, ZeroDistributedOptimizer
        from nanotron.optim.gradient_accumulator import FP32GradientAccumulator

        named = list(self.model.named_parameters())
        groups = [{"named_params": [pair], "lr": LR, "weight_decay": 0.01} for pair in named]
        self.accumulator: Any = None

        def plain(given: Any) -> Any:
            return NamedOptimizer(given, lambda found: torch.optim.AdamW(found, lr=LR, weight_decay=0.01))

        def accumulating(given: Any) -> Any:
            made = partial(FP32GradientAccumulator, grad_buckets_named_params=named)
            optimizer = OptimizerFromGradientAccumulator(made, given, plain)
            self.accumulator = optimizer.gradient_accumulator
            return optimizer

        builder = accumulating if self.job["masters"] else plain
        zero = self.job["zero"]
        self.optimizer = ZeroDistributedOptimizer(groups, builder, self.context.dp_pg) if zero else builder(groups)
        if zero and self.accumulator is not None:
            rank = nd.get_rank(self.context.dp_pg)
            self.accumulator.assign_param_offsets(self.optimizer.param_name_to_dp_rank_offsets, rank)

    def schedule(self) -> None:
        from nanotron import helpers

        self.scheduler = helpers.lr_scheduler_builder(self.optimizer, SCHEDULE, TOTAL)

    def step(self, number: int) -> None:
        for name, param in self.model.named_parameters():
            param.grad = local(full(name, "g", number), name, self.tp, self.rank).to(param.dtype).contiguous()
            if self.accumulator is not None:
                self.accumulator._accumulate_grad(name, param)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def differences(self) -> list[str]:
        """In what the state of this rank is not, to the bit, that of the reference."""
        from nanotron import distributed as nd

        expected, saved, found = reference(self.job["masters"]), self.optimizer.state_dict(), []
        offsets = getattr(self.optimizer, "param_name_to_dp_rank_offsets", None)

        def mine(name: str, kind: str) -> torch.Tensor:
            whole = local(expected[name][kind], name, self.tp, self.rank)
            if offsets is None:
                return whole
            start, stop = offsets[name][nd.get_rank(self.context.dp_pg)]
            return whole.reshape(-1)[start:stop]

        for number, name in saved["names"].items():
            held = dict(saved["state"][number])
            if self.job["masters"]:
                held["fp32"] = saved["gradient_accumulator"][name].detach()
            if float(held.pop("step")) != STEPS:
                found.append(f"{name}: step")
            for kind, tensor in held.items():
                if not torch.equal(tensor.reshape(-1).float(), mine(name, kind).reshape(-1)):
                    found.append(f"{name}: {kind}")
        for name, param in self.model.named_parameters():
            if not torch.equal(param.detach(), local(expected[name]["weight"], name, self.tp, self.rank)):
                found.append(f"{name}: weight")
        return found


def states_of(seed: int) -> Any:
    """What nanotron keeps of the random generators: here of a process with that seed."""
    from nanotron.random import RandomStates, get_current_random_state, set_random_seed

    set_random_seed(seed)
    return RandomStates({"tp_synced": get_current_random_state()})


def save(context: Any, job: dict[str, Any]) -> list[str]:
    """Train STEPS steps and save with nanotron's own functions; beside it what one process has."""
    from nanotron.serialize import (
        DataStageMetadata,
        TrainingMetadata,
        save_lr_scheduler,
        save_meta,
        save_optimizer,
        save_random_states,
        save_weights,
    )

    built = Built(context, job, "w")
    built.optimize()
    built.schedule()
    for number in range(STEPS):
        built.step(number)
    place = pathlib.Path(job["path"])
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        torch.save(reference(job["masters"]), place.parent / "reference.pt")
        sizes = "".join(f"  {key}: {job[key]}\n" for key in ("dp", "pp", "tp"))
        batch = f"  batch_accumulation_per_replica: {BATCH // job['dp']}\n  micro_batch_size: 1\n"
        (place / "config.yaml").write_text(f"parallelism:\n{sizes}tokens:\n{batch}")
    dist.barrier()
    save_weights(built.model, context, place)
    save_optimizer(built.optimizer, context, place)
    save_lr_scheduler(built.scheduler, job["zero"], context, place)
    stages = [DataStageMetadata("s", 1, 8 * STEPS, 8, {"d": 64 * STEPS})]
    metas = TrainingMetadata(
        consumed_train_samples=8 * STEPS,
        last_train_step=STEPS,
        last_stage_idx=0,
        consumed_tokens_total=64 * STEPS,
        data_stages=stages,
    )
    save_meta(context, place, metas)
    save_random_states(states_of(7), context, place)
    dist.barrier()
    return built.differences()


def load(context: Any, job: dict[str, Any]) -> list[str]:
    """What is wrong after stock `load_weights`, `load_optimizer` and `load_lr_scheduler`, in the trainer's order."""
    from nanotron.serialize import load_lr_scheduler, load_meta, load_optimizer, load_weights

    built, place = Built(context, job, "other"), pathlib.Path(job["path"])
    shards = load_weights(built.model, context, place)
    built.optimize()
    built.schedule()
    load_optimizer(built.optimizer, context, place, map_location="cpu", param_shard_metadata=shards, model=built.model)
    load_lr_scheduler(built.scheduler, job["zero"], context, place)
    found = built.differences()
    if load_meta(context, place).metas.last_train_step != STEPS:
        found.append("metadata: last_train_step")
    if any(built.scheduler.base_lrs[number] != LR for number in range(len(built.scheduler.base_lrs))):
        found.append("scheduler: base_lrs")
    return found


class Configuration(types.SimpleNamespace):
    """What the trainer looks at of a configuration; it logs the place of one, so this has a place."""

    def __fspath__(self) -> str:
        return "config.yaml"


def configuration(job: dict[str, Any]) -> Configuration:
    of = types.SimpleNamespace
    sizes = {key: job[key] for key in ("tp", "pp", "dp")}
    return Configuration(
        model=of(model_config=of(), init_method=of()),
        general=of(seed=1),
        logging=of(),
        data_stages=[],
        parallelism=of(**sizes, expert_parallel_size=1, context_parallel_size=job.get("cp", 1)),
        optimizer=of(learning_rate_scheduler=SCHEDULE, zero_stage=job["zero"]),
        checkpoints=of(load_optimizer=True, load_lr_scheduler=True),
        tokens=of(
            train_steps=TOTAL,
            micro_batch_size=1,
            sequence_length=8,
            limit_val_batches=0,
            batch_accumulation_per_replica=job.get("accumulation", BATCH // job["dp"]),
        ),
    )


def trainer_of(context: Any, built: Built, job: dict[str, Any]) -> Any:
    """nanotron's trainer, started: its own order of loading, without what has to do with models, logs and data."""
    from nanotron import trainer as nanotrons

    place = pathlib.Path(job["path"])

    class Trainer(nanotrons.DistributedTrainer):
        def pre_init(self) -> None:
            self.init_checkpoint_path = place

        def init_model(self) -> Any:
            self.param_shard_metadata = nanotrons.load_weights(built.model, context, place)
            built.model.output_pp_rank = 0
            return built.model

        def setup_log_writers(self) -> None: ...

        def post_init(self) -> None: ...

    def optimize(**_: Any) -> tuple[Any, Any]:
        built.optimize()
        return built.optimizer, built.accumulator

    quiet = dict.fromkeys(("log_libraries_versions", "set_ranks_logging_level", "MetricsLogger"), lambda *_, **__: None)
    others = {"ParallelContext": lambda **_: context, "init_random_states": lambda **_: states_of(9)}
    with unittest.mock.patch.multiple(nanotrons, init_optimizer_and_grad_accumulator=optimize, **quiet, **others):
        return Trainer(configuration(job))


def resume(context: Any, job: dict[str, Any]) -> list[str]:
    """What is wrong after nanotron's trainer has resumed with the hooks; then it goes on to the end, and saves."""
    from nanotron import trainer as nanotrons

    import ds_reshard

    with ds_reshard.install("nanotron"):
        built = Built(context, job, "other")
        trainer = trainer_of(context, built, job)
        built.scheduler = trainer.lr_scheduler
        found = built.differences()
        rates = []
        for number in range(STEPS, TOTAL):
            rates.append([group["lr"] for group in built.optimizer.get_base_optimizer().param_groups])
            built.step(number)
        if any(rate != expected for held, expected in zip(rates, trajectory()[STEPS:], strict=True) for rate in held):
            found.append(f"rates: {rates}")
        if trainer.metadata.last_train_step != STEPS:
            found.append("metadata: last_train_step")
        if job["same"] != (trainer.random_states == states_of(7)):
            found.append("random states")
        out = pathlib.Path(job["path"]).parent / "out"
        nanotrons.save(
            config=trainer.config,
            model=built.model,
            optimizer=built.optimizer,
            lr_scheduler=built.scheduler,
            parallel_context=context,
            training_metadata=trainer.metadata,
            root_folder=out,
            should_save_config=False,
            sanity_checks=False,
        )
    files = len(list((out / "lr_scheduler").iterdir()))
    if files != job["pp"] * job["tp"]:
        found.append(f"scheduler: {files} files")
    nanotrons.load_lr_scheduler(built.scheduler, job["zero"], context, out)
    return found


def refused(context: Any, job: dict[str, Any]) -> list[str]:
    """The error with which nanotron's trainer does not start with the hooks, and whether the optimizer had changed."""
    import ds_reshard

    with ds_reshard.install("nanotron"):
        built = Built(context, job, "other")
        try:
            trainer_of(context, built, job)
        except ds_reshard.ReshardError as error:
            changed = bool(built.optimizer.get_base_optimizer().state)
            return [type(error).__name__, f"changed: {changed}", str(error)]
    return ["started"]


def main() -> None:
    source, jobs_path = sys.argv[1:3]
    sys.path.insert(0, source)
    sys.meta_path.append(_Stubs())
    torch.set_num_threads(1)
    _pad_gathers()
    from nanotron.parallel import ParallelContext

    ParallelContext.set_device = lambda self: None
    results = []
    for number, job in enumerate(json.loads(pathlib.Path(jobs_path).read_text())):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{jobs_path}.{number}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        with OnCpu():
            context = ParallelContext(
                tensor_parallel_size=job["tp"],
                pipeline_parallel_size=job["pp"],
                data_parallel_size=job["dp"],
                context_parallel_size=job.get("cp", 1),
                expert_parallel_size=1,
            )
            try:
                found = {"save": save, "load": load, "resume": resume, "refused": refused}[job["do"]](context, job)
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"[:300]]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        results.append(everyone)
        dist.barrier()
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        pathlib.Path(f"{jobs_path}.found").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
