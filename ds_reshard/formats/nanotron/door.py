"""nanotron's checkpoints as the door knows them, and what one tells of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ds_reshard.containers.plain import group_entries
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    Fault,
    ReadFailed,
    UnsupportedLayout,
    error_of,
)
from ds_reshard.formats.nanotron.checkpoint import (
    NanotronCheckpoint,
    NanotronShards,
    Opening,
    open_checkpoint,
    try_open,
)
from ds_reshard.formats.nanotron.content import adopt, content_of, digest_of
from ds_reshard.formats.nanotron.names import LATEST, NanotronListing, is_nanotron, read_listing
from ds_reshard.formats.nanotron.target import nanotron_target
from ds_reshard.model.checkpoint import Checkpoint, Format, Listing, Shards, SurveyReport
from ds_reshard.model.content import Content
from ds_reshard.model.facts import describe as described
from ds_reshard.model.index import Index
from ds_reshard.model.reports import FileEntry, Inspection, ParameterEntry, Steps, states_of
from ds_reshard.model.target import ConversionRequest, Target

_ROLES = {"model": "model", "optimizer": "optimizer"}


def survey(listing: NanotronListing) -> Opening:
    """Every file opened, every fault collected; never raises for what the files hold."""
    opening = try_open(listing)
    if opening.checkpoint is not None:
        layout, shards = opening.checkpoint.layout, NanotronShards(checkpoint=opening.checkpoint)
        index = Index(layout, shards)
        for family, count in layout.shards.items():
            for shard in range(count):
                index.open(family, shard)
        opening.faults += index.faults or list(shards.compare())
    return opening


def _describe(found: Listing) -> Inspection:
    """What was found, as far as the checkpoint could be opened."""
    listing = _nanotron(found)
    opening = survey(listing)
    metadata, topology = opening.metadata, listing.topology
    config = metadata.config if metadata is not None else {}
    tensors = [pair for stage in opening.stages for kinds in stage.states.values() for pair in kinds.items()]
    scalars = [values for stage in opening.stages for values in stage.scalars.values()]
    groups = [(group.members, group.hyperparameters) for stage in opening.stages for group in stage.groups]
    kind = metadata.optimizer.get("type") if metadata is not None and metadata.optimizer is not None else None
    return Inspection(
        format="nanotron",
        writer="nanotron, checkpoint version",
        folder=listing.folder,
        tag=listing.tag,
        version=metadata.version if metadata is not None else None,
        stage=None if topology is None else int(topology.dp is not None),
        wrapper=str(kind) if kind is not None else None,
        dp=metadata.dp if metadata is not None else None,
        tp=metadata.tp if metadata is not None else None,
        pp=topology.pp if topology is not None else None,
        optimizer=config.get("optimizer.optimizer_factory.name"),
        states=states_of(((kind, tensor.dtype) for kind, tensor in tensors), scalars),
        groups=group_entries(groups, {name: parameter.shape for name, parameter in opening.parameters.items()}),
        steps=_steps(opening),
        parameters=tuple(_parameters(opening)),
        files=tuple(_files(listing)),
        faults=tuple(sorted(dict.fromkeys(opening.faults), key=lambda one: (one.where, one.what, one.found))),
    )


def _steps(opening: Opening) -> Steps:
    metadata = opening.metadata
    steps: Mapping[str, object] = {
        described(scalars["step"]): None
        for stage in opening.stages
        for scalars in stage.scalars.values()
        if "step" in scalars
    }
    return Steps(
        global_steps=metadata.step if metadata is not None else None,
        global_samples=metadata.samples if metadata is not None else None,
        skipped_steps=None,
        optimizer_steps=tuple(text.rpartition(" ")[2] for text in steps),
    )


def _parameters(opening: Opening) -> Iterator[ParameterEntry]:
    homes: dict[str, int] = {}
    for number, group in enumerate(group for stage in opening.stages for group in stage.groups):
        for name in group.members:
            homes.setdefault(name, number)
    for name, parameter in sorted(opening.parameters.items()):
        role = ("trainable" if name in homes else "frozen") if opening.stages else "parameter"
        yield ParameterEntry(
            name=name,
            shape=parameter.shape,
            dtype=parameter.dtype.label,
            role=role,
            group=homes.get(name),
            tied_to=None,
        )


def _files(listing: NanotronListing) -> Iterator[FileEntry]:
    for name in sorted(listing.nbytes):
        yield FileEntry(name=name, nbytes=listing.nbytes[name], role=_ROLES.get(name.partition("/")[0], "other"))


TO = "nanotron"


class OpenedNanotron(Checkpoint):
    framework = "nanotron"

    def __init__(self, listing: NanotronListing) -> None:
        self.checkpoint = open_checkpoint(listing)
        self.folder, self.files = listing.folder, listing.nbytes
        self.layout, self.facts = self.checkpoint.layout, self.checkpoint.facts
        self.ranks, self.rates = self.checkpoint.metadata.dp, self.checkpoint.rates

    def shards(self) -> Shards:
        pieces = NanotronShards(checkpoint=self.checkpoint)
        index = Index(self.layout, pieces)
        return Shards(index=index, compare=lambda: () if index.faults else tuple(pieces.compare()))

    def content(self) -> Content:
        return content_of(self.checkpoint)

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        if asked.to != TO:
            return None
        return nanotron_target(self.checkpoint, asked, _opened(asked, like))

    def values(self) -> Mapping[str, Mapping[str, object]]:
        saved = self.checkpoint
        kept = {key: value for key, value in saved.metadata.entries.items() if key not in ("tp", "dp", "version")}
        return {"": kept, "lr_scheduler": saved.schedulers[0].counters if saved.schedulers else {}}


def _opened(asked: ConversionRequest, like: Checkpoint | None) -> NanotronCheckpoint | None:
    if like is None:
        return None
    if not isinstance(like, OpenedNanotron):
        raise ConfigError(f"--like {asked.like}: is no checkpoint of nanotron; name one, or leave it out")
    return like.checkpoint


def _write(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """Return the nanotron checkpoint to write for `content`, arranged as the `--like` checkpoint is."""
    shown = _opened(asked, like)
    if shown is None:
        what = "does not tell how nanotron shards parameters, their order, or the config.yaml"
        mend = "save a step of the coming run, and name that checkpoint: --like DIR"
        raise error_of([UnsupportedLayout.fault(content.folder, what, mend=mend)], subject="converting")
    checkpoint, origins, notes = adopt(content, shown, faults)
    target = nanotron_target(checkpoint, asked)
    tag = str(content.steps)
    return replace(
        target,
        sources={key: origins[wanted] for key, wanted in target.sources.items()},
        folder=tag,
        pointers=dict.fromkeys(target.pointers, tag),
        notes=(*notes, *target.notes, *content.notes),
        basis={"like": digest_of(shown)},
    )


def _open_weights(listing: Listing) -> OpenedNanotron:
    """All of it, as the schedule is by the optimizer's groups; without both where their files cannot be read."""
    try:
        return OpenedNanotron(_nanotron(listing))
    except (CheckpointDamaged, CheckpointNotFound, ReadFailed, UnsupportedLayout):
        return OpenedNanotron(read_listing(_nanotron(listing).folder, optimizer=False))


def _nanotron(listing: Listing) -> NanotronListing:
    assert isinstance(listing, NanotronListing)
    return listing


NANOTRON = Format(
    name="nanotron",
    list=lambda folder: read_listing(folder) if is_nanotron(folder) else None,
    open=lambda listing: OpenedNanotron(_nanotron(listing)),
    open_weights=_open_weights,
    describe=_describe,
    survey=lambda listing: SurveyReport(faults=tuple(try_open(_nanotron(listing)).faults)),
    writes={TO: _write},
    sized=frozenset({TO}),
    latest={LATEST: str},
)
