"""What torch's pickles say about tensors, as records: each view checked to lie inside its storage.

The calls are those of torch/_utils.py and torch/_tensor.py (2.13): `_rebuild_tensor`, `_rebuild_tensor_v2`,
`_rebuild_tensor_v3`, `_rebuild_parameter`, `_rebuild_parameter_with_state`, `_rebuild_from_type_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from ds_reshard.containers.zip_directory import ArchiveMember
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, StorageRecord, TensorRecord

_STORAGES = {
    "DoubleStorage": ElementType.FLOAT64,
    "FloatStorage": ElementType.FLOAT32,
    "HalfStorage": ElementType.FLOAT16,
    "BFloat16Storage": ElementType.BFLOAT16,
    "ComplexFloatStorage": ElementType.COMPLEX64,
    "ComplexDoubleStorage": ElementType.COMPLEX128,
    "LongStorage": ElementType.INT64,
    "IntStorage": ElementType.INT32,
    "ShortStorage": ElementType.INT16,
    "CharStorage": ElementType.INT8,
    "ByteStorage": ElementType.UINT8,
    "BoolStorage": ElementType.BOOL,
    "UntypedStorage": ElementType.UINT8,
}
_PLAIN_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_MAX_DIMENSION = (1 << 63) - 1
_MAX_NDIM = 64  # of torch (c10/core/WrapDimMinimal, dim_list_to_bitset); also keeps checking a view cheap


class TensorCalls:
    """Gives meaning to the persistent ids and the calls by which torch pickles tensors of one archive.

    `of_bytes` are the tensors that were rebuilt whose elements are bytes.
    """

    def __init__(self, path: str, members: Mapping[str, ArchiveMember]) -> None:
        self._path = path
        self._members = members
        self._storages: dict[tuple[str, str, int], StorageRecord] = {}
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
        known = self._storages.get((key, kind.name, numel))
        if known is not None and kind.module in ("torch", "torch.storage", "torch.cuda"):
            return known
        dtype = _STORAGES.get(kind.name)
        if dtype is None or kind.module not in ("torch", "torch.storage", "torch.cuda"):
            return ObjectRecord(callable=kind, args=(key, location, numel))
        member = self._members.get(f"data/{key}")
        if member is None:
            raise CheckpointDamaged(f"{self._path}: storage {key[:80]!r} has no bytes in the archive")
        if member.nbytes != numel * dtype.itemsize:
            raise CheckpointDamaged(
                f"{self._path}: storage {key[:80]!r} of {numel} {dtype.label} elements: expected "
                f"{numel * dtype.itemsize} bytes, found {member.nbytes}"
            )
        record = StorageRecord(
            path=self._path,
            key=key,
            dtype=dtype,
            numel=numel,
            byte_offset=member.byte_offset,
            nbytes=member.nbytes,
            crc32=member.crc32,
        )
        self._storages[key, kind.name, numel] = record
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
        made = TensorRecord(
            storage=storage,
            dtype=dtype,
            element_offset=self._inside(storage, dtype, offset, sizes, strides),
            shape=sizes,
            stride=strides,
            requires_grad=requires_grad is True,
        )
        if dtype.itemsize == 1 and made.nbytes:
            self.of_bytes.append(made)
        return made

    def _inside(
        self, storage: StorageRecord, dtype: ElementType, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> int:
        """The view's offset, checked to stay in the storage; of an empty view, moved there: it reads nothing."""
        numel = storage.nbytes // dtype.itemsize
        if 0 in shape:
            return min(offset, numel)
        stop = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if stop > numel:
            raise CheckpointDamaged(
                f"{self._path}: a tensor of shape {shape}, stride {stride} and offset {offset} ends at element "
                f"{stop} of storage {storage.key!r}, which has {numel} of {dtype.label}"
            )
        return offset


def _dimensions(value: object) -> tuple[int, ...] | None:
    """The sizes, strides or offsets that `value` holds; None when they are not non-negative 64-bit integers."""
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_NDIM:
        return None
    for size in value:
        if not _is_dimension(size):
            return None
    return tuple(value)


def _is_dimension(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_DIMENSION
