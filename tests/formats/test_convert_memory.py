"""What `convert` holds of a large checkpoint at once; synthetic: its tensors are holes in sparse files."""

from __future__ import annotations

from pathlib import Path

import pytest
from high_water import memory_taken, memory_taken_together
from sparse_checkpoint import gpt_shapes, write_checkpoint

pytestmark = pytest.mark.slow

MIB = 1 << 20
CONVERT = "from ds_reshard.cli.main import main\nassert main(['convert', *sys.argv[2:]]) == 0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of it in one file, which is more than may be held, and a quarter of that in one tensor."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    nbytes = write_checkpoint(folder, gpt_shapes(layers=1, width=1024, vocabulary=16000), dp=1)
    largest = max(file.stat().st_size for file in (folder / "global_step1000").iterdir())
    assert nbytes > 350 * MIB and largest > 310 * MIB
    return folder


@pytest.mark.parametrize(
    ("to", "memory", "most"),
    [("zero3", 256, 256), ("universal", 256, 256), ("safetensors", 256, 256), ("zero3", 16, 64), ("universal", 16, 64)],
)
def test_convert_keeps_to_its_memory(checkpoint: Path, tmp_path: Path, to: str, memory: int, most: int) -> None:
    """Above an interpreter with torch, in MiB: with the buffers that it has unless told otherwise, and with little."""
    words = [str(checkpoint), str(tmp_path / "out"), "--to", to, "--memory", str(memory), "--threads", "2"]
    taken = memory_taken(CONVERT, *words, *(["--dp", "2"] if to == "zero3" else []))
    print("TAKEN", to, memory, taken / MIB)
    assert taken < most * MIB


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As large, in 7,200 small tensors: of what a process knows of each, every copy of it may have its own."""
    folder = tmp_path_factory.mktemp("pieces") / "checkpoint"
    write_checkpoint(folder, {f"blocks.{i}.weight": (64, 256) for i in range(2400)}, dp=1)
    return folder


@pytest.mark.parametrize(
    ("source", "asked", "number"), [("checkpoint", 3, 4), ("pieces", 8, 4)], ids=["three", "fewer than asked for"]
)
def test_processes_keep_to_it_together(
    source: str, asked: int, number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those that write, and the one that waits for them: no more than one may have, and fewer where each needs much."""
    words = [str(request.getfixturevalue(source)), str(tmp_path / "out"), "--to", "zero3", "--dp", "8"]
    taken, most_at_once = memory_taken_together(CONVERT, *words, "--threads", "2", "--processes", str(asked))
    assert most_at_once == number
    assert taken < 256 * MIB


def test_a_file_that_is_read_whole_is_more(checkpoint: Path) -> None:
    """What is measured here would show it."""
    largest = max((checkpoint / "global_step1000").iterdir(), key=lambda file: file.stat().st_size)
    assert memory_taken("held = open(sys.argv[2], 'rb').read()", str(largest)) > 256 * MIB


def test_what_a_copy_reads_whole_is_more(checkpoint: Path) -> None:
    """The same of what is held by a process that it starts."""
    code = "import os\nif pid := os.fork():\n    os.waitpid(pid, 0)\nelse:\n    import time\n"
    code += "    held = open(sys.argv[2], 'rb').read()\n    time.sleep(0.5)\n    os._exit(0)"
    largest = max((checkpoint / "global_step1000").iterdir(), key=lambda file: file.stat().st_size)
    taken, number = memory_taken_together(code, str(largest))
    assert taken > 256 * MIB and number == 2
