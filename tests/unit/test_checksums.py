"""Sums of slices become the checksum of the record, or say that the slices did not tile it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault
from ds_reshard.execution.checksums import (
    PartialSum,
    Span,
    combine,
    compare_records,
    partial_sums,
    read_again,
    settle,
    verify,
)
from ds_reshard.execution.interfaces import Outcome, Slice
from ds_reshard.model.index import Record

QUICK = settings(max_examples=40)
DATA = random.Random(0).randbytes(64)
RECORD = Record(path="file", byte_offset=1000, nbytes=len(DATA), crc32=crc32(DATA))


def read(*spans: tuple[int, int], data: bytes = DATA, record: Record = RECORD) -> Outcome:
    """The outcome of a rank that read these spans of the record, and found `data` there."""
    slices = [Slice(byte_offset=a, nbytes=b - a, crc32=crc32(data[a:b])) for a, b in spans]
    return Outcome(slices={record: slices} if slices else {})


def changed(at: int) -> bytes:
    return DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]


def verdict(*outcomes: Outcome) -> tuple[list[str], set[Record]]:
    """The errors that ranks with these outcomes find together, and what is to be read again."""
    settled = [settle(partial_sums(outcome)) for outcome in outcomes]
    faults, again = combine([left for left, _ in settled])
    return [fault.error for fault in [*(fault for _, found in settled for fault in found), *faults]], again


@st.composite
def dealt(draw):
    """The record cut into spans, each dealt to one of up to four ranks, in any order."""
    edges = sorted({0, len(DATA), *draw(st.lists(st.integers(1, len(DATA) - 1), max_size=8))})
    ranks = [[] for _ in range(draw(st.integers(1, 4)))]
    for span in draw(st.permutations(list(pairwise(edges)))):
        ranks[draw(st.integers(0, len(ranks) - 1))].append(span)
    return ranks


def test_two_files_of_one_name_are_told_apart():
    """Each is as it was written, so that a rank which reads its own again finds nothing wrong."""
    other = RECORD._replace(crc32=crc32(changed(0)))
    errors, again = verdict(read((0, 32)), read((32, 64), data=changed(0), record=other))
    assert errors == ["CheckpointDamaged"] and again == {RECORD, other}
    elsewhere = other._replace(path="another file")
    assert verdict(read((0, 32)), read((32, 64), data=changed(0), record=elsewhere)) == ([], {RECORD, elsewhere})


@QUICK
@given(dealt())
def test_slices_of_all_ranks_are_the_whole(ranks):
    """However the record is cut and dealt: no fault, and nothing is read again."""
    assert verdict(*(read(*spans) for spans in ranks)) == ([], set())


@QUICK
@given(dealt(), st.integers(0, len(DATA) - 1))
def test_one_changed_bit_is_one_fault(ranks, at):
    """Whichever rank read it."""
    assert verdict(*(read(*spans, data=changed(at)) for spans in ranks)) == (["ChecksumMismatch"], set())


@QUICK
@given(dealt(), st.data())
def test_a_slice_that_nobody_read_has_the_record_read_again(ranks, data):
    rank = data.draw(st.sampled_from([number for number, spans in enumerate(ranks) if spans]))
    ranks[rank].pop()
    assert verdict(*(read(*spans) for spans in ranks)) == ([], {RECORD} if any(ranks) else set())


def test_a_slice_read_twice_by_one_rank_counts_once():
    assert verdict(read((0, 20), (0, 20), (20, 64))) == ([], set())


def test_a_slice_read_by_two_ranks_has_the_record_read_again():
    assert verdict(read((0, 20)), read((0, 64 - 7)), read((57, 64))) == ([], {RECORD})


def test_what_two_ranks_read_alike_counts_once():
    assert verdict(read((0, 20)), read((0, 20)), read((20, 64))) == ([], set())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "file"
    path.write_bytes(DATA)
    return str(path)


@QUICK
@given(dealt(), dealt(), st.data())
def test_a_bit_that_flips_where_bytes_are_read_twice_is_a_fault(path, ranks, others, data):
    """The file is right, and so is another reading of it: what has the flipped bit is not."""
    record = Record(path=path, byte_offset=0, nbytes=len(DATA), crc32=crc32(DATA))
    outcomes = [read(*spans, record=record) for spans in (*ranks, *others)]
    assert _settled(outcomes) == []
    rank = data.draw(st.sampled_from([number for number, spans in enumerate(ranks) if spans]))
    at = data.draw(st.sampled_from([at for start, stop in ranks[rank] for at in range(start, stop)]))
    outcomes[rank] = read(*ranks[rank], data=changed(at), record=record)
    assert {fault.error for fault in _settled(outcomes)} == {"ChecksumMismatch"}
    together = Outcome()
    for outcome in outcomes:
        together.add(outcome)
    assert {fault.error for fault in verify(together)} == {"ChecksumMismatch"}


def _settled(outcomes: list[Outcome]) -> list[Fault]:
    """What ranks with these outcomes find, each of which reads again what is its own."""
    settled = [settle(partial_sums(outcome)) for outcome in outcomes]
    faults, again = combine([left for left, _ in settled])
    return [*faults, *(fault for left, found in settled for fault in (*found, *read_again(left, again)))]


def test_the_same_half_read_twice_is_not_the_whole():
    """As many bytes as the record has, but not its bytes: to be read again, not called damaged."""
    assert verdict(read((0, 32)), read((0, 32))) == ([], {RECORD})


def test_ranks_that_each_read_the_whole_settle_it_alone():
    """Replicas: nothing is left to combine."""
    for data, errors in ((DATA, []), (changed(9), ["ChecksumMismatch"])):
        left, faults = settle(partial_sums(read((0, 30), (30, 64), data=data)))
        assert (left, [fault.error for fault in faults]) == ([], errors)


def test_a_mismatch_says_what_was_expected_and_found():
    _, (fault,) = settle([PartialSum(record=RECORD, crc32=1, spans=(Span(0, 64),))])
    assert fault.line() == (
        f"file: bytes [1000, 1064) are not what was written (expected crc32 {crc32(DATA):08x}, found 00000001)"
    )
    assert fault.mend


def test_a_record_without_checksum_is_not_judged():
    bare = Record(path="file", byte_offset=0, nbytes=64, crc32=None)
    outcome = read((0, 64), record=bare)
    assert partial_sums(outcome) == []


def test_records_are_read_again_from_their_files(tmp_path):
    """Sound, changed, cut short and gone: one fault for each that is not sound, by its own name."""
    big = random.Random(1).randbytes(3 << 20)
    contents = {"sound": big, "changed": big[:-1] + b"?", "short": big[:-1], "gone": None}
    records = []
    for name, content in contents.items():
        if content is not None:
            (tmp_path / name).write_bytes(b"xyz" + content)
        records.append(Record(path=str(tmp_path / name), byte_offset=3, nbytes=len(big), crc32=crc32(big)))
    found = [(fault.where.rpartition("/")[2], fault.error) for fault in compare_records(records)]
    assert found == [("changed", "ChecksumMismatch"), ("short", "ChecksumMismatch"), ("gone", "ReadFailed")]
