"""Python runs this when it starts with this folder on PYTHONPATH: `import ds_reshard.auto`, before any framework.

The import waits for the first framework, so that a process which loads none starts as fast as without it. The next
`sitecustomize` on the path, which this one hides, runs as well. An interpreter that is too old for ds_reshard, or lacks
one of its requirements, is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
FRAMEWORKS = frozenset(
    {"accelerate", "bitsandbytes", "deepspeed", "megatron", "nanotron", "torch", "transformers", "verl"}
)
"""The packages that ds_reshard patches; a test compares them with the tables of `ds_reshard.hosts`."""
_REQUIREMENTS = ("isal", "numpy", "packaging")


class FirstFramework:
    """A finder of modules that puts the hooks on when the first framework is imported, before that is looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FRAMEWORKS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        put_hooks_on()
        # The caller goes through a list that has just changed: the others are asked here.
        found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        return next((spec for spec in found if spec is not None), None)


def put_hooks_on() -> None:
    """Import `ds_reshard.auto`, from this folder's own package where the interpreter finds no other.

    Raises what that raises of a policy that cannot be applied.
    """
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    before = set(sys.modules)
    try:
        if find_spec("ds_reshard") is None:
            if not all(find_spec(name) for name in _REQUIREMENTS):
                return
            own = os.path.join(PACKAGE, "__init__.py")
            spec = spec_from_file_location("ds_reshard", own, submodule_search_locations=[PACKAGE])
            assert spec is not None and spec.loader is not None
            sys.modules["ds_reshard"] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules["ds_reshard"])
        import ds_reshard.auto  # noqa: F401
    except ImportError:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "ds_reshard":
                del sys.modules[name]


def run_hidden() -> None:
    """Run the next `sitecustomize` on the path, as Python would have done; its errors are Python's to print."""
    own = [number for number, place in enumerate(sys.path) if os.path.abspath(place) == HERE]
    behind = sys.path[own[0] + 1 :] if own else sys.path
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    hidden = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(hidden)


if sys.version_info >= (3, 10):  # noqa: UP036 - any interpreter may find this folder on its path
    if FRAMEWORKS.isdisjoint(sys.modules):
        sys.meta_path.insert(0, FirstFramework())
    else:
        put_hooks_on()
run_hidden()
