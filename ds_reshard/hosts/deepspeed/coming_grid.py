"""The position of a rank of a planned run in its grid, and the part of the saved model that it will have.

Ranks are numbered as by `PipeModelDataParallelTopology` (runtime/pipe/topology.py). If the number of stages differs
from the saved one, layers are divided as by `PipelineModule` (runtime/pipe/module.py). Experts are distributed as by
`_create_expert_and_data_parallel` (utils/groups.py, all of DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.errors import ConfigError, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, Grid, TpRank, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import experts_per_rank, layer_files, layer_of, tied_key, ties_first
from ds_reshard.formats.zero.target import INFO, known_splits
from ds_reshard.formats.zero.tensor_parallel import pattern_info
from ds_reshard.hosts.deepspeed.find_checkpoint import Found
from ds_reshard.hosts.deepspeed.grid import Experts, LiveGrid
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule, use_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The position of a rank: its data-parallel rank of `dp`, its expert-data rank of `expert_ranks`, and the grid."""

    data_rank: int
    dp: int
    expert_rank: int
    expert_ranks: int
    grid: LiveGrid


def cannot_predict(where: str) -> UnsupportedLayout:
    """Return the error of a run whose ranks' parts of the model follow only from the training script."""
    what = "preflight cannot predict which layers, shards and experts a rank has: the training script decides"
    mend = "start the run to know; docs/parallelism.md says what its load takes"
    return UnsupportedLayout.of(where, what, mend=mend)


def refuse_unpredictable(found: Found, sizes: Grid, config: Mapping[str, object], sp: int) -> None:
    """Raise UnsupportedLayout if a rank's part of the model follows only from the training script."""
    autotp_size = section(config, "tensor_parallel").get("autotp_size", 0)
    reasons = {
        f"--tp {sizes.tp}, with another autotp_size in the JSON": isinstance(autotp_size, int)
        and autotp_size not in (0, 1, sizes.tp),
        f"--sp {sp}, with another sequence_parallel_size in the JSON": config.get("sequence_parallel_size", 1)
        not in (1, sp),
        "data_parallel_size of the JSON, which makes a mesh": {"sequence_parallel_size", "data_parallel_size"}
        <= config.keys(),
        "expert_parallel of the JSON": "expert_parallel" in config,
        **(_unpredictable_files(found.checkpoint, sizes) if found.checkpoint is not None else {}),
        f"--ep {sizes.ep} of experts that are not read here": sizes.ep > 1
        and any(fault.error == "UnsupportedLayout" for fault in found.faults),
    }
    for what in (name for name, applies in reasons.items() if applies):
        raise cannot_predict(what)


def _unpredictable_files(checkpoint: AnyCheckpoint, sizes: Grid) -> dict[str, bool]:
    """Return reasons in the checkpoint's files why preflight cannot predict a rank's part, and if each applies."""
    experts = {prefix: one.total for prefix, one in _experts(checkpoint, 0, 1).items()}
    layers = bool(checkpoint.listing.layers)
    counts = checkpoint.optim.counts if experts and checkpoint.optim is not None else ()
    return {
        f"--pp {sizes.pp} of a checkpoint without the files of layers": sizes.pp > 1 and not layers,
        f"--ep {sizes.ep} of a checkpoint without the files of experts": sizes.ep > 1 and not experts,
        f"--ep {sizes.ep} of {sorted(experts.values())} experts": any(total % sizes.ep for total in experts.values()),
        f"--ep {sizes.ep} of layers with several expert-parallel sizes": len({*counts} - {checkpoint.dp}) > 1,
        "a checkpoint of AutoEP": checkpoint.has_autoep,
        "experts at ZeRO stage 0": bool(checkpoint.listing.ep_optim),
        "a PipelineModule at ZeRO stage 0": checkpoint.stage == 0 and bool(checkpoint.stages),
    }


def refuse_stage(grid: LiveGrid, stage: int) -> None:
    """Raise ConfigError if DeepSpeed refuses this stage (`PipelineEngine`, `_configure_zero_optimizer`)."""
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
    """Return the position of global rank `rank`; `rules` are the user's, for tensor-parallel parameters."""
    stage, rank_in_stage = divmod(rank, sizes.dp * sizes.tp)
    data_rank, tp_rank = divmod(rank_in_stage, sizes.tp)
    expert_ranks = sizes.dp // sizes.ep
    data_first = bool(config.get("use_data_before_expert_parallelism"))
    ep_rank, expert_rank = divmod(data_rank, expert_ranks) if data_first else divmod(data_rank, sizes.ep)[::-1]
    grid = LiveGrid(row=TpRank(sizes.tp, tp_rank, rules=rules), experts=_experts(checkpoint, ep_rank, sizes.ep))
    if isinstance(checkpoint, ZeroCheckpoint) and checkpoint.listing.layers:
        ties = _ties(checkpoint)
        tied = frozenset(f"tied_modules.{key}.weight" for key in ties.values())  # TiedLayerSpec's tied_weight_attr
        parts = _saved_stage_starts(checkpoint, ties) if sizes.pp == checkpoint.grid.pp else None
        parts = parts or _default_stage_starts(checkpoint, ties, sizes.pp)
        grid = replace(grid, row=grid.row._replace(ties=ties), stage=stage, pp=sizes.pp, parts=parts, tied=tied)
    return RankPosition(data_rank=data_rank, dp=sizes.dp, expert_rank=expert_rank, expert_ranks=expert_ranks, grid=grid)


def assumptions(grid: LiveGrid) -> list[str]:
    """Return notes on what preflight assumes about a rank's part of the model."""
    if not grid.parts:
        return []
    tied = ", and what is tied of a tied module is its weight" if grid.tied else ""
    return [f"the first layers of the stages are taken to be {', '.join(map(str, grid.parts[:-1]))}{tied}"]


def names_on_rank(names: Iterable[str], grid: LiveGrid) -> tuple[str, ...]:
    """Return the names on a rank in the order of `named_parameters`: a PipelineModule's tied modules come first."""
    on_rank = filter(grid.is_responsible_for, names)
    return tuple(ties_first(sorted(on_rank, key=lambda name: layer_of(name) or 0)) if grid.parts else on_rank)


def shards_on_rank(checkpoint: AnyCheckpoint, grid: LiveGrid) -> tuple[Mapping[str, Shape], Mapping[str, object]]:
    """Return the shapes of a rank's shards, empty without tensor parallelism, and the split info of the run.

    Each part of a tensor is divided into equal shares. Raises UnsupportedLayout if that is not possible.
    """
    if grid.row.size == 1 or not isinstance(checkpoint, ZeroCheckpoint) or not checkpoint.tp_models:
        info = checkpoint.model.entries.get(INFO)
        return {}, info if isinstance(info, dict) else {}
    if checkpoint.stage == 0:
        raise cannot_predict(f"--tp {grid.row.size} of a checkpoint of ZeRO stage 0")
    splits = known_splits(checkpoint)
    with use_rules(grid.row.rules):  # with the splits of the saved shards, but without the saving run's split info
        splits_of_run, faults = splits._replace(evidence=splits.evidence._replace(info={})).for_tp(grid.row.size)
    if faults:
        raise cannot_predict(f"--tp {grid.row.size}: {faults[0].line()}")
    uneven = next((name for name, division in splits_of_run.items() if len(set(division.shards)) > 1), None)
    if uneven is not None:
        raise cannot_predict(f"--tp {grid.row.size}: {uneven} cannot be cut evenly, and the script says how it is")
    return {name: division.shards[grid.row.rank] for name, division in splits_of_run.items()}, pattern_info(
        splits_of_run
    )


def _experts(checkpoint: AnyCheckpoint | None, ep_rank: int, ep: int) -> dict[str, Experts]:
    names = checkpoint.model.module if checkpoint is not None and checkpoint.listing.experts else ()
    totals = experts_per_rank(names, 1)
    return {prefix: Experts(ep_rank * total // ep, total // ep, total) for prefix, total in totals.items()}


def _ties(checkpoint: ZeroCheckpoint) -> dict[int, str]:
    """Return the tied modules by layer number: those named in the layers' files, and one more in each other stage.

    A tied layer with a forward_fn (an output layer that uses the embedding) has no file; it is assumed to be the last
    layer of its stage without a file.
    """
    numbers = {name: layer for (layer, _), name in checkpoint.listing.layers.items()}
    keys = {
        numbers[file]: tied_key(key.name) for file, part in layer_files(checkpoint).items() for key in part.values()
    }
    ties = {layer: key for layer, key in keys.items() if key is not None}
    stages = _stage_contents(checkpoint)
    end = max(numbers.values(), default=0)
    for number, (_, tied) in enumerate(stages):
        begin = 1 + max((layer for owned, _ in stages[:number] for layer in owned), default=-1)
        last = min((layer for owned, _ in stages[number + 1 :] for layer in owned), default=end + 2) - 1
        for key in sorted(tied - {ties.get(layer) for layer in range(begin, last + 1)}):
            candidates = [layer for layer in range(begin, last + 1) if layer not in keys and layer <= end] or [last]
            if key not in ties.values() or candidates[-1] in keys:
                raise cannot_predict(f"the tied module {key!r}, which has no file")
            ties[candidates[-1]] = key
    return ties


def _stage_contents(checkpoint: ZeroCheckpoint) -> list[tuple[set[int], set[str]]]:
    """Return the layers and the tied modules of each saved stage, as far as its parameters and buffers tell."""
    by_stage = [{*stage.trainable, *stage.buffer_names} for stage in checkpoint.stages]
    return [
        ({n for n in map(layer_of, names) if n is not None}, {key for key in map(tied_key, names) if key is not None})
        for names in by_stage
    ]


def _saved_stage_starts(checkpoint: ZeroCheckpoint, ties: Mapping[int, str]) -> tuple[int, ...] | None:
    """Return the first layers of the saved stages, and the number of layers; None if unknown (ZeRO stage 0)."""
    if checkpoint.model.param_shapes is None:
        return None
    stages, end = _stage_contents(checkpoint), _layer_count(checkpoint, ties)

    def cut(stage: int, begin: int) -> tuple[int, ...] | None:  # the starts from `stage` on, which begins at `begin`
        for last in range(begin, end + 1) if stage < len(stages) - 1 else [end]:
            inside = set(range(begin, last)) - ties.keys()
            tied_inside = {ties[layer] for layer in range(begin, last) if layer in ties}
            unique_layers = not any(inside & owned for owned, _ in stages[stage + 1 :])
            if unique_layers and (stages[stage][0] <= inside, tied_inside) == (True, stages[stage][1]):
                rest = cut(stage + 1, last) if stage < len(stages) - 1 else (end,)
                if rest is not None:
                    return (begin, *rest)
        return None

    return cut(0, 0)


def _layer_count(checkpoint: ZeroCheckpoint, ties: Mapping[int, str]) -> int:
    return 1 + max(*(layer for layer, _ in checkpoint.listing.layers), *ties, 0)


def _default_stage_starts(checkpoint: ZeroCheckpoint, ties: Mapping[int, str], stages: int) -> tuple[int, ...]:
    """Return the first layers of `stages` stages, cut as by PipelineModule's partition_method="parameters"."""
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
