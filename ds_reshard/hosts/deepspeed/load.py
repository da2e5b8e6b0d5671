"""The seam of this host: `load_checkpoint`, around DeepSpeed's own.

Rung 2 of the ladder (a method on a class). DeepSpeed publishes no extension point that sees a load before
the data-parallel size is refused (inside `_load_zero_checkpoint`), and model files are looked up by the own
rank before that (`_get_all_ckpt_names`), so the public method is the lowest place from which every layout
can be reached; it has had one signature from 0.14 to 0.19.8.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import EngineUnusable, Fault, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint, open_checkpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.formats.zero.names import read_listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.hosts.deepspeed.agree import agree, attempt, broadcast, gather, rank, told
from ds_reshard.hosts.deepspeed.compare import same_layout
from ds_reshard.hosts.deepspeed.entries import Request, client_entries
from ds_reshard.hosts.deepspeed.live import LiveOptimizer, live_kind, live_optimizer, unsupported
from ds_reshard.hosts.deepspeed.move import Moved, move
from ds_reshard.hosts.deepspeed.prepare import Prepared, prepare
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.model.index import Index

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]
Original = Callable[[], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rank 0 found on disk, told to every rank: faults, nothing to do with us, or a checkpoint."""

    tag: str = ""
    checkpoint: ZeroCheckpoint | None = None
    faults: tuple[Fault, ...] = ()


def load_checkpoint(
    engine: DeepSpeedEngine,
    original: Original,
    *,
    load_dir: str,
    tag: object,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
    custom_load_fn: Callable[..., object] | None,
) -> Result:
    """Load through DeepSpeed where the layout is unchanged, directly from the files where it is not.

    Collective: every rank calls it with the same arguments, and every rank leaves it the same way.
    `original` is DeepSpeed's own method with the user's arguments bound.
    """
    settings = parse_settings(engine._config._param_dict)
    if not settings.enabled or engine.load_universal_checkpoint() or live_kind(engine) == "offload":
        return original()
    _commit_pending_save(engine)
    found = broadcast(
        _look(str(load_dir), tag, optimizer=load_optimizer_states and not load_module_only) if rank() == 0 else Found()
    )
    raise_faults(found.faults, subject=f"loading {load_dir}")
    if found.checkpoint is None:
        return original()
    request = Request(
        load_dir=str(load_dir),
        tag=found.tag,
        strict=load_module_strict,
        optimizer=load_optimizer_states,
        scheduler=load_lr_scheduler_states,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )
    live = live_optimizer(engine)
    if _leave_to_deepspeed(engine, live, found.checkpoint, request, settings):
        result = original()
        restore_use(engine)
        return result
    return _load_directly(engine, live, found.checkpoint, request, settings)


def _commit_pending_save(engine: DeepSpeedEngine) -> None:
    """A decoupled checkpoint engine may still be writing what is to be read: let it finish first."""
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(writer, "is_decoupled", lambda: False)():
        engine._commit_decoupled_checkpoint()


def _look(load_dir: str, tag: object, *, optimizer: bool) -> Found:
    """Rank 0: resolve the tag, list the folder, read what all shards share. Never raises."""
    try:
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                return Found()
            with open(latest, encoding="utf-8") as file:
                tag = file.read().strip()
        folder = os.path.join(load_dir, str(tag))
        if not os.path.isdir(folder):
            return Found(faults=(_no_tag(load_dir, str(tag)),))
        with os.scandir(folder) as scan:
            entries = [(e.name, e.stat().st_size if e.is_file() else None) for e in scan]
        listing = read_listing(
            folder, {n: s for n, s in entries if s is not None}, frozenset(n for n, s in entries if s is None)
        )
        if listing.universal:
            return Found()
        return Found(tag=str(tag), checkpoint=open_checkpoint(listing, optimizer=optimizer))
    except Exception as error:
        return Found(faults=tuple(told(error)))


def _no_tag(load_dir: str, tag: str) -> Fault:
    tags = sorted(e.name for e in os.scandir(load_dir) if e.is_dir()) if os.path.isdir(load_dir) else []
    return Fault(
        error="CheckpointNotFound",
        where=load_dir,
        what=f"has no tag {tag!r}",
        expected="one of " + (", ".join(map(repr, tags[:12])) or "none"),
        found=repr(tag),
        mend="pass tag= one of the tags that exist, or none for the latest" if tags else "check the folder's path",
    )


def _leave_to_deepspeed(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    request: Request,
    settings: Settings,
) -> bool:
    """Whether DeepSpeed's own path takes this load; decided alike, and agreed, on every rank.

    What is left to DeepSpeed has had its structure checked. What can be loaded by neither is refused.
    """
    subject = f"loading {checkpoint.listing.folder}"
    features = unsupported(engine)
    same, faults, cause = attempt(lambda: same_layout(engine, live, checkpoint))
    if features and not same:
        faults.append(
            Fault(
                error="UnsupportedLayout",
                where=checkpoint.listing.folder,
                what=f"a load under another layout is not supported with {', '.join(features)}",
                expected=f"stage {checkpoint.stage}, dp={checkpoint.dp}, as saved",
                found=f"stage {engine.zero_optimization_stage()}, dp={engine.seq_dp_world_size}",
                mend="resume with the layout that was saved",
            )
        )
    signatures: dict[str, dict[str, str]] = {}
    prints: dict[str, tuple[tuple[int, int | None], ...]] = {}
    leave = bool(same) and (bool(features) or not settings.always or checkpoint.stage == 0)
    if leave and not faults:
        shards = ZeroShards(checkpoint=checkpoint)
        index = Index(checkpoint.layout, shards)
        if live is not None and live.stage != 0:
            if checkpoint.optim is not None:
                index.open(OPTIM, live.rank)
            index.open(MODEL, live.rank if checkpoint.listing.partitioned_model else 0)
        faults += index.faults
        signatures, prints = shards.signatures, shards.prints
    verdicts = gather((leave, faults, signatures, prints))
    faults = [fault for _, of_rank, _, _ in verdicts for fault in of_rank]
    faults += compare_signatures(
        {k: v for _, _, said, _ in verdicts for k, v in said.items()}, checkpoint.listing.folder
    )
    faults += compare_prints({k: v for _, _, _, seen in verdicts for k, v in seen.items()}, checkpoint.listing.folder)
    if len({taken for taken, _, _, _ in verdicts}) > 1:
        faults.append(
            Fault(
                error="InternalError",
                where=subject,
                what="ranks disagree on who loads",
                mend="build the same engine on every rank",
            )
        )
    try:
        raise_faults(faults, subject=subject)
    except Exception as error:
        raise error from cause
    return leave


def _load_directly(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    request: Request,
    settings: Settings,
) -> Result:
    """Read the checkpoint into this engine, whatever layout either has. Collective."""
    folder = checkpoint.listing.folder
    started = time.perf_counter()
    prepared, faults, cause = attempt(lambda: prepare(engine, live, checkpoint, request, settings))
    signatures = gather((prepared.shards.signatures, prepared.shards.prints) if prepared is not None else ({}, {}))
    if rank() == 0:
        faults += compare_signatures({k: v for said, _ in signatures for k, v in said.items()}, folder)
        faults += compare_prints({k: v for _, seen in signatures for k, v in seen.items()}, folder)
    agree(faults, subject=f"loading {folder}", cause=cause)
    assert prepared is not None
    refuse_use(engine, f"a load of {folder} did not finish")
    _event(engine, "prologue")
    moved = move(engine, prepared, request, settings)
    _event(engine, "epilogue")
    restore_use(engine)
    _log(prepared, moved, time.perf_counter() - started)
    return prepared.model.path, client_entries(engine, prepared.model, prepared.entries, request)


def _event(engine: DeepSpeedEngine, when: str) -> None:
    """ZeRO-3's own work around a load: partition all parameters before, gather the persistent ones after."""
    optimizer = engine.optimizer
    if optimizer is not None and hasattr(optimizer, f"checkpoint_event_{when}"):
        getattr(optimizer, f"checkpoint_event_{when}")()


def _log(prepared: Prepared, moved: Moved, seconds: float) -> None:
    live = prepared.live
    logger.info(
        "loaded %s (ZeRO %s, dp=%d) as ZeRO %s, dp=%d: %.1f MiB read from %d files in %.2f s",
        prepared.checkpoint.listing.folder,
        prepared.checkpoint.stage,
        prepared.checkpoint.dp,
        live.stage if live else 0,
        live.dp if live else 1,
        moved.bytes_read / 2**20,
        len(moved.files),
        seconds,
    )


_GUARDED = ("step", "save_checkpoint")


def refuse_use(engine: DeepSpeedEngine, why: str) -> None:
    """Let the engine neither step nor save: it may hold half a checkpoint."""

    def refuse(*_: object, **__: object) -> object:
        raise EngineUnusable(f"{why}: the engine may hold parts of it; load a good checkpoint or build the engine anew")

    for name in _GUARDED:
        object.__setattr__(engine, name, refuse)


def restore_use(engine: DeepSpeedEngine) -> None:
    """Undo `refuse_use`, after a load that succeeded."""
    for name in _GUARDED:
        engine.__dict__.pop(name, None)
