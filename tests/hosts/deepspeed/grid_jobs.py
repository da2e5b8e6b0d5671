"""What the worker processes do with engines on a grid of tensor-, pipeline- and expert-parallel ranks.

Every element of every tensor has a value of its own, by a rule that knows no rank: an engine that was just built holds
the truth of its own layout, which is noted, wiped, loaded over and compared. After one step at learning rate 0, with
the loss sum(p * p / 4) in which the second factor is constant, a weight is what it was and its moments follow from it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import golden
import torch
from devices import BUCKETS, DEVICE
from grid_cases import Grid
from grid_models import BUILD, moments, muon_moments, numbers, specs
from jobs import let_go

_STATE: dict[str, Any] = {}


def config_of(grid: Grid) -> dict[str, Any]:
    stage = 1 if grid.stage == "bf16opt" else int(grid.stage)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **BUCKETS, **grid.options},
        "steps_per_print": 10**9,
        **grid.config,
    }
    if grid.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if grid.stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if grid.kind == "pipeline":
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if grid.kind == "autotp" and grid.tp > 1:
        config["tensor_parallel"] = {"autotp_size": grid.tp, "partition_config": specs(grid.layers)}
    if grid.kind in ("llama", "t5") and grid.tp > 1:
        config["tensor_parallel"] = {"autotp_size": grid.tp}
    if grid.kind == "muon":
        config["zero_optimization"]["reduce_scatter"] = False
    if grid.kind == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": grid.ep, "preset_model": "mixtral"}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}}
    return config


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kinds = ([p for n, p in named if p.dim() > 1], [p for n, p in named if p.dim() == 1])
    settings = ({"lr": 0.0, "weight_decay": 0.25}, {"lr": 0.0, "weight_decay": 0.5, "eps": 1e-6, "mark": 5})
    return [{"params": of_kind, **own} for of_kind, own in zip(kinds, settings, strict=True) if of_kind]


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def build(grid: Grid) -> Any:
    """An engine that holds the rule's values, before any step."""
    import deepspeed

    _forget()
    model, mpu = BUILD[grid.kind](grid)
    if grid.sp > 1:  # as Megatron-DeepSpeed's mpu answers; all that divide the optimizer share one sequence
        mpu.get_sequence_parallel_world_size, mpu.get_data_parallel_world_size = lambda: grid.sp, lambda: 1
        mpu.get_sequence_parallel_group = mpu.get_data_parallel_group
    groups = _groups(model)
    if grid.kind == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        every = {"params": list(model.parameters()), "name": "all", "lr": 0.0, "weight_decay": 0.0}
        named = [{**group, "name": f"user {n}"} for n, group in enumerate(groups)] if grid.layers == "groups" else every
        groups = [every] if grid.layers == "one group" else split_params_into_different_moe_groups_for_optimizer(named)
    optimizer = (
        torch.optim.AdamW(groups) if grid.kind not in ("autoep", "muon") else None
    )  # AutoEP splits groups itself
    if grid.kind == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        torch._dynamo.config.disable = True  # each rank would compile its update
        kinds = [(True, {"momentum": 0.95, "ns_method": "standard"}), (False, {"betas": (0.9, 0.999), "eps": 1e-8})]
        named = [(muon, [p for p in model.parameters() if p.requires_grad and p.use_muon is muon]) for muon, _ in kinds]
        optimizer = MuonWithAuxAdam(
            [
                {"params": params, "use_muon": muon, "lr": 0.0, "weight_decay": 0.0, **values}
                for (muon, params), (_, values) in zip(named, kinds, strict=True)
            ]
        )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=list(model.parameters()) if optimizer is None else None,
        lr_scheduler=_schedule if optimizer is None else _schedule(optimizer),
        config=config_of(grid),
        mpu=mpu,
        dist_init_required=False,
    )
    if grid.stage == 3:
        for parameter in engine.module.parameters():
            deepspeed.zero.register_external_parameter(engine.module, parameter)
    _STATE["engine"] = engine
    return engine


def _forget() -> None:
    """Let the last engine go, its process groups with it."""
    from deepspeed.module_inject import layers

    layers.set_autotp_mode(training=False)
    sequences = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if sequences is not None:
        sequences._release_sequence_parallel_groups()
    let_go(_STATE)


def step(grid: Grid, engine: Any) -> None:
    if grid.kind == "pipeline":
        dtype = torch.bfloat16 if grid.dtype == "bf16" else torch.float32
        batch = (torch.ones(1, 1, dtype=dtype, device=DEVICE), torch.ones(1, 1, dtype=dtype, device=DEVICE))
        engine.train_batch(iter([batch] * 4))
    else:
        engine.backward(engine(torch.ones(1, device=DEVICE)))
        engine.step()


def alone(job: Callable[..., Any]) -> Callable[..., Any]:
    """Leave nothing behind to which engines of other tests would hold."""

    @functools.wraps(job)
    def run(**arguments: Any) -> Any:
        try:
            return job(**arguments)
        finally:
            _forget()

    return run


@alone
def save(grid: Grid, folder: str) -> None:
    engine = build(grid)
    step(grid, engine)
    engine.save_checkpoint(folder, tag="t", client_state={"note": 7})


def _parts(engine: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """The fp32 masters of this rank, flat or one by one, each with its state."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            yield from ((flat, inner.state.get(flat, {})) for flat in getattr(optimizer, name))
            return
    if hasattr(optimizer, "fp32_groups"):
        yield from ((p, inner.state.get(p, {})) for group in optimizer.fp32_groups for p in group)
        return
    yield from ((p, inner.state.get(p, {})) for group in inner.param_groups for p in group["params"])


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: getattr(p, "ds_tensor", p).detach() for name, p in engine.module.named_parameters()}
    return found | dict(engine.module.named_buffers())


@alone
def load(
    grid: Grid,
    folder: str,
    hooks: bool = True,
    saved_ep: Any = 1,
    saved_sp: int = 1,
    wiped: float = 0.0,
    **arguments: Any,
) -> dict[str, Any]:
    """Build, note the truth, wipe, load; `wrong` names what is not the truth, with the number of wrong elements."""
    import ds_reshard

    engine = build(grid)
    if grid.stage == 3:
        _clear_padding(engine)
    truth = [flat.detach().clone() for flat, _ in _parts(engine)]
    wholes = _wholes(engine) if grid.kind == "muon" else {}
    weights = {name: tensor.clone() for name, tensor in _weights(engine).items()}
    for tensor in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values()):
        tensor.data.fill_(wiped)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    said = [_said(group) for group in inner.param_groups]
    for group in inner.param_groups:
        group.update(weight_decay=9.0, betas=(0.1, 0.2), eps=1.0)
    with golden.recorded() as layouts, ds_reshard.install("deepspeed") if hooks else nullcontext():
        _, client = engine.load_checkpoint(folder, **arguments)
    wrong = {name: _differing(now, weights[name]) for name, now in _weights(engine).items()}
    steps = set()
    untied = _untied(engine)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for number, (group, before) in enumerate(zip(inner.param_groups, said, strict=True)):
        wrong[f"{number} group"] = sum(_said(group)[key] != value for key, value in before.items())
    for number, ((flat, state), master) in enumerate(zip(_parts(engine), truth, strict=True)):
        wrong[f"{number} fp32"] = _differing(flat.detach(), master)
        # DeepSpeed divides the gradients of experts by all data-parallel ranks, of which only some have them
        # and adds up those of the parts of a sequence
        share = _shares(master, saved_ep) if grid.kind in ("moe", "autoep") else 1 / saved_sp
        expected = moments(torch.where(untied(master), 0.0, master.float()) / share)
        if grid.kind == "muon":
            expected = muon_moments(master.float(), wholes.get(number))
        for kind, value in expected.items():
            wrong[f"{number} {kind}"] = _differing(state[kind], value) if kind in state else -1
        steps.add(float(state.get("step", -1)))
    return {
        "wrong": {name: count for name, count in wrong.items() if count},
        "compared": len(wrong),
        "steps": sorted(steps),
        "groups": [_said(group) for group in inner.param_groups],
        "scheduler": {k: v for k, v in engine.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "global_steps": engine.global_steps,
        "note": (client or {}).get("note"),
        "report": str(ds_reshard.last_report()) if hooks else "",
        "layouts": layouts,
    }


@alone
def load_reading(grid: Grid, folder: str) -> list[str]:
    """The names of the files of which this rank reads the pickles in a load, each as often as it does."""
    import ds_reshard
    from ds_reshard.formats.zero.names import Listing

    engine, read, names = build(grid), Listing.as_saved, list[str]()

    def watched(listing: Listing, name: str, reader: Any) -> Any:
        names.append(name)
        return read(listing, name, reader)

    Listing.as_saved = watched  # type: ignore[assignment,method-assign]
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    finally:
        Listing.as_saved = read  # type: ignore[method-assign]
    return names


@alone
def load_net(**asked: Any) -> dict[str, Any]:
    """`jobs.load`, of a run for which DeepSpeed keeps groups of ranks."""
    import jobs

    return jobs.load(**asked)


@alone
def save_net(**asked: Any) -> dict[str, Any]:
    """`jobs.save`, of a run for which DeepSpeed keeps groups of ranks."""
    import jobs

    return jobs.save(**asked)


def _wholes(engine: Any) -> dict[int, torch.Tensor]:
    """What Muon keeps a momentum of, by the flat buffers of its groups: below stage 3 whole parameters."""
    optimizer = engine.optimizer
    held = getattr(optimizer, "params_in_partition", None)
    found = {}
    for number, (flat, _) in enumerate(_parts(engine)):
        own = flat if hasattr(flat, "use_muon") else None  # at stage 0 the parameter itself
        if own.use_muon if own is not None else optimizer.param_groups[number]["use_muon"]:
            parts = [flat] if held is None else held[number] or [flat[:0]]
            found[number] = torch.cat([p.detach().flatten() for p in parts]).to(next(engine.module.parameters()).dtype)
    return found


def _shares(master: torch.Tensor, saved_ep: Any) -> Any:
    """The ranks over which each expert's gradient was averaged, by its layer, which its numbers tell; 1 of others."""
    first, second = (saved_ep, saved_ep) if isinstance(saved_ep, int) else saved_ep
    layer = (master.bfloat16().view(torch.int16).int() - 0x3700) // 1000
    return torch.where(layer < 1, 1.0, torch.where(layer == 1, float(first), float(second)))


def _said(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}


def _clear_padding(engine: Any) -> None:
    """What is behind the last element of a parameter's last part is memory as it was found."""
    optimizer = engine.optimizer
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        at = 0
        for p in params:
            size = p.ds_tensor.ds_numel
            flat.data[at + _own(p) : at + size] = 0
            at += size
    for p in engine.module.parameters():
        p.ds_tensor.data[_own(p) :] = 0


def _own(parameter: Any) -> int:
    size, place = parameter.ds_tensor.ds_numel, torch.distributed.get_rank(parameter.ds_process_group)
    return int(max(0, min(size, parameter.ds_numel - place * size)))


def _untied(engine: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Which numbers are those of a position that no layer uses: its gradient is zero."""
    unused = numbers(60, 3) if hasattr(engine.module, "tied_modules") else torch.tensor([-1.0])
    return lambda master: torch.isin(master.float(), unused.to(master.device))


def _differing(now: torch.Tensor, then: torch.Tensor) -> int:
    """How many elements differ; what is behind the shorter is padding where it is zero."""
    one, other = now.flatten(), then.flatten()
    shared = min(one.numel(), other.numel())
    return int((one[:shared].float() != other[:shared].float()).sum()) + abs(one.numel() - other.numel())


@alone
def refused(grid: Grid, folder: str, **arguments: Any) -> tuple[str, str, bool]:
    """The error of a load, its text, and whether the engine is as it was."""
    import ds_reshard

    engine = build(grid)
    before = [t.detach().clone() for t in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values())]
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **arguments)
    except ds_reshard.ReshardError as error:
        after = [t.detach() for t in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values())]
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return type(error).__name__, str(error), same
    return "", "nothing was raised", False


@alone
def half_loaded(grid: Grid, bad: str, good: str) -> list[str]:
    """A load that fails while it copies; a step and a save behind it; and a step behind a load that succeeds."""
    from jobs import outcome

    import ds_reshard

    engine = build(grid)
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(bad)
        except ds_reshard.ReshardError as error:
            told = [type(error).__name__]
        told += [outcome(lambda: step(grid, engine)), outcome(lambda: engine.save_checkpoint(bad))]
        engine.load_checkpoint(good)
    return [*told, outcome(lambda: step(grid, engine))]
