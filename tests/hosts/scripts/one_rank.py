"""Train one rank, save, and resume at another ZeRO stage; prints what came back. Run as a script in a fresh process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ports import free_port

STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), required=True)
    parser.add_argument("--stages", type=int, nargs=2, required=True, help="saved at, loaded at")
    parser.add_argument("--policy", type=json.loads, default={})
    parser.add_argument("--reshard", type=json.loads, default={})
    given = parser.parse_args()
    _join(given.device)
    import ds_reshard

    engine = _engine(given.stages[0], given.device, given.dtype, power=8, lr=0.01, section={})
    _train(engine, 0)
    saved = _held(engine)
    engine.save_checkpoint(given.folder)
    engine = _engine(
        given.stages[1],
        given.device,
        given.dtype,
        power=12,
        lr=0.001,
        section={"resume": given.policy, "reshard": given.reshard},
    )
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(given.folder)
    loaded = _held(engine)
    wrong = [key for key, value in saved["tensors"].items() if not _same(value, loaded["tensors"].get(key))]
    rates = _train(engine, STEPS)
    print(
        json.dumps(
            {
                "tensors": len(saved["tensors"]),
                "wrong": wrong,
                "first_rate": rates[0],
                "scales": [saved["scale"], loaded["scale"]],
            }
        )
    )


def _join(device: str) -> None:
    port = free_port()
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR=device,
    )
    import deepspeed
    import jobs

    jobs.load_frameworks()
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)


def _engine(stage: int, device: str, dtype: str, *, power: int, lr: float, section: dict[str, Any]) -> Any:
    """An engine whose loss scale begins at 2 ** `power`, and doubles with every second step."""
    import deepspeed
    import jobs
    import torch
    from cases import Model, Run, ds_config

    scaling = {"initial_scale_power": power, "loss_scale_window": 2} if dtype == "fp16" else {}
    config = ds_config(Run(stage, 1, dtype="none", config={dtype: {"enabled": True, **scaling}}))
    config["ds_reshard"] = section
    torch.manual_seed(7)
    net = jobs.Net(Model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    assert engine.device.type == device
    return engine


def _train(engine: Any, first: int) -> list[float]:
    """Five steps; the learning rate that each used."""
    import jobs

    rates = []
    for step in range(first, first + STEPS):
        loss = engine(*(part.to(engine.device) for part in jobs.batch(step, 0, 1)))
        engine.backward(loss)
        rates.append(float(engine.optimizer.param_groups[0]["lr"]))
        engine.step()
    assert engine.skipped_steps == 0, "a step overflowed, so the scale is not what it was meant to be"
    return rates


def _held(engine: Any) -> dict[str, Any]:
    import jobs
    from gathered import gathered

    held = jobs.contents(engine)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    tensors = {f"{name}[{kind}]": value.cpu() for (name, kind), value in gathered([held]).items()}
    return {"tensors": tensors, "scale": getattr(scaler, "cur_scale", None)}


def _same(one: Any, other: Any) -> bool:
    from gathered import same_bits

    return other is not None and same_bits(one, other)


if __name__ == "__main__":
    main()
