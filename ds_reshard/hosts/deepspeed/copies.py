"""Parameters that several ranks have saved copies of: which copy is loaded, and whether all are equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.execution.deviation import Deviation, same_bits
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.modules import tied_key
from ds_reshard.formats.zero.shards import replica_fault
from ds_reshard.formats.zero.stage0 import Named, same_sizes, with_order
from ds_reshard.hosts.deepspeed.engine import Optimizer
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.load_targets import Wants
from ds_reshard.model.checkpoint import checksums
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Holder, TensorKey
from ds_reshard.operations.proof import is_zero
from ds_reshard.operations.values import logical, read_spans
from ds_reshard.planning.plan import Plan, Planner

logger = logging.getLogger("ds_reshard")


def later_stage_weight_faults(wants: Wants, grid: LiveGrid) -> Iterator[Fault]:
    """Yield a fault for each untied weight (or master made of it) that only a later pipeline stage has saved."""
    names = {source.name for source in wants.sources.values() if source.kind in (WEIGHT, MASTER)}
    for name in sorted(wants.checkpoint.later_stage_weights & names.union(wants.from_masters) - grid.tied):
        what = "is not tied, and no file of a layer has the first stage's value, as its TiedLayerSpec has a forward_fn"
        mend = "save at ZeRO stage 1 and load with optimizer states, or name it in tied_weight_attr"
        yield UnsupportedLayout.fault(f"parameter {name}", what, "the first stage's", "a later one's", mend=mend)


def tensors_read_elsewhere(wants: Wants, grid: LiveGrid) -> frozenset[TensorKey]:
    """Return the tensors in flat buffers that ranks with other layers or experts read, checksums included."""
    if wants.wholes:
        others = (key for key in wants.checkpoint.layout.placements if key.kind in wants.wholes)
        return frozenset(others).difference(wants.sources.values())
    if not wants.checkpoint.stages and not grid.experts:
        return frozenset()
    kinds = {source.kind for source in wants.sources.values()} - {WEIGHT}
    others = (key for key in wants.checkpoint.layout.placements if key.kind in kinds)
    return frozenset(others).difference(wants.sources.values())


def plan_rank(index: Index, wants: Wants, grid: LiveGrid, position: int, size: int) -> Plan:
    """Return this rank's plan for tensors shared by all ranks and for those shared by some; opens shards.

    The rank is `position` of `size` ranks that share the former.
    """
    shares = {(position, size): wants, **wants.shares}
    plans = [
        Planner(index, targets.layout(ranks), targets.sources, elsewhere=tensors_read_elsewhere(targets, grid)).plan(
            rank, sizes={**targets.sizes, **targets.padded}
        )
        for (rank, ranks), targets in shares.items()
    ]
    return reduce(Plan.merge, plans)


def unproved_faults(wants: Wants, *, prove: bool) -> Iterator[Fault]:
    """Yield faults of tensors whose fingerprints cannot be proved: only some ranks of the run have parts of them."""
    left_out = {
        "tensors that this run divides otherwise": wants.divided,
        "the momentum of Muon": wants.wholes,
        "the experts of a mixture": wants.shares,
    }
    for name, present in left_out.items():
        if prove and present:
            what, mend = f"does not prove {name}", '"reshard": {"verify": "crc32"}'
            yield UnsupportedLayout.fault("ds_reshard.reshard.verify", what, "crc32", "fingerprint", mend=mend)


def name_optimizer(checkpoint: ZeroCheckpoint, live: Optimizer | None, grid: LiveGrid) -> Named:
    """Return the checkpoint with its optimizer's parameters named (at stage 0 in this run's order)."""
    if live is None or checkpoint.stage != 0:
        return checkpoint, {}
    raise_faults(list(order_faults(checkpoint, grid, live)), subject=f"loading {checkpoint.listing.folder}")
    if len(checkpoint.stages) > 1 and not checkpoint.tp_models:
        checkpoint = replace(checkpoint, model=model_of_stage(checkpoint, grid))
    ep_rank = next((experts.first // experts.size for experts in grid.experts.values()), 0)
    first = {prefix: experts.first for prefix, experts in grid.experts.items()}
    return with_order(checkpoint, live.order, live.parameters, ep_rank, first)


def order_faults(checkpoint: AnyCheckpoint, grid: LiveGrid, live: Optimizer | None) -> Iterator[Fault]:
    """Yield a fault if this rank has other layers or experts than any rank that saved an optimizer at ZeRO stage 0.

    Such optimizers name no parameters, so each rank must load its own. Other layers are recognised by the number and
    shapes of their parameters; layers with the same shapes cannot be told apart.
    """
    saved, sizes = checkpoint.stages, {experts.total // experts.size for experts in grid.experts.values()}
    mend = "load it with the sizes that were saved, and save at ZeRO stage 1 there"
    if checkpoint.stage != 0 or live is None:
        return
    if checkpoint.listing.ep_optim:
        if sizes == {checkpoint.grid.ep}:
            return
        owner, expected, found = "expert-parallel rank", f"ep={checkpoint.grid.ep}", f"ep={sorted(sizes or {1})}"
        if len(sizes) > 1:
            expected, mend = "experts of one size", "load it at ZeRO stage 0, with the sizes that were saved"
    elif saved:
        owner, expected, found = "stage of the pipeline", str(checkpoint.grid), f"tp={grid.row.size}, pp={grid.pp}"
        if len(saved) == grid.pp and not checkpoint.tp_models:
            if same_sizes(saved[grid.stage], live.order, live.trained):
                return
            expected, found = f"the layers of stage {grid.stage}", "others"
    else:
        return
    yield UnsupportedLayout.fault(
        checkpoint.listing.folder,
        f"holds optimizers that name no parameter (ZeRO stage 0), one for each {owner}",
        f"{expected}, as saved",
        found,
        mend=f"{mend}; or pass load_optimizer_states=False, load_lr_scheduler_states=False",
    )


def ties_restored(checkpoint: ZeroCheckpoint, grid: LiveGrid) -> bool:
    """True if DeepSpeed's own load restores all weights of tied modules.

    The first stage with a tied module loads its file, or keeps the initial weights if there is none, and sends them to
    the others (`_synchronize_tied_weights`, runtime/pipe/module.py, 0.19.8). Untied parameters of a tied module keep
    their initial values in all stages but the first.
    """
    tied = [(name, tied_key(name)) for name in checkpoint.model.module]
    if any(len(grid.stages_of(key)) > 1 and name not in grid.tied for name, key in tied if key is not None):
        return False
    ties, saved = grid.row.ties or {}, {layer for layer, _ in checkpoint.listing.layers}
    firsts = {key: grid.stages_of(key)[0] for key in ties.values()}
    filled = {
        key for n, key in ties.items() if n in saved and grid.parts[firsts[key]] <= n < grid.parts[firsts[key] + 1]
    }
    return filled == set(firsts)


def model_of_stage(checkpoint: AnyCheckpoint, grid: LiveGrid) -> ModelStates:
    """Return the model states of this rank's stage, with the weights and the schedule of all stages together."""
    stage_model, of_all = checkpoint.stages[grid.stage], ("module", SCHEDULER)
    entries = {**stage_model.entries, **{key: checkpoint.model.entries[key] for key in of_all}}
    return replace(checkpoint.model, path=stage_model.path, entries=entries)


def unequal_replicas(
    checkpoint: ZeroCheckpoint, grid: LiveGrid, index: Index, position: int, size: int, *, memory_nbytes: int
) -> Iterator[Fault]:
    """Yield a fault for each saved copy that differs from the first one, which is loaded into all ranks and stages.

    Compared are tensors that tensor-parallel ranks replicate, tied parameters, and untied parameters of tied modules if
    they were trained; a copy that was never trained (a position embedding in the last stage) may differ. Ranks share
    the work: this is rank `position` of `size` of its stage. At ZeRO stage 0 no file has a later stage's weight, so its
    own ranks examine its states.
    """
    copies = [(one.key, holder) for one in checkpoint.layout.placements.values() for holder, _ in one.replicas]
    replicas = {Holder(): index} | {
        owner: index.with_layout(layout) for owner, layout in checkpoint.layout.replicas().items()
    }
    for key, holder in copies[grid.stage * size + position :: grid.pp * size]:
        first = replicas[Holder(holder.stage) if holder.rank else Holder()], key
        replica = replicas[holder], key
        untied = not holder.rank and key.name not in grid.tied
        if key not in first[0].layout or (untied and key.kind == WEIGHT):
            continue
        if same_values(first, replica, memory_nbytes=memory_nbytes):
            continue
        if holder.rank:
            found = _difference(first, replica, memory_nbytes=memory_nbytes)
            yield replica_fault(checkpoint, key, holder.rank, found)
            continue
        if not untied:
            what = "is tied across pipeline stages in this run, but "
            what += f"saved copy {holder.stage + 1} differs from the first"
            mend = "restore all files of one save, or load another tag"
            yield CheckpointDamaged.fault(f"tied parameter {key}", what, "the same bytes", "others", mend=mend)
            continue
        kinds = [kind for kind in checkpoint.layout.kinds(key.name) if kind not in (MASTER, WEIGHT)]
        states = [one for one in (key._replace(kind=kind) for kind in kinds) if one in replica[0].layout]
        checked = states if key.kind == MASTER and states else [key]  # equal states may belong to other masters
        if not all(is_zero(replica[0], one, memory_nbytes=memory_nbytes) for one in checked):
            yield _trained_fault(key, "the first stage's values", "others")
    for key in [key for key in checkpoint.layout.placements if _has_earlier_copy(key.name, grid)][position::size]:
        if key.kind == WEIGHT:
            logger.warning("stage %d: %s has the first stage's values: it is not tied", grid.stage, key.name)
        elif checkpoint.stage == 0 and key.kind != MASTER and not is_zero(index, key, memory_nbytes=memory_nbytes):
            yield _trained_fault(key, "no moments, as no file has this stage's weight", "moments")


def _has_earlier_copy(name: str, grid: LiveGrid) -> bool:
    """True if an earlier stage has a tensor of this name too, and the two are not tied."""
    key = tied_key(name)
    return key is not None and name not in grid.tied and grid.stages_of(key)[:1] not in ([], [grid.stage])


def _trained_fault(key: TensorKey, expected: str, found: str) -> Fault:
    return UnsupportedLayout.fault(
        f"parameter {key}",
        "is not tied in this run, but several pipeline stages trained their own copy; only the first copy is loaded",
        expected,
        found,
        mend="pass load_optimizer_states=False to load the first pipeline stage's weight; or run with the pipeline "
        'stages that were saved and "ds_reshard": {"enabled": false}: above ZeRO stage 0, DeepSpeed then loads the '
        "masters of each pipeline stage",
    )


_Tensor = tuple[Index, TensorKey]


def _difference(one: _Tensor, other: _Tensor, *, memory_nbytes: int) -> str:
    """Return a text of how two tensors differ: in type and shape, or in so many elements by so much."""
    left, right = logical(*one), logical(*other)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{right.dtype} {list(right.shape)} beside {left.dtype} {list(left.shape)}"
    deviation, offset = Deviation(), 0
    for span in read_spans([(left, right)], memory_nbytes=memory_nbytes):
        deviation.add(offset, *span.values)
        offset += span.values[0].numel()
    return f"{deviation.differing} of {offset} elements differ, by at most {deviation.max_abs:g}"


def same_values(one: _Tensor, other: _Tensor, *, memory_nbytes: int) -> bool:
    """True if two tensors are equal to the bit; they are read if their checksums do not tell."""
    if checksums(*one) == checksums(*other):
        return True
    left, right = logical(*one), logical(*other)
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    return all(same_bits(*span.values) for span in read_spans([(left, right)], memory_nbytes=memory_nbytes))
