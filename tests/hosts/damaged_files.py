"""What harms the files of a checkpoint: each takes the folder that they lie in."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[Path], None]


def remove(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def cut(name: str, keep: float) -> Damage:
    def run(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, int(size * keep) if keep < 1 else size - 1)

    return run


def flip(name: str, record: str, *, each: bool = False) -> Damage:
    """Flip one bit in the middle of the largest record whose name has `record` in it, or of `each` that is as large."""

    def run(folder: Path) -> None:
        path = folder / name
        with zipfile.ZipFile(path) as archive:
            found = [i for i in archive.infolist() if record in i.filename]
        largest = max(entry.file_size for entry in found)
        found = [entry for entry in found if entry.file_size == largest]
        with path.open("r+b") as file:
            for entry in found if each else found[:1]:
                file.seek(entry.header_offset + 26)
                lengths = file.read(4)
                header = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                middle = entry.header_offset + header + entry.file_size // 2
                file.seek(middle)
                byte = file.read(1)[0]
                file.seek(middle)
                file.write(bytes([byte ^ 1]))

    return run


def duplicate(source: str, target: str) -> Damage:
    return lambda folder: shutil.copyfile(folder / source, folder / target) and None


def duplicate_without_name(source: str, target: str) -> Damage:
    """As a tool would that loads and saves through a stream: the zip root says nothing."""

    def run(folder: Path) -> None:
        content = torch.load(folder / source, weights_only=False)
        for name in (source, target):
            stream = io.BytesIO()
            torch.save(content, stream)
            (folder / name).write_bytes(stream.getvalue())

    return run


def changed(name: str, change: Callable[[Any], object]) -> Damage:
    """The file written anew by torch.save with another content: every checksum in it fits."""

    def run(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)

    return run


def exchanged(one: str, other: str) -> Damage:
    """Two files change places, as they are."""

    def run(folder: Path) -> None:
        (folder / one).rename(folder / "kept")
        (folder / other).rename(folder / one)
        (folder / "kept").rename(folder / other)

    return run
