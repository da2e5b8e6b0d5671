"""Rank 0's look at the folder: which tag, which files, and what all shards share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ds_reshard.errors import Fault, ReshardError
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint, open_checkpoint, saved_sizes
from ds_reshard.formats.zero.names import Listing, read_listing
from ds_reshard.hosts.deepspeed.agree import told


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rank 0 found on disk, told to every rank: faults, nothing to do with us, or a checkpoint.

    `sizes` are the saved data- and model-parallel sizes, read only where the files are of a kind that is
    not loaded here.
    """

    tag: str = ""
    checkpoint: ZeroCheckpoint | None = None
    faults: tuple[Fault, ...] = ()
    sizes: tuple[int, int] | None = None


def look(load_dir: str, tag: object, *, optimizer: bool) -> Found:
    """Rank 0: resolve the tag, list the folder, read what all shards share. Never raises."""
    listing = None
    try:
        if tag is None:
            latest = Path(load_dir, "latest")
            if not latest.is_file():
                return Found()
            tag = latest.read_text(encoding="utf-8").strip()
        folder = Path(load_dir, str(tag))
        if not folder.is_dir():
            return Found(faults=(_no_tag(load_dir, str(tag)),))
        with os.scandir(folder) as scan:
            entries = [(e.name, e.stat().st_size if e.is_file() else None) for e in scan]
        listing = read_listing(
            str(folder), {n: s for n, s in entries if s is not None}, frozenset(n for n, s in entries if s is None)
        )
        if listing.universal:
            return Found(tag=str(tag))
        return Found(tag=str(tag), checkpoint=open_checkpoint(listing, optimizer=optimizer))
    except Exception as error:
        return Found(tag=str(tag), faults=tuple(told(error)), sizes=_sizes(listing))


def _sizes(listing: Listing | None) -> tuple[int, int] | None:
    """The saved sizes of a checkpoint that is not loaded here; None where even those cannot be read."""
    try:
        return saved_sizes(listing) if listing is not None else None
    except ReshardError:
        return None


def _no_tag(load_dir: str, tag: str) -> Fault:
    tags = sorted(e.name for e in os.scandir(load_dir) if e.is_dir()) if os.path.isdir(load_dir) else []
    return Fault(
        error="CheckpointNotFound",
        where=load_dir,
        what=f"has no tag {tag!r}",
        expected="one of " + (", ".join(map(repr, tags[:12])) or "none"),
        found=repr(tag),
        mend="pass tag= one of the tags that exist, or none for the latest" if tags else "check the folder's path",
    )
