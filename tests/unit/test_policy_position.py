"""Where a policy lets the schedule go on, and that ranks with other policies are told so."""

from __future__ import annotations

import pytest

from ds_reshard.resume.policy import ResumePolicy, policy_differences


@pytest.mark.parametrize(
    ("given", "keeps"),
    [
        ({}, True),
        ({"iteration": "reset"}, False),
        ({"iteration": "reset", "scheduler": "override"}, False),
        ({"iteration": "reset", "scheduler": "checkpoint"}, True),
        ({"optimizer": "skip"}, False),
        ({"optimizer": "skip", "scheduler": "override"}, True),
        ({"scheduler": "reset"}, False),
        ({"finetune": True}, False),
    ],
    ids=str,
)
def test_the_position_is_kept_where_nothing_takes_it(given: dict[str, object], keeps: bool) -> None:
    """A reset iteration takes the position with it unless the checkpoint's schedule is asked for, as does a skip."""
    assert ResumePolicy(**given).keeps_position is keeps  # type: ignore[arg-type]


def test_ranks_that_were_given_other_policies_are_named() -> None:
    """A fault for each key that differs, with the ranks; none where all are alike."""
    plain, other = ResumePolicy(), ResumePolicy(scheduler="override", rng=False)
    assert policy_differences([plain, plain, plain]) == []
    faults = policy_differences([plain, other, plain])
    assert [fault.where for fault in faults] == ["resume policy: scheduler", "resume policy: rng"]
    assert (faults[0].expected, faults[0].found) == ("'host' everywhere, as on ranks 0, 2", "'override' on rank 1")


def test_a_report_may_have_another_name_on_each_rank() -> None:
    """Rank 0 writes it: where rank 0 has none, none would be."""
    first, second, none = ResumePolicy(report="a.json"), ResumePolicy(report="b.json"), ResumePolicy()
    assert policy_differences([first, second]) == []
    (fault,) = policy_differences([none, second])
    assert (fault.where, fault.found) == ("resume policy: report", "'a file' on rank 1")
