"""The content of a source of any format: what every format that is written is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.formats.nanotron.content import content_of as nanotron_content
from ds_reshard.formats.zero.content import content_of as zero_content
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content, Held, schedule_of
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region
from ds_reshard.operations.source import Source

_RUNNING = ("running_mean", "running_var")
_ZEROS = memoryview(bytes(1 << 20))


def content_of(source: Source) -> Content:
    """All of it. Raises UnsupportedLayout, with every reason, for what no content can hold."""
    if source.zero is not None:
        return zero_content(source.zero)
    return nanotron_content(source.nanotron) if source.nanotron is not None else _saved_content(source)


def _saved_content(source: Source) -> Content:
    """Of a run whose weights are its optimizer's masters; equal weights without states are tied ones."""
    assert source.saved is not None
    state, layout = source.saved, source.layout
    scalars = state.facts.scalars if state.facts is not None else {}
    tied = dict(_tied(source))
    tensors: dict[TensorKey, Held] = {}
    for key, place in layout.placements.items():
        if key.kind == WEIGHT and key.name in tied:
            continue
        held = tensors[key] = Held(shape=place.shape, dtype=place.dtype, origin=key)
        trained = len(layout.kinds(key.name)) > 1 or key.name in scalars
        if key.kind == WEIGHT and trained and place.dtype is ElementType.FLOAT32 and key.name not in state.beside:
            tensors[TensorKey(name=key.name, kind=MASTER)] = held
    weights = {key.name: held for key, held in tensors.items() if key.kind == WEIGHT and key.name not in state.beside}
    mend = "--to safetensors for the weights"
    content = Content(
        folder=source.folder,
        ranks=state.ranks,
        tensors=tensors,
        facts=state.facts,
        tied=tied,
        buffers=frozenset(_buffers(weights)),
        beside=state.beside,
        records=dict(_whole(source)),
        objects=state.objects,
        faults=tuple(UnsupportedLayout.fault(source.folder, note, mend=mend) for note in state.notes),
        notes=tuple(_left_out(source)),
    )
    groups = len(state.facts.groups) if state.facts is not None else 0
    return replace(content, schedule=schedule_of(content.entries.get(SCHEDULER), groups))


def _left_out(source: Source) -> Iterator[str]:
    if any(name.startswith("extra_state") for name in source.files):
        yield "the extra_state files (schedule and random states) are not carried over"


def _buffers(weights: Mapping[str, Held]) -> Iterator[str]:
    """Entries that no optimizer could train, and the statistics of torch's normalisation layers beside them."""
    for name, held in weights.items():
        layer, _, leaf = name.rpartition(".")
        counted = f"{layer}.num_batches_tracked" in weights
        if not held.dtype.label.startswith(("float", "bfloat", "complex")) or (counted and leaf in _RUNNING):
            yield name


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
