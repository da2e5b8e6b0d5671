"""Which checkpoint a run loads, what of it is not filled here, and what then hinders Megatron-LM's own load.

What Megatron does was seen of 0.18.2 and 0.19.2, cell by cell (docs/megatron.md has the table).
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import PurePath

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import Place, is_megatron_fsdp, is_megatrons
from ds_reshard.containers.remote import is_url
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    Fault,
    ModelMismatch,
    ReshardError,
    UnsafePickle,
    UnsupportedLayout,
    raise_faults,
)
from ds_reshard.formats.megatron.buckets import bucket_size_of
from ds_reshard.formats.megatron.checkpoint import (
    TRACKER,
    arguments_of,
    chain_of,
    find_iteration,
    iteration_name,
    latest_iteration,
    read_common,
)
from ds_reshard.formats.megatron.flat_states import WORDS, experts_apart, layers_of, size_of
from ds_reshard.formats.megatron.torch_format import is_torch_format
from ds_reshard.model.records import ObjectRecord
from ds_reshard.operations.naming import fitting_maps
from ds_reshard.operations.ranks import attempt
from ds_reshard.operations.source import Found, find_listing, open_weights
from ds_reshard.resume.policy import ResumePolicy

_SIZES = {
    "tensor_model_parallel_size": "tensor-parallel size",
    "pipeline_model_parallel_size": "pipeline-parallel size",
    "virtual_pipeline_model_parallel_size": "number of virtual stages",
    "expert_model_parallel_size": "expert-parallel size",
    "expert_tensor_parallel_size": "tensor-parallel size of experts",
}
_UNTIED = "untie_embeddings_and_output_weights"
_LAYER_WISE = "use_layer_wise_distributed_optimizer"
_MEGATRONS = (None, "dp_zero_gather_scatter")
"""Sharding types that are not read here, and that Megatron loads or refuses; of others it does not tell the reason."""
_FP32_SHARDS = "fp32 weights are their own masters, and Megatron-LM cannot copy the states of this format into them"
"""A RuntimeError when other weights have changed: shards of fp32 weights are views that require gradients, and of the
three loads `load_parameter_state_from_dp_reshardable` and `_from_dp_zero` alone run without `torch.no_grad`
(core/optimizer/distrib_optimizer.py, 0.18.2 and 0.19.2).
"""
_SGD = "Megatron-LM does not create the states of SGD, so it cannot load them from torch_dist"
"""A TypeError: `init_state_fn` of SGD is None (core/optimizer/__init__.py and optimizer.py, 0.18.2 and 0.19.2)."""
_OTHER_STEP = "of format torch it takes moments and iteration of what the tracker file names, whatever --ckpt-step says"
OWN_ADAM = "the distributed optimizer steps by torch's own Adam"
"""Megatron finds no step where it looks for it: a KeyError, or an AssertionError without a word (HAVE_APEX_OR_TE)."""
_LEAST_VERSION = 3.0
"""Of a checkpoint (`checkpoint_version`): older ones order queries, keys and values otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint as far as its small files tell; `objects` are those that lie among the tensors."""

    folder: str
    whole: bool
    common: Mapping[object, object]
    objects: Mapping[str, Place]
    arguments: Mapping[str, object]

    @property
    def sharding(self) -> object:
        """How a distributed optimizer's state lies in a `torch_dist` checkpoint."""
        told = self.common.get("content_metadata")
        return told.get("distrib_optim_sharding_type") if isinstance(told, Mapping) else None

    @property
    def distributed(self) -> bool:
        """Whether a distributed optimizer saved it, as the Adam beside a layer-wise Muon is, whose arguments deny it.

        `validate_args` of training/arguments.py takes the flag away, and `_build_sharded_state_dict_metadata` of
        training/checkpointing.py tells the sharding type all the same (0.18.2 and 0.19.2).
        """
        return bool(self.arguments.get("use_distributed_optimizer")) or self.sharding is not None

    @property
    def states_by_name(self) -> bool:
        """Whether optimizer states are saved by the names of parameters, and not flat or by number."""
        return self.whole and (not self.distributed or self.sharding == "fully_reshardable")

    @property
    def apart(self) -> bool:
        """Whether experts have an optimizer of their own: its groups say so, else the arguments.

        Releases differ in it (`experts_apart`).
        """
        chain = chain_of(self.common.get("optimizer"), self.objects) if self.arguments.get("num_experts") else None
        if chain is None:
            return experts_apart(self.arguments)
        return any(group.get("is_expert_parallel") for groups in chain for group in groups)


def find_saved(arguments: Namespace) -> Saved | None:
    """What `--load` names, None for what is left to Megatron: nothing there, another format, a release.

    Also where files of Megatron's own choice come first: local checkpoints, or `--pretrained-checkpoint`. Raises
    CheckpointNotFound where a checkpoint is there and Megatron would find none.
    """
    path = getattr(arguments, "load", None)
    if path is None:
        _refuse_other_places(arguments)
        return None
    folders.renew(path)
    apart = any(getattr(arguments, name, None) for name in ("use_megatron_fsdp", "use_torch_fsdp2"))
    saved = None if apart else _saved(arguments, path)
    if saved is None and not _has_tracker(path):
        looked_in = _looked_in(arguments, path)
        own = looked_in is not None and looked_in[0] == path
        raise_faults(_passed_over(path.rstrip("/")) if own else (), subject=f"loading {path}")
        _refuse_other_places(arguments)
        if own and getattr(arguments, "exit_on_missing_checkpoint", False) and _pretrained(arguments) is None:
            more = "; or leave out --exit-on-missing-checkpoint, to begin anew"
            raise_faults(_holds_none(path, "--load", more), subject=f"loading {path}")
    return saved


def _pretrained(arguments: Namespace) -> str | None:
    found = getattr(arguments, "pretrained_checkpoint", None)
    return None if found is None else str(found)


def _refuse_other_places(arguments: Namespace) -> None:
    """Raise CheckpointNotFound if `--pretrained-checkpoint`, which is loaded in place of --load, holds none."""
    first = _pretrained(arguments)
    if first is not None and not _has_tracker(first):
        faults = [*map(_of_pretrained, _passed_over(first.rstrip("/")))]
        raise_faults(faults or _holds_none(first, "--pretrained-checkpoint"), subject=f"loading {first}")


def _holds_none(path: str, flag: str, more: str = "") -> list[Fault]:
    """A fault where a flag wants a checkpoint that is not there: Megatron raises a FileNotFoundError without a name.

    With `--exit-on-missing-checkpoint` it ends by `sys.exit()`, the status of a run that went well.
    """
    what, mend = f"holds no checkpoint, which {flag} wants", f"give {flag} the folder of --save of a run{more}"
    return [CheckpointNotFound.fault(path, what, f"a file {TRACKER}", "none", mend=mend)]


def _of_pretrained(fault: Fault) -> Fault:
    """The same of `--pretrained-checkpoint`, where Megatron raises a FileNotFoundError that names no folder."""
    flag = "--pretrained-checkpoint"
    what = fault.what.replace("--load", flag).replace("Megatron-LM would begin anew", "Megatron-LM would find none")
    return replace(fault, what=what, mend=fault.mend.replace("--load", flag))


def _passed_over(path: str) -> Iterator[Fault]:
    """A checkpoint where Megatron sees no tracker file, and begins anew, as if all were well.

    `_load_base_checkpoint` of training/checkpointing.py, 0.18.2 and 0.19.2.
    """
    given = path if is_url(path) else os.path.realpath(path)
    if not is_url(given) and folders.is_file(given) and _has_tracker(os.path.dirname(given)):
        what = "is a file, and --load takes the folder of --save: Megatron-LM would begin anew"
        yield CheckpointNotFound.fault(path, what, mend=f"give --load {os.path.dirname(given)}")
        return
    for folder in (given, os.path.dirname(given), os.path.dirname(os.path.dirname(given))):
        step = os.path.basename(folder)
        if _ITERATION.fullmatch(step) and _is_iteration(folder):
            what = "belongs to one iteration, but --load takes a --save folder: Megatron-LM would begin anew"
            yield CheckpointNotFound.fault(path, what, mend=_how_to_load(os.path.dirname(folder), step))
            return
    there = sorted(filter(_ITERATION.fullmatch, folders.names(given))) if folders.is_folder(given) else []
    there = [step for step in there if _is_iteration(os.path.join(given, step))]
    if there:
        what = f"has no file {TRACKER}, without which Megatron-LM would begin anew"
        mend = f"{_how_to_load(given, there[-1])}; or move all iterations out of {given}, to begin anew"
        yield CheckpointNotFound.fault(path, what, mend=mend)
        return
    if (fault := _found_below(path, given)) is not None:
        yield fault
        return
    names, _, _ = attempt(lambda: folders.names(given))
    steps = sorted(int(match[1]) for name in names or () if (match := _STEP_OF_TRAINER.fullmatch(name)))
    for place in (path, *(f"{path}/checkpoint-{step}" for step in steps[-1:])):
        found, faults, _ = attempt(lambda place=place: find_listing(place, None))  # type: ignore[misc]
        yield from (fault for fault in faults if fault.error == UnsupportedLayout.__name__)
        if found is None:
            continue
        what = f"is a checkpoint of {found.format.name}, which Megatron-LM cannot read: Megatron-LM would begin anew"
        mend = "" if _is_iteration(found.folder) else _conversion(place, found)
        if not mend:
            what = "belongs to one iteration, but --load takes a --save folder: Megatron-LM would begin anew"
            mend = _moved(found.folder)
        yield CheckpointNotFound.fault(place, what, mend=mend)
        return


_STEP_OF_TRAINER = re.compile(r"checkpoint-(\d+)")


def _conversion(path: str, found: Found) -> str:
    """Return the `mend` text that tells the user how to make a checkpoint of Megatron-LM of one of another format."""
    line, more = f"ds-reshard convert {path} DIR --to megatron", ""
    try:
        source = open_weights(found, whole=False)
        content = source.content()
    except ReshardError:  # the line says why
        return f"{line}, and give --load DIR"
    if content.facts is None:
        mend = "give --load a checkpoint that has an optimizer, as ds-reshard convert makes none of weights alone"
        return f"{mend}; or leave out --load, to begin anew"
    if WORDS not in content.weights:
        line += f" --names {'|'.join(fitting_maps(source, 'megatron')) or 'map.json'}"
    if not isinstance(content.entries.get("args"), Mapping):
        line += " --like SAVED"
        more = "; SAVED is a checkpoint that this run has saved, after a step from its beginning"
    return f"{line}, and give --load DIR{more}"


def _found_below(path: str, given: str) -> Fault | None:
    """The fault of a folder that holds a checkpoint of Megatron-LM one or two levels below, None of any other."""
    below = _below(given)
    saves = list(filter(_has_tracker, below))
    if saves:
        what = "contains --save folders and is none itself, so Megatron-LM would begin anew"
        mend = f"give --load {saves[0]}; or leave out --load, to begin anew"
        named = ", ".join(os.path.relpath(one, given) for one in saves[:8])
        return CheckpointNotFound.fault(path, what, found=named, mend=mend)
    folder = next(filter(_is_iteration, below), None)
    if folder is None:
        return None
    above, step = os.path.split(folder)
    line = _how_to_load(above, step) if _ITERATION.fullmatch(step) else _moved(folder)
    what = "contains an iteration but is not a --save folder itself, so Megatron-LM would begin anew"
    mend = f"{line}; or leave out --load, to begin anew"
    return CheckpointNotFound.fault(path, what, found=os.path.relpath(folder, given), mend=mend)


_ITERATION = re.compile(r"iter_\d{7,}|release")
_MOST_BELOW = 64


def _below(folder: str) -> list[str]:
    """Return the local folders one and two levels below a folder; no folders for a URL.

    At most `_MOST_BELOW` folders of a level are listed, and at most as many names in each, because listing takes time.
    """
    levels = [[] if is_url(folder) else [folder]]
    for _ in range(2):
        made = list[str]()
        for above in levels[-1][:_MOST_BELOW]:
            names, _, _ = attempt(lambda one=above: folders.names(one))  # type: ignore[misc]
            made += [os.path.join(above, name) for name in (names or [])[:_MOST_BELOW]]
        levels.append(list(filter(folders.is_folder, made)))
    return [*levels[1], *levels[2]]


def _moved(folder: str) -> str:
    """The line that makes the folder of one iteration a checkpoint that Megatron finds."""
    count = read_common(folder)[0].get("iteration")
    return f"move {folder} to DIR/{iteration_name(str(count))}, write {count} into DIR/{TRACKER}, and give --load DIR"


def _is_iteration(folder: str) -> bool:
    return folders.is_folder(folder) and any(of(folder) for of in (is_megatrons, is_torch_format, is_megatron_fsdp))


def _how_to_load(folder: str, step: str) -> str:
    """Return the `mend` text that tells the user how to load iteration `step` of a `--save` folder."""
    number = step if step == "release" else str(int(step.removeprefix("iter_")))
    tracker = os.path.join(folder, TRACKER)
    latest = latest_iteration(folder) if _has_tracker(folder) else ""
    if number == latest:
        return f"give --load {folder}"
    if not latest.isdecimal() or number == "release":
        return f"write {number} into {tracker}, and give --load {folder}"
    return f"give --load {folder} --ckpt-step {number}"


def _saved(arguments: Namespace, path: str) -> Saved | None:
    try:
        looked_in = _looked_in(arguments, path)
        told = looked_in is not None and looked_in[1] is not None and _pretrained(arguments) is None
        if looked_in is None or not (told or _has_tracker(looked_in[0])):
            return None
        raise_faults(_tracker_faults(*looked_in), subject=f"loading {path}")
        folder = find_iteration(*looked_in)
        whole = is_megatrons(folder)
        raise_faults(_of_megatron_fsdp(path, folder), subject=f"loading {path}")
        if os.path.basename(folder) == "release" or not (whole or is_torch_format(folder)):
            return None
        common, objects = read_common(folder)
    except (CheckpointNotFound, UnsupportedLayout, UnsafePickle):
        return None  # Megatron tells, or the seams of its own reading
    version = common.get("checkpoint_version")
    if not isinstance(version, int | float) or version < _LEAST_VERSION:
        return None
    held = arguments_of(common.get("args"))
    return Saved(folder=folder, whole=whole, common=common, objects=objects, arguments=held)


def _of_megatron_fsdp(path: str, folder: str) -> list[Fault]:
    """A fault for a folder that a run with `--use-megatron-fsdp` alone reads; any other takes it for torch_dcp."""
    if not is_megatron_fsdp(folder):
        return []
    what = "is of format fsdp_dtensor, which Megatron-LM reads with --use-megatron-fsdp alone"
    mend = f"ds-reshard convert {path} DIR --to megatron, and give --load DIR"
    return [ModelMismatch.fault(folder, what, "torch_dist or torch", "fsdp_dtensor", mend=mend)]


def _looked_in(arguments: Namespace, path: str) -> tuple[str, str | None] | None:
    """The folder that Megatron takes an iteration from, and which one it is asked for, None for the latest.

    Non-persistent checkpoints come first unless older than the persistent one, which alone `--ckpt-step` chooses; only
    Megatron knows of those on the nodes' own disks (`_load_base_checkpoint`, megatron/training/checkpointing.py,
    0.18.2 and 0.19.2).
    """
    kind, step = getattr(arguments, "non_persistent_ckpt_type", None), getattr(arguments, "ckpt_step", None)
    persistent = path, str(step) if step else None
    if kind is None:
        return persistent
    elsewhere = _pretrained(arguments) is not None and _latest(path) < 0
    if kind != "global" or elsewhere or is_url(path):
        return None
    beside = getattr(arguments, "non_persistent_global_ckpt_dir", None) or os.path.join(path, "non_persistent")
    newest = _latest(beside)
    return (beside, None) if newest >= 0 and newest >= (step or _latest(path)) else persistent


def _tracker_faults(folder: str, step: str | None) -> Iterator[Fault]:
    """What a tracker file names that is no iteration, or none that is there, as a save leaves that was killed.

    At the first Megatron ends each rank by `sys.exit()`, the status of a run that went well, whatever `--ckpt-step`
    says; at the second it reads a folder that is not there (training/checkpointing.py `read_metadata`,
    `_get_checkpoint_format`, 0.18.2 and 0.19.2).
    """
    names = folders.names(folder)
    told = latest_iteration(folder) if _has_tracker(folder) else step or ""
    by_number = {int(name[5:]): name for name in names if name.startswith("iter_") and name[5:].isdecimal()}
    there = sorted(number for number, name in by_number.items() if iteration_name(str(number)) == name)
    listed = ", ".join(map(str, there[-12:]))
    if told.isdecimal() and step is not None:
        if iteration_name(step) not in names:
            what = f"names no iteration of {folder}, where Megatron-LM would end in a FileNotFoundError"
            mend = f"give --ckpt-step {there[-1]}, or another of {listed}" if there else "leave it out"
            yield ConfigError.fault(f"--ckpt-step {step}", what, mend=mend)
        return
    if (told == "release" or told.isdecimal()) and iteration_name(told) in names:
        return
    mend = f"write one of the iterations that are there into it: {listed}" if there else "remove it, to begin anew"
    if told.isdecimal() and int(told) in by_number:
        mend = f"rename {by_number[int(told)]} to {iteration_name(told)}"
    elif not there and _is_iteration(folder):
        mend = _moved(folder)
    what = "names no checkpoint that is there: a save may have been killed"
    yield CheckpointDamaged.fault(
        os.path.join(folder, TRACKER), what, "an iteration, or release", repr(told), mend=mend
    )


def release_faults(where: str, policy: ResumePolicy, step: object) -> list[Fault]:
    """A release holds weights alone; where the tracker file names it Megatron reads it whatever `--ckpt-step` says."""
    if step:
        what = f"is a release, which the tracker file names: Megatron-LM would load it, and not --ckpt-step {step}"
        mend = f"write {step} into {PurePath(where).parent / TRACKER} in place of --ckpt-step, or leave that out"
        return [ConfigError.fault(where, what, mend=mend)]
    if policy.optimizer != "masters" and policy.scheduler == "host":
        return []
    what = "is a release: weights alone, with no optimizer, schedule or position to resume"
    return [ConfigError.fault(where, what, mend="add --finetune and leave out the others")]


def missing_file(path: str) -> list[Fault]:
    """Return a fault if a file of format `torch` is missing, as after a save or a copy that was killed.

    Without the weights' file Megatron ends the rank with exit status 0; without the optimizer's it fails after weights
    have changed (`_load_base_checkpoint`, `load_checkpoint` of training/checkpointing.py, 0.18.2 and 0.19.2).
    """
    if folders.is_file(path):
        return []
    mend = "restore the folder from a copy, load another iteration, or run with the saved model-parallel sizes"
    return [CheckpointNotFound.fault(path, "is missing", "a file of this rank", "none", mend=mend)]


def _has_tracker(folder: str) -> bool:
    return folders.is_file(os.path.join(folder, TRACKER))


def _latest(folder: str) -> int:
    """The iteration that a tracker file names, 0 for a release, -1 where there is none."""
    told = latest_iteration(folder) if _has_tracker(folder) else ""
    return int(told) if told.isdecimal() else 0 if told == "release" else -1


def hindrances(
    saved: Saved, run: Mapping[str, object], *, optimizer: bool, apart: bool, own_adam: bool = False
) -> list[str]:
    """Return why Megatron cannot load a checkpoint into this run, or would load it wrong; empty if it loads it right.

    `optimizer` is whether the optimizer's state is loaded, too, `apart` whether its experts have one of their own,
    `own_adam` whether its distributed optimizer steps by torch's own Adam.
    """
    if is_url(str(run.get("load"))):
        return ["it is read by URL"]
    runs = saved.arguments, run
    tied = [not arguments.get(_UNTIED) for arguments in runs]
    layer_wise = [bool(arguments.get(_LAYER_WISE)) for arguments in runs]
    distributed = bool(run.get("use_distributed_optimizer")) or (layer_wise[1] and saved.distributed)
    states = optimizer and not saved.arguments.get("no_save_optim")
    alone = {
        "tied embeddings": tied if _UNTIED in saved.arguments else (),
        "a layer-wise optimizer": layer_wise if optimizer else (),
        "a distributed optimizer": (saved.distributed, distributed) if optimizer else (),
        "an optimizer of experts": (saved.apart, apart) if states else (),
    }
    found = [f"{what} in one of the two runs alone" for what, sides in alone.items() if len(set(sides)) > 1]
    if found or (saved.whole and not optimizer):
        return found
    found += [OWN_ADAM] * own_adam
    if optimizer and not saved.whole and distributed:
        above, step = os.path.split(saved.folder)
        found += [_OTHER_STEP] * (not _has_tracker(above) or iteration_name(latest_iteration(above)) != step)
    if saved.whole and saved.distributed:
        if saved.sharding not in ("dp_reshardable", "fully_reshardable", *_MEGATRONS):
            return [f"its optimizer's state is of sharding type {saved.sharding}"]
        if saved.sharding != "dp_reshardable":
            return found
    if optimizer and not distributed:
        found += [_SGD] * (saved.whole and _both_sgd(saved, run))
        found += _differing(runs, {"weights": _weights}) if any(_weights(one) == "fp32" for one in runs) else []
    if saved.whole and not saved.distributed:
        return found
    found += _differing(runs, {**_OF_FILES, **(_OF_BUCKETS if optimizer and saved.distributed else {})})
    views = optimizer and saved.distributed and [_weights(one) for one in runs] == ["fp32", "fp32"]
    return found or [_FP32_SHARDS] * (views and not any(map(run.get, _STATES_NOT_FILLED)))


def _differing(
    runs: Sequence[Mapping[str, object]], rows: Mapping[str, Callable[[Mapping[str, object]], object]]
) -> Iterator[str]:
    """What of the rows is not the same in the saved run and in this one; what one of them does not tell is."""
    for label, value in rows.items():
        was, now = map(value, runs)
        if was != now and was is not None and now is not None:
            plain = isinstance(was, int | str) and isinstance(now, int | str)
            yield f"{label} {was} as saved, {now} now" if plain else f"other {label}"


def _both_sgd(saved: Saved, run: Mapping[str, object]) -> bool:
    return saved.arguments.get("optimizer") == "sgd" == run.get("optimizer")


def may_be_shifted(saved: Saved) -> bool:
    """Whether it is of the kind that Megatron saves wrong where its buckets are padded (`saves`)."""
    arguments = saved.arguments
    shared = not arguments.get(_UNTIED) or bool(arguments.get("mtp_num_layers"))  # an embedding has a bucket of its own
    several = _buckets(arguments) is not None or (shared and size_of(arguments, "pipeline_model_parallel_size") > 1)
    return saved.distributed and saved.sharding == "fully_reshardable" and several


def _size(arguments: Mapping[str, object], name: str) -> int:
    if name.startswith("expert_") and not arguments.get("num_experts"):
        return 1
    if name == "expert_tensor_parallel_size" and not arguments.get(name):
        name = "tensor_model_parallel_size"
    return size_of(arguments, name)


def _stages(arguments: Mapping[str, object]) -> tuple[object, ...]:
    """Which layers each pipeline stage has; where the layout puts those of multi-token prediction, its own words."""
    apart = arguments.get("pipeline_model_parallel_layout") if arguments.get("mtp_num_layers") else None
    return layers_of(arguments), apart


def renumbered(saved: Mapping[str, object], run: Mapping[str, object], where: str) -> list[Fault]:
    """Return a fault if pipeline stages begin at other layers: format `torch` counts the layers of each from 0."""
    starts = [{at: span.start for at, span in (layers_of(one) or {}).items()} for one in (saved, run)]
    if not all(starts) or starts[0] == starts[1]:
        return []
    what = "has other layers on each pipeline stage, and Megatron-LM would take them for those of the same number"
    mend = "pass it as --load with --finetune, which loads weights under any layout; or run with the saved layout"
    return [
        UnsupportedLayout.fault(where, what, str(list(starts[0].values())), str(list(starts[1].values())), mend=mend)
    ]


def _grouped(arguments: Mapping[str, object]) -> bool:
    """Whether each kind of matrix of all experts lies together, and not each expert: local layers know no other way.

    core/models/backends.py, `grouped_mlp_modules`, 0.18.2 and 0.19.2.
    """
    told = arguments.get("num_experts") and arguments.get("moe_grouped_gemm")
    return bool(told) and arguments.get("transformer_impl") != "local"


def _types(arguments: Mapping[str, object]) -> str:
    """What Megatron keeps buckets apart by, and finds them by (`gbuf_ranges`, core/optimizer/distrib_optimizer.py)."""
    weights = _weights(arguments)
    gradients = "fp32" if arguments.get("accumulate_allreduce_grads_in_fp32") else weights
    return f"{weights}, {gradients}"


def _weights(arguments: Mapping[str, object]) -> str:
    """Their type; a plain optimizer has masters beside those that are not fp32, and nests its state in theirs."""
    return next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32")


def _buckets(arguments: Mapping[str, object]) -> object:
    """Where the first stage's buckets end: what the distributed optimizer's flat states depend on."""
    try:
        return bucket_size_of(arguments, 0, 0)
    except ValueError:
        return "ddp_num_buckets", arguments.get("ddp_num_buckets")


_NOT_FILLED = ("fp8", "fp4", _LAYER_WISE)
_STATES_NOT_FILLED = (
    "fp16",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "overlap_param_gather_with_optimizer_step",
)


_OF_FILES: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    **{label: partial(_size, name=name) for name, label in _SIZES.items()},
    "layers of each pipeline stage": _stages,
    **{name: methodcaller("get", name) for name in ("padded_vocab_size", "transformer_impl")},
    "moe_grouped_gemm": _grouped,
}
"""What the files of format `torch` follow, and flat buckets."""
_OF_BUCKETS: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "weights and gradients": _types,
    "buckets of gradients": lambda arguments: (_buckets(arguments),),
}


def unfillable(saved: Saved, run: Mapping[str, object], hindered: Sequence[str], *, optimizer: bool) -> Iterator[Fault]:
    """The options under which a run is not filled from files here; `hindered` is why Megatron does not do it either."""
    if optimizer and saved.whole and _both_sgd(saved, run):
        mend = "save it with --ckpt-format torch, or add --no-load-optim"
        yield UnsupportedLayout.fault(saved.folder, "cannot be loaded with the optimizer: it is SGD's", mend=mend)
    for name in (*_NOT_FILLED, *(_STATES_NOT_FILLED if optimizer else ())):
        held = [side for side, arguments in (("saved", saved.arguments), ("this run's", run)) if arguments.get(name)]
        if held:
            what = f"cannot be loaded with {name} ({' and '.join(held)})"
            mend = "load it as it was saved" if saved.arguments.get(name) else f"load it without {name}"
            mend = "install Apex or Transformer Engine" if hindered == [OWN_ADAM] and len(held) == 2 else mend
            mend += ", or add --no-load-optim" if name in _STATES_NOT_FILLED else ""
            yield UnsupportedLayout.fault(saved.folder, what, mend=mend)
    if not optimizer and run.get("load_main_params_from_ckpt"):  # of what is read here Megatron gets no weights
        what = "cannot give masters to --load-main-params-from-ckpt, which are the cast of its weights here"
        yield UnsupportedLayout.fault(saved.folder, what, mend="leave out --load-main-params-from-ckpt")
    hybrid = [
        bool(one.get("hybrid_layer_pattern") or one.get("hybrid_override_pattern")) for one in (saved.arguments, run)
    ]
    if hybrid == [False, True]:
        what = "is of a GPT model, whose layers Megatron-LM alone deals out to those of a hybrid one"
        yield UnsupportedLayout.fault(saved.folder, what, mend="load it into the model that was saved")
    sizes = ("world_size", "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    same = not hindered and not run.get("finetune") and all(run.get(one) == saved.arguments.get(one) for one in sizes)
    if same and _reruns(saved.common.get("rerun_state_machine")):
        what = "was saved while a step was to be run again, and Megatron-LM alone goes on with that"
        yield UnsupportedLayout.fault(saved.folder, what, mend="load it as it was saved")


def _reruns(state: object) -> bool:
    """Whether a save lies between two runs of a step, which goes on where `load_checkpoint` finds the saved sizes.

    `RerunState.NOT_RUNNING_YET` is 0 (core/rerun_state_machine.py, training/checkpointing.py, 0.18.2 and 0.19.2).
    """
    told = state.get("state") if isinstance(state, Mapping) else None
    return isinstance(told, ObjectRecord) and told.args != (0,)
