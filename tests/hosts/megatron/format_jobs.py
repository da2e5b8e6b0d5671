"""On each rank: a GPT whose weights, masters and moments are all made by a rule, saved by Megatron itself.

The rule says each element of a logical tensor from the tensor's key and the element's place in it: so a reader's answer
is known without Megatron.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

KINDS = ("param", "exp_avg", "exp_avg_sq")
ITERATION, SAMPLES_SEEN, STEP = 5, 20, 5
OPERATIONS = 12_345
"""Floating-point operations so far, as Megatron counts them."""
RUN = (
    "--lr 3e-4 --min-lr 3e-5 --train-iters 5 --lr-decay-iters 40 --lr-decay-style linear --weight-decay 0.01"
    " --micro-batch-size 1 --global-batch-size 4 --num-layers 4 --num-attention-heads 4 --ffn-hidden-size 24"
    " --vocab-size 99 --make-vocab-size-divisible-by 8"
)


def value(key: str, index: torch.Tensor, kind: str) -> torch.Tensor:
    """Elements `index`, row-major and with the axis of layers, of what Megatron calls `key`; squares are >= 0."""
    base = zlib.crc32(key.encode()) % 8191 * 1021 + 17 * KINDS.index(kind)
    made = ((index + base) * 2654435761 % 8388593).to(torch.float32) / 4194304
    return made if kind == "exp_avg_sq" else made - 1


def save(arguments: str, saves: list[dict[str, Any]], hooks: bool = False, stirred: bool = False) -> dict[str, Any]:
    """Build by Megatron's own set-up, fill, and save once for each of `saves`: values of Megatron's arguments.

    One with a `non_persistent_ckpt_type` is saved as such. `stirred` has each rank's generator somewhere else.
    """
    if hooks:
        import ds_reshard

        ds_reshard.install("megatron")
    models, optimizer, scheduler = _setup(arguments)
    from megatron.training import checkpointing, get_args

    args = get_args()
    _fill(models, optimizer)
    torch.rand(torch.distributed.get_rank() + 1 if stirred else 0)
    args.consumed_train_samples, args.iteration = SAMPLES_SEEN, ITERATION
    scheduler.step(SAMPLES_SEEN)
    for asked in saves:
        for name, given in asked.items():
            setattr(args, name, given)
        args.use_dist_ckpt = args.ckpt_format != "torch"
        more = {"checkpointing_context": {}, "non_persistent_ckpt": "non_persistent_ckpt_type" in asked}
        checkpointing.save_checkpoint(args.iteration, models, optimizer, scheduler, OPERATIONS, **more)
    return {}


def save_bert(arguments: str, saves: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of a model whose layers are an encoder's."""
    import small_gpt

    def bert(pre_process: bool = True, post_process: bool = True, config: Any = None, **more: Any) -> Any:
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel
        from megatron.training import get_args
        from megatron.training.argument_utils import core_transformer_config_from_args

        args = get_args()
        config = core_transformer_config_from_args(args) if config is None else config
        sizes = {"vocab_size": args.padded_vocab_size, "max_sequence_length": args.max_position_embeddings}
        ends = {"pre_process": pre_process, "post_process": post_process, "share_embeddings_and_output_weights": True}
        return BertModel(config, 2, bert_layer_local_spec, **sizes, **ends)

    small_gpt._model = bert
    return save(arguments, saves)


def _setup(arguments: str) -> tuple[Any, Any, Any]:
    import inspect

    import small_gpt

    sys.argv = ["save.py", *small_gpt.MODEL.split(), *RUN.split(), *arguments.split()]
    from megatron.core.enums import ModelType
    from megatron.training import arguments as parsing
    from megatron.training import training
    from megatron.training.initialize import initialize_megatron

    if hasattr(parsing, "parse_and_validate_args"):  # 0.17.1 does it in initialize_megatron
        parsing.parse_and_validate_args()
    initialize_megatron()
    kind, more = ModelType.encoder_or_decoder, {"checkpointing_context": {}}
    if "cfg_container" not in inspect.signature(training.setup_model_and_optimizer).parameters:
        return training.setup_model_and_optimizer(small_gpt._model, kind, **more)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.global_vars import get_args

    more |= {"cfg_container": pretrain_cfg_container_from_args(get_args())}
    more |= {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    return training.setup_model_and_optimizer(kind, model_provider_func=small_gpt._model, **more)


def _places(models: Any) -> dict[Any, tuple[str, torch.Tensor]]:
    """Of each live parameter its key, and where each of its elements lies in the whole tensor: as Megatron tells it."""
    from dataclasses import replace

    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model

    found: dict[Any, tuple[str, torch.Tensor]] = {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for model in unwrap_model(models):
        known = {id(one): one for one in (*model.parameters(), *model.buffers())}
        told = model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": group})
        for one in nested_values(told):
            if not isinstance(one, ShardedTensor | ShardedTensorFactory) or id(one.data) not in known:
                continue
            here = torch.full(one.data.shape, -1)
            if isinstance(one, ShardedTensorFactory):
                parts = [(part, part.data) for part in nested_values({0: replace(one, data=here).build()})]
            else:
                parts = [(one, here)]
            for part, view in parts:
                sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
                box = tuple(slice(at, at + n) for at, n in zip(part.global_offset, sizes, strict=True))
                whole = torch.arange(prod(part.global_shape)).view(part.global_shape)
                view.copy_(whole[box].reshape(view.shape))
            assert bool((here >= 0).all())
            found[known[id(one.data)]] = one.key, here
    return found


def _states(optimizer: Any) -> Iterator[tuple[Any, slice, dict[str, torch.Tensor]]]:
    """Of each parameter what this rank holds: which of its elements, and their master and moments."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        whole = slice(None)
        if hasattr(one, "gbuf_ranges"):
            for live in one.model_param_gbuf_map:
                held = one._get_model_param_range_map(live)["param"]
                yield live, slice(held.start, held.end), one._get_main_param_and_optimizer_states(live)
        elif hasattr(one, "float16_groups"):
            for lives, masters in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
                for live, master in zip(lives, masters, strict=True):
                    yield live, whole, {"param": master, **one.optimizer.state[master]}
        else:
            for live in (live for group in one.param_groups for live in group["params"]):
                yield live, whole, {"param": live, **one.optimizer.state[live]}


def _fill(models: Any, optimizer: Any) -> None:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for live in group["params"]:
                live.grad = torch.zeros_like(live)
        one.optimizer.step()  # which makes the moments
        one.optimizer.zero_grad()
        if isinstance(one.optimizer, torch.optim.AdamW):  # which counts in each state
            for state in one.optimizer.state.values():
                state["step"].fill_(STEP)
            continue
        for group in one.optimizer.param_groups:
            group["step"] = STEP
    places = _places(models)
    with torch.no_grad():
        for live, (key, index) in places.items():
            live.data.copy_(value(key, index, "param"))
        for live, part, held in _states(optimizer):
            key, index = places[live]
            for kind in KINDS:
                held[kind].view(-1).copy_(value(key, index.view(-1)[part], kind))


def loaded(arguments: str, folder: str) -> dict[str, Any]:
    """Load by stock Megatron, and compare every weight, master and moment with the rule; what is not so, and counters.

    Rows that pad the vocabulary are anything.
    """
    models, optimizer, scheduler = _setup(f"{arguments} --load {folder}")
    from megatron.training import get_args

    args, wrong, places = get_args(), [], _places(models)
    real = {
        live: (slice(None) if "word_emb" not in key and "output_l" not in key else index // live.shape[1] < 100)
        for live, (key, index) in places.items()
    }
    for live, (key, index) in places.items():
        if not live.data[real[live]].equal(value(key, index, "param")[real[live]].to(live.dtype)):
            wrong.append(key)
    compared = 0
    for live, part, held in _states(optimizer):
        key, index = places[live]
        known = real[live].view(-1)[part] if isinstance(real[live], torch.Tensor) else slice(None)
        for kind in KINDS:
            expected = value(key, index.view(-1)[part], kind)[known]
            compared += expected.numel()
            if not held[kind].detach().view(-1)[known].equal(expected):
                wrong.append(f"{kind} of {key}")
    groups = [group for one in getattr(optimizer, "chained_optimizers", [optimizer]) for group in one.param_groups]
    return {
        "wrong": wrong,
        "compared": compared,
        "steps": sorted({int(group["step"]) for group in groups}),
        "counters": [args.iteration, args.consumed_train_samples, scheduler.num_steps],
        "rates": [(group["max_lr"], group["wd_mult"]) for group in groups],
    }
