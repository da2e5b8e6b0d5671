"""Who loads: DeepSpeed itself, where it loads a checkpoint rightly, or the direct path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, InternalError, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.hosts.deepspeed.compare import same_layout
from ds_reshard.hosts.deepspeed.entries import Request, scheduler_faults
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.look import Found
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.model.index import Index
from ds_reshard.operations.pickles import scan_files
from ds_reshard.operations.ranks import attempt, gather, raise_caused
from ds_reshard.resume.policy import ResumePolicy

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One rank's view of its engine before anything is read; `direct` is False where DeepSpeed loads anyway."""

    direct: bool
    settings: Settings
    live: LiveOptimizer | None
    features: tuple[str, ...]
    policy: ResumePolicy


def disagreement(where: str) -> Fault:
    return InternalError.fault(
        where, "ranks disagree on who loads", mend="give every rank the same DeepSpeed config and build the same engine"
    )


def as_saved(engine: DeepSpeedEngine, found: Found, features: tuple[str, ...]) -> bool:
    """Whether files of a kind that is not read here (pipeline, experts, tensor parallel) are this engine's own.

    Of a universal checkpoint DeepSpeed loads other sizes too, when it is asked to.
    """
    if any(fault.error != "UnsupportedLayout" for fault in found.faults):
        return False
    if found.universal and engine.load_universal_checkpoint():
        return True
    return bool(features) and found.sizes == (engine.seq_dp_world_size, engine.mp_world_size)


def leave_to_deepspeed(engine: DeepSpeedEngine, mine: Considered, checkpoint: ZeroCheckpoint, request: Request) -> bool:
    """Whether DeepSpeed's own path takes this load; decided alike, and agreed, on every rank.

    What is left to DeepSpeed has had its structure checked. What can be loaded by neither is refused. At
    stage 3 a load without optimizer states is not left to DeepSpeed: with `load_module_only` it loads
    nothing, and with `load_optimizer_states=False` the weights of `latest`, whatever the tag
    (`_load_checkpoint`, runtime/engine.py, 0.19.8; issue 8499 of DeepSpeed). With "load_universal" DeepSpeed
    takes every folder for a universal one.
    """
    folder = checkpoint.listing.folder
    same, faults, cause = attempt(lambda: same_layout(engine, mine.live, checkpoint))
    if mine.features and not same:
        faults.append(_unsupported_fault(engine, mine.features, checkpoint))
    partial = ((checkpoint.stage == 3 or _keeps_own_masters(mine)) and not request.load_optimizer) or (
        request.load_optimizer and not request.moments
    )
    asked = mine.settings.always or mine.settings.prove or engine.load_universal_checkpoint()
    always = asked and checkpoint.stage != 0
    leave = bool(same) and (bool(mine.features) or not (always or partial))
    if leave and request.load_optimizer and not request.moments:
        faults.append(_unsupported_fault(engine, (*mine.features, "masters without moments"), checkpoint))
    shards = ZeroShards(checkpoint=checkpoint)
    if leave and not faults:
        found, more, cause = attempt(lambda: _check_own(mine.live, checkpoint, shards))
        faults += (found or []) + more + scheduler_faults(engine, checkpoint.model, request)
    verdicts = gather((leave, faults, shards.signatures, shards.prints))
    faults = [fault for _, of_rank, _, _ in verdicts for fault in of_rank]
    faults += compare_signatures({k: v for _, _, said, _ in verdicts for k, v in said.items()}, folder, states=False)
    faults += compare_prints({k: v for _, _, _, seen in verdicts for k, v in seen.items()}, folder)
    if len({taken for taken, _, _, _ in verdicts}) > 1:
        faults.append(disagreement(folder))
    raise_caused(faults, subject=f"loading {folder}", cause=cause)
    return leave


def _keeps_own_masters(mine: Considered) -> bool:
    """Whether weights alone, loaded by DeepSpeed, would be undone by the first step.

    At stage 0 `FP16_Optimizer` and `FP16_UnfusedOptimizer` (runtime/fp16, 0.19.8) step on masters of their own, which
    a load without optimizer states leaves as they were initialised.
    """
    return mine.live is not None and mine.live.kind in ("fused", "unfused")


def _check_own(live: LiveOptimizer | None, checkpoint: ZeroCheckpoint, shards: ZeroShards) -> list[Fault]:
    """Open the shards that DeepSpeed will load on this rank, and say what is wrong with them.

    The model file was read by rank 0, maybe on another node: its pickle is searched as it lies here.
    """
    index = Index(checkpoint.layout, shards)
    listing = checkpoint.listing
    name = listing.model.get(live.rank if live is not None and listing.partitioned_model else 0)
    model = [listing.path(name)] if name is not None else []
    if live is not None and live.stage != 0:
        if checkpoint.optim is not None:
            index.open(OPTIM, live.rank)
        index.open(MODEL, live.rank if checkpoint.listing.partitioned_model else 0)
    return [*index.faults, *scan_files(model).faults]


def _unsupported_fault(engine: DeepSpeedEngine, features: tuple[str, ...], checkpoint: ZeroCheckpoint) -> Fault:
    return UnsupportedLayout.fault(
        checkpoint.listing.folder,
        f"a load under another layout is not supported with {', '.join(features)}",
        f"stage {checkpoint.stage}, dp={checkpoint.dp}, as saved",
        f"stage {engine.zero_optimization_stage()}, dp={engine.seq_dp_world_size}",
        mend='set "checkpoint": {"load_universal": true}: DeepSpeed then loads it'
        if checkpoint.listing.universal
        else "resume with the layout that was saved",
    )
