"""The clients of verifiers 0.4, unmodified, against the server. Skipped without the package."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.models import CHATML, save_tokenizer
from tests.service.conftest import Served
from tinsmith.integrations.verifiers import environment
from tinsmith.integrations.verifiers.package import importable_name
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

DUEL = Path(__file__).parents[2] / "integrations" / "verifiers" / "packages" / "duel.py"
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 39 + 13?"}]
KEY_VARIABLE = "KEY_OF_THE_TEST_SERVER"
LONG = 40_000  # tokens; the context has 32768


@pytest.fixture(scope="module", autouse=True)
def needs_verifiers() -> None:
    """Skips the module without the package, which takes seconds to import."""
    pytest.importorskip("verifiers.v1")


def verifiers() -> Any:
    return import_module("verifiers.v1")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def served_small(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    with embedded(ServeConfig(models=(f"small={tokenizer_folder}",), engine="fake", data=data)) as (url, key):
        yield Served(url, key, data)


@pytest.fixture
def endpoint(served_small: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv(KEY_VARIABLE, served_small.key)
    return {"base_url": f"{served_small.url}/v1", "api_key_var": KEY_VARIABLE}


@pytest.fixture
def train_config(endpoint: dict[str, str], tokenizer_folder: Path) -> Any:
    options = {**endpoint, "renderer": {"name": "default"}, "renderer_model_name": str(tokenizer_folder)}
    return verifiers().TrainClientConfig.model_validate(options)


def respond(config: Any, messages: list[dict[str, str]] = MESSAGES, **sampling: Any) -> Any:
    """A response of the client that `config` describes."""
    from verifiers.v1.clients import resolve_client
    from verifiers.v1.dialects import ChatDialect

    async def ask() -> Any:
        client = resolve_client(config)
        try:
            params = verifiers().SamplingConfig(**sampling)
            body = ChatDialect().apply_overrides({"messages": messages}, "small", params)
            return await client.get_response(ChatDialect(), body, params, session_id="one")
        finally:
            await client.close()

    return asyncio.run(ask())


def rendered() -> str:
    from jinja2 import Template

    return Template(CHATML).render(messages=MESSAGES, add_generation_prompt=True)


def test_train_client_gets_tokens_and_their_logprobs(train_config: Any, tokenizer_folder: Path):
    response = respond(train_config, max_tokens=12, temperature=0.7, top_p=0.9, top_k=40, seed=5)
    tokens = response.tokens
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert tokenizer.decode(tokens.prompt_ids, skip_special_tokens=False) == rendered()
    assert (len(tokens.completion_ids), response.finish_reason) == (12, "length")
    assert response.message.content == tokenizer.decode(tokens.completion_ids, skip_special_tokens=True)
    assert response.usage.completion_tokens == 12
    assert len(tokens.completion_logprobs) == 12
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in tokens.completion_logprobs)
    again = respond(train_config, max_tokens=12, temperature=0.7, top_p=0.9, top_k=40, seed=5)
    assert again.tokens.completion_ids == tokens.completion_ids


def test_logprobs_of_train_client_are_those_of_the_sdk(train_config: Any, served_small: Served):
    import tinker

    tokens = respond(train_config, max_tokens=8, temperature=1.0, seed=3).tokens
    service = tinker.ServiceClient(base_url=served_small.url, api_key=served_small.key)
    sampler = service.create_sampling_client(base_model="small").result()
    sequence = tinker.ModelInput.from_ints([*tokens.prompt_ids, *tokens.completion_ids])
    scored = sampler.compute_logprobs(sequence).result()[len(tokens.prompt_ids) :]
    assert tokens.completion_logprobs == pytest.approx(scored, abs=1e-5)
    service.close("success").result()


def test_end_of_reply_is_a_stop_with_its_token(train_config: Any):
    response = respond(train_config, max_tokens=20_000, temperature=1.5, seed=1)
    assert response.finish_reason == "stop"
    assert response.tokens.completion_ids[-1] == 2


def test_prompt_beyond_max_model_len_never_reaches_the_engine(train_config: Any, served_small: Served):
    from verifiers.v1.errors import ProviderError

    headers = {"Authorization": f"Bearer {served_small.key}"}
    (card,) = httpx.get(f"{served_small.url}/v1/models", headers=headers, timeout=60).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("small", 32768)
    with pytest.raises(ProviderError, match=r"max_prompt_len|32768|exceeds") as error:
        respond(train_config, [{"role": "user", "content": "0" * LONG}], max_tokens=4)
    assert error.value.status_code == 400


def test_server_error_reaches_the_client_by_name(train_config: Any, endpoint: dict[str, str]):
    from verifiers.v1.errors import ProviderError

    for config in (train_config, verifiers().EvalClientConfig(**endpoint)):
        with pytest.raises(ProviderError, match="min_p is not supported"):
            respond(config, max_tokens=4, min_p=0.1)


def test_eval_client_relays_a_chat_completion(endpoint: dict[str, str]):
    response = respond(verifiers().EvalClientConfig(**endpoint), max_tokens=9, temperature=0.5, seed=2, logprobs=True)
    assert (response.finish_reason, response.usage.completion_tokens) == ("length", 9)
    assert response.message.content
    assert len(response.raw["choices"][0]["logprobs"]["content"]) == 9


def test_eval_client_relays_a_stream(endpoint: dict[str, str]):
    from verifiers.v1.clients import resolve_client
    from verifiers.v1.dialects import ChatDialect

    async def ask() -> bytes:
        client = resolve_client(verifiers().EvalClientConfig(**endpoint))
        body = {"model": "small", "messages": MESSAGES, "max_tokens": 6, "stream": True}
        reply = await client.relay(ChatDialect(), body)
        try:
            return b"".join([event async for event in reply.chunks])
        finally:
            await reply.close()
            await client.close()

    assert asyncio.run(ask()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_episode_of_an_environment(kind: str, train_config: Any, endpoint: dict[str, str]):
    """Two roles over three calls; with the train client every sampled token has a logprob."""
    config = train_config if kind == "train" else verifiers().EvalClientConfig(**endpoint)
    loaded = environment.load(importable_name(str(DUEL)), {}, {}, environment.DIRECT)

    async def main() -> Any:
        async with loaded.serving():
            (slot,) = loaded.slots(next(iter(loaded.taskset)))
            sampling = verifiers().SamplingConfig(max_tokens=7)
            return await loaded.run_slot(
                slot, verifiers().ModelContext(model="small", client=config, sampling=sampling)
            )

    episode = asyncio.run(main())
    assert [error.message for trace in episode.traces for error in trace.errors] == []
    assert {trace.agent.name: trace.num_turns for trace in episode.traces} == {"asker": 1, "solver": 2}
    if kind == "eval":
        return
    for trace in episode.traces:
        sampled = [node for node in trace.nodes if node.sampled]
        assert len(sampled) == trace.num_turns
        for node in sampled:  # a reply may end before its seven tokens
            assert 1 <= sum(node.mask) <= 7
            assert len(node.logprobs) == sum(node.mask)
