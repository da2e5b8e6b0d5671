"""Carry out a prepared load: move bytes, verify them, hand them to DeepSpeed, and prove them where asked."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import CheckpointDamaged, Fault, FingerprintMismatch, ModelMismatch, raise_faults
from ds_reshard.execution.buffers import TensorTarget, read_tensor
from ds_reshard.execution.cuda import choose
from ds_reshard.execution.deviation import same_bits
from ds_reshard.execution.fingerprint import Fingerprint, Fingerprints, Witness, held, signed
from ds_reshard.execution.interfaces import Executor, Outcome
from ds_reshard.execution.states import OTHERS, Samples, has_moments
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint
from ds_reshard.formats.zero.flat import FlatBuffer
from ds_reshard.hosts.deepspeed.engine import (
    SCALE,
    Memory,
    Optimizer,
    entries_unloaded,
    inner_of,
    live_grid,
    live_groups,
    live_optimizer,
    loaded_modules,
    loader_prefixes,
    masters_of,
    memory_of,
    param_names,
    saved_name,
)
from ds_reshard.hosts.deepspeed.entries import OptimizerValues, Request, load_sampler
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.load_targets import has
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.operations.progress import showing
from ds_reshard.operations.ranks import Steps, collective, rank, read_together
from ds_reshard.planning.plan import match_tensors
from ds_reshard.resume.report import ANEW, EQUAL_TO_WEIGHTS, FROM_CHECKPOINT, MASTERS, MOMENTS
from ds_reshard.resume.scheduler_policy import SavedValues

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one rank's load read: bytes, files; the proof of it where one was asked for."""

    bytes_read: int
    files: tuple[str, ...]
    proof: Proof | None


def move(engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings, steps: Steps) -> Moved:
    """Fill the engine. Collective; a fault on any rank raises on every rank, and the engine is then unusable.

    What goes wrong after all bytes were read and checked is left to `steps`: every rank still takes part in
    DeepSpeed's own collectives, and its caller agrees on the faults.
    """
    subject = f"loading {prepared.checkpoint.listing.folder}"
    (witness, memory), outcome = _read(engine, prepared, settings, subject)
    steps.take(lambda: _settle_model(engine, prepared, request, settings, memory), subject=subject)
    steps.take(lambda: _adopt(engine, prepared, request), subject=subject)
    live = prepared.live
    if live is not None and prepared.wants.from_masters:
        steps.take(lambda: _weights_from_masters(engine, live, prepared), subject=subject, always=True)
        steps.take(lambda: _run_loaders(engine.module, prepared, request, memory.state), subject=subject)
    if live is not None and _masters_anew(prepared):
        steps.take(lambda: _masters_from_weights(engine.optimizer, live), subject=subject, always=True)
    proof = None
    if witness is not None:
        proof = prove(engine, prepared, witness, steps, unproved=unproved(prepared))
    files = prepared.plan.files
    return Moved(bytes_read=outcome.bytes_read, files=files, proof=proof)


Begun = tuple[Witness | None, Memory]


def _read(engine: DeepSpeedEngine, prepared: Prepared, settings: Settings, subject: str) -> tuple[Begun, Outcome]:
    """Read this rank's bytes, and agree with all ranks that every record has its checksum. Collective."""

    def read() -> tuple[Begun, Outcome]:
        begun, targets, executor = _begin(engine, prepared, settings)
        outcome = progress.execute(executor, prepared.plan, targets)
        bare = sum(record.crc32 is None for record in outcome.slices)
        if bare:
            logger.warning(
                "%s: %d records carry no checksum (saved with torch's crc32 off): they were loaded without "
                "verification",
                prepared.checkpoint.listing.folder,
                bare,
            )
        return begun, outcome

    replica = _replica(engine, prepared)
    with showing(subject) as progress:
        return read_together(read, replica=replica, shared=lambda: _shares_bytes(prepared), subject=subject)


def _shares_bytes(prepared: Prepared) -> bool:
    """Whether two tensors that are wanted lie in the same bytes, which several ranks may then read.

    They are tied in the checkpoint's module and not in this run's. Sums that are combined by exclusive or would hide a
    fault that two ranks have read.
    """
    module, layout = prepared.checkpoint.model.module, prepared.checkpoint.layout
    if prepared.checkpoint.stages and prepared.grid.row.ties and prepared.grid.pp > 1:
        return True  # stages that have one tied module may read one copy of it
    if prepared.wants.wholes:
        return True  # of a parameter that several ranks have parts of, each reads all
    if prepared.checkpoint.tp_models or prepared.wants.divided:
        return True  # names of tied shards are of one storage, and gaps between parts have no one reader
    found = [
        module[key.name]
        for key in prepared.wants.sources.values()
        if key.name in module and layout[key].buffer == f"module/{key.name}"
    ]
    spans = sorted((one.storage.path, one.byte_offset, one.byte_offset + one.nbytes) for one in found if one.numel)
    return any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans))


def unproved(prepared: Prepared) -> frozenset[str]:
    """The kinds of tensors that this load changes after it has read them."""
    kinds = {"weight": prepared.run.module.has_load_hooks, "fp32": _masters_anew(prepared)}
    return frozenset(kind for kind, changed in kinds.items() if changed)


def _replica(engine: DeepSpeedEngine, prepared: Prepared) -> int:
    """Which replica of the optimizer this rank is part of: the first rank of the group that partitions it.

    There are several where a device mesh has more dimensions than the data-parallel one; each reads
    the whole checkpoint, and their slices must not be combined.
    """
    import torch.distributed as dist

    if prepared.checkpoint.tp_models:
        return 0  # whoever has a part of a tensor reads of all files
    if prepared.live is None or prepared.live.replicated:
        return rank()
    if prepared.checkpoint.stages:
        return prepared.grid.row.rank  # all stages of a row together
    return min(dist.get_process_group_ranks(engine.optimizer.dp_process_group))


def _begin(
    engine: DeepSpeedEngine, prepared: Prepared, settings: Settings
) -> tuple[Begun, Mapping[str, TensorTarget], Executor]:
    """Who sums up what is read, the buffers, and who fills them: what can fail on one rank before any reads."""
    witness = seen_by(prepared) if settings.prove else None
    if prepared.wants.absent and prepared.live is not None:
        _masters_from_weights(engine.optimizer, prepared.live)  # what is absent keeps its weights
    memory = memory_of(engine, prepared.grid)
    targets = prepared.wants.targets(memory.tensors)
    executor = choose(
        settings.device,
        targets,
        threads=settings.threads,
        memory_nbytes=settings.memory_nbytes,
        checksum=settings.checksum,
        saw=witness.saw if witness is not None else None,
        saw_there=witness.saw_there if witness is not None else None,
        named=prepared.wants.named(*place(prepared.live)),
    )
    return (witness, memory), targets, executor


def _settle_model(
    engine: DeepSpeedEngine, prepared: Prepared, request: Request, settings: Settings, memory: Memory
) -> None:
    """Fill in the parts of the module that the executor does not move, then compare weights with masters."""
    import torch

    with torch.no_grad():
        for record, name in prepared.wants.whole_reads:
            memory.tensors[name].copy_(read_tensor(record))
        if not prepared.wants.from_masters:
            _run_loaders(engine.module, prepared, request, memory.state)
    if settings.checksum:
        folder = prepared.checkpoint.listing.folder
        raise_faults(masters_against_weights(engine, prepared), subject=f"loading {folder}")


def _run_loaders(module: torch.nn.Module, prepared: Prepared, request: Request, state: Mapping[str, object]) -> None:
    """Call the modules' own loading code with what was saved, as DeepSpeed does with its state dict.

    An entry that it passes over is an error, unless the load is not strict and the tensors beside it were not saved, as
    the format of a weight of bitsandbytes in 8 bits (`maybe_rearrange_weight`, nn/modules.py, 0.50.2).
    """
    import torch

    if not prepared.run.module.has_load_hooks:
        local = {prepared.grid.global_name(name): name for name in state}
        for name, value in prepared.beside.entries.items():
            module.get_submodule(local.get(name, name).rpartition(".")[0]).set_extra_state(value)
        return
    for prefix, part in loaded_modules(module).items():
        given = _state_saved(part, prefix, prepared, state)
        with torch.no_grad():
            answer = part.load_state_dict(given, strict=False)
        beside = entries_unloaded(part, given, set())
        if unloaded := [
            name
            for name in getattr(answer, "unexpected_keys", ())
            if f"{prefix}{name}" in state and (request.strict or not given.keys().isdisjoint(beside.get(name, given)))
        ]:
            raise ModelMismatch(
                f"module {type(part).__name__}: its state dict has entries that it does not load itself: "
                f"{', '.join(unloaded[:8])}; resume with the layout that was saved"
            )


def _state_saved(
    part: torch.nn.Module, prefix: str, prepared: Prepared, state: Mapping[str, object]
) -> OrderedDict[str, object]:
    """Return the state dict for the `load_state_dict` of a module whose entries begin with `prefix` in the run.

    Modules with loading code of their own get copies in CPU memory, as DeepSpeed gives them: a loader that swaps two
    tensors would otherwise overwrite one. If the load is not strict, they also get the saved entries that the run does
    not have, which they may use. All other modules get their own tensors, so that nothing changes.
    """
    import torch

    saved, values, grid = prepared.checkpoint.model, prepared.beside.entries, prepared.grid
    known = {*saved.module, *saved.objects, *saved.trainable, *saved.frozen_shapes}
    known -= prepared.run.module.unloaded.keys()
    names = {name: name for name in values} | {grid.global_name(name): name for name in state}
    given, loaders = OrderedDict[str, object](), loader_prefixes(part)
    for name, local in names.items():
        if name in known and local.startswith(prefix):
            key = local.removeprefix(prefix)
            given[key] = value = values[name] if name in values else state[local]
            if isinstance(value, torch.Tensor) and key.startswith(loaders):
                given[key] = value.detach().to("cpu", copy=True)
    for name, record in saved.module.items():
        key, is_left = name.removeprefix(prefix), name not in names and name.startswith(prefix)
        if is_left and grid.is_responsible_for(name) and record.storage.path and key.startswith(loaders):
            given[key] = read_tensor(record)
    modules = ((name, saved_name(f"{prefix}{name}".removesuffix("."))) for name, _ in part.named_modules())
    versions = prepared.beside.versions
    vars(given)["_metadata"] = {name: versions[key] for name, key in modules if key in versions}
    return given


def _adopt(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> None:
    """Scheduler, counters and optimizer, in DeepSpeed's own order. Not collective: a rank may fail alone."""
    live, wants = prepared.live, prepared.wants
    if live is None or live.stage != 0:
        counters(engine, prepared, request)
    if live is not None and prepared.values is not None:
        if not wants.from_masters and not (prepared.masters and masters_read(prepared)):
            _masters_from_weights(engine.optimizer, live)
        adopt(engine, live, prepared.values, wants.tensors)
    if live is not None and live.stage == 0:
        counters(engine, prepared, request)


_NO_STATES = ("fp32", "weight", "module", "frozen")


def adopt(
    engine: DeepSpeedEngine, live: Optimizer, values: OptimizerValues, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make the optimizer's state what was read. `tensors` holds the fresh buffers by name.

    DeepSpeed's own `load_state_dict` adopts the tensors and links what hangs on them: of `DeepSpeedZeroOptimizer`,
    `BF16_Optimizer` (whose second positional argument differs: always keywords), `DeepSpeedZeroOptimizer_Stage3`; at
    stage 0 of the wrapped torch optimizer. Masters that were read in place are handed back as saved: torch sees that
    source and destination are one tensor and copies nothing.
    """
    state: dict[int, dict[str, object]] = {}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, of = name.partition("/")
        if kind not in _NO_STATES:
            states.setdefault(int(of), {})[kind] = tensor
    masters = masters_of(engine)
    for number, master in enumerate(masters):
        found = states.get(number, {})
        if live.replicated and live.kind != "fused":
            found = {kind: tensor.view(master.shape) for kind, tensor in found.items()}
        state[number] = {**values.scalars.get(number, {}), **found}
    base: dict[str, object] = {
        "state": {n: s for n, s in state.items() if s},
        "param_groups": group_values(live_groups(engine), live.buffers, values),
    }
    with _as_read(inner_of(engine), masters, state):
        if live.replicated:
            _adopt_stage0(engine, values, base)
        else:
            _adopt_partitioned(engine, live, values, base, masters)


@contextmanager
def _as_read(
    inner: torch.optim.Optimizer, masters: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, object]]
) -> Iterator[None]:
    """Inside, an optimizer gets states that are no fractions, and fp32 states of 16-bit masters that it keeps, as read.

    torch casts the states that it loads to the type of their parameter (`_process_value_according_to_param_policy`,
    optim/optimizer.py, 2.13), DeepSpeedCPUAdam's as well (`fp32_optimizer_states`, ops/adam/cpu_adam.py, 0.19.8).
    """
    import torch

    wide = any(master.element_size() < 4 for master in masters)
    wide = wide and getattr(inner, "fp32_optimizer_states", False)
    kept = [
        (number, kind, read)
        for number, own in state.items()
        for kind, read in own.items()
        if kind != "step" and isinstance(read, torch.Tensor) and (wide or not read.is_floating_point())
    ]

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for number, kind, read in kept:
            state_of = optimizer.state[masters[number]]
            state_of[kind] = read.to(state_of[kind].device)

    if not kept:
        yield
        return
    handle = inner.register_load_state_dict_post_hook(put_back)
    try:
        yield
    finally:
        handle.remove()


_KEPT_APART = ("params", "step", "initial_lr")


def group_values(
    running: Sequence[Mapping[str, object]], buffers: Sequence[FlatBuffer], values: OptimizerValues
) -> list[dict[str, object]]:
    """The param groups as the optimizer takes them over: what was saved, and else what it has."""
    groups: list[dict[str, object]] = []
    for number, group in enumerate(running):
        hyper = values.groups.get(number)
        if hyper is None:
            hyper = {key: value for key, value in group.items() if key != "params"}
            if values.step is not None:
                hyper["step"] = values.step
        # what this run's optimizer needs and the saved one had not: FusedAdam's bias_correction, where AdamW was saved
        hyper = {**{key: value for key, value in group.items() if key not in _KEPT_APART}, **hyper}
        if group.get("moe"):
            hyper = {**hyper, "name": group["name"]}  # says how many ranks share the experts of this run
        groups.append({**hyper, "params": [n for n, buffer in enumerate(buffers) if buffer.group == number]})
    return groups


def _adopt_partitioned(
    engine: DeepSpeedEngine,
    live: Optimizer,
    values: OptimizerValues,
    base: Mapping[str, object],
    masters: Sequence[torch.Tensor],
) -> None:
    import deepspeed

    optimizer = engine.optimizer
    kept = {
        name: values.extras.get(name, getattr(optimizer, name))
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        if name in values.extras or hasattr(optimizer, name)
    }
    if live.kind == "zero3":
        kept.pop("clip_grad", None)
        optimizer._clear_fp32_optimizer_param_groups()  # a fresh torch Adagrad has its groups filled already
        mine = {
            **kept,
            "zero_stage": live.stage,
            "partition_count": live.dp,
            "optimizer_state_dict": base,
            "fp32_flat_groups": list(masters),
        }
    else:
        mine = {
            **kept,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": list(masters),
            "ds_version": deepspeed.__version__,
        }
        if hasattr(optimizer, "groups_padding"):
            mine["group_paddings"] = optimizer.groups_padding
        if hasattr(optimizer, "round_robin_bit16_padding"):
            mine["param_alignment_paddings"] = optimizer.round_robin_bit16_padding
    everyone: list[object] = [None] * live.dp
    everyone[live.rank] = mine
    arguments = {
        "state_dict_list": everyone,
        "load_optimizer_states": True,
        "load_from_fp32_weights": True,
        "checkpoint_folder": None,
        "load_serial": None,
        "param_shapes": None,
    }
    accepted = inspect.signature(optimizer.load_state_dict).parameters
    optimizer.load_state_dict(**{name: value for name, value in arguments.items() if name in accepted})


def _adopt_stage0(engine: DeepSpeedEngine, values: OptimizerValues, base: dict[str, object]) -> None:
    """The wrapped torch optimizer takes its state.

    A torch optimizer's groups list frozen parameters too, so indices are renumbered over all of them.
    """
    optimizer, inner = engine.optimizer, inner_of(engine)
    numbers: dict[int, int] = {}
    groups, at, number = [], 0, 0
    saved = base["param_groups"]
    assert isinstance(saved, list)
    states = base["state"]
    assert isinstance(states, dict)
    for group, hyper in zip(inner.param_groups, saved, strict=True):
        indices = []
        for param in group["params"]:
            if param.requires_grad:
                numbers[number] = at
                number += 1
            indices.append(at)
            at += 1
        groups.append({**hyper, "params": indices})
    inner.load_state_dict({"state": {numbers[n]: state for n, state in states.items()}, "param_groups": groups})
    for name in ("clip_grad", "loss_scale_config"):
        if name in values.extras and hasattr(optimizer, name):
            setattr(optimizer, name, values.extras[name])
    for name, value in vars(values.extras.get("loss_scale_config", SimpleNamespace())).items():
        if name in SCALE and hasattr(optimizer, name):  # which older releases keep in the optimizer itself
            setattr(optimizer, name, value)


def _masters_anew(prepared: Prepared) -> bool:
    """Whether masters are made from the weights in the end, also those that were read to make the weights."""
    return prepared.values is None or bool(prepared.wants.from_masters and not prepared.masters)


def _masters_from_weights(optimizer: object, live: Optimizer) -> None:
    """fp32 masters anew from the weights (they lose the bits that 16-bit weights do not have). Collective."""
    if live.kind == "torch":
        return
    name = "refresh_fp32_params" if live.stage == 0 else "_restore_from_bit16_weights"
    refresh: Callable[[], None] = getattr(optimizer, name)
    refresh()


def _weights_from_masters(engine: DeepSpeedEngine, live: Optimizer, prepared: Prepared) -> None:
    """Weights that the checkpoint did not hold in this run's type: cast from the masters, then gathered. Collective."""
    import torch

    names = set(prepared.wants.from_masters)
    params = {name: param for param, name in param_names(engine, prepared.grid).items()}
    if live.kind in ("zero", "bf16"):
        others = {n for one in live.buffers for n in one.shapes if not has(prepared.checkpoint, n, "fp32")} - names
        kept = {name: params[name].detach().clone() for name in others}  # cast from no master of the checkpoint
        engine.optimizer.update_lp_params()
        with torch.no_grad():
            for name, weight in kept.items():
                params[name].copy_(weight)
        return
    with torch.no_grad():
        for buffer, masters in zip(live.buffers, masters_of(engine), strict=True):
            at = 0
            for name, shape in buffer.shapes.items():
                numel = params[name].numel()
                if name in names:
                    params[name].copy_(masters.detach().view(-1)[at : at + numel].view(shape))
                at += numel


def counters(engine: DeepSpeedEngine, prepared: Prepared, request: Request) -> None:
    """Counters and schedulers, as DeepSpeed's `_load_checkpoint` (runtime/engine.py, 0.19.8) sets them."""
    entries = prepared.entries
    engine.loaded_checkpoint_dp_world_size = prepared.checkpoint.dp
    if request.module_only:
        return
    if request.scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(entries["lr_scheduler"])
    random_ltd = getattr(engine, "random_ltd_scheduler", None)
    if random_ltd is not None and engine.random_ltd_enabled() and entries.get("random_ltd"):
        random_ltd.load_state_dict(entries["random_ltd"])
    loader = engine.training_dataloader
    if loader is not None and engine.curriculum_learning_enabled() and entries.get("data_sampler") is not None:
        load_sampler(loader.data_sampler, entries["data_sampler"])
    engine.global_steps = entries["global_steps"]
    engine.global_samples = entries.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = entries.get("skipped_steps", 0)
    engine.loaded_checkpoint_mp_world_size = entries.get("mp_world_size", 1)


_COMPARED_NUMEL, _SAMPLED_NUMEL = 1 << 20, 1 << 15


def masters_read(prepared: Prepared) -> bool:
    wants = prepared.wants
    return any(key.kind == "fp32" for one in (wants, *wants.shares.values()) for key in one.placements)


def masters_against_weights(engine: DeepSpeedEngine, prepared: Prepared) -> Iterator[Fault]:
    """Yield a fault for each flat buffer, read from files, whose masters' cast is not its weights, bit for bit.

    After every step of every run they are equal: if they are not, the files are of two runs or two steps.
    """
    live = prepared.live
    if live is None or prepared.values is None or not masters_read(prepared):
        return
    read = {key.name for key in prepared.wants.placements if key.kind == "weight"}
    yield from master_faults(engine, live, prepared.grid, read, checkpoint=prepared.checkpoint)


def master_faults(
    engine: DeepSpeedEngine, live: Optimizer, grid: LiveGrid, names: Container[str], *, checkpoint: AnyCheckpoint
) -> Iterator[Fault]:
    """Yield a fault for each flat buffer of parameters with these names whose masters' cast is not its weights."""
    why = "model and optimizer files are of different steps or runs"
    if checkpoint.stage == 0:
        why = (
            "the run trains other parameters than the saved one, or model and optimizer are of different steps or runs"
        )
    buffers = zip(live.buffers, masters_of(engine), _weights_beside(engine, live, grid), strict=True)
    for number, (buffer, masters, weights) in enumerate(buffers):
        if weights is None or not all(name in names for name in buffer.shapes):
            continue
        at = _first_difference(masters.detach().reshape(-1), weights.detach().reshape(-1))
        if at is not None:
            yield CheckpointDamaged.fault(
                checkpoint.listing.folder,
                f"weights and fp32 masters of flat buffer {number} ({next(iter(buffer.shapes))}, ...) do not belong "
                f"together: {why}",
                "the masters' cast in every weight",
                f"a difference at element {at} of the partition of rank {live.rank}",
                mend="restore all files of one save; if the weights were edited on purpose, load once with "
                '"reshard": {"verify": "off"}',
            )


KEPT = "as before this load"
BY_DEEPSPEED = "not zero, as DeepSpeed left them"


def states_left(engine: DeepSpeedEngine, request: Request, saved: SavedValues, given: Samples) -> dict[str, str]:
    """Return the texts of the report for the masters and the moments of this rank.

    They are measured in the engine, and compared with the samples that its optimizer was `given`. DeepSpeed copies some
    states without its optimizer's `load_state_dict`; of these there are no samples.
    """
    masters = _masters_left(engine, loaded=request.load_optimizer and saved.has(MASTERS))
    return {MASTERS: masters, MOMENTS: _moments_left(engine, given, loaded=request.load_moments and saved.has(MOMENTS))}


def _moments_left(engine: DeepSpeedEngine, given: Samples, *, loaded: bool) -> str:
    if not has_moments(engine.optimizer):
        return ANEW[MOMENTS]
    if given:
        return FROM_CHECKPOINT if not given.differing() else OTHERS
    return BY_DEEPSPEED if loaded else KEPT


def _masters_left(engine: DeepSpeedEngine, *, loaded: bool) -> str:
    """Compare elements from all of each flat buffer with the weights: as many as are cheap in CPU memory, too."""
    grid = live_grid(engine)
    live = live_optimizer(engine, grid)
    beside = _weights_beside(engine, live, grid) if live is not None else ()
    compared = [
        (masters.detach().reshape(-1)[::step].contiguous(), weights.detach().reshape(-1)[::step].contiguous())
        for masters, weights in zip(masters_of(engine), beside, strict=True)
        if weights is not None and weights.numel() == masters.numel()
        for step in (masters.numel() // _SAMPLED_NUMEL + 1,)
    ]
    if any(_first_difference(masters, weights) is not None for masters, weights in compared):
        return "not those of the weights" if loaded else KEPT
    finer = any(_first_difference(weights, masters) is not None for masters, weights in compared)
    if not loaded:
        return KEPT if finer else ANEW[MASTERS]
    if finer or all(weights.dtype is masters.dtype for masters, weights in compared):
        return FROM_CHECKPOINT
    return EQUAL_TO_WEIGHTS if engine.zero_load_from_fp32_weights() else ANEW[MASTERS]


def _weights_beside(engine: DeepSpeedEngine, live: Optimizer, grid: LiveGrid) -> list[torch.Tensor | None]:
    """For each flat buffer the weights in the same order and cut, None where there is no such view."""
    optimizer = engine.optimizer
    if live.kind == "zero":
        groups = optimizer.parallel_partitioned_bit16_groups
        return [parts[of.rank] for parts, of in zip(groups, live.buffers, strict=True)]
    if live.kind == "bf16":
        groups = optimizer.bf16_partitioned_groups
        return [parts[of.rank] for parts, of in zip(groups, live.buffers, strict=True)]
    if live.kind == "zero3":
        return list(optimizer.fp16_partitioned_groups_flat)
    if live.kind == "fused":
        return list(optimizer.fp16_groups_flat)
    params = {name: param for param, name in param_names(engine, grid).items()}
    return [params[next(iter(buffer.shapes))] if live.kind == "unfused" else None for buffer in live.buffers]


def _first_difference(masters: torch.Tensor, weights: torch.Tensor) -> int | None:
    for at in range(0, min(masters.numel(), weights.numel()), _COMPARED_NUMEL):
        part = weights[at : at + _COMPARED_NUMEL]
        cast = masters[at : at + _COMPARED_NUMEL].to(device=part.device, dtype=part.dtype)
        if same_bits(cast, part):
            continue
        same = (cast == part) | (cast.isnan() & part.isnan())
        if not bool(same.all()):
            return at + int((~same).nonzero()[0])
    return None


_MEND = (
    "load again, and with another tag if it comes back; then report it with the output of `ds-reshard fingerprint`: "
    "memory is failing, or ds_reshard or DeepSpeed put bytes in a wrong place"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The fingerprints of the engine's whole tensors, each found equal to what was read; how many have none."""

    tensors: Mapping[TensorKey, Fingerprint]
    unproved: int

    def __str__(self) -> str:
        number = len(self.tensors)
        return f"{number} tensors proved" + (f", {self.unproved} not" if self.unproved else "")


def seen_by(prepared: Prepared) -> Witness:
    """Who sums up what this rank is going to read."""
    position, size = place(prepared.live)
    wanted = match_tensors(prepared.index, prepared.wants.layout(size), prepared.wants.sources)
    return Witness(prepared.index, wanted, position)


def divided_names(prepared: Prepared, *, unproved: frozenset[str]) -> int:
    """A digest of the tensors that ranks hold parts of: they add up what they hold of one list of tensors."""
    layout = prepared.wants.layout(place(prepared.live)[1])
    return crc32("\n".join(map(str, _divided(layout, unproved))).encode())


def _divided(layout: Layout, unproved: frozenset[str]) -> list[TensorKey]:
    return sorted(key for key, at in layout.placements.items() if not at.replicated and key.kind not in unproved)


def prove(
    engine: DeepSpeedEngine, prepared: Prepared, witness: Witness, steps: Steps, *, unproved: frozenset[str]
) -> Proof | None:
    """Compare each part in the engine's memory with what was read of it, and the parts with the whole. Collective.

    The kinds in `unproved` are left out, as are tensors that were read whole or made from masters. One sum over
    the ranks that share the optimizer, of two numbers a tensor, in which a rank that failed takes part too. What
    differs is a FingerprintMismatch among the faults of `steps`; then there is no proof.
    """
    subject = f"loading {prepared.checkpoint.listing.folder}"
    position, size = place(prepared.live)
    layout = prepared.wants.layout(size)
    proved = sorted(key for key in layout.placements if key.kind not in unproved)

    def compared() -> Fingerprints[TensorKey]:
        now = held(layout, position, _buffers(engine, prepared))
        raise_faults(_differences(witness.sums, now, proved), subject=subject)
        return now

    now = steps.take(compared, subject=subject) or Fingerprints[TensorKey]()
    parts = {key: now[key] for key in _divided(layout, unproved)}
    whole = {key: now[key] for key in proved} | _summed(engine, prepared.live, parts)
    steps.take(lambda: raise_faults(_incomplete(layout, whole), subject=subject), subject=subject)
    if steps.failed:
        return None
    wants = prepared.wants
    left = len(layout.placements) - len(proved) + len(wants.whole_reads) + len(wants.from_masters)
    return Proof(tensors=whole, unproved=left)


def place(live: Optimizer | None) -> tuple[int, int]:
    """This rank among those that divide the optimizer, and how many they are."""
    return (live.rank, live.dp) if live is not None else (0, 1)


def _buffers(engine: DeepSpeedEngine, prepared: Prepared) -> dict[str, torch.Tensor]:
    """The engine's tensors as they are now: masters and states are looked up anew, in the optimizer."""
    states = inner_of(engine).state if prepared.live is not None else {}
    of_module = ("module/", "weight/", "frozen/")
    found = {name: tensor for name, tensor in prepared.wants.tensors.items() if name.startswith(of_module)}
    for number, masters in enumerate(masters_of(engine)):
        found[f"fp32/{number}"] = masters
        for kind, value in states.get(masters, {}).items():
            if hasattr(value, "data_ptr"):
                found[f"{kind}/{number}"] = value
    return found


def _differences(read: Fingerprints[TensorKey], now: Fingerprints[TensorKey], keys: list[TensorKey]) -> Iterator[Fault]:
    for key in keys:
        if read[key] != now[key]:
            yield FingerprintMismatch.fault(
                str(key),
                f"what lies in the engine of rank {rank()} is not what was read",
                f"fingerprint {read[key]} of {read[key].nbytes} bytes",
                f"{now[key]} of {now[key].nbytes}",
                mend=_MEND,
            )


def _summed(
    engine: DeepSpeedEngine, live: Optimizer | None, parts: Mapping[TensorKey, Fingerprint]
) -> dict[TensorKey, Fingerprint]:
    """The parts of all ranks that share the optimizer, added up. Collective."""
    import torch
    import torch.distributed as dist

    if not parts or live is None or live.replicated:
        return dict(parts)
    rows = [(signed(part.value), part.nbytes) for part in parts.values()]
    sums = torch.tensor(rows, dtype=torch.int64, device=engine.device)
    with collective():
        dist.all_reduce(sums, group=engine.optimizer.dp_process_group)
    totals = (Fingerprint(value=value % 2**64, nbytes=nbytes) for value, nbytes in sums.tolist())
    return dict(zip(parts, totals, strict=True))


def _incomplete(layout: Layout, whole: Mapping[TensorKey, Fingerprint]) -> Iterator[Fault]:
    for key, found in whole.items():
        expected = prod(layout[key].shape) * layout[key].dtype.itemsize
        if found.nbytes != expected:
            yield FingerprintMismatch.fault(
                str(key),
                "the parts of all ranks are not the whole tensor",
                f"{expected} bytes",
                f"{found.nbytes}",
                mend=_MEND,
            )
