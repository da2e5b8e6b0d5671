"""The files of a ZeRO checkpoint that is to be written: one column of the grid after another.

A tensor-parallel rank has model and optimizer files of its own, of its shards: those that a run of them alone would
have saved. Where they lie in the whole tensors is what `tensor_parallel` says, as for those that are read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.experts import expert_of
from ds_reshard.formats.zero.layout import by_key
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.pipeline import ties_first
from ds_reshard.formats.zero.rows import unknown_fault
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.target import (
    UNIVERSAL_INFO,
    ModelTarget,
    OptimizerTarget,
    first_names,
    group_order,
    make_flats,
    refuse_source,
    whole_tensors,
)
from ds_reshard.formats.zero.tensor_parallel import (
    Division,
    Misfit,
    divisions,
    pattern_info,
    redivided,
    rules_given,
    shard_shape,
)
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
_SUB_GROUP_NUMEL = 10**9  # SUB_GROUP_SIZE of deepspeed/runtime/zero/config.py, 0.19.8


class Column(NamedTuple):
    """The files of one tensor-parallel rank."""

    number: int
    optim: OptimizerTarget
    model: ModelTarget

    def placements(self) -> Iterator[Placement]:
        """Where its tensors lie among the shards of all columns."""
        for placement in self.optim.placements():
            yield _moved(placement, self.number * self.optim.dp)
        for placement in self.model.placements():
            yield _moved(placement, self.number * self.model.files)


def _moved(placement: Placement, first: int) -> Placement:
    cut = placement.cut._replace(first=placement.cut.first + first)
    return placement._replace(cut=cut, replicated=False) if first or placement.replicated else placement


def zero_target(
    checkpoint: ZeroCheckpoint,
    kind: str,
    dp: int,
    *,
    tp: int = 1,
    sub_group_size: int | None = None,
    shards: ZeroShards | None = None,
) -> Target:
    """The files that `tp` times `dp` ranks of DeepSpeed's `kind` of FORMATS would have saved of the same state.

    `shards` are the checkpoint's where they are opened for something else too.

    Raises UnsupportedLayout, with every reason, where the source does not hold what they need, or nothing says how
    the coming run divides a parameter.
    """
    subject = f"converting {checkpoint.listing.folder} to {kind}"
    refuse_source(checkpoint, kind)
    if kind == "bf16":
        raise_faults(list(_not_bf16(checkpoint)), subject=subject)
    most = (sub_group_size or _saved_sub_group_size(checkpoint)) if FORMATS[kind][1] == 3 else None
    divided, faults = _divided(checkpoint, tp) if tp > 1 else ({}, [])
    raise_faults(faults, subject=subject)
    first, faults = _column(_of_rank(checkpoint, divided, tp) if tp > 1 else checkpoint, kind, dp, most)
    raise_faults(faults, subject=subject)
    columns = [first._replace(number=number) for number in range(tp)]
    layout = Layout(by_key(_joined(columns, divided)), {OPTIM: tp * dp, MODEL: tp * first.model.files})
    sources = {**{one.key: one.key for one in first.optim.placements()}, **dict(first.model.sources())}
    wants = {key: sources[key if key in sources else key._replace(copy=0)] for key in layout.placements}
    tag = checkpoint.listing.tag
    opened = (shards if tp == 1 else None) or ZeroShards(checkpoint=checkpoint)
    units = tuple(unit for column in columns for unit in _units(opened, column))
    padded = [name for name, division in divided.items() if division.vocabulary]
    notes = (f"rows behind the vocabulary are zeros in {', '.join(padded)}",) if padded else ()
    return Target(layout=layout, wants=wants, units=units, folder=tag, pointers={"latest": tag}, notes=notes)


def _column(checkpoint: ZeroCheckpoint, kind: str, dp: int, most: int | None) -> tuple[Column, list[Fault]]:
    wrapper, stage = FORMATS[kind]
    order = group_order(checkpoint)
    if checkpoint.layers and stage == 1:
        order = [{name: group[name] for name in ties_first(group)} for group in order]
    flats, faults = make_flats(checkpoint, order, dp, sub_group_numel_most=most)
    optim = OptimizerTarget(checkpoint=checkpoint, kind=wrapper, stage=stage, dp=dp, flats=tuple(flats))
    model = ModelTarget(checkpoint=checkpoint, stage=stage, dp=dp, order=[flat.shapes for flat in flats])
    return Column(0, optim, model), faults


def _divided(checkpoint: ZeroCheckpoint, tp: int) -> tuple[dict[str, Division], list[Fault]]:
    """How the coming run's ranks divide each tensor: as the source's do, or as a rule or a pattern says."""
    model, folder = checkpoint.model, checkpoint.listing.folder
    shapes = {name: tensor.shape for name, tensor in whole_tensors(model).items()}
    buffers = {name for name in shapes if name in model.buffer_names}
    info = model.entries.get("universal_checkpoint_info")
    unsaid = {name: [shape] for name, shape in shapes.items() if name not in checkpoint.divided and name not in buffers}
    found, unknown = divisions(unsaid, info if isinstance(info, dict) else {}, rules_given())
    found |= {name: division for name, division in checkpoint.divided.items() if name in shapes}
    made: dict[str, Division] = {}
    for name, division in found.items():
        try:
            made[name] = redivided(division, shapes[name], tp)
        except Misfit as misfit:
            unknown[name] = misfit
    faults = [unknown_fault(name, misfit, folder) for name, misfit in unknown.items()]
    sizes = sorted({division.shape[0] for division in made.values() if division.vocabulary})
    if len(sizes) > 1:
        what, mend = "has two vocabularies, and DeepSpeed's files have a place for one size", "convert it at --tp 1"
        faults.append(UnsupportedLayout.fault(folder, what, "one size", ", ".join(map(str, sizes)), mend=mend))
    apart = sorted(name for name in shapes if expert_of(name) is not None)
    if checkpoint.layers or apart:
        what, mend = "has files of layers or experts", "--names, for a plain module; or convert it without --tp"
        faults.append(UnsupportedLayout.fault(folder, what, "one model file for each rank", "several", mend=mend))
    return made, faults


def _of_rank(checkpoint: ZeroCheckpoint, divided: Mapping[str, Division], tp: int) -> ZeroCheckpoint:
    """The checkpoint of a run that has one rank's shards, and nothing else: those of all ranks have the same shapes."""
    model = checkpoint.model
    shapes = {name: shard_shape(division) for name, division in divided.items()}
    made, firsts = whole_tensors(model), first_names(model)
    own = {name: new_tensor(f"module/{name}", shapes.get(name, one.shape), one.dtype) for name, one in made.items()}
    entries = {
        **model.entries,
        "mp_world_size": tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "universal_checkpoint_info": pattern_info(divided),
    }
    return replace(
        checkpoint,
        listing=replace(checkpoint.listing, model={}),
        model=replace(
            model,
            entries=entries,
            module={name: own.get(firsts[name], tensor) for name, tensor in model.module.items()},
            param_shapes=tuple({name: shapes[name] for name in group} for group in model.param_shapes or ()),
            frozen_shapes={name: shapes[name] for name in model.frozen_shapes},
        ),
    )


def _joined(columns: Sequence[Column], divided: Mapping[str, Division]) -> Iterator[Placement]:
    """Where whole tensors lie: in the shards of all columns, or, where they are not divided, once in each."""
    held: dict[TensorKey, list[tuple[Column, Placement]]] = {}
    for column in columns:
        for placement in column.placements():
            held.setdefault(placement.key, []).append((column, placement))
    for key, members in held.items():
        division = divided.get(key.name)
        if division is None or division.replicated:
            for copy, (_, placement) in enumerate(members):
                yield placement if len(members) == 1 else placement._replace(key=key._replace(copy=copy))
            continue
        whole = members[0][1]._replace(shape=division.shape, box=Box.whole(division.shape))
        tiles = tuple(
            whole._replace(box=box, cut=placement.cut._replace(phase=placement.cut.phase + at))
            for column, placement in members
            for box, at in division.ranks[column.number]
        )
        yield tiles[0] if len(tiles) == 1 else whole._replace(tiles=tiles)


def _units(shards: ZeroShards, column: Column) -> Iterator[Unit]:
    optim, model, mp = column.optim, column.model, f"mp_rank_{column.number:02d}"
    files = model.apart()
    apart = frozenset(key.name for entries in files.values() for key in entries.values())
    others = (TargetFile(name=name, tree=partial(model.part, entries)) for name, entries in files.items())
    for rank in range(model.files):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if model.stage == 3 else f"{mp}_model_states.pt"
        file = TargetFile(name=name, tree=partial(_model_tree, model, shards, rank, apart))
        yield Unit(family=MODEL, shard=column.number * model.files + rank, files=(file, *others))
    for rank in range(optim.dp):
        name = f"{_prefix(model.checkpoint, optim)}zero_pp_rank_{rank}_{mp}_optim_states.pt"
        file = TargetFile(name=name, tree=partial(optim.tree, rank), data=optim.data())
        yield Unit(family=OPTIM, shard=column.number * optim.dp + rank, files=(file,))


def _not_bf16(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """BF16_Optimizer trains bf16 weights alone (`_configure_zero_optimizer` in deepspeed/runtime/engine.py, 0.19.8)."""
    if not _in_bf16(checkpoint):
        expected = '"bf16": {"enabled": true} in the saved DeepSpeed JSON'
        where, what = checkpoint.listing.folder, "was not trained in bf16"
        yield UnsupportedLayout.fault(where, what, expected, "no such entry", mend="--to zero1")


def _in_bf16(checkpoint: ZeroCheckpoint) -> bool:
    config = checkpoint.model.config
    return section(config, "bf16" if "bf16" in config else "bfloat16").get("enabled") is True


def _model_tree(model: ModelTarget, shards: ZeroShards, rank: int, apart: frozenset[str]) -> Mapping[str, object]:
    """One model file, without the weights that are in files `apart`, and the mark of a universal checkpoint.

    The saving run's own file of that rank may hold its buffers and its entries; where it has none, the first's.
    """
    checkpoint = model.checkpoint
    own = rank < checkpoint.dp and rank in checkpoint.listing.model
    tree = model.tree(rank, shards.model_states(rank) if own else checkpoint.model)
    if tree.get("universal_checkpoint_info") == UNIVERSAL_INFO:
        del tree["universal_checkpoint_info"]
    module = tree["module"]
    assert isinstance(module, OrderedDict)
    for name in apart:
        del module[name]
    return {**tree, "module": None} if model.layers else tree


def _prefix(checkpoint: ZeroCheckpoint, optim: OptimizerTarget) -> str:
    """What DeepSpeed begins the names of optimizer files with in a bf16 run (`_get_zero_ckpt_prefix`, engine.py)."""
    if checkpoint.optim is not None:
        return checkpoint.listing.optim_prefix
    return "bf16_" if _in_bf16(checkpoint) else ""


def _saved_sub_group_size(checkpoint: ZeroCheckpoint) -> int:
    size = section(checkpoint.model.config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL
