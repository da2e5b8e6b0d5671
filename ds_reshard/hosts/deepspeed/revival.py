"""Records of a DeepSpeed checkpoint as live values: what an allow-list lets be built, and nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

from ds_reshard.containers.revive import revive
from ds_reshard.execution.buffers import read_tensor, tensor_from_bytes
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import Scalar, ScalarTensor
from ds_reshard.model.records import GlobalName, ObjectRecord

Record = ObjectRecord | GlobalName
Child = Callable[[object], object]


def revived(value: object, *, trusted: frozenset[str], where: str) -> object:
    """The value that `torch.load` would have given, built from the allow-list alone (else TrustRequired)."""
    return revive(value, builders=_builders(), trusted=trusted, tensor=read_tensor, where=where)


def scalar(value: Scalar) -> object:
    """A scalar state as the optimizer keeps it: a small tensor, or a plain value."""
    if isinstance(value, ScalarTensor):
        return tensor_from_bytes(value.data, value.dtype, value.shape)
    return value


def _bytes_io(record: Record, child: Child) -> object:
    """A BytesIO, in which models keep extra state; its pickled state is (content, position, attributes)."""
    made = io.BytesIO()
    if isinstance(record, ObjectRecord):
        state = child(record.state)
        if isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], bytes) and isinstance(state[1], int):
            made.write(state[0])
            made.seek(state[1])
    return made


def _builders() -> Mapping[str, Callable[[Record, Child], object]]:
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def plain(cls: type) -> Callable[[Record, Child], object]:
        def build(record: Record, child: Child) -> object:
            if isinstance(record, GlobalName):
                return cls
            made: object = object.__new__(cls)
            state = child(record.state)
            if isinstance(state, tuple) and len(state) == 2:
                state = {**(state[0] or {}), **(state[1] or {})}
            for name, value in (state or {}).items() if isinstance(state, dict) else ():
                object.__setattr__(made, name, value)
            return made

        return build

    def call(function: Callable[..., object]) -> Callable[[Record, Child], object]:
        def build(record: Record, child: Child) -> object:
            if isinstance(record, GlobalName):
                return function
            return function(*(child(arg) for arg in record.args))

        return build

    def dtype_of(name: str) -> Callable[[Record, Child], object]:
        return lambda record, child: getattr(torch, name)

    names = {f"torch.{t.label}": dtype_of(t.label) for t in ElementType if hasattr(torch, t.label)}
    return {
        **names,
        "torch.device": call(torch.device),
        "torch.Size": call(torch.Size),
        "_io.BytesIO": _bytes_io,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": plain(LossScaler),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": plain(DynamicLossScaler),
        "deepspeed.utils.tensor_fragment.fragment_address": plain(fragment_address),
        "deepspeed.runtime.zero.config.ZeroStageEnum": call(ZeroStageEnum),
    }
