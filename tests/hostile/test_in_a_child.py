"""What hostile pickles and files do to a process of its own: nothing, in an amount of memory that their size bounds."""

from __future__ import annotations

import json
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
from opcodes import EVERY_OPCODE, spelled

_CHILD = """
import json, sys, zipfile
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.pickle_rules import ALLOW_ALL
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ReshardError

path, heard, done, listening = sys.argv[1], [], {}, False

class Finder:
    def find_spec(self, name, *rest):
        if listening:
            heard.append(f"import {name}")

def listen(event, args):
    if listening and event not in ("object.__getattr__", "builtins.id") and not (event == "open" and args[0] == path):
        heard.append(f"{event} {args!r}"[:200])

def read(data):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": data, "data/0": bytes(16), "version": b"3"}.items():
            archive.writestr(f"archive/{name}", content)
    global listening
    listening = True
    try:
        for give in (lambda: read_pickle(data, where="file", persistent=lambda given: given, rules=ALLOW_ALL), load):
            try:
                value = give()
                revive(value, builders={}, tensor=lambda record: record, where="file")
                said = "value"
            except ReshardError as error:
                said = type(error).__name__
    finally:
        listening = False
    return said

def load():
    with open_archive(path) as archive:
        return archive.load()

sys.meta_path.insert(0, Finder())
sys.addaudithook(listen)
for name, data in json.load(sys.stdin).items():
    done[name] = read(data.encode("latin-1"))
print(json.dumps({"done": done, "heard": heard, "torch": "torch" in sys.modules}))
"""


def run(cases: dict[str, bytes], path: Path) -> dict[str, object]:
    given = json.dumps({name: data.decode("latin-1") for name, data in cases.items()})
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], input=given, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_opcode_with_a_name_to_call_does_nothing(tmp_path: Path) -> None:
    """Each of pickletools' opcodes after os.system and its argument were pushed, alone and with what calls them."""
    found = run(EVERY_OPCODE, tmp_path / "file.pt")
    assert found["heard"] == [] and not found["torch"]
    assert isinstance(found["done"], dict) and set(found["done"]) == set(EVERY_OPCODE)
    assert set(found["done"].values()) <= {"value", "UnsafePickle", "CheckpointDamaged", "TrustRequired"}
    assert all(found["done"][f"{name} and call"] == "UnsafePickle" for name in ("INST", "OBJ", "EXT1", "EXT2", "EXT4"))


def test_the_child_hears_what_is_run(tmp_path: Path) -> None:
    """The same child, in which one class is built by the standard library."""
    broken = _CHILD.replace("read_pickle(data, where", "__import__('pickle').loads(data) and read_pickle(data, where")
    case = json.dumps({"getpid": "cos\ngetpid\n)R."})
    done = subprocess.run(
        [sys.executable, "-c", broken, str(tmp_path / "file.pt")],
        input=case,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "pickle.find_class" in done.stdout or "pickle.find_class" in done.stderr


_TAKEN = """
import json, sys
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.errors import ReshardError

def resident(field):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))

taken = {}
for name, (first, again) in json.load(sys.stdin).items():
    data = (first + again * (int(sys.argv[1]) // len(again)) + ".").encode("latin-1")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
        marks.write("5")
    before = resident("VmRSS")
    try:
        read_pickle(data, where="file", persistent=lambda given: given)
    except ReshardError:
        pass
    taken[name] = resident("VmHWM") - before
print(json.dumps(taken))
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_size_of_a_pickle(tmp_path: Path) -> None:
    """Half a megabyte of any one opcode, and of those that make the most of a byte: at most 128 bytes for each."""
    nbytes = 1 << 19
    cases = {opcode.name: ("\x80\4", spelled(opcode).decode("latin-1")) for opcode in pickletools.opcodes}
    called = "\x80\4ca\nb\nq\1"
    cases |= {
        "calls": (called, "h\1)R"),
        "objects": (called, "h\1)\x81"),
        "states": (called, "h\1)R}b"),
        "dicts of one": ("\x80\4", "}NNs"),
        "sets of one": ("\x80\4", "\x8f(N\x90"),
        "frozensets": ("\x80\4", "(\x91"),
        "memo": ("\x80\4N", "\x94"),
    }
    done = subprocess.run(
        [sys.executable, "-c", _TAKEN, str(nbytes)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert {name: held // nbytes for name, held in taken.items() if held > 128 * nbytes} == {}
    assert max(taken.values()) > 32 * nbytes
