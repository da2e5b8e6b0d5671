"""What ranks tell each other: the earliest step that failed anywhere is what all raise; sums that cancel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import CheckpointDamaged, ConfigError, ModelMismatch, ReshardError
from ds_reshard.execution.checksums import partial_sums
from ds_reshard.execution.interfaces import Outcome, Slice
from ds_reshard.model.index import Record
from ds_reshard.operations.load import Details, ReadinessReport, check_ranks_agree
from ds_reshard.operations.ranks import RankReport, Steps, Sums, are_complete, collective, collective_timeout

DATA = random.Random(1).randbytes(64)
RECORD = Record(path="file", byte_offset=100, nbytes=len(DATA), crc32=crc32(DATA))


def _fails(error: type[ReshardError], what: str) -> None:
    raise error(what, [error.fault(what, "is wrong", mend="mend it")])


def _rank(failing: int, error: type[ReshardError]) -> Steps:
    """A rank with three steps, one of which fails."""
    steps = Steps()
    for number in (1, 2, 3):
        said = f"step {number}"
        steps.take(partial(_fails, error, said) if number == failing else lambda: None, subject=said)
    return steps


def test_every_rank_raises_what_the_earliest_step_found() -> None:
    """Whichever rank failed there; what later steps found is not told, as they might not have been reached."""
    ranks = [_rank(3, ModelMismatch), _rank(2, CheckpointDamaged), _rank(0, ModelMismatch)]
    told = [one for rank in ranks for one in rank.gather()]
    said = []
    for rank in ranks:
        with pytest.raises(CheckpointDamaged, match="step 2") as raised:
            rank.raise_first(told)
        said.append(str(raised.value))
    assert len(set(said)) == 1 and "step 3" not in said[0]
    _rank(0, ModelMismatch).agree()


def test_after_a_failure_only_what_others_wait_for_is_done() -> None:
    """A collective is entered by all ranks or none; the fault that is told stays the first."""
    steps, done = _rank(1, ModelMismatch), []
    steps.take(lambda: done.append("passed over"), subject="later")
    steps.take(lambda: done.append("waited for"), subject="later", always=True)
    steps.take(lambda: _fails(CheckpointDamaged, "again"), subject="later", always=True)
    assert done == ["waited for"] and steps.failed
    (told,) = steps.gather()
    assert (told.step, told.subject, [fault.error for fault in told.faults]) == (1, "step 1", ["ModelMismatch"])


def test_a_rank_that_cannot_describe_its_run_is_heard_before_ranks_are_compared() -> None:
    """Whatever number the step has at which that failed; a later one is told after what differs between ranks."""

    def told(failing: int, report: ReadinessReport | None) -> str:
        steps, arguments = _rank(0, ModelMismatch), ReadinessReport(arguments={"tag": "other"})
        others = [_rank(failing, ModelMismatch).gather(report)[0], steps.gather(arguments)[0]]
        steps.gather = lambda value=None: [*others, RankReport(3, "step 3", (), value)]  # type: ignore[method-assign]
        details = Details(files=dict, shards=lambda states: [])
        with pytest.raises(ReshardError) as raised:
            check_ranks_agree(
                ReadinessReport(arguments={"tag": "own"}), steps, details, load="here", folder="here", alike="mend it"
            )
        return str(raised.value)

    assert "step 2" in told(2, None)
    assert "load_checkpoint" in told(2, ReadinessReport()) and "load_checkpoint" in told(1, ReadinessReport())


def test_what_only_another_version_knows_is_said_to_be_so() -> None:
    """torch unpickles what ranks tell inside the collective."""
    with pytest.raises(ConfigError, match=r"another version.*has no Ready2.*install the same version"), collective():
        raise AttributeError("module ready has no Ready2")


def _sums(data: bytes, *spans: tuple[int, int]) -> Sums:
    slices = [Slice(byte_offset=a, nbytes=b - a, crc32=crc32(data[a:b])) for a, b in spans]
    return Sums.of(partial_sums(Outcome(slices={RECORD: slices})), 0)


def test_sums_of_all_ranks_cancel_where_the_record_is_as_it_was_saved() -> None:
    """However it is cut; a changed bit, a slice that nobody read or two did, a rank that cannot tell: they do not."""
    cut = list(pairwise((0, 5, 24, 63, 64)))
    assert are_complete([_sums(DATA, *cut[::2]), _sums(DATA, *cut[1::2])]) and are_complete([_sums(DATA, *cut)])
    other = bytes([DATA[0] ^ 1]) + DATA[1:]
    assert not are_complete([_sums(other, *cut)])
    assert not are_complete([_sums(DATA, *cut[1:])]) and not are_complete([_sums(DATA, *cut[:-1])])
    assert not are_complete([_sums(DATA, *cut), _sums(DATA, cut[1])])
    assert not are_complete([_sums(DATA, *cut), None])
    assert not are_complete([_sums(DATA, cut[0]), _sums(DATA, cut[0])]), "checksums alone cancel"


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_wait_as_long_as_is_asked_and_then_as_before(group: dist.ProcessGroup) -> None:
    """Also those that were made beside the first, and after an error."""
    other = dist.new_group([0], timeout=timedelta(seconds=33))

    def seconds() -> list[float]:
        backends = [one._get_backend(torch.device("cpu")) for one in (group, other)]
        return [one.options._timeout.total_seconds() for one in backends]

    with pytest.raises(CheckpointDamaged), collective_timeout(5):
        assert seconds() == [5, 5]
        _fails(CheckpointDamaged, "a file")
    assert seconds() == [77, 33]
    with collective_timeout(None):
        assert seconds() == [77, 33]


def test_a_group_whose_timeout_cannot_be_set_is_named(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(group), "_get_backend", lambda group, device: object())
    with (
        pytest.raises(ConfigError, match="timeout_s: the timeout of a process group cannot be set"),
        collective_timeout(5),
    ):
        pass
