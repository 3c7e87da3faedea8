"""What clients of the OpenAI dialect send: chat, completions, and tokens in / tokens out as vLLM has it.

Every field that could change an answer is either done or refused by name; fields that could not (who asks, where to
route) are let through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from tinsmith.engine.checks import nearest
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.bodies import Loose, parse

_NOT_DONE = "Leave it out: this server does not do it."
_CONSTRAINED = "Leave it out: answers are not constrained here. Ask for the form in the prompt and check what comes."
_FREE = object()
"""Any value will do: it has no bearing on an answer of this server."""

_ALLOWED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "presence_penalty": ((0,), "Only 0: logprobs here are those of the model, without penalties."),
    "repetition_penalty": ((1,), "Only 1: logprobs here are those of the model, without penalties."),
    "logit_bias": (({},), "Leave it out: logprobs here are those of the model, without a bias."),
    "min_p": ((0,), "Only 0; use top_p or top_k."),
    "typical_p": ((1,), "Only 1; use top_p or top_k."),
    "min_tokens": ((0,), "Only 0."),
    "length_penalty": ((1,), _NOT_DONE),
    "use_beam_search": ((False,), _NOT_DONE),
    "best_of": ((1,), "Use n, and choose by yourself."),
    "suffix": (("",), _NOT_DONE),
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "allowed_token_ids": ((), _CONSTRAINED),
    "bad_words": (([],), _CONSTRAINED),
    "parallel_tool_calls": ((True,), "Only true: how many calls a model makes is not constrained here."),
    "functions": ((), "Use tools."),
    "function_call": (("auto", "none"), "Use tools and tool_choice."),
    "modalities": ((["text"],), "Text only."),
    "audio": ((), "Text only."),
    "prediction": ((), _NOT_DONE),
    "reasoning_effort": ((), "Use chat_template_kwargs, if the model's chat template knows of it."),
    "verbosity": ((), _NOT_DONE),
    "web_search_options": ((), _NOT_DONE),
    "store": ((False,), "Answers are not stored here."),
    "chat_template": ((), "The model's own chat template is used; render by yourself and use /v1/completions."),
    "documents": ((), "Put them into the messages."),
    "truncate_prompt_tokens": ((), "Cut the prompt by yourself."),
    "prompt_logprobs": ((), "Use /v1/completions with echo and logprobs."),
    "detokenize": ((True,), "Use /inference/v1/generate, which answers tokens."),
    "spaces_between_special_tokens": ((True,), _NOT_DONE),
    "features": ((), "Text only."),
    "content_parts": ((), "Text only."),
    "kv_transfer_params": ((), _NOT_DONE),
    "mm_processor_kwargs": ((), "Text only."),
    "priority": ((0,), "Only 0: requests are served in turn."),
    "stream_interval": ((1,), _NOT_DONE),
    "routed_experts_prompt_start": ((_FREE,), ""),
    "user": ((_FREE,), ""),
    "safety_identifier": ((_FREE,), ""),
    "metadata": ((_FREE,), ""),
    "prompt_cache_key": ((_FREE,), ""),
    "prompt_cache_retention": ((_FREE,), ""),
    "cache_salt": ((_FREE,), ""),
    "service_tier": (("auto", "default"), "There is one."),
    "request_id": ((_FREE,), ""),
}
"""Fields that do nothing here: the values that mean nothing, and what to do instead of others. A `cache_salt` keeps
prefix caches apart, and weights are never mixed in ours; experts are routed in models that are not served."""


class StreamOptions(Loose):
    """stream_options."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Drawing(Loose):
    """How tokens are drawn, and where they end."""

    n: int = Field(1, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


class Telling(Drawing):
    """How an answer is told."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class ToolName(Loose):
    """function of a tool."""

    name: str


class Tool(Loose):
    """A tool that a model may call; its schema goes to the chat template as it is."""

    type: Literal["function"]
    function: ToolName


class ChatBody(Telling):
    """chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionBody(Telling):
    """completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    add_special_tokens: bool = True


class GenerateParams(Drawing):
    """sampling_params of /inference/v1/generate."""

    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0)


class GenerateBody(Loose):
    """/inference/v1/generate."""

    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: Literal[False] = False


B = TypeVar("B", bound=Loose)


def parse_exact(kind: type[B], body: bytes | Mapping[str, Any], where: str = "") -> B:
    """The body as `kind`, null being as good as absent. Raises BadRequest, or Unsupported for what is not done."""
    values = json_object(body) if isinstance(body, bytes) else body
    kept = {}
    for key, value in values.items():
        if key in kind.model_fields:
            if value is not None:
                kept[key] = value
        elif key in _ALLOWED:
            _let_through(where + key, value, *_ALLOWED[key])
        elif value is not None:
            raise BadRequest(f"{where}{key} is not known here.", nearest(key, kind.model_fields))
    return parse(kind, json.dumps(kept).encode())


def json_object(body: bytes) -> dict[str, Any]:
    """Raises BadRequest unless the body is one."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}", "Send a JSON object.") from error
    if not isinstance(values, dict):
        raise BadRequest("The body is no JSON object.", "Send one.")
    return values


def _let_through(name: str, value: Any, allowed: tuple[Any, ...], cure: str) -> None:
    if value is not None and _FREE not in allowed and value not in allowed:
        raise Unsupported(f"{name} is not served here.", cure)
