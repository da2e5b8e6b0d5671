"""`verify_saved`: what the ranks have just saved, read again before training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds_reshard.errors import (
    Fault,
    FingerprintMismatch,
    ReshardError,
    UnsupportedLayout,
    as_faults,
    damaged,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint, open_fsdp
from ds_reshard.formats.fsdp.extra_state import missing_extra
from ds_reshard.formats.fsdp.order import line_to_add
from ds_reshard.hosts.fsdp.live import parts_of, second_names, steps_of
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations import Reading, fingerprint
from ds_reshard.operations.ranks import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer

    from ds_reshard.execution.fingerprint import Fingerprint

_MEMORY_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one rank has to tell: faults, the fingerprints of its share of the tensors in the files, and the sums of
    the parts that it holds itself; `passed` names weights that may be in the files and are not compared.
    """

    faults: tuple[Fault, ...] = ()
    other_steps: tuple[Fault, ...] = ()
    saved: Mapping[TensorKey, str | None] = field(default_factory=dict)
    live: Mapping[TensorKey, Fingerprint] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()


def verify_saved(
    path: str | os.PathLike[str],
    *,
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Raise on every rank unless the folder that the ranks have just saved as EasyR1 and verl do is whole.

    Every rank's file opens, all are of the world size of `group`, their keys, types and shard sizes agree, and the
    shards add up to the whole shapes. With `model`, and `optimizer` where it was saved, the values are compared as
    well: the fingerprint of each tensor in the files with that of what the ranks hold now, and the steps. Nothing is
    gathered but sums; each rank reads its share of the tensors, in 64 MiB. Buffers are not compared.

    Collective, where a process group is there: call it on every rank after saving and before the next step.
    Raises CheckpointNotFound, CheckpointDamaged, FingerprintMismatch, UnsupportedLayout where the optimizer's files
    name no parameter (verl with FSDP1), and what reading a damaged file raises: the same on each rank.
    """
    import torch.distributed as dist

    folder = os.fspath(path)
    together = dist.is_available() and dist.is_initialized()
    if together:
        gather(None, group)  # nobody reads before all have saved
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if together else (0, None)
    mine = _seen(folder, rank, size, model, optimizer)
    seen = gather(mine, group) if together else [mine]
    raise_faults([fault for one in seen for fault in one.faults], subject=f"verifying {folder}")
    if model is not None:
        raise_faults(list(_differences(folder, seen, states=optimizer is not None)), subject=f"verifying {folder}")


def _seen(folder: str, rank: int, size: int | None, model: Module | None, optimizer: Optimizer | None) -> _Seen:
    """One rank's part; whatever goes wrong is a fault, for a rank that raised here would leave others waiting."""
    try:
        checkpoint = open_fsdp(folder)
        _check(checkpoint, rank, size)
        if optimizer is not None and checkpoint.unnamed:
            mend = f"{line_to_add(folder)}; or leave out optimizer="
            what = "its optimizer's files name no parameter: they cannot be compared with the optimizer"
            return _Seen(faults=(UnsupportedLayout.fault(folder, what, mend=mend),))
        return _Seen() if model is None else _compared(checkpoint, rank, size or 1, model, optimizer)
    except Exception as error:
        return _Seen(faults=tuple(as_faults(error, where=f"{folder}, verified by rank {rank}")))


def _check(checkpoint: FsdpCheckpoint, rank: int, size: int | None) -> None:
    """Open this rank's share of the files."""
    folder, saved = checkpoint.folder, checkpoint.ranks
    faults = list(missing_extra(folder, saved))
    if size not in (None, saved):
        faults.append(
            damaged(folder, "is of another world size", f"files of {size} ranks, as many as save", f"files of {saved}")
        )
    for shard in range(rank, saved, size or 1):
        for family in checkpoint.first:
            try:
                checkpoint.buffers(family, shard)
            except ReshardError as error:
                faults += faults_of(error)
    raise_faults(faults, subject=f"verifying {folder}")


def _compared(checkpoint: FsdpCheckpoint, rank: int, size: int, model: Module, optimizer: Optimizer | None) -> _Seen:
    """The fingerprints of this rank's share of the files, and of what it holds."""
    from ds_reshard.execution.fingerprint import Fingerprints

    found = fingerprint(checkpoint.folder, reading=Reading(threads=1, memory_nbytes=_MEMORY_NBYTES), shard=(rank, size))
    live = Fingerprints()
    keys = set()
    for part in parts_of(model, optimizer):
        keys.add(part.key)
        live.add_region(part.key, part.shape, part.region, part.values)
    return _Seen(
        faults=found.faults,
        other_steps=tuple(_other_steps(checkpoint, model, optimizer)),
        saved={TensorKey(name=one.name, kind=one.kind): one.fingerprint for one in found.tensors},
        live={key: live[key] for key in keys},
        passed=second_names(model),
    )


def _other_steps(checkpoint: FsdpCheckpoint, model: Module, optimizer: Optimizer | None) -> Iterator[Fault]:
    saved = checkpoint.facts.scalars if checkpoint.facts is not None else {}
    for name, kind, data in steps_of(model, optimizer):
        found = saved.get(name, {}).get(kind)
        if not isinstance(found, ScalarTensor) or found.data != data:
            yield _mismatch(
                checkpoint.folder,
                f"{name}[{kind}]",
                data.hex(),
                found.data.hex() if isinstance(found, ScalarTensor) else "nothing",
            )


def _differences(folder: str, seen: Sequence[_Seen], *, states: bool) -> Iterator[Fault]:
    """Tensors that are not in the files as the ranks hold them."""
    from ds_reshard.execution.fingerprint import Fingerprint

    for one in seen:
        yield from one.other_steps
    saved = {key: value for one in seen for key, value in one.saved.items() if states or key.kind == "weight"}
    live: dict[TensorKey, Fingerprint] = {}
    for one in seen:
        for key, part in one.live.items():
            live[key] = live.get(key, Fingerprint()) + part
    for key in sorted(saved.keys() | live.keys()):
        if key.kind == "weight" and key.name in seen[0].passed and key not in live:
            continue
        expected = str(live[key]) if key in live else "nothing"
        found = saved.get(key) or "nothing"
        if expected != found:
            yield _mismatch(folder, str(key), expected, found)


def _mismatch(folder: str, name: str, expected: str, found: str) -> Fault:
    return FingerprintMismatch.fault(
        folder,
        f"{name} is not what the ranks hold",
        expected,
        found,
        mend="save again into another folder, and do not resume from this one",
    )
