"""What a load of accelerate with `strict=False` finds of a model, without DeepSpeed.

torch reports the names that are missing, and accelerate drops that report (`load_accelerator_state` in
accelerate/checkpointing.py, 1.15.0).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_reshard.operations.matching import report_missing
from ds_reshard.operations.wrapper_names import patterns

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@contextmanager
def trained_names_checked(accelerator: Accelerator, where: str | None, given: Mapping[str, object]) -> Iterator[None]:
    """While accelerate loads, compare the names in the checkpoint with those that each model trains.

    Raises ModelMismatch if it has none of them, before anything changes; if it lacks some, rank 0 warns. Not
    collective: each rank reads the same files. `given` are the arguments of the load; a strict one compares by itself.
    """
    loose = given.get("strict", True) is False and accelerator.distributed_type != "FSDP"
    models = list(accelerator._models) if loose else []
    for model in models:
        load = functools.partial(_load, accelerator, model, model.load_state_dict, str(where))
        vars(model)["load_state_dict"] = load
    try:
        yield
    finally:
        for model in models:
            vars(model).pop("load_state_dict", None)


def _load(
    accelerator: Accelerator,
    model: torch.nn.Module,
    own: Callable[..., object],
    where: str,
    state: Mapping[str, object],
    **options: object,
) -> object:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    missing = [names[0] for names in aliases.values() if not any(name in state for name in names)]
    if not missing:
        return own(state, **options)
    what = f"has {len(aliases) - len(missing)} of the {len(aliases)} parameters that this run trains, by their names"
    unused = sorted(set(state).difference(*aliases.values()))
    names, mend = patterns(state, missing), "build the model that was saved"
    if names is not None and model is accelerator._models[0]:  # whose file `convert` reads
        mend = (
            f"write {json.dumps(names)} to map.json and put the model.safetensors that this makes into {where}:\n"
            f"ds-reshard convert {where} OUT --to safetensors --names map.json"
        )
    refuse, warn = len(missing) == len(aliases), accelerator.is_main_process
    report_missing(where, what, missing, unused, mend=mend, refuse=refuse, warn=warn)
    return own(state, **options)
