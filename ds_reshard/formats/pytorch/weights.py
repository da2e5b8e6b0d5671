"""The tensors of any content in plain files: safetensors in Hugging Face's layout, or a torch file for each kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_reshard.containers.safetensors import shard_index, shards, unwritable
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import MASTER, WEIGHT, Content, TensorSource
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import ConversionRequest, Target, TargetFile, Unit

_SIXTEEN = (ElementType.FLOAT16, ElementType.BFLOAT16)
_FLOATS = (ElementType.FLOAT64, ElementType.FLOAT32, *_SIXTEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Safetensors:
    """Files of weights: `model.safetensors`, or `model-0000i-of-0000N.safetensors` of at most 5 GB with their index."""

    placements: Mapping[TensorKey, Placement]
    units: Sequence[Unit]
    index: Mapping[str, str]


def safetensors(weights: Mapping[TensorKey, TensorSource]) -> Safetensors:
    """The files of these weights, each a unit of its own."""
    nbytes = {key: Box.whole(held.shape).numel * held.dtype.itemsize for key, held in weights.items()}
    files, placements, units = shards(nbytes), dict[TensorKey, Placement](), list[Unit]()
    for name, keys in files.items():
        part = {key: weights[key] for key in keys}
        placements |= placed(part, name)
        tensors = {key.name: new_tensor(str(key), held.shape, held.dtype) for key, held in part.items()}
        file = TargetFile(name=name, tree=partial(dict, tensors), container="safetensors", metadata={"format": "pt"})
        units.append(Unit(family=name, shard=0, files=(file,)))
    return Safetensors(placements=placements, units=units, index=shard_index(files, nbytes))


def placed(tensors: Mapping[TensorKey, TensorSource], family: str) -> dict[TensorKey, Placement]:
    """Whole tensors in buffers of their own, in a family of one shard."""
    return {
        key: chunked_placement(key, held.shape, held.dtype, [Box.whole(held.shape)], family=family, buffer=str(key))
        for key, held in tensors.items()
    }


def write_safetensors(
    content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]
) -> Target:
    """Each weight in `asked.dtype`, from its fp32 master if there is one; else in the type that was trained in.

    Buffers keep their type. Tied weights are there once, under their first name, as safetensors has it.
    """
    weights = _weights(content, asked, [*faults, *unwritable(content.weights)])
    files = safetensors(weights)
    ties = (f"{name} is tied to {first}, and is there under that name alone" for name, first in content.tied.items())
    return Target(
        layout=Layout(files.placements, {unit.family: 1 for unit in files.units}),
        sources={key: held.origin for key, held in weights.items()},
        units=files.units,
        pointers=files.index,
        notes=(*ties, *content.notes),
    )


def write_torch(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """`weight.pt`, a state dict of the module, and a file for each of `fp32`, `exp_avg` and every other state."""
    kinds: dict[str, dict[TensorKey, TensorSource]] = {WEIGHT: _weights(content, asked, faults)}
    for key, held in content.tensors.items():
        if key.kind != WEIGHT:
            kinds.setdefault(key.kind, {})[key] = held
    placements, units = dict[TensorKey, Placement](), list[Unit]()
    for kind, tensors in kinds.items():
        placements |= placed(tensors, kind)
        tree = {key.name: new_tensor(str(key), held.shape, held.dtype) for key, held in tensors.items()}
        tree |= {name: tree[first] for name, first in content.tied.items() if kind == WEIGHT}
        units.append(
            Unit(family=kind, shard=0, files=(TargetFile(name=f"{kind}.pt", tree=partial(OrderedDict, tree)),))
        )
    return Target(
        layout=Layout(placements, dict.fromkeys(kinds, 1)),
        sources={key: held.origin for tensors in kinds.values() for key, held in tensors.items()},
        units=units,
        notes=content.notes,
    )


def _weights(content: Content, asked: ConversionRequest, faults: Sequence[Fault]) -> dict[TensorKey, TensorSource]:
    """Every tensor of the module under its first name, as it is to be written."""
    dtype = ElementType.named(asked.dtype) if asked.dtype is not None else None
    held = content.weights.values()
    lacking = not any(key.kind == MASTER for key in content.tensors)
    if dtype is ElementType.FLOAT32 and lacking and any(one.dtype in _SIXTEEN for one in held):
        what, why = "has 16-bit weights, and no fp32 masters to cast from", [fault.what for fault in content.faults]
        mend = "leave out --dtype: the weights as they were trained"
        said = ("masters that are named, and of the weights' step", "; ".join(why) or "none")
        faults = [*faults, UnsupportedLayout.fault(content.folder, what, *said, mend=mend)]
    raise_faults(faults, subject=f"converting {content.folder} to {asked.to}")
    found: dict[TensorKey, TensorSource] = {}
    for name, one in content.weights.items():
        if dtype not in (None, one.dtype) and one.dtype in _FLOATS and name not in content.buffers:
            master = content.trained.get(name, {}).get(MASTER, one)
            one = replace(one, dtype=dtype, origin=master.origin)
        found[TensorKey(name, WEIGHT)] = one
    return found
