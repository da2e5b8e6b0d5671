"""Every exception that ds_reshard raises, and the fault record that they carry.

    ReshardError
    ├── CheckpointNotFound        the folder, tag or file that was named is not there
    ├── CheckpointDamaged         files are missing, truncated, contradict each other or lie about sizes
    │   └── ChecksumMismatch      bytes that were read are not the bytes that were written
    ├── FingerprintMismatch       what a load left in memory is not what it read
    ├── UnsafePickle              a pickle asks for something that is never done when reading a checkpoint
    │   └── TrustRequired         a class that the user may accept, by naming it
    ├── ModelMismatch             parameters of the model and of the checkpoint differ
    ├── ParamGroupMismatch        param groups cannot be matched without a guess
    ├── ScheduleMismatch          the schedule or its batch size differs from the checkpoint's, and must not
    ├── UnsupportedLayout         a layout, format or option that is refused by name
    ├── ConfigError               a setting is unknown or of the wrong type
    ├── ReadFailed                the operating system could not read bytes that the file has
    ├── WriteFailed               the operating system could not write; the output does not take its name
    ├── DeviceFailed              a GPU has no memory left for a load, or fails while bytes are brought there
    ├── PrepareError              optimizer, scheduler and JSON cannot be prepared together as asked
    ├── EngineUnusable            a load failed half-way: the engine must not step or save
    ├── HookError                 a patch cannot be installed as declared
    ├── RankLost                  another rank has ended, or does not answer within the group's timeout
    └── InternalError             a bug of ours; raised on every rank so that none is left waiting

An error says what, where, what was expected and what was found, and ends with the command or the line
that mends it. All of them pickle, and keep their faults as fields.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

_Error = TypeVar("_Error", bound="ReshardError")
_ABSENT = ("is missing", "are missing", "no such file")
TRY_AGAIN = "or try again: a store may list a new file late"
"""What mends the absence of a file in a folder by URL, too."""
AS_SAVED = "resume with the layout that was saved"
"""How the fix begins of what no other layout can hold; at that layout the run's own framework loads it."""
_USER = re.compile(r"(:/+)(?:[^\s/:@'\"]*:(?![0-9]+/)\S*|[^\s/]*)@")
_QUERY = re.compile(r"(:/[^\s?'\"]*)\?[^\s'\"]*?(?=[:;,]?(?:[\s'\"]|$))")


def without_secrets(text: str) -> str:
    """The text, each URL in it without credentials, which may hold a slash, and without its query."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text)) if ":/" in text else text


class ReshardError(Exception):
    """Base of every error raised on purpose; `faults` holds each finding as a record.

    `agreed` says that every rank which shares the work raises it. Neither message nor faults tell the secrets of a URL.
    """

    agreed = False

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(without_secrets(message))
        self.faults: tuple[Fault, ...] = tuple(faults)

    def __reduce__(self) -> tuple[type[ReshardError], tuple[str, tuple[Fault, ...]]]:
        return type(self), (str(self), self.faults)

    @classmethod
    def fault(cls, where: str, what: str, expected: str = "", found: str = "", *, mend: str = "") -> Fault:
        """A finding that calls for this error."""
        if "://" in where and any(words in f"{what} {found}" for words in _ABSENT):
            mend = f"{mend}{'; ' * bool(mend)}{TRY_AGAIN}"
        return Fault(error=cls.__name__, where=where, what=what, expected=expected, found=found, mend=mend)

    @classmethod
    def of(cls: type[_Error], where: str, what: str, expected: str = "", found: str = "", *, mend: str) -> _Error:
        """This error, of one finding."""
        fault = cls.fault(where, what, expected, found, mend=mend)
        return cls(f"{fault.line()}; {fault.mend}", [fault])


class CheckpointNotFound(ReshardError):
    """The folder, tag or file that was named does not exist."""


class CheckpointDamaged(ReshardError):
    """Files are missing, truncated, contradict each other or declare what they do not hold."""


class ChecksumMismatch(CheckpointDamaged):
    """Bytes that were read do not have the checksum that the file recorded when it was written."""


class FingerprintMismatch(ReshardError):
    """What lies in the engine's memory after a load is not what was read from the files."""


class UnsafePickle(ReshardError):
    """A pickle names a call or an import that reading a checkpoint never makes."""


class TrustRequired(UnsafePickle):
    """A value is of a class outside the allow-list; the user can accept the class by name."""


class ModelMismatch(ReshardError):
    """The model's parameters and the checkpoint's differ in name, shape or trainability."""


class ParamGroupMismatch(ReshardError):
    """The optimizer's param groups cannot be matched with the checkpoint's without a guess."""


class ScheduleMismatch(ReshardError):
    """Learning rates, schedule, weight decay or batch size of run and checkpoint differ, and must not."""


class UnsupportedLayout(ReshardError):
    """A layout, format or option that is not supported, and what to do instead."""


class ConfigError(ReshardError):
    """A setting is unknown, of the wrong type or out of range."""


class PrepareError(ReshardError):
    """Optimizer, scheduler and configuration cannot be prepared as they were asked for, or not in this order."""


class ReadFailed(ReshardError):
    """The operating system failed to read bytes that the file's size promises."""


class WriteFailed(ReshardError):
    """The operating system failed to write: nothing takes the output's name before all of it is on the disk."""


class DeviceFailed(ReshardError):
    """A device has no memory left for the scratch of a load, or failed while bytes were brought to it; or the host."""


class EngineUnusable(ReshardError):
    """A load failed after bytes had moved: stepping or saving would make the damage permanent."""


class HookError(ReshardError):
    """A patch cannot be installed as it was declared."""


class RankLost(ReshardError):
    """Another rank has ended, or does not answer within the timeout of its process group."""


class InternalError(ReshardError):
    """Something that should never happen did; the report names the rank and the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One finding about a checkpoint, a model or a setting.

    `error` is the name of the exception class that this fault calls for; `where` a file, parameter or
    key; `mend` the command or line that puts it right. Faults are compared and sorted, so that every
    rank that has gathered the same faults raises the same text.
    """

    error: str
    where: str
    what: str
    expected: str = ""
    found: str = ""
    mend: str = ""

    def __post_init__(self) -> None:
        for name in ("where", "what", "expected", "found", "mend"):
            object.__setattr__(self, name, without_secrets(getattr(self, name)))

    def line(self) -> str:
        both = (("expected", self.expected), ("found", self.found))
        told = ", ".join(f"{word} {value}" for word, value in both if value)
        return f"{self.where}: {self.what}" + (f" ({told})" if told else "")


_MEND = {
    "UnsafePickle": "do not load this file elsewhere either: ask whoever wrote it",
    "UnsupportedLayout": "load it with the framework and layout that wrote it",
}


def faults_of(error: ReshardError) -> list[Fault]:
    """An error as faults: its own, or one made of its text, whose beginning names the file."""
    if error.faults:
        return list(error.faults)
    where, _, what = str(error).partition(": ")
    mend = _MEND.get(type(error).__name__, "restore the file from a copy, or load another tag")
    return [Fault(error=type(error).__name__, where=where, what=what or where, mend=mend)]


_SHORT = ("can't start new thread", "can't allocate memory")


@contextmanager
def collected(faults: list[Fault]) -> Iterator[None]:
    """Run a block to its end, or to the error that ends it, whose faults are added to `faults`."""
    try:
        yield
    except ReshardError as error:
        faults += faults_of(error)


def is_short(error: BaseException) -> bool:
    """Whether the host has no memory, or no thread, left, as Python says it, or torch (c10/core/alloc_cpu.cpp)."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(words in said for words in _SHORT)


def as_faults(error: Exception, *, where: str) -> list[Fault]:
    """Any exception as faults, so that other ranks can be told; one that nobody foresaw is an InternalError."""
    if isinstance(error, ReshardError):
        return faults_of(error)
    if is_short(error):
        mend = 'give it more, or let it use less: "memory_mib" and "threads", or --memory, --threads and --processes'
        left = "memory" if _SHORT[0] not in str(error) else "thread"
        return [DeviceFailed.fault(where, f"no {left} is left on the host: {error}".rstrip(": "), mend=mend)]
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    if isinstance(error, OSError):
        named = f": {error.filename}" if error.filename is not None else ""
        what = f"the system refuses what it needs: {error.strerror or error}{named} ({place})"
        mend = "see the limits of this process (ulimit -a), its folder and TMPDIR"
        return [ReadFailed.fault(where, what, mend=mend)]
    return [
        InternalError.fault(
            where,
            f"{type(error).__name__}: {error} ({place})",
            mend="report this with the checkpoint's `ds-reshard inspect` output",
        )
    ]


def only_as_saved(faults: Sequence[Fault]) -> bool:
    """True if there are faults, and none of them is one at the layout that was saved."""
    return bool(faults) and all(
        fault.error == UnsupportedLayout.__name__ or fault.mend.startswith(AS_SAVED) for fault in faults
    )


# When faults of several classes meet, the first of this list names the exception: the cause before
# its consequences (a truncated shard is reported as damage, not as the mismatch that follows from it).
_PRECEDENCE: tuple[type[ReshardError], ...] = (
    InternalError,
    ConfigError,
    CheckpointNotFound,
    UnsupportedLayout,
    UnsafePickle,
    TrustRequired,
    CheckpointDamaged,
    ReadFailed,
    WriteFailed,
    DeviceFailed,
    ChecksumMismatch,
    FingerprintMismatch,
    ModelMismatch,
    ParamGroupMismatch,
    ScheduleMismatch,
    PrepareError,
    HookError,
    RankLost,
    EngineUnusable,
    ReshardError,
)
_BY_NAME: dict[str, type[ReshardError]] = {cls.__name__: cls for cls in _PRECEDENCE}
_SHOWN = 40


def _order(fault: Fault) -> tuple[int, str, str, str, str, str]:
    rank = _PRECEDENCE.index(_BY_NAME[fault.error])
    return rank, fault.where, fault.what, fault.expected, fault.found, fault.mend


def damaged(path: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(path, what, expected, found, mend="restore the file, or load another tag")


def fail(path: str, what: str, expected: str, found: str) -> CheckpointDamaged:
    fault = damaged(path, what, expected, found)
    return CheckpointDamaged(fault.line(), [fault])


def wrong_value(where: str, expected: str, value: object) -> Fault:
    """A setting, named by `where`, whose value is of the wrong type or out of its range."""
    return ConfigError.fault(
        where, "has a value that is not allowed", expected, repr(value), mend=f"correct it: {where} takes {expected}"
    )


_TRUST = ", or by --trust "


def trusting(names: Iterable[str]) -> str:
    """How to accept classes by their names: one setting that has all of them."""
    classes = list(dict.fromkeys(names))
    said, them = ("the class is", "it") if len(classes) == 1 else ("the classes are", "them")
    listed = ", ".join(f'"{name}"' for name in classes)
    return (
        f'if {said} your own, accept {them} by "trust": [{listed}] in the "ds_reshard" section of the '
        f"DeepSpeed JSON, without DeepSpeed in DS_RESHARD_SETTINGS{_TRUST}{' --trust '.join(classes)}"
    )


def mends_of(faults: Sequence[Fault]) -> list[str]:
    """What mends each fault: of classes that need trust one setting, alike for all of them, as a second replaces it."""
    classes = [fault.mend.rpartition(_TRUST)[2] for fault in faults if _TRUST in fault.mend]
    return [trusting(classes) if _TRUST in fault.mend else fault.mend for fault in faults]


def error_of(faults: Iterable[Fault], *, subject: str) -> ReshardError:
    """One error that lists every fault, of which there is one or more.

    The text depends on nothing but the set of faults and `subject`, so ranks that hold the same faults
    raise the same error.
    """
    found = sorted(set(faults), key=_order)
    lines = [f.line() for f in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"... and {len(found) - _SHOWN} more")
    mends = [mend for mend in dict.fromkeys(mends_of(found)) if mend]
    body = "\n  ".join(lines)
    tail = "".join(f"\n  To mend: {mend}" for mend in mends)
    told = f"{subject}: {len(found)} fault{'s' if len(found) > 1 else ''} found\n  {body}{tail}"
    return _BY_NAME[found[0].error](told, found)


def raise_faults(faults: Iterable[Fault], *, subject: str) -> None:
    """Raise the one error that lists every fault, or return when there is none."""
    found = list(faults)
    if found:
        raise error_of(found, subject=subject)
