"""The resume policy on a DeepSpeed engine: what is loaded, and what this run's values replace.

The load itself, DeepSpeed's own or the direct one, is asked for no more than the policy wants; afterwards this
run's values, noted before its first load, are written back where the policy says so, and the scheduler is put
where it belongs. Everything that can be refused is refused before.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING

from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint, sequence_ranks
from ds_reshard.hooks.installation import REGISTRY
from ds_reshard.hosts.deepspeed.entries import Request, load_sampler, revived, scale_name
from ds_reshard.hosts.deepspeed.prepare import SavedGroups
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.during import during
from ds_reshard.operations.ranks import attempt, rank
from ds_reshard.resume import schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import ResumeReport, Row, batch_size_warning, because, publish, rate_warning, say_applied
from ds_reshard.resume.schedulers import DEEPSPEED, UNKNOWN, Beginning, innermost, position_in, position_of, set_groups

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
    from deepspeed.runtime.engine import DeepSpeedEngine


MASTERS, MOMENTS = "fp32 masters", "moments"
ANEW = {MASTERS: "from weights", MOMENTS: "anew"}
"""What a load without them leaves, by the rows of the report."""
FROM_CHECKPOINT = "checkpoint"

# Of a param group, what a schedule decides. `initial_lr` is where torch's schedulers keep a group's own rate.
SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "weight_decay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A scheduler beside the engine, and the position that its saved state had."""

    scheduler: object
    saved_position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The last load of an engine: its policy, what the checkpoint said, what was asked for, the iteration that it left.

    `proof` says how many tensors were proved, None where nobody asked for it. `placed` are the schedulers beside the
    engine that have taken a state since. `before` are iteration, samples and position just before the load, `left` says
    whose masters and moments it has left, None while it is still to come. Nothing here holds the engine.
    """

    policy: ResumePolicy
    saved: Saved
    request: Request
    iteration: int
    before: tuple[int, int, int | None] = (0, 0, None)
    proof: str | None = None
    left: Mapping[str, str] | None = None
    placed: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """This run's own values, as they were before its first load, and the last load.

    `groups` are the param groups' values but the parameters; `begun` says that the engine had stepped before,
    so that the scheduler's beginning is not known. `sampler` is the state of a curriculum's data sampler,
    `random_ltd` that of the layer tokens.
    """

    groups: tuple[dict[str, object], ...]
    clip_grad: object
    loss_scaler: object
    scheduler: Beginning | None
    begun: bool
    sampler: object
    random_ltd: object
    last: Last | None = None

    @property
    def scheduled(self) -> bool:
        """Whether a torch scheduler was built on this run's groups: it keeps each group's own rate there."""
        return any("initial_lr" in group for group in self.groups)


_OWN: weakref.WeakKeyDictionary[DeepSpeedEngine, Own] = weakref.WeakKeyDictionary()


def own_values(engine: DeepSpeedEngine) -> Own:
    """This run's values, noted when an engine is first asked for them."""
    if engine not in _OWN:
        scheduler = engine.lr_scheduler
        _OWN[engine] = Own(
            groups=tuple(
                copy.deepcopy({name: value for name, value in group.items() if name not in ("params", "step")})
                for group in live_groups(engine)
            ),
            clip_grad=getattr(engine.optimizer, "clip_grad", None),
            loss_scaler=copy.deepcopy(getattr(engine.optimizer, scale_name(engine.optimizer) or "loss_scaler", None)),
            scheduler=beginning_of(scheduler) if scheduler is not None else None,
            begun=engine.global_steps > 0,
            sampler=copy.deepcopy(sampler.state_dict()) if (sampler := _sampler(engine)) is not None else None,
            random_ltd=copy.deepcopy(ltd.state_dict()) if (ltd := _random_ltd(engine)) is not None else None,
        )
    return _OWN[engine]


def loaded(engine: DeepSpeedEngine, last: Last | None) -> None:
    """Note the last load that has ended."""
    _OWN[engine] = replace(own_values(engine), last=last)


def engine_of(scheduler: object) -> DeepSpeedEngine | None:
    """The engine that has loaded before and steps the optimizer of a scheduler."""
    optimizer = innermost(scheduler)
    return next((engine for engine in _OWN if innermost(engine.optimizer) is optimizer), None)


def live_groups(engine: DeepSpeedEngine) -> list[dict[str, object]]:
    """The live param groups of the torch optimizer inside the engine's."""
    optimizer = getattr(engine, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    groups: list[dict[str, object]] = getattr(inner, "param_groups", [])
    return groups


def _sampler(engine: DeepSpeedEngine) -> DeepSpeedDataSampler | None:
    """The data sampler of curriculum learning, the only data position that DeepSpeed stores."""
    loader = engine.training_dataloader
    sampler: DeepSpeedDataSampler | None = getattr(loader, "data_sampler", None)
    return sampler if loader is not None and engine.curriculum_learning_enabled() else None


def _random_ltd(engine: DeepSpeedEngine) -> RandomLTDScheduler | None:
    """The schedule of random-LTD, which counts by the iteration."""
    made: RandomLTDScheduler | None = getattr(engine, "random_ltd_scheduler", None)
    return made


def narrowed(request: Request, policy: ResumePolicy) -> Request:
    """The load that a policy asks for: never more than the caller's arguments, which keep their meaning."""
    return replace(
        request,
        optimizer=request.optimizer and policy.loads_masters,
        moments=policy.loads_moments,
        replaced=frozenset(policy.hyperparameters) | (SCHEDULED if policy.schedule_is_this_runs else frozenset()),
        module_only=request.module_only or policy.finetune,
        scheduler=request.scheduler and policy.keeps_position and policy.scheduler != "override",
    )


def apply(engine: DeepSpeedEngine, saved: Saved, policy: ResumePolicy) -> None:
    """After a load: this run's values where the policy wants them, and the schedule where it belongs.

    Not collective; the same on every rank.
    """
    own, groups, scheduler = own_values(engine), live_groups(engine), engine.lr_scheduler
    if policy.schedule_is_this_runs:
        _own_schedule(groups, own, SCHEDULED)
    if policy.takes("clip_grad"):
        engine.optimizer.clip_grad = own.clip_grad if own.clip_grad is not None else engine.gradient_clipping()
    if policy.takes("loss_scale"):
        setattr(engine.optimizer, scale_name(engine.optimizer) or "loss_scaler", copy.deepcopy(own.loss_scaler))
    if not policy.keeps_iteration:
        engine.global_steps = engine.global_samples = engine.skipped_steps = 0
        if (random_ltd := _random_ltd(engine)) is not None:
            random_ltd.load_state_dict(own.random_ltd)
    sampler = _sampler(engine)
    if sampler is not None and (policy.dataloader == "reset" or policy.finetune):
        load_sampler(sampler, copy.deepcopy(own.sampler))
    if policy.scheduler == "checkpoint":
        _continue(scheduler, saved, policy, groups)
    elif policy.places_schedule and scheduler is not None:
        _place(scheduler, own, saved.position if policy.keeps_position else 0, groups)
    elif policy.places_schedule and own.scheduled:
        _own_schedule(groups, own, SCHEDULED - {"weight_decay"})
    set_groups(groups, own.groups, policy.hyperparameters)


def _own_schedule(groups: list[dict[str, object]], own: Own, names: Iterable[str]) -> None:
    """This run's values of these names; bounds that this run has not are taken out, or a later scheduler uses them."""
    set_groups(groups, own.groups, names)
    for group, mine in zip(groups, own.groups, strict=True):
        for name in (set(names) - {"lr", "weight_decay"}) - set(mine):
            group.pop(name, None)


def _place(scheduler: object, own: Own, position: int, groups: list[dict[str, object]]) -> None:
    """This run's scheduler at a position; one of an unknown kind has not been loaded, so it is at its beginning."""
    assert own.scheduler is not None
    _own_schedule(groups, own, SCHEDULED - {"weight_decay"})
    if own.scheduler.kind == UNKNOWN:
        return
    set_groups(groups, own.groups, schedulers.cycled(scheduler))
    own.scheduler.place(scheduler, position)


def _continue(scheduler: object, saved: Saved, policy: ResumePolicy, groups: list[dict[str, object]]) -> None:
    """The checkpoint's schedule: what configures it, and with a skipped optimizer the rates that it gives.

    Where the optimizer was loaded the groups have the checkpoint's rates and weight decay already.
    """
    values = saved_values(saved, len(groups))
    if not policy.loads_masters and values is not None:
        set_groups(groups, values, SCHEDULED | schedulers.cycled(scheduler))
    if scheduler is None:
        return
    if schedulers.kind_of(scheduler) == DEEPSPEED:
        _, params = saved.scheduler_section
        assert params is not None
        rates = base_rates(scheduler, saved, params, len(groups))
        built_for = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)] if rates else groups
        schedulers.adopt_configuration(scheduler, params, built_for)
    if not policy.loads_masters:
        schedulers.write_rates(scheduler)


def saved_values(saved: Saved, count: int) -> list[Mapping[str, object]] | None:
    """Saved rate and weight decay of each live group; None where the files that were read do not say.

    The saved JSON speaks for a single group alone: with several, each may have had its own.
    """
    if all(number in saved.groups for number in range(count)):
        return [saved.groups[number] for number in range(count)]
    if count == 1 and "lr" in saved.optimizer_params:
        return [saved.optimizer_params]
    return None


def base_rates(scheduler: object, saved: Saved, params: Mapping[str, object], count: int) -> list[float] | None:
    """The rates that the saved scheduler was built from: the JSON's for one group, else what its rates imply."""
    if not schedulers.needs_rates(scheduler, params):
        return None
    if not saved.groups and count == 1 and "lr" in saved.optimizer_params:
        return [float(str(saved.optimizer_params["lr"]))]
    values = saved_values(saved, count)
    if values is None:
        return None
    return schedulers.base_rates(scheduler, params, [float(str(v["lr"])) for v in values], saved.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The typed facts of a checkpoint that a resume policy and its report need.

    `groups` maps a live param group to the saved hyper-parameters that belong to it: without groups whose members
    were saved with different ones, and empty where the optimizer files are not read. `scheduler` is the saved state
    dict; `config` the DeepSpeed JSON of the saving run; `sp` the number of ranks that shared a micro batch. `holds`
    says what there is of its optimizer, None where that is not known.
    """

    where: str
    stage: int
    dp: int
    sp: int = 1
    groups: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    scheduler: Mapping[str, object] | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    iteration: int | None = None
    samples: int | None = None
    skipped: int = 0
    clip_grad: object = None
    holds: Mapping[str, str] | None = None

    def has(self, name: str) -> bool:
        """Whether its optimizer has them, by a row of the report; so it is taken to be where nobody has looked."""
        return self.holds is None or name in self.holds

    @property
    def position(self) -> int:
        """How far the schedule had run; without a scheduler, the updates that were made."""
        found = position_in(self.scheduler) if self.scheduler is not None else None
        return found if found is not None else max(0, (self.iteration or 0) - self.skipped)

    @property
    def scheduler_section(self) -> tuple[str | None, Mapping[str, object] | None]:
        """Type and parameters of the scheduler in the saving run's JSON, None for what is not there."""
        section = self.config.get("scheduler")
        if not isinstance(section, Mapping):
            return None, None
        kind, params = section.get("type"), section.get("params", {})
        return (str(kind) if kind else None), (params if isinstance(params, Mapping) else None)

    @property
    def optimizer_params(self) -> Mapping[str, object]:
        """Parameters of the optimizer in the saving run's JSON; empty where a script built it."""
        section = self.config.get("optimizer")
        params = section.get("params") if isinstance(section, Mapping) else None
        return params if isinstance(params, Mapping) else {}

    @property
    def train_batch_size(self) -> int | None:
        """The global batch size of the saving run as its JSON gives or implies it."""
        given = self.config.get("train_batch_size")
        if isinstance(given, int):
            return given
        micro = self.config.get("train_micro_batch_size_per_gpu")
        steps = self.config.get("gradient_accumulation_steps", 1)
        return micro * steps * (self.dp // self.sp) if isinstance(micro, int) and isinstance(steps, int) else None

    @property
    def accumulation(self) -> int | None:
        """The micro batches of an update of the saving run, as its JSON gives or implies them."""
        names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
        steps, batch, micro = (self.config.get(name) for name in names)
        if isinstance(steps, int):
            return steps
        ranks = self.dp // self.sp
        if not isinstance(batch, int) or not isinstance(micro, int) or micro < 1 or batch % (micro * ranks):
            return None
        return batch // (micro * ranks)


def read_saved(checkpoint: ZeroCheckpoint, groups: SavedGroups, settings: Settings, *, scheduler: bool) -> Saved:
    """Read these facts; no tensor is read. `scheduler` asks for the scheduler's state, which may need `trust`."""
    # a model file of stage 0 may have the optimizer in it, as records
    tells_groups = checkpoint.stage or isinstance(checkpoint.model.entries.get("optimizer"), Mapping)
    saved = saved_of(
        checkpoint.model.entries,
        settings,
        where=checkpoint.listing.folder,
        stage=checkpoint.told_stage,
        groups=_groups(groups, settings) if tells_groups else {},
        clip_grad=checkpoint.optimizer_entries.get("clip_grad"),
        scheduler=scheduler,
    )
    return replace(saved, holds=_holds(checkpoint))


def _holds(checkpoint: ZeroCheckpoint) -> dict[str, str]:
    """Rows of the report for what there is of an optimizer; of files that were not opened, no more than that."""
    kinds = {key.kind for key in checkpoint.layout.placements} - {WEIGHT}
    if kinds:
        there = {MASTERS: MASTER in kinds, MOMENTS: bool(kinds - {MASTER})}
        return {name: "saved" for name, present in there.items() if present}
    listing, inside = checkpoint.listing, checkpoint.model.entries.get("optimizer")
    unopened = listing.universal or inside is not None or any(one.optim for one in listing.columns.values())
    unopened = unopened or any(name.startswith("optimizer.") for name in listing.nbytes)  # of plain PyTorch
    return dict.fromkeys(ANEW, "not opened") if unopened else {}


def saved_of(
    entries: Mapping[str, object],
    settings: Settings,
    *,
    where: str,
    stage: int,
    scheduler: bool,
    groups: Mapping[int, Mapping[str, object]] | None = None,
    clip_grad: object = None,
) -> Saved:
    """The facts in the entries of a model file, with what the optimizer's files add."""
    state = revived(entries.get("lr_scheduler"), trusted=settings.trust, where="lr_scheduler") if scheduler else None
    config = (
        revived(entries.get("ds_config"), trusted=settings.trust, where="ds_config") if "ds_config" in entries else {}
    )
    return Saved(
        where=where,
        stage=stage,
        dp=(dp := _whole(entries.get("dp_world_size")) or 1),
        sp=gcd(dp, sequence_ranks(entries)),
        groups=groups or {},
        scheduler=state if isinstance(state, Mapping) else None,
        config=config if isinstance(config, Mapping) else {},
        iteration=_whole(entries.get("global_steps")),
        samples=_whole(entries.get("global_samples")),
        skipped=_whole(entries.get("skipped_steps")) or 0,
        clip_grad=clip_grad,
    )


def _groups(groups: SavedGroups, settings: Settings) -> dict[int, Mapping[str, object]]:
    made: dict[int, Mapping[str, object]] = {}
    for number, (saved, differing) in groups.matched.items():
        if not differing:
            values = revived(dict(saved), trusted=settings.trust, where=f"param group {number}")
            assert isinstance(values, dict)
            made[number] = values
    return made


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_BEGUN: weakref.WeakKeyDictionary[object, Beginning] = weakref.WeakKeyDictionary()


def beginning_of(scheduler: object) -> Beginning:
    """The scheduler as it was when it was first asked for here, which is before its first state."""
    if scheduler not in _BEGUN:
        _BEGUN[scheduler] = Beginning(scheduler)
    return _BEGUN[scheduler]


def given(engine: DeepSpeedEngine) -> list[object]:
    """The schedulers on the engine's optimizer that somebody gave a state, but for the engine's own.

    Hugging Face's Trainer and accelerate, and many scripts, keep schedulers that the engine does not know, and give
    them their state before or after `engine.load_checkpoint` (transformers/trainer.py,
    `_load_optimizer_and_scheduler`; accelerate/checkpointing.py, `load_accelerator_state`).
    """
    return [
        scheduler
        for scheduler in list(_BEGUN)
        if innermost(engine.optimizer) is innermost(scheduler) and not owns(engine, scheduler)
    ]


def owns(engine: DeepSpeedEngine, scheduler: object) -> bool:
    """Whether a scheduler is the engine's own, or inside it."""
    return any(scheduler is part for part in _with_parts(engine.lr_scheduler))


def _with_parts(scheduler: object) -> list[object]:
    return [scheduler, *(part for inner in getattr(scheduler, "_schedulers", ()) for part in _with_parts(inner))]


_INSIDE: ContextVar[bool] = ContextVar("states of schedulers are left as they are", default=False)


def as_it_is() -> AbstractContextManager[None]:
    """States that schedulers are given inside are applied as they are."""
    return during(_INSIDE, True)


def left_as_they_are() -> bool:
    """Whether this thread is inside `as_it_is`."""
    return _INSIDE.get()


logger = logging.getLogger("ds_reshard")

_UNREAD = (
    "weight decay, and rates that the scheduler does not hold, are those of the saved DeepSpeed JSON or this run's: "
    "the optimizer's files, which say what was used, were not opened"
)
WAITING = (
    "a scheduler that the engine does not own has not been given its state: until it is, its position is that of its "
    "beginning, and the resume policy takes the state that it is given"
)
_COUNTS_BATCHES = (
    "the scheduler's position ({position}) counts batches of all {dp} ranks, {updates} updates, as accelerate steps: "
    "under another data-parallel size the same position is another update; where the script's lengths are multiples of "
    "the number of ranks, give the scheduler its state with last_epoch {moved}"
)
UNHOOKED = (
    "the hooks are not installed, so a scheduler that the engine does not own takes its saved state as it is, whatever "
    "the resume policy says: import ds_reshard.auto, or hand the scheduler to deepspeed.initialize"
)
_SHOWN = ("lr", "min_lr", "weight_decay", "betas", "eps", "momentum")


def report(engine: DeepSpeedEngine, own: Own, beside: Beside | None) -> ResumeReport:
    """Rows for iteration, schedule, each param group, optimizer, data, layout and batch size, as they are now."""
    assert own.last is not None
    saved, policy, (iteration, samples, _) = own.last.saved, own.last.policy, own.last.before
    clip = getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())
    random = ("this run", "--finetune") if policy.finetune else ("the script's own", "DeepSpeed stores none")
    data = "from its start" if policy.dataloader == "reset" else "the script's own"
    rows = [
        Row.of("iteration", saved.iteration, iteration, engine.global_steps, because(policy, "iteration")),
        Row.of("samples", saved.samples, samples, engine.global_samples, because(policy, "iteration")),
        _position(engine, own.last, beside),
        *_group_rows(engine, own, saved, policy),
        Row.of("clip_grad", saved.clip_grad, own.clip_grad, clip, because(policy, "clip_grad")),
        *_optimizer(own.last),
        Row.of("rng", None, "this run", *random),
        Row.of("data", None, "from its start", data, because(policy, "dataloader")),
        *_sizes(engine, saved),
    ]
    if own.last.proof is not None:
        rows.append(Row.of("fingerprints", None, None, own.last.proof, '"verify": "fingerprint"'))
    warnings = batch_size_warning(saved.train_batch_size, engine.train_batch_size())
    warnings += tuple(_unused_rates(engine, own, policy))
    if not policy.keeps_iteration and not policy.finetune:
        warnings += ("the iteration starts again at 0: later saves may overwrite earlier tags of the same folder",)
    if engine.lr_scheduler is None and own.scheduled and beside is None and not policy.is_default:
        warnings += (WAITING,)
    warnings += _counted(engine, saved, beside)
    if REGISTRY.active("deepspeed") is None and (policy.scheduler != "host" or policy.places_schedule):
        warnings += (UNHOOKED,)
    if policy.scheduler == "checkpoint" and not policy.loads_masters and not saved.groups:
        warnings += (_UNREAD,)
    return ResumeReport(host="deepspeed", checkpoint=saved.where, rows=tuple(rows), warnings=warnings)


def _sizes(engine: DeepSpeedEngine, saved: Saved) -> Iterator[Row]:
    """What this run alone decides. Where ranks share a sequence, and with it a micro batch, the implied is not told."""
    alone = engine.seq_dp_world_size == engine.dp_world_size
    for name, then, now in (
        ("stage and dp", (saved.stage, saved.dp), (int(engine.zero_optimization_stage()), engine.seq_dp_world_size)),
        ("accumulation", saved.accumulation if alone else None, engine.gradient_accumulation_steps()),
        ("global batch size", saved.train_batch_size, engine.train_batch_size()),
    ):
        yield Row.of(name, then, now, now, "this run")


def _unused_rates(engine: DeepSpeedEngine, own: Own, policy: ResumePolicy) -> Iterator[str]:
    """A warning for each param group whose own rate was given up, where nobody asked for that.

    A scheduler of DeepSpeed sets rates of this run from the second update on. One of torch begins at `initial_lr`.
    """
    beside = [engine.lr_scheduler, *given(engine)]
    if policy.scheduler != "host":
        return
    if any(schedulers.kind_of(one) == DEEPSPEED for one in beside):
        for number, (group, rate) in enumerate(
            zip(live_groups(engine), schedulers.present_rates(beside[0]), strict=False)
        ):
            if group.get("lr") != rate:
                yield rate_warning(number, rate, group.get("lr"), when=" by the first update")
        return
    for number, (group, mine) in enumerate(zip(live_groups(engine), own.groups, strict=True)):
        name = "initial_lr" if "initial_lr" in mine else "lr"
        if group.get(name) != mine.get(name):
            yield rate_warning(number, mine.get(name), group.get(name))


def _counted(engine: DeepSpeedEngine, saved: Saved, beside: Beside | None) -> tuple[str, ...]:
    """A warning where a position counts the batches of a number of ranks that is not this run's."""
    updates = (saved.iteration or 0) - saved.skipped
    if beside is None or not updates or saved.dp in (1, engine.seq_dp_world_size):
        return ()
    if schedulers.is_counted_elsewhere():
        return ()
    if beside.saved_position != updates * saved.dp:
        return ()
    moved = updates * engine.seq_dp_world_size
    return (_COUNTS_BATCHES.format(position=beside.saved_position, updates=updates, dp=saved.dp, moved=moved),)


def warn_of_count(engine: DeepSpeedEngine, scheduler: object, state: Mapping[str, object]) -> None:
    """Rank 0: the same where no policy was asked for, and the first state after a load is taken as it is."""
    last = own_values(engine).last
    if rank() == 0 and last is not None and last.policy.is_default and engine.global_steps == last.iteration:
        beside = Beside(scheduler=scheduler, saved_position=position_in(state))
        for warning in _counted(engine, last.saved, beside) if scheduler is not engine.lr_scheduler else ():
            logger.warning("%s", warning)


def amend(engine: DeepSpeedEngine, own: Own, beside: Beside) -> None:
    """Rank 0: report anew, as a scheduler beside the engine has taken a state. Not collective, and never raises."""
    if rank() != 0 or own.last is None:
        return
    path = own.last.policy.report
    made, faults, _ = attempt(lambda: report(engine, own, beside))
    if made is not None:
        _, faults, _ = attempt(lambda: publish(made, path=path))
        rates = [row.used for row in made.rows if row.name.endswith(": lr")]
        position = made["schedule position"].used
        logger.info("%s took its state: position %s, lr %s", type(beside.scheduler).__name__, position, rates)
        say_applied(made, own.last.policy)
        for warning in _counted(engine, own.last.saved, beside):
            logger.warning("%s", warning)
    for fault in faults:
        logger.error("no resume report: %s", fault.line())


def _position(engine: DeepSpeedEngine, last: Last, beside: Beside | None) -> Row:
    scheduler, before = engine.lr_scheduler, last.before[2]
    theirs = last.saved.position if last.saved.scheduler is not None else None
    if beside is not None:
        scheduler, theirs, before = beside.scheduler, beside.saved_position, beginning_of(beside.scheduler).position
    used = position_of(scheduler) if scheduler is not None else None
    return Row.of("schedule position", theirs, before, used, because(last.policy, "position"))


def _group_rows(engine: DeepSpeedEngine, own: Own, saved: Saved, policy: ResumePolicy) -> Iterator[Row]:
    for number, (group, mine) in enumerate(zip(live_groups(engine), own.groups, strict=True)):
        theirs: Mapping[str, object] = saved.groups.get(number, {})
        for name in _SHOWN:
            if name in group:
                why = because(policy, "schedule" if name in SCHEDULED else "", name)
                yield Row.of(f"group {number}: {name}", theirs.get(name), mine.get(name), group[name], why)


def _optimizer(last: Last) -> Iterator[Row]:
    """Rows of masters and moments: as a load has left them, or as one that is still to come will."""
    for name, asked in {MASTERS: last.request.load_optimizer, MOMENTS: last.request.load_moments}.items():
        why, anew = because(last.policy, "optimizer"), ANEW[name]
        if not asked and why == "host":
            why = "arguments of load_checkpoint"
        foreseen = FROM_CHECKPOINT if asked and last.saved.has(name) else anew
        used = last.left[name] if last.left is not None else foreseen
        yield Row.of(name, (last.saved.holds or {}).get(name), anew, used, why)
