"""The shards of a nanotron checkpoint, opened one by one and each checked against the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import Fault, ReshardError, damaged, faults_of, raise_faults
from ds_reshard.formats.nanotron.checkpoint import OPTIM, NanotronCheckpoint, shape_of
from ds_reshard.formats.nanotron.names import Rank
from ds_reshard.formats.nanotron.optimizer_file import OptimizerFile, SavedGroup, read_optimizer, read_scheduler
from ds_reshard.formats.nanotron.parameters import DATA
from ds_reshard.model.facts import canonical, describe
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.planning.plan import extents_overlap

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
        rank = list(checkpoint.topology.ranks)[shard]
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
        groups: dict[str, tuple[str, SavedGroup]] = {}
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
                yield from _differing(path, "the scheduler", first.path, first.entries, found.entries)
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
    files = [PositionedFile(extent.path) for extent in (one, other)]
    try:
        for at in range(0, one.nbytes, _COMPARED_NBYTES):
            nbytes = min(_COMPARED_NBYTES, one.nbytes - at)
            parts = [
                file.read(extent.byte_offset + at, nbytes) for file, extent in zip(files, (one, other), strict=True)
            ]
            if parts[0] != parts[1]:
                return False
    finally:
        for file in files:
            file.close()
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
