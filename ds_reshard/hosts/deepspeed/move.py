"""Carry out a prepared load: move bytes, verify them, hand them to DeepSpeed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import blake2b
from itertools import pairwise
from operator import xor
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.errors import ModelMismatch, raise_faults
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.checksums import PartialSum, combine, partial_sums, read_again, settle
from ds_reshard.execution.choice import choose
from ds_reshard.execution.ports import Executor, Outcome
from ds_reshard.execution.whole import read_tensor
from ds_reshard.execution.witness import Witness
from ds_reshard.hosts.deepspeed.adopt import adopt
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.masters import masters_against_weights, masters_read
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.prove import Proof, place, prove, seen_by
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.hosts.deepspeed.wants import EXTRA_STATE
from ds_reshard.operations.ranks import Steps, agree, attempt, gather, raise_caused, rank

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one rank's load read: bytes, system calls, files; the proof of it where one was asked for."""

    bytes_read: int
    read_calls: int
    files: tuple[str, ...]
    proof: Proof | None


def move(engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings, steps: Steps) -> Moved:
    """Fill the engine. Collective; a fault on any rank raises on every rank, and the engine is then unusable.

    What goes wrong after all bytes were read and checked is left to `steps`: every rank still takes part in
    DeepSpeed's own collectives, and its caller agrees on the faults.
    """
    subject = f"loading {prepared.checkpoint.listing.folder}"
    witness, outcome = _read(engine, prepared, settings, subject)
    steps.take(lambda: _settle_model(engine, prepared, request, settings), subject=subject)
    steps.take(lambda: _adopt(engine, prepared, request), subject=subject)
    steps.take(lambda: _settle_masters(engine, prepared, request), subject=subject, always=True)
    proof = None
    if witness is not None:
        proof = prove(engine, prepared, witness, steps, unproved=unproved(engine, prepared, request))
    files = prepared.plan.files
    return Moved(bytes_read=outcome.bytes_read, read_calls=outcome.read_calls, files=files, proof=proof)


def _read(
    engine: DeepSpeedEngine, prepared: Prepared, settings: Settings, subject: str
) -> tuple[Witness | None, Outcome]:
    """Read this rank's bytes, and agree with all ranks that every record has its checksum. Collective."""
    begun, faults, cause = attempt(lambda: _begin(engine, prepared, settings))
    witness, outcome = None, Outcome()
    if begun is not None:
        witness, targets, executor = begun
        done, faults, cause = attempt(lambda: executor.execute(prepared.plan, targets))
        outcome = done or outcome
    bare = sum(record.crc32 is None for record in outcome.slices)
    if bare:
        logger.warning(
            "%s: %d records carry no checksum (saved with torch's crc32 off): they were loaded without verification",
            prepared.checkpoint.listing.folder,
            bare,
        )
    settled, found, failed = attempt(lambda: settle(partial_sums(outcome)))
    pending, mismatched = settled or ([], [])
    mine = _replica(engine, prepared)
    sums = None if pending and _shares_bytes(prepared) else Sums.of(pending, mine)
    told = gather((faults + found + outcome.faults + mismatched, sums))
    raise_caused([fault for of_rank, _ in told for fault in of_rank], subject=subject, cause=cause or failed)
    if not whole([of_rank for _, of_rank in told]):
        everyone = gather((pending, mine))
        combined, again = combine([parts if replica == mine else [] for parts, replica in everyone])
        combined += read_again([record for record, at in again.items() if at == rank()])
        agree(combined, subject=subject)
    return witness, outcome


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
        crc = spans = 0
        for one in sums:
            record = one.record
            drawn = partial(_drawn, repr((os.path.basename(record.path), *record[1:], replica)))
            total = one.crc32
            for start, stop in one.spans:
                spans += drawn(stop) - drawn(start)
                if start == 0:
                    assert record.crc32 is not None
                    total ^= record.crc32
                    spans -= drawn(record.nbytes) - drawn(0)
            crc ^= _multiplied(total, drawn(-1) | 1)
        return cls(crc, spans % 2**64)


def whole(sums: Sequence[Sums | None]) -> bool:
    """Whether what all ranks read are whole records with their checksums; None is of a rank that cannot tell."""
    said = [one for one in sums if one is not None]
    crc = reduce(xor, (one.crc for one in said), 0)
    return len(said) == len(sums) and crc == 0 and sum(one.spans for one in said) % 2**64 == 0


def _drawn(record: str, offset: int) -> int:
    """A number of 64 bits that stands for an offset of a record."""
    return int.from_bytes(blake2b(f"{record} {offset}".encode(), digest_size=8).digest(), "little")


def _multiplied(value: int, factor: int) -> int:
    """The product of two polynomials over the field of two elements; it is linear in `value`, and one to one."""
    product = 0
    while value:
        lowest = value & -value
        product ^= factor * lowest
        value ^= lowest
    return product


def _shares_bytes(prepared: Prepared) -> bool:
    """Whether two tensors that are wanted lie in the same bytes, which several ranks may then read.

    They are tied in the checkpoint's module and not in this run's. Sums that are combined by exclusive or would hide a
    fault that two ranks have read.
    """
    module, layout = prepared.checkpoint.model.module, prepared.checkpoint.layout
    found = [
        module[key.name]
        for key in prepared.wants.sources.values()
        if key.name in module and layout[key].buffer == f"module/{key.name}"
    ]
    spans = sorted((one.byte_offset, one.byte_offset + one.nbytes) for one in found if one.numel)
    return any(one[1] > other[0] for one, other in pairwise(spans))


def unproved(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> frozenset[str]:
    """The kinds of tensors that this load changes after it has read them."""
    kinds = {
        "weight": request.custom_load_fn is not None or _loads_itself(engine.module, prepared.wants.state),
        "fp32": _masters_anew(prepared),
    }
    return frozenset(kind for kind, changed in kinds.items() if changed)


def _replica(engine: DeepSpeedEngine, prepared: Prepared) -> int:
    """Which replica of the optimizer this rank is part of: the first rank of the group that partitions it.

    There are several where a device mesh has more dimensions than the data-parallel one; each reads
    the whole checkpoint, and their slices must not be combined.
    """
    import torch.distributed as dist

    if prepared.live is None or prepared.live.replicated:
        return rank()
    return min(dist.get_process_group_ranks(engine.optimizer.dp_process_group))


def _begin(
    engine: DeepSpeedEngine, prepared: Prepared, settings: Settings
) -> tuple[Witness | None, Mapping[str, TensorTarget], Executor]:
    """Who sums up what is read, the buffers, and who fills them: what can fail on one rank before any reads."""
    witness = seen_by(prepared) if settings.prove else None
    if prepared.wants.absent and prepared.live is not None:
        _masters_from_weights(engine.optimizer, prepared.live)  # what is absent keeps its weights
    targets = prepared.wants.targets()
    executor = choose(
        settings.device,
        targets,
        threads=settings.threads,
        memory_nbytes=settings.memory_nbytes,
        checksum=settings.checksum,
        saw=witness.saw if witness is not None else None,
        saw_there=witness.saw_there if witness is not None else None,
        named=prepared.wants.named(*place(prepared.live)),
    )
    return witness, targets, executor


def _settle_model(engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings) -> None:
    """Fill in the parts of the module that the executor does not move, then compare weights with masters."""
    import torch

    with torch.no_grad():
        for record, tensor in prepared.wants.whole_reads:
            tensor.copy_(read_tensor(record))
        if request.custom_load_fn is not None:
            state = {name: read_tensor(record) for name, record in prepared.checkpoint.model.module.items()}
            request.custom_load_fn(src=state, dst=engine.module)
        elif _loads_itself(engine.module, prepared.wants.state):
            _run_loaders(engine.module, prepared.wants.state)
        for name, extra in prepared.extra.items():
            engine.module.get_submodule(name).set_extra_state(extra)
    if settings.checksum:
        folder = prepared.checkpoint.listing.folder
        raise_faults(masters_against_weights(engine, prepared), subject=f"loading {folder}")


def _loads_itself(module: torch.nn.Module, state: Mapping[str, object]) -> bool:
    """Whether some module takes part in loading: hooks, its own loader, or entries that are not its tensors."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if any(hasattr(value, "data_ptr") and id(value) not in own for value in state.values()):
        return True
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def _run_loaders(module: torch.nn.Module, state: Mapping[str, object]) -> None:
    """Let the module load what was read: a copy of each tensor onto itself, and all that it does besides."""
    skipped = {name for name in state if name.rpartition(".")[2] == EXTRA_STATE}
    whole = {name: value for name, value in state.items() if name not in skipped and not hasattr(value, "ds_id")}
    answer = module.load_state_dict(whole, strict=False)
    if answer.unexpected_keys:
        raise ModelMismatch(
            f"module {type(module).__name__}: its state dict has entries that it does not load itself: "
            f"{', '.join(answer.unexpected_keys[:8])}; resume with the layout that was saved"
        )


def _adopt(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> None:
    """Scheduler, counters and optimizer, in DeepSpeed's own order. Not collective: a rank may fail alone."""
    live, wants = prepared.live, prepared.wants
    if live is None or live.stage != 0:
        _counters(engine, prepared, request)
    if live is not None and prepared.values is not None:
        if not wants.from_masters and not (prepared.masters and masters_read(prepared)):
            _masters_from_weights(engine.optimizer, live)
        adopt(engine, live, prepared.values, wants.tensors)
    if live is not None and live.stage == 0:
        _counters(engine, prepared, request)


def _settle_masters(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> None:
    """Weights from masters, then masters from weights, where either is asked for.

    Collective: every rank takes the same branches, and the failures of one rank alone are behind it.
    """
    live = prepared.live
    if live is None:
        return
    _weights_from_masters(engine, live, prepared)
    if _masters_anew(prepared):
        _masters_from_weights(engine.optimizer, live)


def _masters_anew(prepared: Prepared) -> bool:
    """Whether masters are made from the weights in the end, also those that were read to make the weights."""
    return prepared.values is None or bool(prepared.wants.from_masters and not prepared.masters)


def _masters_from_weights(optimizer: object, live: LiveOptimizer) -> None:
    """fp32 masters anew from the weights (they lose the bits that 16-bit weights do not have)."""
    if live.kind == "torch":
        return
    name = "refresh_fp32_params" if live.stage == 0 else "_restore_from_bit16_weights"
    refresh: Callable[[], None] = getattr(optimizer, name)
    refresh()


def _weights_from_masters(engine: DeepSpeedEngine, live: LiveOptimizer, prepared: Prepared) -> None:
    """Weights that the checkpoint did not hold in this run's type: cast from the masters, then gathered."""
    import torch

    if not prepared.wants.from_masters:
        return
    if live.kind in ("zero", "bf16"):
        engine.optimizer.update_lp_params()
        return
    names = set(prepared.wants.from_masters)
    params = {name: param for param, name in engine.param_names.items()}
    with torch.no_grad():
        for buffer in live.buffers:
            at = 0
            for name, shape in buffer.shapes.items():
                numel = params[name].numel()
                if name in names:
                    params[name].copy_(buffer.fp32.detach().view(-1)[at : at + numel].view(shape))
                at += numel


def _counters(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> None:
    """Counters and schedulers, as DeepSpeed's `_load_checkpoint` (runtime/engine.py, 0.19.8) sets them."""
    entries = prepared.entries
    engine.loaded_checkpoint_dp_world_size = prepared.checkpoint.dp
    if request.module_only:
        return
    if request.scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(entries["lr_scheduler"])
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and entries.get("random_ltd"):
        engine.random_ltd_scheduler.load_state_dict(entries["random_ltd"])
    loader = engine.training_dataloader
    if loader is not None and engine.curriculum_learning_enabled() and entries.get("data_sampler") is not None:
        loader.data_sampler.load_state_dict(entries["data_sampler"])
    engine.global_steps = entries["global_steps"]
    engine.global_samples = entries.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = entries.get("skipped_steps", 0)
    engine.loaded_checkpoint_mp_world_size = entries.get("mp_world_size", 1)
