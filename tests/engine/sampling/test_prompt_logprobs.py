"""Prompt logprobs, top-k logprobs and tokens drawn at prompt positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.reference import plain_model
from tests.engine.sampling.helpers import PROMPT, sample_request, trained_logprobs
from tests.models import KINDS
from tinsmith.engine.base import TopK


def all_logprobs(base: Path, tokens: Any) -> np.ndarray:
    """float64 [N, V]: logprobs at each position, by plain transformers."""
    with torch.no_grad():
        return plain_model(base)(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1).numpy()


def assert_best(result: TopK, row: int, logprobs: np.ndarray) -> None:
    """Assert that the row holds the likeliest tokens, best first."""
    k = result.token_ids.shape[1]
    np.testing.assert_allclose(result.logprobs[row], np.sort(logprobs)[::-1][:k], atol=1e-5)
    np.testing.assert_allclose(logprobs[result.token_ids[row]], result.logprobs[row], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_equal_transformers(kind: str, engine_of: Any, tiny: Any, wait: Any):
    result = wait(engine_of(kind).sample(sample_request(prompt_logprobs=True, max_tokens=1)))
    expected = all_logprobs(tiny(kind), PROMPT)
    assert result.prompt_logprobs.dtype == np.float32
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], [expected[i, token] for i, token in enumerate(PROMPT[1:])], atol=1e-5
    )
    assert len(result.sequences[0].tokens) == 1


def test_prompt_logprobs_of_a_version_equal_the_trainers(pair: Any, wait: Any):
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, model_id))
    result = wait(engine.sample(sample_request(version=model_id, prompt_logprobs=True, max_tokens=1)))
    expected = trained_logprobs(engine, wait, model_id, PROMPT[:1], np.array(PROMPT[1:], dtype=np.int32))
    np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-5)
    wait(engine.detach(model_id))


def test_prompt_logprobs_equal_those_of_sampled_tokens(engine: Any, wait: Any):
    """A decoding step and a prefill of the whole prompt must not differ."""
    (sampled,) = wait(engine.sample(sample_request(max_tokens=40))).sequences
    again = wait(engine.sample(sample_request([*PROMPT, *sampled.tokens.tolist()], prompt_logprobs=True, max_tokens=1)))
    np.testing.assert_allclose(again.prompt_logprobs[len(PROMPT) :], sampled.logprobs, atol=1e-5)


@pytest.mark.parametrize("last_n", [1, 4, len(PROMPT) - 1])
def test_prompt_logprobs_last_n_leaves_others_nan(last_n: int, engine: Any, wait: Any):
    whole = wait(engine.sample(sample_request(prompt_logprobs=True, max_tokens=1))).prompt_logprobs
    result = wait(
        engine.sample(sample_request(prompt_logprobs=True, prompt_logprobs_last_n=last_n, max_tokens=1))
    ).prompt_logprobs
    assert np.isnan(result[: len(PROMPT) - last_n]).all()
    np.testing.assert_allclose(result[-last_n:], whole[-last_n:], atol=1e-5)


def test_prompt_of_one_token_has_one_nan(engine: Any, wait: Any):
    result = wait(engine.sample(sample_request(PROMPT[:1], prompt_logprobs=True)))
    assert result.prompt_logprobs.shape == (1,)
    assert np.isnan(result.prompt_logprobs).all()


def test_topk_prompt_logprobs_equal_transformers(engine: Any, tiny_llama: Path, wait: Any):
    result = wait(engine.sample(sample_request(topk_prompt_logprobs=5, max_tokens=1))).topk_prompt
    assert result.token_ids.shape == result.logprobs.shape == (len(PROMPT), 5)
    assert (result.token_ids[0] == 0).all()
    assert (result.logprobs[0] == -99999.0).all()
    for row, logprobs in enumerate(all_logprobs(tiny_llama, PROMPT)[:-1], start=1):
        assert_best(result, row, logprobs)


def test_topk_sample_logprobs_equal_transformers(engine: Any, tiny_llama: Path, wait: Any):
    result = wait(engine.sample(sample_request(topk_sample_logprobs=4, num_samples=3, max_tokens=9)))
    for sequence in result.sequences:
        assert sequence.topk.token_ids.shape == sequence.topk.logprobs.shape == (9, 4)
        logprobs = all_logprobs(tiny_llama, [*PROMPT, *sequence.tokens.tolist()])[len(PROMPT) - 1 : -1]
        for row, row_logprobs in enumerate(logprobs):
            assert_best(sequence.topk, row, row_logprobs)


def test_topk_sample_logprobs_are_tempered(engine: Any, wait: Any):
    result = wait(engine.sample(sample_request(topk_sample_logprobs=40, num_samples=4, temperature=0.5)))
    seen = 0
    for sequence in result.sequences:
        for row, token in enumerate(sequence.tokens):
            for place in np.flatnonzero(sequence.topk.token_ids[row] == token):
                seen += 1
                assert sequence.topk.logprobs[row, place] == pytest.approx(sequence.logprobs[row], abs=1e-5)
    assert seen > 10


def test_target_prompt_logprobs_equal_transformers(engine: Any, tiny_llama: Path, wait: Any):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 512, (len(PROMPT) - 1, 6))
    targets[rng.random(targets.shape) < 0.4] = -1
    targets[3] = -1
    result = wait(engine.sample(sample_request(target_prompt_logprobs=targets, max_tokens=1))).target_prompt_logprobs
    expected = np.take_along_axis(all_logprobs(tiny_llama, PROMPT)[:-1], np.maximum(targets, 0), axis=1)
    assert result.shape == targets.shape
    assert (np.isnan(result) == (targets == -1)).all()
    np.testing.assert_allclose(result[targets != -1], expected[targets != -1], atol=1e-5)


def test_all_prompt_questions_in_one_request(engine: Any, wait: Any):
    targets = np.array(PROMPT[1:])[:, None]
    result = wait(
        engine.sample(
            sample_request(
                prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=targets
            )
        )
    )
    np.testing.assert_allclose(result.target_prompt_logprobs[:, 0], result.prompt_logprobs[1:], atol=1e-6)
    assert result.topk_prompt.token_ids.shape == (len(PROMPT), 3)
    assert result.sequences[0].topk.token_ids.shape == (16, 2)


def test_results_hold_only_requested_fields(engine: Any, wait: Any):
    result = wait(engine.sample(sample_request()))
    assert result.prompt_logprobs is None
    assert result.topk_prompt is None
    assert result.target_prompt_logprobs is None
    assert result.sequences[0].topk is None


def test_prompt_questions_do_not_change_the_samples(engine: Any, wait: Any):
    plain = wait(engine.sample(sample_request(num_samples=3)))
    with_questions = wait(engine.sample(sample_request(num_samples=3, prompt_logprobs=True, topk_prompt_logprobs=2)))
    for left, right in zip(plain.sequences, with_questions.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_prompt_alternatives_follow_the_distribution(temperature: float, engine: Any, tiny_llama: Path, wait: Any):
    """The tokens drawn at each position against the distribution that plain transformers gives."""
    k = 400
    result = wait(
        engine.sample(sample_request(prompt_alt_tokens_k=k, temperature=temperature, top_k=1, max_tokens=1))
    ).prompt_alt
    assert result.token_ids.shape == result.logprobs.shape == (len(PROMPT) - 1, k)
    logits = torch.as_tensor(all_logprobs(tiny_llama, PROMPT)[:-1])
    expected = torch.log_softmax(logits / temperature, dim=1).numpy()
    np.testing.assert_allclose(np.take_along_axis(expected, result.token_ids, axis=1), result.logprobs, atol=3e-5)
    # The mean of the draws' logprobs is the negative entropy, within four standard errors.
    probs = np.exp(expected)
    mean, deviation = (probs * expected).sum(), np.sqrt((probs * expected**2).sum(1) - (probs * expected).sum(1) ** 2)
    assert abs(result.logprobs.mean(axis=1).sum() - mean) < 4 * np.sqrt((deviation**2 / k).sum())


def test_greedy_prompt_alternatives_are_the_likeliest(engine: Any, tiny_llama: Path, wait: Any):
    result = wait(engine.sample(sample_request(prompt_alt_tokens_k=2, temperature=0.0, max_tokens=1))).prompt_alt
    best = all_logprobs(tiny_llama, PROMPT)[:-1]
    np.testing.assert_array_equal(result.token_ids, np.repeat(best.argmax(axis=1)[:, None], 2, axis=1))
    np.testing.assert_allclose(result.logprobs[:, 0], best.max(axis=1), atol=1e-5)


def test_prompt_alternatives_repeat_with_the_seed(engine: Any, wait: Any):
    first, again, other, plain = (
        wait(engine.sample(sample_request(num_samples=2, seed=seed, prompt_alt_tokens_k=k)))
        for seed, k in ((1, 3), (1, 3), (2, 3), (1, 0))
    )
    np.testing.assert_array_equal(first.prompt_alt.token_ids, again.prompt_alt.token_ids)
    assert (first.prompt_alt.token_ids != other.prompt_alt.token_ids).any()
    assert plain.prompt_alt is None
    for left, right in zip(first.sequences, plain.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


def test_prompt_alternatives_ignore_last_n(engine: Any, wait: Any):
    whole = wait(engine.sample(sample_request(prompt_alt_tokens_k=2, max_tokens=1))).prompt_alt
    request = sample_request(prompt_alt_tokens_k=2, prompt_logprobs=True, prompt_logprobs_last_n=1, max_tokens=1)
    np.testing.assert_array_equal(wait(engine.sample(request)).prompt_alt.token_ids, whole.token_ids)
