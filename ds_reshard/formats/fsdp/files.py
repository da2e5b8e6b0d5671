"""The files of a folder of EasyR1 or verl, by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ds_reshard.errors import Fault, ReadFailed
from ds_reshard.formats.fsdp.held import damaged
from ds_reshard.model.saved import SavedFile, SavedListing

MODEL, OPTIM = "model", "optim"
_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")


def is_fsdp(folder: str) -> bool:
    return any(match["family"] == MODEL for match in files_of(folder))


def list_fsdp(folder: str) -> SavedListing:
    """The files of such a folder."""
    roles = {MODEL: "model", OPTIM: "optimizer"}
    files = {}
    for name in sorted(os.listdir(folder)):
        path, match = os.path.join(folder, name), _NAME.fullmatch(name)
        if os.path.isfile(path):
            role = roles.get(match[1], "other") if match is not None else "other"
            files[name] = SavedFile(nbytes=os.path.getsize(path), role=role)
    tag = os.path.basename(os.path.abspath(folder))
    return SavedListing(format="files of FSDP ranks", writer="EasyR1 or verl", folder=folder, tag=tag, files=files)


def files_of(folder: str) -> list[dict[str, str]]:
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ReadFailed(f"{folder}: cannot be listed: {error}") from error
    found = (_NAME.fullmatch(name) for name in names)
    return [{"family": match[1], "size": match[2], "rank": match[3]} for match in found if match is not None]


def path_of(folder: str, family: str, size: int, rank: int) -> str:
    return os.path.join(folder, f"{family}_world_size_{size}_rank_{rank}.pt")


def missing(folder: str, files: list[dict[str, str]], size: int) -> Iterator[Fault]:
    for family in (MODEL, *(name for name in (OPTIM,) if any(one["family"] == name for one in files))):
        there = {int(one["rank"]) for one in files if one["family"] == family}
        if there != set(range(size)):
            shown = ", ".join(map(str, sorted(set(range(size)) - there)[:16])) or "none"
            yield damaged(
                folder,
                f"files {family}_world_size_{size}_rank_*.pt are not those of {size} ranks",
                f"ranks 0 to {size - 1}",
                f"{len(there)} files; missing {shown}",
            )
