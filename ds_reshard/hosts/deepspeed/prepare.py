"""Everything about a load that can fail, before the first byte of the engine changes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.errors import AS_SAVED, Fault, ModelMismatch, ParamGroupMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, AnyCheckpoint, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.optim_states import Partition
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.stage0 import Named, param_groups, same_places, stage0_kind, states, torch_optimizer
from ds_reshard.formats.zero.tensor_parallel import padding_rules
from ds_reshard.hosts.deepspeed.copies import (
    later_stage_weight_faults,
    model_of_stage,
    name_optimizer,
    order_faults,
    plan_rank,
    same_values,
    ties_restored,
    unequal_replicas,
    unproved_faults,
)
from ds_reshard.hosts.deepspeed.engine import Optimizer, Run
from ds_reshard.hosts.deepspeed.entries import (
    ModuleValues,
    OptimizerValues,
    Request,
    clipping_faults,
    live_entries,
    loss_scaling,
    module_values,
    revived,
    scalar,
)
from ds_reshard.hosts.deepspeed.find_checkpoint import files_as_listed
from ds_reshard.hosts.deepspeed.foreign import ForeignCheckpoint
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.load_targets import (
    Wants,
    format_faults,
    group_faults,
    more_rows,
    run_shares,
    state_faults,
    want_model,
    want_optimizer,
)
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.hosts.deepspeed.unfound import LiveModel, check_trained_names, saved_shapes, warn_of_others
from ds_reshard.model.checkpoint import Shards
from ds_reshard.model.content import MASTER, WEIGHT, regrouping_fault, reorder_groups
from ds_reshard.model.facts import OptimizerFacts, Scalar, canonical, describe
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.live_run import LiveTensor, LocalShard
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.operations.matching import TRAINED, match_tensors
from ds_reshard.operations.ranks import rank
from ds_reshard.planning.plan import Plan

logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A load that nothing but the disk can still stop.

    `model` is the model file whose entries and buffers this rank takes: stage 3 writes one a rank, and at
    the saved data-parallel size each rank takes back its own; otherwise all take rank 0's.
    """

    checkpoint: AnyCheckpoint
    model: ModelStates
    run: Run
    wants: Wants
    index: Index
    plan: Plan
    values: OptimizerValues | None
    masters: bool
    entries: Mapping[str, object]
    beside: ModuleValues
    shards: ZeroShards | None

    @property
    def live(self) -> Optimizer | None:
        return self.run.optimizer

    @property
    def grid(self) -> LiveGrid:
        return self.run.grid


@gc_disabled()
def prepare(run: Run, checkpoint: AnyCheckpoint, groups: SavedGroups, request: Request, settings: Settings) -> Prepared:
    """Match model, groups and states, plan the copies and open the shards they need; no mutation.

    Raises every fault found on this rank at once.
    """
    subject, live, grid = f"loading {checkpoint.listing.folder}", run.optimizer, run.grid
    loads_optimizer = request.load_optimizer and live is not None
    shards = ZeroShards(checkpoint=checkpoint) if isinstance(checkpoint, ZeroCheckpoint) else None
    divided, faults = run_shares(run, checkpoint)
    model_now, strict = live_model(run, divided), request.strict
    check_trained_names(model_now, checkpoint, grid, strict=strict or loads_optimizer)
    faults += model_faults(model_now, checkpoint, grid, optimizer=loads_optimizer, strict=strict)
    faults += size_faults(live) if live is not None else ()
    raise_faults(faults, subject=subject)
    if not strict:
        warn_of_others(model_now, checkpoint, grid)
    values = None
    if loads_optimizer and live is not None:
        if checkpoint.stage == 0:
            checkpoint, extents = groups.ordered
            shards = ZeroShards(checkpoint=checkpoint, stage0=extents)
        values, found = _optimizer_values(run, live, checkpoint, groups, settings, request)
        faults += found
        raise_faults(faults, subject=subject)
    own = live is None or live.stage == 0 or live.kind == "zero3" or run.from_masters
    masters, states = loads_optimizer and own, loads_optimizer and request.moments
    wants = Wants(checkpoint=checkpoint, divided=divided)
    _fill(wants, run, request, loads_optimizer=loads_optimizer, states=states, masters=masters)
    model = _own_model(run, checkpoint)
    if model is not checkpoint.model and checkpoint.listing.partitioned_model:
        wants.take_buffers(run.module.tensors, model)
    entries = dict(live_entries(run.scheduler, model, request, settings))
    if request.scheduler and not request.module_only and run.scheduler is not None:
        entries["lr_scheduler"], found = groups.scheduler(entries.get("lr_scheduler"), request.replaced)
        faults += found
    if isinstance(checkpoint, ForeignCheckpoint):
        opened = checkpoint.open()
    else:
        assert shards is not None
        opened = Shards(index=Index(checkpoint.layout, shards))
    index = opened.index
    position, size = (live.rank, live.dp) if live else (0, 1)
    plan = plan_rank(index, wants, grid, position, size)
    if checkpoint.listing.partitioned_model:
        for shard in range(position, checkpoint.layout.shards[MODEL], size):
            index.open(MODEL, shard)
    if isinstance(checkpoint, ZeroCheckpoint):
        faults += unequal_replicas(checkpoint, grid, index, position, size, memory_nbytes=settings.memory_nbytes)
    else:
        faults += names_apart(run.module.tensors, index, memory_nbytes=settings.memory_nbytes)
    faults += [*later_stage_weight_faults(wants, grid), *unproved_faults(wants, prove=settings.prove)]
    faults += [*index.faults, *wants.faults, *opened.compare(), *files_as_listed(checkpoint.listing, plan.files)]
    raise_faults(faults, subject=subject)
    return Prepared(
        checkpoint=checkpoint,
        model=model,
        run=run,
        wants=wants,
        index=index,
        plan=plan,
        values=values,
        masters=masters,
        entries=entries,
        beside=module_values(run.module, model, settings),
        shards=shards,
    )


def names_apart(tensors: Iterable[LiveTensor], index: Index, *, memory_nbytes: int) -> Iterator[Fault]:
    """Rank 0: names of one tensor of this run under which another format's folder holds weights that differ.

    That this run has one tensor under them is what proves them tied; a folder that was saved with each name's own bytes
    does not tell, and one of two that differ would be lost.
    """
    for one in tensors if not rank() else ():
        keys = [TensorKey(name=name, kind=WEIGHT) for name in one.entries]
        held = [key for key in keys if key in index.layout]
        for other in held[1:]:
            if not same_values((index, held[0]), (index, other), memory_nbytes=memory_nbytes):
                mend = "build the model with a weight for each name, or correct the folder"
                what = f"is tied to {held[0].name} in this run, and has other values than it in the checkpoint"
                yield ModelMismatch.fault(f"parameter {other.name}", what, "the same bytes", "others", mend=mend)


def _own_model(run: Run, checkpoint: AnyCheckpoint) -> ModelStates:
    if len(checkpoint.stages) > 1 and len(checkpoint.stages) == run.grid.pp:
        return model_of_stage(checkpoint, run.grid)
    listing = checkpoint.listing
    if not listing.partitioned_model or run.data_rank == 0 or checkpoint.tp_models or run.data_ranks != checkpoint.dp:
        return checkpoint.model
    name = listing.model[run.data_rank]
    return listing.read(name, read_model_states)


def _fill(wants: Wants, run: Run, request: Request, *, loads_optimizer: bool, states: bool, masters: bool) -> None:
    """Want what the load is asked for."""
    live = run.optimizer
    want_model(wants, run, masters=masters, strict=request.strict)
    if live is None:
        return
    gathered = bool(wants.from_masters) and live.kind in ("zero", "bf16")
    if loads_optimizer or gathered:
        want_optimizer(wants, live, masters=masters or gathered, states=states)


def _unfollowed(live: Optimizer, checkpoint: AnyCheckpoint) -> Iterator[Fault]:
    """States that are neither one value nor cut as the parameters are: nobody can say how to cut them anew."""

    def mend(types: Iterable[ElementType], itemsize: int) -> str:
        own = f", once {live.name} has a load_state_dict of its own that keeps types (torch's casts states)"
        home = f"{AS_SAVED}{own if _casts(live, types, itemsize) else ''}"
        return f"{home}, or pass --no-load-optim, or load_optimizer_states=False"

    for _, fault in checkpoint.unreshardable:
        yield replace(fault, mend=mend(_stage0_types(checkpoint), 8))
    for number, partition in enumerate(checkpoint.optim.partitions if checkpoint.optim else ()):
        for name, found in partition.unreshardable.items():
            yield UnsupportedLayout.fault(
                f"optimizer state {name!r} of flat buffer {number}",
                "does not follow the parameter, so it cannot be cut for another layout",
                f"{partition.padded_numel} elements or one",
                found,
                mend=mend(_types(partition), partition.fp32.dtype.itemsize),
            )


def _optimizer_values(
    run: Run, live: Optimizer, checkpoint: AnyCheckpoint, groups: SavedGroups, settings: Settings, request: Request
) -> tuple[OptimizerValues, list[Fault]]:
    """What the optimizer takes over; without moments neither scalar states nor a step count."""
    facts, moments = checkpoint.facts, request.moments
    assert facts is not None
    told = {n: {k: v for k, v in one.items() if k not in request.replaced} for n, (one, _) in groups.matched.items()}
    faults = [*format_faults(live), *(group_faults(live, told) if moments else ())]
    hyper: dict[int, Mapping[str, object]] = {}
    for number, (saved, differing) in groups.matched.items():
        faults += [fault for key, fault in differing if key not in request.replaced]
        made = revived(dict(saved), trusted=settings.trust, where=f"param group {number}")
        assert isinstance(made, dict)
        hyper[number] = made if moments else {name: value for name, value in made.items() if name != "step"}
    scalars: dict[int, Mapping[str, object]] = {}
    for number, buffer in enumerate(live.buffers if moments else ()):
        shapes = {name: shape for name, shape in buffer.shapes.items() if prod(shape)}  # an empty one has no states
        found, wrong = match_scalars(f"flat buffer {number}", list(shapes), facts)
        scalars[number] = {name: scalar(value) for name, value in found.items()}
        faults += wrong + _uneven_states(checkpoint, number, shapes)
    entries = checkpoint.optimizer_entries
    faults += clipping_faults(live.computes_norm, entries, request.replaced)
    faults += [*_unfollowed(live, checkpoint), *state_faults(live, checkpoint)] if moments else []
    extras = loss_scaling(run, checkpoint, settings, request)
    step = entries.get("base_optimizer_state_step") if moments else None
    return OptimizerValues(groups=hyper, scalars=scalars, extras=extras, step=step), faults


def _uneven_states(checkpoint: AnyCheckpoint, number: int, shapes: Mapping[str, Shape]) -> list[Fault]:
    """Members of one flat buffer must have been saved with the same states: there is one for all."""
    kinds: dict[tuple[str, ...], str] = {}
    for name in shapes:
        found = tuple(sorted(kind for kind in checkpoint.layout.kinds(name) if kind not in ("weight", "fp32")))
        kinds.setdefault(found, name)
    if len(kinds) < 2:
        return []
    (one, first), (other, second), *_ = kinds.items()
    return [
        ParamGroupMismatch.fault(
            f"flat buffer {number}",
            "its members were saved with other states",
            f"{', '.join(one) or 'none'} (as {first})",
            f"{', '.join(other) or 'none'} (as {second})",
            mend="build the param groups that were saved, or pass --no-load-optim, or load_optimizer_states=False",
        )
    ]


def same_layout(run: Run, checkpoint: AnyCheckpoint) -> bool:
    """Whether DeepSpeed itself loads this checkpoint into this engine, rightly.

    That takes the same stage, wrapper, data-parallel size, file prefix, order of parameters in every
    flat buffer (round-robin), gaps (parameter alignment), sub-groups and param groups; and no elastic
    optimizer state, which DeepSpeed loads at no size. Two stage-0 runs are alike at any size. Of a PipelineModule it
    loses what is not tied of tied modules, all of one that the first stage has no file of, and bf16 at stage 0
    (`BF16_Optimizer._load_legacy_checkpoint`); experts of several expert-parallel ranks it takes for those of any other
    number, fp32 states of 16-bit masters and states that are no fractions it casts, and what an optimizer needs in its
    groups, or another rule of its steps, it overlooks. Between fp16 and another precision it would take over how the
    loss was scaled.
    """
    live, grid = run.optimizer, run.grid
    if not isinstance(checkpoint, ZeroCheckpoint) or checkpoint.model.renamed:
        return False
    if {one.names[0] for one in run.module.tensors if one.quantized} != checkpoint.model.quantized:
        return False
    if live is not None and checkpoint.model.in_fp16 is not run.fp16:
        return False
    if checkpoint.tp_models or len(checkpoint.columns) > 1:
        return False
    sizes = {one.total // one.size for one in grid.experts.values()}
    if checkpoint.listing.ep_optim and not same_places(checkpoint, sizes, None if live is None else live.groups):
        return False
    if bool(checkpoint.stages) != bool(grid.parts):  # DeepSpeed looks for files of layers, or for a module
        return False
    if checkpoint.stages and checkpoint.stage != 0:
        return False
    if checkpoint.stages and (any(order_faults(checkpoint, grid, live)) or not ties_restored(checkpoint, grid)):
        return False
    if live is None or live.stage == 0:
        as_saved = checkpoint.stage == 0 and run.kind == stage0_kind(checkpoint)
        return as_saved and (live is None or not _casts(live, _stage0_types(checkpoint), 8))
    optim = checkpoint.optim
    if optim is None or optim.elastic or checkpoint.dp != live.dp:
        return False
    if (checkpoint.kind, checkpoint.stage) != (live.kind, live.stage):
        return False
    if (checkpoint.listing.optim_prefix == "bf16_") != run.bf16:
        return False
    saved_groups = checkpoint.model.param_shapes or ()
    if [list(s.items()) for s in saved_groups] != [list(b.shapes.items()) for b in live.buffers]:
        return False
    for buffer, partition in zip(live.buffers, optim.partitions, strict=True):
        if _gaps(buffer.gaps) != _gaps(partition.alignment):
            return False
        if _casts(live, _types(partition), min(partition.fp32.dtype.itemsize, buffer.dtype.itemsize)):
            return False
    facts = checkpoint.facts
    assert facts is not None
    for number, (group, told) in enumerate(zip(live.groups, facts.groups, strict=False)):
        saved = told.hyperparameters or {}
        if "bias_correction" in group.keys() - saved.keys() or any(group_faults(live, {number: saved})):
            return False
    return [list(g.members) for g in facts.groups] == [live.members(g) for g in range(len(live.groups))]


def _casts(live: Optimizer, types: Iterable[ElementType], itemsize: int) -> bool:
    """True if torch's `load_state_dict` casts states of these types, to floating-point numbers of `itemsize` bytes."""
    return live.casts_states and any(one.itemsize > itemsize or not one.is_floating for one in types)


def _types(partition: Partition) -> list[ElementType]:
    return [state.dtype for state in partition.states.values()]


def _stage0_types(checkpoint: AnyCheckpoint) -> list[ElementType]:
    """Return the types of the states of a stage-0 optimizer, without its steps, which torch leaves as they are."""
    found = ((kind, one) for state in states(torch_optimizer(checkpoint.model)) for kind, one in state.items())
    return [one.dtype for kind, one in found if kind != "step" and isinstance(one, TensorRecord)]


def _gaps(gaps: Sequence[int] | None) -> Sequence[int] | None:
    return tuple(gaps) if gaps and any(gaps) else None


def live_model(run: Run, divided: Mapping[str, LocalShard]) -> LiveModel:
    """Names and shapes of the run's module, whole ones of what is divided."""
    live, shapes = run.optimizer, run.module.shapes()
    trained = {one.names[0] for one in run.module.tensors if one.trainable}
    if live is not None:
        owned = {name for buffer in live.buffers for name in buffer.shapes}
        trained = owned | {name for name in trained if not prod(shapes[name])}
    shapes |= {name: share.shape for name, share in divided.items() if name in shapes}
    buffers = {name: one.shape for one in run.module.tensors if not one.names for name in one.entries}
    return LiveModel(
        trainable={name: shape for name, shape in shapes.items() if name in trained},
        frozen={name: shape for name, shape in shapes.items() if name not in trained},
        buffers={**buffers, **run.module.other_shapes},
        keys=run.module.names,
        tied={
            name: frozenset(one.entries) for one in run.module.tensors if len(one.entries) > 1 for name in one.entries
        },
    )


def size_faults(live: Optimizer) -> Iterator[Fault]:
    """A fault if a flat buffer has not the size that the layout rule gives it: the rule is then not this run's."""
    for number, buffer in enumerate(live.buffers):
        if buffer.held_numel != buffer.partition_numel:
            yield UnsupportedLayout.fault(
                f"flat buffer {number} of the running engine",
                f"is not partitioned over the {live.dp} ranks of its data-parallel group",
                f"{buffer.partition_numel} elements",
                f"{buffer.held_numel}",
                mend="build the engine in a fresh process; with a device mesh, resume as it was saved",
            )


def model_faults(
    model: LiveModel, checkpoint: AnyCheckpoint, grid: LiveGrid, *, optimizer: bool, strict: bool
) -> Iterator[Fault]:
    """All differences between model and checkpoint that this load cannot accept."""
    saved = checkpoint.model
    held = {name for name in (*saved.module, *saved.objects) if grid.is_responsible_for(name)}
    # weights that DeepSpeed saves in no file of a layer, or of an expert though "expert" is in their names
    # (`_get_non_moe_state_dict`, runtime/engine.py, 0.19.8), or ds_to_universal copies none of, are made from masters
    unsaved = bool(checkpoint.stages or checkpoint.listing.experts or checkpoint.universal is not None)
    from_masters = {n for n in saved.trainable if unsaved and TensorKey(n, MASTER) in checkpoint.layout}
    shapes = saved_shapes(checkpoint)
    own = {**model.trainable, **model.frozen, **model.buffers}
    own = {name: shape for name, shape in own.items() if name in shapes and prod(shape) + prod(shapes[name])}
    padded = more_rows(checkpoint, own)
    rows = f"{_SHAPES}; if the rows after those are padding, add to the DeepSpeed JSON: {padding_rules(padded)}"
    for names, mend in ((padded, rows), ([name for name in own if name not in padded], _SHAPES)):
        yield from match_tensors({n: own[n] for n in names}, {n: shapes[n] for n in names}, mend=mend)
    if strict:
        # safetensors has a tied tensor under one of its names
        made = from_masters.union(name for name, names in model.tied.items() if not held.isdisjoint(names))
        yield from match_tensors(dict.fromkeys(model.keys), dict.fromkeys(held | made & model.keys), mend=_MODEL)
    if optimizer and saved.param_shapes is None and not strict:
        named = {name for name in saved.module.keys() - saved.buffer_names if grid.is_responsible_for(name)}
        mend = "a ZeRO stage-0 optimizer has no parameter names and is matched by order: build the model that was saved"
        run = model.trainable.keys() | named & model.keys
        yield from match_tensors(dict.fromkeys(run), dict.fromkeys(named), mend=mend)
    if optimizer and saved.param_shapes is not None:
        run = {name for name, shape in model.trainable.items() if prod(shape)}
        trained = {name for name, shape in saved.trainable.items() if prod(shape) and grid.is_responsible_for(name)}
        if strict:  # parameters that either model lacks are faults already
            lacking = trained - model.keys | {n for n in run - from_masters if n not in saved.module}
            run, trained = run - lacking, trained - lacking
        mend = "train the same parameters, or pass --no-load-optim, or load_optimizer_states=False"
        yield from match_tensors(dict.fromkeys(run), dict.fromkeys(trained), words=TRAINED, mend=mend)


_SHAPES = "build the model with the shapes that were saved"
_MODEL = "build the model that was saved, or pass load_module_strict=False"


class SavedGroups:
    """The saved param groups beside this run's, matched once for a load: its report, its policy and its optimizer.

    What is wrong with them is raised whenever it is asked for.
    """

    def __init__(
        self, live: Optimizer | None, checkpoint: AnyCheckpoint, grid: LiveGrid, *, optimizer: bool = True
    ) -> None:
        self._live, self._checkpoint, self._grid, self._optimizer = live, checkpoint, grid, optimizer

    @property
    def facts(self) -> OptimizerFacts | None:
        """What the optimizer keeps beside tensors, at stage 0 by this run's order."""
        return self._checkpoint.facts if isinstance(self._checkpoint, ForeignCheckpoint) else self.ordered[0].facts

    @functools.cached_property
    def ordered(self) -> Named:
        """The checkpoint with its optimizer named, at stage 0 by this run's order, and then where its tensors lie."""
        assert isinstance(self._checkpoint, ZeroCheckpoint)
        return name_optimizer(self._checkpoint, self._live, self._grid)

    @functools.cached_property
    def matched(self) -> dict[int, tuple[Mapping[str, object], list[tuple[str, Fault]]]]:
        """For each live param group the saved hyper-parameters that it inherits, and those that differ, as faults.

        A group inherits from the saved group that holds all its members; where they come from several, those should
        agree in every hyper-parameter. A group of which nothing is trained inherits from the saved one of its number,
        if that is such a group, too. Elastic checkpoints store no hyper-parameters, and a load of weights alone takes
        none if no file tells what the optimizers are of.
        """
        if not self._optimizer and any(order_faults(self._checkpoint, self._grid, self._live)):
            return {}
        facts = self.facts
        if facts is None or self._live is None:
            return {}
        home = {name: group for group in facts.groups for name in group.members}
        idle = {n: one.hyperparameters for n, one in enumerate(facts.groups) if not one.members}
        idle = idle if len(facts.groups) == len(self._live.groups) else {}
        inherited: dict[int, tuple[Mapping[str, object], list[tuple[str, Fault]]]] = {}
        for number in range(len(self._live.groups)):
            firsts: dict[int, _Named] = {}
            for name in self._live.listed(number):
                if name in home:
                    firsts.setdefault(id(home[name]), (name, home[name].hyperparameters or {}))
            if not firsts and (own := idle.get(number)) is not None:
                inherited[number] = (own, [])
            if not firsts or home[next(iter(firsts.values()))[0]].hyperparameters is None:
                continue
            first, *others = firsts.values()
            where = f"param group {number}"
            differing = [fault for other in others for fault in _differing(where, "", first, other, _GROUPS_MEND)]
            inherited[number] = (first[1], differing)
        return inherited

    def scheduler(self, state: object, replaced: Container[str]) -> tuple[object, list[Fault]]:
        """A saved scheduler's state with the values that it has for each param group in this run's order.

        Where this run's rates replace the saved ones, it does not matter which of several a group takes over. Where the
        optimizer is not read, the flat groups tell its members; without them the order is taken as it is.
        """
        facts, shapes = None, self._checkpoint.model.param_shapes or ()
        numbered = param_groups(torch_optimizer(self._checkpoint.model)) if self._checkpoint.stage == 0 else None
        if self._live is not None and numbered is not None and len(numbered) == len(self._live.groups) == 1:
            return state, []
        if numbered is None or numbered:
            facts = self.facts
        members = [group.members for group in facts.groups] if facts is not None else [tuple(one) for one in shapes]
        if not isinstance(state, dict) or not members or self._live is None:
            return state, []
        home = {name: number for number, names in enumerate(members) for name in names}
        saved, order, joined = len(members), list[int](), list[list[int]]()
        for number in range(len(self._live.groups)):
            found = sorted({home[name] for name in self._live.listed(number) if name in home})
            order.append(found[0] if found else min(number, saved - 1))
            joined.append(found or [order[-1]])
        lasts = [found[-1] for found in joined]
        made, unknown = reorder_groups(state, order, saved)
        faults = [regrouping_fault(name, "lr_scheduler of this run") for name in unknown]
        differ = lasts != order and canonical(made) != canonical(reorder_groups(state, lasts, saved)[0])
        if differ and "lr" not in replaced:
            faults.append(
                ParamGroupMismatch.fault(
                    "lr_scheduler of this run",
                    "has one value for each param group, and members of one group were saved in several that differ",
                    f"{saved} groups, as saved",
                    f"{len(order)}",
                    mend="build the optimizer with the param groups that were saved, or pass "
                    "load_lr_scheduler_states=False",
                )
            )
        return made, faults


_GROUPS_MEND = "build the param groups that were saved, or pass --no-load-optim, or load_optimizer_states=False"


def match_scalars(where: str, members: list[str], facts: OptimizerFacts) -> tuple[Mapping[str, Scalar], list[Fault]]:
    """The scalar states that one flat buffer takes over; its members must agree."""
    first, *others = [(name, facts.scalars.get(name, {})) for name in members] or [("", {})]
    mend = "build the optimizer with the param groups that were saved"
    return first[1], [fault for other in others for _, fault in _differing(where, "state ", first, other, mend)]


_Named = tuple[str, Mapping[str, object]]


def _differing(where: str, kind: str, one: _Named, other: _Named, mend: str) -> Iterator[tuple[str, Fault]]:
    """Each value that two members of what this run has together were saved with, and that differs."""
    for key in sorted({*one[1], *other[1]}):
        first, second = one[1].get(key), other[1].get(key)
        if canonical(first) != canonical(second):
            what = f"its members were saved with different values of {kind}{key!r}"
            said = f"{describe(first)} (as {one[0]})", f"{describe(second)} (as {other[0]})"
            yield key, ParamGroupMismatch.fault(where, what, *said, mend=mend)
