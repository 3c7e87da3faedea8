"""What a sampling request may ask about its prompt and about the tokens beside those it drew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.reference import plain_model
from tests.engine.sampling.helpers import PROMPT, ask, trained_logprobs
from tests.models import KINDS
from tinsmith.engine.base import TopK


def all_logprobs(base: Path, tokens: Any) -> np.ndarray:
    """float64 [N, V] by plain transformers."""
    with torch.no_grad():
        return plain_model(base)(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1).numpy()


def assert_best(found: TopK, row: int, logprobs: np.ndarray) -> None:
    """The row holds the likeliest tokens, best first."""
    k = found.token_ids.shape[1]
    np.testing.assert_allclose(found.logprobs[row], np.sort(logprobs)[::-1][:k], atol=1e-5)
    np.testing.assert_allclose(logprobs[found.token_ids[row]], found.logprobs[row], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs(kind: str, engine_of: Any, tiny: Any, wait: Any):
    found = wait(engine_of(kind).sample(ask(prompt_logprobs=True, max_tokens=1)))
    wanted = all_logprobs(tiny(kind), PROMPT)
    assert found.prompt_logprobs.dtype == np.float32
    assert np.isnan(found.prompt_logprobs[0])
    np.testing.assert_allclose(
        found.prompt_logprobs[1:], [wanted[i, token] for i, token in enumerate(PROMPT[1:])], atol=1e-5
    )
    assert len(found.sequences[0].tokens) == 1


def test_prompt_logprobs_of_a_version_are_the_trainer_s(pair: Any, wait: Any):
    engine, model_id, _ = pair()
    wait(engine.capture(model_id, model_id))
    found = wait(engine.sample(ask(version=model_id, prompt_logprobs=True, max_tokens=1)))
    wanted = trained_logprobs(engine, wait, model_id, PROMPT[:1], np.array(PROMPT[1:], dtype=np.int32))
    np.testing.assert_allclose(found.prompt_logprobs[1:], wanted, atol=1e-5)
    wait(engine.detach(model_id))


def test_prompt_logprobs_are_those_of_sampling_the_same_tokens(engine: Any, wait: Any):
    """The cached step and the whole prompt in one go must not differ."""
    (said,) = wait(engine.sample(ask(max_tokens=40))).sequences
    again = wait(engine.sample(ask([*PROMPT, *said.tokens.tolist()], prompt_logprobs=True, max_tokens=1)))
    np.testing.assert_allclose(again.prompt_logprobs[len(PROMPT) :], said.logprobs, atol=1e-5)


@pytest.mark.parametrize("last_n", [1, 4, len(PROMPT) - 1])
def test_all_but_the_last_prompt_logprobs_may_be_left_out(last_n: int, engine: Any, wait: Any):
    whole = wait(engine.sample(ask(prompt_logprobs=True, max_tokens=1))).prompt_logprobs
    found = wait(engine.sample(ask(prompt_logprobs=True, prompt_logprobs_last_n=last_n, max_tokens=1))).prompt_logprobs
    assert np.isnan(found[: len(PROMPT) - last_n]).all()
    np.testing.assert_allclose(found[-last_n:], whole[-last_n:], atol=1e-5)


def test_a_prompt_of_one_token_has_one_nan(engine: Any, wait: Any):
    found = wait(engine.sample(ask(PROMPT[:1], prompt_logprobs=True)))
    assert found.prompt_logprobs.shape == (1,)
    assert np.isnan(found.prompt_logprobs).all()


def test_the_likeliest_tokens_at_each_prompt_position(engine: Any, tiny_llama: Path, wait: Any):
    found = wait(engine.sample(ask(topk_prompt_logprobs=5, max_tokens=1))).topk_prompt
    assert found.token_ids.shape == found.logprobs.shape == (len(PROMPT), 5)
    assert (found.token_ids[0] == 0).all()
    assert (found.logprobs[0] == -99999.0).all()
    for row, logprobs in enumerate(all_logprobs(tiny_llama, PROMPT)[:-1], start=1):
        assert_best(found, row, logprobs)


def test_the_likeliest_tokens_at_each_sampled_position(engine: Any, tiny_llama: Path, wait: Any):
    found = wait(engine.sample(ask(topk_sample_logprobs=4, num_samples=3, max_tokens=9)))
    for sequence in found.sequences:
        assert sequence.topk.token_ids.shape == sequence.topk.logprobs.shape == (9, 4)
        logprobs = all_logprobs(tiny_llama, [*PROMPT, *sequence.tokens.tolist()])[len(PROMPT) - 1 : -1]
        for row, one in enumerate(logprobs):
            assert_best(sequence.topk, row, one)


def test_the_likeliest_sampled_tokens_are_tempered_like_the_drawn_one(engine: Any, wait: Any):
    found = wait(engine.sample(ask(topk_sample_logprobs=40, num_samples=4, temperature=0.5)))
    seen = 0
    for sequence in found.sequences:
        for row, token in enumerate(sequence.tokens):
            for place in np.flatnonzero(sequence.topk.token_ids[row] == token):
                seen += 1
                assert sequence.topk.logprobs[row, place] == pytest.approx(sequence.logprobs[row], abs=1e-5)
    assert seen > 10


def test_chosen_tokens_at_each_prompt_position(engine: Any, tiny_llama: Path, wait: Any):
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 512, (len(PROMPT) - 1, 6))
    targets[draw.random(targets.shape) < 0.4] = -1
    targets[3] = -1
    found = wait(engine.sample(ask(target_prompt_logprobs=targets, max_tokens=1))).target_prompt_logprobs
    wanted = np.take_along_axis(all_logprobs(tiny_llama, PROMPT)[:-1], np.maximum(targets, 0), axis=1)
    assert found.shape == targets.shape
    assert (np.isnan(found) == (targets == -1)).all()
    np.testing.assert_allclose(found[targets != -1], wanted[targets != -1], atol=1e-5)


def test_everything_may_be_asked_at_once(engine: Any, wait: Any):
    targets = np.array(PROMPT[1:])[:, None]
    found = wait(
        engine.sample(
            ask(prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=targets)
        )
    )
    np.testing.assert_allclose(found.target_prompt_logprobs[:, 0], found.prompt_logprobs[1:], atol=1e-6)
    assert found.topk_prompt.token_ids.shape == (len(PROMPT), 3)
    assert found.sequences[0].topk.token_ids.shape == (16, 2)


def test_what_is_not_asked_is_not_answered(engine: Any, wait: Any):
    found = wait(engine.sample(ask()))
    assert found.prompt_logprobs is None
    assert found.topk_prompt is None
    assert found.target_prompt_logprobs is None
    assert found.sequences[0].topk is None


def test_asking_about_the_prompt_does_not_change_the_samples(engine: Any, wait: Any):
    plain = wait(engine.sample(ask(num_samples=3)))
    asked = wait(engine.sample(ask(num_samples=3, prompt_logprobs=True, topk_prompt_logprobs=2)))
    for one, two in zip(plain.sequences, asked.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_beside_the_prompt_follow_the_model(temperature: float, engine: Any, tiny_llama: Path, wait: Any):
    """Every position's draws against the whole distribution that plain transformers gives there."""
    k = 400
    found = wait(engine.sample(ask(prompt_alt_tokens_k=k, temperature=temperature, top_k=1, max_tokens=1))).prompt_alt
    assert found.token_ids.shape == found.logprobs.shape == (len(PROMPT) - 1, k)
    logits = torch.as_tensor(all_logprobs(tiny_llama, PROMPT)[:-1])
    wanted = torch.log_softmax(logits / temperature, dim=1).numpy()
    np.testing.assert_allclose(np.take_along_axis(wanted, found.token_ids, axis=1), found.logprobs, atol=3e-5)
    # The mean of the draws' logprobs is the negative entropy, within four standard errors.
    chances = np.exp(wanted)
    mean, spread = (chances * wanted).sum(), np.sqrt((chances * wanted**2).sum(1) - (chances * wanted).sum(1) ** 2)
    assert abs(found.logprobs.mean(axis=1).sum() - mean) < 4 * np.sqrt((spread**2 / k).sum())


def test_greedy_draws_are_the_likeliest(engine: Any, tiny_llama: Path, wait: Any):
    found = wait(engine.sample(ask(prompt_alt_tokens_k=2, temperature=0.0, max_tokens=1))).prompt_alt
    best = all_logprobs(tiny_llama, PROMPT)[:-1]
    np.testing.assert_array_equal(found.token_ids, np.repeat(best.argmax(axis=1)[:, None], 2, axis=1))
    np.testing.assert_allclose(found.logprobs[:, 0], best.max(axis=1), atol=1e-5)


def test_draws_repeat_with_the_seed_and_change_no_sample(engine: Any, wait: Any):
    one, two, other, plain = (
        wait(engine.sample(ask(num_samples=2, seed=seed, prompt_alt_tokens_k=k)))
        for seed, k in ((1, 3), (1, 3), (2, 3), (1, 0))
    )
    np.testing.assert_array_equal(one.prompt_alt.token_ids, two.prompt_alt.token_ids)
    assert (one.prompt_alt.token_ids != other.prompt_alt.token_ids).any()
    assert plain.prompt_alt is None
    for left, right in zip(one.sequences, plain.sequences, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


def test_draws_are_of_the_whole_prompt_whatever_is_scored(engine: Any, wait: Any):
    whole = wait(engine.sample(ask(prompt_alt_tokens_k=2, max_tokens=1))).prompt_alt
    asked = ask(prompt_alt_tokens_k=2, prompt_logprobs=True, prompt_logprobs_last_n=1, max_tokens=1)
    np.testing.assert_array_equal(wait(engine.sample(asked)).prompt_alt.token_ids, whole.token_ids)
