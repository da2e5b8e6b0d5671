"""The state of another framework's checkpoint as a ZeRO checkpoint, from which all of DeepSpeed's files are made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.plain import plain
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, ScalarTensor
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import TensorRecord, new_tensor

_VERSION = "0.19.8"  # whose entries `_save_checkpoint` of deepspeed/runtime/engine.py are written here
_WEIGHT, _MASTER = "weight", "fp32"
_RUNNING = ("running_mean", "running_var")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What was saved: weights that are the optimizer's masters, its states, and the values beside them.

    `shared` are the other names of tied weights, `beside` tensors that are no weights, `entries` the script's own
    values and counters by name, `ranks` the number of processes that saved it. `records` are those of untrained weights
    and of `beside` that lie in one piece.
    """

    folder: str
    layout: Layout
    facts: OptimizerFacts | None
    shared: Mapping[str, str]
    beside: Collection[str]
    records: Mapping[str, TensorRecord]
    entries: Mapping[str, object]
    ranks: int

    @property
    def weights(self) -> dict[str, Placement]:
        return {
            key.name: place
            for key, place in self.layout.placements.items()
            if key.kind == _WEIGHT and key.name not in self.beside
        }

    @property
    def trained(self) -> set[str]:
        """The parameters of which the optimizer has states."""
        found = {key.name for key in self.layout.placements if key.kind not in (_WEIGHT, _MASTER)}
        return found | set(self.facts.scalars if self.facts is not None else ())


def adopt(foreign: Foreign) -> ZeroCheckpoint:
    """The checkpoint that DeepSpeed would have, as far as it can be made: `foreign_faults` says what it lacks.

    Its layout names masters apart from weights; both are the foreign checkpoint's weights.
    """
    weights, trained = foreign.weights, foreign.trained
    facts = foreign.facts and replace(foreign.facts, groups=tuple(map(_plain_group, foreign.facts.groups)))
    groups = facts.groups if facts is not None else ()
    shapes = tuple({name: weights[name].shape for name in group.members if name in weights} for group in groups)
    module = OrderedDict(
        (name, new_tensor(f"module/{name}", place.shape, place.dtype)) for name, place in weights.items()
    )
    for name, owner in foreign.shared.items():
        module[name] = module[owner]
    buffers = frozenset(_buffers(weights))
    module.update({name: foreign.records[name] for name in buffers if name in foreign.records})
    frozen = {
        name: place.shape
        for name, place in weights.items()
        if name not in trained and name not in buffers and name not in foreign.shared
    }
    entries = {**_entries(foreign), "module": module, "buffer_names": sorted(buffers)}
    model = ModelStates(
        path=foreign.folder,
        entries=entries,
        module=module,
        objects={},
        buffer_names=buffers,
        param_shapes=shapes if facts is not None else None,
        frozen_shapes=frozen,
        frozen_fragments={},
        shared=dict(foreign.shared),
        dp=foreign.ranks,
        version=_VERSION,
    )
    listing = Listing(folder=foreign.folder, nbytes={})
    return ZeroCheckpoint(listing=listing, model=model, optim=None, layout=_layout(foreign, trained), facts=facts)


def foreign_key(foreign: Foreign, key: TensorKey) -> TensorKey:
    """The foreign tensor that a tensor of the adopted layout is."""
    return key if key in foreign.layout else TensorKey(name=key.name, kind=_WEIGHT)


def foreign_faults(foreign: Foreign) -> Iterator[Fault]:
    """What keeps an optimizer from being DeepSpeed's: no param groups, members without states, other types."""
    groups = foreign.facts.groups if foreign.facts is not None else ()
    members = [name for group in groups for name in group.members]
    if foreign.facts is not None and not groups:
        yield _fault(foreign.folder, "has no param groups", "save the whole state dict of the optimizer")
    for name in sorted(set(members) - foreign.trained):
        what = "is in a param group, and has no state: whether the coming run trains it, no file says"
        yield _fault(name, what, "build the optimizer of the trainable parameters alone, step once, and save")
    for name in sorted(foreign.trained - set(members)) if groups else ():
        yield _fault(name, "has states, and is in no param group", "save model and optimizer together")
    weights = foreign.weights
    for name in sorted({*foreign.beside, *_buffers(weights)} - foreign.records.keys()):
        yield _fault(
            name,
            "is a buffer, or a tensor beside the model, that is saved in several pieces",
            "save it whole: not as a DTensor that is sharded",
        )
    for key, place in foreign.layout.placements.items():
        if key.name not in foreign.trained:
            continue
        weight = weights.get(key.name)
        if weight is None or place.shape != weight.shape:
            yield _fault(
                str(key),
                "is not of the shape of a weight that was saved",
                "save model and optimizer together; other shapes have no place in ZeRO",
            )
        elif place.dtype is not ElementType.FLOAT32:
            what = f"is {place.dtype.label}, where DeepSpeed keeps fp32 masters and states"
            yield _fault(
                str(key),
                what,
                "train on fp32 parameters (MixedPrecisionPolicy(param_dtype=...)), or load it "
                "through ds_reshard.dcp.Reader",
            )


def _fault(where: str, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=mend)


def _plain_group(group: GroupFacts) -> GroupFacts:
    """Hyper-parameters that were kept as small tensors are numbers to DeepSpeed."""
    values = {
        name: plain(value, {}) if isinstance(value, ScalarTensor) else value
        for name, value in (group.hyperparameters or {}).items()
    }
    return GroupFacts(members=group.members, hyperparameters=values)


def _buffers(weights: Mapping[str, Placement]) -> Iterator[str]:
    """Entries that no optimizer could train, and the statistics of torch's normalisation layers beside them."""
    for name, place in weights.items():
        layer, _, leaf = name.rpartition(".")
        counted = f"{layer}.num_batches_tracked" in weights
        if not place.dtype.label.startswith(("float", "bfloat", "complex")) or (counted and leaf in _RUNNING):
            yield name


def _entries(foreign: Foreign) -> dict[str, object]:
    """The entries of a model file beside the module; the counters that are not told follow from the steps.

    Without `global_samples` DeepSpeed counts them from the steps itself (`_load_checkpoint`, engine.py).
    """
    scalars = foreign.facts.scalars if foreign.facts is not None else {}
    steps = [plain(states["step"], {}) for states in scalars.values() if "step" in states]
    most = max((step for step in steps if isinstance(step, int | float)), default=0)
    usual: dict[str, object] = {
        "optimizer": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": int(most),
    }
    layout = {"dp_world_size": foreign.ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": _VERSION}
    return {**usual, **foreign.entries, **layout}


def _layout(foreign: Foreign, trained: set[str]) -> Layout:
    """The foreign layout, and a master for each trained weight, in a family of its own: it is the same bytes."""
    placements = dict(foreign.layout.placements)
    shards = dict(foreign.layout.shards)
    for name, place in foreign.weights.items():
        if name in trained:
            family = f"masters/{place.family}"
            shards[family] = shards[place.family]
            key = TensorKey(name=name, kind=_MASTER)
            tiles = tuple(tile._replace(key=key, family=family) for tile in place.tiles)
            placements[key] = place._replace(key=key, family=family, tiles=tiles)
    return Layout(placements, shards)
