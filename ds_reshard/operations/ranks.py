"""Collectives that let all ranks act and fail alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from hashlib import blake2b
from operator import xor
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ds_reshard.containers.digests import MAP_OF_NAMES, digest, digests
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
    """Set the timeout of every process group's collectives inside the block; None leaves them as they are.

    Raises ConfigError if a group's timeout cannot be set: its backend is not one of torch's, or torch is too old.
    """
    import torch
    import torch.distributed as dist

    if seconds is None or not (dist.is_available() and dist.is_initialized()):
        yield
        return
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = {
        id(backend): backend for group in groups for backend in map(group._get_backend, group._device_types)
    }.values()
    if not all(hasattr(backend, "_set_default_timeout") and hasattr(backend, "options") for backend in backends):
        where, what = "timeout_s", "the timeout of a process group cannot be set here"
        found = f"torch {torch.__version__}, {', '.join(sorted({type(backend).__name__ for backend in backends}))}"
        mend = "leave it out, and give torch.distributed.init_process_group a timeout"
        raise error_of([ConfigError.fault(where, what, "groups of gloo or NCCL", found, mend=mend)], subject=where)
    before = [(backend, backend.options._timeout) for backend in backends]
    try:
        for backend, _ in before:
            backend._set_default_timeout(timedelta(seconds=seconds))
        yield
    finally:
        for backend, timeout in before:
            backend._set_default_timeout(timeout)


@contextmanager
def collective() -> Iterator[None]:
    """Wrap a collective: raise RankLost if another rank has ended or does not answer.

    Gloo raises RuntimeError, at once if a connection was closed, else after the group's timeout; NCCL ends the process
    after the timeout. If a value cannot be unpickled, another rank runs another version: that raises ConfigError.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        what, found = (
            "cannot read another rank's message: that rank runs another version of ds_reshard",
            str(error)[:200],
        )
        raise ConfigError.of(f"rank {rank()}", what, found=found, mend=_ONE_VERSION) from error
    except RuntimeError as error:
        what = "a rank has ended, or has not answered within timeout_s, or the timeout of init_process_group"
        mend = "find the rank whose log ended first, or that runs without ds_reshard, correct it, and start again"
        raise RankLost.of(f"rank {rank()}", what, "an answer of each rank", str(error)[:200], mend=mend) from error


def gather(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in rank order. Raises ConfigError if ranks run several versions. Collective."""
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
    return [rank_value for _, rank_value in values]


def broadcast(value: T, group: ProcessGroup | None = None) -> T:
    """Return the value of the first rank of the group, on every rank. Collective.

    A rank whose version differs from the first one's enters the next `gather`, where all ranks see the difference.
    """
    import torch.distributed as dist

    if world_size(group) == 1:
        return value
    values: list[object] = [(VERSION, value)]
    with collective():
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    version, result = cast(tuple[str, T], values[0])
    if version != VERSION:
        gather(None, group)
    return result


def _other_versions(versions: Sequence[str]) -> ConfigError:
    """Return the error of ranks that run several versions; it names one rank of each."""
    first = {version: number for number, version in reversed([*enumerate(versions)])}
    found = ", ".join(
        f"{version} on rank {number}" for version, number in sorted(first.items(), key=lambda item: item[1])
    )
    return ConfigError.of("ds_reshard", "ranks run different versions of it", "one version", found, mend=_ONE_VERSION)


def attempt(work: Callable[[], T]) -> tuple[T | None, list[Fault], Exception | None]:
    """Run `work`; return its value, or its exception as faults, so that the rank still reaches the next collective."""
    try:
        return work(), [], None
    except Exception as error:
        return None, as_faults(error, where=f"rank {rank()}"), error


def agree(
    faults: Iterable[Fault], group: ProcessGroup | None = None, *, subject: str, cause: Exception | None = None
) -> None:
    """Raise the same error on every rank if any rank has a fault. Collective."""
    raise_caused(gather_faults(faults, group), subject=subject, cause=cause)


def run_on_all(work: Callable[[], T], group: ProcessGroup | None = None, *, subject: str) -> T:
    """Return `work()` once it has succeeded on all ranks; else raise the faults of all on every rank. Collective."""
    value, faults, cause = attempt(work)
    agree(faults, group, subject=subject, cause=cause)
    return value  # type: ignore[return-value]


def gather_faults(faults: Iterable[Fault], group: ProcessGroup | None = None) -> list[Fault]:
    """Return the faults of all ranks, on every rank. Collective."""
    return [fault for rank_faults in gather(list(faults), group) for fault in rank_faults]


def file_faults(read: Iterable[Mapping[str, bytes]]) -> list[Fault]:
    """Return a fault for each file whose digests differ between ranks; `read` has each rank's digests by path."""
    first: dict[str, bytes] = {}
    faults = []
    for number, rank_digests in enumerate(read):
        for path, file_digest in rank_digests.items():
            if first.setdefault(path, file_digest) == file_digest:
                continue
            what, found = "ranks see different files of this name", f"another on rank {number}"
            if path == MAP_OF_NAMES:
                what, mend = "ranks have different maps of names", "give every rank the same map"
                faults.append(ConfigError.fault(path, what, "one", found, mend=mend))
            else:
                faults.append(CheckpointDamaged.fault(path, what, "one", found, mend=SEEN_BY_ALL))
    return faults


def unseen_faults(where: str, seen: Sequence[bool]) -> list[Fault]:
    """Return a fault if some ranks see a checkpoint and others do not; `seen` has one entry per rank."""
    if all(seen) or not any(seen):
        return []
    ranks = ", ".join(str(number) for number, is_seen in enumerate(seen) if not is_seen)
    what, mend = "is not seen by every rank", "put it where every rank reads it under this path"
    return [CheckpointNotFound.fault(where, what, "the same folder", f"not by rank {ranks}", mend=mend)]


def agree_files(read: Mapping[str, bytes], group: ProcessGroup | None = None, *, subject: str) -> None:
    """Raise on every rank if ranks have read different files of one name; `read` has digests by path. Collective."""
    if len(set(gather(digest(sorted(read.items())), group))) > 1:
        raise_faults(file_faults(gather(read, group)), subject=subject)


@contextmanager
def same_files(group: ProcessGroup | None = None, *, subject: str) -> Iterator[None]:
    """Compare the files that ranks open inside the block, as `agree_files` does, if it raises nothing. Collective."""
    with digests() as read:
        yield
    agree_files(read, group, subject=subject)


def raise_caused(faults: Iterable[Fault], *, subject: str, cause: Exception | None) -> None:
    """Raise faults that all ranks know already, with this rank's own exception as the cause, if there is one."""
    try:
        raise_faults(faults, subject=subject)
    except ReshardError as error:
        raise error from cause


class RankReport(NamedTuple):
    """One rank's report after its steps: the number and subject of its last step, its faults, and a value."""

    step: int
    subject: str
    faults: tuple[Fault, ...]
    value: object


class Steps:
    """One rank's steps between two collectives, so that one collective serves for all of them.

    After a failed step the others are skipped. Every rank takes the same steps; all ranks then raise the faults of the
    earliest step that failed on any rank.
    """

    def __init__(self) -> None:
        self._step = 0
        self._subject = ""
        self._faults: list[Fault] = []
        self._cause: Exception | None = None

    def take(self, work: Callable[[], T], *, subject: str, always: bool = False) -> T | None:
        """Return `work()`; None if it fails, or if an earlier step has failed.

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
        """Return the reports of all ranks, on every rank; `value` is this rank's. Collective."""
        return gather(RankReport(self._step, self._subject, tuple(self._faults), value))

    def raise_first(self, reports: Iterable[RankReport]) -> None:
        """Raise the faults of the earliest step that failed on any rank; the error is the same on every rank."""
        failed = [report for report in reports if report.faults]
        if failed:
            first = min(failed, key=lambda report: report.step)
            faults = [fault for report in failed if report.step == first.step for fault in report.faults]
            raise_caused(faults, subject=first.subject, cause=self._cause if self._step == first.step else None)

    def agree(self) -> None:
        """Raise the same error on every rank if a step of any rank has failed. Collective."""
        self.raise_first(self.gather())


def read_together(
    read: Callable[[], tuple[T, Outcome]],
    group: ProcessGroup | None = None,
    *,
    replica: int,
    shared: Callable[[], bool] = lambda: False,
    subject: str,
) -> tuple[T, Outcome]:
    """Return `read()` once the checksums of all records that ranks have read are right. Collective.

    Ranks that read the same copy have the same `replica`; the checksums of their parts of a record are combined, by one
    number per rank if all is well. If the parts do not tile a record, all ranks that read of it read it again as a
    whole. `shared` tells if several ranks may have read the same bytes, so that one number proves nothing. Every rank
    raises the faults of all.
    """
    with phase("read") as nbytes:
        value, faults, cause = attempt(read)
        outcome = value[1] if value is not None else Outcome()
        nbytes.append(outcome.bytes_read)
    settled, checksum_faults, failed = attempt(lambda: settle(partial_sums(outcome)))
    pending, mismatched = settled or ([], [])
    sums = None if pending and shared() else Sums.of(pending, replica)
    reports = gather((faults + checksum_faults + outcome.faults + mismatched, sums), group)
    raise_caused([fault for from_rank, _ in reports for fault in from_rank], subject=subject, cause=cause or failed)
    if not are_complete([from_rank for _, from_rank in reports]):
        everyone = gather((pending, replica), group)
        combined, again = combine([parts if other == replica else [] for parts, other in everyone])
        combined += read_again(pending, again)
        agree(combined, group, subject=subject)
    assert value is not None
    return value


class Sums(NamedTuple):
    """All partial checksums of one rank in two numbers; over all ranks both cancel to zero if every record is intact.

    `crc` is the exclusive or of the rank's partial checksums, each multiplied by a number derived from its record.
    crc32 is linear, so the parts of a record combine to its checksum; the rank that read the first byte adds the
    recorded checksum, and the two cancel. `spans` is a sum of numbers derived from the ends of the spans, which cancel
    if spans follow each other and cover the record.
    """

    crc: int
    spans: int

    @classmethod
    def of(cls, sums: Iterable[PartialSum], replica: int) -> Sums:
        """Return the sums of one rank's partial checksums; ranks that read the same copy have the same `replica`."""
        crc, rows = 0, list[tuple[int, ...]]()
        for part in sums:
            record = part.record
            seed, factor = _seed_and_factor(repr((os.path.basename(record.path), *record[1:], replica)))
            total = part.crc32
            for span in part.spans:
                rows.append((seed, *span))
                if span.start == 0:
                    assert record.crc32 is not None
                    total ^= record.crc32
                    rows.append((seed, record.nbytes, 0, 1, 0))
            crc ^= _multiply(total, factor | 1)
        return cls(crc, _sum_of_ends(rows))


def are_complete(sums: Sequence[Sums | None]) -> bool:
    """True if all ranks together read intact, complete records; None stands for a rank that cannot tell."""
    reported = [sums_of_rank for sums_of_rank in sums if sums_of_rank is not None]
    crc = reduce(xor, (sums_of_rank.crc for sums_of_rank in reported), 0)
    return len(reported) == len(sums) and crc == 0 and sum(sums_of_rank.spans for sums_of_rank in reported) % 2**64 == 0


def _seed_and_factor(record: str) -> tuple[int, int]:
    """Return two numbers of 64 bits derived from a record."""
    digest = blake2b(record.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _sum_of_ends(rows: Sequence[tuple[int, ...]]) -> int:
    """Return the sum over all spans, modulo 2**64, of the number of the stop minus that of the start.

    Each row is (seed of the record, start, stop, times, step). The number of an offset is the splitmix64 mix of both.
    """
    if not rows:
        return 0
    import numpy  # not with the module, which `import ds_reshard.auto` imports

    seeds, starts, stops, times, steps = numpy.array(rows, dtype=numpy.uint64).T
    row_number = numpy.repeat(numpy.arange(len(rows)), times.astype(numpy.int64))
    firsts = numpy.repeat(numpy.cumsum(times) - times, times.astype(numpy.int64))
    shifts = (numpy.arange(len(row_number), dtype=numpy.uint64) - firsts) * steps[row_number] + seeds[row_number]
    return int((_mixed(stops[row_number] + shifts) - _mixed(starts[row_number] + shifts)).sum())


def _mixed(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    import numpy

    values = (values ^ values >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    mixed: NDArray[numpy.uint64] = values ^ values >> numpy.uint64(31)
    return mixed


def _multiply(value: int, factor: int) -> int:
    """Return the product of two polynomials over the field of two elements; it is linear and injective in `value`."""
    product = 0
    while value:
        lowest = value & -value
        product ^= factor * lowest
        value ^= lowest
    return product
