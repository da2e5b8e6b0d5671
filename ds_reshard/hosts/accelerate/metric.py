"""accelerate's wrapper of a scheduler that wants a metric, and is so told from the others by those who step it.

Hugging Face's Trainer asks `isinstance(scheduler, ReduceLROnPlateau)` to decide whether it steps after each update, or
with a metric after each evaluation (`_run_epoch` and `_evaluate` in transformers/trainer.py, 5.23).
Imported only where accelerate is.
"""

from __future__ import annotations

from accelerate.scheduler import AcceleratedScheduler


class SchedulerOfAMetric(AcceleratedScheduler):  # type: ignore[misc]
    """Passes for its scheduler's class as well."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.scheduler)
