"""What other servers of this protocol got wrong, each asked of this one through the SDK."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.service.conftest import Served, datum
from tinsmith import errors
from tinsmith.errors import TinsmithError
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.settings import build

TOKENS = [5, 6, 7, 8, 9]
PROMPT = types.ModelInput.from_ints(TOKENS)
CALLED_PERMANENT_BUT_RETRIED = {402, 408, 409}
"""The client repeats a request that is answered with one of these, for minutes or hours."""


@pytest.fixture
def sampler(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model="toy").result()


def sampled(sampler: tinker.SamplingClient, prompt: types.ModelInput = PROMPT, **params) -> types.SampledSequence:
    asked = types.SamplingParams(**{"max_tokens": 12, "seed": 3, "stop": [], **params})
    return sampler.sample(prompt, 1, asked).result().sequences[0]


def test_no_refusal_looks_like_a_pause() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TinsmithError)]
    assert len(kinds) > 8
    assert [kind for kind in kinds if kind.status in CALLED_PERMANENT_BUT_RETRIED] == []


def test_a_refusal_that_stands_is_told_at_once(train: tinker.TrainingClient) -> None:
    train.save_state("once").result()
    train.save_weights_for_sampler("once").result()
    began = time.monotonic()
    for again in (train.save_state, train.save_weights_for_sampler):
        with pytest.raises(tinker.BadRequestError, match="exists"):
            again("once").result()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("hold_s", [0, 45, 120])
def test_no_poll_is_held_shorter_or_longer_than_clients_bear(hold_s: float) -> None:
    with pytest.raises(errors.ConfigError, match="hold_s"):
        build(ServeConfig, {"hold_s": hold_s}, "here")


def test_a_client_that_waits_polls_seldom(served: Served, sampler: tinker.SamplingClient, caplog) -> None:
    """One open poll and no more, for as long as a sample takes."""
    caplog.set_level(logging.DEBUG)
    futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=400, stop=[])) for _ in range(20)]
    for future in futures:
        assert len(future.result().sequences[0].tokens) == 400
    polls = [one for one in caplog.records if "retrieve_future" in one.getMessage() and "HTTP Request" in one.msg]
    assert len(futures) <= len(polls) < 3 * len(futures)  # a fetch of each, and few polls for all of them


def test_abandoned_numbers_block_nothing(train: tinker.TrainingClient) -> None:
    asset = types.ModelInput(chunks=[types.ImageAssetPointerChunk(location="x", format="png")])
    broken = types.Datum(model_input=asset, loss_fn_inputs={"target_tokens": [1]})
    with pytest.raises(ValueError, match="ImageAssetPointer"):
        train.forward_backward([broken], "cross_entropy").result(timeout=20)
    assert train.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=20).metrics["loss:sum"] > 0


def test_logprobs_are_of_the_tempered_distribution(sampler: tinker.SamplingClient) -> None:
    plain = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1)
    [best] = sampler.sample(PROMPT, 1, plain, topk_sample_logprobs=512).result().sequences
    every = np.asarray([logprob for _, logprob in sorted(best.topk_logprobs[0])])
    for temperature in (0.5, 2.0):
        one = sampled(sampler, temperature=temperature, max_tokens=1)
        tempered = every / temperature
        expected = tempered[one.tokens[0]] - np.log(np.exp(tempered).sum())
        assert one.logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_each_sampling_parameter_counts(sampler: tinker.SamplingClient) -> None:
    greedy = sampled(sampler, temperature=0.0).tokens
    assert sampled(sampler, top_k=1).tokens == greedy
    assert sampled(sampler, top_p=1e-6).tokens == greedy
    assert sampled(sampler).tokens == sampled(sampler).tokens != sampled(sampler, seed=4).tokens
    assert sampled(sampler, stop=[greedy[3]], temperature=0.0).tokens == greedy[: greedy.index(greedy[3]) + 1]
    assert sampled(sampler, seed=2**63 + 5).tokens  # any 64 bits


def test_every_chunk_of_a_prompt_counts(sampler: tinker.SamplingClient) -> None:
    chunks = [types.EncodedTextChunk(tokens=piece) for piece in (TOKENS[:2], [], TOKENS[2:])]
    assert sampler.compute_logprobs(types.ModelInput(chunks=chunks)).result() == (
        sampler.compute_logprobs(PROMPT).result()
    )


def test_a_sample_is_never_empty(sampler: tinker.SamplingClient) -> None:
    one = sampled(sampler, stop=list(range(512)))
    assert (len(one.tokens), len(one.logprobs), one.stop_reason) == (1, 1, "stop")


def test_old_sampling_sessions_outlive_many_newer_ones(train: tinker.TrainingClient) -> None:
    kept = []
    for _ in range(8):
        train.forward_backward([datum(TOKENS)], "cross_entropy").result()
        train.optim_step(types.AdamParams(learning_rate=0.02)).result()
        sampler = train.save_weights_and_get_sampling_client().result()
        kept.append((sampler, sampler.compute_logprobs(PROMPT).result()))
    assert len({tuple(found[1:]) for _, found in kept}) == 8
    for sampler, found in kept:
        assert sampler.compute_logprobs(PROMPT).result() == found


def test_clipping_counts(client: tinker.ServiceClient) -> None:
    """With a large eps AdamW's first step is as long as the gradient."""

    def loss_after(clip: float) -> float:
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        model.forward_backward([datum(TOKENS)], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0, eps=10.0, grad_clip_norm=clip)).result()
        return model.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]

    free, clipped = loss_after(0.0), loss_after(1e-3)
    assert free < clipped - 0.1


def test_a_future_that_is_dropped_stops_its_sample(served: Served, sampler: tinker.SamplingClient) -> None:
    future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=32000, stop=[])).future()
    assert sampled(sampler).tokens  # the one before it is under way
    future.cancel()
    with served.raw() as post:
        answer = post("retrieve_future", {"request_id": f"{sampler._sampling_session_id}:0"})
    assert "cancelled" in answer.json()["error"]


def test_bodies_are_compressed_when_the_server_asks_for_it(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, compress=True)
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        assert client.holder.get_client_config().proto_compress_fwdbwd
        data = [datum(TOKENS) for _ in range(300)]
        assert len(model.forward_backward(data, "cross_entropy").result().loss_fn_outputs) == 300
        client.close("success").result()
