"""Reads a pickle as inert values: an interpreter of its instructions that imports and calls nothing named."""

from __future__ import annotations

import pickletools
import struct

from ds_reshard.containers.pickle_machine import Forbidden, Persistent, PickleLimits, PickleMachine, Reduce
from ds_reshard.containers.pickle_opcodes import HANDLERS
from ds_reshard.errors import CheckpointDamaged, UnsafePickle
from ds_reshard.model.nesting import out_of_bounds
from ds_reshard.model.records import GlobalName
from ds_reshard.model.uncollected import uncollected

__all__ = ["DEFAULT_LIMITS", "PickleLimits", "read_pickle"]

DEFAULT_LIMITS = PickleLimits()

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

# What the built-in operations of a handler raise on bytes that no pickler wrote.
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, struct.error)


def keep_as_record(function: GlobalName, args: tuple[object, ...]) -> object:
    """The hook of a reader that gives no call a meaning: each becomes an ObjectRecord."""
    return NotImplemented


@uncollected()
def read_pickle(
    data: bytes,
    *,
    where: str,
    persistent: Persistent,
    limits: PickleLimits = DEFAULT_LIMITS,
    reduce: Reduce = keep_as_record,
    named: set[GlobalName] | None = None,
) -> object:
    """The value that `data` pickles, made of plain containers and records; nothing named in it is imported.

    A class or function becomes a GlobalName; calling one gives what `reduce` returns for it and its
    arguments, or an ObjectRecord when `reduce` returns NotImplemented. Plain values that pickle writes as
    calls (OrderedDict, set, bytes, complex, range, slice, torch.Size as a tuple) become themselves.
    `persistent` turns a persistent id into a value; every name in the pickle is added to `named`. Linear in the size of
    the pickle, without recursion.

    Raises UnsafePickle when the pickle asks for what no checkpoint needs, and CheckpointDamaged for
    everything else that is wrong, with `where` and the byte offset of the instruction.
    """
    if len(data) > limits.nbytes:
        raise CheckpointDamaged(f"{where}: a pickle of {len(data)} bytes; at most {limits.nbytes} are read")
    machine = PickleMachine(data, persistent, reduce, limits)
    handlers = HANDLERS
    pos = 0
    try:
        while pos >= 0:
            pos = handlers[data[pos]](machine, pos + 1)
    except Forbidden as error:
        raise UnsafePickle(
            f"{where}: byte {pos}: the pickle {error}; it was not run. Load only checkpoints that you trust, "
            "and save this one again with a current torch.save"
        ) from None
    except _MALFORMED as error:
        raise CheckpointDamaged(_complaint(where, data, pos, error)) from error
    except MemoryError:
        raise CheckpointDamaged(f"{where}: a pickle of {len(data)} bytes takes more memory than there is") from None
    if named is not None:
        named.update(machine.named.values())
    if data[machine.stopped_at :].strip(b"\0"):
        raise CheckpointDamaged(
            f"{where}: byte {machine.stopped_at}: {len(data) - machine.stopped_at} bytes follow the end of the pickle"
        )
    excess = out_of_bounds(machine.result, depth=limits.depth, parts=limits.parts + limits.expansion * len(data))
    if excess is not None:
        raise CheckpointDamaged(f"{where}: the pickle's value {excess}")
    return machine.result


def _complaint(where: str, data: bytes, pos: int, error: Exception) -> str:
    if pos >= len(data):
        return f"{where}: byte {pos}: the pickle ends before its STOP instruction: the file was cut short"
    name = _NAMES.get(data[pos], f"opcode 0x{data[pos]:02x}")
    if isinstance(error, struct.error) or (isinstance(error, IndexError) and pos + 1 >= len(data)):
        what = "the pickle ends inside this instruction: the file was cut short"
    elif isinstance(error, IndexError):
        what = "the instruction needs more values than the stack holds"
    elif isinstance(error, KeyError):
        what = f"memo entry {error} was never stored"
    else:
        what = str(error)[:200]
    return f"{where}: byte {pos}: {name}: {what}"
