"""Where this rank is in the grid of tensor-, pipeline- and data-parallel ranks, as the running engine says.

Attributes read here, all seen in deepspeed 0.19.8: the calls of `engine.mpu` (utils/bwc.py), and of `PipelineModule`
`_layer_specs`, `parts` and `stage_id` (runtime/pipe/module.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.formats.zero.checkpoint import ALONE, Row
from ds_reshard.formats.zero.modules import expert_of, layer_of, renumbered, tied_key

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


class Experts(NamedTuple):
    """The experts of one layer that a rank has: so many from the first on, of all."""

    first: int
    held: int
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

    def answers(self, name: str) -> bool:
        """Whether this rank says what is wrong with a tensor of this name: it should have it, or no rank should."""
        of = expert_of(name) if self.experts else None
        if of is not None and of[0] in self.experts:
            mine = self.experts[of[0]]
            return not 0 <= of[1] < mine.total or mine.first <= of[1] < mine.first + mine.held
        layer, key = layer_of(name), tied_key(name)
        if not self.parts or (layer is None and key not in (self.row.ties or {}).values()):
            return True
        if layer is not None:
            return not 0 <= layer < self.parts[-1] or self.parts[self.stage] <= layer < self.parts[self.stage + 1]
        return self.stage in self.stages_of(key)

    def named(self, name: str) -> str:
        """What a tensor of this rank is called among those of all ranks."""
        return renumbered(name, {prefix: held.first for prefix, held in self.experts.items()}) if self.experts else name

    def stages_of(self, key: str | None) -> list[int]:
        """The stages that have a tied module, in order."""
        layers = [layer for layer, tie in (self.row.ties or {}).items() if tie == key]
        return [s for s in range(self.pp) if any(self.parts[s] <= layer < self.parts[s + 1] for layer in layers)]


NO_GRID = LiveGrid()


def live_grid(engine: DeepSpeedEngine) -> LiveGrid:
    """As the engine's own mpu and module say it; of an engine that is foreseen, as it was foreseen."""
    foreseen = getattr(engine, "coming_grid", None)
    if isinstance(foreseen, LiveGrid):
        return foreseen
    # the mpu of sequence parallelism calls its ranks model-parallel, which divide no parameter and number no file
    # (`_get_model_parallel_world_size`, utils/groups.py, 0.19.8)
    mpu = engine.mpu if engine.mp_world_size > 1 else None
    size, rank = _asked(mpu, "world_size", 1), _asked(mpu, "rank", 0)
    if not _is(type(getattr(engine, "module", None)), "PipelineModule"):
        return LiveGrid(row=Row(size, rank), experts=_experts(engine))
    module = engine.module
    specs = module._layer_specs
    tied = {layer: spec for layer, spec in enumerate(specs) if _is(type(spec), "TiedLayerSpec")}
    ties = {layer: str(spec.key) for layer, spec in tied.items()}
    return LiveGrid(
        row=Row(size, rank, ties),
        stage=int(module.stage_id),
        pp=len(module.parts) - 1,
        parts=tuple(map(int, module.parts)),
        tied=frozenset(
            f"tied_modules.{spec.key}.{name}" for spec in tied.values() for name in _names(spec.tied_weight_attr)
        ),
    )


def autoep_live(engine: DeepSpeedEngine) -> frozenset[int]:
    """The expert-parallel sizes of the layers in which DeepSpeed has cut the experts of a model (AutoEP)."""
    layers = (module for module in engine.module.modules() if _is(type(module), "AutoEPMoELayer"))
    return frozenset(int(layer.ep_size) for layer in layers)


def expert_sizes(engine: DeepSpeedEngine) -> frozenset[int]:
    """The expert-parallel sizes of AutoEP's layers, and at stage 0 the largest of deepspeed.moe's."""
    layers = [module for module in engine.module.modules() if _is(type(module), "MoE") and hasattr(module, "ep_size")]
    native = {int(layer.ep_size) for layer in layers} - {1} if engine.zero_optimization_stage() == 0 else set()
    return autoep_live(engine) | frozenset(sorted(native)[-1:])


def _asked(mpu: object, what: str, otherwise: int) -> int:
    """What an mpu says of tensor parallelism: as `deepspeed.utils.bwc` asks, which old releases have not."""
    for name in ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel"):
        method: Callable[[], int] | None = getattr(mpu, f"{name}_{what}", None)
        if method is not None:
            return int(method())
    return otherwise


def _experts(engine: DeepSpeedEngine) -> dict[str, Experts]:
    """`deepspeed.moe.layer.MoE`: experts are dealt out in order over the ranks of an expert-parallel group."""
    from deepspeed.utils import groups

    found = {}
    for name, module in engine.module.named_modules() if getattr(engine, "has_moe_layers", False) else ():
        if _is(type(module), "MoE") and hasattr(module, "deepspeed_moe"):
            held, total = int(module.num_local_experts), int(module.num_experts)
            place = int(groups._get_expert_parallel_rank(module.expert_group_name))
            prefix = f"{name}.deepspeed_moe.experts.deepspeed_experts.".removeprefix(".")
            found[prefix] = Experts(place * held, held, total)
    return found


def param_names(engine: DeepSpeedEngine) -> dict[torch.Tensor, str]:
    """What each parameter of this rank is called among those of all ranks."""
    names: dict[torch.Tensor, str] = engine.param_names
    if not getattr(engine, "has_moe_layers", False):
        return names
    grid = live_grid(engine)
    return {param: grid.named(name) for param, name in names.items()}


def _is(cls: type, name: str) -> bool:
    return any(base.__name__ == name for base in cls.__mro__)


def _names(attributes: str | list[str]) -> list[str]:
    """`TiedLayerSpec.tied_weight_attr`: one name in old releases."""
    return [attributes] if isinstance(attributes, str) else list(attributes)
