"""On each rank: DeepSpeed's engine loads what was converted for it, and saves it again; no hooks."""

from __future__ import annotations

from math import prod


def through(shapes: dict[str, tuple[int, ...]], decayed: list[str], batch: int, source: str, out: str) -> bool:
    """ZeRO-2 of a bf16 module with these parameters, in two groups; whether its engine has loaded a checkpoint."""
    import deepspeed
    import torch

    net = torch.nn.Module()
    for name, shape in shapes.items():
        *modules, leaf = name.split(".")
        at = net
        for module in modules:
            if not hasattr(at, module):
                at.add_module(module, torch.nn.Module())
            at = getattr(at, module)
        at.register_parameter(leaf, torch.nn.Parameter(torch.zeros(prod(shape)).view(shape)))
    named = dict(net.named_parameters())
    groups = [
        {"params": [named[name] for name in shapes if (name in decayed) is decays], "weight_decay": 0.01 * decays}
        for decays in (True, False)
    ]
    config = {
        "train_batch_size": batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=net, config=config, optimizer=torch.optim.AdamW(groups, lr=1e-4), dist_init_required=False
    )
    path, client_state = engine.load_checkpoint(source)
    engine.save_checkpoint(out, client_state=client_state)
    return path is not None
