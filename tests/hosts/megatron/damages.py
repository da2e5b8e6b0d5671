"""Changes of a copy of a checkpoint that Megatron-LM saved."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader


def changed_common(folder: Path, change: Callable[[bytes], bytes], key: str = "common_state/shard_0_1") -> None:
    """Change the pickle of what all ranks share, or of another object, which then lies in a file of its own."""
    metadata = FileSystemReader(folder).read_metadata()
    (index,) = (one for one in metadata.storage_data if one.fqn == key)
    place = metadata.storage_data[index]
    archive = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    file = folder / "__9_9.distcp"
    with zipfile.ZipFile(io.BytesIO(archive)) as held, zipfile.ZipFile(file, "w") as made:
        for name in held.namelist():
            data = held.read(name)
            changed = change(data) if name.endswith("data.pkl") else data
            assert changed != data or not name.endswith("data.pkl")
            made.writestr(name, changed)
    metadata.storage_data[index] = replace(place, relative_path=file.name, offset=0, length=file.stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def changed_number(name: str, was: int, to: int) -> Callable[[bytes], bytes]:
    """Of a small number that stands behind a name in a pickle."""

    def change(held: bytes) -> bytes:
        pattern = rb"\x00" + name.encode() + rb"(q.|r....)K(?=%c)" % was  # BININT1
        (at,) = (one.end() for one in re.finditer(pattern, held, re.DOTALL))
        return held[:at] + bytes([to]) + held[at + 1 :]

    return change


def changed_text(was: str, to: str) -> Callable[[bytes], bytes]:
    """Of every text of a pickle that is `was`, which may become longer."""
    one, other = (b"X" + len(text).to_bytes(4, "little") + text.encode() for text in (was, to))
    return lambda held: held.replace(one, other)


def changed_chunks(folder: Path, key: str, change: Callable[[list[Any]], None]) -> None:
    """Change the list of chunks of a key in the directory, as torch reads and writes it."""
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata.state_dict_metadata[key].chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def same_bytes(folder: Path, one: str, other: str) -> None:
    """Let a tensor's pieces be those of another of the same shape."""
    metadata = FileSystemReader(folder).read_metadata()
    places = metadata.storage_data
    for index in [index for index in places if index.fqn == one]:
        places[index] = next(
            place for twin, place in places.items() if twin.fqn == other and twin.offset == index.offset
        )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
