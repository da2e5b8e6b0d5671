"""Carry out a prepared load: move bytes, verify them, hand them to DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, ModelMismatch
from ds_reshard.execution.buffers import TensorTarget, read_tensor
from ds_reshard.execution.checksums import PartialSum, combine, partial_sums, read_again, settle
from ds_reshard.execution.cuda import choose
from ds_reshard.execution.fingerprint import Witness
from ds_reshard.execution.interfaces import Executor, Outcome
from ds_reshard.hosts.deepspeed.adopt import adopt
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.masters import masters_against_weights, masters_read
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.prove import Proof, place, prove, seen_by
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.hosts.deepspeed.wants import EXTRA_STATE
from ds_reshard.operations.ranks import agree, attempt, gather, rank

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


def move(engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings) -> Moved:
    """Fill the engine. Collective; a fault on any rank raises on every rank, and the engine is then unusable."""
    subject = f"loading {prepared.checkpoint.listing.folder}"
    begun, faults, cause = attempt(lambda: _begin(engine, prepared, settings))
    agree(faults, subject=subject, cause=cause)
    assert begun is not None
    witness, targets, executor = begun
    outcome, faults, cause = attempt(lambda: executor.execute(prepared.plan, targets))
    outcome = outcome or Outcome()
    bare = sum(record.crc32 is None for record in outcome.slices)
    if bare:
        logger.warning(
            "%s: %d records carry no checksum (saved with torch's crc32 off): they were loaded without verification",
            prepared.checkpoint.listing.folder,
            bare,
        )
    sums, found, failed = attempt(lambda: settle(partial_sums(outcome)))
    faults += found + outcome.faults
    pending: list[PartialSum] = []
    if sums is not None:
        pending, mismatched = sums
        faults += mismatched
    mine = _replica(engine, prepared)
    told = gather((faults, pending, mine))
    everyone = [fault for of_rank, _, _ in told for fault in of_rank]
    combined, again = combine([sums if replica == mine else [] for _, sums, replica in told])
    if not everyone:
        combined += read_again([record for record, at in again.items() if at == rank()])
    agree([*faults, *(combined if not everyone else [])], subject=subject, cause=cause or failed)
    late, faults, cause = attempt(lambda: _settle_model(engine, prepared, request, settings))
    agree([*faults, *(late or [])], subject=subject, cause=cause)
    _, faults, cause = attempt(lambda: _adopt(engine, prepared, request))
    agree(faults, subject=subject, cause=cause)
    _, faults, cause = attempt(lambda: _settle_masters(engine, prepared, request))
    agree(faults, subject=subject, cause=cause)
    proof = prove(engine, prepared, witness, unproved=_unproved(engine, prepared, request)) if witness else None
    files = prepared.plan.files
    return Moved(bytes_read=outcome.bytes_read, read_calls=outcome.read_calls, files=files, proof=proof)


def _unproved(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> frozenset[str]:
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


def _settle_model(engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings) -> list[Fault]:
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
    return [] if not settings.checksum else list(masters_against_weights(engine, prepared))


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
