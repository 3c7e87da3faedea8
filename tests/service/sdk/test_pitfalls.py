"""Known pitfalls of servers of this protocol, checked through the SDK."""

from __future__ import annotations

import logging
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
"""Statuses after which the client repeats a request for minutes or hours."""


@pytest.fixture
def sampler(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model="toy").result()


def sampled(sampler: tinker.SamplingClient, prompt: types.ModelInput = PROMPT, **params) -> types.SampledSequence:
    options = types.SamplingParams(**{"max_tokens": 12, "seed": 3, "stop": [], **params})
    return sampler.sample(prompt, 1, options).result().sequences[0]


def requests(caplog: pytest.LogCaptureFixture, route: str) -> list[str]:
    """The requests of a route in the log of httpx, which has those of either transport of the SDK."""
    return [text for record in caplog.records if record.name == "httpx" and route in (text := record.getMessage())]


def test_no_error_status_makes_the_sdk_wait() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TinsmithError)]
    assert len(kinds) > 8
    assert [kind for kind in kinds if kind.status in CALLED_PERMANENT_BUT_RETRIED] == []


def test_permanent_errors_are_raised_at_once(train: tinker.TrainingClient, caplog) -> None:
    """Without a second attempt."""
    train.save_state("once").result()
    train.save_weights_for_sampler("once").result()
    caplog.set_level(logging.INFO, logger="httpx")
    for again in (train.save_state, train.save_weights_for_sampler):
        with pytest.raises(tinker.BadRequestError, match="exists"):
            again("once").result()
    assert len(requests(caplog, "/save_weights")) == 2


@pytest.mark.parametrize("hold_s", [0, 45, 120])
def test_hold_time_is_limited_to_what_clients_support(hold_s: float) -> None:
    with pytest.raises(errors.ConfigError, match="hold_s"):
        build(ServeConfig, {"hold_s": hold_s}, "here")


def test_waiting_client_polls_rarely(served: Served, sampler: tinker.SamplingClient, caplog) -> None:
    """Few polls stay open for the duration of a sample."""
    caplog.set_level(logging.INFO, logger="httpx")
    futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=400, stop=[])) for _ in range(20)]
    for future in futures:
        assert len(future.result().sequences[0].tokens) == 400
    polls = requests(caplog, "retrieve_future")
    assert len(futures) <= len(polls) < 3 * len(futures)  # a fetch for each sample and few session polls


def test_abandoned_seq_ids_block_nothing(train: tinker.TrainingClient) -> None:
    asset = types.ModelInput(chunks=[types.ImageAssetPointerChunk(location="x", format="png")])
    broken = types.Datum(model_input=asset, loss_fn_inputs={"target_tokens": [1]})
    with pytest.raises(ValueError, match="ImageAssetPointer"):
        train.forward_backward([broken], "cross_entropy").result(timeout=240)
    assert train.forward_backward([datum(TOKENS)], "cross_entropy").result(timeout=240).metrics["loss:sum"] > 0


def test_logprobs_are_of_the_tempered_distribution(sampler: tinker.SamplingClient) -> None:
    plain = types.SamplingParams(max_tokens=1, temperature=1.0, seed=1)
    [best] = sampler.sample(PROMPT, 1, plain, topk_sample_logprobs=512).result().sequences
    every = np.asarray([logprob for _, logprob in sorted(best.topk_logprobs[0])])
    for temperature in (0.5, 2.0):
        sequence = sampled(sampler, temperature=temperature, max_tokens=1)
        tempered = every / temperature
        expected = tempered[sequence.tokens[0]] - np.log(np.exp(tempered).sum())
        assert sequence.logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_each_sampling_parameter_has_an_effect(sampler: tinker.SamplingClient) -> None:
    greedy = sampled(sampler, temperature=0.0).tokens
    assert sampled(sampler, top_k=1).tokens == greedy
    assert sampled(sampler, top_p=1e-6).tokens == greedy
    assert sampled(sampler).tokens == sampled(sampler).tokens != sampled(sampler, seed=4).tokens
    assert sampled(sampler, stop=[greedy[3]], temperature=0.0).tokens == greedy[: greedy.index(greedy[3]) + 1]
    assert sampled(sampler, seed=2**63 + 5).tokens  # any 64 bits


def test_each_chunk_of_a_prompt_is_used(sampler: tinker.SamplingClient) -> None:
    chunks = [types.EncodedTextChunk(tokens=piece) for piece in (TOKENS[:2], [], TOKENS[2:])]
    assert sampler.compute_logprobs(types.ModelInput(chunks=chunks)).result() == (
        sampler.compute_logprobs(PROMPT).result()
    )


def test_sample_is_never_empty(sampler: tinker.SamplingClient) -> None:
    sequence = sampled(sampler, stop=list(range(512)))
    assert (len(sequence.tokens), len(sequence.logprobs), sequence.stop_reason) == (1, 1, "stop")


def test_old_sampling_sessions_stay_valid(train: tinker.TrainingClient) -> None:
    clients = []
    for _ in range(8):
        train.forward_backward([datum(TOKENS)], "cross_entropy").result()
        train.optim_step(types.AdamParams(learning_rate=0.02)).result()
        sampler = train.save_weights_and_get_sampling_client().result()
        clients.append((sampler, sampler.compute_logprobs(PROMPT).result()))
    assert len({tuple(logprobs[1:]) for _, logprobs in clients}) == 8
    for sampler, logprobs in clients:
        assert sampler.compute_logprobs(PROMPT).result() == logprobs


def test_gradient_clipping_has_an_effect(client: tinker.ServiceClient) -> None:
    """With a large eps AdamW's first step is as long as the gradient."""

    def loss_after(clip: float) -> float:
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        model.forward_backward([datum(TOKENS)], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0, eps=10.0, grad_clip_norm=clip)).result()
        return model.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"]

    free, clipped = loss_after(0.0), loss_after(1e-3)
    assert free < clipped - 0.1


def test_dropped_future_cancels_its_sample(served: Served, sampler: tinker.SamplingClient) -> None:
    future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=32000, stop=[])).future()
    assert sampled(sampler).tokens  # the dropped sample was submitted before it
    future.cancel()
    with served.raw() as post:
        answer = post("retrieve_future", {"request_id": f"{sampler._sampling_session_id}:0"})
    assert "cancelled" in answer.json()["error"]


def test_client_compresses_bodies_if_configured(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, compress=True)
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        assert client.holder.get_client_config().proto_compress_fwdbwd
        data = [datum(TOKENS) for _ in range(300)]
        assert len(model.forward_backward(data, "cross_entropy").result().loss_fn_outputs) == 300
        client.close("success").result()
