"""Digests of what was read of a checkpoint's files, by which ranks see whether all of them read the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

from ds_reshard.model.context_value import context_value

_DIGESTS: ContextVar[dict[str, bytes] | None] = ContextVar("digests", default=None)
MAP_OF_NAMES = 'the map of "names"'
"""The key of the digest of a map, in place of a path: a rank may have its map from a file of its own."""


@contextmanager
def digests() -> Iterator[dict[str, bytes]]:
    """A digest of each file that is opened inside, by its path, of those that say what lies in them.

    Of a file of torch.save that is its name, its pickle, and where all that it holds lies, with checksums, also where
    it lies inside another file; of a pickle, as the directory of torch.distributed.checkpoint is one, all of it.
    """
    found: dict[str, bytes] = {}
    with context_value(_DIGESTS, found):
        yield found


def asked() -> dict[str, bytes] | None:
    """Where digests are put, or None where nobody has asked for any."""
    return _DIGESTS.get()


def note_names(*parts: object) -> None:
    """Add a digest of the names that a map gives to those of the files, if digests are collected."""
    if (found := asked()) is not None:
        found[MAP_OF_NAMES] = digest(*parts)


def digest(*parts: object) -> bytes:
    """16 bytes that stand for bytes, and for plain values by how they are written."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass"))
    return made.digest()
