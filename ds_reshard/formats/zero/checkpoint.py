"""A ZeRO checkpoint folder, or a universal one made of it, as a layout, an index and facts."""

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
from ds_reshard.formats.zero.tensor_parallel import Division
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule
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
            yield from buffer.placements(self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCheckpoint:
    """What a load of DeepSpeed asks of a checkpoint, its own or one of another format; small and picklable.

    `optim` is None when the optimizer was not asked for, or for a stage-0 checkpoint, or where `universal` has what
    it would. Under pipeline parallelism `model` and `optim` are what all `stages` say together, and `late` has names of
    weights that are, or at ZeRO stage 0 may be, a later stage's, as no file has the first one's. `rows` are the model
    files of all tensor-parallel ranks where `model` is made of them, with whole tensors, and `divided` says how each
    was cut. With `masters_in_module` (fp32 training at stage 0) the weights are the masters: both keys name the same
    bytes, and a reader wants them once. `uncut` are states of stage 0 that follow no parameter, `stateless` are
    parameters that its optimizer lists and has no states of, though of others.
    """

    listing: Listing
    model: ModelStates
    layout: Layout
    facts: OptimizerFacts | None
    optim: OptimStates | None = None
    masters_in_module: bool = False
    universal: UniversalStates | None = None
    grid: Grid = ONE_RANK
    stages: tuple[ModelStates, ...] = ()
    late: frozenset[str] = frozenset()
    rows: tuple[ModelStates, ...] = ()
    divided: Mapping[str, Division] = field(default_factory=dict)
    uncut: tuple[Fault, ...] = ()
    stateless: frozenset[str] = frozenset()

    @property
    def optimizer_entries(self) -> Mapping[str, object]:
        """What the optimizer's files say beside their tensors: loss scaler, clipping; empty where none was read.

        At stage 0 that is what FP16_Optimizer says in the model file (`state_dict`, runtime/fp16, 0.19.8).
        """
        if self.universal is not None:
            return self.universal.common.entries
        if self.stage == 0:
            return section(self.model.entries, "optimizer")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint(AnyCheckpoint):
    """What all ranks know of a DeepSpeed folder before any of them opens its own shards.

    Made by one rank from the listing, one model file and one optimizer file. `columns` are where the flat buffers of
    `optim` lie, `copies` the weights of which a file before has a copy, for each tensor-parallel rank, by name and
    number of the stage.
    """

    columns: tuple[GridColumn, ...] = ()
    copies: tuple[Mapping[tuple[str, int], TensorRecord], ...] = ()


def sequence_ranks(entries: Mapping[str, object]) -> int:
    """How many ranks of the saving run shared a sequence, and with it a micro batch; 1 where no entry tells."""
    said = entries.get("checkpoint_parallel_dimensions")
    told = said.get("tp_degree") if isinstance(said, dict) and entries.get("mp_world_size") == 1 else None
    return told if isinstance(told, int) and told > 1 else 1


def autoep_sizes(entries: Mapping[str, object]) -> frozenset[int]:
    """The expert-parallel sizes of a model file that AutoEP's layers have written; empty without them."""
    layers = entries.get(AUTOEP) or []
    if not isinstance(layers, list):
        return frozenset({0})  # something that is not read here
    said = (layer.get("ep_size") for layer in layers if isinstance(layer, dict))
    return frozenset(size for size in said if isinstance(size, int))


def is_placeholder(tensor: TensorRecord, shape: tuple[int, ...]) -> bool:
    """Whether a module entry only stands for a partitioned parameter: stage 3 saves those as shape (0,)."""
    return tensor.numel == 0 and prod(shape) != 0


def kinds_of(partition: Partition) -> dict[str, ElementType]:
    return {"fp32": partition.fp32.dtype, **{kind: state.dtype for kind, state in partition.states.items()}}
