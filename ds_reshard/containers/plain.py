"""Values of a checkpoint's pickles in words that JSON has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.model.facts import ScalarTensor, number_of
from ds_reshard.model.records import GlobalName, ObjectRecord, TensorRecord
from ds_reshard.model.reports import GroupEntry

_SHOWN_ITEMS = 64

Scalars = Mapping[TensorRecord, ScalarTensor]


def plain(value: object, scalars: Scalars, depth: int = 3) -> object:
    """A value as JSON can hold it: what JSON has no word for is named, what is long or deep is counted.

    `scalars` holds the tensors of one element whose bytes were read.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, TensorRecord):
        value = scalars.get(value, value)
    if isinstance(value, ScalarTensor | TensorRecord):
        return _number(value)
    if isinstance(value, GlobalName):
        return str(value)
    if isinstance(value, ObjectRecord):
        return f"a {value.callable}"
    if isinstance(value, dict | list | tuple) and (len(value) > _SHOWN_ITEMS or not depth):
        return f"{len(value)} items"
    if isinstance(value, dict):
        return {str(key): plain(item, scalars, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, scalars, depth - 1) for item in value]
    return f"a {type(value).__name__}"


def group_entries(
    groups: Iterable[tuple[Sequence[str], Mapping[str, object] | None]],
    shapes: Mapping[str, tuple[int, ...]],
    scalars: Mapping[TensorRecord, ScalarTensor] = {},
) -> tuple[GroupEntry, ...]:
    """Param groups by their members and hyper-parameters, as they are told; `shapes` are those of parameters.

    `scalars` are the hyper-parameters that were kept as tensors, where they were read.
    """
    made = []
    for number, (members, hyperparameters) in enumerate(groups):
        known = [prod(shapes[name]) for name in members if name in shapes]
        numel = sum(known) if len(known) == len(members) else None
        told = None
        if hyperparameters is not None:
            told = {str(name): plain(value, scalars) for name, value in hyperparameters.items()}
        made.append(GroupEntry(number=number, members=len(members), numel=numel, hyperparameters=told))
    return tuple(made)


def _number(value: ScalarTensor | TensorRecord) -> object:
    number = number_of(value) if isinstance(value, ScalarTensor) else None
    return plain(number, {}) if number is not None else f"a {value.dtype.label} tensor of shape {list(value.shape)}"


def single_elements(values: Iterable[object]) -> Iterator[TensorRecord]:
    """The tensors of one element among the values: learning rates and steps that were kept as tensors."""
    return (value for value in values if isinstance(value, TensorRecord) and value.numel == 1)


def read_scalars(path: str, tensors: Iterable[TensorRecord]) -> dict[TensorRecord, ScalarTensor]:
    """The bytes of small tensors of one file, which is opened once, and not at all for none."""
    wanted = list(dict.fromkeys(tensors))
    if not wanted:
        return {}
    with open_archive(path) as archive:
        return {t: ScalarTensor(dtype=t.dtype, shape=t.shape, data=archive.tensor_bytes(t)) for t in wanted}
