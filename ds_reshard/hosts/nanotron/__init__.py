"""nanotron: its trainer, and loops of one's own on `nanotron.serialize`.

Importing this loads neither nanotron nor torch. The seams that the `wrap_*` below call are in the modules beside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

from ds_reshard.hooks import Function, HostHooks, Patch

_Seam = Callable[[Mapping[str, object], Callable[[], object]], object]


def _bound(original: Function, seam: Callable[[], _Seam]) -> Function:
    """`original`, its arguments bound by name against its own signature and handed to the seam."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return seam()(dict(bound.arguments), functools.partial(original, *args, **kwargs))

    return wrapped


def wrap_save(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.is_zero import save

        return save

    return _bound(original, seam)


def wrap_save_lr_scheduler(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_lr_scheduler(*args: object, **kwargs: object) -> object:
        from ds_reshard.hosts.nanotron.is_zero import save_lr_scheduler as seam

        return seam(signature.bind_partial(*args, **kwargs).arguments, original)

    return save_lr_scheduler


def wrap_load_lr_scheduler(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_lr_scheduler(*args: object, **kwargs: object) -> None:
        from ds_reshard.hosts.nanotron.scheduler import load_lr_scheduler as seam

        seam(signature.bind_partial(*args, **kwargs).arguments)

    return load_lr_scheduler


def wrap_load_optimizer(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.optimizer import load_optimizer

        return load_optimizer

    return _bound(original, seam)


def wrap_state_dict_to_device(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.optimizer import state_dict_to_device

        return state_dict_to_device

    return _bound(original, seam)


def wrap_load_meta(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.counters import load_meta

        return lambda _, by_nanotron: load_meta(by_nanotron)

    return _bound(original, seam)


def wrap_load_random_states(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.random_states import load_random_states

        return lambda arguments, _: load_random_states(arguments)

    return _bound(original, seam)


def wrap_build_scheduler(original: Function) -> Function:
    def seam() -> _Seam:
        from ds_reshard.hosts.nanotron.scheduler import build

        return build

    return _bound(original, seam)


def wrap_trainer(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        from ds_reshard.hosts.nanotron.trainer import initialise

        initialise(self, functools.partial(original, self, *args, **kwargs))

    return __init__


_SERIALIZE = "nanotron.serialize"
_SCHEDULER = ("lr_scheduler", "is_zero", "parallel_context", "root_folder")

HOOKS = HostHooks(
    host="nanotron",
    distribution="nanotron",
    versions=">=0.4,<0.5",
    tested=("0.4",),
    version_attribute="nanotron:__version__",
    patches=(
        Patch(
            target=f"{_SERIALIZE}.main:save",
            wrapper=wrap_save,
            signature=("config", "model", "optimizer", "lr_scheduler", "parallel_context"),
            summary="configuration and optimizer agree on the ZeRO stage, and every scheduler file has one writer",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:save_lr_scheduler",
            wrapper=wrap_save_lr_scheduler,
            signature=_SCHEDULER,
            summary="saves the scheduler once, is_zero derived from the optimizer",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:load_lr_scheduler",
            wrapper=wrap_load_lr_scheduler,
            signature=_SCHEDULER,
            summary="goes on with the rates of an uninterrupted run, at any topology, as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:load_optimizer",
            wrapper=wrap_load_optimizer,
            signature=("optimizer", "parallel_context", "root_folder", "map_location"),
            summary="optimizer states and fp32 masters of any dp, tp, pp and ZeRO stage, as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:state_dict_to_device",
            wrapper=wrap_state_dict_to_device,
            signature=("state_dict", "device"),
            summary="moves nothing where the optimizer was asked to begin anew",
        ),
        Patch(
            target=f"{_SERIALIZE}.metadata:load_meta",
            wrapper=wrap_load_meta,
            signature=("parallel_context", "root_folder"),
            summary="iteration and consumed samples as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.random:load_random_states",
            wrapper=wrap_load_random_states,
            signature=("parallel_context", "root_folder"),
            summary="random states read without running what the file names, with any torch",
        ),
        Patch(
            target="nanotron.helpers:lr_scheduler_builder",
            wrapper=wrap_build_scheduler,
            signature=("optimizer", "lr_scheduler_args", "total_training_steps"),
            summary="the schedule is built on this run's rates, not on those that were loaded",
            optional=True,
        ),
        Patch(
            target="nanotron.trainer:DistributedTrainer.__init__",
            wrapper=wrap_trainer,
            signature=("config_or_config_file",),
            summary="restores random states and reports what was resumed",
            optional=True,
        ),
    ),
)
