"""What a source of one format has for targets of another: DeepSpeed's for FSDP, and FSDP's for DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.dcp.target import Contents
from ds_reshard.formats.zero.adopted import Foreign
from ds_reshard.formats.zero.compared import LAYOUT_ENTRIES
from ds_reshard.formats.zero.target import refuse_source
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region
from ds_reshard.operations.source import Source

Path = tuple[object, ...]
_ZEROS = memoryview(bytes(1 << 20))


def contents_of(source: Source) -> Contents:
    """Tensors, optimizer and the values beside them: of DeepSpeed counters, scheduler and client state.

    Raises UnsupportedLayout for an optimizer that names no parameter, and for tensors that do not lie row-major.
    """
    if source.zero is not None:
        refuse_source(source.zero, "dcp")
    raise_faults(list(_left_out(source)), subject=f"converting {source.folder} to dcp")
    objects = dict(source.saved.objects) if source.saved is not None else {}
    if source.zero is not None:
        entries = source.zero.model.entries
        kept = {name: value for name, value in entries.items() if name not in LAYOUT_ENTRIES and value is not None}
        objects = dict(_flattened((), kept))
    return Contents(
        folder=source.folder,
        layout=source.layout,
        facts=source.facts,
        shared=source.shared,
        objects=objects,
        beside=source.saved.beside if source.saved is not None else {},
    )


def _left_out(source: Source) -> Iterator[Fault]:
    mend = "load it in a run, and save contiguous tensors there"
    for name in source.strided():
        yield UnsupportedLayout.fault(name, "does not lie row-major in the file", mend=mend)
    for note in source.saved.notes if source.saved is not None else ():
        mend = "--to safetensors for the weights"
        yield UnsupportedLayout.fault(source.folder, note, mend=mend)


def _flattened(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    """The innermost values of nested dicts by the keys that lead to them, as `flatten_state_dict` of torch has them."""
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, part in value.items():
            yield from _flattened((*path, key), part)
    elif path:
        yield path, value


def foreign_of(source: Source) -> Foreign:
    """A checkpoint of FSDP as what DeepSpeed's files are made of; equal weights without states are tied ones."""
    assert source.saved is not None
    state = source.saved
    entries: dict[str, object] = {}
    for path, value in state.objects.items():
        _place(entries, tuple(map(str, path)), value)
    records = dict(_whole(source))
    for name, keys in state.beside.items():
        if name in records:
            _place(entries, tuple(map(str, keys)), records[name])
    return Foreign(
        folder=source.folder,
        layout=state.layout,
        facts=state.facts,
        shared=dict(_tied(source)),
        entries=entries,
        beside=state.beside.keys(),
        records=records,
        ranks=source.dp,
    )


def _whole(source: Source) -> Iterator[tuple[str, TensorRecord]]:
    """Weights without states that lie in one piece, as what torch would have saved of each."""
    for key, placement in source.layout.placements.items():
        if key.kind == "weight" and len(source.layout.kinds(key.name)) == 1:
            extents = _extents(source, key)
            if len(extents) == 1 and extents[0].record.nbytes == placement.numel * placement.dtype.itemsize:
                record = extents[0].record
                made = new_tensor(str(record.byte_offset), placement.shape, placement.dtype)
                place = replace(made.storage, path=record.path, byte_offset=record.byte_offset, crc32=record.crc32)
                yield key.name, replace(made, storage=place)


def _place(entries: dict[str, object], path: tuple[str, ...], value: object) -> None:
    """Nest a value as it was; where another value is in the way, under its whole name."""
    at = entries
    for key in path[:-1]:
        inner = at.setdefault(key, {})
        if not isinstance(inner, dict):
            entries[".".join(path)] = value
            return
        at = inner
    at[path[-1]] = value


def _tied(source: Source) -> Iterator[tuple[str, str]]:
    """Weights without states whose bytes are those of a trained one, by the checksums in their files.

    `get_state_dict` saves tied weights under each of their names. Zeros are no sign of it.
    """
    owners: dict[object, str] = {}
    left: list[TensorKey] = []
    for key in source.layout.placements:
        if key.kind == "weight" and len(source.layout.kinds(key.name)) > 1:
            owners.setdefault(_sums(source, key), key.name)
        elif key.kind == "weight":
            left.append(key)
    for key in left:
        sums = _sums(source, key)
        if sums in owners and not all(crc == _of_zeros(nbytes) for _, nbytes, crc in sums[1]):
            yield key.name, owners[sums]


def _sums(source: Source, key: TensorKey) -> tuple[object, tuple[tuple[int, int, int | None], ...]]:
    """Shape, type and the records of a tensor with their checksums; a record without one is like no other."""
    placement, extents = source.layout[key], _extents(source, key)
    alone = key if not extents or any(extent.record.crc32 is None for extent in extents) else None
    records = dict.fromkeys((one.numel, one.record.nbytes, one.record.crc32) for one in extents)
    return (placement.shape, placement.dtype, alone), tuple(records)


def _extents(source: Source, key: TensorKey) -> list[Extent]:
    shape = source.layout[key].shape
    region = Region(box=Box.whole(shape), start=0, stop=prod(shape))
    return [fragment.extent for _, fragment in source.index.locate(key, region)]


def _of_zeros(nbytes: int) -> int:
    found = 0
    for at in range(0, nbytes, len(_ZEROS)):
        found = crc32(_ZEROS[: nbytes - at], found)
    return found
