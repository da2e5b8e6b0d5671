"""The models of `grid_jobs.py`: every element of every tensor has a value of its own, by a rule that knows no rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from grid_cases import Grid

VOCABULARY, WIDTH = 7, 6
VOCABULARIES = {"even": 8, "megatron": 8, "short": 5, "short padded": 5}
PADDING = {"padded": 12, "bare": 8, "bare and wide": 12, "short padded": 12}
"""What a vocabulary is padded to a multiple of, where that is not the number of ranks."""


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


def muon_moments(master: torch.Tensor, whole: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What Muon makes of it: its momentum in the gradient's type, or, beside it, the moments of its own Adam."""
    if whole is not None:
        return {"momentum_buffer": torch.zeros_like(whole).lerp(whole / 4, 1 - 0.95)} if whole.numel() else {}
    square = (master / 4).square()
    return {**moments(master), "exp_avg_sq": torch.zeros_like(square).lerp_(square, 1 - 0.999)}


class Summed(torch.nn.Module):
    """Gives on what it is given, and adds the squares of all its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + square(self)


class Block(Summed):
    def __init__(self, start: int, frozen: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(numbers(start, 5, 7))
        self.b = torch.nn.Parameter(numbers(start + 50, 7))
        self.register_buffer("count", torch.tensor([float(start)]))
        if frozen:
            self.fixed = torch.nn.Parameter(numbers(start + 70, 3), requires_grad=False)


class Embedding(Summed):
    """Tied in its weight, and not in its position, of which each stage has a copy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(0, 11, 3))
        self.position = torch.nn.Parameter(numbers(40, 3))


class Quiet(Embedding):
    """Its spec without a forward_fn, which has a file, is that of the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return head(self, x)


def whole(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + square(module)


class Tie(Summed):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(start, 11, 3))


class Still(Tie):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return head(self, x)


def head(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + (module.weight * 0).sum()


class Norm(Summed):
    """Alone in its stage where there are four: the ranks of DeepSpeed's stages need as many param groups each."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(numbers(start, 9))
        self.m = torch.nn.Parameter(numbers(start + 20, 3, 2))


class Gain(Summed):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(numbers(start, 9))


class Pair(Summed):
    """One parameter under two names."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5, bias=False)
        self.a.weight.data, self.a.bias.data = numbers(start, 5, 3), numbers(start + 20, 5)
        self.b.weight = self.a.weight


class Divided(Summed):
    """What the tensor-parallel ranks of a pipeline divide, and what each has a copy of."""

    def __init__(self, start: int, tp: int, rank: int, frozen: bool = False, bare: bool = False) -> None:
        super().__init__()
        for name, part in divided_block(start, tp, rank).items():
            self.register_parameter(name, torch.nn.Parameter(part))
            getattr(self, name).tensor_model_parallel = name != "b"
        if not bare:
            self.register_buffer("count", torch.tensor([float(start)]))
        if frozen and not bare:
            self.fixed = torch.nn.Parameter(numbers(start + 90, 3), requires_grad=False)


def divided_block(start: int, tp: int = 1, rank: int = 0) -> dict[str, torch.Tensor]:
    """A column, gate and up in one, a row, and a bias that is not divided."""
    gate, up = numbers(start + 20, 8, 2), numbers(start + 36, 8, 2)
    return {
        "w": numbers(start, 4, 5).chunk(tp)[rank].contiguous(),
        "gate_up": torch.cat([part.chunk(tp)[rank] for part in (gate, up)]),
        "row": numbers(start + 52, 3, 8).chunk(tp, 1)[rank].contiguous(),
        "b": numbers(start + 76, 7),
    }


class DividedEmbedding(Embedding):
    def __init__(self, tp: int, rank: int) -> None:
        super().__init__()
        self.weight.data = numbers(0, 12, 3).chunk(tp)[rank].contiguous()
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]


PIPE_RULES = [
    {"parameters": r".*\.(w|weight)"},
    {"parameters": r".*\.gate_up", "parts": 2},
    {"parameters": r".*\.row", "dim": 1},
    {"parameters": r".*\.(b|position|fixed|g|m)", "replicated": True},
]


def _layers(kind: str, tp: int = 1, rank: int = 0) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if kind.startswith("divided"):
        bare = "bare" in kind
        return [
            TiedLayerSpec("embed", DividedEmbedding, tp, rank),
            LayerSpec(Divided, 100, tp, rank, True, bare),
            LayerSpec(Divided, 200, tp, rank, bare=bare),
            lambda x: x,
            LayerSpec(Divided, 300, tp, rank, bare=bare),
            TiedLayerSpec("embed", DividedEmbedding, tp, rank, forward_fn=head),
            LayerSpec(Norm, 400),
        ]
    if kind.startswith("late"):
        early, late = (
            TiedLayerSpec("embed", Still, 0, forward_fn=of)
            if kind.startswith("late tie")
            else TiedLayerSpec("embed", Quiet, forward_fn=of)
            for of in (whole, None)
        )
        return [early, LayerSpec(Block, 100, True), LayerSpec(Block, 200), late, LayerSpec(Norm, 400)]
    first = head_first if kind.startswith("no file") else None
    if kind.startswith("no ties"):
        return [LayerSpec(Block, 100 * number) for number in range(1, 7 if kind.endswith("one more") else 6)]
    if kind == "odd ones":  # a layer without parameters, which has a file, and second names
        return [LayerSpec(Pair, 100), LayerSpec(torch.nn.Identity), LayerSpec(Block, 200, True), LayerSpec(Pair, 300)]
    if kind == "gains last":
        return [LayerSpec(Tie, 0), *(LayerSpec(Gain, 100 * number) for number in (1, 2, 3))]
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
    from deepspeed.runtime.pipe import module
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(grid.pp, grid.tp, grid.dp)
    place = topology.get_coord(torch.distributed.get_rank()).model
    layers = _layers(grid.layers, grid.tp, place)
    uniform = module.ds_utils.partition_uniform
    early = "earlier" in grid.layers
    cut = (lambda **sizes: [at - (0 < at < sizes["num_items"]) for at in uniform(**sizes)]) if early else uniform
    with mock.patch.object(module.ds_utils, "partition_uniform", cut):
        model = PipelineModule(layers, topology=topology, loss_fn=lambda out, _: out.sum(), partition_method="uniform")
    embed = getattr(model.tied_modules, "embed", None)
    if model.stage_id > 0 and hasattr(embed, "position") and "one position" not in grid.layers:
        embed.position.data = numbers(60, 3)
    if grid.layers.startswith("divided") and "unsaid" not in grid.layers:
        model.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [r".*\.(b|position|fixed|g|m)$"],
            "parameter_with_row_parallelism_patterns": [r".*\.row$"],
            "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate_up$"],
            "pipeline_replicated_parameter_patterns": [r"tied_modules\..*"],
        }
    for name, parameter in model.named_parameters():
        if (
            grid.tp > 1 and not grid.layers.startswith("divided") and name.endswith(".w")
        ):  # as a shard: each tensor-parallel rank has values of its own
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


def _sequential(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """The layers of the pipeline without ties, by the same names."""
    model = torch.nn.Sequential(*(Block(100 * number) for number in range(1, 6)))
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    return model, None


def _muon(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """Matrices that Muon trains, and vectors beside them."""
    model = Plain()
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() > 1  # type: ignore[attr-defined]
    return model, None


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


SPECS: dict[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.row\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.col\.weight$"], "partition_type": "column"},
        {"patterns": [r".*few\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [[8, 4, 4], -1], "partition_dim": 0},
        {"patterns": [r".*\.untouched\.weight$"], "partition_type": "skip"},
    ],
}


def specs(layers: str) -> dict[str, Any]:
    """How AutoTP cuts: as `SPECS`, but for what a case has named."""
    if layers == "one part":
        changes = {"qkv": {"partition_type": "column"}}
    else:
        changes = {"col": {"partition_type": "skip"}} if layers == "whole columns" else {}
    said = [
        {"patterns": spec["patterns"], **change}
        for spec in SPECS["layer_specs"]
        for change in [next((to for name, to in changes.items() if name in spec["patterns"][0]), spec)]
    ]
    return {**SPECS, "layer_specs": said}


def filled(model: Any) -> Any:
    """The same model, its elements counted up."""
    start = 0
    for parameter in model.parameters():
        parameter.data.copy_(numbers(start, *parameter.shape))
        start += parameter.numel()
    return model


def _autotp(grid: Grid) -> tuple[torch.nn.Module, Any]:
    model = filled(Cut(few=grid.layers == "few"))
    return model, None


def _llama(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """A Llama of transformers with fewer key and value heads than query heads, divided by its own plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    tied = grid.layers == "tied"
    config = LlamaConfig(vocab_size=20, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model = filled(LlamaForCausalLM(config))
    model.model.rotary_emb = torch.nn.Identity()  # its buffers are in no file
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    return model, None


def _t5(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """A T5 of transformers: AutoTP gives no affine map of its relative positions, an embedding with a column a head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 2, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
    model = filled(T5ForConditionalGeneration(T5Config(vocab_size=20, **sizes)))
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
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


MEGATRON = {
    "embed": "word_embeddings.weight",
    "gate_up": "mlp.dense_h_to_4h.weight",
    "qkv": "attention.query_key_value.weight",
    "row": "mlp.dense_4h_to_h.weight",
}
"""Names by which DeepSpeed merges weights in a way of its own (`MegatronSDLoader`, runtime/state_dict_factory.py)."""


def _mpu_cut(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """A vocabulary of 7 rows, padded to a multiple of the ranks, SwiGLU halves, uneven heads, a row, and a norm."""
    mpu = Mpu(grid.tp)
    model, rank, tp = torch.nn.Module(), mpu.get_model_parallel_rank(), grid.tp
    vocabulary = VOCABULARIES.get(grid.layers, VOCABULARY)
    padded = -(-vocabulary // (multiple := PADDING.get(grid.layers, tp))) * multiple
    embed = torch.cat([numbers(0, vocabulary, WIDTH), torch.zeros(padded - vocabulary, WIDTH)])
    gate, up, (q, k, v) = (
        numbers(100, 8, 6),
        numbers(200, 8, 6),
        (numbers(300 + 100 * n, r, 6) for n, r in enumerate((4 if grid.layers == "megatron" else 8, 4, 4))),
    )
    cut = {
        "embed": embed.chunk(tp)[rank],
        "gate_up": torch.cat([part.chunk(tp)[rank] for part in (gate, up)]),
        "qkv": torch.cat([part.chunk(tp)[rank] for part in (q, k, v)]),
        "row": numbers(600, 6, 8).chunk(tp, 1)[rank].contiguous(),
        "norm": numbers(700 + 50 * rank * (grid.layers == "averaged"), 6),
    }
    if grid.layers == "megatron":
        bias, dense = numbers(800, 2, 8).chunk(tp, 1)[rank].flatten(), numbers(900, 6, 8).chunk(tp, 1)[rank]
        cut = {MEGATRON.get(name, name): tensor for name, tensor in cut.items()}
        cut |= {"mlp.dense_h_to_4h.bias": bias, "attention.dense.weight": dense.contiguous()}
    for name, tensor in cut.items():
        parameter = torch.nn.Parameter(tensor.clone())
        parameter.model_parallel = parameter.tensor_model_parallel = name != "norm"  # type: ignore[attr-defined]
        if grid.layers == "attributes":  # as Megatron sets them
            parameter.partition_dim = {"row": 1, "norm": -1}.get(name, 0)  # type: ignore[attr-defined]
            parameter.partition_stride = 2 if name == "gate_up" else 1  # type: ignore[attr-defined]
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, parameter)
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    end = 2 if grid.layers == "beginnings" else None  # of names, which are enough for DeepSpeed
    patterns: dict[str, Any] = {
        "tp_replicated_parameter_patterns": ["norm"[:end]],
        "vocabulary_parameter_patterns": ["embed"[:end]],
        "original_vocab_size": vocabulary,
    }
    if grid.layers != "forgotten":
        parts = {"patterns": ["qkv"[:end]], "shape": ((8, 4, 4), 6), "partition_dim": 0}
        patterns["parameter_with_row_parallelism_patterns"] = ["row"[:end]]
        patterns["parameter_with_2_sub_params_cat_dim_0"] = ["gate_up"[:end]]
        patterns["parameter_with_sub_params"] = [parts]
    if grid.layers == "averaged":
        patterns["parameter_to_average_patterns"] = patterns.pop("tp_replicated_parameter_patterns")
    if grid.layers not in ("unsaid", "rules", "megatron", "attributes", "bare", "bare and wide"):
        model.universal_checkpoint_info = {"universal_checkpoint_version": 0.2, **patterns}
    return model, mpu


RULES = [
    {"parameters": "embed", "vocabulary": VOCABULARY},
    {"parameters": "gate_up", "parts": 2},
    {"parameters": "qkv", "parts": [8, 4, 4]},
    {"parameters": "row", "dim": 1},
    {"parameters": "norm", "replicated": True},
]


MEGATRON_RULES = [
    {**rule, "parameters": MEGATRON.get(rule["parameters"], rule["parameters"])}
    for rule in [{"parameters": "embed"}, {"parameters": "qkv", "parts": 3}, *RULES[1:2], *RULES[3:]]
]
MEGATRON_RULES += [
    {"parameters": "mlp.dense_h_to_4h.bias", "parts": 2},
    {"parameters": "attention.dense.weight", "dim": 1},
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


def expert_sizes(grid: Grid) -> tuple[int, int]:
    """The expert-parallel size of each layer."""
    return (grid.ep, grid.dp if grid.layers == "two sizes" else grid.ep)


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
            sizes = expert_sizes(grid)
            layers = [MoE(4, Expert(), num_experts=EXPERTS, ep_size=sizes[n], k=1, use_residual=n > 0) for n in (0, 1)]
            self.add_module("experts" if grid.layers == "named experts" else "moe", torch.nn.ModuleList(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return square(self)

    model, rank, ranks = Model(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    swapped = grid.config.get("use_data_before_expert_parallelism")
    start = 0
    for name, parameter in model.named_parameters():
        if ".deepspeed_experts." not in name:
            parameter.data.copy_(numbers(start, *parameter.shape))
            start += parameter.numel()
    named = model.experts if grid.layers == "named experts" else model.moe
    for layer, (moe, ep) in enumerate(zip(named, expert_sizes(grid), strict=True)):
        place = rank // (ranks // ep) if swapped else rank % ep
        for local, module in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            expert = place * EXPERTS // ep + local
            start = 1000 + 1000 * layer + 100 * expert
            for parameter in module.parameters():
                parameter.data.copy_(numbers(start, *parameter.shape))
                start += parameter.numel()
                frozen = {"half": layer == 0 and expert % 2 == 1, "one": expert == 0}
                parameter.requires_grad = not frozen.get(grid.layers, False)
    return model, None


class Fused(torch.nn.Module):
    """Experts as transformers 5 has them: all in one tensor."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(numbers(start, EXPERTS, 6, 4))
        self.down_proj = torch.nn.Parameter(numbers(start + 200, EXPERTS, 4, 3))


def _autoep(grid: Grid) -> tuple[torch.nn.Module, Any]:
    """Two layers whose experts DeepSpeed itself deals out to the ranks (AutoEP)."""
    model, inner = torch.nn.Module(), torch.nn.Module()
    inner.layers = torch.nn.ModuleList()
    for layer in range(2):
        block = torch.nn.Module()
        block.norm = torch.nn.Parameter(numbers(10 * layer, 6))
        block.mlp = torch.nn.Module()
        block.mlp.gate = torch.nn.Linear(4, EXPERTS, bias=False)
        block.mlp.gate.weight.data = numbers(100 + 50 * layer, EXPERTS, 4)
        block.mlp.experts = Fused(1000 + 1000 * layer)
        inner.layers.append(block)
    model.model = inner
    model.config = SimpleNamespace(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=1)
    model.forward = lambda x: square(model)  # type: ignore[method-assign]
    return model, None


BUILD = {
    "plain": _plain,
    "sequential": _sequential,
    "muon": _muon,
    "moe": _moe,
    "pipeline": _pipeline,
    "autotp": _autotp,
    "llama": _llama,
    "t5": _t5,
    "mpu": _mpu,
    "cut": _mpu_cut,
    "autoep": _autoep,
}
