"""Universal checkpoints for tests: what a load of one reads, and folders that DeepSpeed's converter does not make."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from cases import Model, Run
from gathered import gathered, scalars
from jobs import build


def measured(run: Run, model: Model, folder: str) -> tuple[int, int, set[str]]:
    """Bytes that one rank's load read of tensors, bytes that the rank then holds, and the files that it read."""
    import ds_reshard
    from ds_reshard.hosts.deepspeed import load as host

    moved: list[Any] = []
    move = host.move
    host.move = lambda *arguments: moved.append(move(*arguments)) or moved[0]
    engine = build(run, model, seed=99)
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    finally:
        host.move = move
    optimizer = engine.optimizer
    if run.stage == 3:
        held = [*optimizer.fp32_partitioned_groups_flat, *optimizer.fp16_partitioned_groups_flat]
        held += [param.ds_tensor for param in engine.module.parameters() if not param.requires_grad]
    else:
        held = [*optimizer.single_partition_of_fp32_groups, *engine.module.state_dict().values()]
    held += [
        t for state in optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()
    ]
    return moved[0].bytes_read, sum(t.numel() * t.element_size() for t in held), set(moved[0].files)


def write_universal(saved: Path, held: list[dict[str, Any]], into: Path) -> Path:
    """A universal folder with every state that the run held, as ds_reshard writes one. Synthetic: not of DeepSpeed.

    Model file and common state are those of a real save at stage 1 or 2.
    """
    tag = (saved / "latest").read_text()
    folder = into / "universal"
    (folder / "zero").mkdir(parents=True)
    shutil.copy(saved / tag / "mp_rank_00_model_states.pt", folder)
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    shard = torch.load(next((saved / tag).glob("*_rank_0_*_optim_states.pt")), weights_only=False)
    common = dict(shard["optimizer_state_dict"])
    groups = common.pop("base_optimizer_state")["param_groups"]
    for name in ("single_partition_of_fp32_groups", "param_slice_mappings"):
        common.pop(name)
    kinds = set()
    for (name, kind), values in gathered(held).items():
        (folder / "zero" / name).mkdir(exist_ok=True)
        torch.save({"param": values.view(shapes[name])}, folder / "zero" / name / f"{kind}.pt")
        kinds.add(kind)
    for (name, kind), value in scalars(held).items():
        if value is not None:
            torch.save(torch.tensor(value), folder / "zero" / name / f"{kind}.pt")
            kinds.add(kind)
    states = sorted(kinds - {"fp32"})
    torch.save({**common, "param_groups": groups, "ds_reshard": {"states": states}}, folder / "zero/optimizer_state.pt")
    (into / "latest_universal").write_text("universal")
    return into
