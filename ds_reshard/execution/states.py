"""Compare samples of the states that an optimizer was given by a load with the states that it holds."""

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
"""The row of a report for states that have changed since the load."""
CHANGED = "find the hook, or the optimizer's own code, that changes them"


def has_moments(optimizer: object, *, steps: bool = False) -> bool:
    """True if an optimizer on this rank has a state with several elements that are not all zero.

    With `steps`, scalar states such as step counts are looked at, too. States on the meta device are zero.
    """
    states = getattr(innermost(optimizer), "state", None)
    entries = states.values() if isinstance(states, Mapping) else ()
    values = [value for entry in entries if isinstance(entry, Mapping) for value in entry.values()]
    if steps and any(bool(value) for value in values if not getattr(value, "shape", ())):
        return True
    return any(_has_nonzero(value) for value in values if _is_held(value) and callable(getattr(value, "any", None)))


def _has_nonzero(value: object) -> bool:
    """True if any element is not zero. A few elements are looked at first, as reading a whole large state is slow."""
    tensor = cast("torch.Tensor", value)
    return bool(tensor[:: max(1, len(tensor) // _SAMPLE_NUMEL)].any()) or bool(tensor.any())


def _is_held(value: object) -> bool:
    return bool(len(getattr(value, "shape", ()))) and not getattr(value, "is_meta", False)


class Samples:
    """Up to 4,096 elements of each optimizer state, at equal distances, copied to CPU memory."""

    def __init__(self) -> None:
        self._taken: dict[tuple[int, str], tuple[Callable[[], object], torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._taken)

    def clear(self) -> None:
        """Forget all samples, and with them the optimizers."""
        self._taken.clear()

    def take(self, optimizer: object, param: object, kind: str, value: object) -> None:
        """Sample `value`, the state `kind` of `param`; a later sample of the same state replaces it."""
        if _is_held(value):
            where = partial(_state, optimizer, param, kind)
            self._taken[id(param), kind] = where, _sample(cast("torch.Tensor", value))

    def differing(self) -> list[str]:
        """Return the kinds of states that differ from their sample; states that were moved away do not count."""
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
def sampled_loads(optimizer: object) -> Iterator[Samples]:
    """Sample the states that `load_state_dict` gives the torch optimizer inside any wrappers, within the block."""
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
