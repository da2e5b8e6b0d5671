"""The `"ds_reshard"` section of the DeepSpeed JSON, parsed once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ds_reshard.containers.pickle_rules import trust_faults
from ds_reshard.errors import ConfigError, Fault, error_of, raise_faults, wrong_value
from ds_reshard.hooks import Call
from ds_reshard.model.rules import Rule, parse_rules, rule_faults
from ds_reshard.operations.watching import watching_faults
from ds_reshard.resume.policy import Given, from_json
from ds_reshard.resume.schedulers import clock_faults, clock_in

SECTION = "ds_reshard"
_TOP = ("enabled", "reshard", "resume", "trust", "accelerate", "names", "progress", "events", "timeout_s")
_RESHARD = ("unchanged", "threads", "memory_mib", "device", "verify", "tensor_parallel")


def _is_int_up_to(most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_VALUES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "enabled": ("true or false", _is_bool),
    "names": ("a map of names, or the path of one", lambda value: value is None or isinstance(value, str | dict)),
    "reshard.unchanged": ('"direct" or "deepspeed"', ("direct", "deepspeed").__contains__),
    "reshard.threads": ("a whole number from 1 to 256", _is_int_up_to(256)),
    "reshard.memory_mib": ("a whole number from 1 to 1048576", _is_int_up_to(1 << 20)),
    "reshard.device": ('one of "auto", "cpu", "cuda"', ("auto", "cpu", "cuda").__contains__),
    "reshard.verify": ('one of "crc32", "fingerprint", "off"', ("crc32", "fingerprint", "off").__contains__),
}
"""The expected value of each simple setting, as a text and as a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's settings.

    `unchanged` says who loads a checkpoint with the layout of this run: "direct" means ds_reshard, as for any other,
    "deepspeed" means DeepSpeed's own load. `threads` and `memory_mib` limit reading; `device` is where bytes for a GPU
    are cut and cast, "auto", "cpu" or "cuda"; `verify` is "crc32", "fingerprint" or "off"; `trust` are classes
    ("module.Class") that may be built if they occur in `client_state`; `resume` is the section's part of the resume
    policy; `clock` says who steps a scheduler that accelerate prepares, None if the section does not. `tensor_parallel`
    are rules of how tensor-parallel ranks divide parameters. `names` maps parameter names of the checkpoint to those of
    this run, as for `convert --names`, or is the path of such a map. `progress` is "auto" or "off", `events` a file,
    `timeout_s` how long ranks wait for each other; None means the setting of all hosts.
    """

    enabled: bool = True
    unchanged: str = "direct"
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    memory_mib: int = 64
    device: str = "auto"
    verify: str = "crc32"
    trust: frozenset[str] = frozenset()
    resume: Given = field(default_factory=lambda: from_json({}))
    clock: str | None = None
    names: str | Mapping[str, object] | None = None
    tensor_parallel: tuple[Rule, ...] = ()
    progress: str | None = None
    events: str | None = None
    timeout_s: int | None = None

    @property
    def memory_nbytes(self) -> int:
        return self.memory_mib << 20

    @property
    def checksum(self) -> bool:
        """True if bytes are compared with the checksums in their files when they are read."""
        return self.verify != "off"

    @property
    def prove(self) -> bool:
        """True if the engine's tensors after a load are compared with the bytes that were read."""
        return self.verify == "fingerprint"


def parse_settings(config: Mapping[str, object]) -> Settings:
    """Return the settings of a DeepSpeed config. Raises one ConfigError for all unknown keys and wrong values."""
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise error_of([wrong_value(SECTION, "an object", section)], subject="DeepSpeed config")
    faults = [_unknown_key(SECTION, key, _TOP) for key in section if key not in _TOP]
    reshard = section.get("reshard", {})
    if not isinstance(reshard, Mapping):
        faults.append(wrong_value(f"{SECTION}.reshard", "an object", reshard))
        reshard = {}
    faults += [_unknown_key(f"{SECTION}.reshard", key, _RESHARD) for key in reshard if key not in _RESHARD]
    values_by_key = {**section, **{f"reshard.{key}": value for key, value in reshard.items()}}
    for key, (expected, fits) in _VALUES.items():
        if key in values_by_key and not fits(values_by_key[key]):
            faults.append(wrong_value(f"{SECTION}.{key}", expected, values_by_key[key]))
    if (reshard.get("unchanged"), reshard.get("verify")) == ("deepspeed", "fingerprint"):
        what, mend = "proves nothing that it loads", 'remove it, or "verify": "fingerprint"'
        faults.append(ConfigError.fault(f"{SECTION}.reshard.unchanged", f"DeepSpeed {what}", '"direct"', mend=mend))
    rules, trust = reshard.get("tensor_parallel", []), section.get("trust", [])
    faults += rule_faults(f"{SECTION}.reshard.tensor_parallel", rules)
    faults += trust_faults(f"{SECTION}.trust", trust)
    faults += clock_faults(section.get("accelerate", {}))
    progress, events, timeout_s = (section.get(key) for key in ("progress", "events", "timeout_s"))
    faults += watching_faults(f"{SECTION}.", progress, events, timeout_s)
    raise_faults(faults, subject="DeepSpeed config")
    values = {key.removeprefix("reshard."): values_by_key[key] for key in _VALUES if key in values_by_key}
    return Settings(
        **values,
        trust=frozenset(trust),
        resume=from_json(section.get("resume", {})),
        clock=clock_in(config),
        tensor_parallel=parse_rules(rules),
        progress=progress,
        events=events,
        timeout_s=timeout_s,
    )


class Config(Protocol):
    """`DeepSpeedConfig` (runtime/config.py)."""

    _param_dict: Mapping[str, object]
    world_size: int


def check_batch(call: Call) -> None:
    """Run DeepSpeed's check of the batch sizes; if it fails, raise a ConfigError with the numbers of ranks that fit.

    `train_batch_size` is micro batch x accumulation x data-parallel ranks (`_batch_assertion`, runtime/config.py).
    """
    try:
        call()
    except AssertionError:
        config: Config = call["self"]
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        sizes = {name: config._param_dict.get(name) for name in names}
        batch, micro, steps = (value if isinstance(value, int) and value > 0 else None for value in sizes.values())
        if batch is None:
            raise
        ranks = int(config.world_size)  # a float if ranks share sequences
        found = ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)
        what = f"the global batch cannot be divided among {ranks} data-parallel ranks"
        expected = "train_batch_size = micro batch x accumulation x data-parallel ranks"
        fault = ConfigError.fault(
            "DeepSpeed config", what, expected, found, mend=_batch_mend(batch, micro, steps, ranks)
        )
        raise_faults([fault], subject="DeepSpeed config")


def _batch_mend(batch: int, micro: int | None, steps: int | None, world: int) -> str:
    """Return advice on a batch that ranks cannot divide: numbers of ranks that fit the other settings, or a setting."""
    share = (micro or 1) * (steps or 1)
    fixed = micro is not None and steps is not None
    sizes = [ranks for ranks in range(1, batch // share + 1) if not batch % (share * ranks)]
    sizes = [ranks for ranks in sizes if not fixed or share * ranks == batch]
    multiple = share * world
    if fixed and micro is not None and batch % (micro * world) == 0:
        other = f"leave out gradient_accumulation_steps, which then is {batch // (micro * world)}"
    elif sizes and micro is not None and batch % ((steps or 1) * world) == 0:
        other = f"set train_micro_batch_size_per_gpu to {batch // ((steps or 1) * world)}"
    else:
        other = f"make train_batch_size {multiple}" if fixed else f"make train_batch_size a multiple of {multiple}"
    fitting = ", ".join(map(str, sizes[-12:]))
    return f"run on as many data-parallel ranks as divide it ({fitting}), or {other}" if sizes else other


def _unknown_key(section: str, key: str, allowed: tuple[str, ...]) -> Fault:
    mend = f'remove or correct "{key}" in the "{SECTION}" section of the DeepSpeed JSON'
    if key == "always":
        mend = 'remove it: an unchanged layout is read directly; "unchanged": "deepspeed" leaves it to DeepSpeed'
    return ConfigError.fault(
        f"{section}.{key}", "is not a setting", f"one of {', '.join(allowed)}", repr(key), mend=mend
    )
