"""Run as a script: install the DeepSpeed hooks in each order of imports, remove them, and say what differs as JSON.

Each argument is one order. Orders that begin alike share the process of what they begin with, and fork where they part.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from itertools import groupby
from types import ModuleType
from typing import Any

STEPS = {
    "auto": lambda: importlib.import_module("ds_reshard.auto"),
    "torch": lambda: importlib.import_module("torch"),
    "deepspeed": lambda: importlib.import_module("deepspeed"),
    "install": lambda: importlib.import_module("ds_reshard").install("deepspeed"),
    "remove": lambda: importlib.import_module("ds_reshard").uninstall("deepspeed"),
}


def held() -> dict[str, int]:
    """Which object every name of DeepSpeed's and torch's optimizer modules, and of each patched class, holds."""
    from ds_reshard.hosts import table

    found = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.startswith(("deepspeed", "torch.optim")):
            found.update({f"{name}.{key}": id(value) for key, value in list(vars(module).items())})
    for patch in table("deepspeed").patches:
        owner: Any = sys.modules.get(patch.module)
        for part in patch.path[:-1]:
            owner = getattr(owner, part)
        found.update({f"{patch.target.rpartition('.')[0]}.{key}": id(value) for key, value in vars(owner).items()})
    return found


def follow(orders: list[tuple[str, ...]], taken: tuple[str, ...] = ()) -> None:
    """Go on with each of these orders, sorted, in a process that has `taken` the steps before."""
    for step, alike in groupby(orders, key=lambda order: order[:1]):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        if step:
            STEPS[step[0]]()
            follow([order[1:] for order in alike], taken + step)
        else:
            tell(" ".join(taken))
        sys.stdout.flush()
        os._exit(0)


def tell(order: str) -> None:
    import ds_reshard

    states = {status.target: status.state for status in ds_reshard.installed() if status.host == "deepspeed"}
    during = held()
    ds_reshard.uninstall("deepspeed")
    ds_reshard.uninstall("deepspeed")
    before = held()
    with ds_reshard.install("deepspeed"):
        again = held()
    after = held()
    print(
        "SAID"
        + json.dumps(
            {
                "order": order,
                "states": states,
                "changed": sorted(n for n in before if during[n] != before[n]),
                "again": sorted(n for n in before if again[n] != before[n]),
                "left": sorted(n for n in {*before, *after} if before.get(n) != after.get(n)),
                "ours": _ours(),
            }
        )
    )


def _ours() -> list[str]:
    """The targets at which a function of ours stands."""
    from ds_reshard.hosts import table

    found = []
    for patch in table("deepspeed").patches:
        stands: Any = sys.modules.get(patch.module)
        for part in patch.path:
            stands = getattr(stands, part)
        if "ds_reshard" in stands.__code__.co_filename:
            found.append(patch.target)
    return found


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    import ds_reshard  # noqa: F401

    follow(sorted(tuple(order.split()) for order in sys.argv[1:]))
