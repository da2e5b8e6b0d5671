"""Imports ds_reshard before processes are forked, so that no fork imports it again."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import ds_reshard


def import_with(*hosts: str) -> None:
    """Import every module of the package but its commands and those of hosts other than `hosts`; nothing is patched."""
    left_out = {"auto", "run", "dcp", "__main__", "cli", "testing"}
    for module in walk_packages(ds_reshard.__path__, "ds_reshard."):
        _, room, *rest = module.name.split(".")
        if room not in left_out and (room != "hosts" or not rest or rest[0] in hosts):
            import_module(module.name)
