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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_reshard.containers.pickle_rules import PickleRules, in_force, rules_in_force, trusted
from ds_reshard.errors import Fault, raise_faults
from ds_reshard.execution.cuda import device_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.hosts.deepspeed.choose import Considered, as_saved, disagreement, leave_to_deepspeed
from ds_reshard.hosts.deepspeed.entries import Request, client_entries
from ds_reshard.hosts.deepspeed.events import event
from ds_reshard.hosts.deepspeed.live import LiveOptimizer, live_kind, live_optimizer, unsupported
from ds_reshard.hosts.deepspeed.look import Found, latest_tag, look, look_aside, tag_files
from ds_reshard.hosts.deepspeed.move import Moved, move
from ds_reshard.hosts.deepspeed.own_saves import is_resume
from ds_reshard.hosts.deepspeed.prepare import Prepared, prepare
from ds_reshard.hosts.deepspeed.resumed import LEFT_TO_DEEPSPEED, Resume, policy_of
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.hosts.deepspeed.unowned import as_it_is
from ds_reshard.hosts.deepspeed.usable import refuse_use, restore_use
from ds_reshard.operations.pickles import refuse_unsafe, walk
from ds_reshard.operations.ranks import agree, attempt, broadcast, gather, raise_caused, rank
from ds_reshard.resume.policy import ResumePolicy, policy_differences

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]
Original = Callable[[dict[str, object]], Result]
"""DeepSpeed's own method with the user's arguments, but for those given here by name."""


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

    Either way the resume policy decides what is asked for, and what this run's values replace afterwards.
    Collective: every rank calls it with the same arguments, and every rank leaves it the same way.
    `original` is DeepSpeed's own method; it takes the arguments that differ from the user's.
    """
    request = Request(
        load_dir=str(load_dir),
        tag=str(tag) if tag is not None else "",
        strict=load_module_strict,
        optimizer=load_optimizer_states,
        scheduler=load_lr_scheduler_states,
        module_only=load_module_only,
        custom_load_fn=custom_load_fn,
    )
    with as_it_is():
        mine = _considered(engine, request)
        with in_force(PickleRules(mine.settings.trust)):
            return _load(engine, mine, original, request, tag)


def _considered(engine: DeepSpeedEngine, request: Request) -> Considered:
    """What this rank has, where all ranks have the same. Collective."""
    load_dir = request.load_dir
    mine, faults, cause = attempt(lambda: _consider(engine, module_only=request.module_only))
    considered = gather(((mine.direct, mine.policy) if mine else None, faults))
    faults = [fault for _, of_rank in considered for fault in of_rank]
    if not faults:
        faults = policy_differences([view[1] for view, _ in considered if view is not None])
    if len({repr(view) for view, _ in considered}) > 1 and not faults:
        faults.append(disagreement(load_dir))
    raise_caused(faults, subject=f"loading {load_dir}", cause=cause)
    assert mine is not None
    return mine


def _load(engine: DeepSpeedEngine, mine: Considered, original: Original, request: Request, tag: object) -> Result:
    load_dir = request.load_dir
    policy = mine.policy if is_resume(engine, mine.policy, load_dir, tag) else ResumePolicy(report=mine.policy.report)
    resume = Resume(engine, policy, request)
    resume.proof = LEFT_TO_DEEPSPEED if mine.settings.prove else None
    resume.refuse()
    universal = engine.load_universal_checkpoint()
    if not mine.direct:
        resume.without_files(lambda: look_aside(load_dir, tag, universal=universal))
        if mine.settings.enabled:
            _refuse_unsafe(load_dir, tag, universal=universal)
        return resume.finish(_by_deepspeed(engine, original, resume.request, tag))
    wanted = resume.request.load_optimizer
    found = broadcast(look(load_dir, tag, optimizer=wanted, universal=universal) if rank() == 0 else Found())
    if found.checkpoint is None and (not found.faults or as_saved(engine, found, mine.features)):
        if found.tag:  # else there is nothing to load, and nothing to apply a policy to
            resume.without_files(lambda: look_aside(load_dir, found.tag, universal=universal))
            _refuse_unsafe(load_dir, found.tag, universal=universal)
        return resume.finish(_by_deepspeed(engine, original, resume.request, found.tag or tag))
    raise_faults(found.faults, subject=f"loading {load_dir}")
    assert found.checkpoint is not None
    resume.read(mine.live, found.checkpoint, mine.settings)
    request = replace(resume.request, tag=found.tag)
    if leave_to_deepspeed(engine, mine, found.checkpoint, request):
        return resume.finish(_by_deepspeed(engine, original, request, found.tag))
    return resume.finish(_load_directly(engine, mine.live, found.checkpoint, request, mine.settings, resume))


def _refuse_unsafe(load_dir: str, tag: object, *, universal: bool) -> None:
    """Raise on every rank where DeepSpeed would run what is in a pickle of this checkpoint. Collective."""

    def files(faults: list[Fault]) -> Iterator[str]:
        found = tag if tag is not None else latest_tag(load_dir, *tag_files(universal=universal))
        return walk(os.path.join(load_dir, str(found)), faults) if found is not None else iter(())

    refuse_unsafe(files, trust=rules_in_force().trusted, subject=f"loading {load_dir}")


def _by_deepspeed(engine: DeepSpeedEngine, original: Original, request: Request, tag: object) -> Result:
    result = original(
        {
            "tag": tag,
            "load_optimizer_states": request.optimizer,
            "load_lr_scheduler_states": request.scheduler,
            "load_module_only": request.module_only,
        }
    )
    restore_use(engine)
    return result


def _consider(engine: DeepSpeedEngine, *, module_only: bool) -> Considered:
    """This rank's settings, policy and engine; a pending save is finished first."""
    settings = parse_settings(engine._config._param_dict)
    settings = replace(settings, trust=trusted(settings.trust))
    policy = policy_of(engine, settings, module_only=module_only)
    if settings.enabled:
        raise_faults(device_faults("ds_reshard.reshard.device", settings.device), subject="DeepSpeed config")
    features = tuple(unsupported(engine)) if settings.enabled else ()
    by_universal = bool(features) and engine.load_universal_checkpoint()
    if not settings.enabled or by_universal or live_kind(engine) == "offload":
        return Considered(direct=False, settings=settings, live=None, features=features, policy=policy)
    _commit_pending_save(engine)
    return Considered(direct=True, settings=settings, live=live_optimizer(engine), features=features, policy=policy)


def _commit_pending_save(engine: DeepSpeedEngine) -> None:
    """A decoupled checkpoint engine may still be writing what is to be read: let it finish first."""
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(writer, "is_decoupled", lambda: False)():
        engine._commit_decoupled_checkpoint()


def _load_directly(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    request: Request,
    settings: Settings,
    resume: Resume,
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
    event(engine, "prologue")
    moved = move(engine, prepared, request, settings)
    event(engine, "epilogue")
    client, faults, cause = attempt(lambda: client_entries(engine, prepared.model, prepared.entries, request))
    agree(faults, subject=f"loading {folder}", cause=cause)
    restore_use(engine)
    resume.proof = str(moved.proof) if moved.proof is not None else None
    _log(prepared, moved, time.perf_counter() - started)
    return prepared.model.path, client


def _log(prepared: Prepared, moved: Moved, seconds: float) -> None:
    live = prepared.live
    logger.info(
        "loaded %s (%sZeRO %s, dp=%d) as ZeRO %s, dp=%d: %.1f MiB read from %d files in %.2f s",
        prepared.checkpoint.listing.folder,
        "universal, of " if prepared.checkpoint.listing.universal else "",
        prepared.checkpoint.stage,
        prepared.checkpoint.dp,
        live.stage if live else 0,
        live.dp if live else 1,
        moved.bytes_read / 2**20,
        len(moved.files),
        seconds,
    )
    if moved.proof is not None:
        logger.info("%s: %s", prepared.checkpoint.listing.folder, moved.proof)
