"""The same GPT and rule by releases whose wheels hold `megatron.core` alone: saved as their own training would.

That is `save_checkpoint` of megatron/training/checkpointing.py at the tags core_v0.14.0, core_v0.15.3 and core_v0.16.1,
whose own saves have the same bits; what it saves of the arguments is made of the same words.
"""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path
from typing import Any

import torch
from format_jobs import ITERATION, RUN, SAMPLES_SEEN, _fill
from small_gpt import MODEL

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


_SHARDING = {True: "fully_reshardable", False: "dp_reshardable", None: "fully_sharded_model_space"}
"""By `--dist-ckpt-optim-fully-reshardable`, which 0.14 does not know."""


def save(arguments: str, saves: list[dict[str, Any]], hooks: bool = False) -> dict[str, Any]:
    """As `format_jobs.save`, of dense models."""
    import numpy
    from megatron.core.utils import unwrap_model

    assert not hooks
    if not hasattr(numpy, "product"):  # NumPy 2 has taken it away; 0.14 and 0.15 ask for it
        numpy.product = numpy.prod
    args = _arguments(f"{MODEL} {RUN} {arguments}")
    model, optimizer = _build(args)
    scheduler = _scheduler(optimizer, args)
    _fill([model], optimizer)
    model = unwrap_model(model)
    args.consumed_train_samples, args.iteration = SAMPLES_SEEN, ITERATION
    scheduler.step(SAMPLES_SEEN)
    for asked in saves:
        vars(args).update(asked)
        common = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "opt_param_scheduler": scheduler.state_dict(),
            "num_floating_point_operations_so_far": 0,
        }
        folder = Path(args.save, f"iter_{ITERATION:07d}")
        if args.ckpt_format == "torch":
            _torch(folder, common, args, model, optimizer)
        else:
            sharding = _SHARDING[asked.get("dist_ckpt_optim_fully_reshardable")]
            _torch_dist(folder, common, sharding, model, optimizer)
        torch.distributed.barrier()
        Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(ITERATION), encoding="utf-8")
    return {}


def _arguments(words: str) -> argparse.Namespace:
    """Every flag as an attribute, with the derived ones that Megatron's parser adds."""
    held: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), "normalization": "LayerNorm", "num_query_groups": 1}
    held |= {"swiglu": False, "group_query_attention": False, "untie_embeddings_and_output_weights": False}
    held |= {"num_experts": None, "virtual_pipeline_model_parallel_size": None, "bf16": False, "fp16": False}
    held |= {
        "expert_model_parallel_size": 1,
        "overlap_grad_reduce": False,
        "position_embedding_type": "learned_absolute",
    }
    for word in words.split():
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            held[name] = True
        else:
            held[name] = ast.literal_eval(word) if word[0].isdigit() else word
    world, multiple = int(os.environ["WORLD_SIZE"]), held["make_vocab_size_divisible_by"] * held[_SIZES[0]]
    dp = world // (held[_SIZES[0]] * held[_SIZES[1]])
    held |= {"rank": int(os.environ["RANK"]), "world_size": world, "data_parallel_size": dp}
    held |= {"add_bias_linear": "disable_bias_linear" not in held, "accumulate_allreduce_grads_in_fp32": held["bf16"]}
    held |= {"padded_vocab_size": -(-(held["vocab_size"] + 1) // multiple) * multiple}
    return argparse.Namespace(**held)


def _build(args: Any) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.distributed.init_process_group("gloo", rank=args.rank, world_size=args.world_size)
    parallel_state.initialize_model_parallel(*(getattr(args, name) for name in _SIZES[:2]))
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        normalization=args.normalization,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **{name: getattr(args, name) for name in _SIZES},
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    net = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    plan = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, plan, Float16Module(config, net))
    rates = {"lr": args.lr, "min_lr": args.min_lr, "weight_decay": args.weight_decay}
    return model, get_megatron_optimizer(OptimizerConfig(bf16=True, use_distributed_optimizer=True, **rates), [model])


def _scheduler(optimizer: Any, args: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=args.lr_decay_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def _torch_dist(folder: Path, common: dict[str, Any], sharding: str, model: Any, optimizer: Any) -> None:
    """`generate_state_dict` and `dist_checkpointing.save`, fully parallel as by default."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    metadata |= {"singleton_local_shards": False, "dp_cp_group": group}
    tensors = model.sharded_state_dict(metadata=metadata)
    state = {**common, "model": tensors, "optimizer": optimizer.sharded_state_dict(tensors, metadata=metadata)}
    folder.mkdir(parents=True, exist_ok=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
    told = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=told)


def _torch(folder: Path, common: dict[str, Any], args: Any, model: Any, optimizer: Any) -> None:
    """A folder of each model-parallel rank, by its first data-parallel one; the optimizer's state is gathered."""
    from megatron.core import parallel_state

    tp, pp = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
    stage = f"_{pp:03d}" if args.pipeline_model_parallel_size > 1 else ""
    place = folder / f"mp_rank_{tp:02d}{stage}"
    place.mkdir(parents=True, exist_ok=True)
    state = {**common, "model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    if not parallel_state.get_data_parallel_rank():
        torch.save(state, place / "model_optim_rng.pt")
    optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
