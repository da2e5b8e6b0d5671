"""How tensor-parallel ranks divide a parameter: by what the checkpoint says, or by rules that the user gives.

DeepSpeed keeps it in `universal_checkpoint_info` of each model file: since 0.19.6 an affine map, which says of each
shard where its elements lie (checkpoint/affine.py, 0.19.8); before that, and for a user's own model-parallel unit,
patterns of names (checkpoint/ds_to_universal.py). DeepSpeed looks whether one fits the beginning of a name, and takes
the first; here one that fits the whole name goes before others of its kind, and one alone may fit. A bias that none
names is cut as the rows of its weight: each element belongs to one of them.

Patterns of AutoTP name what it has not cut since version 0.3 of them (`collect_autotp_universal_checkpoint_info`,
module_inject/layers.py, 0.19.5), before that in part (0.18.9): what no pattern names may then be either. They never say
how it has cut projections that are fused by its own rules of names (`_replace`, module_inject/auto_tp.py).
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
"""Parts of the names of what AutoTP takes for fused (module_inject/fusedqkv_utils.py, auto_tp.py, 0.18.9, 0.19.5)."""
UNNAMED = "no pattern"
"""The evidence for what no pattern of a checkpoint names: it is cut along dimension 0, as DeepSpeed takes it."""
_RULE = '"ds_reshard": {"reshard": {"tensor_parallel": [%s]}}'
_RULES = 12
_TO_A_TOOL = "; to a tool, --rules FILE with that list"
_SHARED = "; where ranks share parts of it, as GPTBigCode's keys and values: load it with the sizes that were saved"


class Misfit(Exception):
    """Why a parameter's division is not known: what was expected, what was found, and what mends it but a rule."""

    def __init__(self, what: str, expected: str, found: str, mend: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.mend = what, expected, found, mend


class Division(NamedTuple):
    """A whole parameter, and the parts of it that each tensor-parallel rank has.

    Elements of a shard that are in no part are padding. Of a `replicated` one every rank has all. `evidence` is what
    says so. By a rule or a pattern `widths` are those along `dim` of each rank's share of what was cut one by one, and
    of a `vocabulary` rows that were behind it are not there. Where copies may differ, that of rank `owner` counts.
    `shards` are the shapes of the ranks' shards, padding with them.
    """

    shape: Shape
    ranks: tuple[tuple[Part, ...], ...]
    replicated: bool
    evidence: str
    dim: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    vocabulary: bool = False
    owner: int | None = None
    shards: tuple[Shape, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Along `dim`, of what was cut one by one; none where no rule or pattern says it."""
        return tuple(map(sum, self.widths))

    def __str__(self) -> str:
        if self.replicated:
            owner = "" if self.owner is None else f", rank {self.owner}'s counts"
            return f"a copy each ({self.evidence}{owner})"
        sizes = {part.box.size for parts in self.ranks for part in parts}
        axes = [axis for axis, whole in enumerate(self.shape) if any(size[axis] != whole for size in sizes)]
        return f"cut along {axes[-1] if axes else 0} ({self.evidence})"


def unnamed(divided: Mapping[str, Division]) -> str | None:
    """What the user should know of parameters that no pattern names; None where there are none."""
    names = [name for name, division in divided.items() if division.evidence == UNNAMED]
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    said = (
        f"no pattern of the checkpoint names {', '.join(names[:4])}{more}: taken as cut along dimension 0, as DeepSpeed"
    )
    return f"{said} takes them; rules may say otherwise" if names else None


class Evidence(NamedTuple):
    """What says how ranks divide parameters, the user's rules apart.

    `info` is the `universal_checkpoint_info` of a checkpoint or of a run; `autotp` says that DeepSpeed has divided them
    itself. Of a run `whole` are the shapes of whole parameters, where it has them, and `live` what attributes of its
    parameters tell: the rule, or None of one that is cut along dimension 0, in how many parts is not told.
    """

    info: Mapping[str, object] = MappingProxyType({})
    autotp: bool = False
    whole: Mapping[str, Shape] = MappingProxyType({})
    live: Mapping[str, Rule | None] = MappingProxyType({})


NO_EVIDENCE = Evidence()


def divisions(
    shards: Mapping[str, Sequence[Shape]], evidence: Evidence, rules: Sequence[Rule]
) -> tuple[dict[str, Division], dict[str, Misfit]]:
    """The division of each parameter, given the shapes of its shards by rank, and of which it is not known.

    A rule of the user's goes before what the checkpoint says.
    """
    found: dict[str, Division] = {}
    unknown: dict[str, Misfit] = {}
    said = _Said(evidence)
    for name, shapes in shards.items():
        try:
            own = [rule for rule in rules if re.fullmatch(rule.parameters, name)]
            if len(own) > 1:
                said_twice = " and ".join(repr(rule.parameters) for rule in own)
                raise Misfit("two rules name it", "one", said_twice, "correct the rules: one for each parameter")
            said.refuse_scaled(name)
            found[name] = _by_rule(own[0], shapes, "rule") if own else said.of(name, shapes)
        except Misfit as misfit:
            unknown[name] = misfit
    for name in said.unnamed & found.keys():
        weight = found.get(f"{name.removesuffix('bias')}weight") if name.endswith("bias") else None
        if weight is not None and weight.dim == 0 and len(weight.sizes) > 1:
            try:
                found[name] = _by_rule(Rule(name, parts=weight.sizes), shards[name], "as its weight")
            except Misfit as misfit:
                unknown[name] = misfit
    return found, unknown


def _by_rule(rule: Rule, shards: Sequence[Shape], evidence: str) -> Division:
    if rule.replicated:
        return replicated(shards, evidence, owner=rule.owner)
    dims, cut = {len(shape) for shape in shards}, rule.dim
    others = {shape[:cut] + shape[cut + 1 :] for shape in shards}
    if len(dims) != 1 or not 0 <= cut < min(dims) or len(others) != 1:
        raise Misfit(f"its shards are not cut along dimension {cut}", "shapes that differ there alone", _shapes(shards))
    sizes = [shape[cut] for shape in shards]
    if isinstance(rule.parts, int):
        if rule.parts < 1 or any(size % rule.parts for size in sizes):
            raise Misfit("its shards cannot be cut into so many equal parts", str(rule.parts), _shapes(shards))
        widths = [[size // rule.parts for size in sizes]] * rule.parts
    else:
        share = sum(rule.parts) // len(shards)
        if any(part % len(shards) for part in rule.parts) or set(sizes) != {share}:
            expected = f"parts {list(rule.parts)}, each in {len(shards)} equal shares"
            raise Misfit("its shards are not of these parts", expected, _shapes(shards))
        widths = [[part // len(shards)] * len(shards) for part in rule.parts]
    return divided(_whole(shards, cut), cut, widths, evidence, vocabulary=rule.vocabulary)


def divided(
    shape: Shape, dim: int, widths: Sequence[Sequence[int]], evidence: str, *, vocabulary: int | None = None
) -> Division:
    """A parameter of which rank r has `widths[p][r]` of each part p along `dim`, one part behind the other.

    Of a `vocabulary` the rows behind it are padding, which the whole parameter does not have.
    """
    begins = [0, *accumulate(map(sum, widths))]
    shards = tuple((*shape[:dim], sum(own), *shape[dim + 1 :]) for own in zip(*widths, strict=True))
    if begins[-1] != shape[dim]:
        raise Misfit(f"its parts do not fill dimension {dim}", str(shape[dim]), str(begins[-1]))
    if vocabulary is not None and (dim or len(widths) != 1 or not 0 < vocabulary <= shape[0]):
        raise Misfit("its padding is not behind its last row", f"a vocabulary of at most {shape[0]}", str(vocabulary))
    ranks = []
    for rank in range(len(widths[0])):
        inside, parts = 0, list[Part]()
        for begin, width in zip(begins, widths, strict=False):
            first, size = begin + sum(width[:rank]), width[rank]
            if vocabulary is not None:
                first, size = min(first, vocabulary), max(0, min(first + size, vocabulary) - first)
            parts += parts_of(Box.along(shape, dim, first, size), Box.along(shape, dim, inside, size), shards[rank])
            inside += width[rank]
        ranks.append(tuple(parts))
    whole = shape if vocabulary is None else (vocabulary, *shape[1:])
    return Division(
        whole,
        tuple(ranks),
        False,
        evidence,
        dim=dim,
        widths=tuple(map(tuple, widths)),
        vocabulary=vocabulary is not None,
        shards=shards,
    )


def redivided(division: Division, shape: Shape, tp: int) -> Division:
    """A whole parameter of this shape as `tp` ranks divide it who cut it as `division` does, each part evenly.

    Rows behind a vocabulary are as many as make it even. Of one part the first ranks have one more where it is not, as
    DeepSpeed cuts what is not cut by heads (`get_shard_size`, module_inject/tp_shard.py, 0.19.8): a run that cuts it
    otherwise has other shapes, and does not load it. Misfit where one of several parts is not.
    """
    if division.shape != shape:
        raise Misfit("its whole is not what is said to be cut", _shapes([division.shape]), _shapes([shape]))
    if division.replicated:
        return replicated([shape] * tp, division.evidence)
    dim, sizes = (division.dim, division.sizes) if division.sizes else _cut_sizes(division)
    if division.vocabulary:
        rows = -(-shape[0] // tp)
        return divided((rows * tp, *shape[1:]), 0, [[rows] * tp], division.evidence, vocabulary=shape[0])
    if len(sizes) > 1 and any(size % tp for size in sizes):
        raise Misfit(f"its parts along dimension {dim} have no {tp} equal shares", f"multiples of {tp}", str([*sizes]))
    shares = [[size // tp + (rank < size % tp) for rank in range(tp)] for size in sizes]
    return divided(shape, dim, shares, division.evidence)


def _cut_sizes(division: Division) -> tuple[int, tuple[int, ...]]:
    """Along which dimension shards lie, and the sizes of what was cut one by one; Misfit where that cannot be told.

    Each part is a run through the ranks from the first on, which has no less than others (`get_shard_size`,
    module_inject/tp_shard.py, 0.19.8).
    """
    boxes = [(part.box, rank) for rank, parts in enumerate(division.ranks) for part in parts]
    axes = [axis for axis, whole in enumerate(division.shape) if any(box.size[axis] != whole for box, _ in boxes)]
    dim = axes[-1] if axes else 0  # a shard of several parts lies there row by row
    sizes, firsts, last = list[int](), set[int](), len(division.ranks)
    for begin, numel, rank in sorted({(box.offset[dim], box.size[dim], rank) for box, rank in boxes}):
        if rank <= last and begin == sum(sizes):
            sizes.append(0)
            firsts.add(rank)
        sizes[-1] += numel
        last = rank
    if not axes or firsts != {0} or sum(sizes) != division.shape[dim]:
        expected, found = "parts along one dimension, each from the first rank on", f"{len(axes)} dimensions"
        raise Misfit("how it is cut into parts cannot be told", expected, found)
    return dim, tuple(sizes)


def pattern_info(divided: Mapping[str, Division]) -> dict[str, object]:
    """What a run that divides so would have saved as `universal_checkpoint_info` (checkpoint/ds_to_universal.py).

    As of version 0.2 of it, which takes equal shares; where some are not, of 0.4, which wants the widths of all.
    """
    named = {name: f"^{re.escape(name)}$" for name in divided}
    vocabularies = {name: one.shape[0] for name, one in divided.items() if one.vocabulary}
    parts = [
        {
            "patterns": [named[name]],
            "shape": (*one.shape[: one.dim], one.sizes, *one.shape[one.dim + 1 :]),
            "partition_dim": one.dim,
        }
        for name, one in divided.items()
        if not one.replicated and not one.vocabulary
    ]
    widths = {named[name]: [[*own] for own in one.widths] for name, one in divided.items() if one.widths}
    uneven = any(len(set(own)) > 1 for of in widths.values() for own in of)
    return {
        "universal_checkpoint_version": 0.4 if uneven else 0.2,
        **({"sub_param_shard_widths": widths} if uneven else {}),
        "tp_replicated_parameter_patterns": [named[name] for name, one in divided.items() if one.replicated],
        "parameter_with_sub_params": parts,
        "vocabulary_parameter_patterns": [named[name] for name in vocabularies],
        **({"original_vocab_size": max(vocabularies.values())} if vocabularies else {}),
    }


def replicated(shards: Sequence[Shape], evidence: str, *, owner: int | None = None) -> Division:
    """A tensor of which all ranks have a copy; Misfit where their shapes differ, or none is the owner's."""
    owner = owner if len(shards) > 1 else None
    if owner is not None and owner >= len(shards):
        raise Misfit("the rule names a rank that it has no copy of", f"an owner below {len(shards)}", str(owner))
    if len(set(shards)) != 1:
        raise Misfit("it is said to be the same on all ranks", "one shape", _shapes(shards))
    whole = (Part(Box.whole(shards[0]), 0),) if prod(shards[0]) else ()
    every = (whole,) * len(shards)
    return Division(shards[0], every, replicated=True, evidence=evidence, owner=owner, shards=tuple(shards))


def _whole(shards: Sequence[Shape], dim: int) -> Shape:
    return (*shards[0][:dim], sum(shape[dim] for shape in shards), *shards[0][dim + 1 :])


def _shapes(shards: Sequence[Shape]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a scalar" for shape in shards)


def affine_maps(info: Mapping[str, object]) -> Mapping[object, object]:
    """What `universal_checkpoint_info` says of parameters by affine maps, by the patterns of their names."""
    maps = info.get("affine_map")
    params = maps.get("params") if isinstance(maps, Mapping) and maps.get("version") == 1 else None
    return params if isinstance(params, Mapping) else {}


def shard_shapes(entry: object) -> list[Shape]:
    """The shapes of the ranks' shards by an affine map, as far as it says them."""
    ranks = entry.get("ranks") if isinstance(entry, Mapping) else None
    held = [ranks[rank] for rank in sorted(ranks, key=int)] if isinstance(ranks, Mapping) else []
    return [_numbers(one.get("shard_shape")) for one in held if isinstance(one, Mapping)]


class _Said:
    """What `universal_checkpoint_info` says; Misfit where it says nothing of a parameter, or two things."""

    _ROW, _REPLICATED = "parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns"
    _HALVES, _PARTS = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params"
    _VOCABULARY, _AVERAGE = "vocabulary_parameter_patterns", "parameter_to_average_patterns"

    def __init__(self, evidence: Evidence) -> None:
        self.unnamed: set[str] = set()
        self._evidence, self._info = evidence, (info := evidence.info)
        self._maps = affine_maps(info)
        self._mapped = Patterns(self._maps)
        unsupported = info.get("autotp_unsupported_parameter_patterns")
        self._unsupported = unsupported if isinstance(unsupported, Mapping) else {}
        self._reasons = Patterns(self._unsupported)
        kinds = (self._ROW, self._REPLICATED, self._HALVES, self._AVERAGE, self._VOCABULARY)
        lists = {kind: info.get(kind) for kind in kinds}
        self._named = {kind: Patterns(one) for kind, one in lists.items() if isinstance(one, (list, tuple))}
        entries = info.get(self._PARTS)
        self._parts: dict[str, Mapping[object, object]] = {
            str(pattern): entry
            for entry in (entries if isinstance(entries, (list, tuple)) else ())
            if isinstance(entry, Mapping)
            for pattern in entry.get("patterns") or ()
        }
        self._in_parts = Patterns(self._parts)

    def of(self, name: str, shards: Sequence[Shape]) -> Division:
        reasons = [self._unsupported[pattern] for pattern in self._reasons.of(name)]
        if reasons:
            raise Misfit("the run that saved it did not know how it is cut", "a known layout", str(reasons[0]))
        maps = [self._maps[pattern] for pattern in self._mapped.of(name)]
        if len(maps) > 1:
            raise Misfit("two affine maps name it", "one", str(len(maps)))
        if maps:
            return _by_affine_map(maps[0], shards)
        if not self._info:
            return self._by_attributes(name, shards)
        named = {kind for kind in (self._ROW, self._REPLICATED, self._HALVES, self._AVERAGE) if self._names(kind, name)}
        parts = {pattern: self._parts[pattern] for pattern in self._in_parts.of(name)}
        if len(named) + len(parts) > 1:
            raise Misfit("two patterns of the checkpoint name it", "one", ", ".join([*sorted(named), *parts]))
        vocabulary = self._info.get("original_vocab_size") if self._names(self._VOCABULARY, name) else None
        evidence = "pattern"
        if self._AVERAGE in named:
            raise Misfit("its copies may differ between ranks, and are averaged", "one value", self._AVERAGE)
        if self._REPLICATED in named:
            return replicated(shards, evidence)
        if parts:
            return _by_sub_params(next(iter(parts.values())), shards, self._widths(next(iter(parts))), evidence)
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int | None):
            raise Misfit("its vocabulary's size is malformed", "a number", repr(vocabulary))
        if not named and vocabulary is None:
            return self._unnamed(name, shards)
        rule = Rule(name, dim=1 if self._ROW in named else 0, parts=2 if self._HALVES in named else 1)
        return _by_rule(rule._replace(vocabulary=vocabulary), shards, evidence)

    def _unnamed(self, name: str, shards: Sequence[Shape]) -> Division:
        """By what no pattern says: of AutoTP by its own release, of others as DeepSpeed takes it."""
        self.unnamed.add(name)
        if not self._evidence.autotp:
            return _by_rule(Rule(name), shards, UNNAMED)
        if any(part in name for part in _FUSED):
            what = "it may be a fused projection, which DeepSpeed before 0.19.6 cuts in parts that no file names"
            raise Misfit(what, 'a rule with its "parts"', f"shards of {_shapes(shards)}")
        version, whole = self._info.get("universal_checkpoint_version"), self._evidence.whole.get(name)
        if isinstance(version, float) and version >= 0.3:
            return _by_rule(Rule(name), shards, "pattern")
        if whole is None:
            what = "no pattern names it, and DeepSpeed before 0.19.2 names only some of what it has not cut"
            expected = "a rule, or a run with one tensor-parallel rank"
            raise Misfit(what, expected, f"shards of {_shapes(shards)}")
        return _by_rule(Rule(name, replicated=all(shape == whole for shape in shards)), shards, "shapes of this run")

    def _by_attributes(self, name: str, shards: Sequence[Shape]) -> Division:
        """By what the parameters of a run tell (`set_tensor_model_parallel_attributes` of Megatron)."""
        live = self._evidence.live
        if name not in live:
            raise Misfit("nothing says how it is cut", "a rule", f"shards of {_shapes(shards)}")
        rule = live[name]
        if rule is None:
            what = "its partition_dim is 0, which does not tell whether parts of it are cut one by one"
            raise Misfit(what, 'a rule, with "parts" where it is several projections', f"shards of {_shapes(shards)}")
        return _by_rule(rule, shards, "partition_dim")

    def refuse_scaled(self, name: str) -> None:
        """Misfit where a rank has saved multiples of its shard, which no rule makes right."""
        for pattern in self._mapped.of(name):
            entry = self._maps[pattern]
            ranks = entry.get("ranks") if isinstance(entry, Mapping) else None
            for held in ranks.values() if isinstance(ranks, Mapping) else ():
                pieces = held.get("pieces") if isinstance(held, Mapping) else None
                for piece in pieces if isinstance(pieces, (list, tuple)) else ():
                    scale = piece.get("scale", 1) if isinstance(piece, Mapping) else 1
                    if scale != 1:
                        what = "its affine map scales it, which an optimizer's states do not follow"
                        mend = "load it with the tensor-parallel size that was saved"
                        raise Misfit(what, "a scale of 1", repr(scale), mend)

    def _names(self, kind: str, name: str) -> bool:
        return kind in self._named and bool(self._named[kind].of(name))

    def _widths(self, pattern: str) -> object:
        known = self._info.get("sub_param_shard_widths")
        return known.get(pattern) if isinstance(known, Mapping) else None


def _by_sub_params(entry: Mapping[object, object], shards: Sequence[Shape], known: object, evidence: str) -> Division:
    """By `SubparamShape(patterns, shape, partition_dim)`: the shape has the sizes of the parts along that dimension.

    Releases before 0.19.6 give the number of equal parts instead, and no widths: they cut evenly.
    """
    dim, shape = entry.get("partition_dim"), entry.get("shape")
    if not isinstance(dim, int) or not isinstance(shape, (list, tuple)) or not 0 <= dim < len(shape):
        raise Misfit("its parts are malformed", "a shape and a dimension of it", f"{shape!r}, {dim!r}")
    sizes = shape[dim]
    rule = Rule("", dim=dim, parts=tuple(sizes) if isinstance(sizes, (list, tuple)) else sizes)
    if not isinstance(known, (list, tuple)):
        return _by_rule(rule, shards, evidence)
    widths = [list(width) for width in known if isinstance(width, (list, tuple)) and len(width) == len(shards)]
    sums = [sum(column) for column in zip(*widths, strict=True)]
    if len(widths) != len(known) or sums != [one[dim] for one in shards]:
        raise Misfit("its shards have other widths than the checkpoint says", f"{known}", _shapes(shards))
    return divided(_whole(shards, dim), dim, widths, evidence)


def _by_affine_map(entry: object, shards: Sequence[Shape]) -> Division:
    """By the pieces of each shard: blocks that `torch.as_strided` takes out of the whole and of the shard."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("ranks"), Mapping):
        raise Misfit("its affine map is malformed", "a shape and the pieces of each rank", repr(entry)[:80])
    shape = _numbers(entry.get("logical_shape"))
    ranks = []
    for rank, shard in enumerate(shards):
        held = entry["ranks"].get(rank, entry["ranks"].get(str(rank)))
        pieces = held.get("pieces") if isinstance(held, Mapping) else None
        if not isinstance(held, Mapping) or not isinstance(pieces, (list, tuple)):
            raise Misfit("its affine map lacks a rank", f"{len(shards)} ranks", f"no pieces of rank {rank}")
        if _numbers(held.get("shard_shape")) != shard:
            raise Misfit("its affine map is of another shard", str(held.get("shard_shape")), _shapes([shard]))
        ranks.append(tuple(part for piece in pieces for part in _by_piece(piece, shape, shard)))
    whole = (Part(Box.whole(shape), 0),)
    replicated = len(shards) > 1 and all(parts == whole for parts in ranks)
    evidence = "affine map"
    return Division(shape, tuple(ranks), replicated=replicated, evidence=evidence, shards=tuple(shards))


def _by_piece(piece: object, shape: Shape, shard: Shape) -> Iterator[Part]:
    if not isinstance(piece, Mapping):
        raise Misfit("its affine map is malformed", "a block", repr(piece)[:80])
    size = _numbers(piece.get("shape"))
    if not prod(size):
        return
    here, there = (_placed(piece.get(side), size, of) for side, of in (("source", shape), ("dest", shard)))
    if here is None or there is None:
        raise Misfit("its affine map does not place blocks", "boxes, row-major on both sides", repr(piece)[:120])
    yield from parts_of(Box(offset=here, size=size), Box(offset=there, size=size), shard)


def _placed(said: object, size: Shape, shape: Shape) -> Shape | None:
    """The index of a block's first element in a tensor of a shape; None where it is no box of that."""
    if not isinstance(said, (list, tuple)) or len(said) != 2 or len(size) != len(shape):
        return None
    strides, own = _numbers(said[1]), tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if not isinstance(said[0], int) or any(a != b for a, b, n in zip(strides, own, size, strict=True) if n > 1):
        return None
    left, index = said[0], []
    for stride in own:
        at, left = divmod(left, max(1, stride))
        index.append(at)
    fits = all(at >= 0 and at + n <= of for at, n, of in zip(index, size, shape, strict=True))
    return tuple(index) if fits and not left else None


def _numbers(said: object) -> Shape:
    if not isinstance(said, (list, tuple)) or not all(type(one) is int and one >= 0 for one in said):
        raise Misfit("its affine map is malformed", "a list of numbers", repr(said)[:80])
    return tuple(said)


def _rule(name: str, **said: object) -> str:
    return json.dumps({"parameters": re.escape(name), **said})


def padding_rules(sizes: Mapping[str, int]) -> str:
    """The line of a run's JSON that says how many rows of parameters are a vocabulary's, and no padding."""
    return _RULE % ", ".join(_rule(name, vocabulary=size) for name, size in sizes.items())


def evidence_of(model: ModelStates) -> Evidence:
    """What a model file says of how ranks divide parameters."""
    info = model.entries.get("universal_checkpoint_info")
    size = section(model.config, "tensor_parallel").get("autotp_size")
    return Evidence(info if isinstance(info, dict) else {}, autotp=isinstance(size, int) and size > 1)


def vocabularies(
    model: ModelStates,
    shards: Mapping[str, Sequence[Shape]],
    rules: Sequence[Rule],
    *,
    info: Mapping[str, object] | None = None,
) -> dict[str, Division]:
    """The parameters whose last rows are padding, as rules, `info` or else the model file say."""
    evidence = evidence_of(model) if info is None else Evidence(info)
    if "original_vocab_size" not in evidence.info and not any(rule.vocabulary for rule in rules):
        return {}
    found, _ = divisions(shards, evidence, rules)
    return {name: division for name, division in found.items() if division.vocabulary}


def unknown_faults(unknown: Mapping[str, Misfit], path: str) -> list[Fault]:
    """Why parameters cannot be made whole, and the rules that would say how, with what is usual for the truth."""
    rules = [_rule(name, dim=0) for name, misfit in unknown.items() if not misfit.mend]
    shown = ", ".join(rules[:_RULES]) + (", ..." if len(rules) > _RULES else "")
    mend = f"say how {'each' if len(rules) > 1 else 'it'} is cut: {_RULE % shown}{_TO_A_TOOL}"
    return [
        UnsupportedLayout.fault(f"{path}: {name}", misfit.what, misfit.expected, misfit.found, mend=misfit.mend or mend)
        for name, misfit in unknown.items()
    ]


def uncovered(name: str, division: Division, shapes: Sequence[Shape]) -> Iterator[Fault]:
    """Where parts do not lie in their shards, or do not make the whole."""
    mend = f"say how it is cut: {_RULE % _rule(name, dim=0)}{_TO_A_TOOL}{_SHARED}"
    for parts, shape in zip(division.ranks, shapes, strict=True):
        if any(part.element_offset < 0 or part.element_offset + part.box.numel > prod(shape) for part in parts):
            what = "is said to have parts that leave its shard"
            yield UnsupportedLayout.fault(f"parameter {name}", what, f"{prod(shape)} elements", "more", mend=mend)
            return
    if division.replicated:
        return
    try:
        check_cover([part.box for parts in division.ranks for part in parts], division.shape)
    except ValueError as error:
        what = "is said to have parts that do not make the whole"
        yield UnsupportedLayout.fault(f"parameter {name}", what, f"{list(division.shape)}", str(error), mend=mend)
