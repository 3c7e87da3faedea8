"""Tool calls, disconnects and engine deaths in the OpenAI API, over an engine with scripted replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.service.support.inprocess import KEY, Api, api
from tinsmith.engine.base import OnDelta, SampledSequence, SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import EngineDied, Gone
from tinsmith.service.engines.host import RunningEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 39, "b": 13}}</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HI: Any = [{"role": "user", "content": "What is 39 + 13?"}]


class Actor(FakeEngine):
    """Replies with one line for each request, a character per token; never replies where the line is None."""

    def __init__(self, config: EngineConfig, lines: list[str | None]) -> None:
        super().__init__(config)
        self.lines, self.requests, self.cancelled = lines, [], []  # type: ignore[var-annotated]
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.died = asyncio.Event()

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        self.requests.append(request)
        self.began.set()
        line = self.lines.pop(0)
        if line is None:
            if on_delta is not None:
                on_delta(SequenceDelta(sample=0, tokens=(ord("a"),), logprobs=(-1.0,)))
            await self.ended.wait()
            raise Gone("Cancelled.")
        if line == "die":
            raise EngineDied("The engine is dead.")
        tokens = [*map(ord, line), 2]
        for token in tokens if on_delta is not None else ():
            on_delta(SequenceDelta(sample=0, tokens=(token,), logprobs=(-1.0,)))  # type: ignore[misc]
            await asyncio.sleep(0)
        said = SampledSequence(
            tokens=np.array(tokens, np.int32), logprobs=np.full(len(tokens), -1, np.float32), stop_reason="stop"
        )
        return SampleResult(sequences=(said,) * request.num_samples)

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.ended.set()


@asynccontextmanager
async def acted(data: Path, lines: Sequence[str | None]) -> AsyncIterator[tuple[Api, Actor, openai.AsyncOpenAI]]:
    actors: list[Actor] = []

    async def start(config: EngineConfig) -> RunningEngine:
        actors.append(Actor(config, list(lines)))
        return RunningEngine(engine=actors[-1], died=actors[-1].died)

    async with api(data, start) as served:  # type: ignore[arg-type]
        client = openai.AsyncOpenAI(base_url="http://t/v1", api_key=KEY, http_client=served.http, max_retries=0)
        yield served, actors[0], client


def test_tool_call_round_trip(tmp_path: Path):
    async def main() -> None:
        async with acted(tmp_path, [f"Let me see. {CALL}", "It is 52."]) as (_, actor, ai):
            first = await ai.chat.completions.create(model="toy", messages=HI, tools=TOOLS)
            (choice,) = first.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see. ")
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert (call.type, call.function.name) == ("function", "add")  # type: ignore[union-attr]
            assert json.loads(call.function.arguments) == {"a": 39, "b": 13}  # type: ignore[union-attr]
            answer = {"role": "tool", "tool_call_id": call.id, "content": "52"}
            more = [*HI, choice.message.model_dump(), answer]
            second = await ai.chat.completions.create(model="toy", messages=more, tools=TOOLS)
            assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 52.")
            prompt = "".join(map(chr, actor.requests[1].prompt))
            assert prompt.endswith("tool: 52\nassistant:")
            assert '"name": "add"' in prompt  # the template rendered the tool
            assert call.id.isalnum()

    asyncio.run(main())


def test_streams_tool_calls_whole_and_text_separately(tmp_path: Path):
    async def main() -> None:
        async with acted(tmp_path, [f"See: {CALL}\n{CALL}"]) as (_, _, ai):
            text, calls, finish = "", [], None
            async for chunk in await ai.chat.completions.create(model="toy", messages=HI, tools=TOOLS, stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls += [(call.index, call.function) for call in delta.tool_calls or ()]
                finish = chunk.choices[0].finish_reason or finish
            assert (text, finish) == ("See: ", "tool_calls")
            assert [(index, call.name, json.loads(call.arguments)) for index, call in calls] == [  # type: ignore[union-attr]
                (0, "add", {"a": 39, "b": 13}),
                (1, "add", {"a": 39, "b": 13}),
            ]

    asyncio.run(main())


def test_without_tools_a_call_is_text(tmp_path: Path):
    async def main() -> None:
        async with acted(tmp_path, [CALL, CALL]) as (_, actor, ai):
            for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
                said = await ai.chat.completions.create(model="toy", messages=HI, **more)  # type: ignore[call-overload]
                assert (said.choices[0].message.content, said.choices[0].message.tool_calls) == (CALL, None)
                assert "add" not in "".join(map(chr, actor.requests[-1].prompt))
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await ai.chat.completions.create(model="toy", messages=HI, tools=TOOLS, tool_choice="required")

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_engine_request(tmp_path: Path, stream: bool):
    """Calls the ASGI app directly: httpx's transport cannot disconnect."""

    async def main() -> None:
        async with acted(tmp_path, [None]) as (served, actor, _):
            body = json.dumps({"model": "toy", "messages": HI, "stream": stream}).encode()
            headers = [(b"authorization", f"Bearer {KEY}".encode())]
            messages, gone, sent = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event(), []

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            path = "/v1/chat/completions"
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
            app = served.http._transport.app  # type: ignore[attr-defined]
            call = asyncio.create_task(app(scope | {"raw_path": path.encode(), "root_path": ""}, receive, send))
            await actor.began.wait()
            gone.set()
            await asyncio.wait_for(call, 120)
            await asyncio.wait_for(actor.ended.wait(), 120)
            assert actor.cancelled == [actor.requests[0].request_id]
            assert bool(sent) == stream or sent[0]["status"] == 410

    asyncio.run(main())


def test_sample_is_retried_after_an_engine_death(tmp_path: Path):
    async def main() -> None:
        async with acted(tmp_path, ["die", "fine", "die", "die", "die"]) as (_, _, ai):
            said = await ai.chat.completions.create(model="toy", messages=HI)
            assert said.choices[0].message.content == "fine"
            with pytest.raises(openai.InternalServerError, match="dead"):
                await ai.chat.completions.create(model="toy", messages=HI)

    asyncio.run(main())


def test_stream_reports_an_engine_error_as_event(tmp_path: Path):
    async def main() -> None:
        async with acted(tmp_path, ["die", "die", "die"]) as (_, _, ai):
            with pytest.raises(openai.APIError, match="dead"):
                async for _ in await ai.chat.completions.create(model="toy", messages=HI, stream=True):
                    pass

    asyncio.run(main())


def test_generate_takes_and_returns_tokens(tmp_path: Path):
    async def main() -> None:
        async with api(tmp_path) as served:
            params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 5, "stop_token_ids": [9], "seed": 1}
            body = {
                "model": "toy",
                "token_ids": [5, 6, 7],
                "sampling_params": {**params, "logprobs": 1, "skip_special_tokens": False},
                "cache_salt": "3",
            }
            reply = (await ask(served, body)).json()
            (choice,) = reply["choices"]
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert all(np.isfinite(entry["logprob"]) for entry in entries)
            assert (reply["prompt_token_ids"], reply["weights"]) == ([5, 6, 7], "toy")
            assert choice["finish_reason"] in ("stop", "length")
            for wrong, prompt_ids in (
                ({"features": {}}, "features"),
                ({"token_ids": []}, "prompt is empty"),
                ({"token_ids": [2**40]}, "not a token id"),
                ({"token_ids": [5000]}, "contains token id 5000"),
                ({"sampling_params": {"min_p": 0.1}}, r"sampling_params.min_p"),
            ):
                refused = await ask(served, {**body, **wrong})
                assert refused.status_code == 400
                assert prompt_ids in refused.json()["error"]["message"]

    asyncio.run(main())


async def ask(served: Api, body: object) -> httpx.Response:
    return await served.http.post("/inference/v1/generate", json=body)


def test_published_weights_are_sampleable_by_all_tenants(tmp_path: Path):
    async def main() -> None:
        async with api(tmp_path) as served:
            alice, bob = await served.tenant("alice"), await served.tenant("bob")
            model = await alice.model()
            saved = await alice.call("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "open"})
            body = {"model": saved["path"], "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
            assert (await bob.send("POST", "/inference/v1/generate", body)).status_code == 404
            place = saved["path"].removeprefix("tinker://").replace(model, f"{model}/checkpoints")
            assert (await alice.post(f"training_runs/{place}/publish", {})).status_code < 300
            reply = await bob.send("POST", "/inference/v1/generate", body)
            assert reply.json()["weights"] == saved["path"]
            assert (await bob.send("POST", "/inference/v1/generate", {**body, "model": model})).status_code == 404

    asyncio.run(main())
