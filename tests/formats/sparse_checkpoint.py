"""A synthetic ZeRO-2 checkpoint of any size: real structure, and tensors that are holes in sparse files.

No run wrote it. Zip layout and pickles are those of torch.save (`torch.load` reads them); every tensor is
zeros that take no disk, with the checksum that zeros of that length have.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ds_reshard.containers.crc import crc32, repeated

Shape = tuple[int, ...]
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_STORAGES = {torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage}


@dataclass(frozen=True)
class Hole:
    """A tensor of zeros, to be written as a hole."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class _Storage:
    """Stands for the storage of a hole in the pickle."""

    def __init__(self, key: str, hole: Hole) -> None:
        self.key = key
        self.hole = hole


class _Pickler(pickle.Pickler):
    """Pickles holes as torch pickles tensors: `_rebuild_tensor_v2` of a storage named by a persistent id."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.holes: list[Hole] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Hole):
            return NotImplemented
        storage = _Storage(str(len(self.holes)), value)
        self.holes.append(value)
        strides = tuple(prod(value.shape[i + 1 :]) for i in range(len(value.shape)))
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", _STORAGES[value.hole.dtype], value.key, "cpu", value.hole.numel


def write_sparse(path: Path, value: object) -> None:
    """Write `value` as torch.save would, its Holes as holes; each file must stay under 4 GiB."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    texts = [("data.pkl", stream.getvalue()), (".format_version", b"1"), ("byteorder", b"little")]
    members = [(name, data, len(data), crc32(data)) for name, data in texts]
    members += [(f"data/{i}", b"", h.nbytes, repeated(b"\0", h.nbytes)) for i, h in enumerate(pickler.holes)]
    members.append(("version", b"3\n", 2, crc32(b"3\n")))
    directory = b""
    with path.open("wb") as file:
        for name, data, nbytes, crc in members:
            full, header = f"{path.stem}/{name}".encode(), file.tell()
            gap = -(header + _LOCAL.size + len(full) + 4) % 64  # torch aligns every record to 64 bytes
            extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
            file.write(_LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, crc, nbytes, nbytes, len(full), len(extra)))
            file.write(full + extra + data)
            file.seek(nbytes - len(data), io.SEEK_CUR)
            sizes = (crc, nbytes, nbytes, len(full), 0, 0, 0, 0, 0, header)
            directory += _ENTRY.pack(b"PK\x01\x02", 0, 0, 0, 0, 0, 0, *sizes) + full
        start = file.tell()
        count = len(members)
        file.write(directory + _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0))


def gpt_shapes(layers: int, width: int, vocabulary: int = 32000) -> dict[str, Shape]:
    """The parameters of a GPT, by name."""
    shapes: dict[str, Shape] = {"embed.weight": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _block(width)}
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)}


def _block(width: int) -> Iterator[tuple[str, Shape]]:
    for name, outputs, inputs in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
        yield f"{name}.weight", (outputs * width, inputs * width)
        yield f"{name}.bias", (outputs * width,)
    for name in ("norm1", "norm2"):
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def write_checkpoint(folder: Path, shapes: dict[str, Shape], dp: int) -> int:
    """Write a ZeRO-2 checkpoint of AdamW (one param group) under `folder`; returns its bytes."""
    tag = folder / "global_step1000"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    config = {
        "train_batch_size": dp,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    total = sum(map(prod, shapes.values()))
    chunk = -(-total // (2 * dp)) * 2
    write_sparse(
        tag / "mp_rank_00_model_states.pt",
        {
            "module": OrderedDict((name, Hole(shape, torch.bfloat16)) for name, shape in shapes.items()),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedDict(shapes)],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "lr_scheduler": None,
            "global_steps": 1000,
            "global_samples": 1000 * dp,
            "skipped_steps": 0,
            "dp_world_size": dp,
            "mp_world_size": 1,
            "ds_config": config,
            "ds_version": "0.19.8",
        },
    )
    for rank in range(dp):
        used = max(0, min(chunk, total - rank * chunk))
        write_sparse(
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", _optimizer_file(used, chunk, dp, rank, config)
        )
    return sum(file.stat().st_size for file in tag.iterdir())


def _optimizer_file(used: int, chunk: int, dp: int, rank: int, config: dict[str, Any]) -> dict[str, Any]:
    moments = {kind: Hole((chunk,), torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 1000, "params": [0]}
    return {
        "optimizer_state_dict": {
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": {0: moments}, "param_groups": [group]},
            "single_partition_of_fp32_groups": [Hole((used,), torch.float32)],
            "zero_stage": 2,
            "group_paddings": [chunk - used],
            "partition_count": [dp],
            "ds_version": "0.19.8",
            "param_slice_mappings": [OrderedDict()],
        },
        "ds_config": config,
        "ds_version": "0.19.8",
    }
