"""Resume with a tenth of the learning rate, with no flag and with the override; the moments stay, bit for bit.

python examples/03_new_learning_rate.py [PICTURE]  # which rate each update used, and whether ds-reshard lr foretold it
"""

import json
import os
import subprocess
import sys
import tempfile

import deepspeed
import torch

import ds_reshard.auto  # noqa: F401


def config(lr, **resume) -> dict:
    schedule = {"warmup_max_lr": lr, "warmup_num_steps": 10, "total_num_steps": 100}
    adam = {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}
    return {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": adam,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "ds_reshard": {"resume": resume},
    }


def run(config: dict, folder: str, steps: int) -> tuple[list[float], list[bytes], list[bytes]]:
    """The rate that each update used, and the optimizer's states before the first and after the last."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.load_checkpoint(folder)
    adam, used = engine.optimizer.optimizer, []

    def states() -> list[bytes]:
        return [value.cpu().numpy().tobytes() for state in adam.state.values() for _, value in sorted(state.items())]

    adam.register_step_pre_hook(lambda adam, *_: used.append(adam.param_groups[0]["lr"]))
    before, first = states(), engine.global_steps
    for step in range(first, first + steps):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(engine.device, torch.bfloat16)
        engine.backward(torch.nn.functional.mse_loss(engine(batch), batch.sum(1, keepdim=True)))
        engine.step()
    engine.save_checkpoint(folder, save_latest=first == 0)
    return used, before, states()


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and one rank does not need it
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/new.json", "w") as new:
        print(json.dumps(config(0.001)), file=new, flush=True)
        used, _, saved = run(config(0.01), folder, steps=20)
        print(f"saved after 20 updates, the last at {used[-1]:.6f}", flush=True)
        command = [sys.executable, "-m", "ds_reshard", "lr", folder, "--config", new.name, "--json"]
        told = json.loads(subprocess.check_output([*command, *(f"--png={path}" for path in sys.argv[1:])]))["curves"]
        for curve, asked in {"no flag": {}, "override": {"scheduler": "override"}}.items():
            used, loaded, _ = run(config(0.001, **asked), folder, steps=5)
            print(
                f"{curve}: {', '.join(f'{lr:.6f}' for lr in used[:3])},",
                "as foretold," if used == told[curve]["rates"][0][:5] else "NOT AS FORETOLD,",
                "moments bit-identical" if loaded == saved else "MOMENTS CHANGED",
                flush=True,
            )
