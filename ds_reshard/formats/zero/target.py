"""A ZeRO checkpoint that is to be written, as a layout, the source of each tensor, and a tree for each file.

The entries are those of `_save_checkpoint` (deepspeed/runtime/engine.py, 0.19.8) and of the optimizers' `state_dict`
(runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py). Everything that is not about the layout is taken over as
it was saved, the user's own entries too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, GridColumn, ZeroCheckpoint, is_placeholder
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, arranged, slice_numel, sliced, turned_back, whole
from ds_reshard.formats.zero.groups import ep_of
from ds_reshard.formats.zero.model_states import LAGGING, QUANTIZED, ModelStates, section
from ds_reshard.formats.zero.modules import by_number, expert_of, experts_held, of_place
from ds_reshard.formats.zero.optim_states import read_optim_states
from ds_reshard.formats.zero.universal import UniversalStates
from ds_reshard.model.facts import Scalar, ScalarTensor, canonical
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, SizeRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Shape

_SCALER = GlobalName(module="deepspeed.runtime.fp16.loss_scaler", name="LossScaler")
_STAGE = GlobalName(module="deepspeed.runtime.zero.config", name="ZeroStageEnum")
_ADDRESS = GlobalName(module="deepspeed.utils.tensor_fragment", name="fragment_address")
DATA_FIRST = "use_data_before_expert_parallelism"
_KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTarget:
    """The optimizer's files under `kind` ("zero", "bf16" or "zero3") and `stage` at data-parallel size `dp`."""

    checkpoint: ZeroCheckpoint
    kind: str
    stage: int
    dp: int
    buffers: tuple[FlatBuffer, ...]

    def placements(self) -> Iterator[Placement]:
        for buffer in self.buffers:
            for place in range(self.dp // buffer.ranks):
                yield from self.at_place(buffer, place).placements(OPTIM)

    def at_place(self, buffer: FlatBuffer, place: int) -> FlatBuffer:
        """A flat buffer of experts as the ranks at a place among the expert-parallel ones have it."""
        ep = self.dp // buffer.ranks
        held = experts_held(self.checkpoint.model.trainable, ep) if ep > 1 else {}
        first, step = (place * buffer.ranks, 1) if data_first(self.checkpoint) else (place, ep)
        shapes = dict(zip(of_place(buffer.shapes, held, place), buffer.shapes.values(), strict=True))
        return replace(buffer, shapes=shapes, first=first, step=step)

    def share(self, buffer: FlatBuffer, rank: int) -> int:
        """Which share of a flat buffer a rank has, of those of all ranks with the same parameters."""
        return rank % buffer.ranks if data_first(self.checkpoint) else rank // (self.dp // buffer.ranks)

    def used(self, buffer: FlatBuffer, rank: int) -> int:
        """Elements of one rank's share that belong to parameters, or stand between them."""
        return buffer.used_numel(self.share(buffer, rank))

    def tree(self, rank: int) -> dict[str, object]:
        """What torch.save is given for one rank's file."""
        entries = self._zero3() if self.kind == "zero3" else self._flat(rank)
        config, version = self.checkpoint.model.entries.get("ds_config"), self.checkpoint.model.version
        return {"optimizer_state_dict": entries, "ds_config": config, "ds_version": version}

    def data(self) -> dict[str, bytes]:
        """The bytes of the buffers that no logical tensor fills."""
        return {
            _buffer(name, number): value.data
            for number, flat in enumerate(self.buffers)
            for name, value in flat.scalars.items()
            if isinstance(value, ScalarTensor)
        }

    def _base(self) -> dict[str, object]:
        """The wrapped optimizer's own state dict, of padded flat tensors."""
        facts = self.checkpoint.facts
        assert facts is not None
        state: dict[int, dict[str, object]] = {}
        members: dict[int, list[int]] = {}
        for number, flat in enumerate(self.buffers):
            members.setdefault(flat.group, []).append(number)
            held: dict[str, object] = {
                name: _scalar(_buffer(name, number), value) for name, value in flat.scalars.items()
            }
            for kind, dtype in flat.kinds.items():
                if kind != "fp32":
                    held[kind] = new_tensor(f"{kind}/{number}", (flat.partition_numel,), dtype)
            if held:
                state[number] = held
        groups = [
            {**(group.hyperparameters or {}), "params": members.get(g, [])} for g, group in enumerate(facts.groups)
        ]
        return {"state": state, "param_groups": groups}

    def _masters(self, rank: int) -> list[TensorRecord]:
        sizes = [self.used(flat, rank) if self.kind == "zero" else flat.partition_numel for flat in self.buffers]
        return [
            new_tensor(f"fp32/{number}", (size,), flat.kinds["fp32"], requires_grad=True)
            for number, (flat, size) in enumerate(zip(self.buffers, sizes, strict=True))
        ]

    def _flat(self, rank: int) -> dict[str, object]:
        kept = kept_entries(self.checkpoint)
        paddings = [flat.partition_numel - self.used(flat, rank) for flat in self.buffers]
        if self.kind == "bf16":  # the last rank notes all of it (`group_paddings` in bf16_optimizer.py)
            last = [self.share(flat, rank) == flat.ranks - 1 for flat in self.buffers]
            every = [flat.partition_numel * flat.ranks - flat.numel for flat in self.buffers]
            paddings = [numel if of_last else 0 for numel, of_last in zip(every, last, strict=True)]
        entries: dict[str, object] = {
            key: kept[key] for key in _KEPT if key in kept and (self.kind != "bf16" or key == "clip_grad")
        }
        entries["base_optimizer_state"] = self._base()
        entries["single_partition_of_fp32_groups"] = self._masters(rank)
        if self.kind == "zero":
            entries["zero_stage"] = ObjectRecord(callable=_STAGE, args=(self.stage,))
        entries["group_paddings"] = paddings
        if self.kind == "zero":
            entries["param_alignment_paddings"] = [[0] * len(flat.shapes) for flat in self.buffers]
        entries["partition_count"] = [flat.ranks for flat in self.buffers]
        entries["ds_version"] = self.checkpoint.model.version
        entries["param_slice_mappings"] = [self._addresses(flat, rank) for flat in self.buffers]
        return entries

    def _addresses(self, flat: FlatBuffer, rank: int) -> OrderedDict[str, object]:
        """Each parameter's share of the partition, as `fragment_address(numel, start)`."""
        found: OrderedDict[str, object] = OrderedDict()
        for name, cut in flat.cuts():
            piece = cut.piece(self.share(flat, rank), prod(flat.shapes[name]))
            if piece is not None:
                state = {"numel": piece.stop - piece.start, "start": piece.element_offset}
                found[name] = ObjectRecord(callable=_ADDRESS, by_new=True, state=state, has_state=True)
        return found

    def _zero3(self) -> dict[str, object]:
        kept = {**_no_scale(), **kept_entries(self.checkpoint)}
        return {
            "zero_stage": ObjectRecord(callable=_STAGE, args=(3,)),
            **{key: kept[key] for key in _KEPT if key in kept},  # stage 3 passes over clip_grad, and keeps its own
            "partition_count": self.dp,
            "optimizer_state_dict": self._base(),
            "fp32_flat_groups": self._masters(0),
        }


def data_first(checkpoint: ZeroCheckpoint) -> bool:
    """Whether ranks with the same experts are neighbours (`_create_expert_and_data_parallel`, utils/groups.py)."""
    return bool(checkpoint.model.config.get(DATA_FIRST))


def kept_entries(checkpoint: ZeroCheckpoint) -> dict[str, object]:
    """Loss scale and clipping of the saving run; of bf16, where a wrapper saves none, what it then uses: a scale of 1.

    Of another precision DeepSpeed keeps the coming run's where the file has none, and so it does `clip_grad`.
    """
    entries = checkpoint.optimizer_entries
    usual = _no_scale() if checkpoint.model.in_bf16 else {}
    return {**usual, **{key: entries[key] for key in _KEPT if key in entries}}


def _no_scale() -> dict[str, object]:
    """What stage 3 wants where no loss scale was saved (`_rigid_load_state_dict`, runtime/zero/stage3.py, 0.19.8)."""
    scaler = ObjectRecord(callable=_SCALER, by_new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def _scalar(buffer: str, value: Scalar) -> object:
    return new_tensor(buffer, value.shape, value.dtype) if isinstance(value, ScalarTensor) else value


def _buffer(name: str, number: int) -> str:
    return f"scalar/{name}/{number}"


def make_buffers(
    checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]], kind: str, dp: int, *, sub_group_numel: int | None
) -> tuple[list[FlatBuffer], list[Fault]]:
    """The flat buffers of the target, and what keeps a group from being one; `sub_group_numel` for stage 3."""
    faults: list[Fault] = []
    sizes = [ep_of(group) for group in checkpoint.facts.groups] if checkpoint.facts is not None else [1] * len(order)
    own = [dict(islice(shapes.items(), len(shapes) // ep)) for shapes, ep in zip(order, sizes, strict=True)]
    made = arranged(own, RULES[kind], [dp // ep for ep in sizes], sub_group_numel=sub_group_numel)
    for number, buffer in enumerate(made):
        every = order[buffer.group] if sizes[buffer.group] > 1 else buffer.shapes
        kinds = {name: _kinds(checkpoint, name) for name in every}
        scalars = {name: _scalars(checkpoint, name) for name in every}
        first = next(iter(buffer.shapes))
        for name in every:
            if kinds[name] != kinds[first] or canonical(dict(scalars[name])) != canonical(dict(scalars[first])):
                what = "has other optimizer states than its param group's first parameter"
                what += ": a flat buffer keeps one of each"
                mend = "--to universal, which keeps each parameter's own"
                expected = f"the states and steps of {first}"
                faults.append(UnsupportedLayout.fault(name, what, expected, "others", mend=mend))
        made[number] = replace(buffer, kinds=kinds[first], scalars=scalars[first])
    return made, faults


def _kinds(checkpoint: ZeroCheckpoint, name: str) -> dict[str, ElementType]:
    kinds = [kind for kind in checkpoint.layout.kinds(name) if kind != "weight"]
    return {kind: checkpoint.layout[TensorKey(name=name, kind=kind)].dtype for kind in kinds}


def _scalars(checkpoint: ZeroCheckpoint, name: str) -> Mapping[str, Scalar]:
    return checkpoint.facts.scalars.get(name, {}) if checkpoint.facts is not None else {}


@dataclass(frozen=True, kw_only=True)  # not slotted: each file of an expert asks for the whole tensors
class ModelTarget:
    """The model's files at a stage and data-parallel size; `order` lists each flat buffer's parameters."""

    checkpoint: ZeroCheckpoint
    stage: int
    dp: int
    order: Sequence[Mapping[str, Shape]]

    @property
    def files(self) -> int:
        return self.dp if self.stage == 3 else 1

    @cached_property
    def _made(self) -> Mapping[str, TensorRecord]:
        return whole_tensors(self.checkpoint.model)

    def placements(self) -> Iterator[Placement]:
        if self.stage == 3:
            for name, (shape, dtype) in self._frozen().items():
                if prod(shape):
                    yield sliced(name, shape, dtype, self.dp, family=MODEL, buffer=f"frozen/{name}")
            return
        made = self._made
        held = [TensorKey(name, "weight") for name in made]
        if self.layers is not None:
            held = list(dict.fromkeys(key for entries in self.layers.values() for key in entries.values()))
        for key in held:
            tensor = made[key.name]
            placed = whole(key.name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=_weight(key))
            yield placed._replace(key=key)

    def sources(self) -> Iterator[tuple[TensorKey, TensorKey]]:
        """What each placed tensor is read from: the weight where it was saved, else the master, which is cast."""
        for placement in self.placements():
            first = placement.key._replace(copy=0)
            yield placement.key, first if first in self.checkpoint.layout else first._replace(kind="fp32")

    @property
    def layers(self) -> Mapping[str, Mapping[str, TensorKey]] | None:
        """The files of layers, where it is a PipelineModule's: that has ZeRO stage 1 alone (pipe/engine.py)."""
        return self.checkpoint.layers if self.stage == 1 else None

    def tree(self, rank: int, saved: ModelStates) -> dict[str, object]:
        """What torch.save is given for one file; `saved` is the file of the saving run that it goes on from."""
        frozen = self._frozen()
        shapes = OrderedDict((name, SizeRecord(shape)) for name, (shape, _) in frozen.items())
        fragments: OrderedDict[str, object] = OrderedDict()
        module = self._placeholders(saved) if self.stage == 3 else self._whole(saved)
        for name, (shape, dtype) in frozen.items():
            fragments[name] = (
                new_tensor(f"frozen/{name}", (slice_numel(shape, self.dp),), dtype) if self.stage == 3 else module[name]
            )
        # None where the save left frozen parameters out: where DeepSpeed finds some, it wants all (engine.py, 0.19.8).
        keeps_frozen = self.stage >= 2 and bool(frozen)
        changed = {
            "module": module,
            "param_shapes": [
                OrderedDict((name, SizeRecord(shape)) for name, shape in group.items()) for group in self.order
            ],
            "frozen_param_shapes": shapes if keeps_frozen else None,
            "shared_params": dict(self.checkpoint.model.shared) if rank == 0 else {},
            "frozen_param_fragments": fragments if keeps_frozen else None,
            "dp_world_size": self.dp,
        }
        experts: dict[str, set[int]] = {}
        for layer, number, _ in filter(None, map(expert_of, module)):
            experts.setdefault(layer, set()).add(number)
        return {**saved.entries, **({"num_experts": [*map(len, experts.values())]} if experts else {}), **changed}

    def apart(self) -> Mapping[str, Mapping[str, TensorKey]]:
        """The files of layers or experts (`_get_expert_ckpt_name`, engine.py) with their weights by the names there."""
        layers: dict[str, int] = {}
        files: dict[str, dict[str, TensorKey]] = {}
        for name in self.checkpoint.model.module if self.stage < 3 else ():
            if (of := expert_of(name)) is not None:
                layer = layers.setdefault(of[0], len(layers))
                file = f"layer_{layer}_expert_{of[1]}_mp_rank_00_model_states.pt"
                files.setdefault(file, {})[name] = TensorKey(name, "weight")
        return files or self.layers or {}

    def part(self, entries: Mapping[str, TensorKey]) -> dict[str, object]:
        """What torch.save is given for the file of a layer or an expert."""
        made = self._made
        return {
            entry: new_tensor(_weight(key), made[key.name].shape, made[key.name].dtype)
            for entry, key in entries.items()
        }

    def _parameters(self) -> set[str]:
        """The names, also those of tied weights, under which the module's entries are parameters."""
        model = self.checkpoint.model
        return {name for name in (*model.module, *model.frozen_shapes) if name not in model.buffer_names}

    def _frozen(self) -> dict[str, tuple[Shape, ElementType]]:
        """Parameters that no optimizer owns, each under its first name; stage 1 does not list them."""
        model = self.checkpoint.model
        trained = model.trainable
        found = {}
        parameters = self._parameters()
        for name in model.frozen_shapes or [name for name in model.module if name in parameters]:
            if name not in trained and name not in model.shared and name in model.module:
                found[name] = (model.frozen_shapes.get(name, model.module[name].shape), model.module[name].dtype)
        return found

    def _whole(self, saved: ModelStates) -> OrderedDict[str, object]:
        made, names = self._made, first_names(self.checkpoint.model)
        module = _module(saved)
        for name in module:
            if names.get(name) in made:
                module[name] = made[names[name]]
        return module

    def _placeholders(self, saved: ModelStates) -> OrderedDict[str, object]:
        """Parameters as stage 3 saves them, of no element; tied weights share theirs."""
        shared, parameters = self.checkpoint.model.shared, self._parameters()
        module = _module(saved)
        empty: dict[str, TensorRecord] = {}
        for name, value in module.items():
            if name in parameters and isinstance(value, TensorRecord):
                first = shared.get(name, name)
                module[name] = empty.setdefault(first, new_tensor(f"empty/{first}", (0,), value.dtype))
        return module


def _weight(key: TensorKey) -> str:
    """The buffer of a weight, or of a copy of it in another file."""
    return f"module/{key.name}" if not key.copy else f"module/{key.name}/{key.copy}"


def first_names(model: ModelStates) -> dict[str, str]:
    """The first name of each of the module's tensors that was saved: tied ones are saved as one view of one storage."""
    seen: dict[tuple[object, ...], str] = {}
    names = {}
    for name, tensor in model.module.items():
        place = (tensor.storage.path, tensor.storage.key, tensor.element_offset, tensor.shape, tensor.stride)
        first = seen.setdefault(place, name) if tensor.numel else name
        owner = model.shared.get(name, first)
        names[name] = owner if owner in model.module else first
    return names


def whole_tensors(model: ModelStates) -> dict[str, TensorRecord]:
    """Every tensor of a whole module under its first name, in a storage of its own.

    Left out are those that do not lie row-major in the file.
    """
    shapes = {**model.trainable, **model.frozen_shapes}
    made = {}
    for name, first in first_names(model).items():
        tensor = model.module[name]
        kept_in_pieces = name in shapes and is_placeholder(tensor, shapes[name])
        if name == first and (tensor.contiguous or kept_in_pieces):
            shape = shapes[name] if kept_in_pieces else tensor.shape
            made[name] = new_tensor(f"module/{name}", shape, tensor.dtype)
    return made


def _module(saved: ModelStates) -> OrderedDict[str, object]:
    """The module's entries in their order, with the versions that torch keeps beside them."""
    entries = saved.entries["module"]
    assert isinstance(entries, dict)
    kept = saved.module.keys() | saved.objects.keys()
    module: OrderedDict[str, object] = OrderedDict((name, value) for name, value in entries.items() if name in kept)
    if isinstance(entries, OrderedDict):
        vars(module).update(vars(entries))
    return module


UNIVERSAL_INFO = {"universal_checkpoint_version": 0.4}
"""What ds_to_universal sets where a script has not (UNIVERSAL_CHECKPOINT_VERSION_VALUE, checkpoint/constants.py)."""


def group_order(checkpoint: ZeroCheckpoint) -> list[dict[str, Shape]]:
    """The trainable parameters of each param group as the optimizer was given them.

    With `round_robin_gradients` the flat buffers hold them in another order (`_round_robin_reorder`,
    deepspeed/runtime/zero/stage_1_and_2.py), which is undone here.
    """
    assert checkpoint.facts is not None
    shapes = checkpoint.model.trainable
    order = [list(group.members) for group in checkpoint.facts.groups]
    if dealt_in_turn(checkpoint):
        order = [turned_back(members, checkpoint.dp) for members in order]
    return [{name: shapes[name] for name in members} for members in order]


def dealt_in_turn(checkpoint: ZeroCheckpoint) -> bool:
    """Whether flat buffers are in the order of `round_robin_gradients`, which stages 1 and 2 alone know.

    The JSON is not saved where DeepSpeed was given its path. The optimizer files then tell: they list what each rank
    has as its param groups do (`_create_param_mapping`, runtime/zero/stage_1_and_2.py, 0.19.8).
    """
    if checkpoint.kind != "zero" or checkpoint.dp == 1 or not checkpoint.columns:  # of a content, which is in order
        return False
    if isinstance(checkpoint.model.entries.get("ds_config"), dict):
        return section(checkpoint.model.config, "zero_optimization").get("round_robin_gradients") is True
    return any(_listed_otherwise(checkpoint, column) for column in checkpoint.columns)


def _listed_otherwise(checkpoint: ZeroCheckpoint, column: GridColumn) -> bool:
    """Whether the second parameter of a flat buffer is another than its param group's: any such order shows there."""
    shapes = {buffer.number: buffer.shapes for buffer in column.buffers}
    listed: dict[int, list[str]] = {number: [] for number in shapes}
    for name in column.files:
        if all(len(names) >= min(2, len(shapes[number])) for number, names in listed.items()):
            break
        said = checkpoint.listing.read(name, read_optim_states).entries.get("param_slice_mappings")
        for number, names in listed.items():
            mapping = said[number] if isinstance(said, list) and number < len(said) else {}
            own = mapping if isinstance(mapping, dict) else {}
            names += (one for one in map(str, own) if one in shapes[number] and one not in names)
    return any(names[:2] != list(shapes[number])[: len(names[:2])] for number, names in listed.items())


def refuse_source(checkpoint: ZeroCheckpoint, kind: str) -> None:
    """Raise, with every reason, where a checkpoint does not hold what DeepSpeed's files need."""
    faults = [*lacking_of(checkpoint), *quantized_faults(checkpoint.model)]
    raise_faults(faults, subject=f"converting {checkpoint.listing.folder} to {kind}")


def quantized_faults(model: ModelStates) -> Iterator[Fault]:
    mend = "save with exclude_frozen_parameters=True"
    return (UnsupportedLayout.fault(name, QUANTIZED, mend=mend) for name in sorted(model.quantized))


def lacking_of(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """What a checkpoint lacks of an optimizer that another layout or format could go on with."""
    folder = checkpoint.listing.folder
    if checkpoint.facts is None:
        yield UnsupportedLayout.fault(
            folder,
            "holds an optimizer that names no parameter (ZeRO stage 0), or none",
            "a checkpoint of stage 1 to 3, or a universal one",
            f"stage {checkpoint.stage}",
            mend="--to safetensors for the weights; or load it in a run with import ds_reshard.auto, and save there",
        )
        return
    if any(group.hyperparameters is None for group in checkpoint.facts.groups):
        yield UnsupportedLayout.fault(
            folder,
            "holds no param groups (elastic_checkpoint)",
            "learning rates and hyper-parameters, which DeepSpeed reads from a file of this kind",
            "none",
            mend="load it in a run with import ds_reshard.auto, and save there",
        )
    if checkpoint.universal is not None:
        yield from _left_out(checkpoint.universal)
    if checkpoint.model.lagging:
        yield UnsupportedLayout.fault(folder, LAGGING, mend="--to safetensors or torch, for the weights")
    said = isinstance(checkpoint.model.entries.get("ds_config"), dict)
    partitions = checkpoint.optim.partitions if checkpoint.optim is not None else ()
    if checkpoint.kind == "zero" and not said and any(any(partition.alignment or ()) for partition in partitions):
        yield UnsupportedLayout.fault(
            folder,
            "has gaps between parameters (parameter_alignment) and no DeepSpeed JSON, as DeepSpeed was given its path: "
            "nothing tells whether they were dealt out in turn (round_robin_gradients)",
            mend="load it in a run with import ds_reshard.auto, and save there",
        )
    if checkpoint.of_grid:
        yield from _disordered(checkpoint)
    for number, partition in enumerate(partitions):
        for name, why in partition.unfollowed.items():
            yield UnsupportedLayout.fault(
                f"state {name!r} of partition {number}",
                f"is neither one value nor one for each element ({why}): no other layout has a place for it",
                mend="resume with the layout that was saved",
            )


def _disordered(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """Where flat buffers of a grid do not tell the order of the whole model's: DeepSpeed fills them by places alone."""
    folder, mend = checkpoint.listing.folder, "load it in a run with import ds_reshard.auto, and save there"
    if dealt_in_turn(checkpoint):
        what, expected = "has round_robin_gradients on a grid", "parameters in the order of their param groups"
        yield UnsupportedLayout.fault(folder, what, expected, "dealt out", mend=mend)
    held = [list(buffer.shapes) for column in checkpoint.columns for buffer in column.buffers]
    if checkpoint.listing.experts and any(names != by_number(names) for names in held):
        what = "has experts in another order than that of layers and numbers"
        yield UnsupportedLayout.fault(folder, what, "each layer's, one after another", "others", mend=mend)


def _left_out(universal: UniversalStates) -> Iterator[Fault]:
    """States that ds_to_universal has left out, or may have: it carries over those of Adam, and says nothing."""
    yield from universal.incomplete
    for number, group in enumerate(universal.common.groups if universal.common.kept is None else ()):
        if "betas" not in group or group.get("amsgrad") is True or "momentum_decay" in group:
            yield UnsupportedLayout.fault(
                f"{universal.common.path}: param group {number}",
                "is not of Adam or AdamW: of other states ds_to_universal leaves out some, and does not say so",
                mend="convert the ZeRO checkpoint that it was made from",
            )
