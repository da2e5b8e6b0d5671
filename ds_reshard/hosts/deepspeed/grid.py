"""Where this rank is in the grid of tensor-, pipeline- and expert-parallel ranks, and what of the model is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.formats.zero.checkpoint import ALONE, Row
from ds_reshard.formats.zero.modules import expert_of, layer_of, renumbered, tied_key


class Experts(NamedTuple):
    """The experts of one layer that a rank has: so many from the first on, of all."""

    first: int
    size: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGrid:
    """This rank's place: its row, its stage of so many, and the layers of each stage.

    `parts` are the first layers of the stages and the number of all layers, empty without a PipelineModule. `tied` are
    the parameters of tied modules that are equal in all stages. `experts` are those of this rank, by what is before
    their numbers in the names of their tensors.
    """

    row: Row = ALONE
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
        """Whether this rank says what is wrong with a tensor of this name: it should have it, or no rank should."""
        of = expert_of(name) if self.experts else None
        if of is not None and of[0] in self.experts:
            mine = self.experts[of[0]]
            return not 0 <= of[1] < mine.total or mine.first <= of[1] < mine.first + mine.size
        layer, key = layer_of(name), tied_key(name)
        if not self.parts or (layer is None and key not in (self.row.ties or {}).values()):
            return True
        if layer is not None:
            return not 0 <= layer < self.parts[-1] or self.parts[self.stage] <= layer < self.parts[self.stage + 1]
        return self.stage in self.stages_of(key)

    def global_name(self, name: str) -> str:
        """What a tensor of this rank is called among those of all ranks."""
        return renumbered(name, {prefix: held.first for prefix, held in self.experts.items()}) if self.experts else name

    def stages_of(self, key: str | None) -> list[int]:
        """The stages that have a tied module, in order."""
        layers = [layer for layer, tie in (self.row.ties or {}).items() if tie == key]
        return [s for s in range(self.pp) if any(self.parts[s] <= layer < self.parts[s + 1] for layer in layers)]
