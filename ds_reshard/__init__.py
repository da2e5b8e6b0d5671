"""Checkpoints that resume under another topology, bit for bit.

`import ds_reshard.auto` in a training script is all that most need. Importing this package loads no
framework and patches nothing; names other than the errors are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ChecksumMismatch,
    ConfigError,
    DeviceFailed,
    EngineUnusable,
    Fault,
    FingerprintMismatch,
    HookError,
    InternalError,
    ModelMismatch,
    ParamGroupMismatch,
    PrepareError,
    RankLost,
    ReadFailed,
    ReshardError,
    ScheduleMismatch,
    TrustRequired,
    UnsafePickle,
    UnsupportedLayout,
    WriteFailed,
)
from ds_reshard.version import VERSION

if TYPE_CHECKING:
    from ds_reshard.hosts import install, installed, uninstall
    from ds_reshard.hosts.accelerate.diagnostic import diagnose
    from ds_reshard.hosts.accelerate.prepare_arguments import prepare
    from ds_reshard.hosts.fsdp.saved import save_units, verify_saved
    from ds_reshard.resume.policy import ResumePolicy
    from ds_reshard.resume.report import last_report
    from ds_reshard.run import add_arguments

__version__ = VERSION

__all__ = [
    "CheckpointDamaged",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "ConfigError",
    "DeviceFailed",
    "EngineUnusable",
    "Fault",
    "FingerprintMismatch",
    "HookError",
    "InternalError",
    "ModelMismatch",
    "ParamGroupMismatch",
    "PrepareError",
    "RankLost",
    "ReadFailed",
    "ReshardError",
    "ResumePolicy",
    "ScheduleMismatch",
    "TrustRequired",
    "UnsafePickle",
    "UnsupportedLayout",
    "WriteFailed",
    "__version__",
    "add_arguments",
    "diagnose",
    "install",
    "installed",
    "last_report",
    "prepare",
    "save_units",
    "uninstall",
    "verify_saved",
]

_HOME = {
    "ResumePolicy": "ds_reshard.resume.policy",
    "add_arguments": "ds_reshard.run",
    "diagnose": "ds_reshard.hosts.accelerate.diagnostic",
    "install": "ds_reshard.hosts",
    "installed": "ds_reshard.hosts",
    "last_report": "ds_reshard.resume.report",
    "prepare": "ds_reshard.hosts.accelerate.prepare_arguments",
    "save_units": "ds_reshard.hosts.fsdp.saved",
    "uninstall": "ds_reshard.hosts",
    "verify_saved": "ds_reshard.hosts.fsdp.saved",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
