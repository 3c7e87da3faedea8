"""The OpenAI API through the unmodified openai client, against a served fake engine with a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.service.conftest import Served
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

HI = [{"role": "user", "content": "What is 39 + 13?"}]


@pytest.fixture(scope="module")
def served_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("served_llama")
    config = ServeConfig(models=(f"tiny={tiny_llama}", "toy"), engine="fake", data=data)
    with embedded(config) as (url, key):
        yield Served(url, key, data)


@pytest.fixture(scope="module", params=("/v1", "/oai/api/v1"))
def ai(request: pytest.FixtureRequest, served_llama: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served_llama.url + request.param, api_key=served_llama.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def test_lists_and_gets_models(ai: openai.OpenAI):
    assert [item.id for item in ai.models.list()][:2] == ["tiny", "toy"]
    assert ai.models.retrieve("tiny").model_extra["max_model_len"] == 32768  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match="Did you mean 'tiny'"):
        ai.models.retrieve("tinny")


def test_chat_returns_token_ids_and_logprobs(ai: openai.OpenAI, tokenizer: Any):
    reply = ai.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=12,
        seed=4,
        n=2,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    prompt = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert reply.model_extra["prompt_token_ids"] == prompt  # type: ignore[index]
    assert reply.system_fingerprint == "tiny"
    said = 0
    for index, choice in enumerate(reply.choices):
        ids = choice.model_extra["token_ids"]  # type: ignore[index]
        said += len(ids)
        assert choice.index == index
        assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if ids[-1] == 2 else "length")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(ids)
        text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert (
            text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).encode() or b"\xef" not in text
        )
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), said)


def test_streamed_chunks_add_up_to_the_whole_response(ai: openai.OpenAI):
    call_options: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 24,
        "seed": 5,
        "n": 2,
        "logprobs": True,
    }
    whole = ai.chat.completions.create(**call_options)
    texts, logprobs, ends, usage, pieces = ["", ""], [[], []], [None, None], None, 0
    options: Any = {"include_usage": True}
    for chunk in ai.chat.completions.create(**call_options, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += bool(choice.delta.content)
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += (choice.logprobs and choice.logprobs.content) or []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]  # type: ignore[union-attr]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert pieces > 20  # token by token


def test_stop_strings_end_the_text_and_are_excluded(ai: openai.OpenAI):
    call_options: dict[str, Any] = {"model": "toy", "prompt": "ab", "max_tokens": 40, "seed": 1}
    free = ai.completions.create(**call_options).choices[0].text
    stop = free[10:12]
    cut = ai.completions.create(**call_options, stop=[stop, "never"]).choices[0]
    assert (cut.text, cut.finish_reason) == (free[: free.index(stop)], "stop")
    with_stop = ai.completions.create(
        **call_options, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert with_stop.text == free[: free.index(stop) + 2]
    streamed = ai.completions.create(**call_options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text


def test_completions_accept_text_lists_and_tokens(ai: openai.OpenAI, tokenizer: Any):
    ids = tokenizer("The quick fox").input_ids
    call_options: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    text = ai.completions.create(**call_options, prompt="The quick fox").choices[0].text
    assert ai.completions.create(**call_options, prompt=ids).choices[0].text == text
    many = ai.completions.create(**call_options, prompt=["The quick fox", "The quick fox"], n=2)
    assert [(choice.index, choice.text) for choice in many.choices] == [(at, text) for at in range(4)]
    assert many.usage is not None
    assert many.usage.prompt_tokens == 2 * len(ids)


def test_echo_returns_prompt_logprobs(ai: openai.OpenAI, tokenizer: Any):
    ids = tokenizer("The quick fox").input_ids
    scored = ai.completions.create(
        model="tiny",
        prompt="The quick fox",
        max_tokens=0,
        echo=True,
        logprobs=2,
        extra_body={"return_tokens_as_token_ids": True},
    )
    (choice,) = scored.choices
    assert choice.text == "The quick fox"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(p < 0 for p in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[0] == 0
    more = ai.completions.create(model="tiny", prompt="The quick fox", max_tokens=3, echo=True, seed=1)
    assert more.choices[0].text.startswith("The quick fox")


def test_samples_saved_weights_by_path_model_and_session(ai: openai.OpenAI, served_llama: Served):
    service = tinker.ServiceClient(base_url=served_llama.url, api_key=served_llama.key)
    train = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    call_options: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logprobs": 0}

    def said(model: str) -> tuple[str | None, list[float]]:
        reply = ai.completions.create(model=model, **call_options)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        return reply.system_fingerprint, logprobs.token_logprobs  # type: ignore[return-value]

    with pytest.raises(openai.NotFoundError, match="has no saved weights"):
        said(train.model_id)
    fresh = said("tiny")[1]
    steps = []
    for name in ("one", "two"):
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={"target_tokens": [6, 7, 8]}
        )
        train.forward_backward([datum], "cross_entropy").result()
        train.optim_step(types.AdamParams(learning_rate=0.1)).result()
        path = train.save_weights_for_sampler(name).result().path
        steps.append(said(path))
        assert steps[-1][0] == path
        assert said(f"tiny;{path}") == steps[-1]
        assert said(train.model_id) == steps[-1]  # the alias follows
    assert fresh != steps[0][1] != steps[1][1]
    sampler = train.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    sdk = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=1, sampling_params=params).result()
    np.testing.assert_allclose(said(train.model_id)[1], sdk.sequences[0].logprobs, rtol=1e-6)
    assert train.model_id in [item.id for item in ai.models.list()]
    with pytest.raises(openai.BadRequestError, match="belongs to tiny"):
        said(f"toy;{steps[0][0]}")
    service.close("success").result()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "enable_thinking"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_logprobs": 2}, "requires logprobs"),
        ({"stream_options": {"include_usage": True}}, "only with stream: true"),
        ({"max_tokens": 40000}, "The context of tiny is 32768"),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "does not support tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "part of type image_url",
        ),
        ({"messages": [{"role": "king", "content": "hi"}]}, "role is 'king'"),
    ],
)
def test_rejects_unsupported_options_by_name(ai: openai.OpenAI, more: dict[str, Any], says: str):
    with pytest.raises(openai.BadRequestError, match=says) as error:
        ai.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 4, **more})
    assert error.value.type == "invalid_request_error"
    assert (error.value.code == "context_length_exceeded") == ("context" in says)


def test_accepts_fields_without_effect(ai: openai.OpenAI):
    reply = ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HI],
        max_completion_tokens=2,
        frequency_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        user="someone",
        stop=None,
        extra_body={"min_p": 0, "repetition_penalty": 1.0, "top_k": 0, "cache_salt": "7"},
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 2


def test_wrong_key_returns_an_openai_error(served_llama: Served):
    with (
        openai.OpenAI(base_url=f"{served_llama.url}/v1", api_key="tml-wrong") as client,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        client.models.list()
    assert error.value.code == "invalid_api_key"
    headers = {"X-API-Key": served_llama.key}
    assert httpx.get(f"{served_llama.url}/v1/models", headers=headers, timeout=60).status_code == 200
    missing = httpx.get(f"{served_llama.url}/v1/nothing", headers=headers, timeout=60)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_served")


def test_concurrent_async_requests_keep_their_seeds(served_llama: Served):
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served_llama.url}/v1", api_key=served_llama.key) as client:

            async def sample(seed: int) -> str:
                chunks = await client.chat.completions.create(
                    model="tiny", messages=HI, max_tokens=10, seed=seed % 4, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

            return await asyncio.gather(*(sample(seed) for seed in range(16)))

    texts = asyncio.run(ask_all())
    assert texts[:4] == texts[4:8] == texts[12:]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_sampling(served_llama: Served, stream: bool):
    """20,000 tokens take the fake engine several seconds; a disconnect makes them a failed completion at once."""

    def count(metric: str, label: str) -> float:
        headers = {"X-API-Key": served_llama.key}
        lines = httpx.get(f"{served_llama.url}/metrics", headers=headers, timeout=60).text.splitlines()
        of_completions = [line for line in lines if line.startswith(metric) and 'kind="completion"' in line]
        return sum(float(line.split()[-1]) for line in of_completions if label in line)

    def wait_for(metric: str, label: str, value: float) -> None:
        until = time.monotonic() + 120
        while count(metric, label) != value and time.monotonic() < until:
            time.sleep(0.05)
        assert count(metric, label) == value

    failed = ("tinsmith_requests_total", 'outcome="failed"')
    before = count(*failed)
    call_options = {"model": "toy", "prompt": "abc", "max_tokens": 20_000, "ignore_eos": True, "stream": stream}
    connection = HTTPConnection(urlsplit(served_llama.url).netloc, timeout=60)
    headers = {"X-API-Key": served_llama.key, "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(call_options), headers)
    if stream:
        connection.getresponse().readline()
    else:
        wait_for("tinsmith_queue_requests", 'stage="running"', 1)
    connection.close()
    wait_for(*failed, before + 1)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -1, "temperature"),
        ("n", 5000, "n"),
        ("stop", [""], "stop"),
        ("stop", ["a"] * 257, "stop"),
        ("top_k", 0.5, "top_k"),
        ("min_p", 0.5, "min_p"),
        ("nonsense", 1, "nonsense"),
        ("tool_choice", "required", "tool_choice"),
        ("model", "nobody", "model"),
        ("messages", [{"role": "robot"}], "messages[0].role"),
        ("max_tokens", 10**6, "messages"),
        ("stream_options", {"include_usage": True}, "stream_options"),
    ],
)
def test_param_of_an_error_is_the_field(served_llama: Served, field: str, value: object, param: str) -> None:
    with served_llama.raw() as call:
        body = {"model": "tiny", "messages": HI, field: value}
        assert call(f"{served_llama.url}/v1/chat/completions", body).json()["error"]["param"] == param


def test_unknown_key_is_named_as_it_was_sent(served_llama: Served) -> None:
    url = f"{served_llama.url}/v1/models"
    for headers, message in (
        ({"Authorization": "Bearer tml-wrong"}, "The Authorization: Bearer key is not valid."),
        ({"X-API-Key": "tml-wrong"}, "The X-API-Key is not valid."),
        ({}, "The request has no Authorization: Bearer key."),
    ):
        answer = httpx.get(url, headers=headers, timeout=60)
        assert answer.status_code == 401
        assert answer.json()["error"]["message"].startswith(message)
