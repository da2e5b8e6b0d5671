"""`ds-reshard names`: which map fits the names of a checkpoint, and the beginning of one that does."""

from __future__ import annotations

import json
import re

from ds_reshard.errors import ReshardError, faults_of
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import Content
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.reports import MapEntry, Naming
from ds_reshard.operations.name_map import read_name_map, shipped_maps
from ds_reshard.operations.shape_map import Coming, ShapeMap
from ds_reshard.operations.source import Found, open_weights

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


@gc_disabled()
def naming(found: Found, names: str | None) -> Naming:
    """Return what the map `names` makes of a checkpoint, or what each shipped map makes of it."""
    source = open_weights(found, whole=False)
    content = source.content()
    maps = tuple(_applied(name, source, content) for name in ((names,) if names is not None else shipped_maps()))
    fits = any(not one.faults for one in maps)
    return Naming(folder=found.folder, maps=maps, skeleton="" if fits or names is not None else skeleton(content))


def _applied(name: str, source: Checkpoint, content: Content) -> MapEntry:
    """Return the sides of a map and the number of tensors on each, or every reason why it does not fit."""
    try:
        read = read_name_map(name)
        mapped = read.apply(content, source.layout, Coming())
    except ReshardError as error:
        if not faults_of(error):
            raise
        return MapEntry(name=name, about="", faults=tuple(faults_of(error)))
    about, sides = (read.about, read.sides) if isinstance(read, ShapeMap) else ("names alone", ("source", "output"))
    if isinstance(read, ShapeMap) and not mapped.faults and read.side_of(content):
        sides = (sides[1], sides[0])
    weights = (len(content.weights), len(mapped.content.weights))
    return MapEntry(name=name, about=about, sides=sides, weights=weights, faults=mapped.faults)


def fitting_maps(source: Checkpoint, framework: str) -> list[str]:
    """Return the shipped maps that give a checkpoint the names of a framework.

    If none fits, those are returned that have all of its names: no file may tell the numbers of the model.
    """
    content, by_name = source.content(), list[str]()
    for name in shipped_maps():
        read = read_name_map(name)
        if isinstance(read, ShapeMap) and framework in read.sides:
            by_name += [name] if read.has_names(1 - read.sides.index(framework), content) else []
    return [name for name in by_name if not _applied(name, source, content).faults] or by_name


def skeleton(content: Content) -> str:
    """Return a map with an entry for each name of the checkpoint, numbers in names as indices; for a person to fill."""
    shapes: dict[str, tuple[int, ...]] = {}
    ends: dict[str, int] = {}
    for name, tensor in content.weights.items():
        numbers = [int(found) for found in _NUMBER.findall(name)]
        indices = iter("lemnijk")
        form = _NUMBER.sub(lambda _, indices=indices: f"{{{next(indices, 'x')}}}", name)  # type: ignore[misc]
        shapes.setdefault(form, tensor.shape)
        for index, number in zip("lemnijk", numbers, strict=False):
            ends[index] = max(ends.get(index, 0), number + 1)
    lines = ["{", '  "sides": ["saved", "run"],', f'  "numbers": {json.dumps({i: ends[i] for i in ends})},']
    lines += [f'  "indices": {json.dumps({index: index for index in ends})},', '  "entries": [']
    entries = [
        json.dumps({"saved": form, "run": f"name of the run, for {list(shape)}"}) for form, shape in shapes.items()
    ]
    return "\n".join([*lines, ",\n".join(f"    {entry}" for entry in entries), "  ]", "}"])
