"""Stage-0 optimizers of a pipeline under other stages: which stage had which layers follows from the states alone.

PipelineModule lists its parameters layer by layer (runtime/pipe/module.py, 0.19.8), and a torch optimizer numbers its
states as its param groups list them; this run says which of them are in which group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ds_reshard.errors import ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.pipeline import layer_of, tied_key
from ds_reshard.formats.zero.stage0 import (
    Named,
    all_named,
    alone,
    facts_together,
    groups_fault,
    param_groups,
    torch_optimizer,
    with_order,
)
from ds_reshard.model.content import MASTER
from ds_reshard.model.facts import canonical
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import TensorRecord


class StageOrder(NamedTuple):
    """One stage of a run: its first layer, the one after its last, and the parameters of each param group in order.

    `sizes` are the lengths of the param groups, in a torch optimizer with the frozen parameters that they list.
    """

    first: int
    stop: int
    groups: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]


Modules = list[dict[str | int, tuple[str, ...]]]
"""For each param group the parameters of each layer, by its number, and of each tied module, by its key."""
_Names = tuple[tuple[str, ...], ...]


def fits(saved: ModelStates, run: StageOrder) -> bool:
    """Whether the param groups of a saved stage list as many parameters as those of one of a run, or train as many."""
    lists = [group.get("params") for group in param_groups(torch_optimizer(saved))]
    listed = tuple(len(numbers) if isinstance(numbers, list) else 0 for numbers in lists)
    return run.sizes == listed or [*map(len, run.groups)] == [*map(len, _states_by_group(saved))]


def stages_with_order(checkpoint: ZeroCheckpoint, ties: Mapping[int, str], run: Sequence[StageOrder]) -> Named:
    """A checkpoint of stage 0 with the optimizers of all its stages named, where `run` has other stages.

    No file says which layers a stage had: a division of all layers must fit the number, the order and the shapes of all
    states, and the stages' buffers, and no other may. Of a copy of a tied module only states are told: weights, which
    are the masters, are in no file but the first's.
    """
    folder = checkpoint.listing.folder
    modules, layers = _modules_of(run, ties, folder), max(stage.stop for stage in run)
    held, module = {name for group in modules for names in group.values() for name in names}, checkpoint.model.module
    what = (
        "is missing from the checkpoint, whose optimizers name nothing (ZeRO stage 0): the order of all tells of what"
    )
    mend = "build the model that was saved, or pass load_optimizer_states=False, load_lr_scheduler_states=False"
    lacking = [ModelMismatch.fault(f"parameter {name}", what, mend=mend) for name in sorted(held - set(module))]
    raise_faults(lacking, subject=f"checkpoint {folder}")
    division = _division(checkpoint, modules, ties, layers)
    models = [replace(checkpoint.model, path=own.path, entries=own.entries) for own in checkpoint.stages]
    shapes = [[{name: module[name].shape for name in group} for group in names] for names in division]
    parts = all_named(
        [partial(with_order, alone(checkpoint, one), order) for one, order in zip(models, shapes, strict=True)],
        lambda part, first: _said_by_stage(part, first) == _said_by_stage(first, part),
        first="stage",
        folder=folder,
    )
    extents: dict[str, Extent] = {}
    placements: dict[TensorKey, Placement] = {}
    seen: dict[str, int] = {}
    for stage, ((part, of_one), names) in enumerate(zip(parts, division, strict=True)):
        extents |= {f"stage {stage}: {buffer}": extent for buffer, extent in of_one.items()}
        for key, placement in part.layout.placements.items():
            number = seen.get(key.name, 0)
            if not number or key.kind != MASTER:
                key = key._replace(copy=number)
                placements[key] = placement._replace(key=key, buffer=f"stage {stage}: {placement.buffer}")
        for name in (name for group in names for name in group):
            seen[name] = seen.get(name, 0) + 1
    layout = Layout({**checkpoint.layout.placements, **placements}, checkpoint.layout.shards)
    facts = facts_together([part for part, _ in parts])
    return replace(checkpoint, layout=layout, facts=facts, masters_in_module=True), {0: extents}


def _in_order(first: int, stop: int, ties: Mapping[int, str]) -> list[str | int]:
    """The modules of a stage as `PipelineModule.named_parameters` has them: tied ones first, as they come."""
    tied = dict.fromkeys(ties[layer] for layer in range(first, stop) if layer in ties)
    return [*tied, *(layer for layer in range(first, stop) if layer not in ties)]


def _modules_of(run: Sequence[StageOrder], ties: Mapping[int, str], folder: str) -> Modules:
    """What the stages of a run say together; each must list its modules in their order, and all those alike."""
    found: Modules = [{} for _ in run[0].groups]
    alike = all(len(stage.groups) == len(found) for stage in run)
    for stage in run if alike else ():
        for number, group in enumerate(stage.groups):
            of: dict[str | int, list[str]] = {}
            for name in group:
                tie, layer = tied_key(name), layer_of(name)
                of.setdefault(tie if tie is not None else -1 if layer is None else layer, []).append(name)
            order = [name for one in _in_order(stage.first, stage.stop, ties) for name in of.get(one, ())]
            alike = alike and order == list(group)
            alike = alike and all(found[number].setdefault(one, tuple(own)) == tuple(own) for one, own in of.items())
    homes = [name for group in found for own in group.values() for name in own]
    if not alike or len(homes) != len(set(homes)):
        what = "holds optimizers that name no parameter (ZeRO stage 0), one for each stage of the pipeline, and this "
        what += "run's param groups do not tell their order"
        expected = "as many groups in each stage, each with tied modules first, then layer by layer"
        mend = "build the optimizer from module.parameters(), or resume with the stages that were saved"
        fault = UnsupportedLayout.fault(folder, what, expected, "another order", mend=mend)
        raise_faults([fault], subject="matching a stage-0 optimizer")
    return found


def _division(checkpoint: ZeroCheckpoint, modules: Modules, ties: Mapping[int, str], layers: int) -> tuple[_Names, ...]:
    """The parameters of each param group of each saved stage; raises where none or several divisions fit."""
    saved = [_states_by_group(stage) for stage in checkpoint.stages]
    for stage, groups in zip(checkpoint.stages, saved, strict=True):
        if len(groups) != len(modules):
            raise_faults([groups_fault(stage.path, len(modules), len(groups))], subject="matching a stage-0 optimizer")
    if not any(group for groups in saved for group in groups):  # of an optimizer without states, or without a step
        everything = _named(modules, 0, layers, ties)
        return (everything, *(tuple(() for _ in modules) for _ in saved[1:]))
    ways: dict[int, set[tuple[_Names, ...]]] = {0: {()}}
    for model, groups in zip(checkpoint.stages, saved, strict=True):
        longer: dict[int, set[tuple[_Names, ...]]] = {}
        for first, before in ways.items():
            for stop in range(first, layers + 1):
                names = _named(modules, first, stop, ties)
                if any(len(own) > len(group) for own, group in zip(names, groups, strict=True)):
                    break
                if _fits(checkpoint, names, groups) and _has_buffers(model, _in_order(first, stop, ties)):
                    longer.setdefault(stop, set()).update((*way, names) for way in before)
        ways = {stop: found if len(found) < _WAYS else set(sorted(found)[:_WAYS]) for stop, found in longer.items()}
    found = ways.get(layers, set())
    if len(found) != 1:
        what = "holds optimizers that name no parameter (ZeRO stage 0), one for each stage of the pipeline, and "
        what += "several divisions of the layers fit their states" if found else "no division of the layers fits them"
        expected = "the trainable parameters of this run's layers, in order, shared out among the stages"
        said = "; ".join(f"{sum(map(len, groups))} states" for groups in saved)
        mend = "build the model and the param groups that were saved, or resume with the stages that were saved"
        fault = UnsupportedLayout.fault(checkpoint.listing.folder, what, expected, said, mend=mend)
        raise_faults([fault], subject="matching a stage-0 optimizer")
    return found.pop()


_WAYS = 16


def _states_by_group(model: ModelStates) -> list[list[Mapping[str, object]]]:
    """The states of each param group of a torch optimizer, of the parameters that have one."""
    saved = torch_optimizer(model)
    held = saved.get("state")
    groups: list[list[Mapping[str, object]]] = []
    for group in param_groups(saved):
        numbers = group.get("params")
        of = [held.get(n) for n in numbers] if isinstance(held, dict) and isinstance(numbers, list) else []
        groups.append([state for state in of if isinstance(state, dict)])
    return groups


def _named(modules: Modules, first: int, stop: int, ties: Mapping[int, str]) -> _Names:
    order = _in_order(first, stop, ties)
    return tuple(tuple(name for one in order for name in group.get(one, ())) for group in modules)


def _fits(checkpoint: ZeroCheckpoint, names: _Names, groups: Sequence[Sequence[Mapping[str, object]]]) -> bool:
    """Whether there are as many states as parameters, and each has a tensor of its parameter's shape."""
    module = checkpoint.model.module
    return all(len(own) == len(states) for own, states in zip(names, groups, strict=True)) and all(
        any(isinstance(value, TensorRecord) and value.shape == module[name].shape for value in state.values())
        for own, states in zip(names, groups, strict=True)
        for name, state in zip(own, states, strict=True)
    )


def _has_buffers(model: ModelStates, modules: Sequence[str | int]) -> bool:
    """Whether all buffers that a stage names are of these modules."""
    of = {tied_key(name) if layer_of(name) is None else layer_of(name) for name in model.buffer_names}
    return of <= {*modules, None}


def _said_by_stage(part: ZeroCheckpoint, other: ZeroCheckpoint) -> tuple[list[str], set[str], dict[str, str]]:
    """What two stages say alike: the hyper-parameters of param groups, the counts of steps where both have states, and
    the scalar states of what both have."""
    assert part.facts is not None and other.facts is not None
    own, others = part.facts.scalars, other.facts.scalars
    groups = [canonical(dict(group.hyperparameters or {})) for group in part.facts.groups]
    steps = {canonical(said.get("step")) for said in own.values()} if own and others else set()
    return groups, steps, {name: canonical(dict(said)) for name, said in own.items() if name in others}
