"""Any body, to the endpoint of agents: no response is a 5xx, and each error is in the form of the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.rl.workflows.test_workflows import policy
from tests.service.support.answers import fault_of
from tests.service.support.any_json import ANY_JSON, DEEP, Raw, changed, encode
from tinsmith.errors import BadRequest
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint, AgentSession
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.testing import ScriptedSnapshot

pytestmark = pytest.mark.e2e

FEW = settings(
    max_examples=200, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
CALL = {"id": "c", "type": "function", "function": {"name": "say", "arguments": '{"text": "a"}'}}
TOOL = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {}}}}}
VALID: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "the"}], "name": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "of"},
    ],
    "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "stop": ["the"], "logprobs": True, "top_logprobs": 0, "n": 1,
    "seed": 1, "tools": [TOOL], "tool_choice": "auto", "stream": True, "return_token_ids": True,
    "stream_options": {"include_usage": True}, "logit_bias": {}, "response_format": {"type": "text"},
}  # fmt: skip
PATH = "/v1/chat/completions"
Send = Callable[..., Awaitable[httpx.Response]]


def ask(use: Callable[[Send, AgentSession], Awaitable[Any]], snapshot: ScriptedSnapshot | None = None) -> Any:
    """The result of `use` with a session of the endpoint and its client."""

    async def main() -> Any:
        endpoint = AgentEndpoint()
        try:
            async with (
                endpoint.session(snapshot or policy("five"), SamplingConfig(), 1) as session,
                httpx.AsyncClient(timeout=60) as client,
            ):

                async def send(body: Any, method: str = "POST", path: str = "/chat/completions") -> httpx.Response:
                    content = body if isinstance(body, bytes) else encode(body)
                    headers = {"Authorization": f"Bearer {session.api_key}"}
                    return await client.request(method, session.base_url + path, content=content, headers=headers)

                return await use(send, session)
        finally:
            await endpoint.close()

    return asyncio.run(main())


async def few(request: Any, sample: Any) -> Any:
    """Refuses a large number of replies, as a server does."""
    if request.count > 1024:
        raise BadRequest(f"num_samples is {request.count}.", "Give less.", field="num_samples")
    return await sample(request)


def test_changed_bodies_are_answered_in_form() -> None:
    bodies: list[Any] = [VALID]

    @FEW
    @given(st.one_of(changed(VALID, st.one_of(ANY_JSON, DEEP)), ANY_JSON))
    def collect(body: Any) -> None:
        bodies.append(body)

    collect()

    async def use(send: Send, _: AgentSession) -> list[tuple[str, bytes]]:
        answers = [(body, await send(body)) for body in bodies]
        assert answers[0][1].status_code == 200
        return [(fault, encode(body)) for body, answer in answers if (fault := fault_of(PATH, answer))]

    assert ask(use, ScriptedSnapshot(("five",), np.zeros(1), 3, few)) == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (encode({**VALID, "temperature": Raw("1e999")}), "1e999 is too large a number"),
        (encode({**VALID, "temperature": Raw("NaN")}), "NaN is not a JSON number"),
        (encode({**VALID, "x\udfff": 1}), "half a surrogate pair"),
        (encode({**VALID, "messages": [{"role": "user", "content": "\ud83d"}]}), "half a surrogate pair"),
        (encode({**VALID, "messages": [{"role": "user", "content": Raw("[" * 200 + "]" * 200)}]}), "100 levels"),
        (encode({**VALID, "max_tokens": 0}), "'max_tokens'"),
        (encode({**VALID, "max_completion_tokens": 0}), "'max_tokens'"),
        (encode({**VALID, "stream": False}), "only with stream: true"),
        (encode({**VALID, "stream_options": {"usage": True}}), "stream_options.usage"),
        (encode({**VALID, "top_p": -0.1}), "'top_p'"),
    ],
)
def test_bodies_are_refused_by_what_is_wrong(body: bytes, sentence: str) -> None:
    async def use(send: Send, _: AgentSession) -> httpx.Response:
        return await send(body)

    answer = ask(use)
    assert (answer.status_code, fault_of(PATH, answer)) == (400, "")
    assert sentence in answer.json()["error"]["message"]


def test_other_routes_are_refused_in_form() -> None:
    async def use(send: Send, _: AgentSession) -> list[tuple[int, str]]:
        calls = [("POST", "/embeddings"), ("GET", "/chat/completions"), ("PATCH", "/models"), ("OPTIONS", "/%ff%00")]
        answers = [await send({}, method, path) for method, path in calls]
        return [(answer.status_code, fault_of(PATH, answer)) for answer in answers]

    assert ask(use) == [(404, ""), (405, ""), (405, ""), (404, "")]


class Panic(BaseException):
    """What Rust libraries raise: no Exception."""


@pytest.mark.parametrize("fault", [KeyError("half an emoji: \ud83d"), Panic("index out of bounds")])
def test_unforeseen_error_has_an_id_that_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: BaseException
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise fault

    async def use(send: Send, _: AgentSession) -> httpx.Response:
        body = {**VALID, "stream_options": None}
        monkeypatch.setattr(ScriptedSnapshot, "sample", fail)
        answers = [await send({**body, "stream": stream}) for stream in (False, True)]
        monkeypatch.undo()
        assert (await send(body)).status_code == 200
        assert answers[0].status_code == answers[1].status_code == 500
        return answers[1]

    answer = ask(use)
    error = json.loads(answer.content)["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", None, None)
    (request_id,) = re.findall(r"req-\w+", error["message"])
    assert answer.headers["x-request-id"] == request_id
    (record,) = [record for record in caplog.records if request_id in record.getMessage()]
    assert record.exc_info


def test_top_p_of_0_is_greedy() -> None:
    async def use(send: Send, _: AgentSession) -> set[str]:
        answer = await send({"messages": [{"role": "user", "content": "?"}], "n": 16, "top_p": 0})
        return {choice["message"]["content"] for choice in answer.json()["choices"]}

    assert len(ask(use, policy("five", "six"))) == 1
