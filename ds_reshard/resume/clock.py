"""Who counts the steps of a schedule: DeepSpeed's engine, once an update, or accelerate, `num_processes` times.

accelerate steps a torch scheduler `num_processes` times an update (accelerate/scheduler.py, 1.15.0,
`AcceleratedScheduler.step`), DeepSpeed's engine steps its own once (deepspeed/runtime/engine.py, 0.19.8,
`_take_model_step`). The same schedule is another curve on the other clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_reshard.errors import ConfigError, Fault, raise_faults

ENGINE, ACCELERATE = "engine", "accelerate"
CLOCKS = (ENGINE, ACCELERATE)
PLACE = "ds_reshard.accelerate"


def clock_faults(section: object) -> list[Fault]:
    """What is wrong with the value of `"ds_reshard": {"accelerate": ...}`."""
    mend = f'write "ds_reshard": {{"accelerate": {{"clock": "{ENGINE}"}}}} in the DeepSpeed JSON'
    if not isinstance(section, Mapping):
        return [_fault(PLACE, "has a value that is not allowed", "an object", section, mend)]
    faults = [_fault(f"{PLACE}.{key}", "is not a setting", "clock", key, mend) for key in section if key != "clock"]
    clock = section.get("clock")
    if clock is not None and clock not in CLOCKS:
        expected = " or ".join(f'"{name}"' for name in CLOCKS)
        faults.append(_fault(f"{PLACE}.clock", "has a value that is not allowed", expected, clock, mend))
    return faults


def clock_in(config: Mapping[str, object]) -> str | None:
    """The clock that a DeepSpeed JSON asks for, None where it asks for none; ConfigError for anything else."""
    section = config.get("ds_reshard")
    asked = section.get("accelerate", {}) if isinstance(section, Mapping) else {}
    raise_faults(clock_faults(asked), subject="DeepSpeed config")
    clock = asked.get("clock")
    return clock if isinstance(clock, str) else None


def _fault(where: str, what: str, expected: str, found: object, mend: str) -> Fault:
    return ConfigError.fault(where, what, expected, repr(found), mend=mend)
