"""Plain PyTorch as the door knows it: what it opens, and what it writes of any content.

Weights are in safetensors in Hugging Face's layout, or in a torch file of each kind of tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ds_reshard.containers.safetensors import shard_index, shards, unwritable
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.pytorch.checkpoint import OPTIMIZERS, SCHEDULERS, list_pytorch, open_pytorch
from ds_reshard.model.checkpoint import Checkpoint, Format, SavedCheckpoint
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content, TensorSource
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.layout import Layout, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import ConversionRequest, Target, TargetFile, Unit

TO = "pytorch"
_SIXTEEN = (ElementType.FLOAT16, ElementType.BFLOAT16)
_FLOATS = (ElementType.FLOAT64, ElementType.FLOAT32, *_SIXTEEN)
Tensors = Mapping[TensorKey, TensorSource]


def _write(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """`model.safetensors`, or shards of 5 GB with their index, and `optimizer.pt`, its groups with their names.

    Weights are the fp32 masters where there are some: a plain optimizer trains the weights themselves.
    """
    faults = [*faults, *content.faults, *unwritable(content.weights), *_unheld(content)]
    raise_faults(faults, subject=f"converting {content.folder} to {asked.to}")
    weights: dict[TensorKey, TensorSource] = {}
    for name, held in content.weights.items():
        weights[TensorKey(name=name, kind=WEIGHT)] = content.trained.get(name, {}).get(MASTER, held)
    states = {key: held for key, held in content.tensors.items() if key.kind not in (MASTER, WEIGHT)}
    tensors, units, index = _safetensors(weights)
    if beside := tuple(_beside(content)):
        units.append(Unit(family=TO, shard=0, files=beside))
    return _target({**tensors, TO: states}, units, index, (*_left_out(content), *_ties(content), *content.notes))


def _write_safetensors(
    content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]
) -> Target:
    """Each weight in `asked.dtype`, from its fp32 master if there is one; else in the type that was trained in.

    Buffers keep their type. Tied weights are there once, under their first name, as safetensors has it.
    """
    weights = _weights(content, asked, [*faults, *unwritable(content.weights)])
    return _target(*_safetensors(weights), (*_ties(content), *content.notes))


def _write_torch(
    content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]
) -> Target:
    """`weight.pt`, a state dict of the module, and a file for each of `fp32`, `exp_avg` and every other state."""
    kinds: dict[str, dict[TensorKey, TensorSource]] = {WEIGHT: _weights(content, asked, faults)}
    for key, held in content.tensors.items():
        if key.kind != WEIGHT:
            kinds.setdefault(key.kind, {})[key] = held
    units = []
    for kind, tensors in kinds.items():
        tree = {key.name: new_tensor(str(key), held.shape, held.dtype) for key, held in tensors.items()}
        tree |= {name: tree[first] for name, first in content.tied.items() if kind == WEIGHT}
        file = TargetFile(name=f"{kind}.pt", tree=partial(OrderedDict, tree))
        units.append(Unit(family=kind, shard=0, files=(file,)))
    return _target(kinds, units, {}, content.notes)


def _target(
    tensors: Mapping[str, Tensors], units: Sequence[Unit], pointers: Mapping[str, str], notes: tuple[str, ...]
) -> Target:
    """Whole tensors, by the families of their files, in buffers of their own."""
    placements = {
        key: chunked_placement(key, held.shape, held.dtype, [Box.whole(held.shape)], family=family, buffer=str(key))
        for family, of_family in tensors.items()
        for key, held in of_family.items()
    }
    sources = {key: held.origin for of_family in tensors.values() for key, held in of_family.items()}
    layout = Layout(placements, {unit.family: 1 for unit in units})
    return Target(layout=layout, sources=sources, units=units, pointers=pointers, notes=notes)


def _safetensors(weights: Tensors) -> tuple[dict[str, Tensors], list[Unit], Mapping[str, str]]:
    """`model.safetensors`, or `model-0000i-of-0000N.safetensors` of at most 5 GB with their index: each a unit."""
    nbytes = {key: Box.whole(held.shape).numel * held.dtype.itemsize for key, held in weights.items()}
    files = shards(nbytes)
    tensors, units = {name: {key: weights[key] for key in keys} for name, keys in files.items()}, list[Unit]()
    for name, part in tensors.items():
        tree = {key.name: new_tensor(str(key), held.shape, held.dtype) for key, held in part.items()}
        file = TargetFile(name=name, tree=partial(dict, tree), container="safetensors", metadata={"format": "pt"})
        units.append(Unit(family=name, shard=0, files=(file,)))
    return dict(tensors), units, shard_index(files, nbytes)


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


def _unheld(content: Content) -> Iterator[Fault]:
    """What an optimizer has, and its file would go without."""
    if content.facts is None:
        return
    mend = "--to safetensors for the weights; resume with the optimizer that saved it, or --to dcp"
    for where in content.nested_states:
        what = "is a state or a value of the optimizer inside a dict or a list, for which optimizer.pt has no place"
        yield UnsupportedLayout.fault(where, what, mend=mend)
    members = {name for group in content.facts.groups for name in group.members}
    for name in sorted({*content.trained, *content.facts.scalars} - members):
        yield UnsupportedLayout.fault(name, "has states, and is in no param group", mend=mend)


def _beside(content: Content) -> Iterator[TargetFile]:
    """The optimizer's file and the scheduler's, where they were saved; small tensors are buffers with their bytes.

    A step is what it was: torch's optimizers make a tensor of a number when they load it (`Adam.__setstate__`, 2.13).
    """
    data: dict[str, bytes] = {}

    def plain(value: object, where: str) -> object:
        if not isinstance(value, ScalarTensor):
            return value
        data[where] = value.data
        return new_tensor(where, value.shape, value.dtype)

    if content.facts is not None:
        groups: list[dict[str, object]] = []
        state: dict[int, dict[str, object]] = {}
        for group in content.facts.groups:
            numbers = range(len(state), len(state) + len(group.members))
            settings = group.hyperparameters or {}
            values = {key: plain(value, f"group\0{len(groups)}\0{key}") for key, value in settings.items()}
            groups.append({**values, "params": list(numbers), "param_names": list(group.members)})
            for number, name in zip(numbers, group.members, strict=True):
                scalars = content.facts.scalars.get(name, {})
                state[number] = {kind: plain(value, f"state\0{number}\0{kind}") for kind, value in scalars.items()}
                for kind, held in content.trained.get(name, {}).items():
                    key = TensorKey(name=name, kind=kind)
                    if kind != MASTER:
                        state[number][kind] = new_tensor(str(key), held.shape, held.dtype)
        tree = {"state": {number: kinds for number, kinds in state.items() if kinds}, "param_groups": groups}
        yield TargetFile(name=OPTIMIZERS[0], tree=lambda: tree, data=data)
    if SCHEDULER in content.entries:
        yield TargetFile(name=SCHEDULERS[0], tree=lambda: content.entries[SCHEDULER])


def _left_out(content: Content) -> Iterator[str]:
    if content.extra_entries or content.extra_tensors:
        names = ", ".join([*content.extra_entries, *content.extra_tensors])
        yield f"left out, as there is no file for them: {names}"


def _ties(content: Content) -> Iterator[str]:
    for name, first in content.tied.items():
        yield f"{name} is tied to {first}, and is there under that name alone"


PYTORCH = Format(
    name="plain PyTorch",
    list=list_pytorch,
    open=lambda listing: SavedCheckpoint(open_pytorch(listing.folder), listing.nbytes),
    open_weights=lambda listing: SavedCheckpoint(open_pytorch(listing.folder, optimizer=False), listing.nbytes),
    writes={TO: _write, "safetensors": _write_safetensors, "torch": _write_torch},
)
