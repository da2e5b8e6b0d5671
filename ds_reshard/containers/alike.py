"""Archives of one tensor each, many in one file: of those that are framed alike one is parsed.

torch.distributed.checkpoint saves every chunk as an archive of its own. Those of one shape and type are the same bytes
but for the tensor's, their checksum, and the id that torch makes of checksums: what one of them says, all say.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.model.records import StorageRecord, TensorRecord

_CRC32 = struct.Struct("<I")
_IN_HEADER, _IN_ENTRY = 14, 16  # where a checksum stands: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 and 4.3.12
_IDENTITY = ".data/serialization_id"  # caffe2/serialize/inline_container.cc, kSerializationIdRecordName, torch 2.13
_FRAME_NBYTES = 64 << 10
Span = tuple[int, int]


class AlikeArchives:
    """Opens archives of one tensor, and remembers the frames that it has seen."""

    def __init__(self) -> None:
        self._frames: dict[tuple[object, int], _Frame] = {}

    def load(self, path: str, part: Span, kind: object) -> object:
        """What `TorchArchive.load` gives for a part of a file, and raises; archives of one `kind` may be alike."""
        frame = self._frames.get((kind, part[1]))
        tensor = frame.tensor(path, part) if frame is not None else None
        if tensor is not None:
            return tensor
        with open_archive(path, part=part) as archive:
            held = archive.load()
            frame = _frame(archive, held, path, part)
        if frame is not None:
            self._frames.setdefault((kind, part[1]), frame)
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """All of an archive but the bytes [start, stop), which are those of its one tensor: `outside`.

    The spans `same` of it are the same in all archives that are alike; `checksums` are where the header and the
    directory tell those of the members that differ, the tensor's first. A header may leave it out.
    """

    held: TensorRecord
    start: int
    stop: int
    outside: bytes
    same: tuple[Span, ...]
    checksums: tuple[tuple[int, int], ...]

    def tensor(self, path: str, part: Span) -> TensorRecord | None:
        """The tensor of another archive of the same size; None where that is not like this one."""
        outside = _outside(path, part, self.start, self.stop)
        for start, stop in self.same:
            if outside[start:stop] != self.outside[start:stop]:
                return None
        told = [(_CRC32.unpack_from(outside, a)[0], _CRC32.unpack_from(outside, b)[0]) for a, b in self.checksums]
        for in_header, crc in told:
            if in_header not in (0, crc):
                return None
        held, storage = self.held, self.held.storage
        placed = StorageRecord(
            path=path,
            key=storage.key,
            dtype=storage.dtype,
            numel=storage.numel,
            nbytes=storage.nbytes,
            byte_offset=part[0] + self.start,
            crc32=told[0][1],
        )
        return TensorRecord(
            storage=placed,
            dtype=held.dtype,
            element_offset=held.element_offset,
            shape=held.shape,
            stride=held.stride,
            requires_grad=held.requires_grad,
        )


def _outside(path: str, part: Span, start: int, stop: int) -> bytes:
    """The bytes of a part of a file before `start` and from `stop` on."""
    file = PositionedFile(path, part)
    try:
        return file.read(0, start) + file.read(stop, part[1] - stop)
    finally:
        file.close()


def _frame(archive: TorchArchive, held: object, path: str, part: Span) -> _Frame | None:
    """The frame of an archive; None where it holds anything but one tensor with a checksum, or is of a large frame."""
    stored = [member for name, member in archive.members.items() if name.startswith("data/")]
    if not isinstance(held, TensorRecord) or len(stored) != 1 or stored[0].crc32 is None:
        return None
    data = stored[0]
    members = sorted(archive.members.values(), key=lambda member: member.header_offset)
    directory = min(member.entry_offset for member in members)
    begin = {member.name: member.byte_offset - part[0] for member in members}
    end = {a.name: b.header_offset for a, b in pairwise(members)} | {members[-1].name: directory}
    varied = [data, *(member for member in members if member.name == _IDENTITY)]
    start, stop = begin[data.name], end[data.name]
    if part[1] - (stop - start) > _FRAME_NBYTES:
        return None

    def at(offset: int) -> int:
        return offset if offset < stop else offset - (stop - start)

    checksums = tuple((at(one.header_offset + _IN_HEADER), at(one.entry_offset + _IN_ENTRY)) for one in varied)
    spans = [(place, place + _CRC32.size) for places in checksums for place in places]
    spans += [(at(begin[one.name]), at(end[one.name])) for one in varied[1:]]
    outside = _outside(path, part, start, stop)
    edges = [0, *(edge for span in sorted(spans) for edge in span), len(outside)]
    return _Frame(
        held=held,
        start=start,
        stop=stop,
        outside=outside,
        checksums=checksums,
        same=tuple(zip(edges[::2], edges[1::2], strict=True)),
    )
