"""Order copies by file and offset, and join those that continue each other."""

from __future__ import annotations

from collections.abc import Iterable

from ds_reshard.planning.plan import Copy


def coalesce(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same copies, ordered by (file, offset), adjacent ones joined into one."""
    joined: list[Copy] = []
    for copy in sorted(copies, key=lambda c: (c.record.path, c.byte_offset, c.buffer, c.element_offset)):
        last = joined[-1] if joined else None
        if last is not None and _continues(last, copy):
            joined[-1] = last._replace(numel=last.numel + copy.numel)
        else:
            joined.append(copy)
    return tuple(joined)


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        last.element_offset + last.numel == copy.element_offset
        and last.byte_offset + last.nbytes == copy.byte_offset
        and last.buffer == copy.buffer
        and last.record == copy.record
        and (last.dtype, last.target_dtype) == (copy.dtype, copy.target_dtype)
    )
