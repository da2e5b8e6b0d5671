"""A stage-0 checkpoint's optimizer, which names no parameter: the caller gives the order.

DeepSpeed 0.19.8 saves `optimizer.state_dict()` in the model file: of a torch optimizer (fp32 training), of
`FP16_Optimizer` or of `FP16_UnfusedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.errors import (
    Fault,
    ModelMismatch,
    ParamGroupMismatch,
    ReshardError,
    UnsupportedLayout,
    damaged,
    fail,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.zero.checkpoint import MODEL, ZeroCheckpoint
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key, whole
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.optim_states import RESERVED, own_values
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape


def torch_optimizer(model: ModelStates | None) -> Mapping[str, object]:
    """The state_dict of the torch optimizer, which DeepSpeed's own may wrap; empty where there is none."""
    saved = model.entries.get("optimizer") if model is not None else None
    if not isinstance(saved, dict):
        return {}
    inner = saved.get("optimizer_state_dict", saved)
    return inner if isinstance(inner, dict) else {}


def states(saved: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The state of each parameter (or flat group), in order."""
    found = saved.get("state")
    return [state for state in found.values() if isinstance(state, dict)] if isinstance(found, dict) else []


def param_groups(saved: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = saved.get("param_groups")
    return [group for group in found if isinstance(group, dict)] if isinstance(found, list) else []


def masters(model: ModelStates | None) -> Iterator[TensorRecord]:
    """The fp32 masters that FP16_UnfusedOptimizer and FP16_Optimizer save (see stage0.py); none in fp32 training."""
    saved = model.entries.get("optimizer") if model is not None else None
    groups = saved.get("fp32_groups", saved.get("fp32_groups_flat")) if isinstance(saved, dict) else None
    for group in groups if isinstance(groups, list | tuple) else ():
        tensors = group if isinstance(group, list | tuple) else [group]
        yield from (tensor for tensor in tensors if isinstance(tensor, TensorRecord))


def stage0_kind(checkpoint: ZeroCheckpoint) -> str:
    """Which wrapper wrote a stage-0 optimizer: DeepSpeed loads each into its own kind alone."""
    saved = checkpoint.model.entries.get("optimizer")
    if not isinstance(saved, dict):
        return "none"
    marks = {"fp32_groups_flat": "fused", "fp32_groups": "unfused"}
    return next((kind for mark, kind in marks.items() if mark in saved), "torch")


def same_sizes(model: ModelStates, order: Sequence[Mapping[str, Shape]], listed: Sequence[int]) -> bool:
    """Whether the saved param groups are as large as those of a run, in parameters, or where they are flat in elements.

    `order` has the trainable parameters of each group of the run, and `listed` how many it lists: a torch optimizer
    lists frozen ones too, and has no states of them.
    """
    saved, optimizer = torch_optimizer(model), model.entries.get("optimizer")
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        sizes = [master.numel for master in masters(model)]
        return sizes == [sum(map(prod, shapes.values())) for shapes in order]
    held, numbers = saved.get("state"), [group.get("params") for group in param_groups(saved)]
    lists = [one if isinstance(one, list) else [] for one in numbers]
    trained = [sum(isinstance(held, dict) and number in held for number in one) for one in lists]
    return [*map(len, lists)] == [*listed] or trained == [*map(len, order)]


@dataclass(slots=True, kw_only=True)
class _Found:
    """What has been read so far: tensors by buffer, placements, scalar states, faults; `uncut` as of ZeroCheckpoint."""

    path: str
    archive: TorchArchive
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    uncut: list[Fault] = field(default_factory=list)

    def place(self, name: str, kind: str, shape: Shape, tensor: TensorRecord, *, state: bool = True) -> None:
        if (state and (kind in RESERVED or "/" in kind)) or tensor.shape != shape or not tensor.contiguous:
            self.faults.append(_order_fault(name, kind, shape, tensor.shape))
            return
        buffer = f"{kind}/{name}"
        self.tensors[buffer] = tensor
        self.placements.append(whole(name, kind, shape, tensor.dtype, family=MODEL, buffer=buffer))

    def scalar(self, name: str, kind: str, value: object) -> None:
        if isinstance(value, TensorRecord) and value.numel == 1 and value.contiguous:
            found: Scalar = ScalarTensor(dtype=value.dtype, shape=value.shape, data=self.archive.tensor_bytes(value))
        elif value is None or isinstance(value, int | float | bool | str):
            found = value
        elif isinstance(value, TensorRecord):
            self.faults.append(_order_fault(name, kind, (1,), value.shape))
            return
        else:
            self.uncut.append(_uncut(f"{kind} of {name}", type(value).__name__))
            return
        self.scalars.setdefault(name, {})[kind] = found


def with_order(checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]]) -> Named:
    """The same checkpoint with its optimizer named: `order` lists each param group's trainable parameters.

    Returns it with the extents of the optimizer's tensors by buffer, for the one model file. Shapes are checked one by
    one (ModelMismatch); where masters are saved, the caller compares their cast with the weights.
    """
    model = checkpoint.model
    saved = model.entries.get("optimizer")
    if not isinstance(saved, dict):
        raise fail(model.path, "holds no optimizer state", "an entry 'optimizer'", type(saved).__name__)
    inner = saved.get("optimizer_state_dict", saved)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise fail(model.path, "has an optimizer of an unknown layout", "a torch optimizer state", str(sorted(saved)))
    groups = inner["param_groups"]
    if len(groups) != len(order):
        raise_faults([groups_fault(model.path, len(order), len(groups))], subject="matching a stage-0 optimizer")
    with open_archive(model.path) as archive:
        found = _Found(path=model.path, archive=archive)
        found.uncut += [_uncut(name, what) for name, what in own_values(inner).items()]
        raw = "fp32_groups" not in saved and "fp32_groups_flat" not in saved
        for g, (group, shapes) in enumerate(zip(groups, order, strict=True)):
            if "fp32_groups_flat" in saved:
                _flat(found, saved["fp32_groups_flat"][g], inner["state"].get(group["params"][0], {}), shapes, g)
            else:
                masters = saved["fp32_groups"][g] if not raw else None
                _per_parameter(found, masters, _counted(group, inner["state"]), group["params"], shapes)
    raise_faults(found.faults, subject=f"checkpoint {checkpoint.listing.folder}")
    if raw:
        for name, shape in ((n, s) for shapes in order for n, s in shapes.items()):
            if name in model.module:
                found.place(name, "fp32", shape, model.module[name], state=False)
    hyper = ({str(key): value for key, value in group.items() if key != "params"} for group in groups)
    held = [GroupFacts(members=tuple(shapes), hyperparameters=own) for own, shapes in zip(hyper, order, strict=True)]
    facts = OptimizerFacts(groups=tuple(held), scalars=found.scalars)
    layout = Layout({**checkpoint.layout.placements, **by_key(found.placements)}, checkpoint.layout.shards)
    named = replace(checkpoint, layout=layout, facts=facts, masters_in_module=raw, uncut=tuple(found.uncut))
    return named, {0: {buffer: extent_of(tensor) for buffer, tensor in found.tensors.items()}}


Named = tuple[ZeroCheckpoint, dict[int, Mapping[str, Extent]]]
"""A checkpoint of stage 0 with its optimizer named, and where the tensors of that lie, by model file."""


def alone(checkpoint: ZeroCheckpoint, model: ModelStates) -> ZeroCheckpoint:
    """What one model file has saved of a checkpoint, without a place for any tensor yet."""
    return replace(checkpoint, model=model, layout=Layout({}, {MODEL: 1}))


def all_named(
    parts: Iterable[Callable[[], Named]],
    alike: Callable[[ZeroCheckpoint, ZeroCheckpoint], bool],
    *,
    first: str,
    folder: str,
) -> list[tuple[ZeroCheckpoint, Mapping[str, Extent]]]:
    """What each of `parts` gives, for ranks that have saved an optimizer each.

    Raises what is wrong with any, and where one is not `alike` the first.
    """
    named: list[tuple[ZeroCheckpoint, Mapping[str, Extent]]] = []
    faults: list[Fault] = []
    for name in parts:
        try:
            part, extents = name()
            named.append((part, extents[0]))
        except ReshardError as error:
            faults += faults_of(error)
    faults += [fault for part, _ in named for fault in part.uncut]
    for part, _ in named[1:]:
        if not alike(part, named[0][0]):
            what = f"keeps other states, steps or param groups than the first {first}"
            faults.append(damaged(part.model.path, what, "the same", "others"))
    raise_faults(faults, subject=f"checkpoint {folder}")
    return named


def _counted(
    group: Mapping[str, object], states: Mapping[int, Mapping[str, object]]
) -> Mapping[int, Mapping[str, object]]:
    """The states with the step that each parameter has made.

    DeepSpeed's FusedAdam and FusedLion count the steps of a group at its last parameter alone, and step all of them by
    that number (`step`, ops/adam/fused_adam.py, 0.19.8). Their groups hold a `step`, and torch's do not.
    """
    indices = group["params"]
    assert isinstance(indices, list)
    said = {index: states[index].get("step") for index in indices if index in states}
    steps = [step for step in said.values() if isinstance(step, int)]
    if "step" not in group or len(steps) < len(said) or len(set(steps)) < 2:
        return states
    return {**states, **{index: {**states[index], "step": max(steps)} for index in said}}


def _per_parameter(
    found: _Found,
    masters: Sequence[TensorRecord] | None,
    states: Mapping[int, Mapping[str, object]],
    indices: Sequence[int],
    shapes: Mapping[str, Shape],
) -> None:
    """One tensor a parameter. A torch optimizer lists frozen parameters too, but holds no state of them."""
    trained = [i for i in indices if i in states] if masters is None else list(indices)
    if not trained and masters is None:
        return
    if len(trained) != len(shapes):
        found.faults.append(groups_fault(found.path, len(shapes), len(trained)))
        return
    for j, (index, (name, shape)) in enumerate(zip(trained, shapes.items(), strict=True)):
        if masters is not None:
            found.place(name, "fp32", shape, masters[j], state=False)
        for kind, value in states.get(index, {}).items():
            if isinstance(value, TensorRecord) and value.shape == shape and (shape or kind != "step"):
                found.place(name, str(kind), shape, value)
            else:
                found.scalar(name, str(kind), value)


def _flat(
    found: _Found, master: TensorRecord, state: Mapping[str, object], shapes: Mapping[str, Shape], number: int
) -> None:
    """`FP16_Optimizer`: one flat tensor a group, no padding."""
    buffer = FlatBuffer(shapes=shapes, rule=Rule.REPLICATED, ranks=1, number=number)
    total = buffer.numel
    flat = {"fp32": master}
    for kind, value in state.items():
        if isinstance(value, TensorRecord) and value.shape == (total,):
            flat[str(kind)] = value
        else:
            for name in shapes:
                found.scalar(name, str(kind), value)
    for kind, tensor in flat.items():
        if tensor.shape != (total,) or not tensor.contiguous:
            found.faults.append(_order_fault(f"param group {number}", kind, (total,), tensor.shape))
            continue
        found.tensors[f"{kind}/{number}"] = tensor
        found.placements += (one for one in buffer.placements(MODEL, {kind: tensor.dtype}) if one.numel)


def _order_fault(name: str, kind: str, expected: Shape, found: Shape) -> Fault:
    return ModelMismatch.fault(
        f"parameter {name}",
        f"its saved {kind} has another shape: "
        "a stage-0 optimizer names no parameter, so the order of this run's param groups is used",
        str(list(expected)),
        str(list(found)),
        mend="build the optimizer's param groups in the order of the saved run",
    )


def _uncut(name: str, found: str) -> Fault:
    what = "does not follow the parameters, so it cannot be cut for another layout"
    mend = "resume with the layout that was saved, or pass --no-load-optim, or load_optimizer_states=False"
    return UnsupportedLayout.fault(f"optimizer state {name}", what, "a tensor or one value", found, mend=mend)


def groups_fault(path: str, expected: int, found: int) -> Fault:
    return ParamGroupMismatch.fault(
        path,
        "a stage-0 optimizer names no parameter, and its param groups are not those of this run",
        f"{expected} (this run)",
        f"{found} (saved)",
        mend="build the optimizer with the param groups of the saved run; for weights alone pass "
        "load_optimizer_states=False, load_lr_scheduler_states=False",
    )
