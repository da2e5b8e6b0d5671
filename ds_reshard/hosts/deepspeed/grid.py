"""The position of a rank in the grid of tensor-, pipeline- and expert-parallel ranks, and its part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.formats.zero.checkpoint import SINGLE_TP_RANK, TpRank
from ds_reshard.formats.zero.modules import expert_of, layer_of, renumber_expert, tied_key


class Experts(NamedTuple):
    """The experts of one layer that a rank has: numbers [first, first + size) of `total`."""

    first: int
    size: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGrid:
    """This rank's position: its tensor-parallel rank (`row`), its pipeline stage of `pp`, and its experts.

    `parts` are the first layers of all stages and the number of layers, empty without a PipelineModule. `tied` are the
    parameters of tied modules that are equal in all stages. `experts` maps the prefix of the experts' numbers in the
    names of tensors to the experts of this rank.
    """

    row: TpRank = SINGLE_TP_RANK
    stage: int = 0
    pp: int = 1
    parts: tuple[int, ...] = ()
    tied: frozenset[str] = frozenset()
    experts: Mapping[str, Experts] = field(default_factory=dict)

    @property
    def column(self) -> int:
        """The number after `mp_rank_` in the files that this rank saves."""
        return self.stage * self.row.size + self.row.rank

    def is_responsible_for(self, name: str) -> bool:
        """True if this rank reports faults about tensor `name`: it owns the tensor, or no rank does."""
        expert = expert_of(name) if self.experts else None
        if expert is not None and expert[0] in self.experts:
            experts = self.experts[expert[0]]
            return not 0 <= expert[1] < experts.total or experts.first <= expert[1] < experts.first + experts.size
        layer, key = layer_of(name), tied_key(name)
        if not self.parts or (layer is None and key not in (self.row.ties or {}).values()):
            return True
        if layer is not None:
            return not 0 <= layer < self.parts[-1] or self.parts[self.stage] <= layer < self.parts[self.stage + 1]
        return self.stage in self.stages_of(key)

    def global_name(self, name: str) -> str:
        """Return the name in the whole model of a tensor of this rank: its experts are numbered through all ranks."""
        return (
            renumber_expert(name, {layer: own.first for layer, own in self.experts.items()}) if self.experts else name
        )

    def stages_of(self, key: str | None) -> list[int]:
        """Return the stages that have tied module `key`, in order."""
        layers = [layer for layer, tie in (self.row.ties or {}).items() if tie == key]
        return [s for s in range(self.pp) if any(self.parts[s] <= layer < self.parts[s + 1] for layer in layers)]
