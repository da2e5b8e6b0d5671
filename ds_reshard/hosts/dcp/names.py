"""What a checkpoint holds under the keys by which torch.distributed.checkpoint asks for it.

The keys are those of `get_state_dict` under two names at the top, nested or with `flatten_optimizer_state_dict`
(torch/distributed/checkpoint/state_dict.py, 2.13): `model.W`, `optimizer.state.W.exp_avg`, and
`optimizer.param_groups.0.lr` or `optimizer.param_groups.W.lr`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import GroupFacts, Scalar, ScalarTensor
from ds_reshard.model.layout import TensorKey

_WEIGHTS = ("fp32", "weight")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor: the logical tensors that hold its values, by element type, the first being the widest."""

    path: Path
    shape: tuple[int, ...]
    sources: Mapping[ElementType, TensorKey]

    @property
    def dtype(self) -> ElementType:
        return next(iter(self.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One value that is a small tensor in an optimizer of torch: `step`."""

    path: Path
    value: ScalarTensor | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A value of a param group: of the group at `position`, or of the group of the parameter `member`.

    `name` is "params" for the list of members.
    """

    path: Path
    name: str
    position: int | None = None
    member: str | None = None


Entry = Stored | Single | GroupValue


def entries(checkpoint: ZeroCheckpoint, *, model: str, optimizer: str) -> dict[str, Entry]:
    """Every entry by its key; `model` and `optimizer` are the names at the top, "" for none."""
    found: list[Entry] = [*_weights(checkpoint, model)]
    if checkpoint.facts is not None:
        found += _states(checkpoint, optimizer)
        found += _groups(checkpoint.facts.groups, optimizer)
    return {".".join(map(str, entry.path)): entry for entry in found}


def owner(checkpoint: ZeroCheckpoint, name: str) -> str:
    """The name under which the optimizer has a parameter: of tied ones, the first."""
    return checkpoint.model.shared.get(name, name)


def _top(name: str) -> Path:
    return (name,) if name else ()


def _names(checkpoint: ZeroCheckpoint) -> list[str]:
    """Every parameter and buffer, the other names of tied ones too."""
    return list(dict.fromkeys([*(key.name for key in checkpoint.layout.placements), *checkpoint.model.shared]))


def _weights(checkpoint: ZeroCheckpoint, model: str) -> Iterator[Stored]:
    layout = checkpoint.layout
    for name in _names(checkpoint):
        sources: dict[ElementType, TensorKey] = {}
        for kind in _WEIGHTS:
            for key in (TensorKey(name=name, kind=kind), TensorKey(name=owner(checkpoint, name), kind=kind)):
                if key in layout:
                    sources.setdefault(layout[key].dtype, key)
        if sources:
            shape = layout[next(iter(sources.values()))].shape
            yield Stored(path=(*_top(model), name), shape=shape, sources=sources)


def _states(checkpoint: ZeroCheckpoint, optimizer: str) -> Iterator[Entry]:
    layout = checkpoint.layout
    assert checkpoint.facts is not None, "asked for only where there is an optimizer"
    for name in _names(checkpoint):
        at = (*_top(optimizer), "state", name)
        for kind in layout.kinds(owner(checkpoint, name)):
            key = TensorKey(name=owner(checkpoint, name), kind=kind)
            if kind not in _WEIGHTS:
                yield Stored(path=(*at, kind), shape=layout[key].shape, sources={layout[key].dtype: key})
        for kind, value in checkpoint.facts.scalars.get(owner(checkpoint, name), {}).items():
            if _is_number(value):
                yield Single(path=(*at, kind), value=value)  # type: ignore[arg-type]


def _is_number(value: Scalar) -> bool:
    return isinstance(value, ScalarTensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _groups(groups: tuple[GroupFacts, ...], optimizer: str) -> Iterator[GroupValue]:
    at = (*_top(optimizer), "param_groups")
    for position, group in enumerate(groups):
        names = [name for name in group.hyperparameters or {} if name != "params"]
        for name in (*names, "params"):
            yield GroupValue(path=(*at, position, name), name=name, position=position)
        for member in group.members:
            for name in names:
                yield GroupValue(path=(*at[:-1], f"param_groups.{member}.{name}"), name=name, member=member)
