"""The optimizer files of a ZeRO checkpoint that is to be written: layout, and the tree of each rank's file.

The keys, paddings and classes are those that DeepSpeed 0.19.8 saves: `DeepSpeedZeroOptimizer.state_dict`
(runtime/zero/stage_1_and_2.py), `BF16_Optimizer.state_dict` (runtime/bf16_optimizer.py), `_rigid_state_dict` and
`_create_fp16_sub_groups` (runtime/zero/stage3.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.layout import (
    chunk_numel,
    flat_group,
    flat_numel,
    flat_offsets,
    partition_numel,
    sub_group,
    sub_group_numel,
)
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import Scalar, ScalarTensor, canonical
from ds_reshard.model.layout import Cut, Placement, TensorKey
from ds_reshard.model.records import GlobalName, ObjectRecord, TensorRecord, new_tensor

Shape = tuple[int, ...]
_SCALER = GlobalName(module="deepspeed.runtime.fp16.loss_scaler", name="LossScaler")
_STAGE = GlobalName(module="deepspeed.runtime.zero.config", name="ZeroStageEnum")
_ADDRESS = GlobalName(module="deepspeed.utils.tensor_fragment", name="fragment_address")
_KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


@dataclass(frozen=True, kw_only=True)
class Flat:
    """One flat buffer of the target: a param group (stages 1, 2 and BF16) or a sub-group (stage 3).

    `kinds` are the types of its masters and states, `scalars` what the optimizer keeps once for all of it.
    """

    group: int
    shapes: Mapping[str, Shape]
    kinds: Mapping[str, ElementType]
    scalars: Mapping[str, Scalar]

    @cached_property
    def offsets(self) -> dict[str, int]:
        return flat_offsets(self.shapes, None)[0]

    @cached_property
    def numel(self) -> int:
        """Elements of all of it, without padding."""
        return flat_numel(self.shapes, None)

    def padded(self, dp: int, *, zero3: bool) -> int:
        """Elements of each rank's share."""
        return sub_group_numel(self.shapes, dp) if zero3 else partition_numel(self.numel, dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTarget:
    """The optimizer's files under `kind` ("zero", "bf16" or "zero3") and `stage` at data-parallel size `dp`."""

    checkpoint: ZeroCheckpoint
    kind: str
    stage: int
    dp: int
    flats: tuple[Flat, ...]

    def placements(self) -> Iterator[Placement]:
        for number, flat in enumerate(self.flats):
            if self.kind == "zero3":
                yield from sub_group(flat.shapes, self.dp, flat.kinds, number=number, family=OPTIM)
            else:
                yield from flat_group(flat.shapes, None, self.dp, flat.kinds, number=number, family=OPTIM)

    def used(self, number: int, rank: int) -> int:
        """Elements of one rank's share that belong to parameters, or stand between them."""
        flat = self.flats[number]
        padded = flat.padded(self.dp, zero3=self.kind == "zero3")
        if self.kind == "zero3":
            return padded
        return min(padded, max(0, flat.numel - rank * padded))

    def tree(self, rank: int) -> dict[str, object]:
        """What torch.save is given for one rank's file."""
        entries = self._zero3() if self.kind == "zero3" else self._flat(rank)
        config, version = self.checkpoint.model.entries.get("ds_config"), self.checkpoint.model.version
        return {"optimizer_state_dict": entries, "ds_config": config, "ds_version": version}

    def data(self) -> dict[str, bytes]:
        """The bytes of the buffers that no logical tensor fills."""
        return {
            _buffer(name, number): value.data
            for number, flat in enumerate(self.flats)
            for name, value in flat.scalars.items()
            if isinstance(value, ScalarTensor)
        }

    def _base(self) -> dict[str, object]:
        """The wrapped optimizer's own state dict, of padded flat tensors."""
        facts = self.checkpoint.facts
        assert facts is not None
        state: dict[int, dict[str, object]] = {}
        members: dict[int, list[int]] = {}
        for number, flat in enumerate(self.flats):
            padded = flat.padded(self.dp, zero3=self.kind == "zero3")
            members.setdefault(flat.group, []).append(number)
            held: dict[str, object] = {
                name: _scalar(_buffer(name, number), value) for name, value in flat.scalars.items()
            }
            for kind, dtype in flat.kinds.items():
                if kind != "fp32":
                    held[kind] = new_tensor(f"{kind}/{number}", (padded,), dtype)
            if held:
                state[number] = held
        groups = [
            {**(group.hyperparameters or {}), "params": members.get(g, [])} for g, group in enumerate(facts.groups)
        ]
        return {"state": state, "param_groups": groups}

    def _masters(self, rank: int) -> list[TensorRecord]:
        sizes = [
            self.used(number, rank) if self.kind == "zero" else flat.padded(self.dp, zero3=self.kind == "zero3")
            for number, flat in enumerate(self.flats)
        ]
        return [
            new_tensor(f"fp32/{number}", (size,), self.flats[number].kinds["fp32"], requires_grad=True)
            for number, size in enumerate(sizes)
        ]

    def _flat(self, rank: int) -> dict[str, object]:
        kept = kept_entries(self.checkpoint)
        padded = [flat.padded(self.dp, zero3=False) for flat in self.flats]
        paddings = [size - self.used(number, rank) for number, size in enumerate(padded)]
        if self.kind == "bf16":  # the last rank notes all of it (`group_paddings` in bf16_optimizer.py)
            whole = [size * self.dp - flat.numel for size, flat in zip(padded, self.flats, strict=True)]
            paddings = whole if rank == self.dp - 1 else [0] * len(whole)
        entries: dict[str, object] = {
            key: kept[key] for key in _KEPT if key in kept and (self.kind != "bf16" or key == "clip_grad")
        }
        entries["base_optimizer_state"] = self._base()
        entries["single_partition_of_fp32_groups"] = self._masters(rank)
        if self.kind == "zero":
            entries["zero_stage"] = ObjectRecord(callable=_STAGE, args=(self.stage,))
        entries["group_paddings"] = paddings
        if self.kind == "zero":
            entries["param_alignment_paddings"] = [[0] * len(flat.shapes) for flat in self.flats]
        entries["partition_count"] = [self.dp] * len(self.flats)
        entries["ds_version"] = self.checkpoint.model.version
        entries["param_slice_mappings"] = [self._addresses(flat, rank) for flat in self.flats]
        return entries

    def _addresses(self, flat: Flat, rank: int) -> OrderedDict[str, object]:
        """Each parameter's share of the partition, as `fragment_address(numel, start)`."""
        chunk = max(1, flat.padded(self.dp, zero3=False))
        found: OrderedDict[str, object] = OrderedDict()
        for name, shape in flat.shapes.items():
            piece = Cut(chunk=chunk, phase=flat.offsets[name]).piece(rank, prod(shape))
            if piece is not None:
                state = {"numel": piece.stop - piece.start, "start": piece.element_offset}
                found[name] = ObjectRecord(callable=_ADDRESS, by_new=True, state=state, has_state=True)
        return found

    def _zero3(self) -> dict[str, object]:
        kept = kept_entries(self.checkpoint)
        return {
            "zero_stage": ObjectRecord(callable=_STAGE, args=(3,)),
            **{key: kept[key] for key in _KEPT if key in kept},  # stage 3 passes over clip_grad, and keeps its own
            "partition_count": self.dp,
            "optimizer_state_dict": self._base(),
            "fp32_flat_groups": self._masters(0),
        }


def kept_entries(checkpoint: ZeroCheckpoint) -> dict[str, object]:
    """Loss scale and clipping of the saving run; where a wrapper saves none, what it then uses: a scale of 1.

    Without `clip_grad` in the file DeepSpeed keeps the coming run's.
    """
    entries = checkpoint.optimizer_entries
    scaler = ObjectRecord(callable=_SCALER, by_new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    usual: dict[str, object] = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
    return {**usual, **{key: entries[key] for key in _KEPT if key in entries}}


def _scalar(buffer: str, value: Scalar) -> object:
    return new_tensor(buffer, value.shape, value.dtype) if isinstance(value, ScalarTensor) else value


def _buffer(name: str, number: int) -> str:
    return f"scalar/{name}/{number}"


def make_flats(
    checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]], dp: int, *, sub_group_numel_most: int | None
) -> tuple[list[Flat], list[Fault]]:
    """The flat buffers of the target, and what keeps a group from being one; `sub_group_numel_most` for stage 3."""
    flats: list[Flat] = []
    faults: list[Fault] = []
    for g, shapes in enumerate(order):
        if not shapes:
            continue
        for part in _sub_groups(shapes, dp, sub_group_numel_most):
            kinds = {name: _kinds(checkpoint, name) for name in part}
            scalars = {name: _scalars(checkpoint, name) for name in part}
            first = next(iter(part))
            for name in part:
                if kinds[name] != kinds[first] or canonical(dict(scalars[name])) != canonical(dict(scalars[first])):
                    faults.append(_uneven(name, first))
            flats.append(Flat(group=g, shapes=part, kinds=kinds[first], scalars=scalars[first]))
    return flats, faults


def _sub_groups(shapes: Mapping[str, Shape], dp: int, most: int | None) -> Iterator[dict[str, Shape]]:
    """Stage 3 ends a sub-group after the parameter with which its share reaches `sub_group_size`."""
    if most is None or most >= sub_group_numel(shapes, dp):
        yield dict(shapes)
        return
    part: dict[str, Shape] = {}
    numel = 0
    for name, shape in shapes.items():
        part[name] = shape
        numel += chunk_numel(shape, dp)
        if numel >= most:
            yield part
            part, numel = {}, 0
    if part:
        yield part


def _kinds(checkpoint: ZeroCheckpoint, name: str) -> dict[str, ElementType]:
    kinds = [kind for kind in checkpoint.layout.kinds(name) if kind != "weight"]
    return {kind: checkpoint.layout[TensorKey(name=name, kind=kind)].dtype for kind in kinds}


def _scalars(checkpoint: ZeroCheckpoint, name: str) -> Mapping[str, Scalar]:
    return checkpoint.facts.scalars.get(name, {}) if checkpoint.facts is not None else {}


def _uneven(name: str, first: str) -> Fault:
    return UnsupportedLayout.fault(
        name,
        "has other optimizer states than its param group's first parameter: a flat buffer keeps one of each",
        f"the states and steps of {first}",
        "others",
        mend="--to universal, which keeps each parameter's own",
    )
