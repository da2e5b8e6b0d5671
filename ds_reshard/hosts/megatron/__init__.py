"""Megatron-LM: `megatron.training`, and loops of one's own on `megatron.core`.

Importing this loads neither Megatron nor torch. The hooks and the source patches of `patches/` put the same
seams, in the modules beside, around Megatron's own functions.
"""

from __future__ import annotations

from ds_reshard.hooks import HostHooks, Patch, Seam

_LOAD_OPTIMIZER, _LOAD_FILE = "report:load_optimizer", "pickles:load_file"
_CORE = "megatron.core.optimizer"
_DIST = "megatron.core.dist_checkpointing.serialization"
_SAFE = "refuses what would run code when it is unpickled, before it is"
_OPTIMIZER = "states by Megatron, param groups matched by what they are, learning rates and hyper-parameters as asked"


def _patch(target: str, seam: str, signature: tuple[str, ...], summary: str, *, optional: bool = False) -> Patch:
    name = target.partition(":")[2].replace(".", "_").strip("_").upper()
    return Patch(
        target=target,
        wrapper=Seam(f"{__name__}.{seam}"),
        signature=signature,
        summary=summary,
        optional=optional,
        vendored_marker=f"_DS_RESHARD_{name}",
    )


HOOKS = HostHooks(
    host="megatron",
    distribution="megatron-core",
    versions=">=0.16,<0.20",
    tested=("0.16.1", "0.18.2", "0.19.2"),
    version_attribute="megatron.core:__version__",
    patches=(
        _patch(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.__init__",
            "parts:build_scheduler",
            ("optimizer",),
            "what a scheduler was built to do counts for the load of its optimizer, whichever is loaded first",
        ),
        _patch(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
            "report:load_scheduler",
            ("state_dict",),
            "the schedule as asked, its position set and not added to, weight decay right at once",
        ),
        _patch(f"{_CORE}.optimizer:FP32Optimizer.load_state_dict", _LOAD_OPTIMIZER, ("state_dict",), _OPTIMIZER),
        _patch(
            f"{_CORE}.optimizer:Float16OptimizerWithFloat16Params.load_state_dict",
            _LOAD_OPTIMIZER,
            ("state_dict",),
            _OPTIMIZER,
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_state_dict",
            _LOAD_OPTIMIZER,
            ("state_dict",),
            _OPTIMIZER,
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
            "live:build_state",
            ("model_sharded_state_dict", "is_loading"),
            "an optimizer that loads its own state resumes nothing",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            "saves:save_states",
            ("model_sharded_state_dict", "is_loading", "metadata"),
            "masters and moments are saved unshifted, where buckets are padded",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_param_state_dp_reshardable",
            "saves:save_buckets",
            ("model_sharded_state_dict", "is_loading", "metadata"),
            "buckets are saved also where their padding goes beyond their end",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
            "report:load_parameter_state",
            ("state_dict",),
            "moments stay fresh where only masters were asked for",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_parameter_state", _LOAD_FILE, ("filename",), _SAFE
        ),
        _patch(f"{_CORE}.optimizer:ChainedOptimizer.load_parameter_state", _LOAD_FILE, ("filename",), _SAFE),
        _patch(f"{_DIST}:load", "pickles:load", ("sharded_state_dict", "checkpoint_dir"), _SAFE),
        _patch(f"{_DIST}:load_common_state_dict", "pickles:read", ("checkpoint_dir",), _SAFE),
        _patch(f"{_DIST}:load_tensors_metadata", "pickles:read", ("checkpoint_dir",), _SAFE),
        _patch(f"{_DIST}:load_sharded_metadata", "pickles:read", ("checkpoint_dir",), _SAFE),
        _patch(
            "megatron.training.arguments:parse_args",
            "training:parse_args",
            ("extra_args_provider", "ignore_unknown_args"),
            "the resume flags, beside those that Megatron has",
            optional=True,
        ),
        _patch(
            "megatron.training.checkpointing:load_checkpoint",
            "training:load_checkpoint",
            ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
            "resumes as the flags say, under any topology, and reports what was loaded",
            optional=True,
        ),
        _patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            "training:load_base_checkpoint",
            ("load_dir", "args"),
            "refuses what cannot be resumed as asked before anything has changed",
            optional=True,
        ),
        _patch(
            "megatron.training.training:build_train_valid_test_data_loaders",
            "training:build_data_loaders",
            ("build_train_valid_test_datasets_provider",),
            "data from its start, at an iteration that is kept",
            optional=True,
        ),
    ),
)
