"""`ds_reshard.dcp.Reader` over a folder of each format: weights in either type, and moments, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nanotron_builder import MODEL, Run, values, write
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from ds_reshard.dcp import LoadPlanner, Reader
from ds_reshard.operations import convert

CAST = ("zero3", "dcp", "accelerate", "pytorch")
"""These keep the masters alone: 16-bit weights are their rounding, where that is allowed."""

KINDS: dict[str, dict[str, int] | None] = {
    "nanotron": None,
    "zero1": {"dp": 2},
    "zero2": {"dp": 3},
    "zero3": {"dp": 2},
    "bf16": {"dp": 2},
    "universal": {},
    "dcp": {},
    "accelerate": {},
    "pytorch": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["masters", "16 bit by URL"])
def test_each_format_is_read(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, held, how = str(write(Run(dp=2), tmp_path / "saved")), values(Run()), KINDS[kind]
    if how is not None:
        convert(folder, f"{tmp_path}/out", to=kind, **how)
        folder = f"{tmp_path}/out"
    if dtype is torch.bfloat16:
        folder = f"file://{folder}"
        assert Reader.validate_checkpoint_id(folder)
    model = {param.name: torch.zeros(param.shape, dtype=dtype) for param in MODEL}
    moments = {param.name: {"exp_avg": torch.zeros(param.shape)} for param in MODEL}
    state = {"model": model, "optimizer": {"state": moments}}
    dcp.load(state, storage_reader=Reader(folder, cast=kind in CAST), planner=LoadPlanner())
    wanted = "fp32" if dtype is torch.float32 else "weight"
    assert [p.name for p in MODEL if not torch.equal(model[p.name], held[p.name, wanted])] == []
    assert [p.name for p in MODEL if not torch.equal(moments[p.name]["exp_avg"], held[p.name, "exp_avg"])] == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_not_missing_under_its_other_name(tied: bool, tmp_path: Path) -> None:
    """As safetensors has it once; of a model that does not tie them the second is."""
    saved = {"embed.weight": torch.randn(5, 3), "nothing": torch.zeros(0)}
    save_file(saved, tmp_path / "model.safetensors")
    weight, nothing = torch.zeros(5, 3), torch.zeros(0)
    head = weight.detach() if tied else torch.zeros(5, 3)
    model = {"embed.weight": weight, "head.weight": head, "nothing": nothing, "of it": nothing.detach()}
    for partial in (False, True):
        planner = LoadPlanner(allow_partial_load=partial)
        if not (tied or partial):
            with pytest.raises(CheckpointException, match=r"ModelMismatch.*\n.*model\.head\.weight: "):
                dcp.load({"model": model}, storage_reader=Reader(str(tmp_path)), planner=planner)
            continue
        dcp.load({"model": model}, storage_reader=Reader(str(tmp_path)), planner=planner)
        assert torch.equal(weight, saved["embed.weight"]) and torch.equal(head, weight) is tied
        weight.zero_()
