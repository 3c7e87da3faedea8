"""Properties of next_batch over generated queues."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.base import AdamParams, Datum, Pass
from tinsmith.service.storage.payloads import queued_request
from tinsmith.service.storage.records import OptimStep, QueuedRequest
from tinsmith.service.training.scheduler import next_batch

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


def drain(rows: list[QueuedRequest]) -> list[tuple[QueuedRequest, ...]]:
    batches, waiting, last = [], {request.id: request for request in rows}, ""
    while waiting:
        batch = next_batch(waiting.values(), BUDGET, last)
        assert batch, "requests wait but no batch runs"
        for request in batch:
            del waiting[request.id]
        last = batch[0].owner
        batches.append(batch)
    return batches


@given(queues())
@settings(deadline=None)
def test_requests_run_once_in_the_order_of_their_model(rows: list[QueuedRequest]) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    for batch in drain(rows):
        for request in batch:
            seen[request.model_id].append(request.seq)
    assert sum(map(len, seen.values())) == len(rows)
    assert all(seqs == sorted(seqs) for seqs in seen.values())


@given(queues())
@settings(deadline=None)
def test_batch_is_one_barrier_or_passes_within_the_budget(rows: list[QueuedRequest]) -> None:
    for batch in drain(rows):
        if len(batch) > 1:
            assert all(request.packs and not request.alone for request in batch)
            assert sum(request.tokens for request in batch) <= BUDGET


@given(queues())
@settings(deadline=None)
def test_no_owner_leads_twice_while_another_waits(rows: list[QueuedRequest]) -> None:
    waiting, last = {request.id: request for request in rows}, ""
    passed: dict[str, list[str]] = defaultdict(list)
    while waiting:
        owners = {request.owner for request in waiting.values()}
        batch = next_batch(waiting.values(), BUDGET, last)
        last = batch[0].owner
        for owner in owners - {last}:
            passed[owner].append(last)
            assert len(set(passed[owner])) == len(passed[owner]), "an owner led twice while another waited"
        passed[last].clear()
        for request in batch:
            del waiting[request.id]


def test_empty_queue_makes_no_batch() -> None:
    assert next_batch([], BUDGET) == ()


def test_models_share_a_pass_and_barriers_block_their_model() -> None:
    rows = [
        row("a", "x", 1, 30, 0), row("a", "x", 2, None, 1), row("a", "x", 3, 10, 2),
        row("a", "y", 7, 30, 3), row("b", "x", 4, 30, 4),
    ]  # fmt: skip
    first = next_batch(rows, BUDGET)
    assert [request.id for request in first] == ["ax:1", "bx:4", "ay:7"]
    rest = [request for request in rows if request not in first]
    assert [request.id for request in next_batch(rest, BUDGET, "a")] == ["ax:2"]
    assert [request.id for request in next_batch(rest[1:], BUDGET, "a")] == ["ax:3"]


def test_owners_alternate_within_a_batch() -> None:
    rows = [row("a", "x", seq, 20, seq) for seq in range(1, 9)] + [row("b", "x", seq, 20, 50 + seq) for seq in (1, 2)]
    assert [request.id for request in next_batch(rows, BUDGET)] == ["ax:1", "bx:1", "ax:2", "bx:2", "ax:3"]
