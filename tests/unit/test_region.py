"""Regions: cut into boxes exactly, and intersected as a brute-force enumeration does."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.model.region import Box, Region, Rows, Run, box_region, boxes, overlap

QUICK = settings(max_examples=70)


def indices(box: Box) -> list[tuple[int, ...]]:
    """Every index of the box in row-major order, in the coordinates of the whole tensor."""
    return list(product(*(range(at, at + n) for at, n in zip(box.offset, box.size, strict=True))))


def elements(region: Region) -> list[tuple[int, ...]]:
    """The region's elements in storage order."""
    return indices(region.box)[region.start : region.stop]


@st.composite
def regions(draw, *, ndim=None, box=None):
    if box is None:
        ndim = draw(st.integers(0, 4)) if ndim is None else ndim
        axes = [(draw(st.integers(0, 3)), draw(st.integers(0, 4))) for _ in range(ndim)]
        box = Box(offset=tuple(at for at, _ in axes), size=tuple(n for _, n in axes))
    start, stop = sorted(draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    return Region(box=box, start=start, stop=stop)


@st.composite
def pairs(draw):
    """Two regions of one tensor; half of the time of the same box."""
    first = draw(regions())
    same = draw(st.booleans())
    return first, draw(regions(box=first.box) if same else regions(ndim=len(first.box.size)))


@QUICK
@given(regions())
def test_boxes_hold_the_elements_of_the_region_in_storage_order(region):
    assert [index for box in boxes(region) for index in indices(box)] == elements(region)


@QUICK
@given(regions())
def test_an_extent_is_that_of_the_elements_along_each_axis(region):
    for axis in range(len(region.box.size)):
        begin, end = region.extent(axis)
        at = [index[axis] for index in elements(region)]
        assert (begin, end) == (min(at), max(at) + 1) if at else begin == end


@st.composite
def boxes_of_shapes(draw):
    """The shape of a tensor and a box inside it; half of the axes are taken whole."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    axes = []
    for size in shape:
        at = 0 if draw(st.booleans()) else draw(st.integers(0, size))
        axes.append((at, size if at == 0 and draw(st.booleans()) else draw(st.integers(0, size - at))))
    return shape, Box(offset=tuple(at for at, _ in axes), size=tuple(n for _, n in axes))


@QUICK
@given(boxes_of_shapes())
def test_a_box_is_a_span_of_the_whole_where_its_elements_lie_together(case):
    """The same elements in the same order; a span whenever they follow each other in the whole tensor."""
    shape, box = case
    region = box_region(shape, box)
    assert elements(region) == indices(box)
    whole = indices(Box.whole(shape))
    at = [whole.index(index) for index in indices(box)]
    if at and at == list(range(at[0], at[0] + len(at))):
        assert region == Region(box=Box.whole(shape), start=at[0], stop=at[0] + len(at))


@QUICK
@given(boxes_of_shapes(), st.data())
def test_boxes_meet_where_they_share_an_element(case, data):
    shape, box = case
    axes = [(at := data.draw(st.integers(0, size)), data.draw(st.integers(0, size - at))) for size in shape]
    other = Box(offset=tuple(at for at, _ in axes), size=tuple(n for _, n in axes))
    assert box.intersects(other) == bool(set(indices(box)) & set(indices(other)))


@QUICK
@given(regions())
def test_boxes_are_few_and_none_is_empty(region):
    """At most 2 * ndim - 1 boxes (one of a tensor without axes)."""
    made = list(boxes(region))
    assert len(made) <= max(1, 2 * len(region.box.size) - 1)
    assert all(box.numel for box in made)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_the_bound_of_boxes_is_reached(ndim):
    """A span from the second element to the last but one of a cube of side 3 needs 2 * ndim - 1 boxes."""
    cube = Box.whole((3,) * ndim)
    assert len(list(boxes(Region(box=cube, start=1, stop=cube.numel - 1)))) == 2 * ndim - 1


def rows(first, second):
    """Their overlap, each row as a run of its own."""
    return [one for run in overlap(first, second) for one in run.each()]


@QUICK
@given(pairs())
def test_overlap_is_what_both_hold(pair):
    """Every element of both, once, in the order of the first, with its position in each."""
    first, second = pair
    in_second = {index: i for i, index in enumerate(elements(second))}
    expected = [(i, in_second[index]) for i, index in enumerate(elements(first)) if index in in_second]
    found = [(run.first_offset + i, run.second_offset + i) for run in rows(first, second) for i in range(run.numel)]
    assert sorted(found) == expected


@QUICK
@given(pairs())
def test_runs_of_an_overlap_are_as_long_as_can_be(pair):
    runs = sorted(rows(*pair))
    assert all(run.numel > 0 for run in runs)
    for run, after in pairwise(runs):
        continued = (run.first_offset + run.numel, run.second_offset + run.numel)
        assert (after.first_offset, after.second_offset) != continued


def test_spans_of_one_huge_box_overlap_in_one_run():
    """A trillion elements cost nothing: the boxes are not looked into."""
    box = Box.whole((10**6, 10**6))
    first, second = Region(box=box, start=5, stop=10**12), Region(box=box, start=10**11, stop=10**11 + 7)
    assert list(overlap(first, second)) == [Run(first_offset=10**11 - 5, second_offset=0, numel=7)]


def test_a_column_block_overlaps_row_by_row():
    """Columns 2 and 3 of a 3 x 5 tensor, against the span [1, 9) of the whole."""
    block = Region(box=Box(offset=(0, 2), size=(3, 2)), start=0, stop=6)
    span = Region(box=Box.whole((3, 5)), start=1, stop=9)
    assert rows(block, span) == [
        Run(first_offset=0, second_offset=1, numel=2),
        Run(first_offset=2, second_offset=6, numel=2),
    ]


def test_a_tensor_cut_along_an_inner_axis_overlaps_in_one_entry():
    """A quarter of the columns of 8,192 x 28,672 elements, in files of an eighth each: one run with 8,192 rows."""
    shape = (8192, 28672)
    quarter, eighth = (Box(offset=(0, 7168), size=(8192, 28672 // parts)) for parts in (4, 8))
    found = list(overlap(*(Region(box=box, start=0, stop=box.numel) for box in (quarter, eighth))))
    assert found == [Run(first_offset=0, second_offset=0, numel=3584, rows=(Rows(8192, 7168, 3584),))]
    assert found[0].total == prod(shape) // 8


def test_heads_inside_of_layers_are_one_entry_of_two_kinds_of_rows():
    """Layers x heads x elements, of which each side has other heads and other elements."""
    first, second = Box(offset=(0, 2, 0), size=(5, 4, 6)), Box(offset=(0, 0, 3), size=(5, 9, 6))
    (run,) = overlap(*(Region(box=box, start=0, stop=box.numel) for box in (first, second)))
    assert run == Run(first_offset=3, second_offset=12, numel=3, rows=(Rows(5, 24, 54), Rows(4, 6, 6)))


@pytest.mark.parametrize(
    ("offset", "size"), [((0,), ()), ((), (1,)), ((-1,), (2,)), ((0, 0), (3, -1)), ((1, 2, 3), (1, 2))]
)
def test_what_is_no_box_is_refused(offset, size):
    with pytest.raises(ValueError, match="not a box"):
        Box(offset=offset, size=size)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_span_that_leaves_its_box_is_refused(start, stop):
    with pytest.raises(ValueError, match="leaves a box of 6 elements"):
        Region(box=Box.whole((2, 3)), start=start, stop=stop)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 4)])
def test_the_whole_of_a_shape_has_its_elements(shape):
    assert Box.whole(shape).numel == prod(shape) == len(indices(Box.whole(shape)))
