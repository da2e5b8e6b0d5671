"""FSDP1 of torch: optimizer state that is gathered for a checkpoint.

Importing this loads no torch; the seams are in `gather.py` and `flatten.py`. Rung 2: `_optim_state_dict_impl` is where
`FSDP.optim_state_dict`, its two older forms, `get_optimizer_state_dict` and `get_state_dict` all pass, and there is no
extension point before it.
"""

from __future__ import annotations

import functools
import inspect

from ds_reshard.hooks import Function, HostHooks, Patch


def wrap_optim_state_dict(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _optim_state_dict_impl(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.fsdp.gather import gather

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def by_torch(changed: dict[str, object]) -> object:
            bound.arguments.update(changed)
            return original(*bound.args, **bound.kwargs)

        return gather(dict(bound.arguments), by_torch)

    return _optim_state_dict_impl


def wrap_flatten(original: Function) -> Function:
    @functools.wraps(original)
    def _init_flat_param_and_metadata(
        self: object, params: list[object], module: object, aligned_numel: int, use_orig_params: bool
    ) -> object:
        from ds_reshard.hosts.fsdp.flatten import refuse_mixed

        if not use_orig_params:
            refuse_mixed(params, module)  # type: ignore[arg-type]
        return original(self, params, module, aligned_numel, use_orig_params)

    return _init_flat_param_and_metadata


HOOKS = HostHooks(
    host="fsdp",
    distribution="torch",
    versions=">=2.4,<2.14",
    tested=("2.13.0",),
    resumes=False,
    patches=(
        Patch(
            target="torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel._optim_state_dict_impl",
            wrapper=wrap_optim_state_dict,
            signature=(
                "model", "optim", "optim_state_dict", "optim_input", "rank0_only", "full_state_dict", "group",
                "cpu_offload",
            ),
            summary="gathers the optimizer state of FSDP1 with frozen parameters and mixed element types",
        ),
        Patch(
            target="torch.distributed.fsdp._flat_param:FlatParamHandle._init_flat_param_and_metadata",
            wrapper=wrap_flatten,
            signature=("params", "module", "aligned_numel", "use_orig_params"),
            summary="names the parameters of an FSDP unit of which some are frozen, with use_orig_params=False",
        ),
    ),
)  # fmt: skip
