"""Learning rate, betas, eps, weight decay and warm-up: what script and DeepSpeed JSON say of the same value.

`optimizer_values` and `scheduler_values` give what is found and what is to be set in the JSON, so that what was asked
holds: accelerate forwards `lr` and `weight_decay` alone, and these only over an `"auto"` (`config_kwargs` in
`_prepare_deepspeed`, accelerate/accelerator.py, 1.15.0).
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_reshard.hosts.accelerate.finding import REFUSED, Fill, Finding, mended, refused, told
from ds_reshard.hosts.accelerate.given import (
    CALLABLE,
    DEFAULT_LR,
    DEFAULT_WEIGHT_DECAY,
    DUMMY,
    NONE,
    REAL,
    TORCH,
    GivenOptimizer,
    GivenScheduler,
    parts,
)

AUTO = "auto"
Found = tuple[list[Finding], list[Fill]]

# The parameter that overwrites every group's rate, and its default (deepspeed/runtime/lr_schedules.py, 0.19.8).
# WarmupLR without it takes the groups' own since 0.16; WarmupCosineLR always does.
_RATE = {
    "WarmupLR": ("warmup_max_lr", None),
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_max_lr", None),
    "LRRangeTest": ("lr_range_test_min_lr", 0.001),
}
# Whose lists of a value for each group are known (`PER_GROUP` in bind.py).
_KNOWN = ("torch.optim.", "transformers.", "deepspeed.runtime.lr_schedules")
_FILLED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")


def params_of(config: Mapping[str, object], section: str) -> Mapping[str, object]:
    """The parameters of the JSON's optimizer or scheduler."""
    found = config.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def optimizer_values(config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Found:
    """What the JSON's optimizer and a DummyOptim say of the same value."""
    found: list[Finding] = []
    fills: list[Fill] = []
    params = params_of(config, "optimizer")
    if "optimizer" not in config or optimizer.kind == REAL:
        return found, fills
    for name, value in optimizer.arguments.items():
        if name not in params or params[name] == AUTO:
            if not (name in ("lr", "weight_decay") and params.get(name) == AUTO):
                found.append(_forwarded(name, value, params))
                fills.append(Fill(section="optimizer", name=name, value=value))
        elif not same(params[name], value):
            found.append(_contradiction(name, value, params[name]))
    for name, value in params.items():
        if value == AUTO and name not in optimizer.arguments:
            found += _unfilled(name, optimizer)
    scheduled = scheduler.kind == TORCH or optimizer.scheduled
    if scheduled and optimizer.begun and not any(finding.outcome == REFUSED for finding in found):
        found += _early(params, optimizer)
    return found, fills


def _forwarded(name: str, value: object, params: Mapping[str, object]) -> Finding:
    there = 'is "auto"' if name in params else "has none"
    what = f"{name}={value!r} is not handed on by accelerate, as the DeepSpeed JSON {there}"
    return mended("not-forwarded", "DummyOptim", what, f'write "{name}": {_json(value)} into optimizer.params')


def _contradiction(name: str, value: object, saved: object) -> Finding:
    return refused(
        "contradiction",
        f"DummyOptim({name}={value!r})",
        f"the DeepSpeed JSON says {name} {saved!r}, which accelerate takes without a word",
        f'write "{name}": "auto" into optimizer.params of the JSON, or leave {name} out of DummyOptim',
    )


def _unfilled(name: str, optimizer: GivenOptimizer) -> list[Finding]:
    where = f"optimizer.params.{name}"
    if name not in ("lr", "weight_decay"):
        what, mend = 'is "auto", and nothing says what it is to be', f"write a value, or DummyOptim(params, {name}=...)"
        return [refused("unfilled-auto", where, what, mend)]
    if optimizer.kind == NONE:
        what = 'is "auto": a DummyOptim must say what it is to be'
        return [told("auto-needs-object", where, what, f"pass DummyOptim(params, {name}=...)")]
    if all(name in group for group in optimizer.groups):
        return []
    default = DEFAULT_LR if name == "lr" else DEFAULT_WEIGHT_DECAY
    what = f'is "auto", and DummyOptim was given no {name}: it becomes {default}, the default of DummyOptim'
    return [told("default-taken", where, what, f"DummyOptim(params, {name}=...)")]


def _early(params: Mapping[str, object], optimizer: GivenOptimizer) -> list[Finding]:
    """A scheduler on a placeholder that was made before the JSON was known, and so with other rates."""
    wanted = rates(params, optimizer)
    began = [group["lr"] for group in optimizer.begun]
    if not all(same(one, other) for one, other in zip(began, wanted, strict=True)):
        what = (
            f"was made before the Accelerator, so that the scheduler on it goes by the rates {began}, not by the "
            f"DeepSpeed JSON's {wanted}"
        )
        mend = "make the Accelerator first, or say DummyOptim(lr=...)"
        return [refused("early-placeholder", "DummyOptim", what, mend)]
    said = params.get("betas", AUTO)
    for now in (group["betas"] for group in optimizer.written if "betas" in group):
        if "betas" not in optimizer.arguments and said != AUTO and not same(now[1:], said[1:]):  # type: ignore[index]
            what = f"was made before the Accelerator: its scheduler cycles the betas {now}, not the JSON's {said}"
            return [refused("early-placeholder", "DummyOptim", what, "make the Accelerator first")]
    return []


def rates(params: Mapping[str, object], optimizer: GivenOptimizer) -> list[object]:
    """Each param group's rate: its own, else the user's, else the JSON's, else the default."""
    said = params.get("lr", AUTO)
    base = optimizer.arguments.get("lr", DEFAULT_LR if said == AUTO else said)
    return [group.get("lr", base) for group in optimizer.groups]


def scheduler_values(config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler) -> Found:
    """What the JSON's scheduler does to rates, and which of its values nobody gives."""
    if "scheduler" not in config:
        return _built_groups(optimizer, scheduler), []
    section, params = config["scheduler"], params_of(config, "scheduler")
    kind = str(section.get("type")) if isinstance(section, Mapping) else ""
    found: list[Finding] = []
    if kind == "ReduceLROnPlateau":
        what = "is stepped by the engine with the batch size as its metric"
        mend = 'remove "scheduler" from the JSON, and pass ReduceLROnPlateau(optimizer) built in the script'
        found.append(refused("plateau-metric", "scheduler.type", what, mend))
    if params.get("warmup_num_steps") == 0 and not isinstance(params["warmup_num_steps"], bool):
        what = "0 is refused by DeepSpeed since 0.19.6, and was 2 before: two updates at the lowest rate"
        mend = 'remove "scheduler" from the JSON, and pass a scheduler without warm-up; or write 2'
        found.append(refused("warmup-zero", "scheduler.params.warmup_num_steps", what, mend))
    if any("lr" in group for group in optimizer.written) and not optimizer.scheduled:
        what = "its lr was changed in param_groups, and the JSON's scheduler goes by the lr that it was made with"
        found.append(refused("rate-written", "DummyOptim", what, "DummyOptim([{'params': ..., 'lr': ...}])"))
    found += _autos(params, optimizer, scheduler)
    more, fills = _rates(kind, params, params_of(config, "optimizer"), optimizer)
    return found + more, fills


def _autos(params: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler) -> list[Finding]:
    found = []
    autos = [name for name, value in params.items() if value == AUTO]
    filled = {*_FILLED, *(("total_num_steps",) if scheduler.total is not None else ())}
    if scheduler.kind == NONE and autos:
        made = told if optimizer.kind == NONE else refused
        what = f'{", ".join(autos)} of the scheduler are "auto": a DummyScheduler alone fills them'
        mend = "pass accelerate.utils.DummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...)"
        return [made("auto-needs-object", "scheduler.params", what, mend)]
    for name in autos:
        if name not in filled:
            what, mend = 'is "auto", and nothing fills it', f"write a value, or DummyScheduler(optimizer, {name}=...)"
            found.append(refused("unfilled-auto", f"scheduler.params.{name}", what, mend))
    if "warmup_num_steps" in autos and scheduler.warmup == 0:
        what = "a warm-up of 0 becomes 2: two updates at the lowest rate"
        mend = "remove the JSON's scheduler, and pass one without warm-up"
        found.append(told("warmup-zero", "DummyScheduler", what, mend))
    if "total_num_steps" in autos and scheduler.total is not None and scheduler.warmup:
        what = "total_num_steps is divided by the number of processes, warmup_num_steps is not"
        mend = "write both as numbers of updates into the JSON"
        found.append(told("warmup-undivided", "DummyScheduler", what, mend))
    return found


def _rates(
    kind: str, params: Mapping[str, object], optimizer_params: Mapping[str, object], optimizer: GivenOptimizer
) -> Found:
    """Whether the JSON's scheduler leaves each param group at its own rate."""
    name, default = _RATE.get(kind, (None, None))
    if name is None or optimizer.kind == NONE:
        return [], []
    value = params.get(name, default)
    live = [n for n, size in enumerate(optimizer.sizes) if size != 0]
    wanted = [rate for n, rate in enumerate(rates(optimizer_params, optimizer)) if n in live]
    one = wanted[0] if all(same(rate, wanted[0]) for rate in wanted) else None
    if value == AUTO:
        filled = optimizer.arguments.get("lr", DEFAULT_LR) if optimizer.kind == DUMMY else _default(optimizer)
        fill = Fill(section="scheduler", name=name, value=one if one is not None else wanted)
        if one is not None and same(one, filled):
            return [], [fill]
        what = f"accelerate gives all param groups the rate {filled!r} in place of {wanted}"
        mend = f'write "{name}": {_json(fill.value)} into scheduler.params of the JSON'
        return [mended("rates-erased", f"scheduler.params.{name}", what, mend)], [fill]
    if value is None or isinstance(value, (list, tuple)) or (one is not None and same(one, value)):
        return [], []
    asked = one is None or (
        optimizer.kind == DUMMY and ("lr" in optimizer.arguments or any("lr" in g for g in optimizer.groups))
    )
    what = f"{value!r} replaces the rates {wanted} of the param groups"
    mend = f'write "{name}": "auto", or {_json(one if one is not None else wanted)}'
    return [(refused if asked else told)("rates-erased", f"scheduler.params.{name}", what, mend)], []


def _default(optimizer: GivenOptimizer) -> object:
    defaults = getattr(optimizer.thing, "defaults", {})
    return defaults.get("lr", DEFAULT_LR)


def _built_groups(optimizer: GivenOptimizer, scheduler: GivenScheduler) -> list[Finding]:
    """Whether a scheduler that is built has the param groups that DeepSpeed will have."""
    if scheduler.kind not in (TORCH, CALLABLE):
        return []
    count, groups = len(optimizer.sizes), "build the optimizer from [group for group in groups if group['params']]"
    for part in parts(scheduler.thing) if scheduler.kind == TORCH and count else ():
        built = len(vars(part).get("base_lrs") or [None] * count)
        if built != count:
            what = f"was built over {built} param groups, and the optimizer has {count}: its first step fails"
            return [
                refused("group-after-scheduler", "scheduler", what, "add_param_group before the scheduler is built")
            ]
    empty = [number for number, size in enumerate(optimizer.sizes) if size == 0]
    if not empty:
        return []
    what = f"param group {', '.join(map(str, empty))} has no parameter: DeepSpeed takes it out, and "
    if scheduler.kind == CALLABLE:
        what += f"lr_scheduler_callable is given {count - len(empty)} groups"
        return [told("empty-group", "optimizer", what, groups)]
    what += "the scheduler built before fails at its first step (torch 2.10 and later), or moves the wrong groups"
    known = all(type(part).__module__.startswith(_KNOWN) for part in parts(scheduler.thing))
    return [(mended if known else refused)("empty-group", "optimizer", what, groups)]


def same(one: object, other: object) -> bool:
    """Whether two values, of a script and of a JSON, are one."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    try:
        return float(one) == float(other)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return one == other


def _json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
