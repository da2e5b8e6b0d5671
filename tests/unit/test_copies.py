"""Copies as columns are what they are one by one: cut, joined, clipped to a span of their buffer, taken apart."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_blocks import InMemory

from ds_reshard.containers.torch_zip_writer import plan_archive
from ds_reshard.errors import InternalError
from ds_reshard.execution.files import ArchiveFile, StagingExecutor
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.region import Rows
from ds_reshard.planning.copies import Copies, Copy, coalesce
from ds_reshard.planning.plan import Fill, Plan

QUICK = settings(max_examples=100)
FP32, BF16, UINT8 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.UINT8
RECORDS = [Record(path=path, byte_offset=0, nbytes=1 << 50, crc32=None) for path in ("b", "a")]


@st.composite
def families(draw, disjoint=False):
    """Copies with up to two kinds of rows; `disjoint` ones are all into one buffer, in which none overlap."""
    made, at = [], 0
    for _ in range(draw(st.integers(0, 5))):
        numel, rows, step = draw(st.integers(1, 4)), [], 0
        extent = numel
        for _ in range(draw(st.integers(0, 2))):
            times, step = draw(st.integers(2, 4)), extent + draw(st.integers(0, 3))
            rows.insert(0, Rows(times, draw(st.integers(numel, 60)), step))
            extent = step * (times - 1) + extent
        dtype = draw(st.sampled_from((FP32, BF16)))
        offset = at if disjoint else draw(st.integers(0, 50))
        buffer = "b" if disjoint else draw(st.sampled_from(("b", "c")))
        source = draw(st.integers(0, 500))
        made.append(Copy(draw(st.sampled_from(RECORDS)), source, numel, dtype, buffer, offset, FP32, tuple(rows)))
        at += extent + draw(st.integers(0, 4))
    return made


def elements(copies):
    """Each element: its file and byte, its place."""
    found = []
    for copy in copies:
        starts = [(copy.byte_offset, copy.element_offset)]
        for row in copy.rows:
            starts = [
                (byte + i * row.first_step * copy.dtype.itemsize, element + i * row.second_step)
                for byte, element in starts
                for i in range(row.times)
            ]
        found += [
            (copy.path, byte + i * copy.dtype.itemsize, copy.dtype, copy.buffer, element + i, copy.target_dtype)
            for byte, element in starts
            for i in range(copy.numel)
        ]
    return sorted(found, key=repr)


@QUICK
@given(families())
def test_columns_hold_what_they_were_made_of(copies):
    made = Copies.of(copies)
    assert list(made) == copies == [made[i] for i in range(len(made))]
    assert made.nbytes == sum(copy.nbytes for copy in copies)
    assert made.numel == len(elements(copies))
    assert made.paths == {copy.path for copy in copies}
    of_paths = {path: sum(copy.nbytes for copy in copies if copy.path == path) for path in made.paths}
    assert made.nbytes_of_paths() == of_paths


@QUICK
@given(families(), st.integers(1, 30))
def test_runs_and_cuts_are_the_same_elements(copies, chunk_nbytes):
    runs = [run for portion in Copies.of(copies).runs() for run in portion]
    assert elements(runs) == elements(copies) and not any(run.rows for run in runs)
    cut = [part for portion in Copies.of(copies).runs() for part in portion.cut(chunk_nbytes)]
    assert elements(cut) == elements(copies)
    assert all(part.nbytes <= max(chunk_nbytes, part.dtype.itemsize) for part in cut)
    assert len(cut) == sum(-(-run.numel // max(1, chunk_nbytes // run.dtype.itemsize)) for run in runs)


@QUICK
@given(families())
def test_ordered_and_joined_they_are_the_same_elements(copies):
    joined = coalesce(copies)
    assert elements(joined) == elements(copies)
    assert [(c.path, c.byte_offset) for c in joined] == sorted((c.path, c.byte_offset) for c in joined)
    for one, other in pairwise(joined):
        follows = one._replace(
            byte_offset=one.byte_offset + one.numel * one.dtype.itemsize,
            element_offset=one.element_offset + one.numel,
            numel=other.numel,
        )
        assert one.rows or other.rows or follows != other


@QUICK
@given(families(disjoint=True), st.data())
def test_what_fills_a_span_of_a_buffer(copies, data):
    """Windows that follow each other have each element once."""
    if not copies:
        return
    of_buffer = Copies.of(copies).by_buffer()["b"]
    start, stop = of_buffer.extent()
    places = [element for _, _, _, _, element, _ in elements(copies)]
    assert (start, stop) == (min(places), max(places) + 1)
    edges = sorted({start, stop, *data.draw(st.lists(st.integers(start, stop), max_size=4))})
    parts = [of_buffer.clip(*edge) for edge in pairwise(edges)]
    assert elements([copy for part in parts for copy in part]) == elements(copies)
    for (first, last), part in zip(pairwise(edges), parts, strict=True):
        assert all(first <= element < last for _, _, _, _, element, _ in elements(part))


def test_more_rows_than_fit_in_a_portion_are_taken_apart_portion_by_portion(monkeypatch):
    monkeypatch.setattr("ds_reshard.planning.copies._PORTION", 7)
    copy = Copy(RECORDS[0], 3, 2, FP32, "b", 1, FP32, (Rows(5, 100, 60), Rows(6, 9, 4)))
    portions = list(Copies.of([copy, copy._replace(buffer="c"), copy._replace(rows=())]).runs())
    assert max(map(len, portions)) <= 7
    assert elements([run for portion in portions for run in portion]) == elements(
        [copy, copy._replace(buffer="c"), copy._replace(rows=())]
    )


def test_large_numbers_are_exact():
    """More than 2**31 rows, 2**40 elements and 2**63 bytes, to the last bit."""
    rows = (Rows((1 << 32) + 1, 1 << 20, 1 << 20),)
    copy = Copy(RECORDS[0], (1 << 60) + 1, 1 << 18, FP32, "b", (1 << 52) + 1, FP32, rows)
    made = Copies.of([copy] * 9000)
    assert made.nbytes == 9000 * copy.nbytes > 2**63
    assert made.numel == 9000 * (1 << 18) * ((1 << 32) + 1)
    assert made[8999] == copy
    last = made[:1].clip(copy.element_offset + (1 << 52), 1 << 62)
    assert list(last) == [
        copy._replace(byte_offset=copy.byte_offset + (1 << 54), element_offset=copy.element_offset + (1 << 52), rows=())
    ]


@pytest.mark.parametrize(("fill", "sound"), [(Fill("b", 6, 2), True), (Fill("b", 6, 1), False), (None, False)])
def test_files_are_not_filled_with_what_memory_held(tmp_path, fill, sound):
    """Where copies and fills leave a hole, a window of memory would be written with what was there before."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(64))
    record = Record(path=str(path), byte_offset=0, nbytes=64, crc32=None)
    copies = (Copy(record, 0, 3, UINT8, "b", 0, UINT8, (Rows(2, 10, 3),)), Copy(record, 40, 2, UINT8, "b", 8, UINT8))
    written = torch.full((10,), 7, dtype=torch.uint8)
    plan = Plan(copies=copies, fills=(fill,) if fill is not None else ())
    executor = StagingExecutor(threads=1, memory_nbytes=1 << 20, saw=lambda copies, views: None)
    if not sound:
        with pytest.raises(InternalError, match="elements are copied"):
            executor.execute(plan, {"b": InMemory(written)})
        return
    assert executor.execute(plan, {"b": InMemory(written)}).faults == []
    data = path.read_bytes()
    assert bytes(written.tolist()) == data[0:3] + data[10:13] + bytes(2) + data[40:42]


@pytest.mark.parametrize("memory_nbytes", [1 << 18, 8 << 20], ids=["many windows", "one window, cast in portions"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "two types"])
def test_small_pieces_are_cast_as_torch_casts_them(tmp_path, memory_nbytes, mixed):
    """Pieces that wait for their file in the source's type, or in the file's where the source has two."""
    numel, step = 1_200_001, 999
    values = torch.randn(numel)
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        data = bytes(values.to(dtype).view(torch.uint8).numpy())
        (tmp_path / str(dtype)).write_bytes(data)
        records.append(Record(path=str(tmp_path / str(dtype)), byte_offset=0, nbytes=len(data), crc32=None))
    copies = []
    for number, at in enumerate(range(0, numel, step)):
        record, dtype = (records[1], BF16) if mixed and number % 3 == 1 else (records[0], FP32)
        copies.append(Copy(record, at * dtype.itemsize, min(step, numel - at), dtype, "b", at, BF16))
    file = ArchiveFile(str(tmp_path / "made.pt"), plan_archive("made", {"w": new_tensor("b", (numel,), BF16)}))
    executor = StagingExecutor(threads=2, memory_nbytes=memory_nbytes, saw=lambda copies, views: None)
    (key,) = file._places
    assert executor.execute(Plan(copies=tuple(copies)), {"b": file.target(key, BF16)}).faults == []
    file.finish()
    assert torch.equal(torch.load(tmp_path / "made.pt", weights_only=True)["w"], values.to(torch.bfloat16))
