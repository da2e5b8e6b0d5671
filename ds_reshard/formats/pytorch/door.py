"""Plain PyTorch as the door knows it: what it opens, and what it writes of any content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_reshard.containers.safetensors import unwritable
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.pytorch.checkpoint import OPTIMIZERS, SCHEDULERS, list_pytorch, open_pytorch
from ds_reshard.formats.pytorch.weights import placed, safetensors, write_safetensors, write_torch
from ds_reshard.model.checkpoint import Checkpoint, Format, SavedCheckpoint
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content, TensorSource
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import new_tensor
from ds_reshard.model.target import ConversionRequest, Target, TargetFile, Unit

TO = "pytorch"


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
    files, beside = safetensors(weights), tuple(_beside(content))
    units = [*files.units, *([Unit(family=TO, shard=0, files=beside)] if beside else ())]
    return Target(
        layout=Layout({**files.placements, **placed(states, TO)}, {unit.family: 1 for unit in units}),
        sources={key: held.origin for key, held in {**weights, **states}.items()},
        units=units,
        pointers=files.index,
        notes=(*_left_out(content), *content.notes),
    )


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
    for name, first in content.tied.items():
        yield f"{name} is tied to {first}, and is there under that name alone"


PYTORCH = Format(
    name="plain PyTorch",
    list=list_pytorch,
    open=lambda listing: SavedCheckpoint(open_pytorch(listing.folder), listing.nbytes),
    open_weights=lambda listing: SavedCheckpoint(open_pytorch(listing.folder, optimizer=False), listing.nbytes),
    writes={TO: _write, "safetensors": write_safetensors, "torch": write_torch},
)
