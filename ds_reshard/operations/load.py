"""The load of a run, in the order in which its steps are read: so far what ranks agree on before anything changes.

A host finds the checkpoint, chooses who loads it and prepares that; then every rank says whether it is `Ready`, and all
`agree`, or raise the same error. Only after that do bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ds_reshard.errors import AS_SAVED, Fault, InternalError, raise_faults
from ds_reshard.operations.ranks import Steps, Told, attempt, gather, other_files
from ds_reshard.resume.policy import ResumePolicy, differences, policy_differences


class Ready(NamedTuple):
    """What a rank says before anything changes; its size does not depend on the model.

    `given` are the arguments of the load, if ds_reshard has to do with it at all. `view` decides which way a rank
    takes, `loader` is who loads, `as_saved` whether the framework could, `states` whether the optimizer's are cut anew.
    `signatures` are digests of what the model and optimizer shards say that this rank opened. `prints` is a digest of
    the checksums of each optimizer shard, with its name. `names` is a column of the grid, and a digest of the tensors
    whose fingerprints its ranks will add up. `sets` are digests of the paths of the files that say what all shards have
    alike, and of what is in them, and of the shards that this rank opened; `files` has the path of each of these, and a
    digest of what is in it.
    """

    view: str = ""
    policy: ResumePolicy | None = None
    loader: str = ""
    as_saved: bool = False
    given: Mapping[str, object] | None = None
    states: bool = False
    signatures: frozenset[tuple[str, bytes]] = frozenset()
    prints: frozenset[tuple[bytes, str]] = frozenset()
    names: tuple[int, int] | None = None
    sets: frozenset[tuple[bytes, bytes]] = frozenset()
    files: frozenset[tuple[str, bytes]] = frozenset()


class Details(NamedTuple):
    """What ranks tell each other only after a difference: each file of this rank with a digest of what is in it.

    `shards` compares all that the shards of all ranks say, states of optimizers too if it is given True. Collective.
    """

    files: Callable[[], Mapping[str, bytes]]
    shards: Callable[[bool], list[Fault]]


def agree(ready: Ready, steps: Steps, details: Details, *, load: str, folder: str, alike: str) -> bool:
    """Raise the same error on every rank if any is not ready, or if ranks differ. Collective.

    True if all that is wrong is what the framework's own load of an unchanged layout takes: then it loads. `alike` is
    the line that mends ranks which were built otherwise than others.
    """
    told, subject = steps.tell(ready), f"loading {load}"
    said = [one.value for one in told if isinstance(one.value, Ready)]
    if any(one.step == 1 and one.faults for one in told):
        steps.raise_first(told)
    given = [one.given for one in said if one.given is not None]
    mend = "call it with the same arguments on every rank: those of rank 0 may be broadcast"
    raise_faults(differences(given, where="load_checkpoint", mend=mend), subject="loading")
    raise_faults(policy_differences([one.policy for one in said if one.policy is not None]), subject=subject)
    if len({one.view for one in said if one.view}) > 1:  # a rank without one has said why
        raise_faults([_disagreement(load, alike)], subject=subject)
    failed, subject = any(one.faults for one in told), f"loading {folder}"
    if not failed and len({one.loader for one in said}) > 1:
        raise_faults([_disagreement(folder, alike)], subject=subject)
    if not failed and _differ(one.names for one in said if one.names is not None):
        raise_faults([InternalError.fault(folder, "ranks hold parts of other tensors", mend=alike)], subject=subject)
    if not failed and _differ(one for ready in said for pairs in (ready.sets, ready.files) for one in pairs):
        _refuse_other_files(details.files, subject=subject)
    # by what was told alone: of a row whose files are damaged a rank has no checkpoint, and the others wait for it
    differ = _differ(one for ready in said for pairs in (ready.signatures, ready.prints) for one in pairs)
    if any(one.signatures for one in said) and (failed or differ):
        faults = details.shards(any(one.states for one in said))
        if not failed and all(one.as_saved for one in said) and only_as_saved(faults):
            return True
        told = [*told, Told(max(one.step for one in told), subject, tuple(faults), None)]
    steps.raise_first(told)
    return False


def only_as_saved(faults: Sequence[Fault]) -> bool:
    """True if all of them say that only the layout that was saved can take this: at that layout the framework loads."""
    return bool(faults) and all(fault.mend.startswith(AS_SAVED) for fault in faults)


def _differ(said: Iterable[tuple[object, object]]) -> bool:
    """Whether two say different things of one name."""
    pairs = set(said)
    return len(pairs) > len({name for name, _ in pairs})


def _refuse_other_files(mine: Callable[[], Mapping[str, bytes]], *, subject: str) -> None:
    """Raise on every rank if ranks read other files of one name. Collective."""
    read, faults, _ = attempt(mine)
    told = gather((faults, read or {}))
    raise_faults([fault for of_rank, _ in told for fault in of_rank], subject=subject)
    raise_faults(other_files([files for _, files in told]), subject=subject)


def _disagreement(where: str, alike: str) -> Fault:
    return InternalError.fault(where, "ranks disagree on who loads", mend=alike)
