"""The files of a ZeRO checkpoint to be written, one column of the grid after another.

A tensor-parallel rank has model and optimizer files of its shards, as a run of these shards alone would save them;
`tensor_parallel` says where they lie in the whole tensors, as for files that are read. A pipeline stage has the files
of its parameters: a checkpoint of the new run shows which these are, and in which order.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

from ds_reshard.containers.torch_zip_writer import Pickled, pickled
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.content import strided_fault
from ds_reshard.formats.zero.flat import by_key
from ds_reshard.formats.zero.groups import AS_SAVED
from ds_reshard.formats.zero.model_states import IdentityCache, ModelStates, section
from ds_reshard.formats.zero.modules import expert_of, layer_files, tied_key, ties_first
from ds_reshard.formats.zero.target import INFO, UNIVERSAL_INFO, ModelTarget, OptimizerTarget, Saving, make_buffers
from ds_reshard.formats.zero.tensor_parallel import TensorSplit, note_on_unnamed, pattern_info
from ds_reshard.model.content import SCHEDULER, regrouping_fault, reorder_groups
from ds_reshard.model.facts import GroupFacts, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey, placement_of_parts
from ds_reshard.model.region import Box, Shape
from ds_reshard.model.target import RunSizes, Target, TargetFile, Unit

FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
_SIZES = "checkpoint_parallel_dimensions"
_SUB_GROUP_NUMEL = 10**9  # SUB_GROUP_SIZE of deepspeed/runtime/zero/config.py, 0.19.8


class Column(NamedTuple):
    """The files of one tensor-parallel rank, or of one stage of a pipeline."""

    number: int
    optim: OptimizerTarget
    model: ModelTarget

    def placements(self) -> Iterator[Placement]:
        """Yield where the column's tensors lie among the shards of all columns."""
        for placement in self.optim.placements():
            yield _shift_shards(placement, self.number * self.optim.dp)
        for placement in self.model.placements():
            yield _shift_shards(placement, self.number * self.model.files)


def _shift_shards(placement: Placement, first: int) -> Placement:
    cut = placement.cut._replace(first=placement.cut.first + first)
    return placement._replace(cut=cut, replicated=False) if first or placement.replicated else placement


class _Stage(NamedTuple):
    """One stage's param groups, files of layers, and entries that differ from those of a single rank's files."""

    groups: tuple[GroupFacts, ...]
    layers: Mapping[str, Mapping[str, TensorKey]] | None
    entries: Mapping[str, object]


def zero_target(
    saving: Saving, kind: str, dp: int, *, tp: int = 1, like: ZeroCheckpoint | None = None, sub_group: int | None = None
) -> Target:
    """Return the files that `tp` times `dp` DeepSpeed ranks would save of the same state; `kind` is one of FORMATS.

    They have the stages and tensor splits of the run that saved `like`, if it is given. `sub_group` is the size of a
    stage-3 sub-group in elements, None for the saved one.

    Raises UnsupportedLayout, with every reason, if the source lacks something, or a parameter's split is unknown.
    """
    subject = f"converting {saving.content.folder} to {kind}"
    raise_faults(list(_bf16_faults(saving) if kind == "bf16" else _muon_faults(saving, kind, dp)), subject=subject)
    stages, faults = _target_stages(saving, like, kind)
    splits, split_faults = _splits(saving, tp, like) if tp > 1 else ({}, [])
    split_names = (*saving.trained, *saving.frozen) if tp > 1 else saving.frozen if FORMATS[kind][1] == 3 else ()
    strided_faults = [strided_fault(name) for name in split_names if name not in saving.content.weights]
    raise_faults([*faults, *split_faults, *strided_faults], subject=subject)
    if tp > 1:
        stages = [one._replace(entries=_rank_entries(one.entries, len(stages), tp, splits, like)) for one in stages]
    columns: list[Column] = []
    for stage in stages:
        for rank in range(tp):
            shards = {name: split.shards[rank] for name, split in splits.items()}
            if stage.layers is not None and tp > 1:
                stage = stage._replace(layers={_layer_file(name, rank): keys for name, keys in stage.layers.items()})
            column, faults = _column(saving, stage, shards, kind, dp, sub_group or _saved_sub_group_size(saving))
            raise_faults(faults, subject=subject)
            columns.append(column._replace(number=len(columns)))
    shard_counts = {OPTIM: len(columns) * dp, MODEL: len(columns) * columns[0].model.files}
    layout = Layout(by_key(_merged_placements(columns, splits, tp)), shard_counts)
    padded_names = [name for name, split in splits.items() if split.vocabulary]
    notes = (f"rows after the vocabulary are zeros in {', '.join(padded_names)}",) if padded_names else ()
    saved_splits = saving.splits.saved if splits else {}
    split_before = {name for name, split in saved_splits.items() if len(split.parts_by_rank) > 1}
    unnamed_note = note_on_unnamed({name: split for name, split in splits.items() if name not in split_before})
    return Target(
        layout=layout,
        sources={key: saving.content.tensors[key._replace(copy=0)].origin for key in layout.placements},
        units=tuple(unit for column in columns for unit in _units(column)),
        folder=saving.tag,
        pointers={"latest": saving.tag},
        notes=(*notes, *([unnamed_note] if unnamed_note else ())),
        sizes=RunSizes(dp, tp, len(stages), max(dp // b.ranks for column in columns for b in column.optim.buffers)),
    )


def _column(
    saving: Saving, stage: _Stage, shards: Mapping[str, Shape], kind: str, dp: int, sub_group_numel: int
) -> tuple[Column, list[Fault]]:
    """Return the files of a rank with these shards of tensors, and others whole; a shard may be empty."""
    wrapper, number = FORMATS[kind]
    members = [[name for name in group.members if name in saving.trained] for group in stage.groups]
    small = [name for names in members for name in names if 0 in shards.get(name, ()) and 0 not in saving.trained[name]]
    order = [{name: shards.get(name, saving.trained[name]) for name in names if name not in small} for names in members]
    buffers, faults = make_buffers(
        saving, stage.groups, order, wrapper, dp, sub_group_numel=sub_group_numel if number == 3 else None
    )
    optim = OptimizerTarget(
        saving=saving, kind=wrapper, stage=number, dp=dp, groups=stage.groups, buffers=tuple(buffers)
    )
    model = ModelTarget(
        saving=saving,
        stage=number,
        dp=dp,
        order=[buffer.shapes for buffer in buffers],
        shards=shards,
        small=small,
        layers=stage.layers if number == 1 else None,
        entries=stage.entries,
    )
    return Column(0, optim, model), faults


def _splits(saving: Saving, tp: int, like: ZeroCheckpoint | None) -> tuple[Mapping[str, TensorSplit], list[Fault]]:
    """Return how the new run's ranks split each tensor, and faults: as `like`, or else as the source, or by rules."""
    saved_splits, faults = saving.splits, list[Fault]()
    if any(expert_of(name) is not None for name in saved_splits.shapes):
        what, mend = "has files of experts, which are not written beside tensor parallelism", "leave out --tp"
        faults.append(UnsupportedLayout.fault(saved_splits.folder, what, "no experts", "experts", mend=mend))
    if like is not None and like.tp_models:
        return {name: like.splits[name] for name in saved_splits.shapes if name in like.splits}, faults
    splits, split_faults = saved_splits.for_tp(tp)
    return splits, [*faults, *split_faults]


def _rank_entries(
    entries: Mapping[str, object], pp: int, tp: int, splits: Mapping[str, TensorSplit], like: ZeroCheckpoint | None
) -> dict[str, object]:
    """Return the entries of a stage as each of `tp` ranks saves them.

    They describe the splits as `like` does, unless a rule was needed too.
    """
    like_info = like.model.entries.get(INFO) if like is not None and like.tp_models else None
    by_rule = any(split.evidence == "rule" for split in splits.values())
    info = like_info if isinstance(like_info, dict) and not by_rule else pattern_info(splits)
    sizes = {"mp_world_size": tp * pp, _SIZES: {"pp_degree": pp, "tp_degree": tp}}
    return {**entries, **sizes, INFO: {**section(entries, INFO), **info}}


def _layer_file(name: str, rank: int) -> str:
    """Return a layer's file name on one of several tensor-parallel ranks (`ckpt_layer_path`, pipe/module.py)."""
    return f"{name.partition('-')[0]}-model_{rank:02d}-model_states.pt"


def _target_stages(saving: Saving, like: ZeroCheckpoint | None, kind: str) -> tuple[list[_Stage], list[Fault]]:
    """Return the stages of the run that saved `like`, with their parameters and param groups; one stage without it."""
    faults = list(_like_faults(saving, like, kind)) if like is not None else []
    if like is None or faults or not like.stages:
        tied_first = saving.layers is not None and FORMATS[kind][1] == 1  # as in DeepSpeed's module
        stage_groups = (replace(group, members=tuple(ties_first(group.members))) for group in saving.groups)
        return [_Stage(tuple(stage_groups) if tied_first else saving.groups, saving.layers, {})], faults
    where, groups, like_groups = like.listing.folder, saving.groups, like.model.param_shapes or ()
    group_of = {name: number for number, group in enumerate(groups) for name in group.members}
    texts = [canonical(dict(group.hyperparameters or {})) for group in groups]
    files = sorted(layer_files(like).items())
    schedule = saving.entries.get(SCHEDULER)
    tied = [f"^{re.escape(name)}$" for name in like.stages[0].trainable if tied_key(name) is not None]
    stages, begin = list[_Stage](), 0
    for number, (column, stage) in enumerate(zip(like.columns, like.stages, strict=False)):
        members = [[name for flat in flats for name in like_groups[begin + flat]] for flats in column.head.members]
        begin += len(column.buffers)
        for names in members:
            other = next((name for name in names if texts[group_of[name]] != texts[group_of[names[0]]]), None)
            if other is not None:
                what, same = "is in a param group with parameters of other hyper-parameters", f"those of {names[0]}"
                faults.append(UnsupportedLayout.fault(f"{stage.path}: {other}", what, same, "others", mend=AS_SAVED))
        order = [group_of[names[0]] for names in members]
        moved, unknown = reorder_groups(schedule, order, len(groups)) if isinstance(schedule, dict) else (schedule, [])
        faults += [regrouping_fault(entry, where) for entry in unknown]
        entries = {
            "mp_world_size": len(like.stages),
            _SIZES: {"pp_degree": len(like.stages), "tp_degree": 1},
            "buffer_names": sorted(stage.buffer_names),
            SCHEDULER: moved,
            **({INFO: {"pipeline_replicated_parameter_patterns": tied}} if tied else {}),
        }
        stage_groups = (replace(groups[g], members=tuple(names)) for names, g in zip(members, order, strict=True))
        first, end = (len(files) * stage_index // len(like.stages) for stage_index in (number, number + 1))
        stages.append(_Stage(tuple(stage_groups), dict(files[first:end]), entries))
    return stages, faults


def _like_faults(saving: Saving, like: ZeroCheckpoint, kind: str) -> Iterator[Fault]:
    """Yield faults if `like` does not show what is needed, or shows another model's files."""
    where, trained = like.listing.folder, saving.trained
    if not like.columns or not (like.stages or like.tp_models):
        what, mend = "has no stages and no tensor-parallel ranks", "give --like a folder that such a run has saved"
        yield UnsupportedLayout.fault(where, what, "those of a run at ZeRO stage 1 to 3", str(like.grid), mend=mend)
        return
    if like.stages and FORMATS[kind][1] != 1:
        what, mend = "cannot be the files of a PipelineModule", "--to zero1 or bf16"
        yield UnsupportedLayout.fault(saving.content.folder, what, "stage 1", kind, mend=mend)
        return
    for name in sorted(trained.keys() | like.model.trainable.keys()):
        source_shape, like_shape = trained.get(name), like.model.trainable.get(name)
        if source_shape != like_shape:
            shapes = ["none" if shape is None else str([*shape]) for shape in (like_shape, source_shape)]
            yield ModelMismatch.fault(f"{where}: {name}", "differs from the source's parameter", *shapes, mend=AS_SAVED)
    source_shapes = {name: entries.shape for name, entries in saving.content.weights.items()}
    like_shapes = {name: split.shape for name, split in like.splits.items()}
    if like.stages:
        keys = (key for entries in layer_files(like).values() for key in entries.values())
        like_shapes |= {key.name: source_shapes.get(key.name, ()) for key in keys}
    others = {*trained, *(saving.content.buffers if not like.stages else ())}
    for name in sorted((source_shapes.keys() ^ like_shapes.keys()) - others):
        shapes = ["none" if name not in entries else "one" for entries in (like_shapes, source_shapes)]
        yield ModelMismatch.fault(f"{where}: {name}", "differs from the source's tensor", *shapes, mend=AS_SAVED)


def _merged_placements(columns: Sequence[Column], splits: Mapping[str, TensorSplit], tp: int) -> Iterator[Placement]:
    """Yield where whole tensors lie: in the shards of all columns, or, if they are not split, once in each.

    Each stage, and each file of layers, that has a tensor has a copy.
    """
    by_tensor: dict[tuple[str, str], dict[tuple[int, int], list[tuple[int, Placement]]]] = {}
    for column in columns:
        stage, rank = divmod(column.number, tp)
        for placement in column.placements():
            copies = by_tensor.setdefault((placement.key.name, placement.key.kind), {})
            copies.setdefault((stage, placement.key.copy), []).append((rank, placement))
    for (name, kind), copies in by_tensor.items():
        split, numbers = splits.get(name), count()
        for members in copies.values():
            if split is None or split.replicated:
                yield from (one._replace(key=TensorKey(name, kind, next(numbers))) for _, one in members)
                continue
            box = Box.whole(split.shape)
            whole = members[0][1]._replace(key=TensorKey(name, kind, next(numbers)), shape=split.shape, box=box)
            yield placement_of_parts(whole, ((placement.cut, split.parts_by_rank[rank]) for rank, placement in members))


def _units(column: Column) -> Iterator[Unit]:
    """Yield the files of each rank of a column: model files, and those of layers or experts; then optimizer files."""
    optim, model, mp = column.optim, column.model, f"mp_rank_{column.number:02d}"
    files = model.separate_files()
    separate = frozenset(key.name for entries in files.values() for key in entries.values())
    others = (TargetFile(name=name, tree=partial(model.separate_tree, entries)) for name, entries in files.items())
    trees = _ModelTrees(model, separate)
    for rank in range(model.files):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if model.stage == 3 else f"{mp}_model_states.pt"
        file = TargetFile(name=name, tree=partial(trees.tree_of, rank))
        yield Unit(family=MODEL, shard=column.number * model.files + rank, files=(file, *others))
    for rank in range(optim.dp):
        name = f"{optim.saving.prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt"
        file = TargetFile(name=name, tree=partial(optim.tree, rank), data=optim.data())
        yield Unit(family=OPTIM, shard=column.number * optim.dp + rank, files=(file,))


def _muon_faults(saving: Saving, kind: str, dp: int) -> Iterator[Fault]:
    """Refuse Muon on several ranks below stage 3, where each needs the momentum of whole parameters."""
    groups = saving.groups if kind in ("zero1", "zero2") and dp > 1 else ()
    if any((group.hyperparameters or {}).get("use_muon") for group in groups):
        what, mend = (
            "was trained with Muon, whose momentum ranks of ZeRO 1 and 2 keep whole",
            "use --to zero3, or --dp 1",
        )
        yield UnsupportedLayout.fault(saving.content.folder, what, "ZeRO 3", f"{kind}, dp={dp}", mend=mend)


def _bf16_faults(saving: Saving) -> Iterator[Fault]:
    """Refuse other types: BF16_Optimizer trains only bf16 weights (`_configure_zero_optimizer`, engine.py, 0.19.8)."""
    if not saving.wraps_bf16:
        expected = '"bf16": {"enabled": true} in the saved DeepSpeed JSON'
        where, what = saving.content.folder, "was not trained in bf16"
        yield UnsupportedLayout.fault(where, what, expected, "no such entry", mend="--to zero1")


class _ModelTrees:
    """The model files of a column, without the weights that are in other files (`apart`).

    A rank's own saved file may have other buffers and entries; if it has none, the first rank's is rewritten. Ranks
    with equal saved files get equal new ones, pickled once. Thread-safe.
    """

    def __init__(self, model: ModelTarget, apart: frozenset[str]) -> None:
        self._model = model
        self._apart = apart
        self._first, self._others = IdentityCache[Pickled](), IdentityCache[Pickled]()  # only the first lists ties

    def tree_of(self, rank: int) -> Pickled:
        source, cache = self._model.source_model(rank), self._others if rank else self._first
        entries = source.entries if source is not None else self._model.saving.entries
        return cache.get(entries, len(self._model.saving.content.tensors), lambda: pickled(self._tree(rank, source)))

    def _tree(self, rank: int, source: ModelStates | None) -> Mapping[str, object]:
        """Return one file's content, without the mark of a universal checkpoint."""
        tree = self._model.tree(rank, source)
        if tree.get(INFO) == UNIVERSAL_INFO:
            del tree[INFO]
        module = tree["module"]
        assert isinstance(module, OrderedDict)
        for name in self._apart:
            del module[name]
        return {**tree, "module": None} if self._model.layers is not None else tree


def _saved_sub_group_size(saving: Saving) -> int:
    size = section(saving.config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL
