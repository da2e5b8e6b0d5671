"""A small vision-language model under FSDP1, the states of its optimizer, and every way in which torch gathers them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo  # the first optimizer loads it: once, in the server of `fresh.py`
import torch.distributed as dist
from devices import DEVICE, device
from logs import heard
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH, WORDS = 16, 24
MOMENTS = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class Visual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(12, width, bias=False)
        self.blocks = nn.ModuleList([Block(width)])
        self.merger = nn.Linear(width, width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_embed(image)
        for block in self.blocks:
            hidden = block(hidden)
        return self.merger(hidden)


class VLM(nn.Module):
    """The tower's `visual` sorts last of all names, as in Qwen2.5-VL."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Visual(WIDTH)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        hidden = self.embed(words)
        if image is not None:
            hidden = torch.cat([self.visual(image), hidden], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def build(
    orig: bool,
    *,
    frozen: bool = False,
    every: bool = False,
    dtype: torch.dtype = torch.float32,
    mesh: bool = True,
    seed: int = 0,
    tied: bool = False,
) -> tuple[Any, Any]:
    """The wrapped model and its optimizer, over `every` parameter or the trainable ones."""
    torch.manual_seed(seed)
    model = VLM().to(dtype)
    model.visual.requires_grad_(not frozen)
    if tied:
        model.lm_head.weight = model.embed.weight
    more = {"device_mesh": init_device_mesh(DEVICE, (dist.get_world_size(),))} if mesh else {}
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig, device_id=device(), **more
    )
    params = [p for p in wrapped.parameters() if every or p.requires_grad]
    return wrapped, torch.optim.AdamW(params, lr=1e-2)


def train(model: Any, optimizer: Any, *, steps: int = 2, image: bool = True) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(100 + step + 10 * dist.get_rank())
        picture = torch.randn(2, 3, 12).to(DEVICE, dtype) if image else None
        model(torch.randint(0, WORDS, (2, 5)).to(DEVICE), picture).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def touch(optimizer: Any) -> None:
    """What EasyR1 and verl do to offload: `optimizer.state` is a defaultdict, and a look leaves an empty entry."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for _ in optimizer.state[param].items():
                pass


def cast(model: Any, optimizer: Any, dtype: torch.dtype, states: tuple[str, ...], within: str) -> None:
    """Hold these states of the parameters whose names begin so in another type."""
    names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters()}
    for param, held in optimizer.state.items():
        if names[id(param)].startswith(within):
            held.update({state: held[state].to(dtype) for state in states if state in held})


def odd(model: Any, optimizer: Any, kind: str) -> None:
    """States as a quantised optimizer holds them, or a parameter that has only now become trainable."""
    if kind == "thawed":
        model.module.visual.merger.requires_grad_(True)
        touch(optimizer)
    for held in optimizer.state.values():
        if kind == "blocks" and held:
            held["exp_avg"] = torch.zeros(held["exp_avg"].numel() // 4 + 1, dtype=torch.uint8, device=DEVICE)
        if kind == "integers" and held:
            held["exp_avg"] = held["exp_avg"].to(torch.int8)


def _sharded(model: Any, optimizer: Any) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))[1]


def _full(model: Any, optimizer: Any) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _fsdp_full(model: Any, optimizer: Any) -> Any:
    settings = (FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def _fsdp_sharded(model: Any, optimizer: Any) -> Any:
    settings = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *settings):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


WAYS = {
    "get_state_dict": _sharded,
    "get_optimizer_state_dict": _full,
    "FSDP full": _fsdp_full,
    "FSDP sharded": _fsdp_sharded,
}


def whole(value: Any) -> Any:
    """A tensor as a whole, in host memory, whichever way it is sharded. Collective."""
    if hasattr(value, "full_tensor"):
        return value.to(DEVICE).full_tensor().cpu()
    if hasattr(value, "local_shards"):
        out = torch.empty(value.size(), dtype=value.dtype, device=DEVICE) if dist.get_rank() == 0 else None
        value.to(device()).gather(dst=0, out=out)
        box = [out]
        dist.broadcast_object_list(box, src=0)
        return box[0].cpu()
    return value.cpu()


def contents(gathered: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {state: whole(value).clone() for state, value in sorted(states.items())}
        for name, states in sorted(gathered.get("state", {}).items())
        if states
    }


def reference(orig: bool, frozen: bool, dtype: torch.dtype, rounded: bool, image: bool) -> Any:
    """The states of the same run without the trigger, as torch gathers them without a hook and without a CPU copy.

    With `rounded`, those of this rank hold what bf16 can.
    """
    model, optimizer = build(orig, frozen=frozen, dtype=dtype)
    train(model, optimizer, image=image)
    if rounded:
        cast(model, optimizer, torch.bfloat16, MOMENTS, "")
        cast(model, optimizer, torch.float32, MOMENTS, "")
    settings = (FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        found = contents(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    for name, states in found.items():
        if image or not name.startswith("visual."):
            assert states["exp_avg"].any() and not torch.equal(states["exp_avg"], states["exp_avg_sq"]), name
    return found


def difference(found: Any, expected: Any, *, any_type: bool = False) -> str:
    """Where two sets of states are not equal to the bit, empty where they are; of `any_type`, in their values."""
    if found.keys() != expected.keys():
        return f"parameters {sorted(found.keys() ^ expected.keys())}"
    for name, states in expected.items():
        if found[name].keys() != states.keys():
            return f"{name}: {sorted(found[name])}"
        for state, tensor in states.items():
            other = found[name][state].float() if any_type else found[name][state]
            if other.dtype != tensor.dtype or other.shape != tensor.shape:
                return f"{name} {state}: {other.dtype} {other.shape}"
            if not torch.equal(_bytes(other), _bytes(tensor)):
                return f"{name} {state}: other values"
    return ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def _hooks(on: bool) -> Any:
    import ds_reshard

    return ds_reshard.install("fsdp") if on else nullcontext()


def built(orig: bool, frozen: bool) -> None:
    with _hooks(True):
        build(orig, frozen=frozen)


def row(
    orig: bool,
    hooks: bool,
    frozen: bool = False,
    every: bool = False,
    touched: bool = False,
    bf16: bool = False,
    casts: tuple[str, ...] = (),
    within: str = "",
    rank: int | None = None,
    image: bool = True,
    way: str | None = None,
    mesh: bool = True,
    oddity: str = "",
) -> dict[str, Any]:
    """One row of the matrix: what differs from the reference in each way of gathering, and what was logged.

    `casts` are states then held in bf16, by the parameters whose names begin with `within`, on `rank` or on all.
    `live` says whether the optimizer holds the very tensors that it held before, with their values.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    expected = reference(orig, frozen, dtype, rank == dist.get_rank(), image)
    with _hooks(hooks):
        model, optimizer = build(orig, frozen=frozen, every=every, dtype=dtype, mesh=mesh)
        train(model, optimizer, image=image)
        if rank in (None, dist.get_rank()):
            cast(model, optimizer, torch.bfloat16, casts, within)
        if touched:
            touch(optimizer)
        odd(model, optimizer, oddity)
        before = {p: {k: (v, v.clone()) for k, v in s.items()} for p, s in optimizer.state.items()}
        with heard() as lines:
            found = {name: contents(WAYS[name](model, optimizer)) for name in ([way] if way else WAYS)}
    same = before.keys() == optimizer.state.keys() and all(
        after[state] is value and torch.equal(value, copy)
        for p, states in before.items()
        for after in [optimizer.state[p]]
        for state, (value, copy) in states.items()
    )
    for name, states in expected.items():
        if name.startswith(within) and rank is None:
            states.update({state: states[state].bfloat16() for state in casts})
    told = {
        name: difference(
            states,
            {} if name == "get_optimizer_state_dict" and dist.get_rank() else expected,
            any_type=rank is not None,
        )
        for name, states in found.items()
    }
    dtypes = {str(t.dtype) for states in found.values() for s in states.values() for t in s.values()}
    return {"told": told, "live": same, "lines": lines, "dtypes": sorted(dtypes)}


def easyr1(folder: str, bf16: bool) -> dict[tuple[str, str], torch.Tensor]:
    """What EasyR1's checkpoint manager saves of a model with a frozen tower, its optimizer offloaded before; the whole.

    The calls of `FSDPCheckpointManager.save_checkpoint` (verl/utils/checkpoint/fsdp_checkpoint_manager.py).
    """
    model, optimizer = build(True, frozen=True, every=True, dtype=torch.bfloat16 if bf16 else torch.float32)
    train(model, optimizer)
    cast(model, optimizer, torch.bfloat16, ("exp_avg",), "lm_head")
    touch(optimizer)
    with _hooks(True):
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.save(weights, f"{folder}/model_world_size_{size}_rank_{rank}.pt")
    torch.save(states, f"{folder}/optim_world_size_{size}_rank_{rank}.pt")
    torch.save({"rng": torch.get_rng_state()}, f"{folder}/extra_state_world_size_{size}_rank_{rank}.pt")
    held = {(name, "weight"): whole(value) for name, value in weights.items()}
    held |= {(name, kind): tensor for name, kinds in contents(states).items() for kind, tensor in kinds.items()}
    for name in {name for name, kind in held if kind == "exp_avg"}:
        assert held[name, "exp_avg"].any() and not torch.equal(held[name, "exp_avg"], held[name, "exp_avg_sq"])
    return held


def sharded_by_accelerate(folder: str, way: str = "accelerate") -> dict[tuple[str, str], torch.Tensor]:
    """Save FSDP1's states in shards as accelerate does, unless they are there; else load them; what is held, whole.

    By accelerate's own function, or where the Trainer calls one that was there before the hooks.
    """
    from pathlib import Path
    from types import SimpleNamespace
    from typing import cast

    from accelerate.state import PartialState
    from accelerate.utils import fsdp_utils
    from transformers import Trainer

    import ds_reshard
    from ds_reshard.hosts import transformers as host

    PartialState._reset_state()
    PartialState(cpu=True)  # which the functions log through
    configs = {"state_dict_config": ShardedStateDictConfig(), "optim_state_dict_config": ShardedOptimStateDictConfig()}
    plugin = SimpleNamespace(fsdp_version=1, state_dict_type=StateDictType.SHARDED_STATE_DICT, **configs)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), wait_for_everyone=dist.barrier)
    accelerator.process_index = dist.get_rank()
    model, optimizer = build(True)
    given: Any = (plugin, accelerator, optimizer, model, folder)
    if not Path(folder).exists():
        dist.barrier()
        model(torch.arange(8).view(2, 4) % WORDS, torch.ones(2, 3, 12)).sum().backward()
        optimizer.step()
        fsdp_utils.save_fsdp_optimizer(*given)
        (Path(folder) / "scheduler.pt").touch()
    elif way == "accelerate":
        with ds_reshard.install("accelerate"):
            fsdp_utils.load_fsdp_optimizer(*given)
    else:
        trainer: Any = SimpleNamespace(accelerator=accelerator, optimizer=optimizer)
        host.begin_states(cast(Trainer, trainer), folder)
        fsdp_utils.load_fsdp_optimizer(*given)
    PartialState._reset_state()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return {(name, kind): value for name, states in whole.items() for kind, value in states.items()}
