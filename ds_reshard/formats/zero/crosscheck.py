"""What shards that were saved together say alike, compared: faults where they are of two saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from ds_reshard.containers.crc import repeated
from ds_reshard.errors import CheckpointDamaged, Fault
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM
from ds_reshard.formats.zero.optim_states import STATE

_LONGEST = 60


def compare_signatures(signatures: Mapping[str, Mapping[str, str]], folder: str, *, states: bool = True) -> list[Fault]:
    """Faults where shards of one family say different things: they are of different steps or runs.

    `states=False` passes over scalar states other than the step: an optimizer may keep them per rank,
    which only a load under another layout has to refuse.
    """
    faults = []
    families: dict[str, list[str]] = {}
    for name in sorted(signatures):
        families.setdefault(OPTIM if name.endswith("optim_states.pt") else MODEL, []).append(name)
    for names in families.values():
        first = signatures[names[0]]
        for name in names[1:]:
            for key in sorted({*first, *signatures[name]}):
                if key.startswith(STATE) and not states:
                    continue
                one, other = first.get(key, "absent"), signatures[name].get(key, "absent")
                if one != other:
                    faults.append(
                        CheckpointDamaged.fault(
                            f"{folder}/{name}",
                            f"is of another step or run than {names[0]}: {key} differs",
                            one,
                            other,
                            mend="restore all files of one save, or load another tag",
                        )
                    )
    return faults


def abridged(said: Mapping[str, str]) -> dict[str, str]:
    """What a shard says, long texts by their beginning and a digest: each rank is told what all shards say."""
    return {key: text if len(text) <= _LONGEST else f"{text[:40]}... ({_digest(text)})" for key, text in said.items()}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def compare_prints(prints: Mapping[str, Sequence[tuple[int, int | None]]], folder: str) -> list[Fault]:
    """Faults where two optimizer shards hold the same bytes: one was copied over the other.

    Partitions of constant values (zero moments, unit weights) may truly be equal: a shard counts as a
    copy only when all its buffers equal another's and at least two of them are not all zeros.
    """
    seen: dict[tuple[tuple[int, int | None], ...], str] = {}
    faults = []
    for name in sorted(prints):
        marks = tuple(prints[name])
        telling = [crc for nbytes, crc in marks if crc is not None and crc != repeated(b"\0", nbytes)]
        if len(telling) < 2:
            continue
        if marks in seen:
            faults.append(
                CheckpointDamaged.fault(
                    f"{folder}/{name}",
                    f"holds the same bytes as {seen[marks]}: one shard was copied over another",
                    "different partitions",
                    "identical checksums in every buffer",
                    mend="restore the shard, or load another tag",
                )
            )
        seen.setdefault(marks, name)
    return faults
