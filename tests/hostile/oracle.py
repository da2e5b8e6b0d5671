"""The reader of pickles of our own, before CPython's unpickler: the oracle of the differential fuzz for one release."""

from __future__ import annotations

import pickletools
import struct

from oracle_instructions import HANDLERS, IN_FRAME, STOPPED
from oracle_machine import CutShort, OverLimit, PickleMachine, Reduce

from ds_reshard.containers.pickle_engine import Persistent
from ds_reshard.containers.pickle_reader import keep_as_record, scan_bytes
from ds_reshard.containers.pickle_rules import PickleRules, fault_of, rules_in_force
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, faults_of, raise_faults
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.nesting import out_of_bounds

DEFAULT_LIMITS = PickleLimits()
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, struct.error)


def read_pickle(
    data: bytes,
    *,
    where: str,
    persistent: Persistent,
    member: str = "",
    limits: PickleLimits = DEFAULT_LIMITS,
    reduce: Reduce = keep_as_record,
    rules: PickleRules | None = None,
) -> object:
    """As `read_pickle`."""
    rules = rules_in_force() if rules is None else rules
    place = f"{where}: {member}" if member else where
    if len(data) > limits.nbytes:
        raise CheckpointDamaged(f"{place}: a pickle of {len(data)} bytes; at most {limits.nbytes} are read")
    machine = PickleMachine(data, persistent, reduce, limits, rules)
    error = run_pickle(machine, place)
    if error is None and data[machine.stopped_at :].strip(b"\0"):
        error = CheckpointDamaged(
            f"{place}: byte {machine.stopped_at}: {len(data) - machine.stopped_at} bytes follow the end of the pickle"
        )
    if error is None:
        excess = out_of_bounds(machine.result, depth=limits.depth, parts=limits.parts + limits.expansion * len(data))
        if excess is not None:
            error = CheckpointDamaged(f"{place}: the pickle's value {excess}")
    faults = found_in(machine, where, member)
    if faults:
        raise_faults([*faults, *(faults_of(error) if error is not None else ())], subject="reading a checkpoint")
    if error is not None:
        raise error
    return machine.result


@gc_disabled()
def run_pickle(machine: PickleMachine, place: str) -> ReshardError | None:
    """Carry out the instructions up to STOP; what is wrong with them, where they end before.

    A frame must end where an instruction does: where one reaches beyond, Python's own unpickler goes on elsewhere, and
    may run what stands inside a text (CPython's issue 154848).
    """
    data, handlers, pos = machine.data, HANDLERS, 0
    try:
        while pos != STOPPED:
            while pos >= 0:
                pos = handlers[data[pos]](machine, pos + 1)
            while pos <= IN_FRAME:
                pos, end = IN_FRAME - pos, machine.frame_end
                start = pos
                while 0 <= pos < end:
                    start = pos
                    pos = handlers[data[pos]](machine, pos + 1)
                if pos > end or pos <= IN_FRAME:
                    machine.astray = True
                    machine.refuse(start, "reads across the end of a frame, behind which Python's own reader may go on")
    except ReshardError as error:  # of what makes values of persistent ids and calls
        return error
    except _MALFORMED as error:
        machine.stopped_at = pos
        machine.astray |= pos < machine.frame_end or isinstance(error, TypeError | OverflowError | RecursionError)
        machine.lacks = error if isinstance(error, CutShort) else None
        machine.cut_short = isinstance(error, CutShort | struct.error) or _beyond(data, pos, error)
        machine.over_limit = isinstance(error, OverLimit)
        damage = CheckpointDamaged(_complaint(place, data, pos, error))
        damage.__cause__ = error
        return damage
    except MemoryError:
        machine.over_limit = True
        for held in (machine.stack, machine.marked, machine.memo):
            held.clear()
        return CheckpointDamaged(f"{place}: a pickle of {len(data)} bytes takes more memory than there is")
    return None


def found_in(machine: PickleMachine, where: str, member: str) -> list[Fault]:
    """The faults of all findings of a machine, and of the pickles in bytes that it hands to a loader of pickles."""
    faults: list[Fault] = []
    if machine.findings and not (machine.rules.everything and not machine.refused):
        faults += [fault_of(finding, where, member) for finding in machine.findings.values()]
    if machine.nested and not machine.rules.everything:
        for nested, (byte, surely) in machine.nested.items():
            inner = f"{member}, byte {byte}: bytes" if member else f"byte {byte}: bytes"
            faults += scan_bytes(nested, where, inner, machine.rules, strict=surely)
    return faults


def _beyond(data: bytes, pos: int, error: Exception) -> bool:
    """Whether an instruction, or its only byte, stands behind the last byte."""
    return pos >= len(data) or (isinstance(error, IndexError) and pos + 1 >= len(data))


def _complaint(where: str, data: bytes, pos: int, error: Exception) -> str:
    if pos >= len(data):
        return f"{where}: byte {pos}: the pickle ends before its STOP instruction: the file was cut short"
    name = _NAMES.get(data[pos], f"opcode 0x{data[pos]:02x}")
    if isinstance(error, struct.error) or _beyond(data, pos, error):
        what = "the pickle ends inside this instruction: the file was cut short"
    elif isinstance(error, IndexError):
        what = "the instruction needs more values than the stack holds"
    elif isinstance(error, KeyError):
        what = f"memo entry {error} was never stored"
    else:
        what = str(error)[:200]
    return f"{where}: byte {pos}: {name}: {what}"
