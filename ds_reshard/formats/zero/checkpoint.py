"""An opened ZeRO or universal checkpoint folder: its layout, facts and headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ds_reshard.errors import Fault
from ds_reshard.formats.zero.flat import FlatBuffer
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition
from ds_reshard.formats.zero.tensor_parallel import TensorSplit
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule
from ds_reshard.model.target import RunSizes

OPTIM, MODEL = "optim", "model"
AUTOEP = "ds_autoep_layers"
"""The entry of a model file that lists AutoEP's layers, whose experts DeepSpeed itself distributes over ranks."""


class TpRank(NamedTuple):
    """The tensor-parallel rank that reads, the number of ranks, and what its run says of how tensors are split.

    A `size` of 0 is the saving run's. `ties` has the key of each tied layer of a PipelineModule, None if no run is
    known. `rules` are the user's. `whole_shapes` and `live_rules` come from a run's parameters (see `SplitEvidence`),
    `affine_maps` from its module; `shard_shapes` are those of the rank's own shards.
    """

    size: int = 1
    rank: int = 0
    ties: Mapping[int, str] | None = None
    rules: tuple[Rule, ...] = ()
    whole_shapes: Mapping[str, Shape] = MappingProxyType({})
    live_rules: Mapping[str, Rule | None] = MappingProxyType({})
    affine_maps: Mapping[object, object] = MappingProxyType({})
    shard_shapes: Mapping[str, Shape] = MappingProxyType({})


SINGLE_TP_RANK = TpRank()
ANY_TP_RANK = TpRank(size=0)
"""For readers that only need data which is identical on all tensor-parallel ranks."""


class Grid(RunSizes):
    """How many ranks saved a checkpoint, along each axis."""

    def column(self, stage: int, tp_rank: int) -> int:
        """Return the number after `mp_rank_` of a stage's files (`PipelineParallelGrid`, pipe/topology.py, 0.19.8)."""
        return stage * self.tp + tp_rank

    def __str__(self) -> str:
        ep = f", ep={self.ep}" if self.ep > 1 else ""
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}{ep}"

    @property
    def short(self) -> str:
        """Return the sizes above 1, and dp, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self._asdict().items() if size > 1 or axis == "dp")


ONE_RANK = Grid(dp=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridColumn:
    """Optimizer files whose flat buffers are cut together: shard `begin + i` of `family` is the file `files[i]`.

    `buffers` are the flat buffers in these files, under the parameters' names in the whole model. `copies` has this
    column's copy number of each parameter that an earlier column has too. `head` is the first file's header. Columns
    with parts of the same tensors share a family: `number` counts them, and `begin` is this one's first shard.
    """

    family: str
    files: tuple[str, ...]
    buffers: tuple[FlatBuffer, ...]
    head: OptimStates
    copies: Mapping[str, int] = field(default_factory=dict)
    begin: int = 0
    number: int = 0

    @property
    def dp(self) -> int:
        return len(self.files)

    def placements(self) -> Iterator[Placement]:
        for buffer in self.buffers:
            partition = self.head.partitions[buffer.number]
            full_dtypes = {kind: partition.full_states[kind].dtype for kind in sorted(partition.full_param_kinds)}
            if full_dtypes:
                yield from buffer.momentum_placements(self.family, full_dtypes)
            yield from buffer.placements(self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCheckpoint:
    """What a load of DeepSpeed needs of a checkpoint, DeepSpeed's own or another format's; small and picklable.

    `optim` is None if the optimizer was not asked for, and at stage 0. With pipeline parallelism `model` and `optim`
    merge all `stages`; `later_stage_weights` are weights that only a later stage's file holds, or at ZeRO stage 0 may.
    With tensor parallelism `model` may merge the model files of all ranks, `tp_models`, into whole tensors; `splits`
    then says how each was split. With `masters_in_module` (fp32 training at stage 0) the weights are the masters: both
    keys name the same bytes, which are read once. `unreshardable` are the names of stage-0 states that are not
    shaped like a parameter, each with its fault.
    """

    listing: Listing
    model: ModelStates
    layout: Layout
    facts: OptimizerFacts | None
    optim: OptimStates | None = None
    masters_in_module: bool = False
    grid: Grid = ONE_RANK
    stages: tuple[ModelStates, ...] = ()
    later_stage_weights: frozenset[str] = frozenset()
    tp_models: tuple[ModelStates, ...] = ()
    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    unreshardable: tuple[tuple[str, Fault], ...] = ()

    @property
    def optimizer_entries(self) -> Mapping[str, object]:
        """Return the optimizer file's entries beside tensors: loss scaler, clipping; empty if no file was read.

        At stage 0 that is what FP16_Optimizer says in the model file (`state_dict`, runtime/fp16, 0.19.8).
        """
        if self.stage == 0:
            return section(self.model.entries, "optimizer")
        return self.optim.entries if self.optim is not None else {}

    @property
    def optimizer_path(self) -> str:
        """Return the file of the param groups, at stage 0 the model file."""
        return self.optim.path if self.optim is not None else self.model.path

    @property
    def groups(self) -> tuple[Mapping[str, object], ...]:
        """Return the saved param groups, without their members; empty if they were not read or not saved."""
        return (self.optim.groups or ()) if self.optim is not None else ()

    @property
    def universal(self) -> UniversalStates | None:
        """Return the header of a universal checkpoint's states, if it was read."""
        return self.optim if isinstance(self.optim, UniversalStates) else None

    @property
    def dp(self) -> int:
        return self.model.dp

    @property
    def has_grid_files(self) -> bool:
        """True if the checkpoint merges files of several stages, experts or tensor-parallel ranks."""
        return bool(self.stages or self.tp_models or self.listing.experts or self.has_autoep)

    @property
    def has_autoep(self) -> bool:
        """True if DeepSpeed itself has distributed experts over ranks (AutoEP)."""
        return bool(autoep_sizes(self.model.entries))

    @property
    def stage(self) -> int:
        """Return the ZeRO stage of the saving run; 1 for stage 2 if no optimizer file was opened."""
        if self.listing.partitioned_model:
            return 3
        if self.model.param_shapes is None:
            return 0
        return self.optim.stage if self.optim else 1

    @property
    def displayed_stage(self) -> int | str:
        """Return the stage for messages: if no optimizer file was opened, the saved JSON tells stage 2 from stage 1."""
        stage = section(self.model.config, "zero_optimization").get("stage")
        unread = self.optim is None or self.universal is not None
        return stage if unread and self.stage == 1 and isinstance(stage, int) and stage == 2 else self.stage

    @property
    def kind(self) -> str:
        """Return the optimizer's wrapper: "none" (stage 0), "zero", "bf16" or "zero3"; "universal" if it has none."""
        if self.listing.universal:
            return "universal"
        if self.optim is not None:
            return self.optim.kind
        return {0: "none", 3: "zero3"}.get(self.stage, "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint(AnyCheckpoint):
    """What all ranks know of a DeepSpeed folder before any of them opens its own shards.

    One rank reads it from the listing, one model file and one optimizer file. `columns` are the optimizer files by flat
    buffer. `copies` has, per tensor-parallel rank, weights whose first copy is in another file, by name and number.
    """

    columns: tuple[GridColumn, ...] = ()
    copies: tuple[Mapping[tuple[str, int], TensorRecord], ...] = ()


def sequence_ranks(entries: Mapping[str, object]) -> int:
    """Return how many ranks of the saving run shared a sequence, and so a micro batch; 1 if no entry says it."""
    sizes = entries.get("checkpoint_parallel_dimensions")
    ranks = sizes.get("tp_degree") if isinstance(sizes, dict) and entries.get("mp_world_size") == 1 else None
    return ranks if isinstance(ranks, int) and ranks > 1 else 1


def autoep_sizes(entries: Mapping[str, object]) -> frozenset[int]:
    """Return the expert-parallel sizes of AutoEP's layers in a model file; empty without them."""
    layers = entries.get(AUTOEP) or []
    if not isinstance(layers, list):
        return frozenset({0})  # malformed, or of an unknown version
    sizes = (layer.get("ep_size") for layer in layers if isinstance(layer, dict))
    return frozenset(size for size in sizes if isinstance(size, int))


def is_placeholder(tensor: TensorRecord, shape: tuple[int, ...]) -> bool:
    """True if a module entry is the empty stand-in of a partitioned parameter: stage 3 saves these as shape (0,)."""
    return tensor.numel == 0 and prod(shape) != 0


def kinds_of(partition: Partition) -> dict[str, ElementType]:
    return {"fp32": partition.fp32.dtype, **{kind: state.dtype for kind, state in partition.states.items()}}
