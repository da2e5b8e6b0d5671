"""A stage-0 checkpoint's optimizer, which names no parameter: the caller gives the order.

DeepSpeed 0.19.8 saves `optimizer.state_dict()` in the model file: of a torch optimizer (fp32 training), of
`FP16_Optimizer` or of `FP16_UnfusedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.errors import (
    AS_SAVED,
    Fault,
    ModelMismatch,
    ParamGroupMismatch,
    UnsupportedLayout,
    collected,
    damaged,
    fail,
    raise_faults,
)
from ds_reshard.formats.zero.checkpoint import MODEL, ZeroCheckpoint
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, Shard, by_key, merge_shards, whole_placement
from ds_reshard.formats.zero.model_states import ModelStates, read_entries
from ds_reshard.formats.zero.modules import expert_of, renumber_expert
from ds_reshard.formats.zero.optim_states import RESERVED, optimizer_values
from ds_reshard.formats.zero.reader import parts_of_ranks
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
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


def same_sizes(model: ModelStates, order: Sequence[Mapping[str, Shape]], trained: Container[str]) -> bool:
    """Whether the saved param groups are as large as those of a run, in parameters, or where they are flat in elements.

    `order` has the parameters that each group of the run lists, `trained` are those that it trains.
    """
    saved, optimizer = torch_optimizer(model), model.entries.get("optimizer")
    own = [_trained(shapes, trained) for shapes in order]
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:
        sizes = [master.numel for master in masters(model)]
        return sizes == [sum(map(prod, shapes.values())) for shapes in own]
    held, numbers = saved.get("state"), [group.get("params") for group in param_groups(saved)]
    lists = [one if isinstance(one, list) else [] for one in numbers]
    with_states = [sum(isinstance(held, dict) and number in held for number in one) for one in lists]
    return [*map(len, lists)] == [*map(len, order)] or with_states == [*map(len, own)]


def other_members(model: ModelStates, order: Sequence[Mapping[str, Shape]], sizes: Sequence[int]) -> Iterator[Fault]:
    """A fault where torch would stop half-way, or take states for parameters of other shapes: it matches by number.

    `order` has the parameters that each group of the run lists, `sizes` how many tensors its optimizer has in each.
    """
    saved = torch_optimizer(model)
    held, numbers = saved.get("state"), [group.get("params") for group in param_groups(saved)]
    lists = [one if isinstance(one, list) else [] for one in numbers]
    if not lists:
        return
    if [*map(len, lists)] != [*sizes]:
        yield groups_fault(model.path, [*sizes], [*map(len, lists)])
        return
    optimizer = model.entries.get("optimizer")
    if isinstance(optimizer, dict) and "fp32_groups_flat" in optimizer:  # one tensor for all of a group
        return
    for members, own in zip(lists, order, strict=False):
        for number, (name, shape) in zip(members, own.items() if len(own) == len(members) else (), strict=True):
            state = held.get(number) if isinstance(held, dict) else None
            for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                tensor = state.get(kind) if isinstance(state, dict) else None
                if isinstance(tensor, TensorRecord) and tensor.shape != shape:
                    yield _order_fault(name, kind, shape, tensor.shape)


def _trained(shapes: Mapping[str, Shape], trained: Container[str]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if name in trained}


def same_places(checkpoint: ZeroCheckpoint, sizes: set[int], groups: Sequence[Mapping[str, object]] | None) -> bool:
    """Whether a run of these expert-parallel sizes and param groups has the optimizers of stage 0 as they were saved.

    DeepSpeed orders groups of several sizes by hashes, which Python draws anew for each process.
    """
    if max(sizes, default=1) != checkpoint.grid.ep:
        return False
    return groups is None or _outline(groups) == _outline(param_groups(torch_optimizer(of_place(checkpoint, 0))))


def _outline(groups: Iterable[Mapping[str, object]]) -> list[tuple[object, int]]:
    """The name that DeepSpeed has given each param group, and how many parameters it has."""
    sized = ((group.get("name"), group.get("params")) for group in groups)
    return [(name, len(params) if isinstance(params, list) else 0) for name, params in sized]


@dataclass(slots=True, kw_only=True)
class _Found:
    """What has been read so far: tensors by buffer, placements, scalar states, faults; `uncut` as of ZeroCheckpoint.

    `raw` says that the weights are the masters. `shapes` has for each state the parameters that have it as a tensor,
    with their shapes and its own.
    """

    path: str
    archive: TorchArchive
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    uncut: list[tuple[str, Fault]] = field(default_factory=list)
    groups: list[GroupFacts] = field(default_factory=list)
    raw: bool = False
    shapes: dict[str, list[tuple[str, Shape, Shape]]] = field(default_factory=dict)

    def place(self, name: str, kind: str, shape: Shape, tensor: TensorRecord, *, state: bool = True) -> None:
        if state and (kind in RESERVED or "/" in kind):
            self.uncut.append((kind, _uncut(f"{kind} of {name}", "a name that is used for something else")))
            return
        if tensor.shape != shape:
            self.faults.append(_order_fault(name, kind, shape, tensor.shape))
            return
        if not tensor.contiguous:
            fault = _strided(f"{kind} of {name}")
            if state:
                self.uncut.append((kind, fault))
            else:
                self.faults.append(fault)
            return
        buffer = f"{kind}/{name}"
        self.tensors[buffer] = tensor
        self.placements.append(whole_placement(name, kind, shape, tensor.dtype, family=MODEL, buffer=buffer))

    def scalar(self, name: str, kind: str, value: object) -> None:
        if isinstance(value, TensorRecord) and value.numel == 1 and value.contiguous:
            found: Scalar = ScalarTensor(dtype=value.dtype, shape=value.shape, data=self.archive.tensor_bytes(value))
        elif value is None or isinstance(value, int | float | bool | str):
            found = value
        else:
            what = f"shape {list(value.shape)}" if isinstance(value, TensorRecord) else type(value).__name__
            self.uncut.append((kind, _uncut(f"{kind} of {name}", what)))
            return
        self.scalars.setdefault(name, {})[kind] = found

    def order_faults(self) -> Iterator[Fault]:
        """Yield faults of states that have the shapes of all their parameters, but not each that of its own."""
        for kind, rows in self.shapes.items():
            if sorted(shape for _, shape, _ in rows) == sorted(saved for *_, saved in rows):
                yield from (_order_fault(name, kind, *pair) for name, *pair in rows if pair[0] != pair[1])


Named = tuple[ZeroCheckpoint, dict[int, Mapping[str, Extent]]]
"""A checkpoint of stage 0 with its optimizer named, and where the tensors of that lie, by model file."""


def with_order(
    checkpoint: ZeroCheckpoint,
    order: Sequence[Mapping[str, Shape]],
    parameters: Mapping[str, bool],
    ep_rank: int = 0,
    first: Mapping[str, int] = {},
) -> Named:
    """The same checkpoint with its optimizer named: `order` lists each param group's parameters.

    `parameters` are those of the run's module in its order, and whether it trains each. A torch optimizer lists frozen
    ones too, and it alone: if `order` has less than were saved, the group is taken to have all of the run's, in the
    order of the module, and none of them to have states.

    Each tensor-parallel rank has an optimizer, and so has each expert-parallel rank. Of the latter `ep_rank` is this
    run's, and `first` has by layer the number of its first expert; what every rank has is then read from the first
    one's file, as all ranks of the run share it. Returns the checkpoint with the extents of the optimizer's tensors by
    buffer, for each model file. Shapes are checked one by one (ModelMismatch), and that several optimizers say the same
    beside their tensors; where masters are saved, the caller compares their cast with the weights.
    """
    trained = {name for name, trains in parameters.items() if trains}
    frozen = parameters.keys() - trained
    groups = [
        _Group(
            shapes, trained & shapes.keys(), [n for n in parameters if n in frozen or (n in trained and n in shapes)]
        )
        for shapes in order
    ]
    columns, named, faults = list(_columns(checkpoint, groups, ep_rank, first)), list[_Found](), list[Fault]()
    for model, own_groups in columns:
        with collected(faults):
            named.append(_named(model, own_groups))
    if len(columns) > 1:
        faults += [fault for found in named for _, fault in found.uncut]
        of, alike = ("expert", _alike) if checkpoint.listing.ep_optim else ("tensor", _by_name)
        for found in named[1:]:
            if alike(found) != alike(named[0]):
                what = f"keeps other states, steps or param groups than the first {of}-parallel rank"
                faults.append(damaged(found.path, what, "the same", "others"))
    raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
    head, own = named[0], named[-1]
    extents: dict[int, Mapping[str, Extent]] = {}
    for rank, found in enumerate(named):
        extents[rank] = {buffer: extent_of(tensor) for buffer, tensor in found.tensors.items()}
    placements: Iterable[Placement] = own.placements
    if checkpoint.tp_models:
        placements = merge_shards(
            parts_of_ranks([map(Shard, found.placements) for found in named], {MODEL: 1}, checkpoint.splits)
        )
    elif len(columns) > 1:
        shared = {one.key: one for one in head.placements if expert_of(one.key.name) is None}
        apart = ((one.key, one._replace(buffer=f"{ep_rank}: {one.buffer}")) for one in own.placements)
        placements = [shared.get(key, one) for key, one in apart]
        extents = {0: {**extents[0], **{f"{ep_rank}: {buffer}": one for buffer, one in extents[1].items()}}}
    layout = Layout({**checkpoint.layout.placements, **by_key(placements)}, checkpoint.layout.shards)
    facts = OptimizerFacts(groups=tuple(own.groups), scalars=own.scalars)
    entries = {**checkpoint.model.entries, "optimizer": columns[0][0].entries["optimizer"]}
    model, uncut = replace(checkpoint.model, entries=entries), tuple(own.uncut)
    made = replace(checkpoint, model=model, layout=layout, facts=facts, masters_in_module=own.raw, unreshardable=uncut)
    return made, extents


class _Group(NamedTuple):
    """The parameters of a param group of a run, in the order of the script, and those that it trains.

    `beside` are these and all frozen ones, in the order of the module.
    """

    shapes: Mapping[str, Shape]
    trained: Set[str]
    beside: Sequence[str]

    @property
    def own(self) -> dict[str, Shape]:
        """The shapes of those that it trains."""
        return _trained(self.shapes, self.trained)


def _columns(
    checkpoint: ZeroCheckpoint, order: Sequence[_Group], ep_rank: int, first: Mapping[str, int]
) -> Iterator[tuple[ModelStates, Sequence[_Group]]]:
    """The model files with optimizers, each with the order under the names, and in the shapes, of its rank."""
    listing = checkpoint.listing
    for model in checkpoint.tp_models:
        lacking = [name for group in order for name in group.own if name not in model.module]
        faults = [damaged(model.path, f"lacks {name}", "a parameter of this run", "nothing") for name in lacking]
        raise_faults(faults, subject=f"checkpoint {listing.folder}")
        held = {name: tensor.shape for name, tensor in model.module.items()}
        yield model, [one._replace(shapes={n: held.get(n, s) for n, s in one.shapes.items()}) for one in order]
    if listing.ep_optim:
        local = {prefix: -number for prefix, number in first.items()}
        new = {name: renumber_expert(name, local) for group in order for name in (*group.shapes, *group.beside)}
        yield (
            of_place(checkpoint, 0),
            [
                _Group({new[n]: s for n, s in shapes.items()}, {new[n] for n in own}, [new[n] for n in beside])
                for shapes, own, beside in order
            ],
        )
        yield of_place(checkpoint, ep_rank), order
    elif not checkpoint.tp_models:
        yield checkpoint.model, order


def of_place(checkpoint: ZeroCheckpoint, ep_rank: int) -> ModelStates:
    """The model file with the optimizer of one expert-parallel rank, as if that were in it."""
    listing, model = checkpoint.listing, checkpoint.model
    name = listing.ep_optim[ep_rank]
    entries = {**model.entries, **listing.read(name, read_entries)}
    return replace(model, path=listing.path(name), entries=entries)


def _by_name(found: _Found) -> str:
    """What an optimizer says beside its tensors."""
    groups = [(group.members, canonical(dict(group.hyperparameters or {}))) for group in found.groups]
    scalars = {name: {key: canonical(value) for key, value in of.items()} for name, of in found.scalars.items()}
    return repr((groups, sorted(scalars.items()), sorted(one.key for one in found.placements)))


def _alike(found: _Found) -> str:
    """The same without names: the hyper-parameters of each group, and what is alike of its members."""
    scalars = [{canonical(dict(found.scalars.get(name, {}))) for name in group.members} for group in found.groups]
    groups = [canonical(dict(group.hyperparameters or {})) for group in found.groups]
    return repr((groups, [*map(sorted, scalars)]))


def _named(model: ModelStates, order: Sequence[_Group]) -> _Found:
    """The optimizer of one model file, by the order of its parameters."""
    saved = model.entries.get("optimizer")
    if not isinstance(saved, dict):
        raise fail(model.path, "holds no optimizer state", "an entry 'optimizer'", type(saved).__name__)
    inner = saved.get("optimizer_state_dict", saved)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        what, mend = "has an optimizer state of a form of its own", f"{AS_SAVED}, or pass load_optimizer_states=False"
        raise UnsupportedLayout.of(
            model.path, what, "state, param_groups", ", ".join(sorted(map(str, inner))), mend=mend
        )
    groups = inner["param_groups"]
    if len(groups) != len(order):
        raise_faults([groups_fault(model.path, len(order), len(groups))], subject="matching a stage-0 optimizer")
    with open_archive(model.path) as archive:
        found = _Found(path=model.path, archive=archive)
        found.uncut += [(name, _uncut(name, what)) for name, what in optimizer_values(inner).items()]
        found.raw = "fp32_groups" not in saved and "fp32_groups_flat" not in saved
        for g, (group, own) in enumerate(zip(groups, order, strict=True)):
            if "fp32_groups_flat" in saved:
                _flat(found, saved["fp32_groups_flat"][g], inner["state"].get(group["params"][0], {}), own.own, g)
                continue
            held, indices = _counted(group, inner["state"]), group["params"]
            if found.raw:
                _raw(found, held, indices, own)
            elif len(indices) != len(own.own):
                found.faults.append(groups_fault(found.path, len(own.own), len(indices)))
            else:
                for index, (name, shape), master in zip(indices, own.own.items(), saved["fp32_groups"][g], strict=True):
                    found.place(name, "fp32", shape, master, state=False)
                    _states(found, name, shape, held.get(index, {}))
    raise_faults([*found.faults, *found.order_faults()], subject=f"checkpoint {model.path}")
    if found.raw:
        for name, shape in ((n, s) for one in order for n, s in one.own.items()):
            if name in model.module:
                found.place(name, "fp32", shape, model.module[name], state=False)
        raise_faults(found.faults, subject=f"checkpoint {model.path}")
    hyper = ({str(key): value for key, value in group.items() if key != "params"} for group in groups)
    found.groups += [
        GroupFacts(members=tuple(one.shapes), hyperparameters=own) for own, one in zip(hyper, order, strict=True)
    ]
    return found


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


def _raw(found: _Found, states: Mapping[int, Mapping[str, object]], indices: Sequence[int], group: _Group) -> None:
    """Place the states of a torch optimizer, which numbers its parameters.

    Which numbers have states does not tell which parameters they are: if parameters are trained in turns, a frozen one
    has states, and a trained one may have none yet.
    """
    own, names = group.own, list[str | None](group.shapes)
    held = [bool(states.get(index)) for index in indices]
    if not any(held):
        return
    if len(indices) != len(names):
        trained, sure = iter(own), [name in own for name in group.beside] == held
        sure = sure and [name for name in group.beside if name in own] == list(own)
        if sum(held) == len(own) and not (sure or len(group.beside) == len(own)):
            found.faults.append(_places_fault(found.path, len(own), len(held)))
            return
        names = [next(trained, None) if one else None for one in held]
    whole = len(indices) == len(group.shapes)
    lacking: list[str] = []  # DeepSpeed gives an empty parameter no gradient
    if whole:
        lacking = [n for n, one in zip(group.shapes, held, strict=True) if n in own and not one and 0 not in own[n]]
    if lacking or (not whole and sum(held) != len(own)):
        fault = _lacking_fault(found.path, lacking) if lacking else groups_fault(found.path, len(own), sum(held))
        found.faults.append(fault)
        return
    for index, name in zip(indices, names, strict=True):
        state = states.get(index) or {}
        if name is not None and name in own:
            _states(found, name, own[name], state)
        elif state:
            found.uncut.append(("", _uncut(f"of {name}, which this run does not train,", ", ".join(state))))


def _states(found: _Found, name: str, shape: Shape, state: Mapping[str, object]) -> None:
    for kind, value in state.items():
        if isinstance(value, TensorRecord):
            found.shapes.setdefault(str(kind), []).append((name, shape, value.shape))
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
    mend = f"{AS_SAVED}, or pass --no-load-optim, or load_optimizer_states=False"
    return UnsupportedLayout.fault(f"optimizer state {name}", what, "a tensor or one value", found, mend=mend)


def _strided(name: str) -> Fault:
    what = "does not lie row-major in the file, so it cannot be cut for another layout"
    mend = f"{AS_SAVED}, or pass --no-load-optim, or load_optimizer_states=False"
    return UnsupportedLayout.fault(name, what, "a contiguous tensor", "another memory format", mend=mend)


def _places_fault(path: str, trained: int, listed: int) -> Fault:
    what = "names no parameter (ZeRO stage 0), and lists frozen ones in an order that no file tells, or with states"
    mend = f"{AS_SAVED}; or build the optimizer of the parameters that are trained alone"
    mend += ", or pass load_optimizer_states=False, load_lr_scheduler_states=False"
    expected, found = f"{trained} parameters, which this run trains", f"{listed}"
    return ParamGroupMismatch.fault(path, what, expected, found, mend=mend)


def _lacking_fault(path: str, names: Sequence[str]) -> Fault:
    what = f"has no optimizer states of {', '.join(names[:8])}, beside others with states"
    mend = f"{AS_SAVED}, or pass load_optimizer_states=False, load_lr_scheduler_states=False"
    return ParamGroupMismatch.fault(path, what, "states of all trained parameters", "none of some", mend=mend)


def groups_fault(path: str, expected: object, found: object) -> Fault:
    return ParamGroupMismatch.fault(
        path,
        "a stage-0 optimizer names no parameter, and its param groups are not those of this run",
        f"{expected} (this run)",
        f"{found} (saved)",
        mend="build the optimizer with the param groups of the saved run; for weights alone pass "
        "load_optimizer_states=False, load_lr_scheduler_states=False",
    )
