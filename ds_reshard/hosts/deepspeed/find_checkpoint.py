"""Rank 0's look at the folder: which tag, which files, and what all shards share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_reshard.containers import folders
from ds_reshard.containers.digests import MAP_OF_NAMES, digest, digests, note_names
from ds_reshard.containers.pickle_rules import ALLOW_ALL, in_force, rules_in_force
from ds_reshard.containers.remote import is_url
from ds_reshard.containers.torch_zip import digest_of
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, Fault, ReshardError, UnsupportedLayout, as_faults
from ds_reshard.execution.checksums import SEEN_BY_ALL
from ds_reshard.formats.zero.checkpoint import SINGLE_TP_RANK, AnyCheckpoint, TpRank, ZeroCheckpoint
from ds_reshard.formats.zero.door import list_folder
from ds_reshard.formats.zero.model_states import read_entries, read_model_states
from ds_reshard.formats.zero.names import Listing, pattern_in_path, stray_files
from ds_reshard.formats.zero.reader import Sizes, missing_file_faults, open_checkpoint, saved_sizes
from ds_reshard.formats.zero.shards import model_signature
from ds_reshard.formats.zero.universal import is_state_file
from ds_reshard.hosts.deepspeed.foreign import read_foreign
from ds_reshard.model.facts import canonical
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.pickles import every_untrusted, refuse_unsafe_folder, walk
from ds_reshard.operations.ranks import rank
from ds_reshard.operations.shape_map import Coming, ShapeMap
from ds_reshard.operations.source import Found as Located
from ds_reshard.operations.source import find_listing, refuse_elsewhere, refuse_unfinished

logger = logging.getLogger("ds_reshard")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """What rank 0 found in the model file of a checkpoint that DeepSpeed loads; None where there is nothing to load."""

    folder: str = ""
    entries: Mapping[str, object] | None = None
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rank 0 found on disk, told to every rank: faults, nothing to do with us, or a checkpoint.

    `sizes` are those of the saving run, read only where the files are of a kind that is not loaded here; `universal`
    says that the folder is a universal one; `own_save` says that this very run has saved it, so that loading it is no
    resume. `aside` is what a resume policy needs of files that are not read here.

    With a `listing` the checkpoint is not told: every rank reads the files that say what all have alike. `prints` has a
    digest of each by its path, also of a universal checkpoint, of which these files are told. `on_nodes` says that
    shards are missing which each node may have on a disk of its own, and that this rank sees its own.
    """

    tag: str = ""
    checkpoint: AnyCheckpoint | None = None
    universal: bool = False
    faults: tuple[Fault, ...] = ()
    sizes: Sizes | None = None
    own_save: bool = False
    aside: Aside | None = None
    listing: Listing | None = None
    prints: Mapping[str, bytes] = field(default_factory=dict)
    on_nodes: bool = False

    @property
    def complete(self) -> bool:
        """False if rank 0 only listed the folder: every rank then reads its two files, by `look_too`."""
        return self.listing is None or bool(self.prints)

    def for_broadcast(self) -> Found:
        """What rank 0 sends: nothing in it grows with the model, but what the listing knows."""
        if self.listing is None:
            return self
        return replace(self, checkpoint=None, prints={}, listing=replace(self.listing, rename=None))

    def failed(self, faults: Sequence[Fault]) -> Found:
        return replace(self, faults=tuple(faults))


_ASIDE = (
    *("lr_scheduler", "ds_config", "global_steps", "global_samples", "skipped_steps"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
)


def look_aside(load_dir: str, tag: object, *, universal: bool) -> Aside:
    """Rank 0: schedule, counters and JSON of a checkpoint whose tensors are not read here. Never raises."""
    try:
        tag = tag if tag is not None else latest_tag(load_dir, deepspeeds_file(universal=universal))
        if tag is None:
            return Aside()
        folder = os.path.join(load_dir, str(tag))
        name = list_folder(folder).model.get(0)
        if name is None:
            return Aside(faults=(_no_facts(folder, "holds no model file"),))
        path = os.path.join(folder, name)
        entries = read_entries(path, name.removesuffix(".pt"))
        if not {"lr_scheduler", "global_steps"} <= set(entries):
            return Aside(faults=(_no_facts(path, "says neither schedule nor iteration"),))
        return Aside(folder=folder, entries={key: entries[key] for key in _ASIDE if key in entries})
    except Exception as error:
        return Aside(faults=tuple(as_faults(error, where=f"rank {rank()}")))


def _no_facts(where: str, what: str) -> Fault:
    return UnsupportedLayout.fault(
        where,
        f"{what}: the position of the schedule, which the resume policy needs, is not known",
        "mp_rank_00_model_states.pt, as DeepSpeed saves it",
        "none",
        mend="load a plain ZeRO checkpoint, or leave out the resume policy",
    )


def latest_tag(load_dir: str, *names: str) -> str | None:
    """The tag in the first of these files that there is."""
    files = [file for file in (f"{load_dir}/{name}" for name in names) if folders.is_file(file)]
    return folders.read_text(files[0]).strip() if files else None


def deepspeeds_file(*, universal: bool) -> str:
    """Where DeepSpeed looks for the tag of a load without one."""
    return LATEST_UNIVERSAL if universal else LATEST


def tag_files(*, universal: bool) -> tuple[str, ...]:
    """Where a load without a tag looks for one: with "load_universal" as DeepSpeed does, else in what there is."""
    return (LATEST_UNIVERSAL,) if universal else (LATEST, LATEST_UNIVERSAL)


@gc_disabled()
def look(
    load_dir: str,
    tag: object,
    *,
    optimizer: bool,
    universal: bool,
    names: str | Mapping[str, object] | None = None,
    run: Coming = Coming(),  # noqa: B008  (immutable)
    row: TpRank = SINGLE_TP_RANK,
    later: bool = False,
    rename: Callable[[Listing], Listing] = lambda listing: listing,
) -> Found:
    """Rank 0: resolve the tag, list the folder, read what all shards share. Never raises.

    A folder of another format is taken as DeepSpeed would have saved what it holds, its parameters renamed as the map
    `names` says. So is DeepSpeed's own, if the map changes shapes and `run` does not have the names in the folder. With
    `later` a folder without stages and experts is listed alone: rank 0 reads its files while others do.
    """
    listing, given = None, tag is not None
    folders.renew(load_dir)
    try:
        names_map = read_name_map(names) if names is not None else None
        own = isinstance(names_map, ShapeMap)
        other = None if universal else _of_another_format(load_dir, tag, own=own)
        foreign = read_foreign(other, optimizer=optimizer, names=names_map, run=run) if other is not None else None
        if other is not None and foreign is not None:
            return Found(tag=other.listing.tag, checkpoint=foreign, prints=given_map(names))
        if tag is None:
            tag = latest_tag(load_dir, *tag_files(universal=universal))
            if tag == "" or (tag is None and is_url(load_dir)):
                return Found(faults=(_no_latest(load_dir, tag_files(universal=universal)),))
        if tag is None:
            return Found(faults=tuple(_tag_itself(load_dir)))
        refuse_elsewhere(load_dir, str(tag))
        folder = os.path.join(load_dir, str(tag))
        if not folders.is_folder(folder):
            return Found(faults=(_no_tag(load_dir, str(tag), given=given),))
        refuse_unfinished(folder)
        listing = rename(list_folder(folder))
        if later and not (listing.faults or listing.universal or listing.layers or listing.experts):
            return Found(tag=str(tag), listing=listing)
        if listing.universal:  # made of as many files as there are tensors: one rank reads them
            checkpoint, prints = read_heads(listing, optimizer=optimizer, row=row)
            prints = {path: digest for path, digest in prints.items() if not is_state_file(path, folder)}
            del prints[MAP_OF_NAMES]  # a universal folder that would be renamed is refused
            return Found(tag=str(tag), checkpoint=checkpoint, universal=True, prints=prints)
        checkpoint, prints = read_heads(listing, optimizer=optimizer, row=row)
        return Found(tag=str(tag), checkpoint=checkpoint, listing=listing, prints=prints)
    except Exception as error:
        faults, seen = as_faults(error, where=f"rank {rank()}"), listing is not None and listing.universal
        if optimizer and listing is not None:
            faults = every_untrusted(faults, listing.folder)
        known = str(tag) if tag is not None else ""  # `latest` may not be readable
        return Found(tag=known, faults=tuple(faults), sizes=_sizes(listing), universal=seen)


@gc_disabled()
def look_too(found: Found, *, optimizer: bool, row: TpRank = SINGLE_TP_RANK) -> Found:
    """Every rank: read what rank 0 has listed, or the same of its own row. Never raises.

    Of a universal checkpoint, which rank 0 has told, only whether this rank sees the same common files.
    """
    try:
        if found.universal:
            return replace(found, prints={path: digest_of(path) for path in found.prints})
        assert found.listing is not None
        if rank():  # which has not listed it
            folders.renew(found.listing.folder)
        checkpoint, prints = read_heads(found.listing, optimizer=optimizer, row=row)
    except Exception as error:
        faults = as_faults(error, where=f"rank {rank()}")
        if found.listing is not None and rank():
            listed = [fault.where for fault in faults if fault.where in map(found.listing.path, found.listing.nbytes)]
            faults = list(files_as_listed(found.listing, listed)) or faults
        elif found.listing is not None and optimizer:
            faults = every_untrusted(faults, found.listing.folder)
        return replace(found, faults=tuple(faults), sizes=_sizes(found.listing))
    return replace(found, checkpoint=checkpoint, prints=prints)


def given_map(names: str | Mapping[str, object] | None) -> Mapping[str, bytes]:
    """Return a digest of the map that this rank was given; of a folder of another format only rank 0 applies it."""
    return {MAP_OF_NAMES: digest(read_name_map(names).digest if names is not None else "none")}


def look_on_node(found: Found, dp_rank: int, dp: int, *, optimizer: bool) -> Found:
    """Every rank, where each node saves on its own disk (`use_node_local_storage`) and has not all files: its own ones.

    DeepSpeed loads them, each rank its own; what they say of step and sizes is compared among ranks. Never raises.
    """
    assert found.listing is not None
    if not any(missing_file_faults(found.listing, dp, optimizer=optimizer)):
        return found
    try:
        listing = list_folder(found.listing.folder)
        number = dp_rank if listing.partitioned_model else 0
        files = [(listing.model, "model_states", number), *[(listing.optim, "optim_states", dp_rank)] * optimizer]
        for held, what, own in files:
            if own not in held:
                what = f"rank {rank()} does not see the {what} file of data-parallel rank {own}, its own"
                mend = (
                    "start each node's ranks where they were when it saved, or copy all files of one save to each node"
                )
                raise CheckpointDamaged.of(listing.folder, what, mend=mend)
        said = canonical(model_signature(listing.read(listing.model[number], read_model_states)))
        sizes = saved_sizes(replace(listing, model={0: listing.model[number]}))
    except Exception as error:
        return replace(found, faults=tuple(as_faults(error, where=f"rank {rank()}")))
    return replace(found, sizes=sizes, prints={listing.folder: digest(said)}, on_nodes=True)


def read_heads(listing: Listing, *, optimizer: bool, row: TpRank) -> tuple[ZeroCheckpoint, Mapping[str, bytes]]:
    """What all shards share, and a digest of each file that every rank reads it from, by its path.

    A rank whose map renames nothing has the same digest of it as a rank without a map.
    """
    with digests() as found:
        note_names([])
        checkpoint = open_checkpoint(listing, optimizer=optimizer, tp=row)
    known = set(map(listing.path, listing.cache))
    return checkpoint, {path: content for path, content in found.items() if path not in known}


def files_as_listed(listing: Listing, paths: Iterable[str]) -> Iterator[Fault]:
    """Yield a fault for each file that this rank does not see, or sees at another size than rank 0 listed."""
    for path in paths:
        listed = listing.nbytes.get(path.removeprefix(f"{listing.folder}/"))
        try:
            nbytes = folders.identity(path)[0]
        except OSError as error:
            yield other_folder(path, f"{listed} bytes", error.strerror or str(error))
            continue
        if nbytes != listed:
            yield other_folder(path, f"{listed} bytes", f"{nbytes} bytes")


def other_folder(path: str, expected: str, found: str) -> Fault:
    """This rank sees other files than rank 0."""
    what = f"rank {rank()} sees another folder than rank 0"
    return CheckpointDamaged.fault(path, what, expected, found, mend=SEEN_BY_ALL)


def refuse_unsafe_files(load_dir: str, tag: object, *, universal: bool) -> None:
    """Raise on every rank where DeepSpeed would run what is in a pickle of this checkpoint. Collective."""

    def files(faults: list[Fault]) -> Iterator[str]:
        found = tag if tag is not None else latest_tag(load_dir, *tag_files(universal=universal))
        if found is None:
            return iter(())
        folder = os.path.join(load_dir, str(found))
        faults += pattern_in_path(load_dir, str(found))
        faults += stray_files(folder, folders.entries(folder))
        return walk(folder, faults)

    refuse_unsafe_folder(load_dir, files, trust=rules_in_force().trusted)


def _of_another_format(load_dir: str, tag: object, *, own: bool = False) -> Located | None:
    """Return the checkpoint in the folder if it is not DeepSpeed's, or with `own` any checkpoint."""
    latest = latest_tag(load_dir, *tag_files(universal=False)) if tag is None else None
    if latest == "" or (latest is not None and not own):
        return None
    tag = latest if tag is None else tag  # a Trainer's folder has the weights too, beside the tag
    try:
        found = find_listing(load_dir, str(tag) if tag is not None else None)
    except CheckpointNotFound:
        return None
    return found if own or not isinstance(found.listing, Listing) else None


def _sizes(listing: Listing | None) -> Sizes | None:
    """The saved sizes of a checkpoint that is not loaded here; None where even those cannot be read."""
    try:
        with in_force(ALLOW_ALL):
            return saved_sizes(listing) if listing is not None else None
    except Exception:  # what is wrong with the files is told already, and other ranks wait
        return None


def _no_latest(load_dir: str, files: Sequence[str]) -> Fault:
    """Nothing that names a tag: for a local folder DeepSpeed warns, and returns None; of a URL it knows nothing."""
    wanted, mend = " or ".join(map(repr, files)), "pass tag= one of the tags that exist, or restore the file"
    if any(folders.exists(f"{load_dir}/{file}") for file in files):
        what = f"has a file {wanted} that names no tag"
    elif folders.is_folder(load_dir):
        what = f"holds no file {wanted}, which names a tag"
    else:
        what = "is a file, and no folder" if folders.exists(load_dir) else "does not exist"
        mend = "check the URL; where a run begins without a checkpoint, do not load one"
    return CheckpointNotFound.fault(load_dir, what, mend=mend)


def _tag_itself(load_dir: str) -> Iterator[Fault]:
    """A fault for the folder of one tag in place of its parent: DeepSpeed warns that it finds no tag in it, and loads
    nothing (`DeepSpeedEngine.load_checkpoint`, runtime/engine.py, 0.14 to 0.19).
    """
    if latest_tag(load_dir, *tag_files(universal=False)) is not None:
        return  # the file that is asked for is that of universal checkpoints
    try:
        find_listing(load_dir, None)
    except ReshardError:
        return  # nothing is there: a run begins where it will save
    parent, name = os.path.split(os.path.realpath(load_dir))
    what = "is the folder of one tag, in which DeepSpeed finds no tag: it would load nothing, and the run begin anew"
    yield CheckpointNotFound.fault(load_dir, what, mend=f"give its parent and its name: {parent!r}, tag={name!r}")


def _no_tag(load_dir: str, tag: str, *, given: bool) -> Fault:
    tags = [name for name, nbytes in folders.entries(load_dir).items() if nbytes is None]
    other = "none for the latest" if given else "restore that folder"
    return CheckpointNotFound.fault(
        load_dir,
        f"has no tag {tag!r}" + ("" if given else ", which is said to be the latest"),
        "one of " + (", ".join(map(repr, tags[:12])) or "none"),
        repr(tag),
        mend=f"pass tag= one of the tags that exist, or {other}" if tags else "check the folder's path",
    )
