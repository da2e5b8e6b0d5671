"""What was read and what memory holds are the same fingerprints under any two layouts, and under no wrong plan."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import SOME, cases, execute, expected_buffers, model, raw
from test_plan_blocks import InMemory

from ds_reshard.execution import cuda
from ds_reshard.execution.buffers import TensorTarget, element_type, torch_dtype
from ds_reshard.execution.checksums import combine, partial_sums, read_again, settle
from ds_reshard.execution.cuda import CudaExecutor
from ds_reshard.execution.files import StagingExecutor
from ds_reshard.execution.fingerprint import Witness, fingerprint_of, held
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key, whole_placement
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.planning.copies import Copy
from ds_reshard.planning.plan import Planner, match_tensors
from ds_reshard.testing.late_device import LateDevice


def by_host(witness):
    return ThreadExecutor(threads=1, memory_nbytes=1, checksum=True, saw=witness.saw)


def by_device(witness):
    host = ThreadExecutor(threads=2, memory_nbytes=1, checksum=True, saw=witness.saw)
    return CudaExecutor(host, LateDevice(), saw_there=witness.saw_there)


def watched(case, checkpoint, rank, harm=lambda copies: copies, made=by_host):
    """Carry out a rank's plan by an executor that is `made`, its copies changed by `harm`.

    Returns the witness, what memory holds, memory itself, and the faults that the checksums of the read show, together
    with what the other ranks read.
    """
    index, target = Index(case.source.layout(case.shapes), checkpoint), case.target.layout(case.shapes)
    plan = case.plan(rank, checkpoint)
    witness = Witness(index, match_tensors(index, target, case.wants), rank)
    tensors = {  # -3 is no element of the model: a place that nothing is written to is wrong
        buffer: torch.full((numel,), -3, dtype=torch_dtype(case.target.kinds[buffer.partition("/")[0]]))
        for buffer, numel in case.target.sizes(case.shapes).items()
    }
    copies = tuple(harm(list(plan.copies)))
    outcome = made(witness).execute(replace(plan, copies=copies), {b: TensorTarget(t) for b, t in tensors.items()})
    assert outcome.faults == []
    others = [other for other in case.target.ranks if other != rank and case.target.rule != "replicated"]
    settled = [settle(partial_sums(execute(case, case.plan(other, checkpoint))[1])) for other in others]
    settled.append(settle(partial_sums(outcome)))
    combined, again = combine([left for left, _ in settled])
    faults = [*combined, *(one for left, found in settled for one in (*found, *read_again(left, again)))]
    return witness, held(target, rank, tensors), tensors, faults


@SOME
@given(cases(), st.sampled_from((by_host, by_device)), st.sampled_from((1, 40, 1 << 19)))
def test_what_is_read_is_what_is_held_and_the_ranks_add_up_to_the_model(case, made, there_nbytes):
    """On every rank for every tensor, cast or not, seen on the host or, from so many bytes on, on a device.

    A replicated rank holds the whole.
    """
    truth, layout = model(case.shapes), case.target.layout(case.shapes)
    sums = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = case.checkpoint(folder)
        for rank in case.target.ranks:
            with mock.patch.object(cuda, "_SHOWN_THERE_NBYTES", there_nbytes):
                witness, now, _, faults = watched(case, checkpoint, rank, made=made)
            assert not faults
            for key in case.wants:
                assert witness.sums[key] == now[key]
                alone = rank == 0 or case.target.rule == "replicated"
                sums[key] = now[key] if alone else sums[key] + now[key]
    for key in case.wants:
        assert sums[key] == fingerprint_of(truth[key].to(torch_dtype(layout[key].dtype)))


@settings(max_examples=150)
@given(cases(), st.data())
def test_a_plan_that_puts_a_wrong_byte_into_a_tensor_is_seen(case, data):
    """A copy that is lost, reads from another place, or writes to another: where memory is wrong, the sums differ.

    Two copies of one batch that share a place are the exception: both are seen as what the second left there. Their
    checksum is that of no bytes of the file.
    """

    def harm(copies):
        number = data.draw(st.integers(0, len(copies) - 1)) if copies else None
        if number is None:
            return copies
        copy = copies.pop(number)
        size = case.target.sizes(case.shapes)[copy.buffer]
        sources = range(copy.record.byte_offset, copy.record.byte_offset + copy.record.nbytes - copy.nbytes + 1)
        moved = data.draw(
            st.one_of(
                st.none(),
                st.sampled_from(sources).map(lambda at: copy._replace(byte_offset=at)),
                st.integers(0, size - copy.numel).map(lambda at: copy._replace(element_offset=at)),
            )
        )
        return copies if moved is None else [*copies, moved]

    rank = data.draw(st.sampled_from(list(case.target.ranks)))
    with tempfile.TemporaryDirectory() as folder:
        witness, now, tensors, faults = watched(case, case.checkpoint(folder), rank, harm)
    right, layout = expected_buffers(case, rank), case.target.layout(case.shapes)
    for key, placement in layout.placements.items():
        piece = placement.piece(rank)
        if piece is not None:
            part = slice(piece.element_offset, piece.element_offset + piece.stop - piece.start)
            wrong = raw(tensors[placement.buffer][part]) != raw(right[placement.buffer][part])
            assert not wrong or witness.sums[key] != now[key] or faults, key


class OneBuffer:
    """A shard source: one file that holds one buffer of 100 elements."""

    def buffers(self, family, shard):
        record = Record(path="file", byte_offset=64, nbytes=400, crc32=None)
        return {"a": Extent(record=record, byte_offset=64, dtype=ElementType.FLOAT32, numel=100)}


def of_rank_0(index, layout, wants):
    return Witness(index, match_tensors(index, layout, wants), 0)


def test_bytes_between_two_elements_count_nowhere():
    """A copy that begins one byte late would else count as the element before it, of which it holds three bytes."""
    key = TensorKey(name="w", kind="fp32")
    layout = Layout({key: whole_placement("w", "fp32", (100,), ElementType.FLOAT32, family="f", buffer="a")}, {"f": 1})
    record = OneBuffer().buffers("f", 0)["a"].record
    copy = Copy(record, 64 + 40, 10, ElementType.FLOAT32, "a", 10, ElementType.FLOAT32)
    for late, nbytes in ((0, 40), (1, 0), (4, 40)):
        witness = of_rank_0(Index(layout, OneBuffer()), layout, {key: key})
        witness.saw([copy._replace(byte_offset=copy.byte_offset + late)], [memoryview(bytearray(range(40)))])
        assert witness.sums[key].nbytes == nbytes


def test_bytes_of_two_tensors_count_for_the_one_whose_place_they_go_to():
    """Tied tensors lie in the same bytes of a file, and apart in the buffer of the run."""
    first, second = (TensorKey(name=name, kind="fp32") for name in ("first", "second"))
    saved = [
        whole_placement(k.name, "fp32", (100,), ElementType.FLOAT32, family=k.name, buffer="a") for k in (first, second)
    ]
    source = Layout(by_key(saved), {"first": 1, "second": 1})
    shapes = {"first": (100,), "second": (100,)}
    flat = FlatBuffer(shapes=shapes, rule=Rule.FLAT, ranks=1).placements("t", {"fp32": ElementType.FLOAT32})
    target = Layout(by_key(flat), {"t": 1})
    record = OneBuffer().buffers("f", 0)["a"].record
    copy = Copy(record, 64, 100, ElementType.FLOAT32, "fp32/0", 0, ElementType.FLOAT32)
    witness = of_rank_0(Index(source, OneBuffer()), target, {first: first, second: second})
    for element_offset, counted in ((0, (400, 0)), (100, (400, 400))):
        witness.saw([copy._replace(element_offset=element_offset)], [memoryview(bytearray(400))])
        assert tuple(witness.sums[key].nbytes for key in (first, second)) == counted


def test_bytes_that_are_cast_count_as_they_are_cast():
    key, values = TensorKey(name="w", kind="weight"), torch.arange(100, dtype=torch.float32)
    kept, wanted = (
        {key: whole_placement("w", "weight", (100,), dtype, family="f", buffer="a")}
        for dtype in (ElementType.FLOAT32, ElementType.BFLOAT16)
    )
    record = OneBuffer().buffers("f", 0)["a"].record
    copy = Copy(record, 64, 100, ElementType.FLOAT32, "a", 0, ElementType.BFLOAT16)
    witness = of_rank_0(Index(Layout(kept, {"f": 1}), OneBuffer()), Layout(wanted, {"f": 1}), {key: key})
    witness.saw([copy], [memoryview(bytearray(raw(values)))])
    assert witness.sums[key] == fingerprint_of(values.bfloat16())


@pytest.mark.parametrize("staged", [False, True], ids=["into memory", "through a window"])
@pytest.mark.parametrize("saved", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("joined", [False, True], ids=["a copy for each tensor", "a copy for many"])
def test_nans_count_as_they_are_stored(tmp_path, saved, wanted, staged, joined):
    """torch makes other NaNs of the last elements of a tensor than of the first: what is cast in parts is so twice."""
    shapes = {f"w{number}": (5 + 3 * number,) for number in range(40)}
    saved_buffer = FlatBuffer(shapes=shapes, rule=Rule.FLAT, ranks=3, kinds={"fp32": element_type(saved)})
    layout, numel = Layout(by_key(saved_buffer.placements("f")), {"f": 3}), saved_buffer.partition_numel
    extents = []
    for rank in range(3):
        values = torch.randn(numel)
        values[torch.arange(numel) % 3 > 0] = torch.nan
        data = raw(values.to(saved))
        (tmp_path / str(rank)).write_bytes(data)
        record = Record(path=str(tmp_path / str(rank)), byte_offset=0, nbytes=len(data), crc32=None)
        extents.append({"fp32/0": Extent(record=record, byte_offset=0, dtype=element_type(saved), numel=numel)})
    index = Index(layout, mock.Mock(buffers=lambda family, shard: extents[shard]))
    order = shapes if joined else dict(reversed(shapes.items()))
    buffer = FlatBuffer(shapes=order, rule=Rule.FLAT, ranks=1, kinds={"fp32": element_type(wanted)})
    flat = by_key(buffer.placements("t"))
    target, wants = Layout(flat, {"t": 1}), {key: key for key in flat}
    made = torch.zeros(buffer.partition_numel, dtype=wanted)
    witness = of_rank_0(index, target, wants)
    plan, into = Planner(index, target, wants).plan(0, sizes={"fp32/0": len(made)}), TensorTarget(made)
    if staged:
        into = InMemory(made)
        executor = StagingExecutor(threads=1, memory_nbytes=1 << 13, saw=witness.saw)
    else:
        executor = ThreadExecutor(threads=1, memory_nbytes=1 << 13, checksum=True, saw=witness.saw)
    assert executor.execute(plan, {"fp32/0": into}).faults == []
    now = held(target, 0, {"fp32/0": made})
    assert [key.name for key in wants if witness.sums[key] != now[key]] == []
    assert made.isnan().sum() > len(made) // 2
