"""The mesh of a DTensor for another number of ranks, in the form of torch before 2.9: synthetic, from its source alone.

`DeviceMesh.__init__` of torch/distributed/device_mesh.py; tests/hosts/fsdp has files of torch 2.13.
"""

from __future__ import annotations

import pytest

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.formats.fsdp.checkpoint import shard_of
from ds_reshard.formats.fsdp.target import Meshes, ranks_data
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, TensorRecord, new_tensor

MESH = {
    "device_type": "cuda",
    "mesh_dim_names": ("fsdp",),
    "_thread_id": None,
    "_parent_mesh": None,
    "mesh": new_tensor("mesh", (2,), ElementType.INT32),
    "_flatten_mesh_list": (0, 1),
    "_coordinate_on_dim": [1],
    "_dim_group_infos": [("ptd:0", [0, 1], "0")],
    "_hash": 7,
}


def _named(module: str, name: str) -> GlobalName:
    return GlobalName(module=module, name=name)


def _object(name: str, state: object = None, args: tuple[object, ...] = ()) -> ObjectRecord:
    module, _, name = name.rpartition(".")
    return ObjectRecord(callable=_named(module, name), args=args, state=state, has_state=state is not None)


def _dtensor(mesh: dict[str, object]) -> ObjectRecord:
    """The second half of a tensor of eight elements."""
    spec = {
        "mesh": _object("torch.distributed.device_mesh.DeviceMesh", mesh),
        "placements": (_object("torch.distributed.tensor.placement_types.Shard", {"dim": 0}),),
        "tensor_meta": None,
        "_hash": 9,
    }
    inner = {
        "_local_tensor": new_tensor("local", (4,), ElementType.FLOAT32),
        "_spec": _object("torch.distributed.tensor._dtensor_spec.DTensorSpec", spec),
    }
    kind, device = _named("torch.distributed.tensor", "DTensor"), _object("torch.device", args=("cuda", 1))
    made = (kind, _named("torch", "float32"), (8,), (1,), 0, None, device, False)
    rebuild = _named("torch._utils", "_rebuild_wrapper_subclass")
    return _object("torch._tensor._rebuild_from_type_v2", args=(rebuild, kind, made, (None, inner)))


def _written(mesh: dict[str, object]) -> ObjectRecord:
    """What rank 2 of 3 is given, of a tensor that ranks 0 and 1 have saved."""
    local = new_tensor("new", (2,), ElementType.FLOAT32)
    return Meshes("folder", saved_size=2, rank=2, size=3).dtensor(_dtensor(mesh), local)


def _inner(tensor: ObjectRecord) -> dict[str, object]:
    state = tensor.args[3]
    assert isinstance(state, tuple) and isinstance(state[1], dict)
    return state[1]


def test_what_depends_on_the_ranks_is_that_of_the_new_ones() -> None:
    """Ranks, coordinate and groups; names and the device's type stay, hashes are computed anew."""
    spec = _inner(_written(MESH))["_spec"]
    assert isinstance(spec, ObjectRecord) and isinstance(spec.state, dict) and spec.state["_hash"] is None
    mesh = spec.state["mesh"].state
    ranks = mesh.pop("mesh")
    assert isinstance(ranks, TensorRecord) and ranks.shape == (3,)
    assert ranks_data(3) == {ranks.storage.key: bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])}
    assert mesh == {
        "device_type": "cuda",
        "mesh_dim_names": ("fsdp",),
        "_thread_id": None,
        "_parent_mesh": None,
        "_flatten_mesh_list": (0, 1, 2),
        "_coordinate_on_dim": [2],
        "_dim_group_infos": [("ptd:0", [0, 1, 2], "0")],
        "_hash": None,
    }


def test_the_new_tensor_is_the_new_rank_s_and_on_the_cpu() -> None:
    written = _written(MESH)
    held = shard_of("file", "name", written)
    assert held is not None and (held.shape, held.dim, held.rank, held.local.shape) == ((8,), 0, 2, (2,))
    made = written.args[2]
    assert isinstance(made, tuple) and made[6].args == ("cpu",)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"_new_in_torch_3": 1}, "a mesh's _new_in_torch_3 is not known"),
        ({"_flatten_mesh_list": (2, 3)}, r"a mesh of the ranks \(2, 3\)"),
        ({"_parent_mesh": "another"}, "a mesh's _parent_mesh"),
    ],
)
def test_a_mesh_that_is_not_known_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(UnsupportedLayout, match=text):
        _written({**MESH, **change})
