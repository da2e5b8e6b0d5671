"""The seams of `Accelerator.save_state` and `load_state`: the clock is recorded, and translated where it has changed.

On the engine's clock the schedule lies in DeepSpeed's model file, on accelerate's in `scheduler.bin`, where the other
finds nothing: `FileNotFoundError`, or `load_state_dict(None)` (accelerate/checkpointing.py, 1.15.0, and
`_load_checkpoint` in deepspeed/runtime/engine.py, 0.19.8). What both agree on is the number of updates, which the
engine keeps. Rung 2: accelerate's `register_load_state_pre_hook` runs after the engine has loaded.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard import hosts
from ds_reshard.containers import folders
from ds_reshard.containers.pickle_rules import trust_in, trusted
from ds_reshard.errors import CheckpointNotFound, UnsupportedLayout, raise_faults
from ds_reshard.execution import disk
from ds_reshard.formats.zero.names import OPTIMIZER_FILES, pattern_in_path
from ds_reshard.hooks import Call
from ds_reshard.hosts.accelerate import positions
from ds_reshard.hosts.accelerate.prepare_arguments import without_params
from ds_reshard.hosts.accelerate.unfound import trained_names_checked
from ds_reshard.operations.pickles import refuse_unsafe_folder, trusting
from ds_reshard.operations.ranks import gather, run_on_all
from ds_reshard.resume import schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.policy_sources import policy_beside, refuse_unapplied
from ds_reshard.resume.report import ResumeReport, Row, last_report
from ds_reshard.resume.schedulers import ACCELERATE, CLOCKS, ENGINE, PLATEAU, UNKNOWN, Beginning, kind_of, set_groups

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger("ds_reshard")

RECORD = "ds_reshard_clock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """`engine` makes the updates, of each of which the scheduler takes `steps`, None where the script alone decides.

    `groups` are the param groups' values, and `beginning` the scheduler's, before the first update. `began` is the
    number of updates of the engine after which the schedule began, other than 0 where a resume has begun it anew.
    """

    engine: weakref.ref[DeepSpeedEngine]
    scheduler: LRScheduler
    wrapper: AcceleratedScheduler
    clock: str
    steps: int | None
    groups: tuple[Mapping[str, object], ...]
    beginning: Beginning | None
    began: int = 0


_TRACKED: weakref.WeakKeyDictionary[Accelerator, Tracked] = weakref.WeakKeyDictionary()


def track(
    accelerator: Accelerator, engine: DeepSpeedEngine, wrapper: AcceleratedScheduler, *, clock: str, by_script: bool
) -> None:
    """Note what was prepared; accelerate's own clock steps once for each process unless batches are split."""
    scheduler = wrapper.scheduler
    steps = 1 if clock == ENGINE or accelerator.split_batches else accelerator.num_processes
    _TRACKED[accelerator] = Tracked(
        engine=weakref.ref(engine),
        scheduler=scheduler,
        wrapper=wrapper,
        clock=clock,
        steps=None if by_script or (clock != ENGINE and not accelerator.step_scheduler_with_optimizer) else steps,
        groups=tuple(copy.deepcopy(without_params(group)) for group in scheduler.optimizer.param_groups),
        beginning=Beginning(scheduler) if kind_of(scheduler) != UNKNOWN else None,
    )


def tracked(accelerator: Accelerator) -> Tracked | None:
    """What was prepared last, unless `free_memory` has let go of it since."""
    mine = _TRACKED.get(accelerator)
    return mine if mine is not None and any(one is mine.wrapper for one in accelerator._schedulers) else None


class Saved(NamedTuple):
    """What is known of the schedule in a checkpoint: its clock, and the updates before it began.

    `by_script` says that the script alone decided when it took a step; None where nothing tells.
    """

    clock: str | None = None
    since: int = 0
    by_script: bool | None = None


def save_state(call: Call) -> object:
    """Save as accelerate does, and record the clock. Collective; every rank's files are there when it returns."""
    accelerator = call["self"]
    if not _by_deepspeed(accelerator):
        return call()
    _warn_of_what_is_left_out(accelerator)
    location = call()
    place = os.path.join(os.fspath(location), RECORD)
    run_on_all(lambda: _write_record(accelerator, place), subject=f"saving {location}")
    return location


def _write_record(accelerator: Accelerator, path: str) -> None:
    mine = tracked(accelerator)
    if mine is None or not accelerator.is_main_process:
        return
    record = {
        "clock": mine.clock,
        "steps_per_update": mine.steps,
        "num_processes": accelerator.num_processes,
        "began": mine.began,
    }
    disk.write_named(path, json.dumps(record).encode("utf-8"), mend="free space there, then save again")


def _warn_of_what_is_left_out(accelerator: Accelerator) -> None:
    """A scheduler that was built after `prepare` is not saved, and begins anew in the run that loads this."""
    known = [*accelerator._schedulers, *(one for one in accelerator._custom_objects if hasattr(one, "step"))]
    for engine in accelerator._models if not known and accelerator.is_main_process else ():
        groups = getattr(getattr(engine, "basic_optimizer", None), "param_groups", ())
        if engine.lr_scheduler is None and any("initial_lr" in group for group in groups):
            logger.warning(
                "save_state leaves out a scheduler that was not prepared, and a resume begins it anew: write model, "
                "optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler), or "
                "accelerator.register_for_checkpointing(scheduler)"
            )


def load_state(call: Call) -> object:
    """Load as accelerate does, the schedule also from the other clock, and `accelerator.step` on every rank.

    Raises UnsafePickle on every rank where anything below the folder acts when it is unpickled, also without DeepSpeed.
    Collective. accelerate is given the folder that was searched: of two with the same number it would take either.
    """
    accelerator, input_dir = call["self"], call["input_dir"]
    where = os.path.expanduser(os.fspath(input_dir)) if input_dir is not None else _latest(accelerator)
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if where is not None:
        if _by_deepspeed(accelerator):
            run_on_all(lambda: _refuse_other_places(where), subject=f"loading {where}")
        if _by_deepspeed(accelerator) and not hosts.hooked("deepspeed"):
            raise_faults(pattern_in_path(where, "pytorch_model"), subject=f"loading {where}")
        config, given = getattr(plugin, "deepspeed_config", None), call["load_model_func_kwargs"]
        alone = config is not None and not (
            policy_beside(config).loads_masters
            and given.get("load_optimizer_states", True)
            and not given.get("load_module_only")
        )
        refuse_unsafe_folder(where, trust=trust_in(config), unread=[OPTIMIZER_FILES] if alone else [])
    # absolute: a name that begins with ~ would be expanded
    folder = os.path.abspath(where) if input_dir is None and where is not None else input_dir
    names = trusted(trust_in(getattr(plugin, "deepspeed_config", None)))
    original = functools.partial(trusting, names, functools.partial(call, input_dir=folder))
    if plugin is None:
        if accelerator.distributed_type == "MEGATRON_LM":  # whose own load takes the policy
            return original()
        run_on_all(lambda: refuse_unapplied("this Accelerator"), subject=f"loading {where}")
        if where is not None:
            _counted_data(accelerator, where)
        with (
            trained_names_checked(accelerator, where, call["load_model_func_kwargs"]),
            positions.translated(accelerator, _steps(accelerator, where), None, ResumePolicy()),
        ):
            result = original()
        positions.warn_of_micro_batches(accelerator)
        _agree_on_step(accelerator, where, last_report())
        return result
    mine, policy, before = tracked(accelerator), policy_beside(plugin.deepspeed_config), last_report()
    hosts.insist(policy)
    saved, counted = Saved(), [] if policy.finetune or where is None else _counted_data(accelerator, where)
    if mine is not None and mine.clock != ENGINE and policy.places_schedule and not _updates(mine):
        run_on_all(functools.partial(schedulers.refuse_unseen, mine.scheduler), subject=f"loading {where}")
    if mine is not None and where is not None:
        saved = gather(run_on_all(lambda: _saved_clock(where), subject=f"loading {where}"))[0]
    if where is not None:
        moved = mine is not None and saved.clock not in (None, mine.clock)
        run_on_all(lambda: _refuse_absent(accelerator, where, scheduled=not moved), subject=f"loading {where}")
    if mine is not None and policy.keeps_position and not policy.finetune:
        _warn_of_other_steps(accelerator, mine, saved, str(where))
    with _anew(accelerator) if policy.finetune else nullcontext():
        if mine is None or saved.clock in (None, mine.clock):
            with positions.translated(accelerator, _steps(accelerator, where), mine, policy):
                result = original()
        else:
            _refuse(mine, saved, policy, where, alone=len(accelerator._schedulers) == 1)
            leave_out = call["load_model_func_kwargs"].get("load_lr_scheduler_states") is False
            result = _translated(accelerator, original, mine, saved.since, policy, leave_out=leave_out)
    if mine is not None:
        since = saved.since if policy.keeps_position else _updates(mine)
        _TRACKED[accelerator] = replace(mine, began=since)
    if not policy.keeps_iteration:
        _warn_of_objects(accelerator, policy)
    if not policy.finetune:
        _agree_on_step(accelerator, where, before)
        _warn_of_another_batch(accelerator, counted, before)
    return result


def _refuse_other_places(where: str) -> None:
    """Raise CheckpointNotFound for a place above a folder of accelerate, or inside one, and name that folder.

    DeepSpeed would miss a tag, which no argument of `load_state` names.
    """
    inside = [os.path.join(where, one) for one in sorted(os.listdir(where))] if os.path.isdir(where) else []
    above = [str(one) for one in Path(os.path.abspath(where)).parents[:3]]
    found = [one for one in (*inside, *above) if _holds_an_engine(one)]
    if found and not _holds_an_engine(where):
        what, mend = "is above a folder of accelerate, or inside one", f"give load_state {' or '.join(found[:4])}"
        raise_faults([CheckpointNotFound.fault(where, what, mend=mend)], subject=f"loading {where}")


def _holds_an_engine(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "pytorch_model"))


def _refuse_absent(accelerator: Accelerator, where: str, *, scheduled: bool) -> None:
    """Raise CheckpointNotFound for what accelerate reads beside the engine, once that has loaded, and is not there.

    That is a file for each scheduler of its own, where the schedule is read at all, and one for each registered object.
    """
    names = folders.entries(where)
    if not names:
        return  # accelerate says that the folder is not there
    own = [one for one in accelerator._schedulers if type(one).__name__ != "DeepSpeedSchedulerWrapper"]
    files = [f"scheduler_{number}.bin" if number else "scheduler.bin" for number in range(len(own) if scheduled else 0)]
    faults = [
        CheckpointNotFound.fault(
            os.path.join(where, name),
            "there is no such file, and accelerate reads it for a scheduler of this run",
            mend="restore it from a copy; where the saving run had no such scheduler, prepare it after load_state",
        )
        for name in files
        if name not in names
    ]
    found = sum(re.search(r"^custom_checkpoint_\d+\.pkl$", name) is not None for name in names)
    if found != len(accelerator._custom_objects):
        what = "holds the states of other objects than this run has registered"
        mend = "call register_for_checkpointing with the objects of the saving run, in its order"
        ours = str(len(accelerator._custom_objects))
        faults.append(CheckpointNotFound.fault(where, what, f"{ours} custom_checkpoint files", str(found), mend=mend))
    raise_faults(faults, subject=f"loading {where}")


def _warn_of_objects(accelerator: Accelerator, policy: ResumePolicy) -> None:
    """Say on rank 0 what has taken its saved state where a policy begins the iteration anew: a script's own counters.

    A scheduler is none: what it makes of a state the policy says.
    """
    found = [getattr(one, "scheduler", one) for one in accelerator._custom_objects]
    names = ", ".join(type(one).__name__ for one in found if kind_of(one) == UNKNOWN)
    if names and accelerator.is_main_process:
        flags = ", ".join(policy.asked[key] for key in ("finetune", "iteration") if key in policy.asked)
        what = "%s: what the script has registered (%s) has the state that was saved, and counts on from there"
        logger.warning(what, flags, names)


@contextmanager
def _anew(accelerator: Accelerator) -> Iterator[None]:
    """What accelerate restores beside the engine stays this run's: random states, data loaders, and its micro-batches.

    `load_accelerator_state` reads them by the number of the rank and of the data loader, and has no argument for that.
    """
    import numpy
    import torch

    kind, step, loaders = accelerator.device.type, accelerator.step, accelerator._dataloaders
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    devices = range(getattr(torch, kind).device_count()) if kind != "cpu" else ()
    accelerator._dataloaders = []
    try:
        with torch.random.fork_rng(devices, device_type=kind if kind != "cpu" else "cuda"):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        accelerator.step, accelerator._dataloaders = step, loaders


def _by_deepspeed(accelerator: Accelerator) -> bool:
    """Whether an accelerator trains with DeepSpeed: all others are accelerate's own."""
    return getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None) is not None


def _translated(
    accelerator: Accelerator,
    original: Callable[..., object],
    mine: Tracked,
    since: int,
    policy: ResumePolicy,
    *,
    leave_out: bool,
) -> object:
    """Load all but the schedule, and put it where the engine's number of updates says on the clock of this run."""
    by_host, on_engine = policy.scheduler == "host", mine.clock == ENGINE
    with _without_schedule(accelerator, mine):
        result = original(load_lr_scheduler_states=False) if by_host and on_engine else original()
    if on_engine and leave_out:
        return result
    assert mine.steps is not None and mine.beginning is not None
    position = (_updates(mine) - since) * mine.steps
    if by_host and policy.keeps_position:
        _place(mine, position)
        logger.warning("the schedule was saved on another clock: it goes on at position %d of this run's", position)
    elif not on_engine:
        # Of a state that a scheduler is given, the policy takes the position; the hooks of DeepSpeed apply it.
        mine.scheduler.load_state_dict({"last_epoch": position})
    return result


def _updates(mine: Tracked) -> int:
    engine = mine.engine()
    assert engine is not None, "its Accelerator holds it"
    return int(engine.global_steps - engine.skipped_steps)


def _warn_of_other_steps(accelerator: Accelerator, mine: Tracked, saved: Saved, where: str) -> None:
    """Say on rank 0 that the saved position counts steps that the script made, and this run lets accelerate, or not."""
    if saved.clock != mine.clock or saved.by_script in (None, mine.steps is None) or not accelerator.is_main_process:
        return
    sides = ["the script (step_scheduler_with_optimizer=False)", "accelerate"]
    logger.warning(
        "%s: its schedule was stepped by %s, and this run's is by %s: the saved position may be of another update",
        *(where, *(sides if saved.by_script else reversed(sides))),
    )


class _Unread:
    """Stands for a scheduler that the script has registered, too: the state that was saved is of another clock."""

    def load_state_dict(self, state: object) -> None:
        pass


@contextmanager
def _without_schedule(accelerator: Accelerator, mine: Tracked) -> Iterator[None]:
    """While accelerate loads, hide the schedule, and what `register_for_checkpointing` knows of it, from accelerate.

    It is the only one that was prepared.
    """
    schedulers, registered = accelerator._schedulers, accelerator._custom_objects
    own = (mine.scheduler, mine.wrapper)
    accelerator._custom_objects = [_Unread() if any(one is held for held in own) else one for one in registered]
    if mine.clock != ENGINE:
        accelerator._schedulers = []
    try:
        yield
    finally:
        accelerator._schedulers, accelerator._custom_objects = schedulers, registered


def _place(mine: Tracked, position: int) -> None:
    """This run's scheduler at a position of its own schedule, which is this run's in every respect."""
    groups = mine.scheduler.optimizer.param_groups
    raise_faults(schedulers.beyond(mine.scheduler, position), subject="the schedule on this run's clock")
    bases = [group.get("initial_lr") for group in groups]
    began = [group.get("initial_lr") for group in mine.groups]
    if bases != began:
        logger.warning("accelerate: this run's base rates %s hold, not the checkpoint's %s", began, bases)
    names = {"lr", "initial_lr"} | schedulers.cycled(mine.scheduler)
    set_groups(groups, mine.groups, names)
    assert mine.beginning is not None
    mine.beginning.place(mine.scheduler, position)


def _refuse(mine: Tracked, saved: Saved, policy: ResumePolicy, where: str | None, *, alone: bool) -> None:
    """Raise where the schedule of one clock cannot be had on the other."""
    name = type(mine.scheduler).__name__
    if policy.scheduler in ("checkpoint", "strict"):
        why = f'scheduler "{policy.scheduler}" is asked for, which wants it as it was saved'
    elif not alone:
        why = "this Accelerator has several schedulers, of which one alone would be put at its position"
    elif mine.steps is None or mine.beginning is None or kind_of(mine.scheduler) == PLATEAU:
        why = f"{name} cannot be put at a position: its steps are the script's"
    elif policy.keeps_position and saved.by_script:
        why = "the script alone decided when it took a step, which no number of updates tells"
    elif policy.keeps_position and mine.beginning.position:
        why = f"{name} had taken steps before prepare, which no number of updates tells"
    elif policy.keeps_position and policy.scheduler == "override" and saved.since and mine.clock == ENGINE:
        why = f"it was begun anew after {saved.since} updates, of which the engine does not know"
    else:
        return
    fault = UnsupportedLayout.fault(
        str(where),
        f"its schedule is on the clock of {saved.clock}, this run's on that of {mine.clock}, and {why}",
        mend=f'write "ds_reshard": {{"accelerate": {{"clock": "{saved.clock}"}}}} in the DeepSpeed JSON',
    )
    raise_faults([fault], subject=f"loading {where}")


def _saved_clock(folder: str) -> Saved:
    """What the record says; without one, the schedule lies in scheduler.bin on accelerate's clock alone."""
    names = folders.entries(folder)
    if not names:
        return Saved()  # accelerate says that it is not there
    record = _record(folder)
    try:
        if record["clock"] in CLOCKS:
            return Saved(
                str(record["clock"]), int(str(record.get("began", 0))), record.get("steps_per_update", 1) is None
            )
    except (ValueError, KeyError, TypeError):
        pass  # the files tell it as well
    return Saved(ACCELERATE if "scheduler.bin" in names else ENGINE)


def _record(folder: str) -> Mapping[str, object]:
    """What `save_state` has noted beside a checkpoint; nothing where there is no such file, or it says nothing."""
    try:
        found = folders.read_json(os.path.join(folder, RECORD)) if RECORD in folders.entries(folder) else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _steps(accelerator: Accelerator, where: str | None) -> int | None:
    """How many steps an update of the saving run was to its schedulers, as rank 0 sees it; None where unknown.

    Without a record each process has left its random states; a run that splits batches is taken to have done so then.
    Collective.
    """
    record = gather(run_on_all(lambda: _record(where) if where is not None else {}, subject=f"loading {where}"))[0]
    if "clock" in record:
        found = record.get("steps_per_update")
        return found if isinstance(found, int) and record["clock"] == ACCELERATE else None
    if where is None or accelerator.split_batches:
        return None
    return gather(_processes(where))[0] or None


def _counted_data(accelerator: Accelerator, where: str) -> list[str]:
    """The files that tell data loaders how many batches each process has had, in the middle of an epoch. Collective.

    accelerate gives each process its share of the batches, and the count of one to all of them (`DataLoaderShard` in
    data_loader.py, 1.15.0, with use_stateful_dataloader): on another number of processes it is the count of other
    batches, of which some would be seen twice, or none of them ever. UnsupportedLayout on every rank there. Where
    batches are split, or one process reads for all, those of the whole run are counted.
    """
    numbers = [
        number
        for number, loader in enumerate(accelerator._dataloaders)
        if getattr(loader, "use_stateful_dataloader", False) and type(loader).__name__ == "DataLoaderShard"
    ]
    if accelerator.split_batches or not numbers:
        return []
    found = run_on_all(lambda: _data_positions(where, numbers), subject=f"loading {where}")
    told = gather(found)
    then, now, files = max(processes for processes, _ in told), accelerator.num_processes, told[0][1]
    if then not in (0, now):
        faults = [
            UnsupportedLayout.fault(
                os.path.join(where, name),
                "counts the batches that each process has had, and there are others now",
                f"{then} processes, as saved it",
                f"{now}",
                mend="load without use_stateful_dataloader and pass over what was seen with "
                "accelerate.skip_first_batches, or save and load with split_batches=True or dispatch_batches=True",
            )
            for name in files
        ]
        raise_faults(faults, subject=f"loading {where}")
    return files


def _data_positions(where: str, numbers: list[int]) -> tuple[int, list[str]]:
    """How many processes have saved a folder, and which data loaders' files in it are of the middle of an epoch."""
    names = folders.entries(where)
    files = [f"dl_state_dict_{number}.bin" if number else "dl_state_dict.bin" for number in numbers]
    return (
        _processes(where),
        [name for name in files if name in names and _within_an_epoch(os.path.join(where, name))],
    )


def _processes(where: str) -> int:
    """How many processes have saved a folder; 0 where nothing tells."""
    processes = _record(where).get("num_processes")
    if isinstance(processes, int):
        return processes
    names = (re.fullmatch(r"random_states_(\d+)\.pkl", name) for name in folders.entries(where))
    return max((int(found[1]) for found in names if found), default=-1) + 1


def _within_an_epoch(path: str) -> bool:
    """Whether a data loader's state is neither of the beginning nor of the end; also where it does not tell."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return not state.get("_iterator_finished") and state.get("_num_yielded") != 0
    except Exception:  # accelerate reads it itself, and says what is wrong with it
        return True


def _warn_of_another_batch(accelerator: Accelerator, counted: list[str], before: ResumeReport | None) -> None:
    """Where as many processes go on by a count of batches of another size."""
    rows = _reported(before)
    then, now = (_micro_batch({name: getattr(row, at) for name, row in rows.items()}) for at in ("checkpoint", "used"))
    if counted and accelerator.is_main_process and then is not None and then != now:
        what = "%s counts batches of %d samples, and one of this run has %d: some samples are seen twice, or never"
        logger.warning(what, ", ".join(counted), then, now)


def _latest(accelerator: Accelerator) -> str | None:
    """The folder that `load_state()` without one takes, as accelerate names them (accelerator.py, 1.15.0)."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    place = os.path.join(accelerator.project_dir, "checkpoints")
    numbered = [(re.findall(r"[\/]?([0-9]+)(?=[^\/]*$)", name), name) for name in os.listdir(place)]
    found = sorted((int(number[0]), name) for number, name in numbered if number)
    return os.path.join(place, found[-1][1]) if found else None


def _agree_on_step(accelerator: Accelerator, where: str | None, before: ResumeReport | None) -> None:
    """`accelerator.step` of the saving run also on ranks that it did not have, and under another accumulation.

    It counts micro-batches, and decides which of them ends an update. A rank for which there is no random_states file
    keeps its own, logs that at INFO, and accumulates out of step with the others. Under another accumulation the first
    update would be cut short by what is left of the count, and each one after it would lie across two batches.
    """
    if where is None:
        return
    own = os.path.exists(os.path.join(where, f"random_states_{accelerator.process_index}.pkl"))
    told = gather((own, accelerator.step, _accumulation(before)))
    loaded, then, now = [step for there, step, _ in told if there], told[0][2], accelerator.gradient_state.num_steps
    if not own and loaded:
        accelerator.step = loaded[0]
        logger.warning(
            "%s has no random state for rank %d: this run's own is kept, and the position within an update is rank 0's",
            where,
            accelerator.process_index,
        )
    if not loaded or then == now:
        return
    updates, rest = divmod(accelerator.step, then or now)
    if then is not None:
        accelerator.step = updates * now
    if rest and accelerator.is_main_process:
        begun = (
            f"%s was saved within an update of {then} micro-batches, and one of this run has {now}: it begins anew"
            if then is not None
            else f"%s does not tell how many micro-batches an update had: the first of this run has {now - rest} "
            f"of {now}; where the saving run did not accumulate {now}, write accelerator.step = 0 after load_state"
        )
        logger.warning(begun, where)


def _reported(before: ResumeReport | None) -> Mapping[str, Row]:
    """What the engine's load has reported since; on rank 0."""
    report = last_report()
    return {row.name: row for row in report.rows} if report is not None and report is not before else {}


def _accumulation(before: ResumeReport | None) -> int | None:
    """The micro-batches of an update of the saving run, where the engine's load has reported them."""
    row = _reported(before).get("accumulation")
    return row.checkpoint if row is not None and isinstance(row.checkpoint, int) and row.checkpoint > 0 else None


def _micro_batch(values: Mapping[str, object]) -> int | None:
    """The samples that a process has at once, of what a report says of one of the runs."""
    batch, accumulation, layout = (values.get(key) for key in ("global batch size", "accumulation", "stage and dp"))
    if not isinstance(batch, int) or not isinstance(accumulation, int) or not isinstance(layout, tuple):
        return None
    return batch // max(1, accumulation * int(layout[1]))
