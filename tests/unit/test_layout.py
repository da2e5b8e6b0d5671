"""Layouts: every element of every tensor lies in exactly one place, whatever the rule and the number of shards."""

from __future__ import annotations

import pickle
from itertools import pairwise, product
from math import ceil, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.formats.zero.flat import (
    FlatBuffer,
    Rule,
    Shard,
    arrange_buffers,
    by_key,
    merge_shards,
    round_robin_order,
    slice_numel,
    sliced_weight,
    undo_round_robin,
    whole_placement,
)
from ds_reshard.model.layout import Cut, Holder, Layout, Placement, TensorKey, Tiles, check_cover, chunked_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Part, Region, overlap

QUICK = settings(max_examples=40)
FP32, BF16 = ElementType.FLOAT32, ElementType.BFLOAT16
KINDS = {"fp32": FP32, "exp_avg": BF16}

dps = st.integers(1, 9)
shapes_of = st.lists(st.integers(0, 5), max_size=3).map(tuple)
models = st.lists(shapes_of, max_size=6).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})
cuts = st.builds(
    Cut,
    chunk=st.integers(1, 9),
    phase=st.integers(0, 20),
    origin=st.integers(0, 9),
    first=st.integers(0, 3),
    wide=st.none(),
    step=st.integers(1, 3),
)
uneven = st.builds(
    Cut,
    chunk=st.integers(2, 9),
    phase=st.integers(0, 20),
    origin=st.just(0),
    first=st.just(0),
    wide=st.integers(0, 5),
    step=st.just(1),
)


def places(placements: list[Placement], shards: int) -> list[tuple[str, int, int]]:
    """(buffer, shard, element offset) of every element of every tensor, in the order of the tensors."""
    found = []
    for placement in placements:
        for element in range(placement.numel):
            holders = [(shard, placement.piece(shard)) for shard in range(shards)]
            holders = [(shard, piece) for shard, piece in holders if piece and piece.start <= element < piece.stop]
            assert len(holders) == 1, f"{placement.key}, element {element}: {holders}"
            shard, piece = holders[0]
            found.append((placement.buffer, shard, piece.element_offset + element - piece.start))
    return found


@QUICK
@given(cuts, st.integers(0, 40), st.integers(0, 40))
def test_pieces_are_the_elements_one_by_one(cut, start, numel):
    """Element x lies in shard (x + phase) // chunk * step + first, at (x + phase) % chunk + origin."""
    found = [
        (element, piece.shard, piece.element_offset + element - piece.start)
        for piece in cut.pieces(start, start + numel)
        for element in range(piece.start, piece.stop)
    ]
    expected = []
    for element in range(start, start + numel):
        shard, inside = divmod(element + cut.phase, cut.chunk)
        expected.append((element, shard * cut.step + cut.first, inside + cut.origin))
    assert found == expected
    shards = [piece.shard for piece in cut.pieces(start, start + numel)]
    assert shards == sorted(set(shards))


@QUICK
@given(uneven, st.integers(0, 40), st.integers(0, 40))
def test_behind_the_wide_shards_lies_one_element_less(cut, start, numel):
    """The first `wide` shards hold `chunk` elements, all others one less; as nanotron's ZeRO-1 cuts a parameter."""
    sizes = [cut.chunk] * cut.wide + [cut.chunk - 1] * 100
    where = [(shard, inside) for shard, size in enumerate(sizes) for inside in range(size)]
    found = {
        element: (piece.shard, piece.element_offset + element - piece.start)
        for piece in cut.pieces(start, start + numel)
        for element in range(piece.start, piece.stop)
    }
    assert found == {element: where[element + cut.phase] for element in range(start, start + numel)}


@QUICK
@given(st.one_of(cuts, uneven), st.integers(0, 60))
def test_the_piece_of_a_shard_is_that_of_all_pieces(cut, numel):
    """`piece` answers for one shard what `pieces` says of all, and None for a shard that holds nothing."""
    by_shard = {piece.shard: piece for piece in cut.pieces(0, numel)}
    last = (numel + cut.phase) * cut.step + cut.first + 2
    assert [cut.piece(shard, numel) for shard in range(last)] == [by_shard.get(shard) for shard in range(last)]


@QUICK
@given(models, dps, st.data())
def test_a_flat_group_is_its_tensors_one_after_another(shapes, dp, data):
    """With gaps and padding: the place in the group, divided by the partition, is shard and offset."""
    gaps = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    buffer = FlatBuffer(shapes=shapes, rule=Rule.FLAT, ranks=dp, number=7, gaps=gaps, kinds=KINDS)
    placements, chunk = list(buffer.placements("f")), buffer.partition_numel
    Layout(by_key(placements), {"f": dp})
    expected, at = [], 0
    for i, shape in enumerate(shapes.values()):
        expected += [(at + element) for element in range(prod(shape))]
        at += prod(shape) + (gaps[i] if gaps else 0)
    assert places(placements, dp) == [(f"{kind}/7", x // chunk, x % chunk) for kind in KINDS for x in expected]
    assert buffer.numel == at
    assert sum(map(buffer.used_numel, range(dp))) == at


@QUICK
@given(models, dps, st.data())
def test_what_is_kept_whole_is_on_each_rank_that_has_a_part(shapes, dp, data):
    """Beside DeepSpeed's own walk along a group (`get_partition_info`, runtime/zero/stage_1_and_2.py, 0.19.8)."""
    gaps = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    buffer = FlatBuffer(shapes=shapes, rule=Rule.FLAT, ranks=dp, number=7, gaps=gaps)
    size, found = buffer.partition_numel, {name: dict(places) for name, places in buffer.momentum_offsets()}
    placements = list(buffer.momentum_placements("f", {"m": BF16}))
    replicas = Layout(by_key(merge_shards(map(Shard, placements))), {"f": dp}).replicas()
    firsts = {one.key for one in placements}
    assert sum(len(of_rank.placements) for of_rank in replicas.values()) == len(placements) - len(firsts)
    for rank in range(dp):
        begin, end, at, own = size * rank, size * (rank + 1), 0, 0
        for number, (name, shape) in enumerate(shapes.items()):
            numel = prod(shape)
            if begin <= at < end or at < begin < at + numel:
                assert found[name].pop(rank) == own
                pieces = [one.piece(rank) for one in placements if one.key.name == name]
                assert [one.element_offset for one in pieces if one is not None] == ([own] if numel else [])
                own += numel
            at += numel + (gaps[number] if gaps else 0)
        assert buffer.momentum_numel(rank) == own
    assert not size or not any(found.values())


@QUICK
@given(st.integers(0, 10**7), dps)
def test_a_partition_is_the_least_even_share(numel, dp):
    """Padded at the end to a multiple of 2 * dp, and by less than that."""
    padded = FlatBuffer(shapes={"p": (numel,)}, rule=Rule.FLAT, ranks=dp).partition_numel * dp
    assert padded % (2 * dp) == 0
    assert 0 <= padded - numel < 2 * dp


@QUICK
@given(models, dps)
def test_a_sub_group_holds_a_slice_of_each_tensor(shapes, dp):
    """Tensor by tensor ceil(numel / dp) elements a rank, one slice after another, nothing behind the last."""
    buffer = FlatBuffer(shapes=shapes, rule=Rule.EACH, ranks=dp, number=3, kinds=KINDS)
    placements = list(buffer.placements("f"))
    Layout(by_key(placements), {"f": dp})
    expected, at = [], 0
    for shape in shapes.values():
        chunk = ceil(prod(shape) / dp)
        assert chunk == slice_numel(shape, dp)
        expected += [(element // chunk, at + element % chunk) for element in range(prod(shape))]
        at += chunk
    assert places(placements, dp) == [(f"{kind}/3", *place) for kind in KINDS for place in expected]
    assert {buffer.used_numel(rank) for rank in range(dp)} == {buffer.partition_numel} == {at}


@QUICK
@given(models, dps)
def test_a_replicated_buffer_is_whole_on_each_rank(shapes, dp):
    """One parameter after another, without padding, whatever the number of ranks."""
    buffer = FlatBuffer(shapes=shapes, rule=Rule.REPLICATED, ranks=dp, number=2, kinds=KINDS)
    layout, at = Layout(by_key(buffer.placements("f")), {"f": dp}), 0
    for name, shape in shapes.items():
        pieces = {layout[TensorKey(name, "fp32")].piece(rank) for rank in range(dp)}
        assert pieces == ({(0, 0, prod(shape), at)} if prod(shape) else {None})
        at += prod(shape)
    assert buffer.partition_numel == buffer.numel == at


@QUICK
@given(st.lists(models, max_size=4), dps, st.integers(1, 40), st.integers(1, 8))
def test_param_groups_become_flat_buffers_as_deepspeed_makes_them(groups, dp, most, alignment):
    """Beside its own walks (`_create_fp16_sub_groups`, stage3.py; `_round_robin_reorder`, stage_1_and_2.py, 0.19.8)."""
    groups = [{f"{n}.{name}": shape for name, shape in one.items()} for n, one in enumerate(groups)]
    expected, part, numel = [], [], 0
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            part.append(name)
            numel += ceil(prod(shape) / dp)
            if numel >= most or name == [*shapes][-1]:
                expected.append((number, part))
                part, numel = [], 0
    made = arrange_buffers(groups, Rule.EACH, [dp] * len(groups), sub_group_numel=most)
    assert [(one.group, [*one.shapes]) for one in made] == expected
    for one in arrange_buffers(groups, Rule.FLAT, [dp] * len(groups), round_robin=True, alignment=alignment):
        names = list(groups[one.group])
        assert [*one.shapes] == round_robin_order(names, dp) and undo_round_robin([*one.shapes], dp) == names
        if alignment > 1:
            assert all(cut.phase % alignment == 0 for _, cut in one.cuts()) and one.gaps[-1] == 0
        assert one.number == sum(bool(shapes) for shapes in groups[: one.group])


@QUICK
@given(shapes_of, dps)
def test_a_sliced_tensor_has_a_buffer_of_its_own(shape, dp):
    """Cut into pieces of ceil(numel / dp), each at the start of its buffer."""
    placement = sliced_weight("p", shape, BF16, dp, family="f", buffer="own")
    Layout(by_key([placement]), {"f": dp})
    chunk = slice_numel(shape, dp)
    assert places([placement], dp) == [("own", x // chunk, x % chunk) for x in range(prod(shape))]


@QUICK
@given(shapes_of, dps)
def test_a_whole_tensor_is_in_every_shard(shape, shards):
    placement = whole_placement("p", "weight", shape, BF16, family="f", buffer="own")
    Layout(by_key([placement]), {"f": shards})
    for shard in range(shards):
        piece = placement.piece(shard)
        if not prod(shape):
            assert piece is None
            continue
        assert (piece.start, piece.stop, piece.element_offset) == (0, prod(shape), 0)
        assert placement.region(piece) == Region(box=Box.whole(shape), start=0, stop=prod(shape))


def tensor(name: str, numel: int, cut: Cut, **more: object) -> Placement:
    return Placement(
        key=TensorKey(name=name, kind="fp32"),
        shape=(numel,),
        dtype=FP32,
        family="f",
        buffer="b",
        cut=cut,
        box=Box.whole((numel,)),
        **more,
    )


REFUSED = {
    "flat tensors overlap": ([tensor("a", 5, Cut(chunk=6)), tensor("b", 2, Cut(chunk=6, phase=4))], "a.*b.* overlap"),
    "slices overlap": ([tensor("a", 8, Cut(chunk=4)), tensor("b", 8, Cut(chunk=4, origin=3))], "a.*b.* overlap"),
    "one inside another": ([tensor("a", 9, Cut(chunk=6)), tensor("b", 1, Cut(chunk=6, phase=3))], "overlap"),
    "same place": ([tensor("a", 1, Cut(chunk=4)), tensor("b", 1, Cut(chunk=4))], "overlap"),
    "too long for the shards": ([tensor("a", 13, Cut(chunk=6))], "a.*does not fit 2 shards"),
    "phase pushes it out": ([tensor("a", 3, Cut(chunk=6, phase=10))], "a.*does not fit 2 shards"),
    "replica longer than a shard": ([tensor("a", 7, Cut(chunk=6), replicated=True)], "a.*does not fit"),
    "too long for every second shard": ([tensor("a", 5, Cut(chunk=4, step=2))], "a.*does not fit 2 shards"),
    "too long behind the wide shards": ([tensor("a", 8, Cut(chunk=4, wide=1))], "a.*does not fit 2 shards"),
    "two rules in one buffer": ([tensor("a", 4, Cut(chunk=3, phase=1)), tensor("b", 2, Cut(chunk=2))], "overlap"),
    "origin in a flat group": (
        [tensor("a", 2, Cut(chunk=3, phase=1)), tensor("b", 1, Cut(chunk=3, origin=1))],
        "overlap",
    ),
}


@pytest.mark.parametrize(("placements", "why"), REFUSED.values(), ids=REFUSED)
def test_a_layout_that_cannot_be_is_refused(placements, why):
    with pytest.raises(ValueError, match=why):
        Layout(by_key(placements), {"f": 2})


ACCEPTED = {
    "every second shard": [tensor("a", 4, Cut(chunk=4, step=2)), tensor("b", 4, Cut(chunk=4, first=1, step=2))],
    "parts of one shard behind each other": [
        tensor("a", 4, Cut(chunk=4)),
        tensor("b", 2, Cut(chunk=2, origin=4)),
        tensor("c", 2, Cut(chunk=2, origin=4, phase=2)),
    ],
    "fills its shards": [tensor("a", 12, Cut(chunk=6))],
    "next to each other": [tensor("a", 5, Cut(chunk=6)), tensor("b", 7, Cut(chunk=6, phase=5))],
    "slices side by side": [tensor("a", 8, Cut(chunk=4)), tensor("b", 3, Cut(chunk=2, origin=4))],
    "short slice leaves its room": [tensor("a", 1, Cut(chunk=4)), tensor("b", 8, Cut(chunk=4, origin=1))],
    "an empty tensor is nowhere": [tensor("a", 12, Cut(chunk=6)), tensor("b", 0, Cut(chunk=1, phase=99))],
    "nothing": [],
}


@pytest.mark.parametrize("placements", ACCEPTED.values(), ids=ACCEPTED)
def test_a_layout_that_fits_is_accepted(placements):
    layout = Layout(by_key(placements), {"f": 2})
    assert layout.in_buffer("f", "b") == placements
    assert layout.in_buffer("f", "other") == []


def test_a_layout_knows_its_tensors_by_name_kind_and_buffer():
    buffer = FlatBuffer(shapes={"p": (3,), "q": (2, 2)}, rule=Rule.FLAT, ranks=2, kinds=KINDS)
    placements = list(buffer.placements("f"))
    layout = Layout(
        by_key([*placements, whole_placement("p", "weight", (3,), BF16, family="g", buffer="w")]), {"f": 2, "g": 1}
    )
    assert layout.kinds("p") == ["fp32", "exp_avg", "weight"]
    assert layout.buffers("f") == ["fp32/0", "exp_avg/0"]
    assert [str(p.key) for p in layout.in_buffer("f", "exp_avg/0")] == ["p[exp_avg]", "q[exp_avg]"]
    assert layout[TensorKey(name="q", kind="fp32")] is placements[1]
    assert (TensorKey(name="p", kind="weight") in layout, TensorKey(name="z", kind="fp32") in layout) == (True, False)


@st.composite
def grids(draw):
    """The shape of a tensor, and boxes that tile it: every axis is cut anywhere."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(pairwise(at)) for at in edges]
    tiles = [Box(offset=tuple(a for a, _ in tile), size=tuple(b - a for a, b in tile)) for tile in product(*spans)]
    return shape, draw(st.permutations(tiles))


def in_chunks(shape: tuple[int, ...], boxes: list[Box]) -> Placement:
    return chunked_placement(TensorKey(name="p", kind="weight"), shape, FP32, boxes, family="f", buffer="chunk")


@QUICK
@given(grids())
def test_chunks_that_tile_a_tensor_are_found_by_their_regions(grid):
    """Each shard holds the elements of its box, whole."""
    shape, boxes = grid
    placement = in_chunks(shape, boxes)
    layout = Layout(by_key([placement]), {"f": len(boxes)})
    for shard, box in enumerate(boxes):
        ((found, piece),) = layout.pieces("f", "chunk", shard)
        assert (piece.start, piece.stop, piece.element_offset) == (0, box.numel, 0)
        assert (
            list(placement.regions(shard))
            == [(found.region(piece), 0)]
            == [(Region(box=box, start=0, stop=box.numel), 0)]
        )


@QUICK
@given(grids(), st.data())
def test_near_tiles_are_all_that_a_region_meets(grid, data):
    """Whatever region of whatever box; and no tile is told twice."""
    shape, boxes = grid
    if len(boxes) == 1:
        return
    axes = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    box = Box(offset=tuple(a for a, _ in axes), size=tuple(b - a for a, b in axes))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    wanted = Region(box=box, start=start, stop=stop)
    tiles = in_chunks(shape, boxes).tiles
    near = [tile.box for tile in Tiles(tiles).candidates(wanted)]
    met = [tile.box for tile in tiles if list(overlap(wanted, Region(box=tile.box, start=0, stop=tile.numel)))]
    assert len(near) == len({box.offset for box in near}) and {box.offset for box in met} <= {b.offset for b in near}


@pytest.mark.parametrize("axis", [0, 1])
def test_of_many_tiles_only_the_near_ones_are_looked_at(axis):
    """Cut along either axis; a span of a row meets those of its columns alone."""
    boxes = [Box(offset=(0, 2 * i) if axis else (2 * i, 0), size=(512, 2) if axis else (2, 512)) for i in range(256)]
    tiles = Tiles(in_chunks((512, 512), boxes).tiles)
    box = Box(offset=(101, 0), size=(4, 512)) if axis == 0 else Box(offset=(0, 101), size=(512, 4))
    assert len(tiles.candidates(Region(box=box, start=0, stop=box.numel))) == 3
    row = Region(box=Box.whole((512, 512)), start=512 * 7 + 9, stop=512 * 7 + 14)
    assert len(tiles.candidates(row)) == (3 if axis else 1)


@QUICK
@given(grids(), st.data())
def test_chunks_that_do_not_tile_a_tensor_are_refused(grid, data):
    """A hole, an overlap, a box beside the tensor."""
    shape, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    wrong = data.draw(st.sampled_from(["missing", "twice", "another's", "outside"]))
    if wrong == "missing":
        bad = boxes[:at] + boxes[at + 1 :]
    elif wrong == "twice":
        bad = [*boxes, boxes[at]]
    elif wrong == "another's" and len(boxes) > 1:
        bad = [*boxes[:at], boxes[at - 1], *boxes[at + 1 :]]
    else:
        moved = Box(offset=tuple(n + 1 for n in boxes[at].offset), size=boxes[at].size) if shape else boxes[at]
        bad = [*boxes[:at], moved, *boxes[at + 1 :]] if shape else []
    with pytest.raises(ValueError, match="box"):
        in_chunks(shape, bad)


def test_boxes_that_overlap_are_refused_where_their_elements_are_as_many_as_the_tensors():
    """Two rows twice, and two in none."""
    boxes = [Box(offset=(row, 0), size=(2, 4)) for row in (0, 1)]
    with pytest.raises(ValueError, match="overlap"):
        in_chunks((4, 4), boxes)


@QUICK
@given(st.lists(st.lists(st.integers(0, 4), unique=True), min_size=1, max_size=4))
def test_equal_parts_of_ranks_are_replicas_and_all_others_tiles(ranks):
    """Replica n has of each row what the n-th rank that has it holds, or, if fewer have it, the first."""
    rows = sorted({row for held in ranks for row in held})
    ranks, shape = [[rows.index(row) for row in held] for held in ranks], (len(rows), 3)
    placed = []
    for rank, held in enumerate(ranks):
        one = whole_placement("w", "fp32", shape, FP32, family="optim", buffer="fp32/0")
        parts = [Part(Box.along(shape, 0, row, 1), 3 * at) for at, row in enumerate(held)]
        for stage in (0, 2):
            placed.append(Shard(one._replace(cut=Cut(chunk=99, phase=7 + stage, first=rank)), tuple(parts), stage))
    holders = [[rank for rank, held in enumerate(ranks) if row in held] for row in range(len(rows))]
    (first,) = merge_shards(placed)
    found = {Holder(): first, **dict(first.replicas)}
    number = range(max(map(len, holders), default=1))
    assert list(found) == [Holder(stage, rank) for stage in (0, 2) for rank in number]
    for (stage, number), replica in found.items() if rows else ():
        check_cover([tile.box for tile in replica.parts], shape)
        for tile in replica.parts:
            row = tile.box.offset[0]
            rank = holders[row][number] if number < len(holders[row]) else holders[row][0]
            assert (tile.cut.first, tile.cut.phase) == (rank, 7 + stage + 3 * ranks[rank].index(row))


def test_a_tensor_that_only_a_later_stage_has_is_none_of_the_layout():
    one = whole_placement("w", "weight", (3,), FP32, family="model", buffer="copy 1 of w")
    assert list(merge_shards([Shard(one, None, 1)])) == []


def test_a_pickled_layout_comes_back_as_it_was_with_tiles_copies_and_uneven_cuts():
    buffer = FlatBuffer(shapes={"a": (3, 5), "b": ()}, rule=Rule.FLAT, ranks=4, gaps=[1, 0], kinds=KINDS)
    flat = by_key(buffer.placements("optim"))
    tiled = in_chunks((4, 4), [Box(offset=(row, 0), size=(2, 4)) for row in (0, 2)])
    first = next(iter(flat.values()))
    wide = first._replace(
        key=first.key._replace(copy=2), family="other", buffer="uneven", cut=Cut(chunk=4, wide=3), replicated=False
    )
    layout = Layout({**flat, tiled.key: tiled, wide.key: wide}, {"optim": 4, "other": 9, tiled.family: 2})
    for one in (layout, Layout({}, {"optim": 4})):
        again = pickle.loads(pickle.dumps(one))
        assert list(again.placements.items()) == list(one.placements.items())
        assert again.shards == one.shards
