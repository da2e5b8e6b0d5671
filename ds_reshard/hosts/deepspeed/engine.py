"""A running DeepSpeed engine: read once, as a run of plain values, and what a load does to it beside moving bytes.

Attributes read here, all seen in deepspeed 0.14 to 0.19.8: `DeepSpeedZeroOptimizer.round_robin_bit16_groups`,
`.single_partition_of_fp32_groups` (runtime/zero/stage_1_and_2.py), `BF16_Optimizer.bf16_groups`,
`.fp32_groups_flat_partition` (runtime/bf16_optimizer.py), `DeepSpeedZeroOptimizer_Stage3.fp16_groups`,
`.fp32_partitioned_groups_flat`, `.sub_group_to_group_id`, and with AutoEP `.sub_group_process_groups`
(runtime/zero/stage3.py). `round_robin_bit16_padding` is newer than 0.19.5; without it there are no gaps. In 0.19.8: the
calls of `engine.mpu` (utils/bwc.py), and of `PipelineModule` `_layer_specs`, `parts` and `stage_id`
(runtime/pipe/module.py). AutoTP says how it has divided a module in `module.universal_checkpoint_info`
(module_inject/layers.py), as it saves it; a model of an `mpu` may. AutoEP says it of each parameter
(`ds_autoep_uc_meta`, module_inject/auto_ep_layer.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

from ds_reshard.errors import EngineUnusable
from ds_reshard.execution.buffers import element_type
from ds_reshard.execution.states import has_moments
from ds_reshard.formats.zero.autoep import expert_parts
from ds_reshard.formats.zero.checkpoint import TpRank
from ds_reshard.formats.zero.flat import RULES, FlatBuffer
from ds_reshard.formats.zero.flat import Rule as CutRule
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.modules import expert_of
from ds_reshard.formats.zero.tensor_parallel import affine_maps
from ds_reshard.hosts.deepspeed.grid import Experts, LiveGrid
from ds_reshard.model.live_run import LiveModule, LiveOptimizer, LiveRun, LiveTensor, LocalShard, Unloaded
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import Rule
from ds_reshard.operations.ranks import collective, rank, world_size

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine

EXTRA_STATE = "_extra_state"
Names = Mapping["torch.Tensor", str]


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveBuffer(FlatBuffer):
    """A flat buffer of a run: this rank's number among those that share it, and the masters that the rank has of it.

    `held_numel` is their size, as the engine says it, `weight_dtype` the type of the weights beside them at stage 3.
    `states` are the kinds of states that the optimizer keeps of the buffer in its shape, `usual` those that its class
    is known to keep, and whether each has the shape; None if unknown.
    """

    rank: int
    dtype: ElementType
    held_numel: int
    weight_dtype: ElementType | None = None
    states: frozenset[str] | None = None
    usual: Mapping[str, bool] | None = None


Optimizer = LiveOptimizer[LiveBuffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(LiveRun[LiveBuffer]):
    """One rank of a run of DeepSpeed.

    `stage` is the ZeRO stage of the JSON. `columns` counts the model-parallel ranks, `expert_sizes` are the
    expert-parallel sizes of layers. `info` is what the module says of how its parameters are divided, by AutoTP with
    `autotp`; `shard_sizes` are those that it says along a dimension of a parameter.
    """

    stage: int
    grid: LiveGrid
    columns: int
    expert_sizes: frozenset[int] = frozenset()
    info: Mapping[str, object]
    autotp: bool
    shard_sizes: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    universal: bool
    from_masters: bool
    bf16: bool
    node_local: bool = False
    unpickles: bool
    swaps: bool

    @property
    def kind(self) -> str:
        """The kind of the optimizer (`live_kind`)."""
        return self.optimizer.kind if self.optimizer is not None else "none"

    @property
    def fp16(self) -> bool:
        """True if the run trains in fp16, in its JSON or not: DeepSpeed scales the loss by the type alone."""
        return any(one.trainable and one.dtype is ElementType.FLOAT16 for one in self.module.tensors)


def run_of(engine: DeepSpeedEngine, features: Sequence[str] = (), rules: tuple[Rule, ...] = ()) -> Run:
    """Everything that a load asks of an engine, read once. `rules` are the user's, of tensor-parallel parameters."""
    grid, optimizer, module = live_grid(engine), getattr(engine, "optimizer", None), engine.module
    config = engine._config._param_dict
    if not grid.parts:
        grid = replace(grid, row=told_by_parameters(module, grid.row, autotp=autotp_in(config)))
    named = list(module.named_parameters())
    shares = {name: share for name, param in named if (share := _expert_share(param)) is not None}
    return Run(
        data_rank=rank(engine.seq_data_parallel_group),
        data_ranks=int(engine.seq_dp_world_size),
        module=module_of(module, grid),
        optimizer=live_optimizer(engine, grid),
        scheduler=engine.lr_scheduler,
        local_shards=shares,
        features=tuple(features),
        stage=int(engine.zero_optimization_stage()),
        grid=replace(grid, row=grid.row._replace(rules=rules)),
        columns=int(engine.mp_world_size),
        expert_sizes=_expert_sizes(engine),
        info=info_of(module),
        autotp=autotp_in(config),
        shard_sizes={name: _sizes(param) for name, param in named},
        universal=bool(engine.load_universal_checkpoint()),
        from_masters=bool(engine.zero_load_from_fp32_weights()),
        bf16=bool(engine.bfloat16_enabled()),
        node_local=bool(getattr(engine, "use_node_local_storage", bool)()),
        unpickles=_unpickles(engine),
        swaps=bool(getattr(optimizer, "swap_optimizer", False)),
    )


def model_numbers(model: object) -> tuple[tuple[str, Mapping[str, object]], ...]:
    """Return the configuration of a model of transformers, or of an engine's; of other models nothing.

    It comes with a name for messages.
    """
    to_dict = getattr(getattr(getattr(model, "module", model), "config", None), "to_dict", None)
    told = to_dict() if callable(to_dict) else None
    return (("the run's model.config", told),) if isinstance(told, Mapping) else ()


def module_of(module: torch.nn.Module, grid: LiveGrid) -> LiveModule:
    """The tensors of a module, as parameters and as entries of its state dict; tied ones once, with all their names."""
    import torch

    found: dict[int, tuple[torch.Tensor, list[str], list[str]]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), (param, [], []))[1].append(grid.global_name(name))
    state: dict[str, object] = module.state_dict(keep_vars=True)
    whole = {grid.global_name(name): value for name, value in state.items()}
    params, unloaded, scales, read = set(found), dict[str, Unloaded](), dict[str, Unloaded](), set[str]()
    named = list(module.named_modules())
    loaders = {id(one) for _, one in named if has_loader(one)}
    no_loader, codes = entries_unloaded(module, state, loaders), _integers(module)
    for name, beside in entries_unloaded(module, state, set()).items():
        entry = state[name], frozenset(map(grid.global_name, beside))
        if name in no_loader:
            unloaded[grid.global_name(name)] = entry
        elif not codes.isdisjoint(beside):
            scales[grid.global_name(name)] = entry
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != EXTRA_STATE and name not in unloaded:
            found.setdefault(id(value), (value, [], []))[2].append(name)
            read.add(name)
    own = torch.nn.Module.set_extra_state
    extra = [f"{name}.{EXTRA_STATE}".lstrip(".") for name, one in named if type(one).set_extra_state is not own]
    aside = read | unloaded.keys()
    left = {name: value for name, value in whole.items() if name not in aside and id(value) not in params}
    return LiveModule(
        tensors=tuple(_tensor(tensor, tuple(names), tuple(entries)) for tensor, names, entries in found.values()),
        names=frozenset(whole),
        other_shapes={name: tuple(value.shape) for name, value in left.items() if hasattr(value, "shape")},
        unloaded=unloaded,
        scales=scales,
        extra_state_entries=tuple(map(grid.global_name, extra)),
        has_load_hooks=bool(loaders) or _loads_itself(module, state),
        versioned={
            saved_name(n): one._version for n, one in named if id(one) in loaders and one._version not in (None, 1)
        },
    )


def _integers(module: torch.nn.Module) -> set[str]:
    return {name for name, param in module.named_parameters() if not (param.is_floating_point() or param.is_complex())}


def _tensor(tensor: torch.Tensor, names: tuple[str, ...], entries: tuple[str, ...]) -> LiveTensor:
    part = getattr(tensor, "ds_tensor", None)
    label = str((part if part is not None else tensor).dtype).removeprefix("torch.")
    return LiveTensor(
        names=names,
        entries=entries,
        shape=param_shape(tensor),
        dtype=ElementType.named(label) if ElementType.is_named(label) else None,
        trainable=bool(names) and tensor.requires_grad,
        contiguous=tensor.is_contiguous(),
        partitioned=part is not None,
        quantized=hasattr(part, "ds_quant_scale"),
    )


def _loads_itself(module: torch.nn.Module, state: Mapping[str, object]) -> bool:
    """True if a module loads itself as a whole, or has entries that are not its tensors."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if any(hasattr(value, "data_ptr") and id(value) not in own for value in state.values()):
        return True
    return any(_overrides(one, "load_state_dict") for one in loaded_modules(module).values())


def loaded_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules on which DeepSpeed calls `load_state_dict`, by the prefix of their entries' names.

    For a PipelineModule these are its layers (`load_state_dir`, runtime/pipe/module.py, 0.19.8).
    """
    if not _is(type(module), "PipelineModule"):
        return {"": module}
    parts = {f"{name}.": one for name, one in module.named_children() if name != "tied_modules"}
    tied = module.get_submodule("tied_modules").named_children()
    return {**parts, **{f"tied_modules.{name}.": one for name, one in tied}}


def saved_name(module: str) -> str:
    """Return the name of a module in the metadata of a saved state dict. Experts are numbered as on the first rank."""
    of = expert_of(f"{module}.")
    return module if of is None else f"{of[0]}0{of[2]}".removesuffix(".")


def loader_prefixes(part: torch.nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the entries that a module with a loader of its own loads."""
    whole = ("",) if _overrides(part, "load_state_dict") else ()
    named = part.named_modules(remove_duplicate=False)
    return (*whole, *(f"{name}." if name else "" for name, one in named if has_loader(one)))


def _overrides(module: torch.nn.Module, method: str) -> bool:
    """True if a module or its class replaces a method of torch."""
    return not getattr(getattr(module, method), "__module__", "").startswith("torch.nn.")


def entries_unloaded(module: torch.nn.Module, state: Iterable[str], loaders: set[int]) -> dict[str, list[str]]:
    """Return the entries of a module's state dict that `load_state_dict` calls unexpected, each with its tensors.

    Their modules only write them, as bitsandbytes' Linear4bit its scales. One whose `id` is in `loaders` may take any.
    """
    found: dict[str, list[str]] = {}
    for name in state:
        part, left = module, name.split(".")
        own = id(part) in loaders
        while len(left) > 1 and (inner := part._modules.get(left[0])) is not None:
            part, left = inner, left[1:]
            own = own or id(part) in loaders
        held = {**part._parameters, **part._buffers}
        if not own and left[0] != EXTRA_STATE and (len(left) > 1 or left[0] not in held):
            prefix = name.removesuffix(".".join(left))
            found[name] = [prefix + one for one in ([left[0]] if left[0] in held else held)]
    return found


def has_loader(module: torch.nn.Module) -> bool:
    """Whether a module takes part in loading, by hooks or a loader of its own."""
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or _overrides(module, "_load_from_state_dict")
    )


def told_by_parameters(module: torch.nn.Module, row: TpRank, *, autotp: bool) -> TpRank:
    """The row with what this run's parameters tell of how they are divided: shapes of whole ones, and attributes.

    Of one rank all are whole; of AutoTP what bears no mark is (`_set_param_uc_meta`, module_inject/layers.py). Megatron
    sets attributes; a `partition_stride` of 1 is found on SwiGLU's two halves too, and tells nothing of dimension 0.
    """
    whole, held = dict[str, Shape](), dict[str, Shape]()
    live: dict[str, Rule | None] = {}
    for name, parameter in module.named_parameters():
        held[name] = param_shape(parameter)
        said = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
        if row.size == 1 or autotp:
            shape = said.get("logical_shape")
            whole[name] = tuple(shape) if shape is not None else held[name]
        dim, cut = getattr(parameter, "partition_dim", None), getattr(parameter, "tensor_model_parallel", None)
        if isinstance(dim, int) and isinstance(cut, bool):
            stride = getattr(parameter, "partition_stride", 1)
            one = Rule(name, replicated=True) if not cut else Rule(name, dim=dim, parts=stride)
            live[name] = one if not cut or dim or stride > 1 else None
    maps = affine_maps(info_of(module)) if row.size > 1 else {}
    return row._replace(whole_shapes=whole, live_rules=live, affine_maps=maps, shard_shapes=held)


def info_of(module: torch.nn.Module) -> Mapping[str, object]:
    """The model's own record of how its ranks divide parameters."""
    info = getattr(module, "universal_checkpoint_info", None)
    info = info() if callable(info) else info  # a method of Megatron-DeepSpeed's models
    return info if isinstance(info, dict) else {}


def autotp_in(config: Mapping[str, object]) -> bool:
    """Whether DeepSpeed has divided the parameters of a run (AutoTP)."""
    size = section(config, "tensor_parallel").get("autotp_size")
    return isinstance(size, int) and size > 1


def _sizes(parameter: object) -> Mapping[int, Sequence[int]]:
    """Return the sizes of all ranks' shards by dimension if AutoTP records them, else nothing.

    It does so for embeddings (`_slice_embedding`, module_inject/auto_tp.py, 0.19.8).
    """
    meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
    dim, sizes = meta.get("partition_dim"), meta.get("partition_sizes")
    return {dim: sizes} if isinstance(dim, int) and isinstance(sizes, (list, tuple)) else {}


def _expert_share(parameter: object) -> LocalShard | None:
    """The part of the whole parameter that this rank has of an AutoEP parameter, or None for any other parameter."""
    said = getattr(parameter, "ds_autoep_uc_meta", None)
    if said is None:
        return None
    shape = tuple(said["logical_shape"])
    return LocalShard(shape, expert_parts(shape, enumerate(said["local_experts"])))


def live_grid(engine: DeepSpeedEngine) -> LiveGrid:
    """Where this rank is, as the engine's own mpu and module say it."""
    # the mpu of sequence parallelism calls its ranks model-parallel, which divide no parameter and number no file
    # (`_get_model_parallel_world_size`, utils/groups.py, 0.19.8)
    mpu = engine.mpu if engine.mp_world_size > 1 else None
    size, rank = _asked(mpu, "world_size", 1), _asked(mpu, "rank", 0)
    if not _is(type(getattr(engine, "module", None)), "PipelineModule"):
        return LiveGrid(row=TpRank(size, rank), experts=_experts(engine))
    module = engine.module
    specs = module._layer_specs
    tied = {layer: spec for layer, spec in enumerate(specs) if _is(type(spec), "TiedLayerSpec")}
    ties = {layer: str(spec.key) for layer, spec in tied.items()}
    return LiveGrid(
        row=TpRank(size, rank, ties),
        stage=int(module.stage_id),
        pp=len(module.parts) - 1,
        parts=tuple(map(int, module.parts)),
        tied=frozenset(
            f"tied_modules.{spec.key}.{name}" for spec in tied.values() for name in _names(spec.tied_weight_attr)
        ),
    )


def _asked(mpu: object, what: str, otherwise: int) -> int:
    """The mpu's tensor-parallel size or rank, asked as `deepspeed.utils.bwc` does; `otherwise` if it cannot say."""
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


def param_names(engine: DeepSpeedEngine, grid: LiveGrid) -> Names:
    """The name in the whole model of each parameter of this rank."""
    names: Names = engine.param_names
    if not getattr(engine, "has_moe_layers", False):
        return names
    return {param: grid.global_name(name) for param, name in names.items()}


def autoep_live(engine: DeepSpeedEngine) -> frozenset[int]:
    """The expert-parallel sizes of the layers in which DeepSpeed has cut the experts of a model (AutoEP)."""
    layers = (module for module in engine.module.modules() if _is(type(module), "AutoEPMoELayer"))
    return frozenset(int(layer.ep_size) for layer in layers)


def _expert_sizes(engine: DeepSpeedEngine) -> frozenset[int]:
    """The expert-parallel sizes of AutoEP's layers, and at stage 0 the largest of deepspeed.moe's."""
    layers = [module for module in engine.module.modules() if _is(type(module), "MoE") and hasattr(module, "ep_size")]
    native = {int(layer.ep_size) for layer in layers} - {1} if engine.zero_optimization_stage() == 0 else set()
    return autoep_live(engine) | frozenset(sorted(native)[-1:])


def _is(cls: type, name: str) -> bool:
    return any(base.__name__ == name for base in cls.__mro__)


def _names(attributes: str | list[str]) -> list[str]:
    """`TiedLayerSpec.tied_weight_attr`: one name in old releases."""
    return [attributes] if isinstance(attributes, str) else list(attributes)


def unsupported(engine: DeepSpeedEngine) -> list[str]:
    """What this engine uses that a load under another layout cannot handle; names for the refusal.

    NVMe offload shows by the optimizer's own marks: `engine.zero_nvme_offload_optimizer` is newer than 0.15.4.
    """
    optimizer, grid, kind = getattr(engine, "optimizer", None), live_grid(engine), live_kind(engine)
    moe, columns = bool(getattr(engine, "has_moe_layers", False)), int(getattr(engine, "mp_world_size", 1))
    numbered = getattr(getattr(engine, "mpu", None), "get_model_parallel_rank", lambda: None)()

    def marked(*names: str) -> bool:
        return any(bool(getattr(optimizer, name, False)) for name in names)

    found = {
        "model-parallel ranks in another order than stage by stage": columns > 1
        and (grid.row.size * grid.pp, grid.column) != (columns, numbered),
        MIXTURE: moe and not plain_experts(kind, grid, autoep=bool(autoep_live(engine))),
        "NVMe offload": marked("swap_optimizer", "params_in_nvme_and_cpu"),
        "ZenFlow": marked("zenflow") or bool(getattr(engine, "zenflow", False)),
        "SuperOffload": type(optimizer).__name__.startswith("SuperOffload"),
        "MiCS": type(optimizer).__name__.startswith("MiCS"),
    }
    if engine.zero_optimization_stage() > 0 and "Muon" in type(inner_of(engine)).__name__:
        beside = columns > 1 or grid.row.size * grid.pp > 1 or moe or bool(grid.experts)
        found |= {
            "Muon beside tensor, pipeline or expert parallelism": beside,
            "Muon in CPU memory": marked("cpu_offload", "offload_optimizer"),
            "Muon with save_muon_momentum_buffer_in_memory": marked("save_muon_momentum_buffer_in_memory"),
            "Muon in BF16_Optimizer": kind == "bf16",
        }
    return [name for name, present in found.items() if present]


def _unpickles(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's checkpoint engine loads the files that it has saved.

    The engines of "checkpoint": {"writer": ...} call torch.load as it is (`FastCheckpointEngine.load`,
    `DecoupledCheckpointEngine.load`, runtime/checkpoint_engine, 0.19.8), which since torch 2.6 takes no file with
    anything but tensors in it.
    """
    kinds = {"FastCheckpointEngine", "DecoupledCheckpointEngine"}
    own = kinds.intersection(kind.__name__ for kind in type(getattr(engine, "checkpoint_engine", None)).__mro__)
    return not own and section(engine._config._param_dict, "checkpoint").get("writer") is None


MIXTURE = "mixture of experts"


def plain_experts(kind: str, grid: LiveGrid, *, autoep: bool) -> bool:
    """Whether experts are those of deepspeed.moe, or of AutoEP from stage 1 on, and nothing else is cut."""
    alone = grid.row.size == grid.pp == 1 and autoep != bool(grid.experts)
    return alone and kind in ("zero", "bf16", *(("zero3",) if autoep else ("torch", "unfused", "fused")))


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


def scale_name(optimizer: object) -> str | None:
    """The attribute that scales the loss: at stage 0 a config (`FP16_Optimizer`, runtime/fp16, 0.19.8)."""
    names = ("loss_scaler", "loss_scale_config")
    return next((name for name in names if getattr(optimizer, name, None) is not None), None)


SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What every loss scaler counts with: attributes of an object, at stage 0 entries of the optimizer's own state."""


def _scaler(optimizer: object) -> object:
    """Return what scales the loss, or None. Before DeepSpeed 0.18 `FP16_Optimizer` does it itself (runtime/fp16)."""
    name = scale_name(optimizer)
    if name is not None:
        return getattr(optimizer, name)
    own = {name: getattr(optimizer, name) for name in ("dynamic_loss_scale", *SCALE) if hasattr(optimizer, name)}
    return SimpleNamespace(**own) if "cur_scale" in own else None


def live_optimizer(engine: DeepSpeedEngine, grid: LiveGrid) -> Optimizer | None:
    """The engine's optimizer, None when it has none."""
    kind = live_kind(engine)
    if kind in ("none", "offload"):
        return None
    optimizer, names = engine.optimizer, param_names(engine, grid)
    # a PipelineModule's BF16_Optimizer divides its masters at stage 0 too (`_configure_bf16_optimizer`, engine.py)
    stage = int(engine.zero_optimization_stage()) or int(kind == "bf16")
    group = None if stage == 0 else optimizer.dp_process_group
    place = (0, 1) if group is None else (rank(group), world_size(group))
    buffers = tuple(_buffers(kind, optimizer, names, place))
    groups, inner = live_groups(engine), inner_of(engine)
    devices, trained = getattr(optimizer, "subgroup_to_device", {}).values(), {n for b in buffers for n in b.shapes}
    return LiveOptimizer(
        kind=kind,
        stage=stage,
        rank=place[0],
        dp=place[1],
        buffers=buffers,
        groups=as_saved(groups),
        order=_order(kind, optimizer, names, buffers, len(groups)),
        parameters={names[one]: names[one] in trained for one in engine.module.parameters() if one in names},
        name=type(inner).__name__,
        group_keys=frozenset(getattr(inner, "defaults", {})),
        decoupled=decoupled_in(inner),
        states=usual_states(type(inner), {}, flat=True),
        entries=_own_entries(inner),
        unsaved_states=(sum(one != "cpu" for one in devices), len(devices)),
        scaler=_scaler(optimizer),
        computes_norm=bool(getattr(optimizer, "compute_grad_norm", True)),
        casts_states=not _replaces(inner, "load_state_dict"),
    )


def inner_of(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimizer that steps, inside the engine's."""
    return _inner(getattr(engine, "optimizer", None))


def _inner(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper of DeepSpeed.

    A wrapper of the script is returned itself: DeepSpeed gives the state to it, and not to the optimizer inside.
    """
    wraps = any(kind.__module__.startswith("deepspeed.runtime.") for kind in type(optimizer).__mro__)
    return cast("torch.optim.Optimizer", getattr(optimizer, "optimizer", optimizer) if wraps else optimizer)


def _own_entries(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of the state dict of an optimizer that replaces torch's `state_dict`; else none."""
    return frozenset(optimizer.state_dict()) if _replaces(optimizer, "state_dict") else frozenset()


def _replaces(optimizer: object, method: str) -> bool:
    """True if the optimizer's class has a method of its own in place of torch's."""
    import torch

    return getattr(type(optimizer), method, None) not in (getattr(torch.optim.Optimizer, method), None)


def live_groups(engine: DeepSpeedEngine) -> list[dict[str, object]]:
    """The live param groups of the optimizer that steps."""
    return cast(list[dict[str, object]], getattr(inner_of(engine), "param_groups", []))


def masters_of(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """The tensor that has this rank's masters of each flat buffer."""
    kind = live_kind(engine)
    return [] if kind in ("none", "offload") else [masters for *_, masters in _held(kind, engine.optimizer)]


class Memory(NamedTuple):
    """The module's state dict, and the memory of a run by its names (`model/live_run.py`)."""

    state: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]


def memory_of(engine: DeepSpeedEngine, grid: LiveGrid) -> Memory:
    """The memory of a run, when bytes move; the state dict is taken again, as its entries may be made for it."""
    import torch

    state: dict[str, object] = engine.module.state_dict(keep_vars=True)
    found = {f"module/{grid.global_name(name)}": one for name, one in state.items() if isinstance(one, torch.Tensor)}
    found |= {f"fp32/{number}": masters for number, masters in enumerate(masters_of(engine))}
    if live_kind(engine) == "zero3":
        flats = engine.optimizer.fp16_partitioned_groups_flat
        found |= {f"weight/{number}": flat for number, flat in enumerate(flats)}
    parts = ((name, getattr(param, "ds_tensor", None)) for name, param in engine.module.named_parameters())
    return Memory(state, found | {f"frozen/{name}": part for name, part in parts if part is not None})


def _order(
    kind: str, optimizer: ZeROOptimizer, names: Names, buffers: tuple[LiveBuffer, ...], groups: int
) -> tuple[dict[str, Shape], ...]:
    if kind == "zero":
        return tuple(_shapes(params, names) for params in optimizer.bit16_groups)
    if kind == "torch":
        listed = [cast("list[torch.Tensor]", group["params"]) for group in optimizer.param_groups]
        return tuple(
            {names.get(param, f"{number}.{n}"): param_shape(param) for n, param in enumerate(params)}
            for number, params in enumerate(listed)
        )
    order: list[dict[str, Shape]] = [{} for _ in range(groups)]
    for buffer in buffers:
        order[buffer.group] |= buffer.shapes
    return tuple(order)


def param_shape(param: torch.Tensor) -> Shape:
    """A parameter's full shape, also when stage 3 has partitioned it."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _shapes(params: Sequence[torch.Tensor], names: Names) -> dict[str, Shape]:
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
    """The number of each param group, at stage 3 of each sub-group, its parameters, and the tensor of their masters."""
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


def _buffers(kind: str, optimizer: ZeROOptimizer, names: Names, place: tuple[int, int]) -> Iterator[LiveBuffer]:
    """The flat buffers of an optimizer that this rank, as `place` says, shares with so many."""
    gaps = getattr(optimizer, "round_robin_bit16_padding", None) if kind == "zero" else None
    inner = _inner(optimizer)
    held: Mapping[torch.Tensor, Mapping[str, object]] = getattr(inner, "state", {})
    flats = getattr(optimizer, "fp16_partitioned_groups_flat", None)
    probed: dict[tuple[int, bool], Mapping[str, bool] | None] = {}
    for at, (number, params, fp32) in enumerate(_held(kind, optimizer)):
        own, ranks = _share(kind, optimizer, number) or place
        group, flat = _group(kind, optimizer, number, fp32), fp32.dim() < 2
        if (group, flat) not in probed:
            probed[group, flat] = usual_states(type(inner), inner.param_groups[group], flat=flat)
        yield LiveBuffer(
            shapes=_shapes(params, names),
            rule=RULES.get(kind, CutRule.REPLICATED),
            ranks=ranks,
            number=at,
            group=group,
            gaps=tuple(gaps[number]) if gaps else None,
            rank=own,
            dtype=element_type(fp32.dtype),
            held_numel=fp32.numel(),
            weight_dtype=element_type(flats[at].dtype) if flats is not None else None,
            states=own_states(fp32.numel(), inner.param_groups[group], probed[group, flat], held.get(fp32)),
            usual=probed[group, flat],
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
    """Return this rank's place in the group that divides a param group, and its size, if it is smaller than others.

    That is so for experts. A larger group is of a device mesh that an earlier engine has left in this process.
    """
    sharing = {"zero": "real_dp_process_group", "bf16": "real_dp_process_group", "zero3": "sub_group_process_groups"}
    groups = getattr(optimizer, sharing[kind], None) if kind in sharing else None
    if groups is None:
        return None
    size = world_size(groups[number])
    return (rank(groups[number]), size) if size < world_size(optimizer.dp_process_group) else None


KEPT = {
    "FusedAdam": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPUAdam": ("exp_avg", "exp_avg_sq"),
    "FusedLamb": ("exp_avg", "exp_avg_sq"),
    "FusedLion": ("exp_avg",),
    "DeepSpeedCPULion": ("exp_avg", "exp_avg_sq"),
    "DeepSpeedCPUAdagrad": ("exp_avg_sq",),
}
"""The states of DeepSpeed's and apex's optimizers, which compile what they need (deepspeed/ops, 0.19.8)."""
_HOMES = frozenset({"torch", "deepspeed", "apex"})
MOMENTUM = "momentum_buffer"
"""The state that Muon keeps of each parameter of its groups."""


def kept_states(kind: type, group: Mapping[str, object], *, flat: bool) -> dict[str, bool] | None:
    """The states that an optimizer with a group's values keeps of a parameter, and whether each is of its shape.

    Found by one step of it with one small parameter, a vector if `flat` as the buffers of ZeRO are, and else a matrix;
    None where it takes none. Nothing of the run is touched.
    """
    import torch

    probe = torch.nn.Parameter(torch.zeros(6) if flat else torch.zeros(3, 2))
    probe.grad = torch.zeros_like(probe)
    taken = inspect.signature(kind).parameters.keys() - {"fused", "foreach", "capturable", "differentiable"}
    plain = {key: group[key] for key in taken & group.keys() if isinstance(group[key], bool | int | float | tuple)}
    try:
        one = cast(Callable[..., torch.optim.Optimizer], kind)([probe], **plain)
        one.step()
    except Exception:
        return None
    held = {name: getattr(value, "shape", ()) for name, value in one.state[probe].items() if name != "step"}
    return {name: shape == probe.shape for name, shape in held.items() if shape is not None}


def usual_states(kind: type, group: Mapping[str, object], *, flat: bool) -> Mapping[str, bool] | None:
    """What optimizers that are known keep of a buffer; Adafactor keeps other states of a matrix than of a vector."""
    home = kind.__module__.partition(".")[0]
    if home in ("torch", "transformers"):
        return kept_states(kind, group, flat=flat)
    return dict.fromkeys(KEPT[kind.__name__], True) if home in _HOMES and kind.__name__ in KEPT else None


def own_states(
    numel: int, group: Mapping[str, object], usual: Mapping[str, bool] | None, held: Mapping[str, object] | None = None
) -> frozenset[str] | None:
    """The states that an optimizer keeps of a buffer's parameters, of its shape; None where that is unknown.

    `held` are those that it has already.
    """
    if numel < 2:
        return None  # a state of one value may be any
    if "use_muon" in group:
        return frozenset({MOMENTUM} if group["use_muon"] else {"exp_avg", "exp_avg_sq"})
    if held:
        sizes = {name: value.numel() for name, value in held.items() if hasattr(value, "numel")}
        return frozenset(name for name, size in sizes.items() if size == numel and name != "step")
    return None if usual is None else frozenset(name for name, follows in usual.items() if follows)


_STATES_ELSEWHERE = ("NVMe offload", "ZenFlow", "SuperOffload", "Muon ")
"""What `unsupported` names if an engine keeps states beside those of its optimizer, or other ones."""


def keeps_unknown_states(engine: DeepSpeedEngine) -> bool:
    """True if the optimizer has made steps, and `forget_states` would not undo all of them."""
    inner = inner_of(engine)
    if any(name.startswith(_STATES_ELSEWHERE) for name in unsupported(engine)):
        return True
    return has_moments(inner, steps=True) and not all(
        "use_muon" in group or any(usual_states(type(inner), group, flat=flat) is not None for flat in (True, False))
        for group in inner.param_groups
    )


def forget_states(engine: DeepSpeedEngine) -> None:
    """Leave the optimizer without moments and step counts, as one that has not stepped.

    Optimizers make their states in their first step; torch's Adagrad does when it is built (optim/adagrad.py, 2.13).
    DeepSpeed then links them to parameters, once (`_lazy_init_hp_params_optimizer_state`,
    runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py, 0.19.8).
    """
    import torch

    optimizer, inner = engine.optimizer, inner_of(engine)
    if isinstance(inner, torch.optim.Adagrad):
        beginnings = {param: group for group in inner.param_groups for param in group["params"]}
        for param, state in inner.state.items():
            state["step"].zero_()
            state["sum"].fill_(beginnings.get(param, inner.defaults)["initial_accumulator_value"])
        return
    inner.state.clear()
    for group in inner.param_groups:
        group.pop("step", None)
    if hasattr(optimizer, "backup_optimizer"):  # of a `ratio` below 1, a torch AdamW (runtime/zero/stage3.py, 0.19.8)
        optimizer.backup_optimizer.state.clear()
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
    for param in engine.module.parameters():
        if getattr(param, "_hp_mapping", None) is not None:
            param._hp_mapping.optim_fragment = None


def decoupled_in(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether weight decay is apart from the gradient, None if a param group says it.

    torch's AdamW takes no other from a group (`__setstate__`, optim/adamw.py, 2.13), and DeepSpeed's keep it apart;
    torch's Adam takes either.
    """
    import torch

    return True if isinstance(optimizer, torch.optim.AdamW) else getattr(optimizer, "adam_w_mode", None)


def as_saved(groups: Iterable[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
    """Param groups as a state dict has them: numbers in place of parameters."""
    return tuple({**group, "params": [*range(len(cast(Sized, group["params"])))]} for group in groups)


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
    """Make hpZ rebuild its secondary copies, which forward gathers. Those of frozen parameters predate the load.

    DeepSpeed forgets those of trained parameters alone (`invalidate_secondary_tensor`, runtime/zero/stage3.py, 0.19.8).
    """
    for param in engine.module.parameters():
        if getattr(param, "ds_secondary_tensor", None) is not None:
            param.ds_secondary_tensor = None


def _complete_gathers(group: dist.ProcessGroup) -> None:
    """Wait until all gathered parameters have arrived. Collective over gloo; does nothing on other backends.

    DeepSpeed waits for the last of several gathers alone (`_allgather_params_coalesced`,
    runtime/zero/partition_parameters.py, 0.14.5 to 0.18.9), which on gloo leaves the others on their way; gloo's
    barrier waits for all work before it.
    """
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        with collective():
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
