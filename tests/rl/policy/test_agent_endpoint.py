"""The agent endpoint with an unmodified OpenAI client: replies are recorded as they were sampled."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import openai
import pytest

from tests.rl.scripted_run import rows, run, settings
from tests.rl.workflows.test_workflows import YES, policy
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint, AgentSession
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.types import Message, Rollout, Task, Trajectory
from tinsmith.rl.workflows.agent import AgentConfig
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.testing import END, CharacterCodec

USER = {"role": "user", "content": "2 + 3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
HERE = __name__
Use = Callable[[openai.AsyncOpenAI, AgentSession], Awaitable[object]]


def served(use: Use, *replies: str, sampling: SamplingConfig | None = None) -> tuple[object, AgentSession]:
    """(result of `use`, the session that it used)."""

    async def main() -> tuple[object, AgentSession]:
        agent_endpoint = AgentEndpoint()
        try:
            async with agent_endpoint.session(
                policy(*replies), sampling or SamplingConfig(max_tokens=99), 7
            ) as session:
                client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
                async with client:
                    return await use(client, session), session
        finally:
            await agent_endpoint.close()

    return asyncio.run(main())


def test_completion_is_recorded_as_a_turn():
    async def use(client, session):
        return await client.chat.completions.create(
            model=session.model, messages=[USER], logprobs=True, extra_body={"return_token_ids": True}
        )

    answer, session = served(use, "five")
    (turn,) = session.turns
    assert turn.tokens == (*map(ord, "five"), END)
    assert turn.version == 3
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("five", "stop")
    assert choice.token_ids == list(turn.tokens)
    assert [entry.logprob for entry in choice.logprobs.content] == list(turn.logprobs)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(turn.prompt), 5)


def test_continued_conversation_is_one_training_row():
    async def use(client, session):
        said = [USER]
        for more in ("sure?", "really?", None):
            answer = await client.chat.completions.create(model=session.model, messages=said)
            said.append(answer.choices[0].message.model_dump())
            said.append({"role": "user", "content": more})

    _, session = served(use, "five")
    (row,) = rows_from_trajectory(Trajectory(turns=session.turns))
    assert "".join(map(chr, row.targets[row.mask])) == "five\0five\0five\0"


def test_tool_calls_stay_within_one_training_row():
    async def use(client, session):
        said = [USER]
        first = await client.chat.completions.create(model=session.model, messages=said, tools=TOOLS)
        (call,) = first.choices[0].message.tool_calls
        said.append(first.choices[0].message.model_dump(exclude_none=True))
        said.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        await client.chat.completions.create(model=session.model, messages=said, tools=TOOLS)
        return first.choices[0], call

    (choice, call), session = served(use, CALL)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
    assert len(session.turns) == 2
    assert len(rows_from_trajectory(Trajectory(turns=session.turns))) == 1


@pytest.mark.parametrize("reply", [f"<think>\n{CALL}\n</think>\nNo.", f"```\n{CALL}\n```", f"<think>{CALL}"])
def test_calls_that_are_not_made_are_not_executed(reply):
    async def use(client, session):
        return await client.chat.completions.create(model=session.model, messages=[USER], tools=TOOLS)

    answer, _ = served(use, reply)
    assert answer.choices[0].message.tool_calls is None
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (reply, "stop")


def test_call_in_reasoning_that_the_prompt_begins_is_text():
    async def use(client, session):
        begun = [USER, {"role": "assistant", "content": "<think>\n"}]
        return await client.chat.completions.create(model=session.model, messages=begun, tools=TOOLS)

    answer, _ = served(use, f"{CALL}\n</think>\nNo.")
    assert answer.choices[0].message.tool_calls is None


def test_interleaved_conversations_are_two_rows():
    async def use(client, session):
        async def converse(name: str) -> None:
            said = [{"role": "user", "content": name}]
            for _ in range(3):
                answer = await client.chat.completions.create(model=session.model, messages=said)
                said += [{"role": "assistant", "content": answer.choices[0].message.content}, USER]
                await asyncio.sleep(0)

        await asyncio.gather(converse("left"), converse("right"))

    _, session = served(use, "five")
    assert len(session.turns) == 6
    assert len(rows_from_trajectory(Trajectory(turns=session.turns))) == 2


def test_session_with_an_open_url_takes_any_key():
    async def main() -> tuple[str, int]:
        agent_endpoint = AgentEndpoint()
        try:
            async with agent_endpoint.session(policy("five"), SamplingConfig(), 7, open_url=True) as session:
                client = openai.AsyncOpenAI(base_url=session.base_url, api_key="EMPTY", max_retries=0)
                async with client:
                    answer = await client.chat.completions.create(model="any", messages=[USER])
                return str(answer.choices[0].message.content), len(session.turns)
        finally:
            await agent_endpoint.close()

    assert asyncio.run(main()) == ("five", 1)


def test_turns_are_found_by_their_conversation():
    async def use(client, session):
        await asyncio.gather(
            *(client.chat.completions.create(model=session.model, messages=[USER]) for _ in range(2)),
            client.chat.completions.create(model=session.model, messages=[{**USER, "content": "6?"}]),
        )

    _, session = served(use, "five")
    reply = {"role": "assistant", "content": "five"}
    assert len(session.turns_of([USER, reply])) == 2  # equal replies are different turns
    (turn,) = session.turns_of([{**USER, "content": "6?"}, reply])
    assert turn.prompt == tuple(map(ord, "6?"))
    assert session.turns_of([USER, {**reply, "content": "six"}]) == ()


def test_request_options_override_the_run():
    async def use(client, session):
        async def ask(**more):
            return await client.chat.completions.create(model="any", messages=[USER], **more)

        drawn = [[choice.message.content for choice in (await ask(n=16, seed=seed)).choices] for seed in (1, 1, 2)]
        greedy = {choice.message.content for choice in (await ask(n=16, temperature=0)).choices}
        cut = (await ask(max_completion_tokens=1)).choices[0].finish_reason
        unseeded = [(await ask()).choices[0].message.content for _ in range(12)]
        return drawn, greedy, cut, unseeded

    (drawn, greedy, cut, unseeded), _ = served(use, "five", "six")
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(greedy) == 1
    assert cut == "length"
    assert set(unseeded) == {"five", "six"}


def test_stream_has_one_chunk_and_its_end():
    async def use(client, session):
        stream = await client.chat.completions.create(
            model=session.model, messages=[USER], tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    chunks, session = served(use, CALL)
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.completion_tokens == len(session.turns[0].tokens)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice must be"),
        ({"extra_body": {"top_logprob": 1}}, "'top_logprob'"),
        ({"temperature": -1}, "'temperature'"),
        ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "max_prompt_tokens is 100"),
    ],
)
def test_rejects_unsupported_options_by_name(fields, sentence):
    async def use(client, session):
        with pytest.raises(openai.BadRequestError, match=sentence):
            await client.chat.completions.create(**{"model": session.model, "messages": [USER], **fields})
        assert [item.id async for item in client.models.list()] == ["policy"]

    _, session = served(use, "five", sampling=SamplingConfig(max_prompt_tokens=100))
    assert session.turns == ()


def test_tools_require_a_template_that_supports_them(monkeypatch):
    monkeypatch.setattr(CharacterCodec, "template", "{{ messages }}")

    async def use(client, session):
        with pytest.raises(
            openai.BadRequestError, match=r"does not support tools\. Remove .* or set model\.chat_template"
        ):
            await client.chat.completions.create(model=session.model, messages=[USER], tools=TOOLS)

    served(use, "five")


def test_session_has_its_own_key_and_ends_with_its_rollout():
    async def main() -> None:
        agent_endpoint = AgentEndpoint()
        async with agent_endpoint.session(policy("five"), SamplingConfig(), 1) as first:
            async with agent_endpoint.session(policy("six"), SamplingConfig(), 1) as second:
                assert first.base_url != second.base_url
                client = openai.AsyncOpenAI(base_url=second.base_url, api_key=first.api_key, max_retries=0)
                async with client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.chat.completions.create(model="x", messages=[USER])
            client = openai.AsyncOpenAI(base_url=second.base_url, api_key=second.api_key, max_retries=0)
            async with client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="x", messages=[USER])
                with pytest.raises(openai.NotFoundError):
                    await client.embeddings.create(model="x", input="y")
        await agent_endpoint.close()

    asyncio.run(main())


async def yes_or_no_agent(
    task: Task, client: openai.AsyncOpenAI, model: str, fails: bool = False
) -> dict[str, float] | None:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": message.role, "content": message.content} for message in task.messages]
    )
    if fails:
        raise RuntimeError("lost the thread")
    return {"bonus": 0.5} if answer.choices[0].message.content == "yes" else None


def test_agent_function_gets_task_client_and_model():
    task = Task(id="t", messages=(Message(role="user", content="yes or no?"),))

    async def main(**args) -> tuple[Rollout, ...]:
        agent_endpoint = AgentEndpoint()
        parts = WorkflowContext(sampling=SamplingConfig(), rewards=YES, agent_endpoint=agent_endpoint)
        config = AgentConfig(path=f"{HERE}:yes_or_no_agent", args=args)
        try:
            return await config.make(parts).run(task, policy("yes", "no"), count=16, seed=3)
        finally:
            await agent_endpoint.close()

    rewards_by_text = {item.text: item.reward for item in asyncio.run(main())}
    assert rewards_by_text == {"yes": 1.5, "no": 0.0}
    (error,) = {item.error for item in asyncio.run(main(fails=True))}
    assert re.fullmatch(r"RuntimeError: lost the thread \(policy/test_agent_endpoint\.py:\d+\)", error)


def test_run_with_agents_improves_reward(tmp_path):
    workflow = {"type": "agent", "path": f"{HERE}:yes_or_no_agent"}
    assert run(settings(tmp_path, workflow=workflow, steps=12, optimizer={"learning_rate": 0.3})).step == 12
    reward = [row["reward/mean"] for row in rows(tmp_path) if "reward/mean" in row]
    assert np.mean(reward[-3:]) > np.mean(reward[:3])
    with pytest.raises(ValueError, match="is not an async function"):
        settings(tmp_path, workflow={"type": "agent", "path": f"{HERE}:served"})


def test_shared_client_names_the_session_of_a_request():
    async def main() -> tuple[list[str], list[int]]:
        endpoint = AgentEndpoint()
        sampling = SamplingConfig(max_tokens=99)
        try:
            client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="EMPTY", max_retries=0)
            async with client:
                with (
                    endpoint.named_session("left", policy("five"), sampling, 7) as left,
                    endpoint.named_session("right", policy("six"), sampling, 7) as right,
                ):
                    replies = []
                    for name in ("right", "left", "right"):
                        headers = {"X-Session-ID": name}
                        reply = await client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)
                        replies.append(str(reply.choices[0].message.content))
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)
            return replies, [len(left.turns), len(right.turns)]
        finally:
            await endpoint.close()

    assert asyncio.run(main()) == (["six", "five", "six"], [1, 2])


def test_service_is_entered_once_and_left_with_the_endpoint():
    events: list[tuple[str, object]] = []

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        events.append(("entered", asyncio.current_task()))
        yield
        events.append(("left", asyncio.current_task()))

    async def main() -> None:
        endpoint = AgentEndpoint()
        await asyncio.gather(*(endpoint.serve("tools", service) for _ in range(3)))
        await endpoint.close()

    asyncio.run(main())
    (entered, first), (left, last) = events
    assert (entered, left) == ("entered", "left")
    assert first is last


def test_service_that_cannot_start_fails_each_of_its_users():
    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        raise OSError("no port")
        yield

    async def main() -> None:
        endpoint = AgentEndpoint()
        for _ in range(2):
            with pytest.raises(OSError, match="no port"):
                await endpoint.serve("tools", service)
        await endpoint.close()

    asyncio.run(main())


def test_completions_continue_and_score_tokens_and_text():
    async def use(client, session):
        plain = await client.completions.create(model="any", prompt=["ab", "c"], n=2, max_tokens=9)
        prompt = [[97, 98]]
        scored = await client.completions.create(model="any", prompt=prompt, max_tokens=0, logprobs=0, echo=True)
        return plain, scored

    (plain, scored), session = served(use, "five")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in plain.choices] == [
        (at, "five", "stop") for at in range(4)
    ]
    assert plain.usage.prompt_tokens == 3
    (choice,) = scored.choices
    assert (choice.text, choice.logprobs.tokens, choice.logprobs.text_offset) == ("ab", ["a", "b"], [0, 1])
    assert choice.logprobs.token_logprobs == [None, 0.0]
    assert session.turns == ()


@pytest.mark.parametrize(
    ("change", "error"),
    [({"logprobs": 3}, "only with echo"), ({"suffix": "x"}, "suffix"), ({"stream": True}, "stream")],
)
def test_completions_refuse_by_name_what_they_do_not_do(change, error):
    async def use(client, session):
        with pytest.raises(openai.BadRequestError, match=error):
            await client.completions.create(model="any", prompt="a", max_tokens=4, **change)

    served(use, "five")
