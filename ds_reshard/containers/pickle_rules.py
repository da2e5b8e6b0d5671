"""What the pickles of a checkpoint may name: the table, what the user trusts, and what is said of anything else.

Whether a module happens to be imported changes nothing. What the user trusts is added by name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice

from ds_reshard.containers.pickle_table import ALLOWED, TRUSTED, Allowed, Args
from ds_reshard.errors import Fault, TrustRequired, UnsafePickle, trusting, wrong_value
from ds_reshard.model.context_value import context_value
from ds_reshard.model.records import GlobalName, ObjectRecord


class Callee:
    """A name on the stack of a pickle that is there to be called, and for nothing else."""

    __slots__ = ("name",)

    def __init__(self, name: GlobalName) -> None:
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A use of a name that is not allowed: the offset of its instruction in the pickle, and what it does there.

    `name` is empty where the instruction itself is what no pickle of a checkpoint has. `called` is one that is called,
    or given state or items, and not only named.
    """

    byte: int
    name: str
    what: str
    called: bool


class PickleRules:
    """What the pickles of one checkpoint may name: the table, and what the user trusts.

    `passed` are the files of one pickle each that was read and passed. With `everything` all may be named: for a reader
    of what nothing else will load.
    """

    __slots__ = ("everything", "passed", "trusted")

    def __init__(self, trusted: Iterable[str] = (), *, everything: bool = False) -> None:
        self.trusted = frozenset(trusted)
        self.everything = everything
        self.passed: set[str] = set()

    def note(self, path: str) -> None:
        """The one pickle of this file has passed."""
        if not self.everything:
            self.passed.add(os.path.abspath(path))

    def of(self, module: str, name: str) -> Allowed | None:
        """How a name may be used; None where it may not."""
        found = ALLOWED.get((module, name))
        if found is not None:
            return found
        dotted = f"{module}.{name}"
        return TRUSTED if self.everything or (dotted in self.trusted and not acts(dotted)) else None


_TRUSTED_ALWAYS: set[str] = set()


def trust(names: Iterable[str]) -> None:
    """Let the pickles of every checkpoint that this process loads name these classes, as "module.Class"."""
    _TRUSTED_ALWAYS.update(names)


def trusted(*more: Iterable[str]) -> frozenset[str]:
    """What this process trusts, together with `more` (a host's own configuration)."""
    return frozenset(_TRUSTED_ALWAYS).union(*more)


def trust_in(config: object) -> list[str]:
    """What the "ds_reshard" section of a DeepSpeed JSON trusts; its mistakes are told where the section is parsed."""
    section = config.get("ds_reshard") if isinstance(config, Mapping) else None
    names = section.get("trust") if isinstance(section, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def trust_faults(where: str, names: object) -> list[Fault]:
    """What is wrong with a list of classes to trust, as ConfigError; `where` is the setting that has it."""
    if not isinstance(names, list):
        return [wrong_value(where, _NAMES, names)]
    wrong = [name for name in names if not isinstance(name, str) or not _CLASS.fullmatch(name)]
    acting = [name for name in names if name not in wrong and acts(name)]
    return [*(wrong_value(where, _NAMES, name) for name in wrong), *(wrong_value(where, _OWN, name) for name in acting)]


_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_NAMES = 'a list of "module.Class" names'
_OWN = "a class that holds data: nobody can vouch for functions of the machine, or for those that load files"


_IN_FORCE: ContextVar[PickleRules | None] = ContextVar("pickle rules", default=None)


def in_force(rules: PickleRules) -> AbstractContextManager[None]:
    """Let every pickle that is read inside the block be read under these rules."""
    return context_value(_IN_FORCE, rules)


def rules_in_force() -> PickleRules:
    """The rules of the tool or load under way; without any, what this process trusts."""
    return _IN_FORCE.get() or PickleRules(trusted())


UNSAFE = ("UnsafePickle", "TrustRequired")
"""The errors of faults about what acts in a pickle."""

ALLOW_ALL = PickleRules(everything=True)
"""Of a reader of what nothing else will load."""


# -- what certainly acts -----------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions of torch and numpy that open files, run code or call what they are given; a name ending with a point is all
# of a module.
_ACTING = _names(
    "torch.load torch.save torch.from_file torch.jit. torch.hub. torch.package. torch.serialization. torch.ops. "
    "torch.utils. torch._dynamo. torch._inductor. torch._C. torch.fx. torch.export. torch.compile "
    "torch.distributed.rpc. torch.distributed.elastic. torch.distributed.run. torch.multiprocessing. numpy.load "
    "numpy.save numpy.loadtxt numpy.savetxt numpy.fromfile numpy.memmap numpy.lib. numpy.f2py. numpy.testing. "
    "numpy.distutils. numpy.ctypeslib. numpy.vectorize numpy.frompyfunc"
)
# Modules of the standard library whose classes hold data alone; what a user derives from them may be trusted.
_HOLDING = _names(
    "argparse array collections dataclasses datetime decimal enum fractions ipaddress numbers pathlib random re "
    "statistics string time typing uuid zoneinfo"
)
_PYTHON_2 = _names("__builtin__ cPickle cStringIO commands copy_reg exceptions popen2 urllib2")
_RUNNING = _names("IPython _pyrepl cloudpickle dill joblib pip pkg_resources setuptools test")


def acts(dotted: str) -> bool:
    """Whether a name is one that no user could vouch for as a class that holds data.

    True for the standard library, but for its modules of plain values; for what installs or runs code; and for those
    functions of torch and numpy that open, run or call what they are given.
    """
    root, last = dotted.partition(".")[0], dotted.rpartition(".")[2]
    if root in _HOLDING and (last[:1].isupper() or root == "array"):
        return False
    if root in sys.stdlib_module_names or root in _PYTHON_2 or root in _RUNNING:
        return True
    return any(dotted == one or (one.endswith(".") and dotted.startswith(one)) for one in _ACTING)


def fault_of(finding: Finding, path: str, member: str) -> Fault:
    """A finding as the fault of a file; `member` names the pickle in it, where that is not the whole file."""
    what = f"{member}, byte {finding.byte}: {finding.what}" if member else f"byte {finding.byte}: {finding.what}"
    known = tuple(finding.name.rpartition(".")[::2]) in ALLOWED
    if not finding.name or known or acts(finding.name):
        return UnsafePickle.fault(
            path, f"{what}; nothing was run", mend="do not load this file elsewhere either: ask whoever wrote it"
        )
    mend = trusting([finding.name[:200]])
    return TrustRequired.fault(path, f"{what}, for which nobody vouches; nothing was run", mend=mend)


# -- values as text ----------------------------------------------------------------------------------------------------

_SHOWN, _SHOWN_ITEMS = 60, 4


def shown(value: object, depth: int = 3) -> str:
    """A value of a pickle as one would write it in Python, shortened."""
    if isinstance(value, Callee):
        value = value.name
    if isinstance(value, GlobalName):
        return _cut(ascii(str(value))[1:-1], 200)
    if isinstance(value, str | bytes | bytearray | int | float | bool | complex | None):
        return _cut(ascii(value[:200] if isinstance(value, str | bytes | bytearray) else value), _SHOWN)
    if isinstance(value, tuple | list | set | frozenset | dict) and not depth:
        return "..."
    if isinstance(value, tuple):
        parts = [shown(part, depth - 1) for part in value[:_SHOWN_ITEMS]] + ["..."] * (len(value) > _SHOWN_ITEMS)
        return f"({', '.join(parts)}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        pairs = islice(value.items(), _SHOWN_ITEMS)
        told = [f"{shown(key, depth - 1)}: {shown(part, depth - 1)}" for key, part in pairs]
        return "{" + ", ".join(told + ["..."] * (len(value) > _SHOWN_ITEMS)) + "}"
    if isinstance(value, list):
        return f"[{shown(tuple(value), depth)[1:-1].rstrip(',')}]"
    if isinstance(value, ObjectRecord):
        return shown_call(value.callable, value.args, value.kwargs, depth - 1) if depth else "..."
    return f"a {type(value).__name__}"


def shown_call(function: GlobalName, args: Args, kwargs: Mapping[str, object], depth: int = 3) -> str:
    given = shown(args, depth)[1:-1].removesuffix(",")
    named = [f"{key}={shown(value, depth - 1)}" for key, value in islice(kwargs.items(), _SHOWN_ITEMS)]
    return f"{shown(function)}({', '.join(filter(None, [given, *named]))})"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
