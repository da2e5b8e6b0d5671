"""What a survey of a ZeRO checkpoint found, told in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ds_reshard.containers.plain import Scalars, plain
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates
from ds_reshard.formats.zero.stage0_states import masters, param_groups, states, torch_optimizer
from ds_reshard.formats.zero.survey import Survey
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.inspection import (
    Arrangement,
    FileEntry,
    GroupEntry,
    Inspection,
    ParameterEntry,
    StateEntry,
    Steps,
)
from ds_reshard.model.records import TensorRecord


def describe_survey(found: Survey, *, tag: str, bytes_read: int | None) -> Inspection:
    """What the files tell; where the optimizer's could not be read, what the model file says of them."""
    model, optim = found.model, found.optim
    config = _config(model, optim)
    stage0 = torch_optimizer(model)
    return Inspection(
        format="DeepSpeed universal" if found.listing.universal else "DeepSpeed ZeRO",
        folder=found.listing.folder,
        tag=tag,
        version=model.version if model is not None else optim.version if optim is not None else None,
        stage=_stage(found, config),
        wrapper=_wrapper(found),
        dp=found.dp,
        optimizer=_optimizer_name(config),
        states=tuple(_states_of(found, stage0)),
        groups=tuple(_groups_of(found, stage0)),
        steps=_steps(found, stage0),
        arrangement=_arrangement(found, config),
        parameters=tuple(_parameters(model, _members(found))) if model is not None else (),
        files=tuple(_files(found.listing, found.dp)),
        faults=found.faults,
        bytes_read=bytes_read,
    )


def _config(model: ModelStates | None, optim: OptimStates | None) -> Mapping[str, object]:
    """The saved DeepSpeed config, empty where it was not saved as a dict."""
    said = model.entries.get("ds_config") if model is not None else optim.config if optim is not None else None
    return said if isinstance(said, dict) else {}


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _stage(found: Survey, config: Mapping[str, object]) -> int | None:
    if found.optim is not None:
        return found.optim.stage
    stage = _section(config, "zero_optimization").get("stage")
    if found.universal is not None:
        return stage if found.universal.common.own and isinstance(stage, int) else found.universal.common.stage
    if found.listing.partitioned_model:
        return 3
    if found.model is None:
        return None
    if found.model.param_shapes is None:
        return 0
    return stage if isinstance(stage, int) and stage in (1, 2) else None


def _wrapper(found: Survey) -> str | None:
    if found.listing.universal:
        return "universal"
    if found.optim is not None:
        return found.optim.kind
    if found.listing.partitioned_model:
        return "zero3"
    return "none" if found.model is not None and found.model.param_shapes is None else None


def _optimizer_name(config: Mapping[str, object]) -> str | None:
    """The name of the optimizer that DeepSpeed built; None when the script passed its own."""
    name = _section(config, "optimizer").get("type")
    return name if isinstance(name, str) else None


def _states_of(found: Survey, stage0: Mapping[str, object]) -> Iterator[StateEntry]:
    if found.universal is not None:
        yield from _universal_states(found.universal)
    elif found.optim is not None:
        yield from _states(found.optim)
    else:
        yield from _stage0_states(found.model, stage0)


def _universal_states(universal: UniversalStates) -> Iterator[StateEntry]:
    for kind, dtype in {placement.key.kind: placement.dtype.label for placement in universal.placements}.items():
        yield StateEntry(kind=kind, dtypes=(dtype,), scalar=False)
    single = {kind: value for of_name in universal.facts.scalars.values() for kind, value in of_name.items()}
    for kind, value in single.items():
        yield StateEntry(kind=kind, dtypes=(_label(value),), scalar=True)


def _label(value: object) -> str:
    return value.dtype.label if isinstance(value, ScalarTensor) else type(value).__name__


def _states(optim: OptimStates) -> Iterator[StateEntry]:
    flat: dict[str, set[str]] = {"fp32": {p.fp32.dtype.label for p in optim.partitions}}
    scalars: dict[str, set[str]] = {}
    for partition in optim.partitions:
        for kind, tensor in partition.states.items():
            flat.setdefault(kind, set()).add(tensor.dtype.label)
        for kind, value in partition.scalars.items():
            scalars.setdefault(kind, set()).add(_label(value))
    for kinds, scalar in ((flat, False), (scalars, True)):
        for kind, labels in kinds.items():
            yield StateEntry(kind=kind, dtypes=tuple(sorted(labels)), scalar=scalar)


def _groups_of(found: Survey, stage0: Mapping[str, object]) -> Iterator[GroupEntry]:
    if found.universal is not None and found.model is not None:
        shapes = found.model.trainable
        for number, group in enumerate(found.universal.facts.groups):
            yield GroupEntry(
                number=number,
                members=len(group.members),
                numel=sum(prod(shapes[name]) for name in group.members),
                hyperparameters=_hyperparameters(group.hyperparameters or {}, found.scalars),
            )
    elif found.optim is not None:
        yield from _groups(found.model, found.optim, found.scalars)
    else:
        yield from _stage0_groups(stage0, found.scalars)


def _groups(model: ModelStates | None, optim: OptimStates, scalars: Scalars) -> Iterator[GroupEntry]:
    shapes = _matching_shapes(model, optim)
    for number, buffers in enumerate(optim.members):
        members = [shape for i in buffers for shape in shapes[i].values()] if shapes else None
        yield GroupEntry(
            number=number,
            members=len(members) if members is not None else len(buffers),
            numel=sum(map(prod, members)) if members is not None else None,
            hyperparameters=_hyperparameters(optim.groups[number], scalars) if optim.groups is not None else None,
        )


def _matching_shapes(model: ModelStates | None, optim: OptimStates) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The members of each flat buffer; none where the files contradict each other (a fault says so)."""
    shapes = model.param_shapes if model is not None else None
    return shapes if shapes is not None and len(shapes) == len(optim.partitions) else ()


def _hyperparameters(group: Mapping[str, object], scalars: Scalars) -> dict[str, object]:
    return {str(name): plain(value, scalars) for name, value in group.items()}


def _steps(found: Survey, stage0: Mapping[str, object]) -> Steps:
    entries = found.model.entries if found.model is not None else {}
    return Steps(
        global_steps=_count(entries.get("global_steps")),
        global_samples=_count(entries.get("global_samples")),
        skipped_steps=_count(entries.get("skipped_steps")),
        optimizer_steps=tuple(dict.fromkeys(_optimizer_steps(found, stage0))),
    )


def _optimizer_steps(found: Survey, stage0: Mapping[str, object]) -> Iterator[object]:
    """`step` of the states, of the param groups (DeepSpeed's fused optimizers), and of elastic checkpoints."""
    optim = found.optim
    said: list[object] = [state.get("step") for state in states(stage0)]
    said += [group.get("step") for group in param_groups(stage0)]
    if optim is not None:
        said += [partition.scalars.get("step") for partition in optim.partitions]
        said += [group.get("step") for group in optim.groups or ()]
        said.append(optim.entries.get("base_optimizer_state_step"))
    if found.universal is not None:
        said += [scalars.get("step") for scalars in found.universal.facts.scalars.values()]
        said += [group.get("step") for group in found.universal.common.groups]
    for value in said:
        number = plain(value, found.scalars)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield number


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _arrangement(found: Survey, config: Mapping[str, object]) -> Arrangement:
    zero = _section(config, "zero_optimization")
    optim = found.optim
    device = _section(zero, "offload_optimizer").get("device")
    gaps = [p.alignment is not None and any(p.alignment) for p in optim.partitions] if optim is not None else []
    round_robin = zero.get("round_robin_gradients", False) if config else None
    return Arrangement(
        buffers=len(optim.partitions) if optim is not None else None,
        round_robin=round_robin if isinstance(round_robin, bool) else None,
        alignment_gaps=any(gaps) if optim is not None else None,
        elastic=optim.elastic if optim is not None else None,
        offloaded_to="nvme" if found.listing.nvme else device if isinstance(device, str) else None,
    )


def _parameters(model: ModelStates, group_of: Mapping[str, int]) -> Iterator[ParameterEntry]:
    """Every entry of the module's state, then what is known by shape alone (stage 3, excluded weights)."""
    trainable, frozen = model.trainable, model.frozen_shapes
    owners: dict[tuple[str, int, tuple[int, ...]], str] = {}
    for name in dict.fromkeys((*model.module, *trainable, *frozen)):
        tensor = model.module.get(name)
        tied = model.shared.get(name)
        if tensor is not None and tensor.numel:
            first = owners.setdefault((tensor.storage.key, tensor.element_offset, tensor.shape), name)
            tied = tied or (first if first != name else None)
        owner = tied or name
        if name in model.buffer_names:
            role = "buffer"
        elif owner in trainable:
            role = "trainable"
        else:
            # Stage 1 saves no frozen_param_shapes: what is neither a buffer nor in a param group is frozen.
            untrained = model.param_shapes is not None and tensor is not None and tensor.numel
            role = "frozen" if owner in frozen or untrained else "parameter"
        shape = trainable.get(owner) or frozen.get(owner) or (tensor.shape if tensor is not None else ())
        dtype = tensor.dtype.label if tensor is not None else None
        yield ParameterEntry(name=name, shape=shape, dtype=dtype, role=role, group=group_of.get(owner), tied_to=tied)


def _members(found: Survey) -> dict[str, int]:
    """The param group of each parameter that is trained."""
    if found.universal is not None:
        return {name: g for g, group in enumerate(found.universal.facts.groups) for name in group.members}
    optim = found.optim
    shapes = _matching_shapes(found.model, optim) if optim is not None else ()
    if optim is None or not shapes:
        return {}
    return {name: g for g, buffers in enumerate(optim.members) for i in buffers for name in shapes[i]}


def _files(listing: Listing, dp: int | None) -> Iterator[FileEntry]:
    roles: dict[str, str] = {}
    for role, files in (("model", listing.model), ("optimizer", listing.optim)):
        for rank, name in files.items():
            roles[name] = "unused" if dp is not None and rank >= dp else role
    roles |= {name: "optimizer" for name in listing.nbytes if "/" in name}
    for name in sorted(listing.nbytes):
        yield FileEntry(name=name, nbytes=listing.nbytes[name], role=roles.get(name, "other"))


def _stage0_groups(saved: Mapping[str, object], scalars: Scalars) -> Iterator[GroupEntry]:
    """Sizes only: a stage-0 optimizer names no parameter."""
    for number, group in enumerate(param_groups(saved)):
        members = group.get("params")
        hyper = {name: value for name, value in group.items() if name != "params"}
        yield GroupEntry(
            number=number,
            members=len(members) if isinstance(members, list) else 0,
            numel=None,
            hyperparameters=_hyperparameters(hyper, scalars),
        )


def _stage0_states(model: ModelStates | None, saved: Mapping[str, object]) -> Iterator[StateEntry]:
    kept = sorted({tensor.dtype.label for tensor in masters(model)})
    if kept:
        yield StateEntry(kind="fp32", dtypes=tuple(kept), scalar=False)
    found: dict[str, tuple[set[str], bool]] = {}
    for state in states(saved):
        for kind, value in state.items():
            tensor = isinstance(value, TensorRecord)
            label = value.dtype.label if isinstance(value, TensorRecord) else type(value).__name__
            labels, scalar = found.get(str(kind), (set(), True))
            found[str(kind)] = (labels | {label}, scalar and not (tensor and kind != "step"))
    for kind, (labels, scalar) in found.items():
        yield StateEntry(kind=kind, dtypes=tuple(sorted(labels)), scalar=scalar)
