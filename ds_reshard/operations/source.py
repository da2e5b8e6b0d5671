"""Which checkpoint a path and a tag mean, and that checkpoint opened for a tool, of whatever format."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA, directories
from ds_reshard.containers.pickle_rules import UNSAFE, in_force, rules_in_force
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.remote import UNFINISHED, expect, is_url, natural, without_end
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    ReadFailed,
    ReshardError,
    TrustRequired,
    UnsupportedLayout,
    error_of,
    faults_of,
    raise_faults,
)
from ds_reshard.model.checkpoint import Checkpoint, Format, Listing
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.operations.formats import FORMATS, format_of
from ds_reshard.operations.pickles import every_untrusted, scan_files, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of one checkpoint, and the format that they are of."""

    format: Format
    listing: Listing

    @property
    def folder(self) -> str:
        return self.listing.folder


_REFUSED = (*UNSAFE, "ReadFailed", "CheckpointNotFound")
"""What is refused of a file that is no part of the checkpoint; one that is damaged is not."""


@gc_disabled()
def open_checkpoint(found: Found, *, states: bool = True, whole: bool = True, optimizer: bool = True) -> Checkpoint:
    """The checkpoint, all of its shards opened and compared with `whole`, and no tensor's bytes read.

    `states=False` passes over scalar states other than the step, which an optimizer may keep per rank.
    `optimizer=False` leaves the optimizer out, and what is wrong with it. Raises what a load raises for files that are
    missing, damaged or of several saves; UnsafePickle where a file of the folder acts that is not read here, as another
    loader may read it, and ReadFailed or CheckpointNotFound where one cannot be read.
    """
    if whole:
        open_ahead(found)
    with in_force(rules_in_force()):  # one list of what was read, and is not scanned again
        try:
            alone = found.format.open_weights if not optimizer else None
            checkpoint = (alone or found.format.open)(found.listing)
        except CheckpointDamaged as error:
            raise_faults(faults_of(error), subject=f"checkpoint {found.folder}")  # with what mends it
            raise
        except TrustRequired as error:
            wanted = every_untrusted(faults_of(error), found.folder) if optimizer or whole else faults_of(error)
            raise error_of(wanted, subject=f"checkpoint {found.folder}") from error
        checkpoint.compare_scalar_states = states
        if not whole:
            return checkpoint
        checkpoint.open_all()
        faults: list[Fault] = []
        others = scan_files(walk(found.folder, faults))
        faults += [fault for fault in others.faults if fault.error in _REFUSED]
        raise_faults(faults, subject=f"checkpoint {found.folder}")
    return checkpoint


def open_weights(found: Found, *, whole: bool = True) -> Checkpoint:
    """The checkpoint for its weights: with its optimizer, which proves what is tied, unless that cannot be opened."""
    try:
        return open_checkpoint(found, whole=whole)
    except ReshardError:
        return open_checkpoint(found, whole=whole, optimizer=False)


def open_ahead(found: Found) -> None:
    """Of a folder by URL, all of whose files will be opened, ask side by side for what that reads."""
    if is_url(found.folder):
        names = sorted(folders.files_below(found.folder), key=natural)
        expect(((f"{found.folder}/{name}", None) for name in names if not name.endswith(".distcp")), eager=True)


_LATEST_NBYTES = 4096
_GIVEN = "give the folder that was given to save_checkpoint"
_LATEST = {file: named for one in reversed(FORMATS) for file, named in one.latest.items()}


def find_listing(path: str, tag: str | None) -> Found:
    """The files of the checkpoint in `path`: of `tag`, else of the folder itself, else of the tag `latest` names.

    The tags of nanotron are its steps, of which `latest.txt` names the last; those of Megatron-LM its iterations.
    Folders of torch.distributed.checkpoint, of accelerate's sharded FSDP, EasyR1 and verl are checkpoints
    themselves, or tags of the folder above.

    Raises CheckpointNotFound where there is none, and ReadFailed where a folder cannot be listed.
    """
    path = without_end(path)
    folders.renew(path)
    if not folders.is_folder(path):
        there = folders.exists(path)
        what, mend = ("is a file", _GIVEN) if there else ("does not exist", "check the path")
        raise CheckpointNotFound.of(path, what, mend=mend)
    file = ""
    if tag is None:
        found = _found(path)
        if found is not None:
            return found
        file, tag = _latest(path)
    refuse_elsewhere(path, tag)
    places = [os.path.join(path, name) for name in (tag, *(named(tag) for named in _LATEST.values()))]
    folder = next(filter(folders.is_folder, places), places[0])
    found = _found(folder) if folders.is_folder(folder) else None
    if found is None and file:
        there = any(name.endswith(".distcp") for name in folders.names(folder)) if folders.is_folder(folder) else False
        raise _no_checkpoint(folder if there else path, f"has a file {file!r} that names no checkpoint there, {tag!r}")
    if found is None:
        told = f"has no DeepSpeed checkpoint in its tag {tag!r}" if folders.is_folder(folder) else f"has no tag {tag!r}"
        raise _no_checkpoint(path, told)
    return found


def _found(folder: str) -> Found | None:
    refuse_unfinished(folder)
    found = format_of(folder)
    return Found(format=found[0], listing=found[1]) if found is not None else None


def refuse_elsewhere(path: str, tag: str) -> None:
    """Raise for a tag that leads from a URL to this machine's disk, or from that to a URL."""
    if is_url(os.path.join(path, tag)) != is_url(path) or is_url(tag):
        raise _no_checkpoint(path, f"has a tag {tag!r} that would be half there and half elsewhere")


def refuse_unfinished(folder: str) -> None:
    """Raise where a conversion writes to a folder by URL, or has stopped doing so."""
    if is_url(folder) and folders.is_file(f"{folder}/{UNFINISHED}"):
        what = "is a part of a checkpoint: its files are being sent, or the sending was interrupted"
        mend = "wait for the conversion that writes it, or run that again with --resume"
        raise error_of([CheckpointDamaged.fault(folder, what, mend=mend)], subject="reading a checkpoint")


def _latest(path: str) -> tuple[str, str]:
    """The first file there that names the last tag, and the tag."""
    file = next((name for name in _LATEST if folders.exists(os.path.join(path, name))), next(iter(_LATEST)))
    return file, _named_in(os.path.join(path, file), path)


def _named_in(latest: str, path: str) -> str:
    try:
        with PositionedFile(latest) as file:
            tag = file.read(0, min(file.nbytes, _LATEST_NBYTES)).decode("utf-8").strip()
    except CheckpointNotFound:
        raise _no_checkpoint(path, "holds no DeepSpeed checkpoint, and no file 'latest' that names a tag") from None
    except (ReshardError, ValueError) as error:
        raise ReadFailed(f"{latest}: cannot be read: {error}; name the tag: --tag TAG") from error
    if not tag or "\0" in tag:
        raise _no_checkpoint(path, f"has a file {os.path.basename(latest)!r} that names no tag")
    return tag


_OF_RANKS = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin")
"""Files of accelerate (utils/fsdp_utils.py, 1.15)."""


def _no_checkpoint(path: str, what: str) -> ReshardError:
    if any(map(_OF_RANKS.fullmatch, folders.names(path))):
        what = (
            "has a file for each rank, as accelerate saves FSDP with LOCAL_STATE_DICT, or of an optimizer or a further "
            "model alone: none is read here"
        )
        mend = (
            "load it with accelerate on as many ranks, and save it with SHARDED_STATE_DICT; give a folder that has "
            "pytorch_model_fsdp_0_rank0.bin"
        )
        return UnsupportedLayout.of(path, what, mend=mend)
    told = directories(path)
    if told and METADATA not in told:
        what = (
            "has a directory of torch.distributed.checkpoint for each rank (use_collectives=False): none is read here"
        )
        mend = "load it with torch on as many ranks, and save it with use_collectives=True"
        return UnsupportedLayout.of(path, what, mend=mend)
    if any(name.endswith(".distcp") for name in folders.names(path)):
        what = (
            "has files of torch.distributed.checkpoint, and no .metadata, which is written last: the save did not end"
        )
        return CheckpointNotFound.of(path, what, mend="take an older checkpoint, or restore .metadata from a copy")
    below = [os.path.join(path, name) for name, nbytes in folders.entries(path).items() if nbytes is None]
    tags = [os.path.basename(folder) for folder in below if format_of(folder) is not None]
    inside = [folder for folder in below if folders.is_file(os.path.join(folder, "latest"))]
    if not tags and inside:  # what Hugging Face's Trainer calls its output_dir
        inside.sort(key=lambda folder: (len(folder), folder))
        names = ", ".join(map(os.path.basename, inside[-12:]))
        what = f"{what}; its folders hold some: {names}"
        return CheckpointNotFound.of(path, what, mend=f"give one: {inside[-1]}")
    if not tags:
        return CheckpointNotFound.of(path, what, mend=_GIVEN)
    mend = f"name one of the tags that are there: --tag {' | '.join(tags[:12])}"
    return CheckpointNotFound.of(path, what, mend=mend)
