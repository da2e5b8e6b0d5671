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
from math import prod
from typing import NamedTuple

from ds_reshard.containers.torch_zip_writer import Pickled, pickled
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.flat import by_key
from ds_reshard.formats.zero.groups import AS_SAVED
from ds_reshard.formats.zero.model_states import Kept, ModelStates, section
from ds_reshard.formats.zero.modules import expert_of, layer_files, tied_key, ties_first
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.target import (
    UNIVERSAL_INFO,
    ModelTarget,
    OptimizerTarget,
    first_names,
    group_order,
    make_buffers,
    refuse_source,
    whole_tensors,
)
from ds_reshard.formats.zero.tensor_parallel import (
    NO_EVIDENCE,
    Division,
    Misfit,
    divisions,
    evidence_of,
    pattern_info,
    redivided,
    unknown_faults,
    unnamed,
)
from ds_reshard.model.content import SCHEDULER, regrouped, regrouping_fault
from ds_reshard.model.facts import GroupFacts, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey, in_parts
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.rules import rules_given
from ds_reshard.model.target import RunSizes, Target, TargetFile, Unit

FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
_INFO, _SIZES = "universal_checkpoint_info", "checkpoint_parallel_dimensions"
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

    Of a run that has saved `like`: with the stages of its PipelineModule, and tensors divided as its ranks divide them.
    `shards` are the checkpoint's where they are opened for something else too.

    Raises UnsupportedLayout, with every reason, where the source does not hold what they need, or nothing says how
    the coming run divides a parameter.
    """
    subject = f"converting {checkpoint.listing.folder} to {kind}"
    refuse_source(checkpoint, kind)
    raise_faults(list(_not_bf16(checkpoint) if kind == "bf16" else _of_muon(checkpoint, kind, dp)), subject=subject)
    most = (sub_group_size or _saved_sub_group_size(checkpoint)) if FORMATS[kind][1] == 3 else None
    stages, faults = ([checkpoint], []) if like is None else _of_stages(checkpoint, like, kind)
    divided, unknown = redivisions(checkpoint, tp, like) if tp > 1 else ({}, [])
    raise_faults([*faults, *unknown], subject=subject)
    info = _info(divided, like)
    columns: list[Column] = []
    for stage in stages:
        for rank in range(tp):
            one = of_rank(stage, divided, tp, rank, info=info) if tp > 1 else stage
            column, faults = _column(one, kind, dp, most, ordered=like is not None and bool(like.stages))
            raise_faults(faults, subject=subject)
            columns.append(column._replace(number=len(columns)))
    shards_of = {OPTIM: len(columns) * dp, MODEL: len(columns) * columns[0].model.files}
    layout = Layout(by_key(_joined(columns, divided, tp)), shards_of)
    sources = {one.key: one.key for column in columns for one in column.optim.placements()}
    sources |= {key: source for column in columns for key, source in column.model.sources()}
    wants = {key: sources[key._replace(copy=0)] for key in layout.placements}
    tag = checkpoint.listing.tag
    opened = (shards if len(columns) == 1 else None) or ZeroShards(checkpoint=checkpoint)
    units = tuple(unit for column in columns for unit in _units(opened, column))
    padded = [name for name, division in divided.items() if division.vocabulary]
    notes = (f"rows behind the vocabulary are zeros in {', '.join(padded)}",) if padded else ()
    told = {name for name, division in checkpoint.divided.items() if len(division.ranks) > 1}  # of the source
    taken = unnamed({name: division for name, division in divided.items() if name not in told})
    ep = max(dp // buffer.ranks for column in columns for buffer in column.optim.buffers)
    return Target(
        layout=layout,
        wants=wants,
        units=units,
        folder=tag,
        pointers={"latest": tag},
        notes=(*notes, *([taken] if taken else ())),
        sizes=RunSizes(dp, tp, len(stages), ep),
    )


def _column(
    checkpoint: ZeroCheckpoint, kind: str, dp: int, most: int | None, *, ordered: bool
) -> tuple[Column, list[Fault]]:
    wrapper, stage = FORMATS[kind]
    order = group_order(checkpoint)
    if checkpoint.layers is not None and stage == 1 and not ordered:
        order = [{name: group[name] for name in ties_first(group)} for group in order]
    buffers, faults = make_buffers(checkpoint, order, wrapper, dp, sub_group_numel=most)
    optim = OptimizerTarget(checkpoint=checkpoint, kind=wrapper, stage=stage, dp=dp, buffers=tuple(buffers))
    model = ModelTarget(checkpoint=checkpoint, stage=stage, dp=dp, order=[buffer.shapes for buffer in buffers])
    return Column(0, optim, model), faults


def redivisions(
    checkpoint: ZeroCheckpoint, tp: int, like: ZeroCheckpoint | None = None
) -> tuple[dict[str, Division], list[Fault]]:
    """How the coming run's ranks divide each tensor: as those that have saved `like`.

    Without it as the source's do, or as a rule or a pattern says.
    """
    model, folder = checkpoint.model, checkpoint.listing.folder
    shapes = {name: tensor.shape for name, tensor in whole_tensors(model).items() if name not in model.buffer_names}
    faults: list[Fault] = []
    if any(expert_of(name) is not None for name in shapes):
        what, mend = "has files of experts, which are not written beside tensor parallelism", "leave out --tp"
        faults.append(UnsupportedLayout.fault(folder, what, "no experts", "experts", mend=mend))
    if like is not None and like.rows:
        return {name: like.divided[name] for name in shapes if name in like.divided}, faults
    unsaid = {name: [shape] for name, shape in shapes.items() if name not in checkpoint.divided}
    marked = model.entries.get(_INFO) == UNIVERSAL_INFO  # a mark, of which DeepSpeed takes all as cut along dimension 0
    found, unknown = divisions(unsaid, NO_EVIDENCE if marked else evidence_of(model), rules_given())
    found |= {name: division for name, division in checkpoint.divided.items() if name in shapes}
    made: dict[str, Division] = {}
    for name, division in found.items():
        try:
            made[name] = redivided(division, shapes[name], tp)
        except Misfit as misfit:
            unknown[name] = misfit
    faults += unknown_faults(unknown, folder)
    sizes = sorted({division.shape[0] for division in made.values() if division.vocabulary})
    if len(sizes) > 1:
        what, mend = "has two vocabularies, and DeepSpeed's files have a place for one size", "convert it at --tp 1"
        faults.append(UnsupportedLayout.fault(folder, what, "one size", ", ".join(map(str, sizes)), mend=mend))
    return made, faults


def said_of_all(checkpoint: ZeroCheckpoint) -> Mapping[str, Division]:
    """How ranks divide each tensor: as the source's have; as a rule or a pattern says of what one rank had whole."""
    info = checkpoint.model.entries.get(_INFO)
    if not rules_given() and (not isinstance(info, dict) or info == UNIVERSAL_INFO):
        return checkpoint.divided
    return {**redivisions(checkpoint, 1)[0], **checkpoint.divided}


def _info(divided: Mapping[str, Division], like: ZeroCheckpoint | None) -> Mapping[str, object]:
    """What the files say of how tensors are divided: what those of `like` say, where no rule was needed beside it."""
    shown = like.model.entries.get(_INFO) if like is not None and like.rows else None
    ruled = any(division.evidence == "rule" for division in divided.values())
    return shown if isinstance(shown, dict) and not ruled else pattern_info(divided)


def of_rank(
    checkpoint: ZeroCheckpoint,
    divided: Mapping[str, Division],
    tp: int,
    rank: int,
    *,
    info: Mapping[str, object] | None = None,
) -> ZeroCheckpoint:
    """The checkpoint of a run that has one rank's shards, and nothing else.

    A shard without elements is in no flat buffer, and DeepSpeed takes its parameter for a frozen one.
    """
    model = checkpoint.model
    made, firsts = whole_tensors(model), first_names(model)
    shapes = {name: division.shards[rank] for name, division in divided.items()}
    own = {name: new_tensor(f"module/{name}", shapes.get(name, one.shape), one.dtype) for name, one in made.items()}
    trained = {name for name, shape in model.trainable.items() if prod(shapes[name]) or not prod(shape)}
    apart = {*model.trainable, *model.buffer_names, *model.shared}
    frozen = model.frozen_shapes or [name for name in own if name not in apart]
    said, sizes = model.entries.get(_INFO), model.entries.get(_SIZES)
    pp = sizes.get("pp_degree", 1) if isinstance(sizes, dict) else 1
    entries = {
        **model.entries,
        "mp_world_size": tp * pp,
        _SIZES: {"pp_degree": pp, "tp_degree": tp},
        _INFO: {**(said if pp > 1 and isinstance(said, dict) else {}), **(info or pattern_info(divided))},
    }
    facts, layers = checkpoint.facts, checkpoint.layers
    if facts is not None:
        members = [tuple(name for name in group.members if name in trained) for group in facts.groups]
        groups = (replace(group, members=own) for group, own in zip(facts.groups, members, strict=True))
        facts = replace(facts, groups=tuple(groups))
    return replace(
        checkpoint,
        listing=replace(checkpoint.listing, model={}),
        facts=facts,
        layers={_layer_file(name, rank): held for name, held in layers.items()} if layers is not None else None,
        model=replace(
            model,
            entries=entries,
            module={name: own.get(firsts[name], tensor) for name, tensor in model.module.items()},
            param_shapes=tuple(
                {name: shapes[name] for name in group if name in trained} for group in model.param_shapes or ()
            ),
            frozen_shapes={name: shapes[name] for name in (*frozen, *(model.trainable.keys() - trained))},
        ),
    )


def _layer_file(name: str, rank: int) -> str:
    """The name of a layer's file of one tensor-parallel rank of several (`ckpt_layer_path`, runtime/pipe/module.py)."""
    return f"{name.partition('-')[0]}-model_{rank:02d}-model_states.pt"


def _of_stages(checkpoint: ZeroCheckpoint, like: ZeroCheckpoint, kind: str) -> tuple[list[ZeroCheckpoint], list[Fault]]:
    """The checkpoints of runs that have one stage each, with the parameters and param groups that it has in `like`."""
    where, faults = like.listing.folder, list(_unlike(checkpoint, like, kind))
    if faults or not like.stages:
        return [checkpoint], faults
    assert checkpoint.facts is not None
    groups, shown = checkpoint.facts.groups, like.model.param_shapes or ()
    home = {name: number for number, group in enumerate(groups) for name in group.members}
    texts = [canonical(dict(group.hyperparameters or {})) for group in groups]
    files = sorted(layer_files(like).items())
    schedule = checkpoint.model.entries.get(SCHEDULER)
    made, first = [], 0
    for number, (column, stage) in enumerate(zip(like.columns, like.stages, strict=False)):
        members = [[name for flat in flats for name in shown[first + flat]] for flats in column.first.members]
        first += len(column.buffers)
        for names in members:
            other = next((name for name in names if texts[home[name]] != texts[home[names[0]]]), None)
            if other is not None:
                what, said = "is in a param group with parameters of other hyper-parameters", f"those of {names[0]}"
                faults.append(UnsupportedLayout.fault(f"{stage.path}: {other}", what, said, "others", mend=AS_SAVED))
        order = [home[names[0]] for names in members]
        own, unknown = regrouped(schedule, order, len(groups)) if isinstance(schedule, dict) else (schedule, [])
        faults += [regrouping_fault(entry, where) for entry in unknown]
        tied = [f"^{re.escape(name)}$" for name in like.stages[0].trainable if tied_key(name) is not None]
        entries = {
            **checkpoint.model.entries,
            "mp_world_size": len(like.stages),
            _SIZES: {"pp_degree": len(like.stages), "tp_degree": 1},
            "buffer_names": sorted(stage.buffer_names),
            SCHEDULER: own,
            **({_INFO: {"pipeline_replicated_parameter_patterns": tied}} if tied else {}),
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
    if not like.columns or not (like.stages or like.rows):
        what, mend = "shows no stages and no tensor-parallel ranks", "give --like a folder that such a run has saved"
        yield UnsupportedLayout.fault(where, what, "those of a run at ZeRO stage 1 to 3", str(like.grid), mend=mend)
        return
    if like.stages and FORMATS[kind][1] != 1:
        what, mend = "cannot be the files of a PipelineModule", "--to zero1 or bf16"
        yield UnsupportedLayout.fault(checkpoint.listing.folder, what, "stage 1", kind, mend=mend)
        return
    for name in sorted(trained.keys() | like.model.trainable.keys()):
        own, shown = trained.get(name), like.model.trainable.get(name)
        if own != shown:
            said = ["none" if shape is None else str([*shape]) for shape in (shown, own)]
            yield ModelMismatch.fault(f"{where}: {name}", "is another parameter there", *said, mend=AS_SAVED)
    made = {name: one.shape for name, one in whole_tensors(checkpoint.model).items()}
    shown_shapes = {name: division.shape for name, division in like.divided.items()}
    if like.stages:
        shown_shapes |= {
            key.name: made.get(key.name, ()) for held in layer_files(like).values() for key in held.values()
        }
    apart = {*trained, *(checkpoint.model.buffer_names if not like.stages else ())}
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
            yield in_parts(whole, ((one.cut, division.ranks[rank]) for rank, one in members))


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
        name = f"{_prefix(model.checkpoint)}zero_pp_rank_{rank}_{mp}_optim_states.pt"
        file = TargetFile(name=name, tree=partial(optim.tree, rank), data=optim.data())
        yield Unit(family=OPTIM, shard=column.number * optim.dp + rank, files=(file,))


def _of_muon(checkpoint: ZeroCheckpoint, kind: str, dp: int) -> Iterator[Fault]:
    """Below stage 3 each of several ranks wants Muon's momentum of whole parameters."""
    groups = checkpoint.facts.groups if checkpoint.facts is not None and kind in ("zero1", "zero2") and dp > 1 else ()
    if any((group.hyperparameters or {}).get("use_muon") for group in groups):
        what, mend = (
            "was trained with Muon, whose momentum ranks of ZeRO 1 and 2 do not divide",
            "use --to zero3, or --dp 1",
        )
        yield UnsupportedLayout.fault(checkpoint.listing.folder, what, "ZeRO 3", f"{kind}, dp={dp}", mend=mend)


def _not_bf16(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """BF16_Optimizer trains bf16 weights alone (`_configure_zero_optimizer` in deepspeed/runtime/engine.py, 0.19.8)."""
    if not _in_bf16(checkpoint):
        expected = '"bf16": {"enabled": true} in the saved DeepSpeed JSON'
        where, what = checkpoint.listing.folder, "was not trained in bf16"
        yield UnsupportedLayout.fault(where, what, expected, "no such entry", mend="--to zero1")


def _in_bf16(checkpoint: ZeroCheckpoint) -> bool:
    """By the saved JSON; where its path was saved instead, by the names of files and the weights."""
    model, config = checkpoint.model, checkpoint.model.config
    if isinstance(model.entries.get("ds_config"), dict):
        return section(config, "bf16" if "bf16" in config else "bfloat16").get("enabled") is True
    types = {model.module[name].dtype for name in model.trainable if name in model.module}
    return checkpoint.listing.optim_prefix == "bf16_" or ElementType.BFLOAT16 in types


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


def _prefix(checkpoint: ZeroCheckpoint) -> str:
    """What DeepSpeed begins the names of optimizer files with in a bf16 run (`_get_zero_ckpt_prefix`, engine.py)."""
    if checkpoint.optim is not None:
        return checkpoint.listing.optim_prefix
    return "bf16_" if _in_bf16(checkpoint) else ""


def _saved_sub_group_size(checkpoint: ZeroCheckpoint) -> int:
    size = section(checkpoint.model.config, "zero_optimization").get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL
