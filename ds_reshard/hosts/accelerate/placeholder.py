"""A `DummyOptim` that is a torch optimizer: schedulers can be built on it before DeepSpeed's exists.

Imported only where accelerate is: a class that is to be pickled needs its bases when its module is imported.
Until `bind` its param groups are its own, made as torch makes them; afterwards they, `state`, `defaults` and
`state_dict` are the real optimizer's, so that an old handle shows what is trained.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from accelerate.utils.deepspeed import DummyOptim
from torch.optim import Optimizer

from ds_reshard.errors import PrepareError, raise_faults
from ds_reshard.hosts.accelerate.given import DEFAULT_LR, DEFAULT_WEIGHT_DECAY

if TYPE_CHECKING:
    from collections import defaultdict

    Groups = list[dict[str, object]]
    State = defaultdict[torch.Tensor, object]

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
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_PLAIN = ("params", "lr", "weight_decay", "kwargs")
_KEPT = (*_PLAIN, "given", "begun_with", "_begun", "_own_groups", "_own_defaults", "_own_state")


class LateOptimizer(DummyOptim, Optimizer):  # type: ignore[misc]
    """What `DummyOptim(...)` makes while the hooks are on.

    `given` holds the arguments that the user gave, `begun_with` each group's values before any scheduler.
    """

    params: list[object]
    given: dict[str, object]
    begun_with: Groups
    real: Optimizer | None = None

    @property
    def param_groups(self) -> Groups:
        groups: Groups = self.real.param_groups if self.real is not None else self._own_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        if self.real is not None:
            self.real.param_groups = groups
        else:
            self._own_groups = groups

    @property
    def state(self) -> State:
        state: State = self.real.state if self.real is not None else self._own_state
        return state

    @state.setter
    def state(self, state: State) -> None:
        if self.real is not None:
            self.real.state = state
        else:
            self._own_state = state

    @property
    def defaults(self) -> dict[str, object]:
        defaults: dict[str, object] = self.real.defaults if self.real is not None else self._own_defaults
        return defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, object]) -> None:
        self._own_defaults = defaults

    @property
    def own_groups(self) -> Groups:
        """The groups as the script built and changed them before `prepare`."""
        return self._own_groups

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing once prepared: the engine steps inside `accelerator.backward`. An error before."""
        if self.real is None:
            raise_too_early("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's before `prepare`; nothing afterwards: the engine does it."""
        if self.real is None:
            Optimizer.zero_grad(self, set_to_none)

    def state_dict(self) -> dict[str, object]:
        if self.real is None:
            raise_too_early("state_dict")
        assert self.real is not None
        return self.real.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self.real is None:
            raise_too_early("load_state_dict")
        assert self.real is not None
        self.real.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        if self.real is not None:
            what, mend = "DeepSpeed takes no param group after prepare", "add it before accelerator.prepare(...)"
            fault = PrepareError.fault("DummyOptim.add_param_group", what, mend=mend)
            raise_faults([fault], subject="accelerate")
        params = param_group["params"]
        members = [params] if isinstance(params, torch.Tensor) else list(params)  # type: ignore[call-overload]
        added = {**param_group, "params": members}
        if self._begun:
            if not isinstance(self.params[0], dict):
                self.params = [{"params": self.params}]
            self.params.append(added)
        Optimizer.add_param_group(self, dict(added))
        self.begun_with.append(_values(self._own_groups[-1]))

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


def raise_too_early(method: str) -> None:
    fault = PrepareError.fault(
        f"DummyOptim.{method}",
        "called before prepare: DeepSpeed makes the optimizer there, and there is none yet",
        mend="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler), then "
        f"optimizer.{method}(); without DeepSpeed use torch.optim.AdamW in place of DummyOptim",
    )
    raise_faults([fault], subject="accelerate")


def make_late(
    dummy: DummyOptim, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """`DummyOptim.__init__`, after which the object is a `LateOptimizer`; a subclass of the user's stays what it is."""
    if type(dummy) is not DummyOptim:
        original(dummy, *args, **kwargs)
        return
    given = dict(inspect.signature(original).bind(dummy, *args, **kwargs).arguments)
    given.pop("self")
    given |= given.pop("kwargs", {})
    params = _materialised(given.pop("params"))
    original(dummy, params, **given)
    if not params or all(isinstance(group, dict) and not group["params"] for group in params):
        fault = PrepareError.fault(
            "DummyOptim(params)",
            "holds no parameter: a generator such as model.parameters() gives them once",
            mend="DummyOptim(list(model.parameters()), lr=...), and nothing that used the same generator before",
        )
        raise_faults([fault], subject="accelerate")
    dummy.__class__ = LateOptimizer
    dummy.begin(given, _defaults(given, _present_config()))


def _materialised(params: Iterable[object]) -> list[object]:
    if isinstance(params, torch.Tensor):
        raise TypeError("DummyOptim takes an iterable of tensors or dicts, and was given a tensor")
    return [_with_list(group) if isinstance(group, dict) else group for group in params]


def _with_list(group: dict[str, object]) -> dict[str, object]:
    members = group["params"]
    return {**group, "params": [members] if isinstance(members, torch.Tensor) else list(members)}  # type: ignore[call-overload]


def _values(group: Mapping[str, object]) -> dict[str, object]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _present_config() -> Mapping[str, object]:
    """The DeepSpeed JSON of the accelerator that exists, empty where there is none yet."""
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return {}
    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None)
    config: Mapping[str, object] = getattr(plugin, "deepspeed_config", None) or {}
    return config


def _defaults(given: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    """The values that the real optimizer will have: the user's, else the JSON's, else those of its class."""
    section = config.get("optimizer")
    section = section if isinstance(section, Mapping) else {}
    named = {name: value for name, value in (section.get("params") or {}).items() if value != "auto"}
    name = str(section.get("type", "AdamW"))
    name = _LIKE.get(name.lower(), name)
    found = {cls.lower(): cls for cls in vars(torch.optim)}.get(name.lower())
    cls = getattr(torch.optim, found) if found is not None else None
    own = inspect.signature(cls).parameters if isinstance(cls, type) else {}
    made = {key: own[key].default for key in _CYCLED if key in own}
    made |= {key: tuple(value) if isinstance(value, list) else value for key, value in named.items() if key in _CYCLED}
    base = {"lr": named.get("lr", DEFAULT_LR), "weight_decay": named.get("weight_decay", DEFAULT_WEIGHT_DECAY)}
    return {**made, **base, **given}
