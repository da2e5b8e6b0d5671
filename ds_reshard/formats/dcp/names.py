"""What the keys of a nested state dict mean, as `get_state_dict` of torch names them, nested or flattened."""

from __future__ import annotations

from dataclasses import dataclass

from ds_reshard.model.layout import TensorKey

Path = tuple[object, ...]
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""`save_fsdp_model` and `save_fsdp_optimizer` of accelerate/utils/fsdp_utils.py: a folder of torch's for each."""
MODELS = ("model", "module", "state_dict")
_GROUPS = "param_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """The value `name` of a param group: of that at `position`, or of that of the parameter `member`."""

    name: str
    position: int | None = None
    member: str | None = None


def tensor_key(path: Path) -> TensorKey:
    """The logical tensor that a nested state dict's path means.

    `get_state_dict` nests states as (..., "state", W, KIND), flattens them to (..., "state.W.KIND"), and names weights
    by the name of the parameter below the model's.
    """
    names = [str(name) for name in path]
    if len(names) >= 3 and names[-3] == "state":
        return TensorKey(name=names[-2], kind=names[-1])
    if names[-1].startswith("state.") and names[-1].count(".") >= 2:
        name, _, kind = names[-1].removeprefix("state.").rpartition(".")
        return TensorKey(name=name, kind=kind)
    inner = names[1:] if len(names) > 1 and names[0] in MODELS else names
    return TensorKey(name=".".join(inner), kind="weight")


def group_key(path: Path) -> GroupKey | None:
    """The value of a param group that a path means: (..., "param_groups", 0, "lr") or (..., "param_groups.W.lr")."""
    if len(path) >= 3 and path[-3] == _GROUPS and isinstance(path[-2], int):
        return GroupKey(name=str(path[-1]), position=path[-2])
    last = str(path[-1])
    if last.startswith(f"{_GROUPS}.") and last.count(".") >= 2:
        member, _, name = last.removeprefix(f"{_GROUPS}.").rpartition(".")
        return GroupKey(name=name, member=member)
    return None


def is_state(path: Path) -> bool:
    """Whether a path is of an optimizer's state."""
    return tensor_key(path).kind != "weight"
