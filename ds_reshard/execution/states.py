"""Whose the states of an optimizer are after a load: samples of what it was given, compared with what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from ds_reshard.resume.schedulers import innermost

if TYPE_CHECKING:
    import torch

_SAMPLE_NUMEL = 4096
OTHERS = "not those of the checkpoint"
"""Of states that have changed since an optimizer was given those of a checkpoint."""
CHANGED = "find the hook, or the optimizer's own code, that changes them"


def has_moments(optimizer: object, *, steps: bool = False) -> bool:
    """Whether a state of an optimizer on this rank, of more than one value, is other than zero; a meta one never is.

    With `steps` also whether a single value is, as a count of steps.
    """
    states = getattr(innermost(optimizer), "state", None)
    entries = states.values() if isinstance(states, Mapping) else ()
    values = [value for entry in entries if isinstance(entry, Mapping) for value in entry.values()]
    if steps and any(bool(value) for value in values if not getattr(value, "shape", ())):
        return True
    return any(_has_nonzero(value) for value in values if _is_held(value) and callable(getattr(value, "any", None)))


def _has_nonzero(value: object) -> bool:
    """True if an element is not zero. A few of them tell it in most cases: all of a large state takes long to read."""
    tensor = cast("torch.Tensor", value)
    return bool(tensor[:: max(1, len(tensor) // _SAMPLE_NUMEL)].any()) or bool(tensor.any())


def _is_held(value: object) -> bool:
    return bool(len(getattr(value, "shape", ()))) and not getattr(value, "is_meta", False)


class Samples:
    """Up to 4,096 elements of each state that optimizers were given or held, at equal distances, in CPU memory."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, str], tuple[Callable[[], object], torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._taken)

    def clear(self) -> None:
        """Forget all samples, and with them the optimizers."""
        self._taken.clear()

    def take(self, optimizer: object, param: object, kind: str, value: object) -> None:
        """Sample `value`, which is to lie in an optimizer's state of `param` under `kind`; a later one replaces it."""
        if _is_held(value):
            where = partial(_state, optimizer, param, kind)
            self._taken[id(param), kind] = where, _sample(cast("torch.Tensor", value))

    def differing(self) -> list[str]:
        """The kinds of states whose sample is not what lies there now; states that were moved away do not count."""
        return sorted({kind for (_, kind), taken in self._taken.items() if not _is_same(*taken)})


def _state(optimizer: object, param: object, kind: str) -> object:
    return cast("torch.optim.Optimizer", optimizer).state.get(cast("torch.Tensor", param), {}).get(kind)


def _sample(value: torch.Tensor) -> torch.Tensor:
    local = getattr(value, "to_local", lambda: value)().detach().reshape(-1)
    return cast("torch.Tensor", local[:: max(1, local.numel() // _SAMPLE_NUMEL)].to("cpu", copy=True))


def _is_same(where: Callable[[], object], taken: torch.Tensor) -> bool:
    now = where()
    if now is None or not _is_held(now):
        return now is not None
    sample = _sample(cast("torch.Tensor", now))
    if not sample.numel():
        return True
    taken = taken.to(sample.dtype)
    return taken.shape == sample.shape and bool(((taken == sample) | (taken.isnan() & sample.isnan())).all())


@contextmanager
def given(optimizer: object) -> Iterator[Samples]:
    """Inside, sample the states that the torch optimizer below any wrappers is given by `load_state_dict`."""
    samples, inner = Samples(), innermost(optimizer)

    def note(torchs: torch.optim.Optimizer, state_dict: Mapping[str, object]) -> None:
        states, groups = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(states, Mapping) or not isinstance(groups, list | tuple):
            return
        for group, live in zip(groups, torchs.param_groups, strict=False):
            for number, param in zip(group.get("params", ()), live["params"], strict=False):
                held = states.get(number)
                for kind, value in held.items() if isinstance(held, Mapping) else ():
                    samples.take(torchs, param, kind, value)

    register = getattr(inner, "register_load_state_dict_pre_hook", None)
    handle = register(note) if callable(register) else None
    try:
        yield samples
    finally:
        samples.clear()
        if handle is not None:
            handle.remove()
