"""Drawing tokens: the right distribution, and each row by its own rule and its own numbers."""

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
"""Tokens of a row: more than the first look takes."""


def drawn(logits: torch.Tensor, rule: SamplingRule, count: int) -> np.ndarray:
    numbers = (np.arange(count) + 0.5) / count  # evenly spread, so that shares are exact to 1 / count
    return sample_tokens(logits.repeat(count, 1), [rule] * count, numbers.tolist()).tokens.numpy()


def shares(tokens: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_shares_are_the_softmax() -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)) * 2
    found = shares(drawn(logits, PLAIN, 4000), 700)
    np.testing.assert_allclose(found, logits.softmax(dim=1)[0].numpy(), atol=1 / 2000)


def test_temperature_tempers_the_draw_and_the_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    rule = SamplingRule(temperature=2.0, top_k=-1, top_p=1.0)
    np.testing.assert_allclose(shares(drawn(logits, rule, 3000), 3), (logits / 2).softmax(dim=1)[0].numpy(), atol=1e-3)
    chosen = sample_tokens(logits.clone(), [rule], [0.999])
    torch.testing.assert_close(chosen.logprobs[0], (logits / 2).log_softmax(dim=1)[0, 2])


def test_top_k_and_top_p_draw_among_fewer_and_do_not_renormalise() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    np.testing.assert_allclose(
        shares(drawn(logits, SamplingRule(1.0, 2, 1.0), 700), 4), [4 / 7, 3 / 7, 0, 0], atol=2e-3
    )
    np.testing.assert_allclose(
        shares(drawn(logits, SamplingRule(1.0, -1, 0.65), 700), 4), [4 / 7, 3 / 7, 0, 0], atol=2e-3
    )
    np.testing.assert_allclose(shares(drawn(logits, SamplingRule(1.0, 3, 0.3), 100), 4), [1, 0, 0, 0])
    chosen = sample_tokens(logits.clone(), [SamplingRule(1.0, 1, 1.0)], [0.5])
    torch.testing.assert_close(chosen.logprobs[0].exp(), torch.tensor(0.4))


def test_greedy_takes_the_best_with_its_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    chosen = sample_tokens(logits.clone(), [SamplingRule(0.0, -1, 1.0)], [0.0])
    assert chosen.tokens.tolist() == [1]
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(dim=1)[:, 1])


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = torch.full((2, 600), float("-inf"))
    logits[:, 300] = 0.0
    assert sample_tokens(logits.clone(), [PLAIN] * 2, [0.0, float(np.nextafter(1, 0))]).tokens.tolist() == [300, 300]


def test_rows_of_one_batch_follow_their_own_rules() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(3, 1)
    chosen = sample_tokens(
        logits.clone(), [PLAIN, SamplingRule(0.0, -1, 1.0), SamplingRule(1.0, 1, 1.0)], [0.0, 0.0, 0.99]
    )
    assert chosen.tokens.tolist() == [0, 1, 1]


def test_streams_repeat_by_seed_and_differ_by_sample() -> None:
    assert uniform_stream(-3, 1).random(4).tolist() == uniform_stream(-3, 1).random(4).tolist()
    assert uniform_stream(7, 0).random() != uniform_stream(7, 1).random()
    assert uniform_stream(7, 0).random() != uniform_stream(8, 0).random()


def test_top_is_best_first() -> None:
    found = top_logprobs(torch.tensor([[-3.0, -1.0, -2.0]]), 2)
    assert found.token_ids.tolist() == [[1, 2]]
    assert found.logprobs.tolist() == [[-1.0, -2.0]]


def test_many_draws_of_a_row_are_what_each_would_be_of_its_own() -> None:
    """To the bit, whatever the rule; so a group's first tokens need its prompt's row once."""
    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)) * 2
    rules = [
        (PLAIN, SamplingRule(0.7, -1, 0.9, 3), SamplingRule(1.0, 5, 1.0), SamplingRule(0.0, -1, 1.0, 2))[row % 4]
        for row in range(20)
    ]
    rows = [row for row in range(20) for _ in range(1 + row % 3)]
    numbers = np.random.default_rng(0).random(len(rows)).tolist()
    found = sample_tokens(logits.clone(), rules, numbers, rows)
    wanted = sample_tokens(logits[rows], [rules[row] for row in rows], numbers)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.logprobs.tolist() == wanted.logprobs.tolist()
    for one, two in zip(found.top_logprobs, wanted.top_logprobs, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert one.token_ids.tolist() == two.token_ids.tolist()
            assert one.logprobs.tolist() == two.logprobs.tolist()


def test_many_draws_of_a_wide_row_take_the_memory_of_one() -> None:
    logits = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0))
    with torch.profiler.profile(profile_memory=True) as profile:
        sample_tokens(logits, [SamplingRule(1.0, -1, 0.9)], np.random.default_rng(0).random(512).tolist(), [0] * 512)
    assert max(event.self_device_memory_usage + event.cpu_memory_usage for event in profile.key_averages()) < 2**26


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45, 1e-60])
def test_the_coldest_draws_are_the_likeliest_token_for_sure(temperature: float) -> None:
    logits = torch.tensor([[-400.0, 3.0, 500.0, 499.999]])
    rule = SamplingRule(temperature, -1, 1.0, 2)
    chosen = sample_tokens(logits.clone(), [rule], [0.99])
    assert (chosen.tokens.tolist(), chosen.logprobs.tolist()) == ([2], [0.0])
    found = sample_independent(logits, temperature, np.array([[0.99, 0.0]]))
    assert (found.token_ids.tolist(), found.logprobs.tolist()) == ([[2, 2]], [[0.0, 0.0]])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    """Nor does it give a token that there is not: 536 of them do not fill the last block."""
    logits = torch.zeros(3, 536)
    logits[1] = float("nan")
    for rule in (PLAIN, SamplingRule(0.0, -1, 1.0), SamplingRule(1.0, 7, 0.9)):
        chosen = sample_tokens(logits.clone(), [rule] * 3, [0.5, 0.5, 0.5])
        assert 0 <= int(chosen.tokens[1]) < 536
        assert chosen.logprobs.isfinite().tolist() == [True, False, True]


def by_ordering_all(chances: np.ndarray, rule: SamplingRule) -> list[int]:
    """The ids that may be drawn, by the definition."""
    ids = np.argsort(-chances, kind="stable")[: rule.top_k if rule.top_k > 0 else None]
    mass = np.cumsum(chances[ids].astype(np.float64))
    return sorted(ids[(mass - chances[ids]) < rule.top_p * mass[-1]].tolist())


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("grain", [None, 0.5])
def test_what_is_left_is_what_ordering_all_tokens_leaves(sharpness: float, grain: float | None) -> None:
    """With a grain there are many ties, where any other order than that of the ids would show."""
    logits = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(1)) * sharpness
    chances = torch.softmax(logits if grain is None else (logits / grain).round() * grain, dim=1)
    narrow = [(PARTIAL_SORT, 1.0), (PARTIAL_SORT + 1, 0.99), (SIZE - 9, 0.5), (0, 0.01), (SIZE + 5, 0.999), (40, 0.7)]
    kinds = [(-1, 0.9), (3, 1.0), *narrow]
    rules = [SamplingRule(1.0, *kinds[row % len(kinds)]) for row in range(40)]
    left = mask_top_k_top_p(chances, rules)
    for row, rule in enumerate(rules):
        ids = by_ordering_all(chances[row].numpy(), rule)
        assert left[row].nonzero()[:, 0].tolist() == ids, rule
        assert torch.equal(left[row, ids], chances[row, ids])


def test_peaked_rows_are_not_ordered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chances = torch.softmax(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * 8, dim=1)
    chances[1] = 1 / SIZE
    looks: list[tuple[int, int]] = []

    def counted(some: torch.Tensor, size: int) -> torch.Tensor:
        looks.append((len(some), size))
        return some.sort(dim=1, descending=True).values[:, :size]

    monkeypatch.setattr(token_sampling, "_largest", counted)
    mask_top_k_top_p(chances, [SamplingRule(1.0, -1, 0.9)] * 3)
    assert looks == [(3, PARTIAL_SORT), (1, SIZE)]


def test_the_likeliest_token_is_always_left() -> None:
    assert mask_top_k_top_p(torch.tensor([[0.2, 0.4, 0.4]]), [SamplingRule(1.0, -1, 0.0)]).nonzero().tolist() == [
        [0, 1]
    ]
