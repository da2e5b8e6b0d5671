"""Proves a load: what lies in memory afterwards is what was read, tensor by tensor, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault, FingerprintMismatch, raise_faults
from ds_reshard.execution.fingerprint import Fingerprint, Fingerprints, held, signed
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.operations.ranks import Steps, answered, rank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The fingerprints of whole tensors, each found equal to what was read; how many tensors have none."""

    tensors: Mapping[TensorKey, Fingerprint]
    unproved: int

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors proved" + (f", {self.unproved} not" if self.unproved else "")


class Proving(NamedTuple):
    """A rank's layout, its number in it, and the kinds of tensors that a load changes after it has read them."""

    layout: Layout
    position: int
    changed: frozenset[str]

    def divided(self) -> list[TensorKey]:
        """The tensors that ranks hold parts of: they add up what they hold of one list of tensors."""
        placements = self.layout.placements.items()
        return sorted(key for key, at in placements if not at.replicated and key.kind not in self.changed)

    def digest(self) -> int:
        return crc32("\n".join(map(str, self.divided())).encode())

    def prove(
        self,
        read: Fingerprints[TensorKey],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        shared_by: tuple[dist.ProcessGroup, torch.device] | None,
        steps: Steps,
        subject: str,
    ) -> Proof | None:
        """Compare each part in memory with what was read of it, and the parts with the whole. Collective.

        One sum over the ranks that share the tensors, on a device of theirs, of two numbers a tensor, in which a rank
        that failed takes part too; None if each rank has whole tensors. What differs is a FingerprintMismatch among the
        faults of `steps`; then there is no proof.
        """
        proved = sorted(key for key in self.layout.placements if key.kind not in self.changed)

        def compared() -> Fingerprints[TensorKey]:
            now = held(self.layout, self.position, buffers())
            what = f"what lies in the engine of rank {rank()} is not what was read"
            wrong = [(key, read[key], now[key]) for key in proved if read[key] != now[key]]
            said = [
                (key, f"fingerprint {was} of {was.nbytes} bytes", f"{is_} of {is_.nbytes}") for key, was, is_ in wrong
            ]
            raise_faults((_fault(key, what, expected, found) for key, expected, found in said), subject=subject)
            return now

        def complete() -> None:
            sizes = {key: prod(self.layout[key].shape) * self.layout[key].dtype.itemsize for key in whole}
            wrong = [(key, size, whole[key].nbytes) for key, size in sizes.items() if whole[key].nbytes != size]
            what = "the parts of all ranks are not the whole tensor"
            raise_faults((_fault(key, what, f"{size} bytes", str(n)) for key, size, n in wrong), subject=subject)

        now = steps.take(compared, subject=subject) or Fingerprints[TensorKey]()
        whole = {key: now[key] for key in proved} | _summed({key: now[key] for key in self.divided()}, shared_by)
        steps.take(complete, subject=subject)
        return None if steps.failed else Proof(tensors=whole, unproved=len(self.layout.placements) - len(proved))


def _summed(
    parts: Mapping[TensorKey, Fingerprint], shared_by: tuple[dist.ProcessGroup, torch.device] | None
) -> dict[TensorKey, Fingerprint]:
    """The parts of all ranks, added up. Collective."""
    import torch
    import torch.distributed as dist

    if not parts or shared_by is None:
        return dict(parts)
    rows = [(signed(part.value), part.nbytes) for part in parts.values()]
    sums = torch.tensor(rows, dtype=torch.int64, device=shared_by[1])
    with answered():
        dist.all_reduce(sums, group=shared_by[0])
    totals = (Fingerprint(value=value % 2**64, nbytes=nbytes) for value, nbytes in sums.tolist())
    return dict(zip(parts, totals, strict=True))


def _fault(key: TensorKey, what: str, expected: str, found: str) -> Fault:
    mend = "load again, and with another tag if it comes back; then report it with the output of `ds-reshard "
    mend += "fingerprint`: memory is failing, or ds_reshard or the framework put bytes in a wrong place"
    return FingerprintMismatch.fault(str(key), what, expected, found, mend=mend)
