"""The public corpora of picklescan and fickling: whatever acts in them is named, as it is and inside a shard.

    make test-corpora SRC=FOLDER     FOLDER holds checkouts of mmaitre314/picklescan and trailofbits/fickling

Neither is committed here, and nothing of either is run but the lines of fickling's tests that put pickles together.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickletools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from archives import member_of, rebuilt
from listener import heard

from ds_reshard.containers.pickle_reader import scan_file
from ds_reshard.containers.pickle_rules import UNSAFE, PickleRules

SRC = os.environ.get("PICKLE_CORPORA", "")
pytestmark = pytest.mark.skipif(not SRC, reason="no corpora: make test-corpora SRC=FOLDER names them")

# What picklescan's own tests take for harmless, or cannot open (tests/test_scanner.py at f15d54d).
HARMLESS = (
    "bad_pytorch.pt",
    "benign",
    "pytorch_model.bin",
    "new_pytorch_model.bin",
    "not_a_pickle",
    "int_array",
    "object_array",
)
# A test of fickling's that begins with what is harmless.
MIXED = ("test_private_stdlib_allowlist",)
# An archive that nothing here opens, nor anything that loads checkpoints; and a picture that is called a checkpoint.
OTHERS = ("malicious1.7z", "bad_pytorch.pt")


def picklescans() -> Iterator[tuple[str, bytes]]:
    for folder in ("data", "data2"):
        for path in sorted((Path(SRC) / "picklescan" / "tests" / folder).iterdir()):
            if path.name not in OTHERS:
                yield path.name, path.read_bytes()


class _Made(Exception):
    """Ends a test of fickling as soon as its pickle is put together."""


def ficklings() -> Iterator[tuple[str, bytes]]:
    """The pickles of fickling's tests of what others had missed, where these say that one is not safe."""
    sys.path.insert(0, str(Path(SRC) / "fickling"))
    sys.modules.pop("test", None)
    try:
        module = importlib.import_module("test.test_bypasses")
        made: list[bytes] = []
        read: list[bytes] = []
        load = module.Pickled.load

        def remember(data: bytes, *rest: object, **more: object) -> object:
            read.append(data)  # what fickling writes of it has its frames put right
            return load(data, *rest, **more)

        def take(pickled: object, *_: object, **__: object) -> None:
            made.append(read.pop() if read else pickled.dumps())  # type: ignore[attr-defined]
            raise _Made

        module.Pickled.load, module.check_safety = remember, take
        for name, method in inspect.getmembers(module.TestBypasses, inspect.isfunction):
            if name.startswith("test") and name not in MIXED and "assertGreater" in inspect.getsource(method):
                try:
                    method(module.TestBypasses(name))
                except _Made:
                    yield name, made[-1]
                except Exception as error:  # a pickle that fickling itself does not put together here
                    print(f"fickling {name}: not made: {error!r}")
    finally:
        sys.path.pop(0)


def named(path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    faults = scan_file(str(path), PickleRules()).faults  # modules that reading itself needs are loaded now
    events = heard(lambda: scan_file(str(path), PickleRules()))
    assert [event for event in events if not event.startswith((f"open ('{path}'", "object."))] == []
    return [fault.what for fault in faults if fault.error in UNSAFE]


def prefix(content: bytes) -> bytes | None:
    """A pickle's instructions as ones that leave the stack as it was; None where it is not one whole pickle."""
    try:
        found = list(pickletools.genops(content))
    except Exception:
        return None
    if found[-1][2] != len(content) - 1:
        return None
    kept = b""
    for (opcode, _, at), (_, _, after) in zip(found, [*found[1:], (None, None, len(content))], strict=True):
        if opcode.name not in ("PROTO", "FRAME", "STOP"):
            kept += content[at:after]
    return kept + b"0"


def test_every_payload_is_named(tmp_path: Path) -> None:
    """As it is, and thrown away at the beginning of a model file; what its authors call harmless is not."""
    torch.save({"module": {"w": torch.ones(2)}}, tmp_path / "whole.pt")
    shard = (tmp_path / "whole.pt").read_bytes()
    pickled = member_of(shard, "data.pkl")
    counts = {"picklescan": 0, "fickling": 0, "inside a shard": 0, "harmless": 0}
    missed = []
    for corpus, payloads in (("picklescan", picklescans()), ("fickling", ficklings())):
        for name, content in payloads:
            path = tmp_path / f"payload{Path(name).suffix or '.pkl'}"
            told = named(path, content)
            if corpus == "picklescan" and name.startswith(HARMLESS):
                counts["harmless"] += 1
                missed += [f"{name} is called harmless: {told}"] if told else []
                continue
            counts[corpus] += 1
            inside = prefix(content) if "frame_boundary" not in name else None  # which lives by its frames alone
            if inside is None and not told:  # what Python itself does not unpickle is refused for that
                told = [fault.what for fault in scan_file(str(path), PickleRules()).faults]
            missed += [] if told else [f"{corpus}: {name}"]
            if inside is not None:
                counts["inside a shard"] += 1
                changed = rebuilt(shard, {"data.pkl": pickled[:2] + inside + pickled[2:]})
                missed += [] if named(tmp_path / "shard.pt", changed) else [f"{corpus}: {name}, inside a shard"]
    print(counts, *missed, sep="\n")
    assert missed == []
    assert counts["picklescan"] >= 94 and counts["fickling"] >= 27 and counts["inside a shard"] > 100
