"""A nanotron checkpoint of two tensor-parallel ranks becomes one of three data-parallel ranks.

The checkpoint is synthetic: one parameter, written by nanotron's rules (commit 2411b02), with fp32 masters and ZeRO-1.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from ds_reshard.operations import convert, diff, inspect

MASTER, MOMENT = torch.arange(32.0).view(8, 4), torch.arange(32.0).view(8, 4) / 7


def save(step: Path, tp: int) -> None:
    for rank in range(tp):
        rows = slice(rank * 8 // tp, (rank + 1) * 8 // tp)
        slices = f"None,None,None|None,None,None#{rows.start},{rows.stop},None|None,None,None"
        said = {"version": "1.5", "unsharded_shape": "(8, 4)", "local_global_slices_pairs": slices}
        weight = step / f"model/up/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}.safetensors"
        weight.parent.mkdir(parents=True, exist_ok=True)
        save_file({"data": MASTER[rows].bfloat16()}, weight, metadata=said)
        flat = MOMENT[rows].reshape(-1).clone()
        state = {0: {"step": torch.tensor(7.0), "exp_avg": flat, "exp_avg_sq": flat**2}}
        groups = [{"lr": 2e-4, "initial_lr": 3e-4, "betas": (0.9, 0.95), "params": [0]}]
        saved = {"state": state, "param_groups": groups, "names": {0: "up.weight"}}
        saved["gradient_accumulator"] = {"up.weight": MASTER[rows].reshape(-1).clone()}
        file = step / f"optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-{rank}-of-{tp}_exp-0-of-1.pt"
        file.parent.mkdir(exist_ok=True)
        torch.save(saved, file)
    sizes = {"tp_size": str(tp), "dp_size": "1", "pp_size": "1", "expert_parallel_size": "1"}
    offsets = {"param_name_to_dp_rank_offsets": {"up.weight": {"0": ["0", str(32 // tp)]}}}
    config = {"type": "ZeroDistributedOptimizer", "parallelism": sizes, "configs": offsets}
    (step / "optimizer/optimizer_config.json").write_text(json.dumps(config))
    meta = {"version": "1.5", "tp": tp, "dp": 1, "cp": 1, "metas": {"last_train_step": 7}}
    (step / "checkpoint_metadata.json").write_text(json.dumps(meta))


with tempfile.TemporaryDirectory() as folder:
    save(Path(folder) / "saved/7", tp=2)
    (Path(folder) / "saved/latest.txt").write_text("7")
    convert(f"{folder}/saved", f"{folder}/out", to="nanotron", tp=1, dp=3)
    found = inspect(f"{folder}/out")
    print(f"step {found.tag}: tp {found.tp}, dp {found.dp}, ZeRO-{found.stage}, faults: {len(found.faults)}")
    part = torch.load(f"{folder}/out/7/optimizer/optimizer_pp-0-of-1_dp-1-of-3_tp-0-of-1_exp-0-of-1.pt")
    moments, masters = part["state"][0]["exp_avg"], part["gradient_accumulator"]["up.weight"]
    same = torch.equal(moments, MOMENT.view(-1)[11:22]) and torch.equal(masters, MASTER.view(-1)[11:22])
    print(f"rank 1 has elements 11 to 21 of moments and masters: {same}")
    print(f"tensors that differ: {len(diff(f'{folder}/saved', f'{folder}/out').differing)}")
