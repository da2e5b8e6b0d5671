"""Folders of EasyR1, verl and accelerate as the door knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ds_reshard.errors import Fault, UnsupportedLayout, error_of
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint, extra_trees, list_fsdp, open_fsdp, survey_extra
from ds_reshard.formats.fsdp.target import fsdp_target
from ds_reshard.model.checkpoint import Checkpoint, Format, SavedCheckpoint, SurveyReport
from ds_reshard.model.content import Content
from ds_reshard.model.target import ConversionRequest, Target

TO = "fsdp"


class OpenedFsdp(SavedCheckpoint):
    state: FsdpCheckpoint

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        return fsdp_target(self.state, self.dp if asked.dp is None else asked.dp) if asked.to == TO else None

    def extra(self) -> Mapping[object, object] | None:
        trees = extra_trees(self.folder, self.state.ranks, 1)
        return {
            name: value for tree in trees if isinstance(tree, dict) for name, value in tree.items() if name != "rng"
        }

    def uncompared_notes(self, name: str) -> Iterator[str]:
        yield from super().uncompared_notes(name)
        if self._extra_left_out():
            others = "nor is the schedule there with a folder of another format"
            yield f"the random states in {name}'s extra_state files are not compared, {others}"

    def replica_notes(self) -> Iterator[str]:
        yield from self.state.notes_on_buffers()

    def left_out(self) -> tuple[str, ...]:
        return (*self.state.left_out, *self._extra_left_out(), *self.replica_notes())

    def _extra_left_out(self) -> tuple[str, ...]:
        if any(name.startswith("extra_state") for name in self.files):
            return ("the extra_state files (schedule and random states) are not carried over",)
        return ()


def _write(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    mend = "--to dcp, which FSDP2 loads, or load it with ds_reshard.dcp.Reader"
    what = "is not converted to this: files of EasyR1 and verl are made of theirs alone"
    fault = UnsupportedLayout.fault(content.folder, what, found=f"--to {asked.to}", mend=mend)
    raise error_of([*faults, fault], subject="converting")


FSDP = Format(
    name="files of FSDP ranks",
    list=list_fsdp,
    open=lambda listing: OpenedFsdp(open_fsdp(listing.folder), listing.nbytes),
    open_weights=lambda listing: OpenedFsdp(open_fsdp(listing.folder, optimizer=False), listing.nbytes),
    survey=lambda listing: SurveyReport(further=survey_extra(listing.folder)),
    writes={TO: _write},
    sized=frozenset({TO}),
)
