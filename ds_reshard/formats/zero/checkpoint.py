"""A ZeRO checkpoint folder as a layout, an index and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.zero.facts import GroupFacts, OptimizerFacts
from ds_reshard.formats.zero.faults import damaged, fail
from ds_reshard.formats.zero.layout import (
    by_key,
    flat_group,
    flat_offsets,
    partition_numel,
    sliced,
    sub_group,
    sub_group_numel,
    whole,
)
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Extent, Record
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import TensorRecord
from ds_reshard.planning.match import extents_overlap

OPTIM, MODEL = "optim", "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint:
    """What all ranks know of a checkpoint before any of them opens its own shards.

    Made by one rank from the listing, one model file and one optimizer file; small and picklable.
    `optim` is None when the optimizer was not asked for, or for a stage-0 checkpoint. With
    `masters_in_module` (fp32 training at stage 0) the weights are the masters: both keys name the same
    bytes, and a reader wants them once.
    """

    listing: Listing
    model: ModelStates
    optim: OptimStates | None
    layout: Layout
    facts: OptimizerFacts | None
    masters_in_module: bool = False

    @property
    def dp(self) -> int:
        return self.model.dp

    @property
    def stage(self) -> int:
        """The ZeRO stage of the saving run."""
        if self.listing.partitioned_model:
            return 3
        if self.model.param_shapes is None:
            return 0
        return self.optim.stage if self.optim else 1

    @property
    def kind(self) -> str:
        """How the optimizer was wrapped: "none" (stage 0), "zero", "bf16" or "zero3"."""
        if self.optim is not None:
            return self.optim.kind
        return {0: "none", 3: "zero3"}.get(self.stage, "zero")


def open_checkpoint(listing: Listing, *, optimizer: bool) -> ZeroCheckpoint:
    """Read what all shards share. `optimizer=False` leaves the optimizer files unopened below stage 3.

    Raises every structural fault that the listing, the first model file and the first optimizer file
    show: missing shards, wrong sizes, unknown layouts.
    """
    subject = f"checkpoint {listing.folder}"
    raise_faults(listing.faults, subject=subject)
    if 0 not in listing.model:
        raise_faults([Fault(error="CheckpointNotFound", where=listing.folder, what="holds no DeepSpeed model file",
                            expected="mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
                            found=", ".join(sorted(listing.nbytes)[:6]) or "no files",
                            mend="give the folder that save_checkpoint was given, and its tag")],
                     subject=subject)  # fmt: skip
    name = listing.model[0]
    model = read_model_states(listing.path(name), name.removesuffix(".pt"))
    faults = list(_missing(listing, model, optimizer=optimizer or listing.partitioned_model))
    raise_faults(faults, subject=subject)
    optim = None
    if model.param_shapes is not None and (optimizer or listing.partitioned_model):
        name = listing.optim[0]
        optim = read_optim_states(listing.path(name), name.removesuffix(".pt"))
    placements = [*_weights(model, listing)]
    facts = None
    if optim is not None:
        placements += _optimizer(model, optim)
        facts = _facts(model, optim)
    shards = {OPTIM: model.dp, MODEL: model.dp if listing.partitioned_model else 1}
    try:
        layout = Layout(by_key(placements), shards)
    except ValueError as error:
        raise fail(listing.folder, f"declares an impossible layout: {error}", "disjoint tensors", "overlap") from error
    return ZeroCheckpoint(listing=listing, model=model, optim=optim, layout=layout, facts=facts)


def _missing(listing: Listing, model: ModelStates, *, optimizer: bool) -> Iterator[Fault]:
    """Files that the checkpoint must have and the folder does not, or has empty."""
    families = [(listing.model, "model_states", model.dp if listing.partitioned_model else 1)]
    if optimizer and model.param_shapes is not None:
        families.append((listing.optim, "optim_states", model.dp))
    for files, what, count in families:
        absent = [rank for rank in range(count) if rank not in files]
        if absent:
            yield Fault(error="CheckpointDamaged", where=listing.folder,
                        what=f"{what} files of data-parallel ranks {_ranges(absent)} are missing",
                        expected=f"{count} files (the saving run had dp={model.dp})",
                        found=f"{count - len(absent)}",
                        mend="restore the missing files, or load another tag")  # fmt: skip
        for rank in range(count):
            if rank in files and listing.nbytes[files[rank]] == 0:
                yield damaged(listing.path(files[rank]), "is empty", "a torch zip file", "0 bytes")


def _ranges(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def is_placeholder(tensor: TensorRecord, shape: tuple[int, ...]) -> bool:
    """Whether a module entry only stands for a partitioned parameter: stage 3 saves those as shape (0,)."""
    return tensor.numel == 0 and prod(shape) != 0


def _weights(model: ModelStates, listing: Listing) -> Iterator[Placement]:
    for name, tensor in model.module.items():
        shape = model.trainable.get(name) or model.frozen_shapes.get(name) or tensor.shape
        shape = model.trainable.get(model.shared.get(name, name), shape)
        if is_placeholder(tensor, shape) or not tensor.contiguous:
            continue
        yield whole(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")
    if listing.partitioned_model:
        for name, shape in model.frozen_shapes.items():
            fragment = model.frozen_fragments.get(name)
            if fragment is not None and prod(shape):
                yield sliced(name, "weight", shape, fragment.dtype, model.dp, family=MODEL, buffer=f"frozen/{name}")


def _kinds(partition: Partition) -> dict[str, ElementType]:
    return {"fp32": partition.fp32.dtype, **{kind: state.dtype for kind, state in partition.states.items()}}


def _optimizer(model: ModelStates, optim: OptimStates) -> Iterator[Placement]:
    groups = model.param_shapes or ()
    if len(groups) != len(optim.partitions):
        raise fail(optim.path, "flat buffers do not match the model file", f"{len(groups)}", f"{len(optim.partitions)}")
    for number, (shapes, partition) in enumerate(zip(groups, optim.partitions, strict=True)):
        kinds = _kinds(partition)
        if optim.kind == "zero3":
            yield from sub_group(shapes, model.dp, kinds, number=number, family=OPTIM)
        else:
            if partition.alignment is not None and len(partition.alignment) != len(shapes):
                raise fail(optim.path, "alignment gaps do not match the parameters", f"{len(shapes)}",
                           f"{len(partition.alignment)}")  # fmt: skip
            yield from flat_group(shapes, partition.alignment, model.dp, kinds, number=number, family=OPTIM)


def _facts(model: ModelStates, optim: OptimStates) -> OptimizerFacts:
    shapes = model.param_shapes or ()
    groups = tuple(
        GroupFacts(
            members=tuple(name for i in members for name in shapes[i]),
            hyperparameters=optim.groups[g] if optim.groups is not None else None,
        )
        for g, members in enumerate(optim.members)
    )
    scalars = {
        name: partition.scalars for group, partition in zip(shapes, optim.partitions, strict=True) for name in group
    }
    return OptimizerFacts(groups=groups, scalars=scalars)


@dataclass(slots=True, kw_only=True)
class ZeroShards:
    """Opens the shards of a checkpoint for an index, each checked against the layout when it is opened.

    `signatures` collects what each opened shard says of the run; the ranks compare theirs.
    """

    checkpoint: ZeroCheckpoint
    stage0: Mapping[str, Extent] = field(default_factory=dict)
    signatures: dict[str, dict[str, str]] = field(default_factory=dict)
    prints: dict[str, tuple[tuple[int, int | None], ...]] = field(default_factory=dict)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The buffers of one shard: `fp32/0`, `exp_avg/1`, `module/<name>`, `frozen/<name>`."""
        return self._model(shard) if family == MODEL else self._optim(shard)

    def _model(self, shard: int) -> Mapping[str, Extent]:
        checkpoint = self.checkpoint
        name = checkpoint.listing.model[shard]
        model = checkpoint.model
        if shard != 0:
            model = read_model_states(checkpoint.listing.path(name), name.removesuffix(".pt"))
        self.signatures[name] = model_signature(model)
        extents = {f"module/{key}": extent_of(tensor) for key, tensor in model.module.items() if tensor.contiguous}
        for key, shape in checkpoint.model.frozen_shapes.items() if checkpoint.listing.partitioned_model else ():
            fragment = model.frozen_fragments.get(key)
            expected = -(-prod(shape) // checkpoint.dp)
            if not prod(shape):
                continue
            if fragment is None or fragment.numel != expected or not fragment.contiguous:
                found = "nothing" if fragment is None else f"{fragment.numel}"
                raise fail(model.path, f"frozen parameter {key!r} has the wrong share", f"{expected} elements", found)
            extents[f"frozen/{key}"] = extent_of(fragment)
        return {**extents, **self.stage0}

    def _optim(self, shard: int) -> Mapping[str, Extent]:
        checkpoint, first = self.checkpoint, self.checkpoint.optim
        assert first is not None, "optimizer shards are wanted only where there are some"
        name = checkpoint.listing.optim[shard]
        optim = first if shard == 0 else read_optim_states(checkpoint.listing.path(name), name.removesuffix(".pt"))
        self.signatures[name] = optim.signature()
        faults: list[Fault] = []
        if optim.partition_count != checkpoint.dp:
            faults.append(damaged(optim.path, "was saved with another data-parallel size than the model file",
                                  f"{checkpoint.dp}", f"{optim.partition_count}"))  # fmt: skip
        if optim.kind != first.kind or len(optim.partitions) != len(first.partitions):
            faults.append(damaged(optim.path, "is of another optimizer layout than the first shard",
                                  f"{first.kind}, {len(first.partitions)} buffers",
                                  f"{optim.kind}, {len(optim.partitions)} buffers"))  # fmt: skip
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        extents: dict[str, Extent] = {}
        for number, partition in enumerate(optim.partitions):
            faults += self._sizes(optim, shard, number, partition)
            extents[f"fp32/{number}"] = extent_of(partition.fp32)
            extents |= {f"{kind}/{number}": extent_of(state) for kind, state in partition.states.items()}
        for one, other in extents_overlap(extents):
            faults.append(damaged(optim.path, f"buffers {one} and {other} share bytes", "disjoint buffers", "overlap"))
        raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
        self.prints[name] = tuple((e.record.nbytes, e.record.crc32) for e in extents.values() if e.numel)
        return extents

    def _sizes(self, optim: OptimStates, shard: int, number: int, partition: Partition) -> Iterator[Fault]:
        """Whether a partition has exactly the elements that the layout gives it."""
        checkpoint = self.checkpoint
        assert checkpoint.optim is not None
        shapes = (checkpoint.model.param_shapes or ())[number]
        kinds, expected_kinds = _kinds(partition), _kinds(checkpoint.optim.partitions[number])
        if kinds != expected_kinds:
            yield damaged(optim.path, f"partition {number} holds other states than the first shard",
                          ", ".join(sorted(expected_kinds)), ", ".join(sorted(kinds)))  # fmt: skip
        if optim.kind == "zero3":
            padded = used = sub_group_numel(shapes, checkpoint.dp)
        else:
            total = flat_offsets(shapes, partition.alignment)[1]
            padded = partition_numel(total, checkpoint.dp)
            used = min(padded, max(0, total - shard * padded))
        allowed = {"zero": {used}, "bf16": {padded}, "zero3": {padded}}[optim.kind]
        if partition.fp32.numel not in allowed:
            yield damaged(optim.path, f"fp32 partition {number} has the wrong size",
                          f"{min(allowed)} elements", f"{partition.fp32.numel}")  # fmt: skip
        for kind, state in partition.states.items():
            if state.numel not in (padded, used):
                yield damaged(optim.path, f"{kind} partition {number} has the wrong size",
                              f"{padded} elements", f"{state.numel}")  # fmt: skip


def model_signature(model: ModelStates) -> dict[str, str]:
    """What every model file of one checkpoint says alike."""
    keys = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
    return {key: str(model.entries[key]) for key in keys if key in model.entries} | {
        "DeepSpeed version": model.version,
        "param_shapes": str(model.param_shapes),
    }


def extent_of(tensor: TensorRecord) -> Extent:
    """A row-major tensor's bytes, and the zip record that they are part of."""
    storage = tensor.storage
    record = Record(
        path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32
    )  # fmt: skip
    return Extent(record=record, byte_offset=tensor.byte_offset, dtype=tensor.dtype, numel=tensor.numel)
