"""Objects that later garbage collections leave out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tinsmith.processes import garbage_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector runs again after each test."""
    yield
    gc.enable()


def test_nothing_is_collected_while_paused() -> None:
    """Break `paused`: don't disable the collector."""
    with garbage_collection.paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_leaves_out_nothing_of_its_callers_process() -> None:
    """Break `paused`: call `leave_out_existing`."""
    made = [[index] for index in range(1000)]
    before = gc.get_freeze_count()
    with garbage_collection.paused():
        pass
    assert gc.get_freeze_count() == before
    assert any(each is made[0] for each in gc.get_objects())


def test_existing_objects_are_left_out() -> None:
    """Break `leave_out_existing`: don't freeze."""
    made = [[index] for index in range(1000)]
    before = gc.get_freeze_count()
    garbage_collection.leave_out_existing()
    assert gc.get_freeze_count() >= before + len(made)
    assert not any(each is made[0] for each in gc.get_objects())


def test_pause_within_a_pause_does_not_end_it() -> None:
    """Break `paused`: enable the collector always."""
    gc.disable()
    with garbage_collection.paused():
        pass
    assert not gc.isenabled()


def test_collector_runs_again_after_an_error() -> None:
    """Break `paused`: enable the collector without `finally`."""
    with pytest.raises(ImportError), garbage_collection.paused():
        raise ImportError("no such library")
    assert gc.isenabled()
