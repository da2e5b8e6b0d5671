"""A checkpoint of any format, opened for a tool."""

from __future__ import annotations

from dataclasses import dataclass

from ds_reshard.containers.pickle_rules import UNSAFE
from ds_reshard.errors import raise_faults
from ds_reshard.model.checkpoint import Checkpoint, Format, Listing
from ds_reshard.operations.pickles import scan_files, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of one checkpoint, and the format that they are of."""

    format: Format
    listing: Listing

    @property
    def folder(self) -> str:
        return self.listing.folder


def open_checkpoint(found: Found, *, states: bool = True, whole: bool = True) -> Checkpoint:
    """The checkpoint, all of its shards opened and compared with `whole`, and no tensor's bytes read.

    `states=False` passes over scalar states other than the step, which an optimizer may keep per rank. Raises what a
    load raises for files that are missing, damaged or of several saves; UnsafePickle where a file of the folder acts
    that is not read here, as another loader may read it.
    """
    checkpoint = found.format.open(found.listing, states)
    if whole:
        checkpoint.open_all()
        others = scan_files(walk(found.folder, []))
        raise_faults([fault for fault in others.faults if fault.error in UNSAFE], subject=f"checkpoint {found.folder}")
    return checkpoint
