"""Trees that are larger than a micro-batch are computed in pieces, with the results of one pass over them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.data import LOSSES, datum_for, pass_for, tokens_of
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tests.engine.training.micro_batches.test_queue import spin
from tinsmith.engine.base import Pass
from tinsmith.engine.model import packing

FORKS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=8)
"""Of each row, how many tokens it has in common with the one before it, and how many of its own."""


def rows_of(forks: Sequence[tuple[int, int]], draw: np.random.Generator) -> list[np.ndarray]:
    rows = [np.empty(0, np.int32)]
    for shared, own in forks:
        rows.append(np.append(rows[-1][:shared], tokens_of(draw, own)).astype(np.int32))
    return rows[1:]


def tree_pass(model_id: str, loss_fn: str, seed: int = 0) -> Pass:
    """Rows that fork from each other at different depths, one of them inside another."""
    draw = np.random.default_rng(seed)
    rows = rows_of([(0, 40), (30, 12), (35, 1), (10, 30), (38, 25), (0, 9)], draw)
    rows.append(rows[0][:17])
    data = tuple(datum_for(loss_fn, draw, len(row), row) for row in rows)
    return replace(pass_for(loss_fn, model_id), data=data)


@settings(deadline=None, max_examples=100)
@given(FORKS, st.integers(1, 50))
def test_pieces_see_what_the_tree_sees(forks: list[tuple[int, int]], budget: int) -> None:
    rows = rows_of(forks, np.random.default_rng(0))
    tree = packing.pack([packing.PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
    cut = packing.cut(tree, budget)
    if cut is None:
        assert len(tree.tokens) <= (2 * budget if len(tree.chunks) == 1 else budget)
        return
    assert all(len(piece.own) <= budget for piece in cut)
    pieces = [piece for piece in cut if not piece.saves]
    np.testing.assert_array_equal(np.concatenate([piece.own for piece in pieces[::-1]]), np.arange(len(tree.tokens)))
    seen = visible(tree, np.arange(len(tree.tokens)), 0)
    saved = later = np.empty(0, np.int64)
    for piece in cut:
        keys = np.concatenate([saved[: piece.past], piece.own])
        for query, of_query in visible(piece.tree, keys, piece.past).items():
            assert of_query == seen[query], (query, budget)
        if piece.saves:
            saved = keys
            continue
        path, shared = saved[: piece.past], len(later) - len(piece.ancestors)
        np.testing.assert_array_equal(later[:shared], path[:shared])
        np.testing.assert_array_equal(later[shared:], piece.own[piece.ancestors])
        later = path


@settings(deadline=None, max_examples=100)
@given(FORKS, st.integers(1, 50))
def test_ancestors_of_cuts_are_saved_once(forks: list[tuple[int, int]], budget: int) -> None:
    rows = rows_of(forks, np.random.default_rng(0))
    tree = packing.pack([packing.PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate(rows)])
    cut = packing.cut(tree, budget) or ()
    saved = [position for piece in cut if piece.saves for position in piece.own.tolist()]
    cuts = [int(piece.own[0]) for piece in cut if not piece.saves]
    seen = visible(tree, np.arange(len(tree.tokens)), 0)
    assert len(saved) == len(set(saved))
    assert set(saved) == {position for start in cuts for position in seen[start] - {start}}


def visible(tree: packing.PackedTree, keys: np.ndarray, past: int) -> dict[int, set[int]]:
    """The positions that each query sees, by its own position; `keys` are those of the numbers in the tree's jobs."""
    seen = {}
    for job in tree.jobs:
        own = np.arange(job.start, job.stop)
        numbers = np.concatenate([*(np.arange(*run) for run in job.prefix), own]).astype(np.int64)
        mask = np.tri(len(own), dtype=bool) if job.mask is None else job.mask
        for query, row in zip(own, mask, strict=True):
            assert query >= past
            seen[int(keys[query])] = set(keys[numbers[row]].tolist())
    return seen


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_and_gradients_match_the_oracle(loss_fn: str, pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair(pass_tokens=16)
    request = tree_pass(model_id, loss_fn)
    (result,) = wait(engine.run([request]))
    loss, logprobs = oracle.loss(request)
    loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    for actual, wanted in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(actual, wanted.detach().numpy(), atol=1e-5)
    assert_same(gradients_of(engine, model_id), oracle.gradients())


def test_entropies_of_pieces_equal_those_of_the_whole(pair: Any, wait: Any) -> None:
    results, gradients = [], []
    for budget in (16, 1024):
        engine, model_id, _ = pair(pass_tokens=budget)
        request = tree_pass(model_id, "ppo")
        request = replace(request, loss_config={"entropy_coef": 0.1, "return_entropy": 1})
        (result,) = wait(engine.run([request]))
        results.append(result)
        gradients.append(gradients_of(engine, model_id))
    assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-5)
    for cut, whole in zip(results[0].entropies, results[1].entropies, strict=True):
        np.testing.assert_allclose(cut, whole, atol=1e-5)
    assert_same(*gradients)


def test_bfloat16_pieces_are_as_near_as_the_whole(pair: Any, wait: Any) -> None:
    """The gradients of both are compared with those of float32."""
    gradients = {}
    for name, options in {
        "float32": {"dtype": "float32"},
        "whole": {"dtype": "bfloat16", "pass_tokens": 1024},
        "cut": {"dtype": "bfloat16", "pass_tokens": 16},
    }.items():
        engine, model_id, _ = pair(**options)
        wait(engine.run([tree_pass(model_id, "cross_entropy")]))
        pairs = gradients_of(engine, model_id).values()
        gradients[name] = np.concatenate([part.ravel() for pair_of_site in pairs for part in pair_of_site])
    distances = {name: float(np.linalg.norm(gradients[name] - gradients["float32"])) for name in ("whole", "cut")}
    assert distances["cut"] <= 1.5 * distances["whole"]


def test_other_runs_come_between_pieces(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run of another share is answered before the pieces of a tree are all computed; both match the oracle."""
    (engine, large, oracle), (_, small, other) = pair(pass_tokens=16), pair(pass_tokens=16)
    computed = []
    score = engine.trainer._runner._score

    def counted(running: Any) -> None:
        computed.append(len(running.piece.own))
        score(running)

    monkeypatch.setattr(engine.trainer._runner, "_score", counted)
    requests = [replace(tree_pass(large, "cross_entropy"), share="a"), pass_for("ppo", small, lengths=(5, 3))]

    async def together() -> tuple[int, int]:
        first = asyncio.create_task(engine.run(requests[:1]))
        await spin(lambda: bool(computed))
        await engine.run([replace(requests[1], share="b")])
        between = len(computed)
        await first
        return between, len(computed)

    between, after = wait(together())
    assert between <= 3
    assert after >= 12, "the tree is computed in pieces"
    assert max(computed) <= 16
    for request, reference, model_id in zip(requests, (oracle, other), (large, small), strict=True):
        reference.backward(request)
        assert_same(gradients_of(engine, model_id), reference.gradients())


def test_run_cancelled_between_pieces_leaves_no_gradient(pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair(pass_tokens=16)

    async def cancelled() -> None:
        run = asyncio.create_task(engine.run([tree_pass(model_id, "cross_entropy")]))
        await spin(lambda: bool(engine.trainer._queue._running))
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert not engine.trainer._queue._running

    wait(cancelled())
    request = pass_for("cross_entropy", model_id)
    wait(engine.run([request]))
    oracle.backward(request)
    assert_same(gradients_of(engine, model_id), oracle.gradients())


def test_failing_loss_of_a_piece_fails_its_pass_only(pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair(pass_tokens=16)
    good, bad = tree_pass(model_id, "ppo"), tree_pass(model_id, "ppo", seed=1)
    data = [replace(datum, inputs={**datum.inputs, "logprobs": datum.inputs["logprobs"] - 1e4}) for datum in bad.data]
    failed, passed = wait(engine.run([replace(bad, data=tuple(data)), good]))
    assert isinstance(failed, Exception)
    assert passed.metrics["loss:sum"] == pytest.approx(oracle.backward(good)[0], rel=1e-4)
    assert_same(gradients_of(engine, model_id), oracle.gradients())
