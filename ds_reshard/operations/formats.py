"""The table of all formats, in the order in which a folder is asked: a format is one line here.

No other module of operations or cli imports a format; beside the table are what `ds-reshard lr` reads of two of them.
"""

from __future__ import annotations

from ds_reshard.errors import ReadFailed, UnsupportedLayout, error_of
from ds_reshard.formats.dcp.door import DCP
from ds_reshard.formats.fsdp.door import FSDP
from ds_reshard.formats.megatron.checkpoint import is_megatron
from ds_reshard.formats.megatron.checkpoint import read_past as read_megatron_past
from ds_reshard.formats.megatron.door import MEGATRON
from ds_reshard.formats.nanotron.door import NANOTRON
from ds_reshard.formats.pytorch.door import PYTORCH
from ds_reshard.formats.zero.door import ZERO
from ds_reshard.formats.zero.saved_schedule import read_past as read_zero_past
from ds_reshard.model.checkpoint import Format, Listing, Writer

__all__ = ["FORMATS", "WRITERS", "ZERO", "format_of", "is_megatron", "read_megatron_past", "read_zero_past"]

FORMATS: tuple[Format, ...] = (NANOTRON, PYTORCH, FSDP, DCP, MEGATRON, ZERO)

WRITERS: dict[str, Writer] = {to: writer for one in reversed(FORMATS) for to, writer in one.writes.items()}
"""What makes a target of any content, by the name that `--to` takes."""


def format_of(folder: str) -> tuple[Format, Listing] | None:
    """The format that a folder is of and its files there, None where it is of none.

    Raises UnsupportedLayout for a folder that several formats claim, and ReadFailed where it cannot be listed.
    """
    try:
        found = [(one, listing) for one in FORMATS if (listing := one.list(folder)) is not None]
    except OSError as error:
        raise ReadFailed(f"{folder}: cannot be listed: {error}") from error
    if len(found) > 1:
        names = " and ".join(one.name for one, _ in found)
        mend = "move the files of one of them into a folder of their own"
        fault = UnsupportedLayout.fault(folder, "holds the files of several formats", "one", names, mend=mend)
        raise error_of([fault], subject=f"checkpoint {folder}")
    return found[0] if found else None
