"""A nanotron checkpoint folder as a layout, an index and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_reshard.errors import Fault, ReshardError, UnsupportedLayout, damaged, faults_of, raise_faults
from ds_reshard.formats.nanotron.metadata import Metadata, read_metadata
from ds_reshard.formats.nanotron.names import OPTIMIZER_CONFIG, NanotronListing, Rank, Topology
from ds_reshard.formats.nanotron.optimizer_file import (
    OptimizerFile,
    SavedScheduler,
    of_another_step,
    read_optimizer,
    scheduler_of,
)
from ds_reshard.formats.nanotron.parameters import Parameter, place, read_parameters
from ds_reshard.formats.nanotron.slices import dp_cut
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey

OPTIM = "optim"


@dataclass(frozen=True, slots=True, kw_only=True)
class NanotronCheckpoint:
    """What is known of a checkpoint before its shards are opened.

    `stages` are the first optimizer files of each pipeline rank, which hold a part of all its parameters; empty where
    the optimizer was not saved. A tied parameter is trained in several stages: its states lie in each. `schedulers` are
    of the same ranks, empty where none was saved.
    """

    listing: NanotronListing
    metadata: Metadata
    parameters: Mapping[str, Parameter]
    stages: tuple[OptimizerFile, ...]
    schedulers: tuple[SavedScheduler, ...]
    layout: Layout
    facts: OptimizerFacts | None

    @property
    def folder(self) -> str:
        return self.listing.folder

    @property
    def topology(self) -> Topology:
        """Of the optimizer's files; where there are none, what the metadata and the weights say."""
        return self.listing.topology or Topology(pp=1, tp=self.metadata.tp, dp=None, exp=1)

    @property
    def rates(self) -> dict[str, Mapping[str, object]]:
        """What the scheduler keeps of each parameter's param group, by its name."""
        return {
            name: scheduler.of_group(number)
            for stage, scheduler in zip(self.stages, self.schedulers, strict=False)
            for number, group in enumerate(stage.groups)
            for name in group.members
        }

    def stages_of(self, name: str) -> list[int]:
        """The pipeline ranks that train a parameter."""
        return [pp for pp, stage in enumerate(self.stages) if name in stage.states]

    def cut(self, parameter: Parameter, rank: Rank) -> Cut:
        """How the shard of a pipeline and tensor rank lies over the files of its data-parallel ranks."""
        return state_cut(parameter.local_numel(rank.tp), self.topology, rank)


def state_cut(numel: int, topology: Topology, rank: Rank) -> Cut:
    """The states of a shard of `numel` elements: whole in one file, or over those of the data-parallel ranks."""
    first = topology.shard(Rank(pp=rank.pp, tp=rank.tp, dp=0))
    if topology.dp is None:
        return Cut(chunk=max(1, numel), first=first)
    chunk, wide = dp_cut(numel, topology.dp)
    return Cut(chunk=chunk, wide=wide, first=first)


@dataclass(slots=True, kw_only=True)
class Opening:
    """A checkpoint as far as it can be opened, and why no further."""

    metadata: Metadata | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    stages: tuple[OptimizerFile, ...] = ()
    schedulers: tuple[SavedScheduler, ...] = ()
    checkpoint: NanotronCheckpoint | None = None
    faults: list[Fault] = field(default_factory=list)


def open_checkpoint(listing: NanotronListing) -> NanotronCheckpoint:
    """Read what all shards share: the headers of the weights, and the first optimizer file of each pipeline rank.

    Raises every structural fault that these show.
    """
    opening = try_open(listing)
    raise_faults(opening.faults, subject=f"checkpoint {listing.folder}")
    assert opening.checkpoint is not None
    return opening.checkpoint


def try_open(listing: NanotronListing) -> Opening:
    """As `open_checkpoint`, with the faults in what is returned."""
    opening = Opening(faults=list(listing.faults))
    opening.metadata, faults = read_metadata(listing)
    opening.faults += faults
    tp = opening.metadata.tp if opening.metadata is not None else listing.topology.tp if listing.topology else 1
    opening.parameters, faults = read_parameters(listing, tp)
    opening.faults += faults
    if listing.topology is not None:
        opening.stages, faults = _stages(listing, listing.topology)
        opening.faults += faults
    if opening.faults or opening.metadata is None:
        return opening
    opening.faults += _unmatched(listing, opening)
    try:
        groups = [stage.groups for stage in opening.stages]
        opening.schedulers = tuple(scheduler_of(listing, groups))
        opening.faults += of_another_step(opening.schedulers, groups)
    except ReshardError as error:
        opening.faults += faults_of(error)
    if not opening.faults:
        opening.checkpoint = _made(listing, opening.metadata, opening)
    return opening


def _stages(listing: NanotronListing, topology: Topology) -> tuple[tuple[OptimizerFile, ...], list[Fault]]:
    stages: list[OptimizerFile] = []
    faults: list[Fault] = []
    for pp in range(topology.pp):
        name = listing.optimizer.get(Rank(pp=pp, tp=0, dp=0))
        if name is None or not listing.nbytes[name]:
            continue  # which is a fault of the listing
        try:
            stages.append(read_optimizer(listing.path(name)))
        except ReshardError as error:
            faults += faults_of(error)
    return tuple(stages), faults


def _unmatched(listing: NanotronListing, opening: Opening) -> Iterator[Fault]:
    """What the weights, the optimizer's files and its configuration say differently of the parameters."""
    for stage in opening.stages:
        if not stage.states:
            yield damaged(stage.path, "holds no state: it was saved before the first step", "states", "none")
        for name in stage.states:
            if name not in opening.parameters:
                found = "no file below model/"
                yield damaged(stage.path, f"has the states of {name}, which has no weight", "its weight", found)
            elif not opening.parameters[name].shape and listing.topology is not None and listing.topology.dp is None:
                yield UnsupportedLayout.fault(
                    stage.path,
                    f"{name} is one number: its states cannot be told from its counters",
                    mend="save it with zero_stage 1",
                )
    yield from _several_runs(opening.stages)
    config = opening.metadata.optimizer if opening.metadata is not None else None
    if config is not None and opening.stages and listing.topology is not None and listing.topology.dp is not None:
        yield from _offsets(listing, config, opening, listing.topology, listing.topology.dp)


def _several_runs(stages: tuple[OptimizerFile, ...]) -> Iterator[Fault]:
    """Pipeline ranks of which some keep fp32 masters, other states of a tied parameter, or those of another step."""
    trained = [stage for stage in stages if stage.states]
    for stage in trained[1:]:
        first = trained[0]
        if stage.step != first.step:
            yield damaged(stage.path, f"is of another step than {first.path}", str(first.step), str(stage.step))
        if stage.has_masters != first.has_masters:
            said = ("fp32 masters", "none") if first.has_masters else ("no fp32 masters", "masters")
            yield damaged(stage.path, f"is of another run than {first.path}", *said)
            continue
        for name in stage.states.keys() & first.states.keys():
            one, other = (
                {kind: (tensor.dtype.label, tensor.shape) for kind, tensor in of.states[name].items()}
                for of in (first, stage)
            )
            if one != other:
                yield damaged(stage.path, f"has other states of {name} than {first.path}", str(one), str(other))


def _offsets(
    listing: NanotronListing, config: Mapping[str, object], opening: Opening, topology: Topology, dp: int
) -> Iterator[Fault]:
    """The offsets that world rank 0 noted, of its own pipeline stage alone; all are computed here."""
    path, configs = listing.path(OPTIMIZER_CONFIG), config.get("configs")
    noted = configs.get("param_name_to_dp_rank_offsets") if isinstance(configs, dict) else None
    if not isinstance(noted, dict):
        yield damaged(path, "has no offsets", "param_name_to_dp_rank_offsets", "none")
        return
    own = set(opening.stages[0].states)
    if set(noted) != own:
        found = f"{len(noted)} names, {len(own & set(noted))} of them there"
        yield damaged(path, "lists other parameters than the files of pipeline rank 0", f"{len(own)} names", found)
    for name in sorted(own & set(noted) & set(opening.parameters)):
        numel = opening.parameters[name].local_numel(0)
        cut = state_cut(numel, topology, Rank(pp=0, tp=0, dp=0))
        expected = {str(p.shard - cut.first): [str(p.start), str(p.stop)] for p in cut.pieces(0, numel)}
        if noted[name] != expected:
            yield damaged(path, f"has other offsets for {name} than its size gives", str(expected), str(noted[name]))


def _made(listing: NanotronListing, metadata: Metadata, opening: Opening) -> NanotronCheckpoint:
    parameters, stages = opening.parameters, opening.stages
    shards = {parameter.family: len(parameter.files) for parameter in parameters.values()}
    placements = [parameter.weight() for parameter in parameters.values()]
    if listing.topology is not None:
        shards[OPTIM] = sum(1 for _ in listing.topology.ranks)
        placements += _states(parameters, stages, listing.topology)
    layout = Layout({placement.key: placement for placement in placements}, shards)
    facts = _facts(stages) if stages else None
    return NanotronCheckpoint(
        listing=listing,
        metadata=metadata,
        parameters=parameters,
        stages=stages,
        layout=layout,
        facts=facts,
        schedulers=opening.schedulers,
    )


def _states(
    parameters: Mapping[str, Parameter], stages: tuple[OptimizerFile, ...], topology: Topology
) -> Iterator[Placement]:
    """Each state where it is read from: of replicas the first."""
    done: set[TensorKey] = set()
    for pp, stage in enumerate(stages):
        for name, kinds in stage.states.items():
            parameter = parameters[name]
            cuts = {
                tp: state_cut(parameter.local_numel(tp), topology, Rank(pp=pp, tp=tp, dp=0))
                for tp in (range(topology.tp) if parameter.sharded else (0,))
            }
            for kind, tensor in kinds.items():
                key = TensorKey(name=name, kind=kind)
                if key not in done:
                    done.add(key)
                    yield place(parameter, kind, tensor.dtype, OPTIM, f"{kind}/{name}", cuts)


def _facts(stages: tuple[OptimizerFile, ...]) -> OptimizerFacts:
    groups = [
        GroupFacts(members=group.members, hyperparameters=group.hyperparameters)
        for stage in stages
        for group in stage.groups
    ]
    scalars = {name: values for stage in reversed(stages) for name, values in stage.scalars.items()}
    return OptimizerFacts(groups=tuple(groups), scalars=scalars)


def shape_of(parameter: Parameter, topology: Topology, rank: Rank) -> tuple[int, ...] | None:
    """The shape of a state in one file: the shard's own, or flat what the rank has of it; None for nothing."""
    if topology.dp is None:
        return parameter.local_shape(rank.tp)
    piece = state_cut(parameter.local_numel(rank.tp), topology, rank).piece(
        topology.shard(rank), parameter.local_numel(rank.tp)
    )
    return (piece.stop - piece.start,) if piece is not None else None
