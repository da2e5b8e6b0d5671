"""What two checkpoints say beside their tensors, compared: hyper-parameters, counters, schedulers, the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_reshard.errors import ReshardError
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.plain import read_scalars, single_elements
from ds_reshard.model.difference import ValueDifference
from ds_reshard.model.facts import GroupFacts, ScalarTensor, canonical, describe
from ds_reshard.model.records import TensorRecord

# What follows from the layout, and the saved configuration, which the coming run's replaces.
LAYOUT_ENTRIES = frozenset(
    {
        "module",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "optimizer",
        "universal_checkpoint_info",
    }
)
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_ABSENT = object()


def compare_values(a: ZeroCheckpoint, b: ZeroCheckpoint) -> Iterator[ValueDifference]:
    """All that differs. Param groups are compared by their members: a pair for each two that share some."""
    entries = [
        {key: value for key, value in side.model.entries.items() if key not in LAYOUT_ENTRIES} for side in (a, b)
    ]
    yield from differences("", entries[0], entries[1])
    yield from differences("module", a.model.objects, b.model.objects)
    if a.optim is not None and b.optim is not None:
        scaling = [key for key in _SCALING if key in a.optim.entries and key in b.optim.entries]
        one, other = ({key: side.entries[key] for key in scaling} for side in (a.optim, b.optim))
        yield from differences("optimizer", one, other)
    if (a.facts is None) != (b.facts is None):
        yield ValueDifference(where="optimizer", a=_optimizer(a), b=_optimizer(b))
    elif a.facts is not None and b.facts is not None:
        yield from compare_groups(a.facts.groups, b.facts.groups)
        yield from compare_scalars(a.facts.scalars, b.facts.scalars)
    else:
        yield from differences("optimizer", a.model.entries.get("optimizer"), b.model.entries.get("optimizer"))


def _optimizer(checkpoint: ZeroCheckpoint) -> str:
    return "names its parameters" if checkpoint.facts is not None else "names none (ZeRO stage 0): not compared"


def compare_groups(a: tuple[GroupFacts, ...], b: tuple[GroupFacts, ...]) -> Iterator[ValueDifference]:
    home = {name: number for number, group in enumerate(b) for name in group.members}
    for number, group in enumerate(a):
        others = dict.fromkeys(home[name] for name in group.members if name in home)
        for other in others:
            first = next(name for name in group.members if home.get(name) == other)
            where = f"param group {number}" + (f" ({other} in B)" if other != number else "") + f", of {first}"
            if set(group.members) != set(b[other].members):
                counts = (f"{len(one.members)} parameters" for one in (group, b[other]))
                yield ValueDifference(where=f"{where}: members", a=next(counts), b=next(counts))
            yield from differences(where, _read(group.hyperparameters), _read(b[other].hyperparameters))


def _read(hyperparameters: Mapping[str, object] | None) -> object:
    """Hyper-parameters, those that were kept as tensors read; where one cannot be, what stands for it."""
    if hyperparameters is None:
        return "none saved (elastic_checkpoint)"
    read: dict[str, object] = dict(hyperparameters)
    for name, value in hyperparameters.items():
        for tensor in single_elements([value]):
            try:
                read[name] = read_scalars(tensor.storage.path, [tensor])[tensor]
            except ReshardError:
                read[name] = value
    return read


def compare_scalars(
    a: Mapping[str, Mapping[str, object]], b: Mapping[str, Mapping[str, object]]
) -> Iterator[ValueDifference]:
    """Steps and other states that are one value; parameters that differ alike are told together."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys((*a, *b)):
        for difference in differences("", a.get(name, {}), b.get(name, {})):
            alike.setdefault((difference.where, difference.a, difference.b), []).append(name)
    for (kind, one, other), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield ValueDifference(where=f"{kind} of {names[0]}{more}", a=one, b=other)


def differences(where: str, a: object, b: object) -> Iterator[ValueDifference]:
    """The innermost entries of two trees that differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            at = f"{where}.{key}" if where else str(key)
            yield from differences(at, a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif _text(a) != _text(b):
        one, other = _shown(a), _shown(b)
        if one == other:
            one, other = f"{one} ({_kind(a)})", f"{other} ({_kind(b)})"
        yield ValueDifference(where=where, a=one, b=other)


def _text(value: object) -> str:
    return "absent" if value is _ABSENT else canonical(value)


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else describe(value)


def _kind(value: object) -> str:
    """What tells two values apart that read alike."""
    if isinstance(value, ScalarTensor | TensorRecord):
        return f"shape {list(value.shape)}"
    return f"another {type(value).__name__}"
