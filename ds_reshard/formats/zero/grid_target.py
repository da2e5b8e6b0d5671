"""The files of a ZeRO checkpoint to be written, one column of the grid after another.

A tensor-parallel rank has model and optimizer files of its shards, as a run of these shards alone would save them;
`tensor_parallel` says where they lie in the whole tensors, as for files that are read. A pipeline stage has the files
of its parameters: a checkpoint of the new run shows which these are, and in which order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.content import strided_fault
from ds_reshard.formats.zero.flat import Shard, by_key, merge_shards
from ds_reshard.formats.zero.groups import AS_SAVED, mixed_group_faults, other_parameter_faults
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import expert_of, layer_files, tied_key, ties_first
from ds_reshard.formats.zero.target import INFO, Column, Saving
from ds_reshard.formats.zero.tensor_parallel import TensorSplit, note_on_unnamed, pattern_info
from ds_reshard.model.content import SCHEDULER, regrouping_fault, reorder_groups
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.target import RunSizes, Target, TargetFile, Unit

FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
_SIZES = "checkpoint_parallel_dimensions"
_SUB_GROUP_NUMEL = 10**9  # SUB_GROUP_SIZE of deepspeed/runtime/zero/config.py, 0.19.8


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
    stages, faults = _target_stages(saving, like, kind, dp)
    splits, split_faults = _splits(saving, tp, like) if tp > 1 else ({}, [])
    split_names = (*saving.trained, *saving.frozen) if tp > 1 else saving.frozen if FORMATS[kind][1] == 3 else ()
    strided_faults = [strided_fault(name) for name in split_names if name not in saving.content.weights]
    raise_faults([*faults, *split_faults, *strided_faults], subject=subject)
    columns: list[Column] = []
    for stage in stages:
        if tp > 1:
            stage = replace(stage, entries=_rank_entries(stage.entries, len(stages), tp, splits, like))
        for rank in range(tp):
            layers, shards = stage.layers, {name: split.shards[rank] for name, split in splits.items()}
            if layers is not None and tp > 1:
                layers = {_layer_file(name, rank): keys for name, keys in layers.items()}
            column = replace(stage, number=len(columns), layers=layers)
            column, faults = column.with_shards(shards, sub_group or _saved_sub_group_size(saving))
            raise_faults(faults, subject=subject)
            columns.append(column)
    shard_counts = {OPTIM: len(columns) * dp, MODEL: len(columns) * columns[0].model_files}
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
        sizes=RunSizes(dp, tp, len(stages), max(dp // b.ranks for column in columns for b in column.buffers)),
    )


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


def _target_stages(saving: Saving, like: ZeroCheckpoint | None, kind: str, dp: int) -> tuple[list[Column], list[Fault]]:
    """Return a column for each stage of the run that saved `like`, with its param groups; one stage without it."""
    faults = list(_like_faults(saving, like, kind)) if like is not None else []
    stage = partial(Column, saving=saving, kind=FORMATS[kind][0], stage=FORMATS[kind][1], dp=dp)
    if like is None or faults or not like.stages:
        if saving.layers is None or FORMATS[kind][1] != 1:
            return [stage(groups=saving.groups)], faults
        in_module_order = [replace(group, members=tuple(ties_first(group.members))) for group in saving.groups]
        return [stage(groups=in_module_order, layers=saving.layers)], faults
    groups, like_groups = saving.groups, like.model.param_shapes or ()
    group_of = {name: number for number, group in enumerate(groups) for name in group.members}
    files = sorted(layer_files(like).items())
    schedule = saving.entries.get(SCHEDULER)
    tied = [f"^{re.escape(name)}$" for name in like.stages[0].trainable if tied_key(name) is not None]
    stages, begin = list[Column](), 0
    for number, (column, saved_stage) in enumerate(zip(like.columns, like.stages, strict=False)):
        members = [[name for flat in flats for name in like_groups[begin + flat]] for flats in column.head.members]
        begin += len(column.buffers)
        faults += mixed_group_faults(groups, schedule, members, saved_stage.path)
        order = [group_of[names[0]] for names in members]
        moved, unknown = reorder_groups(schedule, order, len(groups)) if isinstance(schedule, dict) else (schedule, [])
        faults += [regrouping_fault(entry, like.listing.folder) for entry in unknown]
        entries = {
            "mp_world_size": len(like.stages),
            _SIZES: {"pp_degree": len(like.stages), "tp_degree": 1},
            "buffer_names": sorted(saved_stage.buffer_names),
            SCHEDULER: moved,
            **({INFO: {"pipeline_replicated_parameter_patterns": tied}} if tied else {}),
        }
        stage_groups = [replace(groups[g], members=tuple(names)) for names, g in zip(members, order, strict=True)]
        first, end = (len(files) * stage_index // len(like.stages) for stage_index in (number, number + 1))
        stages.append(stage(groups=stage_groups, layers=dict(files[first:end]), entries=entries))
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
    yield from other_parameter_faults(trained, like)
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
    shards, holders = list[Shard](), dict[TensorKey, dict[tuple[int, int], int]]()
    for column in columns:
        stage, rank = divmod(column.number, tp)
        for placement in column.placements():
            copy, key, split = placement.key.copy, placement.key._replace(copy=0), splits.get(placement.key.name)
            numbers = holders.setdefault(key, {})
            whole = placement._replace(key=key) if split is None else placement._replace(key=key, shape=split.shape)
            parts = split.parts_by_rank[rank] if split is not None and not split.replicated else None
            shards.append(Shard(whole, parts, numbers.setdefault((stage, copy), len(numbers))))
    for whole in merge_shards(shards):
        for number, placement in enumerate((whole, *(replica.placement for replica in whole.replicas))):
            key = whole.key._replace(copy=number)
            yield placement.renamed(key)


def _units(column: Column) -> Iterator[Unit]:
    """Yield the files of each rank of a column: model files, and those of layers or experts; then optimizer files."""
    mp, files = f"mp_rank_{column.number:02d}", column.separate_files
    others = (TargetFile(name=name, tree=partial(column.separate_tree, entries)) for name, entries in files.items())
    for rank in range(column.model_files):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if column.stage == 3 else f"{mp}_model_states.pt"
        file = TargetFile(name=name, tree=partial(column.model_file, rank))
        yield Unit(family=MODEL, shard=column.number * column.model_files + rank, files=(file, *others))
    for rank in range(column.dp):
        name = f"{column.saving.prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt"
        file = TargetFile(name=name, tree=partial(column.optimizer_tree, rank), data=column.data())
        yield Unit(family=OPTIM, shard=column.number * column.dp + rank, files=(file,))


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


def _saved_sub_group_size(saving: Saving) -> int:
    size = section(saving.config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL
