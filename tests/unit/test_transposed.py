"""Maps that transpose: every element is the one that numpy's reshape and transpose put there, whatever is cut where."""

from __future__ import annotations

import random
import tempfile
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import Arrangement, Checkpoint, raw
from test_plan_blocks import InMemory
from test_shape_map import KINDS, Boxes, boxed, content_of, refused

from ds_reshard.containers.crc import crc32
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.execution.checksums import verify
from ds_reshard.execution.cuda import CudaExecutor
from ds_reshard.execution.files import StagingExecutor
from ds_reshard.execution.fingerprint import Fingerprints, FingerprintTarget, Witness, fingerprint_of, held
from ds_reshard.execution.interfaces import Outcome, Strides
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.checkpoint import checksums
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.shape_map import Coming, Mapped
from ds_reshard.operations.values import logical, read_spans
from ds_reshard.planning.copies import Copy
from ds_reshard.planning.plan import Fill, Plan, Planner
from ds_reshard.testing.late_device import LateDevice
from ds_reshard.testing.suites import StoredTarget

MANY = settings(max_examples=150, deadline=None)
FP32, UINT8 = ElementType.FLOAT32, ElementType.UINT8


def random_view(factors: list[str], rng: random.Random) -> list[list[str]]:
    """The factors in any order, dealt out to one to three dimensions."""
    order = rng.sample(factors, len(factors))
    ends = [*sorted(rng.sample(range(1, len(order)), min(rng.randint(0, 2), len(order) - 1))), len(order)]
    return [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def shown(view: list[list[str]]) -> str:
    return " ".join(f"({' '.join(dimension)})" for dimension in view)


class RandomMap:
    """A map of one tensor and its parts with random views, and the parts by numpy."""

    def __init__(self, rng: random.Random) -> None:
        names = list("abcde")[: rng.randint(2, 5)]
        self.numbers = {name: rng.choice([1, 2, 2, 3, 4]) for name in names}
        terms = rng.choice([[], [], ["x"], ["x", "y"], ["x", "1", "y"]])
        self.numbers |= {"x": rng.randint(1, 3), "y": rng.randint(1, 2)} if terms else {}
        total = "+".join(terms) if len(terms) > 1 else "".join(terms)
        self.view = random_view([*names, *([total] if terms else [])], rng)
        self.terms = terms or [""]
        self.parts = {}
        for number, term in enumerate(self.terms):
            self.parts[f"part{number}"] = random_view([*names, *([term] if terms else [])], rng)
        entry = {"whole": f"whole : {shown(self.view)}"}
        entry["parts"] = [f"{name} : {shown(own)}" for name, own in self.parts.items()]
        self.held = {"sides": ["whole", "parts"], "numbers": self.numbers, "entries": [entry]}

    def size(self, factor: str) -> int:
        return sum(int(one) if one.isdigit() else self.numbers[one] for one in factor.split("+"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(map(self.size, dimension)) for dimension in self.view)

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = [factor for dimension in self.view for factor in dimension]
        apart = whole.reshape([self.size(factor) for factor in flat])
        summed = next((n for n, factor in enumerate(flat) if "+" in factor), None)
        starts = [0, *accumulate(self.size(term) for term in self.terms if term)]
        found = {}
        for number, (name, own) in enumerate(self.parts.items()):
            mine, factors = apart, list(flat)
            if summed is not None:
                mine = apart.narrow(summed, starts[number], starts[number + 1] - starts[number])
                factors[summed] = self.terms[number]
            order = [factors.index(factor) for dimension in own for factor in dimension]
            shape = [prod(map(self.size, dimension)) for dimension in own]
            found[name] = mine.permute(order).reshape(shape).contiguous()
        return found


def truth_of(shape: tuple[int, ...]) -> dict[TensorKey, torch.Tensor]:
    """Bits of any kind: infinities and NaN are among them."""
    bits = torch.Generator().manual_seed(prod(shape))
    found = {}
    for kind, dtype in KINDS.items():
        data = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=bits)
        found[TensorKey("whole", kind)] = data.view(torch_dtype(dtype)).reshape(shape)
    return found


def executor_of(name: str, witness: Witness) -> Any:
    if name == "staged":
        return StagingExecutor(threads=1, memory_nbytes=256, saw=witness.saw)
    if name == "device":
        host = ThreadExecutor(threads=2, memory_nbytes=1 << 14, checksum=True, saw=witness.saw)
        return CudaExecutor(host, LateDevice(), saw_there=witness.saw_there)
    saw = witness.saw if name == "witness" else None
    return ThreadExecutor(threads=1, memory_nbytes=1 << 20, checksum=True, saw=saw)


def check(
    index: Index, mapped: Mapped, expected: dict[TensorKey, torch.Tensor], ranks: int, cast: bool, executor: str
) -> None:
    """Fill flat buffers of so many ranks, in which each tensor begins where the one before it ends."""
    numel = {kind: sum(one.numel() for key, one in expected.items() if key.kind == kind) for kind in KINDS}
    types = {kind: FP32 if cast and kind == "weight" else dtype for kind, dtype in KINDS.items()}
    made, wants, at = dict[TensorKey, Placement](), dict[TensorKey, TensorKey](), dict.fromkeys(KINDS, 0)
    for key, one in mapped.content.tensors.items():
        cut = Cut(chunk=-(-numel[key.kind] // ranks), phase=at[key.kind])
        made[key] = Placement(key, one.shape, types[key.kind], "run", key.kind, cut, Box.whole(one.shape))
        wants[key], at[key.kind] = one.origin, at[key.kind] + prod(one.shape)
    target, flat, outcomes = Layout(made, {"run": ranks}), dict[str, list[torch.Tensor]](), Outcome()
    planner = Planner(index, target, wants)
    for rank in range(ranks):
        chunks = {kind: -(-total // ranks) for kind, total in numel.items()}
        sizes = {kind: max(0, min(chunk, numel[kind] - rank * chunk)) for kind, chunk in chunks.items()}
        memory = {kind: torch.full((size,), 7, dtype=torch_dtype(types[kind])) for kind, size in sizes.items()}
        witness = Witness(index, planner.matches, rank)
        into = InMemory if executor == "staged" else TensorTarget
        targets = {kind: into(one) for kind, one in memory.items()}
        outcomes.add(executor_of(executor, witness).execute(planner.plan(rank, sizes=sizes), targets))
        if executor != "host":
            sums = held(target, rank, memory)
            assert {key: sums[key] for key in sums} == {key: witness.sums[key] for key in witness.sums}
        for kind, one in memory.items():
            flat.setdefault(kind, []).append(one)
    assert not outcomes.faults and not index.faults and not verify(outcomes)
    for key, placement in made.items():
        whole = torch.cat(flat[key.kind])[placement.cut.phase :][: prod(placement.shape)]
        wanted = expected[key].reshape(-1).to(torch_dtype(types[key.kind]))
        assert raw(whole) == raw(wanted), key


def mapped_by(held: dict[str, Any], layout: Layout, names: tuple[str, ...]) -> Mapped:
    mapped = read_name_map(held).apply(content_of(layout, (names,)), layout, Coming())
    assert mapped.faults == ()
    return mapped


EXECUTORS = ["host", "witness", "staged", "device"]


@MANY
@given(seed=st.integers(0, 1 << 20), ranks=st.integers(1, 5), cast=st.booleans(), executor=st.sampled_from(EXECUTORS))
def test_any_view_of_any_boxes_is_numpys(seed: int, ranks: int, cast: bool, executor: str) -> None:
    """Split and joined, from flat partitions and from boxes, into flat partitions, with and without a cast."""
    rng = random.Random(seed)
    made = RandomMap(rng)
    wholes = truth_of(made.shape)
    parts = {
        TensorKey(name, key.kind): part for key, whole in wholes.items() for name, part in made.split(whole).items()
    }
    joins = rng.random() < 0.5
    saved, expected = (parts, wholes) if joins else (wholes, parts)
    names = tuple(dict.fromkeys(key.name for key in saved))
    shapes = {key.name: tuple(one.shape) for key, one in saved.items()}
    why = refused(made.held, shapes, (names,))
    if "no two elements" in why:
        return
    with tempfile.TemporaryDirectory() as folder:
        if rng.random() < 0.5:
            source = Boxes(folder, saved, boxed(saved, rng))
            layout = source.layout
        else:
            arrangement = Arrangement(
                groups=(names,), rule=rng.choice(["flat", "sub", "gaps"]), dp=rng.randint(1, 4), kinds=KINDS
            )
            layout = arrangement.layout(shapes)
            source = Checkpoint(folder, layout, arrangement.sizes(shapes), saved, seed=1)
        mapped = mapped_by(made.held, layout, names)
        check(Index(mapped.layout, source), mapped, expected, ranks, cast, executor)


C_ATTN: dict[str, Any] = {
    "sides": ["megatron", "transformers"],
    "numbers": {"n": 12, "s": 3, "d": 16, "h": 192},
    "entries": [{"megatron": "qkv : (n s d) h", "transformers": ["c_attn : h (s n d)"]}],
}


def c_attn() -> torch.Tensor:
    return torch.arange(192 * 576, dtype=torch.int32).view(torch.float32).reshape(192, 576)


def of_one_file(folder: Path, name: str, whole: torch.Tensor) -> tuple[Layout, Any]:
    """A tensor in a file, and what opens it."""
    path = folder / name
    path.write_bytes(whole.numpy().tobytes())
    record = Record(path=str(path), byte_offset=0, nbytes=whole.nbytes, crc32=crc32(path.read_bytes()))
    extent = Extent(record=record, byte_offset=0, dtype=FP32, numel=whole.numel())
    key, shape = TensorKey(name, "weight"), tuple(whole.shape)
    placement = Placement(key, shape, FP32, "file", "data", Cut(chunk=whole.numel()), Box.whole(shape))

    class Source:
        def buffers(self, family: str, shard: int) -> dict[str, Extent]:
            return {"data": extent}

    return Layout({key: placement}, {"file": 1}), Source()


@pytest.mark.parametrize("joins", [False, True])
def test_places_and_copies_are_as_many_as_rows_at_most(tmp_path: Path, joins: bool) -> None:
    """c_attn of GPT-2 has a place, and a copy for each row that lies together: none for each element."""
    saved = c_attn() if joins else c_attn().reshape(192, 3, 12, 16).permute(2, 1, 3, 0).reshape(576, 192)
    layout, source = of_one_file(tmp_path, "c_attn" if joins else "qkv", saved.contiguous())
    mapped = mapped_by(C_ATTN, layout, ("c_attn" if joins else "qkv",))
    ((key, one),) = mapped.content.tensors.items()
    placement = mapped.layout[one.origin]
    assert placement.tiles == () and len(placement.axes) == 4
    whole = Placement(key, one.shape, FP32, "run", "b", Cut(chunk=saved.numel()), Box.whole(one.shape))
    plan = Planner(Index(mapped.layout, source), Layout({key: whole}, {"run": 1}), {key: one.origin}).plan(0, sizes={})
    assert len(plan.copies) <= 192


def test_values_are_read_in_bounded_spans(tmp_path: Path) -> None:
    """`diff` and `verify` look at a transposed tensor as at any other."""
    layout, source = of_one_file(tmp_path, "c_attn", c_attn())
    mapped = mapped_by(C_ATTN, layout, ("c_attn",))
    ((_, one),) = mapped.content.tensors.items()
    column = logical(Index(mapped.layout, source), one.origin)
    spans = [span.values[0].clone() for span in read_spans([(column,)], memory_nbytes=1 << 17)]
    assert len(spans) > 4
    expected = c_attn().reshape(192, 3, 12, 16).permute(2, 1, 3, 0).reshape(-1)
    assert torch.equal(torch.cat(spans).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_elements_that_lie_apart_are_summed_as_those_that_lie_together(dtype: torch.dtype) -> None:
    """The fingerprint of a tensor is that of its columns, added one by one."""
    bits = torch.randint(0, 256, (40, 1000, dtype.itemsize), dtype=torch.uint8)
    whole = bits.view(dtype).reshape(40, 1000)
    key, sums, element = TensorKey("", ""), Fingerprints[TensorKey](), ElementType.named(str(dtype)[6:])
    target = FingerprintTarget(sums, key)
    for column in range(1000):
        data = whole[:, column].contiguous().view(torch.uint8).numpy().data
        target.scatter(column, memoryview(data).cast("B"), element, Strides(40, 0, 1000))
    assert sums[key] == fingerprint_of(whole)


def test_a_transposed_tensor_of_which_no_two_elements_lie_together_is_refused() -> None:
    """It would take a place for each element."""
    held = {"sides": ["a", "b"], "numbers": {"h": 4, "f": 6}}
    held["entries"] = [{"a": "gate_up : h (f 1+1)", "b": ["gate : f h", "up : f h"]}]
    assert "gate_up" not in refused(held, {"gate_up": (4, 12)})
    assert "no two elements of it lie together" in refused(held, {"gate_up": (4, 12)})
    held["entries"] = [{"a": "gate_up : h (1+1 f)", "b": ["gate : f h", "up : f h"]}]
    assert refused(held, {"gate_up": (4, 12)}) == ""


def test_rows_of_two_tensors_are_not_taken_for_those_of_one(tmp_path: Path) -> None:
    """Between them lies what a fill has zeroed: they are no one piece of the memory that waits for a file."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 9)))
    record = Record(path=str(path), byte_offset=0, nbytes=8, crc32=crc32(path.read_bytes()))
    apart = [Copy(record, at, 2, UINT8, "b", place, UINT8, (), 2) for at, place in ((0, 0), (2, 7))]
    alone = [Copy(record, at, 1, UINT8, "b", place, UINT8) for at, place in ((4, 1), (5, 8))]
    written = torch.full((10,), 7, dtype=torch.uint8)
    plan = Plan(copies=(*apart, *alone), fills=(Fill("b", 3, 4),))
    executor = StagingExecutor(threads=1, memory_nbytes=1 << 20, saw=lambda copies, views: None)
    assert executor.execute(plan, {"b": InMemory(written)}).faults == []
    assert written.tolist() == [1, 5, 2, 0, 0, 0, 0, 3, 6, 4]


@pytest.mark.parametrize("memory_nbytes", [1 << 12, 1 << 22])
@pytest.mark.parametrize(("h", "f"), [(5, 3000), (60, 60)])
def test_a_matrix_is_transposed_in_the_memory_that_there_is(tmp_path: Path, h: int, f: int, memory_nbytes: int) -> None:
    """A row that is longer than it is cut; a square matrix is not taken for one that lies as it is wanted."""
    saved = torch.arange(h * f, dtype=torch.float32).reshape(h, f)
    layout, source = of_one_file(tmp_path, "saved", saved)
    held = {"sides": ["a", "b"], "numbers": {"h": h, "f": f}}
    held["entries"] = [{"a": "saved : h f", "b": "made : f h"}]
    mapped = mapped_by(held, layout, ("saved",))
    ((key, one),) = mapped.content.tensors.items()
    whole = Placement(key, one.shape, FP32, "run", "b", Cut(chunk=saved.numel()), Box.whole(one.shape))
    plan = Planner(Index(mapped.layout, source), Layout({key: whole}, {"run": 1}), {key: one.origin}).plan(0, sizes={})
    target = StoredTarget(TensorTarget(torch.zeros(f, h)))
    executor = ThreadExecutor(threads=1, memory_nbytes=memory_nbytes, checksum=True)
    assert not verify(executor.execute(plan, {"b": target}))
    assert torch.equal(target._target.tensor.reshape(f, h), saved.T) and 0 < target.scratch_nbytes <= memory_nbytes
    waiting = torch.zeros(f, h)
    staging = StagingExecutor(threads=1, memory_nbytes=memory_nbytes, saw=lambda copies, views: None)
    assert not verify(staging.execute(plan, {"b": InMemory(waiting)})) and torch.equal(waiting, saved.T)


def test_equal_checksums_do_not_prove_a_transposed_tensor_equal(tmp_path: Path) -> None:
    """Not even if each of four ranks has saved one of its rows."""
    key, saved = TensorKey("saved", "weight"), torch.arange(16.0).reshape(4, 4).bfloat16()
    source = Boxes(str(tmp_path), {key: saved}, {key: [Box.chunk((4, 4), 0, row, 4) for row in range(4)]})
    flat = Placement(key, (4, 4), KINDS["weight"], str(key), "data", Cut(chunk=4), Box.whole((4, 4)))
    layout = Layout({key: flat}, {str(key): 4})
    held = {"sides": ["a", "b"], "numbers": {"h": 4, "f": 4}}
    held["entries"] = [{"a": "saved : h f", "b": "made : f h"}]
    mapped = mapped_by(held, layout, ("saved",))
    ((_, one),) = mapped.content.tensors.items()
    crcs = [crc32(raw(row)) for row in saved]
    assert checksums(Index(layout, source), key) == ((4, 4), KINDS["weight"], tuple((4, crc) for crc in crcs))
    assert checksums(Index(mapped.layout, source), one.origin) == (mapped.layout, one.origin)
