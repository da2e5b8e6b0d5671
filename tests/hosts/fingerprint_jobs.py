"""Jobs about fingerprints: a state that is saved again under another layout, and loads that prove themselves."""

from __future__ import annotations

from typing import Any

import jobs
from cases import Model, Run


def save_as(run: Run, model: Model, folder: str, to: str) -> dict[str, Any]:
    """Load a checkpoint and save it, untrained, under this run's layout."""
    import ds_reshard

    engine = jobs.build(run, model, seed=99)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    engine.save_checkpoint(to)
    return jobs.contents(engine)
