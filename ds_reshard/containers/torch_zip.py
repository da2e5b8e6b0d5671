"""A file of torch.save, opened without torch: its pickle as records, its tensors as places in the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.pickle_reader import DEFAULT_LIMITS, PickleLimits, read_pickle
from ds_reshard.containers.pickle_rules import PickleRules, rules_in_force
from ds_reshard.containers.positioned import PositionedFile, PositionedView
from ds_reshard.containers.torch_tensors import TensorCalls
from ds_reshard.containers.zip_directory import ArchiveMember, read_members
from ds_reshard.errors import (
    CheckpointDamaged,
    ChecksumMismatch,
    Fault,
    TrustRequired,
    UnsafePickle,
    UnsupportedLayout,
    faults_of,
    raise_faults,
)
from ds_reshard.model.records import StorageRecord, TensorRecord

__all__ = ["ArchiveLimits", "ArchiveMember", "TorchArchive", "check_root", "open_archive"]

# caffe2/serialize/versions.h, kMinSupportedFileFormatVersion and kMaxSupportedFileFormatVersion, torch 2.13.
_VERSIONS = range(1, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLimits:
    """What opening an archive may cost: the bytes of its directory, and its pickles' limits."""

    directory_nbytes: int = 64 << 20
    pickle: PickleLimits = DEFAULT_LIMITS


_DEFAULT = ArchiveLimits()


class TorchArchive:
    """An open archive; close it, or use it with `with`.

    `root` is the folder that holds every member; `members` are by their name below it; `nbytes` is the
    file's size, and `bytes_read` how many of them were read so far. Of a part of a file, offsets count from the
    beginning of the file.
    """

    def __init__(self, file: PositionedFile, limits: ArchiveLimits, start: int = 0) -> None:
        self.path = path = file.path
        self._limits = limits
        self._file = file
        self._start = start
        try:
            root, members = read_members(self._file, limits.directory_nbytes)
            self.root = root
            if self._start:
                members = {n: replace(one, byte_offset=self._start + one.byte_offset) for n, one in members.items()}
            self.members: Mapping[str, ArchiveMember] = MappingProxyType(members)
            self._calls = TensorCalls(path, members)
            self._check_kind()
        except BaseException:
            self._file.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def bytes_read(self) -> int:
        return self._file.bytes_read

    def load(self, name: str = "data.pkl", *, rules: PickleRules | None = None) -> object:
        """The value that member `name` pickles: TensorRecords for tensors, StorageRecords for bare storages.

        No tensor's bytes are read, but those of flat tensors of bytes, in which models keep pickles of their own.
        Raises UnsafePickle for what `rules` (by default those in force) do not allow, CheckpointDamaged,
        ChecksumMismatch, ReadFailed.
        """
        member = self._member(name)
        limit = self._limits.pickle.nbytes
        if member.nbytes > limit:
            raise CheckpointDamaged(
                f"{self.path}: {name!r} is a pickle of {member.nbytes} bytes; at most {limit} are read"
            )
        rules = rules_in_force() if rules is None else rules
        data = self._file.read(member.byte_offset - self._start, member.nbytes)
        mismatch = self._mismatch(f"member {name!r}", data, member.crc32)
        try:
            value = read_pickle(
                data,
                where=self.path,
                member=self._told(name),
                persistent=self._calls.storage,
                limits=self._limits.pickle,
                reduce=self._calls.call,
                rules=rules,
            )
        except (UnsafePickle, CheckpointDamaged) as error:
            if mismatch is None:
                raise
            if isinstance(error, UnsafePickle) and not isinstance(error, TrustRequired):
                # A changed byte makes names that nobody knows, and none that acts.
                raise_faults([*error.faults, *faults_of(mismatch)], subject="reading a checkpoint")
        if mismatch is not None:
            raise mismatch
        if self._calls.of_bytes and not rules.everything:
            raise_faults(self._inside(rules), subject="reading a checkpoint")
        if self.pickles == [name] and self._file.whole:
            rules.note(self.path)
        return value

    @property
    def pickles(self) -> list[str]:
        """The members that are pickles, by their names."""
        return [name for name in self.members if name.endswith((".pkl", ".pickle"))]

    def _inside(self, rules: PickleRules) -> list[Fault]:
        """What acts in pickles that lie in tensors of bytes: Transformer Engine's extra state is one.

        Where the elements do not follow each other, only how they begin is looked at.
        """
        from ds_reshard.containers.pickle_scan import begins_marked, scan_source  # which opens archives

        faults: list[Fault] = []
        for tensor in dict.fromkeys(self._calls.of_bytes):
            at, member = tensor.byte_offset - self._start, self._told(f"storage {tensor.storage.key!r}")
            if tensor.contiguous:
                view = PositionedView(self._file, at, tensor.nbytes)
                faults += scan_source(view, member, rules, strict=False).faults
            elif begins_marked(b"".join(self._file.read(at + offset, 1) for offset in tensor.first_offsets(4))):
                what = f"{member}: a tensor of bytes with stride {tensor.stride} begins as a pickle does; not looked at"
                faults.append(CheckpointDamaged.fault(self.path, what, mend="save it with .contiguous()"))
        return faults

    def _told(self, member: str) -> str:
        """A member as faults name it: with the place of the archive, where that is a part of a file."""
        return f"at {self._start}: {member}" if self._start else member

    def read(self, name: str) -> bytes:
        """All bytes of member `name`, checked; raises ChecksumMismatch, CheckpointDamaged or ReadFailed."""
        member = self._member(name)
        data = self._file.read(member.byte_offset - self._start, member.nbytes)
        self._check(f"member {name!r}", data, member.crc32)
        return data

    def tensor_bytes(self, tensor: TensorRecord) -> bytes:
        """The bytes of a small tensor, row-major; checked when the tensor is all of its storage.

        Raises UnsupportedLayout when the tensor is not contiguous, ChecksumMismatch, CheckpointDamaged or
        ReadFailed.
        """
        storage = tensor.storage
        if storage.path != self.path:
            raise ValueError(f"the tensor lies in {storage.path}, and this archive is {self.path}")
        if not tensor.contiguous:
            raise UnsupportedLayout(
                f"{self.path}: storage {storage.key!r}: a tensor of shape {tensor.shape} and stride {tensor.stride} "
                "is not contiguous; save it with .contiguous()"
            )
        data = self._file.read(tensor.byte_offset - self._start, tensor.nbytes)
        if tensor.nbytes == storage.nbytes:
            self._check(f"storage {storage.key!r}", data, storage.crc32)
        return data

    def storage_bytes(self, storage: StorageRecord) -> bytes:
        """All bytes of a storage, checked; raises ChecksumMismatch, CheckpointDamaged or ReadFailed."""
        return self.read(f"data/{storage.key}")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _member(self, name: str) -> ArchiveMember:
        member = self.members.get(name)
        if member is None:
            raise CheckpointDamaged(f"{self.path}: the archive has no member {name!r}")
        return member

    def _check(self, what: str, data: bytes, recorded: int | None) -> None:
        mismatch = self._mismatch(what, data, recorded)
        if mismatch is not None:
            raise mismatch

    def _mismatch(self, what: str, data: bytes, recorded: int | None) -> ChecksumMismatch | None:
        if recorded is None or (found := crc32(data)) == recorded:
            return None
        return ChecksumMismatch(
            f"{self.path}: {what}: expected crc32 {recorded:08x}, found {found:08x}: the bytes are not those that "
            "were written; take another copy of the file"
        )

    def _check_kind(self) -> None:
        if "constants.pkl" in self.members:
            raise UnsupportedLayout(f"{self.path}: a TorchScript program (torch.jit.save), not a checkpoint")
        version = self._small("version").strip()
        if not version.isdigit() or int(version) not in _VERSIONS:
            raise UnsupportedLayout(
                f"{self.path}: torch archive version {version!r}; versions {_VERSIONS[0]} to {_VERSIONS[-1]} are read"
            )
        order = self._small("byteorder") if "byteorder" in self.members else b"little"
        if order != b"little":
            raise UnsupportedLayout(
                f"{self.path}: byte order {order!r}; only little-endian checkpoints are read. Save it again on a "
                "little-endian machine"
            )

    def _small(self, name: str) -> bytes:
        nbytes = self._member(name).nbytes
        if nbytes > 16:
            raise CheckpointDamaged(f"{self.path}: {name!r} has {nbytes} bytes, where a word is expected")
        return self.read(name)


def open_archive(
    path: str | os.PathLike[str], *, limits: ArchiveLimits = _DEFAULT, part: tuple[int, int] | None = None
) -> TorchArchive:
    """Open a file of torch.save; for a shard of a gigabyte this reads kilobytes.

    `part` is the offset and number of bytes of an archive inside a file.

    Reads the zip directory, the members' headers and two words. Raises CheckpointNotFound, ReadFailed,
    UnsupportedLayout (TorchScript, big-endian, a version of tomorrow) or CheckpointDamaged when the file is
    anything else than torch.save's zip format with every declared range in place.
    """
    return TorchArchive(PositionedFile(os.fspath(path), part), limits, part[0] if part is not None else 0)


def check_root(path: str, stem: str, root: str) -> None:
    """Refuse a file that was written under another name.

    torch names the root of its zip after the file it writes to (the stem), or "archive" when it writes
    to a stream: then nothing can be told.
    """
    if root in (stem, "archive"):
        return
    raise_faults(
        [
            CheckpointDamaged.fault(
                path,
                "was written under another name: a shard was copied or swapped",
                f"root {stem!r} inside the file",
                repr(root),
                mend="restore each shard under the name that it was saved with",
            )
        ],
        subject="reading a checkpoint",
    )
