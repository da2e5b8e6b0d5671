"""A file of torch.save, opened without torch: its pickle as records, its tensors as places in the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeGuard

from ds_reshard.containers import digests
from ds_reshard.containers.crc import crc32
from ds_reshard.containers.pickle_reader import DEFAULT_LIMITS, begins_marked, read_pickle, scan_source
from ds_reshard.containers.pickle_rules import PickleRules, rules_in_force
from ds_reshard.containers.positioned import PositionedFile, PositionedView
from ds_reshard.containers.torch_zip_writer import STORAGES
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
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord, TensorRecord

# caffe2/serialize/versions.h, kMinSupportedFileFormatVersion and kMaxSupportedFileFormatVersion, torch 2.13.
_VERSIONS = range(1, 11)
_DIRECTORY_NBYTES = 64 << 20


class TorchArchive:
    """An open archive; close it, or use it with `with`.

    `root` is the folder that holds every member; `members` are by their name below it; `nbytes` is the file's size.
    Of a part of a file, offsets count from the beginning of the file.
    """

    def __init__(self, file: PositionedFile, start: int = 0) -> None:
        self.path = path = file.path
        self._file = file
        self._start = start
        try:
            self.root, members = read_members(file, _DIRECTORY_NBYTES)
            if start:
                members = {n: one._replace(byte_offset=start + one.byte_offset) for n, one in members.items()}
            self.members: Mapping[str, ArchiveMember] = MappingProxyType(members)
            self._calls = TensorCalls(path, members)
            self._check_kind()
        except BaseException:
            self._file.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    def load(self, name: str = "data.pkl", *, rules: PickleRules | None = None, twins: Twins | None = None) -> object:
        """The value that member `name` pickles: TensorRecords for tensors, StorageRecords for bare storages.

        No tensor's bytes are read, but those of flat tensors of bytes, in which models keep pickles of their own.
        With `twins` the value may be that of a file which was loaded before. Raises UnsafePickle for what `rules` (by
        default those in force) do not allow, CheckpointDamaged, ChecksumMismatch, ReadFailed.
        """
        member = self._member(name)
        if member.nbytes > (most := DEFAULT_LIMITS.nbytes):
            what = f"{name!r} is a pickle of {member.nbytes} bytes; at most {most} are read"
            raise CheckpointDamaged(f"{self.path}: {what}")
        rules = rules_in_force() if rules is None else rules
        data = self._file.read(member.byte_offset - self._start, member.nbytes)
        mismatch = self._mismatch(f"member {name!r}", data, member.crc32)
        known = twins.of(data, self.members, rules) if twins is not None and mismatch is None else None
        value = known.value if known is not None else self._judged(name, data, mismatch, rules)
        if twins is not None and known is None:
            twins.keep(data, self.members, rules, value)
        if self.pickles == [name] and self._file.whole:
            rules.note(self.path)
        if (found := digests.asked()) is not None:
            found[self.path if self._file.whole else f"{self.path}, byte {self._start}"] = self.digest(data)
        return value

    def digest(self, data: bytes) -> bytes:
        """A digest of the file's name, of its pickle, which is `data`, and of where all that it holds lies."""
        held = [(name, one.byte_offset, one.nbytes, one.crc32) for name, one in self.members.items()]
        return digests.digest(data, (os.path.basename(self.path), self.root, held))

    def _judged(self, name: str, data: bytes, mismatch: ChecksumMismatch | None, rules: PickleRules) -> object:
        """The value of a pickle, of which each name is judged; raises as `load`."""
        try:
            value = read_pickle(
                data,
                where=self.path,
                member=self._told(name),
                persistent=self._calls.storage,
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
        return value

    @property
    def pickles(self) -> list[str]:
        """The members that are pickles, by their names."""
        return [name for name in self.members if name.endswith((".pkl", ".pickle"))]

    def _inside(self, rules: PickleRules) -> list[Fault]:
        """What acts in pickles that lie in tensors of bytes: Transformer Engine's extra state is one.

        Where the elements do not follow each other, only how they begin is looked at.
        """
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
        if (mismatch := self._mismatch(f"member {name!r}", data, member.crc32)) is not None:
            raise mismatch
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
        crc = storage.crc32 if tensor.nbytes == storage.nbytes else None
        if (mismatch := self._mismatch(f"storage {storage.key!r}", data, crc)) is not None:
            raise mismatch
        return data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _member(self, name: str) -> ArchiveMember:
        member = self.members.get(name)
        if member is None:
            raise CheckpointDamaged(f"{self.path}: the archive has no member {name!r}")
        return member

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


_TWINS, _TWINS_NBYTES = 16, 32 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a pickle gave beside members of such sizes, and the rules that it passed."""

    sizes: Mapping[str, int]
    rules: PickleRules
    value: object


class Twins:
    """What was loaded last: a file that pickles the same holds the same value, which is judged and made once.

    Only where no storage has bytes, which would lie elsewhere: the model files of ZeRO stage 3 are such files, one for
    each rank, and differ by the number of the rank's GPU in its node. Paths in the value are those of the file that it
    was made of. Any thread may ask; at most 16 pickles are kept, of 32 MiB.
    """

    def __init__(self) -> None:
        self._loaded: dict[bytes, _Loaded] = {}
        self._lock = threading.Lock()

    def of(self, data: bytes, members: Mapping[str, ArchiveMember], rules: PickleRules) -> _Loaded | None:
        """What was loaded of the same pickle beside the same members."""
        with self._lock:
            found = self._loaded.get(data)
        return found if found is not None and found.rules is rules and found.sizes == _sizes(members) else None

    def keep(self, data: bytes, members: Mapping[str, ArchiveMember], rules: PickleRules, value: object) -> None:
        sizes = _sizes(members)
        if any(nbytes for name, nbytes in sizes.items() if name.startswith("data/")):
            return
        with self._lock:
            self._loaded[data] = _Loaded(sizes, rules, value)
            while len(self._loaded) > _TWINS or sum(map(len, self._loaded)) > max(len(data), _TWINS_NBYTES):
                del self._loaded[next(iter(self._loaded))]


def _sizes(members: Mapping[str, ArchiveMember]) -> dict[str, int]:
    return {name: member.nbytes for name, member in members.items()}


def open_archive(path: str | os.PathLike[str], *, part: tuple[int, int] | None = None) -> TorchArchive:
    """Open a file of torch.save; for a shard of a gigabyte this reads kilobytes.

    `part` is the offset and number of bytes of an archive inside a file.

    Reads the zip directory, the members' headers and two words. Raises CheckpointNotFound, ReadFailed,
    UnsupportedLayout (TorchScript, big-endian, a version of tomorrow) or CheckpointDamaged when the file is
    anything else than torch.save's zip format with every declared range in place.
    """
    return TorchArchive(PositionedFile(os.fspath(path), part), part[0] if part is not None else 0)


def digest_of(path: str) -> bytes:
    """What `digests` has of a file, without a look at what its pickle says. Raises as `open_archive` does."""
    with open_archive(path) as archive:
        return archive.digest(archive.read("data.pkl"))


def check_root(path: str, stem: str, root: str) -> None:
    """Refuse a file that was written under another name.

    torch names the root of its zip after the file it writes to (the stem), or "archive" when it writes
    to a stream: then nothing can be told.
    """
    if root not in (stem, "archive"):
        what = "was written under another name: a shard was copied or swapped"
        mend = "restore each shard under the name that it was saved with"
        fault = CheckpointDamaged.fault(path, what, f"root {stem!r} inside the file", repr(root), mend=mend)
        raise_faults([fault], subject="reading a checkpoint")


# -- tensors -----------------------------------------------------------------------------------------------------------

_STORAGES = {name: dtype for dtype, name in STORAGES.items()} | {"UntypedStorage": ElementType.UINT8}
_STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")
_PLAIN_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_MAX_DIMENSION = (1 << 63) - 1
_MAX_NDIM = 64  # of torch (c10/core/WrapDimMinimal, dim_list_to_bitset); also keeps checking a view cheap


class TensorCalls:
    """Gives meaning to the persistent ids and the calls by which torch pickles tensors of one archive.

    The calls are those of torch/_utils.py and torch/_tensor.py (2.13). Each tensor is checked to lie inside its
    storage. `of_bytes` are the tensors that were rebuilt whose elements are bytes.
    """

    def __init__(self, path: str, members: Mapping[str, ArchiveMember]) -> None:
        self._path = path
        self._members = members
        self._storages: dict[str, StorageRecord] = {}
        self.of_bytes: list[TensorRecord] = []

    def storage(self, identity: object) -> object:
        """The StorageRecord of a persistent id ("storage", class, key, location, numel).

        A storage of an element type that has no name here becomes an ObjectRecord. Raises
        CheckpointDamaged when the member is missing or not exactly of the size that the id declares.
        """
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise CheckpointDamaged(f"{self._path}: a persistent id is not that of a torch storage")
        _, kind, key, location, numel = identity
        if not isinstance(kind, GlobalName) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise CheckpointDamaged(f"{self._path}: the persistent id of a storage is malformed")
        dtype = _STORAGES.get(kind.name) if kind.module in _STORAGE_MODULES else None
        if dtype is None:
            return ObjectRecord(callable=kind, args=(key, location, numel))
        known = self._storages.get(key)
        if known is not None and known.numel == numel and known.dtype is dtype:
            return known
        member = self._members.get(f"data/{key}")
        if member is None:
            raise CheckpointDamaged(f"{self._path}: storage {key[:80]!r} has no bytes in the archive")
        if member.nbytes != numel * dtype.itemsize:
            raise CheckpointDamaged(
                f"{self._path}: storage {key[:80]!r} of {numel} {dtype.label} elements: expected "
                f"{numel * dtype.itemsize} bytes, found {member.nbytes}"
            )
        record = StorageRecord(self._path, key, dtype, numel, member.byte_offset, member.nbytes, member.crc32)
        self._storages[key] = record
        return record

    def call(self, function: GlobalName, args: tuple[object, ...]) -> object:
        """The TensorRecord that the call rebuilds; NotImplemented for every other call.

        NotImplemented too for tensors that a record cannot say: of an element type that has no name here,
        conjugated or negated lazily, or of a subclass. Raises CheckpointDamaged for a malformed call.
        """
        name = function.name
        if function.module not in ("torch._utils", "torch._tensor", "torch.tensor"):
            return NotImplemented
        if name == "_rebuild_tensor_v2" and len(args) in (6, 7):
            return self._tensor(args[:4], None, args[4], args[6:])
        if name == "_rebuild_tensor_v3" and len(args) in (7, 8):
            return self._tensor(args[:4], args[6], args[4], args[7:])
        if name == "_rebuild_tensor" and len(args) == 4:
            return self._tensor(args, None, False, ())
        if name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and len(args) in (3, 4):
            if isinstance(args[0], TensorRecord):
                return replace(args[0], requires_grad=args[1] is True)
            return NotImplemented
        if name == "_rebuild_from_type_v2" and len(args) == 4:
            inner, kind, inner_args, _ = args
            if not isinstance(kind, GlobalName) or str(kind) not in _PLAIN_TYPES:
                return NotImplemented
            if isinstance(inner, GlobalName) and isinstance(inner_args, tuple) and inner.name != name:
                return self.call(inner, inner_args)
        return NotImplemented

    def _tensor(
        self, view: tuple[object, ...], named_dtype: object, requires_grad: object, metadata: tuple[object, ...]
    ) -> object:
        storage, offset, shape, stride = view
        if not isinstance(storage, StorageRecord):
            if isinstance(storage, ObjectRecord):
                return NotImplemented
            raise CheckpointDamaged(f"{self._path}: a tensor is rebuilt from a {type(storage).__name__}, not a storage")
        dtype = storage.dtype
        if named_dtype is not None:
            if not isinstance(named_dtype, GlobalName) or named_dtype.module != "torch":
                raise CheckpointDamaged(f"{self._path}: a tensor of storage {storage.key!r} has no element type")
            try:
                dtype = ElementType.named(named_dtype.name)
            except KeyError:
                return NotImplemented
        if any(metadata):
            return NotImplemented
        sizes, strides = _dimensions(shape), _dimensions(stride)
        if sizes is None or strides is None or len(sizes) != len(strides) or not _is_dimension(offset):
            raise CheckpointDamaged(f"{self._path}: a tensor of storage {storage.key!r} is malformed")
        numel, stop = storage.nbytes // dtype.itemsize, offset + 1
        for size, step in zip(sizes, strides):  # noqa: B905
            stop += (size - 1) * step
        if 0 in sizes:  # an empty view reads nothing: moved into the storage
            offset = min(offset, numel)
        elif stop > numel:
            raise CheckpointDamaged(
                f"{self._path}: a tensor of shape {shape}, stride {stride} and offset {offset} ends at element "
                f"{stop} of storage {storage.key!r}, which has {numel} of {dtype.label}"
            )
        made = TensorRecord(storage, dtype, offset, sizes, strides, requires_grad is True)
        if dtype.itemsize == 1 and made.nbytes:
            self.of_bytes.append(made)
        return made


def _dimensions(value: object) -> tuple[int, ...] | None:
    """The sizes, strides or offsets that `value` holds; None when they are not non-negative 64-bit integers."""
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_NDIM or not _INTEGERS.issuperset(map(type, value)):
        return None
    return tuple(value) if not value or (min(value) >= 0 and max(value) <= _MAX_DIMENSION) else None


_INTEGERS = frozenset({int})


def _is_dimension(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_DIMENSION
