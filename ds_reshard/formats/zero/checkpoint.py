"""A ZeRO checkpoint folder, or a universal one made of it, as a layout, an index and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, Fault, damaged, fail, raise_faults
from ds_reshard.formats.zero.layout import by_key, flat_group, sliced, sub_group, whole
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states
from ds_reshard.formats.zero.universal import UniversalStates, read_universal
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType, TensorRecord

OPTIM, MODEL = "optim", "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCheckpoint:
    """What all ranks know of a checkpoint before any of them opens its own shards.

    Made by one rank from the listing, one model file and one optimizer file; small and picklable.
    `optim` is None when the optimizer was not asked for, or for a stage-0 checkpoint, or where `universal` has what
    it would. With `masters_in_module` (fp32 training at stage 0) the weights are the masters: both keys name the same
    bytes, and a reader wants them once. `foreign` says that it was made of a checkpoint of another format.
    """

    listing: Listing
    model: ModelStates
    optim: OptimStates | None
    layout: Layout
    facts: OptimizerFacts | None
    masters_in_module: bool = False
    universal: UniversalStates | None = None
    foreign: bool = False

    @property
    def optimizer_entries(self) -> Mapping[str, object]:
        """What the optimizer's files say beside their tensors: loss scaler, clipping; empty where none was read."""
        if self.universal is not None:
            return self.universal.common.entries
        return self.optim.entries if self.optim is not None else {}

    @property
    def optimizer_path(self) -> str:
        """The file of the param groups: at stage 0 the model file."""
        if self.universal is not None:
            return self.universal.common.path
        return self.optim.path if self.optim is not None else self.model.path

    @property
    def groups(self) -> tuple[Mapping[str, object], ...]:
        """The saved param groups, without their members; empty where they were not read or saved."""
        if self.universal is not None:
            return self.universal.common.groups
        return (self.optim.groups or ()) if self.optim is not None else ()

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
        if self.universal is not None:
            return self.universal.common.stage
        return self.optim.stage if self.optim else 1

    @property
    def kind(self) -> str:
        """How the optimizer was wrapped: "none" (stage 0), "zero", "bf16" or "zero3"; "universal" where it is not."""
        if self.listing.universal:
            return "universal"
        if self.optim is not None:
            return self.optim.kind
        return {0: "none", 3: "zero3"}.get(self.stage, "zero")


def open_checkpoint(listing: Listing, *, optimizer: bool) -> ZeroCheckpoint:
    """Read what all shards share. `optimizer=False` leaves the optimizer files unopened below stage 3.

    A universal folder is read likewise: its files below `zero` stand for the optimizer files.

    Raises every structural fault that the listing, the first model file and the first optimizer file
    show: missing shards, wrong sizes, unknown layouts.
    """
    subject = f"checkpoint {listing.folder}"
    raise_faults(listing.faults, subject=subject)
    if 0 not in listing.model:
        raise_faults(
            [
                CheckpointNotFound.fault(
                    listing.folder,
                    "holds no DeepSpeed model file",
                    "mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
                    ", ".join(sorted(listing.nbytes)[:6]) or "no files",
                    mend="give the folder that save_checkpoint was given, and its tag",
                )
            ],
            subject=subject,
        )
    name = listing.model[0]
    model = read_model_states(listing.path(name), name.removesuffix(".pt"))
    wanted = optimizer or listing.partitioned_model
    sharded = wanted and not listing.universal and model.param_shapes is not None
    faults = list(missing(listing, model.dp, optimizer=sharded))
    raise_faults(faults, subject=subject)
    optim = universal = facts = None
    placements = [*_weights(model, listing)]
    shards = {OPTIM: model.dp, MODEL: model.dp if listing.partitioned_model else 1}
    if wanted and listing.universal:
        universal = read_universal(listing, model)
        listing = replace(listing, nbytes={**listing.nbytes, **universal.nbytes})
        placements += universal.placements
        shards |= {placement.family: 1 for placement in universal.placements}
        facts = universal.facts
    elif wanted and model.param_shapes is not None:
        name = listing.optim[0]
        optim = read_optim_states(listing.path(name), name.removesuffix(".pt"))
        placements += _optimizer(model, optim)
        facts = _facts(model, optim)
    try:
        layout = Layout(by_key(placements), shards)
    except ValueError as error:
        raise fail(listing.folder, f"declares an impossible layout: {error}", "disjoint tensors", "overlap") from error
    return ZeroCheckpoint(listing=listing, model=model, optim=optim, layout=layout, facts=facts, universal=universal)


def saved_sizes(listing: Listing) -> tuple[int, int] | None:
    """The data- and model-parallel sizes that the first model file says, None where it says none.

    Reads the pickle alone and judges nothing: for checkpoints that this format refuses.
    """
    name = listing.model.get(0)
    if name is None:
        return None
    with open_archive(listing.path(name)) as archive:
        top = archive.load()
    sizes = [top.get(key) for key in ("dp_world_size", "mp_world_size")] if isinstance(top, dict) else []
    numbers = [size for size in sizes if isinstance(size, int)]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def missing(listing: Listing, dp: int, *, optimizer: bool) -> Iterator[Fault]:
    """Files that a checkpoint of so many ranks must have and the folder does not, or has empty."""
    families = [(listing.model, "model_states", dp if listing.partitioned_model else 1)]
    if optimizer:
        families.append((listing.optim, "optim_states", dp))
    for files, what, count in families:
        absent = [rank for rank in range(count) if rank not in files]
        if absent:
            yield CheckpointDamaged.fault(
                listing.folder,
                f"{what} files of data-parallel ranks {_ranges(absent)} are missing",
                f"{count} files (the saving run had dp={dp})",
                f"{count - len(absent)}",
                mend="restore the missing files, or load another tag"
                if len(absent) < count
                else "load another tag, or pass load_optimizer_states=False (DeepSpeed 0.17 and 0.18.4 save no "
                "optimizer files of a bf16 run that it wraps as FP16_UnfusedOptimizer)",
            )
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
    trainable = model.trainable
    for name, tensor in model.module.items():
        shape = trainable.get(name) or model.frozen_shapes.get(name) or tensor.shape
        shape = trainable.get(model.shared.get(name, name), shape)
        if is_placeholder(tensor, shape) or not tensor.contiguous:
            continue
        yield whole(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")
    if listing.partitioned_model:
        for name, shape in model.frozen_shapes.items():
            fragment = model.frozen_fragments.get(name)
            if fragment is not None and prod(shape) != 0:
                yield sliced(name, "weight", shape, fragment.dtype, model.dp, family=MODEL, buffer=f"frozen/{name}")


def kinds_of(partition: Partition) -> dict[str, ElementType]:
    return {"fp32": partition.fp32.dtype, **{kind: state.dtype for kind, state in partition.states.items()}}


def unmatched(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """Where the optimizer's flat buffers are not those of the model file; the first that is not."""
    groups, what = model.param_shapes or (), "flat buffers do not match the model file"
    if len(groups) != len(optim.partitions):
        return [damaged(optim.path, what, f"{len(groups)}", f"{len(optim.partitions)}")]
    what = "alignment gaps do not match the parameters"
    for shapes, partition in zip(groups, optim.partitions, strict=True):
        if partition.alignment is not None and len(partition.alignment) != len(shapes):
            return [damaged(optim.path, what, f"{len(shapes)}", f"{len(partition.alignment)}")]
    return []


def _optimizer(model: ModelStates, optim: OptimStates) -> Iterator[Placement]:
    raise_faults(unmatched(model, optim), subject="reading a checkpoint")
    for number, (shapes, partition) in enumerate(zip(model.param_shapes or (), optim.partitions, strict=True)):
        kinds = kinds_of(partition)
        if optim.kind == "zero3":
            yield from sub_group(shapes, model.dp, kinds, number=number, family=OPTIM)
        else:
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
