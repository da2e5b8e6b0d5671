"""What a checkpoint says beside its tensors: counters, scheduler, loss scale, the user's own state."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_reshard.containers.remote import is_url
from ds_reshard.containers.revive import revive
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.execution.buffers import read_tensor, tensor_from_bytes
from ds_reshard.execution.deviation import same_bits
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.hosts.deepspeed.engine import SCALE, Run, live_kind
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.model.facts import Scalar, ScalarTensor
from ds_reshard.model.live_run import LiveModule
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, TensorRecord
from ds_reshard.operations.ranks import rank
from ds_reshard.resume.scheduler_policy import other_state_faults

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
    from deepspeed.runtime.engine import DeepSpeedEngine


logger = logging.getLogger("ds_reshard")

_COUNTERS = ("skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `load_checkpoint`, as the user gave them or as a resume policy narrowed them.

    `moments` is False where weights and masters alone are wanted of the optimizer; `replaced` are the param groups'
    values that this run's take the place of afterwards.
    """

    load_dir: str
    tag: str
    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool
    custom_load_fn: Callable[..., object] | None
    moments: bool = True
    replaced: frozenset[str] = frozenset()

    @property
    def load_optimizer(self) -> bool:
        return self.optimizer and not self.module_only

    @property
    def load_moments(self) -> bool:
        return self.load_optimizer and self.moments

    @property
    def given(self) -> dict[str, object]:
        """What the user gave, by DeepSpeed's names, as plain values; of a function only whether there is one."""
        return {
            "load_dir": self.load_dir.rstrip("/") if is_url(self.load_dir) else os.path.normpath(self.load_dir),
            "tag": self.tag or None,
            "load_module_strict": bool(self.strict),
            "load_optimizer_states": bool(self.optimizer),
            "load_lr_scheduler_states": bool(self.scheduler),
            "load_module_only": bool(self.module_only),
            "custom_load_fn": "none" if self.custom_load_fn is None else "a function",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerValues:
    """What the optimizer takes over, built and checked before a byte moved.

    `groups` are the hyper-parameters per param group (None keeps the live ones), `scalars` the scalar
    states per flat buffer; `loss_scaler`, `clip_grad` and so on are in `extras` where the checkpoint has
    them. `step` is the elastic format's one step.
    """

    groups: Mapping[int, Mapping[str, object]]
    scalars: Mapping[int, Mapping[str, object]]
    extras: Mapping[str, object]
    step: object


def reads_no_url(load_dir: str) -> Fault:
    """DeepSpeed would say that nothing is there, and the run would begin anew."""
    what, mend = "is of a kind that DeepSpeed itself loads, which reads no URL", "copy it to a local folder"
    return UnsupportedLayout.fault(load_dir, what, mend=mend)


def loss_scaling(run: Run, checkpoint: AnyCheckpoint, settings: Settings, request: Request) -> dict[str, object]:
    """Loss scaler, overflow flag and clipping: restored as DeepSpeed restores them.

    A loss scaler of another kind than this run's, or of another precision, is left alone, loudly. Every other precision
    has a static scaler too, of scale 1 (`CreateLossScaler`, runtime/fp16/loss_scaler.py). Between stage 0 and the
    others this run's goes on with the numbers of the saved one.
    """
    entries, fp16, extras = checkpoint.optimizer_entries, checkpoint.model.in_fp16, dict[str, object]()
    if "clip_grad" in entries and "clip_grad" not in request.replaced:
        extras["clip_grad"] = entries["clip_grad"]
    assert run.optimizer is not None
    name = "loss_scaler" if run.optimizer.stage else "loss_scale_config"  # as `scale_name` has it
    live, saved = run.optimizer.scaler, None
    if "loss_scaler" in entries:
        saved = revived(entries["loss_scaler"], trusted=settings.trust, where="loss_scaler")
    elif checkpoint.stage == 0 and (fp16 or not run.optimizer.stage) and "cur_scale" in entries:
        saved = SimpleNamespace(dynamic_loss_scale=entries.get("dynamic_loss_scale"), **_counted(entries.get))
    alike = fp16 is run.fp16 and (fp16 or checkpoint.stage == 0)
    if live is None or saved is None or (name != "loss_scaler" and not alike):
        return extras
    if name == "loss_scaler" and type(saved) is type(live) and fp16 is run.fp16:
        extras |= {"loss_scaler": saved, "dynamic_loss_scale": _dynamic(saved)}
        extras["overflow"] = entries.get("overflow", False)
    elif alike and _dynamic(saved) is _dynamic(live):
        extras[name] = made = copy.copy(live)
        for key, value in _counted(lambda key: getattr(saved, key, None)).items():
            if hasattr(made, key):
                setattr(made, key, value)
    else:
        kinds = [
            f"{'dynamic' if _dynamic(one) else 'static'}, {getattr(one, 'cur_scale', '?')}" for one in (saved, live)
        ]
        what = "the checkpoint's loss scale (%s) is not of this run's kind or precision (%s): this run's is kept"
        logger.warning(what, *kinds)
    return extras


def _counted(get: Callable[[str], object]) -> dict[str, object]:
    """What there is of a saved loss scale; a static one has no more than the scale."""
    return {name: value for name in SCALE if (value := get(name)) is not None}


def _dynamic(scaler: object) -> bool:
    return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))


def clipping_faults(computes_norm: bool, entries: Mapping[str, object], replaced: frozenset[str]) -> list[Fault]:
    """Where gradients were clipped, and this run computes no norm of them.

    DeepSpeed says so when the weights are loaded (`_load_global_state`, runtime/zero/stage_1_and_2.py, 0.19.8).
    """
    saved = entries.get("clip_grad")
    if computes_norm or "clip_grad" in replaced or not isinstance(saved, int | float) or saved <= 0:
        return []
    what, mend = "computes no norm of gradients, which the saved one clipped", "use --override-optim-hparams clip_grad"
    return [
        UnsupportedLayout.fault(
            "zero_optimization.compute_grad_norm: false", what, "clip_grad 0", str(saved), mend=mend
        )
    ]


def live_entries(scheduler: object, model: ModelStates, request: Request, settings: Settings) -> Mapping[str, object]:
    """The model file's entries but the weights, as live values; what is not needed stays unbuilt."""
    skipped = {"module", "frozen_param_fragments"}
    if request.load_optimizer or request.optimizer:
        skipped.add("optimizer")
    saved = {key: value for key, value in model.entries.items() if key not in skipped}
    made = revived(saved, trusted=settings.trust, where=model.path)
    assert isinstance(made, dict)
    raise_faults(scheduler_faults(scheduler, model, request), subject=f"loading {model.path}")
    return made


def scheduler_faults(scheduler: object, model: ModelStates, request: Request) -> list[Fault]:
    """Whether this run's scheduler is to be given a state that the checkpoint does not have."""
    if not request.scheduler or request.module_only or scheduler is None:
        return []
    return other_state_faults(scheduler, model.entries.get("lr_scheduler"), where=model.path)


class ModuleValues(NamedTuple):
    """What modules load beside their tensors: entries by their names, and by a module's name what was saved of it."""

    entries: Mapping[str, object]
    versions: Mapping[str, object]


def module_values(module: LiveModule, model: ModelStates, settings: Settings) -> ModuleValues:
    """The extra states that modules of a run set, and the entries that are no tensors if modules load by themselves.

    Raises UnsupportedLayout if a module loads by versions, and those that were saved are not known.
    """
    own = model.entries["module"] or {}  # None in a stage's file, and in a universal folder made of stages
    assert isinstance(own, dict)
    saved = {**model.module, **model.objects, **own}
    taken = [
        *module.extra_state_entries,
        *(model.objects.keys() - module.unloaded.keys() if module.has_load_hooks else ()),
    ]
    mend = "save it whole: not as a DTensor that is sharded"
    faults = [
        UnsupportedLayout.fault(key, "is an extra state that lies in several pieces", mend=mend)
        for key in module.extra_state_entries
        if isinstance(record := saved.get(key), TensorRecord) and not record.storage.path
    ]
    for name, version in module.versioned.items():
        if name not in model.versions:
            what = "loads by the version of what was saved, and the checkpoint does not say it of this module"
            mend = "load what DeepSpeed has saved of this model, or a state dict with its _metadata"
            where = f"module {name or 'of this run'}"
            faults.append(UnsupportedLayout.fault(where, what, f"a version, {version} in this run", "none", mend=mend))
    raise_faults(faults, subject=f"loading {model.path}")
    values = {key: saved[key] for key in dict.fromkeys(taken) if key in saved}
    return ModuleValues(
        {key: revived(one, trusted=settings.trust, where=f"{model.path}, {key}") for key, one in values.items()},
        {name: revived(one, trusted=settings.trust, where=model.path) for name, one in model.versions.items()},
    )


def client_entries(
    engine: DeepSpeedEngine, model: ModelStates, revived_entries: Mapping[str, object], request: Request
) -> dict[str, object]:
    """`client_state`, by the rule of DeepSpeed's `_load_checkpoint`: all entries that it did not use itself.

    Frozen parameters are given as this engine holds them: the same values, not a second copy.
    """
    used = {"module"} if request.module_only else {"module", *_COUNTERS}
    used |= {"lr_scheduler"} if request.scheduler else set()
    used |= {"optimizer"} if request.optimizer else set()
    entries = {key: revived_entries.get(key) for key in model.entries if key not in used}
    if model.entries.get("frozen_param_fragments") is not None:
        entries["frozen_param_fragments"] = {
            name: getattr(param, "ds_tensor", param).detach()
            for param, name in engine.param_names.items()
            if name in model.frozen_fragments
        }
    kept = engine.zero_optimization_stage() == 0 and live_kind(engine) != "none"
    if request.load_optimizer and model.param_shapes is None and kept:
        entries["optimizer"] = engine.optimizer.state_dict()
    return entries


def load_sampler(sampler: DeepSpeedDataSampler, state: object) -> None:
    """Give the data sampler of curriculum learning a state, whatever it has drawn before.

    Rank 0 opens the clusters that the state names, and DeepSpeed lists them behind those that are open already
    (`load_state_dict`, runtime/data_pipeline/data_sampling/data_sampler.py, 0.19.8): it would draw from both.
    """
    for name in ("data_clusters", "data_cluster_sizes"):
        getattr(sampler, name, []).clear()
    sampler.load_state_dict(state)


Record = ObjectRecord | GlobalName
Child = Callable[[object], object]


def revived(value: object, *, trusted: frozenset[str], where: str) -> object:
    """The value that `torch.load` would have given, built from the allow-list alone (else TrustRequired)."""
    return revive(value, builders=_builders(), trusted=trusted, tensor=read_tensor, where=where)


def scalar(value: Scalar) -> object:
    """A scalar state as the optimizer keeps it: a small tensor, or a plain value."""
    if isinstance(value, ScalarTensor):
        return tensor_from_bytes(value.data, value.dtype, value.shape)
    return value


def _bytes_io(record: Record, child: Child) -> object:
    """A BytesIO, in which models keep extra state; its pickled state is (content, position, attributes)."""
    made = io.BytesIO()
    if isinstance(record, ObjectRecord):
        state = child(record.state)
        if isinstance(state, tuple) and len(state) == 3 and isinstance(state[0], bytes) and isinstance(state[1], int):
            made.write(state[0])
            made.seek(state[1])
    return made


@functools.cache
def _builders() -> Mapping[str, Callable[[Record, Child], object]]:
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    def plain(cls: type) -> Callable[[Record, Child], object]:
        def build(record: Record, child: Child) -> object:
            if isinstance(record, GlobalName):
                return cls
            made: object = object.__new__(cls)
            state = child(record.state)
            if isinstance(state, tuple) and len(state) == 2:
                state = {**(state[0] or {}), **(state[1] or {})}
            for name, value in (state or {}).items() if isinstance(state, dict) else ():
                object.__setattr__(made, name, value)
            return made

        return build

    def call(function: Callable[..., object]) -> Callable[[Record, Child], object]:
        def build(record: Record, child: Child) -> object:
            if isinstance(record, GlobalName):
                return function
            return function(*(child(arg) for arg in record.args))

        return build

    def dtype_of(name: str) -> Callable[[Record, Child], object]:
        return lambda record, child: getattr(torch, name)

    names = {f"torch.{t.label}": dtype_of(t.label) for t in ElementType if hasattr(torch, t.label)}
    return {
        **names,
        "torch.device": call(torch.device),
        "torch.Size": call(torch.Size),
        "_io.BytesIO": _bytes_io,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": plain(LossScaler),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": plain(DynamicLossScaler),
        "deepspeed.utils.tensor_fragment.fragment_address": plain(fragment_address),
    }


def unloaded_faults(checkpoint: AnyCheckpoint, module: LiveModule, *, strict: bool) -> Iterator[Fault]:
    """Yield a fault for saved entries that no module loads, if the load is strict.

    A load that is not strict accepts such an entry if this run has the same value, or if the tensors that it belongs to
    were not saved: a save without frozen weights has their scales all the same (`module_state_dict`, runtime/engine.py,
    0.19.8). Scales that a module loads without their weight, as bitsandbytes' Linear8bitLt, must be those of this run.
    """
    saved = checkpoint.model
    named = {*saved.module, *saved.objects}
    what, mend = "is saved by its module, which does not load it", "pass load_module_strict=False"
    held, passed = [name for name in module.unloaded if strict and name in named], list[str]()
    for name, (value, tensors) in () if strict else (*module.unloaded.items(), *module.scales.items()):
        is_scale, weight_saved = name in module.scales, not tensors.isdisjoint(named | saved.trainable.keys())
        if name not in named or (is_scale and weight_saved) or _is_same(saved.module.get(name), value):
            continue
        if is_scale or weight_saved or isinstance(value, torch.Tensor):
            (held if is_scale or weight_saved else passed).append(name)
    if passed and not rank():
        text = "%s: %s has another value in this run: its frozen weights, which were not saved, may differ"
        logger.warning(text, checkpoint.listing.folder, passed[0])
    if not strict:
        what = "has another value in this run, and is not loaded together with its weight"
        mend = "build the model from the frozen weights of the saved run"
    if held:
        more = f" and {len(held) - 1} more entries" if len(held) > 1 else ""
        yield ModelMismatch.fault(f"module entry {held[0]}{more}", what, mend=mend)


def _is_same(record: TensorRecord | None, value: object) -> bool:
    if record is None or not isinstance(value, torch.Tensor) or record.shape != tuple(value.shape):
        return False
    saved = read_tensor(record)
    return saved.dtype is value.dtype and same_bits(saved.reshape(-1), value.detach().cpu().reshape(-1))
