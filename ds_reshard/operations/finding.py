"""Which checkpoint a path and a tag mean."""

from __future__ import annotations

import os

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointNotFound, ReadFailed, ReshardError, UnsupportedLayout
from ds_reshard.formats.nanotron.names import NanotronListing, is_nanotron
from ds_reshard.formats.nanotron.names import read_listing as read_nanotron
from ds_reshard.formats.zero.names import Listing, read_listing
from ds_reshard.model.saved import SavedListing
from ds_reshard.operations.source import Found, list_saved

_LATEST_NBYTES = 4096
_LATEST_NANOTRON = "latest.txt"  # trainer.py of nanotron


def find_listing(path: str, tag: str | None) -> Found:
    """The files of the checkpoint in `path`: of `tag`, else of the folder itself, else of the tag `latest` names.

    The tags of nanotron are its steps, of which `latest.txt` names the last. Folders of torch.distributed.checkpoint,
    of accelerate's sharded FSDP, and of EasyR1 and verl are checkpoints themselves, or tags of the folder above.

    Raises CheckpointNotFound where there is none, and ReadFailed where a folder cannot be listed.
    """
    if not os.path.isdir(path):
        file = os.path.exists(path)
        raise _not_found(
            path,
            "is a file" if file else "does not exist",
            "give the folder that was given to save_checkpoint" if file else "check the path",
        )
    folder = _nanotron_folder(path, tag)
    if folder is not None:
        return read_nanotron(folder)
    saved = list_saved(path if tag is None else os.path.join(path, tag))
    if saved is not None:
        return saved
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


def find_zero(path: str, tag: str | None, *, tool: str) -> Listing:
    """As `find_listing`, for a tool that knows DeepSpeed's checkpoints alone."""
    found = find_listing(path, tag)
    if isinstance(found, NanotronListing | SavedListing):
        mend = "give it a checkpoint of DeepSpeed or Megatron-LM"
        name = found.format if isinstance(found, SavedListing) else "nanotron"
        fault = UnsupportedLayout.fault(found.folder, f"{tool} does not read {name}", mend=mend)
        raise UnsupportedLayout(f"{fault.line()}; {mend}", [fault])
    return found


def _nanotron_folder(path: str, tag: str | None) -> str | None:
    """The folder of the nanotron checkpoint that is meant, None where it is none."""
    if tag is not None:
        named = os.path.join(path, tag)
        return named if is_nanotron(named) else None
    if is_nanotron(path):
        return path
    others = os.path.exists(os.path.join(path, "latest")) or bool(_list(path).model)
    if others or not os.path.exists(os.path.join(path, _LATEST_NANOTRON)):
        return None
    named = os.path.join(path, _named_in(os.path.join(path, _LATEST_NANOTRON), path))
    if not is_nanotron(named):
        raise _no_checkpoint(path, f"has a file {_LATEST_NANOTRON!r} that names no checkpoint of nanotron")
    return named


def _latest(path: str) -> str:
    """The tag that the file `latest` names, or `latest_universal` where that is the only one."""
    latest = os.path.join(path, "latest")
    if not os.path.exists(latest) and os.path.exists(f"{latest}_universal"):
        latest += "_universal"
    return _named_in(latest, path)


def _named_in(latest: str, path: str) -> str:
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
        raise _no_checkpoint(path, f"has a file {os.path.basename(latest)!r} that names no tag")
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
    if any(name.endswith(".distcp") for name in os.listdir(path)):
        what = (
            "has files of torch.distributed.checkpoint, and no .metadata, which is written last: the save did not end"
        )
        return _not_found(path, what, "take an older checkpoint, or restore .metadata from a copy")
    folders = [entry for entry in os.scandir(path) if entry.is_dir()]
    listings = {entry.name: _list(entry.path) for entry in folders}
    tags = sorted(
        e.name
        for e in folders
        if listings[e.name].model or listings[e.name].optim or is_nanotron(e.path) or list_saved(e.path) is not None
    )
    if not tags:
        return _not_found(path, what, "give the folder that was given to save_checkpoint")
    return _not_found(path, what, f"name one of the tags that are there: --tag {' | '.join(tags[:12])}")


def _not_found(path: str, what: str, mend: str) -> CheckpointNotFound:
    fault = CheckpointNotFound.fault(path, what, mend=mend)
    return CheckpointNotFound(f"{fault.line()}; {mend}", [fault])
