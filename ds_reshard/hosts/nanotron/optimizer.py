"""The seam of `load_optimizer`: every state from where it lies, whatever the saving run's layout was.

Rung 3 of the ladder (a function that serialize and the trainer import by name): nanotron publishes no extension point,
and the methods below take a state dict that is complete (serialize/optimizer.py, commit 2411b02).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, cast

from ds_reshard.errors import Fault, ModelMismatch, ParamGroupMismatch, ScheduleMismatch, raise_faults
from ds_reshard.execution.buffers import element_type, read_tensor, tensor_from_bytes, torch_dtype
from ds_reshard.execution.states import has_moments
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.content import Hyperparameters
from ds_reshard.formats.nanotron.metadata import Batch
from ds_reshard.formats.nanotron.names import CONFIG
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.hooks import Call
from ds_reshard.hosts.nanotron.live import Live, LivePart, Optimizer, ParallelContext, experts_of, live_of
from ds_reshard.hosts.nanotron.load import (
    BATCH,
    Group,
    Load,
    Memory,
    batch_of_run,
    current,
    other_batch,
    refuse_contradiction,
    remember,
    same_policy,
    values_of,
)
from ds_reshard.hosts.nanotron.source import Source, folder_of, source_of, states_of
from ds_reshard.model.content import TensorSource
from ds_reshard.model.facts import GroupFacts, ScalarTensor, torch_step
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.operations.filling import fill
from ds_reshard.operations.matching import TRAINED, match_tensors
from ds_reshard.operations.pickles import one_line_for_all
from ds_reshard.operations.ranks import agree, attempt, gather, run_on_all, same_files
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Plan, copies_of
from ds_reshard.resume.policy import ResumePolicy, hyperparameter_faults
from ds_reshard.resume.report import EQUAL_TO_WEIGHTS, batch_size_warning, because

if TYPE_CHECKING:
    from torch import Tensor


_FACTORY = "the same model and optimizer.optimizer_factory, or --no-load-optim to begin the optimizer anew"
_SHOWN = 8
# One of the hyper-parameters that only this kind of optimizer has.
_KINDS = {"betas": "Adam", "momentum": "SGD"}
_OF_GROUP = ("weight_decay", "betas", "eps", "momentum")
# Values of a run that are in no param group of nanotron, and always this run's.
_ALWAYS_THIS_RUNS = ("clip_grad", BATCH)


def load_optimizer(call: Call) -> None:
    """Load as the policy in force says; collective, and nothing has changed on any rank where it raises for a fault.

    Every rank reads what it trains of each parameter, whatever the saving run's dp, tp, pp and ZeRO stage were.
    """
    load, folder = current(), folder_of(call["root_folder"])
    context = cast(ParallelContext, call["parallel_context"])
    same_policy(load.policy, context.world_pg, subject=f"loading {folder}")
    refuse_contradiction(load)
    load.where, policy = folder, load.policy
    optimizer = cast(Optimizer, call["optimizer"])
    memory = remember(optimizer)
    source = source_of(load, folder, context.world_pg)

    def look() -> Live:
        known = {*_ALWAYS_THIS_RUNS, *(name for group in memory.run for name in group)}
        faults = hyperparameter_faults(policy, known, of_schedule=("lr", "initial_lr"))
        raise_faults(faults, subject="resume policy")
        return live_of(optimizer, context)

    live = run_on_all(look, context.world_pg, subject=f"loading {folder}")
    found = other_batch(load, live.dp, source.batch)
    saved: list[Group] | None = None
    states: States | None = None
    if policy.loads_masters:
        found += experts_of(live.topology.exp)
        saved, states = _reshard(load, live, source, found, call.arguments.get("map_location"))
        memory.decayed = True
    else:
        agree(found, live.world, subject=f"loading {folder}")
    if not policy.loads_moments:
        _begin_anew(live, masters=not policy.loads_masters)
    _settle(live, memory, policy)
    report_optimizer(load, live, source, saved, states)


def _reshard(
    load: Load, live: Live, source: Source, found: Sequence[Fault], map_location: object
) -> tuple[list[Group], States]:
    """Load from any layout; returns the saved values of each param group, and what was read; `found` is raised, too."""
    policy = load.policy
    states = prepare(live, source, policy, found, subject=f"loading {load.where}")
    subject = f"loading {source.folder}"
    tensors = {_buffer(*at): tensor for at, tensor in states.tensors.items()}
    fill(states.plan, tensors, live.world, replica=live.replica, subject=subject)
    values, _, notes = values_of_groups(source, live.groups, list(values_of(live.base.param_groups)))
    saved: list[Group] = [
        {key: read_tensor(one) if isinstance(one, TensorRecord) else one for key, one in group.items()}
        for group in values
    ]
    load.warnings += notes

    def put() -> None:
        made = state_dict(live, source, states, saved)
        if policy.loads_moments:
            if live.held:  # of no part of any parameter, nanotron takes no state: "Loading empty state dict"
                live.optimizer.load_state_dict(made, map_location=map_location)
                return
        elif live.accumulator is not None:
            live.accumulator.load_state_dict(made["gradient_accumulator"])  # type: ignore[attr-defined]
        for group, values in zip(live.base.param_groups, saved, strict=True):
            group.update(values)

    run_on_all(put, live.world, subject=subject)
    return saved, states


def _begin_anew(live: Live, *, masters: bool) -> None:
    """No state, also where this optimizer has trained or loaded before; `masters` become those of the weights."""
    live.base.state.clear()
    if masters and live.accumulator is not None:
        for held in live.accumulator.parameters.values():  # type: ignore[attr-defined]
            held["fp32"].data.copy_(held["half"].data)


def _settle(live: Live, memory: Memory, policy: ResumePolicy) -> None:
    """Give the groups what the policy takes from this run: all but the rate where nothing is loaded."""
    names = {*policy.hyperparameters, *(("weight_decay", "lr", "initial_lr") if policy.schedule_is_this_runs else ())}
    for group, run in zip(live.base.param_groups, memory.run, strict=True):
        taken = names if policy.loads_masters else run.keys() - {"lr", "initial_lr"}
        group.update({name: run[name] for name in taken if name in run})


def state_dict_to_device(call: Call) -> object:
    """The trainer moves loaded states in its first step: there are none where the optimizer was asked to begin anew."""
    return call() if call["state_dict"]["state"] else None


def values_of_groups(
    source: Source, groups: Sequence[tuple[str, ...]], runs: Sequence[Group]
) -> tuple[list[Group], list[Fault], list[str]]:
    """The saved values of the param groups with these members; those of the run where none was saved.

    With them, of another framework's, what keeps them from being trained so, and what there is to tell.
    """
    if not source.foreign:
        pairs = zip(groups, runs, strict=True)
        return [dict((saved_groups(source, names) or [run])[0]) for names, run in pairs], [], []
    known = any("initial_lr" in (group.hyperparameters or {}) for group in source.groups)
    asked = Hyperparameters(source.content, mend="the same param groups and AdamW, or --no-load-optim")
    likes = [{**run, "initial_lr": run.get("initial_lr", run["lr"])} if known else run for run in runs]
    made = [
        asked.group(source.folder, GroupFacts(members=names, hyperparameters=like))
        for names, like in zip(groups, likes, strict=True)
    ]
    return [dict(group.hyperparameters or {}) for group in made], asked.faults, asked.left_out


def findings(live: Live, source: Source, states: SavedStates, policy: ResumePolicy) -> Iterator[Fault]:
    """What does not fit of what this rank trains: kinds of states, element types, masters, groups."""
    adams = {name for names, run in zip(live.groups, live.run, strict=True) if "betas" in run for name in names}
    for name, held in live.held.items():
        if name not in states:
            continue
        yield from unlike(live, held, {kind: one.dtype for kind, one in states[name].items()}, policy)
        if policy.loads_moments and (source.foreign or name in adams):
            yield from _lacks(source, name, states[name])
    if source.own is not None:
        yield from other_cuts(live, source.own)
    elif policy.loads_moments:
        yield from values_of_groups(source, live.groups, live.run)[1]
    for names, run in zip(live.groups, live.run, strict=True):
        yield from _group(source, names, run, policy)


def _lacks(source: Source, name: str, kinds: Collection[str]) -> Iterator[Fault]:
    """States of a parameter that torch's AdamW keeps and were not saved; of another framework, others that were."""
    found, wanted = {*kinds, *source.scalars.get(name, {})} - {MASTER}, {"exp_avg", "exp_avg_sq", "step"}
    for kind in sorted(found ^ wanted if source.foreign else wanted - found):
        what = "is not there" if kind not in found else "has no place in nanotron's AdamW"
        yield _mismatch(f"{kind} of {name}", what, "exp_avg, exp_avg_sq, step", ", ".join(sorted(found)) or "none")


def unlike(live: Live, held: LivePart, kinds: Mapping[str, ElementType], policy: ResumePolicy) -> Iterator[Fault]:
    """What does not fit of the saved states of one parameter."""
    if (MASTER in kinds) != (live.accumulator is not None):
        with_masters = "with fp32 masters (accumulate_grad_in_fp32: true)"
        said = (with_masters, "without") if MASTER in kinds else ("without fp32 masters", "with them")
        yield ModelMismatch.fault(
            "fp32 masters",
            "are on one side only",
            f"saved {said[0]}",
            f"this run is {said[1]}",
            mend=f"optimizer.accumulate_grad_in_fp32: {str(MASTER in kinds).lower()}, "
            "or --no-load-optim to begin the optimizer anew from the weights",
        )
    if not policy.loads_moments:
        return
    wanted = element_type(held.tensor.dtype)
    for kind, dtype in kinds.items():
        if kind != MASTER and dtype is not wanted:
            yield _mismatch(f"{kind} of {held.name}", "is of another element type", dtype.label, wanted.label)


def other_cuts(live: Live, checkpoint: NanotronCheckpoint) -> Iterator[Fault]:
    """Parameters of equal shape that are cut over the tensor-parallel ranks in other chunks.

    nanotron takes the weights of a rank as they are where tp and pp are those that were saved, so weights and states
    would be of different rows.
    """
    sizes = (live.topology.pp, live.topology.tp)
    if live.topology.tp == 1 or sizes != (checkpoint.topology.pp, checkpoint.topology.tp):
        return
    for name, held in live.held.items():
        parameter = checkpoint.parameters.get(name)
        if parameter is None or parameter.shape != held.shape:
            continue
        then = tuple(parameter.tiles_at(live.rank.tp))
        if then != held.tiles:
            said = (
                ", ".join(f"{list(tile.box.size)} at {list(tile.box.offset)}" for tile in tiles[:4])
                for tiles in (then, held.tiles)
            )
            yield _mismatch(name, "is cut over the tensor-parallel ranks in other chunks", *said)


def saved_groups(source: Source, names: Sequence[str]) -> list[Mapping[str, object]]:
    """The values of the saved param groups that these parameters were in, each once."""
    found, wanted = list[Mapping[str, object]](), set(names)
    for group in source.groups:
        values = group.hyperparameters
        if values is not None and not wanted.isdisjoint(group.members) and values not in found:
            found.append(values)
    return found


def _group(source: Source, names: Sequence[str], group: Group, policy: ResumePolicy) -> Iterator[Fault]:
    """Yield a fault if a param group differs from the saved one in its members, optimizer or weight decay."""
    saved = saved_groups(source, names)
    if len(saved) > 1:
        differ = sorted({key for values in saved for key in values if values.get(key) != saved[0].get(key)})
        what = f"are in one param group, and were in several that differ in {', '.join(differ)}"
        mend = "build the param groups as the saving run did, or --no-load-optim"
        yield ParamGroupMismatch.fault(some(names), what, f"{len(saved)} groups", "one", mend=mend)
    for values in saved[:1] if policy.loads_moments else ():
        for key, kind in _KINDS.items():
            if (key in values) != (key in group):
                said = (f"saved by {kind}", "another") if key in values else ("saved by another", kind)
                yield _mismatch(some(names), "would be trained by another optimizer", *said)
        if policy.scheduler == "strict" and not policy.takes("weight_decay"):
            then, now = values.get("weight_decay"), group.get("weight_decay")
            if then != now:
                where, what = f"weight_decay of {some(names)}", "differs from the checkpoint's"
                mend = "give the saved value, or --override-opt-param-scheduler to go on with this run's"
                yield ScheduleMismatch.fault(where, what, str(then), str(now), mend=mend)


def some(names: Collection[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _mismatch(where: str, what: str, expected: str, found: str) -> Fault:
    return ModelMismatch.fault(where, what, expected, found, mend=_FACTORY)


SavedStates = Mapping[str, Mapping[str, TensorSource]]


class States(NamedTuple):
    """Tensors of this rank by (name, kind), which are there to be filled, and the copies that fill them."""

    tensors: Mapping[tuple[str, str], Tensor]
    plan: Plan


def prepare(live: Live, source: Source, policy: ResumePolicy, before: Sequence[Fault], *, subject: str) -> States:
    """Open what this rank needs and compare it with the optimizer. Collective: every finding of every rank at once.

    `before` are findings that this rank had already.
    """
    with same_files(live.world, subject=subject):
        states, faults, cause = attempt(lambda: _states_of(live, source))
        agree([*faults, *before] if faults else [], live.world, subject=subject, cause=cause)
    assert states is not None
    found, faults, cause = attempt(lambda: list(findings(live, source, states, policy)))
    first = live.replica == live.rank.tp == live.rank.dp == 0  # which has a part of every parameter of its stage
    mine: dict[str, Shape] = {name: held.shape for name, held in live.held.items()} if first else {}
    shapes = {name: shape for of_rank in gather(mine, live.world) for name, shape in of_rank.items()}
    saved = {name: next(iter(kinds.values())).shape for name, kinds in states.items()}
    found = [*before, *(found or []), *match_tensors(shapes, saved, words=TRAINED, mend=_FACTORY)]
    agree([*faults, *found], live.world, subject=subject, cause=cause)
    return run_on_all(lambda: _plan(live, source, states, policy), live.world, subject=subject)


def _states_of(live: Live, source: Source) -> SavedStates:
    with one_line_for_all(source.folder):
        return states_of(source, masters=live.accumulator is not None)


def state_dict(live: Live, source: Source, states: States, saved: Sequence[Group]) -> dict[str, object]:
    """What nanotron's `load_state_dict` takes: as `torch.load` gives it of the file that this rank would have saved.

    `saved` are the values of each param group.
    """
    state: dict[int, dict[str, object]] = {one.number: {} for one in live.held.values()}
    masters: dict[str, Tensor] = {}
    for one in live.held.values():
        for kind, kept in source.scalars.get(one.name, {}).items():
            value = torch_step(kept) if source.foreign else kept
            scalar = isinstance(value, ScalarTensor)
            state[one.number][kind] = tensor_from_bytes(value.data, value.dtype, value.shape) if scalar else value  # type: ignore[union-attr]
    for (name, kind), tensor in states.tensors.items():
        if kind == MASTER:
            masters[name] = tensor
        else:
            state[live.held[name].number][kind] = tensor
    numbers = count()
    groups = [
        {**values, "params": [next(numbers) for _ in group["params"]]}
        for values, group in zip(saved, live.base.param_groups, strict=True)
    ]
    names = {one.number: one.name for one in live.held.values()}
    made: dict[str, object] = {"state": state, "names": names, "param_groups": groups}
    return {**made, "gradient_accumulator": masters} if live.accumulator is not None else made


def _plan(live: Live, source: Source, states: SavedStates, policy: ResumePolicy) -> States:
    import torch

    shards = source.checkpoint.shards()
    index = shards.index.with_layout(source.layout)
    tensors: dict[tuple[str, str], Tensor] = {}
    copies: list[Copy] = []
    for name, held in live.held.items():
        for kind, saved in states[name].items():
            if kind != MASTER and not policy.loads_moments:
                continue
            tensors[name, kind] = torch.empty(tuple(held.tensor.shape), dtype=torch_dtype(saved.dtype), device="cpu")
            for region, first in held.regions():
                buffer = _buffer(name, kind)
                copies += copies_of(index, saved.origin, region, buffer=buffer, element_offset=first, dtype=saved.dtype)
    with one_line_for_all(source.folder):
        raise_faults(shards.index.faults or shards.compare(), subject=f"loading {source.folder}")
    return States(tensors, Plan(copies=coalesce(copies)))


def _buffer(name: str, kind: str) -> str:
    return f"{kind}/{name}"


_KEPT = "as before this load"


def _left(live: Live, policy: ResumePolicy, read: States | None) -> tuple[str, str]:
    """Whose the masters and the moments of all ranks are, each answer once; collective."""
    mine = (_masters_left(live, policy, read), _moments_left(live, policy, read)) if live.held else None
    everyone = [one for one in gather(mine, live.world) if one is not None]
    masters, moments = ("; ".join(dict.fromkeys(answers)) for answers in zip(*everyone, strict=True))
    return masters, moments


def _moments_left(live: Live, policy: ResumePolicy, read: States | None) -> str:
    """Whose the moments and steps of this rank are, by what is in its optimizer."""
    if not has_moments(live.base, steps=True):
        return "zero"
    return "from the checkpoint" if policy.loads_moments and _holds(live, read, masters=False) else _KEPT


def _masters_left(live: Live, policy: ResumePolicy, read: States | None) -> str:
    """Whose the masters of this rank are: after a load without them the weights, to the bit."""
    parts = live.accumulator.parameters.values() if live.accumulator is not None else ()  # type: ignore[attr-defined]
    if not all(bool((held["fp32"] == held["half"]).all()) for held in parts):
        return "from the checkpoint" if policy.loads_masters and _holds(live, read, masters=True) else _KEPT
    if not policy.loads_masters:
        return "from the loaded weights"
    return (
        EQUAL_TO_WEIGHTS if any(held["fp32"].dtype != held["half"].dtype for held in parts) else "from the checkpoint"
    )


def _holds(live: Live, read: States | None, *, masters: bool) -> bool:
    """Whether the optimizer holds what was read of the checkpoint."""
    for (name, kind), tensor in read.tensors.items() if read is not None else ():
        own = live.held[name].tensor
        held = own if kind == MASTER else live.base.state.get(own, {}).get(kind)
        if (kind == MASTER) is masters and (
            held is None or not held.detach().cpu().isclose(tensor.to(held.dtype), 0, 0, equal_nan=True).all()
        ):
            return False
    return True


def report_unloaded(load: Load, optimizer: Optimizer, context: ParallelContext) -> None:
    """The rows of an optimizer that the configuration leaves as it was built; collective."""
    masters, moments = _left(live_of(optimizer, context), replace(load.policy, optimizer="skip"), None)
    for name, used in (("fp32 masters", masters), ("moments and step", moments)):
        load.row(name, used, "checkpoints.load_optimizer")


def report_optimizer(
    load: Load, live: Live, source: Source, saved: Sequence[Group] | None, states: States | None
) -> None:
    """What became of the optimizer; published at once in a loop of the user's own."""
    policy, then, now = load.policy, source.listing.topology, live.topology
    for name in ("pp", "tp"):
        load.row(name, getattr(now, name), "host", saved=getattr(then, name, None), run=getattr(now, name))
    load.row("dp", live.dp, "host", saved=source.ranks, run=live.dp)
    stage = int(now.dp is not None)
    load.row("zero stage", stage, "host", saved=int(then.dp is not None) if then is not None else None, run=stage)
    batch = batch_of_run(load, live.dp)
    if batch is not None:
        size = source.batch.size if isinstance(source.batch, Batch) else source.batch
        load.row("global batch size", batch.size, because(policy, "schedule", BATCH), saved=size, run=batch.size)
        load.warnings += batch_size_warning(size, batch.size)
        if size is None and not policy.schedule_is_this_runs and not policy.takes(BATCH):
            what = f"tells no global batch size: this run's {batch.size} is not compared with it"
            load.warnings.append(f"{'' if source.foreign else f'{CONFIG} of '}the checkpoint {what}")
    why, (masters, moments) = because(policy, "optimizer"), _left(live, policy, states)
    load.row("fp32 masters", masters, why)
    load.row("moments and step", moments, why)
    for number, (run, used) in enumerate(zip(live.run, live.base.param_groups, strict=True)):
        values = saved[number] if saved is not None else {}
        for name in dict.fromkeys((*_OF_GROUP, *policy.hyperparameters)):
            if name in used:
                what = "schedule" if name == "weight_decay" and not policy.takes(name) else name
                why = because(policy, what, name)
                load.row(f"group {number} {name}", used[name], why, saved=values.get(name), run=run.get(name))
    if load.trainer is None:
        load.publish()
