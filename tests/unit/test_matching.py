"""Which tensors a run and a checkpoint have in common, and what a weight is read from."""

from __future__ import annotations

import pytest

from ds_reshard.errors import Fault
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.records import ElementType
from ds_reshard.operations.matching import TRAINED, choose_source, match_tensors

FLOAT32, BFLOAT16, FLOAT16 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16


def test_tensors_of_one_side_and_of_another_shape_are_told() -> None:
    run = {"late": (2,), "other": (3, 2), "same": (4,), "scalar": ()}
    faults = match_tensors(run, {"other": (2, 3), "same": (4,), "gone": (1,), "scalar": ()}, mend="build it")
    assert [(one.line(), one.mend) for one in faults] == [
        ("gone: is in the checkpoint but not in the model", "build it"),
        ("late: is missing from the checkpoint", "build it"),
        ("other: has another shape (expected [3, 2], found [2, 3])", "build it"),
    ]


def test_names_alone_are_compared_without_shapes() -> None:
    faults = match_tensors({"a": None, "b": None}, {"b": (2,), "c": None}, words=TRAINED, mend="train them")
    assert [(one.where, one.what) for one in faults] == [("a", TRAINED[0]), ("c", TRAINED[1])]


@pytest.mark.parametrize(
    ("dtype", "weight", "master", "alone", "casting"),
    [
        (BFLOAT16, BFLOAT16, FLOAT32, WEIGHT, WEIGHT),
        (FLOAT32, BFLOAT16, FLOAT32, MASTER, MASTER),
        (FLOAT16, BFLOAT16, FLOAT32, MASTER, MASTER),
        (BFLOAT16, FLOAT32, None, None, WEIGHT),
        (FLOAT32, BFLOAT16, None, None, WEIGHT),
        (FLOAT16, BFLOAT16, None, None, None),
        (ElementType.FLOAT64, FLOAT32, FLOAT32, None, None),
    ],
)
def test_a_weight_is_read_from_its_own_type_or_its_master(
    dtype: ElementType, weight: ElementType, master: ElementType | None, alone: str | None, casting: str | None
) -> None:
    """Other types are cast only if the framework does that itself, and then where fp32 is on one side."""
    saved = {kind: one for kind, one in ((WEIGHT, weight), (MASTER, master)) if one is not None}
    for casts, expected in ((False, alone), (True, casting)):
        faults: list[Fault] = []
        assert choose_source("w", dtype, saved, faults, casts=casts, mend="another type") == expected
        assert [one.expected for one in faults] == ([] if expected else [dtype.label])
