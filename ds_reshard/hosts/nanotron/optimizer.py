"""The seam of `load_optimizer`: nanotron's own where it loads its own file, else every state from where it lies.

Rung 3 of the ladder (a function that serialize and the trainer import by name): nanotron publishes no extension point,
and the methods below take a state dict that is complete (serialize/optimizer.py, commit 2411b02).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.execution.checksums import read_again
from ds_reshard.formats.nanotron.checkpoint import OPTIM, open_checkpoint
from ds_reshard.formats.nanotron.metadata import Metadata, read_metadata
from ds_reshard.formats.nanotron.names import NanotronListing, read_listing
from ds_reshard.formats.nanotron.optimizer_file import OptimizerFile
from ds_reshard.formats.nanotron.shards import NanotronShards
from ds_reshard.hosts.nanotron import report
from ds_reshard.hosts.nanotron.agree import same_policy, together
from ds_reshard.hosts.nanotron.batch import BATCH, other_batch
from ds_reshard.hosts.nanotron.compare import other_cuts, unlike
from ds_reshard.hosts.nanotron.current import Group, Memory, current, refuse_contradiction, remember, values_of
from ds_reshard.hosts.nanotron.fill import prepare, read, saved_groups, state_dict
from ds_reshard.hosts.nanotron.live import Live, Optimizer, ParallelContext, live_of
from ds_reshard.operations.ranks import agree, gather
from ds_reshard.resume.policy import ResumePolicy

# Values of a run that are in no param group of nanotron, and always this run's.
_ALWAYS_THIS_RUNS = ("clip_grad", BATCH)


def load_optimizer(arguments: Mapping[str, object], original: Callable[[], object]) -> None:
    """Load as the policy in force says; collective, and nothing has changed on any rank where it raises for a fault.

    Every rank reads what it trains of each parameter, whatever the saving run's dp, tp, pp and ZeRO stage were.
    """
    load, folder = current(), str(arguments["root_folder"])
    context = cast(ParallelContext, arguments["parallel_context"])
    same_policy(load.policy, context.world_pg, subject=f"loading {folder}")
    refuse_contradiction(load)
    load.where, policy = folder, load.policy
    optimizer = cast(Optimizer, arguments["optimizer"])
    memory = remember(optimizer)

    def look() -> tuple[Live, NanotronListing, Metadata | None]:
        raise_faults(_unknown(memory, policy), subject="resume policy")
        listing = read_listing(folder)
        return live_of(optimizer, context), listing, read_metadata(listing)[0]

    live, listing, metadata = together(look, context.world_pg, subject=f"loading {folder}")
    found = other_batch(load, live.dp, metadata)
    saved: list[Group] | None = None
    if policy.loads_masters:
        found += _experts(live)
        if any(gather(bool(found), live.world)) or _takes_over(live, listing, metadata, policy):
            saved = _reshard(live, listing, policy, found, arguments.get("map_location"))
        else:
            together(original, live.world, subject=f"loading {folder}")
            saved = list(values_of(live.base.param_groups))
        memory.decayed = True
    else:
        agree(found, live.world, subject=f"loading {folder}")
    if not policy.loads_moments:
        _begin_anew(live, masters=not policy.loads_masters)
    _settle(live, memory, policy)
    report.optimizer(load, live, listing, metadata, saved)


def _reshard(
    live: Live, listing: NanotronListing, policy: ResumePolicy, found: Sequence[Fault], map_location: object
) -> list[Group]:
    """Load from any layout; returns the saved values of each param group. `found` was found before."""
    states = prepare(live, listing, policy, found)
    read(live, states)
    saved = saved_groups(live, states.checkpoint)

    def put() -> None:
        made = state_dict(live, states)
        if policy.loads_moments:
            if live.held:  # of no part of any parameter, nanotron takes no state: "Loading empty state dict"
                live.optimizer.load_state_dict(made, map_location=map_location)
                return
        elif live.accumulator is not None:
            live.accumulator.load_state_dict(made["gradient_accumulator"])  # type: ignore[attr-defined]
        for group, values in zip(live.base.param_groups, saved, strict=True):
            group.update(values)

    together(put, live.world, subject=f"loading {listing.folder}")
    return saved


def _takes_over(live: Live, listing: NanotronListing, metadata: Metadata | None, policy: ResumePolicy) -> bool:
    """Whether nanotron's own way would not load this, or not as asked. Collective: one answer for all ranks."""
    same = metadata is not None and (listing.topology, metadata.dp, metadata.cp) == (live.topology, live.dp, live.cp)
    ready = same and policy.loads_moments and policy.scheduler != "strict"  # which compares param groups by names
    if not all(gather(ready, live.world)):
        return True
    own = together(lambda: _own(live, listing), live.world, subject=f"loading {listing.folder}")
    return any(gather(not _fits(live, own, policy), live.world))


def _own(live: Live, listing: NanotronListing) -> OptimizerFile:
    """This rank's own file, of the same save as the first of its stage, the schedulers and the weights.

    Each byte of its tensors is checked: torch.load, which nanotron reads it with, compares no checksum.
    """
    checkpoint = open_checkpoint(listing)
    shards, shard = NanotronShards(checkpoint=checkpoint), live.topology.shard(live.rank)
    extents = shards.buffers(OPTIM, shard)
    raise_faults([*shards.compare(), *other_cuts(live, checkpoint)], subject=f"checkpoint {listing.folder}")
    records = dict.fromkeys(extent.record for extent in extents.values() if extent.record.crc32 is not None)
    raise_faults(read_again(records), subject=f"checkpoint {listing.folder}")
    return shards.opened[shard]


def _fits(live: Live, own: OptimizerFile, policy: ResumePolicy) -> bool:
    """Whether this rank's own file is what nanotron takes it for: it loads by number, and compares names alone.

    A file without states is none: nanotron refuses it.
    """
    if not live.held:
        return False
    members = [[name for name in of_group if name in live.held] for of_group in live.groups]
    if list(own.states) != list(live.held) or [list(group.members) for group in own.groups] != members:
        return False
    for name, held in live.held.items():
        kinds = own.states[name]
        if any(tensor.shape != tuple(held.tensor.shape) for tensor in kinds.values()):
            return False
        if any(unlike(live, held, {kind: tensor.dtype for kind, tensor in kinds.items()}, policy)):
            return False
    return True


def _experts(live: Live) -> list[Fault]:
    if live.topology.exp == 1:
        return []
    return [
        UnsupportedLayout.fault(
            "this run",
            "has expert parallelism: ranks of other experts hold "
            "parameters of one name, which nanotron's files tell apart by that rank alone",
            "expert_parallel_size 1",
            str(live.topology.exp),
            mend="resume it with nanotron alone, at the topology that saved it; or --no-load-optim",
        )
    ]


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


def _unknown(memory: Memory, policy: ResumePolicy) -> list[Fault]:
    held = {name for group in memory.run for name in group}
    faults = []
    for name in policy.hyperparameters:
        where = f"--override-optim-hparams {name}"
        if name in ("lr", "initial_lr"):
            what, mend = "belongs to the schedule", "leave it out and add --override-opt-param-scheduler"
        elif name in held or name in _ALWAYS_THIS_RUNS:
            continue
        else:
            known = ", ".join(sorted({*held, *_ALWAYS_THIS_RUNS} - {"lr", "initial_lr"}))
            what, mend = "is not a hyper-parameter of this run", f"name some of: {known}"
        faults.append(ConfigError.fault(where, what, mend=mend))
    return faults


def state_dict_to_device(arguments: Mapping[str, object], original: Callable[[], object]) -> object:
    """The trainer moves loaded states in its first step: there are none where the optimizer was asked to begin anew."""
    state_dict = cast("Mapping[str, object]", arguments["state_dict"])
    return original() if state_dict["state"] else None
