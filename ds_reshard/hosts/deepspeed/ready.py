"""The reports of all ranks before a load changes anything, and the errors if they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.containers.digests import digest
from ds_reshard.errors import Fault, InternalError, raise_faults
from ds_reshard.formats.zero.shards import ZeroShards, compare_checksums, compare_signatures, rank_independent_text
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.find_checkpoint import Found
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.resume import Resume
from ds_reshard.operations.ranks import RankReport, Steps, attempt, file_faults, gather
from ds_reshard.resume.policy import ResumePolicy, differences, policy_differences

_BUILD_ALIKE = "give every rank the same DeepSpeed config and build the same engine"


@dataclass(slots=True)
class Decision:
    """This rank's decision on a load: who loads, and how; `files` has a digest of each shard opened to decide."""

    resume: Resume | None = None
    loader: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    shards: ZeroShards | None = None
    prepared: Prepared | None = None

    @property
    def reshards_states(self) -> bool:
        """True if optimizer states are loaded into another layout, so that all ranks must have the same ones."""
        return self.prepared is not None and self.resume is not None and self.resume.request.load_optimizer


class ReadinessReport(NamedTuple):
    """One rank's report before a load changes anything; its size does not depend on the model.

    `arguments` are those of the load, None if ds_reshard does not handle it. `route` is a text of the settings
    that decide who loads, `loader` is who loads, and `reshards_states` is true if optimizer states change their layout.
    `signatures` are digests of the facts in the model and optimizer shards that this rank opened; `shard_checksums`
    pairs a digest of the checksums of each optimizer shard with its name. `fingerprinted` is a column of the
    grid, with a digest of the names of tensors whose fingerprints its ranks will add up. `file_sets` pairs a digest of
    paths with a digest of contents, for the files that every rank reads, and for the shards that this rank opened;
    `files` has the path of each of these shards, with a digest of its contents.
    """

    route: str = ""
    policy: ResumePolicy | None = None
    loader: str = ""
    arguments: Mapping[str, object] | None = None
    reshards_states: bool = False
    signatures: frozenset[tuple[str, bytes]] = frozenset()
    shard_checksums: frozenset[tuple[bytes, str]] = frozenset()
    fingerprinted: tuple[int, int] | None = None
    file_sets: frozenset[tuple[bytes, bytes]] = frozenset()
    files: frozenset[tuple[str, bytes]] = frozenset()


def check_ranks_agree(
    reports: list[RankReport], steps: Steps, found: Found, decision: Decision, request: Request
) -> None:
    """Raise the same error on every rank if any rank is not ready, or if ranks differ. Collective."""
    subject = f"loading {request.load_dir}"
    listing = found.checkpoint.listing if found.checkpoint is not None else found.listing
    folder = listing.folder if listing is not None else request.load_dir
    ready = [one.value for one in reports if isinstance(one.value, ReadinessReport)]
    if any(one.step == 1 and one.faults for one in reports):
        steps.raise_first(reports)
    arguments = [one.arguments for one in ready if one.arguments is not None]
    mend = "call load_checkpoint with the same arguments on every rank: broadcast those of rank 0, for example"
    raise_faults(differences(arguments, where="load_checkpoint", mend=mend), subject="loading")
    raise_faults(policy_differences([one.policy for one in ready if one.policy is not None]), subject=subject)
    if len({one.route for one in ready if one.route}) > 1:  # a rank without a route has reported a fault
        raise_faults([_loader_fault(request.load_dir)], subject=subject)
    failed = any(one.faults for one in reports)
    if not failed and len({one.loader for one in ready}) > 1:
        raise_faults([_loader_fault(folder)], subject=f"loading {folder}")
    if not failed and _has_conflicts(one.fingerprinted for one in ready if one.fingerprinted is not None):
        what = "ranks hold parts of other tensors"
        raise_faults([InternalError.fault(folder, what, mend=_BUILD_ALIKE)], subject=f"loading {folder}")
    if not failed and _has_conflicts(pair for one in ready for pairs in (one.file_sets, one.files) for pair in pairs):
        _refuse_other_files(found, decision, subject=f"loading {folder}")
    # Decide from the gathered reports only: a rank that failed to open its files has no checkpoint, but must still take
    # part in the next collective.
    both = (pairs for one in ready for pairs in (one.signatures, one.shard_checksums))
    differ = _has_conflicts(pair for pairs in both for pair in pairs)
    if any(one.signatures for one in ready) and (failed or differ):
        states = any(one.reshards_states for one in ready)
        reports = _add_shard_faults(reports, decision.shards, folder, states=states)
    steps.raise_first(reports)


def _has_conflicts(pairs_of_ranks: Iterable[tuple[object, object]]) -> bool:
    """True if two pairs have the same name, but different values."""
    pairs = set(pairs_of_ranks)
    return len(pairs) > len({name for name, _ in pairs})


def _add_shard_faults(
    reports: list[RankReport], shards: ZeroShards | None, folder: str, *, states: bool
) -> list[RankReport]:
    """Compare the shards of all ranks; return the reports with the faults added as a last report. Collective."""
    shards_by_rank = gather((shards.signatures, shards.checksums) if shards is not None else ({}, {}))
    last = max(one.step for one in reports)
    faults = compare_signatures({k: v for one, _ in shards_by_rank for k, v in one.items()}, folder, states=states)
    faults += compare_checksums({k: v for _, one in shards_by_rank for k, v in one.items()}, folder)
    return [*reports, RankReport(last, f"loading {folder}", tuple(faults), None)]


def _refuse_other_files(found: Found, decision: Decision, *, subject: str) -> None:
    """Raise on every rank if ranks read different files of one name. Collective.

    In a model file that DeepSpeed loads, only the entries that all ranks share must be equal: each node may have saved
    its own file, with entries of the script and statistics of its own batches.
    """

    def digests() -> dict[str, bytes]:
        models = (found.checkpoint.model, *found.checkpoint.stages) if found.checkpoint is not None else ()
        alike = {model.path: digest(rank_independent_text(model)) for model in models if decision.loader == "DeepSpeed"}
        return {**found.prints, **decision.files, **alike}

    own_digests, faults, _ = attempt(digests)
    by_rank = gather((faults, own_digests or {}))
    raise_faults([fault for of_rank, _ in by_rank for fault in of_rank], subject=subject)
    raise_faults(file_faults([files for _, files in by_rank]), subject=subject)


def _loader_fault(where: str) -> Fault:
    return InternalError.fault(where, "ranks disagree on who loads", mend=_BUILD_ALIKE)
