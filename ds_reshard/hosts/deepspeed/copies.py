"""Parameters of which several stages of a pipeline have a copy: who takes which, and whether all are equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.deviation import Deviation, same_bits
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.experts import places_with_order
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.pipeline import tied_key
from ds_reshard.formats.zero.rows import copy_fault, row_with_order, rows_with_order
from ds_reshard.formats.zero.stage0 import Named, with_order
from ds_reshard.formats.zero.stage0_pipeline import StageOrder, fits, stages_with_order
from ds_reshard.hosts.deepspeed.grid import LiveGrid, copies_of, param_names
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.load_targets import Wants
from ds_reshard.model.checkpoint import checksums
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations.proof import is_zero
from ds_reshard.operations.ranks import gather
from ds_reshard.operations.values import SpanReader, logical
from ds_reshard.planning.plan import Plan, Planner

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Orders = Sequence[StageOrder | None]
"""What all ranks of a run say of the param groups of their stages."""


def take_own_weights(wants: Wants, grid: LiveGrid) -> None:
    """Leave to its master a weight of which this stage takes a copy of its own: files of layers have one alone."""
    for key, source in list(wants.sources.items()):
        master = TensorKey(source.name, MASTER)
        if source.kind == WEIGHT and master in wants.checkpoint.layout and grid.source(wants.checkpoint, master).copy:
            placement = wants.placements.pop(key)
            del wants.sources[key], wants.makers[placement.buffer]
            wants.from_masters.append(source.name)
        elif source.kind == WEIGHT and grid.parts and _copied(source.name, grid):
            _of_first(source.name, grid, "are in the optimizer's files alone, which are not read")


def of_later_stages(wants: Wants, grid: LiveGrid) -> Iterator[Fault]:
    """Weights, or masters that they are, of which only a later stage's value is to be had, and that are not tied."""
    wanted = {source.name for source in wants.sources.values() if source.kind in (WEIGHT, MASTER)}
    for name in sorted(wants.checkpoint.late & wanted.union(wants.from_masters) - grid.tied):
        what = "is not tied, and no file of a layer has the first stage's value, as its TiedLayerSpec has a forward_fn"
        mend = "save at ZeRO stage 1 and load with optimizer states, or name it in tied_weight_attr"
        yield UnsupportedLayout.fault(f"parameter {name}", what, "the first stage's", "a later one's", mend=mend)


def _copied(name: str, grid: LiveGrid) -> bool:
    """Whether an earlier stage has a tensor of this name, too, and they are not tied."""
    key = tied_key(name)
    return key is not None and name not in grid.tied and grid.stages_of(key)[:1] != [grid.stage]


def _of_first(name: str, grid: LiveGrid, why: str) -> None:
    logger.warning("stage %d: the values of %s are those of the first stage; those of others %s", grid.stage, name, why)


def take_own_copies(wants: Wants, grid: LiveGrid) -> None:
    """Read masters and states from the copy of them that this stage takes."""
    for key, source in wants.sources.items() if wants.checkpoint.stages else ():
        if source.kind != WEIGHT:
            wants.sources[key] = grid.source(wants.checkpoint, source)


def wanted_elsewhere(wants: Wants, grid: LiveGrid) -> frozenset[TensorKey]:
    """Tensors of flat buffers that ranks with other layers or experts read, and see to the checksums of."""
    if wants.wholes:
        others = (key for key in wants.checkpoint.layout.placements if key.kind in wants.wholes and not key.copy)
        return frozenset(others).difference(wants.sources.values())
    if not wants.checkpoint.stages and not grid.experts:
        return frozenset()
    kinds = {source.kind for source in wants.sources.values()} - {WEIGHT}
    others = (key for key in wants.checkpoint.layout.placements if key.kind in kinds)
    return frozenset(others).difference(wants.sources.values())


def plan_of(index: Index, wants: Wants, grid: LiveGrid, position: int, size: int) -> Plan:
    """The plan of this rank, of what all ranks of the run divide and of what only some do; opens shards."""
    shares = {(position, size): wants, **wants.shares}
    plans = [
        Planner(index, one.layout(ranks), one.sources, elsewhere=wanted_elsewhere(one, grid)).plan(
            place, sizes={**one.sizes, **one.padded}
        )
        for (place, ranks), one in shares.items()
    ]
    return reduce(Plan.and_also, plans)


def left_as_built(engine: DeepSpeedEngine, grid: LiveGrid) -> None:
    """Say what no file of ZeRO stage 0 holds: what is not tied of a tied module, in all stages but the first."""
    lost = sorted(name for name in param_names(engine).values() if _copied(name, grid))
    if lost:
        logger.warning(
            "stage %d keeps %s as it was built: DeepSpeed has saved that of the first stage alone (save at ZeRO stage "
            "1 and each stage's own is saved)",
            grid.stage,
            ", ".join(lost),
        )


def shares_unproved(wants: Wants, *, prove: bool) -> Iterator[Fault]:
    """Fingerprints are added up over the ranks of a run, which do not all have a share of an expert."""
    left_out = {
        "tensors that this run divides otherwise": wants.divided,
        "the momentum of Muon": wants.wholes,
        "the experts of a mixture": wants.shares,
    }
    for name, there in left_out.items():
        if prove and there:
            what, mend = f"does not prove {name}", '"reshard": {"verify": "crc32"}'
            yield UnsupportedLayout.fault("ds_reshard.reshard.verify", what, "crc32", "fingerprint", mend=mend)


def ordered(checkpoint: ZeroCheckpoint, live: LiveOptimizer | None, grid: LiveGrid, orders: Orders) -> Named:
    """The checkpoint with its optimizer named, at stage 0 by this run's order, and then where its tensors lie."""
    if live is None or checkpoint.stage != 0:
        return checkpoint, {}
    told = [one for one in orders or (stage_order(live, grid),) if one is not None]
    if by_other_stages(checkpoint, grid, told):
        return of_stages(checkpoint, grid, told)
    if checkpoint.rows:
        return rows_with_order(checkpoint, lambda row: row_with_order(row, live.order))
    named = places_with_order if checkpoint.listing.places else with_order
    return named(of_stage(checkpoint, grid), live.order)


def tell_orders(live: LiveOptimizer | None, grid: LiveGrid, *, wanted: bool) -> Orders:
    """What each rank says of its stage's param groups, where others' are wanted. Collective there."""
    return gather(stage_order(live, grid)) if wanted else ()


def stage_order(live: LiveOptimizer | None, grid: LiveGrid) -> StageOrder | None:
    """What this rank says of its stage, where others need to know it; None of an engine without an optimizer."""
    if live is None or not grid.parts:
        return None
    first, stop = grid.parts[grid.stage : grid.stage + 2]
    listed = live.order if live.kind != "torch" else [cast(list[object], group["params"]) for group in live.groups]
    return StageOrder(first, stop, tuple(map(tuple, live.order)), tuple(map(len, listed)))


def by_other_stages(checkpoint: ZeroCheckpoint, grid: LiveGrid, told: Orders) -> bool:
    """Whether the saved stages, whose optimizers name no parameter, are others than this run's, or its shards are.

    As many stages may have other layers: then the first that has others has more of them, or fewer, and so parameters.
    torch compares their number too, and raises where a stage has another (`Optimizer.load_state_dict`, 2.13), which
    leaves others alone with what they have loaded. Where not all stages have told, as in a preflight, they are alike.
    """
    saved = checkpoint.stages
    if checkpoint.stage != 0 or not saved:
        return False
    if len(saved) != grid.pp or checkpoint.rows:
        return True
    ends, raw = [*pairwise(grid.parts)], "fp32_groups" not in _kinds_of(checkpoint)
    stages = [(saved[ends.index(one[:2])], one) for one in told if one is not None]
    return raw and len(stages) >= grid.pp and not all(fits(*one) for one in stages)


def gives_back_ties(checkpoint: ZeroCheckpoint, grid: LiveGrid) -> bool:
    """Whether DeepSpeed loads the weights of all tied modules: the first stage that has one fills those of all others
    (`_synchronize_tied_weights`, runtime/pipe/module.py, 0.19.8), be it from a file of a layer or as it was built.
    """
    ties, saved = grid.row.ties or {}, {layer for layer, _ in checkpoint.listing.layers}
    firsts = {key: grid.stages_of(key)[0] for key in ties.values()}
    filled = {
        key for at, key in ties.items() if at in saved and grid.parts[firsts[key]] <= at < grid.parts[firsts[key] + 1]
    }
    return filled == set(firsts)


def of_stages(checkpoint: ZeroCheckpoint, grid: LiveGrid, told: Sequence[StageOrder]) -> Named:
    """A checkpoint of stage 0 with the optimizers of all its stages named, for a run with other stages.

    `told` is what the ranks of this run say of theirs.
    """
    raw = "fp32_groups" not in _kinds_of(checkpoint)
    if not raw or not grid.parts:
        fault = UnsupportedLayout.fault(
            checkpoint.listing.folder,
            "holds optimizers that name no parameter (ZeRO stage 0), one for each stage of the pipeline"
            + ("" if raw else ", with masters of their own (fp16)"),
            f"pp={len(checkpoint.stages)}, as saved",
            f"pp={grid.pp}" if grid.parts else "no PipelineModule",
            mend="resume with the stages that were saved, and save at ZeRO stage 1; or pass "
            "load_optimizer_states=False, load_lr_scheduler_states=False",
        )
        raise_faults([fault], subject=f"loading {checkpoint.listing.folder}")
    _say_first(checkpoint, grid)
    ties = grid.row.ties or {}
    if checkpoint.rows:
        return rows_with_order(checkpoint, lambda row: stages_with_order(row, ties, told))
    return stages_with_order(checkpoint, ties, told)


def _kinds_of(checkpoint: ZeroCheckpoint) -> set[str]:
    """The entries of DeepSpeed's optimizers around torch's, of either of which fp32_groups says that it has masters."""
    saved = [stage.entries.get("optimizer") for stage in checkpoint.stages]
    return {str(key).removesuffix("_flat") for one in saved if isinstance(one, dict) for key in one}


def of_stage(checkpoint: ZeroCheckpoint, grid: LiveGrid) -> ZeroCheckpoint:
    """A checkpoint of stage 0 with the optimizer of this rank's stage, which names no parameter."""
    if len(checkpoint.stages) < 2:
        return checkpoint
    _say_first(checkpoint, grid)
    return replace(checkpoint, model=model_of_stage(checkpoint, grid))


def _say_first(checkpoint: ZeroCheckpoint, grid: LiveGrid) -> None:
    for name in sorted(name for name in checkpoint.model.module if _copied(name, grid)):
        _of_first(name, grid, "are in no file of ZeRO stage 0")


def model_of_stage(checkpoint: ZeroCheckpoint, grid: LiveGrid) -> ModelStates:
    """What the model file of this rank's stage says, and of weights and schedule what all stages' say together."""
    own, of_all = checkpoint.stages[grid.stage], ("module", SCHEDULER)
    entries = {**own.entries, **{key: checkpoint.model.entries[key] for key in of_all}}
    return replace(checkpoint.model, path=own.path, entries=entries)


def copies_apart(
    checkpoint: ZeroCheckpoint, grid: LiveGrid, index: Index, position: int, size: int, *, memory_nbytes: int
) -> Iterator[Fault]:
    """Copies that should be equal and are not: of what is not divided by tensor-parallel ranks, of tied parameters, and
    of others where this run has one for several.

    A copy that was never trained, as that of a position embedding in the last stage, is passed over. The ranks of a row
    divide the copies among them; `position` of `size` is this rank's among those of its stage.
    """
    copies = [key for key in checkpoint.layout.placements if key.copy]
    for key in copies[grid.stage * size + position :: grid.pp * size]:
        row, number = checkpoint.copy_of(key)
        first = key._replace(copy=number if row else 0)
        if first not in checkpoint.layout:
            continue  # of which no file has the first stage's weight
        if row:
            if not same_values(index, first, key, memory_nbytes=memory_nbytes):
                found = _difference(index, first, key, memory_nbytes=memory_nbytes)
                yield copy_fault(checkpoint, key, found)
            continue
        if key.name in grid.tied:
            if not same_values(index, first, key, memory_nbytes=memory_nbytes):
                what = (
                    f"copy {key.copy + 1}, of another stage, has other values than the first: they are tied in this run"
                )
                mend = "restore all files of one save, or load another tag"
                yield CheckpointDamaged.fault(f"tied parameter {key}", what, "the same bytes", "others", mend=mend)
            continue
        if key.kind == WEIGHT or len(grid.stages_of(tied_key(key.name))) == copies_of(checkpoint, first):
            continue
        states = set(checkpoint.layout.kinds(key.name)) - {MASTER, WEIGHT}
        if key.kind == MASTER and states:
            continue  # its states tell whether it was trained
        if same_values(index, first, key, memory_nbytes=memory_nbytes):
            continue
        if is_zero(index, key, memory_nbytes=memory_nbytes):
            logger.warning("%s: copy %d, which was never trained, is not loaded: this run has one", key, key.copy + 1)
        else:
            yield UnsupportedLayout.fault(
                f"parameter {key}",
                "is not tied, was trained in several stages, and is one parameter in this run",
                f"{copies_of(checkpoint, first)} stages with {tied_key(key.name)!r}, as saved",
                f"{len(grid.stages_of(tied_key(key.name)))}",
                mend="resume with stages that have as many copies; or name it in tied_weight_attr",
            )


def _difference(index: Index, one: TensorKey, other: TensorKey, *, memory_nbytes: int) -> str:
    left, right = logical(index, one), logical(index, other)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{right.dtype} {list(right.shape)} beside {left.dtype} {list(left.shape)}"
    reader = SpanReader(Ledger(), threads=1, memory_nbytes=memory_nbytes, progress=None, total=left.nbytes)
    found, at = Deviation(), 0
    for span in reader.read([(left, right)]):
        found.add(at, *span.values)
        at += span.values[0].numel()
    return f"{found.differing} of {at} elements differ, by at most {found.max_abs:g}"


def same_values(index: Index, one: TensorKey, other: TensorKey, *, memory_nbytes: int) -> bool:
    """Whether two tensors are equal to the bit; read where their checksums do not tell."""
    if checksums(index, one) == checksums(index, other):
        return True
    left, right = logical(index, one), logical(index, other)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    reader = SpanReader(Ledger(), threads=1, memory_nbytes=memory_nbytes, progress=None, total=left.nbytes)
    return all(same_bits(*span.values) for span in reader.read([(left, right)]))
