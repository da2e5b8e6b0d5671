"""Megatron-LM: `megatron.training`, and loops of one's own on `megatron.core`.

Importing this loads neither Megatron nor torch. The hooks and the source patches of `patches/` put the same
functions, the `wrap_*` below, around Megatron's own; the seams that these call are in the modules beside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from ds_reshard.hooks import Function, HostHooks, Patch


def wrap_build_scheduler(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        from ds_reshard.hosts.megatron.parts import note_built

        original(self, *args, **kwargs)
        note_built(self, signature.bind(self, *args, **kwargs).arguments)  # type: ignore[arg-type]

    return __init__


def wrap_load_scheduler(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: object, state_dict: object) -> None:
        from ds_reshard.hosts.megatron.parts import load_scheduler
        from ds_reshard.hosts.megatron.report import publish_part

        publish_part(load_scheduler(self, functools.partial(original, self), state_dict))  # type: ignore[arg-type]

    return load_state_dict


def wrap_load_optimizer(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: object, state_dict: object) -> None:
        from ds_reshard.hosts.megatron.parts import load_optimizer
        from ds_reshard.hosts.megatron.report import publish_part

        publish_part(load_optimizer(self, functools.partial(original, self), state_dict))  # type: ignore[arg-type]

    return load_state_dict


def wrap_build_state(original: Function) -> Function:
    @functools.wraps(original)
    def sharded_state_dict(self: object, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.live import building

        with building():
            return original(self, *args, **kwargs)

    return sharded_state_dict


def wrap_save_states(original: Function) -> Function:
    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: object, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.saves import save_states

        return save_states(self, functools.partial(original, self, *args, **kwargs))  # type: ignore[arg-type]

    return sharded_param_state_fully_reshardable


def wrap_save_buckets(original: Function) -> Function:
    @functools.wraps(original)
    def sharded_param_state_dp_reshardable(self: object, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.saves import end_padding

        return end_padding(original(self, *args, **kwargs))

    return sharded_param_state_dp_reshardable


def wrap_load_parameter_state(original: Function) -> Function:
    @functools.wraps(original)
    def load_parameter_state(self: object, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.parts import load_parameter_state as seam

        return seam(self, functools.partial(original, self, *args, **kwargs))  # type: ignore[arg-type]

    return load_parameter_state


def wrap_parse_args(original: Function) -> Function:
    @functools.wraps(original)
    def parse_args(extra_args_provider: object = None, ignore_unknown_args: bool = False) -> object:
        from ds_reshard.hosts.megatron.training import parse_args as seam

        return seam(original, extra_args_provider, ignore_unknown_args)  # type: ignore[arg-type]

    return parse_args


def wrap_load_checkpoint(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.training import load_checkpoint as seam

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return seam(
            lambda **more: original(**{**given, **more}),  # type: ignore[arg-type]
            _arguments(),  # type: ignore[arg-type]
            models=given["ddp_model"],
            optimizer=given["optimizer"],
            scheduler=given["opt_param_scheduler"],
            load_arg=given["load_arg"],
        )

    return load_checkpoint


def wrap_load_base_checkpoint(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_base_checkpoint(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.training import load_base_checkpoint as seam

        bound = signature.bind(*args, **kwargs).arguments
        return seam(functools.partial(original, *args, **kwargs), bound["load_dir"], bound["args"])  # type: ignore[arg-type]

    return load_base_checkpoint


def wrap_load(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.pickles import refuse_sharded

        bound = signature.bind(*args, **kwargs).arguments
        with refuse_sharded(bound["checkpoint_dir"], bound.get("process_group")):
            return original(*args, **kwargs)

    return load


def wrap_read(original: Function) -> Function:
    """A function that one rank may call alone."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def read(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.pickles import refuse_common

        refuse_common(signature.bind(*args, **kwargs).arguments["checkpoint_dir"])
        return original(*args, **kwargs)

    return read


def wrap_load_file(original: Function) -> Function:
    @functools.wraps(original)
    def load_parameter_state(self: object, filename: str, *args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.pickles import refuse_file

        refuse_file(filename, getattr(self, "data_parallel_group", None))
        return original(self, filename, *args, **kwargs)

    return load_parameter_state


def wrap_build_data_loaders(original: Function) -> Function:
    @functools.wraps(original)
    def build_data_loaders(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.megatron.training import build_data_loaders as seam

        return seam(functools.partial(original, *args, **kwargs), _arguments())  # type: ignore[arg-type]

    return build_data_loaders


def _arguments() -> object:
    from megatron.training import get_args

    return get_args()


_CORE = "megatron.core.optimizer"
_DIST = "megatron.core.dist_checkpointing.serialization"
_SAFE = "refuses what would run code when it is unpickled, before it is"
_OPTIMIZER = "states by Megatron, param groups matched by what they are, learning rates and hyper-parameters as asked"


def _patch(
    target: str,
    wrapper: Callable[[Function], Function],
    signature: tuple[str, ...],
    summary: str,
    *,
    optional: bool = False,
) -> Patch:
    name = target.partition(":")[2].replace(".", "_").strip("_").upper()
    return Patch(
        target=target,
        wrapper=wrapper,
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
            wrap_build_scheduler,
            ("optimizer",),
            "what a scheduler was built to do counts for the load of its optimizer, whichever is loaded first",
        ),
        _patch(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
            wrap_load_scheduler,
            ("state_dict",),
            "the schedule as asked, its position set and not added to, weight decay right at once",
        ),
        _patch(f"{_CORE}.optimizer:FP32Optimizer.load_state_dict", wrap_load_optimizer, ("state_dict",), _OPTIMIZER),
        _patch(
            f"{_CORE}.optimizer:Float16OptimizerWithFloat16Params.load_state_dict",
            wrap_load_optimizer,
            ("state_dict",),
            _OPTIMIZER,
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_state_dict",
            wrap_load_optimizer,
            ("state_dict",),
            _OPTIMIZER,
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_state_dict",
            wrap_build_state,
            ("model_sharded_state_dict", "is_loading"),
            "an optimizer that loads its own state resumes nothing",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            wrap_save_states,
            ("model_sharded_state_dict", "is_loading", "metadata"),
            "masters and moments are saved unshifted, where buckets are padded",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.sharded_param_state_dp_reshardable",
            wrap_save_buckets,
            ("model_sharded_state_dict", "is_loading", "metadata"),
            "buckets are saved also where their padding goes beyond their end",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
            wrap_load_parameter_state,
            ("state_dict",),
            "moments stay fresh where only masters were asked for",
        ),
        _patch(
            f"{_CORE}.distrib_optimizer:DistributedOptimizer.load_parameter_state", wrap_load_file, ("filename",), _SAFE
        ),
        _patch(f"{_CORE}.optimizer:ChainedOptimizer.load_parameter_state", wrap_load_file, ("filename",), _SAFE),
        _patch(f"{_DIST}:load", wrap_load, ("sharded_state_dict", "checkpoint_dir"), _SAFE),
        _patch(f"{_DIST}:load_common_state_dict", wrap_read, ("checkpoint_dir",), _SAFE),
        _patch(f"{_DIST}:load_tensors_metadata", wrap_read, ("checkpoint_dir",), _SAFE),
        _patch(f"{_DIST}:load_sharded_metadata", wrap_read, ("checkpoint_dir",), _SAFE),
        _patch(
            "megatron.training.arguments:parse_args",
            wrap_parse_args,
            ("extra_args_provider", "ignore_unknown_args"),
            "the resume flags, beside those that Megatron has",
            optional=True,
        ),
        _patch(
            "megatron.training.checkpointing:load_checkpoint",
            wrap_load_checkpoint,
            ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
            "resumes as the flags say, and under any topology, and reports it",
            optional=True,
        ),
        _patch(
            "megatron.training.checkpointing:_load_base_checkpoint",
            wrap_load_base_checkpoint,
            ("load_dir", "args"),
            "refuses what cannot be resumed as asked before anything has changed",
            optional=True,
        ),
        _patch(
            "megatron.training.training:build_train_valid_test_data_loaders",
            wrap_build_data_loaders,
            ("build_train_valid_test_datasets_provider",),
            "data from its start, at an iteration that is kept",
            optional=True,
        ),
    ),
)
