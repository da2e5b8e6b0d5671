"""What ranks say before anything changes, and what follows where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.containers.digests import digest
from ds_reshard.errors import Fault, InternalError, raise_faults
from ds_reshard.formats.zero.shards import ZeroShards, alike_on_all_ranks, compare_prints, compare_signatures
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.find_checkpoint import Found
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.resume import Resume
from ds_reshard.operations.ranks import RankReport, Steps, attempt, file_faults, gather
from ds_reshard.resume.policy import ResumePolicy, differences, policy_differences

_BUILD_ALIKE = "give every rank the same DeepSpeed config and build the same engine"


@dataclass(slots=True)
class Decision:
    """Which way a load takes, as this rank sees it; `files` has a digest of each shard that it opened to see that."""

    resume: Resume | None = None
    loader: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    shards: ZeroShards | None = None
    prepared: Prepared | None = None

    @property
    def reshards_states(self) -> bool:
        """Whether the optimizer's states are read for another layout, so that all ranks have to say them alike."""
        return self.prepared is not None and self.resume is not None and self.resume.request.load_optimizer


class ReadinessReport(NamedTuple):
    """What a rank says before anything changes; its size does not depend on the model.

    `given` are the arguments of the load, where ds_reshard has to do with it at all. `view` decides which way a rank
    takes, `loader` is who loads, `states` whether the optimizer's are cut anew. `signatures` are digests of what the
    model and optimizer shards say that this rank opened. `prints` is a digest of the checksums of each optimizer shard,
    with its name. `names` is a column of the grid, and a digest of the tensors whose fingerprints its ranks will add
    up. `sets` are digests of the paths of the files that say what all shards have alike, and of what is in them, and of
    the shards that this rank opened; `files` has the path of each of these, and a digest of what is in it.
    """

    route: str = ""
    policy: ResumePolicy | None = None
    loader: str = ""
    arguments: Mapping[str, object] | None = None
    reshards_states: bool = False
    signatures: frozenset[tuple[str, bytes]] = frozenset()
    shard_checksums: frozenset[tuple[bytes, str]] = frozenset()
    fingerprinted_names: tuple[int, int] | None = None
    file_sets: frozenset[tuple[bytes, bytes]] = frozenset()
    files: frozenset[tuple[str, bytes]] = frozenset()


def check_ranks_agree(told: list[RankReport], steps: Steps, found: Found, decision: Decision, request: Request) -> None:
    """Raise the same error on every rank where any is not ready, or where ranks differ. Collective."""
    subject = f"loading {request.load_dir}"
    listing = found.checkpoint.listing if found.checkpoint is not None else found.listing
    folder = listing.folder if listing is not None else request.load_dir
    said = [one.value for one in told if isinstance(one.value, ReadinessReport)]
    if any(one.step == 1 and one.faults for one in told):
        steps.raise_first(told)
    given = [one.arguments for one in said if one.arguments is not None]
    mend = "call it with the same arguments on every rank: those of rank 0 may be broadcast"
    raise_faults(differences(given, where="load_checkpoint", mend=mend), subject="loading")
    raise_faults(policy_differences([one.policy for one in said if one.policy is not None]), subject=subject)
    if len({one.route for one in said if one.route}) > 1:  # a rank without one has said why
        raise_faults([_loader_fault(request.load_dir)], subject=subject)
    failed = any(one.faults for one in told)
    if not failed and len({one.loader for one in said}) > 1:
        raise_faults([_loader_fault(folder)], subject=f"loading {folder}")
    if not failed and _has_conflicts(one.fingerprinted_names for one in said if one.fingerprinted_names is not None):
        what = "ranks hold parts of other tensors"
        raise_faults([InternalError.fault(folder, what, mend=_BUILD_ALIKE)], subject=f"loading {folder}")
    if not failed and _has_conflicts(
        one for ready in said for pairs in (ready.file_sets, ready.files) for one in pairs
    ):
        _refuse_other_files(found, decision, subject=f"loading {folder}")
    # by what was told alone: of a row whose files are damaged a rank has no checkpoint, and the others wait for it
    differ = _has_conflicts(
        one for ready in said for pairs in (ready.signatures, ready.shard_checksums) for one in pairs
    )
    if any(one.signatures for one in said) and (failed or differ):
        states = any(one.reshards_states for one in said)
        told = _add_shard_faults(told, decision.shards, folder, states=states)
    steps.raise_first(told)


def _has_conflicts(said: Iterable[tuple[object, object]]) -> bool:
    """Whether two say different things of one name."""
    pairs = set(said)
    return len(pairs) > len({name for name, _ in pairs})


def _add_shard_faults(
    told: list[RankReport], shards: ZeroShards | None, folder: str, *, states: bool
) -> list[RankReport]:
    """What ranks said, with what is found where all that their shards say is compared. Collective."""
    seen = gather((shards.signatures, shards.prints) if shards is not None else ({}, {}))
    last = max(one.step for one in told)
    faults = compare_signatures({k: v for one, _ in seen for k, v in one.items()}, folder, states=states)
    faults += compare_prints({k: v for _, one in seen for k, v in one.items()}, folder)
    return [*told, RankReport(last, f"loading {folder}", tuple(faults), None)]


def _refuse_other_files(found: Found, decision: Decision, *, subject: str) -> None:
    """Raise where ranks read other files of one name, on every rank. Collective.

    Of a model file that DeepSpeed loads only what all ranks have alike has to be the same: each node may have saved its
    own, with what the script keeps of its own and the statistics of its own batches.
    """

    def mine() -> dict[str, bytes]:
        models = (found.checkpoint.model, *found.checkpoint.stages) if found.checkpoint is not None else ()
        alike = {model.path: digest(alike_on_all_ranks(model)) for model in models if decision.loader == "DeepSpeed"}
        return {**found.prints, **decision.files, **alike}

    read, faults, _ = attempt(mine)
    told = gather((faults, read or {}))
    raise_faults([fault for of_rank, _ in told for fault in of_rank], subject=subject)
    raise_faults(file_faults([files for _, files in told]), subject=subject)


def _loader_fault(where: str) -> Fault:
    return InternalError.fault(where, "ranks disagree on who loads", mend=_BUILD_ALIKE)
