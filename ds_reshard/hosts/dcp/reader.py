"""A `torch.distributed.checkpoint.StorageReader` over a checkpoint of any format, straight from its files."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as TorchPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digests, note_names
from ds_reshard.errors import (
    Fault,
    ModelMismatch,
    ReshardError,
    UnsafePickle,
    UnsupportedLayout,
    as_faults,
    faults_of,
    raise_faults,
    wrong_value,
)
from ds_reshard.execution.buffers import TensorTarget, element_type, tensor_from_bytes, torch_dtype
from ds_reshard.execution.checksums import PartialSum, combine, partial_sums, read_again, settle
from ds_reshard.execution.cuda import choose
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.formats.dcp.entries import Matched, Unasked, left_out, match_keys, optimizers
from ds_reshard.hosts.dcp.entries import Entry, Groups, GroupValue, Own, Single, Stored, entries, is_state
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import WEIGHT, Content, TensorSource
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.model.region import Box, box_region
from ds_reshard.operations.matching import match_tensors
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.progress import showing
from ds_reshard.operations.proof import left_out_faults, prove, unproved
from ds_reshard.operations.ranks import agree_files, gather, gather_faults, rank
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.operations.wrapper_names import convert_line
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Plan, copies_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("ds_reshard")
_SUBJECT = "torch.distributed.checkpoint"


class LoadPlanner(DefaultLoadPlanner):
    """torch's `DefaultLoadPlanner`, of any storage, that raises ModelMismatch with all missing keys and other shapes.

    With `allow_partial_load` missing keys are left as they are, and other shapes are still an error; so is a DTensor of
    which a rank holds another part than its mesh says. A tied weight, which safetensors has under one name, is not
    missing under the others.
    """

    def create_local_plan(self) -> LoadPlan:
        self._leave_out_second_names()
        raise_faults(self._faults(), subject=_SUBJECT)
        return super().create_local_plan()

    def _leave_out_second_names(self) -> None:
        """Ask for no key that is not there and whose memory is that of one that is: loads are in place."""
        assert self.metadata is not None, "torch gives the metadata before it asks for a plan"
        saved = self.metadata.state_dict_metadata
        filled = {_memory(value) for key, value in self.state_dict.items() if key in saved} - {None}
        self.state_dict = {
            key: value for key, value in self.state_dict.items() if key in saved or _memory(value) not in filled
        }

    def _faults(self) -> Iterator[Fault]:
        assert self.metadata is not None, "torch gives the metadata before it asks for a plan"
        saved, mend = self.metadata.state_dict_metadata, "build the model that was saved"
        wanted = {key: getattr(value, "size", None) for key, value in self.state_dict.items()}
        if self.allow_partial_load:
            wanted = {key: size for key, size in wanted.items() if key in saved}
        else:
            mend += ", or leave it out of the state dict, or LoadPlanner(allow_partial_load=True) to keep what is there"
        run = {key: size() if callable(size) else None for key, size in wanted.items()}
        yield from match_tensors(
            run, {key: getattr(saved[key], "size", None) for key in run if key in saved}, mend=mend
        )
        for key, value in self.state_dict.items():
            yield from off_mesh(key, value)


def _memory(value: object) -> tuple[object, ...] | None:
    """Where a tensor lies, or this rank's part of it, also one without elements; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride()


class WeightsAlone(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """What there is by its key, of a checkpoint whose optimizer cannot be opened: who asks for that is told why."""

    def __init__(
        self, told: Mapping[str, TensorStorageMetadata | BytesStorageMetadata], optimizer: str, faults: Sequence[Fault]
    ) -> None:
        super().__init__(told)
        self._states = (f"{optimizer}.",) if optimizer else ("state.", "param_groups.")
        self._faults = faults

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        raise_faults(self._faults if not there and str(key).startswith(self._states) else (), subject=_SUBJECT)
        return there


def off_mesh(key: str, value: object) -> Iterator[Fault]:
    """A DTensor's part of another shape than torch cuts for this rank of the mesh, where it has elements."""
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return
    expected = tuple(compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)[0])
    found = tuple(value.to_local().shape)
    if found != expected and prod(found) + prod(expected):
        what = "is held in another shape than its mesh says"
        mend = "make it with fully_shard or distribute_tensor on the mesh of this run"
        yield ModelMismatch.fault(key, what, str(list(expected)), str(list(found)), mend=mend)


class Filling:
    """What one plan asks for: tensors of files, collected and then read; small tensors and values that are here.

    `trained` are the names of the parameters whose masters or states are among these tensors.
    """

    def __init__(self, index: Index, *, cast: bool) -> None:
        self.filled: list[tuple[ReadItem, torch.Tensor]] = []
        self.singles: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        self.values: list[tuple[ReadItem, object]] = []
        self.trained: set[str] = set()
        self._index = index
        self._cast = cast
        self._copies: list[Copy] = []
        self._memory: dict[tuple[object, ...], tuple[str, list[Copy]]] = {}
        self._targets: dict[str, TensorTarget] = {}
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outcome = Outcome()

    def add(self, item: ReadItem, entry: Stored, tensor: torch.Tensor) -> None:
        """Have `tensor` filled with the box of the entry that the item names; ModelMismatch for another type.

        And where another name of the same memory, as of tied weights, would fill it with other bytes.
        """
        dtype = element_type(tensor.dtype)
        if dtype not in entry.sources and not self._cast:
            raise ModelMismatch("", [_other_type(entry, dtype.label)])
        tensor = tensor.detach()
        self.filled.append((item, tensor))
        key = entry.source(dtype)
        if key.kind != WEIGHT:
            self.trained.add(key.name)
        box = Box(offset=tuple(item.storage_offsets), size=tuple(item.lengths))
        buffer = str(len(self._targets))
        region = box_region(entry.shape, box)
        copies = list(copies_of(self._index, key, region, buffer=buffer, element_offset=0, dtype=dtype))
        if self._filled_already(item.storage_index.fqn, tensor, copies):
            return
        target = tensor
        if not tensor.is_contiguous():
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._scattered.append((tensor, target))
        self._targets[buffer] = TensorTarget(target)
        self._copies += copies

    def _filled_already(self, name: str, tensor: torch.Tensor, copies: list[Copy]) -> bool:
        """Whether another name of the same memory fills it with the same bytes; ModelMismatch where with others.

        torch fills it with one after the other. Of files without checksums both are read, and so they are here.
        """
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first, theirs = self._memory.setdefault(where, (name, copies)) if tensor.numel() else (name, copies)
        if first == name:
            return False
        one, other = ([copy.record for copy in some] for some in (theirs, copies))
        if one != other and any(record.crc32 is None for record in (*one, *other)):
            return False
        if _bytes_of(theirs) != _bytes_of(copies):
            mend = "build the model without the tie, or leave one of the two names out of the state dict"
            what = f"shares memory with {first} in this run, but the checkpoint has different values for the two names"
            raise ModelMismatch("", [ModelMismatch.fault(name, what, mend=mend)])
        return True

    def execute(self, *, threads: int, memory_nbytes: int) -> int:
        """Read every byte once; how many they were."""
        executor = choose("auto", self._targets, threads=threads, memory_nbytes=memory_nbytes, checksum=True)
        with showing("loading by ds_reshard.dcp.Reader") as progress:
            self._outcome = progress.execute(executor, Plan(copies=coalesce(self._copies)), self._targets)
        for tensor, target in self._scattered:
            tensor.copy_(target)
        return self._outcome.bytes_read

    def checked(self) -> tuple[list[Fault], list[PartialSum]]:
        """The faults of reading, and of records that were read whole; the sums of those that were read in part."""
        pending, faults = settle(partial_sums(self._outcome))
        return [*self._outcome.faults, *faults], pending


def _bytes_of(copies: Sequence[Copy]) -> list[tuple[object, ...]]:
    """A key to compare the bytes of tensors: for each run of them the checksum, size and place within its record."""
    return [
        (
            copy.record.crc32,
            copy.record.nbytes,
            copy.byte_offset - copy.record.byte_offset,
            copy.numel,
            copy.dtype,
            copy.element_offset,
            copy.rows,
            copy.spread,
        )
        for copy in copies
    ]


def single(entry: Single, dtype: torch.dtype, *, cast: bool) -> torch.Tensor:
    """The value in that type; ModelMismatch where the type cannot hold it, unless it may be `cast`."""
    value = entry.value
    saved = tensor_from_bytes(value.data, value.dtype, ()) if isinstance(value, ScalarTensor) else torch.tensor(value)
    found = saved.to(dtype)
    if not cast and not torch.allclose(found.to(saved.dtype), saved, rtol=0, atol=0, equal_nan=True):
        raise ModelMismatch("", [_other_type(entry, str(dtype))])
    return found


def _other_type(entry: Stored | Single, dtype: str) -> Fault:
    saved = ", ".join(one.label for one in entry.sources) if isinstance(entry, Stored) else "its value exactly"
    return ModelMismatch.fault(
        ".".join(map(str, entry.path)),
        "the target is of a type that was not saved",
        saved,
        dtype.removeprefix("torch."),
        mend="build the model in a type that was saved, or ds_reshard.dcp.Reader(path, cast=True)",
    )


class Reader(StorageReader):
    """Serves a checkpoint of any format to `torch.distributed.checkpoint.load`; writes nothing.

    `path`, which may be a URL, and `tag` are as for `ds-reshard inspect`: what DeepSpeed's `load_checkpoint` takes, the
    folder of the tag itself, or one of torch.distributed.checkpoint, accelerate, EasyR1 or verl. `model` and
    `optimizer` are the names at the top of the state dict that is loaded, "" for none. Weights come in the type of the
    target: the fp32 masters, or the 16-bit weights. Any other type is refused, unless `cast` allows torch's rounding.
    With `names`, a map as for `convert`, the keys are those of the map's other side; a map that leaves out rows is
    refused, and so are states that are asked for and that the map does not take along.

    With `group`, the process group that is given to `load`, each of its ranks makes a Reader, faults are the same on
    all of them, and checksums of what several ranks read in parts are compared; without it, of what one rank reads
    whole. Where a checksum is wrong, or a rank fails, tensors have been written to, and are not to be used. Reads with
    `threads` threads, in at most `memory_nbytes` of memory beside the targets.

    Opens the files that all shards share at once: raises what a load raises for one that is missing or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tag: str | None = None,
        names: str | None = None,
        model: str = "model",
        optimizer: str = "optimizer",
        cast: bool = False,
        group: ProcessGroup | None = None,
        threads: int | None = None,
        memory_nbytes: int = 64 << 20,
    ) -> None:
        limits = {"threads": threads if threads is not None else 1, "memory_nbytes": memory_nbytes}
        raise_faults([wrong_value(name, "1 or more", one) for name, one in limits.items() if one < 1], subject=_SUBJECT)
        self._tag, self._map = tag, names
        self._names = {"model": model, "optimizer": optimizer}
        self._cast = cast
        self._group = group
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._memory_nbytes = memory_nbytes
        self.bytes_read = 0
        self._open(path)

    def _open(self, path: str | os.PathLike[str]) -> None:
        """Open it; with a group on every rank, or on none: others would wait for this one in `load`."""
        faults: list[Fault] = []
        with digests() as read:
            try:
                self._open_here(path)
            except Exception as error:
                if self._group is None:
                    raise
                faults = as_faults(error, where=os.fspath(path))
        self._agree(faults)
        if self._group is not None:
            folder = f"{self._source.folder}/"
            agree_files({file.removeprefix(folder): said for file, said in read.items()}, self._group, subject=_SUBJECT)

    @gc_disabled()
    def _open_here(self, path: str | os.PathLike[str]) -> None:
        self.checkpoint_id = os.fspath(path)
        self._found = find_listing(self.checkpoint_id, self._tag)
        self._unread: list[Fault] = []
        try:
            self._use(open_checkpoint(self._found, whole=False))
        except UnsafePickle:
            raise
        except ReshardError as error:
            self._use(open_checkpoint(self._found, whole=False, optimizer=False))
            self._leave_out(faults_of(error))
        if self._held.faults:
            self._leave_out([*self._unread, *self._held.faults])
        if self._group is None or self._group.rank() == 0:
            prove(self._source, ())  # the weights alone; all ranks are told what one finds
            if self._map is not None:
                raise_faults(left_out_faults(self._source), subject=_SUBJECT)
            for note in (*self._held.notes, *self._source.replica_notes()):
                logger.warning("%s: %s", self._source.folder, note)

    def _leave_out(self, faults: list[Fault]) -> None:
        """Note why the optimizer is not open; loads of the weights alone go on."""
        self._unread = faults
        if rank(self._group) == 0:
            told = "; ".join(fault.line() for fault in faults)
            logger.warning("%s: the weights alone can be read: %s", self._source.folder, told)

    def _use(self, source: Checkpoint) -> None:
        """Serve this checkpoint, as the map has it if there is one."""
        held, layout = _content_of(source), source.layout
        note_names()
        if self._map is not None:
            held, layout, faults, padding = read_name_map(self._map).apply(source.content(), layout, Coming())
            mend = "ds-reshard convert --names, and read what it writes"
            unread = (
                UnsupportedLayout.fault(source.folder, f"cannot be read by it: {note}", mend=mend) for note in padding
            )
            raise_faults([*faults, *unread], subject=_SUBJECT)
            tensors = {key: replace(one, dtype=layout[one.origin].dtype) for key, one in held.tensors.items()}
            held = replace(held, tensors=tensors)
        self._held, self._layout = held, layout
        self._entries: Mapping[str, Entry] = entries(held, **self._names)
        self._groups = Groups(held.facts.groups if held.facts is not None else (), held.tied, where=source.folder)
        self._source = source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint, where one is named."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self.checkpoint_id:
            self._open(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return folders.is_folder(os.fspath(checkpoint_id))

    def read_metadata(self, *args: object) -> Metadata:
        """Every tensor as one chunk, whole: which part of which file it is, is found when it is read."""
        told = {key: _told(entry) for key, entry in self._entries.items()}
        return Metadata(
            state_dict_metadata=WeightsAlone(told, self._names["optimizer"], self._unread) if self._unread else told,
            planner_data={key: entry.path for key, entry in self._entries.items()},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @gc_disabled()
    def read_data(self, plan: LoadPlan, planner: TorchPlanner) -> Future[None]:
        """Fill what the plan asks for; all faults of the plan are raised at once, before the first byte is moved."""
        filling, faults = self._asked(plan, planner)
        states = self._asks_for_states(plan, planner)
        if self._unread and (faults or states):
            faults = [*faults, *self._unread]
        self._warn(planner, faults, filling.trained if filling is not None else frozenset())
        assert filling is not None
        try:
            self.bytes_read += filling.execute(threads=self._threads, memory_nbytes=self._memory_nbytes)
            faults, pending = filling.checked()
        except Exception as error:
            faults, pending = as_faults(error, where=self.checkpoint_id), []
        self._verify(faults, pending)
        for item, tensor in filling.filled:
            planner.commit_tensor(item, tensor)
        for item, tensor, value in filling.singles:
            planner.commit_tensor(item, tensor.copy_(value))
        for item, told in filling.values:
            planner.load_bytes(item, _pickled(told))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _asks_for_states(self, plan: LoadPlan, planner: TorchPlanner) -> bool:
        wanted = optimizers(getattr(planner, "original_state_dict", {}))
        return any(wanted) or any(is_state(self._entries[item.storage_index.fqn]) for item in plan.items)

    def _asked(self, plan: LoadPlan, planner: TorchPlanner) -> tuple[Filling | None, list[Fault]]:
        """What this rank is to fill, and everything that is wrong with it: other ranks wait to hear it."""
        try:
            return self._fill(plan, planner)
        except Exception as error:
            return None, as_faults(error, where=self.checkpoint_id)

    def _fill(self, plan: LoadPlan, planner: TorchPlanner) -> tuple[Filling, list[Fault]]:
        shards = self._source.shards()
        self._source.compare_scalar_states = any(is_state(self._entries[item.storage_index.fqn]) for item in plan.items)
        filling = Filling(shards.index.with_layout(self._layout), cast=self._cast)
        wanted = getattr(planner, "state_dict", {})
        faults = [fault for key, value in wanted.items() for fault in off_mesh(key, value)]
        faults += left_out(optimizers(getattr(planner, "original_state_dict", {})), self._entries)
        faults += self._lost(planner) if self._map is not None else ()
        flattened: dict[str, dict[str, object]] = {}
        for item in plan.items if not faults else ():
            fqn = item.storage_index.fqn
            entry = self._entries[fqn]
            try:
                if isinstance(entry, GroupValue):
                    if entry.member is not None:
                        current = wanted.get(fqn)
                        flattened.setdefault(entry.member, {})[entry.name] = current
                    filling.values.append((item, self._groups.value(entry, _members(planner, entry))))
                    continue
                if isinstance(entry, Stored):
                    target = planner.resolve_tensor(item).detach()
                    faults += self._source.weight_faults(entry.source(element_type(target.dtype)))
                    filling.add(item, entry, target)
                elif isinstance(entry, Single) and (tensor := _filled(item, entry, planner)) is not None:
                    filling.singles.append((item, tensor, single(entry, tensor.dtype, cast=self._cast)))
                else:
                    filling.values.append((item, entry.value))
            except Exception as error:
                faults += as_faults(error, where=fqn)
        faults += self._groups.joined(flattened)
        return filling, [*faults, *shards.compare(), *shards.index.faults]

    def _lost(self, planner: TorchPlanner) -> Iterator[Fault]:
        """Yield a fault for each state that a partial load would leave as it is, of a weight that it fills."""
        model, optimizer = (f"{name}." if name else "" for name in self._names.values())
        top = f"{optimizer}state."
        for key in getattr(planner, "state_dict", {}) if self._held.facts is not None else ():
            weight = f"{model}{key.removeprefix(top).rpartition('.')[0]}"
            if key.startswith(top) and key not in self._entries and weight in self._entries:
                what = "is not in the checkpoint as the map has it, and its weight is"
                mend = f"leave it out of the state dict, or correct {self._map}"
                yield ModelMismatch.fault(key, what, "the states of each weight", "none", mend=mend)

    def _warn(self, planner: TorchPlanner, faults: list[Fault], trained: Set[str]) -> None:
        """Raise the `faults` of all ranks, as `_agree`; then warn of what only the run or only the checkpoint has.

        A partial load that finds none of the weights is a fault, and so are masters of the parameters `trained` that
        are not those of their weights: the ranks that read masters or states share that proof.
        """
        tied = {*self._held.tied, *self._held.tied.values()}
        saved = [key for key, entry in self._entries.items() if len(entry.path) < 2 or entry.path[-2] not in tied]
        asked = list(optimizers(getattr(planner, "original_state_dict", {})))
        tensors = [key for key, value in getattr(planner, "state_dict", {}).items() if isinstance(value, torch.Tensor)]
        mine = Unasked.of(asked, saved), Matched.of(tensors, asked, self._entries, self._names["model"])
        alone = self._group is None
        everyone = [(faults, mine, trained)] if alone else gather((faults, mine, trained), self._group)
        raise_faults([fault for of_rank, _, _ in everyone for fault in of_rank], subject=_SUBJECT)
        if any(names for _, _, names in everyone):
            self._agree(self._unproved([names for _, _, names in everyone]))
        seen = [one for _, one, _ in everyone]
        for text in match_keys(seen, saved, self._source.folder, rank=rank(self._group), mend=self._renaming):
            logger.warning("%s", text)

    def _unproved(self, trained: Sequence[Set[str]]) -> list[Fault]:
        """This rank's part of the proof that the masters and states that ranks read are of their parameters."""
        readers = [number for number, names in enumerate(trained) if names]
        number = self._group.rank() if self._group is not None else 0
        if number not in readers:
            return []
        try:
            names = frozenset().union(*trained) if self._map is None else None  # those that were saved are others
            return unproved(self._source, names, part=readers.index(number), of=len(readers))
        except Exception as error:
            return as_faults(error, where=self.checkpoint_id)

    def _renaming(self, lacking: Sequence[str]) -> str:
        """What mends a load of which wrappers have changed all names; else the general way."""
        mend = "ask for the saved keys (the Reader's model= sets the key at the top), or build the model that was saved"
        top = f"{self._names['model']}." if self._names["model"] else ""
        saved = [
            key.removeprefix(top) for key, one in self._entries.items() if key.startswith(top) and not is_state(one)
        ]
        return convert_line(saved, [key.removeprefix(top) for key in lacking], folder=self._source.folder) or mend

    def _verify(self, faults: Sequence[Fault], pending: Sequence[PartialSum]) -> None:
        """Raise for the `faults` of reading; with a group, for those of what all ranks have read together, too."""
        if self._group is None:
            raise_faults(faults, subject=_SUBJECT)
            return
        everyone = gather((faults, pending), self._group)
        combined, again = combine([sums for _, sums in everyone])
        found = [fault for of_rank, _ in everyone for fault in of_rank] + combined
        self._agree([*found, *read_again(pending, again)])

    def _agree(self, faults: Sequence[Fault]) -> None:
        """Raise where a rank has faults: on every rank of the group, else on this one, for torch to tell the others."""
        raise_faults(faults if self._group is None else gather_faults(faults, self._group), subject=_SUBJECT)


def _filled(item: ReadItem, entry: Single, planner: TorchPlanner) -> torch.Tensor | None:
    """The tensor of the target into which a value is put; None where it takes the place of what is there.

    So torch does with each that is no tensor in the checkpoint; a number is put into a tensor here.
    """
    if isinstance(entry.value, ScalarTensor):
        return planner.resolve_tensor(item).detach()
    current = getattr(planner, "state_dict", {}).get(item.storage_index.fqn)
    if isinstance(entry.value, bool | str | None) or not isinstance(current, torch.Tensor) or current.dim():
        return None
    return (current.to_local() if isinstance(current, DTensor) else current).detach()


def _content_of(source: Checkpoint) -> Content:
    """Return what is read of a checkpoint under its own names, also of one that no other format can store."""
    tensors = {
        key: TensorSource(shape=one.shape, dtype=one.dtype, origin=key) for key, one in source.layout.placements.items()
    }
    return Content(
        folder=source.folder,
        ranks=None,
        tensors=tensors,
        facts=source.facts,
        tied=source.shared,
        extra_tensors=source.extra_tensors,
        objects=source.objects,
        notes=tuple(source.notes),
    )


def _told(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, GroupValue | Own) or (isinstance(entry, Single) and not isinstance(entry.value, ScalarTensor)):
        return BytesStorageMetadata()
    shape = torch.Size(entry.shape if isinstance(entry, Stored) else ())
    dtype = torch_dtype(entry.dtype) if isinstance(entry, Stored) else torch.float32
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=shape, chunks=[chunk])


def _members(planner: TorchPlanner, entry: GroupValue) -> Sequence[str | int]:
    """The members of this run's param group, as its state dict names or numbers them."""
    if entry.position is None:
        return ()
    wanted = getattr(planner, "state_dict", {})
    members = wanted.get(".".join(map(str, (*entry.path[:-1], "params"))))
    return members if isinstance(members, list) and all(isinstance(one, str | int) for one in members) else ()


def _pickled(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
