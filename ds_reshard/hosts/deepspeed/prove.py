"""Prove a load: the fingerprints of what lies in the engine are those of what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault, FingerprintMismatch, raise_faults
from ds_reshard.execution.fingerprint import Fingerprint, Fingerprints
from ds_reshard.execution.witness import Witness, held
from ds_reshard.hosts.deepspeed.live import LiveOptimizer, live_optimizer
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.operations.ranks import Steps, rank

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

_MEND = (
    "load again, and with another tag if it comes back; then report it with the output of `ds-reshard fingerprint`: "
    "memory is failing, or ds_reshard or DeepSpeed put bytes in a wrong place"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The fingerprints of the engine's whole tensors, each found equal to what was read; how many have none."""

    tensors: Mapping[TensorKey, Fingerprint]
    unproved: int

    def __str__(self) -> str:
        number = len(self.tensors)
        return f"{number} tensors proved" + (f", {self.unproved} not" if self.unproved else "")


def seen_by(prepared: Prepared) -> Witness:
    """Who sums up what this rank is going to read."""
    position, size = place(prepared.live)
    return Witness(prepared.index, prepared.wants.layout(size), position, prepared.wants.sources)


def divided_names(prepared: Prepared, *, unproved: frozenset[str]) -> int:
    """A digest of the tensors that ranks hold parts of: they add up what they hold of one list of tensors."""
    layout = prepared.wants.layout(place(prepared.live)[1])
    return crc32("\n".join(map(str, _divided(layout, unproved))).encode())


def _divided(layout: Layout, unproved: frozenset[str]) -> list[TensorKey]:
    return sorted(key for key, at in layout.placements.items() if not at.replicated and key.kind not in unproved)


def prove(
    engine: DeepSpeedEngine, prepared: Prepared, witness: Witness, steps: Steps, *, unproved: frozenset[str]
) -> Proof | None:
    """Compare each part in the engine's memory with what was read of it, and the parts with the whole. Collective.

    The kinds in `unproved` are left out, as are tensors that were read whole or made from masters. One sum over
    the ranks that share the optimizer, of two numbers a tensor, in which a rank that failed takes part too. What
    differs is a FingerprintMismatch among the faults of `steps`; then there is no proof.
    """
    subject = f"loading {prepared.checkpoint.listing.folder}"
    position, size = place(prepared.live)
    layout = prepared.wants.layout(size)
    proved = sorted(key for key in layout.placements if key.kind not in unproved)

    def compared() -> Fingerprints:
        now = held(layout, position, _buffers(engine, prepared))
        raise_faults(_differences(witness.sums, now, proved), subject=subject)
        return now

    now = steps.take(compared, subject=subject) or Fingerprints()
    parts = {key: now[key] for key in _divided(layout, unproved)}
    whole = {key: now[key] for key in proved} | _summed(engine, prepared.live, parts)
    steps.take(lambda: raise_faults(_incomplete(layout, whole), subject=subject), subject=subject)
    if steps.failed:
        return None
    wants = prepared.wants
    left = len(layout.placements) - len(proved) + len(wants.whole_reads) + len(wants.from_masters)
    return Proof(tensors=whole, unproved=left)


def place(live: LiveOptimizer | None) -> tuple[int, int]:
    """This rank among those that divide the optimizer, and how many they are."""
    return (live.rank, live.dp) if live is not None else (0, 1)


def _buffers(engine: DeepSpeedEngine, prepared: Prepared) -> dict[str, torch.Tensor]:
    """The engine's tensors as they are now: masters and states are looked up anew, in the optimizer."""
    live = live_optimizer(engine)
    optimizer = engine.optimizer
    found = {name: tensor for name, tensor in prepared.wants.tensors.items() if _of_module(name)}
    for number, buffer in enumerate(live.buffers if live is not None else ()):
        found[f"fp32/{number}"] = buffer.fp32
        for kind, value in getattr(optimizer, "optimizer", optimizer).state.get(buffer.fp32, {}).items():
            if hasattr(value, "data_ptr"):
                found[f"{kind}/{number}"] = value
    return found


def _of_module(buffer: str) -> bool:
    return buffer.startswith(("module/", "weight/", "frozen/"))


def _differences(read: Fingerprints, now: Fingerprints, keys: list[TensorKey]) -> Iterator[Fault]:
    for key in keys:
        if read[key] != now[key]:
            yield FingerprintMismatch.fault(
                str(key),
                f"what lies in the engine of rank {rank()} is not what was read",
                f"fingerprint {read[key]} of {read[key].nbytes} bytes",
                f"{now[key]} of {now[key].nbytes}",
                mend=_MEND,
            )


def _summed(
    engine: DeepSpeedEngine, live: LiveOptimizer | None, parts: Mapping[TensorKey, Fingerprint]
) -> dict[TensorKey, Fingerprint]:
    """The parts of all ranks that share the optimizer, added up. Collective."""
    import torch
    import torch.distributed as dist

    if not parts or live is None or live.replicated:
        return dict(parts)
    rows = [(_signed(part.value), part.nbytes) for part in parts.values()]
    sums = torch.tensor(rows, dtype=torch.int64, device=engine.device)
    dist.all_reduce(sums, group=engine.optimizer.dp_process_group)
    totals = (Fingerprint(value=value % 2**64, nbytes=nbytes) for value, nbytes in sums.tolist())
    return dict(zip(parts, totals, strict=True))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _incomplete(layout: Layout, whole: Mapping[TensorKey, Fingerprint]) -> Iterator[Fault]:
    for key, found in whole.items():
        expected = _nbytes(layout[key])
        if found.nbytes != expected:
            yield FingerprintMismatch.fault(
                str(key),
                "the parts of all ranks are not the whole tensor",
                f"{expected} bytes",
                f"{found.nbytes}",
                mend=_MEND,
            )


def _nbytes(placement: Placement) -> int:
    return prod(placement.shape) * placement.dtype.itemsize
