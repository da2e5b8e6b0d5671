"""What ranks do with the hooks of nanotron: its synthetic stand-in resumes synthetic checkpoints of any topology."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jobs
import logs
import torch
import torch.distributed as dist
from logs import refusal

import ds_reshard
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import from_json
from ds_reshard.resume.report import last_report

_HERE = Path(__file__).parent
for _folder in (_HERE / "nanotron_stand_in", _HERE.parents[1] / "formats"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from nanotron_builder import PEAK, STEP, Param, Run, dp_slices, local, values, write_texts  # noqa: E402

TOTAL = 20
SCHEDULE = {
    "learning_rate": PEAK,
    "lr_warmup_steps": 2,
    "lr_warmup_style": "linear",
    "lr_decay_steps": None,
    "lr_decay_style": "cosine",
    "lr_decay_starting_step": None,
    "min_decay_lr": 3e-5,
}


@contextmanager
def hooked(policy: dict[str, Any] | None = None) -> Iterator[None]:
    policy_sources.forget()
    if policy:
        policy_sources.ask(from_json(policy, place="test"))
    try:
        with ds_reshard.install("nanotron"):
            yield
    finally:
        policy_sources.forget()


def context_of(run: Run) -> Any:
    """Its groups take the place of those of any context before."""
    from nanotron.parallel import ParallelContext

    jobs.let_go({})
    return ParallelContext(pp=run.pp, dp=run.dp, tp=run.tp, cp=run.cp, exp=run.exp)


def parameter(param: Param, tensor: torch.Tensor, tp: int, rank: int) -> Any:
    """The shard of a rank, which says where it lies in the whole."""
    from nanotron.parallel import NanotronParameter, ShardedInfo, SlicesPair

    made = NanotronParameter(local(tensor, param, tp, rank).clone())
    if param.split is None:
        return made
    axes, at, pairs = range(len(param.shape)), 0, []
    for chunk in param.chunks or (param.shape[param.split],):
        part = chunk // tp
        own = slice(at // tp, at // tp + part) if param.chunks else slice(None)
        whole = slice(at + rank * part, at + (rank + 1) * part)
        pairs.append(
            SlicesPair(
                tuple(own if axis == param.split else slice(None) for axis in axes),
                tuple(whole if axis == param.split else slice(None) for axis in axes),
            )
        )
        at += chunk
    made.info = ShardedInfo(tuple(pairs), param.shape)
    return made


def parameters(run: Run, context: Any) -> dict[str, Any]:
    """Those of this rank, of weights that are in no checkpoint."""
    held = values(Run(masters=run.masters, model=run.model, seed=9))
    tp, pp = dist.get_rank(context.tp_pg), dist.get_rank(context.pp_pg)
    return {param.name: parameter(param, held[param.name, "weight"], run.tp, tp) for param in run.params(pp)}


def module(run: Run, context: Any) -> torch.nn.Module:
    """The same as a model of nanotron's."""
    root = torch.nn.Module()
    for name, param in parameters(run, context).items():
        *folders, leaf = name.split(".")
        at = root
        for folder in folders:
            if folder not in dict(at.named_children()):
                at.add_module(folder, torch.nn.Module())
            at = at.get_submodule(folder)
        at.register_parameter(leaf, param)
    return root


def build(run: Run, context: Any, *, peak: float = PEAK, decay: float = 0.5, model: Any = None) -> Any:
    """An optimizer of that topology, of weights that are in no checkpoint."""
    from nanotron.optim import NamedOptimizer, OptimizerFromGradientAccumulator, ZeroDistributedOptimizer

    own = parameters(run, context) if model is None else dict(model.named_parameters())
    groups = [{"named_params": [pair], "lr": peak} for pair in own.items()]

    def plain(given: Any) -> Any:
        return NamedOptimizer(
            given, lambda made: torch.optim.AdamW(made, lr=peak, betas=(0.8, 0.9), weight_decay=decay)
        )

    def accumulating(given: Any) -> Any:
        return OptimizerFromGradientAccumulator(given, plain)

    builder = accumulating if run.masters else plain
    return ZeroDistributedOptimizer(groups, builder, context.dp_pg) if run.zero else builder(groups)


def differences(optimizer: Any, run: Run, context: Any) -> list[str]:
    """In what the states of this rank are not, to the bit, those of the synthetic checkpoint."""
    expected = values(Run(masters=run.masters, model=run.model))
    saved, found = optimizer.state_dict(), []
    tp, dp, pp = (dist.get_rank(group) for group in (context.tp_pg, context.dp_pg, context.pp_pg))
    for param in run.params(pp):
        whole = local(torch.empty(param.shape), param, run.tp, tp).numel()
        start, stop = dp_slices(whole, run.dp)[dp] if run.zero else (0, whole)
        if start == stop:
            continue
        number = next((n for n, name in saved["names"].items() if name == param.name), None)
        if number is None:
            found.append(f"{param.name}: absent")
            continue
        held = dict(saved["state"][number])
        if run.masters:
            held["fp32"] = saved["gradient_accumulator"][param.name].detach()
        if float(held.pop("step")) != STEP:
            found.append(f"{param.name}: step")
        for kind, tensor in held.items():
            mine = local(expected[param.name, kind], param, run.tp, tp).reshape(-1)[start:stop]
            if not torch.equal(tensor.reshape(-1), mine):
                found.append(f"{param.name}: {kind}")
    return found


def on_nodes(job: Callable[..., Any]) -> Callable[..., Any]:
    """It can be given `nodes`: for each rank the folder where its relative paths begin."""

    @functools.wraps(job)
    def there(*given: Any, nodes: list[str] | None = None, **named: Any) -> Any:
        with contextlib.chdir(nodes[dist.get_rank()] if nodes is not None else "."):
            return job(*given, **named)

    return there


@on_nodes
def load(run: Run, folders: list[str], policies: list[dict[str, Any] | None] | None = None) -> list[list[str]]:
    """What is wrong after `load_optimizer` of each folder: differences, or the error. Each rank has a policy."""
    from nanotron.serialize import optimizer as nanotrons

    context, found = context_of(run), []
    for folder in folders:
        with hooked(policies[dist.get_rank()] if policies else None):
            optimizer = build(run, context)
            before = [group["lr"] for group in optimizer.get_base_optimizer().param_groups]
            try:
                nanotrons.load_optimizer(optimizer, context, Path(folder) / str(STEP), map_location="cpu")
                found.append(differences(optimizer, run, context))
            except ds_reshard.ReshardError as error:
                left = optimizer.get_base_optimizer()
                changed = bool(left.state) or [group["lr"] for group in left.param_groups] != before
                found.append([type(error).__name__, *(fault.line() for fault in error.faults), f"changed: {changed}"])
    return found


def load_twice(run: Run, folder: str, policy: dict[str, Any]) -> tuple[list[str], int, bool, bool]:
    """All of a checkpoint, then by the policy: what differed at first, and afterwards the number of states, whether
    masters are the saved ones, and whether hyper-parameters and masters are this run's."""
    from nanotron.serialize import optimizer as nanotrons

    context, place = context_of(run), Path(folder) / str(STEP)
    with hooked():
        optimizer = build(run, context)
        base, masters = optimizer.get_base_optimizer(), optimizer.optimizer.gradient_accumulator.parameters
        own = [dict(group, params=None) for group in base.param_groups]
        nanotrons.load_optimizer(optimizer, context, place, map_location="cpu")
        first = differences(optimizer, run, context)
        saved = {name: held["fp32"].detach().clone() for name, held in masters.items()}
    with hooked(policy):
        nanotrons.load_optimizer(optimizer, context, place, map_location="cpu")
    rates = ("lr", "initial_lr")
    groups = [
        {key: group[key] for key in of_run if key not in rates}
        for group, of_run in zip([dict(group, params=None) for group in base.param_groups], own, strict=True)
    ]
    mine = groups == [{key: value for key, value in of_run.items() if key not in rates} for of_run in own]
    return (
        first,
        len(base.state),
        all(torch.equal(held["fp32"], saved[name]) for name, held in masters.items()),
        mine and all(torch.equal(held["fp32"], held["half"].float()) for held in masters.values()),
    )


def load_after_updates(run: Run, folder: str, keeps: bool) -> tuple[str, ...]:
    """The rows of masters and moments of a load into a run that has other states; with `keeps` nanotron keeps those."""
    from nanotron.serialize import optimizer as nanotrons

    context, place = context_of(run), Path(folder) / str(STEP)
    with hooked():
        optimizer = build(run, context)
        nanotrons.load_optimizer(optimizer, context, place, map_location="cpu")
        base = optimizer.get_base_optimizer()
        for tensor, state in base.state.items():
            for value in (tensor, *state.values()):
                value.data.add_(1) if isinstance(value, torch.Tensor) else None
        if keeps:
            optimizer.load_state_dict = lambda *state, **how: None
        nanotrons.load_optimizer(optimizer, context, place, map_location="cpu")
    report = last_report()
    assert report is not None or dist.get_rank()
    return tuple(report[name].used for name in ("fp32 masters", "moments and step")) if report is not None else ()


def config_for(run: Run, context: Any, folder: str | None, **changed: Any) -> Any:
    """The configuration of a trainer: `schedule`, `checkpoints` and `zero_stage` may be others than the saved run's."""
    schedule = SimpleNamespace(**{**SCHEDULE, **changed.get("schedule", {})})
    switches = {"load_optimizer": True, "load_lr_scheduler": True, **changed.get("checkpoints", {})}
    return SimpleNamespace(
        parallel_context=context,
        checkpoints=SimpleNamespace(resume_checkpoint_path=Path(folder) / str(STEP) if folder else None, **switches),
        optimizer=SimpleNamespace(learning_rate_scheduler=schedule, zero_stage=changed.get("zero_stage", run.zero)),
        tokens=SimpleNamespace(
            train_steps=TOTAL,
            micro_batch_size=1,
            batch_accumulation_per_replica=changed.get("accumulation", 8 // run.dp),
        ),
        build_optimizer=lambda: build(run, context, peak=schedule.learning_rate, decay=changed.get("decay", 0.5)),
    )


def rates_of(trainer: Any, steps: int) -> list[float]:
    """The rates of the coming steps, of all param groups alike."""
    base, found = trainer.optimizer.get_base_optimizer(), []
    for _ in range(steps):
        (rate,) = {group["lr"] for group in base.param_groups}
        found.append(rate)
        base.step()
        trainer.lr_scheduler.step()
    return found


def uninterrupted(run: Run, **changed: Any) -> list[float]:
    """The rates of a run from its first step to its last, by the stand-in without hooks."""
    from nanotron.trainer import DistributedTrainer

    return rates_of(DistributedTrainer(config_for(run, context_of(run), None, **changed)), TOTAL)


def resume(run: Run, folder: str, policy: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """What the stand-in's trainer has after it has resumed with the hooks, and the rates that follow."""
    from nanotron.trainer import DistributedTrainer

    context = context_of(run)
    with hooked(policy):
        with logs.first_update() if policy else contextlib.nullcontext([]) as told:
            trainer = DistributedTrainer(config_for(run, context, folder, **changed))
        trainer.first_step()
        base = trainer.optimizer.get_base_optimizer()
        report = last_report() if dist.get_rank() == 0 else None
        saved = trainer.optimizer.state_dict()
        return {
            "moments": bool(saved["state"]),
            "groups": [dict(group, params=None) for group in base.param_groups],
            "masters": {name: one.detach().clone() for name, one in saved.get("gradient_accumulator", {}).items()},
            "differences": differences(trainer.optimizer, run, context) if saved["state"] else None,
            "metadata": asdict(trainer.metadata),
            "random": trainer.random_states["tp_synced"].torch_cpu.clone(),
            "report": report,
            "told": told,
            "applied": policy_sources.applied(),
            "warnings": report.warnings if report is not None else (),
            "rates": rates_of(trainer, TOTAL - trainer.lr_scheduler.last_epoch),
        }


def resume_unrestored(run: Run, folder: str) -> dict[str, Any]:
    """The same where the random states that were read are dropped."""
    with mock.patch("ds_reshard.hosts.nanotron.trainer.restore"):
        return resume(run, folder)


@on_nodes
def start_refused(run: Run, folder: str, policy: dict[str, Any] | None = None, **changed: Any) -> tuple[str, str, bool]:
    """The error of a trainer that must not start, and whether its optimizer or scheduler had changed by then.

    An `accumulation` that is a list is of each rank.
    """
    from nanotron import trainer

    context, rank = context_of(run), dist.get_rank()
    if isinstance(changed.get("accumulation"), list):
        changed["accumulation"] = changed["accumulation"][rank]
    config, built = config_for(run, context, folder, **changed), build(run, context)
    before = [dict(group, params=None) for group in built.get_base_optimizer().param_groups]
    config.build_optimizer = lambda: built
    with hooked(policy):
        try:
            trainer.DistributedTrainer(config)
        except ds_reshard.ReshardError as error:
            base = built.get_base_optimizer()
            now = [
                {key: group[key] for key in of_run}
                for group, of_run in zip([dict(group, params=None) for group in base.param_groups], before, strict=True)
            ]
            return type(error).__name__, str(error), bool(base.state) or now != before
    return "started", "", True


def save(run: Run, out: str, *, config: dict[str, Any] | None = None) -> list[str]:
    """The files that are there after the trainer has saved."""
    from nanotron.trainer import DistributedTrainer

    context, place = context_of(run), Path(out)
    with hooked():
        trainer = DistributedTrainer(config_for(run, context, None, **(config or {})))
        trainer.save_checkpoint(place)
    dist.barrier()
    return sorted(path.name for path in place.rglob("*") if path.is_file())


def call_save(run: Run, out: str, how: str) -> str:
    """Call `save_lr_scheduler` as a caller of one's own may."""
    from nanotron import serialize
    from nanotron.trainer import DistributedTrainer

    context, place = context_of(run), Path(out)
    with hooked():
        scheduler = DistributedTrainer(config_for(run, context, None)).lr_scheduler
        given: dict[str, Any] = {"lr_scheduler": scheduler, "parallel_context": context, "root_folder": place}
        more = {"wrong": {"is_zero": not run.zero}, "stage": {"is_zero": run.zero}}.get(how, {})
        args, named = (tuple(given.values()), {}) if how == "dropped by position" else ((), {**given, **more})
        return refusal(lambda: serialize.save_lr_scheduler(*args, **named)) or "saved"


def random_states(run: Run, folder: str) -> None:
    """Each rank keeps the states of a process of its own seed in a checkpoint."""
    from nanotron.random import RandomStates, get_current_random_state
    from nanotron.serialize import save_random_states

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + dist.get_rank())
        states = RandomStates({"tp_synced": get_current_random_state()})
    save_random_states(states, context_of(run), Path(folder) / str(STEP))


def load_random(run: Run, folder: str) -> str:
    """`load_random_states` with the hooks: nothing, or the error."""
    from nanotron import serialize

    context = context_of(run)
    with hooked():
        return refusal(lambda: serialize.load_random_states(context, Path(folder) / str(STEP))) or "loaded"


def copies() -> str:
    """Which names of nanotron's modules are still its own while the hooks are on, and whether all are afterwards."""
    import nanotron.helpers
    import nanotron.serialize
    import nanotron.serialize.main
    import nanotron.trainer

    serialize, trainer = nanotron.serialize, nanotron.trainer
    bound = [
        (serialize.main, "save_lr_scheduler"),
        (serialize, "save_lr_scheduler"),
        (serialize, "save"),
        (serialize, "load_meta"),
        (serialize, "load_random_states"),
        (serialize, "load_optimizer"),
        (trainer, "save"),
        (trainer, "load_lr_scheduler"),
        (trainer, "load_optimizer"),
        (trainer, "load_meta"),
        (trainer, "state_dict_to_device"),
        (trainer, "lr_scheduler_builder"),
    ]
    before = [vars(module)[name] for module, name in bound]
    with hooked():
        left = [
            f"{module.__name__}.{name}"
            for (module, name), own in zip(bound, before, strict=True)
            if vars(module)[name] is own
        ]
    restored = [vars(module)[name] for module, name in bound] == before
    return json.dumps({"left": left, "restored": restored})


@on_nodes
def other(run: Run, folder: str, policy: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """What the trainer has after it was given a folder of any format: differences of weights and states, or the error.

    `names` is the path of a map of names, or each rank's own; `stages` are the data stages of its configuration, and
    `model_config` what it says of the model. With `loop` the weights are loaded without a trainer first.
    """
    from nanotron import trainer as nanotrons
    from nanotron.trainer import DistributedTrainer

    from ds_reshard.operations.name_map import ask_names

    context = context_of(run)
    model = module(run, context)
    config = config_for(run, context, None, **changed)
    config.checkpoints.resume_checkpoint_path = Path(folder)
    config.model, config.data_stages = model, changed.get("stages", [])
    model.model_config = model.config = SimpleNamespace(**changed.get("model_config", {}))
    config.build_optimizer = lambda: build(run, context, model=model)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    names = changed.get("names")
    ask_names(names[dist.get_rank()] if isinstance(names, list) else names)
    try:
        with hooked(policy):
            if changed.get("loop"):
                nanotrons.load_weights(model=model, parallel_context=context, root_folder=Path(folder))
            trainer = DistributedTrainer(config)
            trainer.first_step()
            report = last_report() if dist.get_rank() == 0 else None
    except ds_reshard.ReshardError as error:
        same = all(torch.equal(one, before[name]) for name, one in model.named_parameters())
        return {"error": type(error).__name__, "text": str(error), "unchanged": same}
    finally:
        ask_names(None)
    held, tp = values(Run(masters=run.masters, model=run.model)), dist.get_rank(context.tp_pg)
    wrong = [
        param.name
        for param in run.params(dist.get_rank(context.pp_pg))
        if not torch.equal(model.get_parameter(param.name), local(held[param.name, "weight"], param, run.tp, tp))
    ]
    scheduler = trainer.lr_scheduler
    return {
        "weights": wrong,
        "states": differences(trainer.optimizer, run, context) if trainer.optimizer.state_dict()["state"] else None,
        "position": scheduler.last_epoch,
        "bases": sorted(set(scheduler.base_lrs)),
        "metadata": asdict(trainer.metadata),
        "warnings": report.warnings if report is not None else (),
    }


def elastic(run: Run, folder: str, until: int) -> dict[str, Any]:
    """A start of an elastic run of the stand-in's trainer: from what it has saved last in `folder`, to another save.

    A sample is a whole number for each element, and the loss how far the weights are from it. So the gradient of a
    batch is the same to the bit however its samples are dealt to ranks.
    """
    from nanotron.trainer import DistributedTrainer

    context, place = context_of(run), Path(folder)
    model = module(run, context)
    config = config_for(run, context, None)
    config.model, config.build_optimizer = model, lambda: build(run, context, model=model)
    config.checkpoints.resume_checkpoint_path = place if (place / "latest.txt").exists() else None
    rank, losses, rates = dist.get_rank(context.dp_pg), [], []
    with hooked():
        trainer = DistributedTrainer(config)
        if config.checkpoints.resume_checkpoint_path is not None:
            trainer.first_step()
        began = trainer.metadata.last_train_step
        base = trainer.optimizer.get_base_optimizer()
        for step in range(began, until):
            (rate,) = {group["lr"] for group in base.param_groups}
            rates.append(rate)
            losses.append(_update(model, trainer.optimizer, context, step, range(rank, 8, run.dp)))
            trainer.lr_scheduler.step()
        trainer.save_checkpoint(place / str(until))
    if rank == 0:
        write_texts(run, place / str(until), until)
        (place / "latest.txt").write_text(str(until))
    dist.barrier()
    return {"began": began, "losses": losses, "rates": rates}


def _update(model: torch.nn.Module, optimizer: Any, context: Any, step: int, samples: range) -> float:
    """One update of ZeRO-1 by this rank's samples of eight: its loss before it."""
    base = optimizer.get_base_optimizer()
    shards = {optimizer.id_to_name[id(one)]: one for group in base.param_groups for one in group["params"]}
    offsets, loss = optimizer.param_name_to_dp_rank_offsets, torch.zeros(())
    for name, param in model.named_parameters():
        targets = [
            torch.randint(-9, 9, param.shape, generator=torch.Generator().manual_seed(8 * step + sample)).float()
            for sample in samples
        ]
        loss += sum((param.detach() - one).square().sum() for one in targets) / 8
        batch = torch.stack(targets).sum(0)
        dist.all_reduce(batch, group=context.dp_pg)
        if name in shards:
            start, stop = offsets[name][dist.get_rank(context.dp_pg)]
            shards[name].grad = (param.detach() - batch / 8).view(-1)[start:stop]
    optimizer.step()
    for name, param in model.named_parameters():
        for owner, (start, stop) in offsets[name].items():
            dist.broadcast(param.detach().view(-1)[start:stop], group_src=owner, group=context.dp_pg)
    dist.all_reduce(loss, group=context.dp_pg)
    return float(loss)
