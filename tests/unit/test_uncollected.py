"""Garbage is not collected while many objects are made, and is collected again as before afterwards."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from ds_reshard.model.gc_pause import gc_disabled


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
    assert gc_disabled()(many)(collections) == (0, 100_000)
    assert gc.isenabled() and many(collections)[0] > 0


def test_an_error_leaves_the_collector_on_and_one_that_was_off_stays_off():
    with pytest.raises(ValueError, match="here"), gc_disabled():
        assert not gc.isenabled()
        raise ValueError("here")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled(), gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def other():
    """Another thread that is inside; called, it leaves."""
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with gc_disabled():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(60)

    def left():
        leave.set()
        thread.join(60)

    yield left
    left()


def test_threads_that_come_and_go_leave_it_on(other):
    """The last that leaves turns it on, whatever the order."""
    with gc_disabled():
        pass
    assert not gc.isenabled(), "another thread is inside"
    with gc_disabled():
        other()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_many_threads_at_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [gc_disabled()(int)() for _ in range(2000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert gc.isenabled()


def test_a_process_that_is_made_while_another_thread_is_inside_collects(other):
    child = os.fork()
    if not child:
        with gc_disabled():
            pass
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other()
    assert gc.isenabled()
