"""The prefix cache in the sampler: later requests reuse it, and samples do not depend on it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.data import pass_for
from tests.engine.reference import plain_model
from tests.engine.sampling.helpers import PROMPT, assert_same_samples, sample_request, sampling
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, SampleResult
from tinsmith.errors import Gone


@pytest.fixture
def uncached(engine_of: Any) -> Any:
    """An engine without space for cached prefixes."""
    return engine_of("llama", cache_tokens=1)


def next_prompt(prompt: Any, sampled: SampleResult, *more: int, sample: int = 0) -> tuple[int, ...]:
    """The prompt of the next turn: prompt, sampled tokens, further tokens."""
    return (*prompt, *sampled.sequences[sample].tokens.tolist(), *more)


@pytest.mark.parametrize("kind", KINDS)
def test_second_turn_reuses_prompt_and_samples(kind: str, engine_of: Any, wait: Any, cache_scope: str):
    engine, fresh = engine_of(kind), engine_of(kind, cache_tokens=1)
    first = wait(engine.sample(sample_request(num_samples=3, max_tokens=20, cache_scope=cache_scope)))
    assert first.prompt_cache_hit_tokens == 0
    for sample in range(3):
        prompt = next_prompt(PROMPT, first, 7, 8, 9, sample=sample)
        second = wait(engine.sample(sample_request(prompt, num_samples=2, max_tokens=30, cache_scope=cache_scope)))
        assert second.prompt_cache_hit_tokens == len(PROMPT) + 19  # the last sampled token was never fed back
        expected = wait(fresh.sample(sample_request(prompt, num_samples=2, max_tokens=30)))
        assert expected.prompt_cache_hit_tokens == 0
        assert_same_samples(second, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [13, 300])
def test_repeated_prompt_gives_bit_identical_samples(
    dtype: str, length: int, engine_of: Any, wait: Any, cache_scope: str
):
    engine = engine_of("llama", dtype=dtype)
    prompt = tuple(int(token) for token in np.random.default_rng(length).integers(3, 500, length))
    wait(engine.sample(sample_request(prompt[: length // 2], cache_scope=cache_scope)))
    first, again = (
        wait(engine.sample(sample_request(prompt, num_samples=3, max_tokens=40, cache_scope=cache_scope)))
        for _ in range(2)
    )
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (length // 2, length)
    assert_same_samples(again, first, atol=0)
    assert (
        wait(engine.sample(sample_request(prompt[:-1], cache_scope=cache_scope))).prompt_cache_hit_tokens == length - 2
    )


def test_prompt_of_a_running_request_is_cached(engine: Any, wait: Any, cache_scope: str):
    async def late() -> SampleResult:
        running = await sampling(engine, sample_request(max_tokens=60, cache_scope=cache_scope))
        result = await engine.sample(sample_request((*PROMPT, 5, 6), cache_scope=cache_scope))
        await running
        return result

    assert wait(late()).prompt_cache_hit_tokens == len(PROMPT)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_of_one_token_is_cached(kind: str, engine_of: Any, wait: Any, cache_scope: str):
    """As of a judge whose questions begin with the same rules. A text that is scored is not."""
    engine = engine_of(kind)
    question, text = ((*PROMPT, end) for end in (5, 6))

    def hits(prompt: tuple[int, ...], **about: Any) -> int:
        request = sample_request(prompt, max_tokens=1, cache_scope=cache_scope, **about)
        return int(wait(engine.sample(request)).prompt_cache_hit_tokens)

    assert hits(text, prompt_logprobs=True) == 0
    assert hits(question) == 0
    assert hits(question) == len(question)
    assert hits((*question, 7)) == len(question)
    assert hits(text) == len(PROMPT)


def test_scopes_and_versions_share_no_prefixes(engine: Any, pair: Any, wait: Any, cache_scope: str):
    _, model_id, _ = pair()
    wait(engine.capture(model_id, f"{model_id}-v"))
    wait(engine.sample(sample_request(cache_scope=cache_scope)))
    assert wait(engine.sample(sample_request(cache_scope=f"{cache_scope}-2"))).prompt_cache_hit_tokens == 0
    assert (
        wait(engine.sample(sample_request(cache_scope=cache_scope, version=f"{model_id}-v"))).prompt_cache_hit_tokens
        == 0
    )
    assert wait(
        engine.sample(sample_request(cache_scope=cache_scope, version=f"{model_id}-v"))
    ).prompt_cache_hit_tokens == len(PROMPT)
    wait(engine.detach(f"{model_id}-v"))


def test_replaced_version_shares_no_prefixes(engine: Any, pair: Any, wait: Any, cache_scope: str):
    _, model_id, _ = pair()
    name = f"{model_id}-v"
    wait(engine.capture(model_id, name))

    async def replaced() -> None:
        running = await sampling(engine, sample_request(version=name, max_tokens=60, cache_scope=cache_scope))
        await engine.run([pass_for("cross_entropy", model_id)])
        await engine.step(model_id, AdamParams(learning_rate=0.05))
        await engine.capture(model_id, name)
        await running  # it finishes on the old weights

    wait(replaced())
    result = wait(engine.sample(sample_request(version=name, max_tokens=40, cache_scope=cache_scope)))
    assert result.prompt_cache_hit_tokens == 0
    wait(engine.capture(model_id, f"{name}-2"))
    assert_same_samples(result, wait(engine.sample(sample_request(version=f"{name}-2", max_tokens=40))))
    before = engine.sampler.batch.prefix_cache.tokens
    wait(engine.detach(name))
    assert engine.sampler.batch.prefix_cache.tokens < before
    wait(engine.detach(f"{name}-2"))


def test_prompt_questions_do_not_depend_on_the_cache(engine: Any, uncached: Any, wait: Any, cache_scope: str):
    prompt = next_prompt(PROMPT, wait(engine.sample(sample_request(max_tokens=20, cache_scope=cache_scope))), 3, 4)
    targets = np.array(prompt[1:])[:, None]
    for cached_tokens, about in (
        (0, {"prompt_logprobs": True}),
        (len(prompt) - 1 - 4, {"prompt_logprobs": True, "prompt_logprobs_last_n": 4}),
        (0, {"topk_prompt_logprobs": 3, "target_prompt_logprobs": targets, "prompt_alt_tokens_k": 2}),
    ):
        actual, expected = (
            wait(left.sample(sample_request(prompt, cache_scope=cache_scope, **about))) for left in (engine, uncached)
        )
        assert actual.prompt_cache_hit_tokens == cached_tokens
        assert_same_samples(actual, expected)
        for left, right in (
            (actual.prompt_logprobs, expected.prompt_logprobs),
            (actual.target_prompt_logprobs, expected.target_prompt_logprobs),
        ):
            assert (left is None) == (right is None)
            if left is not None:
                np.testing.assert_allclose(left, right, atol=1e-5)
        if actual.topk_prompt is not None:
            np.testing.assert_allclose(actual.topk_prompt.logprobs, expected.topk_prompt.logprobs, atol=1e-5)
            np.testing.assert_array_equal(actual.prompt_alt.token_ids, expected.prompt_alt.token_ids)


def test_cached_and_new_prompts_in_one_pass(engine: Any, uncached: Any, wait: Any, cache_scope: str):
    """Some prompts are cached, some partly, some not at all, and one has prompt_logprobs."""
    rng = np.random.default_rng(3)
    long = tuple(int(token) for token in rng.integers(3, 500, 300))
    wait(engine.sample(sample_request(long[:280], max_tokens=5, cache_scope=cache_scope)))
    wait(engine.sample(sample_request((*PROMPT, 9), max_tokens=50, cache_scope=cache_scope)))
    prompts = [long, long[:200], (*PROMPT, 1, 2), PROMPT, PROMPT[:4], (*long[:50], 4, 4), (8, *PROMPT), long[:280]]

    async def together(target: Any) -> list[SampleResult]:
        about = [{"prompt_logprobs": place == 3} for place in range(len(prompts))]
        calls = zip(prompts, about, strict=True)
        return await asyncio.gather(
            *(target.sample(sample_request(prompt, cache_scope=cache_scope, **more)) for prompt, more in calls)
        )

    actual, expected = wait(together(engine)), wait(together(uncached))
    for left, right in zip(actual, expected, strict=True):
        assert_same_samples(left, right)
    assert [left.prompt_cache_hit_tokens for left in actual] == [280, 199, 13, 0, 3, 50, 0, 280]
    np.testing.assert_allclose(actual[3].prompt_logprobs, expected[3].prompt_logprobs, atol=1e-5)


def test_prefix_cache_stays_within_cache_tokens(engine_of: Any, engine: Any, wait: Any):
    small = engine_of("llama", cache_tokens=150)
    for seed in range(12):
        settings: dict[str, Any] = {"num_samples": 2, "max_tokens": 15, "seed": seed}
        prompt = (*PROMPT, seed + 3, *PROMPT)
        assert_same_samples(
            wait(small.sample(sample_request(prompt, **settings))),
            wait(engine.sample(sample_request(prompt, **settings))),
        )
        cache = small.sampler.batch.prefix_cache
        assert 0 < cache.tokens <= 150
        nodes = [node for _, node in cache._lru.values()]
        assert sum(node.keys.shape[2] for node in nodes) == cache.tokens
        # A node's tensors have their own storage: none keeps a larger one alive.
        assert all(node.keys.untyped_storage().nbytes() == node.keys.nbytes for node in nodes)


def test_evicted_conversation_continues_unchanged(engine_of: Any, engine: Any, wait: Any, cache_scope: str):
    small = engine_of("llama", cache_tokens=150)
    first = wait(small.sample(sample_request(max_tokens=30, cache_scope=cache_scope)))
    prompt = next_prompt(PROMPT, first, 3, 4)
    for seed in range(8):
        wait(small.sample(sample_request((seed + 20, *PROMPT), max_tokens=25, cache_scope=cache_scope)))
    second = wait(small.sample(sample_request(prompt, max_tokens=30, cache_scope=cache_scope)))
    assert second.prompt_cache_hit_tokens == 0
    assert_same_samples(second, wait(engine.sample(sample_request(prompt, max_tokens=30))))


def test_cancelled_and_failed_requests_keep_cache_valid(engine: Any, wait: Any, cache_scope: str):
    expected = wait(engine.sample(sample_request(max_tokens=50)))

    async def disturbed() -> SampleResult:
        doomed = sample_request(max_tokens=200, num_samples=4, cache_scope=cache_scope)
        running = await sampling(engine, doomed)
        await engine.cancel(doomed.request_id)
        with pytest.raises(Gone):
            await running
        calls = (
            engine.sample(sample_request((*PROMPT[:6], 99_999), cache_scope=cache_scope)),
            engine.sample(sample_request(max_tokens=50, cache_scope=cache_scope)),
        )
        broken, actual = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(broken, Exception)
        return actual

    actual = wait(disturbed())
    assert actual.prompt_cache_hit_tokens == len(PROMPT)  # the prompt prefilled before the cancellation is valid
    assert_same_samples(actual, expected)


def greedy(base: Any, prompt: Any, length: int) -> list[int]:
    """Greedy tokens by plain transformers, with one full forward pass for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(base(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


_TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.booleans()), min_size=1, max_size=10
)
"""(conversation, tokens of the user, tokens to sample, whether to wait for all running turns first)"""


@given(_TURNS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conversations_in_any_order_equal_transformers(
    engine_of: Any, tiny: Any, wait: Any, turns: list[tuple[int, int, int, bool]]
):
    """In a cache that holds only some of them, every turn equals that of plain transformers."""
    engine, base = engine_of("llama", cache_tokens=192), plain_model(tiny("llama"), torch.float32)
    conversations: list[list[int]] = [[5, 6, 7], [5, 6, 8], [5], [9, 9]]

    async def turn(conversation: list[int], count: int, length: int) -> None:
        conversation.extend(10 + (len(conversation) * count) % 7 for _ in range(count))
        (sampled,) = (
            await engine.sample(sample_request(tuple(conversation), temperature=0.0, max_tokens=length))
        ).sequences
        assert sampled.tokens.tolist() == greedy(base, conversation, length)
        conversation.extend(sampled.tokens.tolist())

    async def all_turns() -> None:
        busy: dict[int, asyncio.Task[None]] = {}
        for index, count, length, alone in turns:
            for task in [*busy.values()] if alone else [busy[index]] if index in busy else []:
                await task
            busy[index] = asyncio.create_task(turn(conversations[index], count, length))
        await asyncio.gather(*busy.values())

    wait(all_turns())
