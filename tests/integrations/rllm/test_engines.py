"""Engines: chats in, replies with their tokens out; conversations are extended token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

import tinsmith
from tests.integrations.rllm.flows import engine
from tinsmith.errors import TinsmithError, Unsupported, UserError
from tinsmith.integrations.rllm.engines.base import model_output, split_reasoning
from tinsmith.rl.types import Image, PlacedImage, Turn
from tinsmith.rllm import OpenAIEngine, Step, TerminationEvent, TerminationReason, TinkerEngine
from tinsmith.testing import END

pytestmark = pytest.mark.usefixtures("forked_programs")

USER = {"role": "user", "content": "2 + 3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def respond(model: Any, *messages: dict[str, Any], **more: Any) -> Any:
    return asyncio.run(model.get_model_response(list(messages), **more))


def test_output_has_the_tokens_of_the_reply():
    output = respond(engine("five"), USER, application_id="t:0", temperature=0.5)
    assert (output.text, output.content, output.reasoning, output.tool_calls) == ("five", "five", None, None)
    assert output.prompt_ids == list(map(ord, "2 + 3?"))
    assert output.completion_ids == [*map(ord, "five"), END]
    assert output.logprobs == [0.0] * 5
    assert (output.finish_reason, output.weight_version, output.model) == ("stop", 3, "")
    assert (output.prompt_length, output.completion_length) == (6, 5)


def test_steps_take_no_images():
    """A Step would be trained on without the images of its prompt."""
    placed = PlacedImage(image=Image(format="png", data=""), start=0, length=1)
    turn = Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text="", stop="stop", images=(placed,))
    with pytest.raises(Unsupported, match="Steps of rLLM"):
        model_output(turn, {"content": ""})


def test_continued_conversation_extends_the_tokens():
    model = engine("five")
    first = respond(model, USER)
    again = respond(model, USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "sure?"})
    before = first.prompt_ids + first.completion_ids
    assert again.prompt_ids == [*before, *map(ord, "sure?")]  # END is a token that no text has


def test_reasoning_is_separate_and_may_be_sent_back():
    model = engine("<think>\n2 and 3</think>\n\nfive")
    first = respond(model, USER)
    assert (first.content, first.reasoning) == ("five", "2 and 3")
    step = Step.from_model_output(first, [USER])
    more = {"role": "user", "content": "sure?"}
    before = first.prompt_ids + first.completion_ids
    assert respond(model, *step.chat_completions, more).prompt_ids[: len(before)] == before
    alone = {"role": "assistant", "content": "five"}  # the template decides, which here has no reasoning
    assert respond(model, USER, alone, more).prompt_ids == list(map(ord, "2 + 3?fivesure?"))
    longer = respond(model, USER, alone, more, accumulate_reasoning=True)
    assert longer.prompt_ids[: len(before)] == before


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("five", ("five", None)),
        ("<think>a</think> five ", ("five", "a")),
        ("a\n</think>\n\nfive", ("five", "a")),  # the template had written <think>
        ("<think>cut", ("", "cut")),
    ],
)
def test_reasoning_is_split_from_the_content(text: str, parts: tuple[str, str | None]):
    assert split_reasoning(text) == parts


def test_tool_calls_are_parsed():
    output = respond(engine('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'), USER, tools=TOOLS)
    (call,) = output.tool_calls
    assert (call.name, call.arguments, output.content) == ("add", {"a": 2}, "")


def test_requests_override_the_sampling_settings():
    model = engine("five", max_tokens=99)
    assert respond(model, USER, max_tokens=2).finish_reason == "length"
    assert respond(model, USER, max_new_tokens=3).completion_length == 3
    drawn = engine("yes", "no")
    assert {respond(drawn, USER, seed=4).text for _ in range(6)} == {respond(drawn, USER, seed=4).text}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 2}, "n is not supported"),
        ({"min_p": 0.1}, "no argument 'min_p'"),
        ({"temperature": -1}, "temperature"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_arguments_that_are_not_supported_are_named(more: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        respond(engine("five"), USER, **more)


def test_prompt_limit_can_be_lifted_for_one_request():
    model = engine("five", max_prompt_tokens=3)
    with pytest.raises(TerminationEvent) as ended:
        respond(model, USER)
    assert ended.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert respond(model, USER, enforce_max_prompt_length=False).text == "five"


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(base URL, API key) of a service with the fake engine."""
    config = tinsmith.ServeConfig(
        models=(f"tiny={tiny_llama}",), data=tmp_path_factory.mktemp("service"), engine="fake"
    )
    with tinsmith.embedded(config) as (url, key):
        yield url, key


def test_tinker_engine_samples_a_base_model(service: tuple[str, str]):
    url, key = service

    async def main() -> tuple[Any, Any, Any]:
        model = TinkerEngine(
            base_url=url,
            api_key=key,
            model_name="tiny",
            sampling_params={"max_tokens": 5},
            seed=1,
        )
        outputs = await asyncio.gather(*(model.get_model_response([USER]) for _ in range(4)))
        first = outputs[0]
        reply = {"role": "assistant", "content": first.content}
        again = await model.get_model_response([USER, reply, {"role": "user", "content": "sure?"}])
        logprobs = await model.compute_logprobs(first.prompt_ids + first.completion_ids)
        await model.close()
        return outputs, again, logprobs

    outputs, again, logprobs = asyncio.run(main())
    first = outputs[0]
    assert first.model == "tiny"  # not the policy of a run: a run would not train on it
    assert 0 < first.completion_length <= 5
    assert len(first.logprobs) == len(first.completion_ids)
    assert len(logprobs) == first.prompt_length + first.completion_length - 1
    exchanges = [output.prompt_ids + output.completion_ids for output in outputs if output.text == first.text]
    assert any(again.prompt_ids[: len(exchange)] == exchange for exchange in exchanges)


def test_tinker_engine_samples_the_weights_that_are_set(service: tuple[str, str]):
    url, key = service

    async def main() -> tuple[list[float], list[float]]:
        client = tinker.ServiceClient(base_url=url, api_key=key)
        training = await client.create_lora_training_client(base_model="tiny", rank=4)
        model = TinkerEngine(
            model_name="tiny", tokenizer=training.get_tokenizer(), service_client=client, max_response_length=4
        )
        base = await model.get_model_response([USER], temperature=0)
        data = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(base.prompt_ids[:4]),
            loss_fn_inputs={"target_tokens": [7] * 4, "weights": [1.0] * 4},  # type: ignore[dict-item]
        )
        for _ in range(3):
            await training.forward_backward([data], "cross_entropy")
            await training.optim_step(tinker.AdamParams(learning_rate=0.5))
        before = await model.compute_logprobs(base.prompt_ids)
        model.set_sampling_client(await training.save_weights_and_get_sampling_client())
        after = await model.compute_logprobs(base.prompt_ids)
        await client.close("success")
        return before, after

    before, after = asyncio.run(main())
    assert before != after


def test_tinker_engine_keeps_prompt_and_reply_within_the_model(service: tuple[str, str]):
    url, key = service

    async def main(length: int) -> int:
        model = TinkerEngine(base_url=url, api_key=key, model_name="tiny", max_model_length=length, seed=3)
        try:
            return (await model.get_model_response([USER], stop=[])).completion_length
        finally:
            await model.close()

    async def prompt_length() -> int:
        model = TinkerEngine(base_url=url, api_key=key, model_name="tiny", max_response_length=1)
        output = await model.get_model_response([USER])
        await model.close()
        return output.prompt_length

    prompt = asyncio.run(prompt_length())
    assert asyncio.run(main(prompt + 4)) <= 3
    with pytest.raises(TerminationEvent):
        asyncio.run(main(prompt + 1))


def test_tinker_engine_names_what_it_does_not_support():
    with pytest.raises(UserError, match="renderer_name is not supported"):
        TinkerEngine(model_name="tiny", renderer_name="qwen3")
    with pytest.raises(UserError, match="image_processor is not supported"):
        TinkerEngine(model_name="tiny", image_processor=object())
    with pytest.raises(UserError, match="no parameter 'min_p'"):
        TinkerEngine(model_name="tiny", sampling_params={"min_p": 0.1})
    with pytest.raises(UserError, match="No server responds"):
        respond(TinkerEngine(model_name="tiny", base_url="http://127.0.0.1:9"), USER)


def test_sampling_parameters_differ_in_evaluation():
    parameters = {"train": {"temperature": 1.0}, "val": {"temperature": 0.0, "top_k": 0}}
    model = TinkerEngine(model_name="tiny", sampling_params=parameters)
    assert (model._sampling[False].temperature, model._sampling[True].temperature) == (1.0, 0.0)
    assert model._sampling[True].top_k == -1


def test_openai_engine_chats_and_completes(service: tuple[str, str], tiny_llama: Path):
    from transformers import AutoTokenizer

    url, key = service
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "sampling_params": {"max_tokens": 4}}
    chat = respond(OpenAIEngine("tiny", **options), USER, temperature=0)
    assert chat.completion_length <= 4
    assert (chat.completion_ids, chat.model) == (None, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    completed = respond(OpenAIEngine("tiny", tokenizer=tokenizer, **options), USER, temperature=0)
    assert completed.text == chat.text
    assert len(completed.prompt_ids) == chat.prompt_length
    with pytest.raises(TerminationEvent):
        respond(OpenAIEngine("tiny", tokenizer=tokenizer, max_prompt_length=3, **options), USER)


class Answers:
    """A server that sends these responses in turn."""

    def __init__(self, *responses: tuple[int, dict[str, Any]]) -> None:
        self.responses, self.bodies = list(responses), []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        status, body = self.responses.pop(0)
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        writer.close()

    def respond(self, **more: Any) -> Any:
        async def main() -> Any:
            server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
            async with server:
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                return await OpenAIEngine("m", base_url=url, **more).get_model_response([USER], application_id="t:0")

        return asyncio.run(main())


MESSAGE = {"role": "assistant", "content": "five", "reasoning_content": "2 and 3"}
REPLY = {"choices": [{"message": MESSAGE, "finish_reason": "stop"}], "usage": {"prompt_tokens": 4}}


def test_openai_engine_retries_after_passing_errors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinsmith.integrations.rllm.engines.openai.FIRST_WAIT_S", 0.0)
    server = Answers((503, {}), (429, {}), (200, REPLY))
    output = server.respond(tools=TOOLS, sampling_params={"temperature": 0.5})
    assert (output.content, output.reasoning, output.prompt_length) == ("five", "2 and 3", 4)
    assert server.bodies[0] == server.bodies[2]
    assert server.bodies[2] == {
        "model": "m", "messages": [USER], "temperature": 0.5, "max_tokens": 4096, "tools": TOOLS
    }  # fmt: skip


def test_openai_engine_reports_lasting_errors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinsmith.integrations.rllm.engines.openai.FIRST_WAIT_S", 0.0)
    with pytest.raises(UserError, match=r"rejects the request with status 400: .*no such field"):
        Answers((400, {"error": "no such field"})).respond()
    with pytest.raises(TinsmithError, match="does not respond: status 503"):
        Answers((503, {}), (503, {})).respond(api_retries=1)
    with pytest.raises(TinsmithError, match=r"127\.0\.0\.1:9/chat/completions does not respond: ConnectError"):
        respond(OpenAIEngine("m", base_url="http://127.0.0.1:9", api_retries=0), USER)
