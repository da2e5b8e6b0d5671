"""What a checkpoint holds under the keys by which torch.distributed.checkpoint asks for it.

The keys are those of `get_state_dict` under two names at the top, nested or with `flatten_optimizer_state_dict`
(torch/distributed/checkpoint/state_dict.py, 2.13): `model.W`, `optimizer.state.W.exp_avg`, and
`optimizer.param_groups.0.lr` or `optimizer.param_groups.W.lr`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.model.checkpoint import Checkpoint
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A value of the script's own, of plain Python, under the name that it had."""

    path: Path
    value: object


Entry = Stored | Single | GroupValue | Own


def entries(source: Checkpoint, *, model: str, optimizer: str) -> dict[str, Entry]:
    """Every entry by its key; `model` and `optimizer` are the names at the top, "" for none."""
    found: list[Entry] = [*_weights(source, model)]
    if source.facts is not None:
        found += _states(source, optimizer)
        found += _groups(source.facts.groups, optimizer)
    found += _own(source)
    return {".".join(map(str, entry.path)): entry for entry in found}


def owner(source: Checkpoint, name: str) -> str:
    """The name under which the optimizer has a parameter: of tied ones, the first."""
    return source.shared.get(name, name)


def _top(name: str) -> Path:
    return (name,) if name else ()


def _keys(path: tuple[object, ...]) -> Path:
    return tuple(key if isinstance(key, int) else str(key) for key in path)


def _names(source: Checkpoint) -> list[str]:
    """Every parameter and buffer, the other names of tied ones too."""
    return list(dict.fromkeys([*(key.name for key in source.layout.placements), *source.shared]))


def _weights(source: Checkpoint, model: str) -> Iterator[Stored]:
    layout = source.layout
    for name in _names(source):
        sources: dict[ElementType, TensorKey] = {}
        for kind in _WEIGHTS:
            for key in (TensorKey(name=name, kind=kind), TensorKey(name=owner(source, name), kind=kind)):
                if key in layout:
                    sources.setdefault(layout[key].dtype, key)
        if sources:
            shape = layout[next(iter(sources.values()))].shape
            own = source.beside.get(name)
            path = _keys(own) if own is not None else (*_top(model), name)
            yield Stored(path=path, shape=shape, sources=sources)


def _states(source: Checkpoint, optimizer: str) -> Iterator[Entry]:
    layout = source.layout
    assert source.facts is not None, "asked for only where there is an optimizer"
    for name in _names(source):
        at = (*_top(optimizer), "state", name)
        for kind in layout.kinds(owner(source, name)):
            key = TensorKey(name=owner(source, name), kind=kind)
            if kind not in _WEIGHTS:
                yield Stored(path=(*at, kind), shape=layout[key].shape, sources={layout[key].dtype: key})
        for kind, value in source.facts.scalars.get(owner(source, name), {}).items():
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


def _own(source: Checkpoint) -> Iterator[Own]:
    """Values beside model and optimizer; what holds tensors or classes is not offered."""
    for path, value in source.objects.items():
        if _is_plain(value):
            yield Own(path=_keys(path), value=value)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)
