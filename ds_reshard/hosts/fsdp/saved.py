"""Folders that the ranks of EasyR1 and verl have just saved, read again before training goes on; `save_units` for them.

Nothing is gathered but sums: the parts of tensors that the ranks hold stay where they lie.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ds_reshard.containers import folders
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import (
    Fault,
    FingerprintMismatch,
    ReshardError,
    UnsupportedLayout,
    as_faults,
    damaged,
    error_of,
    faults_of,
    raise_faults,
)
from ds_reshard.execution import disk
from ds_reshard.formats.fsdp.checkpoint import EXTRA, FsdpCheckpoint, file_name, open_fsdp, wrong_extra
from ds_reshard.formats.fsdp.flat_parameters import ORDER, FlatOrder, Member
from ds_reshard.hosts.fsdp.optimizer_state import local
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region
from ds_reshard.operations import Reading, fingerprint
from ds_reshard.operations.ranks import gather, rank, world_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp._optim_utils import FSDPParamInfo
    from torch.nn import Module
    from torch.optim import Optimizer

    from ds_reshard.execution.fingerprint import Fingerprint


logger = logging.getLogger("ds_reshard")
_MEMORY_NBYTES = 64 << 20
_MEND = "save again into another folder, and do not resume from this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one rank has to tell: faults, the fingerprints of its share of the tensors in the files, and the sums of
    the parts that it holds itself; `passed` names weights that may be in the files and are not compared.
    """

    faults: tuple[Fault, ...] = ()
    other_steps: tuple[Fault, ...] = ()
    saved: Mapping[TensorKey, str | None] = field(default_factory=dict)
    live: Mapping[TensorKey, Fingerprint] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()


def verify_saved(
    path: str | os.PathLike[str],
    *,
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Raise on every rank unless the folder that the ranks have just saved as EasyR1 and verl do is whole.

    Every rank's file opens, all are of the world size of `group`, their keys, types and shard sizes agree, and the
    shards add up to the whole shapes. With `model`, and `optimizer` where it was saved, the values are compared as
    well: the fingerprint of each tensor in the files with that of what the ranks hold now, and the steps. Nothing is
    gathered but sums; each rank reads its share of the tensors, in 64 MiB. Buffers are not compared.

    Collective, where a process group is there: call it on every rank after saving and before the next step.
    Raises CheckpointNotFound, CheckpointDamaged, FingerprintMismatch, UnsupportedLayout where the optimizer's files
    name no parameter (verl with FSDP1), and what reading a damaged file raises: the same on each rank.
    """
    import torch.distributed as dist

    folder = os.fspath(path)
    together = dist.is_available() and dist.is_initialized()
    gather(None, group)  # nobody reads before all have saved
    seen = gather(_seen(folder, rank(group), world_size(group) if together else None, model, optimizer), group)
    raise_faults([fault for one in seen for fault in one.faults], subject=f"verifying {folder}")
    if model is not None:
        raise_faults(_differences(folder, seen, states=optimizer is not None), subject=f"verifying {folder}")


def _seen(folder: str, rank: int, size: int | None, model: Module | None, optimizer: Optimizer | None) -> _Seen:
    """One rank's part; whatever goes wrong is a fault, for a rank that raised here would leave others waiting."""
    try:
        checkpoint = open_fsdp(folder)
        _check(checkpoint, rank, size)
        if optimizer is not None and checkpoint.unnamed:
            mend = f"{checkpoint.unnamed.mend}; or leave out optimizer="
            what = "its optimizer's files name no parameter: they cannot be compared with the optimizer"
            return _Seen(faults=(UnsupportedLayout.fault(folder, what, mend=mend),))
        return _Seen() if model is None else _compared(checkpoint, rank, size or 1, model, optimizer)
    except Exception as error:
        return _Seen(faults=tuple(as_faults(error, where=f"{folder}, verified by rank {rank}")))


def _check(checkpoint: FsdpCheckpoint, rank: int, size: int | None) -> None:
    """Open this rank's share of the files."""
    folder, saved = checkpoint.folder, checkpoint.ranks
    faults = list(wrong_extra(folder, saved))
    if size not in (None, saved):
        faults.append(
            damaged(folder, "is of another world size", f"files of {size} ranks, as many as save", f"files of {saved}")
        )
    for shard in range(rank, saved, size or 1):
        for family in checkpoint.first:
            try:
                checkpoint.buffers(family, shard)
            except ReshardError as error:
                faults += faults_of(error)
        extra = os.path.join(folder, file_name(EXTRA, saved, shard))
        if folders.exists(extra):
            with open_archive(extra) as archive:
                for name in archive.members:
                    archive.read(name)
    raise_faults(faults, subject=f"verifying {folder}")


def _compared(checkpoint: FsdpCheckpoint, rank: int, size: int, model: Module, optimizer: Optimizer | None) -> _Seen:
    """The fingerprints of this rank's share of the files, and of what it holds."""
    from ds_reshard.execution.fingerprint import Fingerprints

    found = fingerprint(checkpoint.folder, reading=Reading(threads=1, memory_nbytes=_MEMORY_NBYTES), shard=(rank, size))
    live = Fingerprints[TensorKey]()
    keys = set()
    for key, shape, region, values in _parts(model, optimizer):
        keys.add(key)
        live.add_region(key, shape, region, values)
    return _Seen(
        faults=found.faults,
        other_steps=tuple(_other_steps(checkpoint, model, optimizer)),
        saved={TensorKey(name=saved_name(one.name), kind=one.kind): one.fingerprint for one in found.tensors},
        live={key: live[key] for key in keys},
        passed=second_names(model),
    )


def _other_steps(checkpoint: FsdpCheckpoint, model: Module, optimizer: Optimizer | None) -> Iterator[Fault]:
    """States that are one number, of the parameters of which this rank has a state, and that are saved otherwise."""
    import torch

    from ds_reshard.execution.buffers import memory_of

    scalars = checkpoint.facts.scalars if checkpoint.facts is not None else {}
    saved = {saved_name(name): states for name, states in scalars.items()}
    for one in _parameters(model):
        states = optimizer.state.get(one.tensor, {}) if optimizer is not None else {}
        for kind, value in states.items():
            if not isinstance(value, torch.Tensor) or value.dim() or not one.tensor.dim():
                continue
            data, found = bytes(memory_of(value.detach().cpu().reshape(1))), saved.get(one.name, {}).get(kind)
            if not isinstance(found, ScalarTensor) or found.data != data:
                told = found.data.hex() if isinstance(found, ScalarTensor) else "nothing"
                yield _mismatch(checkpoint.folder, f"{one.name}[{kind}]", data.hex(), told)


def _differences(folder: str, seen: Sequence[_Seen], *, states: bool) -> Iterator[Fault]:
    """Tensors that are not in the files as the ranks hold them."""
    from ds_reshard.execution.fingerprint import Fingerprint

    for one in seen:
        yield from one.other_steps
    saved = {key: value for one in seen for key, value in one.saved.items() if states or key.kind == "weight"}
    live: dict[TensorKey, Fingerprint] = {}
    for one in seen:
        for key, part in one.live.items():
            live[key] = live.get(key, Fingerprint()) + part
    for key in sorted(saved.keys() | live.keys()):
        if key.kind == "weight" and key.name in seen[0].passed and key not in live:
            continue
        expected = str(live[key]) if key in live else "nothing"
        found = saved.get(key) or "nothing"
        if expected != found:
            yield _mismatch(folder, str(key), expected, found)


def _mismatch(folder: str, name: str, expected: str, found: str) -> Fault:
    return FingerprintMismatch.fault(folder, f"{name} is not what the ranks hold", expected, found, mend=_MEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter as this rank has it: `region` lies `inside` the tensor under which the optimizer keeps its state.

    `region` is None where this rank holds nothing of it, or what a rank before it holds too.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    region: Region | None
    inside: slice


def _parameters(model: Module) -> Iterator[_Parameter]:
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    infos = _get_fqn_to_fsdp_param_info(model)
    flattened = set[int]()
    for name, info in infos.items():
        flat, number = info.handle.flat_param, info.param_indices[name]
        region, offset = _flat_region(info, number)
        tensor = flat if flat._params is None else flat._params[number]
        flattened |= {id(flat), id(tensor)}
        inside = slice(offset, offset + region.numel) if tensor is flat and region is not None else slice(None)
        shape = tuple(flat._shapes[number])
        yield _Parameter(name=saved_name(name), shape=shape, tensor=tensor, region=region, inside=inside)
    for name, param in model.named_parameters():  # of FSDP2, and what FSDP1 was told to ignore
        if id(param) not in flattened:
            region, shape = _local_region(param), tuple(param.shape)
            yield _Parameter(name=saved_name(name), shape=shape, tensor=param, region=region, inside=slice(None))


def saved_name(name: str) -> str:
    """The name of a parameter without those of what wraps modules: FSDP1, activation checkpointing, torch.compile.

    get_state_dict saves it so; `state_dict()` of a compiled module keeps `_orig_mod`.
    """
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    return clean_tensor_name(name).replace("_orig_mod.", "")


def _parts(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[TensorKey, tuple[int, ...], Region, Tensor]]:
    """This rank's parts of every parameter and of every state that is of its parameter's shape: elements of a region.

    Of what several ranks hold alike the first rank's part alone.
    """
    import torch

    for one in _parameters(model):
        if one.region is None:
            continue
        states = optimizer.state.get(one.tensor, {}) if optimizer is not None else {}
        for kind, value in [("weight", one.tensor), *states.items()]:
            if isinstance(value, torch.Tensor) and (value.dim() or not one.shape):
                values = local(value).detach().reshape(-1)[one.inside]
                yield TensorKey(name=one.name, kind=kind), one.shape, one.region, values


def second_names(model: Module) -> frozenset[str]:
    """The names of buffers, and all names of parameters: of a tied one, the first alone is compared."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    named = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    handles = [
        (prefix, module._handle)
        for prefix, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    tied = [
        ".".join(part for part in (prefix, info.module_name, info.param_name) if part)
        for prefix, handle in handles
        if handle is not None
        for info in handle.flat_param._shared_param_infos
    ]
    return frozenset(saved_name(name) for name in (*tied, *(name for name, _ in named)))


def _flat_region(info: FSDPParamInfo, number: int) -> tuple[Region | None, int]:
    """Of one parameter of FSDP1: the span of it in this rank's span of the flat parameter, and where that begins."""
    flat = info.handle.flat_param
    whole = Box.whole(tuple(flat._shapes[number]))
    if not _is_first_replica(info):
        return None, 0
    if not info.handle.uses_sharded_strategy:
        return Region(box=whole, start=0, stop=whole.numel), info.handle._get_flat_param_offsets()[number][0]
    shard = flat._shard_param_infos[number]
    if not shard.in_shard:
        return None, 0
    start, numel, offset = shard.intra_param_start_idx, shard.numel_in_shard, shard.offset_in_shard
    assert start is not None and numel is not None and offset is not None
    return Region(box=whole, start=start, stop=start + numel), offset


def _is_first_replica(info: FSDPParamInfo) -> bool:
    """Whether no rank before this one holds the same elements of a unit of FSDP1."""
    import torch.distributed as dist

    if not info.handle.uses_sharded_strategy:
        return dist.get_rank() == 0
    replicas = getattr(info.state, "_inter_node_pg", None)  # of HYBRID_SHARD alone
    return replicas is None or dist.get_rank(replicas) == 0


def _local_region(param: Tensor) -> Region | None:
    """What this rank holds of a parameter of FSDP2; None where a rank before it holds the same."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        if dist.is_initialized() and dist.get_rank():
            return None
        box = Box.whole(tuple(param.shape))
    else:
        coordinates = param.device_mesh.get_coordinate() or ()
        if any(at for at, placed in zip(coordinates, param.placements, strict=True) if placed.is_replicate()):
            return None
        size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        box = Box(offset=tuple(offset), size=tuple(size))
    return Region(box=box, start=0, stop=box.numel)


def save_units(path: str | os.PathLike[str], model: Module, optimizer: Optimizer) -> None:
    """Write `fsdp_units.json` into the folder of a checkpoint of FSDP1: with it the optimizer's own state dict is read.

    verl saves `optimizer.state_dict()`, which tells of no parameter's name, shape or place in its flat parameter. Not
    collective: one rank suffices, each writes the same. Raises UnsupportedLayout for a model without flat parameters or
    an optimizer of others, and WriteFailed.
    """
    text = _order(os.fspath(path), model, optimizer).text()
    mend = "free space there, or check its permissions, then save again"
    disk.make_folder(os.fspath(path), mend=mend)
    disk.write_named(os.path.join(path, ORDER), text.encode("utf-8"), mend=mend)


def _order(where: str, model: Module, optimizer: Optimizer) -> FlatOrder:
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    infos = _get_fqn_to_fsdp_param_info(model)
    units: dict[int, dict[str, Member]] = {id(info.handle): {} for info in infos.values()}
    numbered: dict[int, str] = {}
    for name, info in infos.items():
        flat, number = info.handle.flat_param, info.param_indices[name]
        # With use_orig_params there is padding between parameters, of which offsets are told as well.
        told = zip(info.handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        offset = [start for (start, _), padding in told if not padding][number]
        units[id(info.handle)][name] = Member(shape=tuple(flat._shapes[number]), offset=offset)
        numbered.setdefault(id(flat if flat._params is None else flat._params[number]), name)
    counted = [param for group in optimizer.param_groups for param in group["params"]]
    others = sum(id(param) not in numbered for param in counted)
    if others or not units:
        what = f"the optimizer has {others} parameters of no unit" if units else "the model has no flat parameters"
        mend = "give the model that FullyShardedDataParallel returned, and the optimizer that was made of it"
        fault = UnsupportedLayout.fault(where, what, "FSDP1", mend=mend)
        raise error_of([fault], subject=f"the units of {where}")
    return FlatOrder(
        use_orig_params=any(info.handle._use_orig_params for info in infos.values()),
        parameters=tuple(numbered[id(param)] for param in counted),
        units=tuple(dict(sorted(unit.items(), key=lambda one: one[1].offset)) for unit in units.values()),
    )


def verify_save(manager: object, folder: str | os.PathLike[str] | None, *, model_only: bool = False) -> None:
    """Verify what a call of `FSDPCheckpointManager.save_checkpoint` has saved; collective.

    The folder is its first argument, `path` of EasyR1 and `local_path` of verl, None for no save
    (verl/utils/checkpoint/fsdp_checkpoint_manager.py of EasyR1 1537764 and of verl 0.9.1).
    """
    if folder is None:
        return
    if not getattr(manager, "should_save_model", True):
        logger.warning("verify_after_save: %s is not verified: its manager saves no model", folder)
        return
    optimizer = cast("Optimizer | None", getattr(manager, "optimizer", None))
    if model_only or not getattr(manager, "should_save_optimizer", True):
        optimizer = None
    path, model = os.fspath(folder), cast("Module", manager.model)  # type: ignore[attr-defined]
    try:
        if getattr(manager, "should_save_lora_only", False):
            verify_saved(path)
            logger.warning("verify_after_save: %s holds a part of the model: its values are not compared", path)
        else:
            _verify(path, model, optimizer)
    except UnsupportedLayout as error:  # the same on every rank; a save that is not read here may be a good one
        if any(fault.error != UnsupportedLayout.__name__ for fault in faults_of(error)):
            raise
        logger.warning("verify_after_save: %s is not verified: %s", path, error)


def _verify(path: str, model: Module, optimizer: Optimizer | None) -> None:
    """`verify_saved`, with the units of flat parameters noted before where they are needed; collective."""
    try:
        verify_saved(path, model=model, optimizer=optimizer)
    except UnsupportedLayout:
        if optimizer is None:
            raise
        if reason := _without_units(path, model, optimizer):
            verify_saved(path, model=model)
            logger.warning("verify_after_save: the optimizer's files in %s are not compared: %s", path, reason)
            return
        verify_saved(path, model=model, optimizer=optimizer)


def _without_units(path: str, model: Module, optimizer: Optimizer) -> str:
    """Note what flat parameters are made of, where the model has some; else why not. Collective."""
    reason = ""
    if rank() == 0:
        try:
            save_units(path, model, optimizer)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            reason = str(error) or type(error).__name__
    return max(gather(reason))
