"""An FSDP unit that torch cannot flatten, told by the names of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_reshard.errors import UnsupportedLayout, raise_faults

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def refuse_mixed(params: Sequence[Tensor], module: Module) -> None:
    """Raise UnsupportedLayout where frozen and trainable parameters would become one flat parameter.

    torch raises a ValueError there that names none of them (`_validate_tensors_to_flatten`, 2.13).
    """
    if len({param.requires_grad for param in params}) < 2:
        return
    names = {id(param): name for name, param in module.named_parameters()}
    frozen, trainable = (
        ", ".join(sorted(names.get(id(param), "?") for param in params if param.requires_grad is wanted)[:8])
        for wanted in (False, True)
    )
    fault = UnsupportedLayout.fault(
        f"FSDP unit {type(module).__name__}",
        "frozen and trainable parameters cannot be flattened into one with use_orig_params=False",
        "all frozen or all trainable",
        f"frozen {frozen}; trainable {trainable}",
        mend="FSDP(model, use_orig_params=True, ...), or give the frozen modules FSDP units of their own",
    )
    raise_faults([fault], subject="building FSDP")
