"""A nanotron checkpoint folder as a layout, facts, and shards that are checked against both when they are opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import Fault, ReshardError, UnsupportedLayout, damaged, faults_of, raise_faults
from ds_reshard.formats.nanotron.metadata import Metadata, read_metadata
from ds_reshard.formats.nanotron.names import OPTIMIZER_CONFIG, NanotronListing, Rank, Topology
from ds_reshard.formats.nanotron.optimizer_file import (
    OptimizerFile,
    SavedScheduler,
    of_another_step,
    read_optimizer,
    read_scheduler,
    scheduler_of,
)
from ds_reshard.formats.nanotron.parameters import DATA, Parameter, dp_cut, place, read_parameters
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, canonical, describe
from ds_reshard.model.index import Extent, extent_of, extents_overlap
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
            name: row
            for stage, scheduler in zip(self.stages, self.schedulers, strict=False)
            for group, row in zip(stage.groups, scheduler.groups, strict=True)
            for name in group.members
        }

    def stages_of(self, name: str) -> list[int]:
        """The pipeline ranks that train a parameter."""
        return [pp for pp, stage in enumerate(self.stages) if name in stage.states]


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
        yield from _offsets(listing, config, opening, listing.topology)


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
    listing: NanotronListing, config: Mapping[str, object], opening: Opening, topology: Topology
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
    groups = tuple(group for stage in stages for group in stage.groups)
    scalars = {name: values for stage in reversed(stages) for name, values in stage.scalars.items()}
    return OptimizerFacts(groups=groups, scalars=scalars)


def shape_of(parameter: Parameter, topology: Topology, rank: Rank) -> tuple[int, ...] | None:
    """The shape of a state in one file: the shard's own, or flat what the rank has of it; None for nothing."""
    if topology.dp is None:
        return parameter.local_shape(rank.tp)
    piece = state_cut(parameter.local_numel(rank.tp), topology, rank).piece(
        topology.shard(rank), parameter.local_numel(rank.tp)
    )
    return (piece.stop - piece.start,) if piece is not None else None


_COMPARED_NBYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class NanotronShards:
    """Opens the shards of a checkpoint for an index, each checked against the layout when it is opened.

    `opened` keeps what is needed to compare the optimizer's files with each other.
    """

    checkpoint: NanotronCheckpoint
    opened: dict[int, OptimizerFile] = field(default_factory=dict)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The buffers of one shard: `data` of a weight's file, `exp_avg/<name>` and others of an optimizer's."""
        checkpoint = self.checkpoint
        if family != OPTIM:
            return {DATA: extent_of(checkpoint.parameters[family.removeprefix("model/")].files[shard])}
        rank = checkpoint.topology.rank(shard)
        path = checkpoint.listing.path(checkpoint.listing.optimizer[rank])
        first = checkpoint.stages[rank.pp]
        file = first if path == first.path else read_optimizer(path)
        raise_faults(list(_unlike(checkpoint, rank, file)), subject=f"checkpoint {checkpoint.folder}")
        self.opened[shard] = file
        extents = {
            f"{kind}/{name}": extent_of(tensor) for name, kinds in file.states.items() for kind, tensor in kinds.items()
        }
        shared = [
            damaged(path, f"{one} and {other} share bytes", "disjoint tensors", "overlap")
            for one, other in extents_overlap(extents)
        ]
        raise_faults(shared, subject=f"checkpoint {checkpoint.folder}")
        return extents

    def compare(self) -> Iterator[Fault]:
        """Faults where the files that were opened say different things of one parameter: they are of several saves.

        Compares steps and hyper-parameters, also with those of the first file of each stage, and of parameters that
        several ranks hold alike (not sharded, or tied) every state, by its checksum or its bytes.
        """
        groups: dict[str, tuple[str, GroupFacts]] = {}
        scalars: dict[tuple[str, str], tuple[str, object]] = {}
        for file in (*self.checkpoint.stages, *self.opened.values()):
            for group in file.groups:
                for name in group.members:
                    first, known = groups.setdefault(name, (file.path, group))
                    yield from _differing(
                        file.path, f"param group of {name}", first, known.hyperparameters, group.hyperparameters
                    )
            for name, values in file.scalars.items():
                for kind, value in values.items():
                    first, said = scalars.setdefault((name, kind), (file.path, value))
                    yield from _differing(file.path, f"{kind} of {name}", first, said, value)
        yield from self._schedulers()
        yield from self._replicas()

    def _schedulers(self) -> Iterator[Fault]:
        """Of each stage all ranks keep the same scheduler, and of all stages the same counters."""
        checkpoint = self.checkpoint
        for rank, name in checkpoint.listing.schedulers.items():
            path, first = checkpoint.listing.path(name), checkpoint.schedulers[rank.pp]
            if path != first.path:
                try:
                    found = read_scheduler(path, len(checkpoint.stages[rank.pp].groups))
                except ReshardError as error:
                    yield from faults_of(error)
                    continue
                yield from _differing(path, "the scheduler", first.path, first.entries(), found.entries())
        for other in checkpoint.schedulers[1:]:
            first = checkpoint.schedulers[0]
            yield from _differing(other.path, "the scheduler's position", first.path, first.counters, other.counters)

    def _replicas(self) -> Iterator[Fault]:
        topology = self.checkpoint.topology
        for name, parameter in self.checkpoint.parameters.items():
            stages = self.checkpoint.stages_of(name)
            for tp in range(topology.tp):
                for pp in stages:
                    first = Rank(pp=stages[0], tp=tp if parameter.sharded else 0, dp=0)
                    if (pp, tp) != (first.pp, first.tp):
                        yield from self._replica(name, first, Rank(pp=pp, tp=tp, dp=0))

    def _replica(self, name: str, first: Rank, other: Rank) -> Iterator[Fault]:
        topology = self.checkpoint.topology
        for dp in range(topology.dp_files):
            one, two = (self.opened.get(topology.shard(Rank(pp=rank.pp, tp=rank.tp, dp=dp))) for rank in (first, other))
            if one is None or two is None:
                continue
            for kind, tensor in one.states.get(name, {}).items():
                if not same_bytes(extent_of(tensor), extent_of(two.states[name][kind])):
                    yield damaged(
                        two.path,
                        f"{kind} of {name} differs from that of another rank that holds the same part",
                        f"the bytes of {one.path.removeprefix(self.checkpoint.folder + '/')}",
                        "others",
                    )


def same_bytes(one: Extent, other: Extent) -> bool:
    """Whether two tensors hold the same bits: by the checksums of records that hold nothing else, or by reading."""
    if one.dtype is not other.dtype or one.numel != other.numel:
        return False
    if all(extent.record.crc32 is not None and extent.record.nbytes == extent.nbytes for extent in (one, other)):
        return one.record.crc32 == other.record.crc32
    with PositionedFile(one.path) as first, PositionedFile(other.path) as second:
        for at in range(0, one.nbytes, _COMPARED_NBYTES):
            nbytes = min(_COMPARED_NBYTES, one.nbytes - at)
            if first.read(one.byte_offset + at, nbytes) != second.read(other.byte_offset + at, nbytes):
                return False
    return True


def _unlike(checkpoint: NanotronCheckpoint, rank: Rank, file: OptimizerFile) -> Iterator[Fault]:
    """In what a file is not what the first file of its stage and the weights say that it must be."""
    first, topology = checkpoint.stages[rank.pp], checkpoint.topology
    expected = {
        name: shape
        for name in first.states
        if (shape := shape_of(checkpoint.parameters[name], topology, rank)) is not None
    }
    if set(expected) != set(file.states):
        yield damaged(
            file.path, "holds the states of other parameters than its rank has", _some(expected), _some(file.states)
        )
        return
    for name, shape in expected.items():
        kinds, like = file.states[name], first.states[name]
        if {kind: tensor.dtype for kind, tensor in kinds.items()} != {kind: t.dtype for kind, t in like.items()}:
            yield damaged(file.path, f"has other states of {name} than the first file", _some(like), _some(kinds))
            continue
        for kind, tensor in kinds.items():
            if tensor.shape != shape:
                what = f"{kind} of {name} has another shape than its part of the parameter"
                yield damaged(file.path, what, str(list(shape)), str(list(tensor.shape)))


def _some(names: Mapping[str, object] | Sequence[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def _differing(path: str, what: str, first: str, said: object, value: object) -> Iterator[Fault]:
    if canonical(said) != canonical(value):
        yield damaged(path, f"{what} differs from that in {first}", describe(said), describe(value))
