"""What one rank of a run wants from a checkpoint, which parts of whole tensors it has, and where they lie."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ds_reshard.errors import AS_SAVED, Fault, ModelMismatch, ParamGroupMismatch, UnsupportedLayout
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint
from ds_reshard.formats.zero.flat import slice_numel, sliced_weight, whole_placement
from ds_reshard.formats.zero.model_states import QUANTIZED, ModelStates
from ds_reshard.formats.zero.patterns import Patterns
from ds_reshard.formats.zero.tensor_parallel import (
    SplitEvidence,
    affine_maps,
    coverage_faults,
    find_splits,
    split_by_widths,
    unknown_split_faults,
    vocabulary_splits,
)
from ds_reshard.hosts.deepspeed.engine import MOMENTUM, LiveBuffer, Optimizer, Run
from ds_reshard.hosts.deepspeed.entries import unloaded_faults
from ds_reshard.hosts.deepspeed.foreign import ForeignCheckpoint
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, placement_of_parts
from ds_reshard.model.live_run import LiveTensor, LocalShard
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Shape
from ds_reshard.operations.ranks import rank
from ds_reshard.planning.copies import Copy

logger = logging.getLogger("ds_reshard")
RUN = "run"


@dataclass(slots=True, kw_only=True)
class Wants:
    """Target placements, the source tensor of each, and where the target's bytes live.

    `sizes` and `fresh_types` list the fresh buffers alone, which have padding to zero; `padded` those that the engine
    has, and in which rows behind a vocabulary are zeroed. `whole_reads` are tensors that are read and copied as a whole
    (not row-major in the file or in memory), with the buffers that receive them. `from_masters` names the weights that
    the checkpoint does not hold and that are cast from the masters once those are in; `absent` the trainable parameters
    that it does not hold at all (a non-strict load keeps them). `faults` are entries that cannot be read. `shares` are
    what is wanted of buffers that other ranks divide than all of the run, by this rank's place among them and their
    number. `divided` says what this rank has of the tensors that it has parts of, `wholes` are kinds that a rank has
    whole which others may have, too.
    """

    checkpoint: AnyCheckpoint
    placements: dict[TensorKey, Placement] = field(default_factory=dict)
    sources: dict[TensorKey, TensorKey] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    fresh_types: dict[str, torch.dtype] = field(default_factory=dict)
    whole_reads: list[tuple[TensorRecord, str]] = field(default_factory=list)
    from_masters: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    shares: dict[tuple[int, int], Wants] = field(default_factory=dict)
    divided: Mapping[str, LocalShard] = field(default_factory=dict)
    wholes: set[str] = field(default_factory=set)
    _layouts: dict[int, Layout] = field(default_factory=dict)

    def of_buffer(self, buffer: LiveBuffer, live: Optimizer) -> Wants:
        """Where what is wanted of a buffer belongs: apart, if not all ranks of the run share it."""
        if buffer.ranks == live.dp:
            return self
        own = Wants(checkpoint=self.checkpoint, divided=self.divided)
        return self.shares.setdefault((buffer.rank, buffer.ranks), own)

    def existing(self, placement: Placement, source: TensorKey, numel: int) -> None:
        """Want `source` in a buffer of `numel` elements that the engine already has."""
        if not self._place(placement, source):
            self.padded[placement.buffer] = numel

    def fresh(self, placement: Placement, source: TensorKey, numel: int) -> None:
        """Want `source` in a new buffer of `numel` elements, which the engine will adopt."""
        self._place(placement, source)
        self.sizes[placement.buffer], self.fresh_types[placement.buffer] = numel, torch_dtype(placement.dtype)

    def _place(self, placement: Placement, source: TensorKey) -> bool:
        """Record where `source` is read to: of a divided tensor this rank's parts. Return whether they cover it."""
        assert not self._layouts, "a plan has been made of what was wanted before"
        key, share = placement.key, self.divided.get(placement.key.name)
        if share is None or share.whole:
            self.placements[key], self.sources[key] = placement, source
            return True
        if share.parts:
            whole = placement._replace(shape=share.shape, box=Box.whole(share.shape))
            self.placements[key], self.sources[key] = placement_of_parts(whole, [(placement.cut, share.parts)]), source
        return sum(part.box.numel for part in share.parts) == placement.numel

    def take_buffers(self, tensors: Iterable[LiveTensor], model: ModelStates) -> None:
        """Take the module's buffers from this rank's own model file instead of the first one's."""
        assert not self._layouts, "a plan has been made of what was wanted before"
        for entry in tensors:
            record = next((model.module[name] for name in entry.entries if name in model.module), None)
            if record is None or model.buffer_names.isdisjoint(entry.entries) or record.shape != entry.shape:
                continue
            for key in [TensorKey(name=name, kind="weight") for name in entry.entries]:
                if self.placements.pop(key, None) is not None:
                    del self.sources[key]
            self.whole_reads.append((record, f"module/{entry.entries[0]}"))

    def layout(self, world: int) -> Layout:
        """Where they lie in a run of so many ranks; nothing more can be wanted afterwards."""
        if world not in self._layouts:
            self._layouts[world] = Layout(self.placements, {RUN: world})
        return self._layouts[world]

    def named(self, rank: int, world: int) -> Callable[[Copy], str]:
        """Which tensors the elements of a copy into a buffer of `rank` are of."""

        def tensors(copy: Copy) -> str:
            first, last = copy.element_offset, copy.element_offset + copy.numel
            shares = ((self, rank, world), *((wants, *share) for share, wants in self.shares.items()))
            return ", ".join(
                str(placement.key)
                for wants, place, size in shares
                for placement, piece in wants.layout(size).pieces(RUN, copy.buffer, place)
                if piece.element_offset < last and first < piece.element_offset + piece.stop - piece.start
            )

        return tensors

    def targets(self, live: Mapping[str, torch.Tensor]) -> dict[str, TensorTarget]:
        """The buffers of a run by name, and beside its masters the new ones: memory is allocated here, not before."""
        wanted = (placement.buffer for placement in self.placements.values())
        for buffer in dict.fromkeys((*wanted, *self.sizes, *self.padded)):
            if buffer in self.sizes:
                device = live[f"fp32/{buffer.rpartition('/')[2]}"].device
                self.tensors[buffer] = torch.empty(self.sizes[buffer], dtype=self.fresh_types[buffer], device=device)
            else:
                self.tensors[buffer] = live[buffer]
        made = {buffer: TensorTarget(tensor, untouched=buffer in self.sizes) for buffer, tensor in self.tensors.items()}
        for wants in self.shares.values():
            made |= wants.targets(live)
            self.tensors |= wants.tensors
        return made


def run_shares(run: Run, checkpoint: AnyCheckpoint) -> tuple[dict[str, LocalShard], list[Fault]]:
    """The parts that this rank has of parameters that are divided; empty if the checkpoint has the same parts."""
    if not checkpoint.tp_models or run.grid.row.size == 1:
        return {**run.local_shards, **_padded(run, checkpoint)}, []
    grid, local = run.grid, run.module.shapes()
    maps = affine_maps(run.info)
    mapped = Patterns(maps)
    shards = {
        name: _shards([maps[one] for one in mapped.matching(name)], shape, run.shard_sizes.get(name, {}), grid)
        for name, shape in local.items()
    }
    row, rules = grid.row, [rule._replace(owner=None) for rule in grid.row.rules]
    found, unknown = find_splits(shards, SplitEvidence(run.info, run.autotp, row.whole_shapes, row.live_rules), rules)
    faults = unknown_split_faults(unknown, "this run")
    for name, division in found.items():
        faults += coverage_faults(name, division, shards[name])
        held = sum(part.box.numel for part in division.parts_by_rank[grid.row.rank])
        if held != prod(local[name]) and not division.vocabulary:
            what = "has elements in this run that are no part of it, which would be left as they are"
            mend = "resume with the tensor-parallel size that was saved, or with one"
            fault = UnsupportedLayout.fault(
                f"parameter {name}", what, f"{held} elements", f"{prod(local[name])}", mend=mend
            )
            faults.append(fault)
    own = {name: LocalShard(one.shape, one.parts_by_rank[grid.row.rank], one.replicated) for name, one in found.items()}
    return {
        name: own[owner] for owner, one in run.module.parameters().items() if owner in own for name in one.names
    }, faults


def _padded(run: Run, checkpoint: AnyCheckpoint) -> dict[str, LocalShard]:
    """Vocabularies with more rows in a run without tensor parallelism than were saved; the extra rows are padding.

    As the run's own patterns or rules say, by whose size the saved one must be. A run that says nothing has no more
    rows than the saving run had with its padding: others may be words of its own, of which no file has anything.
    """
    model, saved = checkpoint.model, {name: one for name, one in checkpoint.splits.items() if one.vocabulary}
    shapes = {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes, **model.trainable}
    shapes |= {name: one.shape for name, one in saved.items()}
    held = {name: one.shape for one in run.module.tensors for name in one.names}
    more = {name: [own] for name, own in held.items() if own[:1] > shapes.get(name, own)[:1]}
    said = vocabulary_splits(model, more, run.grid.row.rules, info=run.info) if more else {}
    for name in more.keys() & saved.keys() - said.keys():
        own, size, room = held[name], saved[name].shape[0], sum(shard[0] for shard in saved[name].shards)
        if own[1:] == saved[name].shape[1:] and own[0] <= room:
            said[name] = split_by_widths(own, 0, [own[:1]], "saved", vocabulary=size)
            if not rank():
                logger.warning("%s: its rows behind the saved vocabulary of %d are padding, and zeros", name, size)
    return {name: LocalShard(one.shape, one.parts_by_rank[0]) for name, one in said.items()}


def more_rows(checkpoint: AnyCheckpoint, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The vocabularies of which `shapes` have more rows than were saved, and how many were."""
    saved = {name: one.shape for name, one in checkpoint.splits.items() if one.vocabulary and name in shapes}
    return {
        name: shape[0]
        for name, shape in saved.items()
        if shapes[name][1:] == shape[1:] and shapes[name][:1] > shape[:1]
    }


def _shards(mapped: Sequence[object], own: Shape, sizes: Mapping[int, Sequence[int]], grid: LiveGrid) -> list[Shape]:
    """The shapes of all ranks' shards: as the affine map or AutoTP's own sizes say, else alike.

    Where they are not, the whole is not as long as this rank takes it for, and the load is refused.
    """
    shapes = [own] * grid.row.size
    for dim, of_ranks in sizes.items():
        shapes = [(*own[:dim], size, *own[dim + 1 :]) for size in of_ranks]
    for entry in mapped:
        of_ranks = entry["ranks"] if isinstance(entry, Mapping) else {}
        said = [of_ranks.get(rank, of_ranks.get(str(rank))) for rank in range(grid.row.size)]
        shapes = [tuple(one["shard_shape"]) for one in said if one is not None]
        if grid.row.rank < len(shapes):
            shapes[grid.row.rank] = own
    return shapes


def has(checkpoint: AnyCheckpoint, name: str, kind: str) -> bool:
    return TensorKey(name=name, kind=kind) in checkpoint.layout


def want_model(wants: Wants, run: Run, *, masters: bool, strict: bool) -> None:
    """Want every weight and buffer of the module.

    `masters` says that fp32 masters are loaded: a trainable weight that the checkpoint lacks, or holds
    in another type than this run trains in, is then cast from its master. What no module loads is not wanted.
    """
    live = run.optimizer
    trainable = {name for buffer in live.buffers for name in buffer.shapes} if live else set()
    wants.faults += unloaded_faults(wants.checkpoint, run.module, strict=strict)
    if live is not None and live.kind == "zero3":
        _want_partitioned(wants, run, live, masters=masters)
    for entry in run.module.tensors:
        if entry.partitioned or not entry.entries:
            continue
        master = next(
            (name for name in entry.entries if name in trainable and has(wants.checkpoint, name, "fp32")), None
        )
        if masters and live is not None and master is not None:
            if live.kind in ("torch", "unfused") and not entry.contiguous:
                wants.faults.append(_unread(master, "has masters or states that are not contiguous in this run"))
            if live.kind == "torch":
                continue
            if not _weight_as_trained(wants.checkpoint, entry):
                wants.from_masters.append(master)
                continue
        _want_weight(wants, entry, live)


def _weight_as_trained(checkpoint: AnyCheckpoint, entry: LiveTensor) -> bool:
    """Whether the checkpoint holds this weight beside its master, in the type that this run trains in."""
    keys = [TensorKey(name=name, kind="weight") for name in entry.entries]
    saved = next((checkpoint.layout[key] for key in keys if key in checkpoint.layout), None)
    return saved is not None and saved.dtype is entry.dtype and not checkpoint.masters_in_module


def _want_weight(wants: Wants, entry: LiveTensor, live: Optimizer | None) -> None:
    """A weight or buffer from the module's entries; without one, a trainable weight from its master.

    Where the run trains it and partitions masters, only this rank's share is read into them, and the weight is then
    cast and gathered (`from_masters`).
    """
    checkpoint, names = wants.checkpoint, entry.entries
    if not checkpoint.model.quantized.isdisjoint(names):
        wants.faults.append(_quantized(names[0], checkpoint))
        return
    shared = checkpoint.model.shared
    for name in (*names, *(shared[name] for name in names if name in shared)):
        if has(checkpoint, name, "weight"):
            _want_whole(wants, entry, TensorKey(name=name, kind="weight"))
            return
        record = checkpoint.model.module.get(name)
        if record is not None and record.storage.path and record.shape == entry.shape:
            wants.whole_reads.append((record, f"module/{names[0]}"))
            return
        if has(checkpoint, name, "fp32"):
            trained = live is not None and not all(one.shapes.keys().isdisjoint(names) for one in live.buffers)
            if trained and live is not None and live.kind in ("zero", "bf16"):
                wants.from_masters.append(name)
            else:
                _want_whole(wants, entry, TensorKey(name=name, kind="fp32"))
            return
    held = [name for name in names if name in checkpoint.model.module or name in checkpoint.model.objects]
    if held and 0 not in entry.shape:
        wants.faults.append(_unread(held[0], "is in the checkpoint in a form that is not read"))


def _unread(name: str, what: str) -> Fault:
    return UnsupportedLayout.fault(
        f"module entry {name}",
        what,
        "a plain dense tensor, or a share in the optimizer's files",
        "another kind of value, or a placeholder without one",
        mend=f"{AS_SAVED}, where DeepSpeed loads it itself",
    )


def _quantized(name: str, checkpoint: AnyCheckpoint) -> Fault:
    """Of a frozen weight that either side keeps quantized: a part is nothing without its scale."""
    what = QUANTIZED if name in checkpoint.model.quantized else "is kept quantized in this run"
    mend = "save with exclude_frozen_parameters=True, and load with load_module_strict=False"
    return UnsupportedLayout.fault(f"module entry {name}", what, "a weight in its own type", mend=mend)


def _want_whole(wants: Wants, entry: LiveTensor, source: TensorKey) -> None:
    if not prod(entry.shape):
        return
    name, record = entry.entries[0], wants.checkpoint.model.module.get(source.name)
    if not entry.contiguous and source.kind == "weight" and record is not None and record.numel and record.storage.path:
        wants.whole_reads.append((record, f"module/{name}"))
        return
    if not entry.contiguous or entry.dtype is None:
        wants.faults.append(_unread(name, "is not contiguous in this run, and has no whole weight to be read from"))
        return
    placement = whole_placement(name, "weight", entry.shape, entry.dtype, family=RUN, buffer=f"module/{name}")
    wants.existing(placement, source, prod(entry.shape))


def _want_partitioned(wants: Wants, run: Run, live: Optimizer, *, masters: bool) -> None:
    """Stage 3: this rank's slices of trainable and frozen parameters.

    With masters, DeepSpeed itself casts the partitions from them; the saved 16-bit slices are read all
    the same where there are any, to be compared with that cast.
    """
    checkpoint = wants.checkpoint
    kinds = ("fp32",) if masters and checkpoint.masters_in_module else ("weight", "fp32")
    for buffer in live.buffers:
        dtype = buffer.weight_dtype
        assert dtype is not None, "stage 3 has flat weights"
        held = [[TensorKey(name, kind) for kind in kinds if has(checkpoint, name, kind)] for name in buffer.shapes]
        sources = {first.name: first for first, *_ in filter(None, held)}  # a load that is not strict may find no key
        if masters and any(one.kind == "fp32" or checkpoint.layout[one].dtype is not dtype for one in sources.values()):
            continue
        into = wants.of_buffer(buffer, live)
        for placement in buffer.placements(RUN, {"weight": dtype}):
            source = sources.get(placement.key.name)
            if source is not None and placement.numel:
                into.existing(placement, source, buffer.partition_numel)
    trained = {name for buffer in live.buffers for name in buffer.shapes}
    for name, param in run.module.parameters().items():
        if name in trained or not param.partitioned or not prod(param.shape):
            continue
        keys = (TensorKey(one, kind) for one in param.entries or [name] for kind in ("weight", "fp32"))
        key = next((one for one in keys if one in checkpoint.layout), None)
        if key is not None:
            own = param.dtype
            whole_numbers = own is not None and not own.is_floating and checkpoint.layout[key].dtype is not own
            if own is None or whole_numbers or param.quantized or name in checkpoint.model.quantized:
                wants.faults.append(_quantized(name, checkpoint))
                continue
            placement = sliced_weight(name, param.shape, own, live.dp, family=RUN, buffer=f"frozen/{name}")
            wants.existing(placement, key, slice_numel(param.shape, live.dp))


def want_optimizer(wants: Wants, live: Optimizer, *, masters: bool, states: bool) -> None:
    """Request this rank's partitions: fp32 masters into the buffers of the run, states into new ones beside them."""
    for buffer in live.buffers:
        kinds: dict[str, ElementType] = {}
        if masters and any(has(wants.checkpoint, name, "fp32") for name in buffer.shapes):
            kinds["fp32"] = buffer.dtype
        if states:
            kinds |= state_kinds(wants.checkpoint, buffer)
        wholes = {kind: kinds.pop(kind) for kind in _whole_kinds(live, buffer) & kinds.keys()}
        if wholes:
            _want_wholes(wants, live, buffer, wholes)
        for placement in buffer.placements(RUN, kinds):
            key = placement.key
            if not placement.numel:
                continue
            if key not in wants.checkpoint.layout:
                wants.absent.append(key.name)
                continue
            into = wants.of_buffer(buffer, live)
            if key.kind == "fp32":
                into.existing(placement, key, buffer.held_numel)
            else:
                into.fresh(placement, key, buffer.held_numel)
    if wants.absent and wants.padded:
        what = "is not in the checkpoint, and this run pads the vocabulary in the same flat buffer"
        fault = UnsupportedLayout.fault(wants.absent[0], what, mend="load with load_module_strict=True")
        wants.faults.append(fault)


def _whole_kinds(live: Optimizer, buffer: LiveBuffer) -> frozenset[str]:
    """The states that this rank keeps whole for each parameter in its partition (`FlatBuffer.momentum_offsets`)."""
    return frozenset({MOMENTUM} if live.kind == "zero" and live.groups[buffer.group].get("use_muon") else ())


def _want_wholes(wants: Wants, live: Optimizer, buffer: LiveBuffer, kinds: Mapping[str, ElementType]) -> None:
    """Want states of which this rank keeps those of whole parameters, whatever part of them it has."""
    numel = buffer.momentum_numel(live.rank)
    wants.wholes |= kinds.keys()
    for name, places in buffer.momentum_offsets():
        shape, at = buffer.shapes[name], dict(places).get(live.rank)
        if at is None or not prod(shape):
            continue
        for kind, dtype in kinds.items():
            key = TensorKey(name, kind)
            if key not in wants.checkpoint.layout:
                wants.absent.append(name)
                continue
            cut = Cut(chunk=prod(shape), origin=at, first=live.rank)
            placement = Placement(key, shape, dtype, RUN, f"{kind}/{buffer.number}", cut, Box.whole(shape))
            wants.fresh(placement, key, numel)


def state_kinds(checkpoint: AnyCheckpoint, buffer: LiveBuffer) -> dict[str, ElementType]:
    """The states that follow the buffer's parameters in the checkpoint, with their types."""
    kinds: dict[str, ElementType] = {}
    for name, shape in buffer.shapes.items():
        if prod(shape):
            for kind in checkpoint.layout.kinds(name):
                if kind not in ("weight", "fp32"):
                    kinds[kind] = checkpoint.layout[TensorKey(name=name, kind=kind)].dtype
    return kinds


TORCH_ENTRIES = frozenset({"state", "param_groups"})
_LIONS, _UNUSED = frozenset({"FusedLion", "DeepSpeedCPULion"}), "exp_avg_sq"
"""In CPU memory DeepSpeed's Lion keeps a state that no step uses (`step`, ops/lion/cpu_lion.py, 0.19.8)."""


def state_faults(live: Optimizer, checkpoint: AnyCheckpoint) -> Iterator[Fault]:
    """States that this run's optimizer has not, or has and the checkpoint has not; and those of universal ones."""
    yield from _twin_faults(*live.unsaved_states)
    passed_over = {name for name, _ in checkpoint.unreshardable} | ({_UNUSED} if live.name in _LIONS else set())
    for number, buffer in enumerate(live.buffers):
        own, saved = buffer.states, frozenset(state_kinds(checkpoint, buffer))
        known = buffer.usual if checkpoint.universal is None else None
        if own is not None and known is not None and checkpoint.facts is not None:
            own |= {name for name, follows in known.items() if not follows}
            saved |= {*checkpoint.facts.scalars.get(next(iter(buffer.shapes), ""), ())} - {"step"}
        own, saved = own and own - passed_over, saved - passed_over
        muon = MOMENTUM in (own or ()) and live.groups[buffer.group].get("use_muon")
        if not saved and (muon or _before_first_step(checkpoint)):
            continue
        if own is not None and any(map(prod, buffer.shapes.values())) and own != saved:
            mend = "build the optimizer that was saved, or pass --no-load-optim, or load_optimizer_states=False"
            if not saved and checkpoint.stage == 0 and any(state_kinds(checkpoint, one) for one in live.buffers):
                mend = f"{AS_SAVED}, or {mend}"  # where a parameter that was not trained yet has no states
            yield ModelMismatch.fault(
                f"flat buffer {number} ({next(iter(buffer.shapes))}, ...)",
                "was trained by an optimizer of another kind: its states are others",
                f"{', '.join(sorted(own)) or 'none'}, as {live.name} has them",
                ", ".join(sorted(saved)) or "none",
                mend=mend,
            )
    yield from _universal_faults(live, checkpoint)
    yield from _muon_faults(live, checkpoint)


def _twin_faults(apart: int, count: int) -> Iterator[Fault]:
    """States that an offload with a `ratio` keeps on the device, which DeepSpeed neither saves nor loads.

    (`backup_optimizer`; `_rigid_state_dict` asks the other one alone; runtime/zero/stage3.py, 0.19.8).
    """
    if apart:
        what = (
            "keeps moments of sub-groups on the device, which DeepSpeed neither saves nor loads: they would begin anew"
        )
        mend = 'set "ratio": 1.0, or pass --no-load-optim, or load_optimizer_states=False'
        where, found = "zero_optimization.offload_optimizer.ratio", f"{apart} of {count} sub-groups there"
        yield UnsupportedLayout.fault(where, what, "1.0", found, mend=mend)


def _before_first_step(checkpoint: AnyCheckpoint) -> bool:
    """Whether it was saved when torch's optimizers, and DeepSpeed's, had made no states yet."""
    if checkpoint.universal is not None or isinstance(checkpoint, ForeignCheckpoint):
        return False
    entries = checkpoint.model.entries
    return isinstance(entries.get("global_steps"), int) and entries["global_steps"] == entries.get("skipped_steps", 0)


def format_faults(live: Optimizer) -> Iterator[Fault]:
    """An optimizer that has a state dict of its own form can be given no other one's states, however they are cut."""
    if live.entries and live.entries != TORCH_ENTRIES:
        what = "has a state dict of a form of its own, which ds_reshard does not make"
        mend = f"{AS_SAVED}, or pass --no-load-optim, or load_optimizer_states=False"
        expected, found = ", ".join(sorted(TORCH_ENTRIES)), ", ".join(sorted(map(str, live.entries)))
        yield UnsupportedLayout.fault(f"optimizer {live.name} of this run", what, expected, found, mend=mend)


def group_faults(live: Optimizer, groups: Mapping[int, Mapping[str, object]]) -> Iterator[Fault]:
    """Yield a fault for each saved hyper-parameter that changes a step and that this run's optimizer lacks."""
    decoupled = live.decoupled
    for number, saved in groups.items():
        differ = [name for name, rare in (("maximize", True), ("bias_correction", False)) if saved.get(name) is rare]
        differ = [name for name in differ if name not in live.group_keys]
        if saved.get("weight_decay") and decoupled is not None:
            differ += ["decoupled_weight_decay"] * (saved.get("decoupled_weight_decay", bool(decoupled)) != decoupled)
        for name in differ:
            what = f"{live.name} does not step by {name} as the saved optimizer did"
            mend = "build the optimizer that was saved, or pass --no-load-optim, or load_optimizer_states=False"
            yield ModelMismatch.fault(f"param group {number}", what, found=f"{name} {saved[name]}", mend=mend)


def _muon_faults(live: Optimizer, checkpoint: AnyCheckpoint) -> Iterator[Fault]:
    """What Muon would take over of parameters that it did not train, or whose momentum no file says the cut of."""
    groups = checkpoint.facts.groups if checkpoint.facts is not None else ()
    known = [(one.members, one.hyperparameters) for one in groups if one.hyperparameters is not None]
    trained = {name: bool(values.get("use_muon")) for members, values in known for name in members}
    muon = [bool(group.get("use_muon")) for group in live.groups]
    for number, buffer in enumerate(live.buffers):
        own = muon[buffer.group]
        other = next((name for name in buffer.shapes if trained.get(name, own) != own), None)
        if other is not None:
            said = ["Muon" if of else "another optimizer" for of in (own, not own)]
            what, mend = "was trained by another optimizer", "give its parameter the use_muon that was saved"
            yield ParamGroupMismatch.fault(f"flat buffer {number}: {other}", what, *said, mend=mend)
    elastic = checkpoint.optim is not None and checkpoint.optim.elastic
    if any(muon) and (checkpoint.universal is not None or elastic or checkpoint.has_grid_files):
        found = "universal" if checkpoint.universal is not None else "elastic" if elastic else str(checkpoint.grid)
        what, mend = "is none that Muon takes its momentum from", "pass --no-load-optim, or load_optimizer_states=False"
        yield UnsupportedLayout.fault(checkpoint.listing.folder, what, "plain files of ZeRO stages", found, mend=mend)


def _universal_faults(live: Optimizer, checkpoint: AnyCheckpoint) -> Iterator[Fault]:
    """States that are missing from a universal checkpoint, or may be: ds_to_universal drops them without a word.

    Where its files do not tell what the saved optimizer kept, this run's optimizer must be one that is known to keep
    no more than is there.
    """
    universal = checkpoint.universal
    if universal is None:
        return
    yield from universal.missing_states
    if universal.states is not None:
        return
    path, known = universal.path, live.states if live.buffers else None
    if known is None or not known.keys() <= {"exp_avg", "exp_avg_sq"}:
        what = f"does not say which states the saved optimizer kept, and {live.name} may keep others"
        yield _lost(path, what, "exp_avg, exp_avg_sq and step, which are all that ds_to_universal takes along")
        return
    if any(group.get("amsgrad") for group in universal.groups):
        yield _lost(path, "belongs to an optimizer with amsgrad", "max_exp_avg_sq beside exp_avg_sq")
    facts = checkpoint.facts
    assert facts is not None
    counted = {name for group in facts.groups if "step" in (group.hyperparameters or {}) for name in group.members}
    lacking = [
        name
        for number in range(len(live.groups))
        for name in live.members(number)
        if name not in counted and name in facts.scalars and "step" not in facts.scalars[name]
    ]
    if lacking and not universal.missing_states:
        yield _lost(path, f"says no step of {', '.join(lacking[:8])}", "a step, or step.pt beside each parameter")


def _lost(path: str, what: str, expected: str) -> Fault:
    return UnsupportedLayout.fault(
        path,
        what,
        expected,
        "none",
        mend="load the ZeRO checkpoint that it was made from, or pass --no-load-optim, or load_optimizer_states=False",
    )
