"""The queue's index: what can start follows from the requests of idle models alone."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.training.test_scheduler import BUDGET, fork, queues, row
from tinsmith.service.budgets.queue import attended_first
from tinsmith.service.storage.records import QueuedRequest
from tinsmith.service.training.queue import RequestQueue
from tinsmith.service.training.scheduler import Group, next_groups


def queue_of(rows: list[QueuedRequest]) -> RequestQueue:
    queue = RequestQueue("toy", Mock(), Mock(), Mock(), {})
    for request in rows:
        queue.add(request)
    return queue


def busy_models(running: list[Group]) -> set[str]:
    return {name for group in running for each in group for name in (each.model_id, each.source)}


@given(queues(), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=3), st.data())
@settings(deadline=None)
def test_requests_of_idle_models_decide_what_starts(
    rows: list[QueuedRequest], sources: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Also which of the abandoned models start. Break `_models`: leave out the source of a fork."""
    forks = [fork(owner, f"f{n}", f"{owner}{model}", 3, 100 + n) for n, (owner, model) in enumerate(sources)]
    queue = queue_of([*(replace(request, alone=False) for request in rows), *forks])
    running: list[Group] = []
    abandoned = frozenset(data.draw(st.sets(st.sampled_from(sorted({*queue.models()}) or [""]))))
    while queue.requests:
        groups = next_groups(attended_first(queue.requests.values(), abandoned, queue.models()), running, BUDGET)
        idle = attended_first(queue.of_idle_models(busy_models(running)), abandoned, queue.models())
        assert next_groups(idle, running, BUDGET) == groups
        running += groups
        for request in running.pop(data.draw(st.integers(0, len(running) - 1))):
            queue.remove(request)
    assert not queue.of_idle_models(())


def test_isolated_requests_count_until_they_end() -> None:
    """Break `remove`: leave out `_alone.discard`."""
    request = row("a", "x", 1, 10, 0)
    queue = queue_of([request])
    assert not queue.must_isolate
    queue.replace(replace(request, alone=True))
    assert queue.must_isolate
    assert [each.alone for each in queue.of_idle_models(())] == [True]
    queue.remove(request)
    assert not queue.must_isolate
