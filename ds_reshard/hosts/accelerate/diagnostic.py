"""What becomes of an optimizer and a scheduler beside a DeepSpeed JSON: pure, and the same for hooks and `diagnose`.

Every rule is a fact about `Accelerator._prepare_deepspeed` (accelerate/accelerator.py, 1.15.0; the same text back to
0.34) and about `_configure_lr_scheduler` and `_configure_basic_optimizer` (deepspeed/runtime/engine.py, 0.19.8).
accelerate forwards `lr` and `weight_decay` of a DummyOptim alone, and these only over an `"auto"` (`config_kwargs`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, PrepareError
from ds_reshard.hosts.accelerate.prepare_arguments import (
    CALLABLE,
    DEFAULT_LR,
    DEFAULT_WEIGHT_DECAY,
    DUMMY,
    NONE,
    REAL,
    TORCH,
    GivenOptimizer,
    GivenScheduler,
    given_optimizer,
    parameters_of,
    parts,
    trains,
)
from ds_reshard.resume.schedulers import ACCELERATE, ENGINE, clock_in, innermost, may_be_multiplied

if TYPE_CHECKING:
    from accelerate import Accelerator

REFUSED, MENDED, TOLD = "refused", "mended", "told"
AUTO = "auto"
BACKWARD = "make a new Accelerator for each model, or call model.backward(loss) and model.step() of the engine itself"
_ADD_OPTIMIZER = (
    'add "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}} to the DeepSpeed JSON, '
    "or pass torch.optim.AdamW(model.parameters(), lr=...)"
)
_ONE_SCHEDULER = 'remove "scheduler" from the DeepSpeed JSON, or pass accelerate.utils.DummyScheduler(optimizer)'
_TOGETHER = "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)"
_CLOCK = '"ds_reshard": {"accelerate": {"clock": "%s"}} in the DeepSpeed JSON'
# At position 0 they are where they were before it (`_get_gamma` in deepspeed/runtime/lr_schedules.py, 0.19.8).
_WARM_UPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# The parameter that overwrites every group's rate, and its default (deepspeed/runtime/lr_schedules.py, 0.19.8).
# WarmupLR without it takes the groups' own since 0.16; WarmupCosineLR always does.
_RATE = {
    "WarmupLR": ("warmup_max_lr", None),
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_max_lr", None),
    "LRRangeTest": ("lr_range_test_min_lr", 0.001),
}
# Whose lists of a value for each group are known (`PER_GROUP` in late_optimizer.py).
_KNOWN = ("torch.optim.", "transformers.", "deepspeed.runtime.lr_schedules")
_FILLED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")

ENGINE_CLOCK = "engine-clock"
_NO_WARM_UP = 'for none, remove "scheduler" from the JSON, and pass a scheduler without warm-up'

Config = Mapping[str, object]
# By section ("optimizer" or "scheduler") and name: parameters of the DeepSpeed JSON.
Values = dict[tuple[str, str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`what` accelerate does by itself, and the line to change (`mend`).

    `outcome` is what the hooks make of it: "refused" (a PrepareError), "mended" (done as asked, and logged), or
    "told" (left as it is, and logged). `rule` names the finding, whatever its text.
    """

    rule: str
    outcome: str
    where: str
    what: str
    mend: str

    def fault(self) -> Fault:
        return PrepareError.fault(self.where, self.what, mend=self.mend)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.mend}"


def _finding(outcome: str, rule: str, where: str, what: str, mend: str) -> Finding:
    return Finding(rule=rule, outcome=outcome, where=where, what=what, mend=mend)


refused, mended, told = (partial(_finding, outcome) for outcome in (REFUSED, MENDED, TOLD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was given to one `prepare`, what is found about it, and what is to be set in the JSON for it to hold."""

    optimizer: GivenOptimizer
    scheduler: GivenScheduler
    findings: tuple[Finding, ...]
    fills: Values


def diagnose(
    config: Config,
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


def _listed(things: object) -> Sequence[object]:
    if things is None:
        return ()
    return things if isinstance(things, Sequence) else (things,)


def examine(
    config: Config,
    optimizers: Sequence[object],
    schedulers: Sequence[object],
    models: Sequence[object] | None,
    accelerator: Accelerator | None,
) -> Examined:
    """As `diagnose`; `models` is None where they are not known, and empty where none is prepared with the rest."""
    optimizer = given_optimizer(optimizers[0] if optimizers else None)
    scheduler = GivenScheduler(thing=schedulers[0] if schedulers else None)
    found: list[Finding] = []
    fills: Values = {}
    looks: tuple[Iterator[Finding], ...] = (
        _apart(models, optimizers, schedulers),
        _multiplicity(models or (), optimizers, schedulers),
        _twice(optimizer, models or (), accelerator),
        _order(optimizer, scheduler, models or ()),
        _meeting(config, optimizer, scheduler),
    )
    for look in looks:
        found += look
        if any(finding.outcome == REFUSED for finding in found):
            break
    else:
        found += _optimizer_values(config, optimizer, scheduler, fills, alone=models is None)
        found += _scheduler_values(config, optimizer, scheduler, fills)
    if accelerator is not None:
        found += _beside_accelerator(config, optimizer, accelerator)
    found += _stepped(config, optimizer, scheduler, accelerator)
    return Examined(optimizer=optimizer, scheduler=scheduler, findings=tuple(found), fills=fills)


def _apart(
    models: Sequence[object] | None, optimizers: Sequence[object], schedulers: Sequence[object]
) -> Iterator[Finding]:
    """Whether an optimizer or a scheduler is prepared without the model."""
    fresh = any(not given_optimizer(optimizer).prepared for optimizer in optimizers)
    if models is not None and not models and (fresh or schedulers):
        what = (
            f"{'an optimizer' if fresh else 'a scheduler'} without the model: accelerate returns it as it is, the "
            "engine knows nothing of it, and save_state leaves it out"
        )
        yield refused("apart", "accelerator.prepare", what, f"prepare all in one call: {_TOGETHER}")


def _multiplicity(
    models: Sequence[object], optimizers: Sequence[object], schedulers: Sequence[object]
) -> Iterator[Finding]:
    where = "accelerator.prepare"
    if len(models) > 1:
        what = (
            f"{len(models)} models in one prepare: DeepSpeed makes an engine of one, and accelerate refuses the others"
        )
        yield refused("two-models", where, what, "make a new Accelerator for each model")
    one_optimizer = (
        "pass one optimizer with several param groups: DummyOptim([{'params': a}, {'params': b, 'lr': ...}])"
    )
    one_scheduler = "join them: torch.optim.lr_scheduler.ChainedScheduler([first, second])"
    for name, things, verb, mend in (
        ("optimizer", optimizers, "trained", one_optimizer),
        ("scheduler", schedulers, "scheduled", one_scheduler),
    ):
        if len(things) > 1:
            what = (
                f"{len(things)} {name}s in one prepare: accelerate keeps the last, gives it back for all of them, "
                f"and the others' parameters are never {verb}"
            )
            yield refused(f"two-{name}s", where, what, mend)


def _twice(optimizer: GivenOptimizer, models: Sequence[object], accelerator: Accelerator | None) -> Iterator[Finding]:
    """What an engine has already: it would be given a second optimizer, or the second engine its moments."""
    inside = [getattr(engine, "module", None) for engine in accelerator._models] if accelerator is not None else []
    name = "DummyOptim" if optimizer.kind == DUMMY else "optimizer"
    if optimizer.prepared or any(hasattr(model, "basic_optimizer") or model in inside for model in models):
        yield refused(
            "prepared-twice",
            name if optimizer.prepared else "model",
            "has been prepared already, and belongs to that engine",
            "go on with what the first prepare has returned; or make a new model, optimizer and Accelerator",
        )


def _order(optimizer: GivenOptimizer, scheduler: GivenScheduler, models: Sequence[object]) -> Iterator[Finding]:
    if optimizer.edited:
        what = "was given other parameters in its param_groups, of which DeepSpeed is not told"
        mend = "DummyOptim([{'params': ...}]) with these parameters, or optimizer.add_param_group({'params': ...})"
        yield refused("params-written", "DummyOptim", what, mend)
    if not any(optimizer.sizes) and None not in optimizer.sizes and optimizer.kind != NONE:
        what = "holds no parameter: a generator such as model.parameters() gives them once"
        yield refused("no-parameters", "optimizer", what, "pass list(model.parameters())")
    own = {id(parameter) for model in models for parameter in model.parameters()}  # type: ignore[attr-defined]
    others = [parameter for parameter in parameters_of(optimizer.thing) if id(parameter) not in own]
    if models and others:
        what = f"{len(others)} of its parameters are not the model's: they are never trained"
        mend = "build the optimizer from model.parameters() of the model that is prepared with it"
        yield refused("other-model", "optimizer", what, mend)
    if optimizer.scheduled and scheduler.over is not optimizer.thing:
        what = (
            "a scheduler was built on it and is not in this prepare: the script alone steps it, and save_state leaves "
            "it out"
        )
        yield told("scheduler-left-out", "DummyOptim", what, f"prepare it, too: {_TOGETHER}")
    if scheduler.over is not None and scheduler.over is not innermost(optimizer.thing):
        what = (
            "is built on an optimizer that is not in this prepare: it moves the rates of an optimizer that nothing "
            "trains with, and the real one's stay"
        )
        yield refused("foreign-scheduler", "scheduler", what, f"pass the optimizer it was built on: {_TOGETHER}")


def _meeting(config: Config, optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Iterator[Finding]:
    """Which optimizer meets which scheduler and which sections of the JSON."""
    in_json = "optimizer" in config
    if optimizer.kind == DUMMY and not in_json:
        what = "stands for the optimizer of the DeepSpeed JSON, which has none"
        yield refused("no-json-optimizer", "DummyOptim", what, _ADD_OPTIMIZER)
    if optimizer.kind == REAL and in_json:
        what = "is given in the script and in the DeepSpeed JSON"
        mend = 'remove "optimizer" from the DeepSpeed JSON, or pass accelerate.utils.DummyOptim(params, lr=...)'
        yield refused("two-sources-of-optimizer", "optimizer", what, mend)
    if optimizer.kind == NONE and scheduler.kind != NONE and not in_json:
        yield refused("scheduler-alone", "scheduler", "there is no optimizer that it could drive", _ADD_OPTIMIZER)
    zero = config.get("zero_optimization")
    if any(optimizer.frozen) and isinstance(zero, Mapping) and zero.get("stage") in (1, 2):
        number = optimizer.frozen.index(True)
        what = f"param group {number} has no parameter that requires a gradient, and ZeRO 1 and 2 fail over it"
        yield refused("frozen-group", "optimizer", what, "leave it out: [p for p in params if p.requires_grad]")
    yield from _schedulers_meet(config, optimizer, scheduler)


def _schedulers_meet(config: Config, optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Iterator[Finding]:
    in_json, kind = "scheduler" in config, scheduler.kind
    if in_json and kind == TORCH:
        what = "is given in the script and in the DeepSpeed JSON"
        yield refused("two-sources-of-scheduler", "scheduler", what, _ONE_SCHEDULER)
    elif in_json and kind == CALLABLE:
        winner = "the JSON's is ignored" if optimizer.kind == DUMMY else "the callable is ignored"
        what = (
            f'and the scheduler of the DeepSpeed JSON are both given: {winner}, silently where the JSON has no "auto"'
        )
        mend = 'remove "scheduler" from the DeepSpeed JSON, or leave out lr_scheduler_callable'
        yield refused("two-sources-of-scheduler", "lr_scheduler_callable", what, mend)
    elif kind == DUMMY and not in_json:
        what = "stands for the scheduler of the DeepSpeed JSON, which has none"
        mend = (
            "DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, ...)), or add "
            '"scheduler" to the DeepSpeed JSON'
        )
        yield refused("no-json-scheduler", "DummyScheduler", what, mend)
    elif kind == CALLABLE and optimizer.kind != DUMMY:
        what = "accelerate hands it on beside a DummyOptim alone, and drops it here: the rate stays constant"
        mend = "DummyOptim in place of the optimizer, or the scheduler itself in place of DummyScheduler"
        yield mended("dropped-callable", "lr_scheduler_callable", what, mend)
    elif scheduler.unknown and optimizer.kind != DUMMY:
        what = "is no scheduler to accelerate, which returns it as it is, and save_state leaves it out"
        mend = "nothing to change with the hooks; without them accelerator.register_for_checkpointing(scheduler)"
        yield mended("unknown-scheduler", type(scheduler.thing).__name__, what, mend)
    elif kind == TORCH and optimizer.kind == DUMMY:
        what = "is built on a DummyOptim: accelerate takes none but a DummyScheduler beside it"
        mend = "nothing to change with the hooks; without them DummyScheduler(optimizer, lr_scheduler_callable=...)"
        yield mended("scheduler-on-placeholder", "scheduler", what, mend)
    elif in_json and kind == NONE:
        what = "runs inside engine.step, though no scheduler is prepared"
        mend = "pass accelerate.utils.DummyScheduler(optimizer) to see it, or remove it from the JSON"
        yield told("json-scheduler-unseen", "scheduler of the DeepSpeed JSON", what, mend)
    if in_json and clock_in(config) == ACCELERATE:
        what = 'is "accelerate", and a scheduler of the DeepSpeed JSON is always stepped by the engine'
        mend = 'remove the clock, or the "scheduler" of the DeepSpeed JSON'
        yield refused("json-scheduler-clock", "ds_reshard.accelerate.clock", what, mend)


def params_of(config: Config, section: str) -> Mapping[str, object]:
    """The parameters of the JSON's optimizer or scheduler."""
    found = config.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _optimizer_values(
    config: Config, optimizer: GivenOptimizer, scheduler: GivenScheduler, fills: Values, *, alone: bool
) -> list[Finding]:
    """What the JSON's optimizer and a DummyOptim say of the same value; `fills` gets what is to be set in the JSON.

    With `alone` nothing is known but the JSON: Hugging Face's Trainer fills what is "auto" there by its own arguments.
    """
    found: list[Finding] = []
    params = params_of(config, "optimizer")
    if "optimizer" not in config or optimizer.kind == REAL:
        return found
    for name, value in optimizer.arguments.items():
        said = params.get(name, AUTO)
        if said != AUTO and not same(said, value):
            what = f"the DeepSpeed JSON says {name} {said!r}, which accelerate takes without a word"
            mend = f'write "{name}": "auto" into optimizer.params of the JSON, or leave {name} out of DummyOptim'
            found.append(refused("contradiction", f"DummyOptim({name}={value!r})", what, mend))
        elif said == AUTO and not (name in ("lr", "weight_decay") and name in params):
            there = 'is "auto"' if name in params else "has none"
            what = f"{name}={value!r} is not handed on by accelerate, as the DeepSpeed JSON {there}"
            mend = f'write "{name}": {_json(value)} into optimizer.params'
            found.append(mended("not-forwarded", "DummyOptim", what, mend))
            fills["optimizer", name] = value
    for name, value in params.items():
        if value == AUTO and name not in optimizer.arguments:
            found += _unfilled(name, optimizer, alone=alone)
    scheduled = scheduler.kind == TORCH or optimizer.scheduled
    if scheduled and optimizer.begun and not any(finding.outcome == REFUSED for finding in found):
        found += _early(params, optimizer)
    return found


def _unfilled(name: str, optimizer: GivenOptimizer, *, alone: bool) -> Iterator[Finding]:
    where, mend = f"optimizer.params.{name}", f"pass DummyOptim(params, {name}=...)"
    if alone and optimizer.kind == NONE:
        what = 'is "auto": Hugging Face\'s Trainer fills it by its arguments; without it a DummyOptim must say it'
        yield told("auto-needs-object", where, what, mend)
    elif name not in ("lr", "weight_decay"):
        what, mend = 'is "auto", and nothing says what it is to be', f"write a value, or DummyOptim(params, {name}=...)"
        yield refused("unfilled-auto", where, what, mend)
    elif optimizer.kind == NONE:
        yield told("auto-needs-object", where, 'is "auto": a DummyOptim must say what it is to be', mend)
    elif not all(name in group for group in optimizer.groups):
        default = DEFAULT_LR if name == "lr" else DEFAULT_WEIGHT_DECAY
        what = f'is "auto", and DummyOptim was given no {name}: it becomes {default}, the default of DummyOptim'
        yield told("default-taken", where, what, f"DummyOptim(params, {name}=...)")


def _early(params: Mapping[str, object], optimizer: GivenOptimizer) -> Iterator[Finding]:
    """A scheduler on a placeholder that was made before the JSON was known, and so with other rates."""
    wanted, began = rates(params, optimizer), [group["lr"] for group in optimizer.begun]
    if not same(began, wanted):
        what = (
            f"was made before the Accelerator, so that the scheduler on it goes by the rates {began}, not by the "
            f"DeepSpeed JSON's {wanted}"
        )
        mend = "make the Accelerator first, or say DummyOptim(lr=...)"
        yield refused("early-placeholder", "DummyOptim", what, mend)
        return
    said = params.get("betas", AUTO)
    cycled = [group["betas"] for group in optimizer.written if "betas" in group]
    others = [now for now in cycled if said != AUTO and not same(now[1:], said[1:])]  # type: ignore[index]
    if others and "betas" not in optimizer.arguments:
        what = f"was made before the Accelerator: its scheduler cycles the betas {others[0]}, not the JSON's {said}"
        yield refused("early-placeholder", "DummyOptim", what, "make the Accelerator first")


def rates(params: Mapping[str, object], optimizer: GivenOptimizer) -> list[object]:
    """Each param group's rate: its own, else the user's, else the JSON's, else the default."""
    said = params.get("lr", AUTO)
    base = optimizer.arguments.get("lr", DEFAULT_LR if said == AUTO else said)
    return [group.get("lr", base) for group in optimizer.groups]


def _scheduler_values(
    config: Config, optimizer: GivenOptimizer, scheduler: GivenScheduler, fills: Values
) -> Iterator[Finding]:
    """What the JSON's scheduler does to rates, and which of its values nobody gives."""
    if "scheduler" not in config:
        yield from _built_groups(optimizer, scheduler)
        return
    section, params = config["scheduler"], params_of(config, "scheduler")
    kind = str(section.get("type")) if isinstance(section, Mapping) else ""
    if kind == "ReduceLROnPlateau":
        what = "is stepped by the engine with the batch size as its metric"
        mend = 'remove "scheduler" from the JSON, and pass ReduceLROnPlateau(optimizer) built in the script'
        yield refused("plateau-metric", "scheduler.type", what, mend)
    if params.get("warmup_num_steps") == 0 and not isinstance(params["warmup_num_steps"], bool):
        what = "0 is refused by DeepSpeed since 0.19.6, and is 2, as before it: two updates at the lowest rate"
        yield mended("warmup-zero", "scheduler.params.warmup_num_steps", what, _NO_WARM_UP)
        fills["scheduler", "warmup_num_steps"] = 2
    if any("lr" in group for group in optimizer.written) and not optimizer.scheduled:
        what = "its lr was changed in param_groups, and the JSON's scheduler goes by the lr that it was made with"
        yield refused("rate-written", "DummyOptim", what, "DummyOptim([{'params': ..., 'lr': ...}])")
    yield from _autos(params, optimizer, scheduler)
    yield from _rates(kind, params, rates(params_of(config, "optimizer"), optimizer), optimizer, fills)


def _autos(params: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Iterator[Finding]:
    autos = [name for name, value in params.items() if value == AUTO]
    if scheduler.kind == NONE and autos:
        finding = told if optimizer.kind == NONE else refused
        what = f'{", ".join(autos)} of the scheduler are "auto": a DummyScheduler alone fills them'
        mend = "pass accelerate.utils.DummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...)"
        yield finding("auto-needs-object", "scheduler.params", what, mend)
        return
    warmup, total = (getattr(scheduler.thing, f"{name}_num_steps", None) for name in ("warmup", "total"))
    for name in autos:
        if name not in _FILLED and not (name == "total_num_steps" and total is not None):
            what, mend = 'is "auto", and nothing fills it', f"write a value, or DummyScheduler(optimizer, {name}=...)"
            yield refused("unfilled-auto", f"scheduler.params.{name}", what, mend)
    if "warmup_num_steps" in autos and warmup == 0:
        what = "a warm-up of 0 becomes 2: two updates at the lowest rate"
        yield told("warmup-zero", "DummyScheduler", what, _NO_WARM_UP)
    if "total_num_steps" in autos and total is not None and warmup:
        what = "total_num_steps is divided by the number of processes, warmup_num_steps is not"
        yield told("warmup-undivided", "DummyScheduler", what, "write both as numbers of updates into the JSON")


def _rates(
    kind: str, params: Mapping[str, object], of_groups: Sequence[object], optimizer: GivenOptimizer, fills: Values
) -> Iterator[Finding]:
    """Whether the JSON's scheduler leaves each param group at its own rate."""
    name, default = _RATE.get(kind, (None, None))
    if name is None or optimizer.kind == NONE:
        return
    where, value, dummy = f"scheduler.params.{name}", params.get(name, default), optimizer.kind == DUMMY
    each = [rate for rate, size in zip(of_groups, optimizer.sizes, strict=True) if size != 0]
    one = each[0] if all(same(rate, each[0]) for rate in each) else None
    wanted = each if one is None else one
    if value == AUTO:
        fills["scheduler", name] = wanted
        defaults: Mapping[str, object] = optimizer.arguments if dummy else getattr(optimizer.thing, "defaults", {})
        filled = defaults.get("lr", DEFAULT_LR)
        if one is None or not same(one, filled):
            what = f"accelerate gives all param groups the rate {filled!r} in place of {each}"
            mend = f'write "{name}": {_json(wanted)} into scheduler.params of the JSON'
            yield mended("rates-erased", where, what, mend)
    elif not (value is None or isinstance(value, (list, tuple)) or (one is not None and same(one, value))):
        said = dummy and any("lr" in given for given in (optimizer.arguments, *optimizer.groups))
        finding = refused if one is None or said else told
        what = f"{value!r} replaces the rates {each} of the param groups"
        yield finding("rates-erased", where, what, f'write "{name}": "auto", or {_json(wanted)}')


def _built_groups(optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Iterator[Finding]:
    """Whether a scheduler that is built has the param groups that DeepSpeed will have."""
    if scheduler.kind not in (TORCH, CALLABLE):
        return
    count = len(optimizer.sizes)
    held = list(parts(scheduler.thing)) if scheduler.kind == TORCH else []
    for part in held if count else ():
        built = len(vars(part).get("base_lrs") or [None] * count)
        if built != count:
            what = f"was built over {built} param groups, and the optimizer has {count}: its first step fails"
            yield refused("group-after-scheduler", "scheduler", what, "add_param_group before the scheduler is built")
            return
    empty = [number for number, size in enumerate(optimizer.sizes) if size == 0]
    if empty:
        finding = told if scheduler.kind == CALLABLE else mended
        what = f"param group {', '.join(map(str, empty))} has no parameter: DeepSpeed takes it out, and "
        if scheduler.kind == CALLABLE:
            what += f"lr_scheduler_callable is given {count - len(empty)} groups"
        else:
            what += (
                "the scheduler built before fails at its first step (torch 2.10 and later), or moves the wrong groups"
            )
        if not all(type(part).__module__.startswith(_KNOWN) for part in held):
            finding = refused
        mend = "build the optimizer from [group for group in groups if group['params']]"
        yield finding("empty-group", "optimizer", what, mend)


def same(one: object, other: object) -> bool:
    """Whether two values, of a script and of a JSON, are one."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return float(one) == float(other)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return one == other


def _json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _beside_accelerator(config: Config, optimizer: GivenOptimizer, accelerator: Accelerator) -> Iterator[Finding]:
    """Processes, engines and micro-batches that only the accelerator knows of."""
    distributed = sys.modules.get("torch.distributed")
    begun = distributed is not None and distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if distributed is not None and begun else 1
    if accelerator.num_processes != world:
        what = (
            f"is {accelerator.num_processes}, and {world} processes train: batch sizes, schedules and checkpoints are "
            "wrong"
        )
        mend = (
            'call accelerate.PartialState(backend="gloo") before the Accelerator is built, or write '
            'Accelerator(..., kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])'
        )
        yield refused("alone", "accelerator.num_processes", what, mend)
    if any(map(trains, accelerator._models)) and optimizer.kind != NONE:
        what = (
            "is called a second time: accelerator.backward goes to the engine of the first alone, and this model is "
            "not trained by it; with the hooks it is an error"
        )
        yield told("second-engine", "accelerator.prepare", what, BACKWARD)
    said, own = config.get("gradient_accumulation_steps"), accelerator.gradient_accumulation_steps
    if isinstance(said, int) and own not in (1, said):
        what = f"is {own} in the Accelerator and {said} in the DeepSpeed JSON, which wins"
        mend = 'write "auto" into the JSON, or leave it out of Accelerator(...)'
        yield told("two-accumulations", "gradient_accumulation_steps", what, mend)


def is_the_scripts(optimizer: GivenOptimizer, scheduler: GivenScheduler) -> bool:
    """Whether a scheduler is one that the script built, and not the engine's: DeepSpeed's own, on a real optimizer."""
    return scheduler.kind == TORCH and (optimizer.kind == DUMMY or not scheduler.of_deepspeed)


def _stepped(
    config: Config, optimizer: GivenOptimizer, scheduler: GivenScheduler, accelerator: Accelerator | None
) -> Iterator[Finding]:
    """Who steps the schedule, where another path would step it otherwise, and its first updates."""
    clock, section, kind = clock_in(config), config.get("scheduler"), scheduler.kind
    in_json = "scheduler" in config
    if clock is not None and kind == NONE and optimizer.kind != NONE and not in_json:
        what = (
            "holds for a scheduler in this prepare, and there is none: one that is made later is stepped as without it"
        )
        mend = "pass the scheduler to the same accelerator.prepare(...), or leave the clock out"
        yield told("clock-unused", "ds_reshard.accelerate.clock", what, mend)
    by_script = accelerator is not None and not accelerator.step_scheduler_with_optimizer
    by_engine = clock != ACCELERATE
    if clock is None and not in_json and is_the_scripts(optimizer, scheduler):
        by_engine = optimizer.kind == DUMMY and not by_script
        processes = accelerator.num_processes if accelerator is not None else "num_processes"
        once = processes == 1 or by_script or (accelerator is not None and accelerator.split_batches)
        if not by_engine and not once and not scheduler.unknown:
            what = (
                f"takes {processes} steps an update, one for each process, and one with split_batches; a DummyOptim's "
                "takes one"
            )
            mend = f"count its steps so, or write {_CLOCK % ENGINE} for one step an update"
            yield told("steps-per-process", "scheduler", what, mend)
        if by_engine and not once and not scheduler.unknown and may_be_multiplied(scheduler.thing, processes):
            what = (
                f"is stepped once an update by the engine: where its lengths are multiplied by the {processes} "
                "processes, as for accelerate, it is that much too slow"
            )
            mend = f"then write {_CLOCK % ACCELERATE}, else {_CLOCK % ENGINE}"
            yield told(ENGINE_CLOCK, "scheduler", what, mend)
    if by_engine and kind == CALLABLE and clock is None:
        what = (
            "what it makes is stepped by the engine once an update, whether the script steps it or not; one whose step "
            "wants a metric is fed the batch size, and with the hooks the metric of scheduler.step(metric)"
        )
        mend = f"count its steps in updates, or write {_CLOCK % ACCELERATE}"
        yield told("engine-steps", "lr_scheduler_callable", what, mend)
    if by_engine and by_script and (in_json or kind != NONE):
        where = "Accelerator(step_scheduler_with_optimizer=False)"
        what = "has no effect on this scheduler: the engine steps it once an update"
        mend = (
            "build the scheduler in the script, in place of the JSON's" if in_json else f"write {_CLOCK % ACCELERATE}"
        )
        yield told("steps-by-engine", where, what, mend)
    name = str(section.get("type")) if isinstance(section, Mapping) else type(scheduler.thing).__name__
    if name in _WARM_UPS and (isinstance(section, Mapping) or scheduler.of_deepspeed):
        what = "its first two updates are at the lowest rate, 0 unless it is given"
        mend = "get_scheduler of transformers, built in the script, has one such update; or leave it so"
        yield told("two-at-the-lowest", name, what, mend)
