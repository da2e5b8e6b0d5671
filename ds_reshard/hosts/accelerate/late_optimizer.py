"""A `DummyOptim` that is a torch optimizer, and the `prepare` that binds it to DeepSpeed's.

Schedulers can be built on it before DeepSpeed's optimizer exists. Until `bind` its param groups are its own, made as
torch makes them; afterwards they, `state`, `defaults` and `state_dict` are the real optimizer's, so that an old handle
shows what is trained. Imported only where accelerate is: a class that is to be pickled needs its bases when its module
is imported.

The seam is `Accelerator._prepare_deepspeed`: rung 2 of the ladder. accelerate's published extension point,
`DummyScheduler(lr_scheduler_callable=...)`, takes a function, and not a scheduler that is there; `Accelerator.prepare`
is passed by where TRL calls `_prepare_deepspeed(model)` itself. The method has had one signature from 0.34 to 1.15.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedSchedulerWrapper, DummyOptim
from torch.optim import Optimizer

from ds_reshard.errors import PrepareError, raise_faults
from ds_reshard.hooks import Call
from ds_reshard.hosts.accelerate.diagnostic import (
    BACKWARD,
    ENGINE_CLOCK,
    REFUSED,
    Examined,
    Values,
    examine,
    is_the_scripts,
    params_of,
)
from ds_reshard.hosts.accelerate.prepare_arguments import (
    CALLABLE,
    DEFAULT_LR,
    DEFAULT_WEIGHT_DECAY,
    DUMMY,
    NONE,
    TORCH,
    given_optimizer,
    is_module,
    is_optimizer,
    is_scheduler,
    parts,
    trains,
    without_params,
)
from ds_reshard.hosts.accelerate.state import track
from ds_reshard.operations.ranks import gather_faults
from ds_reshard.resume.schedulers import ACCELERATE, ENGINE, clock_in, innermost

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

# The optimizers of DeepSpeed that are not torch's own, and the one whose hyper-parameters they have.
_LIKE = {
    "lamb": "Adam",
    "onebitadam": "Adam",
    "zerooneadam": "Adam",
    "onebitlamb": "Adam",
    "muadam": "Adam",
    "muadamw": "AdamW",
    "musgd": "SGD",
}
# What a scheduler may change beside the rate.
_CYCLED = ("betas", "momentum", "eps")
_HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_PLAIN = ("params", "lr", "weight_decay", "kwargs")
_KEPT = (*_PLAIN, "given", "begun_with", "_begun", "own_param_groups", "own_defaults", "own_state")
# The lists of schedulers of torch and DeepSpeed that hold one value for each param group.
PER_GROUP = (
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "delta_lrs",
    "_init_lrs",
    "org_lrs",
    "min_moms",
    "max_moms",
    "min_lr",
)


def _refuse(
    where: str, what: str, mend: str, *, expected: str = "", found: str = "", subject: str = "accelerator.prepare"
) -> None:
    raise_faults([PrepareError.fault(where, what, expected, found, mend=mend)], subject=subject)


class _Shown:
    """An attribute of a LateOptimizer: its own (`own_...`) until it is bound, then the real optimizer's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, late: LateOptimizer, owner: type) -> object:
        return getattr(late, f"own_{self.name}") if late.real is None else getattr(late.real, self.name)

    def __set__(self, late: LateOptimizer, value: object) -> None:
        if late.real is None:
            setattr(late, f"own_{self.name}", value)
        else:
            setattr(late.real, self.name, value)


class LateOptimizer(DummyOptim, Optimizer):  # type: ignore[misc]
    """What `DummyOptim(...)` makes while the hooks are on.

    `given` holds the arguments that the user gave, `begun_with` each group's values before any scheduler, and
    `own_param_groups` the groups as the script built and changed them before `prepare`.
    """

    params: list[object]
    given: dict[str, object]
    begun_with: list[dict[str, object]]
    own_param_groups: list[dict[str, object]]
    real: Optimizer | None = None
    param_groups = _Shown()  # type: ignore[assignment]
    state = _Shown()  # type: ignore[assignment]
    defaults = _Shown()  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing once prepared: the engine steps inside `accelerator.backward`. An error before."""
        self._made("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's before `prepare`; nothing afterwards: the engine does it."""
        if self.real is None:
            Optimizer.zero_grad(self, set_to_none)

    def state_dict(self) -> dict[str, object]:
        return self._made("state_dict").state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._made("load_state_dict").load_state_dict(state_dict)

    def _made(self, method: str) -> Optimizer:
        """The real optimizer; PrepareError, which names the method, before there is one."""
        if self.real is None:
            _refuse(
                f"DummyOptim.{method}",
                "called before prepare: DeepSpeed makes the optimizer there, and there is none yet",
                "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler), then "
                f"optimizer.{method}(); without DeepSpeed use torch.optim.AdamW in place of DummyOptim",
                subject="accelerate",
            )
        assert self.real is not None
        return self.real

    def add_param_group(self, param_group: dict[str, object]) -> None:
        if self.real is not None:
            what, mend = "DeepSpeed takes no param group after prepare", "add it before accelerator.prepare(...)"
            _refuse("DummyOptim.add_param_group", what, mend, subject="accelerate")
        added = _with_list(param_group)
        if self._begun:
            if not isinstance(self.params[0], dict):
                self.params = [{"params": self.params}]
            self.params.append(added)
        Optimizer.add_param_group(self, dict(added))
        self.begun_with.append(copy.deepcopy(without_params(self.own_param_groups[-1])))

    def begin(self, given: dict[str, object], defaults: dict[str, object]) -> None:
        """Become a torch optimizer over `params`, which `DummyOptim` has noted."""
        self.given, self.begun_with, self._begun = given, [], False
        Optimizer.__init__(self, self.params, defaults)  # type: ignore[arg-type]
        self._begun = True

    def bind(self, real: Optimizer) -> None:
        """Show the real optimizer's from now on; what was registered on this one is called by that one."""
        for name in _HOOKS:
            mine, theirs = getattr(self, name, None), getattr(real, name, None)
            if mine and theirs is not None:
                mine.update(theirs)
                setattr(real, name, mine)
        self.real = real

    def plain(self) -> DummyOptim:
        """What accelerate made of the same arguments: to it, a torch optimizer would be the user's own."""
        made = object.__new__(DummyOptim)
        vars(made).update({name: getattr(self, name) for name in _PLAIN})
        return made

    def __getstate__(self) -> dict[str, object]:
        return {**{name: vars(self)[name] for name in _KEPT}, "real": self.real}

    def __setstate__(self, state: dict[str, object]) -> None:
        Optimizer.__setstate__(self, state)


def make_late(call: Call) -> None:
    """`DummyOptim.__init__`; a subclass of the user's stays what it is."""
    dummy = call["self"]
    if type(dummy) is not DummyOptim or "params" not in call.passed:
        call()
        return
    given = {name: value for name, value in call.passed.items() if name != "self"}
    given |= given.pop("kwargs", {})
    params = given.pop("params")
    if isinstance(params, torch.Tensor):
        raise TypeError("DummyOptim takes an iterable of tensors or dicts, and was given a tensor")
    params = [_with_list(group) if isinstance(group, dict) else group for group in params]
    call(params=params)
    if all(isinstance(group, dict) and not group["params"] for group in params):
        what = "holds no parameter: a generator such as model.parameters() gives them once"
        mend = "DummyOptim(list(model.parameters()), lr=...), and nothing that used the same generator before"
        _refuse("DummyOptim(params)", what, mend, subject="accelerate")
    dummy.__class__ = LateOptimizer
    dummy.begin(given, _defaults(given, _present_config()))


def _with_list(group: Mapping[str, object]) -> dict[str, object]:
    members = group["params"]
    return {**group, "params": [members] if isinstance(members, torch.Tensor) else list(members)}  # type: ignore[call-overload]


def _present_config() -> Mapping[str, object]:
    """The DeepSpeed JSON of the accelerator that exists, empty where there is none yet."""
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None) if AcceleratorState._shared_state else None
    config: Mapping[str, object] = getattr(plugin, "deepspeed_config", None) or {}
    return config


def _defaults(given: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    """The values that the real optimizer will have: the user's, else the JSON's, else those of its class."""
    section = config.get("optimizer")
    name = str(section.get("type", "AdamW")) if isinstance(section, Mapping) else "AdamW"
    name = _LIKE.get(name.lower(), name).lower()
    classes = {known.lower(): cls for known, cls in vars(torch.optim).items() if isinstance(cls, type)}
    own = inspect.signature(classes[name]).parameters if name in classes else {}
    made: dict[str, object] = {key: own[key].default for key in _CYCLED if key in own}
    made |= {"lr": DEFAULT_LR, "weight_decay": DEFAULT_WEIGHT_DECAY}
    for key, value in params_of(config, "optimizer").items():
        if key in (*_CYCLED, "lr", "weight_decay") and value != "auto":
            made[key] = tuple(value) if isinstance(value, list) else value
    return {**made, **given}


class SchedulerOfAMetric(AcceleratedScheduler):  # type: ignore[misc]
    """accelerate's wrapper of a scheduler that wants a metric; it passes for its scheduler's class as well.

    Hugging Face's Trainer asks `isinstance(scheduler, ReduceLROnPlateau)` to decide whether it steps after each update,
    or with a metric after each evaluation (`_run_epoch` and `_evaluate` in transformers/trainer.py, 5.23).
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.scheduler)


class SeveralEngines:
    """Stands where accelerate keeps the one engine that `backward` goes to, when more than one trains.

    `accelerator.backward` goes to the engine of the first `prepare` alone, and accelerate says so in one warning, at
    the second `prepare` (`_prepare_deepspeed`, accelerate 1.15.0). `engine` is the first, which `free_memory` destroys.
    """

    def __init__(self, engine: object) -> None:
        self.engine = engine

    def backward(self, loss: object, **kwargs: object) -> None:
        self._refuse("accelerator.backward")

    def get_global_grad_norm(self) -> None:
        self._refuse("accelerator.clip_grad_norm_")

    def _refuse(self, method: str) -> None:
        what = "this Accelerator has prepared several models, and accelerate takes the first one's engine for each"
        _refuse(method, what, BACKWARD, subject="accelerate")


def prepare_deepspeed(call: Call) -> object:
    """Prepare as accelerate does, with the scheduler that was given driving the optimizer that DeepSpeed makes.

    Collective: every rank calls it with the same arguments, and every rank raises the same PrepareError, before the
    engine is built. Without optimizer and scheduler, or with what is prepared already, accelerate's own method runs.
    """
    accelerator, args = call["self"], call["args"]
    optimizers, schedulers = [x for x in args if is_optimizer(x)], [x for x in args if is_scheduler(x)]
    models = [x for x in args if is_module(x)]
    for plain in optimizers:
        # A DummyOptim made before the hooks were on: accelerate reads its generator once, and so must the rules.
        if isinstance(getattr(plain, "params", None), Iterator):
            plain.params = list(plain.params)
    fresh = any(not given_optimizer(optimizer).prepared for optimizer in optimizers)
    if not schedulers and not (fresh or (models and optimizers)):
        return call()
    plugin = accelerator.state.deepspeed_plugin
    _restore(plugin)
    config = plugin.deepspeed_config
    found = examine(config, optimizers, schedulers, models, accelerator)
    faults = gather_faults(finding.fault() for finding in found.findings if finding.outcome == REFUSED)
    raise_faults(faults, subject="accelerator.prepare")
    for finding in found.findings if accelerator.is_main_process else ():
        level = logging.WARNING if finding.rule in (ENGINE_CLOCK, "warmup-zero") else logging.INFO
        logger.log(level, "accelerate: %s: %s", finding.outcome, finding)
    by_script = not accelerator.step_scheduler_with_optimizer and is_the_scripts(found.optimizer, found.scheduler)
    with _filled(plugin, found.fills):
        return _prepared(accelerator, call, args, found, clock_in(config) or (ACCELERATE if by_script else None))


# By the plugin's config: what the user had written where one prepare wrote something else, and what that was.
# accelerate writes what it fills into the one dict that all engines of a process share: a second prepare finds the
# first one's values where the user had written "auto".
_WRITTEN: weakref.WeakKeyDictionary[HfDeepSpeedConfig, tuple[Values, Values]] = weakref.WeakKeyDictionary()


def _values(plugin: DeepSpeedPlugin) -> Values:
    """All parameters of the JSON's optimizer and scheduler."""
    sections = {section: params_of(plugin.deepspeed_config, section) for section in ("optimizer", "scheduler")}
    return {(section, name): value for section, params in sections.items() for name, value in params.items()}


@contextmanager
def _filled(plugin: DeepSpeedPlugin, fills: Values) -> Iterator[None]:
    """Set values in the JSON for one prepare, and note what has been written over what the user had there."""
    before, config = _values(plugin), plugin.deepspeed_config
    for (section, name), value in fills.items():
        config[section]["params"] = {**(config[section].get("params") or {}), name: value}
    try:
        yield
    finally:
        written = {key: value for key, value in _values(plugin).items() if key not in before or before[key] != value}
        _WRITTEN[plugin.hf_ds_config] = ({key: before[key] for key in written if key in before}, written)


def _restore(plugin: DeepSpeedPlugin) -> None:
    """Give the next prepare the user's JSON; the engine that was made keeps the dict it has."""
    before, written = _WRITTEN.pop(plugin.hf_ds_config, ({}, {}))
    present = _values(plugin)
    untouched = [key for key, value in written.items() if key in present and present[key] == value]
    if not untouched:
        return
    config = copy.deepcopy(plugin.deepspeed_config)
    for section, name in untouched:
        params = config[section]["params"]
        if (section, name) in before:
            params[name] = before[section, name]
        else:
            del params[name]
    plugin.deepspeed_config = plugin.hf_ds_config.config = config


def _prepared(
    accelerator: Accelerator, call: Call, args: tuple[object, ...], found: Examined, clock: str | None
) -> tuple[object, ...]:
    """Have accelerate make the engine, and let the scheduler drive its optimizer, on the clock that is asked for."""
    optimizer, scheduler, given, kind = found.optimizer, found.scheduler, found.scheduler.thing, found.scheduler.kind
    # Whether the scheduler is attached here, and not by accelerate.
    ours = kind == CALLABLE or (kind == TORCH and (optimizer.kind == DUMMY or clock is not None or scheduler.unknown))
    sent = [None if ours and thing is given else thing for thing in args]
    result = call(args=tuple(thing.plain() if isinstance(thing, LateOptimizer) else thing for thing in sent))
    engine: DeepSpeedEngine = accelerator._models[-1]
    _go_to_the_one_that_trains(accelerator, engine)
    real: Optimizer = engine.basic_optimizer
    if isinstance(optimizer.thing, LateOptimizer):
        carry(optimizer.thing, real, scheduled=kind == TORCH and scheduler.over is optimizer.thing)
        optimizer.thing.bind(real)
    if kind == TORCH:
        drop_empty_groups(given, optimizer.sizes)
        for part in parts(given):
            part.optimizer = real  # type: ignore[attr-defined]
        _note_steps(real)
    if ours:
        made = given if kind == TORCH else called(given.lr_scheduler_callable, real)  # type: ignore[attr-defined]
        wrapper = _attach(accelerator, engine, made, clock or ENGINE)
        _take_arguments(wrapper)
        return tuple(wrapper if thing is given else one for thing, one in zip(args, result, strict=True))
    if kind != NONE:  # attached by accelerate, as it always does
        wrapper = accelerator._schedulers[-1]
        _take_arguments(wrapper)
        own = ENGINE if engine.lr_scheduler is wrapper.scheduler else ACCELERATE
        track(accelerator, engine, wrapper, clock=own, by_script=_wants_metric(wrapper.scheduler))
    return tuple(result)


def _go_to_the_one_that_trains(accelerator: Accelerator, engine: DeepSpeedEngine) -> None:
    """Let `accelerator.backward` go to the one engine that trains, and refuse it where there are more."""
    wrapped = accelerator.deepspeed_engine_wrapped
    if wrapped.engine is engine:
        return
    several = sum(map(trains, accelerator._models)) > 1
    accelerator.deepspeed_engine_wrapped = SeveralEngines(wrapped.engine) if several else DeepSpeedEngineWrapper(engine)


def carry(late: LateOptimizer, real: Optimizer, *, scheduled: bool) -> None:
    """Write into the real groups what the script and its scheduler have written into the placeholder's.

    `scheduled` says that a scheduler was built on the placeholder, whose rates then hold, also where they are
    unchanged. DeepSpeed keeps the group dicts of `basic_optimizer` in whatever ZeRO makes of it.
    Raises PrepareError where DeepSpeed has made other param groups, as it does for experts.
    """
    changed = [
        _changes(group, begun, rate=scheduled)
        for group, begun in zip(late.own_param_groups, late.begun_with, strict=True)
        if group["params"]
    ]
    if not any(changed):
        return
    if len(changed) != len(real.param_groups):
        _refuse(
            "scheduler",
            "was built over other param groups than DeepSpeed has made, as it does for experts",
            "DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...) builds it over the real ones",
            expected=str(len(changed)),
            found=str(len(real.param_groups)),
        )
    for group, values in zip(real.param_groups, changed, strict=True):
        for missing in (name for name in ("betas", "momentum") if name in values and name not in group):
            what = (
                f"was made before the Accelerator: its scheduler cycles {missing}, which {type(real).__name__} has not"
            )
            _refuse("DummyOptim", what, "make the Accelerator before DummyOptim(...)")
        group.update(values)


def _changes(group: Mapping[str, object], begun: Mapping[str, object], *, rate: bool) -> dict[str, object]:
    def changed(name: str, value: object) -> bool:
        return name not in begun or not (begun[name] is value or bool(begun[name] == value))

    values = without_params(group).items()
    return {name: value for name, value in values if (rate and name == "lr") or changed(name, value)}


def drop_empty_groups(scheduler: object, sizes: Sequence[int | None]) -> None:
    """Leave a scheduler that was built over groups of these sizes the values of those that DeepSpeed keeps.

    It takes param groups without parameters out, in place: `_configure_optimizer`, deepspeed/runtime/engine.py, 0.19.8.
    """
    for part in parts(scheduler) if 0 in sizes else ():
        for name in PER_GROUP:
            values = vars(part).get(name)
            if isinstance(values, list) and len(values) == len(sizes):
                setattr(part, name, [value for value, size in zip(values, sizes, strict=True) if size != 0])


def _note_steps(optimizer: Optimizer) -> None:
    """As torch's schedulers do when they are built, so that they do not warn of a missing `optimizer.step()`.

    `patch_track_step_called` in torch/optim/lr_scheduler.py, 2.13.
    """
    reference, function = weakref.ref(optimizer), getattr(optimizer.step, "__func__", None)
    # Without a function, another library's stands in place of the method.
    if function is None or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> object:
        live = reference()
        assert live is not None
        live._opt_called = True  # type: ignore[attr-defined]
        return function.__get__(live, type(live))(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign,assignment]


def called(function: Callable[[Optimizer], object], real: Optimizer) -> object:
    """What an `lr_scheduler_callable` makes of the real optimizer; PrepareError where that cannot drive it."""
    made = function(real)
    groups = getattr(innermost(getattr(made, "optimizer", None)), "param_groups", real.param_groups)
    mend = "lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, ...), built on its argument"
    if not callable(getattr(made, "step", None)) or is_optimizer(made):
        _refuse("lr_scheduler_callable", f"gave a {type(made).__name__}, which is no scheduler", mend)
    elif not any(group is live for group in groups for live in real.param_groups):
        what = "gave a scheduler on another optimizer than the one it was called with: the real one's rates would stay"
        _refuse("lr_scheduler_callable", what, mend)
    return made


def _attach(accelerator: Accelerator, engine: DeepSpeedEngine, scheduler: object, clock: str) -> object:
    """Give a scheduler to the engine, or to accelerate, to be stepped and saved there.

    One that wants a metric is stepped by the script alone, with that metric, at most once an update.
    """
    optimizer, by_script = accelerator._optimizers[-1], _wants_metric(scheduler)
    if clock == ENGINE and not by_script:
        engine.lr_scheduler = scheduler
        wrapper = DeepSpeedSchedulerWrapper(scheduler, optimizer)
    else:
        wrapper = (SchedulerOfAMetric if by_script else AcceleratedScheduler)(
            scheduler,
            optimizer,
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches or clock == ENGINE,
        )
    accelerator._schedulers.append(wrapper)
    track(accelerator, engine, wrapper, clock=ACCELERATE if by_script else clock, by_script=by_script)
    return wrapper


def _take_arguments(wrapper: object) -> None:
    """Let `scheduler.step(...)` of one that the engine steps be called as any scheduler's: it does nothing.

    That of accelerate takes no argument (`DeepSpeedSchedulerWrapper.step` in accelerate/utils/deepspeed.py, 1.15.0).
    """
    if isinstance(wrapper, DeepSpeedSchedulerWrapper):
        wrapper.step = _engine_steps


def _engine_steps(*args: object, **kwargs: object) -> None:
    pass


def _wants_metric(scheduler: object) -> bool:
    """Whether `step` takes what an engine does not have: DeepSpeed feeds it the batch size, of any class.

    `_take_model_step` in deepspeed/runtime/engine.py, 0.19.8.
    """
    parameters = inspect.signature(scheduler.step).parameters.values()  # type: ignore[attr-defined]
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
