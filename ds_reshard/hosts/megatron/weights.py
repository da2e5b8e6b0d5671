"""What a checkpoint and a model do not have in common, where Megatron loads: it drops it, or goes on without a word."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import ConfigError, Fault
from ds_reshard.formats.megatron.torch_dist import is_state, saved_tensors
from ds_reshard.hosts.megatron.direct import MODEL, STATES, other_vocabulary
from ds_reshard.hosts.megatron.live import Load
from ds_reshard.hosts.megatron.topology import renumbered
from ds_reshard.operations.matching import OTHER_SHAPE, TENSORS, TRAINED, match_tensors
from ds_reshard.operations.ranks import attempt, broadcast, gather, rank

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch


def vocabulary_faults(load: Load, arguments: object) -> list[Fault]:
    """Rows that Megatron would drop, or make of zeros, without a word; `--finetune` warns."""
    saved = load.found.arguments if load.found is not None else None
    faults = other_vocabulary(getattr(saved, "__dict__", {}), vars(arguments), load.where)
    if not load.policy.finetune:
        return faults
    said = [f"the vocabulary: {one.what} ({one.expected} as saved, {one.found} now)" for one in faults]
    load.warnings += [text for text in said if text not in load.warnings]  # looked at twice
    return []


_LOG = f"{MODEL}, or add --dist-ckpt-strictness log_all to leave it as it was built"


def other_tensors(load: Load, asked: Mapping[object, object], strictness: str) -> list[Fault]:
    """A fault for each tensor of a `torch_dist` checkpoint that no rank has, or of a rank that it has not. Collective.

    Megatron reads what is `asked` for, and drops the rest without a word. What the checkpoint has not ends in torch's
    own error where `--dist-ckpt-strictness` is `assume_ok_unexpected`, and stays as built where that logs or ignores
    (core/dist_checkpointing/validation.py, 0.18.2 and 0.19.2). With `--finetune` either is a warning.
    """
    if strictness.startswith("return_"):
        what, mend = "returns more than Megatron-LM's own load_checkpoint takes", "give log_all in its place"
        return [ConfigError.fault(f"--dist-ckpt-strictness {strictness}", what, mend=mend)]
    found, _, _ = attempt(lambda: saved_tensors(load.where) if rank() == 0 else None)  # what is wrong Megatron tells
    there = broadcast(found) or []
    if not there:
        return []
    own = _keys(asked)
    without = sum(1 << number for number, name in enumerate(there) if name not in own)
    told = gather((without, sorted(own - set(there)), "optimizer" in asked))
    left = reduce(and_, (one[0] for one in told))
    with_states = any(one[2] for one in told)
    lost = {name for number, name in enumerate(there) if left >> number & 1 and (with_states or not is_state(name))}
    lacking = {name for one in told for name in one[1]}
    passed, finetune = strictness.startswith("log_") or strictness == "ignore_all", load.policy.finetune
    faults = []
    for words, mend, of_states in ((TENSORS, MODEL, False), (TRAINED, STATES, True)):
        sides = ({name: None for name in names if is_state(name) is of_states} for names in (lacking, lost))
        faults += match_tensors(*sides, words=words, mend=_LOG if finetune else mend)
    if finetune:
        warned = [one for one in faults if passed or one.where in lost]
        load.warnings += ["; ".join(f"{one.where}: {one.what}" for one in warned)] if warned else []
        return [one for one in faults if one not in warned]
    return [fault for fault in faults if not is_state(fault.where)] or faults


def _keys(asked: Mapping[object, object]) -> set[str]:
    """The keys of the model's and the optimizer's tensors that this rank asks for."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    own = set[str]()
    for one in nested_values(dict(asked)):
        parts = nested_values({0: one.build()}) if isinstance(one, ShardedTensorFactory) else [one]
        own.update(part.key for part in parts if isinstance(part, ShardedTensor))
    return own


def other_weights(load: Load, state: Mapping[str, object]) -> list[Fault]:
    """What of format `torch` is not the model's own weights by name and shape; with `--finetune` names are a warning.

    Megatron puts in what is of its names and goes on, and stops at another shape when others are in
    (`load_model_state_dict` of training/checkpointing.py, 0.18.2 and 0.19.2: strict, and then not).
    """
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args

    names, shapes = list[Fault](), list[Fault]()
    models = cast("list[torch.nn.Module]", unwrap_model(load.models))
    for number, model in enumerate(models):
        held = state.get("model" if len(models) == 1 else f"model{number}")
        told = {str(name): one for name, one in held.items() if _is_weight(one)} if isinstance(held, Mapping) else {}
        own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers, kept = dict(model.named_buffers(remove_duplicate=False)), model.state_dict(keep_vars=True)
        own |= {name: one for name, one in buffers.items() if name in kept and _is_weight(one)}
        known = own | buffers
        kept = {name: one.shape for name, one in told.items() if name in own or name not in known}
        faults = match_tensors({name: one.shape for name, one in own.items()}, kept, mend=MODEL)
        shapes += [fault for fault in faults if fault.what == OTHER_SHAPE]
        names += [fault for fault in faults if fault.what != OTHER_SHAPE]
    if names and load.policy.finetune and load.found is not None:
        shapes += renumbered(getattr(load.found.arguments, "__dict__", {}), vars(get_args()), load.where)
    if load.policy.finetune and names:
        load.warnings.append("; ".join(f"{fault.where}: {fault.what}" for fault in names))
        names = []
    return names + shapes


def _is_weight(value: object) -> TypeGuard[torch.Tensor]:
    return bool(getattr(getattr(value, "dtype", None), "is_floating_point", False))
