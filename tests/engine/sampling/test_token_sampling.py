"""Token sampling: distribution, rules of each row, and top_k and top_p without a full sort."""

import numpy as np
import pytest
import torch

from tinsmith.engine.sampling import token_sampling
from tinsmith.engine.sampling.token_sampling import (
    PARTIAL_SORT,
    SamplingRule,
    mask_top_k_top_p,
    sample_independent,
    sample_tokens,
    top_logprobs,
    uniform_stream,
)

PLAIN = SamplingRule(temperature=1.0, top_k=-1, top_p=1.0)
SIZE = PARTIAL_SORT + 1000
"""Tokens of a row: more than are sorted at first."""


def sample_many(logits: torch.Tensor, rule: SamplingRule, count: int) -> np.ndarray:
    uniforms = (np.arange(count) + 0.5) / count  # equally spaced, so that frequencies are exact to 1 / count
    return sample_tokens(logits.repeat(count, 1), [rule] * count, uniforms.tolist()).tokens.numpy()


def frequencies(tokens: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_frequencies_equal_the_softmax() -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)) * 2
    actual = frequencies(sample_many(logits, PLAIN, 4000), 700)
    np.testing.assert_allclose(actual, logits.softmax(dim=1)[0].numpy(), atol=1 / 2000)


def test_temperature_applies_to_tokens_and_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    rule = SamplingRule(temperature=2.0, top_k=-1, top_p=1.0)
    np.testing.assert_allclose(
        frequencies(sample_many(logits, rule, 3000), 3), (logits / 2).softmax(dim=1)[0].numpy(), atol=1e-3
    )
    sampled = sample_tokens(logits.clone(), [rule], [0.999])
    torch.testing.assert_close(sampled.logprobs[0], (logits / 2).log_softmax(dim=1)[0, 2])


def test_top_k_and_top_p_do_not_renormalise_logprobs() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    np.testing.assert_allclose(
        frequencies(sample_many(logits, SamplingRule(1.0, 2, 1.0), 700), 4), [4 / 7, 3 / 7, 0, 0], atol=2e-3
    )
    np.testing.assert_allclose(
        frequencies(sample_many(logits, SamplingRule(1.0, -1, 0.65), 700), 4), [4 / 7, 3 / 7, 0, 0], atol=2e-3
    )
    np.testing.assert_allclose(frequencies(sample_many(logits, SamplingRule(1.0, 3, 0.3), 100), 4), [1, 0, 0, 0])
    sampled = sample_tokens(logits.clone(), [SamplingRule(1.0, 1, 1.0)], [0.5])
    torch.testing.assert_close(sampled.logprobs[0].exp(), torch.tensor(0.4))


def test_greedy_takes_the_likeliest_untempered() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    sampled = sample_tokens(logits.clone(), [SamplingRule(0.0, -1, 1.0)], [0.0])
    assert sampled.tokens.tolist() == [1]
    torch.testing.assert_close(sampled.logprobs, logits.log_softmax(dim=1)[:, 1])


def test_extreme_uniforms_draw_possible_tokens() -> None:
    logits = torch.full((2, 600), float("-inf"))
    logits[:, 300] = 0.0
    assert sample_tokens(logits.clone(), [PLAIN] * 2, [0.0, float(np.nextafter(1, 0))]).tokens.tolist() == [300, 300]


def test_rows_of_one_batch_follow_their_own_rules() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    sampled = sample_tokens(
        logits.clone(), [PLAIN, SamplingRule(0.0, -1, 1.0), SamplingRule(1.0, 1, 1.0)], [0.0, 0.0, 0.99]
    )
    assert sampled.tokens.tolist() == [0, 1, 1]


def test_uniform_streams_repeat_by_seed_and_differ_by_sample() -> None:
    assert uniform_stream(-3, 1).random(4).tolist() == uniform_stream(-3, 1).random(4).tolist()
    assert uniform_stream(7, 0).random() != uniform_stream(7, 1).random()
    assert uniform_stream(7, 0).random() != uniform_stream(8, 0).random()


def test_top_logprobs_are_in_descending_order() -> None:
    top = top_logprobs(torch.tensor([[-3.0, -1.0, -2.0]]), 2)
    assert top.token_ids.tolist() == [[1, 2]]
    assert top.logprobs.tolist() == [[-1.0, -2.0]]


def test_drawn_token_has_its_logprob_of_the_list() -> None:
    logits = torch.randn(64, 700, generator=torch.Generator().manual_seed(0)) * 5
    rules = [PLAIN if row % 3 == 0 else SamplingRule(1.0, 50, 1.0, 50) for row in range(64)]
    sampled = sample_tokens(logits, rules, np.random.default_rng(0).random(64).tolist())
    for token, logprob, top in zip(sampled.tokens, sampled.logprobs, sampled.top_logprobs, strict=True):
        if top is not None:
            assert dict(zip(top.token_ids[0], top.logprobs[0], strict=True))[int(token)] == logprob


def test_draws_from_one_row_equal_draws_from_copies() -> None:
    """To the bit, for every rule: the first tokens of a group need one row of logits."""
    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)) * 2
    rules = [
        (PLAIN, SamplingRule(0.7, -1, 0.9, 3), SamplingRule(1.0, 5, 1.0), SamplingRule(0.0, -1, 1.0, 2))[row % 4]
        for row in range(20)
    ]
    rows = [row for row in range(20) for _ in range(1 + row % 3)]
    uniforms = np.random.default_rng(0).random(len(rows)).tolist()
    actual = sample_tokens(logits.clone(), rules, uniforms, rows)
    expected = sample_tokens(logits[rows], [rules[row] for row in rows], uniforms)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.logprobs.tolist() == expected.logprobs.tolist()
    for left, right in zip(actual.top_logprobs, expected.top_logprobs, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.logprobs.tolist() == right.logprobs.tolist()


def test_draws_from_one_row_take_the_memory_of_one() -> None:
    logits = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(profile_memory=True) as profile:
        sample_tokens(logits, [SamplingRule(1.0, -1, 0.9)], np.random.default_rng(0).random(512).tolist(), [0] * 512)
    assert max(event.self_device_memory_usage + event.cpu_memory_usage for event in profile.key_averages()) < 2**26


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45, 1e-60])
def test_lowest_temperatures_draw_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([[-400.0, 3.0, 500.0, 499.999]])
    rule = SamplingRule(temperature, -1, 1.0, 2)
    sampled = sample_tokens(logits.clone(), [rule], [0.99])
    assert (sampled.tokens.tolist(), sampled.logprobs.tolist()) == ([2], [0.0])
    actual = sample_independent(logits, temperature, np.array([[0.99, 0.0]]))
    assert (actual.token_ids.tolist(), actual.logprobs.tolist()) == ([[2, 2]], [[0.0, 0.0]])


def test_nan_row_does_not_affect_others() -> None:
    """Nor does it give an id outside the vocabulary: 536 tokens do not fill the last block."""
    logits = torch.zeros(3, 536)
    logits[1] = float("nan")
    for rule in (PLAIN, SamplingRule(0.0, -1, 1.0), SamplingRule(1.0, 7, 0.9)):
        sampled = sample_tokens(logits.clone(), [rule] * 3, [0.5, 0.5, 0.5])
        assert 0 <= int(sampled.tokens[1]) < 536
        assert sampled.logprobs.isfinite().tolist() == [True, False, True]


def kept_by_full_sort(probs: np.ndarray, rule: SamplingRule) -> list[int]:
    """Ids that may be drawn, by the definition."""
    ids = np.argsort(-probs, kind="stable")[: rule.top_k if rule.top_k > 0 else None]
    mass = np.cumsum(probs[ids].astype(np.float64))
    return sorted(ids[(mass - probs[ids]) < rule.top_p * mass[-1]].tolist())


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("grain", [None, 0.5])
def test_mask_equals_full_sort(sharpness: float, grain: float | None) -> None:
    """With a grain there are many ties, which must be resolved by id."""
    logits = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(1)) * sharpness
    probs = torch.softmax(logits if grain is None else (logits / grain).round() * grain, dim=1)
    narrow = [(PARTIAL_SORT, 1.0), (PARTIAL_SORT + 1, 0.99), (SIZE - 9, 0.5), (0, 0.01), (SIZE + 5, 0.999), (40, 0.7)]
    kinds = [(-1, 0.9), (3, 1.0), *narrow]
    rules = [SamplingRule(1.0, *kinds[row % len(kinds)]) for row in range(40)]
    masked = mask_top_k_top_p(probs, rules)
    for row, rule in enumerate(rules):
        ids = kept_by_full_sort(probs[row].numpy(), rule)
        assert masked[row].nonzero()[:, 0].tolist() == ids, rule
        assert torch.equal(masked[row, ids], probs[row, ids])


def test_peaked_rows_are_sorted_partially(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.softmax(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * 8, dim=1)
    probs[1] = 1 / SIZE
    sorts: list[tuple[int, int]] = []

    def count_sorts(probs: torch.Tensor, size: int) -> torch.Tensor:
        sorts.append((len(probs), size))
        return probs.sort(dim=1, descending=True).values[:, :size]

    monkeypatch.setattr(token_sampling, "_largest", count_sorts)
    mask_top_k_top_p(probs, [SamplingRule(1.0, -1, 0.9)] * 3)
    assert sorts == [(3, PARTIAL_SORT), (1, SIZE)]


def test_mask_keeps_the_likeliest_token() -> None:
    assert mask_top_k_top_p(torch.tensor([[0.2, 0.4, 0.4]]), [SamplingRule(1.0, -1, 0.0)]).nonzero().tolist() == [
        [0, 1]
    ]
