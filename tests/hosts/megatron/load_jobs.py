"""On each rank: a GPT that Megatron sets up and loads with the hooks on, every element compared with the rule."""

from __future__ import annotations

import os
from typing import Any

import torch
from format_jobs import KINDS, _places, _setup, _states, value
from small_gpt import ended

VOCABULARY = 99


def load(arguments: str, hooks: bool = True, frozen: str = "", extra: str = "") -> dict[str, Any]:
    """Set up with `--load`: what of weights, masters and moments differs from what was saved, and the counters."""
    import ds_reshard

    freeze(frozen)
    extend(extra)
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
        "extra": [one.tolist() for model in models for name, one in model.state_dict().items() if name.endswith(EXTRA)],
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
            found |= {float(state.get("step", 0)) for state in one.optimizer.state.values()}
        else:
            assert not any("step" in state for state in one.optimizer.state.values())
            found |= {group.get("step", 0) for group in one.optimizer.param_groups if group["params"]}
    return found


def save(
    arguments: str, saves: list[dict[str, Any]], frozen: str = "", extra: str = "", around: str = ""
) -> dict[str, Any]:
    """Save a run in which parameters of this name are frozen, with a tensor more, or inside another module."""
    import format_jobs

    freeze(frozen)
    extend(extra, 2.0)
    wrap(around)
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


EXTRA = "mlp.extra_scale"


def extend(kind: str, value: float = 0.5) -> None:
    """The first MLP has a tensor more, of which its `sharded_state_dict` says nothing: a parameter, or a buffer."""
    import small_gpt

    made = small_gpt._model
    if not kind:
        return

    def extended(*args: Any, **more: Any) -> Any:
        model = made(*args, **more)
        first = next(module for name, module in model.named_modules() if name.endswith("mlp"))
        held = torch.full((4,), value)
        if kind == "buffer":
            first.register_buffer("extra_scale", held)
        else:
            first.extra_scale = torch.nn.Parameter(held, requires_grad=kind == "trained")
        return model

    small_gpt._model = extended


def wrap(name: str) -> None:
    """The model is inside another module, by this name."""
    import format_jobs
    import small_gpt

    made = small_gpt._model
    if not name:
        return

    def wrapped(*args: Any, **more: Any) -> Any:
        from megatron.core.transformer.module import MegatronModule

        inner = made(*args, **more)
        outer = MegatronModule(inner.config)
        setattr(outer, name, inner)
        outer.set_input_tensor = inner.set_input_tensor
        return outer

    small_gpt._model = wrapped
    format_jobs.value = lambda key, *where: value(key.removeprefix(f"{name}."), *where)  # as of the model inside


def refused(
    arguments: str, own: list[str] | None = None, nodes: list[str] | None = None, frozen: str = "", extra: str = ""
) -> dict[str, Any]:
    """The same, expected to be refused: the error, and what it had changed by then.

    Each rank has `own` arguments, and is where relative paths begin at one of `nodes`.
    """
    import ds_reshard

    freeze(frozen)
    extend(extra)
    number = int(os.environ["RANK"])
    if nodes is not None:
        os.chdir(nodes[number])
    ds_reshard.install("megatron")
    return ended(lambda: _setup(f"{arguments} {own[number] if own is not None else ''}"))


def tried(arguments: str, frozen: str = "", adam: bool = False, settings: str = "") -> dict[str, Any]:
    """A load as `load` makes it, or the faults of its refusal; `settings` are those of the environment.

    `adam` is whether the run steps by torch's own.
    """
    import ds_reshard
    from ds_reshard.errors import ReshardError
    from ds_reshard.hosts.fsdp.settings import ask_settings

    if adam:
        import torch_adam

        torch_adam._fall_back()
    ds_reshard.install("megatron")
    if settings:
        ask_settings(settings, place="DS_RESHARD_SETTINGS")
    try:
        return {"refused": None, "faults": (), **load(arguments, frozen=frozen)}
    except ReshardError as error:
        return {"refused": type(error).__name__, "faults": [(one.where, one.what, one.mend) for one in error.faults]}


def stranger(path: str) -> dict[str, Any]:
    """Save a file of format `torch` again, with classes in it that no allow-list knows."""
    from unlisted_class import Stranger

    held = torch.load(path, weights_only=False)
    held["args"].own = [Stranger(1)]
    torch.save(held, path)
    return {}


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
