"""Garbage is not collected while many objects are made, and is collected again as before afterwards."""

from __future__ import annotations

import gc

import pytest

from ds_reshard.model.uncollected import uncollected


@pytest.fixture
def collections():
    """The collections that begin, as a list that grows."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def many(collections):
    """How many collections there are while so many lists are made."""
    before = len(collections)
    made = [[] for _ in range(100_000)]
    return len(collections) - before, len(made)


def test_nothing_is_collected_on_the_way(collections):
    assert many(collections)[0] > 0
    assert uncollected()(many)(collections) == (0, 100_000)
    assert gc.isenabled() and many(collections)[0] > 0


def test_an_error_leaves_the_collector_on_and_one_that_was_off_stays_off():
    with pytest.raises(ValueError, match="here"), uncollected():
        assert not gc.isenabled()
        raise ValueError("here")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected(), uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
