"""Chat completions by the policy, with its replies recorded as Turns.

Requests and messages are those of the OpenAI API. An assistant message that a caller sends back stands for the sampled
tokens of that reply, so the prompts of a conversation extend each other and become one training row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import Field, ValidationError

from tinsmith.chat.completions import TextRequest
from tinsmith.chat.images import read_data_url
from tinsmith.chat.messages import parse_messages
from tinsmith.chat.rendering import content_text
from tinsmith.chat.request import ChatRequest, describe_errors, first_field
from tinsmith.chat.strict_json import parse_json
from tinsmith.chat.tool_calls.formats import ToolCallFormat, marker_texts, tool_call_format
from tinsmith.chat.tool_calls.parser import parse_reply
from tinsmith.errors import BadRequest, UserError
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import EncodedPrompt, Image, Message, Turn

PROMPT_END = 32
"""Tokens of a prompt that are decoded to see whether it begins the reply's reasoning."""
MODEL = "policy"
"""Name of the policy; any name is accepted."""


class AgentChatRequest(ChatRequest):
    """Body of chat/completions; fields that are not set take the run's sampling settings."""

    model: str = MODEL
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int = Field(0, ge=0, le=0)


def sampling_of(request: AgentChatRequest | TextRequest, defaults: SamplingConfig) -> SamplingConfig:
    """`defaults` with the settings of the request on top. Raises BadRequest."""
    overrides = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.most_tokens,
        "stop": (request.stop,) if isinstance(request.stop, str) else request.stop,
    }
    changed = {key: value for key, value in overrides.items() if value is not None}
    try:
        return SamplingConfig.model_validate({**dict(defaults), **changed})
    except ValidationError as error:
        raise invalid_request(error) from error


def invalid_request(error: ValidationError) -> BadRequest:
    """The error for a request whose fields do not validate."""
    errors = error.errors()
    message = f"The request is invalid: {describe_errors(errors)}"
    return BadRequest(message, "Correct or remove the field.", field=first_field(errors))


class ChatSession:
    """Replies of the policy to chat requests, recorded as turns."""

    def __init__(self, policy: Snapshot, sampling: SamplingConfig, seed: int, *, limit: int | None = None) -> None:
        """`seed` is the rollout's own. With `limit`, only this many of the newest replies are recorded."""
        self._policy, self._sampling, self._seed, self._limit = policy, sampling, seed, limit
        self._calls = 0
        self._turns_by_conversation: dict[str, list[Turn]] = {}
        """Turns of the last message, by the conversation up to and including it. Equal replies are several turns."""
        self._turns_by_messages: dict[str, list[Turn]] = {}
        """The same, whatever the tools."""
        self._turns: list[Turn] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All replies, grouped by conversation; the conversation with the newest reply comes last."""
        conversations: list[list[Turn]] = []
        for turn in self._turns:
            extended = [turns for turns in conversations if _extends(turn, turns[-1])]
            longest = max(extended, key=lambda turns: len(turns[-1].prompt), default=[])
            conversations = [*(turns for turns in conversations if turns is not longest), [*longest, turn]]
        return tuple(turn for turns in conversations for turn in turns)

    @property
    def turns_by_time(self) -> tuple[Turn, ...]:
        """All replies in the order in which they were sampled."""
        return tuple(self._turns)

    def turns_of(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
        """The turns whose reply is the last of these messages, with any tools, oldest first.

        There are several if equal replies were sampled. Raises UserError for messages that are not a chat.
        """
        chat = self._policy.chat
        urls = list[str]() if chat.takes_images else None
        parsed = with_images(parse_messages(messages, developer_role="developer" in chat.template, images=urls), urls)
        return tuple(self._turns_by_messages.get(_conversation_key(parsed, ()), ()))

    async def replies(
        self, request: AgentChatRequest, defaults: SamplingConfig | None = None
    ) -> list[tuple[Turn, dict[str, Any]]]:
        """`request.n` replies, each as a turn and as an assistant message with tool calls separated from its text.

        `defaults` replaces the sampling settings of the session. Raises UserError for a request that cannot be served.
        """
        template = self._policy.chat.template
        tools = request.template_tools()
        call_format = (
            tool_call_format(
                template, "the policy", "set model.chat_template to one that supports them, such as hermes"
            )
            if tools
            else None
        )
        urls = list[str]() if self._policy.chat.takes_images else None
        messages = with_images(request.template_messages(template, urls), urls)
        sampling = sampling_of(request, defaults or self._sampling)
        prompt = self._prompt(messages, tools)
        seed = self._next_seed() if request.seed is None else request.seed
        replies = []
        for turn in await self._policy.sample(prompt, count=request.n, seed=seed, sampling=sampling):
            message = self._reply_message(turn, messages, call_format, tools, sampling)
            self._record([*messages, message], tools, turn)
            replies.append((turn, message))
        return replies

    def _next_seed(self) -> int:
        """The seed of the next request that names none."""
        number, self._calls = self._calls, self._calls + 1
        return request_seed(self._seed, number)

    def _record(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], turn: Turn) -> None:
        self._turns.append(turn)
        self._turns_by_conversation.setdefault(_conversation_key(messages, tools), []).append(turn)
        self._turns_by_messages.setdefault(_conversation_key(messages, ()), []).append(turn)
        if self._limit is None:
            return
        del self._turns[: -self._limit]
        for recorded in (self._turns_by_conversation, self._turns_by_messages):
            if len(recorded) > self._limit:
                del recorded[next(iter(recorded))]

    def _prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> EncodedPrompt:
        """Prompt tokens that extend the conversation's last recorded turn, where the template allows it."""
        parts = [_message(message) for message in messages]
        for at in reversed(range(len(messages))):
            if messages[at]["role"] != "assistant":
                continue
            turns = self._turns_by_conversation.get(_conversation_key(messages[: at + 1], tools))
            if turns and at + 1 < len(messages):
                try:
                    return self._policy.chat.encode([*parts[:at], turns[-1], *parts[at + 1 :]], tools)
                except UserError:  # the template needs the call itself before a tool's result: render all messages
                    break
        return self._policy.chat.encode(parts, tools)

    def _reply_message(
        self,
        turn: Turn,
        messages: Sequence[Mapping[str, Any]],
        call_format: ToolCallFormat | None,
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingConfig,
    ) -> dict[str, Any]:
        """The reply to `messages` as an assistant message, tool calls separated from its text."""
        if call_format is None:
            return {"role": "assistant", "content": turn.text}
        chat, last = self._policy.chat, messages[-1]
        continued = str(last["content"] or "") if last["role"] == "assistant" else ""
        call_format = call_format.after(chat.decode(turn.prompt[-PROMPT_END:]), continued)
        reply = chat.text(turn.tokens, sampling.stop, marker_texts(call_format))
        text, calls = parse_reply(reply, call_format, tools)
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if tool_calls := [call.to_json() for call in calls]:
            message["tool_calls"] = tool_calls
        elif message["content"] is None:
            message["content"] = ""
        return message


def _extends(turn: Turn, last: Turn) -> bool:
    tokens = (*last.prompt, *last.tokens)
    return turn.prompt[: len(tokens)] == tokens and turn.images[: len(last.images)] == last.images


def _message(message: Mapping[str, Any]) -> Message:
    more = {key: value for key, value in message.items() if key not in ("role", "content")}
    text, placed = "", list[tuple[int, Image]]()
    for part in [message["content"]] if isinstance(message["content"], str | None) else message["content"]:
        if isinstance(part, Image):
            placed.append((len(text), part))
        else:
            text += part or ""
    return Message(role=message["role"], content=text, more=more, images=tuple(placed))


def with_images(messages: Sequence[Mapping[str, Any]], urls: Sequence[str] | None) -> list[dict[str, Any]]:
    """Parsed messages with their content as text or, with images, as texts and the images of `urls` in order.

    Raises Unsupported for URLs that hold no data, BadRequest for data that are no image.
    """
    waiting = iter(urls or ())
    return [{**message, "content": _with_images(message["content"], waiting)} for message in messages]


def _with_images(content: str | Sequence[Mapping[str, Any]], urls: Iterator[str]) -> str | list[str | Image]:
    if isinstance(content, str) or all(part["type"] == "text" for part in content):
        return content_text(content)
    return [_part(part, urls) for part in content]


def _part(part: Mapping[str, Any], urls: Iterator[str]) -> str | Image:
    if part["type"] == "text":
        return str(part["text"])
    _, file = read_data_url(next(urls))
    try:
        return Image.of(file)
    except ValueError as error:
        raise BadRequest(f"An image_url cannot be read: {error}.", "Send a whole PNG or JPEG file.") from error


def _conversation_key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Equal for conversations that differ only in fields that clients add to replies, such as call ids."""
    comparable = [
        {"said": message["content"] or "", "calls": [call["function"] for call in _parsed_calls(message)]}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]
    return json.dumps([comparable, list(tools)], sort_keys=True, default=_comparable)


def _comparable(value: Any) -> str:
    return value.digest if isinstance(value, Image) else str(value)


def _parsed_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The message's tool calls with their arguments as objects, as `parse_messages` returns them."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError):  # arguments that are not JSON are compared as text
                arguments = parse_json(arguments or "{}")
        calls.append({"function": {"name": function["name"], "arguments": arguments}})
    return calls
