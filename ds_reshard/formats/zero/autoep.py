"""The experts of AutoEP, which DeepSpeed deals out to the ranks of expert-parallel groups itself.

Those of a layer are one parameter each of w1, w2 and w3, cut along its first dimension. The model file says which
experts each expert-parallel rank has, in order (`ds_autoep_layers`, runtime/engine.py; `expert_placement`,
checkpoint/autoep_affine.py, 0.19.8): any order, other numbers on each rank, and an expert on several, whose copies must
be equal. DeepSpeed's engine deals them out in order, the same number to each. Each expert's weights have a file of
their own, one whoever has a copy; at stage 3 there are none, and optimizer files hold masters.
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
"""Begins the family of the files of a layer's experts: a shard each, by its number among all."""
_PARAMETERS = ("w1", "w2", "w3")


class Layer(NamedTuple):
    """A layer, and the experts of each expert-parallel rank, in the order in which its parameters have them."""

    number: int
    prefix: str
    total: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}.{part}" for part in _PARAMETERS]

    @property
    def in_order(self) -> bool:
        return self.ranks == _in_order(self.total, len(self.ranks))


class Dealt(NamedTuple):
    """A parameter of all experts of a layer."""

    shape: Shape
    layer: Layer

    def shard(self, rank: int) -> Shape:
        return (len(self.layer.ranks[rank]), *self.shape[1:])

    def parts(self, rank: int) -> tuple[Part, ...]:
        """The parts of a rank's shard: where several ranks have an expert, each expert is one."""
        own, once = list(enumerate(self.layer.ranks[rank])), sum(map(len, self.layer.ranks)) == self.layer.total
        return tuple(
            part for run in ([own] if once else [[one] for one in own]) for part in expert_parts(self.shape, run)
        )


def expert_parts(shape: Shape, experts: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """Experts of a parameter, each given behind its place in a shard: a part for each run of them."""
    runs: list[tuple[int, int, int]] = []
    for at, expert in experts:
        first_at, first, count = runs[-1] if runs else (-1, -1, 0)
        if count and (at, expert) == (first_at + count, first + count):
            runs[-1] = (first_at, first, count + 1)
        else:
            runs.append((at, expert, 1))
    numel = prod(shape[1:])
    return tuple(Part(Box.along(shape, 0, first, count), at * numel) for at, first, count in runs)


def _in_order(total: int, ep: int) -> tuple[tuple[int, ...], ...]:
    own = total // ep
    return tuple(tuple(range(rank * own, (rank + 1) * own)) for rank in range(ep))


def autoep_layers(model: ModelStates, faults: list[Fault]) -> list[Layer]:
    """The layers of a model file, and which rank has which of their experts."""
    said, found = model.entries.get(AUTOEP), list[Layer]()
    for number, one in enumerate(said if isinstance(said, list) else [said]):
        prefix = one.get("expert_key_prefix") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(prefix, str):
            raise fail(model.path, f"entry {AUTOEP!r} is malformed", "a layer's experts", describe(one))
        total, ep = (positive(model.path, key, one.get(key)) for key in ("num_experts", "ep_size"))
        placement = one.get("expert_placement")
        if placement is None:  # of a release that does not say it
            if total % ep:
                what = "deals out experts of layers unevenly"
                faults.append(damaged(model.path, what, "one size that divides them", f"{total} over {ep}"))
            ranks = _in_order(total, ep)
        else:
            ranks, wrong = _placed(f"{model.path}: {prefix}", placement, total, ep)
            faults += wrong
        found.append(Layer(number, prefix, total, ranks))
    if len({len(layer.ranks) for layer in found}) > 1:
        sizes = ", ".join(f"{layer.total} over {len(layer.ranks)}" for layer in found)
        faults.append(damaged(model.path, "deals out experts of layers to other numbers of ranks", "one", sizes))
    return found


def _placed(where: str, said: object, total: int, ep: int) -> tuple[tuple[tuple[int, ...], ...], list[Fault]]:
    """The experts of each rank by a placement descriptor, and what is wrong with it."""
    even = _in_order(total, ep)
    version = said.get("version") if isinstance(said, dict) else None
    if version != 1:
        what, mend = "places its experts as another DeepSpeed describes it", "load it with the sizes it was saved with"
        return even, [UnsupportedLayout.fault(where, what, "version 1", describe(version), mend=mend)]
    assert isinstance(said, dict)
    ranks = said.get("ranks")
    held = {one.get("rank"): one.get("experts") for one in ranks or () if isinstance(one, dict)}
    found = "; ".join(f"{rank}: {experts}" for rank, experts in held.items())[:200]
    ranked = [held.get(rank) for rank in range(ep)]
    lists = [one for one in ranked if isinstance(one, list)]
    if not isinstance(ranks, list) or len(ranks) != ep or len(lists) != ep:
        return even, [damaged(where, "says of some ranks no experts", f"lists of {ep} ranks", found)]
    if any(type(one) is not int or not 0 <= one < total for own in lists for one in own) or any(
        len(set(own)) != len(own) for own in lists
    ):
        return even, [damaged(where, "deals out experts that it has not, or twice to one rank", f"{total}", found)]
    if {one for own in lists for one in own} != set(range(total)):
        return even, [damaged(where, "says of some experts no rank", f"each of {total}", found)]
    return tuple(map(tuple, lists)), []


def dealt_parameters(
    listing: Listing, model: ModelStates, layers: Sequence[Layer], faults: list[Fault]
) -> tuple[dict[str, Dealt], dict[str, ElementType]]:
    """How each parameter of experts is cut, and the type of its weights: as the files of first experts have them."""
    dealt, dtypes = dict[str, Dealt](), dict[str, ElementType]()
    types = [tensor.dtype for tensor in model.module.values()]
    for layer in layers:
        files = expert_file(listing, layer.number, 0) if not listing.partitioned_model else {}
        for name in layer.names:
            of_file, local = files.get(name), model.trainable.get(name)
            tail = of_file.shape if of_file is not None else local[1:] if local is not None else None
            own = (len(layer.ranks[0]), *(tail or ()))
            if tail is None or local not in (None, own):
                expected, found = str(list(own)), str(local and list(local))
                faults.append(damaged(model.path, f"has {name} of another shape than its experts", expected, found))
                continue
            dealt[name] = Dealt((layer.total, *tail), layer)
            dtypes[name] = of_file.dtype if of_file is not None else types[0]
    return dealt, dtypes


def expert_file(listing: Listing, layer: int, expert: int) -> dict[str, TensorRecord]:
    """The weights of one expert of AutoEP, by the names of the parameters that they are slices of."""
    name = listing.experts[layer, expert]
    found: dict[str, TensorRecord] = {}
    for key, value in listing.read(name, read_entries).items():
        parameter, _, number = key.rpartition(".")
        if number != str(expert) or not isinstance(value, TensorRecord) or not value.contiguous:
            expected = f"weights of expert {expert}"
            raise fail(listing.path(name), "is not a file of this expert", expected, f"{key!r}")
        found[parameter] = value
    return found


def expert_weights(
    listing: Listing, dealt: Mapping[str, Dealt], dtypes: Mapping[str, ElementType]
) -> tuple[list[Placement], dict[str, int]]:
    """Where the weights of all experts lie, in files of their own, and how many each layer has; none at stage 3."""
    placements, shards = list[Placement](), dict[str, int]()
    for name, (shape, layer) in dealt.items() if not listing.partitioned_model else ():
        family = f"{EXPERT_FILES}{layer.number}"
        shards[family] = layer.total
        tiles = [(expert, 0, Box.along(shape, 0, expert, 1)) for expert in range(layer.total)]
        key = TensorKey(name, WEIGHT)
        placements.append(tiled_placement(key, shape, dtypes[name], tiles, family=family, buffer=name))
    return placements, shards


def unfit_counts(
    first: OptimStates, groups: Sequence[Iterable[str]], dealt: Mapping[str, Dealt], dp: int, ep: int
) -> Iterator[Fault]:
    """Flat buffers that other ranks share than those that have their parameters, or of experts and others."""
    for number, group in enumerate(groups):
        own = {name in dealt for name in group}
        expected, found = dp // ep if True in own else dp, first.counts[number]
        if len(own) > 1 or found != expected:
            what = f"flat buffer {number} is divided among other ranks than its parameters"
            yield damaged(first.path, what, f"{expected}", f"{found}" if len(own) < 2 else "experts and others")


def of_other_ranks(head: OptimStates, numbers: Iterable[int], ranks: list[int]) -> Iterator[Fault]:
    """Where a file of stage 3 says that other ranks share its experts."""
    said = head.entries.get(PARTITION_GROUPS)
    if not isinstance(said, list):
        return
    for number in numbers:
        found = said[number].get("partition_ranks")
        if found != ranks:
            what = f"shares the experts of flat buffer {number} among other ranks than its place in their groups says"
            yield damaged(head.path, what, str(ranks), describe(found))
