"""Properties of next_groups over generated queues."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.base import AdamParams, Datum, Pass
from tinsmith.service.storage.payloads import queued_request
from tinsmith.service.storage.records import ForkModel, OptimStep, QueuedRequest
from tinsmith.service.training.scheduler import MAX_BARRIERS, Group, next_groups

BUDGET = 100


def row(owner: str, model: str, seq: int, tokens: int | None, order: int, alone: bool = False) -> QueuedRequest:
    """A queued pass of `tokens` tokens, or an optimizer step (a barrier) if None."""
    name = f"{owner}{model}"
    if tokens is None:
        work = OptimStep(adam=AdamParams())
    else:
        datum = Datum(tokens=np.zeros(tokens, np.int32), targets=np.zeros(tokens, np.int64))
        work = Pass(model_id=name, data=(datum,), loss_fn="cross_entropy")
    return replace(queued_request(f"{name}:{seq}", owner, name, seq, order, work), alone=alone)


@st.composite
def queues(draw) -> list[QueuedRequest]:
    """Requests of a few owners and models: increasing seq_ids with gaps, in random order of arrival."""
    seqs: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    for order in range(draw(st.integers(1, 30))):
        key = draw(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")))
        seqs[key] += draw(st.integers(1, 5))
        tokens = draw(st.one_of(st.none(), st.integers(1, 150)))
        rows.append(row(*key, seqs[key], tokens, order, alone=tokens is not None and draw(st.integers(0, 9)) == 0))
    return draw(st.permutations(rows))


def simulate(
    rows: list[QueuedRequest], which_ends: Callable[[int], int], check: Callable[[list[Group]], None] = lambda _: None
) -> list[Group]:
    """Run all requests; of the running groups, `which_ends(count)` ends first. Returns groups in the order of start."""
    waiting, running, groups, last = {request.id: request for request in rows}, [], [], ""
    while waiting or running:
        started = next_groups(waiting.values(), running, BUDGET, last)
        for group in started:
            last = group[0].owner if group[0].in_background else last
            for request in group:
                del waiting[request.id]
        running, groups = running + started, groups + started
        assert running, "requests wait but nothing runs"
        check(running)
        running.pop(which_ends(len(running)))
    return groups


def ends(data: st.DataObject) -> Callable[[int], int]:
    return lambda running: data.draw(st.integers(0, running - 1))


@given(queues(), st.data())
@settings(deadline=None)
def test_requests_start_once_in_the_order_of_their_model(rows: list[QueuedRequest], data: st.DataObject) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    for group in simulate(rows, ends(data)):
        for request in group:
            seen[request.model_id].append(request.seq)
    assert sum(map(len, seen.values())) == len(rows)
    assert all(seqs == sorted(seqs) for seqs in seen.values())


@given(queues(), st.data())
@settings(deadline=None)
def test_models_run_one_group_and_owners_stay_in_budget(rows: list[QueuedRequest], data: st.DataObject) -> None:
    def check(running: list[Group]) -> None:
        models = Counter(group[0].model_id for group in running)
        assert max(models.values()) == 1
        assert len(running) == 1 or not any(group[0].alone for group in running)
        for group in running:
            assert len(group) == 1 or all(request.packs and not request.alone for request in group)
            assert len({request.model_id for request in group}) == 1
        for owner in "abc":
            sizes = [sum(request.tokens for request in group) for group in running if group[0].owner == owner]
            assert sum(size for size in sizes if size <= BUDGET) <= BUDGET
            assert sum(size > BUDGET for size in sizes) <= 1

    simulate(rows, ends(data), check)


@given(queues(), queues(), st.data())
@settings(deadline=None)
def test_no_owner_waits_for_another(
    rows: list[QueuedRequest], others: list[QueuedRequest], data: st.DataObject
) -> None:
    """Break it: let `_Limits` count the tokens of all owners together."""
    rows, others = ([replace(request, alone=False) for request in listed] for listed in (rows, others))
    own = [request for request in rows if request.owner == "a"]
    theirs = [request for request in others if request.owner != "a"]
    running = next_groups(theirs, [], BUDGET)
    alone = next_groups(own, [], BUDGET)
    assert [group for group in next_groups(own + theirs, running, BUDGET) if group[0].owner == "a"] == alone


def test_empty_queue_starts_nothing() -> None:
    assert next_groups([], [], BUDGET) == []


def ids(groups: Sequence[Group]) -> list[list[str]]:
    return [[request.id for request in group] for group in groups]


def test_models_run_side_by_side_and_barriers_block_their_model() -> None:
    rows = [
        row("a", "x", 1, 30, 0), row("a", "x", 2, None, 1), row("a", "x", 3, 10, 2),
        row("a", "y", 7, 30, 3), row("a", "y", 8, 20, 5), row("b", "x", 4, 30, 4),
    ]  # fmt: skip
    first = next_groups(rows, [], BUDGET)
    assert ids(first) == [["ax:1"], ["ay:7", "ay:8"], ["bx:4"]]
    assert next_groups(rows[1:3], first, BUDGET) == []
    assert ids(next_groups(rows[1:3], first[1:], BUDGET)) == [["ax:2"]]
    assert ids(next_groups(rows[2:3], first[1:], BUDGET)) == [["ax:3"]]


def test_step_starts_while_its_passes_are_computed() -> None:
    """Break it: let any barrier start in `_candidates`, or leave out `passing`."""
    rows = [row("a", "x", 1, 10, 0), row("a", "x", 2, None, 1), row("a", "x", 3, 10, 2)]
    forked = fork("a", "s", "ax", 1, 3)
    first = next_groups(rows, [], BUDGET)
    assert ids(first) == [["ax:1"]]
    assert next_groups(rows[1:], first, BUDGET) == []
    assert ids(next_groups(rows[1:], first, BUDGET, passing={"ax"})) == [["ax:2"]]
    assert next_groups(rows[2:], first, BUDGET, passing={"ax"}) == []
    assert next_groups([forked, *rows[1:]], first, BUDGET, passing={"ax"}) == []
    suspect = replace(rows[1], alone=True)
    assert next_groups([suspect], first, BUDGET, passing={"ax"}) == []


@given(queues(), st.data())
@settings(deadline=None)
def test_steps_ahead_keep_the_order_of_their_model(rows: list[QueuedRequest], data: st.DataObject) -> None:
    waiting = {request.id: replace(request, alone=False) for request in rows}
    running: list[Group] = []
    ran: dict[str, list[int]] = defaultdict(list)
    while waiting or running:
        of_model = Counter(group[0].model_id for group in running)
        passing = {group[0].model_id for group in running if group[0].packs and of_model[group[0].model_id] == 1}
        passing &= data.draw(st.sets(st.sampled_from(sorted(passing)))) if passing else set()
        for group in next_groups(waiting.values(), running, BUDGET, passing=passing):
            before = [other for other in running if other[0].model_id == group[0].model_id]
            assert not before or (before[0][0].packs and isinstance(group[0].operation, OptimStep))
            running.append(group)
            for request in group:
                del waiting[request.id]
                ran[request.model_id].append(request.seq)
        group = data.draw(st.sampled_from(running))
        running.remove(next(other for other in running if other[0].model_id == group[0].model_id))  # passes first
    assert all(seqs == sorted(seqs) for seqs in ran.values())


def test_request_over_the_budget_runs_beside_small_ones() -> None:
    large = [row("a", model, 1, 150, order) for order, model in enumerate("xy")]
    small = [row("a", "z", 1, 60, 2), row("a", "w", 1, 60, 3), row("a", "v", 1, 10, 4)]
    started = next_groups(large + small, [], BUDGET)
    assert ids(started) == [["ax:1"], ["az:1"]], "aw:1 waits for room, and av:1 does not pass it"
    assert ids(next_groups([large[1], *small[1:]], started[1:], BUDGET)) == [["ay:1"]]


def test_owner_runs_a_limited_number_of_barriers() -> None:
    steps = [row("a", str(number), 1, None, number) for number in range(2 * MAX_BARRIERS)]
    started = next_groups(steps, [], BUDGET)
    assert len(started) == MAX_BARRIERS
    other = row("b", "x", 1, None, 99)
    assert ids(next_groups([*steps[MAX_BARRIERS:], other], started, BUDGET)) == [["bx:1"]]


def fork(owner: str, model: str, source: str, after: int, order: int) -> QueuedRequest:
    """The creation of a shadow of the model `source`, accepted after its request `after`."""
    work = ForkModel(path="", source=source)
    made = queued_request(f"{owner}{model}:0", owner, f"{owner}{model}", 0, order, work)
    return replace(made, source=source, source_seq=after)


def test_fork_runs_between_the_requests_of_its_source() -> None:
    rows = [
        row("a", "x", 1, 10, 0), row("a", "x", 2, None, 1), row("a", "x", 3, 10, 3), row("a", "x", 4, None, 4),
        fork("a", "s", "ax", 2, 2), row("a", "s", 1, 10, 5),
    ]  # fmt: skip
    ran = [request.id for group in simulate(rows, lambda _: 0) for request in group]
    assert sorted(ran) == sorted(request.id for request in rows)
    assert ran.index("ax:2") < ran.index("as:0") < ran.index("ax:3")
    assert ran.index("as:0") < ran.index("as:1")


@given(queues(), st.data())
@settings(deadline=None)
def test_forks_keep_the_order_of_both_models(rows: list[QueuedRequest], data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(rows))
    rows = [replace(request, alone=False) for request in rows]
    seqs = [request.seq for request in rows if request.model_id == source.model_id]
    after = data.draw(st.sampled_from([0, *seqs]))
    made = fork("c", "z", source.model_id, after, len(rows))

    def check(running: list[Group]) -> None:
        models = {request.model_id for group in running for request in group}
        assert not {"cz", source.model_id} <= models or made not in [group[0] for group in running]

    listed = [*rows, made, row("c", "z", 1, 5, len(rows) + 1)]
    ran = [request for group in simulate(listed, ends(data), check) for request in group]
    places = {request.id: place for place, request in enumerate(ran)}
    for request in rows:
        if request.model_id == source.model_id:
            assert (places[request.id] < places["cz:0"]) == (request.seq <= after)
    assert places["cz:0"] < places["cz:1"]


def test_shadows_yield_to_the_other_requests_of_their_owner() -> None:
    waiting = [replace(row("a", "s", seq, 60, seq), yields=True) for seq in (1, 2, 3)]
    waiting += [row("a", "x", 1, 60, 8), row("b", "x", 1, None, 9)]
    assert ids(next_groups(waiting, [], BUDGET)) == [["ax:1"], ["bx:1"]]
    assert ids(next_groups(waiting[:3], [], BUDGET)) == [["as:1"]]


def shadow_row(owner: str, model: str, seq: int, order: int, alone: bool = False) -> QueuedRequest:
    """A queued shadow pass."""
    plain = row(owner, model, seq, 10, order, alone)
    assert isinstance(plain.operation, Pass)
    return replace(plain, operation=replace(plain.operation, loss_fn="shadow", forward_only=True))


def test_one_shadow_pass_runs_at_a_time_owners_in_turn() -> None:
    number = count(10)
    shadows = [shadow_row(owner, model, 1, next(number)) for owner, model in ("ax", "ay", "bx")]
    plain = row("c", "x", 1, 10, 0)
    started = next_groups([*shadows, plain], [], BUDGET)
    assert ids(started) == [["cx:1"], ["ax:1"]]
    assert next_groups(shadows[1:], started, BUDGET) == []
    assert ids(next_groups(shadows[1:], started[:1], BUDGET, "a")) == [["bx:1"]]
    assert ids(next_groups(shadows[1:], started[:1], BUDGET, "b")) == [["ay:1"]]


def test_shadow_pass_is_a_barrier_of_its_model() -> None:
    rows = [row("a", "x", 1, 10, 0), shadow_row("a", "x", 2, 1), row("a", "x", 3, 10, 2)]
    assert ids(next_groups(rows, [], BUDGET)) == [["ax:1"]]
    assert ids(next_groups(rows[1:], [], BUDGET)) == [["ax:2"]]


def test_suspect_runs_by_itself() -> None:
    rows = [shadow_row("a", "x", 1, 0, alone=True), row("b", "x", 1, 10, 1), row("c", "x", 1, 10, 2, alone=True)]
    started = next_groups(rows, [], BUDGET)
    assert ids(started) == [["ax:1"]]
    assert next_groups(rows[1:], started, BUDGET) == []
    assert ids(next_groups(rows[1:], [], BUDGET)) == [["cx:1"]]
    assert next_groups(rows[2:], [(rows[1],)], BUDGET) == []
