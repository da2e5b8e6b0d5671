"""Every pickle below a folder, whatever the folder is: what would act if a framework loaded it."""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import Place, directories, read_directory
from ds_reshard.containers.pickle_reader import Scanned, scan_file
from ds_reshard.containers.pickle_rules import ALLOW_ALL, UNSAFE, PickleRules, in_force, rules_in_force, trusted
from ds_reshard.containers.remote import is_url, without_end
from ds_reshard.errors import (
    CheckpointNotFound,
    Fault,
    ReadFailed,
    ReshardError,
    TrustRequired,
    error_of,
    faults_of,
    raise_faults,
)
from ds_reshard.model.context_value import context_value
from ds_reshard.model.reports import PickleScan
from ds_reshard.operations.ranks import agree, attempt, broadcast, gather, rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
EXTRA_STATE = "_extra_state"
"""How the keys of tensors end in which Transformer Engine keeps a pickle."""


def scan_pickles(path: str) -> PickleScan:
    """All pickles of a file, or of every file below a folder, none of them run; CheckpointNotFound for neither."""
    folders.renew(path)
    if not folders.exists(path):
        raise CheckpointNotFound(f"{path}: does not exist; check the path")
    faults: list[Fault] = []
    paths = list(walk(path, faults)) if folders.is_folder(path) else [path]
    found = scan_files(paths)
    return PickleScan(
        folder=path,
        files=len(paths),
        pickles=found.pickles,
        unread=found.unread + len(faults),
        faults=tuple(sorted({*faults, *found.faults}, key=lambda fault: (fault.where, fault.what))),
    )


def walk(folder: str, faults: list[Fault]) -> Iterator[str]:
    """Every regular file below a folder, sorted, links followed once; what cannot be listed is a fault."""
    if is_url(folder):
        yield from (f"{without_end(folder)}/{name}" for name in folders.files_below(folder))
        return
    seen: set[tuple[int, int]] = set()
    waiting = [folder]  # not os.walk, which calls itself for each folder in a folder before Python 3.12
    while waiting:
        at = waiting.pop()
        try:
            status = os.stat(at)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(at) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            waiting += [entry.path for entry in reversed(found) if entry.is_dir()]
            yield from [entry.path for entry in found if entry.is_file()]
        except OSError as error:
            what = f"cannot be listed: {error.strerror or error}"
            missing = isinstance(error, FileNotFoundError)
            mend = "check the path" if missing else "check the file system and its permissions"
            faults.append(ReadFailed.fault(str(error.filename), what, mend=mend))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTarget:
    """A file that may hold pickles: all of it, or the parts that are unpickled alone."""

    path: str
    parts: tuple[tuple[int, int], ...] = ()
    whole: bool = True


def scan_files(paths: Iterable[str]) -> Scanned:
    """Scan the pickles in these files under the rules in force, and return their number and the faults.

    Files that have already passed under these rules are counted, but not scanned again.
    """
    rules, found = rules_in_force(), Scanned()
    paths = list(paths)
    parts: dict[str, set[tuple[int, int]]] = {}
    for folder in dict.fromkeys(os.path.dirname(path) for path in paths):
        if directories(folder or "."):
            try:
                parts.update(_parts(folder))
            except ReshardError as error:
                found.faults += faults_of(error)
    for path in paths:
        if os.path.abspath(path) in rules.passed:
            found.pickles += 1
        else:
            found.add(scan_file(path, rules, sorted(parts.get(path, ()))))
    found.faults = list(dict.fromkeys(found.faults))
    return found


def every_untrusted(faults: Sequence[Fault], folder: str) -> list[Fault]:
    """Return the faults. If all of them are TrustRequired, add the TrustRequired faults of every file below `folder`.

    The user can then accept all classes at once. Otherwise each file would ask for its own when it is opened.
    """
    name = TrustRequired.__name__
    if not faults or any(fault.error != name for fault in faults):
        return list(faults)
    more = [fault for fault in scan_files(walk(folder, [])).faults if fault.error == name]
    return list(dict.fromkeys([*faults, *more]))


@contextmanager
def one_line_for_all(folder: str) -> Iterator[None]:
    """Let a TrustRequired that is raised in the block name the classes of all files of the folder, in one line."""
    try:
        yield
    except TrustRequired as error:
        raise error_of(every_untrusted(faults_of(error), folder), subject=f"checkpoint {folder}") from error


def trusting(names: Iterable[str], load: Callable[..., T], **arguments: object) -> T:
    """Return `load(**arguments)`, in which `torch.load` takes the named classes with `weights_only=True` (torch 2.5).

    A framework's own load would refuse what was accepted here. A class that cannot be imported is left to it.
    """
    import torch

    allow = getattr(torch.serialization, "safe_globals", None)
    classes = [one for one in map(_class, names) if one is not None]
    with allow(classes) if allow is not None and classes else nullcontext():
        return load(**arguments)


def _class(name: str) -> type | None:
    module, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(module), last)
    except (AttributeError, ImportError, ValueError):
        return None
    return found if isinstance(found, type) else None


def _parts(folder: str, objects: Callable[[str], bool] | None = None) -> Mapping[str, set[tuple[int, int]]]:
    """The parts of each file of a folder of torch.distributed.checkpoint, as its directory says.

    With `objects` those alone that are unpickled: objects whose keys it picks, and tensors in which a pickle lies.
    The directory is read whatever it names: what acts in it is found where it is scanned itself.
    """
    with in_force(ALLOW_ALL):
        found_there = [read_directory(folder, name) for name in directories(folder or ".")]
    places: list[Place] = []
    for directory in found_there:
        places += [place for key, place in directory.objects.items() if objects is None or objects(key)]
        for key, tensor in directory.tensors.items():
            if objects is None or (key.endswith(EXTRA_STATE) and objects(key)):
                of_tensor = [chunk.place for chunk in tensor.chunks if chunk.place is not None]
                places += [place for place in of_tensor if objects is not None or not place.transformed]
    found: dict[str, set[tuple[int, int]]] = {}
    for place in places:
        if place.transformed:
            place.open()  # raises why its pickle cannot be looked at
        found.setdefault(place.path, set()).add((place.byte_offset, place.nbytes))
    return found


def untold(scanned: Sequence[Fault], told: Sequence[Fault]) -> list[Fault]:
    """Of the faults of a scan those that are not told yet: of a file that is damaged, how, is told once."""
    files, known = {fault.where for fault in told}, {(fault.where, fault.what) for fault in told}
    return [
        fault
        for fault in scanned
        if (fault.where, fault.what) not in known and (fault.error in UNSAFE or fault.where not in files)
    ]


def siblings(path: str, folder: str) -> list[str]:
    """The files of a checkpoint: all below its own folder, and those that lie in the folder that was given."""
    faults: list[Fault] = []  # of folders that cannot be listed, which opening the checkpoint tells
    beside = (os.path.join(without_end(path), name) for name in folders.files(path))
    return list(dict.fromkeys([*walk(folder, faults), *beside]))


# -- before a framework loads ------------------------------------------------------------------------------------------

_SCANNED: ContextVar[tuple[str, ...]] = ContextVar("folders whose pickles were scanned", default=())


def already_scanned(folder: str) -> AbstractContextManager[None]:
    """Within the block the pickles below a folder are not scanned again."""
    return context_value(_SCANNED, (*_SCANNED.get(), os.path.join(os.path.abspath(folder), "")))


Files = Callable[[list[Fault]], Iterable[str]]
"""Lists files, and appends what is wrong with the list."""


def refuse_unsafe_folder(
    folder: str,
    files: Files | None = None,
    *,
    trust: Iterable[str] = (),
    group: ProcessGroup | None = None,
    alone: bool = False,
    objects: Callable[[str], bool] = lambda key: True,
    unread: Sequence[str] = (),
) -> None:
    """Raise UnsafePickle on every rank if loading a pickle could run code that is not allowed.

    Scans the files that `files` lists, or all files below `folder` if it is None, and runs nothing in them. This is a
    collective call unless `alone` is true. Each machine scans every file that it sees; ranks of one machine that see
    the same files divide them among themselves.

    `trust` names classes that are allowed in addition to those in DS_RESHARD_SETTINGS. `objects` selects by key the
    objects of torch.distributed.checkpoint to scan. No framework loads files whose names match a pattern in `unread`;
    for those, only UnsafePickle itself is raised. In other files, a pickle that cannot be read is refused too, because
    the framework might be able to read it.
    """
    faults: list[Fault] = []
    subject = f"loading {folder}"

    def unscanned() -> Iterator[str]:
        paths = walk(folder, faults) if files is None else files(faults)
        return (path for path in paths if not os.path.abspath(path).startswith(_SCANNED.get()))

    if alone:
        faults += _scan(_unpickled(unscanned(), objects, faults), trust, unread)
        raise_faults(faults, subject=subject)
        return
    listed, more, cause = attempt(lambda: list(unscanned()))
    faults += more
    digest, _, _ = attempt(lambda: _digest(listed or []))
    seen = gather((_machine(), digest or b""), group)
    sharing = [number for number, one in enumerate(seen) if one == seen[rank(group)]]
    alike = len(sharing) == len(seen)
    targets: tuple[list[ScanTarget] | None, list[Fault]] = ([], [])
    if rank(group) == 0 or not alike:
        misread: list[Fault] = []
        made, more, failed = attempt(lambda: list(_unpickled(listed or [], objects, misread)))
        targets, cause = (made, [*misread, *more]), cause or failed
    mine, more = broadcast(targets, group) if alike else targets
    faults += more
    chosen = (mine or [])[sharing.index(rank(group)) :: len(sharing)]
    found, more, failed = attempt(lambda: _scan(chosen, trust, unread))
    agree([*faults, *(found or []), *more], subject=subject, cause=cause or failed, group=group)


def _scan(targets: Iterable[ScanTarget], trust: Iterable[str], unread: Sequence[str]) -> list[Fault]:
    rules = PickleRules(trusted(trust))
    faults = [fault for one in targets for fault in scan_file(one.path, rules, one.parts, whole=one.whole).faults]
    passed = {one.where for one in faults if any(fnmatch(os.path.basename(one.where), name) for name in unread)}
    return [one for one in faults if one.error == "UnsafePickle" or one.where not in passed]


def _unpickled(paths: Iterable[str], objects: Callable[[str], bool], faults: list[Fault]) -> Iterator[ScanTarget]:
    """What frameworks unpickle of these files: of torch.distributed.checkpoint its objects, and no plain tensor.

    torch reads tensors with `weights_only=True` (torch/distributed/checkpoint/filesystem.py, 2.13), and names its files
    *.distcp, as no other loader does: a file of any other name is searched whole, whatever a directory says of it. What
    is wrong with a directory is a fault: torch might read what is not understood here.
    """
    of_folder: dict[str, Mapping[str, set[tuple[int, int]]]] = {}
    described: dict[str, bool] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in of_folder:
            described[folder] = bool(directories(folder or "."))
            of_folder[folder] = {}
            try:
                if described[folder]:
                    of_folder[folder] = _parts(folder, objects)
            except ReshardError as error:
                faults += faults_of(error)
        parts = of_folder[folder].get(path)
        if parts is not None:
            yield ScanTarget(path=path, parts=tuple(sorted(parts)), whole=not name.endswith(".distcp"))
        elif not (name.endswith(".distcp") and described[folder]):
            yield ScanTarget(path=path)


def _machine() -> str:
    """Return an identifier of this machine since its last boot, and of this process's mount namespace.

    Under the same identifier a path names the same file. The names, inodes, sizes and times of the files do not prove
    that: different files on the disks of two machines may agree in all of them.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def _digest(paths: Iterable[str]) -> bytes:
    """What tells a rank whether another of this machine sees the same files now."""
    made = hashlib.sha256()
    for path in paths:
        made.update(repr((os.fsencode(path), folders.identity(path))).encode())
    return made.digest()
