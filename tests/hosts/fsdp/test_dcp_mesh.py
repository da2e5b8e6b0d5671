"""`ds_reshard.dcp.Reader` and the meshes of DTensors: any shape is filled, one that does not match is refused."""

from __future__ import annotations

from typing import Any

import fresh
import pytest
from cases import Model, Run
from gathered import gathered, same_bits
from saves import Saves

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NAME = "embed.weight"


def test_any_mesh_is_filled(saves: Saves) -> None:
    """Of two dimensions, with replicas, cut in two axes or twice in one; and of some of the ranks."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    shape = tuple(saved[0]["weights"][NAME].shape)
    expected = gathered(saved)[NAME, "fp32"]
    for rank, told in enumerate(fresh.run("dcp_mesh_jobs.filled", 4, folder=str(folder), name=NAME, shape=shape)):
        assert isinstance(told, dict), told
        assert (told.pop("two of four ranks") is None) == (rank in (0, 2))
        assert len(told) == 3 and all(same_bits(tensor.view(-1), expected) for tensor in told.values())


@pytest.mark.parametrize(("rows", "torchs_planner"), [(0, False), (1, False), (50, False), (1, True), (50, True)])
def test_a_mesh_that_does_not_match_is_refused_on_every_rank(saves: Saves, rows: int, torchs_planner: bool) -> None:
    """One rank holds fewer or more rows than its mesh says: no rank is left waiting, and nothing is filled."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    shape = tuple(saved[0]["weights"][NAME].shape)
    case: dict[str, Any] = {"folder": str(folder), "name": NAME, "shape": shape, "rows": rows}
    for told in fresh.run("dcp_mesh_jobs.contradicts", 2, collective_s=20, torchs_planner=torchs_planner, **case):
        assert "ModelMismatch" in told and f"{NAME}: is held in another shape than its mesh says" in told
        assert told.endswith("touched False")


def test_what_one_rank_cannot_do_is_told_to_all(saves: Saves) -> None:
    """An error that nobody foresaw, on one rank, before bytes are moved and while they are: no rank waits for it."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    shape = tuple(saved[0]["weights"][NAME].shape)
    case: dict[str, Any] = {"folder": str(folder), "name": NAME, "shape": shape}
    for broken in ("add", "execute"):
        for told in fresh.run("dcp_mesh_jobs.breaks", 2, collective_s=20, broken=broken, **case):
            assert "InternalError" in told and "KeyError: 'surprise'" in told, told
