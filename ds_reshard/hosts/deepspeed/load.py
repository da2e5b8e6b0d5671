"""The seam of this host: `load_checkpoint`, around DeepSpeed's own; who loads, and in which order.

Rung 2 of the ladder (a method on a class). DeepSpeed publishes no extension point that sees a load before
the data-parallel size is refused (inside `_load_zero_checkpoint`), and model files are looked up by the own
rank before that (`_get_all_ckpt_names`), so the public method is the lowest place from which every layout
can be reached; it has had one signature from 0.14 to 0.19.8.

A load has four collectives of ours where nothing is wrong: what rank 0 found is broadcast; every rank says that it is
ready; every rank says what it read, as checksums; every rank says that it is done. None of them grows with the model:
every rank reads the two small files that rank 0 lists, all at once, and says a digest of each file that it has opened.
Details are told only after a difference; but of a universal checkpoint, and of one of another format, rank 0 tells all
that it has read, and what it has read of the files of experts, and of a pipeline's masters at ZeRO stage 0.
Where several ranks may read the same bytes, as of grids, two more tell the checksums of what they read in parts. A
fingerprint or a report file, where one was asked for, adds one; over gloo stage 3 waits for DeepSpeed's gathers with a
barrier, which carries nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digest, digests
from ds_reshard.containers.pickle_rules import PickleRules, in_force, trusted
from ds_reshard.containers.remote import is_url
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.execution.cuda import device_faults
from ds_reshard.execution.states import given
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, AnyCheckpoint, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import LAGGING
from ds_reshard.formats.zero.names import column_of, pattern_in_path, stray_files
from ds_reshard.formats.zero.shards import ZeroShards, signature_by_family
from ds_reshard.formats.zero.tensor_parallel import note_on_unnamed
from ds_reshard.hooks import Call
from ds_reshard.hosts.deepspeed.engine import (
    Run,
    event,
    forget_second_copies,
    live_kind,
    refuse_use,
    restore_use,
    run_of,
    unsupported,
)
from ds_reshard.hosts.deepspeed.entries import Request, client_entries, clipping_faults, reads_no_url, scheduler_faults
from ds_reshard.hosts.deepspeed.find_checkpoint import (
    Found,
    deepspeeds_file,
    latest_tag,
    look,
    look_aside,
    look_on_node,
    look_too,
    other_folder,
    refuse_unsafe_files,
)
from ds_reshard.hosts.deepspeed.load_targets import state_faults
from ds_reshard.hosts.deepspeed.move import Moved, divided_names, move, unproved
from ds_reshard.hosts.deepspeed.prepare import Prepared, SavedGroups, live_model, model_faults, prepare, same_layout
from ds_reshard.hosts.deepspeed.ready import Decision, ReadinessReport, check_ranks_agree
from ds_reshard.hosts.deepspeed.resume import Resume, policy_of, restrict, scheduler_seam_off, was_saved_by
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.hosts.deepspeed.unfound import check_trained_names, with_names
from ds_reshard.model.facts import canonical
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.operations.pickles import scan_files
from ds_reshard.operations.ranks import Steps, attempt, broadcast, rank
from ds_reshard.operations.watching import asked, phase, watched
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import say

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One rank's view of its engine before anything is read; without a `run` DeepSpeed loads anyway.

    `universal` says that the JSON asks for universal checkpoints.
    """

    settings: Settings
    policy: ResumePolicy
    universal: bool
    run: Run | None


def load_checkpoint(call: Call) -> Result:
    """Load through DeepSpeed where the layout is unchanged, directly from the files where it is not.

    Either way the resume policy decides what is asked for, and what this run's values replace afterwards.
    Collective: every rank calls it with the same arguments, and every rank leaves it the same way.
    """
    engine, tag = call["self"], call["tag"]
    request = Request(
        load_dir=str(call["load_dir"]),
        tag=str(tag) if tag is not None else "",
        strict=call["load_module_strict"],
        optimizer=call["load_optimizer_states"],
        scheduler=call["load_lr_scheduler_states"],
        module_only=call["load_module_only"],
        custom_load_fn=call["custom_load_fn"],
    )
    steps = Steps()
    with scheduler_seam_off():
        mine = steps.take(
            lambda: _consider(engine, module_only=request.module_only), subject=f"loading {request.load_dir}"
        )
        settings = mine.settings if mine is not None else Settings()
        wanted = asked(settings.progress, settings.events, settings.timeout_s)
        with in_force(PickleRules(settings.trust)), watched("deepspeed", request.load_dir, wanted):
            return _load(engine, mine, call, request, tag, steps)


def _consider(engine: DeepSpeedEngine, *, module_only: bool) -> Considered:
    """This rank's settings, policy and engine; a pending save is finished first, as ranks wait for each other there."""
    _commit_pending_save(engine)
    settings = parse_settings(engine._config._param_dict)
    settings = replace(settings, trust=trusted(settings.trust))
    policy = policy_of(live_kind(engine), settings, module_only=module_only)
    if settings.enabled:
        raise_faults(device_faults("ds_reshard.reshard.device", settings.device), subject="DeepSpeed config")
    features = tuple(unsupported(engine)) if settings.enabled else ()
    universal = bool(engine.load_universal_checkpoint())
    direct = settings.enabled and not (features and universal) and live_kind(engine) != "offload"
    run = run_of(engine, features, settings.tensor_parallel) if direct else None
    return Considered(settings=settings, policy=policy, universal=universal, run=run)


def _commit_pending_save(engine: DeepSpeedEngine) -> None:
    """A decoupled checkpoint engine may still be writing what is to be read: let it finish first.

    DeepSpeed's method ends with a barrier: no rank reads before all have finished.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(writer, "is_decoupled", lambda: False)():
        engine._commit_decoupled_checkpoint()


def _load(
    engine: DeepSpeedEngine, mine: Considered | None, call: Call, request: Request, tag: object, steps: Steps
) -> Result:
    with phase("prepare"):
        found, decision = agree_on_loader(engine, mine, request, tag, steps)
    assert mine is not None and decision.resume is not None
    resume, tag = decision.resume, found.tag or tag
    with given(engine.optimizer) as resume.given:
        if decision.prepared is not None:
            return resume.report(_load_directly(engine, decision.prepared, mine.settings, resume))
        with phase("deepspeed"):
            result = _by_deepspeed(engine, call, resume.request, tag)
        return resume.report(resume.after_deepspeed(result))


@gc_disabled()
def agree_on_loader(
    engine: DeepSpeedEngine, mine: Considered | None, request: Request, tag: object, steps: Steps
) -> tuple[Found, Decision]:
    """What was found, and what every rank does with it; raises on every rank where one is not ready. Collective."""
    found = _found(engine, mine, request, tag)
    with digests() as read:
        decision = _decide(engine, mine, found, request, steps)
    decision.files = read
    ready = None
    if mine is not None:
        subject = f"loading {request.load_dir}"
        ready = steps.take(lambda: _said(mine, found, decision, request), subject=subject, always=True)
    told = steps.gather(ready or ReadinessReport())
    check_ranks_agree(told, steps, found, decision, request)
    unread = mine is not None and mine.settings.enabled and decision.loader == "DeepSpeed, unread"
    if mine is not None and unread and (found.tag or found.faults or mine.run is None):
        refuse_unsafe_files(request.load_dir, found.tag or tag, universal=mine.universal)
    return found, decision


def _found(engine: DeepSpeedEngine, mine: Considered | None, request: Request, tag: object) -> Found:
    """What rank 0 found; every rank reads the checkpoint's own two files by what rank 0 lists. Collective."""
    found = Found()
    if mine is not None and rank() == 0:
        seen, faults, _ = attempt(lambda: _find(engine, mine, request, tag))
        found = seen or Found(faults=tuple(faults))
    told = broadcast(found.told())
    if mine is None:
        return told
    if rank() == 0 and not found.unread:
        return found
    seen, faults, _ = attempt(lambda: _find_too(engine, mine, request, tag, told))
    return seen or replace(told, faults=tuple(faults))


def _find_too(engine: DeepSpeedEngine, mine: Considered, request: Request, tag: object, told: Found) -> Found:
    """Every rank: what this rank sees of what rank 0 found."""
    if told.faults:
        return told
    run = mine.run
    if run is not None and (told.listing is not None or told.universal):
        wanted = restrict(request, _policy(mine, told)).load_optimizer
        if told.listing is not None:
            told = replace(told, listing=with_names(told.listing, run.module.names, mine.settings.names))
        found = look_too(told, optimizer=wanted, row=run.grid.row)
        if found.faults and told.listing is not None and run.node_local:
            found = look_on_node(
                found, run.data_rank, run.data_ranks if run.columns == 1 else 0, optimizer=wanted and run.stage > 0
            )
        return _with_aside(mine, request, tag, found)
    if mine.settings.enabled and not (tag or told.tag or told.checkpoint):
        file = f"{request.load_dir}/{deepspeeds_file(universal=mine.universal)}"
        return replace(told, faults=(other_folder(file, "none", "one"),) if folders.is_file(file) else ())
    return told


def _policy(mine: Considered, found: Found) -> ResumePolicy:
    """To load what this very run has saved is no resume."""
    return mine.policy if not found.own_save else ResumePolicy(report=mine.policy.report)


def _find(engine: DeepSpeedEngine, mine: Considered, request: Request, tag: object) -> Found:
    """Rank 0: what the folder holds, and what the resume policy needs to know of it."""
    load_dir, universal, run = request.load_dir, mine.universal, mine.run
    own_save = not mine.policy.is_default and was_saved_by(engine, load_dir, tag, universal=universal)
    found = Found(own_save=own_save)
    if run is not None:
        wanted = restrict(request, _policy(mine, found)).load_optimizer
        names, row = mine.settings.names, run.grid.row
        rename = partial(with_names, run=run.module.names, names=names)
        looked = look(
            load_dir, tag, optimizer=wanted, universal=universal, names=names, row=row, later=True, rename=rename
        )
        found = replace(looked, own_save=own_save)
    elif mine.settings.enabled:
        named = tag if tag is not None else latest_tag(load_dir, deepspeeds_file(universal=universal))
        found = replace(found, tag=str(named or ""))
    return found if found.unread else _with_aside(mine, request, tag, found)


def _with_aside(mine: Considered, request: Request, tag: object, found: Found) -> Found:
    """The same with what a resume policy needs of files that are not read here."""
    unread = mine.run is None or (found.tag and _is_unread(mine.run, found))
    if not unread or _policy(mine, found).is_default:
        return found
    aside = look_aside(request.load_dir, found.tag or tag, universal=mine.universal)
    said = {aside.folder: digest(canonical(aside.entries))}
    return replace(found, aside=aside, prints={**found.prints, **said})


def _is_unread(run: Run, found: Found) -> bool:
    """Whether DeepSpeed loads, as there is nothing that is read here."""
    return found.checkpoint is None and (not found.faults or as_saved(run, found))


def _decide(engine: DeepSpeedEngine, mine: Considered | None, found: Found, request: Request, steps: Steps) -> Decision:
    """What this rank does with what rank 0 found; every fault that can be known before the engine changes."""
    made, subject = Decision(), f"loading {request.load_dir}"
    if mine is None:
        return made
    policy = _policy(mine, found)
    made.resume = resume = steps.take(lambda: Resume(engine, policy, request, mine.settings), subject=subject)
    if resume is None:
        return made
    steps.take(resume.check_policy, subject=subject)
    run = mine.run
    if run is None or _is_unread(run, found):
        made.loader = "DeepSpeed, unread"
        if is_url(request.load_dir) and mine.settings.enabled:
            steps.take(lambda: raise_faults([reads_no_url(request.load_dir)], subject=subject), subject=subject)
        if found.tag or run is None:  # else there is nothing to load, and nothing to apply a policy to
            steps.take(lambda: raise_faults(found.faults if run is None else (), subject=subject), subject=subject)
            steps.take(lambda: resume.check_unread_load(found.aside), subject=subject)
        return made
    steps.take(lambda: raise_faults(found.faults, subject=subject), subject=subject)
    checkpoint = found.checkpoint
    if checkpoint is None:
        return made
    groups = SavedGroups(run.optimizer, checkpoint, run.grid, optimizer=resume.request.load_optimizer)
    steps.take(lambda: resume.read(checkpoint, groups, mine.settings), subject=subject)
    shards = ZeroShards(checkpoint=checkpoint) if isinstance(checkpoint, ZeroCheckpoint) else None
    made.shards, asked = shards, replace(resume.request, tag=found.tag)
    resume.request, folder = asked, f"loading {checkpoint.listing.folder}"
    leave = steps.take(lambda: leave_to_deepspeed(run, mine.settings, checkpoint, asked, shards), subject=folder)
    made.loader = {True: "DeepSpeed", False: "ds_reshard", None: ""}[leave]
    if leave is False:
        made.prepared = steps.take(lambda: prepare(run, checkpoint, groups, asked, mine.settings), subject=folder)
        made.shards = made.prepared.shards if made.prepared is not None else None
    return made


def _said(mine: Considered, found: Found, decision: Decision, request: Request) -> ReadinessReport:
    """What this rank says of itself, as much as it can where it has failed."""
    view, shards, prepared = (
        repr((mine.run is not None, mine.settings.enabled, mine.policy)),
        decision.shards,
        decision.prepared,
    )
    given = request.given if mine.settings.enabled else None
    ready = ReadinessReport(
        route=view,
        policy=mine.policy,
        loader=decision.loader,
        arguments=given,
        reshards_states=decision.reshards_states,
    )
    read = [sorted(files.items()) for files in (found.prints, decision.files) if files]
    sets = (zip(*files, strict=True) for files in read)
    ready = ready._replace(file_sets=frozenset((digest(paths), digest(contents)) for paths, contents in sets))
    if not found.universal:  # which has a file for each tensor
        ready = ready._replace(files=frozenset(decision.files.items()))
    if prepared is not None and mine.settings.prove:
        names = divided_names(prepared, unproved=unproved(prepared))
        ready = ready._replace(fingerprinted=(prepared.grid.column, names))
    if shards is None:
        return ready
    signatures = frozenset(
        (family, digest(sorted(alike.items())))
        for name, said in shards.signatures.items()
        for family, alike in signature_by_family(name, said, states=ready.reshards_states).items()
    )
    prints = frozenset(
        (digest((column_of(name), marks)), name)
        for name, marks in shards.checksums.items()
        if sum(crc is not None for _, crc in marks) > 1
    )
    return ready._replace(signatures=signatures, shard_checksums=prints)


def as_saved(run: Run, found: Found) -> bool:
    """Whether files of a kind that is not read here are this engine's own.

    DeepSpeed does not look at the expert-parallel size of AutoEP, and at ZeRO 1 loads the masters of others silently
    (`_get_padded_tensor`, runtime/zero/stage_1_and_2.py, 0.19.8).
    Of a universal checkpoint DeepSpeed loads other sizes too, when it is asked to.
    """
    if any(fault.error != "UnsupportedLayout" for fault in found.faults) and not found.on_nodes:
        return False
    if found.universal and run.universal:
        return True
    sizes = run.data_ranks, run.columns, run.expert_sizes
    return (bool(run.features) or found.on_nodes) and found.sizes == sizes


def leave_to_deepspeed(
    run: Run, settings: Settings, checkpoint: AnyCheckpoint, request: Request, shards: ZeroShards | None
) -> bool:
    """Whether DeepSpeed's own path takes this load, as this rank sees it; raises what can be loaded by neither.

    What is left to DeepSpeed has had its structure checked. At
    stage 3 a load without optimizer states is not left to DeepSpeed: with `load_module_only` it loads
    nothing, and with `load_optimizer_states=False` the weights of `latest`, whatever the tag
    (`_load_checkpoint`, runtime/engine.py, 0.19.8; issue 8499 of DeepSpeed). With "load_universal" DeepSpeed
    takes every folder for a universal one.
    """
    same = run.unpickles and same_layout(run, checkpoint)
    same = same and not (request.load_optimizer and _overlooked(run, checkpoint))
    faults: list[Fault] = []
    if run.features and not same:
        faults.append(_unsupported_fault(run, run.features, checkpoint))
    weights_alone = checkpoint.stage == 3 or bool(checkpoint.stages) or _keeps_own_masters(run)
    partial = not request.moments if request.load_optimizer else weights_alone
    custom = request.custom_load_fn is not None  # which DeepSpeed alone calls
    asked = (settings.always or settings.prove) and not custom
    always = (asked or run.universal or is_url(request.load_dir)) and checkpoint.stage != 0
    leave = same and (bool(run.features) or not (always or partial))
    if custom and not leave:
        what = "is called by DeepSpeed's own load, which takes the layout that was saved, with optimizer states"
        expected = f"stage {checkpoint.displayed_stage}, {checkpoint.grid}, as saved, with optimizer states"
        found = "another layout" if request.load_optimizer else "a load without optimizer states"
        mend = "load without custom_load_fn, or with the optimizer states and the layout that were saved"
        where = "load_checkpoint(custom_load_fn=...)"
        faults.append(UnsupportedLayout.fault(where, what, expected, found, mend=mend))
    if leave and request.load_optimizer and not request.moments and "SuperOffload" not in run.features:
        faults.append(_unsupported_fault(run, (*run.features, "masters without moments"), checkpoint))
    faults += _unsaved(run, checkpoint, request) if request.load_optimizer else ()
    faults += _swapping(run) if leave else ()
    if leave and is_url(request.load_dir):
        faults.append(reads_no_url(request.load_dir))
    if leave and not faults and shards is not None:
        faults += pattern_in_path(request.load_dir, request.tag) + _check_own(run, checkpoint, shards)
        faults += scheduler_faults(run.scheduler, checkpoint.model, request)
    if leave and checkpoint.stage == 0 and not custom:  # DeepSpeed compares no names there
        strict = request.strict or request.load_optimizer
        check_trained_names(live_model(run, {}), checkpoint, run.grid, strict=strict)
    if leave and checkpoint.stages:  # of which DeepSpeed stops one stage alone, and the others wait for it
        model = live_model(run, {})
        faults += model_faults(model, checkpoint, run.grid, optimizer=False, strict=request.strict)
    raise_faults(faults, subject=f"loading {checkpoint.listing.folder}")
    if leave and request.load_optimizer and "ZenFlow" in run.features and rank() == 0:
        logger.warning("ZenFlow: %s has no moments of the columns that it selects: they begin anew", request.load_dir)
    return leave


def _unsaved(run: Run, checkpoint: AnyCheckpoint, request: Request) -> Iterator[Fault]:
    """What DeepSpeed keeps beside the optimizer, and neither saves nor loads.

    SuperOffload has its moments in another process (`SuperOffloadCPUOptimizer`, runtime/superoffload, 0.19.8).
    """
    if "SuperOffload" in run.features and request.moments:
        where = "zero_optimization.offload_optimizer.super_offload"
        what = "keeps its moments in another process, and DeepSpeed neither saves nor loads them: they would begin anew"
        mend = "--load-masters-only, for what there is; to keep moments, train without it"
        yield UnsupportedLayout.fault(where, what, "false", "true", mend=mend)
    if checkpoint.model.masters_lag and "ZenFlow" not in run.features:
        mend = (
            "resume with ZenFlow and the layout that was saved, or pass --no-load-optim, or load_optimizer_states=False"
        )
        yield UnsupportedLayout.fault(checkpoint.listing.folder, LAGGING, mend=mend)


def _swapping(run: Run) -> Iterator[Fault]:
    """Of an optimizer under NVMe offload DeepSpeed loads the masters that lie there, whatever is asked for.

    It copies the files of `offloaded_tensors` and opens no optimizer file (`load_checkpoint`, runtime/engine.py,
    0.19.8), and a fresh optimizer does not know the moments among them (`has_state_tensors`,
    runtime/swap_tensor/optimizer_utils.py).
    """
    if run.swaps:
        what = "DeepSpeed loads neither moments, steps nor small param groups of an optimizer there: they begin anew"
        mend = 'train with "device": "cpu"; for what DeepSpeed makes of it, load once with "ds_reshard": '
        mend += '{"enabled": false}'
        yield UnsupportedLayout.fault("zero_optimization.offload_optimizer.device", what, "cpu", "nvme", mend=mend)


def _overlooked(run: Run, checkpoint: AnyCheckpoint) -> bool:
    """Whether DeepSpeed takes the states of an optimizer of another kind, or finds late that gradients were clipped.

    At stage 3 it adds its masters to those that a fresh torch Adagrad has, and stops, as there are too many
    (`_set_fp32_optimizer_param_groups`, runtime/zero/stage3.py, 0.19.8).
    """
    live = run.optimizer
    if run.features or live is None or live.stage == 0:
        return False
    fresh = live.name == "Adagrad" and any(one["params"] for one in live.groups)
    if live.kind == "zero3" and fresh:
        return True
    late = clipping_faults(live.computes_norm, checkpoint.optimizer_entries, frozenset())
    return bool(late) or any(state_faults(live, checkpoint))


def _keeps_own_masters(run: Run) -> bool:
    """Whether weights alone, loaded by DeepSpeed, would be undone by the first step.

    At stage 0 `FP16_Optimizer` and `FP16_UnfusedOptimizer` (runtime/fp16, 0.19.8) step on masters of their own, which
    a load without optimizer states leaves as they were initialised.
    """
    return run.kind in ("fused", "unfused")


def _check_own(run: Run, checkpoint: AnyCheckpoint, shards: ZeroShards) -> list[Fault]:
    """Open the shards that DeepSpeed will load on this rank, and say what is wrong with them.

    The model file was read by rank 0, maybe on another node: its pickle is searched as it lies here, and so is an
    optimizer of experts at stage 0, and the names of the files among which DeepSpeed looks for them.
    """
    index, live = Index(checkpoint.layout, shards), run.optimizer
    listing = checkpoint.listing
    name = listing.model.get(live.rank if live is not None and listing.partitioned_model else 0)
    places = {listing.ep_optim.get(held.first // held.size) for held in run.grid.experts.values()}
    unpickled = [listing.path(one) for one in (name, *places) if one is not None]
    if live is not None and live.stage != 0:
        if checkpoint.optim is not None:
            index.open(OPTIM, live.rank)
        index.open(MODEL, live.rank if checkpoint.listing.partitioned_model else 0)
    strays = stray_files(listing.folder, folders.entries(listing.folder), listing.nbytes)
    return [*strays, *index.faults, *scan_files(unpickled).faults]


def _unsupported_fault(run: Run, features: tuple[str, ...], checkpoint: AnyCheckpoint) -> Fault:
    again = 'remove "writer" from "checkpoint": its engine does not load what it saves, and '
    return UnsupportedLayout.fault(
        checkpoint.listing.folder,
        f"a load under another layout is not supported with {', '.join(features)}",
        f"stage {checkpoint.stage}, {checkpoint.grid}, as saved",
        f"stage {run.stage}, dp={run.data_ranks}",
        mend='set "checkpoint": {"load_universal": true}: DeepSpeed then loads it'
        if checkpoint.listing.universal
        else f"{'' if run.unpickles else again}resume with the layout that was saved",
    )


def _by_deepspeed(engine: DeepSpeedEngine, call: Call, request: Request, tag: object) -> Result:
    result: Result = call(
        tag=tag,
        load_optimizer_states=request.optimizer,
        load_lr_scheduler_states=request.scheduler,
        load_module_only=request.module_only,
    )
    forget_second_copies(engine)
    restore_use(engine)
    return result


@gc_disabled()
def _load_directly(engine: DeepSpeedEngine, prepared: Prepared, settings: Settings, resume: Resume) -> Result:
    """Read the checkpoint into this engine, whatever layout either has, and apply the resume policy. Collective."""
    folder, steps = prepared.checkpoint.listing.folder, Steps()
    started = time.perf_counter()
    refuse_use(engine, f"a load of {folder} did not finish")
    event(engine, "prologue")
    moved = move(engine, prepared, resume.request, settings, steps)
    event(engine, "epilogue")
    client = steps.take(
        lambda: client_entries(engine, prepared.model, prepared.entries, resume.request), subject=f"loading {folder}"
    )
    resume.proof = str(moved.proof) if moved.proof is not None else None
    result = (prepared.model.path, client)
    with phase("resume"):
        resume.apply(steps)
    restore_use(engine)
    _log(prepared, moved, time.perf_counter() - started)
    return result


def _log(prepared: Prepared, moved: Moved, seconds: float) -> None:
    live, saved = prepared.live, prepared.checkpoint.grid._replace(dp=prepared.checkpoint.dp).short
    if not rank():
        universal = "universal, of " if prepared.checkpoint.listing.universal else ""
        stage = prepared.checkpoint.displayed_stage
        say(
            f"loaded {prepared.checkpoint.listing.folder} ({universal}ZeRO {stage}, {saved}) as "
            f"ZeRO {live.stage if live else 0}, dp={live.dp if live else 1}; "
            f"rank 0 read {moved.bytes_read / 2**20:.1f} MiB from {len(moved.files)} files in {seconds:.2f} s"
        )
    note = note_on_unnamed(prepared.checkpoint.splits)
    if note and not rank():
        logger.warning("%s: %s", prepared.checkpoint.listing.folder, note)
    made = prepared.wants.from_masters if prepared.checkpoint.stages else []
    if made:
        why = "no file of a layer holds them as this pipeline stage needs them"
        text = "%s: weights were cast from their fp32 masters, as %s: %s"
        logger.warning(text, prepared.checkpoint.listing.folder, why, ", ".join(made))
    if moved.proof is not None:
        logger.info("%s: %s", prepared.checkpoint.listing.folder, moved.proof)
