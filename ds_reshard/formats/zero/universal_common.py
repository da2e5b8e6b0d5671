"""`zero/optimizer_state.pt` of a universal checkpoint: what all parameters of a group have alike.

It is the saving optimizer's state without its tensors (deepspeed/checkpoint/ds_to_universal.py `_save_optimizer_state`,
0.19.8), or of stage 3 with all of rank 0's (`_save_optimizer_state_stage3`); either way with the param groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import fail
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.optim_states import Partition, read_stage, sub_groups, torch_state
from ds_reshard.model.facts import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonState:
    """The entries of the file; `buffers[g]` are the flat buffers (entries of `param_shapes`) of param group g.

    `kept` are states that the optimizer kept of each flat buffer, None where nothing here tells; `scalars` those of
    them that are one value and lie here. `own` says that `ds-reshard convert` wrote it, which leaves no state out and
    names the members of each param group.
    """

    path: str
    nbytes: int
    stage: int
    entries: Mapping[str, object]
    groups: tuple[Mapping[str, object], ...]
    buffers: tuple[tuple[int, ...], ...]
    kept: Sequence[frozenset[str]] | None
    scalars: Sequence[Mapping[str, Scalar]]
    own: bool


def read_common(path: str, model: ModelStates) -> CommonState:
    """Read the file: directory, pickle and scalar states. Raises CheckpointDamaged where it is of another model."""
    count = len(model.param_shapes or ())
    with open_archive(path) as archive:
        check_root(path, "optimizer_state", archive.root)
        entries = archive.load()
        if not isinstance(entries, dict) or not isinstance(entries.get("param_groups"), list):
            raise fail(path, "is no common state of a universal checkpoint", "'param_groups'", _kind(entries))
        own, numbered = _numbered(path, entries["param_groups"], model)
        _, groups, buffers = torch_state(path, "param_groups", {"state": {}, "param_groups": numbered})
        if sorted(i for of_group in buffers for i in of_group) != list(range(count)):
            raise fail(path, "param groups and the model file's param_shapes differ", f"{count}", str(buffers))
        partitions = _embedded(path, archive, entries, count)
        nbytes = archive.nbytes
    kept: Sequence[frozenset[str]] | None = None
    if partitions is not None:
        kept = [frozenset({*p.states, *p.scalars, *p.unfollowed}) for p in partitions]
    elif own:
        kept = [frozenset[str]()] * count
    return CommonState(
        path=path,
        nbytes=nbytes,
        stage=read_stage(path, entries["zero_stage"]) if "zero_stage" in entries else 1,
        entries=entries,
        groups=groups,
        buffers=buffers,
        kept=kept,
        scalars=[_alike(p) for p in partitions] if partitions is not None else [{}] * count,
        own=own,
    )


def _numbered(path: str, groups: list[object], model: ModelStates) -> tuple[bool, list[object]]:
    """The param groups with the numbers of their flat buffers, and whether they named their members instead."""
    shapes = model.param_shapes or ()
    given = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not any(isinstance(name, str) for params in given if isinstance(params, list) for name in params):
        return False, groups
    if len(groups) != len(shapes) or any(params != list(names) for params, names in zip(given, shapes, strict=True)):
        raise fail(path, "param groups and the model file's param_shapes differ", f"{len(shapes)}", f"{len(groups)}")
    numbered: list[object] = [
        {**group, "params": [number]} for number, group in enumerate(groups) if isinstance(group, dict)
    ]
    return True, numbered


def _embedded(
    path: str, archive: TorchArchive, entries: Mapping[str, object], count: int
) -> tuple[Partition, ...] | None:
    """Rank 0's partitions, which ds_to_universal leaves in the common state of a stage-3 checkpoint."""
    if "fp32_flat_groups" not in entries:
        return None
    partitions = sub_groups(path, archive, {}, entries).partitions
    if len(partitions) != count:
        raise fail(path, "flat buffers do not match the model file", f"{count}", f"{len(partitions)}")
    return partitions


def _alike(partition: Partition) -> Mapping[str, Scalar]:
    """The scalar states that all ranks have alike: an optimizer may keep others per rank, and these are rank 0's."""
    return {name: value for name, value in partition.scalars.items() if name in ("step", "mu_product")}


def _kind(value: object) -> str:
    return f"keys {sorted(map(str, value))[:8]}" if isinstance(value, dict) else type(value).__name__
