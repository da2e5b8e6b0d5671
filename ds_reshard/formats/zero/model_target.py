"""The model files of a ZeRO checkpoint to be written: whole weights (stages 1 and 2), or placeholders (stage 3).

The entries are those of `_save_checkpoint` (deepspeed/runtime/engine.py, 0.19.8). Everything that is not about the
layout is taken over as it was saved, the user's own entries too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.formats.zero.checkpoint import MODEL, ZeroCheckpoint, is_placeholder
from ds_reshard.formats.zero.layout import chunk_numel, sliced, whole
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.model.codec import ElementType
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import SizeRecord, TensorRecord, new_tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """The model's files at a stage and data-parallel size; `order` lists each flat buffer's parameters."""

    checkpoint: ZeroCheckpoint
    stage: int
    dp: int
    order: Sequence[Mapping[str, Shape]]

    @property
    def files(self) -> int:
        return self.dp if self.stage == 3 else 1

    def placements(self) -> Iterator[Placement]:
        if self.stage == 3:
            for name, (shape, dtype) in self._frozen().items():
                if prod(shape):
                    yield sliced(name, "weight", shape, dtype, self.dp, family=MODEL, buffer=f"frozen/{name}")
            return
        for name, tensor in whole_tensors(self.checkpoint.model).items():
            yield whole(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")

    def sources(self) -> Iterator[tuple[TensorKey, TensorKey]]:
        """What each placed tensor is read from: the weight where it was saved, else the master, which is cast."""
        for placement in self.placements():
            master = TensorKey(name=placement.key.name, kind="fp32")
            yield placement.key, placement.key if placement.key in self.checkpoint.layout else master

    def tree(self, rank: int, saved: ModelStates) -> dict[str, object]:
        """What torch.save is given for one file; `saved` is the file of the saving run that it goes on from."""
        frozen = self._frozen()
        shapes = OrderedDict((name, SizeRecord(shape)) for name, (shape, _) in frozen.items())
        fragments: OrderedDict[str, object] = OrderedDict()
        module = self._placeholders(saved) if self.stage == 3 else self._whole(saved)
        for name, (shape, dtype) in frozen.items():
            fragments[name] = (
                new_tensor(f"frozen/{name}", (chunk_numel(shape, self.dp),), dtype) if self.stage == 3 else module[name]
            )
        keeps_frozen = self.stage >= 2
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
        return {**saved.entries, **changed}

    def _parameters(self) -> set[str]:
        """The names, also those of tied weights, under which the module's entries are parameters."""
        model = self.checkpoint.model
        return {name for name in (*model.module, *model.frozen_shapes) if name not in model.buffer_names}

    def _frozen(self) -> dict[str, tuple[Shape, ElementType]]:
        """Parameters that no optimizer owns, each under its first name; stage 1 does not list them."""
        model = self.checkpoint.model
        trained = {name for group in self.order for name in group}
        found = {}
        parameters = self._parameters()
        for name in model.frozen_shapes or [name for name in model.module if name in parameters]:
            if name not in trained and name not in model.shared and name in model.module:
                found[name] = (model.frozen_shapes.get(name, model.module[name].shape), model.module[name].dtype)
        return found

    def _whole(self, saved: ModelStates) -> OrderedDict[str, object]:
        made, names = whole_tensors(self.checkpoint.model), first_names(self.checkpoint.model)
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


def first_names(model: ModelStates) -> dict[str, str]:
    """The first name of each of the module's tensors: tied ones are saved as one view of one storage."""
    seen: dict[tuple[object, ...], str] = {}
    names = {}
    for name, tensor in model.module.items():
        place = (tensor.storage.path, tensor.storage.key, tensor.element_offset, tensor.shape, tensor.stride)
        first = seen.setdefault(place, name) if tensor.numel else name
        names[name] = model.shared.get(name, first)
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
    module: OrderedDict[str, object] = OrderedDict(entries)
    if isinstance(entries, OrderedDict):
        vars(module).update(vars(entries))
    return module
