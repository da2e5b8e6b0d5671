"""The files of a ZeRO checkpoint that is to be written: one column of the grid after another.

A tensor-parallel rank has model and optimizer files of its own, of its shards: those that a run of them alone would
have saved. Where they lie in the whole tensors is what `tensor_parallel` says, as for those that are read. A stage of a
pipeline has those of its parameters; which they are, and in which order, a checkpoint of the coming run shows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ds_reshard.containers.torch_zip_writer import Pickled, pickled
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.experts import expert_of
from ds_reshard.formats.zero.layout import by_key
from ds_reshard.formats.zero.model_states import Kept, ModelStates, section
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
from ds_reshard.model.content import SCHEDULER, regrouped, regrouping_fault
from ds_reshard.model.facts import GroupFacts, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
_AS_SAVED = "give --like a folder that the coming run has saved, with the model and the param groups of the source"
_SUB_GROUP_NUMEL = 10**9  # SUB_GROUP_SIZE of deepspeed/runtime/zero/config.py, 0.19.8


class Column(NamedTuple):
    """The files of one tensor-parallel rank, or of one stage of a pipeline."""

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
    like: ZeroCheckpoint | None = None,
    sub_group_size: int | None = None,
    shards: ZeroShards | None = None,
) -> Target:
    """The files that `tp` times `dp` ranks of DeepSpeed's `kind` of FORMATS would have saved of the same state.

    Or those of the stages of a PipelineModule that has saved `like`, each on `dp` ranks. `shards` are the checkpoint's
    where they are opened for something else too.

    Raises UnsupportedLayout, with every reason, where the source does not hold what they need, or nothing says how
    the coming run divides a parameter.
    """
    subject = f"converting {checkpoint.listing.folder} to {kind}"
    refuse_source(checkpoint, kind)
    if kind == "bf16":
        raise_faults(list(_not_bf16(checkpoint)), subject=subject)
    most = (sub_group_size or _saved_sub_group_size(checkpoint)) if FORMATS[kind][1] == 3 else None
    divided, faults = redivisions(checkpoint, tp) if tp > 1 else ({}, [])
    raise_faults(faults, subject=subject)
    own = [of_rank(checkpoint, divided, tp) if tp > 1 else checkpoint] * tp
    if like is not None:
        own, faults = _of_stages(checkpoint, like, kind)
        raise_faults(faults, subject=subject)
    columns: list[Column] = []
    for number, one in enumerate(own):
        if not number or one is not own[0]:
            column, faults = _column(one, kind, dp, most, ordered=like is not None)
            raise_faults(faults, subject=subject)
        columns.append(column._replace(number=number))
    shards_of = {OPTIM: len(columns) * dp, MODEL: len(columns) * columns[0].model.files}
    layout = Layout(by_key(_joined(columns, divided)), shards_of)
    sources = {one.key: one.key for column in columns for one in column.optim.placements()}
    sources |= {key: source for column in columns for key, source in column.model.sources()}
    wants = {key: sources[key if key in sources else key._replace(copy=0)] for key in layout.placements}
    tag = checkpoint.listing.tag
    opened = (shards if len(columns) == 1 else None) or ZeroShards(checkpoint=checkpoint)
    units = tuple(unit for column in columns for unit in _units(opened, column))
    padded = [name for name, division in divided.items() if division.vocabulary]
    notes = (f"rows behind the vocabulary are zeros in {', '.join(padded)}",) if padded else ()
    return Target(layout=layout, wants=wants, units=units, folder=tag, pointers={"latest": tag}, notes=notes)


def _column(
    checkpoint: ZeroCheckpoint, kind: str, dp: int, most: int | None, *, ordered: bool
) -> tuple[Column, list[Fault]]:
    wrapper, stage = FORMATS[kind]
    order = group_order(checkpoint)
    if checkpoint.layers is not None and stage == 1 and not ordered:
        order = [{name: group[name] for name in ties_first(group)} for group in order]
    flats, faults = make_flats(checkpoint, order, dp, sub_group_numel_most=most)
    optim = OptimizerTarget(checkpoint=checkpoint, kind=wrapper, stage=stage, dp=dp, flats=tuple(flats))
    model = ModelTarget(checkpoint=checkpoint, stage=stage, dp=dp, order=[flat.shapes for flat in flats])
    return Column(0, optim, model), faults


def redivisions(checkpoint: ZeroCheckpoint, tp: int) -> tuple[dict[str, Division], list[Fault]]:
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
    if checkpoint.layers is not None or apart:
        what, mend = "has files of layers or experts", "--names, for a plain module; or convert it without --tp"
        faults.append(UnsupportedLayout.fault(folder, what, "one model file for each rank", "several", mend=mend))
    return made, faults


def of_rank(checkpoint: ZeroCheckpoint, divided: Mapping[str, Division], tp: int) -> ZeroCheckpoint:
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


def _of_stages(checkpoint: ZeroCheckpoint, like: ZeroCheckpoint, kind: str) -> tuple[list[ZeroCheckpoint], list[Fault]]:
    """The checkpoints of runs that have one stage each, with the parameters and param groups that it has in `like`."""
    where, faults = like.listing.folder, list(_unlike(checkpoint, like, kind))
    if faults:
        return [], faults
    assert checkpoint.facts is not None and checkpoint.layers is not None
    groups = checkpoint.facts.groups
    home = {name: number for number, group in enumerate(groups) for name in group.members}
    texts = [canonical(dict(group.hyperparameters or {})) for group in groups]
    files = [(name, checkpoint.layers[name]) for name in sorted(checkpoint.layers)]
    made = []
    for number, (column, stage) in enumerate(zip(like.columns, like.stages, strict=True)):
        members = [[name for flat in flats for name in column.shapes[flat]] for flats in column.first.members]
        for names in members:
            other = next((name for name in names if texts[home[name]] != texts[home[names[0]]]), None)
            if other is not None:
                what, said = "is in a param group with parameters of other hyper-parameters", f"those of {names[0]}"
                faults.append(UnsupportedLayout.fault(f"{stage.path}: {other}", what, said, "others", mend=_AS_SAVED))
        order = [home[names[0]] for names in members]
        schedule = checkpoint.model.entries.get(SCHEDULER)
        unknown: list[str] = []
        if isinstance(schedule, dict):
            schedule, unknown = regrouped(schedule, order, len(groups))
        faults += [regrouping_fault(entry, where) for entry in unknown]
        entries = {
            **checkpoint.model.entries,
            "mp_world_size": len(like.stages),
            "checkpoint_parallel_dimensions": {"pp_degree": len(like.stages), "tp_degree": 1},
            "buffer_names": sorted(stage.buffer_names),
            SCHEDULER: schedule,
        }
        facts = [
            GroupFacts(members=tuple(names), hyperparameters=groups[g].hyperparameters)
            for names, g in zip(members, order, strict=True)
        ]
        shapes = tuple({name: checkpoint.model.trainable[name] for name in names} for names in members)
        begin, end = (len(files) * at // len(like.stages) for at in (number, number + 1))
        one = replace(
            checkpoint,
            model=replace(checkpoint.model, entries=entries, param_shapes=shapes),
            facts=replace(checkpoint.facts, groups=tuple(facts)),
            layers=dict(files[begin:end]),
        )
        made.append(one)
    return made, faults


def _unlike(checkpoint: ZeroCheckpoint, like: ZeroCheckpoint, kind: str) -> Iterator[Fault]:
    """Where a checkpoint of the coming run does not show what is needed, or shows another model's."""
    where, trained = like.listing.folder, checkpoint.model.trainable
    if not like.stages or like.grid.tp > 1 or not like.columns:
        what, mend = "shows no stages", "give --like a folder that the PipelineModule has saved at ZeRO stage 1"
        yield UnsupportedLayout.fault(where, what, "a PipelineModule, tp=1, ZeRO stage 1", str(like.grid), mend=mend)
    elif checkpoint.layers is None or FORMATS[kind][1] != 1:
        what, mend = "cannot be the files of a PipelineModule", "--to zero1 or bf16, without --names"
        found = kind if checkpoint.layers is not None else "a plain module"
        where = checkpoint.listing.folder
        yield UnsupportedLayout.fault(where, what, "stage 1, and a PipelineModule's names", found, mend=mend)
    else:
        for name in sorted(trained.keys() | like.model.trainable.keys()):
            own, shown = trained.get(name), like.model.trainable.get(name)
            if own != shown:
                said = ["none" if shape is None else str([*shape]) for shape in (shown, own)]
                yield ModelMismatch.fault(f"{where}: {name}", "is another parameter there", *said, mend=_AS_SAVED)
        lacking = sorted(set(like.listing.layers.values()) - checkpoint.layers.keys())
        for file in lacking:
            what = "is a file of a layer that the source has no file of"
            yield ModelMismatch.fault(f"{where}/{file}", what, "the same layers", "none", mend=_AS_SAVED)


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
    trees = _ModelTrees(model, shards, apart)
    for rank in range(model.files):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if model.stage == 3 else f"{mp}_model_states.pt"
        file = TargetFile(name=name, tree=partial(trees.of, rank))
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


class _ModelTrees:
    """The model files of a column, without the weights that are in files `apart`.

    The saving run's own file of a rank may hold its buffers and its entries; where it has none, the first's. Ranks of
    which the same was saved have the same written, pickled once. Any thread may ask.
    """

    def __init__(self, model: ModelTarget, shards: ZeroShards, apart: frozenset[str]) -> None:
        self._model = model
        self._shards = shards
        self._apart = apart
        self._first, self._others = Kept[Pickled](), Kept[Pickled]()  # the first rank's file alone names what is tied

    def of(self, rank: int) -> Pickled:
        checkpoint = self._model.checkpoint
        own = rank < checkpoint.dp and rank in checkpoint.listing.model
        saved = self._shards.model_states(rank) if own else checkpoint.model
        kept = self._others if rank else self._first
        return kept.of(saved.entries, len(saved.module), lambda: pickled(self._tree(rank, saved)))

    def _tree(self, rank: int, saved: ModelStates) -> Mapping[str, object]:
        """One file's content, without the mark of a universal checkpoint."""
        tree = self._model.tree(rank, saved)
        if tree.get("universal_checkpoint_info") == UNIVERSAL_INFO:
            del tree["universal_checkpoint_info"]
        module = tree["module"]
        assert isinstance(module, OrderedDict)
        for name in self._apart:
            del module[name]
        return {**tree, "module": None} if self._model.layers is not None else tree


def _prefix(checkpoint: ZeroCheckpoint, optim: OptimizerTarget) -> str:
    """What DeepSpeed begins the names of optimizer files with in a bf16 run (`_get_zero_ckpt_prefix`, engine.py)."""
    if checkpoint.optim is not None:
        return checkpoint.listing.optim_prefix
    return "bf16_" if _in_bf16(checkpoint) else ""


def _saved_sub_group_size(checkpoint: ZeroCheckpoint) -> int:
    size = section(checkpoint.model.config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL
