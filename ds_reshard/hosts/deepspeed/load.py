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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digest
from ds_reshard.containers.pickle_rules import PickleRules, in_force, trusted
from ds_reshard.containers.remote import is_url
from ds_reshard.errors import Fault, ReshardError, UnsupportedLayout, faults_of, only_as_saved, raise_faults
from ds_reshard.execution.checksums import SEEN_BY_ALL
from ds_reshard.execution.cuda import device_faults
from ds_reshard.execution.states import sampled_loads
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, AnyCheckpoint, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import LAGGING
from ds_reshard.formats.zero.names import column_of, pattern_in_path, stray_files
from ds_reshard.formats.zero.shards import (
    ZeroShards,
    compare_checksums,
    compare_signatures,
    rank_independent_text,
    signature_by_family,
)
from ds_reshard.formats.zero.stage0 import other_members
from ds_reshard.formats.zero.tensor_parallel import note_on_unnamed
from ds_reshard.hooks import Call
from ds_reshard.hosts.deepspeed.engine import (
    Run,
    event,
    forget_second_copies,
    live_kind,
    model_numbers,
    refuse_use,
    restore_use,
    run_of,
    unsupported,
)
from ds_reshard.hosts.deepspeed.entries import (
    Request,
    client_entries,
    clipping_faults,
    reads_no_url,
    scheduler_faults,
    unloaded_faults,
)
from ds_reshard.hosts.deepspeed.find_checkpoint import (
    Found,
    deepspeeds_file,
    given_map,
    latest_tag,
    look,
    look_aside,
    look_on_node,
    look_too,
    other_folder,
    refuse_unsafe_files,
)
from ds_reshard.hosts.deepspeed.foreign import ForeignCheckpoint
from ds_reshard.hosts.deepspeed.load_targets import state_faults
from ds_reshard.hosts.deepspeed.move import Moved, divided_names, master_faults, move, unproved
from ds_reshard.hosts.deepspeed.prepare import Prepared, SavedGroups, live_model, model_faults, prepare, same_layout
from ds_reshard.hosts.deepspeed.resume import Resume, policy_of, restrict, scheduler_seam_off, was_saved_by
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.hosts.deepspeed.unfound import check_trained_names, warn_of_others, with_names
from ds_reshard.model.facts import canonical
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.operations.load import ReadinessReport, load
from ds_reshard.operations.pickles import scan_files
from ds_reshard.operations.ranks import Steps, attempt, gather, rank, run_on_all
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.watching import asked, phase, watched
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import say

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]


@dataclass(slots=True)
class Decision:
    """This rank's decision on a load: who loads, and how. With `can_hand_over` DeepSpeed could load it instead."""

    resume: Resume | None = None
    loader: str = ""
    can_hand_over: bool = False
    shards: ZeroShards | None = None
    prepared: Prepared | None = None

    @property
    def reshards_states(self) -> bool:
        """True if optimizer states are loaded into another layout, so that all ranks must have the same ones."""
        return self.prepared is not None and self.resume is not None and self.resume.request.load_optimizer


def load_checkpoint(call: Call) -> Result:
    """Load directly from the files, whether the layout has changed or not; through DeepSpeed if nobody else can.

    Either way the resume policy decides what is asked for, and what this run's values replace afterwards.
    Collective: every rank calls it with the same arguments, and every rank leaves it the same way.
    """
    tag = call["tag"]
    request = Request(
        load_dir=str(call["load_dir"]),
        tag=str(tag) if tag is not None else "",
        strict=call["load_module_strict"],
        optimizer=call["load_optimizer_states"],
        scheduler=call["load_lr_scheduler_states"],
        module_only=call["load_module_only"],
        custom_load_fn=call["custom_load_fn"],
    )
    with scheduler_seam_off():
        return load(DeepSpeedLoad(call["self"], request, tag, call))


class DeepSpeedLoad:
    """One load into an engine, or into a run that has not started (preflight); the steps are in operations/load.py.

    Without a `run` DeepSpeed loads; `universal` is True if the JSON asks for universal checkpoints.
    """

    built_alike = "give every rank the same DeepSpeed config and build the same engine"

    def __init__(self, engine: DeepSpeedEngine, request: Request, tag: object, call: Call | None = None) -> None:
        self.engine, self.request, self.tag, self.where, self._call = engine, request, tag, request.load_dir, call
        self.settings, self.policy = Settings(), ResumePolicy()
        self.universal = False
        self.run: Run | None = None

    def read_run(self) -> None:
        """A pending save is finished first, as ranks wait for each other there."""
        engine = self.engine
        _commit_pending_save(engine)
        settings = parse_settings(engine._config._param_dict)
        settings = replace(settings, trust=trusted(settings.trust))
        self.policy = policy_of(live_kind(engine), settings, module_only=self.request.module_only)
        if settings.enabled:
            raise_faults(device_faults("ds_reshard.reshard.device", settings.device), subject="DeepSpeed config")
        features = tuple(unsupported(engine)) if settings.enabled else ()
        self.universal = bool(engine.load_universal_checkpoint())
        direct = settings.enabled and not (features and self.universal) and live_kind(engine) != "offload"
        self.run = run_of(engine, features, settings.tensor_parallel) if direct else None
        self.settings = settings

    @contextmanager
    def in_force(self) -> Iterator[None]:
        settings = self.settings
        wanted = asked(settings.progress, settings.events, settings.timeout_s)
        with in_force(PickleRules(settings.trust)), watched("deepspeed", self.where, wanted):
            yield

    def nothing(self) -> Found:
        return Found()

    def find(self) -> Found:
        """Rank 0: what the folder holds, and what the resume policy needs to know of it."""
        run, policy = self.run, self.policy
        own_save = not policy.is_default and was_saved_by(self.engine, self.where, self.tag, universal=self.universal)
        found = Found(own_save=own_save)
        if run is not None:
            looked = look(
                self.where,
                self.tag,
                optimizer=self._reads_optimizer(found),
                universal=self.universal,
                names=self.settings.names,
                run=Coming(run.module.names, model_numbers(self.engine) if self.settings.names is not None else ()),
                row=run.grid.row,
                later=True,
                rename=partial(with_names, run=run.module.names, names=self.settings.names),
            )
            found = replace(looked, own_save=own_save)
        elif self.settings.enabled:
            latest = latest_tag(self.where, deepspeeds_file(universal=self.universal))
            found = replace(found, tag=str((self.tag if self.tag is not None else latest) or ""))
        return self._with_aside(found) if found.complete else found

    def open(self, found: Found) -> Found:
        """Every rank: read the headers of what rank 0 found, or of this rank's own column."""
        if found.faults:
            return found
        run = self.run
        if isinstance(found.checkpoint, ForeignCheckpoint):
            own, _, _ = attempt(lambda: given_map(self.settings.names))  # the file may lie where rank 0 runs alone
            return replace(found, prints={**found.prints, **(own or {})})
        if run is not None and (found.listing is not None or found.universal):
            optimizer, listing = self._reads_optimizer(found), found.listing
            if listing is not None:
                found = replace(found, listing=with_names(listing, run.module.names, self.settings.names))
            opened = look_too(found, optimizer=optimizer, row=run.grid.row)
            if opened.faults and listing is not None and run.node_local:
                ranks = run.data_ranks if run.columns == 1 else 0
                opened = look_on_node(opened, run.data_rank, ranks, optimizer=optimizer and run.stage > 0)
            return self._with_aside(opened)
        if self.settings.enabled and not (self.tag or found.tag or found.checkpoint):
            file = f"{self.where}/{deepspeeds_file(universal=self.universal)}"
            return found.failed([other_folder(file, "none", "one")] if folders.is_file(file) else ())
        return found

    def choose(self, found: Found, steps: Steps) -> Decision:
        """What this rank does with what rank 0 found; every fault that can be known before the engine changes."""
        made, run, subject = Decision(), self.run, f"loading {self.where}"
        made.resume = resume = steps.take(
            lambda: Resume(self.engine, self._policy(found), self.request, self.settings), subject=subject
        )
        if resume is None:
            return made
        steps.take(resume.check_policy, subject=subject)
        if run is None or _is_unread(run, found):
            made.loader = "DeepSpeed, unread"
            if is_url(self.where) and self.settings.enabled:
                steps.take(lambda: raise_faults([reads_no_url(self.where)], subject=subject), subject=subject)
            if found.tag or run is None:  # else there is nothing to load, and nothing to apply a policy to
                steps.take(lambda: raise_faults(found.faults if run is None else (), subject=subject), subject=subject)
                steps.take(lambda: resume.check_unread_load(found.aside), subject=subject)
            return made
        steps.take(lambda: raise_faults(found.faults, subject=subject), subject=subject)
        checkpoint = found.checkpoint
        if checkpoint is None:
            return made
        groups = SavedGroups(run.optimizer, checkpoint, run.grid, optimizer=resume.request.load_optimizer)
        steps.take(lambda: resume.read(checkpoint, groups, self.settings), subject=subject)
        resume.request = request = replace(resume.request, tag=found.tag)
        subject = f"loading {checkpoint.listing.folder}"
        steps.take(lambda: self._choose_loader(made, run, checkpoint, groups, request), subject=subject)
        return made

    def _choose_loader(
        self, decision: Decision, run: Run, checkpoint: AnyCheckpoint, groups: SavedGroups, request: Request
    ) -> None:
        """Prepare the direct load, or leave the load to DeepSpeed: if that is asked for, or nobody else can load it."""
        settings, can = self.settings, deepspeed_can(run, checkpoint, request)
        left = can and asks_deepspeed(run, settings, request)
        faults = neither_loads(run, checkpoint, request, left=left)
        raise_faults(faults, subject=f"loading {checkpoint.listing.folder}")
        decision.can_hand_over = can and not left
        if not left:
            try:
                decision.prepared = prepare(run, checkpoint, groups, request, settings)
                decision.shards, decision.loader = decision.prepared.shards, "ds_reshard"
                return
            except ReshardError as error:
                found = faults_of(error)
                own_files = all(fault.mend == SEEN_BY_ALL for fault in found)  # as each node may have saved them
                if not (decision.can_hand_over and (only_as_saved(found) or own_files)):
                    raise
        self._leave(decision, run, checkpoint, request)

    def _leave(self, decision: Decision, run: Run, checkpoint: AnyCheckpoint, request: Request) -> None:
        """Leave the load to DeepSpeed, once this rank has checked what it will read."""
        assert isinstance(checkpoint, ZeroCheckpoint), "DeepSpeed loads no other format"
        decision.prepared, decision.shards = None, ZeroShards(checkpoint=checkpoint)
        check_left(run, checkpoint, request, decision.shards)
        decision.loader = "DeepSpeed"

    def hand_over(self, found: Found, decision: Decision) -> None:
        """Let DeepSpeed load instead, as another rank cannot read what the checkpoint holds."""
        decision.can_hand_over = False
        if decision.loader != "DeepSpeed":
            assert self.run is not None and found.checkpoint is not None and decision.resume is not None
            self._leave(decision, self.run, found.checkpoint, decision.resume.request)

    def readiness(self, found: Found, decision: Decision, files: Mapping[str, bytes]) -> ReadinessReport:
        """What this rank reports of itself, as much as it can if it has failed."""
        shards, prepared = decision.shards, decision.prepared
        by_path = [sorted(digests.items()) for digests in (found.prints, files) if digests]
        sets = (zip(*pairs, strict=True) for pairs in by_path)
        report = ReadinessReport(
            route=repr((self.run is not None, self.settings.enabled, self.policy)),
            policy=self.policy,
            loader=decision.loader,
            can_hand_over=decision.can_hand_over,
            arguments=self.request.given if self.settings.enabled else None,
            reshards_states=decision.reshards_states,
            file_sets=frozenset((digest(paths), digest(contents)) for paths, contents in sets),
            files=frozenset(() if found.universal else files.items()),  # a universal folder has a file for each tensor
        )
        if prepared is not None and self.settings.prove:
            names = divided_names(prepared, unproved=unproved(prepared))
            report = report._replace(fingerprinted=(prepared.grid.column, names))
        if shards is None:
            return report
        signatures = frozenset(
            (family, digest(sorted(alike.items())))
            for name, entries in shards.signatures.items()
            for family, alike in signature_by_family(name, entries, states=report.reshards_states).items()
        )
        checksums = frozenset(
            (digest((column_of(name), marks)), name)
            for name, marks in shards.checksums.items()
            if sum(crc is not None for _, crc in marks) > 1
        )
        return report._replace(signatures=signatures, shard_checksums=checksums)

    def folder(self, found: Found) -> str:
        listing = found.checkpoint.listing if found.checkpoint is not None else found.listing
        return listing.folder if listing is not None else self.where

    def file_digests(self, found: Found, decision: Decision, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """A digest of each file that all ranks read, and of the shards that this rank has opened, by their paths.

        If DeepSpeed loads, a model file must be equal only in what all ranks have alike: each node may have saved its
        own, with what the script keeps of its own and the statistics of its own batches.
        """
        models = (found.checkpoint.model, *found.checkpoint.stages) if found.checkpoint is not None else ()
        alike = {model.path: digest(rank_independent_text(model)) for model in models if decision.loader == "DeepSpeed"}
        return {**found.prints, **files, **alike}

    def compare_shards(self, found: Found, decision: Decision, states: bool) -> list[Fault]:
        """Compare all that the shards of all ranks say. Collective."""
        shards, folder = decision.shards, self.folder(found)
        seen = gather((shards.signatures, shards.checksums) if shards is not None else ({}, {}))
        faults = compare_signatures({k: v for one, _ in seen for k, v in one.items()}, folder, states=states)
        return faults + compare_checksums({k: v for _, one in seen for k, v in one.items()}, folder)

    def agreed(self, found: Found, decision: Decision) -> None:
        """Refuse what DeepSpeed would execute of files that are not read here. Collective."""
        unread = self.settings.enabled and decision.loader == "DeepSpeed, unread"
        if unread and (found.tag or found.faults or self.run is None):
            refuse_unsafe_files(self.where, found.tag or self.tag, universal=self.universal)

    def fill(self, found: Found, decision: Decision) -> Result:
        """Read, verify and install, or let DeepSpeed load, as decided; then report what was measured. Collective."""
        resume = decision.resume
        assert resume is not None and self._call is not None
        with sampled_loads(self.engine.optimizer) as resume.given:
            if decision.prepared is not None:
                return resume.report(_load_directly(self.engine, decision.prepared, self.settings, resume))
            with phase("deepspeed"):
                result = _by_deepspeed(self.engine, self._call, resume.request, found.tag or self.tag)
            if found.checkpoint is not None and resume.request.load_optimizer and result[0] is not None:
                self._check_masters(found.checkpoint)
            return resume.report(resume.after_deepspeed(result))

    def _check_masters(self, checkpoint: AnyCheckpoint) -> None:
        """Raise if masters of ZeRO stage 0 are not those of the weights beside them. Collective.

        DeepSpeed matches them by their places (`load_state_dict`, runtime/fp16/fused_optimizer.py and
        unfused_optimizer.py, 0.19.8): those of a parameter that this run freezes may be given to one of its shape.
        """
        run, folder = self.run, checkpoint.listing.folder
        if run is None or run.optimizer is None or checkpoint.stage != 0 or not _keeps_own_masters(run):
            return
        live, names = run.optimizer, {name for buffer in run.optimizer.buffers for name in buffer.shapes}
        if self.settings.checksum:
            refuse_use(self.engine, f"a load of {folder} did not finish")
            faults = master_faults(self.engine, live, run.grid, names, checkpoint=checkpoint)
            run_on_all(lambda: raise_faults(faults, subject=f"loading {folder}"), subject=f"loading {folder}")
            restore_use(self.engine)

    def _policy(self, found: Found) -> ResumePolicy:
        """The policy of this load. Loading what this very run has saved is no resume: it takes the default policy."""
        return self.policy if not found.own_save else ResumePolicy(report=self.policy.report)

    def _reads_optimizer(self, found: Found) -> bool:
        return restrict(self.request, self._policy(found)).load_optimizer

    def _with_aside(self, found: Found) -> Found:
        """Add what a resume policy needs of files that are not read here."""
        unread = self.run is None or (found.tag and _is_unread(self.run, found))
        if not unread or self._policy(found).is_default:
            return found
        aside = look_aside(self.where, found.tag or self.tag, universal=self.universal)
        said = {aside.folder: digest(canonical(aside.entries))}
        return replace(found, aside=aside, prints={**found.prints, **said})


def _commit_pending_save(engine: DeepSpeedEngine) -> None:
    """A decoupled checkpoint engine may still be writing what is to be read: let it finish first.

    DeepSpeed's method ends with a barrier: no rank reads before all have finished.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if getattr(writer, "is_decoupled", lambda: False)():
        engine._commit_decoupled_checkpoint()


def _is_unread(run: Run, found: Found) -> bool:
    """True if DeepSpeed loads because nothing is read here."""
    return found.checkpoint is None and (not found.faults or as_saved(run, found))


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


def deepspeed_can(run: Run, checkpoint: AnyCheckpoint, request: Request) -> bool:
    """True if DeepSpeed itself loads this checkpoint into this run, rightly, with these arguments.

    At stage 3 it loads no weights without optimizer states: with `load_module_only` none, and with
    `load_optimizer_states=False` those of `latest`, whatever the tag (`_load_checkpoint`, runtime/engine.py, 0.19.8;
    issue 8499 of DeepSpeed). With "load_universal" it takes every folder for a universal one.
    """
    same = run.unpickles and same_layout(run, checkpoint)
    same = same and not (request.load_optimizer and _overlooked(run, checkpoint))
    weights_alone = checkpoint.stage == 3 or bool(checkpoint.stages) or _keeps_own_masters(run)
    partial = not request.moments if request.load_optimizer else weights_alone
    unread = (run.universal and checkpoint.stage != 0) or is_url(request.load_dir)
    return same and (bool(run.features) or not (unread or partial))


def asks_deepspeed(run: Run, settings: Settings, request: Request) -> bool:
    """True if DeepSpeed is to load what it can, as it alone handles what is asked for."""
    if run.features or request.custom_load_fn is not None:
        return True
    return settings.unchanged == "deepspeed" or (run.node_local and not settings.prove)


def neither_loads(run: Run, checkpoint: AnyCheckpoint, request: Request, *, left: bool) -> Iterator[Fault]:
    """Yield faults of what only DeepSpeed handles, and does not load: not at all, or not if it is not `left` to it."""
    custom = request.custom_load_fn is not None
    if run.features and not left:
        yield _unsupported_fault(run, run.features, checkpoint)
    if custom and not left:
        what = "is called by DeepSpeed's own load, which takes the layout that was saved, with optimizer states"
        expected = f"stage {checkpoint.displayed_stage}, {checkpoint.grid}, as saved, with optimizer states"
        found = "another layout" if request.load_optimizer else "a load without optimizer states"
        mend = "load without custom_load_fn, or with the optimizer states and the layout that were saved"
        where = "load_checkpoint(custom_load_fn=...)"
        yield UnsupportedLayout.fault(where, what, expected, found, mend=mend)
    if left and request.load_optimizer and not request.moments and "SuperOffload" not in run.features:
        yield _unsupported_fault(run, (*run.features, "masters without moments"), checkpoint)
    yield from _unsaved(run, checkpoint, request) if request.load_optimizer else ()


def check_left(run: Run, checkpoint: AnyCheckpoint, request: Request, shards: ZeroShards) -> None:
    """Raise if DeepSpeed would fail to load on this rank, or would execute or mistake what it reads."""
    faults = [*_swapping(run)]
    if is_url(request.load_dir):
        faults.append(reads_no_url(request.load_dir))
    if not faults:
        faults += pattern_in_path(request.load_dir, request.tag) + _check_own(run, checkpoint, shards)
        faults += scheduler_faults(run.scheduler, checkpoint.model, request)
    if checkpoint.stage == 0 and request.custom_load_fn is None:  # DeepSpeed compares no names there
        strict = request.strict or request.load_optimizer
        check_trained_names(live_model(run, {}), checkpoint, run.grid, strict=strict)
    # DeepSpeed stops with a part of the weights loaded; of a pipeline one stage alone, and the others wait for it
    if checkpoint.stages or (request.strict and request.custom_load_fn is None):
        model = live_model(run, {})
        faults += model_faults(model, checkpoint, run.grid, optimizer=False, strict=request.strict)
    if request.custom_load_fn is None:
        faults += unloaded_faults(checkpoint, run.module, strict=request.strict)
    if not faults and request.load_optimizer and request.custom_load_fn is None:
        faults += _other_members(run, checkpoint)
    raise_faults(faults, subject=f"loading {checkpoint.listing.folder}")
    if not request.strict and request.custom_load_fn is None:
        warn_of_others(live_model(run, {}), checkpoint, run.grid)
    if request.load_optimizer and "ZenFlow" in run.features and rank() == 0:
        logger.warning("ZenFlow: %s has no moments of the columns that it selects: they begin anew", request.load_dir)


def _other_members(run: Run, checkpoint: AnyCheckpoint) -> Iterator[Fault]:
    """Faults of param groups of ZeRO stage 0 that have other parameters than this run, as numbers and shapes tell."""
    live = run.optimizer
    if live is None or checkpoint.stage != 0 or checkpoint.stages or checkpoint.listing.ep_optim:
        return
    params = [one.get("params") for one in live.groups]
    sizes = [len(one) if isinstance(one, list) else 0 for one in params]
    yield from other_members(checkpoint.model, live.order, sizes)


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
        source = f"{universal}ZeRO {stage}" if isinstance(stage, int) else stage
        say(
            f"loaded {prepared.checkpoint.listing.folder} ({source}, {saved}) as "
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
