"""A ZeRO checkpoint folder, or a universal one made of it, as a layout, an index and facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    UnsupportedLayout,
    damaged,
    fail,
    raise_faults,
)
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, by_key, sliced, whole
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_model_states, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states, with_wholes
from ds_reshard.formats.zero.tensor_parallel import Division
from ds_reshard.formats.zero.universal import UniversalStates, read_universal
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule, rules_given
from ds_reshard.model.target import RunSizes

OPTIM, MODEL = "optim", "model"
AUTOEP = "ds_autoep_layers"
"""What a model file says of the layers whose experts DeepSpeed has dealt out itself (AutoEP)."""


class Row(NamedTuple):
    """Which of the tensor-parallel ranks of a grid a reader is, and how many there are.

    `ties` are the keys of a PipelineModule's layers that are tied modules, None where no run tells them. `rules` are
    what the user says of how tensors are divided, `whole` and `live` what a run's parameters tell of it (`Evidence`),
    `maps` its affine maps, `held` the shapes of a rank's own shards. A size of 0 is that of the saving run.
    """

    size: int = 1
    rank: int = 0
    ties: Mapping[int, str] | None = None
    rules: tuple[Rule, ...] = ()
    whole: Mapping[str, Shape] = MappingProxyType({})
    live: Mapping[str, Rule | None] = MappingProxyType({})
    maps: Mapping[object, object] = MappingProxyType({})
    held: Mapping[str, Shape] = MappingProxyType({})


ALONE = Row()
FIRST_ROW = Row(size=0)
"""Of a reader of what all rows have alike."""


class Grid(RunSizes):
    """How many ranks saved a checkpoint, along each axis."""

    def column(self, stage: int, tp_rank: int) -> int:
        """The number after `mp_rank_` of a stage's files (`PipelineParallelGrid`, runtime/pipe/topology.py, 0.19.8)."""
        return stage * self.tp + tp_rank

    def __str__(self) -> str:
        ep = f", ep={self.ep}" if self.ep > 1 else ""
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}{ep}"

    @property
    def shortly(self) -> str:
        """Without what is 1, but for dp."""
        return ", ".join(f"{axis}={size}" for axis, size in self._asdict().items() if size > 1 or axis == "dp")


ONE_RANK = Grid(dp=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridColumn:
    """Optimizer files whose flat buffers are cut together: shard i of `family` is the file `files[i]`.

    `buffers` are those that are read from them, with the names that parameters have in the whole model; `copies` the
    parameters of which an earlier column has the first copy. `first` is what the first file says. Where columns share a
    family, shards of it begin with number `begin` in this one, the `number`-th.
    """

    family: str
    files: tuple[str, ...]
    buffers: tuple[FlatBuffer, ...]
    first: OptimStates
    copies: Mapping[str, int] = field(default_factory=dict)
    begin: int = 0
    number: int = 0

    @property
    def dp(self) -> int:
        return len(self.files)

    def placements(self) -> Iterator[Placement]:
        """Where the tensors of these buffers lie."""
        for buffer in self.buffers:
            partition = self.first.partitions[buffer.number]
            wholes = {kind: partition.wholes[kind].dtype for kind in sorted(partition.whole_kinds)}
            if wholes:
                yield from buffer.momentum_placements(self.family, wholes)
            for placement in buffer.placements(self.family):
                copy = self.copies.get(placement.key.name, 0)
                yield placement._replace(key=placement.key._replace(copy=copy)) if copy else placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint:
    """What all ranks know of a checkpoint before any of them opens its own shards.

    Made by one rank from the listing, one model file and one optimizer file; small and picklable.
    `optim` is None when the optimizer was not asked for, or for a stage-0 checkpoint, or where `universal` has what
    it would. `columns` are where the flat buffers of `optim` lie; under pipeline parallelism `model` and `optim` are
    what all `stages` say together, `copies` the tensors of which a file before has a copy, and `late` names of weights
    that are, or at ZeRO stage 0 may be, a later stage's, as no file has the first one's. `rows` are the model
    files of all tensor-parallel ranks where `model` is made of them, with whole tensors, and `divided` says how each
    was cut. With `masters_in_module` (fp32 training
    at stage 0) the weights are the masters: both keys name the same bytes, and a reader wants them once. `layers` are
    the files of a stage of a PipelineModule that is to be written, with the tensors by their names there. `foreign`
    says that it was made of a checkpoint of another format. `uncut` are states of stage 0 that follow no parameter.
    Copies of the next tensor-parallel rank are numbered from `copy_stride` on.
    """

    listing: Listing
    model: ModelStates
    optim: OptimStates | None
    layout: Layout
    facts: OptimizerFacts | None
    masters_in_module: bool = False
    universal: UniversalStates | None = None
    foreign: bool = False
    grid: Grid = ONE_RANK
    columns: tuple[GridColumn, ...] = ()
    stages: tuple[ModelStates, ...] = ()
    copies: tuple[Mapping[str, TensorRecord], ...] = ()
    late: frozenset[str] = frozenset()
    rows: tuple[ModelStates, ...] = ()
    divided: Mapping[str, Division] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, TensorKey]] | None = None
    uncut: tuple[Fault, ...] = ()
    copy_stride: int = 1

    @property
    def optimizer_entries(self) -> Mapping[str, object]:
        """What the optimizer's files say beside their tensors: loss scaler, clipping; empty where none was read."""
        if self.universal is not None:
            return self.universal.common.entries
        return self.optim.entries if self.optim is not None else {}

    @property
    def optimizer_path(self) -> str:
        """The file of the param groups: at stage 0 the model file."""
        if self.universal is not None:
            return self.universal.common.path
        return self.optim.path if self.optim is not None else self.model.path

    @property
    def groups(self) -> tuple[Mapping[str, object], ...]:
        """The saved param groups, without their members; empty where they were not read or saved."""
        if self.universal is not None:
            return self.universal.common.groups
        return (self.optim.groups or ()) if self.optim is not None else ()

    @property
    def dp(self) -> int:
        return self.model.dp

    def copy_of(self, key: TensorKey) -> tuple[int, int]:
        """The tensor-parallel rank, and of that the copy, counted through the stages, that a key of a copy means."""
        return divmod(key.copy, self.copy_stride)

    @property
    def of_grid(self) -> bool:
        """Whether it is made of the files of several stages, of experts, or of tensor-parallel ranks."""
        return bool(self.stages or self.rows or self.listing.experts or self.of_autoep)

    @property
    def of_autoep(self) -> bool:
        """Whether DeepSpeed has dealt out experts itself (AutoEP)."""
        return bool(autoep_sizes(self.model.entries))

    @property
    def stage(self) -> int:
        """The ZeRO stage of the saving run."""
        if self.listing.partitioned_model:
            return 3
        if self.model.param_shapes is None:
            return 0
        if self.universal is not None:
            return self.universal.common.stage
        return self.optim.stage if self.optim else 1

    @property
    def told_stage(self) -> int:
        """The stage as people are told: of stages 1 and 2 the saved JSON tells, where no optimizer file was opened."""
        said = section(self.model.config, "zero_optimization").get("stage")
        return said if self.optim is None and self.stage == 1 and isinstance(said, int) and said == 2 else self.stage

    @property
    def kind(self) -> str:
        """How the optimizer was wrapped: "none" (stage 0), "zero", "bf16" or "zero3"; "universal" where it is not."""
        if self.listing.universal:
            return "universal"
        if self.optim is not None:
            return self.optim.kind
        return {0: "none", 3: "zero3"}.get(self.stage, "zero")


def open_checkpoint(listing: Listing, *, optimizer: bool, row: Row | None = None) -> ZeroCheckpoint:
    """Read what all shards share. `optimizer=False` leaves the optimizer files unopened below stage 3.

    A universal folder is read likewise: its files below `zero` stand for the optimizer files. `row` says whose shards
    are read of tensors that tensor-parallel ranks have divided; without it all are, by the rules that a tool was given.

    Raises every structural fault that the listing, the first model file and the first optimizer file
    show: missing shards, wrong sizes, unknown layouts.
    """
    subject = f"checkpoint {listing.folder}"
    row = row or Row(rules=rules_given())
    raise_faults(listing.faults, subject=subject)
    heads = {number: files.model[0] for number, files in listing.columns.items() if 0 in files.model}
    if not heads:
        raise_faults([_no_model(listing)], subject=subject)
    number = row.rank if row.rank in heads else min(heads)
    model = listing.read(heads[number], read_model_states)
    grid = read_grid(listing, model)
    row = row._replace(size=row.size or grid.tp)
    # BF16_Optimizer divides its masters at stage 0 of a PipelineModule, and the model file then says no shapes
    divided = model.param_shapes is not None or bool(listing.layers and any(c.optim for c in listing.columns.values()))
    sharded = (optimizer or listing.partitioned_model) and not listing.universal and divided
    experts = autoep_sizes(model.entries)
    every_row = reshaped(listing, grid, row) or _cut_otherwise(listing, row, heads[min(heads)], model)
    size = grid.tp if every_row else row.size
    states = listing.universal and (optimizer or listing.partitioned_model)
    faults = [*grid_faults(listing, grid, size, optimizer=sharded)]
    if experts and (grid.tp * grid.pp > 1 or listing.universal or model.param_shapes is None):
        faults.append(_autoep_fault(listing, grid, experts))
    raise_faults(faults, subject=subject)
    if every_row:
        from ds_reshard.formats.zero.rows import open_rows

        found = open_rows(listing, grid, row, optimizer=sharded)
    else:
        found = open_row(listing, grid, row, model, optimizer=sharded)
    return _with_states(found) if states else found


def _with_states(checkpoint: ZeroCheckpoint) -> ZeroCheckpoint:
    """With the masters and states of a universal checkpoint, which are whole whatever the sizes."""
    listing, layout = checkpoint.listing, checkpoint.layout
    universal = read_universal(listing, checkpoint.model, checkpoint.stages)
    families = {placement.family: 1 for placement in universal.placements}
    placements = [*layout.placements.values(), *universal.placements]
    return replace(
        checkpoint,
        listing=replace(listing, nbytes={**listing.nbytes, **universal.nbytes}),
        layout=layout_of(listing, placements, {**layout.shards, **families}),
        facts=universal.facts,
        universal=universal,
    )


def open_row(listing: Listing, grid: Grid, row: Row, model: ModelStates, *, optimizer: bool) -> ZeroCheckpoint:
    """What one tensor-parallel rank has saved: `model` is its first model file; `optimizer` says to read its masters.

    Of a universal checkpoint, which has none of one rank, the weights.
    """
    listing = listing.column(row.rank)
    if grid.pp > 1 or listing.layers:
        from ds_reshard.formats.zero.pipeline import open_pipeline

        return open_pipeline(listing, grid, row, model, optimizer=optimizer)
    if autoep_sizes(model.entries):
        from ds_reshard.formats.zero.autoep import open_autoep

        return open_autoep(listing, grid, model, optimizer=optimizer)
    if listing.experts:
        from ds_reshard.formats.zero.experts import open_experts

        return open_experts(listing, grid, model, optimizer=optimizer)
    optim = facts = None
    columns: tuple[GridColumn, ...] = ()
    placements = [*weights(model, listing)]
    shards = {MODEL: model.dp if listing.partitioned_model else 1}
    if optimizer:
        column = read_column(listing, model)
        columns = (replace(column, first=with_wholes(column.first)) if grid.tp == 1 else column,)
        optim = columns[0].first
        facts = facts_of(model.param_shapes or (), optim)
    for column in columns:
        placements += column.placements()
        shards[column.family] = column.dp
    layout = layout_of(listing, placements, shards)
    return ZeroCheckpoint(
        listing=listing, model=model, optim=optim, layout=layout, facts=facts, grid=grid, columns=columns
    )


def reshaped(listing: Listing, grid: Grid, row: Row) -> bool:
    """Whether a reader takes what all tensor-parallel ranks have saved: where theirs is another number than its own.

    Or of a universal checkpoint, where not all of it is whole.
    """
    return (grid.tp != row.size or (listing.universal and grid.tp > 1)) and not listing.experts


def _cut_otherwise(listing: Listing, row: Row, first: str, model: ModelStates) -> bool:
    """Whether a run cuts parameters, or pads vocabularies, otherwise than as many ranks have saved them; alike on each.

    So each asks the file of the first; `model` is that of this rank, which may be it.
    """
    from ds_reshard.formats.zero.rows import cut_otherwise, padded_otherwise

    if not (row.maps or row.held) or listing.experts:
        return False
    saved = model if model.path == listing.path(first) else listing.read(first, read_model_states)
    return padded_otherwise(saved, row) or (bool(row.maps) and cut_otherwise(saved, row))


def layout_of(listing: Listing, placements: Iterable[Placement], shards: Mapping[str, int]) -> Layout:
    try:
        return Layout(by_key(placements), shards)
    except ValueError as error:
        raise fail(listing.folder, f"declares an impossible layout: {error}", "disjoint tensors", "overlap") from error


def read_column(listing: Listing, model: ModelStates) -> GridColumn:
    """The optimizer files beside a model file, by the first of them."""
    optim = listing.read(listing.optim[0], read_optim_states)
    raise_faults(unmatched(model, optim), subject=f"checkpoint {listing.folder}")
    return one_column(listing, model, optim)


def one_column(listing: Listing, model: ModelStates, optim: OptimStates) -> GridColumn:
    """The optimizer files of a checkpoint without pipeline or expert parallelism."""
    files = tuple(listing.optim.get(rank, "") for rank in range(model.dp))
    buffers = flat_buffers(optim, dict(enumerate(model.param_shapes or ())), len(files))
    return GridColumn(family=OPTIM, files=files, buffers=buffers, first=optim)


def flat_buffers(optim: OptimStates, shapes: Mapping[int, Mapping[str, Shape]], ranks: int) -> tuple[FlatBuffer, ...]:
    """The flat buffers of an optimizer file of these numbers and parameters, which so many ranks share."""
    groups = {number: group for group, members in enumerate(optim.members) for number in members}
    return tuple(
        FlatBuffer(
            shapes=of_buffer,
            rule=RULES[optim.kind],
            ranks=ranks,
            number=number,
            group=groups[number],
            gaps=optim.partitions[number].alignment,
            kinds=kinds_of(optim.partitions[number]),
            scalars=optim.partitions[number].scalars,
        )
        for number, of_buffer in shapes.items()
    )


def _no_model(listing: Listing) -> Fault:
    return CheckpointNotFound.fault(
        listing.folder,
        "holds no DeepSpeed model file",
        "mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
        ", ".join(sorted(listing.nbytes)[:6]) or "no files",
        mend="give the folder that save_checkpoint was given, and its tag",
    )


def read_grid(listing: Listing, model: ModelStates) -> Grid:
    """The sizes of the saving run, as its model files say them.

    `checkpoint_parallel_dimensions` is newer than 0.18.9: before it the names of the layers' files tell tp. One
    model-parallel rank has tp=1 and pp=1: under sequence parallelism (Ulysses) DeepSpeed 0.19.8 writes its size as
    `tp_degree` (`_checkpoint_parallel_metadata`, runtime/engine.py), though each rank has whole parameters.
    """
    columns = positive(model.path, "mp_world_size", model.entries.get("mp_world_size", 1))
    said = model.entries.get("checkpoint_parallel_dimensions")
    if isinstance(said, dict) and columns > 1:  # else an mpu may have told the ranks that share a sequence as tp
        pp, tp = (positive(model.path, name, said.get(name)) for name in ("pp_degree", "tp_degree"))
    else:
        tp = len({rank for _, rank in listing.layers}) or columns
        pp = max(1, columns // tp)
    if pp * tp != columns:
        sizes = f"tp={tp}, pp={pp}"
        raise fail(model.path, "names sizes that do not fit each other", f"{columns} model-parallel ranks", sizes)
    return Grid(dp=model.dp, tp=tp, pp=pp)


def sequence_ranks(entries: Mapping[str, object]) -> int:
    """How many ranks of the saving run shared a sequence, and with it a micro batch; 1 where no entry tells."""
    said = entries.get("checkpoint_parallel_dimensions")
    told = said.get("tp_degree") if isinstance(said, dict) and entries.get("mp_world_size") == 1 else None
    return told if isinstance(told, int) and told > 1 else 1


def _autoep_fault(listing: Listing, grid: Grid, experts: frozenset[int]) -> Fault:
    what = "has experts of AutoEP beside tensor or pipeline parallelism, at ZeRO stage 0, or in universal files"
    expected, found = "stage 1 to 3, tp=1, pp=1", f"{grid}, ep={', '.join(map(str, sorted(experts)))}"
    return UnsupportedLayout.fault(
        listing.folder, what, expected, found, mend="load it with the sizes it was saved with"
    )


def grid_faults(listing: Listing, grid: Grid, tp: int, *, optimizer: bool) -> Iterator[Fault]:
    """Files that a grid of these sizes has not, or lacks; or that belong to rows of another number than `tp`."""
    if grid.tp != tp:
        what = "was saved with tensor parallelism of another size" if tp > 1 else "saved with tensor parallelism"
        expected = f"tensor-parallel size {tp}"
        mend = f"load it in a run with import ds_reshard.auto and tensor-parallel size {grid.tp}"
        yield UnsupportedLayout.fault(listing.folder, what, expected, str(grid), mend=mend)
    foreign = sorted(set(listing.columns) - set(range(grid.tp * grid.pp)))
    if foreign:
        what, expected = "holds files of another grid", f"mp_rank_00 to mp_rank_{grid.tp * grid.pp - 1:02d} ({grid})"
        found = f"mp_rank_{foreign[0]:02d}"
        yield CheckpointDamaged.fault(
            listing.folder, what, expected, found, mend="move the files of the other save out of the folder"
        )
    for number in range(grid.tp * grid.pp):
        of = f" of mp_rank_{number:02d}" if grid.tp * grid.pp > 1 else ""
        yield from missing(listing.column(number), grid.dp, optimizer=optimizer, of=of)


class Sizes(NamedTuple):
    """The data- and model-parallel sizes of a saving run, and the expert-parallel sizes where DeepSpeed cut experts."""

    dp: int
    mp: int
    ep: frozenset[int] = frozenset()


def autoep_sizes(entries: Mapping[str, object]) -> frozenset[int]:
    """The expert-parallel sizes of a model file that AutoEP's layers have written; empty without them."""
    layers = entries.get(AUTOEP) or []
    if not isinstance(layers, list):
        return frozenset({0})  # something that is not read here
    said = (layer.get("ep_size") for layer in layers if isinstance(layer, dict))
    return frozenset(size for size in said if isinstance(size, int))


_OF_EXPERTS = re.compile(r"expp_rank_([0-9]+)_mp_rank_[0-9]+_optim_states\.pt")
"""The optimizer's states of one expert-parallel rank at stage 0 (`_get_optimizer_ckpt_name`, runtime/engine.py)."""


def saved_sizes(listing: Listing) -> Sizes | None:
    """The sizes that the first model file says, None where it says none.

    Reads the pickle alone and judges nothing: for checkpoints that this format refuses.
    """
    name = listing.model.get(0)
    if name is None:
        return None
    with open_archive(listing.path(name)) as archive:
        top = archive.load()
    sizes = [top.get(key) for key in ("dp_world_size", "mp_world_size")] if isinstance(top, dict) else []
    numbers = [size for size in sizes if isinstance(size, int)]
    if not isinstance(top, dict) or len(numbers) < 2:
        return None
    ranks = {int(match[1]) for match in map(_OF_EXPERTS.fullmatch, listing.nbytes) if match is not None} - {0}
    return Sizes(dp=numbers[0], mp=numbers[1], ep=autoep_sizes(top) | {rank + 1 for rank in sorted(ranks)[-1:]})


def missing(listing: Listing, dp: int, *, optimizer: bool, of: str = "") -> Iterator[Fault]:
    """Files that a column of so many ranks must have and the folder does not, or has empty."""
    families = [(listing.model, "model_states", dp if listing.partitioned_model else 1)]
    if optimizer:
        families.append((listing.optim, "optim_states", dp))
    for files, what, count in families:
        absent = [rank for rank in range(count) if rank not in files]
        others = any(getattr(column, what.partition("_")[0]) for column in listing.columns.values())
        if absent:
            yield CheckpointDamaged.fault(
                listing.folder,
                f"{what} files{of} of data-parallel ranks {_ranges(absent)} are missing",
                f"{count} files (the saving run had dp={dp})",
                f"{count - len(absent)}",
                mend="restore the missing files, or load another tag"
                if len(absent) < count or others
                else "load another tag, or pass --no-load-optim, or load_optimizer_states=False (DeepSpeed 0.17 and "
                "0.18.4 save no optimizer files of a bf16 run that it wraps as FP16_UnfusedOptimizer)",
            )
        for rank in range(count):
            if rank in files and listing.nbytes[files[rank]] == 0:
                yield damaged(listing.path(files[rank]), "is empty", "a torch zip file", "0 bytes")


def _ranges(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def is_placeholder(tensor: TensorRecord, shape: tuple[int, ...]) -> bool:
    """Whether a module entry only stands for a partitioned parameter: stage 3 saves those as shape (0,)."""
    return tensor.numel == 0 and prod(shape) != 0


def weights(model: ModelStates, listing: Listing) -> Iterator[Placement]:
    trainable = model.trainable
    for name, tensor in model.module.items():
        shape = trainable.get(name) or model.frozen_shapes.get(name) or tensor.shape
        shape = trainable.get(model.shared.get(name, name), shape)
        if is_placeholder(tensor, shape) or not tensor.contiguous:
            continue
        yield whole(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")
    if listing.partitioned_model:
        for name, shape in model.frozen_shapes.items():
            fragment = model.frozen_fragments.get(name)
            if fragment is not None and prod(shape) != 0:
                yield sliced(name, shape, fragment.dtype, model.dp, family=MODEL, buffer=f"frozen/{name}")


def kinds_of(partition: Partition) -> dict[str, ElementType]:
    return {"fp32": partition.fp32.dtype, **{kind: state.dtype for kind, state in partition.states.items()}}


def unmatched(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """Where the optimizer's flat buffers are not those of the model file; the first that is not."""
    groups, what = model.param_shapes or (), "flat buffers do not match the model file"
    if len(groups) != len(optim.partitions):
        return [damaged(optim.path, what, f"{len(groups)}", f"{len(optim.partitions)}")]
    what = "alignment gaps do not match the parameters"
    for shapes, partition in zip(groups, optim.partitions, strict=True):
        if partition.alignment is not None and len(partition.alignment) != len(shapes):
            return [damaged(optim.path, what, f"{len(shapes)}", f"{len(partition.alignment)}")]
    return []


def uneven(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """Where flat buffers with other experts are not as rank 0's, of which alone the model file says what it trains."""
    what = "has other parameters than rank 0: ranks have frozen different numbers of experts, or two saves are mixed"
    mend = "freeze as many experts on each rank, pass --no-load-optim, or load_optimizer_states=False, "
    mend += "or load as saved without ds_reshard"
    faults = unmatched(model, optim)
    return [UnsupportedLayout.fault(optim.path, what, one.expected, one.found, mend=mend) for one in faults]


def facts_of(shapes: Sequence[Mapping[str, Shape]], optim: OptimStates) -> OptimizerFacts:
    """What the optimizer keeps beside tensors; of a parameter in several buffers, what the first has."""
    groups = tuple(
        GroupFacts(
            members=tuple(name for i in members for name in shapes[i]),
            hyperparameters=optim.groups[g] if optim.groups is not None else None,
        )
        for g, members in enumerate(optim.members)
    )
    scalars: dict[str, Mapping[str, Scalar]] = {}
    for group, partition in zip(shapes, optim.partitions, strict=True):
        for name in group:
            scalars.setdefault(name, partition.scalars)
    return OptimizerFacts(groups=groups, scalars=scalars)
