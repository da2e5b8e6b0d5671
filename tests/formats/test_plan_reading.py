"""What planning and verifying cost on a checkpoint of gigabytes; synthetic: its tensors are holes in sparse files."""

from __future__ import annotations

from pathlib import Path

import pytest
from high_water import memory_taken
from sparse_checkpoint import gpt_shapes, write_checkpoint

from ds_reshard.operations import plan


@pytest.mark.parametrize(("to", "dp"), [("zero3", 16), ("zero2", 5), ("universal", None)])
def test_a_plan_reads_metadata_alone(tmp_path: Path, to: str, dp: int | None) -> None:
    """Of some gigabytes less than a thousandth, counted by the system; the whole is foretold."""
    folder = tmp_path / "checkpoint"
    nbytes = write_checkpoint(folder, gpt_shapes(layers=24, width=1024), 8)
    made = plan(str(folder), to=to, dp=dp)
    assert nbytes > 4 << 30
    assert made.bytes_read > (0.85 if to == "zero3" else 0.99) * nbytes  # which keeps no 16-bit weights
    assert made.metadata_nbytes is not None and made.metadata_nbytes < nbytes / 1000


@pytest.mark.slow
def test_verify_and_diff_keep_to_their_memory(tmp_path: Path) -> None:
    """Of gigabytes in tensors of a hundred megabytes, 64 MiB at a time, above what torch itself takes."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, gpt_shapes(layers=4, width=1024), 2)
    code = (
        "from ds_reshard.operations import Reading, diff, verify\n"
        "reading = Reading(threads=2, memory_nbytes=64 << 20)\n"
        "assert verify(sys.argv[2], deep=True, reading=reading).clean\n"
        "assert diff(sys.argv[2], sys.argv[2], reading=reading).equal\n"
    )
    assert memory_taken(code, str(folder)) < 128 << 20
