"""An engine that may hold half a checkpoint lets nobody step or save until a load succeeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_reshard.errors import EngineUnusable

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_GUARDED = ("step", "save_checkpoint", "save_16bit_model", "save_fp16_model")


def refuse_use(engine: DeepSpeedEngine, why: str) -> None:
    """Let the engine neither step nor save: it may hold half a checkpoint."""

    def refuse(*_: object, **__: object) -> object:
        raise EngineUnusable(f"{why}: the engine may hold parts of it; load a good checkpoint or build the engine anew")

    for name in _GUARDED:
        object.__setattr__(engine, name, refuse)


def restore_use(engine: DeepSpeedEngine) -> None:
    """Undo `refuse_use`, after a load that succeeded."""
    for name in _GUARDED:
        engine.__dict__.pop(name, None)
