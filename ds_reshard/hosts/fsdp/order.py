"""`save_units`: what the flat parameters of a running model are made of, written beside its checkpoint."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, UnsupportedLayout, WriteFailed, raise_faults
from ds_reshard.formats.fsdp.order import ORDER, FlatOrder, Member

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.nn import Module
    from torch.optim import Optimizer


def save_units(path: str | os.PathLike[str], model: Module, optimizer: Optimizer) -> None:
    """Write `fsdp_units.json` into the folder of a checkpoint of FSDP1: with it the optimizer's own state dict is read.

    verl saves `optimizer.state_dict()`, which tells of no parameter's name, shape or place in its flat parameter. Not
    collective: one rank suffices, each writes the same. Raises UnsupportedLayout for a model without flat parameters or
    an optimizer of others, and WriteFailed.
    """
    text = _order(os.fspath(path), model, optimizer).text()
    file = os.path.join(path, ORDER)
    beside = f"{file}.{uuid.uuid4().hex}"
    try:
        os.makedirs(path, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as written:
            written.write(text)
        os.replace(beside, file)
    except OSError as error:
        raise WriteFailed(f"{file}: cannot be written: {error}") from error


def _order(where: str, model: Module, optimizer: Optimizer) -> FlatOrder:
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    infos = _get_fqn_to_fsdp_param_info(model)
    handles: dict[int, FlatParamHandle] = {id(info.handle): info.handle for info in infos.values()}
    units: dict[int, dict[str, Member]] = {key: {} for key in handles}
    numbered: dict[int, str] = {}
    for name, info in infos.items():
        flat, number = info.handle.flat_param, info.param_indices[name]
        member = Member(shape=tuple(flat._shapes[number]), offset=_offsets(info.handle)[number])
        units[id(info.handle)][name] = member
        numbered.setdefault(id(flat if flat._params is None else flat._params[number]), name)
    counted = [param for group in optimizer.param_groups for param in group["params"]]
    others = sum(id(param) not in numbered for param in counted)
    if others or not units:
        raise_faults([_foreign(where, others, len(units))], subject=f"the units of {where}")
    orig = any(handle._use_orig_params for handle in handles.values())
    return FlatOrder(
        use_orig_params=orig,
        parameters=tuple(numbered[id(param)] for param in counted),
        units=tuple(dict(sorted(unit.items(), key=lambda one: one[1].offset)) for unit in units.values()),
    )


def _foreign(where: str, others: int, units: int) -> Fault:
    what = f"the optimizer has {others} parameters of no unit" if units else "the model has no flat parameters"
    mend = "give the model that FullyShardedDataParallel returned, and the optimizer that was made of it"
    return UnsupportedLayout.fault(where, what, "FSDP1", mend=mend)


def _offsets(handle: FlatParamHandle) -> list[int]:
    """Where each parameter begins in the flat parameter, which has padding between them with use_orig_params."""
    flat = handle.flat_param
    found = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
    return [start for (start, _), padding in found if not padding]
