"""What the ranks tell each other, so that all of them act and fail alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from hashlib import blake2b
from operator import xor
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ds_reshard.containers.digests import digest, digests
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    Fault,
    RankLost,
    ReshardError,
    as_faults,
    error_of,
    raise_faults,
)
from ds_reshard.execution.checksums import SEEN_BY_ALL, PartialSum, combine, partial_sums, read_again, settle
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.operations.watching import phase
from ds_reshard.version import VERSION

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_ONE_VERSION = "install the same version of ds_reshard on every node, and start again"


def rank(group: ProcessGroup | None = None) -> int:
    import torch.distributed as dist

    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def world_size(group: ProcessGroup | None = None) -> int:
    import torch.distributed as dist

    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def collective_timeout(seconds: int | None) -> Iterator[None]:
    """Inside, collectives of every process group wait so long for other ranks; None is as they were made.

    Raises ConfigError where a group's timeout cannot be set: a backend that torch does not bring, or a torch too old.
    """
    import torch
    import torch.distributed as dist

    if seconds is None or not (dist.is_available() and dist.is_initialized()):
        yield
        return
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = {id(one): one for group in groups for one in map(group._get_backend, group._device_types)}.values()
    if not all(hasattr(one, "_set_default_timeout") and hasattr(one, "options") for one in backends):
        where, what = "timeout_s", "the timeout of a process group cannot be set here"
        found = f"torch {torch.__version__}, {', '.join(sorted({type(one).__name__ for one in backends}))}"
        mend = "leave it out, and give torch.distributed.init_process_group a timeout"
        raise error_of([ConfigError.fault(where, what, "groups of gloo or NCCL", found, mend=mend)], subject=where)
    before = [(one, one.options._timeout) for one in backends]
    try:
        for one, _ in before:
            one._set_default_timeout(timedelta(seconds=seconds))
        yield
    finally:
        for one, timeout in before:
            one._set_default_timeout(timeout)


@contextmanager
def collective() -> Iterator[None]:
    """Around a collective: what the backend says where a rank has ended or does not answer, as RankLost.

    Gloo raises RuntimeError, at once where a connection was closed and else after the group's timeout; NCCL ends the
    process after it. What is told cannot be unpickled where its class is in another version alone: a ConfigError.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        what, found = "does not know what another rank tells, as another version of ds_reshard would", str(error)[:200]
        raise ConfigError.of(f"rank {rank()}", what, found=found, mend=_ONE_VERSION) from error
    except RuntimeError as error:
        what = "a rank has ended, or has not answered within timeout_s, or the timeout of init_process_group"
        mend = "see which rank's log ended first, and why, or runs without ds_reshard, and start again"
        raise RankLost.of(f"rank {rank()}", what, "an answer of each rank", str(error)[:200], mend=mend) from error


def gather(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order, on every rank; ConfigError where ranks run other versions. Collective."""
    import torch.distributed as dist

    size = world_size(group)
    if size == 1:
        return [value]
    values: list[tuple[str, T]] = [(VERSION, value)] * size
    with collective():
        dist.all_gather_object(values, (VERSION, value), group=group)
    versions = [version for version, _ in values]
    if len(set(versions)) > 1:
        raise _other_versions(versions)
    return [of_rank for _, of_rank in values]


def broadcast(value: T, group: ProcessGroup | None = None) -> T:
    """The value of the first rank of the group, on every rank. Collective.

    A rank of another version than the first goes on to what ranks gather next, where all see it.
    """
    import torch.distributed as dist

    if world_size(group) == 1:
        return value
    box: list[object] = [(VERSION, value)]
    with collective():
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    version, said = cast(tuple[str, T], box[0])
    if version != VERSION:
        gather(None, group)
    return said


def _other_versions(versions: Sequence[str]) -> ConfigError:
    """Ranks of several versions, one of each by name: they would not do the same."""
    first = {version: number for number, version in reversed([*enumerate(versions)])}
    found = ", ".join(
        f"{version} on rank {number}" for version, number in sorted(first.items(), key=lambda one: one[1])
    )
    return ConfigError.of("ds_reshard", "ranks run different versions of it", "one version", found, mend=_ONE_VERSION)


def attempt(work: Callable[[], T]) -> tuple[T | None, list[Fault], Exception | None]:
    """Run one rank's share of the work; what it raises comes back as faults, never past a collective."""
    try:
        return work(), [], None
    except Exception as error:
        return None, as_faults(error, where=f"rank {rank()}"), error


def agree(
    faults: Iterable[Fault], group: ProcessGroup | None = None, *, subject: str, cause: Exception | None = None
) -> None:
    """Raise the same error on every rank when any rank has a fault. Collective."""
    raise_caused(gather_faults(faults, group), subject=subject, cause=cause)


def run_on_all(work: Callable[[], T], group: ProcessGroup | None = None, *, subject: str) -> T:
    """What `work` gives on this rank, once it has succeeded on all; else its faults on every rank. Collective."""
    value, faults, cause = attempt(work)
    agree(faults, group, subject=subject, cause=cause)
    return value  # type: ignore[return-value]


def gather_faults(faults: Iterable[Fault], group: ProcessGroup | None = None) -> list[Fault]:
    """What any rank has found, on every rank. Collective."""
    return [fault for of_rank in gather(list(faults), group) for fault in of_rank]


def file_faults(read: Iterable[Mapping[str, bytes]]) -> list[Fault]:
    """A fault for each file of which ranks, in their order, have another digest than the first that read it."""
    first: dict[str, bytes] = {}
    faults = []
    for number, of_rank in enumerate(read):
        for path, said in of_rank.items():
            if first.setdefault(path, said) != said:
                what, found = "ranks see other files of this name", f"another on rank {number}"
                faults.append(CheckpointDamaged.fault(path, what, "one", found, mend=SEEN_BY_ALL))
    return faults


def unseen_faults(where: str, seen: Sequence[bool]) -> list[Fault]:
    """A fault where some ranks, in their order, see a checkpoint, and others do not."""
    if all(seen) or not any(seen):
        return []
    ranks = ", ".join(str(number) for number, there in enumerate(seen) if not there)
    what, mend = "is not seen by every rank", "put it where every rank reads it under this path"
    return [CheckpointNotFound.fault(where, what, "the same folder", f"not by rank {ranks}", mend=mend)]


def agree_files(read: Mapping[str, bytes], group: ProcessGroup | None = None, *, subject: str) -> None:
    """Raise on every rank where ranks have `read` other files of one name; a digest of each by its name. Collective."""
    if len(set(gather(digest(sorted(read.items())), group))) > 1:
        raise_faults(file_faults(gather(read, group)), subject=subject)


@contextmanager
def same_files(group: ProcessGroup | None = None, *, subject: str) -> Iterator[None]:
    """`agree_files` of what was opened inside, where that raises nothing. Collective."""
    with digests() as read:
        yield
    agree_files(read, group, subject=subject)


def raise_caused(faults: Iterable[Fault], *, subject: str, cause: Exception | None) -> None:
    """Raise what all ranks know already, from this rank's own exception where it has one."""
    try:
        raise_faults(faults, subject=subject)
    except ReshardError as error:
        raise error from cause


class RankReport(NamedTuple):
    """What one rank says after its steps: how far it came, what it found there, and a value for the others."""

    step: int
    subject: str
    faults: tuple[Fault, ...]
    value: object


class Steps:
    """One rank's steps between two collectives, so that one collective serves for all of them.

    After a failure the rest of the steps are passed over. Every rank takes the same steps, and all of them then raise
    what the earliest step that failed anywhere has found.
    """

    def __init__(self) -> None:
        self._step = 0
        self._subject = ""
        self._faults: list[Fault] = []
        self._cause: Exception | None = None

    def take(self, work: Callable[[], T], *, subject: str, always: bool = False) -> T | None:
        """What `work` gives; None where it fails, or where a step before it has failed.

        `always` is for work that other ranks wait for: it is done after a failure too.
        """
        if self._faults:
            return attempt(work)[0] if always else None
        self._step, self._subject = self._step + 1, subject
        value, self._faults, self._cause = attempt(work)
        return value

    @property
    def failed(self) -> bool:
        return bool(self._faults)

    def gather(self, value: object = None) -> list[RankReport]:
        """What each rank says, on every rank. Collective."""
        return gather(RankReport(self._step, self._subject, tuple(self._faults), value))

    def raise_first(self, told: Iterable[RankReport]) -> None:
        """Raise what the earliest failed step of any rank found; the same error on every rank."""
        failed = [one for one in told if one.faults]
        if failed:
            first = min(failed, key=lambda one: one.step)
            faults = [fault for one in failed if one.step == first.step for fault in one.faults]
            raise_caused(faults, subject=first.subject, cause=self._cause if self._step == first.step else None)

    def agree(self) -> None:
        """Raise the same error on every rank when a step of any rank has failed. Collective."""
        self.raise_first(self.gather())


def read_together(
    read: Callable[[], tuple[T, Outcome]],
    group: ProcessGroup | None = None,
    *,
    replica: int,
    shared: Callable[[], bool] = lambda: False,
    subject: str,
) -> tuple[T, Outcome]:
    """What `read` gives, once every record that any rank has read has its checksum. Collective.

    Ranks that read one and the same copy have the same `replica`: the parts of a record that they read are combined,
    by one number a rank where all is well. A record whose parts do not tile it is read again by all that read of it.
    `shared` says whether several ranks may have read the same bytes: one number then tells nothing. Every rank raises
    what any has found.
    """
    with phase("read") as nbytes:
        value, faults, cause = attempt(read)
        outcome = value[1] if value is not None else Outcome()
        nbytes.append(outcome.bytes_read)
    settled, found, failed = attempt(lambda: settle(partial_sums(outcome)))
    pending, mismatched = settled or ([], [])
    sums = None if pending and shared() else Sums.of(pending, replica)
    told = gather((faults + found + outcome.faults + mismatched, sums), group)
    raise_caused([fault for of_rank, _ in told for fault in of_rank], subject=subject, cause=cause or failed)
    if not are_complete([of_rank for _, of_rank in told]):
        everyone = gather((pending, replica), group)
        combined, again = combine([parts if other == replica else [] for parts, other in everyone])
        combined += read_again(pending, again)
        agree(combined, group, subject=subject)
    assert value is not None
    return value


class Sums(NamedTuple):
    """All partial sums of one rank in two numbers, which are zero over all ranks where every record is as it was saved.

    `crc` is the exclusive or, over the records, of what the rank read, multiplied by a number that is drawn from the
    record: crc32 is linear, so the parts of a record give its own checksum, which the rank adds that read its first
    byte. `spans` is a sum of numbers that are drawn from the ends of the spans: they cancel where spans follow each
    other and cover the record.
    """

    crc: int
    spans: int

    @classmethod
    def of(cls, sums: Iterable[PartialSum], replica: int) -> Sums:
        crc, rows = 0, list[tuple[int, ...]]()
        for one in sums:
            record = one.record
            seed, factor = _seed_and_factor(repr((os.path.basename(record.path), *record[1:], replica)))
            total = one.crc32
            for span in one.spans:
                rows.append((seed, *span))
                if span.start == 0:
                    assert record.crc32 is not None
                    total ^= record.crc32
                    rows.append((seed, record.nbytes, 0, 1, 0))
            crc ^= _multiply(total, factor | 1)
        return cls(crc, _sum_of_ends(rows))


def are_complete(sums: Sequence[Sums | None]) -> bool:
    """Whether what all ranks read are whole records with their checksums; None is of a rank that cannot tell."""
    said = [one for one in sums if one is not None]
    crc = reduce(xor, (one.crc for one in said), 0)
    return len(said) == len(sums) and crc == 0 and sum(one.spans for one in said) % 2**64 == 0


def _seed_and_factor(record: str) -> tuple[int, int]:
    """Two numbers of 64 bits that stand for a record."""
    digest = blake2b(record.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _sum_of_ends(rows: Sequence[tuple[int, ...]]) -> int:
    """The sum, modulo 2**64, of the number of each span's stop less that of its start.

    Each row is (seed of the record, start, stop, times, step). The number of an offset is the splitmix64 mix of both.
    """
    if not rows:
        return 0
    import numpy  # not with the module, which `import ds_reshard.auto` imports

    seeds, starts, stops, times, steps = numpy.array(rows, dtype=numpy.uint64).T
    which = numpy.repeat(numpy.arange(len(rows)), times.astype(numpy.int64))
    firsts = numpy.repeat(numpy.cumsum(times) - times, times.astype(numpy.int64))
    moved = (numpy.arange(len(which), dtype=numpy.uint64) - firsts) * steps[which] + seeds[which]
    return int((_mixed(stops[which] + moved) - _mixed(starts[which] + moved)).sum())


def _mixed(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    import numpy

    values = (values ^ values >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    mixed: NDArray[numpy.uint64] = values ^ values >> numpy.uint64(31)
    return mixed


def _multiply(value: int, factor: int) -> int:
    """The product of two polynomials over the field of two elements; it is linear in `value`, and one to one."""
    product = 0
    while value:
        lowest = value & -value
        product ^= factor * lowest
        value ^= lowest
    return product
