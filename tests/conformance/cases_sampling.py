"""Cases of SamplingClient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.cases_training import settled
from tests.conformance.catalog import case
from tests.conformance.world import World, fresh, params, prompt


@case("SamplingClient.sample")
def sample(world: World) -> None:
    sampler = world.sampler()
    result = settled(world, sampler.sample, prompt(), 3, params())
    assert len(result.sequences) == 3
    for sequence in result.sequences:
        assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (4, 4, "length")
        assert all(lp <= 0 for lp in sequence.logprobs)
    again = settled(world.plain(), sampler.sample, prompt(), 3, params())
    assert [sequence.tokens for sequence in again.sequences] == [
        sequence.tokens for sequence in result.sequences
    ]  # equal seeds give equal samples
    stops(world, sampler)
    prompt_options(world, sampler)
    for bad in ({"temperature": -1.0}, {"top_p": 1.5}, {"max_tokens": 0}):
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
            settled(world.plain(), sampler.sample, prompt(), 1, params(**bad))
    greedy = [settled(world.plain(), sampler.sample, prompt(), 1, params(temperature=0.0, seed=s)) for s in (1, 2)]
    assert greedy[0].sequences[0].tokens == greedy[1].sequences[0].tokens


def stops(world: World, sampler) -> None:  # type: ignore[no-untyped-def]
    """Stops: a string, several, token ids, none. The result includes the stop token."""
    free = settled(world.plain(), sampler.sample, prompt(), 1, params(max_tokens=6)).sequences[0].tokens
    cut = settled(world.plain(), sampler.sample, prompt(), 1, params(max_tokens=6, stop=[free[2]])).sequences[0]
    first = free.index(free[2])
    assert (list(cut.tokens), cut.stop_reason) == (list(free[: first + 1]), "stop")
    for stop in ("zzzz", ["zzzz", "yyyy"], None):
        assert settled(world.plain(), sampler.sample, prompt(), 1, params(stop=stop)).sequences[0].tokens


def prompt_options(world: World, sampler) -> None:  # type: ignore[no-untyped-def]
    targets = np.array([[6, 7], [7, 8]], np.int64)
    result = settled(
        world.plain(), lambda *args: sampler.sample(*args, include_prompt_logprobs=True, topk_prompt_logprobs=2,
        topk_sample_logprobs=2, target_prompt_logprobs=types.TensorData.from_numpy(targets)), prompt(), 1, params(),
    )  # fmt: skip
    assert len(result.prompt_logprobs) == 3
    assert result.prompt_logprobs[0] is None or math.isnan(result.prompt_logprobs[0])
    assert len(result.topk_prompt_logprobs) == 3
    targets = result.target_prompt_logprobs.to_numpy()
    assert targets[:, 0] == pytest.approx(result.prompt_logprobs[1:], abs=1e-4)


@case("SamplingClient.compute_logprobs")
def compute_logprobs(world: World) -> None:
    sampler = world.sampler()
    whole = settled(world, sampler.compute_logprobs, prompt(5, 6, 7, 8))
    assert len(whole) == 4
    assert whole[0] is None
    assert all(lp <= 0 for lp in whole[1:])
    tail = settled(world.plain(), lambda: sampler.compute_logprobs(prompt(5, 6, 7, 8), prompt_logprobs_last_n=2))
    assert tail[2:] == pytest.approx(whole[2:])


@case("SamplingClient.get_base_model")
def get_base_model(world: World) -> None:
    assert world.call(world.sampler().get_base_model) == world.model


@case("SamplingClient.get_tokenizer")
def get_tokenizer(world: World) -> None:
    """Uses a client made from a path, since the hub need not have the name of the base model."""
    model = world.plain().train()
    path = model.save_weights_for_sampler(fresh("t")).result().path
    tokenizer = world.sampler(base_model=None, model_path=path).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("reward", add_special_tokens=False)) == "reward"
