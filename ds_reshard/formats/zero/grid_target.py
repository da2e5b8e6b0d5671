"""The files of a ZeRO checkpoint that is to be written: one column of the grid after another.

A tensor-parallel rank has model and optimizer files of its own, of its shards: those that a run of them alone would
have saved. Where they lie in the whole tensors is what `tensor_parallel` says, as for those that are read. A stage of a
pipeline has those of its parameters; which they are, and in which order, a checkpoint of the coming run shows.
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
from ds_reshard.formats.zero.model_states import Kept, ModelStates, section
from ds_reshard.formats.zero.modules import expert_of, layer_files, tied_key, ties_first
from ds_reshard.formats.zero.target import INFO, UNIVERSAL_INFO, ModelTarget, OptimizerTarget, Saving, make_buffers
from ds_reshard.formats.zero.tensor_parallel import Division, pattern_info, unnamed
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
        """Where its tensors lie among the shards of all columns."""
        for placement in self.optim.placements():
            yield _moved(placement, self.number * self.optim.dp)
        for placement in self.model.placements():
            yield _moved(placement, self.number * self.model.files)


def _moved(placement: Placement, first: int) -> Placement:
    cut = placement.cut._replace(first=placement.cut.first + first)
    return placement._replace(cut=cut, replicated=False) if first or placement.replicated else placement


class _Stage(NamedTuple):
    """What the files of one stage have: param groups, layers, and entries that are not those of a single rank's."""

    groups: tuple[GroupFacts, ...]
    layers: Mapping[str, Mapping[str, TensorKey]] | None
    entries: Mapping[str, object]


def zero_target(
    saving: Saving, kind: str, dp: int, *, tp: int = 1, like: ZeroCheckpoint | None = None, most: int | None = None
) -> Target:
    """The files that `tp` times `dp` ranks of DeepSpeed's `kind` of FORMATS would have saved of the same state.

    Of a run that has saved `like`: with the stages of its PipelineModule, and tensors divided as its ranks divide them.
    `most` is the size of a sub-group of stage 3, None for the saved one.

    Raises UnsupportedLayout, with every reason, where the source does not hold what they need, or nothing says how
    the coming run divides a parameter.
    """
    subject = f"converting {saving.content.folder} to {kind}"
    raise_faults(list(_not_bf16(saving) if kind == "bf16" else _of_muon(saving, kind, dp)), subject=subject)
    stages, faults = _stages(saving, like, kind)
    divided, unknown = _divided(saving, tp, like) if tp > 1 else ({}, [])
    cut = (*saving.trained, *saving.frozen) if tp > 1 else saving.frozen if FORMATS[kind][1] == 3 else ()
    strided = [strided_fault(name) for name in cut if name not in saving.content.weights]
    raise_faults([*faults, *unknown, *strided], subject=subject)
    if tp > 1:
        stages = [stage._replace(entries=_of_rank(stage.entries, len(stages), tp, divided, like)) for stage in stages]
    columns: list[Column] = []
    for stage in stages:
        for rank in range(tp):
            shards = {name: division.shards[rank] for name, division in divided.items()}
            if stage.layers is not None and tp > 1:
                stage = stage._replace(layers={_layer_file(name, rank): held for name, held in stage.layers.items()})
            column, faults = _column(saving, stage, shards, kind, dp, most or _saved_sub_group_size(saving))
            raise_faults(faults, subject=subject)
            columns.append(column._replace(number=len(columns)))
    shards_of = {OPTIM: len(columns) * dp, MODEL: len(columns) * columns[0].model.files}
    layout = Layout(by_key(_joined(columns, divided, tp)), shards_of)
    padded = [name for name, division in divided.items() if division.vocabulary]
    notes = (f"rows behind the vocabulary are zeros in {', '.join(padded)}",) if padded else ()
    told = {name for name, division in saving.splits.divided.items() if len(division.ranks) > 1} if divided else set()
    taken = unnamed({name: division for name, division in divided.items() if name not in told})
    return Target(
        layout=layout,
        sources={key: saving.content.tensors[key._replace(copy=0)].origin for key in layout.placements},
        units=tuple(unit for column in columns for unit in _units(column)),
        folder=saving.tag,
        pointers={"latest": saving.tag},
        notes=(*notes, *([taken] if taken else ())),
        sizes=RunSizes(dp, tp, len(stages), max(dp // one.ranks for column in columns for one in column.optim.buffers)),
    )


def _column(
    saving: Saving, stage: _Stage, shards: Mapping[str, Shape], kind: str, dp: int, most: int
) -> tuple[Column, list[Fault]]:
    """The files of a rank that has these shards of tensors, and all of others; of a parameter maybe no element."""
    wrapper, number = FORMATS[kind]
    members = [[name for name in group.members if name in saving.trained] for group in stage.groups]
    small = [n for names in members for n in names if 0 in shards.get(n, ()) and 0 not in saving.trained[n]]
    order = [{n: shards.get(n, saving.trained[n]) for n in names if n not in small} for names in members]
    buffers, faults = make_buffers(
        saving, stage.groups, order, wrapper, dp, sub_group_numel=most if number == 3 else None
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


def _divided(saving: Saving, tp: int, like: ZeroCheckpoint | None) -> tuple[Mapping[str, Division], list[Fault]]:
    """How the coming run's ranks divide each tensor: as those that have saved `like`.

    Without it as the source's do, or as a rule or a pattern says.
    """
    splits, faults = saving.splits, list[Fault]()
    if any(expert_of(name) is not None for name in splits.shapes):
        what, mend = "has files of experts, which are not written beside tensor parallelism", "leave out --tp"
        faults.append(UnsupportedLayout.fault(splits.folder, what, "no experts", "experts", mend=mend))
    if like is not None and like.rows:
        return {name: like.divided[name] for name in splits.shapes if name in like.divided}, faults
    found, unknown = splits.over(tp)
    return found, [*faults, *unknown]


def _of_rank(
    entries: Mapping[str, object], pp: int, tp: int, divided: Mapping[str, Division], like: ZeroCheckpoint | None
) -> dict[str, object]:
    """The entries of a stage as each of `tp` ranks has them.

    Of how tensors are divided they say what those of `like` say, where no rule was needed beside it.
    """
    shown = like.model.entries.get(INFO) if like is not None and like.rows else None
    ruled = any(division.evidence == "rule" for division in divided.values())
    info = shown if isinstance(shown, dict) and not ruled else pattern_info(divided)
    sizes = {"mp_world_size": tp * pp, _SIZES: {"pp_degree": pp, "tp_degree": tp}}
    return {**entries, **sizes, INFO: {**section(entries, INFO), **info}}


def _layer_file(name: str, rank: int) -> str:
    """The name of a layer's file of one tensor-parallel rank of several (`ckpt_layer_path`, runtime/pipe/module.py)."""
    return f"{name.partition('-')[0]}-model_{rank:02d}-model_states.pt"


def _stages(saving: Saving, like: ZeroCheckpoint | None, kind: str) -> tuple[list[_Stage], list[Fault]]:
    """The stages of the run that has saved `like`, each with its parameters and param groups; one without it."""
    faults = list(_unlike(saving, like, kind)) if like is not None else []
    if like is None or faults or not like.stages:
        ties = saving.layers is not None and FORMATS[kind][1] == 1  # which DeepSpeed's module has first
        own = (replace(group, members=tuple(ties_first(group.members))) for group in saving.groups)
        return [_Stage(tuple(own) if ties else saving.groups, saving.layers, {})], faults
    where, groups, shown = like.listing.folder, saving.groups, like.model.param_shapes or ()
    home = {name: number for number, group in enumerate(groups) for name in group.members}
    texts = [canonical(dict(group.hyperparameters or {})) for group in groups]
    files = sorted(layer_files(like).items())
    schedule = saving.entries.get(SCHEDULER)
    tied = [f"^{re.escape(name)}$" for name in like.stages[0].trainable if tied_key(name) is not None]
    made, first = list[_Stage](), 0
    for number, (column, stage) in enumerate(zip(like.columns, like.stages, strict=False)):
        members = [[name for flat in flats for name in shown[first + flat]] for flats in column.first.members]
        first += len(column.buffers)
        for names in members:
            other = next((name for name in names if texts[home[name]] != texts[home[names[0]]]), None)
            if other is not None:
                what, said = "is in a param group with parameters of other hyper-parameters", f"those of {names[0]}"
                faults.append(UnsupportedLayout.fault(f"{stage.path}: {other}", what, said, "others", mend=AS_SAVED))
        order = [home[names[0]] for names in members]
        placed, unknown = reorder_groups(schedule, order, len(groups)) if isinstance(schedule, dict) else (schedule, [])
        faults += [regrouping_fault(entry, where) for entry in unknown]
        entries = {
            "mp_world_size": len(like.stages),
            _SIZES: {"pp_degree": len(like.stages), "tp_degree": 1},
            "buffer_names": sorted(stage.buffer_names),
            SCHEDULER: placed,
            **({INFO: {"pipeline_replicated_parameter_patterns": tied}} if tied else {}),
        }
        own = (replace(groups[g], members=tuple(names)) for names, g in zip(members, order, strict=True))
        begin, end = (len(files) * at // len(like.stages) for at in (number, number + 1))
        made.append(_Stage(tuple(own), dict(files[begin:end]), entries))
    return made, faults


def _unlike(saving: Saving, like: ZeroCheckpoint, kind: str) -> Iterator[Fault]:
    """Where a checkpoint of the coming run does not show what is needed, or shows another model's."""
    where, trained = like.listing.folder, saving.trained
    if not like.columns or not (like.stages or like.rows):
        what, mend = "shows no stages and no tensor-parallel ranks", "give --like a folder that such a run has saved"
        yield UnsupportedLayout.fault(where, what, "those of a run at ZeRO stage 1 to 3", str(like.grid), mend=mend)
        return
    if like.stages and FORMATS[kind][1] != 1:
        what, mend = "cannot be the files of a PipelineModule", "--to zero1 or bf16"
        yield UnsupportedLayout.fault(saving.content.folder, what, "stage 1", kind, mend=mend)
        return
    for name in sorted(trained.keys() | like.model.trainable.keys()):
        own, shown = trained.get(name), like.model.trainable.get(name)
        if own != shown:
            said = ["none" if shape is None else str([*shape]) for shape in (shown, own)]
            yield ModelMismatch.fault(f"{where}: {name}", "is another parameter there", *said, mend=AS_SAVED)
    made = {name: held.shape for name, held in saving.content.weights.items()}
    shown_shapes = {name: division.shape for name, division in like.divided.items()}
    if like.stages:
        shown_shapes |= {
            key.name: made.get(key.name, ()) for held in layer_files(like).values() for key in held.values()
        }
    apart = {*trained, *(saving.content.buffers if not like.stages else ())}
    for name in sorted((made.keys() ^ shown_shapes.keys()) - apart):
        said = ["none" if name not in held else "one" for held in (shown_shapes, made)]
        yield ModelMismatch.fault(f"{where}: {name}", "is another tensor there", *said, mend=AS_SAVED)


def _joined(columns: Sequence[Column], divided: Mapping[str, Division], tp: int) -> Iterator[Placement]:
    """Where whole tensors lie: in the shards of all columns, or, where they are not divided, once in each.

    Of what several stages have, or several files of layers, each has a copy.
    """
    held: dict[tuple[str, str], dict[tuple[int, int], list[tuple[int, Placement]]]] = {}
    for column in columns:
        stage, rank = divmod(column.number, tp)
        for one in column.placements():
            places = held.setdefault((one.key.name, one.key.kind), {})
            places.setdefault((stage, one.key.copy), []).append((rank, one))
    for (name, kind), places in held.items():
        division, copies = divided.get(name), count()
        for members in places.values():
            if division is None or division.replicated:
                yield from (one._replace(key=TensorKey(name, kind, next(copies))) for _, one in members)
                continue
            box = Box.whole(division.shape)
            whole = members[0][1]._replace(key=TensorKey(name, kind, next(copies)), shape=division.shape, box=box)
            yield placement_of_parts(whole, ((one.cut, division.ranks[rank]) for rank, one in members))


def _units(column: Column) -> Iterator[Unit]:
    optim, model, mp = column.optim, column.model, f"mp_rank_{column.number:02d}"
    files = model.apart()
    apart = frozenset(key.name for entries in files.values() for key in entries.values())
    others = (TargetFile(name=name, tree=partial(model.part, entries)) for name, entries in files.items())
    trees = _ModelTrees(model, apart)
    for rank in range(model.files):
        name = f"zero_pp_rank_{rank}_{mp}_model_states.pt" if model.stage == 3 else f"{mp}_model_states.pt"
        file = TargetFile(name=name, tree=partial(trees.of, rank))
        yield Unit(family=MODEL, shard=column.number * model.files + rank, files=(file, *others))
    for rank in range(optim.dp):
        name = f"{optim.saving.prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt"
        file = TargetFile(name=name, tree=partial(optim.tree, rank), data=optim.data())
        yield Unit(family=OPTIM, shard=column.number * optim.dp + rank, files=(file,))


def _of_muon(saving: Saving, kind: str, dp: int) -> Iterator[Fault]:
    """Below stage 3 each of several ranks wants Muon's momentum of whole parameters."""
    groups = saving.groups if kind in ("zero1", "zero2") and dp > 1 else ()
    if any((group.hyperparameters or {}).get("use_muon") for group in groups):
        what, mend = (
            "was trained with Muon, whose momentum ranks of ZeRO 1 and 2 do not divide",
            "use --to zero3, or --dp 1",
        )
        yield UnsupportedLayout.fault(saving.content.folder, what, "ZeRO 3", f"{kind}, dp={dp}", mend=mend)


def _not_bf16(saving: Saving) -> Iterator[Fault]:
    """BF16_Optimizer trains bf16 weights alone (`_configure_zero_optimizer` in deepspeed/runtime/engine.py, 0.19.8)."""
    if not saving.wraps_bf16:
        expected = '"bf16": {"enabled": true} in the saved DeepSpeed JSON'
        where, what = saving.content.folder, "was not trained in bf16"
        yield UnsupportedLayout.fault(where, what, expected, "no such entry", mend="--to zero1")


class _ModelTrees:
    """The model files of a column, without the weights that are in files `apart`.

    The saving run's own file of a rank may hold its buffers and its entries; where it has none, the first's. Ranks of
    which the same was saved have the same written, pickled once. Any thread may ask.
    """

    def __init__(self, model: ModelTarget, apart: frozenset[str]) -> None:
        self._model = model
        self._apart = apart
        self._first, self._others = Kept[Pickled](), Kept[Pickled]()  # the first rank's file alone names what is tied

    def of(self, rank: int) -> Pickled:
        saved, kept = self._model.saved(rank), self._others if rank else self._first
        entries = saved.entries if saved is not None else self._model.saving.entries
        return kept.of(entries, len(self._model.saving.content.tensors), lambda: pickled(self._tree(rank, saved)))

    def _tree(self, rank: int, saved: ModelStates | None) -> Mapping[str, object]:
        """One file's content, without the mark of a universal checkpoint."""
        tree = self._model.tree(rank, saved)
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
