"""Views: which rows of one tensor are the rows of others, in the notation of einops.

`(g q+1+1 d) h` is the view of a tensor of two dimensions, the first of which has three factors. The sum says of which
parts the tensor consists: in each of `g` groups come `q` times `d` rows of the first part, `d` rows of the second and
`d` of the third. A part has the same factors with its own term of the sum: `(g q d) h`, `(g 1 d) h`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.region import Box, Region, Shape, boxes

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
        raise ValueError(f"{text!r} is no view: parentheses hold the factors of one dimension, and nothing else")
    bad = any("(" in factor or ")" in factor for dimension in found for factor in dimension)
    if bad or not found or not all(found):
        raise ValueError(f"{text!r} is no view: parentheses hold the factors of one dimension, and nothing else")
    return found


class Span(NamedTuple):
    """`rows` rows of the whole from `whole` on, which are the rows of a part from `part` on."""

    whole: int
    part: int
    rows: int


class Part(NamedTuple):
    """One part of a tensor: its shape, and its rows in the whole.

    The rows of a tensor are its elements along the first `lead` dimensions together; the other dimensions are the same
    in the whole and in the part. `lead` counts the whole's dimensions, `part_lead` those of the part.
    """

    shape: Shape
    lead: int
    part_lead: int
    spans: tuple[Span, ...]


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
    named = [tuple(mine if "+" in factor else factor for factor in dimension) for dimension in view]
    own = own or tuple(
        kept for dimension in named if (kept := tuple(factor for factor in dimension if factor not in stacked))
    )
    if mine in stacked:
        raise ValueError(f"the view {show(view)!r} has {mine!r} in its sum and as a factor that its parts do not have")
    factors = [factor for dimension in named for factor in dimension if factor not in stacked and factor != "1"]
    if sorted(factors) != sorted(factor for dimension in own for factor in dimension if factor != "1"):
        raise ValueError(f"the views {show(view)!r} and {show(own)!r} do not have the same factors")
    if {*own[-1]} - {"1"} != {*named[-1]} - {*stacked, "1"}:
        what = f"{show(own)!r} has its dimensions in another order than {show(view)!r}"
        raise ValueError(f"{what}: a transposed tensor cannot be mapped")
    tail = 0
    while tail < min(len(own), len(view)) and own[-1 - tail] == view[-1 - tail] and "+" not in "".join(view[-1 - tail]):
        tail += 1
    lead, part_lead = len(view) - tail, len(own) - tail
    if {factor for dimension in own[part_lead:] for factor in dimension} & {*stacked}:
        raise ValueError(f"a part of {show(view)!r} cannot be stacked along its last dimensions")
    steps, first = dict[str, int](), 0
    inner = 1
    for dimension, shown in reversed([*zip(view[:lead], named[:lead], strict=True)]):
        for factor, name in reversed([*zip(dimension, shown, strict=True)]):
            if steps.setdefault(name, inner) != inner and name != "1":
                raise ValueError(f"the view {show(view)!r} has {name!r} in its sum and as a factor: give it two names")
            if "+" in factor:
                first += before * inner
            if name in stacked:
                first += stacked[name] * inner
            inner *= sum(_size(one, numbers) for one in factor.split("+"))
    axes, inner = list[tuple[int, int, int]](), 1
    for factor in reversed([factor for dimension in own[:part_lead] for factor in dimension]):
        size = _size(factor, numbers)
        if size != 1:
            axes.append((size, steps[factor], inner))
        inner *= size
    return Part(whole_shape(own, numbers), lead, part_lead, tuple(_spans(first, axes)))


def show(view: View) -> str:
    return " ".join(one[0] if len(one) == 1 else f"({' '.join(one)})" for one in view)


def _size(factor: str, numbers: Mapping[str, int]) -> int:
    return sum(evaluate(one, numbers) for one in factor.split("+"))


def _spans(first: int, axes: Sequence[tuple[int, int, int]]) -> Iterator[Span]:
    """Yield the spans of a part whose axes, the innermost first, have these sizes and steps in the whole and in it."""
    count, outer = 1, list(axes)
    while outer and outer[0][1:] == (count, count):
        count *= outer.pop(0)[0]
    outer.reverse()
    for index in product(*(range(size) for size, _, _ in outer)):
        whole, part = (sum(i * axis[side] for i, axis in zip(index, outer, strict=True)) for side in (1, 2))
        yield Span(first + whole, part, count)


def tiles_of(
    placement: Placement, key: TensorKey, shape: Shape, leads: tuple[int, int], spans: Sequence[Span]
) -> Iterator[Placement]:
    """Yield where the rows `spans` of a tensor lie, as tiles of the tensor `key` that has them in turn.

    `whole` of a span counts rows of the placed tensor, `part` rows of the tensor `key`, which has this shape; `leads`
    are the numbers of their leading dimensions.
    """
    lead, other_lead = leads
    rows, other = placement.shape[:lead], Box.whole(shape[:other_lead])
    for tile in placement.parts:
        tail_offset, tail_size = tile.box.offset[lead:], tile.box.size[lead:]
        width, stored = prod(tail_size), 0
        for start, stop in _intervals(rows, Box(offset=tile.box.offset[:lead], size=tile.box.size[:lead])):
            for whole, part, count in spans:
                low, high = max(start, whole), min(stop, whole + count)
                if low >= high:
                    continue
                at = stored + (low - start) * width
                region = Region(box=other, start=part + low - whole, stop=part + high - whole)
                for one in boxes(region):
                    box = Box(offset=(*one.offset, *tail_offset), size=(*one.size, *tail_size))
                    cut = tile.cut._replace(phase=tile.cut.phase + at)
                    yield tile._replace(key=key, shape=shape, box=box, cut=cut, replicated=False, tiles=(), replicas=())
                    at += box.numel
            stored += (stop - start) * width


def _intervals(rows: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the intervals of rows that a box of the leading dimensions has, in the order of its storage."""
    if not box.numel:
        return
    last = max((axis for axis, size in enumerate(rows) if size != box.size[axis]), default=0)
    count = prod(box.size[last:])
    for index in product(*map(range, box.size[:last])):
        first = 0
        offset = (*(a + b for a, b in zip(box.offset, index, strict=False)), *box.offset[last:])
        for size, at in zip(rows, offset, strict=True):
            first = first * size + at
        yield first, first + count
