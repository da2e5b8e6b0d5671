"""A tensor of one rank's file: plain, or a DTensor, sharded over all ranks or over each of several groups (HSDP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.records import ObjectRecord, TensorRecord
from ds_reshard.model.region import Box

_MEND = "restore the folder from a copy, or load an older step"
_SAVE = "save with FSDP(model, use_orig_params=True, device_mesh=...) and get_state_dict, as EasyR1 does"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor of one rank's file: `local` of the whole `shape`, sharded by axis `dim`, or all of it (None).

    `rank` is the one that saved it, by its place on the mesh, and `ranks` how many are on that; None of a plain tensor.
    Of HSDP, `replicas` groups of ranks, one after another, hold the same shards each.
    """

    shape: Shape
    dim: int | None
    rank: int | None
    local: TensorRecord
    replicas: int = 1
    ranks: int | None = None

    def box(self, rank: int, size: int) -> Box:
        """What a rank of `size` holds, as torch.chunk cuts: ceil(n / shards) rows each, the last ones fewer or none."""
        if self.dim is None:
            return Box.whole(self.shape)
        shards = size // self.replicas
        whole, number = self.shape[self.dim], rank % shards
        rows = -(-whole // shards)
        start, stop = min(whole, number * rows), min(whole, (number + 1) * rows)
        offset, extent = [0] * len(self.shape), list(self.shape)
        offset[self.dim], extent[self.dim] = start, stop - start
        return Box(offset=tuple(offset), size=tuple(extent))


def held_of(path: str, name: str, value: object) -> Held | None:
    """A DTensor or a plain tensor; None for any other value."""
    if isinstance(value, TensorRecord):
        return Held(shape=value.shape, dim=None, rank=None, local=_row_major(path, name, value))
    if not isinstance(value, ObjectRecord) or str(value.callable) != "torch._tensor._rebuild_from_type_v2":
        return None
    made, state = value.args[2], value.args[3]
    inner = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else {}
    local, spec = inner.get("_local_tensor"), _state(inner.get("_spec"))
    placements = spec.get("placements")
    shape = made[2] if isinstance(made, tuple) and len(made) > 2 else None
    if not isinstance(local, TensorRecord) or not isinstance(shape, tuple) or not isinstance(placements, tuple):
        raise_faults([_unsupported(path, f"{name} is no DTensor that is known: {value.args[1]}")], subject="reading")
        raise AssertionError
    kinds = [str(one.callable).rpartition(".")[2] for one in placements if isinstance(one, ObjectRecord)]
    if kinds not in (["Shard"], ["Replicate"], ["Replicate", "Shard"], ["Replicate", "Replicate"]):
        what = f"{name} is placed as {', '.join(kinds)}: sharded or replicated, or shards that are replicated, are read"
        raise_faults([_unsupported(path, what)], subject="reading a checkpoint")
    dim = _state(placements[-1]).get("dim") if kinds[-1] == "Shard" else None
    if kinds[-1] == "Shard" and not (isinstance(dim, int) and 0 <= dim < len(shape)):
        raise_faults(
            [damaged(path, f"{name} is sharded by axis {dim}", f"of {len(shape)}", "another")],
            subject="reading a checkpoint",
        )
    mesh = _state(spec.get("mesh"))
    sizes, at = _mesh_sizes(mesh), mesh.get("_coordinate_on_dim")
    if len(kinds) == 2 and (sizes is None or len(sizes) != 2 or not isinstance(at, list | tuple) or len(at) != 2):
        raise_faults([_unsupported(path, f"{name} lies on a mesh of unknown sizes")], subject="reading a checkpoint")
    rank = 0
    for size, coordinate in zip(sizes or (1,), at if isinstance(at, list | tuple) else (), strict=False):
        rank = rank * size + (coordinate if isinstance(coordinate, int) else 0)
    return Held(
        shape=tuple(shape),
        dim=dim if isinstance(dim, int) else None,
        rank=rank,
        local=_row_major(path, name, local),
        replicas=sizes[0] if sizes and kinds == ["Replicate", "Shard"] else 1,
        ranks=prod(sizes) if sizes is not None else None,
    )


def _mesh_sizes(mesh: Mapping[object, object]) -> tuple[int, ...] | None:
    """The sizes of a mesh's dimensions, by its layout (torch 2.13), else the tensor of its ranks; None if neither."""
    axes = _state(mesh.get("_layout")).get("axes")
    if isinstance(axes, tuple):
        shapes = [_state(axis).get("shape") for axis in axes]
        return tuple(prod(shape) for shape in shapes if isinstance(shape, tuple))
    ranks = mesh.get("mesh")
    return ranks.shape if isinstance(ranks, TensorRecord) else None


def _row_major(path: str, name: str, tensor: TensorRecord) -> TensorRecord:
    if not tensor.contiguous:
        raise_faults([_unsupported(path, f"{name} does not lie row-major")], subject="reading a checkpoint")
    return tensor


def _state(record: object) -> Mapping[object, object]:
    return record.state if isinstance(record, ObjectRecord) and isinstance(record.state, dict) else {}


def damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=_MEND)


def other_groups(path: str) -> Fault:
    """A rank's file whose param groups are not rank 0's."""
    what = "its param groups have other members or values than rank 0's: of another run"
    return damaged(path, what, "the same on all ranks", "others")


def _unsupported(where: str, what: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=_SAVE)
