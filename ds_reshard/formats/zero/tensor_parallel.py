"""How tensor-parallel ranks split a parameter: by what the checkpoint says, or by rules that the user gives.

DeepSpeed describes it in `universal_checkpoint_info` of each model file. Since 0.19.6 that is an affine map, which says
where each shard's elements lie (checkpoint/affine.py, 0.19.8). Before, and for a user's own model-parallel unit, it is
patterns of names (checkpoint/ds_to_universal.py). DeepSpeed takes the first pattern that matches the beginning of a
name. Here one that matches the whole name goes before others of its kind, and only one may match. A bias without a
pattern is cut as its weight's rows: each element belongs to one row.

Since their version 0.3 AutoTP's patterns list what it has not cut (`collect_autotp_universal_checkpoint_info`,
module_inject/layers.py, 0.19.5). Before (0.18.9) the list is incomplete: a parameter without a pattern may be cut or
not. They never say how AutoTP cuts projections fused by its rules (`_replace`, module_inject/auto_tp.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.patterns import Patterns
from ds_reshard.model.layout import check_cover
from ds_reshard.model.region import Box, Part, Shape, parts_of
from ds_reshard.model.rules import Rule

_FUSED = ("qkv_proj", "query_key_value", "attn.Wqkv", "self_attn.W_pack", "c_attn", "gate_up_proj", "dense_h_to_4h")
"""By these parts of names AutoTP finds fused projections (module_inject/fusedqkv_utils.py, auto_tp.py, 0.18.9 on)."""
UNNAMED = "no pattern"
"""The evidence if no pattern of a checkpoint matches: cut along dimension 0, as DeepSpeed assumes."""
_RULE = '"ds_reshard": {"reshard": {"tensor_parallel": [%s]}}'
_MAX_RULES = 12
_TO_A_TOOL = "; to a tool, --rules FILE with that list"
_SHARED = "; if ranks share parts of it, as GPTBigCode's keys and values: load it with the sizes that were saved"


class UnknownSplit(Exception):
    """Why a parameter's split is unknown: what was expected and found, and, unless a rule mends it, what does."""

    def __init__(self, what: str, expected: str, found: str, mend: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.mend = what, expected, found, mend


class TensorSplit(NamedTuple):
    """A whole parameter, and the parts of it that each tensor-parallel rank has.

    Elements of a shard that are in no part are padding. If `replicated`, every rank has the whole. `evidence` names the
    source of the split. A split by a rule or a pattern consists of pieces along `dim`, each cut by itself:
    `widths[p][r]` is rank r's share of piece p. If `vocabulary`, the rows after it are padding and left out. If copies
    may differ, that of rank `owner` counts. `shards` are the shapes of the ranks' shards, padding included.
    """

    shape: Shape
    parts_by_rank: tuple[tuple[Part, ...], ...]
    replicated: bool
    evidence: str
    dim: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    vocabulary: bool = False
    owner: int | None = None
    shards: tuple[Shape, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes along `dim` of the pieces that were cut by themselves; empty if unknown."""
        return tuple(map(sum, self.widths))

    def __str__(self) -> str:
        if self.replicated:
            owner = "" if self.owner is None else f", rank {self.owner}'s counts"
            return f"a copy each ({self.evidence}{owner})"
        sizes = {part.box.size for parts in self.parts_by_rank for part in parts}
        axes = [axis for axis, whole in enumerate(self.shape) if any(size[axis] != whole for size in sizes)]
        return f"cut along {axes[-1] if axes else 0} ({self.evidence})"


def note_on_unnamed(splits: Mapping[str, TensorSplit]) -> str | None:
    """Return a note on parameters that no pattern matches; None if there are none."""
    names = [name for name, split in splits.items() if split.evidence == UNNAMED]
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    text = f"no pattern of the checkpoint matches {', '.join(names[:4])}{more}: taken as cut along dimension 0, as"
    return f"{text} DeepSpeed does; rules may say otherwise" if names else None


class SplitEvidence(NamedTuple):
    """What says how ranks split parameters, other than the user's rules.

    `info` is the `universal_checkpoint_info` of a checkpoint or a run; `autotp` is set if DeepSpeed's AutoTP has split
    them. A run may also have `whole_shapes`, the shapes of whole parameters, and `live_rules`, the rules that its
    parameters' attributes give: None for a parameter that is cut along dimension 0 into an unknown number of pieces.
    """

    info: Mapping[str, object] = MappingProxyType({})
    autotp: bool = False
    whole_shapes: Mapping[str, Shape] = MappingProxyType({})
    live_rules: Mapping[str, Rule | None] = MappingProxyType({})


NO_EVIDENCE = SplitEvidence()


def find_splits(
    shards: Mapping[str, Sequence[Shape]], evidence: SplitEvidence, rules: Sequence[Rule]
) -> tuple[dict[str, TensorSplit], dict[str, UnknownSplit]]:
    """Return each parameter's split, from the shapes of its shards by rank, and why the others' are unknown.

    A rule of the user's goes before what the checkpoint says.
    """
    splits: dict[str, TensorSplit] = {}
    unknown: dict[str, UnknownSplit] = {}
    saved = _SavedSplits(evidence)
    for name, shapes in shards.items():
        try:
            matching = matching_rules(name, rules)
            if len(matching) > 1:
                names = " and ".join(repr(rule.parameters) for rule in matching)
                raise UnknownSplit("two rules match it", "one", names, "correct the rules: one for each parameter")
            saved.refuse_scaled(name)
            splits[name] = _rule_split(matching[0], shapes, "rule") if matching else saved.split_of(name, shapes)
        except UnknownSplit as error:
            unknown[name] = error
    for name in saved.unnamed & splits.keys():
        weight = splits.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
        if weight is not None and weight.dim == 0 and len(weight.sizes) > 1:
            try:
                splits[name] = _rule_split(Rule(name, parts=weight.sizes), shards[name], "as its weight")
            except UnknownSplit as error:
                unknown[name] = error
    return splits, unknown


def matching_rules(name: str, rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules whose pattern matches the whole name."""
    return [rule for rule in rules if re.fullmatch(rule.parameters, name)]


def _rule_split(rule: Rule, shards: Sequence[Shape], evidence: str) -> TensorSplit:
    """Return the split by a rule; raises UnknownSplit if the shards' shapes contradict it."""
    if rule.replicated:
        return replicated_split(shards, evidence, owner=rule.owner)
    ndims, dim = {len(shape) for shape in shards}, rule.dim
    other_dims = {shape[:dim] + shape[dim + 1 :] for shape in shards}
    if len(ndims) != 1 or not 0 <= dim < min(ndims) or len(other_dims) != 1:
        raise UnknownSplit(f"its shards are not cut along dimension {dim}", "equal other dimensions", _text(shards))
    sizes = [shape[dim] for shape in shards]
    if isinstance(rule.parts, int):
        if rule.parts < 1 or any(size % rule.parts for size in sizes):
            raise UnknownSplit("its shards cannot be cut into so many equal parts", str(rule.parts), _text(shards))
        widths = [[size // rule.parts for size in sizes]] * rule.parts
    else:
        share = sum(rule.parts) // len(shards)
        if any(part % len(shards) for part in rule.parts) or set(sizes) != {share}:
            expected = f"parts {list(rule.parts)}, each in {len(shards)} equal shares"
            raise UnknownSplit("its shards are not of these parts", expected, _text(shards))
        widths = [[part // len(shards)] * len(shards) for part in rule.parts]
    return split_by_widths(_whole_shape(shards, dim), dim, widths, evidence, vocabulary=rule.vocabulary)


def split_by_widths(
    shape: Shape, dim: int, widths: Sequence[Sequence[int]], evidence: str, *, vocabulary: int | None = None
) -> TensorSplit:
    """Return the split that gives rank r `widths[p][r]` of each piece p along `dim`, one piece after another.

    Rows after a `vocabulary` are padding, which the whole parameter does not have.
    """
    begins = [0, *accumulate(map(sum, widths))]
    shards = tuple((*shape[:dim], sum(of_rank), *shape[dim + 1 :]) for of_rank in zip(*widths, strict=True))
    if begins[-1] != shape[dim]:
        raise UnknownSplit(f"its parts do not fill dimension {dim}", str(shape[dim]), str(begins[-1]))
    if vocabulary is not None and (dim or len(widths) != 1 or not 0 < vocabulary <= shape[0]):
        raise UnknownSplit("its padding is not after its last row", f"at most {shape[0]} rows", str(vocabulary))
    parts_by_rank = []
    for rank in range(len(widths[0])):
        offset, parts = 0, list[Part]()
        for begin, width in zip(begins, widths, strict=False):
            first, size = begin + sum(width[:rank]), width[rank]
            if vocabulary is not None:
                first, size = min(first, vocabulary), max(0, min(first + size, vocabulary) - first)
            parts += parts_of(Box.along(shape, dim, first, size), Box.along(shape, dim, offset, size), shards[rank])
            offset += width[rank]
        parts_by_rank.append(tuple(parts))
    whole = shape if vocabulary is None else (vocabulary, *shape[1:])
    return TensorSplit(
        whole,
        tuple(parts_by_rank),
        False,
        evidence,
        dim=dim,
        widths=tuple(map(tuple, widths)),
        vocabulary=vocabulary is not None,
        shards=shards,
    )


def resplit(split: TensorSplit, shape: Shape, tp: int) -> TensorSplit:
    """Return the split of a whole parameter of this shape over `tp` ranks as `split` does it: each piece evenly.

    A vocabulary gets as many padding rows as an even cut needs. If a single piece is not even, the first ranks have one
    more, as DeepSpeed cuts what is not cut by heads (`get_shard_size`, module_inject/tp_shard.py, 0.19.8): a run that
    cuts it otherwise has other shapes, and does not load it. Raises UnknownSplit if one of several pieces is not even.
    """
    if split.shape != shape:
        raise UnknownSplit("the parameter that was cut has another shape", _text([split.shape]), _text([shape]))
    if split.replicated:
        return replicated_split([shape] * tp, split.evidence)
    dim, sizes = (split.dim, split.sizes) if split.sizes else _cut_sizes(split)
    if split.vocabulary:
        rows = -(-shape[0] // tp)
        return split_by_widths((rows * tp, *shape[1:]), 0, [[rows] * tp], split.evidence, vocabulary=shape[0])
    if len(sizes) > 1 and any(size % tp for size in sizes):
        raise UnknownSplit(f"its parts in dimension {dim} do not divide by {tp}", f"multiples of {tp}", str([*sizes]))
    shares = [[size // tp + (rank < size % tp) for rank in range(tp)] for size in sizes]
    return split_by_widths(shape, dim, shares, split.evidence)


def _cut_sizes(split: TensorSplit) -> tuple[int, tuple[int, ...]]:
    """Return along which dimension shards lie, and the sizes of the pieces that were cut by themselves.

    Each piece runs through the ranks from the first on, which has no less than others (`get_shard_size`,
    module_inject/tp_shard.py, 0.19.8). Raises UnknownSplit if that cannot be told from the parts.
    """
    boxes = [(part.box, rank) for rank, parts in enumerate(split.parts_by_rank) for part in parts]
    axes = [axis for axis, whole in enumerate(split.shape) if any(box.size[axis] != whole for box, _ in boxes)]
    dim = axes[-1] if axes else 0  # a shard of several parts lies there row by row
    sizes, firsts, last = list[int](), set[int](), len(split.parts_by_rank)
    for begin, numel, rank in sorted({(box.offset[dim], box.size[dim], rank) for box, rank in boxes}):
        if rank <= last and begin == sum(sizes):
            sizes.append(0)
            firsts.add(rank)
        sizes[-1] += numel
        last = rank
    if not axes or firsts != {0} or sum(sizes) != split.shape[dim]:
        expected, found = "parts along one dimension, each from the first rank on", f"{len(axes)} dimensions"
        raise UnknownSplit("how it is cut into parts cannot be told", expected, found)
    return dim, tuple(sizes)


def pattern_info(splits: Mapping[str, TensorSplit]) -> dict[str, object]:
    """Return the `universal_checkpoint_info` that a run with these splits would save (checkpoint/ds_to_universal.py).

    That is version 0.2, which assumes equal shares; if some are unequal, 0.4, which needs the widths of all.
    """
    patterns = {name: f"^{re.escape(name)}$" for name in splits}
    vocabularies = {name: split.shape[0] for name, split in splits.items() if split.vocabulary}
    sub_params = [
        {
            "patterns": [patterns[name]],
            "shape": (*split.shape[: split.dim], split.sizes, *split.shape[split.dim + 1 :]),
            "partition_dim": split.dim,
        }
        for name, split in splits.items()
        if not split.replicated and not split.vocabulary
    ]
    widths = {patterns[name]: [[*piece] for piece in split.widths] for name, split in splits.items() if split.widths}
    uneven = any(len(set(piece)) > 1 for pieces in widths.values() for piece in pieces)
    return {
        "universal_checkpoint_version": 0.4 if uneven else 0.2,
        **({"sub_param_shard_widths": widths} if uneven else {}),
        "tp_replicated_parameter_patterns": [patterns[name] for name, split in splits.items() if split.replicated],
        "parameter_with_sub_params": sub_params,
        "vocabulary_parameter_patterns": [patterns[name] for name in vocabularies],
        **({"original_vocab_size": max(vocabularies.values())} if vocabularies else {}),
    }


def replicated_split(shards: Sequence[Shape], evidence: str, *, owner: int | None = None) -> TensorSplit:
    """Return the split of a tensor of which all ranks have a copy; raises UnknownSplit if shapes differ."""
    owner = owner if len(shards) > 1 else None
    if owner is not None and owner >= len(shards):
        raise UnknownSplit("the rule names a rank that it has no copy of", f"an owner below {len(shards)}", str(owner))
    if len(set(shards)) != 1:
        raise UnknownSplit("it is said to be the same on all ranks", "one shape", _text(shards))
    whole = (Part(Box.whole(shards[0]), 0),) if prod(shards[0]) else ()
    parts = (whole,) * len(shards)
    return TensorSplit(shards[0], parts, replicated=True, evidence=evidence, owner=owner, shards=tuple(shards))


def _whole_shape(shards: Sequence[Shape], dim: int) -> Shape:
    return (*shards[0][:dim], sum(shape[dim] for shape in shards), *shards[0][dim + 1 :])


def _text(shards: Sequence[Shape]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a scalar" for shape in shards)


def affine_maps(info: Mapping[str, object]) -> Mapping[object, object]:
    """Return the affine maps of `universal_checkpoint_info`, by the patterns of their parameters' names."""
    maps = info.get("affine_map")
    params = maps.get("params") if isinstance(maps, Mapping) and maps.get("version") == 1 else None
    return params if isinstance(params, Mapping) else {}


def shapes_in_affine_map(entry: object) -> list[Shape]:
    """Return the shapes of the ranks' shards in an affine map, as far as it has them."""
    ranks = entry.get("ranks") if isinstance(entry, Mapping) else None
    shards = [ranks[rank] for rank in sorted(ranks, key=int)] if isinstance(ranks, Mapping) else []
    return [_numbers(shard.get("shard_shape")) for shard in shards if isinstance(shard, Mapping)]


class _SavedSplits:
    """Splits by `universal_checkpoint_info`; raises UnknownSplit if it has none for a parameter, or several."""

    _ROW, _REPLICATED = "parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns"
    _HALVES, _PARTS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"
    _VOCABULARY, _AVERAGE = "vocabulary_parameter_patterns", "parameter_to_average_patterns"

    def __init__(self, evidence: SplitEvidence) -> None:
        self.unnamed: set[str] = set()
        self._evidence, self._info = evidence, (info := evidence.info)
        self._maps = affine_maps(info)
        self._mapped = Patterns(self._maps)
        unsupported = info.get("autotp_unsupported_parameter_patterns")
        self._unsupported = unsupported if isinstance(unsupported, Mapping) else {}
        self._reasons = Patterns(self._unsupported)
        kinds = (self._ROW, self._REPLICATED, self._HALVES, self._AVERAGE, self._VOCABULARY)
        lists = {kind: info.get(kind) for kind in kinds}
        self._named = {kind: Patterns(found) for kind, found in lists.items() if isinstance(found, (list, tuple))}
        entries = info.get(self._PARTS)
        self._parts: dict[str, Mapping[object, object]] = {
            str(pattern): entry
            for entry in (entries if isinstance(entries, (list, tuple)) else ())
            if isinstance(entry, Mapping)
            for pattern in entry.get("patterns") or ()
        }
        self._in_parts = Patterns(self._parts)

    def split_of(self, name: str, shards: Sequence[Shape]) -> TensorSplit:
        reasons = [self._unsupported[pattern] for pattern in self._reasons.matching(name)]
        if reasons:
            raise UnknownSplit("the run that saved it did not know how it is cut", "a known layout", str(reasons[0]))
        maps = [self._maps[pattern] for pattern in self._mapped.matching(name)]
        if len(maps) > 1:
            raise UnknownSplit("two affine maps match it", "one", str(len(maps)))
        if maps:
            return _affine_split(maps[0], shards)
        if not self._info:
            return self._by_attributes(name, shards)
        named = {kind for kind in (self._ROW, self._REPLICATED, self._HALVES, self._AVERAGE) if self._fits(kind, name)}
        parts = {pattern: self._parts[pattern] for pattern in self._in_parts.matching(name)}
        if len(named) + len(parts) > 1:
            raise UnknownSplit("two patterns of the checkpoint match it", "one", ", ".join([*sorted(named), *parts]))
        vocabulary = self._info.get("original_vocab_size") if self._fits(self._VOCABULARY, name) else None
        evidence = "pattern"
        if self._AVERAGE in named:
            raise UnknownSplit("its copies may differ between ranks, and are averaged", "one value", self._AVERAGE)
        if self._REPLICATED in named:
            return replicated_split(shards, evidence)
        if parts:
            return _parts_split(next(iter(parts.values())), shards, self._widths(next(iter(parts))), evidence)
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int | None):
            raise UnknownSplit("its vocabulary's size is malformed", "a number", repr(vocabulary))
        if not named and vocabulary is None:
            return self._unnamed(name, shards)
        rule = Rule(name, dim=1 if self._ROW in named else 0, parts=2 if self._HALVES in named else 1)
        return _rule_split(rule._replace(vocabulary=vocabulary), shards, evidence)

    def _unnamed(self, name: str, shards: Sequence[Shape]) -> TensorSplit:
        """Return the split of a parameter that no pattern matches: by AutoTP's release, else as DeepSpeed assumes."""
        self.unnamed.add(name)
        if not self._evidence.autotp:
            return _rule_split(Rule(name), shards, UNNAMED)
        if any(part in name for part in _FUSED):
            what = "it may be a fused projection, whose parts DeepSpeed before 0.19.6 does not save"
            raise UnknownSplit(what, 'a rule with its "parts"', f"shards of {_text(shards)}")
        version, whole_shape = self._info.get("universal_checkpoint_version"), self._evidence.whole_shapes.get(name)
        if isinstance(version, float) and version >= 0.3:
            return _rule_split(Rule(name), shards, "pattern")
        if whole_shape is None:
            what = "no pattern matches it, and DeepSpeed before 0.19.2 lists only some of the uncut parameters"
            expected = "a rule, or a run with one tensor-parallel rank"
            raise UnknownSplit(what, expected, f"shards of {_text(shards)}")
        return _rule_split(Rule(name, replicated=all(s == whole_shape for s in shards)), shards, "shapes of this run")

    def _by_attributes(self, name: str, shards: Sequence[Shape]) -> TensorSplit:
        """Return the split by attributes of a run's parameters (Megatron's `set_tensor_model_parallel_attributes`)."""
        rules = self._evidence.live_rules
        if name not in rules:
            raise UnknownSplit("nothing says how it is cut", "a rule", f"shards of {_text(shards)}")
        rule = rules[name]
        if rule is None:
            what = "its partition_dim is 0, which does not say whether it is cut as one piece or as several"
            raise UnknownSplit(what, 'a rule, with "parts" if it is several projections', f"shards of {_text(shards)}")
        return _rule_split(rule, shards, "partition_dim")

    def refuse_scaled(self, name: str) -> None:
        """Raise UnknownSplit if a rank saved multiples of its shard, which no rule makes right."""
        for pattern in self._mapped.matching(name):
            entry = self._maps[pattern]
            ranks = entry.get("ranks") if isinstance(entry, Mapping) else None
            for shard in ranks.values() if isinstance(ranks, Mapping) else ():
                pieces = shard.get("pieces") if isinstance(shard, Mapping) else None
                for piece in pieces if isinstance(pieces, (list, tuple)) else ():
                    scale = piece.get("scale", 1) if isinstance(piece, Mapping) else 1
                    if scale != 1:
                        what = "its affine map scales it, but not the optimizer's states"
                        mend = "load it with the tensor-parallel size that was saved"
                        raise UnknownSplit(what, "a scale of 1", repr(scale), mend)

    def _fits(self, kind: str, name: str) -> bool:
        return kind in self._named and bool(self._named[kind].matching(name))

    def _widths(self, pattern: str) -> object:
        all_widths = self._info.get("sub_param_shard_widths")
        return all_widths.get(pattern) if isinstance(all_widths, Mapping) else None


def _parts_split(entry: Mapping[object, object], shards: Sequence[Shape], known: object, evidence: str) -> TensorSplit:
    """Return the split by `SubparamShape(patterns, shape, partition_dim)`: the shape has the parts' sizes at that dim.

    Releases before 0.19.6 give the number of equal parts instead, and no widths: they cut evenly.
    """
    dim, shape = entry.get("partition_dim"), entry.get("shape")
    if not isinstance(dim, int) or not isinstance(shape, (list, tuple)) or not 0 <= dim < len(shape):
        raise UnknownSplit("its parts are malformed", "a shape and a dimension of it", f"{shape!r}, {dim!r}")
    sizes = shape[dim]
    rule = Rule("", dim=dim, parts=tuple(sizes) if isinstance(sizes, (list, tuple)) else sizes)
    if not isinstance(known, (list, tuple)):
        return _rule_split(rule, shards, evidence)
    widths = [list(width) for width in known if isinstance(width, (list, tuple)) and len(width) == len(shards)]
    sums = [sum(column) for column in zip(*widths, strict=True)]
    if len(widths) != len(known) or sums != [shard[dim] for shard in shards]:
        raise UnknownSplit("its shards have other widths than the checkpoint says", f"{known}", _text(shards))
    return split_by_widths(_whole_shape(shards, dim), dim, widths, evidence)


def _affine_split(entry: object, shards: Sequence[Shape]) -> TensorSplit:
    """Return the split by the pieces of each shard: `torch.as_strided` blocks of the whole and of the shard."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("ranks"), Mapping):
        raise UnknownSplit("its affine map is malformed", "a shape and the pieces of each rank", repr(entry)[:80])
    shape = _numbers(entry.get("logical_shape"))
    ranks = []
    for rank, shard in enumerate(shards):
        rank_map = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
        pieces = rank_map.get("pieces") if isinstance(rank_map, Mapping) else None
        if not isinstance(rank_map, Mapping) or not isinstance(pieces, (list, tuple)):
            raise UnknownSplit("its affine map lacks a rank", f"{len(shards)} ranks", f"no pieces of rank {rank}")
        if _numbers(rank_map.get("shard_shape")) != shard:
            raise UnknownSplit("its affine map is of another shard", str(rank_map.get("shard_shape")), _text([shard]))
        ranks.append(tuple(part for piece in pieces for part in _parts_of_piece(piece, shape, shard)))
    whole = (Part(Box.whole(shape), 0),)
    replicated = len(shards) > 1 and all(parts == whole for parts in ranks)
    evidence = "affine map"
    return TensorSplit(shape, tuple(ranks), replicated=replicated, evidence=evidence, shards=tuple(shards))


def _parts_of_piece(piece: object, shape: Shape, shard: Shape) -> Iterator[Part]:
    """Yield the parts of one piece of an affine map."""
    if not isinstance(piece, Mapping):
        raise UnknownSplit("its affine map is malformed", "a block", repr(piece)[:80])
    size = _numbers(piece.get("shape"))
    if not prod(size):
        return
    source, dest = (_first_index(piece.get(side), size, of) for side, of in (("source", shape), ("dest", shard)))
    if source is None or dest is None:
        raise UnknownSplit("its affine map does not place blocks", "boxes, row-major on both sides", repr(piece)[:120])
    yield from parts_of(Box(offset=source, size=size), Box(offset=dest, size=size), shard)


def _first_index(saved: object, size: Shape, shape: Shape) -> Shape | None:
    """Return the index of a block's first element in a tensor of this shape; None if the block is no box of it."""
    if not isinstance(saved, (list, tuple)) or len(saved) != 2 or len(size) != len(shape):
        return None
    strides, row_major = _numbers(saved[1]), tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if not isinstance(saved[0], int) or any(a != b for a, b, n in zip(strides, row_major, size, strict=True) if n > 1):
        return None
    offset, index = saved[0], []
    for stride in row_major:
        position, offset = divmod(offset, max(1, stride))
        index.append(position)
    fits = all(at >= 0 and at + count <= limit for at, count, limit in zip(index, size, shape, strict=True))
    return tuple(index) if fits and not offset else None


def _numbers(value: object) -> Shape:
    if not isinstance(value, (list, tuple)) or not all(type(number) is int and number >= 0 for number in value):
        raise UnknownSplit("its affine map is malformed", "a list of numbers", repr(value)[:80])
    return tuple(value)


def _rule_json(name: str, **fields: object) -> str:
    return json.dumps({"parameters": re.escape(name), **fields})


def padding_rules(sizes: Mapping[str, int]) -> str:
    """Return the line of a run's JSON that says how many rows of parameters are a vocabulary's, and no padding."""
    return _RULE % ", ".join(_rule_json(name, vocabulary=size) for name, size in sizes.items())


def evidence_of(model: ModelStates) -> SplitEvidence:
    """Return what a model file says of how ranks split parameters."""
    info = model.entries.get("universal_checkpoint_info")
    size = section(model.config, "tensor_parallel").get("autotp_size")
    return SplitEvidence(info if isinstance(info, dict) else {}, autotp=isinstance(size, int) and size > 1)


def vocabulary_splits(
    model: ModelStates,
    shards: Mapping[str, Sequence[Shape]],
    rules: Sequence[Rule],
    *,
    info: Mapping[str, object] | None = None,
) -> dict[str, TensorSplit]:
    """Return the splits of parameters whose last rows are padding, by rules, and by `info` or else the model file."""
    evidence = evidence_of(model) if info is None else SplitEvidence(info)
    if "original_vocab_size" not in evidence.info and not any(rule.vocabulary for rule in rules):
        return {}
    splits, _ = find_splits(shards, evidence, rules)
    return {name: split for name, split in splits.items() if split.vocabulary}


def unknown_split_faults(unknown: Mapping[str, UnknownSplit], path: str) -> list[Fault]:
    """Return one fault for each parameter whose split is unknown, with a suggested rule that cuts along dimension 0."""
    rules = [_rule_json(name, dim=0) for name, reason in unknown.items() if not reason.mend]
    shown = ", ".join(rules[:_MAX_RULES]) + (", ..." if len(rules) > _MAX_RULES else "")
    mend = f"say how {'each' if len(rules) > 1 else 'it'} is cut: {_RULE % shown}{_TO_A_TOOL}"
    return [
        UnsupportedLayout.fault(f"{path}: {name}", reason.what, reason.expected, reason.found, mend=reason.mend or mend)
        for name, reason in unknown.items()
    ]


def coverage_faults(name: str, split: TensorSplit, shapes: Sequence[Shape]) -> Iterator[Fault]:
    """Yield a fault if parts leave their shards, or do not make up the whole."""
    mend = f"say how it is cut: {_RULE % _rule_json(name, dim=0)}{_TO_A_TOOL}{_SHARED}"
    for parts, shape in zip(split.parts_by_rank, shapes, strict=True):
        if any(part.element_offset < 0 or part.element_offset + part.box.numel > prod(shape) for part in parts):
            what = "has parts that lie outside its shard"
            yield UnsupportedLayout.fault(f"parameter {name}", what, f"{prod(shape)} elements", "more", mend=mend)
            return
    if split.replicated:
        return
    try:
        check_cover([part.box for parts in split.parts_by_rank for part in parts], split.shape)
    except ValueError as error:
        what = "has parts that do not make up the whole"
        yield UnsupportedLayout.fault(f"parameter {name}", what, f"{list(split.shape)}", str(error), mend=mend)
