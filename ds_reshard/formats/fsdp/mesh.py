"""A DTensor of torch's pickles for another number of ranks, on a mesh that holds all of them.

Its mesh has one dimension; or of HSDP two, groups of ranks that hold the same shards: their size stays, their number
changes. What `DeviceMesh.__init__` and `DTensorSpec` keep (torch/distributed/device_mesh.py and
tensor/_dtensor_spec.py): 2.13, and of one dimension, from their sources alone, the older form with `mesh`,
`_flatten_mesh_list` and `_dim_group_infos`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

from ds_reshard.errors import UnsupportedLayout, raise_faults
from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, TensorRecord, new_tensor

_RANKS = "ranks of the mesh"
_CPU = ObjectRecord(callable=GlobalName(module="torch", name="device"), args=("cpu",))
_OF_SPEC = frozenset({"mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order", "_hash"})
# The names of groups are those that a run gives in the order in which it makes them, whatever its size is.
_OF_MESH = frozenset(
    {"_device_type", "device_type", "_mesh_dim_names", "mesh_dim_names", "_thread_id", "_dim_group_names"}
)
_NOTHING = frozenset({"_root_mesh", "_parent_mesh", "_flatten_mapping"})


def ranks_data(size: int) -> Mapping[str, bytes]:
    """The buffer of a mesh's ranks, for a file that has DTensors."""
    return {_RANKS: struct.pack(f"<{size}i", *range(size))}


class Meshes:
    """The meshes of one new file, that of `rank` of `size`; DTensors that share one share it there too.

    `shards` is the size of a group of HSDP, None of a mesh of one dimension; `saved_rank` saved the DTensors, in the
    first group.
    """

    def __init__(
        self, path: str, *, saved_size: int, rank: int, size: int, shards: int | None = None, saved_rank: int = 0
    ) -> None:
        self._path = path
        self._saved_size = saved_size
        self._rank = rank
        self._size = size
        self._shards = shards
        self._saved_rank = saved_rank
        self._made: dict[int, ObjectRecord] = {}

    def dtensor(self, saved: ObjectRecord, local: TensorRecord) -> ObjectRecord:
        """The DTensor of which this rank holds `local`; on the CPU, as all that is written is.

        Raises UnsupportedLayout for what no version of torch that is known keeps of one.
        """
        function, kind, made, state = saved.args
        assert isinstance(made, tuple) and isinstance(state, tuple)
        slots, attributes = state
        spec = attributes["_spec"]
        entries = {name: self._of_spec(name, value) for name, value in spec.state.items()}
        device = tuple(_CPU if _is_device(part) else part for part in made)
        inner = {**attributes, "_local_tensor": local, "_spec": replace(spec, state=entries)}
        return replace(saved, args=(function, kind, device, (slots, inner)))

    def _of_spec(self, name: str, value: object) -> object:
        if name == "mesh" and isinstance(value, ObjectRecord) and isinstance(value.state, dict):
            if id(value) not in self._made:
                entries = {name: self._of_mesh(str(name), entry) for name, entry in value.state.items()}
                self._made[id(value)] = replace(value, state=entries)
            return self._made[id(value)]
        if name not in _OF_SPEC:
            self._refuse(f"a DTensor's {name}")
        return None if name == "_hash" else value

    def _of_mesh(self, name: str, value: object) -> object:
        if name in ("_rank_map", "mesh") and isinstance(value, TensorRecord):
            return self._ranks(value)
        if name in ("_flatten_rank_map", "_flatten_mesh_list"):
            if value != tuple(range(self._saved_size)):
                self._refuse(f"a mesh of the ranks {value}")
            return tuple(range(self._size))
        if name == "_coordinate_on_dim" and isinstance(value, tuple | list):
            return type(value)([self._rank] if self._shards is None else divmod(self._rank, self._shards))
        if name in ("_layout", "_layouts"):
            return self._resized(value) if self._shards is None else self._regrouped(value, self._shards)
        if name == "_dim_group_names" and self._shards is not None:
            return self._group_names(value, self._shards)
        if name == "_dim_group_infos" and isinstance(value, list) and self._shards is None:
            return [(tag, list(range(self._size)), *rest) for tag, _, *rest in value]
        if name == "_rank":
            return self._rank
        if name == "_hash":
            return None
        if name not in _OF_MESH and (name not in _NOTHING or value):
            self._refuse(f"a mesh's {name}")
        return value

    def _ranks(self, saved: TensorRecord) -> TensorRecord:
        if saved.shape != (self._saved_size,) or saved.dtype is not ElementType.INT32:
            self._refuse(f"a mesh of {saved.dtype.label} {list(saved.shape)}")
        return new_tensor(_RANKS, (self._size,), saved.dtype)

    def _resized(self, layout: object) -> object:
        """A mesh's layout: its one size follows that of the run, its stride is 1."""
        if isinstance(layout, tuple):
            return tuple(map(self._resized, layout))
        if not isinstance(layout, ObjectRecord) or not isinstance(layout.state, dict):
            return layout
        if "shape" not in layout.state:
            return replace(layout, state={name: self._resized(value) for name, value in layout.state.items()})
        flat = layout.callable.name == "_FlatLayout"
        if layout.state != _axis(self._saved_size, flat=flat) or (not flat and 1 in (self._saved_size, self._size)):
            self._refuse(f"a mesh of the layout {layout.state}")
        return replace(layout, state=_axis(self._size, flat=flat))

    def _regrouped(self, layout: object, shards: int) -> object:
        """The layout of a mesh of HSDP, as torch 2.13 keeps it: groups of `shards` ranks, one after another."""
        state = layout.state if isinstance(layout, ObjectRecord) and isinstance(layout.state, dict) else {}
        axes = state.get("axes")
        if not isinstance(layout, ObjectRecord) or not isinstance(axes, tuple):
            self._refuse("a mesh of two dimensions")
            raise AssertionError
        found = [axis.state for axis in axes if isinstance(axis, ObjectRecord)]
        expected = [_part(self._saved_size // shards, shards), _part(shards, 1)]
        if found != expected or shards == 1:
            self._refuse(f"a mesh of the layout {found}")
        first = replace(axes[0], state=_part(self._size // shards, shards))
        return replace(layout, state={**state, "axes": (first, *axes[1:])})

    def _group_names(self, saved: object, shards: int) -> list[str]:
        """The names of this rank's groups, of which `saved` are those of the rank that saved.

        `init_device_mesh` makes the groups of one dimension after those of the other, and all ranks count them
        (torch/distributed/device_mesh.py, 2.13): first one for each shard, of the ranks that hold it, then the rest.
        """
        numbers = [int(name) for name in saved if str(name).isdigit()] if isinstance(saved, list) else []
        if len(numbers) != 2 or numbers[1] != numbers[0] - self._saved_rank + shards:
            self._refuse(f"a mesh with groups named {saved}")
        alike, together = numbers[0] - self._saved_rank, numbers[1]
        group, number = divmod(self._rank, shards)
        return [str(alike + number), str(together + group)]

    def _refuse(self, what: str) -> None:
        fault = UnsupportedLayout.fault(
            self._path,
            f"{what} is not known here, and may depend on the number of ranks",
            "a mesh of one dimension over all ranks, or of two for HSDP, as torch 2.13 keeps it",
            mend="load it with the number of ranks that saved it, and save it with torch 2.13",
        )
        raise_faults([fault], subject="converting")


def _axis(size: int, *, flat: bool) -> dict[object, object]:
    """The layout of one dimension; a `_FlatLayout` drops a size of 1 (torch/distributed/_mesh_layout.py, 2.13)."""
    return {"shape": (), "stride": ()} if flat and size == 1 else {"shape": (size,), "stride": (1,)}


def _part(size: int, stride: int) -> dict[object, object]:
    return {"shape": (size,), "stride": (stride,)}


def _is_device(value: object) -> bool:
    return isinstance(value, ObjectRecord) and str(value.callable) == "torch.device"
