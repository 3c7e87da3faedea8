"""Properties of the scheduler, over queues that hypothesis makes up."""

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
    """tokens None makes a barrier."""
    name = f"{owner}{model}"
    if tokens is None:
        work = OptimStep(adam=AdamParams())
    else:
        one = Datum(tokens=np.zeros(tokens, np.int32), targets=np.zeros(tokens, np.int64))
        work = Pass(model_id=name, data=(one,), loss_fn="cross_entropy")
    return replace(queued_request(f"{name}:{seq}", owner, name, seq, order, work), alone=alone)


@st.composite
def queues(draw) -> list[QueuedRequest]:
    """Rows of a few owners and models, seq_ids rising with gaps, in a mixed order of arrival."""
    seqs: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    for order in range(draw(st.integers(1, 30))):
        key = draw(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")))
        seqs[key] += draw(st.integers(1, 5))
        tokens = draw(st.one_of(st.none(), st.integers(1, 150)))
        rows.append(row(*key, seqs[key], tokens, order, alone=tokens is not None and draw(st.integers(0, 9)) == 0))
    return draw(st.permutations(rows))


def drain(rows: list[QueuedRequest]) -> list[tuple[QueuedRequest, ...]]:
    batches, waiting, last = [], {one.id: one for one in rows}, ""
    while waiting:
        batch = next_batch(waiting.values(), BUDGET, last)
        assert batch, "rows wait and nothing runs"
        for one in batch:
            del waiting[one.id]
        last = batch[0].owner
        batches.append(batch)
    return batches


@given(queues())
@settings(deadline=None)
def test_every_row_runs_once_in_its_models_order(rows: list[QueuedRequest]) -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    for batch in drain(rows):
        for one in batch:
            seen[one.model_id].append(one.seq)
    assert sum(map(len, seen.values())) == len(rows)
    assert all(seqs == sorted(seqs) for seqs in seen.values())


@given(queues())
@settings(deadline=None)
def test_a_batch_is_one_barrier_or_passes_within_the_budget(rows: list[QueuedRequest]) -> None:
    for batch in drain(rows):
        if len(batch) > 1:
            assert all(one.packs and not one.alone for one in batch)
            assert sum(one.tokens for one in batch) <= BUDGET


@given(queues())
@settings(deadline=None)
def test_no_owner_waits_while_others_lead_twice(rows: list[QueuedRequest]) -> None:
    waiting, last = {one.id: one for one in rows}, ""
    passed: dict[str, list[str]] = defaultdict(list)
    while waiting:
        owners = {one.owner for one in waiting.values()}
        batch = next_batch(waiting.values(), BUDGET, last)
        last = batch[0].owner
        for owner in owners - {last}:
            passed[owner].append(last)
            assert len(set(passed[owner])) == len(passed[owner]), "an owner led twice while another waited"
        passed[last].clear()
        for one in batch:
            del waiting[one.id]


def test_nothing_waits_for_nothing() -> None:
    assert next_batch([], BUDGET) == ()


def test_models_and_owners_share_a_pass_and_a_barrier_holds_only_its_own() -> None:
    rows = [
        row("a", "x", 1, 30, 0), row("a", "x", 2, None, 1), row("a", "x", 3, 10, 2),
        row("a", "y", 7, 30, 3), row("b", "x", 4, 30, 4),
    ]  # fmt: skip
    first = next_batch(rows, BUDGET)
    assert [one.id for one in first] == ["ax:1", "bx:4", "ay:7"]
    rest = [one for one in rows if one not in first]
    assert [one.id for one in next_batch(rest, BUDGET, "a")] == ["ax:2"]
    assert [one.id for one in next_batch(rest[1:], BUDGET, "a")] == ["ax:3"]


def test_owners_take_turns_within_a_batch() -> None:
    rows = [row("a", "x", seq, 20, seq) for seq in range(1, 9)] + [row("b", "x", seq, 20, 50 + seq) for seq in (1, 2)]
    assert [one.id for one in next_batch(rows, BUDGET)] == ["ax:1", "bx:1", "ax:2", "bx:2", "ax:3"]
