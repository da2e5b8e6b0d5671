"""Everything about a load that can fail, before the first byte of the engine changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import CheckpointDamaged, Fault, ParamGroupMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.stage0 import with_order
from ds_reshard.hosts.deepspeed.adopt import OptimizerValues
from ds_reshard.hosts.deepspeed.compare import live_model, match_groups, match_scalars, model_faults
from ds_reshard.hosts.deepspeed.entries import Request, extra_state, live_entries, loss_scaling
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.revival import revived, scalar
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.hosts.deepspeed.universal import state_faults
from ds_reshard.hosts.deepspeed.wants import Wants, want_model, want_optimizer
from ds_reshard.model.index import Index
from ds_reshard.model.uncollected import uncollected
from ds_reshard.operations.ranks import rank
from ds_reshard.planning.plan import Plan, plan_rank

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A load that nothing but the disk can still stop.

    `model` is the model file whose entries and buffers this rank takes: stage 3 writes one a rank, and at
    the saved data-parallel size each rank takes back its own; otherwise all take rank 0's.
    """

    checkpoint: ZeroCheckpoint
    model: ModelStates
    live: LiveOptimizer | None
    wants: Wants
    index: Index
    plan: Plan
    values: OptimizerValues | None
    masters: bool
    entries: Mapping[str, object]
    extra: Mapping[str, object]
    shards: ZeroShards


@uncollected()
def prepare(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    request: Request,
    settings: Settings,
) -> Prepared:
    """Match model, groups and states, plan the copies and open the shards they need; no mutation.

    Raises every fault found on this rank at once.
    """
    subject = f"loading {checkpoint.listing.folder}"
    loads_optimizer = request.load_optimizer and live is not None
    shards = ZeroShards(checkpoint=checkpoint)
    faults: list[Fault] = list(
        model_faults(live_model(engine, live), checkpoint, optimizer=loads_optimizer, strict=request.strict)
    )
    faults += _custom_faults(request, live, checkpoint)
    faults += live.faults() if live is not None else []
    raise_faults(faults, subject=subject)
    if loads_optimizer and checkpoint.stage == 0 and live is not None:
        checkpoint, extents = with_order(checkpoint, live.order)
        shards = ZeroShards(checkpoint=checkpoint, stage0=extents)
    values = None
    if loads_optimizer and live is not None:
        values, found = _optimizer_values(engine, live, checkpoint, settings, request)
        if request.moments:
            found += [*_unfollowed(checkpoint), *state_faults(engine, live, checkpoint)]
        faults += found
        raise_faults(faults, subject=subject)
    masters = loads_optimizer and (live is None or live.stage == 0 or live.kind == "zero3" or _from_fp32(engine))
    states = loads_optimizer and request.moments
    wants = _wants(engine, live, checkpoint, loads_optimizer=loads_optimizer, states=states, masters=masters)
    model = _own_model(engine, checkpoint)
    if model is not checkpoint.model:
        wants.take_buffers(model)
    entries = live_entries(engine, model, request, settings)
    index = Index(checkpoint.layout, shards)
    position, size = (live.rank, live.dp) if live else (0, 1)
    plan = plan_rank(index, wants.layout(size), position, wants.sources, sizes=wants.sizes)
    if checkpoint.listing.partitioned_model:
        for shard in range(position, checkpoint.dp, size):
            index.open(MODEL, shard)
    faults += index.faults + wants.faults
    faults += _files_as_listed(checkpoint, plan)
    raise_faults(faults, subject=subject)
    return Prepared(
        checkpoint=checkpoint,
        model=model,
        live=live,
        wants=wants,
        index=index,
        plan=plan,
        values=values,
        masters=masters,
        entries=entries,
        extra=extra_state(engine, model, settings),
        shards=shards,
    )


def _own_model(engine: DeepSpeedEngine, checkpoint: ZeroCheckpoint) -> ModelStates:
    import torch.distributed as dist

    listing, number = checkpoint.listing, dist.get_rank(group=engine.seq_data_parallel_group)
    if not listing.partitioned_model or number == 0 or engine.seq_dp_world_size != checkpoint.dp:
        return checkpoint.model
    name = listing.model[number]
    return read_model_states(listing.path(name), name.removesuffix(".pt"))


def _from_fp32(engine: DeepSpeedEngine) -> bool:
    return bool(engine.zero_load_from_fp32_weights())


def _custom_faults(request: Request, live: LiveOptimizer | None, checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    partitioned = checkpoint.listing.partitioned_model or (live is not None and live.kind == "zero3")
    if request.custom_load_fn is not None and partitioned:
        yield UnsupportedLayout.fault(
            "load_checkpoint(custom_load_fn=...)",
            "a custom load function gets whole weights, which stage 3 does not have",
            "stages 0 to 2 on both sides",
            "stage 3",
            mend="load without custom_load_fn, or save and load at stages 0 to 2",
        )


def _wants(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    *,
    loads_optimizer: bool,
    states: bool,
    masters: bool,
) -> Wants:
    wants = Wants(checkpoint=checkpoint)
    want_model(wants, engine, live, masters=masters)
    if live is None:
        return wants
    gathered = bool(wants.from_masters) and live.kind in ("zero", "bf16")
    if loads_optimizer or gathered:
        want_optimizer(wants, live, masters=masters or gathered, states=states)
    return wants


def _unfollowed(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """States that are neither one value nor cut as the parameters are: nobody can say how to cut them anew."""
    for number, partition in enumerate(checkpoint.optim.partitions if checkpoint.optim else ()):
        for name, found in partition.unfollowed.items():
            yield UnsupportedLayout.fault(
                f"optimizer state {name!r} of flat buffer {number}",
                "does not follow the parameter, so it cannot be cut for another layout",
                f"{partition.padded_numel} elements or one",
                found,
                mend="resume with the layout that was saved, or pass load_optimizer_states=False",
            )


def _optimizer_values(
    engine: DeepSpeedEngine, live: LiveOptimizer, checkpoint: ZeroCheckpoint, settings: Settings, request: Request
) -> tuple[OptimizerValues, list[Fault]]:
    """What the optimizer takes over; without moments neither scalar states nor a step count."""
    facts, moments = checkpoint.facts, request.moments
    assert facts is not None
    groups, faults = match_groups({g: live.members(g) for g in range(len(live.groups))}, facts, request.replaced)
    hyper: dict[int, Mapping[str, object]] = {}
    for number, saved in groups.items():
        made = revived(dict(saved), trusted=settings.trust, where=f"param group {number}")
        assert isinstance(made, dict)
        hyper[number] = made if moments else {name: value for name, value in made.items() if name != "step"}
    scalars: dict[int, Mapping[str, object]] = {}
    for number, buffer in enumerate(live.buffers if moments else ()):
        found, wrong = match_scalars(f"flat buffer {number}", list(buffer.shapes), facts)
        scalars[number] = {name: scalar(value) for name, value in found.items()}
        faults += wrong + _uneven_states(checkpoint, number, buffer.shapes)
    entries = checkpoint.optimizer_entries
    extras = loss_scaling(engine, entries, settings)
    step = entries.get("base_optimizer_state_step") if moments else None
    return OptimizerValues(groups=hyper, scalars=scalars, extras=extras, step=step), faults


def _uneven_states(checkpoint: ZeroCheckpoint, number: int, shapes: Mapping[str, Shape]) -> list[Fault]:
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
            mend="build the optimizer with the param groups that were saved, or pass load_optimizer_states=False",
        )
    ]


def _files_as_listed(checkpoint: ZeroCheckpoint, plan: Plan) -> Iterator[Fault]:
    """Whether this rank sees the files that rank 0 listed, at the sizes that it saw."""
    for path in plan.files:
        listed = checkpoint.listing.nbytes[path.removeprefix(f"{checkpoint.listing.folder}/")]
        try:
            nbytes = os.stat(path).st_size
        except OSError as error:
            yield _other_folder(path, rank(), f"{listed} bytes", error.strerror or str(error))
            continue
        if nbytes != listed:
            yield _other_folder(path, rank(), f"{listed} bytes", f"{nbytes} bytes")


def _other_folder(path: str, rank: int, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(
        path,
        f"rank {rank} sees another folder than rank 0",
        expected,
        found,
        mend="load from a folder that every rank sees (with node-local storage: copy all files to each node)",
    )
