"""OpenAIEngine: any server of OpenAI's API. Its replies are another model's, so a run does not train on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import httpx
from typing_extensions import override

from tinsmith.chat.tool_calls.formats import tool_call_format
from tinsmith.chat.tool_calls.parser import parse_reply
from tinsmith.errors import TinsmithError, UserError
from tinsmith.integrations.rllm.engines.base import (
    LIMIT_NAMES,
    NOT_USED,
    Messages,
    RolloutEngine,
    parameters_by_mode,
    parse_tool_call,
    split_reasoning,
)
from tinsmith.integrations.rllm.records import ModelOutput, TerminationEvent, TerminationReason, ToolCall
from tinsmith.rl.policy.chat import Chat
from tinsmith.rl.policy.chat_session import PROMPT_END
from tinsmith.rl.types import Message

OPENAI_URL = "https://api.openai.com/v1"
RETRIED_STATUSES = (408, 409, 429, 500, 502, 503, 504)
FIRST_WAIT_S = 0.5
"""Wait before the first retry; it doubles with each one."""
REQUEST_TIMEOUT_S = 600.0


class OpenAIEngine(RolloutEngine):
    """Samples `model` at `base_url`: chat/completions, or completions of rendered prompts if a tokenizer is given.

    With a tokenizer, replies have prompt_ids and completion_ids, and prompts above max_prompt_length end the rollout.
    """

    def __init__(
        self,
        model: str = "",
        tokenizer: Any = None,
        max_prompt_length: int = 4096,
        max_response_length: int = 4096,
        max_model_length: int | None = None,
        api_retries: int = 3,
        base_url: str = OPENAI_URL,
        api_key: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        accumulate_reasoning: bool = False,
        disable_thinking: bool = False,
    ) -> None:
        """`api_key`: by default $OPENAI_API_KEY. `sampling_params` are fields of the request, or `{train: …, val: …}`.

        `tools` are sent with every chat. `accumulate_reasoning` sends the reasoning of earlier replies again.
        """
        if not model:
            raise UserError("OpenAIEngine needs model.", "Pass the name of a model of the server.")
        self.model, self.tokenizer, self.api_retries, self.tools = model, tokenizer, api_retries, tools
        self.max_prompt_length, self.max_response_length = max_prompt_length, max_response_length
        self.max_model_length, self.accumulate_reasoning = max_model_length, accumulate_reasoning
        self._parameters = parameters_by_mode(sampling_params)
        self._url = base_url.rstrip("/")
        self._key = api_key or os.environ.get("OPENAI_API_KEY", "") or "EMPTY"
        values = {"enable_thinking": False} if disable_thinking else {}
        self._chat = Chat(tokenizer, values=values) if tokenizer is not None else None
        if disable_thinking and self._chat is None:
            raise UserError("disable_thinking needs a tokenizer.", "Pass one, or set it in sampling_params.")

    @override
    async def get_model_response(self, messages: Messages, **kwargs: Any) -> ModelOutput:
        enforced = bool(kwargs.pop("enforce_max_prompt_length", True))
        accumulate = bool(kwargs.pop("accumulate_reasoning", self.accumulate_reasoning))
        mode = bool(kwargs.get("is_validation", self.is_validation))
        own = {name: value for name, value in kwargs.items() if name not in (*NOT_USED, "skip_special_tokens")}
        tools = own.pop("tools", None) or self.tools
        body: dict[str, Any] = {"model": self.model, **_with_limit(self._parameters[mode], self.max_response_length)}
        body |= _with_limit(own, body["max_tokens"])
        sent = [_sent(message, accumulate) for message in messages]
        if self._chat is None:
            return await self._complete_chat(sent, body, tools)
        return await self._complete(sent, body, tools, enforced)

    @override
    def count_prompt_tokens(self, messages: Messages) -> int:
        if self._chat is None:
            return super().count_prompt_tokens(messages)
        return len(self._prompt_ids([_sent(message, True) for message in messages], None))

    def _prompt_ids(self, messages: Messages, tools: list[dict[str, Any]] | None) -> list[int]:
        assert self._chat is not None
        parts = [
            Message(
                role=str(message["role"]),
                content=str(message.get("content") or ""),
                more={key: value for key, value in message.items() if key not in ("role", "content")},
            )
            for message in messages
        ]
        return self._chat.prompt(parts, tools or ())

    async def _complete_chat(
        self, messages: Messages, body: Mapping[str, Any], tools: list[dict[str, Any]] | None
    ) -> ModelOutput:
        response = await self._post(
            "chat/completions", {**body, "messages": list(messages), **({"tools": tools} if tools else {})}
        )
        choice = response["choices"][0]
        message = choice["message"]
        content, reasoning = split_reasoning(str(message.get("content") or ""))
        reasoning = message.get("reasoning_content") or message.get("reasoning") or reasoning
        calls = [parse_tool_call(call["function"]) for call in message.get("tool_calls") or ()]
        return self._output(str(message.get("content") or ""), content, reasoning, calls, choice, response)

    async def _complete(
        self, messages: Messages, body: Mapping[str, Any], tools: list[dict[str, Any]] | None, enforced: bool
    ) -> ModelOutput:
        prompt = self._prompt_ids(messages, tools)
        room = (self.max_model_length or len(prompt) + body["max_tokens"] + 1) - 1 - len(prompt)
        if room < 1 or (enforced and self.max_prompt_length and len(prompt) > self.max_prompt_length):
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
        body = {**body, "max_tokens": min(body["max_tokens"], room)}
        response = await self._post("completions", {**body, "prompt": prompt})
        choice = response["choices"][0]
        text = str(choice["text"])
        assert self._chat is not None
        said, calls = text, list[ToolCall]()
        if tools:
            form = tool_call_format(self._chat.template, self.model).after(self._chat.decode(prompt[-PROMPT_END:]))
            said, new_calls = parse_reply(text, form, tools)
            calls = [parse_tool_call(call.to_json()["function"]) for call in new_calls]
        content, reasoning = split_reasoning(said)
        output = self._output(text, content, reasoning, calls, choice, response)
        output.prompt_ids, output.completion_ids = prompt, self._chat.encode_text(text)
        output.prompt_length, output.completion_length = len(prompt), len(output.completion_ids)
        return output

    def _output(
        self,
        text: str,
        content: str,
        reasoning: str | None,
        calls: list[ToolCall],
        choice: Mapping[str, Any],
        response: Mapping[str, Any],
    ) -> ModelOutput:
        usage = response.get("usage") or {}
        return ModelOutput(
            text=text,
            content=content,
            reasoning=reasoning,
            tool_calls=calls or None,
            prompt_length=int(usage.get("prompt_tokens") or 0),
            completion_length=int(usage.get("completion_tokens") or 0),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            model=self.model,
        )

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response to a request; retried on errors that may pass. Raises UserError or TinsmithError."""
        url, failure = f"{self._url}/{route}", ""
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
            for retry in range(self.api_retries + 1):
                if retry:
                    await asyncio.sleep(FIRST_WAIT_S * 2 ** (retry - 1))
                try:
                    response = await client.post(url, json=body, headers={"Authorization": f"Bearer {self._key}"})
                except httpx.TransportError as error:
                    failure = f"{type(error).__name__}: {error}"
                    continue
                if response.is_success:
                    return dict(response.json())
                failure = f"status {response.status_code}: {response.text[:500]}"
                if response.status_code not in RETRIED_STATUSES:
                    raise UserError(f"{url} rejects the request with {failure}", "Correct the request.")
        raise TinsmithError(f"{url} does not respond: {failure}", "Check base_url, and that the server runs.")


def _with_limit(parameters: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The parameters with the limit of tokens as max_tokens, by default `limit`."""
    limits = [value for name, value in parameters.items() if name in LIMIT_NAMES and value is not None]
    rest = {name: value for name, value in parameters.items() if name not in LIMIT_NAMES and value is not None}
    return {**rest, "max_tokens": limits[0] if limits else limit}


def _sent(message: Mapping[str, Any], accumulate: bool) -> dict[str, Any]:
    """A message without its reasoning, or with it in its text."""
    sent = {key: value for key, value in message.items() if key != "reasoning"}
    if accumulate and message.get("reasoning"):
        sent["content"] = f"<think>\n{message['reasoning']}\n</think>\n\n{message.get('content') or ''}"
    return sent
