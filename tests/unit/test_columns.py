"""The arithmetic of cuts on columns is that of each cut alone."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.columns import Cuts, Family
from ds_reshard.model.layout import Cut, Layout, Piece, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box

QUICK = settings(max_examples=100)


@st.composite
def placed(draw):
    numel = draw(st.integers(0, 40))
    wide = draw(st.none() | st.integers(0, 5))
    cut = Cut(
        chunk=draw(st.integers(1 if wide is None else 2, 12)),
        phase=draw(st.integers(0, 20)),
        origin=draw(st.integers(0, 9)),
        first=draw(st.integers(0, 3)),
        wide=wide,
        step=draw(st.integers(1, 3)),
    )
    box = Box.whole((numel,))
    key = TensorKey("p", "fp32")
    return Placement(key, (numel,), ElementType.FLOAT32, "f", "b", cut, box, replicated=draw(st.booleans()))


@QUICK
@given(st.lists(placed(), max_size=6), st.integers(0, 9))
def test_what_a_shard_holds(members, shard):
    pieces = Cuts(members).pieces_of(shard)
    expected = [(number, member.piece(shard)) for number, member in enumerate(members)]
    assert [
        (member, (start, stop, at))
        for member, _, start, stop, at in zip(*(column.tolist() for column in pieces), strict=True)
    ] == [(number, piece[1:]) for number, piece in expected if piece is not None]


@QUICK
@given(st.lists(placed(), max_size=6), st.data())
def test_where_elements_lie(members, data):
    members = [member for member in members if member.numel]
    spans = [sorted(data.draw(st.sets(st.integers(0, one.numel), min_size=2, max_size=2))) for one in members]
    start, stop = numpy.array(spans, dtype=numpy.int64).reshape(-1, 2).T
    pieces = Cuts(members).locate(start, stop)
    assert [(row[0], Piece(*row[1:])) for row in zip(*(column.tolist() for column in pieces), strict=True)] == [
        (number, piece)
        for number, (member, span) in enumerate(zip(members, spans, strict=True))
        for piece in member.cut.pieces(*span)
    ]


def test_numbers_that_do_not_fit_are_refused():
    """Columns have 64 bits; sums of what is in them must be exact."""
    cut = Cut(chunk=1 << 62)
    huge = Placement(TensorKey("p", "fp32"), (1,), ElementType.FLOAT32, "f", "b", cut, Box.whole((1,)))
    with pytest.raises(UnsupportedLayout, match=r"2\*\*62"):
        Cuts([huge])
    shards = huge._replace(cut=Cut(chunk=1 << 50))
    with pytest.raises(UnsupportedLayout, match=r"2\*\*62"):
        Family(Layout({shards.key: shards}, {"f": 1 << 13}), "f")
