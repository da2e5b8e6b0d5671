"""Synthetic: weights, each from the file of its own name; what is cut otherwise is joined by the real one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def load_weights(
    model: Any, parallel_context: Any, root_folder: Path, filtered_state_dict: Any = None
) -> dict[str, Any]:
    for name, tensor in (filtered_state_dict or model.state_dict()).items():
        *folders, leaf = name.split(".")
        at = root_folder.joinpath("model", *folders)
        if not at.exists():
            raise ValueError(f"Couldn't find folder {at} in checkpoint at {root_folder}")
        tensor[:] = load_file(at / f"model_{leaf}.safetensors")["data"]
    return {name: {} for name in model.state_dict()}
