"""Divergences, entropies and correlations against brute force."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integrations.minds.introspection.table_policy import VOCABULARY, TablePolicy
from tinsmith.errors import TinsmithError
from tinsmith.integrations.minds.introspection.beliefs import (
    kl_divergence,
    next_token_kl,
    normalized_entropy,
    reply_logprobs,
    spearman,
    user,
)

PROBABILITIES = st.lists(st.floats(0.01, 1), min_size=2, max_size=8).map(lambda p: np.array(p) / np.sum(p))


def test_reply_logprobs_are_those_of_its_tokens():
    policy = TablePolicy()
    values = asyncio.run(reply_logprobs(policy, [user("Guess:")], "Owl"))
    np.testing.assert_allclose(values, policy.text_logprobs("Guess:", "Owl"), rtol=1e-6)


def test_reply_without_logprobs_is_an_error(monkeypatch):
    async def nothing(self, tokens, last=None):
        return np.array([np.nan] * (last or 1))

    monkeypatch.setattr(TablePolicy, "logprobs", nothing)
    with pytest.raises(TinsmithError, match="no logprobs"):
        asyncio.run(reply_logprobs(TablePolicy(), [user("Guess:")], "Owl"))


@pytest.mark.parametrize("support", [1, 5, VOCABULARY])
def test_next_token_kl_merges_the_rest_of_the_union(support):
    policy = TablePolicy()
    p, q = (np.exp(policy.distribution([*map(ord, text)])) for text in ("after", "before"))
    union = sorted({*np.argsort(-p)[:support].tolist(), *np.argsort(-q)[:support].tolist()})
    expected = sum(p[i] * np.log(p[i] / q[i]) for i in union)
    if len(union) < VOCABULARY:
        expected += (1 - p[union].sum()) * np.log((1 - p[union].sum()) / (1 - q[union].sum()))
    value = asyncio.run(next_token_kl(policy, [user("after")], [user("before")], support))
    assert value == pytest.approx(expected, abs=1e-4)
    exact = float((p * np.log(p / q)).sum())
    assert value <= exact + 1e-4
    if support == VOCABULARY:
        assert value == pytest.approx(exact, abs=1e-4)


@given(PROBABILITIES)
def test_kl_of_equal_distributions_is_zero(p):
    assert kl_divergence(np.log(p), np.log(p)) == 0.0
    assert kl_divergence(np.log(p[:1]), np.log(p[:1])) == 0.0


def test_kl_by_hand():
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kl_divergence(np.log(p), np.log(q)) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    # The rest, 0.2 and 0.6, is one more outcome.
    assert kl_divergence(np.log([0.8]), np.log([0.4])) == pytest.approx(0.8 * np.log(2) + 0.2 * np.log(1 / 3))


@given(PROBABILITIES)
def test_normalized_entropy_is_between_none_and_uniform(p):
    value = normalized_entropy(p)
    assert -1e-9 <= value <= 1 + 1e-9
    assert value == pytest.approx(-sum(x * np.log(x) for x in p) / np.log(len(p)))
    assert normalized_entropy(np.full(len(p), 1 / len(p))) == pytest.approx(1.0)
    assert normalized_entropy(np.eye(len(p))[0]) == normalized_entropy(np.ones(1)) == 0.0


@settings(deadline=None)
@given(st.permutations(range(6)), st.permutations(range(6)))
def test_spearman_without_ties_is_the_textbook_formula(order, values):
    ranks = {index: place for place, index in enumerate(order)}
    actual = {index: place for place, index in enumerate(sorted(range(6), key=lambda index: -values[index]))}
    squares = sum((ranks[index] - actual[index]) ** 2 for index in range(6))
    assert spearman(order, values) == pytest.approx(1 - 6 * squares / (6 * 35))


def test_spearman_with_ties_is_the_correlation_of_mean_ranks():
    ranks = [1.5, 0.0, 1.5, 3.0]  # of 2, 5, 2, 1, largest first
    expected = np.corrcoef([0, 1, 2, 3], ranks)[0, 1]
    assert spearman([0, 1, 2, 3], [2.0, 5.0, 2.0, 1.0]) == pytest.approx(expected)
    assert spearman([2, 1, 0], [0.1, 0.1, 0.1]) == 0.0
