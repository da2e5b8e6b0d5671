"""Where a rank of a run that is still to come stands in its grid, and what it then has of the model that was saved.

Ranks are numbered as `PipeModelDataParallelTopology` does (runtime/pipe/topology.py). Stages that are not those that
were saved are cut as `PipelineModule` does (runtime/pipe/module.py). Experts are dealt out as
`_create_expert_and_data_parallel` does (utils/groups.py, all of DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.errors import ConfigError, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, Grid, Row, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import experts_held, layer_files, layer_of, tied_key, ties_first
from ds_reshard.formats.zero.target import INFO, splits_of
from ds_reshard.formats.zero.tensor_parallel import pattern_info
from ds_reshard.hosts.deepspeed.find_checkpoint import Found
from ds_reshard.hosts.deepspeed.grid import Experts, LiveGrid
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule, use_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """A rank of the coming run: its number among those of its data, among those of its experts, and in the grid."""

    data_rank: int
    dp: int
    expert_rank: int
    expert_ranks: int
    grid: LiveGrid


def cannot_predict(where: str) -> UnsupportedLayout:
    what = "which layers, rows and experts a rank of DeepSpeed has, its script says: that is not foreseen"
    mend = "start the run to know; docs/parallelism.md says what its load takes"
    return UnsupportedLayout.of(where, what, mend=mend)


def refuse_unpredictable(found: Found, sizes: Grid, config: Mapping[str, object], sp: int) -> None:
    """Where a rank's part of the model follows from the script alone, raise UnsupportedLayout."""
    divides = section(config, "tensor_parallel").get("autotp_size", 0)
    asked = {
        f"--tp {sizes.tp}, with another autotp_size in the JSON": isinstance(divides, int)
        and divides not in (0, 1, sizes.tp),
        f"--sp {sp}, with another sequence_parallel_size in the JSON": config.get("sequence_parallel_size", 1)
        not in (1, sp),
        "data_parallel_size of the JSON, which makes a mesh": {"sequence_parallel_size", "data_parallel_size"}
        <= config.keys(),
        "expert_parallel of the JSON": "expert_parallel" in config,
        **(_unpredictable_files(found.checkpoint, sizes) if found.checkpoint is not None else {}),
        f"--ep {sizes.ep} of experts that are not read here": sizes.ep > 1
        and any(fault.error == "UnsupportedLayout" for fault in found.faults),
    }
    for what in (name for name, there in asked.items() if there):
        raise cannot_predict(what)


def _unpredictable_files(checkpoint: AnyCheckpoint, sizes: Grid) -> dict[str, bool]:
    experts, layers = (
        {prefix: one.total for prefix, one in _experts(checkpoint, 0, 1).items()},
        bool(checkpoint.listing.layers),
    )
    counts = checkpoint.optim.counts if experts and checkpoint.optim is not None else ()
    return {
        f"--pp {sizes.pp} of a checkpoint without the files of layers": sizes.pp > 1 and not layers,
        f"--ep {sizes.ep} of a checkpoint without the files of experts": sizes.ep > 1 and not experts,
        f"--ep {sizes.ep} of {sorted(experts.values())} experts": any(total % sizes.ep for total in experts.values()),
        f"--ep {sizes.ep} of layers with several expert-parallel sizes": len({*counts} - {checkpoint.dp}) > 1,
        "a checkpoint of AutoEP": checkpoint.of_autoep,
        "experts at ZeRO stage 0": bool(checkpoint.listing.places),
        "a PipelineModule at ZeRO stage 0": checkpoint.stage == 0 and bool(checkpoint.stages),
    }


def refuse_stage(grid: LiveGrid, stage: int) -> None:
    """Raise ConfigError where DeepSpeed builds no such engine (`PipelineEngine`, `_configure_zero_optimizer`)."""
    what, most = ("a PipelineModule", 1) if grid.parts else ("a mixture of experts", 2)
    if (grid.parts or grid.experts) and stage > most:
        raise ConfigError.of(
            "DeepSpeed config",
            f"DeepSpeed refuses ZeRO {stage} with {what}",
            f"stage 0 to {most}",
            f"stage {stage}",
            mend="correct zero_optimization.stage",
        )


def position_of_rank(
    rank: int, sizes: Grid, checkpoint: AnyCheckpoint | None, config: Mapping[str, object], rules: tuple[Rule, ...]
) -> RankPosition:
    """Where rank `rank` of `sizes` stands. `rules` are the user's, of tensor-parallel parameters."""
    stage, within = divmod(rank, sizes.dp * sizes.tp)
    data, row = divmod(within, sizes.tp)
    share = sizes.dp // sizes.ep
    swapped = bool(config.get("use_data_before_expert_parallelism"))
    place, of_place = divmod(data, share) if swapped else divmod(data, sizes.ep)[::-1]
    grid = LiveGrid(row=Row(sizes.tp, row, rules=rules), experts=_experts(checkpoint, place, sizes.ep))
    if isinstance(checkpoint, ZeroCheckpoint) and checkpoint.listing.layers:
        ties = _ties(checkpoint)
        tied = frozenset(f"tied_modules.{key}.weight" for key in ties.values())  # TiedLayerSpec's tied_weight_attr
        parts = _saved_stage_starts(checkpoint, ties) if sizes.pp == checkpoint.grid.pp else None
        parts = parts or _default_stage_starts(checkpoint, ties, sizes.pp)
        grid = replace(grid, row=grid.row._replace(ties=ties), stage=stage, pp=sizes.pp, parts=parts, tied=tied)
    return RankPosition(data_rank=data, dp=sizes.dp, expert_rank=of_place, expert_ranks=share, grid=grid)


def assumptions(grid: LiveGrid) -> list[str]:
    """What is taken for granted of a rank's part of the model."""
    if not grid.parts:
        return []
    tied = ", and what is tied of a tied module is its weight" if grid.tied else ""
    return [f"the first layers of the stages are taken to be {', '.join(map(str, grid.parts[:-1]))}{tied}"]


def names_on_rank(names: Iterable[str], grid: LiveGrid) -> tuple[str, ...]:
    """Those of a rank, as `named_parameters` has them: a PipelineModule's tied modules first, then layer by layer."""
    own = filter(grid.is_responsible_for, names)
    return tuple(ties_first(sorted(own, key=lambda name: layer_of(name) or 0)) if grid.parts else own)


def shards_on_rank(checkpoint: AnyCheckpoint, grid: LiveGrid) -> tuple[Mapping[str, Shape], Mapping[str, object]]:
    """The shapes of a rank's shards if others than the saving ranks divide, and what its run would say of them.

    Each part is divided in equal shares.
    """
    if grid.row.size == 1 or not isinstance(checkpoint, ZeroCheckpoint) or not checkpoint.rows:
        said = checkpoint.model.entries.get(INFO)
        return {}, said if isinstance(said, dict) else {}
    if checkpoint.stage == 0:
        raise cannot_predict(f"--tp {grid.row.size} of a checkpoint of ZeRO stage 0")
    splits = splits_of(checkpoint)
    with use_rules(grid.row.rules):  # beside what ranks have divided, and not what the saving run says of others
        found, faults = splits._replace(evidence=splits.evidence._replace(info={})).over(grid.row.size)
    if faults:
        raise cannot_predict(f"--tp {grid.row.size}: {faults[0].line()}")
    uneven = next((name for name, division in found.items() if len(set(division.shards)) > 1), None)
    if uneven is not None:
        raise cannot_predict(f"--tp {grid.row.size}: {uneven} has no equal shares, and the script says how it is cut")
    return {name: division.shards[grid.row.rank] for name, division in found.items()}, pattern_info(found)


def _experts(checkpoint: AnyCheckpoint | None, place: int, ep: int) -> dict[str, Experts]:
    names = checkpoint.model.module if checkpoint is not None and checkpoint.listing.experts else ()
    totals = experts_held(names, 1)
    return {prefix: Experts(place * total // ep, total // ep, total) for prefix, total in totals.items()}


def _ties(checkpoint: ZeroCheckpoint) -> dict[int, str]:
    """The layers that are tied modules: those that the names in their files tell, and in each other stage one more.

    A layer with a forward_fn, as an output layer that uses the embedding, has no file: of the numbers of its stage that
    no file has it is taken to be the last.
    """
    numbers = {name: layer for (layer, _), name in checkpoint.listing.layers.items()}
    keys = {
        numbers[file]: tied_key(key.name) for file, held in layer_files(checkpoint).items() for key in held.values()
    }
    ties = {layer: key for layer, key in keys.items() if key is not None}
    stages = _stage_contents(checkpoint)
    end = max(numbers.values(), default=0)
    for at, (_, tied) in enumerate(stages):
        begin = 1 + max((layer for owned, _ in stages[:at] for layer in owned), default=-1)
        last = min((layer for owned, _ in stages[at + 1 :] for layer in owned), default=end + 2) - 1
        for key in sorted(tied - {ties.get(layer) for layer in range(begin, last + 1)}):
            free = [layer for layer in range(begin, last + 1) if layer not in keys and layer <= end] or [last]
            if key not in ties.values() or free[-1] in keys:
                raise cannot_predict(f"the tied module {key!r}, which has no file")
            ties[free[-1]] = key
    return ties


def _stage_contents(checkpoint: ZeroCheckpoint) -> list[tuple[set[int], set[str]]]:
    """The layers and the tied modules of each saved stage, as far as its parameters and buffers tell."""
    names = [{*stage.trainable, *stage.buffer_names} for stage in checkpoint.stages]
    return [
        ({n for n in map(layer_of, own) if n is not None}, {key for key in map(tied_key, own) if key is not None})
        for own in names
    ]


def _saved_stage_starts(checkpoint: ZeroCheckpoint, ties: Mapping[int, str]) -> tuple[int, ...] | None:
    """The first layers of the stages that were saved; None where their parameters do not tell (ZeRO stage 0)."""
    if checkpoint.model.param_shapes is None:
        return None
    stages, end = _stage_contents(checkpoint), _layer_count(checkpoint, ties)

    def cut(stage: int, begin: int) -> tuple[int, ...] | None:
        for last in range(begin, end + 1) if stage < len(stages) - 1 else [end]:
            inside = set(range(begin, last)) - ties.keys()
            held = {ties[layer] for layer in range(begin, last) if layer in ties}
            apart = not any(inside & owned for owned, _ in stages[stage + 1 :])
            if apart and (stages[stage][0] <= inside, held) == (True, stages[stage][1]):
                rest = cut(stage + 1, last) if stage < len(stages) - 1 else (end,)
                if rest is not None:
                    return (begin, *rest)
        return None

    return cut(0, 0)


def _layer_count(checkpoint: ZeroCheckpoint, ties: Mapping[int, str]) -> int:
    return 1 + max(*(layer for layer, _ in checkpoint.listing.layers), *ties, 0)


def _default_stage_starts(checkpoint: ZeroCheckpoint, ties: Mapping[int, str], stages: int) -> tuple[int, ...]:
    """As PipelineModule's partition_method="parameters" cuts: by the numbers of the layers' parameters."""
    from deepspeed.runtime.utils import partition_balanced

    end = _layer_count(checkpoint, ties)
    trained = checkpoint.model.trainable or {name: one.shape for name, one in checkpoint.model.module.items()}
    sizes = dict[int | str | None, int]()
    for name, shape in trained.items():
        part = tied_key(name) or layer_of(name)
        sizes[part] = sizes.get(part, 0) + prod(shape)
    counts = [sizes.get(ties.get(layer, layer), 0) for layer in range(end)]
    if end < stages:
        raise cannot_predict(f"--pp {stages} of {end} layers")
    return tuple(map(int, partition_balanced(weights=counts, num_parts=stages)))
