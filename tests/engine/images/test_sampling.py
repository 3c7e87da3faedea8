"""Sampling with images against transformers: greedy tokens, logprobs of prompts, and what the prefix cache shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import Wait
from tests.engine.images.conftest import Parts, row_of
from tests.vision import END, IMAGE, START, TYPES, picture, plain_inputs, vision_model
from tinsmith.engine.base import EMPTY_LOGPROB, SampleRequest, SampleResult
from tinsmith.errors import BadRequest

A, B, LIKE_A = picture(0), picture(1, 64, 48), picture(2)
PROMPTS: tuple[Parts, ...] = (
    [[5, 6, START], A, [END, 8, 9]],
    [[5, 6, START], B, [END, 8, 9, START], A, [END, 3]],
    [[5, 6, START], B, [END, 8, 9]],
    [[5, 6, 7, 8, 9]],
    [B],
)


def request_of(parts: Parts, *, expected: bool = True, **options: Any) -> SampleRequest:
    tokens, images = row_of(parts, expected=expected)
    settings = {"request_id": "r", "max_tokens": 8, "temperature": 0.0, "stop_tokens": ()}
    return SampleRequest(prompt=tokens, images=images, **(settings | options))


def sample(engine: Any, wait: Wait, *requests: SampleRequest) -> list[SampleResult]:
    async def together() -> list[SampleResult]:
        return list(await asyncio.gather(*(engine.sample(request) for request in requests)))

    return wait(together())


@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_sampling_equals_generate(model_type: str, vision_engine: Callable[..., Any], wait: Wait) -> None:
    """All prompts at once; again from the prefix cache; without expected_tokens."""
    engine, reference = vision_engine(model_type), vision_model(model_type)
    first = sample(engine, wait, *(request_of(parts, prompt_logprobs=True) for parts in PROMPTS))
    again = sample(engine, wait, *(request_of(parts, expected=False) for parts in PROMPTS))
    for parts, result, cached in zip(PROMPTS, first, again, strict=True):
        tokens, inputs = result.sequences[0].tokens.tolist(), plain_inputs(parts)
        length = inputs["input_ids"].shape[1]
        assert cached.sequences[0].tokens.tolist() == tokens
        assert cached.prompt_cache_hit_tokens == length
        if isinstance(parts[0], list):  # generate goes on at other positions than forward where an image comes first
            expected = reference.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, length:]
            assert tokens == expected.tolist()
        whole = plain_inputs([*parts, tokens])
        reference.model.rope_deltas = None
        softmax = reference(**whole).logits[0].log_softmax(-1).detach()
        assert tokens == softmax[length - 1 : -1].argmax(-1).tolist()
        ids = inputs["input_ids"][0]
        logprobs = softmax[: length - 1].gather(1, ids[1:, None])[:, 0].numpy()
        logprobs[ids[1:] == IMAGE] = np.nan
        assert result.prompt_logprobs is not None
        np.testing.assert_allclose(result.prompt_logprobs[1:], logprobs, atol=5e-5)


def test_prefixes_are_shared_with_the_same_image_only(vision_engine: Callable[..., Any], wait: Wait) -> None:
    """LIKE_A has as many tokens as A: its placeholders are equal."""
    engine = vision_engine()
    wait(engine.release_memory())
    sample(engine, wait, request_of([[20, START], A, [END, 8]], max_tokens=1))
    sample(engine, wait, request_of([[20, START], A, [END, 8]]))
    [other] = sample(engine, wait, request_of([[20, START], LIKE_A, [END, 8]]))
    [same] = sample(engine, wait, request_of([[20, START], A, [END, 9]]))
    assert (other.prompt_cache_hit_tokens, same.prompt_cache_hit_tokens) == (2, 9)
    wait(engine.release_memory())
    [plain] = sample(engine, wait, request_of([[20, START], LIKE_A, [END, 8]]))
    assert plain.sequences[0].tokens.tolist() == other.sequences[0].tokens.tolist()
    np.testing.assert_allclose(plain.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-5)


def test_results_at_images_are_empty(vision_engine: Callable[..., Any], wait: Wait) -> None:
    parts = [[5, 6, START], A, [END, 8, 9]]
    targets = np.full((11, 2), 7, np.int64)
    request = request_of(
        parts, prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets, prompt_alt_tokens_k=3,
        num_samples=4,
    )  # fmt: skip
    [result] = sample(vision_engine(), wait, request)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt is not None
    assert result.target_prompt_logprobs is not None
    assert result.prompt_alt is not None
    images = np.isnan(result.prompt_logprobs)
    assert images.nonzero()[0].tolist() == [0, 3, 4, 5, 6, 7, 8]
    assert (result.topk_prompt.logprobs[images] == EMPTY_LOGPROB).all()
    assert (np.isnan(result.target_prompt_logprobs).all(1) == images[1:]).all()
    assert ((result.prompt_alt.logprobs == EMPTY_LOGPROB).all(1) == images[1:]).all()
    assert len({tuple(sequence.tokens) for sequence in result.sequences}) == 1


def test_prompts_that_grow_beyond_the_context_are_refused(vision_engine: Callable[..., Any], wait: Wait) -> None:
    request = request_of([[5] * 500, B, [9]], expected=False, max_tokens=2)
    with pytest.raises(BadRequest, match="context length"):
        sample(vision_engine(), wait, request)
    with pytest.raises(BadRequest, match="target_prompt_logprobs has shape"):
        sample(
            vision_engine(), wait, request_of([A, [9]], expected=False, target_prompt_logprobs=np.zeros((1, 1), int))
        )
