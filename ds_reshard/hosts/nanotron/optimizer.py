"""The seam of `load_optimizer`: every state from where it lies, whatever the saving run's layout was.

Rung 3 of the ladder (a function that serialize and the trainer import by name): nanotron publishes no extension point,
and the methods below take a state dict that is complete (serialize/optimizer.py, commit 2411b02).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.digests import digest
from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    ModelMismatch,
    ParamGroupMismatch,
    ScheduleMismatch,
    error_of,
    raise_faults,
)
from ds_reshard.execution.buffers import element_type, read_tensor, tensor_from_bytes, torch_dtype
from ds_reshard.execution.states import has_moments
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.content import Hyperparameters
from ds_reshard.formats.nanotron.door import OpenedNanotron
from ds_reshard.formats.nanotron.metadata import Metadata, read_metadata
from ds_reshard.formats.nanotron.names import CONFIG, META, NanotronListing, read_listing
from ds_reshard.formats.nanotron.optimizer_file import MASTER, SavedGroup
from ds_reshard.hooks import Call
from ds_reshard.hosts.nanotron.foreign import Foreign, folder_of, foreign_of, states_of
from ds_reshard.hosts.nanotron.live import Live, Optimizer, ParallelContext, TrainedPart, experts_of, live_of
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
    run_of,
    same_policy,
    values_of,
)
from ds_reshard.model.checkpoint import Shards
from ds_reshard.model.content import TensorSource
from ds_reshard.model.facts import OptimizerFacts, ScalarTensor, torch_step
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.operations.filling import fill
from ds_reshard.operations.matching import TRAINED, match_tensors
from ds_reshard.operations.ranks import agree, agree_files, attempt, gather, run_on_all, same_files
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint of any format holds of an optimizer, and where.

    `states` has of each trained parameter the tensors by kind.
    """

    folder: str
    shapes: Mapping[str, Shape]
    states: Mapping[str, Mapping[str, TensorSource]]
    facts: OptimizerFacts
    shards: Shards
    own: NanotronCheckpoint | None = None
    foreign: Foreign | None = None

    def of_groups(
        self, groups: Sequence[tuple[str, ...]], runs: Sequence[Group]
    ) -> tuple[list[Group], list[Fault], list[str]]:
        """The saved values of the param groups with these members; those of the run where none was saved.

        With them, of another framework's, what keeps them from being trained so, and what there is to tell.
        """
        known = any("initial_lr" in (group.hyperparameters or {}) for group in self.facts.groups)
        own = [{**run, "initial_lr": run.get("initial_lr", run["lr"])} if known else run for run in runs]
        pairs = list(zip(groups, own if self.foreign is not None else runs, strict=True))
        if self.foreign is None:
            return [dict((saved_group(self, names) or [run])[0]) for names, run in pairs], [], []
        asked = Hyperparameters(self.foreign.content, mend="the same param groups and AdamW, or --no-load-optim")
        made = [
            asked.group(self.folder, SavedGroup(members=names, hyperparameters=run)).hyperparameters
            for names, run in pairs
        ]
        return [dict(values) for values in made], asked.faults, asked.left_out


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
    foreign = foreign_of(load, folder, context.world_pg)

    def look() -> tuple[Live, NanotronListing, Metadata | None]:
        known = {*_ALWAYS_THIS_RUNS, *(name for group in memory.run for name in group)}
        faults = hyperparameter_faults(policy, known, of_schedule=("lr", "initial_lr"))
        raise_faults(faults, subject="resume policy")
        listing = read_listing(folder) if foreign is None else NanotronListing(folder=foreign.folder, nbytes={})
        return live_of(optimizer, context), listing, read_metadata(listing)[0] if foreign is None else None

    live, listing, metadata = run_on_all(look, context.world_pg, subject=f"loading {folder}")
    if foreign is None:
        agree_files({os.path.join(folder, META): digest(metadata)}, live.world, subject=f"loading {folder}")
    size = foreign.content.batch_size if foreign is not None else metadata.batch if metadata is not None else None
    found = other_batch(load, live.dp, size)
    saved: list[Group] | None = None
    states: States | None = None
    if policy.loads_masters:
        found += experts_of(live.topology.exp)
        masters = live.accumulator is not None
        opened = partial(_open, listing) if foreign is None else partial(_of_foreign, foreign, masters=masters)
        saved, states = _reshard(load, live, opened, found, call.arguments.get("map_location"))
        memory.decayed = True
    else:
        agree(found, live.world, subject=f"loading {folder}")
    if not policy.loads_moments:
        _begin_anew(live, masters=not policy.loads_masters)
    _settle(live, memory, policy)
    report_optimizer(load, live, listing, metadata, saved, foreign, states)


def _reshard(
    load: Load, live: Live, opened: Callable[[], Saved], found: Sequence[Fault], map_location: object
) -> tuple[list[Group], States]:
    """Load from any layout; returns the saved values of each param group, and what was read; `found` is raised, too."""
    policy = load.policy
    states = prepare(live, opened, policy, found, subject=f"loading {load.where}")
    subject = f"loading {states.checkpoint.folder}"
    tensors = {_buffer(*at): tensor for at, tensor in states.tensors.items()}
    fill(states.plan, tensors, live.world, replica=live.replica, subject=subject)
    values, _, notes = states.checkpoint.of_groups(live.groups, list(values_of(live.base.param_groups)))
    saved: list[Group] = [
        {key: read_tensor(one) if isinstance(one, TensorRecord) else one for key, one in group.items()}
        for group in values
    ]
    load.warnings += notes

    def put() -> None:
        made = state_dict(live, states, saved)
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


def findings(live: Live, checkpoint: Saved, policy: ResumePolicy) -> Iterator[Fault]:
    """What does not fit of what this rank trains: kinds of states, element types, masters, groups."""
    states = checkpoint.states
    for name, held in live.held.items():
        if name not in states:
            continue
        yield from unlike(live, held, {kind: one.dtype for kind, one in states[name].items()}, policy)
        if checkpoint.foreign is not None and policy.loads_moments:
            yield from _lacks(checkpoint, name)
    if checkpoint.own is not None:
        yield from other_cuts(live, checkpoint.own)
    elif policy.loads_moments:
        yield from checkpoint.of_groups(live.groups, run_of(live.base))[1]
    for names, run in zip(live.groups, run_of(live.base), strict=True):
        yield from _group(checkpoint, names, run, policy)


def _lacks(checkpoint: Saved, name: str) -> Iterator[Fault]:
    """States that nanotron's AdamW keeps of each parameter, and another framework has not saved, or others."""
    found = {*checkpoint.states[name], *checkpoint.facts.scalars.get(name, {})} - {MASTER}
    for kind in sorted(found ^ {"exp_avg", "exp_avg_sq", "step"}):
        what = "is not there" if kind not in found else "has no place in nanotron's AdamW"
        yield _mismatch(f"{kind} of {name}", what, "exp_avg, exp_avg_sq, step", ", ".join(sorted(found)) or "none")


def unlike(live: Live, held: TrainedPart, kinds: Mapping[str, ElementType], policy: ResumePolicy) -> Iterator[Fault]:
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


def saved_group(checkpoint: Saved, names: Sequence[str]) -> list[Mapping[str, object]]:
    """The values of the saved param groups that these parameters were in, each once."""
    found: list[Mapping[str, object]] = []
    for group in checkpoint.facts.groups:
        values = group.hyperparameters
        if values is not None and set(names) & set(group.members) and values not in found:
            found.append(values)
    return found


def _group(checkpoint: Saved, names: Sequence[str], group: Group, policy: ResumePolicy) -> Iterator[Fault]:
    saved = saved_group(checkpoint, names)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Tensors of this rank by (name, kind), which are there to be filled, and the copies that fill them."""

    checkpoint: Saved
    tensors: Mapping[tuple[str, str], Tensor]
    plan: Plan


def prepare(
    live: Live, opened: Callable[[], Saved], policy: ResumePolicy, before: Sequence[Fault], *, subject: str
) -> States:
    """Open what this rank needs and compare it with the optimizer. Collective: every finding of every rank at once.

    `before` are findings that this rank had already.
    """
    with same_files(live.world, subject=subject):
        checkpoint, faults, cause = attempt(opened)
        agree([*faults, *before] if faults else [], live.world, subject=subject, cause=cause)
    assert checkpoint is not None
    found, faults, cause = attempt(lambda: list(findings(live, checkpoint, policy)))
    first = live.replica == live.rank.tp == live.rank.dp == 0  # which has a part of every parameter of its stage
    mine: dict[str, Shape] = {name: held.shape for name, held in live.held.items()} if first else {}
    shapes = {name: shape for of_rank in gather(mine, live.world) for name, shape in of_rank.items()}
    saved = {name: checkpoint.shapes[name] for name in checkpoint.states}
    found = [*before, *(found or []), *match_tensors(shapes, saved, words=TRAINED, mend=_FACTORY)]
    agree([*faults, *found], live.world, subject=subject, cause=cause)
    return run_on_all(lambda: _plan(live, checkpoint, policy), live.world, subject=subject)


def state_dict(live: Live, states: States, saved: Sequence[Group]) -> dict[str, object]:
    """What nanotron's `load_state_dict` takes: as `torch.load` gives it of the file that this rank would have saved.

    `saved` are the values of each param group.
    """
    facts = states.checkpoint.facts
    state: dict[int, dict[str, object]] = {one.number: {} for one in live.held.values()}
    masters: dict[str, Tensor] = {}
    for one in live.held.values():
        for kind, kept in facts.scalars.get(one.name, {}).items():
            value = torch_step(kept) if states.checkpoint.foreign is not None else kept
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


def _open(listing: NanotronListing) -> Saved:
    source = OpenedNanotron(listing)
    checkpoint = source.checkpoint
    if checkpoint.facts is None:
        where, mend = f"{listing.folder}/optimizer", "--no-load-optim, or load another step"
        raise error_of([_no_states(where, "the file of each rank", mend)], subject=listing.folder)
    shapes = {name: parameter.shape for name, parameter in checkpoint.parameters.items()}
    states = {
        name: {
            kind: TensorSource(shape=shapes[name], dtype=one.dtype, origin=TensorKey(name=name, kind=kind))
            for kind, one in kinds.items()
        }
        for stage in reversed(checkpoint.stages)
        for name, kinds in stage.states.items()
    }
    return Saved(
        folder=checkpoint.folder,
        shapes=shapes,
        states=states,
        facts=checkpoint.facts,
        shards=source.shards(),
        own=checkpoint,
    )


def _of_foreign(foreign: Foreign, *, masters: bool) -> Saved:
    content = foreign.content
    faults = [*content.faults]
    if content.facts is None or not content.facts.groups:
        mend = "--no-load-optim, to begin the optimizer anew from the weights"
        faults.append(_no_states(foreign.folder, "param groups and states", mend))
    raise_faults(faults, subject=f"loading {foreign.folder}")
    assert content.facts is not None
    states = states_of(foreign, masters=masters)
    first = {name: next(iter(kinds.values())).shape for name, kinds in content.trained.items()}
    return Saved(
        folder=foreign.folder,
        shapes=first,
        states=states,
        facts=content.facts,
        shards=foreign.source.shards(),
        foreign=foreign,
    )


def _no_states(where: str, expected: str, mend: str) -> Fault:
    return CheckpointDamaged.fault(where, "holds no states of an optimizer", expected, "none", mend=mend)


def _plan(live: Live, checkpoint: Saved, policy: ResumePolicy) -> States:
    import torch

    index = checkpoint.shards.index
    tensors: dict[tuple[str, str], Tensor] = {}
    copies: list[Copy] = []
    for name, held in live.held.items():
        for kind, saved in checkpoint.states[name].items():
            if kind != MASTER and not policy.loads_moments:
                continue
            tensors[name, kind] = torch.empty(tuple(held.tensor.shape), dtype=torch_dtype(saved.dtype), device="cpu")
            for region, first in held.regions():
                buffer = _buffer(name, kind)
                copies += copies_of(index, saved.origin, region, buffer=buffer, element_offset=first, dtype=saved.dtype)
    raise_faults(index.faults or checkpoint.shards.compare(), subject=f"loading {checkpoint.folder}")
    return States(checkpoint=checkpoint, tensors=tensors, plan=Plan(copies=coalesce(copies)))


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


def report_optimizer(
    load: Load,
    live: Live,
    listing: NanotronListing,
    metadata: Metadata | None,
    saved: Sequence[Group] | None,
    foreign: Foreign | None,
    states: States | None,
) -> None:
    """What became of the optimizer; published at once in a loop of the user's own."""
    policy, then, now = load.policy, listing.topology, live.topology
    for name in ("pp", "tp"):
        load.row(name, getattr(now, name), "host", saved=getattr(then, name, None), run=getattr(now, name))
    ranks = foreign.content.ranks if foreign is not None else metadata.dp if metadata is not None else None
    load.row("dp", live.dp, "host", saved=ranks, run=live.dp)
    stage = int(now.dp is not None)
    load.row("zero stage", stage, "host", saved=int(then.dp is not None) if then is not None else None, run=stage)
    batch = batch_of_run(load, live.dp)
    if batch is not None:
        size = metadata.global_batch_size if metadata is not None else None
        size = foreign.content.batch_size if foreign is not None else size
        load.row("global batch size", batch.size, because(policy, "schedule", BATCH), saved=size, run=batch.size)
        load.warnings += batch_size_warning(size, batch.size)
        if size is None and not policy.schedule_is_this_runs and not policy.takes(BATCH):
            what = f"tells no global batch size: this run's {batch.size} is not compared with it"
            load.warnings.append(f"{f'{CONFIG} of ' if foreign is None else ''}the checkpoint {what}")
    why, (masters, moments) = because(policy, "optimizer"), _left(live, policy, states)
    load.row("fp32 masters", masters, why)
    load.row("moments and step", moments, why)
    for number, (run, used) in enumerate(zip(run_of(live.base), live.base.param_groups, strict=True)):
        values = saved[number] if saved is not None else {}
        for name in dict.fromkeys((*_OF_GROUP, *policy.hyperparameters)):
            if name in used:
                what = "schedule" if name == "weight_decay" and not policy.takes(name) else name
                why = because(policy, what, name)
                load.row(f"group {number} {name}", used[name], why, saved=values.get(name), run=run.get(name))
    if load.trainer is None:
        load.publish()
