"""Archives of torch.save taken apart by torch, and written anew with every size and checksum as it should be."""

from __future__ import annotations

import io
import zipfile

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
