"""Views: which rows of one tensor are the rows of others, in the notation of einops.

`(g q+1+1 d) h` is the view of a tensor of two dimensions, the first of which has three factors. The sum says of which
parts the tensor consists: in each of `g` groups come `q` times `d` rows of the first part, `d` rows of the second and
`d` of the third. A part has the same factors with its own term of the sum: `(g q d) h`, `(g 1 d) h`. They may be in any
order, `h (g q d)`: the part is then a box of its tensor that is stored with its axes in the order of the whole.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.region import Axis, Box, Shape, cut_span

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_DIMENSION = re.compile(r"\(([^()]*)\)|(\S+)")


def evaluate(text: str, numbers: Mapping[str, int]) -> int:
    """Return the value of an expression of names, whole numbers, + - * / and parentheses.

    Raises ValueError for anything else, for a name that `numbers` lacks, for a division that leaves a remainder, and
    for a value below 0.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in numbers:
                raise ValueError(f"nothing tells the number {node.id!r}")
            return numbers[node.id]
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if type(node.op) in _OPERATIONS:
                return int(_OPERATIONS[type(node.op)](left, right))
            if isinstance(node.op, ast.Div) and right and left % right == 0:
                return left // right
            if isinstance(node.op, ast.Div):
                raise ValueError(f"{left} is no multiple of {right} in {text!r}")
        raise ValueError(f"{text!r} is not an expression of names, whole numbers, + - * / and parentheses")

    try:
        found = value(_parsed(text.strip()))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not an expression of names, whole numbers, + - * / and parentheses") from None
    if found < 0:
        raise ValueError(f"{text!r} is {found}, which is below 0")
    return found


@lru_cache(maxsize=1 << 10)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


View = tuple[tuple[str, ...], ...]
"""The factors of each dimension of a tensor."""


def parse_view(text: str) -> View:
    """Return the factors of each dimension of a view. Raises ValueError for parentheses that do not match."""
    found = tuple(tuple((inside or outside).split()) for inside, outside in _DIMENSION.findall(text))
    if re.sub(r"\s", "", text) != re.sub(r"\s", "", "".join(match[0] for match in _DIMENSION.finditer(text))):
        raise ValueError(
            f"{text!r} is no view: write dimensions apart, the factors of one in parentheses, as in (a b) c"
        )
    bad = any("(" in factor or ")" in factor for dimension in found for factor in dimension)
    if bad or not found or not all(found):
        raise ValueError(
            f"{text!r} is no view: write dimensions apart, the factors of one in parentheses, as in (a b) c"
        )
    return found


class Place(NamedTuple):
    """The place of a factor in a tensor: `size` indices, `step` rows apart along dimension `dim`.

    A part has some of them, from index `first` on.
    """

    dim: int
    step: int
    size: int
    first: int = 0

    def holds(self, inner: Place) -> bool:
        """True if this factor and the one behind it are one factor: `inner` has all of its indices."""
        return (self.dim, self.step) == (inner.dim, inner.step * inner.size)


class Factor(NamedTuple):
    """`size` indices along a factor of a view, and its place in the whole and in a part that has these indices."""

    size: int
    whole: Place
    part: Place


class Part(NamedTuple):
    """One part of a tensor: its shape, and the factors that give each of its elements a place in the whole."""

    shape: Shape
    factors: tuple[Factor, ...]


def whole_shape(view: View, numbers: Mapping[str, int]) -> Shape:
    return tuple(prod(_size(factor, numbers) for factor in dimension) for dimension in view)


def part_of(view: View, term: int, numbers: Mapping[str, int], *, own: View | None, stacked: Mapping[str, int]) -> Part:
    """Return the part that has term number `term` of the view's sum (0 if the view has no sum).

    `own` is the part's own view if the order of its factors differs. `stacked` are factors of the whole that the part
    does not have, with the index of the part along each. Raises ValueError with the reason if the views do not fit.
    """
    flat = [factor for dimension in view for factor in dimension]
    sums = [factor for factor in flat if "+" in factor]
    if len(sums) > 1 or len({*flat} - {"1"}) != len([factor for factor in flat if factor != "1"]):
        raise ValueError(f"the view {show(view)!r} has two sums, or a factor twice")
    terms = [one.strip() for one in sums[0].split("+")] if sums else []
    mine = terms[term] if terms else ""
    before = sum(_size(one, numbers) for one in terms[:term])
    named = tuple(tuple(mine if "+" in factor else factor for factor in dimension) for dimension in view)
    own = own or tuple(
        kept for dimension in named if (kept := tuple(factor for factor in dimension if factor not in stacked))
    )
    if mine in stacked:
        raise ValueError(f"the view {show(view)!r} has {mine!r} in its sum and as a factor that its parts do not have")
    factors = [factor for dimension in named for factor in dimension if factor not in stacked and factor != "1"]
    if sorted(factors) != sorted(factor for dimension in own for factor in dimension if factor != "1"):
        raise ValueError(f"the views {show(view)!r} and {show(own)!r} do not have the same factors")
    if len({*factors}) < len(factors):
        raise ValueError(f"the view {show(view)!r} has {mine!r} in its sum and as a factor: give it two names")
    shape, placed = whole_shape(own, numbers), _joined(_factors((view, named, own), numbers, before, stacked))
    is_transposed = {*own[-1]} - {"1"} != {*named[-1]} - {*stacked, "1"}
    if is_transposed and placed and placed[-1].size == 1 < placed[-1].whole.size:
        what = f"{show(own)!r} is a transposed part of {show(view)!r}"
        raise ValueError(f"{what}, and no two elements of it lie together: each would need a place of its own")
    return Part(shape, tuple(placed))


def show(view: View) -> str:
    return " ".join(one[0] if len(one) == 1 else f"({' '.join(one)})" for one in view)


def _size(factor: str, numbers: Mapping[str, int]) -> int:
    return sum(evaluate(one, numbers) for one in factor.split("+"))


def _factors(
    views: tuple[View, View, View], numbers: Mapping[str, int], before: int, stacked: Mapping[str, int]
) -> Iterator[Factor]:
    """Yield the factors of a part, the views of which are those of the whole, the same by name, and its own.

    `before` is the number of indices of the sum that precede the part's.
    """
    view, named, own = views
    alone = Place(0, 0, 1)
    places = {name: place for _, name, place in _places(own, own, numbers)}
    for factor, name, place in _places(view, named, numbers):
        part = places.get(name, alone) if name != "1" else alone
        if place.size > 1:
            yield Factor(part.size, place._replace(first=before if "+" in factor else stacked.get(name, 0)), part)


def _places(view: View, named: View, numbers: Mapping[str, int]) -> Iterator[tuple[str, str, Place]]:
    """Yield each factor of a view, its name in `named`, and its place; in the order of the view."""
    for dim, (dimension, names) in enumerate(zip(view, named, strict=True)):
        sizes = [_size(factor, numbers) for factor in dimension]
        for at, (factor, name) in enumerate(zip(dimension, names, strict=True)):
            yield factor, name, Place(dim, prod(sizes[at + 1 :]), sizes[at])


def _joined(factors: Iterable[Factor]) -> list[Factor]:
    """Return the factors in the order of the whole; those that lie together there and in the part are one."""
    joined: list[Factor] = []
    for factor in sorted(factors, key=lambda factor: (factor.whole.dim, -factor.whole.step, factor.whole.size)):
        size, whole, part = factor
        if joined and size == whole.size == part.size:
            outer = joined[-1]
            if outer.whole.holds(whole) and outer.part.holds(part):
                places = (
                    Place(inner.dim, inner.step, place.size * size, place.first * size)
                    for place, inner in ((outer.whole, whole), (outer.part, part))
                )
                joined[-1] = Factor(outer.size * size, *places)
                continue
        joined.append(factor)
    return joined


def tiles_of(
    placement: Placement, key: TensorKey, shape: Shape, part: Part, *, joins: bool = False
) -> Iterator[Placement]:
    """Yield where a part of a saved tensor lies, as tiles of the tensor `key`, which has this shape.

    With `joins` it is the other way round: the part is saved, and `key` has it.
    """
    factors = [Factor(size, of_part, whole) for size, whole, of_part in part.factors] if joins else part.factors
    ordered = _joined(factors)
    sizes = [tuple(one.whole.size for one in ordered if one.whole.dim == dim) for dim in range(len(placement.shape))]
    for tile in placement.parts:
        assert not tile.axes
        ends = [(first, first + size) for first, size in zip(tile.box.offset, tile.box.size, strict=True)]
        cuts = [[*cut_span(of_dim, *of_box)] for of_dim, of_box in zip(sizes, ends, strict=True)]
        last = max((dim for dim, of_dim in enumerate(cuts) if len(of_dim) > 1), default=0)
        for dim in range(last):  # a box of indices lies together if it has one index along these dimensions
            cuts[dim] = [one for at in range(*ends[dim]) for one in cut_span(sizes[dim], at, at + 1)]
        at = 0
        for cut in product(*cuts):
            held = [(a, a + size) for offset, counts in cut for a, size in zip(offset, counts, strict=True)]
            for offset, axes, box in _boxes_of(ordered, held, at, len(shape)):
                placed = tile.cut._replace(phase=tile.cut.phase + offset)
                one = tile._replace(key=key, shape=shape, box=box, cut=placed, axes=axes)
                yield one._replace(replicated=False, tiles=(), replicas=())
            at += prod(b - a for a, b in held)


def _boxes_of(
    factors: Sequence[Factor], held: Sequence[tuple[int, int]], at: int, ndim: int
) -> Iterator[tuple[int, tuple[Axis, ...], Box]]:
    """Yield the boxes of the new tensor that saved elements are, each with its first element and its axes.

    `held` are the indices along the factors, of elements that lie together from `at` on. They are taken apart along the
    outer factors until the part has all of them, and they are a box.
    """
    counts = [stop - start for start, stop in held]
    outer = next((number for number, count in enumerate(counts) if count > 1), len(counts))
    kept = [
        (max(start, one.whole.first), min(stop, one.whole.first + one.size))
        for one, (start, stop) in zip(factors, held, strict=True)
    ]
    if any(start >= stop for start, stop in kept):
        return
    axes = [Axis(one.part.dim, b - a, one.part.step) for one, (a, b) in zip(factors, kept, strict=True) if b - a > 1]
    sizes = [prod(axis.size for axis in axes if axis.dim == dim) for dim in range(ndim)]
    cut_inside = any(kept[number] != held[number] for number in range(outer + 1, len(held)))
    inner = [1] * ndim
    is_box = True
    for axis in sorted(axes, key=lambda axis: axis.step):
        is_box &= axis.step == inner[axis.dim]
        inner[axis.dim] *= axis.size
    if cut_inside or not is_box:
        below = prod(counts[outer + 1 :])
        for number in range(*kept[outer]):
            one_of = [*held[:outer], (number, number + 1), *held[outer + 1 :]]
            yield from _boxes_of(factors, one_of, at + (number - held[outer][0]) * below, ndim)
        return
    offset = [0] * ndim
    for one, (start, _) in zip(factors, kept, strict=True):
        offset[one.part.dim] += (start - one.whole.first + one.part.first) * one.part.step
    skipped = (kept[outer][0] - held[outer][0]) * prod(counts[outer + 1 :]) if outer < len(held) else 0
    plain = [*axes] == sorted(axes, key=lambda axis: (axis.dim, -axis.step))
    yield at + skipped, () if plain else tuple(axes), Box(offset=tuple(offset), size=tuple(sizes))
