"""Param groups of Megatron-LM: which parameters each has, and their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import ChecksumMismatch
from ds_reshard.formats.megatron.checkpoint import Chain
from ds_reshard.model.content import MASTER
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
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
    common = _common_step(state)
    scalars: dict[str, dict[str, Scalar]] = {}
    for group, names in zip(held, members, strict=True):
        step = read_step(group.get("step", common))
        if step is not None:
            scalars |= {name: {"step": step} for name in names}
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


def _common_step(state: object) -> object:
    """The step that the plain optimizer saves once for all (`_extract_common_per_param_step`, optimizer.py)."""
    for held in _nested(state):
        if isinstance(held.get("state"), Mapping) and "common_step" in held["state"]:  # type: ignore[operator]
            return held["state"]["common_step"]  # type: ignore[index]
    return None


def _nested(state: object) -> Iterator[Mapping[object, object]]:
    if isinstance(state, Mapping):
        yield state
        yield from (held for name, held in state.items() if name == "optimizer" and isinstance(held, Mapping))


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
