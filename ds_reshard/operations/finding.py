"""Which checkpoint a path and a tag mean."""

from __future__ import annotations

import os

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointNotFound, Fault, ReadFailed, ReshardError
from ds_reshard.formats.zero.names import Listing, read_listing

_LATEST_NBYTES = 4096


def find_listing(path: str, tag: str | None) -> Listing:
    """The files of the checkpoint in `path`: of `tag`, else of the folder itself, else of the tag `latest` names.

    Raises CheckpointNotFound where there is none, and ReadFailed where a folder cannot be listed.
    """
    if not os.path.isdir(path):
        file = os.path.exists(path)
        raise _not_found(
            path,
            "is a file" if file else "does not exist",
            "give the folder that was given to save_checkpoint" if file else "check the path",
        )
    if tag is None:
        listing = _list(path)
        if listing.model or listing.optim or listing.faults:
            return listing
        tag = _latest(path)
    folder = os.path.join(path, tag)
    if not os.path.isdir(folder):
        raise _no_checkpoint(path, f"has no tag {tag!r}")
    listing = _list(folder)
    if not (listing.model or listing.optim or listing.faults):
        raise _no_checkpoint(path, f"has no DeepSpeed checkpoint in its tag {tag!r}")
    return listing


def _latest(path: str) -> str:
    """The tag that the file `latest` names, or `latest_universal` where that is the only one."""
    latest = os.path.join(path, "latest")
    if not os.path.exists(latest) and os.path.exists(f"{latest}_universal"):
        latest += "_universal"
    try:
        file = PositionedFile(latest)
        try:
            tag = file.read(0, min(file.nbytes, _LATEST_NBYTES)).decode("utf-8").strip()
        finally:
            file.close()
    except CheckpointNotFound:
        raise _no_checkpoint(path, "holds no DeepSpeed checkpoint, and no file 'latest' that names a tag") from None
    except (ReshardError, ValueError) as error:
        raise ReadFailed(f"{latest}: cannot be read: {error}; name the tag: --tag TAG") from error
    if not tag or "\0" in tag:
        raise _no_checkpoint(path, "has a file 'latest' that names no tag")
    return tag


def _list(folder: str) -> Listing:
    try:
        with os.scandir(folder) as scan:
            entries = [(e.name, e.stat().st_size if e.is_file() else None) for e in scan]
    except OSError as error:
        raise ReadFailed(f"{folder}: cannot be listed: {error}") from error
    files = {name: nbytes for name, nbytes in entries if nbytes is not None}
    return read_listing(folder, files, frozenset(name for name, nbytes in entries if nbytes is None))


def _no_checkpoint(path: str, what: str) -> CheckpointNotFound:
    listings = ((e.name, _list(e.path)) for e in os.scandir(path) if e.is_dir())
    tags = sorted(name for name, listing in listings if listing.model or listing.optim)
    if not tags:
        return _not_found(path, what, "give the folder that was given to save_checkpoint")
    return _not_found(path, what, f"name one of the tags that are there: --tag {' | '.join(tags[:12])}")


def _not_found(path: str, what: str, mend: str) -> CheckpointNotFound:
    fault = Fault(error="CheckpointNotFound", where=path, what=what, mend=mend)
    return CheckpointNotFound(f"{fault.line()}; {mend}", [fault])
