"""The load of a run: the steps that every host takes, from top to bottom.

    read_run    the run as plain values, its settings and its resume policy         every rank
    find        rank 0 finds the checkpoint; one broadcast; every rank reads its headers
    choose      tensors, groups and states matched; who loads; the reads planned     every rank
    agreed      all that is wrong on any rank, raised on every rank; nothing has changed. If a rank finds what only the
                saved layout can hold, and this run has it, the framework loads on every rank: `hand_over`, agreed again
    fill        bytes are read, verified and installed, or the framework loads; then the report of what the run holds

A host fills in the steps as a `HostLoad`. Preflight is the load up to `agreed`, of a run that has not started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

from ds_reshard.containers.digests import digests
from ds_reshard.errors import Fault, InternalError, only_as_saved, raise_faults
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.operations.ranks import RankReport, Steps, attempt, broadcast, file_faults, gather, rank, unseen_faults
from ds_reshard.operations.watching import phase
from ds_reshard.resume.policy import ResumePolicy, differences, policy_differences


class Found(Protocol):
    """What a host found of a checkpoint. `complete` is True if rank 0 has read all that every rank needs."""

    @property
    def complete(self) -> bool: ...

    def for_broadcast(self: F) -> F:
        """What the other ranks are sent; small, whatever the size of the model."""
        ...

    def failed(self: F, faults: Sequence[Fault]) -> F:
        """The same with faults, which every rank then raises."""
        ...


F = TypeVar("F", bound=Found)
C = TypeVar("C")
R = TypeVar("R", covariant=True)


class HostLoad(Protocol[F, C, R]):
    """One load into a run of a host. `load` calls these methods in this order; a method may raise on one rank alone.

    A host's `choose` takes its own steps, so that a failure of one rank stops none of the others before they agree.
    `agreed` and `fill` are collective, and so is `compare_shards`, which is called only after a difference. `hand_over`
    changes the choice, and checks what the framework will read in place of ds_reshard.
    """

    where: str
    built_alike: str
    """The line that mends ranks whose runs were built in different ways."""

    def read_run(self) -> None: ...
    def in_force(self) -> AbstractContextManager[object]: ...
    def nothing(self) -> F: ...
    def find(self) -> F: ...
    def open(self, found: F) -> F: ...
    def choose(self, found: F, steps: Steps) -> C: ...
    def readiness(self, found: F, choice: C, files: Mapping[str, bytes]) -> ReadinessReport: ...
    def folder(self, found: F) -> str: ...
    def file_digests(self, found: F, choice: C, files: Mapping[str, bytes]) -> Mapping[str, bytes]: ...
    def compare_shards(self, found: F, choice: C, states: bool) -> list[Fault]: ...
    def hand_over(self, found: F, choice: C) -> None: ...
    def agreed(self, found: F, choice: C) -> None: ...
    def fill(self, found: F, choice: C) -> R: ...


def load(host: HostLoad[F, C, R]) -> R:
    """Load a checkpoint into a run. Collective: every rank returns, or every rank raises the same error."""
    steps = Steps()
    steps.take(host.read_run, subject=f"loading {host.where}")
    with host.in_force():
        with phase("prepare"):
            found, choice = prepare(host, steps)
        return host.fill(found, choice)


@gc_disabled()
def prepare(host: HostLoad[F, C, R], steps: Steps) -> tuple[F, C]:
    """Find the checkpoint, choose who loads it, and agree; the run has not changed. Collective."""
    run_is_known, subject = not steps.failed, f"loading {host.where}"
    found = _find(host, run_is_known=run_is_known)
    with digests() as files:
        choice = host.choose(found, steps)
    details = Details(
        files=lambda: host.file_digests(found, choice, files),
        shards=lambda states: host.compare_shards(found, choice, states),
    )
    folder = host.folder(found)

    def agree() -> bool:
        report = None
        if run_is_known:
            ready = steps.take(lambda: host.readiness(found, choice, files), subject=subject, always=True)
            report = ready or ReadinessReport()
        return check_ranks_agree(report, steps, details, load=host.where, folder=folder, alike=host.built_alike)

    if not agree():
        with digests() as opened:
            steps.take(lambda: host.hand_over(found, choice), subject=f"loading {folder}")
        files.update(opened)
        agree()
    host.agreed(found, choice)
    return found, choice


def _find(host: HostLoad[F, C, R], *, run_is_known: bool) -> F:
    """Rank 0 finds the checkpoint and tells the others; every rank then reads its headers. Collective."""
    found = host.nothing()
    if run_is_known and rank() == 0:
        result, faults, _ = attempt(host.find)
        found = result if result is not None else found.failed(faults)
    shared = broadcast(found.for_broadcast())
    if not run_is_known:
        return shared
    if rank() == 0 and found.complete:
        return found
    result, faults, _ = attempt(lambda: host.open(shared))
    return result if result is not None else shared.failed(faults)


class ReadinessReport(NamedTuple):
    """One rank's report before a load changes anything; its size does not depend on the model.

    `arguments` are those of the load, None if ds_reshard does not handle it. `route` is a text of the settings that
    decide who loads, `loader` is who loads, `seen` is False if this rank sees no checkpoint, `reshards_states` is true
    if optimizer states change their layout. With `can_hand_over` the framework could load the checkpoint, too: this run
    has the layout that was saved. `signatures` are digests of the facts in the model and optimizer shards that this
    rank opened; `shard_checksums` pairs a digest of the checksums of each optimizer shard with its name.
    `fingerprinted` is a column of the grid, with a digest of the names of tensors whose fingerprints its ranks add up.
    `file_sets` pairs a digest of paths with a digest of contents, for the files that every rank reads, and for the
    shards that this rank opened; `files` has the path of each of these shards, with a digest of its contents.
    """

    route: str = ""
    policy: ResumePolicy | None = None
    loader: str = ""
    can_hand_over: bool = False
    arguments: Mapping[str, object] | None = None
    seen: bool = True
    reshards_states: bool = False
    signatures: frozenset[tuple[str, bytes]] = frozenset()
    shard_checksums: frozenset[tuple[bytes, str]] = frozenset()
    fingerprinted: tuple[int, int] | None = None
    file_sets: frozenset[tuple[bytes, bytes]] = frozenset()
    files: frozenset[tuple[str, bytes]] = frozenset()


class Details(NamedTuple):
    """What ranks exchange only after a difference: digests of files by path; `shards(True)` compares scalars, too."""

    files: Callable[[], Mapping[str, bytes]]
    shards: Callable[[bool], list[Fault]]


def check_ranks_agree(
    report: ReadinessReport | None, steps: Steps, details: Details, *, load: str, folder: str, alike: str
) -> bool:
    """Raise the same error on every rank if any rank is not ready, or if ranks differ. Collective.

    Returns False if only the framework can load what they have found, and all say that it could. A rank that could not
    describe its run reports None: its faults come before all others. `load` is the folder that was asked for, `folder`
    that of the checkpoint, `alike` the line that mends ranks that were built in different ways.
    """
    reports, subject = steps.gather(report), f"loading {load}"
    ready = [one.value for one in reports if isinstance(one.value, ReadinessReport)]
    if any(one.value is None for one in reports):
        steps.raise_first(reports)
    arguments = [one.arguments for one in ready if one.arguments is not None]
    mend = "call load_checkpoint with the same arguments on every rank: broadcast those of rank 0, for example"
    raise_faults(differences(arguments, where="load_checkpoint", mend=mend), subject="loading")
    raise_faults(policy_differences([one.policy for one in ready if one.policy is not None]), subject=subject)
    if len({one.route for one in ready if one.route}) > 1:  # a rank without a route has reported a fault
        raise_faults([loader_fault(load, alike)], subject=subject)
    failed, subject = any(one.faults for one in reports), f"loading {folder}"
    raise_faults([] if failed else unseen_faults(load, [one.seen for one in ready]), subject=f"loading {load}")
    can_hand_over = not failed and all(one.can_hand_over for one in ready)
    if not failed and len({one.loader for one in ready}) > 1:
        if can_hand_over:
            return False
        raise_faults([loader_fault(folder, alike)], subject=subject)
    if not failed and _has_conflicts(one.fingerprinted for one in ready if one.fingerprinted is not None):
        raise_faults([InternalError.fault(folder, "ranks hold parts of other tensors", mend=alike)], subject=subject)
    if not failed and _has_conflicts(pair for one in ready for pairs in (one.file_sets, one.files) for pair in pairs):
        if can_hand_over:
            return False
        _refuse_other_files(details.files, subject=subject)
    # From the reports alone: a rank that failed to open its files must still take part in the next collective.
    both = (pairs for one in ready for pairs in (one.signatures, one.shard_checksums))
    differ = _has_conflicts(pair for pairs in both for pair in pairs)
    if any(one.signatures for one in ready) and (failed or differ):
        faults = details.shards(any(one.reshards_states for one in ready))
        if can_hand_over and only_as_saved(faults):
            return False
        reports = [*reports, RankReport(max(one.step for one in reports), subject, tuple(faults), None)]
    steps.raise_first(reports)
    return True


def _has_conflicts(pairs_of_ranks: Iterable[tuple[object, object]]) -> bool:
    """True if two pairs have the same name, but different values."""
    pairs = set(pairs_of_ranks)
    return len(pairs) > len({name for name, _ in pairs})


def _refuse_other_files(files: Callable[[], Mapping[str, bytes]], *, subject: str) -> None:
    """Raise on every rank if ranks read different files of one name. Collective."""
    own_digests, faults, _ = attempt(files)
    by_rank = gather((faults, own_digests or {}))
    raise_faults([fault for of_rank, _ in by_rank for fault in of_rank], subject=subject)
    raise_faults(file_faults([digests for _, digests in by_rank]), subject=subject)


def loader_fault(where: str, alike: str) -> Fault:
    return InternalError.fault(where, "ranks disagree on who loads", mend=alike)
