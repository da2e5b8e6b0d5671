"""A running DeepSpeed engine as a layout and buffers: the target side of a load.

Attributes read here, all seen in deepspeed 0.14 to 0.19.8: `DeepSpeedZeroOptimizer.round_robin_bit16_groups`,
`.single_partition_of_fp32_groups` (runtime/zero/stage_1_and_2.py), `BF16_Optimizer.bf16_groups`,
`.fp32_groups_flat_partition` (runtime/bf16_optimizer.py), `DeepSpeedZeroOptimizer_Stage3.fp16_groups`,
`.fp32_partitioned_groups_flat`, `.sub_group_to_group_id`, and with AutoEP `.sub_group_process_groups`
(runtime/zero/stage3.py). `round_robin_bit16_padding`
is newer than 0.19.5; without it there are no gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import EngineUnusable, Fault, UnsupportedLayout
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, Rule
from ds_reshard.formats.zero.model_states import section
from ds_reshard.hosts.deepspeed.grid import LiveGrid, autoep_live, live_grid, param_names
from ds_reshard.model.region import Shape
from ds_reshard.operations.ranks import answered, rank, world_size

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBuffer(FlatBuffer):
    """A flat buffer of an engine, with the fp32 tensor of this rank's masters and its number among those that share."""

    fp32: torch.Tensor
    rank: int


MOMENTUM = "momentum_buffer"
"""The state that Muon keeps of each parameter of its groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer:
    """An optimizer of any stage, seen alike.

    `kind` is "zero", "bf16" or "zero3", and at stage 0 "fused" (one flat buffer a group), "unfused" or
    "torch" (one buffer a parameter; a torch optimizer's masters are the weights themselves). `rank` and
    `dp` are those of the group that partitions the optimizer; at stage 0 every rank holds all, as the
    one rank of dp=1. `groups` are the optimizer's live param groups, `order` the trainable parameters of
    each in the order in which the user gave them.
    """

    kind: str
    stage: int
    rank: int
    dp: int
    buffers: tuple[LiveBuffer, ...]
    groups: tuple[dict[str, object], ...]
    order: tuple[dict[str, Shape], ...]

    @property
    def replicated(self) -> bool:
        return self.stage == 0

    def faults(self) -> list[Fault]:
        """Where a flat buffer has not the size that the layout rule gives it: the rule is then not this engine's."""
        found = []
        for number, buffer in enumerate(self.buffers):
            expected = buffer.partition_numel
            if buffer.fp32.numel() != expected:
                found.append(
                    UnsupportedLayout.fault(
                        f"flat buffer {number} of the running engine",
                        f"is not partitioned over the {self.dp} ranks of its data-parallel group",
                        f"{expected} elements",
                        f"{buffer.fp32.numel()}",
                        mend="build the engine in a fresh process; with a device mesh, resume as it was saved",
                    )
                )
        return found

    def whole_kinds(self, buffer: LiveBuffer) -> frozenset[str]:
        """The states that this rank keeps whole for each parameter in its partition (`FlatBuffer.momentum_offsets`)."""
        return frozenset({MOMENTUM} if self.kind == "zero" and self.groups[buffer.group].get("use_muon") else ())

    def members(self, group: int) -> list[str]:
        return [name for buffer in self.buffers if buffer.group == group for name in buffer.shapes]


def unsupported(engine: DeepSpeedEngine) -> list[str]:
    """What this engine uses that a load under another layout cannot handle; names for the refusal."""
    optimizer = getattr(engine, "optimizer", None)
    wrapper = type(optimizer).__name__
    stage = engine.zero_optimization_stage()
    base = type(getattr(optimizer, "optimizer", optimizer)).__name__
    grid, columns = live_grid(engine), int(getattr(engine, "mp_world_size", 1))
    numbered = getattr(getattr(engine, "mpu", None), "get_model_parallel_rank", lambda: None)()
    apart = columns > 1 and (grid.row.size * grid.pp, grid.column) != (columns, numbered)
    found = {
        "model-parallel ranks in another order than stage by stage": apart,
        "mixture of experts": bool(getattr(engine, "has_moe_layers", False)) and not _plain_experts(engine, grid),
        "NVMe offload": _nvme(engine),
        "ZenFlow": bool(getattr(optimizer, "zenflow", False)) or bool(getattr(engine, "zenflow", False)),
        "SuperOffload": wrapper.startswith("SuperOffload"),
        "MiCS": wrapper.startswith("MiCS"),
    }
    if stage > 0 and "Muon" in base:
        found |= {
            "Muon beside tensor, pipeline or expert parallelism": columns > 1
            or grid.row.size * grid.pp > 1
            or bool(getattr(engine, "has_moe_layers", False) or grid.experts),
            "Muon in CPU memory": bool(getattr(optimizer, "cpu_offload", False))
            or bool(getattr(optimizer, "offload_optimizer", False)),
            "Muon with save_muon_momentum_buffer_in_memory": bool(
                getattr(optimizer, "save_muon_momentum_buffer_in_memory", False)
            ),
            "Muon in BF16_Optimizer": live_kind(engine) == "bf16",
        }
    return [name for name, present in found.items() if present]


def unpickles(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's checkpoint engine loads the files that it has saved.

    The engines of "checkpoint": {"writer": ...} call torch.load as it is (`FastCheckpointEngine.load`,
    `DecoupledCheckpointEngine.load`, runtime/checkpoint_engine, 0.19.8), which since torch 2.6 takes no file with
    anything but tensors in it. An engine that is only foreseen has none: its JSON tells.
    """
    kinds = {"FastCheckpointEngine", "DecoupledCheckpointEngine"}
    own = kinds.intersection(kind.__name__ for kind in type(getattr(engine, "checkpoint_engine", None)).__mro__)
    return not own and section(engine._config._param_dict, "checkpoint").get("writer") is None


def _plain_experts(engine: DeepSpeedEngine, grid: LiveGrid) -> bool:
    """Whether experts are those of deepspeed.moe, or of AutoEP from stage 1 on, and nothing else is cut."""
    autoep = bool(autoep_live(engine))
    alone = grid.row.size == grid.pp == 1 and autoep != bool(grid.experts)
    return alone and live_kind(engine) in ("zero", "bf16", *(("zero3",) if autoep else ("torch", "unfused", "fused")))


def _nvme(engine: DeepSpeedEngine) -> bool:
    """By the optimizer's own marks: `engine.zero_nvme_offload_optimizer` is newer than 0.15.4."""
    optimizer = getattr(engine, "optimizer", None)
    return bool(getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False))


def live_kind(engine: DeepSpeedEngine) -> str:
    """The kind of the engine's optimizer; without one "offload" at ZeRO stage 3, and "none" at other stages."""
    optimizer = getattr(engine, "optimizer", None)
    if type(getattr(optimizer, "optimizer", None)).__name__ == "DummyOptim":
        return "none"  # bf16 at stage 0 is wrapped without one, too (`_configure_bf16_optimizer`, engine.py, 0.19.8)
    for kind, (_, masters) in _HELD.items():
        if hasattr(optimizer, masters):
            return kind
    if engine.zero_optimization_stage() == 3:
        return "offload"
    return "torch" if hasattr(optimizer, "param_groups") else "none"


def live_optimizer(engine: DeepSpeedEngine) -> LiveOptimizer | None:
    """The engine's optimizer, None when it has none."""
    kind = live_kind(engine)
    if kind in ("none", "offload"):
        return None
    optimizer, names = engine.optimizer, param_names(engine)
    # a PipelineModule's BF16_Optimizer divides its masters at stage 0 too (`_configure_bf16_optimizer`, engine.py)
    stage = int(engine.zero_optimization_stage()) or int(kind == "bf16")
    group = None if stage == 0 else optimizer.dp_process_group
    place = (0, 1) if group is None else (rank(group), world_size(group))
    buffers = tuple(_buffers(kind, optimizer, names, place))
    groups = tuple(getattr(optimizer, "optimizer", optimizer).param_groups)
    return LiveOptimizer(
        kind=kind,
        stage=stage,
        rank=place[0],
        dp=place[1],
        buffers=buffers,
        groups=groups,
        order=_order(kind, optimizer, names, buffers, len(groups)),
    )


def _order(
    kind: str, optimizer: ZeROOptimizer, names: dict[torch.Tensor, str], buffers: tuple[LiveBuffer, ...], groups: int
) -> tuple[dict[str, Shape], ...]:
    if kind == "zero":
        return tuple(_shapes(params, names) for params in optimizer.bit16_groups)
    order: list[dict[str, Shape]] = [{} for _ in range(groups)]
    for buffer in buffers:
        order[buffer.group] |= buffer.shapes
    return tuple(order)


def param_shape(param: torch.Tensor) -> Shape:
    """A parameter's full shape, also when stage 3 has partitioned it."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _shapes(params: Sequence[torch.Tensor], names: dict[torch.Tensor, str]) -> dict[str, Shape]:
    return {names[param]: param_shape(param) for param in params}


_HELD = {
    "bf16": ("bf16_groups", "fp32_groups_flat_partition"),
    "zero": ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    "zero3": ("fp16_groups", "fp32_partitioned_groups_flat"),
    "fused": ("fp16_groups", "fp32_groups_flat"),
    "unfused": ("fp16_groups", "fp32_groups"),
}
"""Where each of DeepSpeed's optimizers lists parameters and masters; the latter tell them apart, in this order."""


def _held(kind: str, optimizer: ZeROOptimizer) -> Iterator[tuple[int, Sequence[torch.Tensor], torch.Tensor]]:
    """Parameters with the tensor that has their masters, and its number: of a param group, at stage 3 a sub-group."""
    if kind == "torch":
        for number, group in enumerate(optimizer.param_groups):
            yield from ((number, [param], param) for param in group["params"] if param.requires_grad)
        return
    listed = (getattr(optimizer, name) for name in _HELD[kind])
    for number, (params, masters) in enumerate(zip(*listed, strict=True)):
        if kind == "unfused":
            yield from ((number, [param], master) for param, master in zip(params, masters, strict=True))
        else:
            yield number, params, masters


def _buffers(
    kind: str, optimizer: ZeROOptimizer, names: dict[torch.Tensor, str], place: tuple[int, int]
) -> Iterator[LiveBuffer]:
    """The flat buffers of an optimizer that this rank, as `place` says, shares with so many."""
    gaps = getattr(optimizer, "round_robin_bit16_padding", None) if kind == "zero" else None
    for at, (number, params, fp32) in enumerate(_held(kind, optimizer)):
        own, ranks = _share(kind, optimizer, number) or place
        yield LiveBuffer(
            shapes=_shapes(params, names),
            rule=RULES.get(kind, Rule.REPLICATED),
            ranks=ranks,
            number=at,
            group=_group(kind, optimizer, number, fp32),
            gaps=tuple(gaps[number]) if gaps else None,
            fp32=fp32,
            rank=own,
        )


def _group(kind: str, optimizer: ZeROOptimizer, number: int, fp32: torch.Tensor) -> int:
    """The param group of a flat tensor.

    Not always one each: DeepSpeed rebuilds torch's Adagrad with all flat partitions in a single group
    (`initialize_optimizer_states`, runtime/zero/stage_1_and_2.py, 0.19.8).
    """
    if kind == "zero3":
        return int(optimizer.sub_group_to_group_id[number])
    if kind == "zero":
        groups = optimizer.optimizer.param_groups
        (number,) = (g for g, group in enumerate(groups) if any(flat is fp32 for flat in group["params"]))
    return number


def _share(kind: str, optimizer: ZeROOptimizer, number: int) -> tuple[int, int] | None:
    """The ranks that divide a group of experts are fewer than those that divide the others.

    More are those of a device mesh that an engine has left in this process: then the layout rule does not hold.
    """
    sharing = {"zero": "real_dp_process_group", "bf16": "real_dp_process_group", "zero3": "sub_group_process_groups"}
    groups = getattr(optimizer, sharing[kind], None) if kind in sharing else None
    if groups is None:
        return None
    size = world_size(groups[number])
    return (rank(groups[number]), size) if size < world_size(optimizer.dp_process_group) else None


def event(engine: DeepSpeedEngine, when: str) -> None:
    """ZeRO-3's own work around a load: partition all parameters before, gather the persistent ones after."""
    optimizer = engine.optimizer
    if when == "epilogue":
        forget_second_copies(engine)
    if optimizer is not None and hasattr(optimizer, f"checkpoint_event_{when}"):
        getattr(optimizer, f"checkpoint_event_{when}")()
        if when == "epilogue":
            _complete_gathers(optimizer.dp_process_group)


def forget_second_copies(engine: DeepSpeedEngine) -> None:
    """Let hpZ make its second copies anew, of which forward gathers: those of what is frozen are older than the load.

    DeepSpeed forgets those of trained parameters alone (`invalidate_secondary_tensor`, runtime/zero/stage3.py, 0.19.8).
    """
    for param in engine.module.parameters():
        if getattr(param, "ds_secondary_tensor", None) is not None:
            param.ds_secondary_tensor = None


def _complete_gathers(group: dist.ProcessGroup) -> None:
    """Wait until what was gathered has arrived. Collective over gloo, and nothing elsewhere.

    DeepSpeed waits for the last of several gathers alone (`_allgather_params_coalesced`,
    runtime/zero/partition_parameters.py, 0.14.5 to 0.18.9), which on gloo leaves the others on their way; gloo's
    barrier waits for all work before it.
    """
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        with answered():
            dist.barrier(group=group)


_GUARDED = ("step", "train_batch", "save_checkpoint", "save_16bit_model", "save_fp16_model")
"""What trains and saves; a pipeline's `train_batch` makes its step without `step` (runtime/pipe/engine.py, 0.19.8)."""


_REFUSED = "_ds_reshard_refused"
"""The attribute of an engine that is refused: by name, what refuses, and what stood there of the instance's own."""


def refuse_use(engine: DeepSpeedEngine, why: str) -> None:
    """Let the engine neither step nor save: it may hold half a checkpoint."""
    restore_use(engine)
    held = engine.__dict__
    held[_REFUSED] = {name: (_refusing(engine, name, why), held.get(name)) for name in _GUARDED}
    held.update({name: refuse for name, (refuse, _) in held[_REFUSED].items()})


def _refusing(engine: DeepSpeedEngine, name: str, why: str) -> Callable[..., object]:
    own = engine.__dict__.get(name)

    def refuse(*args: object, **kwargs: object) -> object:
        if _REFUSED in engine.__dict__:
            mend = "load a good checkpoint or build the engine anew"
            raise EngineUnusable(f"{why}: the engine may hold parts of it; {mend}")
        # somebody has wrapped this meanwhile
        return (own or getattr(type(engine), name).__get__(engine))(*args, **kwargs)

    return refuse


def restore_use(engine: DeepSpeedEngine) -> None:
    """Undo `refuse_use`, after a load that succeeded: what others have put on the engine stays."""
    for name, (refuse, own) in engine.__dict__.pop(_REFUSED, {}).items():
        if engine.__dict__.get(name) is refuse:
            del engine.__dict__[name]
            engine.__dict__.update({name: own} if own is not None else {})
