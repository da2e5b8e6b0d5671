"""Where every tensor lies: digests of the layouts that loads and conversions plan with, kept in golden.json.

What is kept was made before the layouts' arithmetic was rebuilt. `GOLDEN=new pytest FILE...` keeps what differs, which
needs a reason in the commit's message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ds_reshard.model.layout import Layout
from ds_reshard.planning.plan import Planner

KEPT = Path(__file__).with_name("golden.json")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Collects, for each plan that is begun, a digest of the layout that is read and of the one that is filled."""
    found: list[str] = []
    begin = Planner.__init__

    def watched(self: Planner, source: Any, target: Layout, *arguments: Any, **more: Any) -> None:
        found.append(f"{digest(source.layout)} {digest(target)}")
        begin(self, source, target, *arguments, **more)

    Planner.__init__ = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Planner.__init__ = begin  # type: ignore[method-assign]


def lines(layout: Layout) -> list[str]:
    """Each piece of each tensor and of its replicas: in which shard and buffer it lies, and what of the tensor it is.

    Names of families are left out: they are ours, and no file has them.
    """
    found = []
    for placement in layout.placements.values():
        what = f"{placement.key.name} {placement.key.kind} {placement.dtype.label} {placement.shape}"
        for part in (*placement.parts, *(part for _, one in placement.replicas for part in one.parts)):
            box = f"{part.box.offset}+{part.box.size}" + "".join(f" {axis}" for axis in part.axes)
            for shard in range(1 if part.replicated else layout.shards[part.family]):
                piece = part.piece(shard)
                if piece is not None:
                    at = f"{piece.start}:{piece.stop} at {piece.element_offset} of {part.buffer} in {shard}"
                    found.append(f"{what} {box} {at}")
    return sorted(found)


def digest(layout: Layout) -> str:
    text = "\n".join(lines(layout))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def check(case: str, found: list[list[str]]) -> None:
    """Compare what each rank has recorded in a case with what is kept of it."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    told = [sorted(rank) for rank in found]
    if os.environ.get("GOLDEN") == "new" and kept.get(case) != told:
        text = json.dumps({**kept, case: told}, sort_keys=True)
        KEPT.write_text(text.replace("]], ", "]],\n") + "\n", encoding="utf-8")
        return
    assert kept.get(case) == told, f"{case}: tensors lie elsewhere than they did"
