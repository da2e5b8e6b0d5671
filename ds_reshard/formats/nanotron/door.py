"""nanotron's checkpoints as the door knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.nanotron.adopted import adopt
from ds_reshard.formats.nanotron.arrangement import Wanted
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint, open_checkpoint, try_open
from ds_reshard.formats.nanotron.content import content_of, digest_of
from ds_reshard.formats.nanotron.inspection import describe, survey
from ds_reshard.formats.nanotron.names import NanotronListing, is_nanotron, read_listing
from ds_reshard.formats.nanotron.shards import NanotronShards
from ds_reshard.formats.nanotron.target import nanotron_target
from ds_reshard.model.checkpoint import Checkpoint, Format, Listing, Shards, Surveyed
from ds_reshard.model.content import Content
from ds_reshard.model.index import Index
from ds_reshard.model.reports import Inspection
from ds_reshard.model.target import Asked, Target

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

    def target(self, asked: Asked, like: Checkpoint | None) -> Target | None:
        if asked.to != TO:
            return None
        return nanotron_target(self.checkpoint, _wanted(asked), _opened(asked, like))

    def values(self) -> Mapping[str, Mapping[str, object]]:
        saved = self.checkpoint
        kept = {key: value for key, value in saved.metadata.entries.items() if key not in ("tp", "dp", "version")}
        return {"": kept, "lr_scheduler": saved.schedulers[0].counters if saved.schedulers else {}}


def _wanted(asked: Asked) -> Wanted:
    return Wanted(dp=asked.dp, tp=asked.tp, pp=asked.pp, zero_stage=asked.zero_stage)


def _opened(asked: Asked, like: Checkpoint | None) -> NanotronCheckpoint | None:
    if like is None:
        return None
    if not isinstance(like, OpenedNanotron):
        raise ConfigError(f"--like {asked.like}: is no checkpoint of nanotron; name one, or leave it out")
    return like.checkpoint


def _write(content: Content, asked: Asked, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """Any content as a checkpoint of nanotron, arranged as that of `--like` is."""
    shown = _opened(asked, like)
    if shown is None:
        what = "does not tell how nanotron cuts parameters, in which order it trains them, and with which config.yaml"
        mend = "save a step of the coming run, and name that checkpoint: --like DIR"
        raise_faults([UnsupportedLayout.fault(content.folder, what, mend=mend)], subject="converting")
    assert shown is not None
    adoption = adopt(content, shown)
    raise_faults([*faults, *content.faults, *adoption.faults], subject=f"converting {content.folder} to nanotron")
    assert adoption.checkpoint is not None
    target = nanotron_target(adoption.checkpoint, _wanted(asked))
    tag = str(content.steps)
    return replace(
        target,
        wants={key: adoption.origins[wanted] for key, wanted in target.wants.items()},
        folder=tag,
        pointers=dict.fromkeys(target.pointers, tag),
        notes=(*adoption.notes, *target.notes, *content.notes),
        basis={"like": digest_of(shown)},
    )


def _nanotron(listing: Listing) -> NanotronListing:
    assert isinstance(listing, NanotronListing)
    return listing


def _describe(listing: Listing, bytes_read: Callable[[], int | None]) -> Inspection:
    found = _nanotron(listing)
    opening = survey(found)
    return describe(found, opening, tag=found.tag, bytes_read=bytes_read())


NANOTRON = Format(
    name="nanotron",
    list=lambda folder: read_listing(folder) if is_nanotron(folder) else None,
    open=lambda listing, states: OpenedNanotron(_nanotron(listing)),
    describe=_describe,
    survey=lambda listing: Surveyed(faults=tuple(try_open(_nanotron(listing)).faults)),
    writes={TO: _write},
    sized=frozenset({TO}),
)
