"""nanotron: its trainer, and loops of one's own on `nanotron.serialize`.

Importing this loads neither nanotron nor torch: the seams are in the modules beside, and are imported when they are
called first.
"""

from __future__ import annotations

from ds_reshard.hooks import HostHooks, Patch, Seam

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
            wrapper=Seam(f"{__name__}.scheduler:save"),
            signature=("config", "model", "optimizer", "lr_scheduler", "parallel_context"),
            summary="saves the optimizer's ZeRO stage in the configuration; one rank writes each scheduler file",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:save_lr_scheduler",
            wrapper=Seam(f"{__name__}.scheduler:save_lr_scheduler", partial=True),
            signature=_SCHEDULER,
            summary="saves the scheduler once, is_zero derived from the optimizer",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:load_lr_scheduler",
            wrapper=Seam(f"{__name__}.scheduler:load_lr_scheduler", partial=True),
            signature=_SCHEDULER,
            summary="goes on with the rates of an uninterrupted run, at any topology, as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.main:parse_ckpt_path",
            wrapper=Seam(f"{__name__}.source:parse_ckpt_path"),
            signature=("config", "parallel_context"),
            summary="finds a checkpoint of another format, where nanotron would begin anew",
        ),
        Patch(
            target=f"{_SERIALIZE}.weights:load_weights",
            wrapper=Seam(f"{__name__}.source:load_weights"),
            signature=("model", "parallel_context", "root_folder"),
            summary="weights of a folder of another format",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:load_optimizer",
            wrapper=Seam(f"{__name__}.optimizer:load_optimizer"),
            signature=("optimizer", "parallel_context", "root_folder", "map_location"),
            summary="optimizer states and fp32 masters of any dp, tp, pp and ZeRO stage, as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.optimizer:state_dict_to_device",
            wrapper=Seam(f"{__name__}.optimizer:state_dict_to_device"),
            signature=("state_dict", "device"),
            summary="moves nothing where the optimizer was asked to begin anew",
        ),
        Patch(
            target=f"{_SERIALIZE}.metadata:load_meta",
            wrapper=Seam(f"{__name__}.trainer:load_meta"),
            signature=("parallel_context", "root_folder"),
            summary="iteration and consumed samples as asked",
        ),
        Patch(
            target=f"{_SERIALIZE}.random:load_random_states",
            wrapper=Seam(f"{__name__}.trainer:load_random_states"),
            signature=("parallel_context", "root_folder"),
            summary="random states read without running what the file names, with any torch",
        ),
        Patch(
            target="nanotron.helpers:lr_scheduler_builder",
            wrapper=Seam(f"{__name__}.scheduler:build"),
            signature=("optimizer", "lr_scheduler_args", "total_training_steps"),
            summary="the schedule is built on this run's rates, not on those that were loaded",
            optional=True,
        ),
        Patch(
            target="nanotron.trainer:DistributedTrainer.__init__",
            wrapper=Seam(f"{__name__}.trainer:initialise"),
            signature=("config_or_config_file",),
            summary="restores random states and reports what was resumed",
            optional=True,
        ),
    ),
)
