"""A ZeRO checkpoint that is to be written, as a layout, the source of each tensor, and a tree for each file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.layout import by_key
from ds_reshard.formats.zero.model_target import ModelTarget
from ds_reshard.formats.zero.optimizer_target import OptimizerTarget, make_flats
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.layout import Layout
from ds_reshard.model.target import Target, TargetFile, Unit

Shape = tuple[int, ...]
FORMATS = {"zero1": ("zero", 1), "zero2": ("zero", 2), "zero3": ("zero3", 3), "bf16": ("bf16", 1)}
UNIVERSAL_INFO = {"universal_checkpoint_version": 0.4}
"""What ds_to_universal sets where a script has not (UNIVERSAL_CHECKPOINT_VERSION_VALUE, checkpoint/constants.py)."""
_SUB_GROUP_NUMEL = 10**9  # SUB_GROUP_SIZE of deepspeed/runtime/zero/config.py, 0.19.8


def zero_target(
    checkpoint: ZeroCheckpoint,
    kind: str,
    dp: int,
    *,
    sub_group_size: int | None = None,
    shards: ZeroShards | None = None,
) -> Target:
    """The files that DeepSpeed's `kind` of FORMATS at data-parallel size `dp` would have saved of the same state.

    `shards` are the checkpoint's where they are opened for something else too.

    Raises UnsupportedLayout, with every reason, where the source does not hold what they need.
    """
    wrapper, stage = FORMATS[kind]
    subject = f"converting {checkpoint.listing.folder} to {kind}"
    refuse_source(checkpoint, kind)
    if kind == "bf16":
        raise_faults(list(_not_bf16(checkpoint)), subject=subject)
    order = group_order(checkpoint)
    most = (sub_group_size or _saved_sub_group_size(checkpoint)) if stage == 3 else None
    flats, faults = make_flats(checkpoint, order, dp, sub_group_numel_most=most)
    raise_faults(faults, subject=subject)
    optim = OptimizerTarget(checkpoint=checkpoint, kind=wrapper, stage=stage, dp=dp, flats=tuple(flats))
    model = ModelTarget(checkpoint=checkpoint, stage=stage, dp=dp, order=[flat.shapes for flat in flats])
    layout = Layout(by_key([*optim.placements(), *model.placements()]), {OPTIM: dp, MODEL: model.files})
    wants = {**{placement.key: placement.key for placement in optim.placements()}, **dict(model.sources())}
    tag = checkpoint.listing.tag
    units = tuple(_units(shards or ZeroShards(checkpoint=checkpoint), optim, model))
    return Target(layout=layout, wants=wants, units=units, folder=tag, pointers={"latest": tag})


def _units(shards: ZeroShards, optim: OptimizerTarget, model: ModelTarget) -> Iterator[Unit]:
    for rank in range(model.files):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if model.stage == 3 else "mp_rank_00_model_states.pt"
        file = TargetFile(name=name, tree=partial(_model_tree, model, shards, rank))
        yield Unit(family=MODEL, shard=rank, files=(file,))
    for rank in range(optim.dp):
        name = f"{_prefix(model.checkpoint, optim)}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = TargetFile(name=name, tree=partial(optim.tree, rank), data=optim.data())
        yield Unit(family=OPTIM, shard=rank, files=(file,))


def _not_bf16(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """BF16_Optimizer trains bf16 weights alone (`_configure_zero_optimizer` in deepspeed/runtime/engine.py, 0.19.8)."""
    if not _in_bf16(checkpoint):
        yield UnsupportedLayout.fault(
            checkpoint.listing.folder,
            "was not trained in bf16",
            '"bf16": {"enabled": true} in the saved DeepSpeed JSON',
            "no such entry",
            mend="--to zero1",
        )


def _in_bf16(checkpoint: ZeroCheckpoint) -> bool:
    config = checkpoint.model.entries.get("ds_config")
    section = config.get("bf16", config.get("bfloat16")) if isinstance(config, dict) else None
    return isinstance(section, dict) and section.get("enabled") is True


def _model_tree(model: ModelTarget, shards: ZeroShards, rank: int) -> Mapping[str, object]:
    """One model file, without the mark that a conversion to universal alone has set in it.

    The saving run's own file of that rank may hold its buffers and its entries; where it has none, the first's.
    """
    checkpoint = model.checkpoint
    own = rank < checkpoint.dp and rank in checkpoint.listing.model
    tree = model.tree(rank, shards.model_states(rank) if own else checkpoint.model)
    if tree.get("universal_checkpoint_info") == UNIVERSAL_INFO:
        del tree["universal_checkpoint_info"]
    return tree


def _prefix(checkpoint: ZeroCheckpoint, optim: OptimizerTarget) -> str:
    """What DeepSpeed begins the names of optimizer files with in a bf16 run (`_get_zero_ckpt_prefix`, engine.py)."""
    if checkpoint.optim is not None:
        return checkpoint.listing.optim_prefix
    return "bf16_" if _in_bf16(checkpoint) else ""


def group_order(checkpoint: ZeroCheckpoint) -> list[dict[str, Shape]]:
    """The trainable parameters of each param group as the optimizer was given them.

    With `round_robin_gradients` the flat buffers hold them in another order (`_round_robin_reorder`,
    deepspeed/runtime/zero/stage_1_and_2.py), which is undone here.
    """
    assert checkpoint.facts is not None
    shapes = checkpoint.model.trainable
    order = [list(group.members) for group in checkpoint.facts.groups]
    if checkpoint.kind == "zero" and _saved_zero(checkpoint).get("round_robin_gradients") is True:
        order = [_unrobined(members, checkpoint.dp) for members in order]
    return [{name: shapes[name] for name in members} for members in order]


def _unrobined(members: list[str], dp: int) -> list[str]:
    places = [place for first in range(dp) for place in range(first, len(members), dp)]
    return [name for _, name in sorted(zip(places, members, strict=True))]


def _saved_zero(checkpoint: ZeroCheckpoint) -> Mapping[str, object]:
    config = checkpoint.model.entries.get("ds_config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _saved_sub_group_size(checkpoint: ZeroCheckpoint) -> int:
    size = _saved_zero(checkpoint).get("sub_group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else _SUB_GROUP_NUMEL


def refuse_source(checkpoint: ZeroCheckpoint, kind: str) -> None:
    """Raise, with every reason, where a checkpoint does not hold what all targets need."""
    raise_faults(list(_lacking(checkpoint)), subject=f"converting {checkpoint.listing.folder} to {kind}")


def _lacking(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    folder = checkpoint.listing.folder
    if checkpoint.facts is None:
        yield UnsupportedLayout.fault(
            folder,
            "holds an optimizer that names no parameter (ZeRO stage 0), or none",
            "a checkpoint of stage 1 to 3, or a universal one",
            f"stage {checkpoint.stage}",
            mend="--to safetensors for the weights; or load it in a run with import ds_reshard.auto, and save there",
        )
        return
    if any(group.hyperparameters is None for group in checkpoint.facts.groups):
        yield UnsupportedLayout.fault(
            folder,
            "holds no param groups (elastic_checkpoint)",
            "learning rates and hyper-parameters, which DeepSpeed reads from a file of this kind",
            "none",
            mend="load it in a run with import ds_reshard.auto, and save there",
        )
    if checkpoint.universal is not None:
        yield from _left_out(checkpoint.universal)
    for number, partition in enumerate(checkpoint.optim.partitions if checkpoint.optim is not None else ()):
        for name, why in partition.unfollowed.items():
            yield UnsupportedLayout.fault(
                f"state {name!r} of partition {number}",
                f"is neither one value nor one for each element ({why}): no other layout has a place for it",
                mend="resume with the layout that was saved",
            )


def _left_out(universal: UniversalStates) -> Iterator[Fault]:
    """States that ds_to_universal has left out, or may have: it carries over those of Adam, and says nothing."""
    yield from universal.incomplete
    for number, group in enumerate(universal.common.groups if universal.common.kept is None else ()):
        if "betas" not in group or group.get("amsgrad") is True or "momentum_decay" in group:
            yield UnsupportedLayout.fault(
                f"{universal.common.path}: param group {number}",
                "is not of Adam or AdamW: of other states ds_to_universal leaves out some, and does not say so",
                mend="convert the ZeRO checkpoint that it was made from",
            )
