"""Micro-batches that are computed at the same time: the numbers of the oracle, errors of their runs alone."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.architectures import save_tiny
from tests.engine.data import datum_for, pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine.base import LoraSpec, Pass, PassResult
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model.packing import PackedRow, packed_tokens, sorted_for_packing, take_rows
from tinsmith.engine.threads.compute import SMALL_WORK, ComputeThreads, threads_for
from tinsmith.engine.training.micro_batches.plan import MAX_EXCESS, MAX_SHARE, ThreadShare, thread_shares
from tinsmith.engine.training.run_rows import RunRows
from tinsmith.errors import BadRequest
from tinsmith.routed_experts import to_words

LENGTHS = (20, 9, 17, 25, 12, 30, 8, 22, 14, 27)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets an engine compute two micro-batches at the same time; returns the threads of forwards as they are computed,
    of which both have begun before one goes on."""

    def set_on(engine: Any) -> list[int]:
        runner, computed, barrier = engine.trainer._runner, [], threading.Barrier(2)
        monkeypatch.setattr(runner, "_threads", ComputeThreads(2))
        forward, advance = runner._forward, runner.advance
        count = 0

        def counted(running: Any) -> None:
            nonlocal count
            count = len(running)
            advance(running)

        def met(running: Any) -> None:
            computed.append(threading.get_ident())
            if count == 2:
                barrier.wait(60)
            forward(running)

        monkeypatch.setattr(runner, "advance", counted)
        monkeypatch.setattr(runner, "_forward", met)
        return computed

    return set_on


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_one_pass_in_two_threads_matches_the_oracle(
    kind: str, loss_fn: str, recompute: str, pair: Any, wait: Any, at_once: Any
) -> None:
    engine, model_id, oracle = pair(kind=kind, pass_tokens=48, recompute=recompute)
    computed = at_once(engine)
    for seed in (1, 2):  # gradients add up
        request = pass_for(loss_fn, model_id, seed=seed, lengths=LENGTHS)
        [result] = wait(engine.run([request]))
        (loss,) = oracle.backward(request)
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert len(set(computed)) == 2, "in two threads"
    assert_same(gradients_of(engine, model_id), oracle.gradients())


def test_passes_of_two_models_in_two_threads_match_their_oracles(pair: Any, wait: Any, at_once: Any) -> None:
    models = [pair(pass_tokens=48, lora=lora) for lora in (LoraSpec(rank=4, seed=1), LoraSpec(rank=7, seed=2))]
    engine = models[0][0]
    computed = at_once(engine)
    requests = [
        pass_for("ppo", model_id, seed=number, lengths=LENGTHS) for number, (_, model_id, _) in enumerate(models)
    ]

    async def together() -> Any:
        return await asyncio.gather(*(engine.run([request]) for request in requests))

    for [result], request, (_, model_id, oracle) in zip(wait(together()), requests, models, strict=True):
        (loss,) = oracle.backward(request)
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients_of(engine, model_id), oracle.gradients())
    assert len(set(computed)) == 2


def test_rows_with_and_without_gradient_are_both_cut(pair: Any, wait: Any, at_once: Any) -> None:
    engine, model_id, oracle = pair(pass_tokens=48)
    at_once(engine)
    trained = pass_for("cross_entropy", model_id, seed=1, lengths=LENGTHS)
    scored = replace(pass_for("cross_entropy", model_id, seed=2, lengths=LENGTHS), forward_only=True)
    results = wait(engine.run([trained, scored]))
    losses = oracle.backward(trained)
    assert results[0].metrics["loss:sum"] == pytest.approx(losses[0], rel=1e-5)
    [alone] = wait(engine.run([scored]))
    for left, right in zip(results[1].logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert_same(gradients_of(engine, model_id), oracle.gradients())


def test_failing_run_leaves_the_one_beside_it(pair: Any, wait: Any, at_once: Any) -> None:
    (engine, good, oracle), (_, bad, _) = pair(pass_tokens=48), pair(pass_tokens=48)
    at_once(engine)
    fine = replace(pass_for("cross_entropy", good, lengths=LENGTHS), share="a")
    overflow = np.full(LENGTHS[0], -9e4, np.float32)
    faulty = pass_for("ppo", bad, lengths=LENGTHS)
    first = replace(faulty.data[0], inputs={**faulty.data[0].inputs, "logprobs": overflow})
    faulty = replace(faulty, data=(first, *faulty.data[1:]), share="b")

    async def together() -> Any:
        return await asyncio.gather(engine.run([fine]), engine.run([faulty]))

    [[result], [failed]] = wait(together())
    assert isinstance(result, PassResult)
    assert isinstance(failed, BadRequest)
    oracle.backward(fine)
    assert_same(gradients_of(engine, good), oracle.gradients())
    assert not any(gradient.any() for gradient in gradients_of(engine, bad).values())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_text"])
def test_mixtures_and_hybrids_match_one_thread(
    model_type: str, tmp_path: Any, wait: Any, at_once: Any, model_id: str
) -> None:
    """Recorded experts too: each thread replays those of its own rows."""
    source = str(save_tiny(model_type, tmp_path))
    engines = [
        build(EngineConfig(source=source, device="cpu", dtype="float32", threads=1, pass_tokens=48)) for _ in range(2)
    ]
    computed = at_once(engines[1])
    draw = np.random.default_rng(0)
    data = [datum_for("cross_entropy", draw, length) for length in LENGTHS]
    router = engines[0].card.router
    if router is not None:
        data = [replace(datum, routed_experts=_experts(router, len(datum.tokens), draw)) for datum in data]
    request = Pass(model_id=model_id, data=tuple(data), loss_fn="cross_entropy")
    results = []
    for engine in engines:
        wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
        [result] = wait(engine.run([request]))
        results.append((result, gradients_of(engine, model_id)))
    assert len(set(computed)) == 2
    (expected, left), (result, right) = results
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)
    for logprobs, reference in zip(result.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, reference, atol=2e-5)
    assert_same(right, left, tolerance=1e-4)
    for engine in engines:
        wait(engine.close())


def _experts(router: Any, tokens: int, draw: np.random.Generator) -> np.ndarray:
    record = router.empty(tokens)
    for layers in record:
        for layer in layers:
            layer[...] = draw.choice(router.experts, len(layer), replace=False)
    return to_words(record)


def test_calls_share_the_cores() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        threads, seen = ComputeThreads(2), []
        threads.run([lambda: seen.append(torch.get_num_threads())])
        threads.run([lambda: seen.append(torch.get_num_threads())] * 2)
        assert seen == [5, 2, 2]
        assert torch.get_num_threads() == 5
        with threads_for(SMALL_WORK - 1):
            threads.run([lambda: seen.append(torch.get_num_threads())])
            threads.run([lambda: seen.append(torch.get_num_threads())] * 2)
        with threads_for(SMALL_WORK):
            threads.run([lambda: seen.append(torch.get_num_threads())])
        assert seen[3:] == [1, 1, 1, 5]
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


def test_small_passes_take_one_thread(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, scores and backward; and the trainer has all of its threads again after it."""
    engine, model_id, oracle = pair()
    runner, seen = engine.trainer._runner, dict[str, int]()

    def count(name: str, step: Any) -> None:
        def counted(running: Any) -> None:
            seen[name] = torch.get_num_threads()
            step(running)

        monkeypatch.setattr(runner, name, counted)

    count("_forward", runner._forward)
    count("_score", runner._score)
    count("_backward", runner._backward)
    advance = runner.advance

    def on_three(running: Any) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        advance(running)
        seen["afterwards"] = torch.get_num_threads()
        torch.set_num_threads(before)

    monkeypatch.setattr(runner, "advance", on_three)
    request = pass_for("cross_entropy", model_id)
    wait(engine.run([request]))
    assert seen == {"_forward": 1, "_score": 1, "_backward": 1, "afterwards": 3}
    oracle.backward(request)
    assert_same(gradients_of(engine, model_id), oracle.gradients())
    monkeypatch.setattr(runner, "_parameters", SMALL_WORK)
    wait(engine.run([request]))
    assert seen == {"_forward": 3, "_score": 3, "_backward": 3, "afterwards": 3}


ROWS = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 60), st.booleans()), max_size=20)


@given(ROWS, st.integers(1, 3), st.integers(20, 200))
@settings(deadline=None, max_examples=200)
def test_every_row_is_in_one_share(drawn: list[tuple[int, int, bool]], count: int, budget: int) -> None:
    rows: dict[bool, list[PackedRow]] = {True: [], False: []}
    for key, (shared, own, with_grad) in enumerate(drawn):
        tokens = np.concatenate([np.arange(shared), np.full(own, 1000 + key)]).astype(np.int32)
        rows[with_grad].append(PackedRow(key=key, adapter=0, tokens=tokens))
    whole = RunRows([], {with_grad: sorted_for_packing(some) for with_grad, some in rows.items()})
    shares = thread_shares(whole, count, budget)
    assert 1 <= len(shares) <= count
    for with_grad, some in whole.rows.items():
        of_shares = [share.rows.rows[with_grad] for share in shares]
        assert sorted(row.key for own in of_shares for row in own) == sorted(row.key for row in some)
        assert all(budget / 2 <= share.budgets[with_grad] <= MAX_EXCESS * budget for share in shares)
        if sum(map(bool, of_shares)) > 1:
            assert packed_tokens(some) > budget
            batches = [_micro_batches(share, with_grad) for share in shares]
            for batch in chain(*batches):
                first = some.index(batch[0])
                assert batch == list(some[first : first + len(batch)]), "neighbours, in order"
            rounds = [max(map(packed_tokens, each)) for each in zip_longest(*batches, fillvalue=())]
            left, uncut = deque(some), 0
            while left:
                uncut += packed_tokens(take_rows(left, budget)[0])
            assert sum(rounds) <= MAX_SHARE * uncut


def _micro_batches(share: ThreadShare, with_grad: bool) -> list[list[PackedRow]]:
    left = iter(share.rows.rows[with_grad])
    batches = [list(islice(left, size)) for size in share.sizes[with_grad]]
    assert not list(left)
    return batches


def test_largest_micro_batches_are_computed_together() -> None:
    """Groups of 8, 5, 9 and 6 rows with a prompt each stay whole, the two largest in the first round."""
    prompts, rows = {2: 8, 3: 5, 4: 9, 5: 6}, list[PackedRow]()
    for prompt, answers in prompts.items():
        for number in range(answers):
            tokens = np.array([*[prompt] * 40, *[100 + number] * 10], np.int32)
            rows.append(PackedRow(key=len(rows), adapter=0, tokens=tokens))
    whole = RunRows([], {True: sorted_for_packing(rows), False: []})
    shares = thread_shares(whole, 2, 130)
    assert [share.sizes[True] for share in shares] == [[9, 6], [8, 5]]
    firsts = [int(share.rows.rows[True][0].tokens[0]) for share in shares]
    assert firsts == [4, 2]


def test_rows_that_fit_leave_room_for_others() -> None:
    """Eight rows of one prompt, of which a micro-batch takes all, though they are longer than it one by one."""
    rows = [PackedRow(key=key, adapter=0, tokens=np.append(np.arange(30), [1000 + key])) for key in range(8)]
    whole = RunRows([], {True: sorted_for_packing(rows), False: []})
    (share,) = thread_shares(whole, 2, 100)
    assert share.budgets[True] == 100


def test_tree_in_pieces_stays_whole() -> None:
    """Rows that share little are cut beside it, and so is a tree that is not computed in pieces."""
    rows = [PackedRow(key=key, adapter=0, tokens=np.append(np.arange(80), [1000 + key] * 40)) for key in range(8)]
    whole = RunRows([], {True: sorted_for_packing(rows), False: []})
    assert len(thread_shares(whole, 2, 100, cuts=True)) == 1
    assert len(thread_shares(whole, 2, 100)) == 2
    apart = [replace(row, tokens=row.tokens + 100 * row.key) for row in rows]
    whole = RunRows([], {True: sorted_for_packing(apart), False: []})
    assert len(thread_shares(whole, 2, 100, cuts=True)) == 2
