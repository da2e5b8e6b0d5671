"""What becomes of an optimizer and a scheduler beside a DeepSpeed JSON: pure, and the same for hooks and `diagnose`.

Every rule is a fact about `Accelerator._prepare_deepspeed` (accelerate/accelerator.py, 1.15.0; the same text back to
0.34) and about `_configure_lr_scheduler` and `_configure_basic_optimizer` (deepspeed/runtime/engine.py, 0.19.8). The
rules about values, rather than about which objects meet, are in `values.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.hosts.accelerate.finding import REFUSED, Fill, Finding, mended, refused, told
from ds_reshard.hosts.accelerate.given import (
    CALLABLE,
    DUMMY,
    NONE,
    REAL,
    TORCH,
    GivenOptimizer,
    GivenScheduler,
    given_optimizer,
    given_scheduler,
    parameters_of,
)
from ds_reshard.hosts.accelerate.running import GivenAccelerator, counted, given_accelerator
from ds_reshard.hosts.accelerate.values import optimizer_values, scheduler_values
from ds_reshard.resume.clock import ACCELERATE, clock_in
from ds_reshard.resume.schedulers import innermost

_ADD_OPTIMIZER = (
    'add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}} to the DeepSpeed JSON, '
    "or pass torch.optim.AdamW(model.parameters(), lr=...)"
)
_ONE_SCHEDULER = 'remove "scheduler" from the DeepSpeed JSON, or pass accelerate.utils.DummyScheduler(optimizer)'
_TOGETHER = "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was given to one `prepare`, what is found about it, and what is to be set in the JSON for it to hold."""

    optimizer: GivenOptimizer
    scheduler: GivenScheduler
    findings: tuple[Finding, ...]
    fills: tuple[Fill, ...] = ()


def diagnose(
    config: Mapping[str, object],
    optimizer: object = None,
    scheduler: object = None,
    *,
    model: object = None,
    accelerator: object = None,
) -> tuple[Finding, ...]:
    """What `accelerator.prepare` makes of these, and the line to change for everything that is not as asked.

    `config` is the DeepSpeed JSON as a dict; `optimizer`, `scheduler` and `model` are what is to be prepared, or a
    list of them; with `accelerator` it is also said what only that knows, as the number of processes. Pure: nothing
    is changed, no generator consumed, no framework imported. The hooks go by the same rules.
    Raises ConfigError for a `"ds_reshard"` section that is wrong.
    """
    models = None if model is None else _listed(model)
    return examine(config, _listed(optimizer), _listed(scheduler), models, accelerator).findings


def examine(
    config: Mapping[str, object],
    optimizers: Sequence[object],
    schedulers: Sequence[object],
    models: Sequence[object] | None,
    accelerator: object,
) -> Examined:
    """As `diagnose`; `models` is None where they are not known, and empty where none is prepared with the rest."""
    optimizer = given_optimizer(optimizers[0] if optimizers else None)
    scheduler = given_scheduler(schedulers[0] if schedulers else None)
    running = given_accelerator(accelerator)
    found: list[Finding] = []
    fills: list[Fill] = []
    looks: tuple[Iterator[Finding], ...] = (
        _apart(models, optimizers, schedulers),
        _multiplicity(models or (), optimizers, schedulers),
        _twice(optimizer, models or (), running),
        _order(optimizer, scheduler, models or ()),
        _meeting(config, optimizer, scheduler),
    )
    for look in looks:
        found += look
        if any(finding.outcome == REFUSED for finding in found):
            break
    else:
        for values in (optimizer_values, scheduler_values):
            more, set_in_json = values(config, optimizer, scheduler)
            found += more
            fills += set_in_json
    found += counted(config, optimizer, scheduler, running)
    return Examined(optimizer=optimizer, scheduler=scheduler, findings=tuple(found), fills=tuple(fills))


def _apart(
    models: Sequence[object] | None, optimizers: Sequence[object], schedulers: Sequence[object]
) -> Iterator[Finding]:
    """Whether an optimizer or a scheduler is prepared without the model."""
    fresh = any(not given_optimizer(optimizer).prepared for optimizer in optimizers)
    if models is not None and not models and (fresh or schedulers):
        thing = "an optimizer" if fresh else "a scheduler"
        yield refused(
            "apart",
            "accelerator.prepare",
            f"{thing} without the model: accelerate returns it as it is, the engine knows nothing of it, and "
            "save_state leaves it out",
            f"prepare all in one call: {_TOGETHER}",
        )


def _listed(things: object) -> tuple[object, ...]:
    if things is None:
        return ()
    return tuple(things) if isinstance(things, Sequence) else (things,)


def _multiplicity(
    models: Sequence[object], optimizers: Sequence[object], schedulers: Sequence[object]
) -> Iterator[Finding]:
    if len(models) > 1:
        yield refused(
            "two-models",
            "accelerator.prepare",
            f"{len(models)} models in one prepare: DeepSpeed makes an engine of one, and accelerate refuses the others",
            "make a new Accelerator for each model",
        )
    for name, things in (("optimizer", optimizers), ("scheduler", schedulers)):
        if len(things) > 1:
            yield refused(
                f"two-{name}s",
                "accelerator.prepare",
                f"{len(things)} {name}s in one prepare: accelerate keeps the last, gives it back for all of them, "
                "and the others' parameters are never " + ("trained" if name == "optimizer" else "scheduled"),
                "pass one optimizer with several param groups: DummyOptim([{'params': a}, {'params': b, 'lr': ...}])"
                if name == "optimizer"
                else "join them: torch.optim.lr_scheduler.ChainedScheduler([first, second])",
            )


def _twice(optimizer: GivenOptimizer, models: Sequence[object], running: GivenAccelerator) -> Iterator[Finding]:
    """What an engine has already: it would be given a second optimizer, or the second engine its moments."""
    engines = [model for model in models if hasattr(model, "basic_optimizer") or model in running.modules]
    name = "DummyOptim" if optimizer.kind == DUMMY else "optimizer"
    if optimizer.prepared or engines:
        yield refused(
            "prepared-twice",
            name if optimizer.prepared else "model",
            "has been prepared already, and belongs to that engine",
            "go on with what the first prepare has returned; or make a new model, optimizer and Accelerator",
        )


def _order(optimizer: GivenOptimizer, scheduler: GivenScheduler, models: Sequence[object]) -> Iterator[Finding]:
    if optimizer.edited:
        yield refused(
            "params-written",
            "DummyOptim",
            "was given other parameters in its param_groups, of which DeepSpeed is not told",
            "DummyOptim([{'params': ...}]) with these parameters, or optimizer.add_param_group({'params': ...})",
        )
    if not any(optimizer.sizes) and None not in optimizer.sizes and optimizer.kind != NONE:
        yield refused(
            "no-parameters",
            "optimizer",
            "holds no parameter: a generator such as model.parameters() gives them once",
            "pass list(model.parameters())",
        )
    yield from _of_another_model(optimizer, models)
    if optimizer.scheduled and scheduler.over is not optimizer.thing:
        yield told(
            "scheduler-left-out",
            "DummyOptim",
            "a scheduler was built on it and is not in this prepare: the script alone steps it, and save_state leaves "
            "it out",
            f"prepare it, too: {_TOGETHER}",
        )
    if scheduler.over is not None and scheduler.over is not innermost(optimizer.thing):
        yield refused(
            "foreign-scheduler",
            "scheduler",
            "is built on an optimizer that is not in this prepare: it moves the rates of an optimizer that nothing "
            "trains with, and the real one's stay",
            f"pass the optimizer it was built on: {_TOGETHER}",
        )


def _of_another_model(optimizer: GivenOptimizer, models: Sequence[object]) -> Iterator[Finding]:
    """Parameters of the optimizer that the model does not have, and that so never get a gradient from it."""
    own = {id(parameter) for model in models for parameter in model.parameters()}  # type: ignore[attr-defined]
    others = [parameter for parameter in parameters_of(optimizer.thing) if id(parameter) not in own]
    if models and others:
        yield refused(
            "other-model",
            "optimizer",
            f"{len(others)} of its parameters are not the model's: they are never trained",
            "build the optimizer from model.parameters() of the model that is prepared with it",
        )


def _meeting(config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Iterator[Finding]:
    """Which optimizer meets which scheduler and which sections of the JSON."""
    in_json = "optimizer" in config
    if optimizer.kind == DUMMY and not in_json:
        yield refused(
            "no-json-optimizer",
            "DummyOptim",
            "stands for the optimizer of the DeepSpeed JSON, which has none",
            _ADD_OPTIMIZER,
        )
    if optimizer.kind == REAL and in_json:
        yield refused(
            "two-sources-of-optimizer",
            "optimizer",
            "is given in the script and in the DeepSpeed JSON",
            'remove "optimizer" from the DeepSpeed JSON, or pass accelerate.utils.DummyOptim(params, lr=...)',
        )
    if optimizer.kind == NONE and scheduler.kind != NONE and not in_json:
        yield refused("scheduler-alone", "scheduler", "there is no optimizer that it could drive", _ADD_OPTIMIZER)
    zero = config.get("zero_optimization")
    if any(optimizer.frozen) and isinstance(zero, Mapping) and zero.get("stage") in (1, 2):
        yield refused(
            "frozen-group",
            "optimizer",
            f"param group {optimizer.frozen.index(True)} has no parameter that requires a gradient, and ZeRO 1 and 2 "
            "fail over it",
            "leave it out: [p for p in params if p.requires_grad]",
        )
    yield from _schedulers_meet(config, optimizer, scheduler)


def _schedulers_meet(
    config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler
) -> Iterator[Finding]:
    in_json, kind = "scheduler" in config, scheduler.kind
    if in_json and kind == TORCH:
        yield refused(
            "two-sources-of-scheduler", "scheduler", "is given in the script and in the DeepSpeed JSON", _ONE_SCHEDULER
        )
    elif in_json and kind == CALLABLE:
        winner = "the JSON's is ignored" if optimizer.kind == DUMMY else "the callable is ignored"
        yield refused(
            "two-sources-of-scheduler",
            "lr_scheduler_callable",
            f'and the scheduler of the DeepSpeed JSON are both given: {winner}, silently where the JSON has no "auto"',
            'remove "scheduler" from the DeepSpeed JSON, or leave out lr_scheduler_callable',
        )
    elif kind == DUMMY and not in_json:
        yield refused(
            "no-json-scheduler",
            "DummyScheduler",
            "stands for the scheduler of the DeepSpeed JSON, which has none",
            "DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, ...)), or add "
            '"scheduler" to the DeepSpeed JSON',
        )
    elif kind == CALLABLE and optimizer.kind != DUMMY:
        yield mended(
            "dropped-callable",
            "lr_scheduler_callable",
            "accelerate hands it on beside a DummyOptim alone, and drops it here: the rate stays constant",
            "DummyOptim in place of the optimizer, or the scheduler itself in place of DummyScheduler",
        )
    elif scheduler.unknown and optimizer.kind != DUMMY:
        yield mended(
            "unknown-scheduler",
            type(scheduler.thing).__name__,
            "is no scheduler to accelerate, which returns it as it is, and save_state leaves it out",
            "nothing to change with the hooks; without them accelerator.register_for_checkpointing(scheduler)",
        )
    elif kind == TORCH and optimizer.kind == DUMMY:
        yield mended(
            "scheduler-on-placeholder",
            "scheduler",
            "is built on a DummyOptim: accelerate takes none but a DummyScheduler beside it",
            "nothing to change with the hooks; without them DummyScheduler(optimizer, lr_scheduler_callable=...)",
        )
    elif in_json and kind == NONE:
        yield told(
            "json-scheduler-unseen",
            "scheduler of the DeepSpeed JSON",
            "runs inside engine.step, though no scheduler is prepared",
            "pass accelerate.utils.DummyScheduler(optimizer) to see it, or remove it from the JSON",
        )
    if in_json and clock_in(config) == ACCELERATE:
        yield refused(
            "json-scheduler-clock",
            "ds_reshard.accelerate.clock",
            'is "accelerate", and a scheduler of the DeepSpeed JSON is always stepped by the engine',
            'remove the clock, or the "scheduler" of the DeepSpeed JSON',
        )
