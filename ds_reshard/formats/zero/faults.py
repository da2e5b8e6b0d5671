"""The faults that every reader of this format reports in the same words."""

from __future__ import annotations

from ds_reshard.errors import CheckpointDamaged, Fault, raise_faults


def check_root(path: str, stem: str, root: str) -> None:
    """Refuse a file that was written under another name.

    torch names the root of its zip after the file it writes to (the stem), or "archive" when it writes
    to a stream: then nothing can be told.
    """
    if root in (stem, "archive"):
        return
    raise_faults(
        [
            Fault(
                error="CheckpointDamaged",
                where=path,
                what="was written under another name: a shard was copied or swapped",
                expected=f"root {stem!r} inside the file",
                found=repr(root),
                mend="restore each shard under the name that it was saved with",
            )
        ],
        subject="reading a checkpoint",
    )


def damaged(path: str, what: str, expected: str, found: str) -> Fault:
    return Fault(
        error="CheckpointDamaged",
        where=path,
        what=what,
        expected=expected,
        found=found,
        mend="restore the file, or load another tag",
    )


def fail(path: str, what: str, expected: str, found: str) -> CheckpointDamaged:
    fault = damaged(path, what, expected, found)
    return CheckpointDamaged(fault.line(), [fault])
