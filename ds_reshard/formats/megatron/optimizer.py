"""Param groups of Megatron-LM: which parameters each has, and their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import ChecksumMismatch
from ds_reshard.formats.megatron.checkpoint import Chain, parts_of
from ds_reshard.model.content import MASTER
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical, number_of
from ds_reshard.model.records import TensorRecord

KINDS = {"param": MASTER, "fp32_param": MASTER}
"""What Megatron calls the kinds that have names of their own here: the first with, the other without the distributed
optimizer (core/optimizer/distrib_optimizer.py and optimizer.py, 0.19.2)."""

_COUNTED = ("params", "step")
_NORMS = ("q_layernorm.", "k_layernorm.")
EXPERTS = ".mlp.experts."
_ALIKE = ("lr", "max_lr", "min_lr", "betas", "eps")
"""What `get_mup_config_overrides` and overrides of the user's would give some parameters otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A parameter with states, and the shape that it has here."""

    name: str
    shape: tuple[int, ...]


def facts_of(
    chain: Chain | None, state: object, trained: Sequence[Trained], arguments: Mapping[str, object]
) -> tuple[OptimizerFacts | None, str]:
    """The groups with their members, and why those are not known, where they are not: groups are then without members.

    No file says which parameter is in which group. Megatron's own rule does, where the groups differ in no more than
    it makes of them: weight decay for all but biases and tensors of one dimension (`get_standard_config_overrides`,
    core/optimizer/__init__.py, 0.19.2; `_get_param_groups`, 0.16.1), and experts of an expert-parallel run apart.
    """
    held, ungrouped = [group for groups in chain or () for group in groups], ""
    if not trained and not held:
        return None, ""
    members = members_of(held, trained, arguments)
    if members is None:
        ungrouped = (
            f"which of its {len(held)} param groups a parameter is in is told by no file, and no rule of Megatron's"
        )
        members = [[] for _ in held]
    parts = dict(enumerate(parts_of(state)))
    steps = [_step(group, parts.get(number)) for number, groups in enumerate(chain or ()) for group in groups]
    told = {number_of(step): step for step in steps if step is not None}
    one = next(iter(told.values())) if len(told) == 1 else None
    placed = zip(members, steps, strict=True) if not ungrouped else [([each.name for each in trained], one)]
    scalars: dict[str, dict[str, Scalar]] = {}
    for names, own in placed:
        step = own if own is not None else one  # of a group that is empty on the first rank, no step is told
        scalars |= {name: {"step": step} for name in names if step is not None}
    made = tuple(
        GroupFacts(members=tuple(names), hyperparameters={k: v for k, v in group.items() if k not in _COUNTED})
        for group, names in zip(held, members, strict=True)
    )
    return OptimizerFacts(groups=made, scalars=scalars), ungrouped


def members_of(
    groups: Sequence[Mapping[str, object]], trained: Sequence[Trained], arguments: Mapping[str, object]
) -> list[list[str]] | None:
    """The members of each group by Megatron's rule; None where the groups are others than it makes."""
    kinds = [(group.get("wd_mult"), bool(group.get("is_expert_parallel"))) for group in groups]
    usual = all(
        group.get("lr_mult") == 1.0 and not group.get("is_decoupled_lr") and group.get("default_config", True)
        for group in groups
    )
    alike = all(len({canonical(group.get(name)) for group in groups}) == 1 for name in _ALIKE) if groups else False
    if len(set(kinds)) != len(kinds) or not (usual and alike) or any(wd not in (0.0, 1.0) for wd, _ in kinds):
        return None
    apart, older = any(experts for _, experts in kinds), any("default_config" not in group for group in groups)
    found: dict[tuple[object, bool], list[str]] = {kind: [] for kind in kinds}
    for one in trained:
        kind = (float(_decayed(one, arguments, older=older)), apart and EXPERTS in f".{one.name}")
        if kind not in found:
            return None
        found[kind].append(one.name)
    return list(found.values())


def odd_states(arguments: Mapping[str, object]) -> list[str]:
    """What makes states others than a master and its moments, flat, the weight the cast of the master.

    Muon's are of whole parameters, beside the flat ones of Adam (core/optimizer/layer_wise_optimizer.py, 0.19.2: seen),
    and weights in fp8 are no casts.
    """
    told = [name for name in ("fp8_param_gather", "fp4_param_gather") if arguments.get(name)]
    optimizer = arguments.get("optimizer", "adam")
    return told if optimizer in ("adam", "sgd", "lion") else [*told, f"optimizer {optimizer}"]


def _decayed(one: Trained, arguments: Mapping[str, object], *, older: bool) -> bool:
    """`older` is of a run of core 0.15 or before, of which groups say less (`_get_param_groups`, 0.14.0 and 0.15.3)."""
    if older and arguments.get("embedding_init_method_std") is not None and "embedding" in one.name:
        return False
    if arguments.get("apply_wd_to_qk_layernorm") and any(norm in one.name for norm in _NORMS):
        return True
    return len(one.shape) != 1 and not one.name.endswith(".bias")


def _step(group: Mapping[str, object], state: object) -> Scalar:
    """The step of a group of an optimizer; None where none is told, or several are."""
    own = read_step(group.get("step"))
    beside = saved_steps(state) if own is None else []
    return beside[0] if len(beside) == 1 else own


def saved_steps(state: object) -> list[Scalar]:
    """The steps that a plain optimizer saves beside its param groups, equal ones once.

    torch's Adam counts in each state: format `torch` has it so, and `torch_dist` once for all (`common_step` of
    `_extract_common_per_param_step`, core/optimizer/optimizer.py, 0.18.2 and 0.19.2). Raises as `read_step` does.
    """
    inner = state.get("optimizer", state) if isinstance(state, Mapping) else None
    states = inner.get("state") if isinstance(inner, Mapping) else None
    if not isinstance(states, Mapping):
        return []
    held = [states.get("common_step"), *(one.get("step") for one in states.values() if isinstance(one, Mapping))]
    apart = dict[object, object]()
    for one in held:  # a checksum tells numbers apart, so that equal ones are read once
        summed = not isinstance(one, TensorRecord) or one.storage.crc32 is not None
        apart[canonical(one) if summed else id(one)] = one
    read = map(read_step, apart.values())
    return list({number_of(one): one for one in read if one is not None}.values())


def read_step(step: object) -> Scalar:
    """A step as it was saved; a tensor's one element is read. Raises ChecksumMismatch and ReadFailed."""
    if not isinstance(step, TensorRecord) or step.numel != 1:
        return step if isinstance(step, int | float) and not isinstance(step, bool) else None
    storage = step.storage
    with PositionedFile(storage.path) as file:
        data = file.read(step.byte_offset, step.nbytes)
    if storage.crc32 is not None and storage.nbytes == step.nbytes and crc32(data) != storage.crc32:
        raise ChecksumMismatch(f"{storage.path}: the optimizer's step is not what was written; restore the file")
    return ScalarTensor(dtype=step.dtype, shape=step.shape, data=data)
