"""What the sampler remembers: found again by later requests, and never to be noticed in what it says."""

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
from tests.engine.sampling.helpers import PROMPT, ask, assert_same_samples
from tests.models import KINDS
from tinsmith.engine.base import AdamParams, SampleResult
from tinsmith.errors import Gone


@pytest.fixture
def forgetful(engine_of: Any) -> Any:
    """An engine that has no room for prefixes beside what is running."""
    return engine_of("llama", cache_tokens=1)


@pytest.fixture
def space(model_id: str) -> str:
    """A space that no other test uses."""
    return f"space-of-{model_id}"


def then(prompt: Any, said: SampleResult, *more: int, sample: int = 0) -> tuple[int, ...]:
    """The next turn's prompt: what was asked, what was said, what is asked now."""
    return (*prompt, *said.sequences[sample].tokens.tolist(), *more)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_turn_finds_the_prompt_and_what_was_said(kind: str, engine_of: Any, wait: Any, space: str):
    engine, fresh = engine_of(kind), engine_of(kind, cache_tokens=1)
    first = wait(engine.sample(ask(num_samples=3, max_tokens=20, cache_scope=space)))
    assert first.prompt_cache_hit_tokens == 0
    for sample in range(3):
        prompt = then(PROMPT, first, 7, 8, 9, sample=sample)
        second = wait(engine.sample(ask(prompt, num_samples=2, max_tokens=30, cache_scope=space)))
        assert second.prompt_cache_hit_tokens == len(PROMPT) + 19  # the last token said was never read
        wanted = wait(fresh.sample(ask(prompt, num_samples=2, max_tokens=30)))
        assert wanted.prompt_cache_hit_tokens == 0
        assert_same_samples(second, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [13, 300])
def test_a_prompt_asked_again_is_not_computed_and_says_the_same_to_the_bit(
    dtype: str, length: int, engine_of: Any, wait: Any, space: str
):
    engine = engine_of("llama", dtype=dtype)
    prompt = tuple(int(token) for token in np.random.default_rng(length).integers(3, 500, length))
    wait(engine.sample(ask(prompt[: length // 2], cache_scope=space)))
    first, again = (wait(engine.sample(ask(prompt, num_samples=3, max_tokens=40, cache_scope=space))) for _ in range(2))
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (length // 2, length)
    assert_same_samples(again, first, atol=0)
    assert wait(engine.sample(ask(prompt[:-1], cache_scope=space))).prompt_cache_hit_tokens == length - 2


def test_a_request_that_comes_while_another_runs_finds_its_prompt(engine: Any, wait: Any, space: str):
    async def late() -> SampleResult:
        running = asyncio.create_task(engine.sample(ask(max_tokens=60, cache_scope=space)))
        await asyncio.sleep(0.05)
        found = await engine.sample(ask((*PROMPT, 5, 6), cache_scope=space))
        await running
        return found

    assert wait(late()).prompt_cache_hit_tokens == len(PROMPT)


def test_nothing_is_found_of_another_space_or_version(engine: Any, pair: Any, wait: Any, space: str):
    _, model_id, _ = pair()
    wait(engine.capture(model_id, f"{model_id}-v"))
    wait(engine.sample(ask(cache_scope=space)))
    assert wait(engine.sample(ask(cache_scope=f"{space}-2"))).prompt_cache_hit_tokens == 0
    assert wait(engine.sample(ask(cache_scope=space, version=f"{model_id}-v"))).prompt_cache_hit_tokens == 0
    assert wait(engine.sample(ask(cache_scope=space, version=f"{model_id}-v"))).prompt_cache_hit_tokens == len(PROMPT)
    wait(engine.detach(f"{model_id}-v"))


def test_a_version_of_the_same_name_finds_nothing_of_the_old_one(engine: Any, pair: Any, wait: Any, space: str):
    _, model_id, _ = pair()
    name = f"{model_id}-v"
    wait(engine.capture(model_id, name))

    async def replaced() -> None:
        running = asyncio.create_task(engine.sample(ask(version=name, max_tokens=60, cache_scope=space)))
        await asyncio.sleep(0.05)
        await engine.run([pass_for("cross_entropy", model_id)])
        await engine.step(model_id, AdamParams(learning_rate=0.05))
        await engine.capture(model_id, name)
        await running  # on the old weights, to its end

    wait(replaced())
    found = wait(engine.sample(ask(version=name, max_tokens=40, cache_scope=space)))
    assert found.prompt_cache_hit_tokens == 0
    wait(engine.capture(model_id, f"{name}-2"))
    assert_same_samples(found, wait(engine.sample(ask(version=f"{name}-2", max_tokens=40))))
    kept = engine.sampler.batch.prefix_cache.tokens
    wait(engine.detach(name))
    assert engine.sampler.batch.prefix_cache.tokens < kept
    wait(engine.detach(f"{name}-2"))


def test_what_is_asked_about_a_prompt_is_computed_whatever_is_known(engine: Any, forgetful: Any, wait: Any, space: str):
    prompt = then(PROMPT, wait(engine.sample(ask(max_tokens=20, cache_scope=space))), 3, 4)
    targets = np.array(prompt[1:])[:, None]
    for found, about in (
        (0, {"prompt_logprobs": True}),
        (len(prompt) - 1 - 4, {"prompt_logprobs": True, "prompt_logprobs_last_n": 4}),
        (0, {"topk_prompt_logprobs": 3, "target_prompt_logprobs": targets, "prompt_alt_tokens_k": 2}),
    ):
        mine, theirs = (wait(one.sample(ask(prompt, cache_scope=space, **about))) for one in (engine, forgetful))
        assert mine.prompt_cache_hit_tokens == found
        assert_same_samples(mine, theirs)
        for one, two in (
            (mine.prompt_logprobs, theirs.prompt_logprobs),
            (mine.target_prompt_logprobs, theirs.target_prompt_logprobs),
        ):
            assert (one is None) == (two is None)
            if one is not None:
                np.testing.assert_allclose(one, two, atol=1e-5)
        if mine.topk_prompt is not None:
            np.testing.assert_allclose(mine.topk_prompt.logprobs, theirs.topk_prompt.logprobs, atol=1e-5)
            np.testing.assert_array_equal(mine.prompt_alt.token_ids, theirs.prompt_alt.token_ids)


def test_known_and_new_prompts_in_one_pass(engine: Any, forgetful: Any, wait: Any, space: str):
    """Some of the prompts are known, some in part, some not at all, and one is asked about."""
    draw = np.random.default_rng(3)
    long = tuple(int(token) for token in draw.integers(3, 500, 300))
    wait(engine.sample(ask(long[:280], max_tokens=5, cache_scope=space)))
    wait(engine.sample(ask((*PROMPT, 9), max_tokens=50, cache_scope=space)))
    prompts = [long, long[:200], (*PROMPT, 1, 2), PROMPT, PROMPT[:4], (*long[:50], 4, 4), (8, *PROMPT), long[:280]]

    async def together(one: Any) -> list[SampleResult]:
        about = [{"prompt_logprobs": place == 3} for place in range(len(prompts))]
        asked = zip(prompts, about, strict=True)
        return await asyncio.gather(*(one.sample(ask(prompt, cache_scope=space, **more)) for prompt, more in asked))

    mine, theirs = wait(together(engine)), wait(together(forgetful))
    for found, wanted in zip(mine, theirs, strict=True):
        assert_same_samples(found, wanted)
    assert [found.prompt_cache_hit_tokens for found in mine] == [280, 199, 13, 0, 3, 50, 0, 280]
    np.testing.assert_allclose(mine[3].prompt_logprobs, theirs[3].prompt_logprobs, atol=1e-5)


def test_the_cache_stays_within_its_tokens(engine_of: Any, engine: Any, wait: Any):
    small = engine_of("llama", cache_tokens=600)
    for seed in range(12):
        settings: dict[str, Any] = {"num_samples": 2, "max_tokens": 60, "seed": seed}
        prompt = (*PROMPT, seed + 3, *PROMPT)
        assert_same_samples(wait(small.sample(ask(prompt, **settings))), wait(engine.sample(ask(prompt, **settings))))
        held = small.sampler.batch.prefix_cache
        assert 0 < held.tokens <= 600
        rows = [node for _, node in held._lru.values()]
        assert sum(run.keys.shape[2] for run in rows) == held.tokens
        # A run's tensors are its own: none keeps a larger one alive.
        assert all(run.keys.untyped_storage().nbytes() == run.keys.nbytes for run in rows)


def test_after_eviction_a_conversation_goes_on_the_same(engine_of: Any, engine: Any, wait: Any, space: str):
    small = engine_of("llama", cache_tokens=600)
    first = wait(small.sample(ask(max_tokens=30, cache_scope=space)))
    prompt = then(PROMPT, first, 3, 4)
    for seed in range(8):
        wait(small.sample(ask((seed + 20, *PROMPT), max_tokens=100, cache_scope=space)))
    second = wait(small.sample(ask(prompt, max_tokens=30, cache_scope=space)))
    assert second.prompt_cache_hit_tokens == 0
    assert_same_samples(second, wait(engine.sample(ask(prompt, max_tokens=30))))


def test_cancelled_and_failed_requests_leave_nothing_wrong(engine: Any, wait: Any, space: str):
    wanted = wait(engine.sample(ask(max_tokens=50)))

    async def disturbed() -> SampleResult:
        doomed = ask(max_tokens=200, num_samples=4, cache_scope=space)
        running = asyncio.create_task(engine.sample(doomed))
        await asyncio.sleep(0.05)
        await engine.cancel(doomed.request_id)
        with pytest.raises(Gone):
            await running
        asked = (
            engine.sample(ask((*PROMPT[:6], 99_999), cache_scope=space)),
            engine.sample(ask(max_tokens=50, cache_scope=space)),
        )
        broken, found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(broken, Exception)
        return found

    found = wait(disturbed())
    assert found.prompt_cache_hit_tokens == len(PROMPT)  # what was read before the cancelling is right
    assert_same_samples(found, wanted)


def greedy(base: Any, prompt: Any, length: int) -> list[int]:
    """By plain transformers, one whole forward for every token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(base(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


_TURNS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.booleans()), min_size=1, max_size=10
)
"""Which conversation goes on, how many tokens are put in, how many come out, and whether it is told to wait first."""


@given(_TURNS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conversations_in_any_order_are_those_of_plain_transformers(
    engine_of: Any, tiny: Any, wait: Any, turns: list[tuple[int, int, int, bool]]
):
    """With a cache that holds some of them: what is said is what a fresh model would say, turn after turn."""
    engine, base = engine_of("llama", cache_tokens=192), plain_model(tiny("llama"), torch.float32)
    talks: list[list[int]] = [[5, 6, 7], [5, 6, 8], [5], [9, 9]]

    async def turn(talk: list[int], put: int, length: int) -> None:
        talk.extend(10 + (len(talk) * put) % 7 for _ in range(put))
        (said,) = (await engine.sample(ask(tuple(talk), temperature=0.0, max_tokens=length))).sequences
        assert said.tokens.tolist() == greedy(base, talk, length)
        talk.extend(said.tokens.tolist())

    async def all_turns() -> None:
        busy: dict[int, asyncio.Task[None]] = {}
        for which, put, length, alone in turns:
            for one in [*busy.values()] if alone else [busy[which]] if which in busy else []:
                await one
            busy[which] = asyncio.create_task(turn(talks[which], put, length))
        await asyncio.gather(*busy.values())

    wait(all_turns())
