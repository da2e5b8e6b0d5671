"""On each rank: a GPT that Megatron sets up and loads with the hooks on, every element compared with the rule."""

from __future__ import annotations

import os
from typing import Any

import torch
from format_jobs import KINDS, _places, _setup, _states, value
from small_gpt import ended

VOCABULARY = 99


def load(arguments: str, hooks: bool = True, frozen: str = "") -> dict[str, Any]:
    """Set up with `--load`: what of weights, masters and moments differs from what was saved, and the counters."""
    import ds_reshard

    freeze(frozen)
    if hooks:
        ds_reshard.install("megatron")
    models, optimizer, scheduler = _setup(arguments)
    from megatron.training import get_args

    args, report = get_args(), ds_reshard.last_report()
    return {
        "wrong": wrong(models, optimizer),
        "cast": _cast(optimizer),
        "fresh": not any(
            bool(held[kind].any()) for _, _, held in _states(optimizer) for kind in KINDS[1:] if kind in held
        ),
        "iteration": args.iteration,
        "samples": args.consumed_train_samples,
        "position": scheduler.num_steps,
        "steps": sorted(_steps(optimizer)),
        "report": report.to_json() if report is not None else None,
    }


def everything(arguments: str, hooks: bool = True) -> dict[str, Any]:
    """All that a load leaves on this rank, whose generators were somewhere else before it."""
    import random

    import numpy
    from megatron.core import tensor_parallel
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import checkpointing, get_args, training

    import ds_reshard

    if hooks:
        ds_reshard.install("megatron")
    told, load = dict[str, Any](), training.load_checkpoint

    def from_elsewhere(*given: Any, **more: Any) -> Any:
        random.random(), numpy.random.rand(3), torch.rand(3)
        told["returned"] = load(*given, **more)
        return told["returned"]

    training.load_checkpoint = from_elsewhere
    models, optimizer, scheduler = _setup(arguments)
    for number, model in enumerate(models):
        told |= {f"weight {number}.{name}": one.clone() for name, one in model.state_dict().items() if one is not None}
    for number, (_, part, held) in enumerate(_states(optimizer)):
        told |= {f"state {number}.{kind}": one.clone() for kind, one in held.items()} | {f"part {number}": str(part)}
    for number, group in enumerate(optimizer.param_groups):
        told |= {f"group {number}.{name}": one for name, one in group.items() if name != "params"}
    rerun = get_rerun_state_machine().state_dict(None, "torch_dist", force=True)
    told |= {"schedule": scheduler.state_dict(), "microbatches": get_num_microbatches()}
    told["rerun"] = repr({name: one for name, one in rerun.items() if name != "sharded"})
    told |= {"version": checkpointing.get_checkpoint_version(), "iteration": checkpointing.get_loaded_iteration()}
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    told |= {"random": [random.getstate(), numpy.random.get_state(), torch.get_rng_state(), tracked]}
    told |= {f"argument {name}": repr(one) for name, one in vars(get_args()).items()}
    report = ds_reshard.last_report()
    return {"told": told, "report": report.to_json() if report is not None else None}


def rolled(arguments: str) -> dict[str, Any]:
    """Load, step as a run that goes on, change the weights, and load again: what either load left, and its report."""
    import ds_reshard

    ds_reshard.install("megatron")
    models, optimizer, scheduler = _setup(arguments)
    from megatron.training import checkpointing, get_args

    args, told = get_args(), []
    for turn in range(2):
        if turn:
            _go_on(models, optimizer, scheduler)
            args.iteration, _ = checkpointing.load_checkpoint(models, optimizer, scheduler, checkpointing_context={})
        report = ds_reshard.last_report()
        assert report is not None
        told.append(
            {
                "moments": {
                    bool(held[kind].any()) for _, _, held in _states(optimizer) for kind in KINDS[1:] if kind in held
                },
                "cast": _cast(optimizer),
                "steps": sorted(_steps(optimizer)),
                "counters": [args.iteration, args.consumed_train_samples, scheduler.num_steps],
                "rates": [group["lr"] for group in optimizer.param_groups],
                "rows": {row["name"]: row for row in report.to_json()["rows"]},
                "wrong": sorted({text.split()[0] for text in wrong(models, optimizer)}),
            }
        )
    return {"told": told}


def _go_on(models: Any, optimizer: Any, scheduler: Any) -> None:
    """Three updates, as far as the state shows it."""
    from megatron.training import get_args

    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for live in group["params"]:
                live.grad = torch.ones_like(live)
        one.optimizer.step()
        one.optimizer.zero_grad()
    with torch.no_grad():
        for live in (live for model in models for live in model.parameters()):
            live.add_(1.0)
    scheduler.step(12)
    get_args().iteration += 3
    get_args().consumed_train_samples += 12
    torch.rand(5)


def _cast(optimizer: Any) -> bool:
    return all(
        held["param"].equal(live.data.view(-1)[part].view(held["param"].shape).float())
        for live, part, held in _states(optimizer)
    )


def _steps(optimizer: Any) -> set[Any]:
    """Those that the next update counts on from: torch's Adam keeps them in each state, a fused one in its groups."""
    found = set[Any]()
    for one in optimizer.chained_optimizers:
        if isinstance(one.optimizer, torch.optim.AdamW):
            found |= {float(state["step"]) for state in one.optimizer.state.values()}
        else:
            assert not any("step" in state for state in one.optimizer.state.values())
            found |= {group.get("step", 0) for group in one.optimizer.param_groups if group["params"]}
    return found


def save(arguments: str, saves: list[dict[str, Any]], frozen: str) -> dict[str, Any]:
    """Save a run in which parameters of this name are frozen."""
    import format_jobs

    freeze(frozen)
    return format_jobs.save(arguments, saves)


def save_stepped(arguments: str, saves: list[dict[str, Any]]) -> dict[str, Any]:
    """Save after one update with gradients of zero, whatever the optimizer keeps."""
    models, optimizer, scheduler = _setup(arguments)
    from megatron.training import checkpointing, get_args

    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for live in group["params"]:
                live.grad = torch.zeros_like(live)
        one.optimizer.step()
    args = get_args()
    args.iteration = 1
    scheduler.step(4)
    for asked in saves:
        vars(args).update(asked, use_dist_ckpt=asked["ckpt_format"] != "torch")
        checkpointing.save_checkpoint(1, models, optimizer, scheduler, 0, checkpointing_context={})
    return {}


def freeze(name: str) -> None:
    """Parameters whose name holds `name` are not trained by the models of this process."""
    import small_gpt

    made = small_gpt._model

    def frozen(*args: Any, **more: Any) -> Any:
        model = made(*args, **more)
        for parameter in (one for key, one in model.named_parameters() if name and name in key):
            parameter.requires_grad_(False)
        return model

    small_gpt._model = frozen


def refused(
    arguments: str, own: list[str] | None = None, nodes: list[str] | None = None, frozen: str = ""
) -> dict[str, Any]:
    """The same, expected to be refused: the error, and what it had changed by then.

    Each rank has `own` arguments, and is where relative paths begin at one of `nodes`.
    """
    import ds_reshard

    freeze(frozen)
    number = int(os.environ["RANK"])
    if nodes is not None:
        os.chdir(nodes[number])
    ds_reshard.install("megatron")
    return ended(lambda: _setup(f"{arguments} {own[number] if own is not None else ''}"))


def spoiled(arguments: str, spoil: str) -> dict[str, Any]:
    """A load after which a tensor's method `spoil` changes the moments of the last rank, just before it is reported."""
    from ds_reshard.hosts.megatron import training

    verify = training._verify

    def then(load: Any) -> None:
        verify(load)
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            for _, _, held in _states(load.optimizer):
                getattr(held["exp_avg"], spoil)()

    training._verify = then
    return refused(arguments)


def wrong(models: Any, optimizer: Any) -> list[str]:
    """Tensors that are not what the rule says; rows that pad the vocabulary may be anything."""
    from megatron.training import get_args

    places, found, seen, width = _places(models), [], 0, get_args().hidden_size

    def compare(held: torch.Tensor, key: str, index: torch.Tensor, kind: str, what: str) -> None:
        nonlocal seen
        seen += held.numel()
        real = torch.ones_like(index, dtype=torch.bool)
        if "word_embeddings" in key or key.startswith("output_layer"):
            real = index < VOCABULARY * width
        same = held.detach().reshape(-1).cpu() == value(key, index, kind).to(held.dtype)
        if not bool(same[real].all()):
            found.append(f"{what} {key}: {int((~same & real).sum())} of {held.numel()}")

    for live, (key, index) in places.items():
        compare(live.data, key, index.reshape(-1), "param", "weight")
    for live, part, held in _states(optimizer):
        key, index = places[live]
        found += [f"{kind} {key}: absent" for kind in KINDS if kind not in held]
        for kind in held.keys() - {"step"}:
            compare(held[kind], key, index.reshape(-1)[part], kind, kind)
    assert seen
    return found


def wrap_names(path: str) -> dict[str, Any]:
    """Save a file of format `torch` again, its weights named as those of a compiled model."""
    held = torch.load(path, weights_only=False)
    held["model"] = {f"_orig_mod.{name}": value for name, value in held["model"].items()}
    torch.save(held, path)
    return {}


def change(path: str, name: str) -> dict[str, Any]:
    """Save a file of format `torch` again, with another value in it; it holds classes of Megatron."""
    held = torch.load(path, weights_only=False)
    if name == "schedule":
        held["opt_param_scheduler"]["num_steps"] += 4
    else:
        left: list[Any] = [held.get(name, held)]
        while not torch.is_tensor(left[0]):
            left = [*left.pop(0).values(), *left] if isinstance(left[0], dict) else left[1:]
        left[0].view(-1)[0] += 1
    torch.save(held, path)
    return {}
