"""The Responses API through the unmodified openai client, with the shapes that openai-agents sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.service.conftest import Served
from tests.service.openai.test_tool_calls_and_disconnects import CALL, acted
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.service.openai.response_items import chat_messages

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}


@pytest.fixture(scope="module")
def ai(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    data = tmp_path_factory.mktemp("responses")
    with embedded(ServeConfig(models=(f"tiny={tiny_llama}", "toy"), engine="fake", data=data)) as (url, key):
        served = Served(url, key, data)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:
            yield client


def test_response_equals_the_chat_completion(ai: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0.7, "extra_body": {"seed": 3}}
    chat = ai.chat.completions.create(messages=messages, max_tokens=12, **options)
    for sent in ("Hi", messages[1:]):
        made = ai.responses.create(input=sent, instructions="Be brief.", max_output_tokens=12, **options)
        assert made.output_text == chat.choices[0].message.content
        assert (made.status, made.model, made.object) == ("incomplete", "tiny", "response")
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert chat.usage is not None
        assert (made.usage.input_tokens, made.usage.output_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
        )


def test_streamed_response_equals_the_whole(ai: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "Hi", "max_output_tokens": 24, "extra_body": {"seed": 5}}
    whole = ai.responses.create(**options)
    events: list[Any] = list(ai.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert kinds.count("output_text.delta") == len(kinds) - 8 > 10
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)


@pytest.mark.parametrize("stream", [False, True])
def test_function_call_round_trip(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with acted(tmp_path, [f"Let me see. {CALL}", "It is 52."]) as (_, actor, ai):
            request: Any = {"model": "toy", "tools": [TOOL], "stream": stream}
            history: list[Any] = [{"role": "user", "content": "What is 39 + 13?"}]
            made = await ai.responses.create(**request, input=history)
            if stream:
                events: list[Any] = [event async for event in made]
                (arguments,) = (event for event in events if event.type == "response.function_call_arguments.done")
                made = events[-1].response
                assert (arguments.item_id, events[-1].type) == (made.output[1].id, "response.completed")
            message, call = made.output
            assert (message.content[0].text, call.type, call.name) == ("Let me see. ", "function_call", "add")
            assert json.loads(call.arguments) == {"a": 39, "b": 13}
            history += [item.model_dump(exclude_none=True) for item in made.output]
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": "52"})
            last = await ai.responses.create(**{**request, "stream": False}, input=history)
            assert (last.output_text, last.status) == ("It is 52.", "completed")
            assert "".join(map(chr, actor.requests[1].prompt)).endswith("tool: 52\nassistant:")

    asyncio.run(main())


def test_tools_are_rendered_and_results_returned(ai: openai.OpenAI) -> None:
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is 39 + 13?"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 39}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": '{"a": 13}'},
        {"type": "function_call_output", "call_id": "c1", "output": "52"},
    ]  # fmt: skip
    user, assistant, result = chat_messages(None, history)
    assert user == {"role": "user", "content": "What is 39 + 13?"}
    assert assistant["content"] == "I add."
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "52"}
    made = ai.responses.create(model="toy", input=history, tools=[TOOL], max_output_tokens=8)
    bare = ai.responses.create(model="toy", input=history, max_output_tokens=8)
    assert made.usage is not None
    assert bare.usage is not None
    assert made.usage.input_tokens > bare.usage.input_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("store", True),
        ("truncation", "auto"),
        ("text", {"format": {"type": "json_object"}}),
        ("reasoning", {"effort": "low"}),
        ("background", True),
        ("include", ["file_search_call.results"]),
        ("tool_choice", "required"),
        ("max_output_tokens", 0),
        ("temperature", -1),
        ("nonsense", 1),
        ("model", "nobody"),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [1]),
        ("input", []),
        ("tools", [{"type": "function", "name": "f"}] * 1025),
    ],
)
def test_unsupported_fields_are_refused_by_name(ai: openai.OpenAI, field: str, value: object) -> None:
    body = {"model": "toy", "input": "Hi", field: value}
    with pytest.raises(openai.APIStatusError) as caught:
        ai.post("/responses", body=body, cast_to=object)
    assert caught.value.status_code in (400, 404)
    assert (caught.value.param or "").startswith(field)
