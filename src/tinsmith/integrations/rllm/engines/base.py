"""Engines under the names of rLLM: a chat in, a ModelOutput out.

`SnapshotEngine` samples weights through the Tinker API; `TinkerEngine` opens them by itself, and a run hands its
workflows an engine on the weights in training. Replies are recorded: messages that continue a conversation of this
engine extend its tokens and are not encoded again.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError
from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.errors import Unsupported, UserError
from tinsmith.integrations.rllm.records import ModelOutput, TerminationEvent, TerminationReason, ToolCall
from tinsmith.rl.policy.chat_session import AgentChatRequest, ChatSession, invalid_request
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.types import Message, Turn

Messages = Sequence[Mapping[str, Any]]

LIMIT_NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")
"""Names of the limit of a reply's tokens."""
REQUEST_KEYS = ("temperature", "top_p", "top_k", "stop", "seed", "tools", "tool_choice")
NOT_USED = ("application_id", "task", "is_validation")
"""Arguments of get_model_response that identify a request and do not change its reply."""


EVALUATING: ContextVar[bool | None] = ContextVar("evaluating", default=None)
"""The mode of the tasks that are being executed: it replaces `is_validation` of their engine. None: it does not."""


class RolloutEngine(ABC):
    """Base class of engines. A subclass implements `get_model_response`."""

    _is_validation: bool = False
    weight_version: int = 0
    """Number of updates of the weights."""
    max_prompt_length: int | None = None
    max_response_length: int = 4096

    @property
    def is_validation(self) -> bool:
        """Whether requests belong to an evaluation; selects the sampling parameters `val` in place of `train`."""
        executed = EVALUATING.get()
        return self._is_validation if executed is None else executed

    @is_validation.setter
    def is_validation(self, value: bool) -> None:
        self._is_validation = value

    @abstractmethod
    async def get_model_response(self, messages: Messages, **kwargs: Any) -> ModelOutput:
        """The reply to a chat. `kwargs` are sampling parameters and tools of this request.

        Raises TerminationEvent for a prompt above max_prompt_length.
        """
        ...

    def count_prompt_tokens(self, messages: Messages) -> int:
        """Number of tokens of the prompt of a chat."""
        raise UserError(f"{type(self).__name__} has no tokenizer.", "Pass one, or use an engine that has one.")


class SnapshotEngine(RolloutEngine):
    """Samples one version of the weights."""

    model: str = ""
    """Empty: the policy in training. Otherwise the name of other weights, whose replies are not trained on."""

    def __init__(
        self,
        sampling: SamplingConfig,
        val_sampling: SamplingConfig | None = None,
        *,
        accumulate_reasoning: bool = False,
        limit: int | None = None,
    ) -> None:
        """`val_sampling` applies with `is_validation`. `limit`: number of replies to record. `bind` sets the weights.

        With `accumulate_reasoning`, a reply that is sent back without its reasoning stands for the whole reply;
        otherwise the chat template decides.
        """
        self._sampling = {False: sampling, True: val_sampling or sampling}
        self.accumulate_reasoning, self._limit = accumulate_reasoning, limit
        self.max_prompt_length, self.max_response_length = sampling.max_prompt_tokens, sampling.max_tokens
        self._snapshot: Snapshot | None = None
        self._session: ChatSession | None = None
        self._texts: dict[tuple[str, str | None], str] = {}
        """Whole replies by content and reasoning."""

    def bind(self, snapshot: Snapshot, seed: int) -> None:
        """Sample from `snapshot` from now on, with an empty record."""
        self._snapshot, self.weight_version, self._texts = snapshot, snapshot.version, {}
        self._session = ChatSession(snapshot, self._sampling[False], seed, limit=self._limit)

    @override
    async def get_model_response(self, messages: Messages, **kwargs: Any) -> ModelOutput:
        session = await self._bound_session()
        sampling = self._sampling[bool(kwargs.get("is_validation", self.is_validation))]
        accumulate = bool(kwargs.pop("accumulate_reasoning", self.accumulate_reasoning))
        if not kwargs.pop("enforce_max_prompt_length", True):
            sampling = sampling.model_copy(update={"max_prompt_tokens": None})
        request = chat_request([self._whole(message, accumulate) for message in messages], kwargs)
        try:
            ((turn, message),) = await session.replies(request, sampling)
        except PromptTooLong as error:
            raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from error
        output = model_output(turn, message, self.model)
        if output.reasoning is not None and output.content is not None:
            if self._limit is not None and len(self._texts) >= self._limit:
                del self._texts[next(iter(self._texts))]
            self._texts[output.content, output.reasoning] = str(message["content"])
        return output

    async def _bound_session(self) -> ChatSession:
        if self._session is None:
            raise UserError("The engine has no weights to sample.", "Call bind first.")
        return self._session

    @override
    def count_prompt_tokens(self, messages: Messages) -> int:
        assert self._snapshot is not None
        return len(self._snapshot.chat.prompt([_message(message) for message in messages]))

    def _whole(self, message: Mapping[str, Any], accumulate: bool) -> dict[str, Any]:
        """A message as the policy sampled it, with its reasoning if the caller sends that back."""
        whole = {key: value for key, value in message.items() if key != "reasoning"}
        if message.get("role") != "assistant":
            return whole
        content, reasoning = str(message.get("content") or ""), message.get("reasoning")
        text = self._texts.get((content, reasoning)) if reasoning else None
        if text is None and accumulate:
            text = next((text for (said, _), text in self._texts.items() if said == content), None)
        if text is not None:
            return {**whole, "content": text}
        return {**whole, "reasoning_content": reasoning} if reasoning else whole


def chat_request(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> AgentChatRequest:
    """The request for one reply. Raises UserError for an argument that is not supported."""
    values: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    for name, value in arguments.items():
        if name in LIMIT_NAMES:
            values["max_tokens"] = value
        elif name in REQUEST_KEYS:
            if value is not None:
                values[name] = value
        elif name == "n" and value != 1:
            raise UserError("get_model_response returns one reply; n is not supported.", "Call it several times.")
        elif name == "skip_special_tokens" and value is not True:
            raise UserError("skip_special_tokens=False is not supported.", "Decode completion_ids.")
        elif name not in (*NOT_USED, "n", "skip_special_tokens"):
            raise UserError(f"get_model_response has no argument {name!r}.", f"It takes {', '.join(REQUEST_KEYS)}.")
    if (top_k := values.get("top_k")) is not None and top_k <= 0:
        values["top_k"] = -1
    try:
        return AgentChatRequest.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error) from error


def model_output(turn: Turn, message: Mapping[str, Any], model: str = "") -> ModelOutput:
    """A recorded reply as a ModelOutput; `message` is the reply with its tool calls apart.

    Raises Unsupported for a prompt with images, which a ModelOutput has no place for.
    """
    if turn.images:
        raise Unsupported(
            "Steps of rLLM hold token ids and take no images.", "Remove the images, or write a workflow of Tinsmith."
        )
    content, reasoning = split_reasoning(str(message.get("content") or ""))
    calls = [parse_tool_call(call["function"]) for call in message.get("tool_calls", ())]
    return ModelOutput(
        text=turn.text,
        content=content,
        reasoning=reasoning,
        tool_calls=calls or None,
        prompt_ids=list(turn.prompt),
        completion_ids=list(turn.tokens),
        logprobs=list(turn.logprobs),
        prompt_length=len(turn.prompt),
        completion_length=len(turn.tokens),
        finish_reason=turn.stop,
        weight_version=turn.version,
        model=model,
    )


def split_reasoning(text: str) -> tuple[str, str | None]:
    """(content, reasoning) of a reply; the reasoning is None without <think>."""
    before, end, after = text.partition("</think>")
    if end:
        return after.strip(), before.removeprefix("<think>").strip()
    if text.lstrip().startswith("<think>"):
        return "", text.lstrip().removeprefix("<think>").strip()
    return text, None


def sampling_config(
    parameters: Mapping[str, Any] | None, max_prompt_length: int | None, max_response_length: int
) -> SamplingConfig:
    """Sampling settings from the parameters of an engine. Raises UserError."""
    values: dict[str, Any] = {"max_tokens": max_response_length, "max_prompt_tokens": max_prompt_length}
    for name, value in (parameters or {}).items():
        key = "max_tokens" if name in LIMIT_NAMES else name
        if key not in ("max_tokens", "temperature", "top_p", "top_k", "stop"):
            raise UserError(f"sampling_params has no parameter {name!r}.", "Remove it.")
        if value is not None:
            values[key] = -1 if key == "top_k" and value <= 0 else value
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    try:
        return SamplingConfig.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error) from error


def parameters_by_mode(parameters: Mapping[str, Any] | None) -> dict[bool, Mapping[str, Any]]:
    """Sampling parameters of training (False) and of evaluation (True); `{train: …, val: …}` or the same for both."""
    values = dict(parameters or {})
    if values.keys() & {"train", "val"}:
        train = values.get("train") or {}
        return {False: train, True: values.get("val") or train}
    return {False: values, True: values}


def random_seed() -> int:
    """A new 31-bit seed."""
    return secrets.randbits(31)


def parse_tool_call(function: Mapping[str, Any]) -> ToolCall:
    """The tool call in a reply of OpenAI's API; arguments that are not a JSON object are under the key arguments."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {"arguments": arguments}
    return ToolCall(
        name=function["name"], arguments=arguments if isinstance(arguments, dict) else {"arguments": arguments}
    )


def _message(message: Mapping[str, Any]) -> Message:
    more = {key: value for key, value in message.items() if key not in ("role", "content", "reasoning")}
    return Message(role=str(message["role"]), content=str(message.get("content") or ""), more=more)
