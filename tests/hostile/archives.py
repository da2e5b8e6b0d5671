"""Archives of torch.save taken apart by torch, and written anew with every size and checksum as it should be."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from typing import Any

import torch


def member_of(content: bytes, name: str) -> bytes:
    """A member of an archive, by its name below the root."""
    data: bytes = torch._C.PyTorchFileReader(io.BytesIO(content)).get_record(name)
    return data


def rebuilt(content: bytes, members: dict[str, bytes]) -> bytes:
    """The archive with these members, by their names below the root, in place of its own or beside them."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(stream, "w") as target:
        names = dict.fromkeys(name.partition("/")[2] for name in source.namelist())
        root = source.namelist()[0].partition("/")[0]
        for name in names | dict.fromkeys(members):
            data = members[name] if name in members else member_of(content, name)
            target.writestr(zipfile.ZipInfo(f"{root}/{name}"), data)
    return stream.getvalue()


_ODD_NAMES = (
    "b/data/0",
    "a/.",
    "a/..",
    "a//x",
    "a",
    "a/",
    "/a",
    "a/PK\x01\x02",
    "a/\n",
    "a/\0",
    "a/ü",
    "a/\\",
    "a/..x",
)


def lying(drawn: random.Random) -> bytes:
    """An archive of a few members, of which about a quarter is whole."""

    def odd(percent: float, *others: Any) -> Any:
        """The first, and seldom one of the rest."""
        return others[0] if drawn.random() * 100 > percent else drawn.choice(others[1:])

    body, entries = b"", []
    for number in range(drawn.randrange(1, 9)):
        name = odd(4, f"a/data/{number}", *_ODD_NAMES).encode()
        data = drawn.randbytes(drawn.choice((0, 1, 5, 64, 3000)))
        nbytes = odd(4, len(data), 0, len(data) + 1, len(data) + 40, 2**31, 2**32 - 1)
        crc, flags, method = odd(9, zlib.crc32(data), 0), odd(3, 0x808, 0, 8, 0x800, 1, 0x2000), odd(1, 0, 8)
        padding = drawn.randrange(60)
        extra = odd(9, struct.pack("<2H", 0x4246, padding) + bytes(padding), b"", drawn.randbytes(drawn.randrange(40)))
        sized = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) + extra
        extra = odd(9, extra, sized, struct.pack("<2H", 1, drawn.choice((0, 4, 70, 65535))) + bytes(drawn.randrange(9)))
        header_name, said = odd(2, name, b"a/data/1"), odd(9, 0, nbytes, 2**32 - 1, 7)
        fields = (odd(3, flags, 0, 1), method, 0, 0, odd(9, 0, crc, 7), said, said)
        offset = odd(2, len(body), 0, len(body) + 1, max(0, len(body) - 20), 2**31, 2**32 - 1)
        lengths = len(header_name), odd(3, len(extra), drawn.randrange(70))
        body += struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, *fields, *lengths) + header_name + extra + data
        body += odd(30, b"", struct.pack("<4s3I", b"PK\x07\x08", crc, len(data), len(data)))
        more, comment = odd(4, b"", extra), odd(2, b"", b"hi")
        fields = (flags, method, 0, 0, crc, nbytes, odd(2, nbytes, 3), len(name), len(more), len(comment))
        entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 20, *fields, odd(1, 0, 1), 0, 0, offset)
        entries += [entry + name + more + comment] * odd(2, 1, 0, 2)
    if drawn.random() < 0.1:
        drawn.shuffle(entries)
    directory, count = b"".join(entries) + odd(2, b"", b"xx"), odd(3, len(entries), 0, 3)
    return body + directory + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)
