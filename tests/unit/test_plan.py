"""Plans between any two layouts: what they move is the model, each byte is read once, every change is seen.

The checkpoints here are of no format: `Checkpoint` writes the buffers of a layout to one file a shard, each in a
record with bytes around it that nobody wants, and padding that is not zero.

The two golden plans of tests/unit/golden/ show what a plan says. After a change that is meant, write them anew
with `DS_RESHARD_WRITE_GOLDEN=1 python -m pytest tests/unit/test_plan.py -k golden`, and read the difference.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.execution.checksums import combine, partial_sums, read_again, settle
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key
from ds_reshard.model.index import Extent, Index, Record, extents_overlap
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.planning.plan import Planner
from ds_reshard.testing import FormatSuite, SavedCheckpoint
from ds_reshard.testing.suites import checksum_faults

SOME = settings(max_examples=25)
GOLDEN = Path(__file__).parent / "golden"
FP32, BF16, INT64 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.INT64
KINDS = {"fp32": FP32, "exp_avg": BF16, "count": INT64}
TYPES = {**KINDS, "weight": BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One side: groups of names, and the rule and number of ranks that cut them."""

    groups: tuple[tuple[str, ...], ...]
    rule: str
    dp: int
    kinds: dict[str, ElementType]

    @property
    def ranks(self) -> range:
        return range(self.dp)

    def layout(self, shapes):
        placements = [one for buffer in self._buffers(shapes) for one in buffer.placements("f")]
        return Layout(by_key(placements), {"f": self.dp})

    def sizes(self, shapes):
        """Elements of each buffer of a rank."""
        buffers = self._buffers(shapes)
        return {f"{kind}/{buffer.number}": buffer.partition_numel for buffer in buffers for kind in self.kinds}

    def _buffers(self, shapes):
        rule = {"sub": Rule.EACH, "replicated": Rule.REPLICATED}.get(self.rule, Rule.FLAT)
        return [
            FlatBuffer(
                shapes={name: shapes[name] for name in names},
                rule=rule,
                ranks=self.dp,
                number=number,
                gaps=[len(name) % 3 for name in names] if self.rule == "gaps" else None,
                kinds=self.kinds,
            )
            for number, names in enumerate(self.groups)
        ]


class Checkpoint:
    """A shard source over files that it writes: (family, shard) to buffers, each record `around` bytes larger."""

    def __init__(self, folder, layout, sizes, truth, *, seed, pairs=False):
        rng = random.Random(seed)
        self.opened = []
        self._shards = {}
        for shard in range(layout.shards["f"]):
            path = os.path.join(folder, f"shard{shard}")
            extents, data = {}, bytearray(rng.randbytes(rng.randint(0, 9)))
            for buffers in self._records(list(sizes), pairs):
                begin, inside = len(data), {}
                for buffer in buffers:
                    data += rng.randbytes(rng.choice([0, 0, 3, 8]))
                    inside[buffer] = len(data)
                    data += self._buffer(layout, buffer, sizes[buffer], shard, truth, rng)
                data += rng.randbytes(rng.choice([0, 0, 5]))
                record = Record(path=path, byte_offset=begin, nbytes=len(data) - begin, crc32=crc32(data[begin:]))
                for buffer, at in inside.items():
                    dtype = TYPES[buffer.partition("/")[0]]
                    extents[buffer] = Extent(record=record, byte_offset=at, dtype=dtype, numel=sizes[buffer])
                data += rng.randbytes(rng.randint(0, 3))
            Path(path).write_bytes(data)
            self._shards[shard] = extents

    def buffers(self, family, shard):
        assert family == "f"
        self.opened.append(shard)
        for extent in self._shards[shard].values():
            if extent.record.byte_offset + extent.record.nbytes > os.path.getsize(extent.path):
                raise CheckpointDamaged(f"{extent.path}: is cut off")
        return self._shards[shard]

    @staticmethod
    def _records(buffers, pairs):
        return [buffers[i : i + 2] for i in range(0, len(buffers), 2)] if pairs else [[b] for b in buffers]

    @staticmethod
    def _buffer(layout, buffer, numel, shard, truth, rng):
        size = TYPES[buffer.partition("/")[0]].itemsize
        data = bytearray(rng.randbytes(numel * size))
        for placement in layout.in_buffer("f", buffer):
            piece = placement.piece(shard)
            if piece is not None:
                at = piece.element_offset * size
                saved = raw(truth[placement.key].reshape(-1)[piece.start : piece.stop])
                data[at : at + len(saved)] = saved
        return data


def raw(tensor):
    return bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def model(shapes):
    """Every tensor of every kind, its elements numbered through (bfloat16 rounds those above 256)."""
    truth = {}
    for kind, dtype in KINDS.items():
        at = 1
        for name, shape in shapes.items():
            values = torch.arange(at, at + prod(shape)).reshape(shape)
            truth[TensorKey(name=name, kind=kind)] = values.to(torch_dtype(dtype))
            at += prod(shape)
    return truth


@st.composite
def arrangements(draw, names, rules, kinds):
    order = draw(st.permutations(names))
    cut = draw(st.integers(0, len(order)))
    groups = tuple(tuple(part) for part in (order[:cut], order[cut:]) if part)
    return Arrangement(groups=groups, rule=draw(st.sampled_from(rules)), dp=draw(st.integers(1, 6)), kinds=kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A reshard: shapes, both sides, the names that are wanted, and how the source's records are made."""

    shapes: dict[str, tuple[int, ...]]
    source: Arrangement
    target: Arrangement
    seed: int
    pairs: bool

    @property
    def wants(self):
        names = [name for group in self.target.groups for name in group]
        return {TensorKey(name=n, kind=k): TensorKey(name=n, kind=k) for n in names for k in self.target.kinds}

    def checkpoint(self, folder):
        layout = self.source.layout(self.shapes)
        sizes = self.source.sizes(self.shapes)
        return Checkpoint(folder, layout, sizes, model(self.shapes), seed=self.seed, pairs=self.pairs)

    def plan(self, rank, checkpoint, wants=None):
        index = Index(self.source.layout(self.shapes), checkpoint)
        target = self.target.layout(self.shapes)
        sizes = self.target.sizes(self.shapes)
        plan = Planner(index, target, wants or self.wants).plan(rank, sizes=sizes)
        assert index.faults == []
        return plan

    def plans(self, checkpoint):
        return [self.plan(rank, checkpoint) for rank in self.target.ranks]


@st.composite
def cases(draw, rules=("flat", "gaps", "sub", "replicated")):
    shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
    made = {"p" * (i + 1): shape for i, shape in enumerate(draw(shapes))}
    wanted = draw(st.lists(st.sampled_from(list(made)), min_size=1, unique=True))
    kinds = draw(st.sampled_from([KINDS, {"fp32": FP32, "exp_avg": BF16}, {"fp32": BF16, "count": INT64}]))
    return Case(
        shapes=made,
        source=draw(arrangements(list(made), ["flat", "gaps", "sub"], KINDS)),
        target=draw(arrangements(wanted, rules, kinds)),
        seed=draw(st.integers(0, 99)),
        pairs=draw(st.booleans()),
    )


def execute(case, plan):
    """What one rank's fresh buffers hold after its plan, and what it read."""
    tensors = {}
    for buffer, numel in case.target.sizes(case.shapes).items():
        tensors[buffer] = torch.full((numel,), 77, dtype=torch_dtype(case.target.kinds[buffer.partition("/")[0]]))
    executor = ThreadExecutor(threads=1, memory_nbytes=1, checksum=True)
    outcome = executor.execute(plan, {buffer: TensorTarget(tensor) for buffer, tensor in tensors.items()})
    assert outcome.faults == []
    return tensors, outcome


def expected_buffers(case, rank):
    """What they must hold: each tensor's piece, cast to the buffer's type, and zeros elsewhere."""
    tensors = {}
    for buffer, numel in case.target.sizes(case.shapes).items():
        tensors[buffer] = torch.zeros(numel, dtype=torch_dtype(case.target.kinds[buffer.partition("/")[0]]))
    truth = model(case.shapes)
    for key, placement in case.target.layout(case.shapes).placements.items():
        piece = placement.piece(rank)
        if piece is not None:
            stop = piece.element_offset + piece.stop - piece.start
            tensors[placement.buffer][piece.element_offset : stop] = truth[key].reshape(-1)[piece.start : piece.stop]
    return tensors


def spans_read(plans):
    """For each record the byte spans that the plans read, ordered."""
    spans = {}
    for plan in plans:
        for part in (*plan.copies, *plan.checks):
            spans.setdefault(part.record, []).append((part.byte_offset, part.byte_offset + part.nbytes))
    return {record: sorted(of) for record, of in spans.items()}


def read_once(plans):
    for record, spans in spans_read(plans).items():
        edges = [record.byte_offset, *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == edges[:-1], f"{record}: {spans}"
        assert edges[-1] == record.byte_offset + record.nbytes, f"{record}: {spans}"


@SOME
@given(cases())
def test_what_every_rank_holds_afterwards_is_the_model(case):
    """Each wanted tensor bit for bit (cast where the types differ), zero wherever no tensor lies."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = case.checkpoint(folder)
        for rank in case.target.ranks:
            found, _ = execute(case, case.plan(rank, checkpoint))
            expected = expected_buffers(case, rank)
            assert {b: raw(t) for b, t in found.items()} == {b: raw(t) for b, t in expected.items()}


@SOME
@given(cases())
def test_over_all_ranks_every_byte_of_a_touched_record_is_read_once(case):
    """Copies and checks tile it; where the target is replicated, those of each rank alone do."""
    with tempfile.TemporaryDirectory() as folder:
        plans = case.plans(case.checkpoint(folder))
    for together in [[plan] for plan in plans] if case.target.rule == "replicated" else [plans]:
        read_once(together)


@SOME
@given(cases(), st.data())
def test_a_changed_byte_anywhere_in_a_touched_record_is_seen(case, data):
    """Also in padding and around the buffers; a sound checkpoint has no fault, and nothing is read again."""
    with tempfile.TemporaryDirectory() as folder:
        plans = case.plans(case.checkpoint(folder))
        records = sorted(spans_read(plans))
        damaged = data.draw(st.sampled_from([*records, None])) if records else None
        if damaged is not None:
            at = damaged.byte_offset + data.draw(st.integers(0, damaged.nbytes - 1))
            content = bytearray(Path(damaged.path).read_bytes())
            content[at] ^= data.draw(st.integers(1, 255))
            Path(damaged.path).write_bytes(content)
        outcomes = [execute(case, plan)[1] for plan in plans]
        together = [[o] for o in outcomes] if case.target.rule == "replicated" else [outcomes]
        found = {(fault.error, fault.where) for of in together for fault in checksum_faults(of)}
        assert found == ({("ChecksumMismatch", damaged.path)} if damaged is not None else set())


@SOME
@given(cases(), st.randoms())
def test_the_same_layouts_give_the_same_plan(case, rng):
    """Computed twice, and with the wants in any order."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = case.checkpoint(folder)
        wants = list(case.wants.items())
        rng.shuffle(wants)
        for rank in case.target.ranks:
            plan = case.plan(rank, checkpoint)
            assert case.plan(rank, checkpoint) == plan == case.plan(rank, checkpoint, dict(wants))


@SOME
@given(cases())
def test_copies_are_ordered_and_none_continues_another(case):
    """By file and offset; no two copies of a plan could be one, and none is empty."""
    with tempfile.TemporaryDirectory() as folder:
        plans = case.plans(case.checkpoint(folder))
    for plan in plans:
        for parts in (plan.copies, plan.checks):
            assert [(p.record.path, p.byte_offset) for p in parts] == sorted(
                (p.record.path, p.byte_offset) for p in parts
            )
            assert all(part.nbytes for part in parts)
        for one, other in permutations(plan.copies, 2):
            continues = (one.record, one.buffer, one.byte_offset + one.nbytes, one.element_offset + one.numel)
            assert continues != (other.record, other.buffer, other.byte_offset, other.element_offset)


@SOME
@given(cases())
def test_a_rank_opens_only_the_shards_that_it_reads(case):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = case.checkpoint(folder)
        for rank in case.target.ranks:
            checkpoint.opened.clear()
            plan = case.plan(rank, checkpoint)
            assert sorted(checkpoint.opened) == sorted({int(path.rpartition("shard")[2]) for path in plan.files})


@SOME
@given(cases(rules=("flat",)), st.data())
def test_a_part_of_a_tensor_is_moved_as_its_own_box(case, data):
    """Targets that want a box inside each tensor get its elements, and no sound file is called damaged."""
    placements, truth = {}, model(case.shapes)
    for key in case.wants:
        shape = case.shapes[key.name]
        offset = tuple(data.draw(st.integers(0, n)) for n in shape)
        box = Box(
            offset=offset, size=tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, offset, strict=True))
        )
        chunk = max(1, -(-box.numel // case.target.dp))
        placements[key] = Placement(
            key=key, shape=shape, dtype=KINDS[key.kind], family="f", buffer=str(key), cut=Cut(chunk=chunk), box=box
        )
    target, outcomes = Layout(placements, {"f": case.target.dp}), []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = case.checkpoint(folder)
        for rank in case.target.ranks:
            index = Index(case.source.layout(case.shapes), checkpoint)
            plan = Planner(index, target, case.wants).plan(rank, sizes={})
            tensors = {p.buffer: torch.zeros(p.cut.chunk, dtype=torch_dtype(p.dtype)) for p in placements.values()}
            executor = ThreadExecutor(threads=1, memory_nbytes=1, checksum=True)
            outcomes.append(executor.execute(plan, {b: TensorTarget(t) for b, t in tensors.items()}))
            for key, placement in placements.items():
                piece, box = placement.piece(rank), placement.box
                if piece is not None:
                    inner = truth[key][tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]
                    part = inner.reshape(-1)[piece.start : piece.stop]
                    assert raw(tensors[placement.buffer][: part.numel()]) == raw(part)
        settled = [settle(partial_sums(outcome)) for outcome in outcomes]
        faults, again = combine([left for left, _ in settled])
        assert [*faults, *(one for left, found in settled for one in (*found, *read_again(left, again)))] == []


class OfNoFormat(FormatSuite):
    """The checkpoints of this module, as the kit for formats sees them: the kit is tested here."""

    rule = "flat"

    def make(self, folder):
        arrangement = Arrangement(groups=(("a", "none"), ("b", "c")), rule=self.rule, dp=3, kinds=KINDS)
        shapes = {"a": (4, 5), "none": (2, 0), "b": (), "c": (2, 3, 2)}
        layout, truth = arrangement.layout(shapes), model(shapes)
        source = Checkpoint(folder, layout, arrangement.sizes(shapes), truth, seed=1)
        return SavedCheckpoint(open=lambda: Index(layout, source), truth=truth)


class TestFlatGroups(OfNoFormat):
    pass


class TestSubGroups(OfNoFormat):
    rule = "sub"


def changed(saved, **tensors):
    return replace(saved, truth=saved.truth | {TensorKey(name=n, kind="fp32"): t for n, t in tensors.items()})


def behind(saved):
    """The checkpoint with every extent one element further on."""
    index = saved.open()

    class Moved:
        def buffers(self, family, shard):
            return {
                b: e._replace(byte_offset=e.byte_offset + e.dtype.itemsize)
                for b, e in index.open(family, shard).items()
            }

    return replace(saved, open=lambda: Index(index.layout, Moved()))


@pytest.mark.parametrize(
    ("breaks", "test"),
    [
        (lambda saved: changed(saved, more=torch.zeros(1)), "test_every_tensor_is_placed"),
        (lambda saved: changed(saved, b=torch.zeros(1)), "test_every_tensor_is_placed"),
        (lambda saved: changed(saved, b=torch.tensor(7)), "test_every_tensor_is_placed"),
        (lambda saved: changed(saved, a=torch.zeros(4, 5)), "test_reading_every_fragment_gives_what_was_saved"),
        (lambda saved: changed(saved, a=torch.zeros(4, 5)), "test_parts_are_found_as_the_whole_is"),
        (lambda saved: changed(saved, a=torch.zeros(4, 6)), "test_fragments_tile_every_tensor"),
        (behind, "test_reading_every_fragment_gives_what_was_saved"),
        (behind, "test_extents_lie_in_their_files"),
    ],
)
def test_the_kit_for_formats_can_fail(breaks, test):
    """A format that says something else than what was saved fails the test for it."""

    class Broken(OfNoFormat):
        def make(self, folder):
            return breaks(super().make(folder))

    with pytest.raises(AssertionError):
        getattr(Broken(), test)()


class Described:
    """A shard source without files: one record a buffer, the buffers one after another."""

    def __init__(self, sizes):
        self._sizes = sizes

    def buffers(self, family, shard):
        extents, at = {}, 64
        for buffer, numel in self._sizes.items():
            dtype = KINDS[buffer.partition("/")[0]]
            nbytes = numel * dtype.itemsize
            record = Record(path=f"shard{shard}.pt", byte_offset=at, nbytes=nbytes, crc32=shard)
            extents[buffer] = Extent(record=record, byte_offset=at, dtype=dtype, numel=numel)
            at += nbytes + 64
        return extents


MODEL = {"embed": (5, 3), "scale": (), "empty": (0, 2), "out": (3, 5), "bias": (7,)}
ALL = (tuple(MODEL),)
TWO = {"fp32": FP32, "exp_avg": BF16}
GOLDEN_PLANS = {
    "flat_dp2_to_sub_group_dp3": (
        Arrangement(groups=ALL, rule="flat", dp=2, kinds=TWO),
        Arrangement(groups=(("embed", "scale", "empty"), ("out", "bias")), rule="sub", dp=3, kinds=TWO),
    ),
    "sub_group_dp3_to_a_part_replicated_dp2": (
        Arrangement(groups=ALL, rule="sub", dp=3, kinds=TWO),
        Arrangement(groups=(("out", "embed"),), rule="replicated", dp=2, kinds={"fp32": BF16}),
    ),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_plans(name):
    """Every rank's plan of two small reshards is the one that was read and found right.

    DS_RESHARD_WRITE_GOLDEN=1 writes the files anew; the test then fails once, so that no run passes by it.
    """
    source, target = GOLDEN_PLANS[name]
    described = Described(source.sizes(MODEL))
    case = Case(shapes=MODEL, source=source, target=target, seed=0, pairs=False)
    plans = {f"rank {rank}": case.plan(rank, described) for rank in target.ranks}
    file = GOLDEN / f"{name}.json"
    if os.environ.get("DS_RESHARD_WRITE_GOLDEN"):
        file.write_text(golden_text(plans))
        pytest.fail(f"wrote {file.name}: read the difference, and run again without DS_RESHARD_WRITE_GOLDEN")
    assert golden_text(plans) == file.read_text()


def told(value):
    """A copy, fill or check, and what it holds, in words of JSON."""
    if hasattr(value, "_asdict"):
        return {
            name: told(part) for name, part in value._asdict().items() if part != () and (name, part) != ("spread", 1)
        }
    return value.label if isinstance(value, ElementType) else value


def golden_text(plans):
    """JSON with one copy, fill or check a line."""
    lines = []
    for rank, plan in plans.items():
        parts = []
        for kind in ("copies", "fills", "checks"):
            body = ",\n".join(f"   {json.dumps(told(row))}" for row in getattr(plan, kind))
            parts.append(f'  "{kind}": [\n{body}\n  ]' if body else f'  "{kind}": []')
        lines.append(f' "{rank}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Faulty:
    """A shard source whose shard 1 is damaged, and whose shard 0 has no buffers."""

    def buffers(self, family, shard):
        if shard == 1:
            raise CheckpointDamaged("shard1.pt: is cut off")
        return {}


def test_a_shard_that_cannot_be_opened_is_one_fault():
    """However many tensors lie in it; the plan is made all the same, so that every fault is found."""
    source, target = GOLDEN_PLANS["flat_dp2_to_sub_group_dp3"]
    index = Index(source.layout(MODEL), Faulty())
    keys = [TensorKey(name=name, kind="fp32") for name in ("out", "bias")]
    plan = Planner(index, target.layout(MODEL), {key: key for key in keys}).plan(2, sizes={})
    assert (plan.copies, plan.checks) == ((), ())
    damaged = [(fault.error, fault.where) for fault in index.faults if fault.where == "shard1.pt"]
    assert damaged == [("CheckpointDamaged", "shard1.pt")]


def test_a_shard_without_a_wanted_buffer_is_a_fault():
    """Otherwise a fresh buffer would keep what its memory held before."""
    source, target = GOLDEN_PLANS["flat_dp2_to_sub_group_dp3"]
    index = Index(source.layout(MODEL), Faulty())
    key = TensorKey(name="embed", kind="fp32")
    Planner(index, target.layout(MODEL), {key: key}).plan(0, sizes={})
    assert index.faults != []


class Whole:
    """A shard source of one buffer of 32 elements in each shard."""

    def buffers(self, family, shard):
        record = Record(path=f"{shard}.pt", byte_offset=0, nbytes=128, crc32=None)
        return {"b": Extent(record=record, byte_offset=0, dtype=FP32, numel=32)}


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (2, 8)), ((2, 0), (2, 8))], True),
        ([((0, 0), (2, 8)), ((2, 0), (1, 8))], False),
        ([((0, 0), (3, 8)), ((2, 0), (2, 8))], False),
        ([((0, 0), (2, 8)), ((2, 0), (1, 8)), ((0, 0), (1, 8))], False),
    ],
    ids=["each once", "a hole", "twice", "a hole as large as what lies twice"],
)
@pytest.mark.parametrize("part", [False, True])
def test_elements_in_no_file_or_in_two_are_a_fault_before_a_byte_moves(boxes, whole, part):
    """Where a hole is, the buffer would keep what its memory held; no format's own check is needed for it."""
    key = TensorKey(name="w", kind="fp32")
    tiles = tuple(
        Placement(
            key=key,
            shape=(4, 8),
            dtype=FP32,
            family="f",
            buffer="b",
            cut=Cut(chunk=32, first=shard),
            box=Box(offset=offset, size=size),
        )
        for shard, (offset, size) in enumerate(boxes)
    )
    all_of_it = Placement(
        key=key, shape=(4, 8), dtype=FP32, family="f", buffer="b", cut=Cut(chunk=32), box=Box.whole((4, 8))
    )
    index = Index(Layout({key: all_of_it._replace(tiles=tiles)}, {"f": len(boxes)}), Whole())
    wanted = all_of_it._replace(box=Box(offset=(0, 2), size=(4, 3)), cut=Cut(chunk=12)) if part else all_of_it
    plan = Planner(index, Layout({key: wanted}, {"f": 1}), {key: key}).plan(0, sizes={})
    if whole:
        assert (index.faults, sum(copy.nbytes for copy in plan.copies)) == ([], 4 * wanted.numel)
    else:
        assert [(fault.error, "fp32" in fault.what or "w" in fault.what) for fault in index.faults][:1] == [
            ("CheckpointDamaged", True)
        ]


def test_a_plan_counts_its_bytes_and_names_its_files():
    source, target = GOLDEN_PLANS["sub_group_dp3_to_a_part_replicated_dp2"]
    case = Case(shapes=MODEL, source=source, target=target, seed=0, pairs=False)
    plan = case.plan(1, Described(source.sizes(MODEL)))
    assert plan.files == ("shard0.pt", "shard1.pt", "shard2.pt")
    assert plan.nbytes == 3 * FlatBuffer(shapes=MODEL, rule=Rule.EACH, ranks=3).partition_numel * 4


def test_buffers_that_share_bytes_are_found():
    record = Record(path="f", byte_offset=0, nbytes=100, crc32=None)
    rows = {"a": ("f", 0, 4), "b": ("f", 16, 4), "c": ("f", 28, 2), "d": ("g", 0, 9), "e": ("f", 2, 0)}
    extents = {
        name: Extent(record=record._replace(path=path), byte_offset=at, dtype=FP32, numel=numel)
        for name, (path, at, numel) in rows.items()
    }
    assert extents_overlap(extents) == [("b", "c")]
