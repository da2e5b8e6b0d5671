"""A load function of the script's own, which fills what it likes of the module."""

from __future__ import annotations

from typing import Any

import jobs
import torch
from cases import Model, Run
from logs import refusal


def load(run: Run, model: Model, folder: str, arguments: dict[str, Any], hooks: bool) -> dict[str, Any]:
    """Load all but the head, which the function leaves as it is; what engine and function got, or the refusal."""
    from contextlib import nullcontext

    import ds_reshard

    seen: list[str] = []

    def custom(src: dict[str, Any], dst: torch.nn.Module) -> None:
        seen.extend(sorted(src))
        own = dst.state_dict()
        for name in src.keys() & own.keys():
            if not name.startswith("head"):
                own[name].copy_(src[name])

    engine = jobs.build(run, model, seed=99)
    with ds_reshard.install("deepspeed") if hooks else nullcontext():
        refused = refusal(lambda: engine.load_checkpoint(folder, custom_load_fn=custom, **arguments))
    return {**jobs.contents(engine), "seen": seen, "refused": refused}
