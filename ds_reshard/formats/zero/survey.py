"""Every file of a ZeRO or universal checkpoint opened, every fault collected: what a load refuses, seen all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

from ds_reshard.containers.plain import Scalars, read_scalars, single_elements
from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, damaged
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint, open_checkpoint
from ds_reshard.formats.zero.crosscheck import abridged, compare_prints, compare_signatures
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, read_optim_states
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.stage0_states import param_groups, states, torch_optimizer
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.formats.zero.universal_common import CommonState
from ds_reshard.formats.zero.universal_files import list_states, read_state, state_file
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout
from ds_reshard.model.records import TensorRecord

States = TypeVar("States", ModelStates, OptimStates)
_MEND = "restore the file, or load another tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The first model file and the first optimizer file that could be read, and all faults, sorted.

    `scalars` holds the learning rates and steps of those two that were kept as tensors; `universal` is what a
    universal checkpoint that can be opened whole has in place of optimizer files.
    """

    listing: Listing
    model: ModelStates | None
    optim: OptimStates | None
    scalars: Scalars
    faults: tuple[Fault, ...]
    universal: UniversalStates | None = None

    @property
    def dp(self) -> int | None:
        """The data-parallel size of the saving run."""
        if self.model is not None:
            return self.model.dp
        return self.optim.partition_count if self.optim is not None else None


def survey(listing: Listing) -> Survey:
    """Open every shard, metadata only. Never raises for what the files hold.

    A checkpoint that is whole is opened as a load opens it. One that is not is opened from the first files
    that can be read, so that the faults of the others are found too. Of layouts that are refused as a
    whole, only the first files are looked at.
    """
    look = _Look(listing=listing, faults=[*listing.faults, *_empty(listing)])
    if any(fault.error == "UnsupportedLayout" for fault in look.faults):
        model, optim = look.first(listing.model, read_model_states), look.first(listing.optim, read_optim_states)
        return look.done(model, optim)
    checkpoint = look.whole()
    if checkpoint is not None:
        model, optim = checkpoint.model, checkpoint.optim
        look.open_shards(checkpoint)
        if checkpoint.universal is not None:
            look.open_tensors(checkpoint, checkpoint.universal)
            return replace(look.done(model, optim), universal=checkpoint.universal, listing=checkpoint.listing)
    else:
        model, optim = look.first(listing.model, read_model_states), look.first(listing.optim, read_optim_states)
        look.salvage(model, optim)
    return look.done(model, optim)


def _empty(listing: Listing) -> list[Fault]:
    return [
        damaged(listing.path(name), "is empty", "a torch zip file", "0 bytes")
        for name in (*listing.model.values(), *listing.optim.values())
        if listing.nbytes[name] == 0
    ]


@dataclass(slots=True, kw_only=True)
class _Look:
    """A survey under way; `unreadable` names the files that are not tried again, `kept` are scalars read already."""

    listing: Listing
    faults: list[Fault]
    unreadable: set[str] = field(default_factory=set)
    kept: dict[TensorRecord, ScalarTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unreadable.update(name for name, nbytes in self.listing.nbytes.items() if nbytes == 0)

    def whole(self) -> ZeroCheckpoint | None:
        """The checkpoint as a load opens it, None when it cannot be."""
        if self.listing.model.get(0, "") in {"", *self.unreadable}:
            return None
        try:
            return open_checkpoint(replace(self.listing, faults=()), optimizer=True)
        except ReshardError as error:
            self.note(error, self.listing.folder)
            return None

    def first(self, files: Mapping[int, str], read: Callable[[str, str], States]) -> States | None:
        """What the file of the lowest rank that can be read says."""
        for rank in sorted(files):
            states = self.read(files[rank], read)
            if states is not None:
                return states
        return None

    def read(self, name: str, read: Callable[[str, str], States]) -> States | None:
        if name in self.unreadable:
            return None
        try:
            return read(self.listing.path(name), name.removesuffix(".pt"))
        except ReshardError as error:
            self.unreadable.add(name)
            self.note(error, self.listing.path(name))
            return None

    def salvage(self, model: ModelStates | None, optim: OptimStates | None) -> None:
        """Check the files of a checkpoint that cannot be opened whole against those that can."""
        listing = self.listing
        dp = model.dp if model is not None else optim.partition_count if optim is not None else None
        if dp is not None:
            self.absent(listing.model, "model_states", dp if listing.partitioned_model else 1)
            if not listing.universal and (model is None or model.param_shapes is not None):
                self.absent(listing.optim, "optim_states", dp)
        if listing.universal and model is not None:
            self.read_tensors(model)
        placed = model is not None and self.matching(model, optim)
        if model is not None:
            # The shards are checked against the model file and the first of them; no tensor is placed.
            checkpoint = ZeroCheckpoint(
                listing=listing, model=model, optim=optim if placed else None, layout=Layout({}, {}), facts=None
            )
            self.open_shards(checkpoint)
        if optim is not None and not placed:
            names = [name for _, name in sorted(listing.optim.items())]
            read = {name: self.read(name, read_optim_states) for name in names}
            said = {name: abridged(states.signature()) for name, states in read.items() if states is not None}
            self.faults += compare_signatures(said, listing.folder)

    def absent(self, files: Mapping[int, str], what: str, count: int) -> None:
        """Note shards that are not there, where `open_checkpoint` had not come to look for them."""
        missing = [str(rank) for rank in range(count) if rank not in files]
        counted = any("are missing" in fault.what and what in fault.what for fault in self.faults)
        if missing and not counted:
            shown = ", ".join(missing[:16]) + (f", ... ({len(missing)} in all)" if len(missing) > 16 else "")
            self.faults.append(
                CheckpointDamaged.fault(
                    self.listing.folder,
                    f"{what} files of data-parallel ranks {shown} are missing",
                    f"{count} files",
                    f"{count - len(missing)}",
                    mend="restore the missing files, or load another tag",
                )
            )

    def matching(self, model: ModelStates, optim: OptimStates | None) -> bool:
        """Whether the optimizer's flat buffers are those of the model file, so that sizes can be checked."""
        if optim is None or model.param_shapes is None:
            return False
        shapes, partitions = model.param_shapes, optim.partitions
        if len(shapes) != len(partitions):
            self.faults.append(
                damaged(optim.path, "flat buffers do not match the model file", f"{len(shapes)}", f"{len(partitions)}")
            )
            return False
        for group, partition in zip(shapes, partitions, strict=True):
            if partition.alignment is not None and len(partition.alignment) != len(group):
                self.faults.append(
                    damaged(
                        optim.path,
                        "alignment gaps do not match the parameters",
                        f"{len(group)}",
                        f"{len(partition.alignment)}",
                    )
                )
                return False
        return True

    def open_shards(self, checkpoint: ZeroCheckpoint) -> None:
        """Open every shard of the checkpoint, and compare what they say and hold."""
        shards = ZeroShards(checkpoint=checkpoint)
        optim = self.listing.optim if checkpoint.optim is not None else {}
        for family, files in ((MODEL, self.listing.model), (OPTIM, optim)):
            for rank in sorted(files):
                if files[rank] in self.unreadable or rank >= checkpoint.dp:
                    continue
                try:
                    shards.buffers(family, rank)
                except ReshardError as error:
                    self.note(error, self.listing.path(files[rank]))
        self.faults += compare_signatures(shards.signatures, self.listing.folder)
        self.faults += compare_prints(shards.prints, self.listing.folder)

    def open_tensors(self, checkpoint: ZeroCheckpoint, universal: UniversalStates) -> None:
        """Open every tensor of a universal checkpoint, and add the states that are known to be missing."""
        index = Index(checkpoint.layout, ZeroShards(checkpoint=checkpoint))
        for placement in universal.placements:
            if placement.numel:
                index.open(placement.family, 0)
        self.faults += [*index.faults, *universal.incomplete]
        found = self.scalars(universal.common, (v for group in universal.common.groups for v in group.values()))
        self.kept = {**self.kept, **found}

    def read_tensors(self, model: ModelStates) -> None:
        """Read every tensor's file of a universal checkpoint that cannot be opened whole."""
        files, faults = list_states(self.listing.folder, [n for n, shape in model.trainable.items() if prod(shape)])
        self.faults += faults
        for path, kind in ((state_file(name, kind), kind) for name, kinds in files.items() for kind in kinds):
            try:
                read_state(self.listing.path(path), kind)
            except ReshardError as error:
                self.note(error, self.listing.path(path))

    def note(self, error: ReshardError, where: str) -> None:
        """Keep an error as faults, each with the file it is about and what mends it."""
        if not error.faults:
            what = str(error).removeprefix(f"{where}: ")
            at, colon, rest = what.partition(".pt: ")
            if colon and at.startswith(self.listing.folder):
                where, what = f"{at}.pt", rest
            self.faults.append(Fault(error=type(error).__name__, where=where, what=what, mend=_MEND))
        self.faults += [fault if fault.mend else replace(fault, mend=_MEND) for fault in error.faults]

    def done(self, model: ModelStates | None, optim: OptimStates | None) -> Survey:
        scalars = {**self.kept, **self.scalars(model, _stage0_values(model)), **self.scalars(optim, _values(optim))}
        faults = sorted(set(self.faults), key=lambda fault: (fault.where, fault.what, fault.found))
        return Survey(listing=self.listing, model=model, optim=optim, scalars=scalars, faults=tuple(faults))

    def scalars(self, file: ModelStates | OptimStates | CommonState | None, values: Iterable[object]) -> Scalars:
        """The tensors of one element among `values`, which lie in `file`."""
        if file is None:
            return {}
        try:
            return read_scalars(file.path, single_elements(values))
        except ReshardError as error:
            self.note(error, file.path)
            return {}


def _values(optim: OptimStates | None) -> Iterator[object]:
    """What may be a tensor of one element in an optimizer file: hyper-parameters."""
    for group in (optim.groups or ()) if optim is not None else ():
        yield from group.values()


def _stage0_values(model: ModelStates | None) -> Iterator[object]:
    saved = torch_optimizer(model)
    for group in param_groups(saved):
        yield from group.values()
    for state in states(saved):
        yield state.get("step")
