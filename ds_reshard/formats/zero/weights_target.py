"""A checkpoint's tensors in plain files: weights as safetensors in Hugging Face's layout, or a torch file a kind."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from ds_reshard.containers.safetensors import shard_index, shards, unwritable
from ds_reshard.errors import UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.flat import by_key, in_one_shard, whole
from ds_reshard.formats.zero.model_states import LAGGING
from ds_reshard.formats.zero.target import first_names, quantized_faults, whole_tensors
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.target import Target, TargetFile, Unit

WEIGHTS = ("safetensors", "torch")
DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = (ElementType.FLOAT64, ElementType.FLOAT32, ElementType.FLOAT16, ElementType.BFLOAT16)


def safetensors_target(checkpoint: ZeroCheckpoint, dtype: str | None) -> Target:
    """`model.safetensors`, or `model-0000i-of-0000N.safetensors` of at most 5 GB with their index.

    Each parameter in `dtype`, from its fp32 master where there is one; else in the type that was trained in. Buffers
    keep their type. Tied weights are there once, under their first name, as safetensors has it.
    """
    weights = _weights(checkpoint, dtype)
    raise_faults(list(unwritable(key.name for key in weights)), subject=f"converting {checkpoint.listing.folder}")
    nbytes = {key: placement.numel * placement.dtype.itemsize for key, placement in weights.items()}
    files = shards(nbytes)
    placements, units = [], []
    for number, (name, group) in enumerate(files.items()):
        tensors = {key.name: new_tensor(str(key), weights[key].shape, weights[key].dtype) for key in group}
        placements += [in_one_shard(weights[key], number, family="weights", buffer=str(key)) for key in group]
        file = TargetFile(name=name, tree=partial(dict, tensors), container="safetensors", metadata={"format": "pt"})
        units.append(Unit(family="weights", shard=number, files=(file,)))
    return Target(
        layout=Layout(by_key(placements), {"weights": len(files)}),
        wants={key: _source(checkpoint, key, dtype) for key in weights},
        units=tuple(units),
        pointers=shard_index(files, nbytes),
        folder="",
    )


def torch_target(checkpoint: ZeroCheckpoint, dtype: str | None) -> Target:
    """`weight.pt`, a state dict of the module, and a file for each of `fp32`, `exp_avg` and every other state."""
    weights = _weights(checkpoint, dtype)
    kinds: dict[str, list[Placement]] = {"weight": list(weights.values())}
    for key, placement in checkpoint.layout.placements.items():
        if key.kind != "weight":
            kinds.setdefault(key.kind, []).append(placement)
    placements = {
        p.key: in_one_shard(p, 0, family=p.key.kind, buffer=str(p.key)) for group in kinds.values() for p in group
    }
    trees = {
        kind: {p.key.name: new_tensor(str(p.key), p.shape, p.dtype) for p in group} for kind, group in kinds.items()
    }
    for name, first in first_names(checkpoint.model).items():
        if first in trees["weight"]:
            trees["weight"][name] = trees["weight"][first]
    units = [
        Unit(family=kind, shard=0, files=(TargetFile(name=f"{kind}.pt", tree=partial(OrderedDict, tree)),))
        for kind, tree in trees.items()
    ]
    wants = {key: key if key.kind != "weight" else _source(checkpoint, key, dtype) for key in placements}
    return Target(layout=Layout(placements, dict.fromkeys(kinds, 1)), wants=wants, units=units, pointers={}, folder="")


def _source(checkpoint: ZeroCheckpoint, key: TensorKey, dtype: str | None) -> TensorKey:
    """The master, where another type is asked for or no weight was saved; else the weight."""
    master = TensorKey(name=key.name, kind="fp32")
    if key not in checkpoint.layout:
        return master
    other = dtype is not None and checkpoint.layout[key].dtype.label != dtype
    return master if other and master in checkpoint.layout else key


def _weights(checkpoint: ZeroCheckpoint, dtype: str | None) -> dict[TensorKey, Placement]:
    """Every tensor of the module under its first name, as it is to be written."""
    model = checkpoint.model
    made = whole_tensors(checkpoint.model)
    lost = sorted(name for name, first in first_names(checkpoint.model).items() if first not in made)
    what = "does not lie row-major in the file, as a plain file's tensors do"
    mend = "load it in a run, and save module.state_dict() with contiguous tensors there"
    faults = [UnsupportedLayout.fault(name, what, mend=mend) for name in lost]
    faults += quantized_faults(model)
    narrow = {tensor.dtype for tensor in made.values()} & {ElementType.FLOAT16, ElementType.BFLOAT16}
    if dtype == "float32" and checkpoint.facts is None and narrow:
        what = "its fp32 masters name no parameter (ZeRO stage 0), and its 16-bit weights are not them"
        mend = "leave out --dtype: the weights as they were trained"
        faults.append(UnsupportedLayout.fault(checkpoint.listing.folder, what, mend=mend))
    if dtype == "float32" and model.lagging:
        mend = "leave out --dtype: the weights as they were trained"
        faults.append(UnsupportedLayout.fault(checkpoint.listing.folder, LAGGING, mend=mend))
    raise_faults(faults, subject=f"converting {checkpoint.listing.folder}")
    found = {}
    for name, tensor in made.items():
        cast = name not in model.buffer_names and tensor.dtype in _FLOATS
        kept = ElementType.named(dtype) if dtype is not None and cast else tensor.dtype
        key = TensorKey(name=name, kind="weight")
        found[key] = whole(name, "weight", tensor.shape, kept, family="weights", buffer=name)
    return found
