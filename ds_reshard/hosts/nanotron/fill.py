"""The states of this rank's optimizer, read from a checkpoint of any layout into host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import CheckpointDamaged, Fault, raise_faults
from ds_reshard.execution.buffers import TensorTarget, tensor_from_bytes, torch_dtype
from ds_reshard.execution.checksums import combine, partial_sums, read_again, settle
from ds_reshard.execution.ports import Outcome
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.execution.whole import read_tensor
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint, open_checkpoint
from ds_reshard.formats.nanotron.names import NanotronListing
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.formats.nanotron.shards import NanotronShards
from ds_reshard.hosts.nanotron.compare import findings, left_over, saved_group, states_of
from ds_reshard.hosts.nanotron.current import Group, values_of
from ds_reshard.hosts.nanotron.live import Held, Live, Shape
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.operations.ranks import agree, attempt, gather
from ds_reshard.planning.coalesce import coalesce
from ds_reshard.planning.plan import Copy, Plan
from ds_reshard.resume.policy import ResumePolicy

if TYPE_CHECKING:
    from torch import Tensor

_MEMORY_NBYTES = 64 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Tensors of this rank by (name, kind), which are there to be filled, and the copies that fill them."""

    checkpoint: NanotronCheckpoint
    tensors: Mapping[tuple[str, str], Tensor]
    plan: Plan


def prepare(live: Live, listing: NanotronListing, policy: ResumePolicy, before: Sequence[Fault]) -> States:
    """Open what this rank needs and compare it with the optimizer. Collective: every finding of every rank at once.

    `before` are findings that this rank had already.
    """
    subject = f"loading {listing.folder}"
    checkpoint, faults, cause = attempt(lambda: _open(listing))
    agree([*faults, *before] if faults else [], live.world, subject=subject, cause=cause)
    assert checkpoint is not None
    found, faults, cause = attempt(lambda: list(findings(live, checkpoint, policy)))
    first = live.replica == live.rank.tp == live.rank.dp == 0  # which has a part of every parameter of its stage
    mine: dict[str, Shape] = {name: held.shape for name, held in live.held.items()} if first else {}
    shapes = {name: shape for of_rank in gather(mine, live.world) for name, shape in of_rank.items()}
    found = [*before, *(found or []), *left_over(checkpoint, set(shapes), shapes)]
    agree([*faults, *found], live.world, subject=subject, cause=cause)
    states, faults, cause = attempt(lambda: _plan(live, checkpoint, policy))
    agree(faults, live.world, subject=subject, cause=cause)
    assert states is not None
    return states


def read(live: Live, states: States) -> None:
    """Fill the tensors; every byte is read once and verified. Collective: a fault on any rank raises on every rank."""
    executor = ThreadExecutor(threads=min(_THREADS, os.cpu_count() or 1), memory_nbytes=_MEMORY_NBYTES, checksum=True)
    targets = {_buffer(*at): TensorTarget(tensor) for at, tensor in states.tensors.items()}
    outcome, faults, cause = attempt(lambda: executor.execute(states.plan, targets))
    outcome = outcome or Outcome()
    pending, wrong = settle(partial_sums(outcome))
    told = gather((live.replica, pending), live.world)
    combined, again = combine([sums if replica == live.replica else [] for replica, sums in told])
    import torch.distributed as dist

    mine = [record for record, reader in again.items() if reader == dist.get_rank(live.world)]
    reread, failed, _ = attempt(lambda: read_again(mine))
    agree(
        [*faults, *outcome.faults, *wrong, *combined, *(reread or []), *failed],
        live.world,
        subject=f"loading {states.checkpoint.folder}",
        cause=cause,
    )


def state_dict(live: Live, states: States) -> dict[str, object]:
    """What nanotron's `load_state_dict` takes: as `torch.load` gives it of the file that this rank would have saved."""
    held = live.held.values()
    facts = states.checkpoint.facts
    assert facts is not None
    state: dict[int, dict[str, object]] = {one.number: {} for one in held}
    masters: dict[str, Tensor] = {}
    for one in held:
        for kind, value in facts.scalars.get(one.name, {}).items():
            scalar = isinstance(value, ScalarTensor)
            state[one.number][kind] = tensor_from_bytes(value.data, value.dtype, value.shape) if scalar else value  # type: ignore[union-attr]
    for (name, kind), tensor in states.tensors.items():
        if kind == MASTER:
            masters[name] = tensor
        else:
            state[live.held[name].number][kind] = tensor
    names = {one.number: one.name for one in held}
    made: dict[str, object] = {"state": state, "names": names, "param_groups": _groups(live, states.checkpoint)}
    return {**made, "gradient_accumulator": masters} if live.accumulator is not None else made


def saved_groups(live: Live, checkpoint: NanotronCheckpoint) -> list[Group]:
    """The saved values of each of this run's param groups; its own where no member was saved."""
    run = list(values_of(live.base.param_groups))
    found = []
    for names, own in zip(live.groups, run, strict=True):
        saved = saved_group(checkpoint, names)
        values = saved[0] if saved else own
        found.append({key: read_tensor(v) if isinstance(v, TensorRecord) else v for key, v in values.items()})
    return found


def _open(listing: NanotronListing) -> NanotronCheckpoint:
    checkpoint = open_checkpoint(listing)
    if checkpoint.facts is None:
        fault = CheckpointDamaged.fault(
            f"{listing.folder}/optimizer",
            "holds no states of an optimizer",
            "the file of each rank",
            "none",
            mend="--no-load-optim, or load another step",
        )
        raise_faults([fault], subject=f"checkpoint {listing.folder}")
    return checkpoint


def _plan(live: Live, checkpoint: NanotronCheckpoint, policy: ResumePolicy) -> States:
    import torch

    shards = NanotronShards(checkpoint=checkpoint)
    index = Index(checkpoint.layout, shards)
    saved = states_of(checkpoint)
    tensors: dict[tuple[str, str], Tensor] = {}
    copies: list[Copy] = []
    for name, held in live.held.items():
        for kind, dtype in saved[name].items():
            if kind != MASTER and not policy.loads_moments:
                continue
            tensors[name, kind] = torch.empty(tuple(held.tensor.shape), dtype=torch_dtype(dtype), device="cpu")
            copies += _copies(index, held, kind)
    faults = list(index.faults)
    raise_faults(faults or list(shards.compare()), subject=f"loading {checkpoint.folder}")
    return States(checkpoint=checkpoint, tensors=tensors, plan=Plan(copies=coalesce(copies)))


def _copies(index: Index, held: Held, kind: str) -> list[Copy]:
    key = TensorKey(name=held.name, kind=kind)
    return [
        Copy(
            record=fragment.extent.record,
            byte_offset=fragment.extent.byte_offset,
            numel=fragment.extent.numel,
            dtype=fragment.extent.dtype,
            buffer=_buffer(held.name, kind),
            element_offset=first + at,
            target_dtype=fragment.extent.dtype,
        )
        for region, first in held.regions()
        for at, fragment in index.locate(key, region)
    ]


def _groups(live: Live, checkpoint: NanotronCheckpoint) -> list[Group]:
    numbers = iter(range(sum(len(group["params"]) for group in live.base.param_groups)))
    return [
        {**values, "params": [next(numbers) for _ in group["params"]]}
        for values, group in zip(saved_groups(live, checkpoint), live.base.param_groups, strict=True)
    ]


def _buffer(name: str, kind: str) -> str:
    return f"{kind}/{name}"
