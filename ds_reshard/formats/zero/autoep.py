"""The experts of AutoEP, which DeepSpeed itself distributes over the ranks of expert-parallel groups.

All experts of a layer are one parameter each of w1, w2 and w3, cut along its first dimension. The model file says which
experts each expert-parallel rank has, in order (`ds_autoep_layers`, runtime/engine.py; `expert_placement`,
checkpoint/autoep_affine.py, 0.19.8): in any order, in other numbers on each rank, and an expert may be on several,
whose copies must be equal. DeepSpeed's engine distributes them in order, the same number to each rank. Each expert's
weights are in one file, whichever ranks have a copy; at stage 3 there are none, and optimizer files hold masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout, damaged, fail
from ds_reshard.formats.zero.checkpoint import AUTOEP
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_entries
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import PARTITION_GROUPS, OptimStates
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.facts import describe
from ds_reshard.model.layout import Placement, TensorKey, tiled_placement
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Part, Shape

EXPERT_FILES = "experts of layer "
"""The prefix of the family of a layer's expert files: shard i is the file of expert i."""
_PARAMETERS = ("w1", "w2", "w3")


class ExpertLayer(NamedTuple):
    """A layer, and the experts of each expert-parallel rank in the order in which the rank's parameters hold them."""

    number: int
    prefix: str
    num_experts: int
    by_rank: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}.{part}" for part in _PARAMETERS]

    @property
    def in_order(self) -> bool:
        return self.by_rank == _even_split(self.num_experts, len(self.by_rank))


class ExpertParameter(NamedTuple):
    """A parameter that holds all experts of a layer along its first dimension."""

    shape: Shape
    layer: ExpertLayer
    dtype: ElementType

    def weights(self, name: str) -> Placement:
        """Return where the weights of all experts lie: shard i of the layer's family is the file of expert i."""
        tiles = [(expert, 0, Box.along(self.shape, 0, expert, 1)) for expert in range(self.layer.num_experts)]
        key, family = TensorKey(name, WEIGHT), f"{EXPERT_FILES}{self.layer.number}"
        return tiled_placement(key, self.shape, self.dtype, tiles, family=family, buffer=name)

    def shard(self, rank: int) -> Shape:
        return (len(self.layer.by_rank[rank]), *self.shape[1:])

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Return the parts in a rank's shard: one per run of experts, or one per expert if ranks share experts."""
        ids, layer = list(enumerate(self.layer.by_rank[rank])), self.layer
        unique = sum(map(len, layer.by_rank)) == layer.num_experts
        return tuple(
            part for run in ([ids] if unique else [[one] for one in ids]) for part in expert_parts(self.shape, run)
        )


def expert_parts(shape: Shape, experts: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """Return the parts for (position in the shard, expert) pairs: one part for each run of consecutive pairs."""
    runs: list[tuple[int, int, int]] = []
    for position, expert in experts:
        first_position, first, count = runs[-1] if runs else (-1, -1, 0)
        if count and (position, expert) == (first_position + count, first + count):
            runs[-1] = (first_position, first, count + 1)
        else:
            runs.append((position, expert, 1))
    numel = prod(shape[1:])
    return tuple(Part(Box.along(shape, 0, first, count), position * numel) for position, first, count in runs)


def _even_split(total: int, ep: int) -> tuple[tuple[int, ...], ...]:
    per_rank = total // ep
    return tuple(tuple(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(ep))


def autoep_layers(model: ModelStates, faults: list[Fault]) -> list[ExpertLayer]:
    """Return the layers of a model file, with the experts of each rank."""
    entry, layers = model.entries.get(AUTOEP), list[ExpertLayer]()
    for number, layer in enumerate(entry if isinstance(entry, list) else [entry]):
        prefix = layer.get("expert_key_prefix") if isinstance(layer, dict) else None
        if not isinstance(layer, dict) or not isinstance(prefix, str):
            raise fail(model.path, f"entry {AUTOEP!r} is malformed", "a layer's experts", describe(layer))
        total, ep = (positive(model.path, key, layer.get(key)) for key in ("num_experts", "ep_size"))
        placement = layer.get("expert_placement")
        if placement is None:  # saved by a release without this entry
            if total % ep:
                what = "has layers whose experts the ranks do not share evenly"
                faults.append(damaged(model.path, what, "one size that divides them", f"{total} over {ep}"))
            ranks = _even_split(total, ep)
        else:
            ranks, placement_faults = _experts_by_rank(f"{model.path}: {prefix}", placement, total, ep)
            faults += placement_faults
        layers.append(ExpertLayer(number, prefix, total, ranks))
    if len({len(parsed.by_rank) for parsed in layers}) > 1:
        sizes = ", ".join(f"{parsed.num_experts} over {len(parsed.by_rank)}" for parsed in layers)
        faults.append(damaged(model.path, "has layers whose experts are on different numbers of ranks", "one", sizes))
    return layers


def _experts_by_rank(where: str, saved: object, total: int, ep: int) -> tuple[tuple[tuple[int, ...], ...], list[Fault]]:
    """Return the experts of each rank by a placement descriptor, and its faults."""
    even = _even_split(total, ep)
    version = saved.get("version") if isinstance(saved, dict) else None
    if version != 1:
        what, mend = "has an expert placement of an unknown version", "load it with the sizes it was saved with"
        return even, [UnsupportedLayout.fault(where, what, "version 1", describe(version), mend=mend)]
    assert isinstance(saved, dict)
    ranks = saved.get("ranks")
    experts_of = {entry.get("rank"): entry.get("experts") for entry in ranks or () if isinstance(entry, dict)}
    text = "; ".join(f"{rank}: {experts}" for rank, experts in experts_of.items())[:200]
    expert_lists = [experts_of.get(rank) for rank in range(ep)]
    valid = [experts for experts in expert_lists if isinstance(experts, list)]
    if not isinstance(ranks, list) or len(ranks) != ep or len(valid) != ep:
        return even, [damaged(where, "has an expert placement without some ranks", f"lists of {ep} ranks", text)]
    if any(type(expert) is not int or not 0 <= expert < total for experts in valid for expert in experts) or any(
        len(set(experts)) != len(experts) for experts in valid
    ):
        return even, [damaged(where, "places experts that do not exist, or twice on one rank", f"{total}", text)]
    if {expert for experts in valid for expert in experts} != set(range(total)):
        return even, [damaged(where, "has an expert placement without some experts", f"each of {total}", text)]
    return tuple(map(tuple, valid)), []


def expert_parameters(
    listing: Listing, model: ModelStates, layers: Sequence[ExpertLayer], faults: list[Fault]
) -> dict[str, ExpertParameter]:
    """Return each parameter of experts, with the shape and type in the file of its layer's first expert."""
    params = dict[str, ExpertParameter]()
    types = [tensor.dtype for tensor in model.module.values()]
    for layer in layers:
        files = expert_file(listing, layer.number, 0) if not listing.partitioned_model else {}
        for name in layer.names:
            weight, shape = files.get(name), model.trainable.get(name)
            expert_shape = weight.shape if weight is not None else shape[1:] if shape is not None else None
            local_shape = (len(layer.by_rank[0]), *(expert_shape or ()))
            if expert_shape is None or shape not in (None, local_shape):
                expected, found = str(list(local_shape)), str(shape and list(shape))
                faults.append(damaged(model.path, f"has {name} in another shape than its experts", expected, found))
                continue
            dtype = weight.dtype if weight is not None else types[0]
            params[name] = ExpertParameter((layer.num_experts, *expert_shape), layer, dtype)
    return params


def expert_file(listing: Listing, layer: int, expert: int) -> dict[str, TensorRecord]:
    """Return the weights of one expert, by the names of the parameters that hold them."""
    name = listing.experts[layer, expert]
    weights: dict[str, TensorRecord] = {}
    for key, value in listing.read(name, read_entries).items():
        parameter, _, number = key.rpartition(".")
        if number != str(expert) or not isinstance(value, TensorRecord) or not value.contiguous:
            expected = f"weights of expert {expert}"
            raise fail(listing.path(name), "does not hold this expert's weights", expected, f"{key!r}")
        weights[parameter] = value
    return weights


def partition_count_faults(
    first: OptimStates, groups: Sequence[Iterable[str]], autoep: Mapping[str, ExpertParameter], dp: int, ep: int
) -> Iterator[Fault]:
    """Yield a fault for each flat buffer of experts and others, or shared by other ranks than its parameters."""
    for number, group in enumerate(groups):
        is_expert = {name in autoep for name in group}
        expected, found = dp // ep if True in is_expert else dp, first.counts[number]
        if len(is_expert) > 1 or found != expected:
            what = f"flat buffer {number} is shared by another number of ranks than its parameters"
            yield damaged(first.path, what, f"{expected}", f"{found}" if len(is_expert) < 2 else "experts and others")


def partition_rank_faults(head: OptimStates, numbers: Iterable[int], ranks: list[int]) -> Iterator[Fault]:
    """Yield a fault for each buffer whose stage-3 file says that other ranks share its experts."""
    partition_groups = head.entries.get(PARTITION_GROUPS)
    if not isinstance(partition_groups, list):
        return
    for number in numbers:
        saved_ranks = partition_groups[number].get("partition_ranks")
        if saved_ranks != ranks:
            what = f"the experts of flat buffer {number} are shared by other ranks than their expert-parallel group"
            yield damaged(head.path, what, str(ranks), describe(saved_ranks))
