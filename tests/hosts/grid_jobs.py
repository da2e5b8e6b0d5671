"""What the worker processes do with engines on a grid of tensor-, pipeline- and expert-parallel ranks.

Every element of every tensor has a value of its own, by a rule that knows no rank: an engine that was just built holds
the truth of its own layout, which is noted, wiped, loaded over and compared. After one step at learning rate 0, with
the loss sum(p * p / 4) in which the second factor is constant, a weight is what it was and its moments follow from it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from grid_cases import Grid

_STATE: dict[str, Any] = {}
VOCABULARY, WIDTH = 7, 6


def numbers(start: int, *shape: int) -> torch.Tensor:
    """Numbers that bf16 holds exactly, none of them twice: 6000 there are."""
    count = int(torch.tensor(shape).prod())
    assert start + count <= 6000
    bits = torch.arange(0x3700 + start, 0x3700 + start + count, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).float().view(shape)


def square(module: torch.nn.Module) -> Any:
    return sum((p * (p.detach() / 4)).sum() for p in module.parameters() if p.requires_grad)


def moments(master: torch.Tensor) -> dict[str, torch.Tensor]:
    """What Adam makes of the gradient master / 4 in its first step, rounded as torch rounds it."""
    gradient = master.float() / 4
    first = torch.zeros_like(gradient).lerp_(gradient, 1 - 0.9)
    second = torch.zeros_like(gradient).mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
    return {"exp_avg": first, "exp_avg_sq": second}


class Block(torch.nn.Module):
    def __init__(self, start: int, frozen: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(numbers(start, 5, 7))
        self.b = torch.nn.Parameter(numbers(start + 50, 7))
        self.register_buffer("count", torch.tensor([float(start)]))
        if frozen:
            self.fixed = torch.nn.Parameter(numbers(start + 70, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + square(self)


class Embedding(torch.nn.Module):
    """Tied in its weight, and not in its position, of which each stage has a copy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(0, 11, 3))
        self.position = torch.nn.Parameter(numbers(40, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + square(self)


def head(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + (module.weight * 0).sum()


class Norm(torch.nn.Module):
    """Alone in its stage where there are four: the ranks of DeepSpeed's stages need as many param groups each."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(numbers(start, 9))
        self.m = torch.nn.Parameter(numbers(start + 20, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + square(self)


def _layers(kind: str) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    first = head_first if kind == "no file" else None
    if kind == "no ties":
        return [LayerSpec(Block, 100 * number) for number in range(1, 6)]
    return [
        TiedLayerSpec("embed", Embedding, forward_fn=first),
        LayerSpec(Block, 100, True),
        LayerSpec(Block, 200),
        lambda x: x,
        LayerSpec(Block, 300),
        TiedLayerSpec("embed", Embedding, forward_fn=head),
        LayerSpec(Norm, 400),
    ]


def head_first(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _pipeline(grid: Grid) -> tuple[torch.nn.Module, Any]:
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(grid.pp, grid.tp, grid.dp)
    model = PipelineModule(
        _layers(grid.layers), topology=topology, loss_fn=lambda out, label: out.sum(), partition_method="uniform"
    )
    if model.stage_id > 0 and "embed" in model.tied_modules and grid.layers != "one position":
        model.tied_modules["embed"].position.data = numbers(60, 3)
    for name, parameter in model.named_parameters():
        if grid.tp > 1 and name.endswith(".w"):  # as a shard: each tensor-parallel rank has values of its own
            parameter.data = numbers(500 + 100 * int(name[0]) + 40 * _tp_rank(model), 5, 7)
    return model, None


class Plain(torch.nn.Module):
    """The layers of the pipeline as a plain module, by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = torch.nn.ModuleList([Block(100, True), Block(200), Block(300)])
        self.norm = Norm(400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(self)


NAMES = {
    "tied_modules\\.embed\\.(.*)": "embed.{1}",
    "(?P<n>[12])\\.(.*)": "blocks.{n-1}.{2}",
    "4\\.(.*)": "blocks.2.{1}",
    "6\\.(.*)": "norm.{1}",
}
"""What the pipeline's parameters are called in `Plain`."""


def _plain(grid: Grid) -> tuple[torch.nn.Module, Any]:
    return Plain(), None


def _tp_rank(model: Any) -> int:
    return int(model.mpu().get_slice_parallel_rank())


class Attention(torch.nn.Module):
    """A fused projection of uneven parts, a column, a row, and what is not cut."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.col, self.row = linear(WIDTH, 10), linear(10, WIDTH)
        self.qkv = linear(WIDTH, 16)
        self.untouched = linear(WIDTH, 3)


class Cut(torch.nn.Module):
    def __init__(self, few: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        if few:
            self.few = torch.nn.Linear(WIDTH, 2)
        self.layers = torch.nn.ModuleList([Attention(), Attention()])
        if few:
            self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("count", torch.tensor([3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(self)


SPECS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.row\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.col\.weight$"], "partition_type": "column"},
        {"patterns": [r".*few\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [[8, 4, 4], -1], "partition_dim": 0},
        {"patterns": [r".*\.untouched\.weight$"], "partition_type": "skip"},
    ],
}


def _autotp(grid: Grid) -> tuple[torch.nn.Module, Any]:
    model, start = Cut(few=grid.layers == "few"), 0
    for parameter in model.parameters():
        parameter.data.copy_(numbers(start, *parameter.shape))
        start += parameter.numel()
    return model, None


class Mpu:
    """The calls that DeepSpeed makes; tensor-parallel ranks are neighbours."""

    def __init__(self, tp: int) -> None:
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        self._sizes = {"model": tp, "data": ranks // tp}
        rows = [list(range(first, first + tp)) for first in range(0, ranks, tp)]
        columns = [list(range(first, ranks, tp)) for first in range(tp)]
        self._groups = {}
        for kind, lists in (("model", rows), ("data", columns)):
            for members in lists:
                group = torch.distributed.new_group(members)
                if rank in members:
                    self._groups[kind] = group

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if not any(kind in name for kind in ("model_parallel", "data_parallel")):
            raise AttributeError(name)
        kind = "data" if "data" in name else "model"
        if name.startswith("get_pipeline"):
            return lambda: 1 if name.endswith("size") else 0
        if name.endswith("_world_size"):
            return lambda: self._sizes[kind]
        if name.endswith("_rank"):
            return lambda: torch.distributed.get_rank(self._groups[kind])
        if name.endswith("_group"):
            return lambda: self._groups[kind]
        raise AttributeError(name)


def _mpu_cut(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """A vocabulary of 7 rows, padded to a multiple of the ranks, SwiGLU halves, uneven heads, a row, and a norm."""
    mpu = Mpu(grid.tp)
    model, rank, tp = torch.nn.Module(), mpu.get_model_parallel_rank(), grid.tp
    vocabulary = 8 if grid.layers == "even" else VOCABULARY
    padded = -(-vocabulary // tp) * tp
    embed = torch.cat([numbers(0, vocabulary, WIDTH), torch.zeros(padded - vocabulary, WIDTH)])
    gate, up, (q, k, v) = (
        numbers(100, 8, 6),
        numbers(200, 8, 6),
        (numbers(300 + 100 * n, r, 6) for n, r in enumerate((8, 4, 4))),
    )
    cut = {
        "embed": embed.chunk(tp)[rank],
        "gate_up": torch.cat([part.chunk(tp)[rank] for part in (gate, up)]),
        "qkv": torch.cat([part.chunk(tp)[rank] for part in (q, k, v)]),
        "row": numbers(600, 6, 8).chunk(tp, 1)[rank].contiguous(),
        "norm": numbers(700, 6),
    }
    for name, tensor in cut.items():
        parameter = torch.nn.Parameter(tensor.clone())
        parameter.model_parallel = parameter.tensor_model_parallel = name != "norm"  # type: ignore[attr-defined]
        model.register_parameter(name, parameter)
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    if grid.layers in ("said", "even"):
        model.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": ["norm"],
            "parameter_with_row_parallelism_patterns": ["row"],
            "vocabulary_parameter_patterns": ["embed"],
            "original_vocab_size": vocabulary,
            "parameter_with_2_sub_params_cat_dim_0": ["gate_up"],
            "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": ((8, 4, 4), 6), "partition_dim": 0}],
        }
    return model, mpu


RULES = [
    {"parameters": "embed", "vocabulary": VOCABULARY},
    {"parameters": "gate_up", "parts": 2},
    {"parameters": "qkv", "parts": [8, 4, 4]},
    {"parameters": "row", "dim": 1},
    {"parameters": "norm", "replicated": True},
]


def _mpu(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """Nothing in its files says how a tensor is cut: each rank has numbers of its own, but for one that all share."""
    mpu = Mpu(grid.tp)
    model, rank = torch.nn.Module(), mpu.get_model_parallel_rank()
    for number, shape in enumerate([(8, 6), (8,), (6, 4), (6,), (5, 3)]):
        start = 200 * number + (0 if shape == (6,) else 100 * rank)
        parameter = torch.nn.Parameter(numbers(start, *shape))
        parameter.model_parallel = parameter.tensor_model_parallel = shape != (6,)  # type: ignore[attr-defined]
        model.register_parameter(f"p{number}", parameter)
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    return model, mpu


EXPERTS = 4


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 5), torch.nn.Linear(5, 4, bias=False)


def _moe(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """Two layers of four experts; each has numbers of its own, by its number among all."""
    from deepspeed.moe.layer import MoE

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(4, 4)
            layers = [MoE(4, Expert(), num_experts=EXPERTS, ep_size=grid.ep, k=1, use_residual=n > 0) for n in range(2)]
            self.moe = torch.nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return square(self)

    model, rank, ranks = Model(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    swapped = grid.config.get("use_data_before_expert_parallelism")
    place = rank // (ranks // grid.ep) if swapped else rank % grid.ep
    start = 0
    for name, parameter in model.named_parameters():
        if ".deepspeed_experts." not in name:
            parameter.data.copy_(numbers(start, *parameter.shape))
            start += parameter.numel()
    for layer, moe in enumerate(model.moe):
        for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            start = 1000 + 1000 * layer + 100 * (place * EXPERTS // grid.ep + local)
            for parameter in expert.parameters():
                parameter.data.copy_(numbers(start, *parameter.shape))
                start += parameter.numel()
    return model, None


_BUILD = {"plain": _plain, "moe": _moe, "pipeline": _pipeline, "autotp": _autotp, "mpu": _mpu, "cut": _mpu_cut}


def config_of(grid: Grid) -> dict[str, Any]:
    stage = 1 if grid.stage == "bf16opt" else int(grid.stage)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **grid.options},
        "steps_per_print": 10**9,
        **grid.config,
    }
    if grid.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if grid.stage == "bf16opt":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if grid.kind == "pipeline":
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if grid.kind == "autotp" and grid.tp > 1:
        config["tensor_parallel"] = {"autotp_size": grid.tp, "partition_config": SPECS}
    return config


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kinds = ([p for n, p in named if p.dim() > 1], [p for n, p in named if p.dim() == 1])
    settings = ({"lr": 0.0, "weight_decay": 0.25}, {"lr": 0.0, "weight_decay": 0.5, "eps": 1e-6, "mark": 5})
    return [{"params": of_kind, **own} for of_kind, own in zip(kinds, settings, strict=True) if of_kind]


def build(grid: Grid) -> Any:
    """An engine that holds the rule's values, before any step."""
    import deepspeed

    _forget()
    model, mpu = _BUILD[grid.kind](grid)
    groups = _groups(model)
    if grid.kind == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        every = {"params": list(model.parameters()), "name": "all", "lr": 0.0, "weight_decay": 0.0}
        groups = split_params_into_different_moe_groups_for_optimizer(every)
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=config_of(grid),
        mpu=mpu,
        dist_init_required=False,
    )
    if grid.stage == 3:
        for parameter in engine.module.parameters():
            deepspeed.zero.register_external_parameter(engine.module, parameter)
    _STATE["engine"] = engine
    return engine


def _forget() -> None:
    """The last engine, and the groups of ranks that DeepSpeed keeps for the process."""
    from deepspeed.module_inject import layers
    from deepspeed.utils import groups

    layers.set_autotp_mode(training=False)
    _STATE.clear()
    gc.collect()
    for name, value in {
        "_WORLD_GROUP": None,
        "mpu": None,
        "mesh_device": None,
        "expert_tensor_parallel_world_size": 1,
        "_TENSOR_MODEL_PARALLEL_GROUP": None,
        "_MODEL_PARALLEL_GROUP": None,
        "_DATA_PARALLEL_GROUP": None,
    }.items():
        setattr(groups, name, value)
    for name in (
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        "_ALL_TO_ALL_GROUP",
    ):
        getattr(groups, name).clear()
    distributed = torch.distributed.distributed_c10d
    for group in list(distributed._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def step(grid: Grid, engine: Any) -> None:
    if grid.kind == "pipeline":
        dtype = torch.bfloat16 if grid.dtype == "bf16" else torch.float32
        batch = (torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype))
        engine.train_batch(iter([batch] * 4))
    else:
        engine.backward(engine(torch.ones(1)))
        engine.step()


def alone(job: Callable[..., Any]) -> Callable[..., Any]:
    """Leave nothing behind to which engines of other tests would hold."""

    @functools.wraps(job)
    def run(**arguments: Any) -> Any:
        try:
            return job(**arguments)
        finally:
            _forget()

    return run


@alone
def save(grid: Grid, folder: str) -> None:
    engine = build(grid)
    step(grid, engine)
    engine.save_checkpoint(folder, tag="t", client_state={"note": 7})


def _parts(engine: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """The fp32 masters of this rank, flat or one by one, each with its state."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            yield from ((flat, inner.state.get(flat, {})) for flat in getattr(optimizer, name))
            return
    if hasattr(optimizer, "fp32_groups"):
        yield from ((p, inner.state.get(p, {})) for group in optimizer.fp32_groups for p in group)
        return
    yield from ((p, inner.state.get(p, {})) for group in inner.param_groups for p in group["params"])


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: getattr(p, "ds_tensor", p).detach() for name, p in engine.module.named_parameters()}
    return found | dict(engine.module.named_buffers())


@alone
def load(grid: Grid, folder: str, hooks: bool = True, saved_ep: int = 1, **arguments: Any) -> dict[str, Any]:
    """Build, note the truth, wipe, load; `wrong` names what is not the truth, with the number of wrong elements."""
    import ds_reshard

    engine = build(grid)
    if grid.stage == 3:
        _clear_padding(engine)
    truth = [flat.detach().clone() for flat, _ in _parts(engine)]
    weights = {name: tensor.clone() for name, tensor in _weights(engine).items()}
    for tensor in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values()):
        tensor.data.zero_()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    said = [_said(group) for group in inner.param_groups]
    for group in inner.param_groups:
        group.update(weight_decay=9.0, betas=(0.1, 0.2), eps=1.0)
    if hooks:
        with ds_reshard.install("deepspeed"):
            _, client = engine.load_checkpoint(folder, **arguments)
    else:
        _, client = engine.load_checkpoint(folder, **arguments)
    wrong = {name: _differing(now, weights[name]) for name, now in _weights(engine).items()}
    steps = set()
    untied = _untied(engine)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for number, (group, before) in enumerate(zip(inner.param_groups, said, strict=True)):
        wrong[f"{number} group"] = sum(_said(group)[key] != value for key, value in before.items())
    for number, ((flat, state), master) in enumerate(zip(_parts(engine), truth, strict=True)):
        wrong[f"{number} fp32"] = _differing(flat.detach(), master)
        of_experts = grid.kind == "moe" and inner.param_groups[number].get("moe")
        # DeepSpeed divides the gradients of experts by all data-parallel ranks, of which only some have them
        expected = moments(torch.where(untied(master), 0.0, master.float()) / (saved_ep if of_experts else 1))
        for kind, value in expected.items():
            wrong[f"{number} {kind}"] = _differing(state[kind], value) if kind in state else -1
        steps.add(float(state.get("step", -1)))
    return {
        "wrong": {name: count for name, count in wrong.items() if count},
        "compared": len(wrong),
        "steps": sorted(steps),
        "groups": [_said(group) for group in inner.param_groups],
        "scheduler": {k: v for k, v in engine.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "global_steps": engine.global_steps,
        "note": (client or {}).get("note"),
        "report": str(ds_reshard.last_report()) if hooks else "",
    }


def _said(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}


def _clear_padding(engine: Any) -> None:
    """What is behind the last element of a parameter's last part is memory as it was found."""
    optimizer = engine.optimizer
    for params, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        at = 0
        for p in params:
            size = p.ds_tensor.ds_numel
            flat.data[at + _own(p) : at + size] = 0
            at += size
    for p in engine.module.parameters():
        p.ds_tensor.data[_own(p) :] = 0


def _own(parameter: Any) -> int:
    size, place = parameter.ds_tensor.ds_numel, torch.distributed.get_rank(parameter.ds_process_group)
    return int(max(0, min(size, parameter.ds_numel - place * size)))


def _untied(engine: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Which numbers are those of a position that no layer uses: its gradient is zero."""
    unused = numbers(60, 3) if hasattr(engine.module, "tied_modules") else torch.tensor([-1.0])
    return lambda master: torch.isin(master.float(), unused)


def _differing(now: torch.Tensor, then: torch.Tensor) -> int:
    """How many elements differ; what is behind the shorter is padding where it is zero."""
    one, other = now.flatten(), then.flatten()
    shared = min(one.numel(), other.numel())
    return int((one[:shared].float() != other[:shared].float()).sum()) + abs(one.numel() - other.numel())


@alone
def refused(grid: Grid, folder: str, **arguments: Any) -> tuple[str, str, bool]:
    """The error of a load, its text, and whether the engine is as it was."""
    import ds_reshard

    engine = build(grid)
    before = [t.detach().clone() for t in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values())]
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **arguments)
    except ds_reshard.ReshardError as error:
        after = [t.detach() for t in (*(flat for flat, _ in _parts(engine)), *_weights(engine).values())]
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return type(error).__name__, str(error), same
    return "", "nothing was raised", False
